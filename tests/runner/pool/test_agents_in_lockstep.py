from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from envbus.actors.env.agents import ALL
from envbus.runner.errors import Fault, FaultCause
from envbus.runner.pool.agents_in_lockstep import AgentsEpisode, AgentsInLockstep, Record
from envbus.runner.pool.pool import ActorPool
from tests.actors.agent_envs import CountingParallelEnv, RoundRobinEnv

Make = Callable[..., tuple[ActorPool, AgentsInLockstep]]


def record(seen: dict[str, int], **over: bool) -> Record:
    return {
        "observations": seen,
        "rewards": dict.fromkeys(seen, 1.0),
        "terminateds": {ALL: False, **over},
        "truncateds": {ALL: False},
        "infos": {},
    }


def fault(life: int) -> Fault:
    return Fault(env_id=0, cause=FaultCause.CRASH, message="gone", restarts=life)


# --- one episode ------------------------------------------------------------------------------


def test_a_fault_truncates_the_agents_that_are_not_done_with_what_they_saw_last() -> None:
    episode = AgentsEpisode()
    episode.take(record({"a": 1, "b": 1, "c": 1}), 0)
    episode.take(record({"b": 2}, c=True), 0)
    episode.fail(fault(0))
    told = episode.take_known()
    assert told is not None
    assert told["observations"] == {"a": 1, "b": 2}
    assert told["rewards"] == {"a": 0.0, "b": 0.0}
    assert told["terminateds"] == {"a": False, "b": False, ALL: False}
    assert told["truncateds"] == {"a": True, "b": True, ALL: True}
    assert told["infos"]["a"] == {"fault": {"cause": "crash", "error": "gone", "restarts": 0}}
    assert episode.take_known() is None
    assert episode.begins_by_itself


def test_the_first_record_of_the_next_episode_waits_until_the_end_of_this_one_is_told() -> None:
    episode = AgentsEpisode()
    episode.take(record({"a": 1}), 0)
    assert not episode.continues(1)
    episode.keep_first(record({"a": 9}), 1)
    episode.fail(fault(0))
    cut, first = episode.take_known(), episode.take_known()
    assert cut is not None
    assert cut["truncateds"][ALL]
    assert first == record({"a": 9})
    assert episode.runs
    assert not episode.begins_by_itself
    assert episode.continues(1)


def test_a_fault_of_a_former_life_ends_no_episode() -> None:
    episode = AgentsEpisode()
    episode.take(record({"a": 1}), 1)
    episode.fail(fault(0))
    assert episode.take_known() is None
    assert episode.runs
    assert not episode.begins_by_itself


def test_a_fault_after_the_end_of_an_episode_is_not_told() -> None:
    episode = AgentsEpisode()
    episode.take(record({"a": 1}, **{ALL: True}), 0)
    episode.fail(fault(0))
    assert episode.take_known() is None
    assert episode.begins_by_itself


def test_an_episode_that_nobody_has_seen_is_forgotten_when_it_fails_too() -> None:
    episode = AgentsEpisode()
    episode.take(record({"a": 1}), 0)
    episode.keep_first(record({"a": 9}), 1)
    episode.fail(fault(0))
    episode.fail(fault(1))
    cut = episode.take_known()
    assert cut is not None
    assert cut["infos"]["a"]["fault"]["restarts"] == 0
    assert episode.take_known() is None
    assert episode.begins_by_itself


# --- all envs ---------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Make]:
    pools = []

    def start(env_fns: list[Any], **settings: Any) -> tuple[ActorPool, AgentsInLockstep]:
        pool = ActorPool(env_fns, **{"num_actors": 0, **settings})
        pools.append(pool)
        return pool, AgentsInLockstep(pool)

    yield start
    for pool in pools:
        pool.close(terminate=True)


def act(records: list[Record]) -> list[dict[Any, int]]:
    return [dict.fromkeys(one["observations"], 1) for one in records]


@pytest.mark.parametrize(
    "env",
    [partial(RoundRobinEnv, 3, 7), partial(CountingParallelEnv, {"x": 2, "y": 5}, cut=["y"])],
)
def test_an_env_whose_episode_is_over_is_reset_by_the_next_step(
    make: Make, env: Callable[[], Any]
) -> None:
    _, lockstep = make([env, env])
    alone = env()
    records = lockstep.reset(None, None)
    assert str(records[0]["observations"]) == str(alone.reset()[0])
    is_over, ends = False, 0
    for _ in range(20):
        actions = act(records)
        records = lockstep.step(actions)
        if is_over:
            assert str(records[1]["observations"]) == str(alone.reset()[0])
            is_over = False
            continue
        observations, rewards, *_ = alone.step(actions[1])
        assert str(records[1]["observations"]) == str(observations)
        assert records[1]["rewards"] == rewards
        is_over = records[1]["terminateds"][ALL] or records[1]["truncateds"][ALL]
        ends += is_over
    assert ends >= 2


def test_each_env_gets_a_seed_of_its_own(make: Make) -> None:
    _, lockstep = make([partial(CountingParallelEnv, {"x": 9})] * 2)
    infos = [one["infos"] for one in lockstep.reset(5, None)]
    assert infos == [{"x": {"seed": 5}}, {"x": {"seed": 6}}]


class FragileEnv(CountingParallelEnv):
    """Raises where the action of x is 2."""

    def step(self, actions: dict[Any, Any]) -> Any:
        if actions.get("x") == 2:
            raise ValueError("fragile")
        return super().step(actions)


def test_one_env_fails_and_the_others_go_on(make: Make) -> None:
    pool, lockstep = make([partial(FragileEnv, {"x": 9, "y": 1})] * 2, restart=True)
    records = lockstep.reset(0, None)
    lockstep.step(act(records))
    failed, other = lockstep.step([{"x": 2}, {"x": 1}])
    assert failed["observations"].keys() == {"x"}  # y was done
    np.testing.assert_array_equal(failed["observations"]["x"], [0, 1])
    assert failed["truncateds"] == {"x": True, ALL: True}
    assert failed["infos"]["x"]["fault"]["cause"] == "error"
    assert other["observations"]["x"].tolist() == [0, 2]
    begun, other = lockstep.step([{}, {"x": 1}])
    assert begun["observations"].keys() == {"x", "y"}
    assert not begun["truncateds"][ALL]
    assert other["observations"]["x"].tolist() == [0, 3]
    assert pool.statistics().faults == {"error": 1}


def test_envs_whose_process_is_killed_end_their_episodes_and_begin_anew(make: Make) -> None:
    env = partial(CountingParallelEnv, {"x": 50, "y": 50})
    pool, lockstep = make([env] * 4, num_actors=2, restart=True)
    records = lockstep.reset(0, None)
    lockstep.step(act(records))
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    cut: set[int] = set()
    while not cut:  # what the step had sent before it was killed counts
        records = lockstep.step(act(records))
        cut = {i for i, one in enumerate(records) if one["truncateds"][ALL]}
    assert cut == {0, 1}
    assert [records[i]["truncateds"] for i in cut] == [{"x": True, "y": True, ALL: True}] * 2
    assert [one["infos"]["y"]["fault"]["cause"] for one in records[:2]] == ["crash"] * 2
    steps = int(records[2]["observations"]["x"][1])
    records = lockstep.step(act(records))
    assert [int(one["observations"]["x"][1]) for one in records] == [0, 0, steps + 1, steps + 1]
    lockstep.step(act(records))
