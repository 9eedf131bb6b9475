"""Which workload is stepped with how many envs, and how often it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envbus.bench.variants import Role, Variant
from envbus.bench.workloads import TEAMS, WORKLOADS

__all__ = [
    "ALL_CASES",
    "FULL",
    "QUICK",
    "QUICK_CASES",
    "REQUESTS",
    "REQUESTS_QUICK",
    "Case",
    "Schedule",
    "parse_case",
]


@dataclass(frozen=True)
class Case:
    """One block of rows: a workload with a number of envs."""

    workload: str
    num_envs: int

    @property
    def name(self) -> str:
        """Short name, as on the command line: `null:64`."""
        return f"{self.workload}:{self.num_envs}"

    def options(self, variant: Variant) -> dict[str, Any]:
        """Return the variant's options in this case.

        Envs that wait rather than compute want a process each; the number of actors is the
        caller's choice, and a user would make it. Every other case runs with the default.
        """
        if variant.role is Role.OURS and self.workload == "jitter":
            return {**variant.options, "num_actors": "num_envs"}
        return variant.options


def parse_case(text: str) -> Case:
    """Return the case named `text`, e.g. `"null:64"`.

    Raises:
        ValueError: No such workload, or no number of envs.
    """
    workload, _, number = text.partition(":")
    known = [*WORKLOADS, *TEAMS]
    if workload not in known or not number.isdigit() or int(number) < 1:
        raise ValueError(
            f"case {text!r} is not understood; write WORKLOAD:NUM_ENVS with one of "
            f"{', '.join(known)}"
        )
    return Case(workload, int(number))


_NUM_ENVS = {
    "null": (1, 8, 64, 256),
    "cartpole": (1, 8, 64, 256),
    "pixels": (1, 8, 64, 256),
    "dict": (1, 8, 16, 64),
    "infos": (8, 64),
    # Episodes of four steps, and the next one begins in the step that ends one.
    "short": (64,),
    "frame": (16,),
    # Heavier envs: at 256 a start alone takes long, and the picture is that of 64.
    "halfcheetah": (1, 8, 64),
    "pong": (1, 8, 64),
    "burn": (16,),
    "blas": (8,),
    "jitter": (16, 64),
}
ALL_CASES = tuple(Case(workload, n) for workload, numbers in _NUM_ENVS.items() for n in numbers)
QUICK_CASES = (Case("null", 1), Case("null", 8), Case("null", 64), Case("cartpole", 8))


@dataclass(frozen=True)
class Schedule:
    """How long and how often everything is timed."""

    #: Rounds per case; in each, every variant runs once.
    rounds: int
    #: Seconds of one timed run, and of the untimed steps before it: caches and cores wake up.
    seconds: float
    warm_up: float
    #: Starts of each variant in the start-up benchmark.
    starts: int
    #: Decides the order within each round.
    seed: int = 0
    #: Workloads whose rounds are longer, and how many times.
    times_as_long: Mapping[str, float] = field(default_factory=dict)

    def of(self, workload: str) -> Schedule:
        """Return the schedule of one workload's rounds."""
        times = self.times_as_long.get(workload, 1.0)
        return replace(self, seconds=times * self.seconds, warm_up=times * self.warm_up)

    def order(self, name: object) -> np.random.Generator:
        """Return what shuffles the rounds of the case of that name: the same each time."""
        return np.random.default_rng([self.seed, *str(name).encode()])


#: 5 rounds: quartiles mean something, one bad round cannot move the median, and all cases
#: together take an hour and a half.
FULL = Schedule(rounds=5, seconds=1.0, warm_up=0.15, starts=3)
QUICK = Schedule(rounds=3, seconds=0.3, warm_up=0.05, starts=2)
#: For single requests: a second holds thousands, enough for a 99th percentile. Some minutes.
REQUESTS = Schedule(rounds=7, seconds=1.0, warm_up=0.3, starts=0)
REQUESTS_QUICK = Schedule(rounds=3, seconds=0.3, warm_up=0.1, starts=0)
