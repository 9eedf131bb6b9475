"""Proves what a pool promises, from what envs applied and what the driver saw. Pure.

For every env and life of it: each action was applied at most once; each applied step was
delivered exactly once, or its episode was reported as faulty; all came in order; and nothing was
mixed between envs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

__all__ = [
    "NOTHING_NOTED",
    "NOT_MIXED",
    "RESET",
    "RULES",
    "Audit",
    "Delivered",
    "EnvRecord",
    "Event",
    "Faulty",
    "Rule",
    "Sent",
    "Violation",
    "audit_env",
    "note_of",
    "reward_of",
]

#: The nonce of a reset: it carries no action.
RESET = 0
#: What `Delivered.noted` is where the info says nothing.
NOTHING_NOTED = -1
#: Violations of one env that are told; one mistake brings many in its train.
_MOST_TOLD = 20


class EnvRecord(msgspec.Struct, frozen=True, gc=False):
    """An env's own record of a step or reset, made before the env does anything else."""

    #: Random number of the env object.
    life: int
    #: Steps and resets of this life so far, this one included.
    count: int
    #: Number of the action, unique in the run; `RESET` for a reset.
    nonce: int


class Sent(msgspec.Struct, frozen=True, gc=False):
    """The driver handed an action to the pool."""

    nonce: int


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """The driver got a row."""

    #: What the observation says of itself.
    env_id: int
    life: int
    count: int
    nonce: int
    #: What the pool says of the row.
    incarnation: int
    reward: int
    over: bool
    noted: int


class Faulty(msgspec.Struct, frozen=True, gc=False):
    """The pool reported that the env's episode ended by a fault, its `restarts`-th one."""

    restarts: int


Event: TypeAlias = Sent | Delivered | Faulty


class Rule(NamedTuple):
    """One thing that is promised. The fields are for people."""

    name: str
    promise: str


APPLIED_ONCE = Rule("applied once", "an action is applied at most once")
APPLIED_AS_SENT = Rule("applied as sent", "an env applies its own actions, in order")
LIVES_APART = Rule("lives apart", "a life is over when the next one begins, and counts by one")
DELIVERED_ONCE = Rule("delivered once", "a step is delivered at most once")
DELIVERED_TRUE = Rule("delivered true", "what is delivered is what the env made of that action")
DELIVERED_ALL = Rule("delivered all", "an applied step is delivered, or its episode is faulty")
IN_ORDER = Rule("in order", "the steps of a life are delivered in order, without a gap")
FAULT_TOLD = Rule("fault told", "a life ends by a fault that is reported, and once only")
COMES_BACK = Rule("comes back", "after a fault the env's next life is delivered")
NOT_MIXED = Rule("not mixed", "what one env did is not delivered as another's")

RULES = (
    *(APPLIED_ONCE, APPLIED_AS_SENT, LIVES_APART, DELIVERED_ONCE, DELIVERED_TRUE),
    *(DELIVERED_ALL, IN_ORDER, FAULT_TOLD, COMES_BACK, NOT_MIXED),
)


class Audit(NamedTuple):
    """What an audit of one env found."""

    #: The first `_MOST_TOLD` of them.
    violations: list[Violation]
    #: Lives that ended without a fault, between two episodes: their actor was recycled.
    recycled: int


class Violation(NamedTuple):
    """A promise that was not kept."""

    env_id: int
    rule: Rule
    detail: str

    def __str__(self) -> str:
        return f"env {self.env_id}: {self.rule.promise}; but {self.detail}"


def reward_of(nonce: int) -> int:
    """Return the reward of the step that applies this action; 0 for a reset."""
    return 0 if nonce == RESET else nonce % 1009 + 1


def note_of(nonce: int) -> int:
    """Return what the info of that step says; most say nothing."""
    return nonce if nonce != RESET and nonce % 3 == 0 else NOTHING_NOTED


def audit_env(env_id: int, events: Sequence[Event], applied: Sequence[EnvRecord]) -> Audit:
    """Return what is wrong with one env.

    Args:
        env_id: Which env.
        events: What the driver saw of it, in its order.
        applied: What it applied, over all its lives, in its order.
    """
    audit = _Audit(env_id, applied)
    audit.check_applied(applied, {event.nonce for event in events if isinstance(event, Sent)})
    for event in events:
        if isinstance(event, Sent):
            audit.on_sent(event)
        elif isinstance(event, Faulty):
            audit.on_faulty(event)
        else:
            audit.on_delivered(event)
    audit.finish(applied)
    return Audit(audit.violations[:_MOST_TOLD], audit.recycled)


@dataclass
class _LifeAudit:
    """What was delivered of one life."""

    count: int = 0
    #: Whether the last row ended an episode, so that the next action is not applied.
    over: bool = False
    #: Whether a fault that was reported ended it.
    ended: bool = False


class _Audit:
    def __init__(self, env_id: int, applied: Iterable[EnvRecord]) -> None:
        self.violations: list[Violation] = []
        self._env_id = env_id
        self._nonces = {(row.life, row.count): row.nonce for row in applied}
        self._lives: dict[int, _LifeAudit] = {}
        self._present: int | None = None
        #: Number of the present life: faults and recyclings so far.
        self._number = 0
        self.recycled = 0
        #: Whether a fault was reported, and no row came since.
        self._broken = False
        #: The action that has no answer yet.
        self._pending: int | None = None

    def check_applied(self, applied: Sequence[EnvRecord], sent: set[int]) -> None:
        """Check the env's own record by itself."""
        nonces = [row.nonce for row in applied if row.nonce != RESET]
        for nonce, times in Counter(nonces).items():
            if times > 1:
                self._blame(APPLIED_ONCE, f"action {nonce} was applied {times} times")
            if nonce not in sent:
                self._blame(APPLIED_AS_SENT, f"action {nonce} was not sent to it")
        if nonces != sorted(nonces):
            self._blame(APPLIED_AS_SENT, "it applied actions in another order")
        counts: dict[int, int] = {}
        former: int | None = None
        for row in applied:
            if row.life != former and row.life in counts:
                self._blame(LIVES_APART, f"life {row.life:x} went on after another had begun")
            if row.count != counts.get(row.life, 0) + 1:
                self._blame(LIVES_APART, f"life {row.life:x} jumps to count {row.count}")
            if (row.count == 1) and row.nonce != RESET:
                self._blame(LIVES_APART, f"life {row.life:x} begins with a step")
            counts[row.life] = row.count
            former = row.life

    def on_sent(self, event: Sent) -> None:
        """The driver sends only to envs that have answered."""
        if self._pending is not None:
            self._blame(DELIVERED_ALL, f"action {self._pending} was never answered")
        self._pending = event.nonce

    def on_faulty(self, event: Faulty) -> None:
        """The present life is over."""
        if not self._take_number(event.restarts):
            self._blame(
                FAULT_TOLD,
                f"the fault of life number {self._number} was reported as {event.restarts}",
            )
        self._number += 1
        self._broken = True
        self._pending = None
        if self._present is not None:
            self._lives[self._present].ended = True

    def on_delivered(self, row: Delivered) -> None:
        """Check a row against what was sent, applied and delivered before."""
        text = f"count {row.count} of life {row.life:x}"
        if row.env_id != self._env_id:
            self._blame(NOT_MIXED, f"it was given {text} of env {row.env_id}")
            return
        recycled = False
        if row.incarnation != self._number:
            recycled = row.life != self._present and self._take_number(row.incarnation)
            if not recycled:
                self._blame(
                    FAULT_TOLD, f"{text} is of life number {row.incarnation}, not {self._number}"
                )
        nonce = self._nonces.get((row.life, row.count))
        if nonce is None:
            self._blame(DELIVERED_TRUE, f"{text} was never applied")
        elif nonce != row.nonce:
            self._blame(DELIVERED_TRUE, f"{text} applied action {nonce}, not {row.nonce}")
        if (row.reward, row.noted) != (reward_of(row.nonce), note_of(row.nonce)):
            self._blame(
                DELIVERED_TRUE,
                f"{text} has action {row.nonce}, reward {row.reward} and info {row.noted}",
            )
        if row.life == self._present:
            self._on_same_life(row, text)
        else:
            self._on_next_life(row, text, recycled=recycled)
        self._present = row.life
        life = self._lives.setdefault(row.life, _LifeAudit())
        life.count, life.over = max(row.count, life.count), row.over
        self._pending = None
        self._broken = False

    def _on_same_life(self, row: Delivered, text: str) -> None:
        life = self._lives[row.life]
        if row.count <= life.count:
            self._blame(DELIVERED_ONCE, f"{text} came after count {life.count}")
        elif row.count > life.count + 1:
            self._blame(IN_ORDER, f"{text} came after count {life.count}")
        if self._broken:
            self._blame(FAULT_TOLD, f"{text} came after a fault had ended that life")
        elif self._pending is None:
            self._blame(DELIVERED_ONCE, f"{text} came without being asked for")
        elif row.nonce != (RESET if life.over else self._pending):
            self._blame(
                DELIVERED_TRUE, f"{text} answers action {self._pending} with action {row.nonce}"
            )

    def _on_next_life(self, row: Delivered, text: str, *, recycled: bool) -> None:
        if row.life in self._lives:
            self._blame(DELIVERED_ONCE, f"{text} came after a later life")
        elif self._present is not None and not self._broken and not recycled:
            self._blame(FAULT_TOLD, f"{text} came, and the end of the life before was not reported")
        elif row.count != 1:
            self._blame(IN_ORDER, f"{text} was the first of its life that came")

    def finish(self, applied: Sequence[EnvRecord]) -> None:
        """Check that nothing is missing at the end."""
        if self._pending is not None:
            self._blame(DELIVERED_ALL, f"action {self._pending} was never answered")
        if self._broken:
            self._blame(COMES_BACK, "it did not")
        if self._present is None:
            self._blame(COMES_BACK, "nothing of it was ever delivered")
        lengths: dict[int, int] = {}
        for row in applied:
            lengths[row.life] = max(row.count, lengths.get(row.life, 0))
        for place, (number, length) in enumerate(lengths.items()):
            life = self._lives.get(number)
            if life is None:
                # Its first reset was applied, and it failed before that was told: another life
                # came before, and one follows.
                if length > 1 or not self._number or place == len(lengths) - 1:
                    self._blame(DELIVERED_ALL, f"nothing of life {number:x} was delivered")
            elif length > life.count + life.ended:
                self._blame(
                    DELIVERED_ALL,
                    f"life {number:x} applied {length}, and {life.count} were delivered",
                )

    def _take_number(self, number: int) -> bool:
        """Return whether a life may have this number, one more if its actor was recycled.

        That happens between two episodes only, or while the env does not work.
        """
        if number == self._number + 1:
            life = None if self._present is None else self._lives[self._present]
            if self._broken or (life is not None and life.over):
                self._number = number
                self.recycled += 1
        return number == self._number

    def _blame(self, rule: Rule, detail: str) -> None:
        self.violations.append(Violation(self._env_id, rule, detail))
