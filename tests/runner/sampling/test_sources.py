from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from envbus.runner.pool.agent_results import PollResult
from envbus.runner.sampling.sources import EnvNumbers, Polled, poll_any

#: No number of a descriptor that select(2) takes is so high.
_FD_SETSIZE = 1024


class Fake:
    """Brings an env when it was told to; is looked at as often as is counted."""

    def __init__(self, env_id: int) -> None:
        self.env_id = env_id
        self.ready = False
        self.looks = 0
        self.ear, self.mouth = os.pipe()

    def tell(self) -> None:
        self.ready = True
        os.write(self.mouth, b".")

    def fileno(self) -> int:
        return self.ear

    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        self.looks += 1
        result = PollResult({}, {}, {}, {}, {}, {})
        result.faults, result.late, result.incarnations = [], [self.env_id], {}
        if self.ready:
            result.observations[self.env_id] = {}
        return Polled(result)


@pytest.fixture
def fakes() -> Iterator[Any]:
    both = [Fake(0), Fake(1)]
    yield both
    for fake in both:
        os.close(fake.ear)
        os.close(fake.mouth)


def test_whoever_is_ready_comes_alone_and_who_is_first_changes(fakes: Any) -> None:
    for fake in fakes:
        fake.tell()
    assert [list(poll_any(fakes, None, 1, turn).result.observations) for turn in range(4)] == [
        [0],
        [1],
        [0],
        [1],
    ]
    assert [fake.looks for fake in fakes] == [2, 2]


def test_nobody_else_is_late_when_somebody_comes(fakes: Any) -> None:
    fakes[1].tell()
    polled = poll_any(fakes, None, 1, 0)
    assert (list(polled.result.observations), polled.result.late) == ([1], [])


def test_at_the_deadline_all_are_late(fakes: Any) -> None:
    assert poll_any(fakes, 0.0, 1, 0).result.late == [0, 1]
    assert [fake.looks for fake in fakes] == [1, 1]


def test_sources_with_descriptors_of_high_numbers_are_waited_for(fakes: Any) -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, _FD_SETSIZE + 64), most))
    try:
        for fake in fakes:
            low, fake.ear = fake.ear, fcntl.fcntl(fake.ear, fcntl.F_DUPFD_CLOEXEC, _FD_SETSIZE)
            os.close(low)
        polled = poll_any(fakes, time.monotonic() + 0.01, 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert polled.result.late == [0, 1]


def test_numbers_of_envs_are_the_lowest_that_are_free() -> None:
    numbers = EnvNumbers(5)
    assert [numbers.take() for _ in range(4)] == [5, 6, 7, 8]
    for number in (7, 5):
        numbers.give_back(number)
    assert [numbers.take() for _ in range(3)] == [5, 7, 9]
