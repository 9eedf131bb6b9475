from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.batches.episode import EpisodeIds
from envbus.runner.batches.metrics import SampleMetrics
from envbus.runner.errors import Fault, FaultCause
from envbus.runner.sampling.columns import ColumnFragments, Columns, RunningEpisodes
from envbus.runner.sampling.config import EnvQuotas, Phase, RunnerConfig, Sample


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def step(columns: Columns, ids: Any, value: float, *, done: bool = False) -> None:
    """One row per env: observation `value`, action, reward and next observation follow from it."""
    rows = np.full((len(ids), 1), value)
    columns.observe(ids, rows)
    columns.act(ids, ids, int(value), {"logp": rows[:, 0] / 2})
    flags = np.full(len(ids), done)
    columns.complete(ids, rows + 1, rows[:, 0] * 10, flags, ~flags)


def begin(columns: Columns, ids: Any, number: int, t: int = 0) -> None:
    columns.begin(ids, eps_id=ids + number, incarnation=ids * 0 + 1, t=t)


def test_rows_come_env_by_env_and_as_views_if_all_are_full() -> None:
    columns = Columns(2, 2)
    begin(columns, ints(0, 1), 100, t=5)
    step(columns, ints(1), 0.0, done=True)
    begin(columns, ints(1), 200)
    step(columns, ints(0, 1), 1.0)
    step(columns, ints(0), 2.0)
    batch = columns.batch(columns.num_rows, "agent0", 9)
    assert batch["obs"][:, 0].tolist() == [1, 2, 0, 1]
    assert batch["next_obs"][:, 0].tolist() == [2, 3, 1, 2]
    assert batch["rewards"].tolist() == [10, 20, 0, 10]
    assert batch["eps_id"].tolist() == [100, 100, 101, 201]
    assert batch["t"].tolist() == [5, 6, 5, 0]
    assert batch["env_id"].tolist() == [0, 0, 1, 1]
    assert batch["policy_version"].tolist() == [1, 2, 0, 1]
    assert batch["terminateds"].tolist() == [False, False, True, False]
    assert batch["logp"].tolist() == [0.5, 1, 0, 0.5]
    assert batch["unroll_id"].tolist() == [9] * 4
    again = columns.batch(columns.num_rows, "agent0", 9)
    assert np.shares_memory(batch["obs"], again["obs"])
    assert columns.batch(ints(1, 0), "agent0", 9)["obs"][:, 0].tolist() == [1]


def test_columns_grow_and_keep_what_they_hold() -> None:
    columns = Columns(2, 1)
    begin(columns, ints(0, 1), 0)
    for value in range(5):
        step(columns, ints(1), value)
    step(columns, ints(0), 7)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert batch["obs"][:, 0].tolist() == [7, 0, 1, 2, 3, 4]
    assert batch["t"].tolist() == [0, 0, 1, 2, 3, 4]


def test_what_was_rewound_leaves_no_trace() -> None:
    columns = Columns(1, 4)
    begin(columns, ints(0), 10)
    step(columns, ints(0), 0)
    columns.truncate(0)
    begin(columns, ints(0), 20)
    step(columns, ints(0), 1)
    step(columns, ints(0), 2)
    columns.rewind(0, 1)
    begin(columns, ints(0), 30)
    step(columns, ints(0), 3, done=True)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert batch["eps_id"].tolist() == [10, 30]
    assert batch["t"].tolist() == [0, 0]


def test_kept_and_open_rows_go_over_into_the_next_fragment() -> None:
    columns = Columns(2, 4)
    begin(columns, ints(0, 1), 0)
    step(columns, ints(0, 1), 0)
    step(columns, ints(0), 1)
    columns.observe(ints(0), np.array([[5.0]]))
    columns.act(ints(0), ints(3), 8, {"logp": np.array([0.25])})
    following = columns.following(1, kept=ints(2, 0), opened=np.array([True, False]))
    following.complete(ints(0), np.array([[6.0]]), np.ones(1), *np.zeros((2, 1), np.bool_))
    batch = following.batch(following.num_rows, "agent0", 0)
    assert batch["obs"][:, 0].tolist() == [0, 1, 5]
    assert batch["policy_version"].tolist() == [0, 1, 8]
    assert batch["t"].tolist() == [0, 1, 2]
    assert columns.batch(columns.num_rows, "agent0", 0)["obs"][:, 0].tolist() == [0, 1, 0]


def test_a_wider_dtype_widens_and_another_shape_is_refused() -> None:
    columns = Columns(1, 3)
    begin(columns, ints(0), 0)
    step(columns, ints(0), 1)
    columns.observe(ints(0), np.array([[2]]))
    columns.act(ints(0), np.array([1.5]), 0, {"logp": np.zeros(1)})
    columns.complete(ints(0), np.array([[3]]), np.zeros(1), *np.zeros((2, 1), np.bool_))
    assert columns.batch(columns.num_rows, "a", 0)["actions"].tolist() == [0.0, 1.5]
    with pytest.raises(ValueError, match="obs has shape"):
        columns.observe(ints(0), np.zeros((1, 2)))
    with pytest.raises(ValueError, match="extra columns are"):
        columns.act(ints(0), ints(0), 0, {})


def test_nested_observations_are_columns_of_columns() -> None:
    columns = Columns(1, 1)
    begin(columns, ints(0), 0)
    seen = {"a": np.ones((1, 2)), "b": (np.zeros(1, np.int64),)}
    columns.observe(ints(0), seen)
    columns.act(ints(0), ints(0), 0, {})
    columns.complete(ints(0), seen, np.zeros(1), *np.zeros((2, 1), np.bool_))
    batch = columns.batch(columns.num_rows, "a", 0)
    assert batch["obs"]["a"].shape == (1, 2)
    assert batch["next_obs"]["b"][0].tolist() == [0]


def test_no_rows_are_an_empty_batch() -> None:
    assert len(Columns(3, 2).batch(ints(0, 0, 0), "a", 0)) == 0


def test_what_was_observed_is_handed_out_as_views_where_envs_are_in_step() -> None:
    columns = Columns(4, 3)
    begin(columns, ints(0, 1, 2, 3), 0)
    rows = np.arange(3.0).reshape(3, 1)
    in_step = columns.observe(ints(1, 2, 3), rows)
    assert np.array_equal(in_step, rows)
    step(columns, ints(2), 5.0)
    apart = columns.observe(ints(1, 2, 3), rows)
    assert np.array_equal(apart, rows)
    in_step[2] = 7.0
    assert apart[2] == 2.0
    step(columns, ints(1), 3.0)
    assert in_step[0] == 3.0


def test_envs_in_step_and_alone_leave_the_rows_that_others_leave() -> None:
    together, apart = Columns(3, 2), Columns(3, 2)
    for columns in (together, apart):
        begin(columns, ints(0, 1, 2), 0)
    for value in range(5):  # they grow on the way
        step(together, ints(0, 1, 2), value)
        step(apart, ints(1), value)
        step(apart, ints(0, 2), value)
    one, other = (columns.batch(columns.num_rows, "agent0", 0) for columns in (together, apart))
    assert one["obs"][:, 0].tolist() == [0, 1, 2, 3, 4] * 3
    for name in ("obs", "next_obs", "rewards", "logp", "policy_version", "terminateds"):
        assert one[name].tolist() == other[name].tolist()


def test_large_memory_is_used_again_once_nobody_has_it() -> None:
    wide, flags = np.ones((2, 1 << 16)), np.zeros(2, bool)

    def fragment(columns: Columns) -> Any:
        columns = columns.following(1, ints(0, 0), flags)
        begin(columns, ints(0, 1), 0)
        columns.observe(ints(0, 1), wide)
        columns.act(ints(0, 1), ints(0, 1), 0, {})
        columns.complete(ints(0, 1), wide, np.zeros(2), flags, flags)
        return columns, columns.batch(columns.num_rows, "agent0", 0)

    def places(batch: Any) -> set[int]:
        return {batch[name].__array_interface__["data"][0] for name in ("obs", "next_obs")}

    columns, first = fragment(Columns(2, 1))
    columns, second = fragment(columns)
    columns, third = fragment(columns)
    assert len(places(first) | places(second) | places(third)) == 6
    was, kept = places(second), third["obs"][1:]  # a view of it is enough to have it
    del second, third
    columns, fourth = fragment(columns)
    assert places(fourth) == was
    assert (kept == 1.0).all()


def test_columns_are_made_where_the_caller_wants_them_and_stay_its_own() -> None:
    memory = np.zeros((2, 80_000), np.float64)
    free = [memory[0], memory[1]]

    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        fits = shape == (4, 20_000) and dtype == np.float64
        return free.pop(0).reshape(shape) if fits and free else None

    columns = Columns(2, 2, make)
    begin(columns, ints(0, 1), 0)
    for value in (1.0, 2.0):
        rows = np.full((2, 20_000), value)
        columns.observe(ints(0, 1), rows)
        columns.act(ints(0, 1), ints(0, 1), 0, {})
        columns.complete(ints(0, 1), rows + 1, ints(0, 1), ints(0, 0) > 0, ints(0, 0) > 0)
    batch = columns.batch(columns.num_rows, "agent0", 0)
    assert np.array_equal(memory[0].reshape(2, 2, -1)[:, :, 0], [[1, 2], [1, 2]])
    assert np.array_equal(memory[1].reshape(2, 2, -1)[:, :, 0], [[2, 3], [2, 3]])
    assert np.shares_memory(batch["obs"], memory)
    del batch
    following = columns.following(2, ints(0, 0), ints(0, 0) > 0)
    begin(following, ints(0, 1), 0)
    following.observe(ints(0, 1), rows)
    assert memory[0].reshape(2, 2, -1)[0, 0, 0] == 1.0  # it is not used again by itself


# --- fragments, and rows ahead ----------------------------------------------------------------

#: Steps of an episode.
LENGTH = 5


class Simulated:
    """Two envs whose observation counts their steps; the policy's version is `version`."""

    def __init__(self, hear: Any = None, **config: Any) -> None:
        self.metrics = SampleMetrics()
        settings = RunnerConfig(**config)
        self.rows = ColumnFragments(settings, "p", 2, self.metrics, hear_of_end=hear)
        self.steps = [0, 0]
        self.version = 0
        self.rows.begin_episodes(ints(0, 1), ints(0, 0))
        self.rows.phase[:] = Phase.WAITING

    def open(self, env_id: int) -> None:
        rows, ids = self.rows, ints(env_id)
        if rows.phase[env_id] != Phase.WAITING:
            rows.begin_episodes(ids, ids * 0)
        rows.columns.observe(ids, np.full((1, 1), self.steps[env_id]))
        rows.columns.act(ids, ids, self.version, {})
        rows.phase[env_id] = Phase.STEPPING

    def close(self, env_id: int) -> None:
        self.steps[env_id] += 1
        count, ids = self.steps[env_id], ints(env_id)
        self.rows.phase[env_id] = Phase.WAITING
        done = np.array([count % LENGTH == 0])
        seen = np.full((1, 1), count)
        self.rows.take_steps(ids, seen, np.ones(1), done, ~done & False, np.ones(1))

    def step(self, env_id: int, times: int) -> None:
        for _ in range(times):
            self.open(env_id)
            self.close(env_id)

    def fail(self, env_id: int, *, given_up: bool = False) -> None:
        fault = Fault(
            env_id=env_id, cause=FaultCause.ERROR, message="no", restarts=0, given_up=given_up
        )
        self.rows.take_fault(fault)

    def begin(self, *quotas: int) -> None:
        self.rows.begin(EnvQuotas(ints(*quotas), "env_steps", False))

    def end(self) -> Sample:
        return self.rows.end((), 0)


def test_the_end_of_an_episode_is_told_at_once_and_with_its_result() -> None:
    told: list[Any] = []
    envs = Simulated(hear=lambda *, result: told.append((result.env_id, result.length)))
    envs.begin(20, 20)
    envs.step(1, LENGTH)
    envs.step(0, LENGTH + 2)
    assert told == [(1, LENGTH), (0, LENGTH)]
    envs.fail(0)
    assert told[2:] == [(0, 2)]
    envs.end()
    assert len(told) == 3


def of(sample: Sample, env_id: int, name: str) -> list[Any]:
    batch = sample.single()
    column = batch[name][batch["env_id"] == env_id]
    return list(column.reshape(len(column)).tolist())


def test_rows_ahead_are_the_first_of_the_next_fragments() -> None:
    envs = Simulated(run_ahead=9)
    envs.begin(3, 3)
    envs.step(0, 8)
    envs.step(1, 3)
    samples = [envs.end()]
    envs.version = 7
    for more in (0, 1):
        envs.begin(4, 4)
        envs.step(0, 3 * more)
        envs.step(1, 4)
        samples.append(envs.end())
    for env_id in (0, 1):
        assert [of(sample, env_id, "obs") for sample in samples] == [
            [0, 1, 2],
            [3, 4, 5, 6],
            [7, 8, 9, 10],
        ]
        assert [of(sample, env_id, "t") for sample in samples] == [
            [0, 1, 2],
            [3, 4, 0, 1],
            [2, 3, 4, 0],
        ]
    versions = [of(sample, 0, "policy_version") for sample in samples]
    assert versions == [[0] * 3, [0] * 4, [0, 7, 7, 7]]
    ids = [of(sample, 0, "eps_id") for sample in samples]
    assert ids == [[0] * 3, [0, 0, 2, 2], [2, 2, 2, 4]]


def test_an_episode_that_ended_ahead_is_told_with_its_last_row() -> None:
    envs = Simulated(run_ahead=9)
    envs.begin(2, 2)
    envs.step(0, 7)
    first = envs.end()
    assert (first.episodes, envs.metrics.read()["num_episodes"]) == ((), 0)
    envs.begin(2, 2)
    assert not envs.end().episodes
    envs.begin(2, 2)
    (result,) = envs.end().episodes
    assert (result.length, result.fragments) == (5, 3)
    assert envs.metrics.read()["num_episodes"] == 1


def test_an_action_under_way_stays_open_behind_rows_ahead() -> None:
    envs = Simulated(run_ahead=9)
    envs.begin(2, 2)
    envs.step(0, 3)
    envs.open(0)
    assert of(envs.end(), 0, "obs") == [0, 1]
    envs.version = 1
    envs.begin(3, 3)
    envs.close(0)
    envs.step(0, 1)
    sample = envs.end()
    assert of(sample, 0, "obs") == [2, 3, 4]
    assert of(sample, 0, "policy_version") == [0, 0, 1]


def test_who_goes_on_and_who_is_awaited() -> None:
    envs = Simulated(run_ahead=2)
    envs.begin(1, 0)
    envs.step(0, 3)
    assert envs.rows.unmet().tolist() == [False, False]
    assert envs.rows.going_on().tolist() == [False, False]  # nobody is awaited
    envs.end()
    envs.begin(2, 1)
    assert envs.rows.unmet().tolist() == [False, True]
    assert envs.rows.going_on().tolist() == [True, True]
    envs.step(0, 2)
    assert envs.rows.going_on(ints(1, 0)).tolist() == [True, False]
    envs.fail(0, given_up=True)
    envs.end()
    envs.begin(5, 5)
    assert envs.rows.going_on().tolist() == [False, True]


def test_all_go_on_together_until_one_has_contributed_its_part() -> None:
    envs = Simulated()
    envs.begin(3, 4)
    assert envs.rows.steps_together() == 3
    envs.step(0, 2)
    assert envs.rows.steps_together() == 1
    envs.step(0, 1)
    assert envs.rows.steps_together() == 0
    envs.rows.begin(EnvQuotas(ints(3, 4), "env_steps", True))
    assert envs.rows.steps_together() == 0  # whole episodes: nobody knows


@pytest.mark.parametrize("faulty", ["drop", "truncate"])
def test_a_fault_hits_the_rows_that_its_episode_has_ahead(faulty: str) -> None:
    envs = Simulated(run_ahead=9, faulty_episodes=faulty)
    envs.begin(3, 3)
    envs.step(0, 7)
    first = envs.end()
    assert of(first, 0, "obs") == [0, 1, 2]
    envs.begin(3, 3)
    envs.fail(0)
    assert envs.rows.unmet().tolist() == [faulty == "drop", True]
    second = envs.end()
    envs.begin(3, 3)
    third = envs.end()
    rows = [of(sample, 0, "obs") if len(sample) else [] for sample in (second, third)]
    results = [result for sample in (second, third) for result in sample.episodes]
    assert [result.faulty for result in results] == [False, True]
    if faulty == "drop":
        assert rows == [[3, 4], []]
        assert envs.metrics.read()["num_dropped_rows"] == 2
    else:
        assert rows == [[3, 4, 5], [6]]
        assert of(third, 0, "truncateds") == [True]
        assert results[1].fragments == 2


def test_what_is_ahead_of_an_env_that_is_given_up_leaves_at_once() -> None:
    envs = Simulated(run_ahead=9, faulty_episodes="truncate")
    envs.begin(2, 2)
    envs.step(0, 7)
    envs.fail(0, given_up=True)
    sample = envs.end()
    assert of(sample, 0, "obs") == [*range(7)]
    assert [result.length for result in sample.episodes] == [5, 2]
    envs.begin(0, 2)
    assert len(envs.end()) == 0


def test_a_reset_discards_what_is_ahead_and_counts_it() -> None:
    envs = Simulated(run_ahead=9)
    envs.begin(2, 2)
    envs.step(0, 7)
    envs.end()
    envs.rows.reset()
    assert envs.metrics.read()["num_dropped_rows"] == 5
    envs.begin(2, 2)
    assert envs.rows.unmet().tolist() == [True, True]
    envs.step(0, 2)
    sample = envs.end()
    assert of(sample, 0, "t") == [0, 1]
    assert not sample.episodes


def test_ids_follow_from_env_and_number_and_differ_between_runners() -> None:
    ids = []
    for index in (0, 1):
        episodes = RunningEpisodes(RunnerConfig(worker_index=index), "p", 3)
        for chosen in (ints(0, 2), ints(2)):
            episodes.begin(chosen, chosen * 0, chosen * 0)
            ids += episodes.ids.running[chosen].tolist()
    assert ids[:3] == [0, 2, 5]
    assert len(set(ids)) == 6


def test_a_result_tells_of_all_fragments_together() -> None:
    episodes = RunningEpisodes(RunnerConfig(), "p", 2)
    episodes.begin(ints(1), ints(4), ints(0))
    for reward in (0.5, 2.0):
        episodes.step(ints(1), np.array([reward]))
    episodes.fragments[1] = 3
    result = episodes.result(1, False, True, None, has_rows=True)
    assert (result.episode_return, result.length, result.fragments) == (2.5, 2, 4)
    assert (result.eps_id, result.env_id, result.incarnation) == (1, 1, 4)
    assert (result.terminated, result.truncated, result.faulty) == (False, True, False)
    assert result.agent_policies == {"agent0": "p"}
    dropped = episodes.result(1, False, False, 1, has_rows=False)
    assert (dropped.agent_steps, dropped.fragments) == ({"agent0": 1}, 3)


def test_ids_that_go_on_from_others_are_never_used_twice() -> None:
    ids = EpisodeIds(0, 3)
    ids.begin(np.arange(3))
    ids.begin(1)
    assert ids.running.tolist() == [0, 4, 2]
    assert ids.following == 6
    ids.go_on_from(20)
    assert ids.running.tolist() == [0, 4, 2]
    ids.begin(np.array([0, 1]))
    assert ids.running.tolist() == [20, 21, 2]
    ids.go_on_from(5)  # less than its own
    ids.begin(2)
    assert ids.running.tolist() == [20, 21, 25]
