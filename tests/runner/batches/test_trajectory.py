from __future__ import annotations

import numpy as np
import pytest

from envbus.runner.batches.trajectory import Trajectory, agent_id_column


def walk(trajectory: Trajectory, steps: int, first_t: int = 0) -> None:
    for t in range(first_t, first_t + steps):
        trajectory.act(np.int64(t), 0, {"vf_preds": np.float32(t)})
        trajectory.add_reward(1.0)
        trajectory.complete(np.float32(t + 1), t)


def test_observations_are_stored_once_for_obs_and_next_obs() -> None:
    trajectory = Trajectory("a")
    trajectory.begin(np.float32(0), "p")
    walk(trajectory, 3)
    batch = trajectory.cut({"eps_id": 5})
    assert np.shares_memory(batch["obs"][1:], batch["next_obs"][:-1])
    assert batch["eps_id"].tolist() == [5, 5, 5]


def test_a_fragment_that_has_left_is_not_written_again() -> None:
    trajectory = Trajectory("a")
    trajectory.begin(np.float32(0), "p")
    walk(trajectory, 2)
    batch = trajectory.cut({})
    before = [batch[name].tolist() for name in batch.columns]
    walk(trajectory, 50, first_t=2)
    trajectory.end()
    assert [batch[name].tolist() for name in batch.columns] == before
    assert trajectory.cut({})["obs"].tolist() == list(range(2, 52))


def test_an_open_row_moves_to_the_next_fragment_with_all_its_columns() -> None:
    trajectory = Trajectory("a", infos=True)
    trajectory.begin({"x": np.float32(0)}, "p")
    for t in range(2):
        trajectory.act((np.int64(t),), 10 + t, {"state_in": {"h": np.full(2, t)}})
        if t == 0:
            trajectory.add_info({"t": 0})
            trajectory.complete({"x": np.float32(1)}, 0)
    assert len(trajectory.cut({})) == 1
    trajectory.add_info({"t": 1})
    trajectory.complete({"x": np.float32(2)}, 1)
    batch = trajectory.cut({})
    assert batch["obs"]["x"].tolist() == [1.0]
    assert batch["actions"][0].tolist() == [1]
    assert batch["policy_version"].tolist() == [11]
    assert batch["state_in"]["h"].tolist() == [[1, 1]]
    assert batch["infos"].tolist() == [{"t": 1}]


def test_rewards_add_up_in_float64_before_they_become_float32() -> None:
    trajectory = Trajectory("a")
    trajectory.begin(np.float32(0), "p")
    trajectory.act(0, 0, {})
    for reward in (2.0**24, 1.0, 1.0):  # float32 would lose the ones
        trajectory.add_reward(reward)
    trajectory.complete(np.float32(1), 0)
    assert trajectory.cut({})["rewards"].tolist() == [2.0**24 + 2]


def test_a_reward_without_any_row_is_given_back_at_the_end() -> None:
    trajectory = Trajectory("a")
    trajectory.begin(np.float32(0), "p")
    trajectory.add_reward(2.5)
    assert trajectory.end() == 2.5


@pytest.mark.parametrize(
    ("agent_id", "dtype", "value"),
    [("walker_1", "<U8", "walker_1"), (7, "<i8", 7), (("team", 1), "<U11", "('team', 1)")],
)
def test_agent_ids_become_integers_or_strings(agent_id: object, dtype: str, value: object) -> None:
    column = agent_id_column(agent_id, 2)
    assert (column.dtype.str, column.tolist()) == (dtype, [value, value])


def test_the_reward_before_is_known_over_fragments_and_not_over_a_break() -> None:
    trajectory = Trajectory("a")
    trajectory.begin(np.float32(0), "p")
    assert trajectory.last_reward is None
    walk(trajectory, 2)
    trajectory.act(np.int64(2), 0, {"vf_preds": np.float32(2)})
    trajectory.add_reward(5.0)
    trajectory.complete(np.float32(3), 2)
    assert trajectory.last_reward == 5.0
    trajectory.cut({}, 2)
    assert trajectory.last_reward == 5.0
    trajectory.cut({})
    assert trajectory.last_reward == 5.0
    trajectory.act(np.int64(3), 0, {"vf_preds": np.float32(3)})
    trajectory.break_off({})
    trajectory.begin(np.float32(9), "p")
    assert trajectory.last_reward is None
