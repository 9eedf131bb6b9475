"""`EnvRunner`: drives a pool or a bridge with policies, and returns what happened as columns.

Leaves out the two ways of doing so: `column_sampler.py` (fast) and `dict_sampler.py` (general).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from envbus.actors.external.errors import SimulatorError
from envbus.bus.errors import ConfigError, RestartLimitError
from envbus.bus.forking import StaysHere
from envbus.bus.settings import check_number
from envbus.runner.callbacks import naming
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.columns import Make
from envbus.runner.config import check_kind
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.env_set import Envs, EnvSet
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policy_map import Policies, PolicyMap
from envbus.runner.runner_renewal import Factories, RunnerRenewal
from envbus.runner.samplers import make_sampler
from envbus.runner.sampling import Demand, RunnerConfig, Sample
from envbus.runner.seeding import restart_seed
from envbus.runner.serving import ServingThread
from envbus.runner.trajectory import AgentID
from envbus.runner.video import VideoRecorder

__all__ = ["EnvRunner"]


class EnvRunner(RunnerRenewal, StaysHere):
    """Samples envs with policies.

        pool = ActorPool(["CartPole-v1"] * 64)
        space = pool.single_action_space
        with EnvRunner(pool, RandomPolicy(space), RunnerConfig(rollout_fragment_length=128)) as run:
            batch = run.sample().single()  # 64 * 128 rows, env by env

    Envs go on where the sample before has left them; no fragment begins with a gap. One thread
    creates, uses and stops it.

    Args:
        envs: A pool, an `ExternalEnvBridge`, or several bridges and at most one pool; the runner's
            own from now on. With several agents, callbacks that are told of single episodes, or a
            bridge, the pool's `autoreset_mode` must be "Disabled". docs/sampling.md says how a
            bridge's episodes are sampled.
        policies: One, or by policy id; functions `observations -> actions` are policies, too.
        config: None: the defaults.
        make_column: `(shape, dtype) -> array` or None, asked for the memory of each column of a
            fragment, where rows are kept in columns: for shared memory, or pinned one. What it
            returns is written to until the sample is over. None, or where it returns None: fresh
            memory.

    Attributes:
        envs: As given.
        config: As given.
        metrics: What `get_metrics` reads.
        timers: Likewise.

    Raises:
        ConfigError: Envs, policies and config do not fit together. The envs are left open.
    """

    def __init__(
        self,
        envs: Envs,
        policies: Policies,
        config: RunnerConfig | None = None,
        *,
        make_column: Make | None = None,
    ) -> None:
        self.envs = envs
        self._make_column = make_column
        self._envs = EnvSet(envs)
        if config is not None:
            example = "RunnerConfig(rollout_fragment_length=128)"
            check_kind("config", config, RunnerConfig, example=example)
        self.config = config or RunnerConfig()
        self._factories: Factories | None = None
        self._policies = PolicyMap(policies)
        self.metrics = SampleMetrics()
        self.timers = PerfTimers(self.config.ema_coef)
        self._num_samples = 0
        #: How often the envs, or the policies, were made anew.
        self._renewals = 0
        self._recorder: VideoRecorder | None = None
        self._asking = threading.RLock()
        self._sampler = self._make_sampler()
        self._begun = False
        #: A sample has raised: nobody knows what the envs are at.
        self._lost_track = False
        #: Answers simulators, or did so last.
        self._server: ServingThread | None = None

    @classmethod
    def from_factories(
        cls,
        make_env: Callable[[], Any],
        make_module: Callable[[Any], Policies],
        config: RunnerConfig | None = None,
    ) -> EnvRunner:
        """Return a runner that can make its envs and policies anew.

        Args:
            make_env: Returns envs: a pool, a bridge, or a sequence of these.
            make_module: Returns the policies for such envs' spaces; the envs are not its own.
            config: None: the defaults.
        """
        envs = make_env()
        try:
            runner = cls(envs, make_module(envs), config)
        except BaseException:
            EnvSet(envs).close(terminate=True)
            raise
        runner._factories = (make_env, make_module)
        return runner

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
            ClosedEnvironmentError: It was stopped, also by a callback or a signal's handler while
                this call is under way.
            SimulatorError: A simulator that a bridge hosts has ended. Nothing is lost by it.
            Exception: What the pool raises, if its envs are not made anew. After any other
                exception the next call begins new episodes in all envs.
        """
        self._assert_open()
        sampler, config = self._sampler, self.config
        explore = config.explore if explore is None else explore
        check_number("timeout", timeout, optional=True)
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
            self._tell_connectors(explore)
            self._begin(demand, force_reset=force_reset)
            sample = sampler.sample(demand, deadline, explore, config.unique(self._num_samples))
            self._num_samples += 1
            self.metrics.add_steps(
                env_steps=sample.env_steps,
                agent_steps=sample.agent_steps,
                module_steps={name: len(batch) for name, batch in sample.policy_batches.items()},
            )
            with naming("on_sample_end"):
                config.callbacks.on_sample_end(sample=sample)
        except BaseException as exc:
            self._lost_track = not isinstance(exc, SimulatorError)
            if self._envs.closed and isinstance(exc, Exception):
                raise ClosedEnvironmentError("`EnvRunner` was stopped during a sample.") from exc
            raise
        return sample

    def serve(self, seconds: float, *, explore: bool | None = None) -> None:
        """Answer the simulators of its bridges for some time, without sampling.

        The rows wait for the next sample: see `RunnerConfig.max_waiting_steps`.

        Args:
            seconds: How long.
            explore: None: as configured.

        Raises:
            ConfigError: It has no bridge.
            Exception: As from `sample`.
        """
        self._assert_open()
        check_number("seconds", seconds)
        self._serve(time.monotonic() + seconds, explore, lambda: False)

    @contextmanager
    def serving(self, *, explore: bool | None = None) -> Iterator[None]:
        """Answer the simulators of its bridges in a thread, while the block runs.

            with runner.serving():
                train(sample)  # must not change what the policies read, but by `set_weights`

        The runner cannot be used meanwhile, except for `set_weights` and what only reads.

        Raises:
            ConfigError: It has no bridge.
            Exception: As from `sample`, at the end of the block.
        """
        self._assert_open()
        self._bridged()
        server = ServingThread(lambda is_over: self._serve(math.inf, explore, is_over))
        self._server = server
        try:
            server.start()
            yield
        finally:
            self._end_serving()
        server.raise_error()

    # --- about it ----------------------------------------------------------------------------

    def get_spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as the envs have them."""
        return self._envs.spaces()

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
                f"envs {lost} of {self._envs.num_envs} failed too often and were given up; the "
                "pool's hooks and the log say why"
            )

    def stop(self) -> None:
        """Close the envs, and finish videos. Idempotent."""
        self._end_serving()
        self._finish_videos()
        self._envs.close()

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end_serving()
        self._finish_videos()
        self._envs.close(terminate=exc is not None)

    # --- private -----------------------------------------------------------------------------

    def _make_sampler(self) -> ColumnSampler | DictSampler:
        config = self.config
        if config.video is not None:
            self._finish_videos()
            self._recorder = VideoRecorder(
                config.video, config.callbacks, self._envs.get_sub_environments(), self.timers
            )
            config = dataclasses.replace(config, callbacks=self._recorder)
        self._tell_policies()
        return make_sampler(
            self._envs,
            config,
            lambda: self._policies.by_id,
            self.metrics,
            self.timers,
            self._make_column,
            self._asking,
        )

    def _tell_connectors(self, explore: bool) -> None:
        for connector in self.config.connectors().values():
            connector.is_evaluated = not explore

    def _finish_videos(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _begin(self, demand: Demand, *, force_reset: bool) -> None:
        """See that the episodes that run are ones that this sample can go on with."""
        sampler = self._sampler
        if not self._begun:
            for env_id in range(self._envs.num_envs):
                with naming("on_sub_environment_created"):
                    self.config.callbacks.on_sub_environment_created(env_id=env_id, incarnation=0)
            seed = self.config.seed
            sampler.reset(restart_seed(seed, 0, self._renewals) if self._renewals else seed)
            self._begun = True
        elif force_reset or self._lost_track or (demand.complete and sampler.has_cut_episode()):
            sampler.reset(None)
        self._give_up_lost(force_reset=force_reset)

    def _give_up_lost(self, *, force_reset: bool = False) -> None:
        """Give up the episodes of bridges of which nobody knows what they are at."""
        if (force_reset or self._lost_track) and isinstance(self._sampler, DictSampler):
            self._sampler.give_up()
        self._lost_track = False

    def _serve(self, deadline: float, explore: bool | None, is_over: Callable[[], bool]) -> None:
        sampler = self._bridged()
        explore = self.config.explore if explore is None else explore
        try:
            self._tell_connectors(explore)
            self._give_up_lost()
            sampler.serve(deadline, explore, is_over)
        except BaseException as exc:
            self._lost_track = not isinstance(exc, SimulatorError)
            raise

    def _end_serving(self) -> None:
        """See that no other thread uses the envs."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def _bridged(self) -> DictSampler:
        if not self._envs.bridges:
            raise ConfigError("serve: there is no bridge whose simulators could be answered")
        return self._general("serve")

    def _assert_open(self) -> None:
        if self._envs.closed:
            raise ClosedEnvironmentError("Trying to operate on `EnvRunner`, after `stop()`.")
        if self._server is not None:
            if not self._server.is_over:
                text = "the runner is serving; leave `serving` first"
                raise AlreadyPendingCallError(text, "serving")
            self._end_serving()  # Ctrl-C broke off the wait for it
