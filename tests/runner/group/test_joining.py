from __future__ import annotations

from typing import Any

import numpy as np

from envbus.runner.batches.metrics import EpisodeResult, MetricsDelta
from envbus.runner.errors import Fault, FaultCause
from envbus.runner.group.joining import RunnerFault, RunnerPart, join
from envbus.runner.group.protocol import Report


def result(env_id: int, eps_id: int) -> EpisodeResult:
    return EpisodeResult(
        eps_id=eps_id,
        env_id=env_id,
        incarnation=0,
        episode_return=1.0,
        length=1,
        agent_returns={},
        agent_steps={},
        agent_policies={},
        terminated=True,
        truncated=False,
        faulty=False,
        fragments=1,
        unrecorded_reward=0.0,
        custom_metrics={},
    )


def part(runner: int, first_env: int, rows: dict[str, list[int]], **report: Any) -> RunnerPart:
    given: dict[str, Any] = {"late": (), "faults": (), "num_episodes": 0} | report
    results = given.pop("results", [])
    columns = {
        policy_id: {
            "obs": np.array(env_ids, np.float32),
            "env_id": np.array(env_ids, np.int64),
        }
        for policy_id, env_ids in rows.items()
    }
    for policy in columns.values():
        for column in policy.values():
            column.flags.writeable = False  # as they come in a message
    return RunnerPart(
        runner,
        first_env,
        columns,
        env_steps=sum(map(len, rows.values())),
        report=Report(
            metrics=MetricsDelta(results=results, counts={}),
            timers={},
            iterations=0,
            connectors={},
            connector_metrics={},
            **given,
        ).shifted(first_env),
    )


def test_rows_are_ordered_by_runner_and_env_ids_count_through() -> None:
    sample = join([part(1, 2, {"p": [0, 1]}), part(0, 0, {"p": [0, 1, 1], "q": [0]})])
    assert sample.runners == (0, 1)
    assert sample["p"]["env_id"].tolist() == [0, 1, 1, 2, 3]
    assert sample["p"]["obs"].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert sample["q"]["env_id"].tolist() == [0]
    assert sample.env_steps == 6
    sample["p"]["obs"][0] = 5.0  # the caller's own


def test_late_envs_faults_and_episodes_are_those_of_the_group() -> None:
    fault = Fault(env_id=1, cause=FaultCause.CRASH, message="", restarts=0)
    gone = RunnerFault(runner=2, cause=FaultCause.CRASH, message="", restarts=0, lost_share=True)
    earlier, mine = result(0, 7), result(1, 8)
    sample = join(
        [
            part(0, 0, {"p": [0]}, late=(0,)),
            part(1, 4, {"p": [1]}, faults=(fault,), results=[earlier, mine], num_episodes=1),
        ],
        late_runners=[3],
        runner_faults=[gone],
    )
    assert sample.late == (0,)
    assert [fault.env_id for fault in sample.faults] == [5]
    assert [(episode.env_id, episode.eps_id) for episode in sample.episodes] == [(5, 8)]
    assert sample.late_runners == (3,)
    assert sample.runner_faults == (gone,)


def test_no_parts_are_an_empty_sample() -> None:
    sample = join([], late_runners=[0, 1])
    assert (len(sample), sample.agent_steps, sample.runners) == (0, 0, ())
