"""Which workload is stepped with how many envs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbus.bench.adapters.workloads import TEAMS, WORKLOADS
from envbus.bench.steps.variants import Role, Variant

__all__ = [
    "ALL_CASES",
    "QUICK_CASES",
    "Case",
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
