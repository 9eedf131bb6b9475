"""Histories of one env as a pool that keeps its promises would leave them, of any shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from envbus.runner.chaos.audit import (
    RESET,
    Delivered,
    EnvRecord,
    Event,
    Faulty,
    Sent,
    note_of,
    reward_of,
)

__all__ = ["ENV_ID", "History", "histories"]

ENV_ID = 3
#: What may happen to an action, and to an env between two.
STEP, END, LOST_BEFORE, LOST_AFTER, DIED_IDLE, DIED_IN_RESET, RECYCLED = range(7)


@dataclass
class History:
    """What one env applied and what the driver saw of it; begins with its first row."""

    applied: list[EnvRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    nonce: int = 100
    life: int = 0xA0
    count: int = 0
    #: Of the present life.
    number: int = 0
    recycled: int = 0
    over: bool = False

    def begin(self) -> None:
        """The first row of the next life."""
        self.life += 1
        self.count = 0
        self.over = False
        self.deliver(RESET)

    def apply(self, nonce: int) -> None:
        self.count += 1
        self.applied.append(EnvRecord(self.life, self.count, nonce))

    def deliver(self, nonce: int, *, over: bool = False) -> None:
        self.apply(nonce)
        self.events.append(row_of(self.applied[-1], self.number, over=over))
        self.over = over

    def send(self) -> int:
        self.nonce += 2
        self.events.append(Sent(self.nonce))
        return RESET if self.over else self.nonce

    def fail(self) -> None:
        self.events.append(Faulty(self.number))
        self.number += 1

    def happen(self, what: int) -> None:
        if what in (STEP, END):
            nonce = self.send()
            self.deliver(nonce, over=what == END and nonce != RESET)
        elif what == RECYCLED:
            if self.over:  # what is sent to one that is held is dropped
                self.send()
                self.number += 1
                self.recycled += 1
                self.begin()
        elif what == DIED_IDLE:
            self.fail()
            self.begin()
        else:
            nonce = self.send()
            if what != LOST_BEFORE:
                self.apply(nonce)
            self.fail()
            if what == DIED_IN_RESET:
                self.life += 1
                self.count = 0
                self.apply(RESET)
            self.begin()


def row_of(applied: EnvRecord, number: int, *, over: bool = False) -> Delivered:
    """Return the row that an env made by applying this."""
    return Delivered(
        env_id=ENV_ID,
        life=applied.life,
        count=applied.count,
        nonce=applied.nonce,
        incarnation=number,
        reward=reward_of(applied.nonce),
        over=over,
        noted=note_of(applied.nonce),
    )


def _history(happenings: list[int]) -> History:
    history = History()
    history.begin()
    for what in happenings:
        history.happen(what)
    return history


#: Histories of at least one applied and delivered step after at least one fault.
histories = st.tuples(
    st.lists(st.integers(0, 6), max_size=15), st.lists(st.integers(0, 6), max_size=15)
).map(lambda parts: _history([STEP, *parts[0], STEP, LOST_AFTER, STEP, STEP, *parts[1], STEP]))
