"""`EnvRunner`: drives a pool with policies, and returns what happened as columns.

Leaves out the two ways of doing so: `column_sampler.py` (fast) and `dict_sampler.py` (general).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError

from envbus.bus.errors import ConfigError, RestartLimitError
from envbus.runner.callbacks import naming
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.connectors import Connector
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.episode import DEFAULT_POLICY_ID, EpisodeRecorder
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import FunctionPolicy, Policy, Weights
from envbus.runner.pool import ActorPool
from envbus.runner.samplers import make_sampler
from envbus.runner.sampling import Demand, RunnerConfig, Sample
from envbus.runner.trajectory import AgentID

__all__ = ["EnvRunner"]


class EnvRunner:
    """Samples envs with policies.

        pool = ActorPool(["CartPole-v1"] * 64)
        space = pool.single_action_space
        with EnvRunner(pool, RandomPolicy(space), RunnerConfig(rollout_fragment_length=128)) as run:
            batch = run.sample().single()  # 64 * 128 rows, env by env

    Envs go on where the sample before has left them; no fragment begins with a gap. One thread
    creates, uses and stops it.

    Args:
        envs: It is the runner's own from now on. With several agents, or callbacks that are told
            of single episodes, its `autoreset_mode` must be "Disabled".
        policies: One, or by policy id; functions `observations -> actions` are policies, too.
        config: None: the defaults.

    Raises:
        ConfigError: Envs, policies and config do not fit together. The pool is left open.
    """

    def __init__(
        self,
        envs: ActorPool,
        policies: Policy | Callable[[Any], Any] | Mapping[str, Policy | Callable[[Any], Any]],
        config: RunnerConfig | None = None,
    ) -> None:
        self.envs = envs
        self.config = config or RunnerConfig()
        given = policies if isinstance(policies, Mapping) else {DEFAULT_POLICY_ID: policies}
        self._policies = {name: _as_policy(name, policy) for name, policy in given.items()}
        if not self._policies:
            raise ConfigError("there must be at least one policy")
        self.metrics = SampleMetrics()
        self.timers = PerfTimers(self.config.ema_coef)
        self._sampler = make_sampler(
            envs, self.config, lambda: self._policies, self.metrics, self.timers
        )
        self._num_samples = 0
        self._begun = False
        #: A sample has raised: nobody knows what the envs are at.
        self._lost_track = False

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policies by id."""
        return self._policies

    @property
    def is_vectorized(self) -> bool:
        """Whether rows are kept in columns over all envs."""
        return isinstance(self._sampler, ColumnSampler)

    def sample(
        self,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        timeout: float | None = None,
        force_reset: bool = False,
        explore: bool | None = None,
    ) -> Sample:
        """Step the envs until there are as many rows as asked, and return these.

        Each env contributes an equal part, so that fast ones are not over-represented. Without a
        number, each contributes `rollout_fragment_length` steps.

        Args:
            num_env_steps: Of all envs together; exactly, or in complete_episodes mode at least.
            num_episodes: Of all envs together, exactly; each whole. Running ones of which rows
                have left already are given up for it, as in complete_episodes mode.
            timeout: Seconds after which what is there is returned; `late` names the envs that
                were awaited. Nothing is lost: they go on in the next call. None: no limit but
                the deadlines of the pool's requests.
            force_reset: Give up all running episodes and begin new ones.
            explore: None: as configured.

        Raises:
            ValueError: Both numbers, or a negative one.
            CallbackError, ConnectorError: It names which one.
            ConfigError: An agent was given to a policy that is not there.
            RestartLimitError: No env is left.
            Exception: What the pool raises, if its envs are not made anew. After any exception
                the next call begins new episodes in all envs.
        """
        self._assert_open()
        sampler, config = self._sampler, self.config
        deadline = None if timeout is None else time.monotonic() + timeout
        demand = Demand.of(
            config,
            sampler.live,
            num_env_steps=num_env_steps,
            num_episodes=num_episodes,
            turn=self._num_samples,
            first=sampler.stepping,
        )
        if not sampler.live.any():
            self.assert_healthy()
        try:
            self._begin(demand, force_reset=force_reset)
            sample = sampler.sample(
                demand,
                deadline,
                config.explore if explore is None else explore,
                config.unique(self._num_samples),
            )
        except BaseException:
            self._lost_track = True
            raise
        self._num_samples += 1
        self.metrics.add_steps(env_steps=sample.env_steps, agent_steps=sample.agent_steps)
        with naming("on_sample_end"):
            config.callbacks.on_sample_end(sample=sample)
        return sample

    # --- policies ----------------------------------------------------------------------------

    def add_policy(
        self,
        policy_id: str,
        policy: Policy | Callable[[Any], Any],
        policy_mapping_fn: Callable[[AgentID, EpisodeRecorder], str] | None = None,
    ) -> None:
        """Add a policy, or put another in the place of one, for episodes that begin from now on.

        Args:
            policy_id: Its id.
            policy: Itself.
            policy_mapping_fn: Takes the place of the one that there is.

        Raises:
            ConfigError: The runner keeps columns; make it with `vectorized=False`.
        """
        sampler = self._general("add_policy")
        self._policies = {**self._policies, policy_id: _as_policy(policy_id, policy)}
        if policy_mapping_fn is not None:
            sampler.policy_mapping_fn = policy_mapping_fn

    def remove_policy(
        self,
        policy_id: str,
        policy_mapping_fn: Callable[[AgentID, EpisodeRecorder], str] | None = None,
    ) -> None:
        """Remove a policy; episodes that run with it keep it to their end.

        Raises:
            ConfigError: There is no such policy, or no other, or the runner keeps columns.
        """
        sampler = self._general("remove_policy")
        self._policy(policy_id)
        if len(self._policies) == 1:
            raise ConfigError(f"policy {policy_id!r} is the last one")
        self._policies = {
            name: policy for name, policy in self._policies.items() if name != policy_id
        }
        if policy_mapping_fn is not None:
            sampler.policy_mapping_fn = policy_mapping_fn

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id, of all policies or of some."""
        names = list(self._policies) if policy_ids is None else list(policy_ids)
        return {name: self._policy(name).get_weights() for name in names}

    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Set weights by policy id; actions from now on are theirs, and say so.

        Raises:
            ConfigError: There is no such policy. Nothing was set.
        """
        found = [(self._policy(name), values) for name, values in weights.items()]
        for policy, values in found:
            policy.set_weights(values, version)

    # --- about it ----------------------------------------------------------------------------

    def get_spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the envs have them."""
        envs = self.envs
        return {
            agent_id: (envs.get_observation_space(agent_id), envs.get_action_space(agent_id))
            for agent_id in envs.get_agent_ids()
        }

    def get_metrics(self) -> dict[str, Any]:
        """Return statistics since the last call (`SampleMetrics.read`), and the timers' means."""
        return {**self.metrics.read(), **self.timers.read()}

    def assert_healthy(self) -> None:
        """Raise if it cannot sample with all of its envs.

        Raises:
            ClosedEnvironmentError: It was stopped.
            RestartLimitError: Envs were given up; they are named.
        """
        self._assert_open()
        lost = [env_id for env_id, live in enumerate(self._sampler.live) if not live]
        if lost:
            raise RestartLimitError(
                f"envs {lost} of {self.envs.num_envs} failed too often and were given up; the "
                "pool's hooks and the log say why"
            )

    def get_state(self) -> dict[str, Any]:
        """Return weights, their versions, connectors' states and the counts of a lifetime.

        Not the envs' own state: running episodes are no part of it.
        """
        policies = self._policies.items()
        return {
            "weights": self.get_weights(),
            "policy_versions": {name: policy.policy_version for name, policy in policies},
            "connectors": {name: one.get_state() for name, one in self._connectors().items()},
            "metrics": self.metrics.get_state(),
            "num_samples": self._num_samples,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this runner or another."""
        for name, weights in state["weights"].items():
            self._policy(name).set_weights(weights, state["policy_versions"][name])
        for name, connector in self._connectors().items():
            connector.set_state(state["connectors"][name])
        self.metrics.set_state(state["metrics"])
        self._num_samples = max(self._num_samples, int(state["num_samples"]))

    def stop(self) -> None:
        """Close the envs. Idempotent."""
        self.envs.close()

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.envs.close(terminate=exc is not None)

    # --- private -----------------------------------------------------------------------------

    def _begin(self, demand: Demand, *, force_reset: bool) -> None:
        """See that the episodes that run are ones that this sample can go on with."""
        sampler = self._sampler
        if not self._begun:
            for env_id in range(self.envs.num_envs):
                with naming("on_sub_environment_created"):
                    self.config.callbacks.on_sub_environment_created(env_id=env_id, incarnation=0)
            sampler.reset(self.config.seed)
            self._begun, self._lost_track = True, False
        elif force_reset or self._lost_track or (demand.complete and sampler.has_cut_episode()):
            sampler.reset(None)
            self._lost_track = False

    def _general(self, verb: str) -> DictSampler:
        if isinstance(self._sampler, ColumnSampler):
            raise ConfigError(
                f"{verb}: rows are kept in columns for one policy; make the runner with "
                'RunnerConfig(vectorized=False) and the pool with autoreset_mode="Disabled"'
            )
        return self._sampler

    def _policy(self, policy_id: str) -> Policy:
        try:
            return self._policies[policy_id]
        except KeyError:
            known = sorted(self._policies)
            raise ConfigError(f"there is no policy {policy_id!r}; there are {known}") from None

    def _connectors(self) -> dict[str, Connector]:
        found: dict[str, Connector] = {}
        kinds = {
            "observation": self.config.observation_connector,
            "action": self.config.action_connector,
        }
        for kind, both in kinds.items():
            if isinstance(both, Mapping):
                found |= {f"{kind}/{policy_id}": one for policy_id, one in both.items()}
            elif both is not None:
                found[kind] = both
        return found

    def _assert_open(self) -> None:
        if self.envs.closed:
            raise ClosedEnvironmentError("Trying to operate on `EnvRunner`, after `stop()`.")


def _as_policy(name: str, policy: Any) -> Policy:
    if hasattr(policy, "compute_actions"):
        return policy  # type: ignore[no-any-return]
    if callable(policy):
        return FunctionPolicy(policy)
    raise ConfigError(
        f"policy {name!r} must have compute_actions, or be a function, not {policy!r:.80}"
    )
