from __future__ import annotations

import gc
import os
from typing import Any

import msgspec
import numpy as np
import pytest

from envbus.bus.errors import ProtocolError
from envbus.runner.policies import PolicyOutput
from envbus.runner.policy_batching import Piece
from envbus.runner.policy_door import close_all
from envbus.runner.policy_rows import Answer, RowMemory, SharedRows, cut, form_of, join, split
from envbus.runner.policy_rows import gather as gather_in


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


def test_memory_of_a_large_batch_is_used_again_once_nobody_refers_to_it() -> None:
    memory = RowMemory()
    shape, dtype = (32, 4, 84, 84), np.dtype(np.uint8)
    first = memory.empty(shape, dtype)
    place = first.ctypes.data
    part = first[3]
    other = memory.empty(shape, dtype)
    assert not np.shares_memory(first, other)
    del first
    assert not np.shares_memory(memory.empty(shape, dtype), part)
    del part
    assert memory.empty((8, 4, 84, 84), np.dtype(np.float32)).ctypes.data == place
    assert memory.empty((2,), dtype).flags.owndata


def test_a_large_batch_of_one_request_may_be_written_to_as_well() -> None:
    pixels = np.ones((32, 4, 84, 84), np.uint8)
    pixels.flags.writeable = False
    memory = RowMemory()
    gather_in([pixels], memory)[:] = 7
    both = gather_in([pixels, pixels], memory)
    assert both.shape == (64, 4, 84, 84)
    assert (both == 1).all()


def test_an_answer_is_split_and_joined_without_a_loss() -> None:
    out = PolicyOutput({"move": np.arange(5)}, rows(5), {"logp": np.arange(5.0)})
    answer = Answer.of(out, 5, version=7)
    parts = [split(answer, 0, 2), split(answer, 2, 5)]
    assert split(answer, 0, 5) is answer
    assert parts[1].actions["move"].tolist() == [2, 3, 4]
    whole = join(parts)
    assert whole.actions["move"].tolist() == [0, 1, 2, 3, 4]
    assert whole.states[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert whole.extras["logp"].tolist() == [0, 1, 2, 3, 4]
    assert (whole.rows, whole.version, whole.versions) == (5, 7, None)


def test_parts_that_other_weights_chose_say_so_row_by_row() -> None:
    parts = [
        Answer.of(PolicyOutput(np.zeros(count)), count, version)
        for count, version in ((2, 4), (1, 5))
    ]
    whole = join(parts)
    assert whole.versions is not None
    assert whole.versions.tolist() == [4, 4, 5]
    own = Answer.of(PolicyOutput(np.zeros(2), versions=np.array([8, 9])), 2, version=0)
    assert split(own, 1, 2).versions.tolist() == [9]  # type: ignore[union-attr]


def test_actions_of_no_fixed_size_are_split_and_joined_as_a_list() -> None:
    answer = Answer.of(PolicyOutput(["a", "bb", "ccc"]), 3, version=0)
    assert answer.listed
    assert join([split(answer, 0, 1), split(answer, 1, 3)]).actions == ["a", "bb", "ccc"]


@pytest.mark.parametrize(
    "out",
    [
        PolicyOutput(np.zeros(2)),
        PolicyOutput(["a", "b"]),
        PolicyOutput(np.zeros(3), np.zeros((1, 4))),
        PolicyOutput(np.zeros(3), np.zeros((3, 4)), {"logp": np.float64(0.0)}),
    ],
)
def test_a_policy_that_does_not_answer_each_row_is_told_so(out: PolicyOutput) -> None:
    with pytest.raises(ValueError, match=r"the policy returned .* for 3 rows"):
        Answer.of(out, 3, 0, np.zeros((3, 4)))


def test_an_answer_is_its_own_though_the_policy_uses_its_arrays_again() -> None:
    buffer = np.zeros(3)
    answer = Answer.of(PolicyOutput(buffer, buffer, {"logp": buffer}), 3, 0, np.zeros(3))
    buffer += 1
    assert answer.actions.tolist() == answer.states.tolist() == [0.0] * 3
    assert answer.extras["logp"].tolist() == [0.0] * 3


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
