"""RLlib's env runners over envs in supervised actors, and our batches under RLlib's names.

Needs Ray (`pip install -e '.[rllib]'`). Leaves out all that a runner does besides having envs:
episodes, connectors, modules, metrics and state are RLlib's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.wrappers.vector import DictInfoToList
from typing_extensions import Self, Unpack

from envbus.actors.env.agents import ALL
from envbus.actors.env.source import parse_source
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.nested import leaves_of, map_tree
from envbus.runner.engine.engine import Statistics
from envbus.runner.extras import needed_for
from envbus.runner.pool.agents_in_lockstep import AgentsInLockstep, Record
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import ActorSettings, FleetConfig

with needed_for("envbus.runner.adapters.rllib", "rllib"):
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.env.env_context import EnvContext
    from ray.rllib.env.env_runner import ENV_STEP_FAILURE
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
    from ray.rllib.policy import sample_batch as rllib_batches
    from ray.tune.registry import ENV_CREATOR, _global_registry

__all__ = [
    "BusMultiAgentEnvRunner",
    "BusSingleAgentEnvRunner",
    "BusVectorMultiAgentEnv",
    "to_rllib",
]


# --- env runners ------------------------------------------------------------------------------


class _OverActors:
    """What both env runners add to RLlib's: envs in actors, and counts of what failed.

    Their metrics are `num_env_faults` (envs whose episode a fault has ended), `num_env_restarts`
    (envs made anew in their process) and `num_actor_restarts` (processes started again), each since
    the last `get_metrics`, and with `_lifetime` at the end of its name since the start.
    """

    #: Settings of the actors: what `ActorSettings` explains. `restart` is True if it is not named.
    actor_settings: ClassVar[ActorSettings] = {}

    # Of RLlib's runner.
    config: Any
    env: Any
    metrics: Any
    num_envs: int
    num_workers: int
    worker_index: int | None
    _callbacks: Any

    #: What `get_metrics` has told of the present envs.
    _told: Mapping[str, int] = {}

    @classmethod
    def with_settings(cls, **settings: Unpack[ActorSettings]) -> type[Self]:
        """Return this class with other `actor_settings`, for `config.env_runners(env_runner_cls=)`.

        Those that are not named stay. Ray pickles the class with all that is in it.

        Raises:
            TypeError: There is no such setting.
            ConfigError: One cannot be used.
        """
        FleetConfig.of(settings)
        chosen: ActorSettings = {**cls.actor_settings, **settings}
        fields = {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "actor_settings": chosen,
        }
        return type(cls.__name__, (cls,), fields)

    def _log_faults(self) -> None:
        """Log what failed and was made anew since this was called last, and since the start."""
        if self.env is None:
            return
        now: Statistics = self.env.unwrapped.statistics()
        counts = {
            "num_env_faults": sum(now.faults.values()),
            "num_env_restarts": now.env_restarts,
            "num_actor_restarts": now.restarts,
        }
        for name, count in counts.items():
            more = count - self._told.get(name, 0)
            self.metrics.log_value(name, more, reduce="sum")
            self.metrics.log_value(f"{name}_lifetime", more, reduce="lifetime_sum")
        self._told = counts

    def _close_envs(self) -> None:
        """Close the envs, if there are any: others take their place."""
        self._log_faults()
        envs, self.env, self._told = self.env, None, {}
        if envs is not None:
            envs.close()

    def _plan(self) -> tuple[list[Any], ActorSettings, Any]:
        """Return what makes each env, the actors' settings, and RLlib's `EnvContext`.

        Raises:
            ConfigError: The config names no env.
        """
        config: Any = self.config
        env, count = config.env, config.num_envs_per_env_runner
        if not env:
            raise ConfigError('the config names no env: call config.environment("CartPole-v1")')
        context = config.env_config
        if not isinstance(context, EnvContext):
            context = EnvContext(
                context,
                worker_index=self.worker_index,
                num_workers=self.num_workers,
                remote=config.remote_worker_envs,
            )
        settings: ActorSettings = {"restart": True, **self.actor_settings}
        if isinstance(env, str) and _global_registry.contains(ENV_CREATOR, env):
            env = _global_registry.get(ENV_CREATOR, env)
        if not callable(env):
            return [parse_source(env, dict(context))] * count, settings, context
        if settings.get("num_actors") != 0:  # imported once, and not by each actor
            settings["preload"] = [*settings.get("preload", ()), EnvContext.__module__]
        contexts = [context.copy_with_overrides(vector_index=index) for index in range(count)]
        return [functools.partial(env, one) for one in contexts], settings, context

    def _use(self, envs: Any, context: Any) -> None:
        """Have `sample` use these envs.

        Raises:
            ConfigError: There are not as many as the config says.
        """
        wanted = self.config.num_envs_per_env_runner
        if envs.num_envs != wanted:
            envs.close()
            raise ConfigError(
                f"num_envs_per_env_runner={wanted}, but what makes an env has made vector envs, "
                f"{envs.num_envs} envs in all; let it make single envs"
            )
        self.env = envs
        self.num_envs = envs.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": envs.unwrapped,
                "env_context": context,
            },
        )


class BusSingleAgentEnvRunner(_OverActors, SingleAgentEnvRunner):
    """RLlib's `SingleAgentEnvRunner` whose envs are those of a `BusVectorEnv`.

        config.env_runners(env_runner_cls=BusSingleAgentEnvRunner.with_settings(num_actors=2))

    An env or a process that fails is made anew, and the other envs go on. The episode of a failed
    env ends as *truncated*, with reward 0, the last observation that the runner was given, and
    `infos["fault"]`. What is given up (`RestartLimitError`) is an error of the step, as any:
    `config.fault_tolerance(restart_failed_sub_environments=True)` has RLlib make all envs anew.
    """

    #: The last observations, a batch.
    _shown: Any = None
    #: Envs whose reset has failed in the last step: the next one resets them.
    _not_begun: Sequence[int] = ()

    def make_env(self) -> None:
        """Make the vector env; called again, close the one before.

        Raises:
            ConfigError: The config names no env, or a setting cannot be used.
            Exception: As from `BusVectorEnv`.
        """
        self._close_envs()
        sources, settings, context = self._plan()
        self._use(DictInfoToList(BusVectorEnv(sources, **settings)), context)

    def get_metrics(self) -> Any:
        """Return RLlib's metrics, and counts of what failed and was made anew."""
        self._log_faults()
        return super().get_metrics()

    def _try_env_reset(self, **given: Any) -> tuple[Any, Any]:
        self._shown, infos = super()._try_env_reset(**given)
        self._not_begun = ()
        return self._shown, infos

    def _try_env_step(self, actions: Any) -> Any:
        # The observation of a reset that failed begins nothing.
        for env_index in self._not_begun:
            self._new_episode(env_index)
        self._not_begun = ()
        results = super()._try_env_step(actions)
        if isinstance(results, str) and results == ENV_STEP_FAILURE:
            return results
        observations, _, _, truncateds, infos = results
        if truncateds.any():
            self._not_begun = self._end_faulty(observations, truncateds, infos)
        self._shown = observations
        return results

    def _end_faulty(
        self, observations: Any, truncateds: npt.NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Give episodes that a fault has ended their last observations; return other failed envs.

        What stands in such a row may be half of what its process was about to write.
        """
        not_begun = []
        for env_index in np.flatnonzero(truncateds).tolist():
            if "fault" not in infos[env_index]:
                continue
            if not self._ongoing_episodes[env_index].is_reset:
                not_begun.append(env_index)
                continue
            last = [leaf for _, leaf in leaves_of(self._shown)]
            for (_, leaf), known in zip(leaves_of(observations), last, strict=True):
                leaf[env_index] = known[env_index]
        return not_begun


class BusMultiAgentEnvRunner(_OverActors, MultiAgentEnvRunner):
    """RLlib's `MultiAgentEnvRunner` whose envs are those of a `BusVectorMultiAgentEnv`.

        config.env_runners(env_runner_cls=BusMultiAgentEnvRunner.with_settings(num_actors=2))

    Faults are dealt with as in `BusSingleAgentEnvRunner`: all agents of the env are truncated.
    """

    def make_env(self) -> None:
        """Make the envs; called again, close those before.

        Raises:
            ConfigError: The config names no env, a setting cannot be used, or the envs have one
                agent only.
            Exception: As from `ActorPool`.
        """
        self._close_envs()
        sources, settings, context = self._plan()
        self._use(BusVectorMultiAgentEnv(sources, **settings), context)

    def get_metrics(self) -> Any:
        """Return RLlib's metrics, and counts of what failed and was made anew."""
        self._log_faults()
        return super().get_metrics()

    def _try_env_step(self, actions: Any) -> Any:
        results = super()._try_env_step(actions)
        if isinstance(results, str) and results == ENV_STEP_FAILURE:
            return results
        *_, truncateds, infos = results
        for flags, told in zip(truncateds, infos, strict=True):
            if flags[ALL] and any("fault" in info for info in told.values()):
                # RLlib calls an episode terminated, and its agents too, where each agent is done
                # by a flag of its own. That of all truncates them as well.
                for agent in flags.keys() - {ALL}:
                    del flags[agent]
        return results


# --- envs with several agents -----------------------------------------------------------------


class _Agents(MultiAgentEnv):
    """Says which agents an env has, and their spaces; the env itself is in an actor."""

    def __init__(self, observations: Mapping[Any, Any], actions: Mapping[Any, Any]) -> None:
        self.possible_agents = list(observations)
        self.agents = list(observations)
        self.observation_spaces = dict(observations)
        self.action_spaces = dict(actions)
        super().__init__()


class BusVectorMultiAgentEnv(VectorMultiAgentEnv):
    """Steps envs with several agents in actors, in lock-step: RLlib's `VectorMultiAgentEnv`.

    Results are those of RLlib's `SyncVectorMultiAgentEnv`: a list with a dict by agent per env; an
    env whose episode is over is reset by the next step, which ignores its actions.

    An env that fails, or whose actor does, ends its episode: all of its agents that were not done
    are truncated, as is `"__all__"`, with the last observation of each, reward 0 and
    `infos[agent]["fault"]`. The next step brings the first observations of its next episode. A
    fault on the way to these is not seen here; `statistics` counts it.

    Args:
        env_fns: One per env: what makes a `MultiAgentEnv`, or another env with several agents that
            names them beforehand.
        **settings: What `ActorSettings` explains.

    Attributes:
        envs: Stand-ins, which say the agents and spaces of each env. No env is in this process.

    Raises:
        ConfigError: A setting cannot be used, or the envs name no agents.
        Exception: As from `ActorPool`.
    """

    closed = True  # until it can be closed

    def __init__(self, env_fns: Sequence[Any], **settings: Unpack[ActorSettings]) -> None:
        self._pool = pool = ActorPool(env_fns, all_or_nothing=True, **settings)
        observation, action = pool.single_observation_space, pool.single_action_space
        if not (
            isinstance(observation, AgentSpaces)
            and isinstance(action, AgentSpaces)
            and observation.spaces
        ):
            pool.close()
            raise ConfigError(
                "these envs name no agents before they are reset: give them possible_agents and "
                "their spaces; for envs with one agent use BusSingleAgentEnvRunner"
            )
        self.closed = False
        self._lockstep = AgentsInLockstep(pool)
        self.num_envs = pool.num_envs
        self.single_observation_spaces = dict(observation.spaces)
        self.single_action_spaces = dict(action.spaces)
        self.single_observation_space = gymnasium.spaces.Dict(self.single_observation_spaces)
        self.single_action_space = gymnasium.spaces.Dict(self.single_action_spaces)
        self.envs = [
            _Agents(self.single_observation_spaces, self.single_action_spaces)
            for _ in range(self.num_envs)
        ]
        one = pool.get_sub_environments()[0]
        self.metadata = {**one.get_attr("metadata"), "autoreset_mode": "next_step"}
        self.render_mode = one.get_attr("render_mode")

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]]]:
        """Reset all envs; return observations and infos, a dict by agent per env.

        Args:
            seed: Env i gets `seed + i`; or one seed, or None, per env; None seeds none.
            options: Handed to each env.

        Raises:
            Exception: As from `ActorPool.recv`.
        """
        records = self._lockstep.reset(seed, options)
        return _lists(records, "observations"), _lists(records, "infos")

    def step(self, actions: Sequence[Mapping[Any, Any]]) -> tuple[list[dict[Any, Any]], ...]:
        """Step all envs by a dict by agent each; return five lists, of a dict by agent per env.

        Raises:
            Exception: As from `ActorPool.send` and `recv`.
        """
        records = self._lockstep.step(actions)
        names = ("observations", "rewards", "terminateds", "truncateds", "infos")
        return tuple(_lists(records, name) for name in names)

    def render(self) -> tuple[Any, ...]:
        """Return each env's frame, or None where it has none."""
        return tuple(self._pool.try_render())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, in its actor, and return what each returned."""
        return tuple(env.call(name, *args, **kwargs) for env in self._pool.get_sub_environments())

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env."""
        return tuple(env.get_attr(name) for env in self._pool.get_sub_environments())

    def actor_pids(self) -> list[int]:
        """Return the process id of each actor that runs."""
        return self._pool.actor_pids()

    def statistics(self) -> Statistics:
        """Return counts since the start: actors, restarts, faults, late replies."""
        return self._pool.statistics()

    def close_extras(self, **_: Any) -> None:
        """Close all envs and end their processes; called by `close`."""
        self._pool.close()


def _lists(records: Sequence[Record], name: str) -> list[dict[Any, Any]]:
    return [record[name] for record in records]


# --- batches ----------------------------------------------------------------------------------

#: Columns that RLlib calls otherwise.
_THEIR_NAMES = {"next_obs": "new_obs"}


def to_rllib(batch: SampleBatch | MultiAgentBatch, *, previous: bool = False) -> Any:
    """Return a batch as RLlib's class of the same name (`ray.rllib.policy.sample_batch`).

    Columns have the names that they had there: `obs`, `new_obs`, `actions`, `rewards`,
    `terminateds`, `truncateds`, `eps_id`, `env_id`, `t`, `unroll_id`, `infos`, `action_logp`,
    `vf_preds`. `agent_index` numbers the agents of the batch from 0, in the order of their ids.
    `seq_lens` has the rows of each trajectory, `(trajectories,)` int32. A state that the policy had
    is `state_in_0`, `state_in_1`, ... of each trajectory's first row, and `state_out_0`, ... of all
    rows. Columns that RLlib does not know keep their names. Arrays are shared as far as they stay
    what they are.

    Args:
        batch: It.
        previous: Add `prev_actions` and `prev_rewards`: those of the row before, and zeros in the
            first row of an agent's episode. Those that are recorded, as a policy has them in its
            `wanted_inputs`, are there in any case, and stay.

    Raises:
        TypeError: `batch` is none of ours.
        ValueError: What is before a row is in no row of `batch`: an episode does not begin in it,
            or has a gap. Sample whole episodes, or have the policy want these inputs.
    """
    if isinstance(batch, MultiAgentBatch):
        parts = batch.policy_batches
        ids = _agent_ids(parts.values())
        renamed = {name: _renamed(part, ids, previous) for name, part in parts.items()}
        return rllib_batches.MultiAgentBatch(renamed, batch.env_steps)
    if isinstance(batch, SampleBatch):
        return _renamed(batch, _agent_ids([batch]), previous)
    raise TypeError(
        "to_rllib takes a SampleBatch or MultiAgentBatch of envbus.runner.batches, "
        f"not {batch!r:.80}"
    )


def _agent_ids(batches: Any) -> npt.NDArray[Any]:
    columns = [batch["agent_id"] for batch in batches if "agent_id" in batch]
    return np.unique(np.concatenate(columns)) if columns else np.empty(0)


def _renamed(batch: SampleBatch, agent_ids: npt.NDArray[Any], previous: bool) -> Any:
    starts = batch.trajectory_starts()
    columns: dict[str, Any] = {}
    if previous:
        names = {"prev_actions": "actions", "prev_rewards": "rewards"}
        columns = {
            name: _before(batch, of, starts) for name, of in names.items() if name not in batch
        }
    for name, column in batch.columns.items():
        if name == "agent_id":
            columns["agent_index"] = np.searchsorted(agent_ids, column)
        elif name in ("state_in", "state_out"):
            if name == "state_in":
                column = map_tree(lambda leaf: leaf[starts], column)
            for index, (_, leaf) in enumerate(leaves_of(column)):
                columns[f"{name}_{index}"] = leaf
        else:
            columns[_THEIR_NAMES.get(name, name)] = column
    lengths = np.diff(np.flatnonzero(starts), append=len(batch))
    return rllib_batches.SampleBatch(columns, seq_lens=lengths.astype(np.int32))


def _before(batch: SampleBatch, name: str, starts: npt.NDArray[np.bool_]) -> Any:
    """Return each row's value of `name` in the row before; zeros where an episode begins."""
    if "t" not in batch or batch["t"][starts].any():
        raise ValueError(
            f"the last {name} of rows that do not begin their episode are in no row of this batch: "
            'sample whole episodes (batch_mode="complete_episodes"), or have the policy want '
            f'them: wanted_inputs = ("prev_{name}",)'
        )

    def shifted(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
        before = np.zeros_like(leaf)
        before[1:][~starts[1:]] = leaf[:-1][~starts[1:]]
        return before

    return map_tree(shifted, batch[name])
