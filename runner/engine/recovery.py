"""Which failed envs are made anew, when, with which seed, and which are given up. Pure.

One level below the restart of actors (`workers/lifecycle.py`): the env alone is closed and made
again in its actor, which goes on. Same policy, own budget. A *unit* is what fails and is made
together: one env, or all envs of one vector env.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from envbus.bus.supervision.restart import Exit, RestartPolicy
from envbus.bus.supervision.supervision import ChildGivenUp, StartChild, Supervision
from envbus.runner.engine.seeding import restart_seed

__all__ = ["Incarnations", "Recovery"]


class Incarnations:
    """Which life each env is in, and how each is seeded.

    A life ends when the env or its actor fails, or is exchanged for a fresh one.

    Attributes:
        numbers: `(num_envs,)` int64: lives that each env has begun after its first.
    """

    def __init__(self, num_envs: int) -> None:
        self.numbers = np.zeros(num_envs, np.int64)
        self._seeds: list[int | None] = [None] * num_envs

    def remember(self, env_id: int, seed: int | None) -> None:
        """Take in the seed that the caller gave; None leaves the former one."""
        if seed is not None:
            self._seeds[env_id] = seed

    def begin(self, env_ids: Iterable[int]) -> None:
        """These envs begin another life."""
        for env_id in env_ids:
            self.numbers[env_id] += 1

    def seeds(self, env_ids: Iterable[int]) -> list[int | None] | None:
        """Return what seeds the first reset of these envs' present lives; None: nothing does.

        Derived from the env's last seed, its id and the number of the life, so that a run with
        the same faults repeats.
        """
        derived = [
            restart_seed(self._seeds[env_id], env_id, int(self.numbers[env_id]))
            for env_id in env_ids
        ]
        return None if all(seed is None for seed in derived) else derived


class Recovery:
    """The failed envs of a pool.

    Args:
        units: Of all envs.
        policy: How often and how soon each unit is made anew.
        random: Returns a number from [0, 1), for the policy's jitter; None: no jitter.
    """

    def __init__(
        self,
        units: Sequence[range],
        policy: RestartPolicy,
        random: Callable[[], float] | None = None,
    ) -> None:
        self._unit_of = {env_id: unit for unit in units for env_id in unit}
        self._by_name = {_name(unit): unit for unit in units}
        self._supervision = Supervision(random)
        for unit in units:
            self._supervision.add(_name(unit), policy)
            self._works(unit, -math.inf)
        #: First ids of units that failed and do not work yet.
        self._broken: set[int] = set()
        #: Units whose pause is over.
        self._due: list[range] = []
        #: By first id of a unit: how often it failed that is not made anew any more.
        self._given_up: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether a unit has failed and does not work yet."""
        return bool(self._broken)

    def unit_of(self, env_id: int) -> range:
        """Return the envs that fail together with this one."""
        return self._unit_of[env_id]

    def failed(self, unit: range, detail: str, now: float) -> str | None:
        """An env of `unit` failed, or could not be made anew.

        Returns:
            None if it will be made anew, by `due`; else how often that was done in vain, and
            which setting allows more.
        """
        name = _name(unit)
        if unit.start in self._given_up:
            return self._given_up[unit.start]
        self._broken.add(unit.start)
        life = self._supervision.incarnation(name)
        for effect in self._supervision.on_exit(name, life, Exit.CRASH, now, detail):
            if isinstance(effect, ChildGivenUp):
                self._broken.discard(unit.start)
                self._given_up[unit.start] = effect.how_often
            else:
                self._take(effect, now)
        return self._given_up.get(unit.start)

    def due(self, now: float) -> list[range]:
        """Return the units to make anew now; each is told once per failure."""
        for effect in self._supervision.due(now):
            self._take(effect, now)
        due, self._due = self._due, []
        return due

    def wake_at(self) -> float | None:
        """Return by when `due` has something, or None if nothing is waited for."""
        return -math.inf if self._due else self._supervision.wake_at()

    def works(self, env_ids: Iterable[int], now: float) -> None:
        """These envs work: they were made anew, or their actor was started again."""
        for env_id in env_ids:
            unit = self._unit_of[env_id]
            self._broken.discard(unit.start)
            self._due = [other for other in self._due if other is not unit]
            self._works(unit, now)

    def restarts(self) -> int:
        """Return how often units were to be made anew so far."""
        return self._supervision.all_restarts()

    def _take(self, effect: StartChild, now: float) -> None:
        unit = self._by_name[effect.name]
        if unit.start in self._broken:
            self._due.append(unit)
        else:  # it came back with its actor meanwhile
            self._works(unit, now)

    def _works(self, unit: range, now: float) -> None:
        name = _name(unit)
        self._supervision.on_ready(name, self._supervision.incarnation(name), now)


def _name(unit: range) -> str:
    return f"env-{unit.start}"
