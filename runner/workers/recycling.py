"""When an actor is exchanged for a fresh one although it works: decided here, done elsewhere. Pure.

One at a time, at the end of episodes: when all envs of the actor are between two. In a pool, they
are held back for each other, of the one actor that has the *turn*; a vector env, whose envs step
together, takes any that is *due* when it happens to be. Leaves out how an actor is exchanged
(`lifecycle.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number

__all__ = ["RecycleAfter", "Recycling"]

#: An actor whose turn came to nothing gets none for so many times as long: its envs are then held
#: back for a tenth of the time at most.
_PAUSE_FACTOR = 9.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecycleAfter:
    """Limits of one actor process' life; the first one that it reaches ends it.

    Reached, an actor is exchanged for a fresh one between episodes, so that no step is lost; no
    fault is reported. No two actors are exchanged at the same time, and in the first round
    `episodes`, `steps` and `seconds` are less for some, to spread them evenly.

    Raises:
        ConfigError: None is given, or one is not positive.
    """

    #: Episodes that ended, in all of its envs together.
    episodes: int | None = None
    #: Steps of all of its envs together.
    steps: int | None = None
    #: Resident memory of its process and all below it, in MiB; looked at about once per second.
    rss_mb: float | None = None
    seconds: float | None = None
    #: Seconds that a pool holds back the envs of an actor whose episodes have ended, for those
    #: whose have not. Then they go on, and it is tried again after nine times as long. A vector
    #: env cannot hold back: after so many seconds it truncates the episodes that still run.
    max_hold: float = 30.0

    def __post_init__(self) -> None:
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in given.items():
            whole, optional = name in ("episodes", "steps"), name != "max_hold"
            name = f"RecycleAfter.{name}"
            check_number(name, value, whole=whole, over=0.0, finite=True, optional=optional)
        if all(value is None for name, value in given.items() if name != "max_hold"):
            raise ConfigError("RecycleAfter() needs one of episodes, steps, rss_mb or seconds")


@dataclass(slots=True)
class _Life:
    """What one actor's present process has done."""

    #: Fraction of the limits that it may use up.
    share: float = 1.0
    began_at: float = math.inf
    episodes: int = 0
    steps: int = 0
    rss_mb: float = 0.0
    #: It gets no turn before.
    not_before: float = -math.inf


class Recycling:
    """The actors of one pool and who has the turn to be exchanged.

    Times are in seconds of a clock that never goes back.

    Args:
        after: When an actor's turn comes.
        num_actors: They are called by their index.
    """

    def __init__(self, after: RecycleAfter, num_actors: int) -> None:
        self._after = after
        self._lives = [_Life((index + 1) / num_actors) for index in range(num_actors)]
        self._turn: int | None = None
        self._turn_since = 0.0
        self._leaving = False
        #: Who had the turn last.
        self._last = -1
        #: Nobody can be due before.
        self._look_at = -math.inf

    @property
    def max_hold(self) -> float:
        """Seconds that those whose episodes have ended wait for the others."""
        return self._after.max_hold

    @property
    def weighs(self) -> bool:
        """Whether it wants to know how much memory actors use."""
        return self._after.rss_mb is not None

    def begin(self, index: int, now: float) -> None:
        """An actor's process is ready: its first one, or another one for whatever reason."""
        life = self._lives[index]
        share = life.share if life.began_at == math.inf else 1.0
        self._lives[index] = _Life(share, now)
        self._look_at = -math.inf
        self._end_turn(index)

    def end(self, index: int) -> None:
        """An actor's process is gone, and not because it was asked to leave."""
        self._lives[index] = _Life()  # without a beginning it is never due
        self._end_turn(index)

    def count(self, index: int, steps: int, episodes: int) -> None:
        """An actor's envs made steps, and ended episodes, since it was last told."""
        life = self._lives[index]
        life.steps += steps
        life.episodes += episodes
        if self._is_spent(life):
            self._look_at = min(self._look_at, life.not_before)

    def weigh(self, index: int, rss_mb: float) -> None:
        """Take in how much memory an actor uses now, in MiB."""
        life = self._lives[index]
        life.rss_mb = rss_mb
        if self._is_spent(life):
            self._look_at = min(self._look_at, life.not_before)

    def due(self, now: float) -> list[int]:
        """Return all who are to be exchanged, by whose turn is next; nobody while one leaves."""
        if self._leaving or now < self._look_at:
            return []
        times = [self._due_at(life) for life in self._lives]
        number = len(times)
        in_turn = ((self._last + 1 + step) % number for step in range(number))
        found = [index for index in in_turn if times[index] <= now]
        if not found:
            self._look_at = min(times)
        return found

    def turn(self, now: float) -> int | None:
        """Return whose envs are to be held back, so that it is exchanged; None: nobody's.

        It keeps the turn until it leaves, passes it, or ends.
        """
        if self._turn is None and (found := self.due(now)):
            self._turn = self._last = found[0]
            self._turn_since = now
        return None if self._leaving else self._turn

    def hold_ends_at(self) -> float:
        """Return when the one who has the turn is to `pass_turn`; infinite if nobody has it."""
        if self._turn is None or self._leaving:
            return math.inf
        return self._turn_since + self._after.max_hold

    def pass_turn(self, now: float) -> None:
        """The one who has the turn does not come to a place between episodes; later again."""
        assert self._turn is not None
        assert not self._leaving
        self._lives[self._turn].not_before = now + _PAUSE_FACTOR * (now - self._turn_since)
        self._turn = None
        self._look_at = -math.inf

    def leave(self, index: int) -> None:
        """An actor was asked to leave; nobody else has a turn until its next life begins."""
        assert not self._leaving
        self._turn = self._last = index
        self._leaving = True

    def _end_turn(self, index: int) -> None:
        if self._turn == index:
            self._turn = None
            self._leaving = False
            self._look_at = -math.inf

    def _due_at(self, life: _Life) -> float:
        """Return when an actor may have its turn, as far as is known by now."""
        if life.began_at == math.inf:
            return math.inf
        if self._is_spent(life):
            return life.not_before
        if self._after.seconds is None:
            return math.inf
        return max(life.began_at + self._after.seconds * life.share, life.not_before)

    def _is_spent(self, life: _Life) -> bool:
        after = self._after
        return (
            (after.episodes is not None and life.episodes >= after.episodes * life.share)
            or (after.steps is not None and life.steps >= after.steps * life.share)
            or (after.rss_mb is not None and life.rss_mb >= after.rss_mb)
        )
