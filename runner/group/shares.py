"""How much each runner of a group is asked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from envbus.bus.settings import check_number
from envbus.runner.sampling import Demand, RunnerConfig

__all__ = ["Share", "share_out", "worker_index"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one runner is asked for; without a number, one fragment of each of its envs."""

    unit: Literal["env_steps", "episodes", "fragment"] = "fragment"
    amount: int = 0

    @classmethod
    def of(cls, num_env_steps: int | None, num_episodes: int | None) -> Share:
        """Return what a call asks for.

        Raises:
            ValueError: Both numbers are given, or one is negative.
        """
        if num_env_steps is not None and num_episodes is not None:
            raise ValueError("give num_env_steps or num_episodes, not both")
        amount = num_episodes if num_env_steps is None else num_env_steps
        if amount is None:
            return cls()
        name = "num_episodes" if num_env_steps is None else "num_env_steps"
        check_number(name, amount, whole=True)
        if amount < 0:
            raise ValueError(f"the number of steps or episodes must not be negative, got {amount}")
        return cls("episodes" if num_env_steps is None else "env_steps", amount)

    @property
    def num_env_steps(self) -> int | None:
        """As `EnvRunner.sample` takes it."""
        return self.amount if self.unit == "env_steps" else None

    @property
    def num_episodes(self) -> int | None:
        """As `EnvRunner.sample` takes it."""
        return self.amount if self.unit == "episodes" else None


def share_out(
    total: Share, num_envs: Sequence[int], owed: Sequence[Share | None], *, turn: int
) -> list[Share | None]:
    """Return what each of some runners is to be asked for; None: nothing.

    Each env contributes an equal part, wherever it is. Who has been asked before and has not
    delivered is not asked again: what it owes counts, so that the total comes out exactly.

    Args:
        total: Of all together.
        num_envs: Envs of each runner.
        owed: What each was asked for before; None: nothing.
        turn: Which env is the first to get one more, if the number does not divide.
    """
    free = [index for index, share in enumerate(owed) if share is None]
    shares: list[Share | None] = [None] * len(owed)
    if total.unit == "fragment" or not free:
        for index in free:
            shares[index] = total
        return shares
    coming = sum(share.amount for share in owed if share is not None and share.unit == total.unit)
    counts = [num_envs[index] for index in free]
    quotas = Demand.of(
        RunnerConfig(),
        np.ones(sum(counts), np.bool_),
        num_env_steps=max(total.amount - coming, 0),
        turn=turn,
    ).quotas
    for index, part in zip(free, np.split(quotas, np.cumsum(counts)[:-1]), strict=True):
        amount = int(part.sum())
        if amount:
            shares[index] = Share(total.unit, amount)
    return shares


def worker_index(first: int, index: int, incarnation: int, num_runners: int) -> int:
    """Return the `RunnerConfig.worker_index` of one life of one runner; no other life has it."""
    return first + index + num_runners * incarnation
