"""When processes that hang are asked where they are."""

from __future__ import annotations

from envbus.bus.errors import EnvbusError
from envbus.runner.monitoring.hung import HungLines
from envbus.runner.monitoring.observer import ObservedRun
from tests.runner.monitoring_scenes import actor, observed

STACK = """\
Current thread 0x0 (most recent call first):
  File "/home/me/sims/env.py", line 12 in step
"""


class Clock:
    """Notes who is asked; each answer takes some seconds."""

    def __init__(self, takes: float = 0.0, text: str = STACK) -> None:
        self.takes = takes
        self.text = text
        self.now = 0.0
        self.asked: list[int] = []

    def stacks(self, pid: int) -> str:
        self.asked.append(pid)
        self.now += self.takes
        return self.text

    def lines(self) -> HungLines:
        return HungLines(self.stacks, lambda: self.now)


def hanging(**stalled: float) -> list[ObservedRun]:
    """Return a look at actors by their names, `a0=3.0`, that hang for so many seconds."""
    numbers = {int(name[1:]): seconds for name, seconds in stalled.items()}
    return [observed(*map(actor, numbers), stalled=numbers)]


def test_who_hangs_is_asked_where_it_is() -> None:
    lines = Clock().lines()
    assert lines.look(hanging(a0=2.0, a1=0.5)) == {1000: "sims/env.py:12 in step"}


def test_who_is_known_is_asked_again_when_it_has_hung_twice_as_long() -> None:
    clock = Clock()
    lines = clock.lines()
    asked = []
    for seconds in range(2, 20):
        clock.asked.clear()
        assert 1000 in lines.look(hanging(a0=float(seconds)))
        asked += [seconds] * len(clock.asked)
    assert asked == [2, 4, 8, 16]


def test_who_has_stepped_meanwhile_is_asked_anew_and_who_is_well_forgotten() -> None:
    clock = Clock()
    lines = clock.lines()
    for stalled in (10.0, 1.5, 0.0, 1.5):
        lines.look(hanging(a0=stalled))
    assert len(clock.asked) == 3
    assert lines.look(hanging(a0=0.0)) == {}


def test_a_look_takes_no_longer_than_can_be_borne_and_the_next_one_goes_on() -> None:
    clock = Clock(takes=0.3)
    lines = clock.lines()
    runs = hanging(a0=2.0, a1=5.0, a2=3.0)
    assert set(lines.look(runs)) == {1001, 1002}  # who hangs for the longest time first
    assert set(lines.look(runs)) == {1000, 1001, 1002}
    assert clock.asked == [1001, 1002, 1000]


def test_a_process_without_a_stack_says_why() -> None:
    clock = Clock(text="no stack of process 1000: it was stopped (SIGSTOP)")
    assert clock.lines().look(hanging(a0=2.0)) == {1000: "it was stopped (SIGSTOP)"}


def test_a_process_that_cannot_be_asked_has_no_line() -> None:
    def refuse(pid: int) -> str:
        raise EnvbusError("gone")

    assert HungLines(refuse).look(hanging(a0=2.0)) == {1000: ""}
