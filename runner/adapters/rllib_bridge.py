"""RLlib's env runner over a bridge: simulators that drive themselves give it its episodes.

Needs Ray (`pip install -e '.[rllib]'`). Leaves out what `ExternalEnvBridge` does, and all of
RLlib's runner but how it samples: connectors, modules, metrics and state are RLlib's own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium.vector.utils import batch_space
from typing_extensions import Self

from envbus.bus.errors import ConfigError
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.extras import needed_for
from envbus.runner.pool.agent_results import DUMMY_AGENT

with needed_for("envbus.runner.adapters.rllib_bridge", "rllib"):
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.core.columns import Columns
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.utils.metrics import (
        ENV_TO_MODULE_CONNECTOR,
        MODULE_TO_ENV_CONNECTOR,
        RLMODULE_INFERENCE_TIMER,
        WEIGHTS_SEQ_NO,
    )
    from ray.rllib.utils.spaces.space_utils import unbatch

__all__ = ["BusExternalEnvRunner"]

logger = logging.getLogger("envbus.runner.adapters.rllib_bridge")

#: Seconds without a simulator after which the log says so.
_PATIENCE = 60.0
_SETTINGS = frozenset(inspect.signature(ExternalEnvBridge).parameters)


class _Bridged(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Stands where RLlib looks for envs; says their spaces. No env is in this process."""

    def __init__(self, bridge: ExternalEnvBridge, num_envs: int) -> None:
        self.bridge = bridge
        self.num_envs = num_envs
        observations: Any = bridge.observation_space
        actions: Any = bridge.action_space
        self.single_observation_space, self.single_action_space = observations, actions
        self.observation_space = batch_space(observations, num_envs)
        self.action_space = batch_space(actions, num_envs)

    def close_extras(self, **_: Any) -> None:
        """Stop the bridge; called by `close`."""
        self.bridge.stop()


@dataclass(slots=True)
class _Playing:
    """An episode that a simulator has open."""

    #: Its present chunk.
    episode: Any
    #: Whether its rows are returned.
    is_recorded: bool
    #: The module's action for the last observation, and what it adds; None: there is none.
    chosen: tuple[Any, dict[str, Any]] | None = None


class BusExternalEnvRunner(SingleAgentEnvRunner):
    """RLlib's `SingleAgentEnvRunner` whose episodes are those of simulators at a bridge.

        config.environment(observation_space=observation_space, action_space=action_space)
        config.env_runners(
            env_runner_cls=BusExternalEnvRunner.with_settings(bind="tcp://127.0.0.1:5556")
        )

    What RLlib's `PolicyServerInput` was for. Simulators connect by `ExternalEnvClient`, and wait
    while the algorithm trains. `sample` waits for as long as no simulator comes; where env runners
    are remote, `config.env_runners(sample_timeout_s=)` ends that. All simulators that wait at one
    time are answered by one forward pass.

    `num_envs_per_env_runner` says nothing about simulators; it is a factor of how much a sample
    has, as ever. Where whole episodes are sampled, or after `force_reset`, episodes of which rows
    have left are answered to their end, without rows.

    A simulator that vanishes truncates its episode at its last observation, and is counted by the
    metrics `num_env_faults` and `num_env_faults_lifetime`. So does an action that came too late,
    or that the simulator chose itself (`log_action`): the row of it is left out, and what follows
    is an episode of its own. Episodes with `training_enabled=False` have no rows.

    The bridge is `env.unwrapped.bridge`.
    """

    #: Settings of the bridge: the arguments of `ExternalEnvBridge`. `bind` may be a function of the
    #: env runner's `worker_index`, so that each has a port of its own.
    bridge_settings: ClassVar[dict[str, Any]] = {}

    # Of RLlib's runner.
    config: Any
    env: Any
    metrics: Any
    module: Any
    num_envs: int
    _cached_to_module: Any

    #: By the bridge's ids.
    _open: dict[str, _Playing]
    #: Those whose simulators wait for an action; the connectors have seen them.
    _asking: Sequence[str] = ()

    @classmethod
    def with_settings(cls, **settings: Any) -> type[Self]:
        """Return this class with other `bridge_settings`, for `config.env_runners`.

        Those that are not named stay. Ray pickles the class with all that is in it.

        Raises:
            TypeError: There is no such setting.
        """
        if unknown := sorted(settings.keys() - _SETTINGS):
            raise TypeError(
                f"an ExternalEnvBridge has no settings {', '.join(unknown)}; it has "
                f"{', '.join(sorted(_SETTINGS))}"
            )
        fields = {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "bridge_settings": {**cls.bridge_settings, **settings},
        }
        return type(cls.__name__, (cls,), fields)

    def make_env(self) -> None:
        """Make the bridge; called again, stop the one before.

        Raises:
            ConfigError: The config has no spaces, or a setting cannot be used.
            TransportError: An endpoint cannot be bound.
        """
        if self.env is not None:
            self.env.close()
        config: Any = self.config
        settings = {
            "observation_space": config.observation_space,
            "action_space": config.action_space,
            **self.bridge_settings,
        }
        for name in ("observation_space", "action_space"):
            if not isinstance(settings[name], gymnasium.Space):
                raise ConfigError(
                    f"{name} must be one space, not {settings[name]!r}: call "
                    "config.environment(observation_space=..., action_space=...)"
                )
        if callable(settings.get("bind")):
            settings["bind"] = settings["bind"](self.worker_index)
        self.env = _Bridged(ExternalEnvBridge(**settings), config.num_envs_per_env_runner)
        self.num_envs = self.env.num_envs
        self._open, self._asking = {}, ()
        self._shared_data: dict[Any, Any] = {}
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env,
                "env_context": config.env_config,
            },
        )

    def _sample(
        self,
        *,
        num_timesteps: Any = None,
        num_episodes: Any = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[Any]:
        """Return so many rows, or episodes, of what simulators have done."""
        for one in self._open.values():
            has_left = num_episodes is not None and one.episode.t_started
            if has_left or (force_reset and one.episode.t):
                one.is_recorded = False
        done: list[Any] = []
        steps = faults = 0
        while steps < num_timesteps if num_timesteps is not None else len(done) < num_episodes:
            self._answer(steps, explore, random_actions)
            result = self.env.bridge.poll(_PATIENCE)
            if not result.observations and not result.faults:
                logger.warning("no simulator has come for a minute to %s", self.env.bridge.address)
            faults += len(result.faults)
            steps += self._take(result, done, explore)
        for name, how in (("num_env_faults", "sum"), ("num_env_faults_lifetime", "lifetime_sum")):
            self.metrics.log_value(name, faults, reduce=how)
        self._done_episodes_for_metrics.extend(done)
        chunks = [episode for episode in done if len(episode)]
        if num_timesteps is not None:
            chunks += self._cut()
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=steps)
        self._increase_sampled_metrics(steps, len(done))
        return [chunk.to_numpy() for chunk in chunks] if self.episodes_to_numpy else chunks

    def _answer(self, steps: int, explore: bool, random_actions: bool) -> None:
        """Choose actions for the simulators that wait, and send them."""
        asking, self._asking = self._asking, ()
        if not asking:
            return
        ones = [self._open[episode_id] for episode_id in asking]
        try:
            for_env = self._choose(ones, steps, explore, random_actions)
        except Exception as exc:
            self.env.bridge.fail(asking, exc)
            raise
        actions = {name: {DUMMY_AGENT: act} for name, act in zip(asking, for_env, strict=True)}
        self.env.bridge.send_actions(actions, policy_version=self._weights_seq_no)

    def _choose(
        self, ones: Sequence[_Playing], steps: int, explore: bool, random_actions: bool
    ) -> list[Any]:
        """Choose actions; return them as simulators take them."""
        to_module = self._cached_to_module
        self._cached_to_module = None
        if random_actions or self.module is None:
            for one in ones:
                one.chosen = self.env.single_action_space.sample(), {}
            return [one.chosen[0] for one in ones if one.chosen]
        with self.metrics.log_time(RLMODULE_INFERENCE_TIMER):
            if explore:
                runners = self.config.num_env_runners or 1
                before = self.num_env_steps_sampled_lifetime // runners
                to_env = self.module.forward_exploration(to_module, t=(before + steps) * runners)
            else:
                to_env = self.module.forward_inference(to_module)
        to_env = self._module_to_env(
            rl_module=self.module,
            batch=to_env,
            episodes=[one.episode for one in ones],
            explore=explore,
            shared_data=self._shared_data,
            metrics=self.metrics,
            metrics_prefix_key=(MODULE_TO_ENV_CONNECTOR,),
        )
        actions = to_env.pop(Columns.ACTIONS)
        for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, actions)
        for index, (one, action) in enumerate(zip(ones, unbatch(actions), strict=True)):
            extras = {name: column[index] for name, column in to_env.items()}
            one.chosen = action, {**extras, WEIGHTS_SEQ_NO: self._weights_seq_no}
        return list(unbatch(for_env))

    def _take(self, result: BridgeResult, done: list[Any], explore: bool) -> int:
        """Put what simulators have done into episodes; return how many rows that makes."""
        steps = 0
        asking, ended = [], []
        for fault in result.faults:
            if (lost := self._open.pop(fault.episode_id, None)) is not None:
                self._end(lost, done)
        for episode_id, seen in result.observations.items():
            observation = seen[DUMMY_AGENT]
            infos = result.infos[episode_id].get(DUMMY_AGENT, {})
            one = self._open.get(episode_id)
            if one is not None and one.chosen is not None and episode_id not in result.unacted:
                action, extras = one.chosen
                flags = result.terminateds[episode_id], result.truncateds[episode_id]
                one.episode.add_env_step(
                    observation,
                    action,
                    result.rewards[episode_id][DUMMY_AGENT],
                    infos,
                    terminated=flags[0]["__all__"],
                    truncated=flags[1]["__all__"],
                    extra_model_outputs=extras,
                )
                steps += one.is_recorded
                which = "on_episode_step"
            else:  # what led here, if anything, is no action of the module
                if one is not None:
                    self._end(one, done)
                one = self._begin(one, episode_id not in result.untrained)
                one.episode.add_env_reset(observation, infos)
                which = "on_episode_start"
            one.chosen = None
            self._open[episode_id] = one
            if episode_id in result.ended:
                ended.append(self._open.pop(episode_id))
            elif episode_id not in result.off_policy_actions:
                asking.append(episode_id)
            self._make_on_episode_callback(which, 0, [one.episode])
        self._prepare(ended, explore)  # connectors see, and may change, last observations, too
        for one in ended:
            self._end(one, done)
        self._asking = asking
        self._cached_to_module = self._prepare([self._open[name] for name in asking], explore)
        return steps

    def _begin(self, before: _Playing | None, is_recorded: bool) -> _Playing:
        """Return a new episode; one that goes on behind a gap is recorded as it was."""
        episode = SingleAgentEpisode(
            observation_space=self.env.single_observation_space,
            action_space=self.env.single_action_space,
        )
        self._make_on_episode_callback("on_episode_created", 0, [episode])
        return _Playing(episode, is_recorded if before is None else before.is_recorded)

    def _end(self, one: _Playing, done: list[Any]) -> None:
        """End an episode; one that did not end by itself is truncated."""
        episode = one.episode
        if not episode.is_done:
            episode.is_truncated = True
        self._make_on_episode_callback("on_episode_end", 0, [episode])
        if one.is_recorded and episode.t:
            done.append(episode)
        else:
            self._ongoing_episodes_for_metrics.pop(episode.id_, None)

    def _prepare(self, ones: Sequence[_Playing], explore: bool) -> Any:
        """Return what the connectors make of these episodes for the module."""
        if not ones or self.module is None:
            return None
        return self._env_to_module(
            rl_module=self.module,
            episodes=[one.episode for one in ones],
            batch={},
            explore=explore,
            shared_data=self._shared_data,
            metrics=self.metrics,
            metrics_prefix_key=(ENV_TO_MODULE_CONNECTOR,),
        )

    def _cut(self) -> list[Any]:
        """Return the rows of episodes that go on."""
        chunks = []
        for one in self._open.values():
            chunk = one.episode
            if not len(chunk):
                continue
            one.episode = chunk.cut(len_lookback_buffer=self.config.episode_lookback_horizon)
            if one.is_recorded:
                chunk.validate()
                self._ongoing_episodes_for_metrics[chunk.id_].append(chunk)
                chunks.append(chunk)
        return chunks
