"""Which env of a pool is hosted by which actor, and which envs are one vector env. No I/O.

Leaves out what envs are doing (`engine/env_states.py`).
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envbus.bus.settings import positive_int
from envbus.runner.workers.worker import Actor

__all__ = ["EnvPlacement", "as_ids"]


def as_ids(name: str, given: object) -> list[int]:
    """Return ids as ints. A mask is none: its bools would be taken for the ids 0 and 1.

    Raises:
        TypeError: They are something else; told by the argument's name.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a sequence of ids, [0, 3] for example; not {given!r}")
    ids = list(given)
    for one in ids:
        if isinstance(one, bool | np.bool_) or not hasattr(one, "__index__"):
            raise TypeError(
                f"{name} has integers, [0, 3] for example, not {one!r}; those of a mask are "
                "numpy.flatnonzero(mask)"
            )
    return [operator.index(one) for one in ids]


class EnvPlacement:
    """The envs of a pool, once its actors are started.

    Args:
        actors: All, in order.

    Attributes:
        units: The envs that are made and fail together: one, or those of one vector env.
        vector_groups: For each env that is part of a vector env, the ids of all envs of that one.
        remote_envs: Those whose actor is elsewhere.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = actors
        self._actor_of = [actor for actor in actors for _ in actor.env_ids]
        self.units = [unit for actor in actors for unit in actor.units()]
        self.vector_groups = {i: unit for unit in self.units for i in unit if len(unit) > 1}
        self.remote_envs = frozenset(i for actor in actors if actor.remote for i in actor.env_ids)

    def actor_of(self, env_id: int) -> Actor:
        """Return the actor that hosts an env."""
        return self._actor_of[env_id]

    def by_actor(self, env_ids: Sequence[int]) -> list[tuple[Actor, list[int]]]:
        """Group env ids by actor, in order, as vector envs want theirs."""
        ids = sorted(env_ids)
        groups, start = [], 0
        while start < len(ids):
            actor = self._actor_of[ids[start]]
            stop = bisect.bisect_left(ids, actor.env_ids.stop, start)
            groups.append((actor, ids[start:stop]))
            start = stop
        return groups

    def groups(self, count: int) -> list[list[int]]:
        """Share all envs out to groups of about one size, in order.

        The envs of each actor are spread over all groups, so that none is idle while one steps;
        those of one vector env stay together.

        Raises:
            ConfigError: `count` is no positive integer.
        """
        count = positive_int("count", count)
        groups: list[list[int]] = [[] for _ in range(count)]
        for actor in self._actors:
            units = actor.units()
            each, rest = divmod(len(units), count)
            first = 0
            # Whole blocks of neighbours; who has the fewest gets one that is left over.
            for place, group in enumerate(sorted(groups, key=len)):
                stop = first + each + (place < rest)
                group += [env_id for unit in units[first:stop] for env_id in unit]
                first = stop
        return groups

    def check_ids(self, env_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[int]:
        """Return env ids as ints.

        Raises:
            ValueError: One is unknown, or named twice.
            TypeError: One is not an integer.
        """
        num_envs = len(self._actor_of)
        if isinstance(env_ids, np.ndarray) and env_ids.dtype.kind == "i" and env_ids.ndim == 1:
            chosen: list[int] = env_ids.tolist()
        else:
            chosen = as_ids("env_ids", env_ids)
        distinct = len(set(chosen)) == len(chosen)
        if chosen and distinct and min(chosen) >= 0 and max(chosen) < num_envs:
            return chosen  # the usual case, without a look at each
        unknown = [i for i in chosen if not 0 <= i < num_envs]
        if unknown:
            raise ValueError(f"unknown env ids {unknown}; there are envs 0 to {num_envs - 1}")
        if not distinct:
            twice = sorted({i for i in chosen if chosen.count(i) > 1})
            raise ValueError(f"env ids {twice} are named more than once")
        return chosen

    def check_vector_groups(self, chosen: Sequence[int]) -> None:
        """Refuse a step of only some envs of one vector env, by a ValueError."""
        if not self.vector_groups:
            return
        for group in {self.vector_groups[i] for i in chosen if i in self.vector_groups}:
            missing = [i for i in group if i not in chosen]
            if missing:
                raise ValueError(
                    f"envs {group.start} to {group.stop - 1} are one vector env and step "
                    f"together, but {missing} are not named"
                )
