from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from envbus.bus.errors import ProtocolError
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Kind,
    Payload,
    Tree,
)
from envbus.runner.batches.row_memory import RowMemory
from envbus.runner.inference.policy_batching import BatchingConfig, Piece
from envbus.runner.inference.policy_calls import Calls, HostedPolicy, SharedRows, cut, form_of
from envbus.runner.inference.policy_calls import gather as gather_in
from envbus.runner.inference.policy_protocol import ActionsChosen, ChooseActions
from envbus.runner.inference.worker_discovery import close_all
from envbus.runner.policies.policy import Policy, PolicyOutput

LATER = 60.0
A, B = b"asker-a", b"asker-b"


class Doubles(Policy):
    """Acts by twice what it sees; notes how many rows it is asked about; dislikes 13."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.named: Iterator[str] = iter(())

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        self.asked.append(len(observations))
        if (observations == 13).any():
            raise ValueError("unlucky")
        extras = {name: observations[:, 0] for name in itertools.islice(self.named, 1)}
        return PolicyOutput(2 * observations[:, 0], states, extras)


class Bench:
    """Calls with a policy, and what they have ended with."""

    def __init__(self, **config: Any) -> None:
        self.policy = Doubles()
        self.hosted = HostedPolicy(self.policy)
        batching = {"max_batch": 256, "max_wait": 0.0, "max_rows_waiting": 65536} | config
        self.calls = Calls("worker", BatchingConfig(**batching), self._end)
        self.ends: list[tuple[bytes, int, Payload]] = []

    def ask(self, asker: bytes, number: int, *values: float, ttl: float = LATER) -> None:
        """Add a request with a row for each value."""
        header = Header(PROTOCOL_VERSION, Kind.REQUEST, number, "ChooseActions", ttl)
        rows = np.asarray(values, np.float32).reshape(-1, 1)
        self.calls.add(asker, header, request(rows), self.hosted)

    def compute(self) -> None:
        """Compute all that waits."""
        while self.calls.rows_waiting:
            self.calls.compute(hurry=True)

    def actions(self) -> dict[tuple[bytes, int], list[float]]:
        """Return the actions that were answered, by asker and number."""
        return {
            (asker, number): end.actions.value.tolist()
            for asker, number, end in self.ends
            if isinstance(end, ActionsChosen)
        }

    def failures(self) -> dict[tuple[bytes, int], Failed]:
        """Return the failures, by asker and number."""
        return {(asker, number): end for asker, number, end in self.ends if isinstance(end, Failed)}

    def _end(self, asker: bytes, header: Header, answer: Payload) -> None:
        self.ends.append((asker, header.request_id, answer))


def request(rows: Any, **fields: Any) -> ChooseActions:
    """Return a question about rows."""
    return ChooseActions(
        policy_id="default_policy",
        explore=True,
        **{"num_rows": len(rows), "observations": Tree(rows), "states": Tree(None), **fields},
    )


def test_requests_that_wait_go_in_one_call_and_each_gets_its_own_rows() -> None:
    bench = Bench()
    bench.ask(A, 1, 1, 2)
    bench.ask(B, 1, 3)
    bench.ask(A, 2, 4)
    bench.compute()
    assert bench.policy.asked == [4]
    assert bench.actions() == {(A, 1): [2, 4], (B, 1): [6], (A, 2): [8]}
    assert all(end.crowded for _, _, end in bench.ends if isinstance(end, ActionsChosen))


def test_an_asker_that_is_alone_is_not_told_of_a_crowd() -> None:
    bench = Bench()
    bench.ask(A, 1, 1)
    bench.ask(A, 2, 2)
    bench.compute()
    assert not any(end.crowded for _, _, end in bench.ends if isinstance(end, ActionsChosen))


def test_a_request_larger_than_a_batch_is_answered_once_and_whole() -> None:
    bench = Bench(max_batch=2)
    bench.ask(A, 1, 1, 2, 3, 4, 5)
    bench.compute()
    assert bench.policy.asked == [2, 2, 1]
    assert bench.actions() == {(A, 1): [2, 4, 6, 8, 10]}


def test_one_that_makes_the_policy_raise_fails_alone() -> None:
    bench = Bench()
    bench.ask(A, 1, 1)
    bench.ask(B, 1, 13)
    bench.ask(A, 2, 3)
    bench.compute()
    assert bench.actions() == {(A, 1): [2], (A, 2): [6]}
    (failed,) = bench.failures().values()
    assert failed.code is FailureCode.REMOTE
    assert "unlucky" in failed.message
    assert bench.hosted.counts().failures == 1


def test_a_large_one_that_has_failed_is_computed_no_further() -> None:
    bench = Bench(max_batch=1)
    bench.ask(A, 1, 13, 1, 2)
    bench.compute()
    assert bench.policy.asked == [1]
    assert len(bench.ends) == 1


def test_one_whose_parts_do_not_fit_together_fails_and_ends_nobody_else() -> None:
    bench = Bench(max_batch=2)
    bench.policy.named = iter("ab")  # each time another extra
    bench.ask(A, 1, 1, 2, 3, 4)
    bench.compute()
    (failed,) = bench.failures().values()
    assert failed.code is FailureCode.REMOTE
    assert "in one part and not in all" in failed.message
    bench.ask(A, 2, 5)
    bench.compute()
    assert bench.actions() == {(A, 2): [10]}
    assert (bench.hosted.counts().failures, bench.hosted.counts().requests) == (1, 1)


def test_what_is_over_keeps_no_room_from_others() -> None:
    """However many rows it has: these take no bytes."""
    bench = Bench(max_batch=1, max_rows_waiting=2)
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "ChooseActions", LATER)
    endless = request(np.zeros((2**40, 0), np.float32))
    bench.calls.add(A, header, endless, bench.hosted)
    bench.calls.compute(hurry=True)  # it has no first column: fails
    assert bench.calls.rows_waiting == 0
    bench.calls.add(A, header, endless, bench.hosted)
    bench.calls.forget(A)
    assert bench.calls.rows_waiting == 0
    bench.ask(B, 1, 1)
    bench.compute()
    assert bench.actions() == {(B, 1): [2]}


def test_what_exceeds_the_rows_that_may_wait_fails_at_once() -> None:
    bench = Bench(max_rows_waiting=2)
    bench.ask(A, 1, 1, 2)
    bench.ask(B, 1, 3)
    (failed,) = bench.failures().values()
    assert failed.code is FailureCode.OVERLOADED
    assert "max_rows_waiting" in failed.message
    bench.compute()
    assert bench.actions() == {(A, 1): [2, 4]}


def test_what_is_too_late_is_neither_computed_nor_answered() -> None:
    bench = Bench()
    bench.ask(A, 1, 1, ttl=0.0)
    bench.ask(A, 2, 2)
    bench.compute()
    assert bench.policy.asked == [1]
    assert bench.actions() == {(A, 2): [4]}
    assert bench.hosted.counts().expired == 1


def test_an_asker_that_is_gone_gets_no_answer() -> None:
    bench = Bench()
    bench.ask(A, 1, 1)
    bench.ask(B, 1, 2)
    bench.calls.forget(A)
    bench.compute()
    assert bench.policy.asked == [1]
    assert bench.actions() == {(B, 1): [4]}


def test_states_come_back_with_the_rows() -> None:
    bench = Bench()
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "ChooseActions", LATER)
    rows = np.ones((2, 1), np.float32)
    bench.calls.add(A, header, request(rows, states=Tree((np.array([5, 6]),))), bench.hosted)
    bench.compute()
    ((_, _, end),) = bench.ends
    assert isinstance(end, ActionsChosen)
    assert end.states.value[0].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_rows": 0}, "has rows"),
        ({"num_rows": 3}, "of 3 rows"),
        ({"observations": Tree(None), "shared": "x:1"}, "no rows were shared"),
        ({"observations": Tree([1.0]), "listed": True}, "no list of 2 rows"),
    ],
)
def test_what_cannot_be_computed_is_refused(fields: dict[str, Any], why: str) -> None:
    bench = Bench()
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 1, "ChooseActions", LATER)
    with pytest.raises(ProtocolError, match=why):
        bench.calls.add(A, header, request(np.ones((2, 1)), **fields), bench.hosted)
    assert not bench.calls.rows_waiting


def rows(count: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + count, dtype=np.float32).reshape(count, 1)


def gather(parts: list[Any]) -> Any:
    return gather_in(parts, RowMemory())


def test_pieces_of_several_requests_become_one_batch_that_may_be_written_to() -> None:
    one, other = rows(3), rows(4, 10)
    one.flags.writeable = False
    batch = gather([cut(one, Piece(1, 1, 3)), cut(other, Piece(2, 0, 2))])
    assert batch[:, 0].tolist() == [1, 2, 10, 11]
    alone = gather([cut(one, Piece(1, 0, 2))])
    alone += 1
    assert one[:, 0].tolist() == [0, 1, 2]


def test_nested_observations_and_those_without_a_fixed_size_are_gathered_too() -> None:
    tree = {"a": rows(2), "b": (rows(2, 5),)}
    batch = gather([cut(tree, Piece(1, 1, 2)), cut(tree, Piece(2, 0, 2))])
    assert batch["a"][:, 0].tolist() == [1, 0, 1]
    assert batch["b"][0][:, 0].tolist() == [6, 5, 6]
    texts = gather([cut(["x", "yy"], Piece(1, 1, 2)), cut(["z"], Piece(2, 0, 1))])
    assert texts.tolist() == ["yy", "z"]
    assert gather([cut(None, Piece(1, 0, 2))]) is None


def test_what_is_nobody_else_s_is_not_copied() -> None:
    fresh = rows(3)[[0, 2]]
    assert gather([fresh]) is fresh


def test_a_large_batch_of_one_request_may_be_written_to_as_well() -> None:
    pixels = np.ones((32, 4, 84, 84), np.uint8)
    pixels.flags.writeable = False
    memory = RowMemory()
    gather_in([pixels], memory)[:] = 7
    both = gather_in([pixels, pixels], memory)
    assert both.shape == (64, 4, 84, 84)
    assert (both == 1).all()


def test_rows_that_cannot_be_shared_leave_alone_what_has_their_descriptors_later() -> None:
    memory, layout = (os.memfd_create(name) for name in ("memory", "layout"))
    os.ftruncate(memory, 100)
    with pytest.raises(msgspec.DecodeError) as caught:
        SharedRows.attach(memory, 100, layout)
    close_all([memory, layout])
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    del caught
    gc.collect()
    assert [os.fstat(other).st_size for other in others] == [0, 0]
    close_all(others)


@pytest.mark.parametrize("path", [os.devnull, "/dev/zero"])
def test_a_device_is_no_layout_of_shared_rows(path: str) -> None:
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 100)
    with pytest.raises(msgspec.DecodeError):
        SharedRows.attach(memory, 100, os.open(path, os.O_RDONLY))


def test_a_huge_file_is_not_read_as_the_layout_of_shared_rows() -> None:
    memory, layout = (os.memfd_create(name) for name in ("memory", "layout"))
    os.ftruncate(memory, 100)
    os.ftruncate(layout, 2**30)
    with pytest.raises(ProtocolError, match="a layout of 1073741824 bytes"):
        SharedRows.attach(memory, 100, layout)


def test_several_workers_can_read_one_layout_at_a_time() -> None:
    memory, layout = (os.memfd_create(name) for name in ("memory", "layout"))
    os.ftruncate(memory, 100)
    os.write(layout, b"no layout")
    os.lseek(layout, 3, os.SEEK_SET)
    with pytest.raises(msgspec.DecodeError):
        SharedRows.attach(memory, 100, os.dup(layout))
    assert os.lseek(layout, 0, os.SEEK_CUR) == 3
    close_all([layout])


def test_only_batches_of_one_form_go_together() -> None:
    assert form_of(rows(2), 2, "observations") == form_of(rows(5), 5, "observations")
    assert form_of(rows(2), 2, "x") != form_of(rows(2).astype(np.float64), 2, "x")
    assert form_of(rows(2), 2, "x") != form_of(np.zeros((2, 2), np.float32), 2, "x")
    assert form_of({"a": rows(2)}, 2, "x") == form_of({"a": rows(3)}, 3, "x")
    assert form_of({"a": rows(2)}, 2, "x") != form_of({"b": rows(2)}, 2, "x")
    assert form_of(None, 2, "states") is None


@pytest.mark.parametrize("tree", [rows(3), np.float32(1.0).reshape(()), {"a": rows(3)}, {"a": 1}])
def test_what_is_no_batch_of_so_many_rows_is_refused(tree: Any) -> None:
    with pytest.raises(ProtocolError, match="observations"):
        form_of(tree, 2, "observations")
