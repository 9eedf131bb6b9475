"""What an adapter gives the harness: something to run, timed the same way for all.

Needs NumPy only: it runs in every library's own virtual environment.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Broken",
    "Killable",
    "Measurement",
    "Opening",
    "Recovered",
    "Stepper",
    "Timed",
    "measurement_of",
]


@dataclass(frozen=True)
class Opening:
    """What to construct: a workload, how many envs of it, and the variant's options."""

    workload: str
    num_envs: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One timed run. Durations in seconds, latencies in microseconds of one vector step."""

    env_steps: int
    seconds: float
    vector_steps: int
    latency_p50_us: float
    latency_p99_us: float


@dataclass(frozen=True)
class Recovered:
    """A worker process was killed, and its envs came back by themselves. Durations in seconds."""

    #: From the kill until each of its envs has made a step again.
    seconds: float
    #: Env steps of the other workers, and how long they were counted: `before` the kill, `during`
    #: the recovery, and for as long with the worker's envs merely `not_asked`, by itself and with
    #: a `core_lost` to something else. Empty in lockstep, where all wait for all.
    others: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """A worker process was killed, and stepping failed. Durations in seconds."""

    #: Qualified name of the exception, or `"hangs"`.
    raised: str
    #: From the kill until it was raised.
    surfaced: float
    #: Other worker processes that were still there then.
    left: int
    #: To end the workers that are left, construct anew, reset, and make a step.
    by_hand: float
    #: What became of a plain `close()`: empty, the qualified name of what it raised, or `"hangs"`.
    #: Then the workers are ended by force, and `by_hand` is from there.
    close_error: str = ""


class Timed(ABC):
    """Opened envs, after their first reset, and whatever goes through them."""

    @abstractmethod
    def run(self, ring: Sequence[npt.NDArray[Any]], seconds: float) -> Measurement:
        """Go on for `seconds` of wall time.

        Args:
            ring: Actions `(num_envs, *action_shape)` of successive steps, round and round; for
                those that do not choose their own.
            seconds: The last step or fragment is finished.
        """

    @abstractmethod
    def close(self) -> None:
        """End the library's processes."""


@runtime_checkable
class Killable(Protocol):
    """Takes part in the comparison of what becomes of a killed worker."""

    def kill_one(self, ring: Sequence[npt.NDArray[Any]]) -> Recovered | Broken:
        """Kill one worker process with SIGKILL, and see what comes of it."""


class Stepper(Timed):
    """A vector of envs that is stepped with the actions that are given."""

    @abstractmethod
    def step(self, actions: npt.NDArray[Any]) -> int:
        """Make one vector step, with whatever the library needs for autoreset.

        Args:
            actions: `(num_envs, *action_shape)`.

        Returns:
            How many envs were stepped: all of them, or fewer where the library hands back the
            first that are ready.
        """

    def run(self, ring: Sequence[npt.NDArray[Any]], seconds: float) -> Measurement:
        """Step for `seconds` of wall time with the actions of `ring`, round and round."""
        step, clock = self.step, time.perf_counter_ns
        latencies: list[int] = []
        env_steps, count, length = 0, 0, len(ring)
        start = now = clock()
        end = start + int(seconds * 1e9)
        while now < end:
            env_steps += step(ring[count % length])
            count += 1
            before, now = now, clock()
            latencies.append(now - before)
        return measurement_of(env_steps, latencies, (now - start) / 1e9)


def measurement_of(env_steps: int, latencies_ns: Sequence[int], seconds: float) -> Measurement:
    """Return the measurement of a run whose vector steps took `latencies_ns`."""
    p50, p99 = np.percentile(np.asarray(latencies_ns, np.float64), [50, 99]) / 1e3
    return Measurement(
        env_steps=env_steps,
        seconds=seconds,
        vector_steps=len(latencies_ns),
        latency_p50_us=round(float(p50), 2),
        latency_p99_us=round(float(p99), 2),
    )
