from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.columns import ColumnFragments
from envbus.runner.faults import Fault, FaultCause
from envbus.runner.metrics import SampleMetrics
from envbus.runner.sampling import Demand, Phase, RunnerConfig, Sample

#: Steps of an episode.
LENGTH = 5


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


class Simulated:
    """Two envs whose observation counts their steps; the policy's version is `version`."""

    def __init__(self, **config: Any) -> None:
        self.metrics = SampleMetrics()
        self.rows = ColumnFragments(RunnerConfig(**config), "p", 2, self.metrics)
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
        self.rows.take_steps(ids, seen, np.ones(1), done, ~done & False)

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
        self.rows.begin(Demand(ints(*quotas), "env_steps", False))

    def end(self) -> Sample:
        return self.rows.end((), 0)


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
    envs.rows.begin(Demand(ints(3, 4), "env_steps", True))
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
