"""`BaseEnvRunner`: what an `EnvRunnerGroup` hosts; `EnvRunner` is one, and others can be written.

Leaves out how envs are sampled (`env_runner.py`), and the processes (`envbus.runner.group`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from gymnasium import Space

from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies.policy import Policy, Weights
from envbus.runner.policies.policy_map import PolicyMap, check_state
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.connector_times import ConnectorTimes
from envbus.runner.workers.config import check_kind

__all__ = ["BaseEnvRunner"]


class BaseEnvRunner(ABC):
    """Base class of runners: derive from it to sample in a way of your own.

        @dataclass(frozen=True, kw_only=True)
        class MazeConfig(RunnerConfig):
            level: int = 1

        class MazeRunner(BaseEnvRunner):
            def __init__(self, config):
                super().__init__(config)
                self.make_env()

            def make_env(self):
                self.stop()
                self.env = Maze(self.config.level, seed=self.config.seed)

            def sample(self, **limits):
                batch = SampleBatch(play(self.env))
                self.metrics.add_steps(env_steps=len(batch), agent_steps=len(batch))
                return Sample({"default_policy": batch}, len(batch))

            def get_spaces(self):
                return {"default_policy": (self.env.observation_space, self.env.action_space)}

            def assert_healthy(self):
                assert self.env is not None

        group = EnvRunnerGroup(4, config=MazeConfig(level=3), make_runner=MazeRunner)

    Only `sample`, `get_spaces` and `assert_healthy` must be written. The rest has a default, in
    which a runner has no policies.

    Args:
        config: Settings, and those of a class that you derive from `RunnerConfig`; None: the
            defaults. In a group each runner has its own `seed` and `worker_index` there.

    Attributes:
        config: As given. May be replaced: `make_env` and `make_module` read it when they are
            called.
        env: What `make_env` has made; None: nothing.
        metrics: To be fed by `sample`; what `get_metrics` reads, and a group collects.
        timers: Likewise.
        connector_times: Likewise.

    Raises:
        ConfigError: `config` is no `RunnerConfig`.
    """

    config: RunnerConfig
    metrics: SampleMetrics
    timers: PerfTimers
    connector_times: ConnectorTimes
    env: Any = None
    #: What numbers of episodes and samples have reached elsewhere.
    _ids = (0, 0)

    def __init__(self, config: RunnerConfig | None = None) -> None:
        if config is not None:
            example = "RunnerConfig(rollout_fragment_length=128)"
            check_kind("config", config, RunnerConfig, example=example)
        self.config = config or RunnerConfig()
        self.metrics = SampleMetrics()
        self.timers = PerfTimers(self.config.ema_coef)
        self.connector_times = ConnectorTimes()

    # --- to be written -------------------------------------------------------------------------

    @abstractmethod
    def sample(
        self,
        num_env_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        timeout: float | None = None,
        force_reset: bool = False,
        explore: bool | None = None,
    ) -> Sample:
        """Return rows, as many as asked; arguments as of `EnvRunner.sample`.

        A group gives all of them by name.
        """

    @abstractmethod
    def get_spaces(self) -> dict[Any, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by policy id, or by agent id as `EnvRunner` does."""

    @abstractmethod
    def assert_healthy(self) -> None:
        """Raise if it cannot sample."""

    # --- what may be written -------------------------------------------------------------------

    def make_env(self) -> None:
        """Close `env`, and make it anew by the present `config`.

        Raises:
            ConfigError: The class does not say how.
        """
        raise ConfigError(f"{type(self).__qualname__} has no make_env of its own")

    def make_module(self) -> None:
        """Make the policies anew by the present `config`.

        Raises:
            ConfigError: The class does not say how.
        """
        raise ConfigError(f"{type(self).__qualname__} has no make_module of its own")

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policies by id: those whose weights a group sets."""
        return {}

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id, of all policies or of some.

        Raises:
            ConfigError: There is no such policy.
        """
        return PolicyMap(self.policies).get_weights(policy_ids)

    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Set weights by policy id; None: of the version after each policy's present one.

        Raises:
            ConfigError: There is no such policy. Nothing was set.
        """
        PolicyMap(self.policies).set_weights(weights, version)

    def get_policy_spaces(self) -> dict[str, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by policy id, as far as `get_spaces` has them so."""
        spaces = self.get_spaces()
        return {policy_id: spaces[policy_id] for policy_id in self.policies if policy_id in spaces}

    def get_metrics(self) -> dict[str, Any]:
        """Return statistics since the last call (`SampleMetrics.read`), and the timers' means.

        Also `mean_connector_ms` and `connector_metrics`, by names of connectors.
        """
        connectors = self.connector_times.read(self.config.connectors())
        return {**self.metrics.read(), **self.timers.read(), **connectors}

    def get_state(self) -> dict[str, Any]:
        """Return weights with their versions, and the counts of a lifetime."""
        policies = self.policies
        return {
            "policies": PolicyMap(policies).get_state() if policies else {},
            "metrics": self.metrics.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this runner or another.

        Raises:
            ConfigError: It is no state, or has a policy that is not here.
        """
        check_state(state, "policies", "metrics")
        if state["policies"]:
            PolicyMap(self.policies).set_state(state["policies"])
        self.metrics.set_state(state["metrics"])

    def ping(self) -> str:
        """Return "pong"; where it raises instead, a group's `probe` finds the runner silent."""
        return "pong"

    def stop(self) -> None:
        """Close `env`, and let go of all else. May be called again."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def ids_reached(self) -> tuple[int, int]:
        """Return what no number of an episode, and of a sample, has reached yet here."""
        return self._ids

    def go_on_from(self, next_eps_id: int, num_samples: int) -> None:
        """Have later episodes and samples be numbered from these on, if they are not already."""
        self._ids = max(self._ids[0], next_eps_id), max(self._ids[1], num_samples)
