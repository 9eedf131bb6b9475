from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch


def ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def batch(eps_id: list[int], t: list[int], **columns: Any) -> SampleBatch:
    return SampleBatch({"eps_id": ints(*eps_id), "t": ints(*t), **columns})


def test_columns_must_have_equally_many_rows() -> None:
    with pytest.raises(ValueError, match="column t has 1 rows and column eps_id 2"):
        batch([1, 1], [0])


def test_nested_columns_are_checked_by_their_leaves() -> None:
    with pytest.raises(ValueError, match=r"obs\['b'\] has 3 rows and column obs\['a'\] 2"):
        SampleBatch({"obs": {"a": np.zeros((2, 4)), "b": np.zeros(3)}})


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ([1.0], TypeError, "must be an array"),
        (np.float32(1), TypeError, "must be an array"),
        (np.zeros(1, np.float64), TypeError, "rewards must be of float32, not of float64"),
        (np.zeros((1, 1), np.float32), ValueError, r"must be \(rows,\), not \(1, 1\)"),
    ],
)
def test_a_column_of_the_wrong_kind_is_named(
    column: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SampleBatch({"rewards": column})


def test_a_missing_column_is_told_with_those_that_there_are() -> None:
    with pytest.raises(KeyError, match=r"no column 'obs'; there are \['eps_id', 't'\]"):
        batch([1], [0])["obs"]


def test_a_slice_is_a_view_and_a_mask_a_copy() -> None:
    whole = batch([1, 1, 2], [0, 1, 0], obs={"a": np.arange(6).reshape(3, 2)})
    part = whole[1:]
    assert len(part) == 2
    assert np.shares_memory(part["obs"]["a"], whole["obs"]["a"])
    chosen = whole[whole["t"] == 0]
    assert chosen["obs"]["a"].tolist() == [[0, 1], [4, 5]]
    assert len(whole[ints(2, 2, 0)]) == 3


def test_what_is_no_index_of_rows_is_refused() -> None:
    whole = batch([1, 1], [0, 1])
    with pytest.raises(TypeError, match="indexed by"):
        whole[0]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="mask over 2 rows"):
        whole[np.ones(3, np.bool_)]
    with pytest.raises(TypeError, match="iterate over"):
        list(whole)


def test_batches_are_joined_in_their_order_and_in_new_memory() -> None:
    one = batch([1, 1], [0, 1], obs=(np.zeros((2, 3)), np.zeros(2)))
    two = batch([2], [0], obs=(np.ones((1, 3)), np.ones(1)))
    joined = SampleBatch.concatenate([one, SampleBatch({}), two])
    assert joined["eps_id"].tolist() == [1, 1, 2]
    assert joined["obs"][1].tolist() == [0, 0, 1]
    alone = SampleBatch.concatenate([one])
    assert not np.shares_memory(alone["t"], one["t"])
    assert len(SampleBatch.concatenate([])) == 0


def test_batches_of_different_columns_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"only some have the columns \['action_logp'\]"):
        SampleBatch.concatenate([batch([1], [0]), batch([1], [1], action_logp=np.zeros(1))])


def test_agent_ids_of_both_kinds_become_strings() -> None:
    joined = SampleBatch.concatenate(
        [SampleBatch({"agent_id": ints(7)}), SampleBatch({"agent_id": np.array(["walker"])})]
    )
    assert joined["agent_id"].tolist() == ["7", "walker"]


def test_a_batch_is_split_by_episode_and_by_trajectory() -> None:
    agents = np.array(["a", "a", "b", "b", "b"])
    whole = batch([1, 1, 1, 2, 2], [0, 4, 2, 0, 0], agent_id=agents)
    assert whole.trajectory_starts().tolist() == [True, False, True, True, True]
    assert [part["t"].tolist() for part in whole.split_by_trajectory()] == [[0, 4], [2], [0], [0]]
    assert [len(part) for part in whole.split_by_episode()] == [3, 2]
    assert SampleBatch({}).split_by_trajectory() == []


def test_a_trajectory_goes_on_in_the_next_sample_unless_rows_are_missing_between_them() -> None:
    turns = batch([1, 1], [0, 2], unroll_id=ints(0, 0))
    for t, goes_on in ((3, True), (4, False)):
        after = batch([1, 1], [t, t + 2], unroll_id=ints(1, 1))
        both = SampleBatch.concatenate([turns, after])
        assert both.trajectory_starts().tolist() == [True, False, not goes_on, False]


def test_trajectories_side_by_side_are_a_view_with_time_first() -> None:
    whole = batch([1, 1, 1, 2, 2, 2], [0, 1, 2] * 2, env_id=ints(0, 0, 0, 1, 1, 1))
    views = whole.time_major(2)
    assert views["t"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert np.shares_memory(views["t"], whole["t"])
    sliced = SampleBatch({"obs": np.arange(24).reshape(8, 3)[::2]})  # strides of its own
    assert np.shares_memory(sliced.time_major(2)["obs"], sliced["obs"])


def test_rows_from_time_major_arrays_go_back_without_a_copy() -> None:
    obs = {"a": np.arange(12).reshape(3, 2, 2)}
    rows = SampleBatch.from_time_major({"obs": obs, "t": np.repeat(ints(0, 1, 2)[:, None], 2, 1)})
    assert rows["t"].tolist() == [0, 0, 1, 1, 2, 2]
    back = rows.time_major(2, order="time")
    assert back["obs"]["a"].tolist() == obs["a"].tolist()
    assert np.shares_memory(back["obs"]["a"], obs["a"])


def test_a_layout_that_is_none_is_refused() -> None:
    whole = batch([1, 1, 2, 2], [0, 1, 0, 1], env_id=ints(0, 0, 1, 1))
    with pytest.raises(ValueError, match="4 rows do not make 3 trajectories"):
        whole.time_major(3)
    with pytest.raises(ValueError, match="env_id changes"):
        whole.time_major(2, order="time")
    with pytest.raises(ValueError, match=r"must all be \(T, N"):
        SampleBatch.from_time_major({"obs": np.zeros((3, 2, 1)), "t": np.zeros((2, 2))})


def test_columns_are_added_without_touching_the_batch() -> None:
    before = batch([1], [0])
    after = before.with_columns(advantages=np.zeros(1, np.float32))
    assert "advantages" in after
    assert "advantages" not in before
    with pytest.raises(ValueError, match="advantages has 2 rows"):
        before.with_columns(advantages=np.zeros(2))


def test_a_batch_pickles_and_knows_its_size() -> None:
    before = batch([1, 2], [0, 0], obs={"a": np.zeros((2, 2), np.float32)})
    after = pickle.loads(pickle.dumps(before))
    assert (len(after), after.nbytes) == (2, 16 + 16 + 16)
    assert repr(after) == "SampleBatch(2 rows: eps_id, t, obs)"


def test_policies_keep_their_own_columns() -> None:
    parts = [
        ("walker", batch([1], [0])),
        ("runner", batch([1], [0], vf_preds=np.zeros(1))),
        ("walker", batch([2], [0])),
    ]
    both = MultiAgentBatch.of(parts, env_steps=1)
    assert (both.env_steps, both.agent_steps, len(both)) == (1, 3, 1)
    assert both["walker"]["eps_id"].tolist() == [1, 2]
    twice = MultiAgentBatch.concatenate([both, both])
    assert (twice.env_steps, twice.agent_steps, twice.nbytes) == (2, 6, 2 * both.nbytes)
    with pytest.raises(KeyError, match="no rows of policy 'p9'"):
        both["p9"]
    with pytest.raises(ValueError, match="not of one policy"):
        both.single()
    assert "walker" in both
    assert "p9" not in both
    with pytest.raises(TypeError, match="iterate over"):
        list(both)


def test_the_policy_whose_rows_do_not_fit_is_named() -> None:
    parts = [("walker", batch([1], [0])), ("walker", batch([1], [0], vf_preds=np.zeros(1)))]
    with pytest.raises(ValueError, match="policy 'walker': batches cannot be joined"):
        MultiAgentBatch.of(parts, env_steps=1)


def test_runs_of_unequal_length_are_filled_up_and_marked() -> None:
    batch = SampleBatch(
        {
            "obs": {"x": np.arange(1, 13).reshape(6, 2)},
            "infos": np.array([{}] * 6),
            "env_id": np.array([0, 0, 0, 0, 2, 2]),
            "eps_id": np.array([0, 0, 4, 4, 2, 2]),
            "t": np.array([7, 8, 0, 1, 0, 1]),
        }
    )
    columns, valid = batch.padded(by="env")
    assert valid.T.tolist() == [[True] * 4, [True, True, False, False]]
    assert columns["obs"]["x"].shape == (4, 2, 2)
    assert columns["obs"]["x"][:, 1].tolist() == [[9, 10], [11, 12], [0, 0], [0, 0]]
    assert columns["infos"][2:, 1].tolist() == [None, None]
    columns, valid = batch.padded(3)
    assert valid.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert columns["t"].T.tolist() == [[7, 8, 0], [0, 1, 0], [0, 1, 0]]
    columns, valid = batch.padded(1, by="env")
    assert columns["t"].tolist() == [[7, 0]]
    assert SampleBatch({}).padded()[1].shape == (0, 0)


def test_a_function_makes_rows_of_each_trajectory() -> None:
    whole = batch([1, 1, 2], [0, 1, 0])
    seen: list[list[int]] = []

    def last(rows: SampleBatch) -> SampleBatch:
        seen.append(rows["t"].tolist())
        return rows[-1:].with_columns(length=np.array([len(rows)]))

    made = whole.map_trajectories(last)
    assert seen == [[0, 1], [0]]
    assert (made["eps_id"].tolist(), made["length"].tolist()) == ([1, 2], [2, 1])
    assert len(SampleBatch({}).map_trajectories(last)) == 0


def recurrent() -> SampleBatch:
    """Trajectories of 5, 2 and 3 rows; the state before a row is ten times its number."""
    rows = batch([1] * 5 + [2] * 2 + [3] * 3, [*range(5), *range(2), *range(3)])
    state = 10.0 * np.arange(10)
    return rows.with_columns(
        obs={"a": np.arange(1, 11)},
        state_in=(state[:, None], {"c": state}),
        state_out=(state[:, None] + 10, {"c": state + 10}),
    )


def test_trajectories_are_cut_into_chunks_with_the_state_at_the_begin_of_each() -> None:
    columns, seq_lens, states = recurrent().chunked(2)
    assert seq_lens.tolist() == [2, 2, 1, 2, 2, 1]
    assert columns["obs"]["a"].T.tolist() == [[1, 2], [3, 4], [5, 0], [6, 7], [8, 9], [10, 0]]
    assert columns["eps_id"].T.tolist() == [[1, 1], [1, 1], [1, 0], [2, 2], [3, 3], [3, 0]]
    assert states[0].tolist() == [[0.0], [20.0], [40.0], [50.0], [70.0], [90.0]]
    assert states[1]["c"].tolist() == [0.0, 20.0, 40.0, 50.0, 70.0, 90.0]
    assert not {"state_in", "state_out"} & columns.keys()


def test_chunks_may_be_ragged_and_longer_than_any_trajectory() -> None:
    rows = recurrent()
    columns, seq_lens, states = rows.chunked(3, pad=False)
    assert seq_lens.tolist() == [3, 2, 2, 3]
    assert columns["obs"]["a"] is rows["obs"]["a"]
    assert states[1]["c"].tolist() == [0.0, 30.0, 50.0, 70.0]
    columns, seq_lens, _ = rows.chunked(7)
    assert seq_lens.tolist() == [5, 2, 3]
    assert columns["t"].shape == (7, 3)


def test_chunks_of_a_policy_without_a_state_have_none() -> None:
    columns, seq_lens, states = batch([1, 1, 2], [0, 1, 0]).chunked(1)
    assert (seq_lens.tolist(), states) == ([1, 1, 1], None)
    assert columns["t"].tolist() == [[0, 1, 0]]
    columns, seq_lens, states = SampleBatch({}).chunked(4)
    assert (columns, seq_lens.tolist(), states) == ({}, [], None)
    with pytest.raises(ConfigError, match="max_seq_len must be a positive integer, not 0"):
        batch([1], [0]).chunked(0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 10),
)
def test_chunks_have_all_rows_once_and_in_their_order(lengths: list[int], most: int) -> None:
    ids = [index for index, length in enumerate(lengths) for _ in range(length)]
    rows = batch(ids, [t for length in lengths for t in range(length)])
    columns, seq_lens, _ = rows.chunked(most)
    chunks = [columns["t"][:length, i] for i, length in enumerate(seq_lens.tolist())]
    assert np.concatenate(chunks).tolist() == rows["t"].tolist()
    assert len(chunks) == sum(-(-length // most) for length in lengths)
    assert max(seq_lens) <= most
