from __future__ import annotations

import gc
import os
from typing import Any

import msgspec
import numpy as np
import pytest

from envbus.bus.errors import ProtocolError
from envbus.runner.policy_batching import Piece
from envbus.runner.policy_calls import SharedRows, cut, form_of
from envbus.runner.policy_calls import gather as gather_in
from envbus.runner.policy_door import close_all
from envbus.runner.row_memory import RowMemory


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
