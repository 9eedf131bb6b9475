"""The measured loop: steps a vector env with a policy and counts what happens.

Leaves out who makes the vector env; Gymnasium's own are measured by the same loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from envbus.actors.spaces.spaces import is_fixed_size
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.batches.nested import as_rows
from envbus.runner.policies.policy import PolicyFactory

__all__ = ["EpisodeCounts", "Limits", "Measured", "OnProgress", "Progress", "Stepping"]

#: Seconds between two reports of progress.
_REPORT_EVERY = 0.25


class Limits(msgspec.Struct, frozen=True):
    """When to stop: at whichever is reached first. One of them is set."""

    #: Env steps.
    steps: int | None = None
    seconds: float | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one vector env did. Means and quantiles are None where nothing was counted."""

    #: "envbus", or the class of Gymnasium's that was stepped instead.
    backend: str
    #: Seconds from the call that makes the vector env to the first observation.
    start_seconds: float
    #: Wall time of the stepping, the policy's included.
    seconds: float
    vector_steps: int
    #: Steps that envs took; those of an autoreset, which only reset, are left out.
    env_steps: int
    env_steps_per_second: float
    episodes: int
    #: Episodes that a failure cut off.
    lost_episodes: int
    mean_return: float | None
    mean_length: float | None
    #: Milliseconds of one `step` of the vector env.
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    #: Actor processes that were started again; None where nobody would.
    restarts: int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run of one vector env is."""

    backend: str
    #: From 0 to 1.
    fraction: float
    seconds: float
    env_steps: int
    episodes: int
    restarts: int | None = None
    #: Process id of the actor that was killed just now.
    killed: int | None = None


OnProgress: TypeAlias = Callable[[Progress], None]


class EpisodeCounts:
    """Sums over the episodes of `num_envs` envs, at a few array operations per vector step.

    In NEXT_STEP mode the step after the end of an episode only resets the env, and is none.

    Attributes:
        env_steps: Steps that the envs took.
        episodes: Those that ended by themselves; `returns` and `length` are sums over these.
        lost: Those that an env's or an actor's failure cut off.
    """

    def __init__(self, num_envs: int, autoreset_mode: AutoresetMode) -> None:
        self.env_steps = self.episodes = self.lost = self.length = 0
        self.returns = 0.0
        self._resets_by_step = autoreset_mode is AutoresetMode.NEXT_STEP
        #: Of the episodes that run.
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        #: Envs whose next step belongs to no episode.
        self._idle: npt.NDArray[np.bool_] = np.zeros(num_envs, np.bool_)

    def update(
        self,
        rewards: npt.NDArray[Any],
        terminations: npt.NDArray[np.bool_],
        truncations: npt.NDArray[np.bool_],
        lost: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in one vector step, `(num_envs,)` each; `lost` is read where an episode ends."""
        acting = ~self._idle
        self.env_steps += int(np.count_nonzero(acting))
        np.add(self._returns, rewards, out=self._returns, where=acting)
        self._lengths += acting
        ended = terminations | truncations
        finished = ended & acting
        if self._resets_by_step:
            # Not `finished`: an actor that dies during a reset is reset once more.
            self._idle = ended
        if not finished.any():
            return
        counted = finished if lost is None else finished & ~lost
        num_counted = int(np.count_nonzero(counted))
        self.episodes += num_counted
        self.lost += int(np.count_nonzero(finished)) - num_counted
        self.returns += float(self._returns[counted].sum())
        self.length += int(self._lengths[counted].sum())
        self._returns[finished] = 0.0
        self._lengths[finished] = 0


class Stepping:
    """One run of one vector env. What it counted can be read at any time, also half way.

    Args:
        backend: Name for the reports.
        make_policy: Makes what chooses the actions.
        on_progress: Called some times per second, between two steps.
        at_half_time: Called once when half of the limit is reached, with the vector env;
            returns the process id for the report's `killed`.
        restarts: Returns how many actors were started again so far.
    """

    def __init__(
        self,
        backend: str,
        make_policy: PolicyFactory,
        on_progress: OnProgress,
        *,
        at_half_time: Callable[[], int | None] | None = None,
        restarts: Callable[[], int] | None = None,
    ) -> None:
        self.backend = backend
        self.seconds = 0.0
        self.vector_steps = 0
        self._make_policy = make_policy
        self._on_progress = on_progress
        self._at_half_time = at_half_time
        self._restarts = restarts
        self._start_seconds = 0.0
        self._episodes = EpisodeCounts(0, AutoresetMode.NEXT_STEP)
        self._latencies = LatencyHistogram()

    def run(
        self,
        envs: VectorEnv[Any, Any, Any],
        limits: Limits,
        *,
        seed: int | None = None,
        made_at: float | None = None,
    ) -> None:
        """Reset the envs and step them until a limit is reached.

        Args:
            envs: Made, not yet reset, and left open. In NEXT_STEP or SAME_STEP mode.
            limits: When to stop.
            seed: For the envs and the policy.
            made_at: `time.perf_counter()` when the making of `envs` began.
        """
        clock = time.perf_counter
        made_at = clock() if made_at is None else made_at
        mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        episodes = self._episodes = EpisodeCounts(envs.num_envs, mode)
        observations, _ = envs.reset(seed=seed)
        most_steps = math.inf if limits.steps is None else limits.steps
        most_seconds = math.inf if limits.seconds is None else limits.seconds
        policy, step = self._make_policy(envs.single_action_space, seed), envs.step
        space = envs.observation_space
        fixed = is_fixed_size(envs.single_observation_space)
        add_latency, update = self._latencies.add, episodes.update
        begin = clock()
        self._start_seconds = begin - made_at
        report_at = begin + _REPORT_EVERY
        fraction = 0.0
        while fraction < 1.0:
            rows = observations if fixed else as_rows(list(iterate(space, observations)))
            actions = policy.compute_actions(rows, None).actions
            before = clock()
            observations, rewards, terminations, truncations, infos = step(actions)
            now = clock()
            add_latency(now - before)
            update(rewards, terminations, truncations, infos.get("_fault"))
            self.vector_steps += 1
            self.seconds = now - begin
            fraction = max(self.seconds / most_seconds, episodes.env_steps / most_steps)
            if fraction >= 0.5 and self._at_half_time is not None:
                killed = self._at_half_time()
                self._at_half_time = None
                self._report(fraction, killed)
            elif now >= report_at:
                report_at = now + _REPORT_EVERY
                self._report(fraction)

    def measured(self) -> Measured:
        """Return what was counted up to now."""
        counts = self._episodes
        count = counts.episodes
        return Measured(
            backend=self.backend,
            start_seconds=self._start_seconds,
            seconds=self.seconds,
            vector_steps=self.vector_steps,
            env_steps=counts.env_steps,
            env_steps_per_second=counts.env_steps / self.seconds if self.seconds else 0.0,
            episodes=count,
            lost_episodes=counts.lost,
            mean_return=counts.returns / count if count else None,
            mean_length=counts.length / count if count else None,
            latency_p50_ms=_milliseconds(self._latencies.quantile(0.5)),
            latency_p99_ms=_milliseconds(self._latencies.quantile(0.99)),
            restarts=self._count_restarts(),
        )

    def _report(self, fraction: float, killed: int | None = None) -> None:
        self._on_progress(
            Progress(
                backend=self.backend,
                fraction=min(fraction, 1.0),
                seconds=self.seconds,
                env_steps=self._episodes.env_steps,
                episodes=self._episodes.episodes,
                restarts=self._count_restarts(),
                killed=killed,
            )
        )

    def _count_restarts(self) -> int | None:
        return None if self._restarts is None else self._restarts()


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
