from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envbus.bus.errors import ConfigError
from envbus.runner.inference.policy_batching import Batcher, BatchingConfig, CallBatch, Piece

FAR = 1000.0


def batcher(max_batch: int = 4, max_wait: float = 1.0, max_rows_waiting: int = 100) -> Batcher:
    return Batcher(
        BatchingConfig(max_batch=max_batch, max_wait=max_wait, max_rows_waiting=max_rows_waiting)
    )


def test_nobody_waits_without_a_window() -> None:
    waiting = batcher(max_wait=0.0)
    waiting.add(1, "a", 1, now=5.0, deadline=FAR)
    assert waiting.next_batch(5.0) == CallBatch("a", [Piece(1, 0, 1)])


def test_policies_do_not_mix_and_the_oldest_goes_first() -> None:
    waiting = batcher()
    waiting.add(1, "b", 1, now=0.0, deadline=FAR)
    waiting.add(2, "a", 1, now=0.1, deadline=FAR)
    assert waiting.next_batch(3.0) == CallBatch("b", [Piece(1, 0, 1)])
    assert waiting.next_batch(3.0) == CallBatch("a", [Piece(2, 0, 1)])


def test_a_request_that_is_in_a_hurry_does_not_wait_for_others() -> None:
    waiting = batcher(max_wait=10.0)
    waiting.add(1, "a", 1, now=0.0, deadline=FAR)
    waiting.observe("a", 0.5)
    waiting.add(2, "a", 1, now=0.0, deadline=3.0)
    assert waiting.wake_at() == 2.0
    assert waiting.next_batch(1.9) is None
    assert waiting.next_batch(2.0) == CallBatch("a", [Piece(1, 0, 1), Piece(2, 0, 1)])


def test_keys_do_not_pile_up() -> None:
    waiting = batcher(max_wait=0.0)
    for request in range(3 * Batcher.MAX_KEYS):
        waiting.add(request, request, 1, now=0.0, deadline=FAR)
        assert waiting.next_batch(0.0) == CallBatch(request, [Piece(request, 0, 1)])
    assert len(waiting._queues) <= Batcher.MAX_KEYS + 1


@pytest.mark.parametrize(
    "setting",
    [{"max_batch": 0}, {"max_wait": -1.0}, {"max_wait": math.inf}, {"max_rows_waiting": 0}],
)
def test_unusable_settings_are_refused(setting: dict[str, float]) -> None:
    usable: dict[str, Any] = {"max_batch": 1, "max_wait": 0.0, "max_rows_waiting": 1}
    with pytest.raises(ConfigError, match=next(iter(setting))):
        BatchingConfig(**(usable | setting))


class BatcherMachine(RuleBasedStateMachine):
    """Whatever comes in whichever order: each row goes once, in order, in time, in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.config = BatchingConfig(max_batch=5, max_wait=1.0, max_rows_waiting=40)
        self.batcher = Batcher(self.config)
        self.now = 0.0
        self.numbers = 0
        #: Request -> (key, rows, arrived, deadline), and how many rows went.
        self.known: dict[int, tuple[str, int, float, float]] = {}
        self.gone: dict[int, int] = {}

    @rule(
        key=st.sampled_from("abc"),
        rows=st.integers(1, 12),
        left=st.floats(0.01, 5.0),
    )
    def add(self, key: str, rows: int, left: float) -> None:
        self.numbers += 1
        waiting = sum(known[1] - self.gone[number] for number, known in self.known.items())
        taken = self.batcher.add(self.numbers, key, rows, now=self.now, deadline=self.now + left)
        assert taken == (not waiting or waiting + rows <= self.config.max_rows_waiting)
        if taken:
            self.known[self.numbers] = (key, rows, self.now, self.now + left)
            self.gone[self.numbers] = 0

    @rule(seconds=st.floats(0.0, 2.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.sampled_from("abc"), seconds=st.floats(0.0, 0.5))
    def observe(self, key: str, seconds: float) -> None:
        self.batcher.observe(key, seconds)

    @rule()
    def expire(self) -> None:
        for request in self.batcher.expire(self.now):
            assert self.known[request][3] <= self.now
            self._forget(request)
        assert all(known[3] > self.now for known in self.known.values())

    @rule(remainder=st.integers(0, 2))
    def drop(self, remainder: int) -> None:
        self.batcher.drop(lambda request: request % 3 == remainder)
        for request in [number for number in self.known if number % 3 == remainder]:
            self._forget(request)

    @rule()
    def take(self) -> None:
        batch = self.batcher.next_batch(self.now)
        if batch is None:
            for key, _, arrived, _ in self.known.values():
                assert self.now < arrived + self.config.max_wait
                rows = sum(
                    known[1] - self.gone[number]
                    for number, known in self.known.items()
                    if known[0] == key
                )
                assert rows < self.config.max_batch
            return
        assert 0 < sum(piece.stop - piece.start for piece in batch.pieces) <= self.config.max_batch
        for piece in batch.pieces:
            request, start, stop = piece.request, piece.start, piece.stop
            key, rows, _, _ = self.known[request]
            assert key == batch.key
            older = [number for number, known in self.known.items() if known[0] == key]
            assert request == min(older)  # first come, first served
            assert start == self.gone[request] < stop <= rows
            self.gone[request] = stop
            if stop == rows:
                self._forget(request)

    @precondition(lambda self: self.known)
    @rule()
    def wake(self) -> None:
        wake_at = self.batcher.wake_at()
        assert wake_at is not None
        self.now = max(self.now, wake_at)
        assert self.batcher.next_batch(self.now) is not None
        # What was taken is not followed up: begin anew.
        self.batcher = Batcher(self.config)
        self.known.clear()
        self.gone.clear()

    @invariant()
    def holds(self) -> None:
        waiting = sum(known[1] - self.gone[number] for number, known in self.known.items())
        assert self.batcher.rows_waiting == waiting

    def _forget(self, request: int) -> None:
        del self.known[request]
        del self.gone[request]


TestBatcherMachine = BatcherMachine.TestCase
