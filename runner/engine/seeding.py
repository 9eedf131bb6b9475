"""How seeds are spread over envs, and what an env gets after a restart. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Life", "restart_seed", "spread_seeds"]


def spread_seeds(
    seed: int | Sequence[int | None] | npt.NDArray[np.integer[Any]] | None,
    num_envs: int,
    env_ids: Sequence[int] | None = None,
) -> list[int | None]:
    """Return one seed per env: `seed + i`, as Gymnasium does, or the sequence's.

    Args:
        seed: For all envs, or one for each.
        num_envs: How many there are.
        env_ids: Which of them a sequence is for, in its order; None: all.

    Raises:
        ValueError: The sequence has another length than there are envs, or `env_ids`.
        TypeError: `seed` is neither an integer nor a sequence of integers and None.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + index for index in range(num_envs)]
    if not _is_sequence(seed):
        raise TypeError(f"a seed is an integer, a sequence with one per env, or None, not {seed!r}")
    if env_ids is not None and len(seed) != len(env_ids):
        raise ValueError(
            f"there are {len(seed)} seeds for {len(env_ids)} env_ids; give one, or None, for each"
        )
    if env_ids is None and len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got "
            f"length={len(seed)}."
        )
    for item in seed:
        if item is not None and not isinstance(item, int | np.integer):
            raise TypeError(f"a seed must be an integer or None, not {item!r}")
    seeds = [None if item is None else int(item) for item in seed]
    if env_ids is None:
        return seeds
    by_env = dict(zip(env_ids, seeds, strict=True))
    return [by_env.get(env_id) for env_id in range(num_envs)]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


class Life(IntEnum):
    """Whose life a seed is derived for. Each has seeds of its own, also with equal numbers."""

    ENV = 0
    #: All envs of a runner, after its envs or its sampler were made anew.
    SAMPLER = 1
    #: A runner of a group, as a process.
    RUNNER = 2


def restart_seed(
    seed: int | None, index: int, incarnation: int, life: Life = Life.ENV
) -> int | None:
    """Return the seed for the life `incarnation` of an env, or of `life`, from its last one.

    A run with the same faults repeats, and the episode that ended in a fault does not come
    back for ever. None if it was never seeded.
    """
    if seed is None:
        return None
    # NumPy takes no negative ones; envs may. A further word keeps -7 apart from 7.
    words = [abs(seed), index, incarnation, 2 * life + (seed < 0)]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
