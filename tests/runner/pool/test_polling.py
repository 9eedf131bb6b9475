from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces import Discrete
from gymnasium.vector import SyncVectorEnv

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError, RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.env_results import ObservationStore
from envbus.runner.errors import ActorLostError, Fault, FaultCause, env_errors
from envbus.runner.pool.agent_results import ASYNC_RESET, DUMMY_AGENT, PollResult
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import Timeouts
from envbus.runner.workers.recycling import RecycleAfter
from tests.actors.agent_envs import CountingParallelEnv, DictEnv, RoundRobinEnv
from tests.envs import FailingEnv
from tests.runner.pool_envs import PATIENCE, GatedEnv
from tests.runner.sampling_scenes import counting
from tests.waiting import wait_until

Make = Callable[..., ActorPool]
GOES_ON = {"__all__": False}
OVER = {"__all__": True}


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    """Make pools whose caller resets; they are killed at the end of the test."""

    def _make(env_fns: Any, **kwargs: Any) -> ActorPool:
        pools.append(ActorPool(env_fns, **{"autoreset_mode": "Disabled", **kwargs}))
        return pools[-1]

    return _make


def act(env_ids: Any, action: Any = 1) -> dict[int, dict[str, Any]]:
    return {env_id: {DUMMY_AGENT: action} for env_id in env_ids}


def poll_all(pool: ActorPool, env_ids: Any) -> dict[int, dict[str, Any]]:
    """Poll until all of these envs have returned something; what they have, by env."""
    missing = set(env_ids)
    found: dict[int, dict[str, Any]] = {}
    while missing:
        result = pool.poll(timeout=PATIENCE)
        assert not result.late, f"no answer from {result.late}"
        found.update(by_env(result))
        missing -= set(result.observations)
    return found


def by_env(result: PollResult) -> dict[int, dict[str, Any]]:
    names = result._fields[:5]
    return {i: {name: getattr(result, name)[i] for name in names} for i in result.observations}


def poll_until_back(pool: ActorPool, env_id: int) -> PollResult:
    while True:
        result = pool.poll(timeout=PATIENCE)
        assert not result.late, f"no answer from {result.late}"
        if env_id in result.observations:
            return result


# --- envs with one agent --------------------------------------------------------------------


def test_poll_gives_six_dicts_by_env_and_agent(make: Make) -> None:
    pool = make(counting(2, length=1), num_actors=1)
    result = pool.poll(min_envs=2)
    observations, rewards, terminateds, truncateds, infos, off_policy_actions = result
    assert {i: o[DUMMY_AGENT].tolist() for i, o in observations.items()} == {
        0: [1, 0, 0, -1],
        1: [1, 0, 0, -1],
    }
    assert rewards == {0: {DUMMY_AGENT: 0.0}, 1: {DUMMY_AGENT: 0.0}}
    assert terminateds == truncateds == {i: {DUMMY_AGENT: False, **GOES_ON} for i in (0, 1)}
    assert infos == {i: {DUMMY_AGENT: {"episode": 1}} for i in (0, 1)}
    assert off_policy_actions == {}
    pool.send_actions(act([1], 7))
    observations, rewards, terminateds, truncateds, infos, _ = pool.poll()
    assert observations[1][DUMMY_AGENT].tolist() == [1, 1, 7, -1]
    assert rewards == {1: {DUMMY_AGENT: 11.0}}
    assert terminateds == {1: {DUMMY_AGENT: True, **OVER}}
    assert truncateds == {1: {DUMMY_AGENT: False, **GOES_ON}}
    assert infos == {1: {DUMMY_AGENT: {}}}


def test_try_reset_gives_the_sentinel_twice_and_poll_the_observation(make: Make) -> None:
    pool = make(counting(2))
    poll_all(pool, [0, 1])
    assert pool.try_reset(1, seed=5) == (ASYNC_RESET, ASYNC_RESET)
    result = pool.poll()
    assert result.observations[1][DUMMY_AGENT].tolist() == [2, 0, 0, 5]
    assert result.infos == {1: {DUMMY_AGENT: {"episode": 2}}}
    assert ASYNC_RESET == "async_reset_return"  # RLlib's


def test_try_reset_waits_on_request_and_leaves_the_others_alone(make: Make) -> None:
    pool = make(counting(3), num_actors=1)
    poll_all(pool, range(3))
    pool.send_actions(act([0, 2], 3))
    observations, infos = pool.try_reset(1, 5, {"map": "small"}, wait=True)
    assert {i: o[DUMMY_AGENT].tolist() for i, o in observations.items()} == {1: [2, 0, 0, 5]}
    assert infos == {1: {DUMMY_AGENT: {"episode": 2}}}
    assert sorted(poll_all(pool, [0, 2])) == [0, 2]
    assert pool.get_sub_environments()[1].get_attr("options") == [None, {"map": "small"}]
    observations, _ = pool.try_reset(seed=20, wait=True)
    assert [o[DUMMY_AGENT].tolist()[3] for o in observations.values()] == [20, 21, 22]


def test_try_reset_that_takes_too_long_is_told_and_polled_later(make: Make, tmp_path: Path) -> None:
    class SlowReset(GatedEnv):
        def reset(self, **kwargs: Any) -> Any:
            self.await_gate()
            return CountingEnv.reset(self, **kwargs)

    pool = make([functools.partial(SlowReset, tmp_path / "gate")])
    with pytest.raises(multiprocessing.TimeoutError, match="envs \\[0\\] were not reset"):
        pool.try_reset(0, wait=True, timeout=0.05)
    (tmp_path / "gate").touch()
    assert list(pool.poll(PATIENCE).observations) == [0]


def test_rows_for_which_there_was_no_memory_come_with_the_next_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def single(store: ObservationStore, env_id: int) -> Any:
        if env_id == 1:
            raise MemoryError
        return really_single(store, env_id)

    really_single = ObservationStore.single
    pool = make(counting(2), num_actors=0)
    poll_all(pool, [0, 1])
    pool.send_actions(act([0, 1], 7))
    monkeypatch.setattr(ObservationStore, "single", single)
    with pytest.raises(MemoryError):
        pool.poll(min_envs=2)
    monkeypatch.undo()
    result = pool.poll(min_envs=2)
    assert [result.observations[i][DUMMY_AGENT].tolist() for i in (0, 1)] == [[1, 1, 7, -1]] * 2
    monkeypatch.setattr(ObservationStore, "single", single)
    with pytest.raises(MemoryError):
        pool.try_reset(wait=True)
    monkeypatch.undo()
    assert poll_all(pool, [0, 1])[1]["observations"][DUMMY_AGENT].tolist() == [2, 0, 0, -1]


def test_nothing_is_reset_before_the_first_poll(make: Make) -> None:
    pool = make([DictEnv] * 2)
    first, _ = pool.get_sub_environments()
    assert first.get_attr("resets") == 0
    with pytest.raises(ValueError, match="Env 1 has not been reset"):
        pool.send_actions({1: {}})
    poll_all(pool, [0, 1])
    assert first.get_attr("resets") == 1


def test_the_first_poll_leaves_alone_what_was_reset_before(make: Make) -> None:
    pool = make(counting(3))
    pool.try_reset(1, seed=8)
    seen = poll_all(pool, range(3))
    assert [seen[i]["observations"][DUMMY_AGENT].tolist() for i in range(3)] == [
        [1, 0, 0, -1],
        [1, 0, 0, 8],
        [1, 0, 0, -1],
    ]
    other = make(counting(2))
    other.reset(seed=3)
    other.recv(min_envs=2)
    with pytest.raises(NoAsyncCallError, match="call `try_reset` or `send_actions` first"):
        other.poll()


def test_an_env_that_is_done_takes_no_actions_until_it_is_reset(make: Make) -> None:
    pool = make(counting(2, length=1))
    poll_all(pool, [0, 1])
    pool.send_actions(act([0, 1]))
    poll_all(pool, [0, 1])
    pool.try_reset(0)
    poll_all(pool, [0])
    with pytest.raises(ValueError, match="Env 1 is already done and cannot accept new actions"):
        pool.send_actions(act([0, 1]))
    pool.send_actions(act([0]))  # it was not sent before
    pool.try_reset(1)
    poll_all(pool, [0, 1])
    pool.send_actions(act([1]))
    assert list(pool.poll().observations) == [1]


@pytest.mark.parametrize(
    ("actions", "error", "text"),
    [
        ({2: {DUMMY_AGENT: 1}}, ValueError, "unknown env ids"),
        ({1: 3}, TypeError, "the actions of env 1 must be a dict by agent, not a int"),
        ({1: {}}, ValueError, "env 1 has one agent, 'agent0'; the actions are for"),
        ({1: {"other": 1}}, ValueError, "the actions are for \\['other'\\]"),
    ],
)
def test_wrong_actions_are_refused_before_anything_is_sent(
    make: Make, actions: Any, error: type[Exception], text: str
) -> None:
    pool = make(counting(2), num_actors=1)
    poll_all(pool, [0, 1])
    with pytest.raises(error, match=text):
        pool.send_actions({**act([0]), **actions})
    pool.send_actions({})
    pool.send_actions(act([0, 1]))
    with pytest.raises(AlreadyPendingCallError):
        pool.send_actions(act([0]))
    seen = poll_all(pool, [0, 1])
    assert [seen[i]["observations"][DUMMY_AGENT][1] for i in (0, 1)] == [1, 1]


def test_a_pool_that_resets_its_envs_itself_cannot_be_polled(make: Make) -> None:
    pool = make(counting(1), autoreset_mode="NextStep")
    for use in (pool.poll, pool.try_reset, pool.try_restart, lambda: pool.send_actions({})):
        with pytest.raises(ConfigError, match='make the pool with autoreset_mode="Disabled"'):
            use()


def test_what_is_polled_equals_gymnasium_s_own_stepping(make: Make) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode="Disabled")
    pool = make(["CartPole-v1"] * 2)
    first, _ = local.reset(seed=4)
    pool.reset(seed=4)
    seen = poll_all(pool, [0, 1])
    for _ in range(8):
        assert np.array_equal(first, [seen[i]["observations"][DUMMY_AGENT] for i in (0, 1)])
        assert seen[0]["observations"][DUMMY_AGENT].flags.writeable
        first, *_ = local.step(np.array([1, 0]))
        pool.send_actions({0: {DUMMY_AGENT: 1}, 1: {DUMMY_AGENT: 0}})
        seen = poll_all(pool, [0, 1])
    local.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_observations_have_the_form_of_their_space(make: Make, shared_memory: bool) -> None:
    def env() -> Any:
        env = gymnasium.make("Blackjack-v1")  # a Tuple of Discrete
        return gymnasium.wrappers.TransformObservation(
            env, lambda seen: {"cards": seen}, gymnasium.spaces.Dict(cards=env.observation_space)
        )

    pool = make([env], shared_memory=shared_memory)
    observation = pool.poll().observations[0][DUMMY_AGENT]
    assert observation in pool.get_observation_space(DUMMY_AGENT)


# --- waiting --------------------------------------------------------------------------------


def gated(folder: Path, num_envs: int) -> list[Callable[[], GatedEnv]]:
    return [functools.partial(GatedEnv, folder / str(i)) for i in range(num_envs)]


def test_poll_returns_who_is_ready(make: Make, tmp_path: Path) -> None:
    pool = make(gated(tmp_path, 3), num_actors=3)
    poll_all(pool, range(3))
    pool.send_actions(act(range(3)))
    nothing = pool.poll(timeout=0.3)
    assert (nothing.observations, nothing.late) == ({}, [0, 1, 2])
    (tmp_path / "1").touch()
    one = pool.poll(timeout=PATIENCE)  # a slow env does not hold it up
    assert (list(one.observations), one.late) == ([1], [])
    for _ in range(3):
        pool.send_actions(act([1]))
        assert list(pool.poll(timeout=PATIENCE).observations) == [1]
    for gate in "02":
        (tmp_path / gate).touch()
    assert sorted(pool.poll(min_envs=2, timeout=PATIENCE).observations) == [0, 2]


def test_poll_waits_for_more_for_a_while_only(make: Make, tmp_path: Path) -> None:
    pool = make(gated(tmp_path, 3), num_actors=3)
    poll_all(pool, range(3))
    pool.send_actions(act(range(3)))
    for gate in "01":
        (tmp_path / gate).touch()
    seen: list[int] = []
    while len(seen) < 2:  # at least one each time, though min_envs are never ready
        result = pool.poll(timeout=PATIENCE, min_envs=3, batch_wait=0.05)
        assert result.observations
        assert result.late == []
        seen += result.observations
    assert sorted(seen) == [0, 1]
    (tmp_path / "2").touch()
    pool.send_actions(act([0, 1]))
    assert sorted(pool.poll(batch_wait=PATIENCE).observations) == [0, 1, 2]  # all that are awaited


def test_polling_for_nothing_is_refused(make: Make) -> None:
    pool = make(counting(2))
    with pytest.raises(ValueError, match="min_envs must be at least 1 and at most 2"):
        pool.poll(min_envs=3)
    poll_all(pool, [0, 1])
    with pytest.raises(NoAsyncCallError):
        pool.poll()
    pool.stop()
    pool.stop()
    with pytest.raises(ClosedEnvironmentError):
        pool.poll()


# --- several agents -------------------------------------------------------------------------


def test_only_agents_with_an_observation_act_and_key_sets_may_differ(make: Make) -> None:
    pool = make([functools.partial(RoundRobinEnv, 3, 6)])
    assert pool.get_agent_ids() == {0, 1, 2}
    observations, rewards, terminateds, _, infos, _ = pool.poll()
    received: dict[int, list[float]] = {0: [], 1: [], 2: []}
    while not terminateds[0]["__all__"]:
        pool.send_actions({0: dict.fromkeys(observations[0], 1)})
        observations, rewards, terminateds, _, infos, _ = pool.poll()
        for agent, reward in rewards[0].items():
            received[agent].append(reward)
    assert infos == {0: {}}
    # 10 per step each, handed out when the agent's turn comes, or at the end.
    assert received == {0: [30, 30], 1: [10, 30, 20], 2: [20, 30, 10]}


def test_rewards_and_flags_without_an_observation_are_kept(make: Make) -> None:
    script = [
        ({"a": 1}, {"a": 1, "b": 2}, {"b": True, **GOES_ON}, GOES_ON, {}),
        ({"a": 2}, {"b": 3}, GOES_ON, GOES_ON, {}),
        ({"b": 3}, {"b": 4}, {"b": False, **GOES_ON}, GOES_ON, {}),
        ({"b": 4}, {"a": 5}, GOES_ON, GOES_ON, {}),
        ({}, {"a": 6}, OVER, GOES_ON, {}),
    ]
    pool = make([functools.partial(DictEnv, script)])
    rewards, flags = [], []
    pool.poll()
    for _ in script:
        pool.send_actions({0: {}})
        result = pool.poll()
        rewards.append(result.rewards[0])
        flags.append(result.terminateds[0])
    assert rewards == [{"a": 1}, {}, {"b": 9}, {}, {"a": 11}]
    assert flags == [GOES_ON, GOES_ON, {"b": True, **GOES_ON}, GOES_ON, OVER]
    assert result.observations == {0: {}}  # the missing last ones stay missing


def test_what_was_kept_for_an_agent_is_gone_with_the_episode(make: Make) -> None:
    script = [({"a": 1}, {"a": 1, "b": 2}, GOES_ON, GOES_ON, {})]
    pool = make([functools.partial(DictEnv, script)])
    pool.poll()
    pool.send_actions({0: {}})
    pool.poll()
    pool.try_reset(0)
    assert pool.poll().rewards == {0: {"a": 0.0, "b": 0.0}}


def test_an_env_without_all_is_named_and_the_others_lose_nothing(make: Make) -> None:
    wrong = [({"a": 1}, {}, {"a": False}, GOES_ON, {})]
    pool = make([DictEnv, functools.partial(DictEnv, wrong)], num_actors=1)
    poll_all(pool, [0, 1])
    pool.send_actions({0: {"a": 1}, 1: {"a": 1}})
    with pytest.raises(ValueError, match="terminateds without '__all__'") as caught:
        pool.poll()
    assert [error.env_id for error in env_errors(caught.value)] == [1]
    assert list(pool.poll().observations) == [0]
    pool.try_reset(1)
    assert list(pool.poll().observations) == [1]


def test_all_follows_from_the_agents_of_a_pettingzoo_env(make: Make) -> None:
    pool = make([functools.partial(CountingParallelEnv, {"x": 1, "y": 2, "z": 2}, both=["x"])])
    pool.poll()
    pool.send_actions({0: {"x": 1, "y": 1, "z": 1}})
    _, _, terminateds, truncateds, _, _ = pool.poll()
    assert terminateds == {0: {"x": True, "y": False, "z": False, "__all__": False}}
    assert truncateds == {0: {"x": True, "y": False, "z": False, "__all__": False}}
    pool.send_actions({0: {"y": 1, "z": 2}})
    _, rewards, terminateds, truncateds, _, _ = pool.poll()
    assert rewards == {0: {"y": 1.0, "z": 2.0}}
    assert terminateds == {0: {"y": True, "z": True, "__all__": True}}
    assert truncateds == {0: {"y": False, "z": False, "__all__": False}}
    with pytest.raises(ValueError, match="Env 0 is already done"):
        pool.send_actions({0: {}})


def test_infos_without_an_observation_and_common_ones_are_carried(make: Make) -> None:
    infos = {"b": {"why": "dead"}, "__common__": {"tick": 3}}
    pool = make([functools.partial(DictEnv, [({"a": 1}, {}, GOES_ON, GOES_ON, infos)])])
    assert pool.poll().infos == {0: {"__common__": {"seed": None}}}
    pool.send_actions({0: {"a": 1}})
    assert pool.poll().infos == {0: infos}


def test_an_env_none_of_whose_agents_acts_is_stepped_by_an_empty_dict(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    script = [({}, {}, GOES_ON, GOES_ON, {})] * 3 + [({"a": 1}, {"a": 1}, GOES_ON, GOES_ON, {})]
    pool = make([functools.partial(DictEnv, script)])
    observations = pool.poll().observations
    with caplog.at_level(logging.WARNING, "envbus.runner.pool.polling"):
        for _ in script:
            pool.send_actions({0: dict.fromkeys(observations[0], 1)})
            observations = pool.poll().observations
    assert observations == {0: {"a": 1}}
    assert pool.get_sub_environments()[0].get_attr("actions") == [{"a": 1, "b": 1}, {}, {}, {}]
    assert [r.getMessage()[:41] for r in caplog.records] == [
        "env 0: no agent has an observation, so th"
    ]


def test_agents_have_spaces_of_their_own(make: Make) -> None:
    pool = make([DictEnv] * 2)
    assert pool.is_multi_agent
    assert pool.get_agent_ids() == {"a", "b"}
    assert pool.get_action_space("a") == DictEnv.action_spaces["a"]
    assert pool.get_observation_space("b", env_id=1) is pool.observation_space["b"]
    assert pool.action_space is pool.single_action_space
    assert pool.action_space.sample().keys() == {"a", "b"}
    with pytest.raises(TypeError, match="no observation space for agent 'c'"):
        pool.get_observation_space("c")
    one = make(counting(3))
    assert not one.is_multi_agent
    assert one.get_agent_ids() == {DUMMY_AGENT}
    assert one.get_action_space(DUMMY_AGENT) is one.single_action_space
    assert one.action_space.shape == (3,)
    with pytest.raises(KeyError, match="'agent0', not 'a'"):
        one.get_action_space("a")


def test_envs_with_different_agents_cannot_be_in_one_pool(make: Make) -> None:
    with pytest.raises(RuntimeError, match="Env 1 has"):
        make([functools.partial(RoundRobinEnv, 2), functools.partial(RoundRobinEnv, 3)])


def test_agents_may_be_called_anything(make: Make) -> None:
    agents = {7: 3, ("team", 1): 3, np.str_("text"): 3, "ü": 3}
    pool = make([functools.partial(CountingParallelEnv, agents)], local_links=False)
    assert list(pool.poll().observations[0]) == list(agents)
    pool.send_actions({0: {agent: place for place, agent in enumerate(agents)}})
    assert list(pool.poll().rewards[0].values()) == [0.0, 1.0, 2.0, 3.0]


def test_the_array_side_has_records_of_envs_with_agents(make: Make) -> None:
    until = functools.partial(CountingParallelEnv, {"x": 1, "y": 2})
    pool = make([until] * 2, autoreset_mode="NextStep")
    pool.reset(seed=1)
    batch = pool.recv(min_envs=2)
    assert [record["agents"] for record in batch.observations] == [["x", "y"]] * 2
    for _ in range(2):
        pool.send([{"x": 1, "y": 2}] * 2, batch.env_ids)
        batch = pool.recv(min_envs=2)
    assert batch.rewards.tolist() == [2.0, 2.0]
    assert batch.terminations.tolist() == [True, True]
    pool.send([{}] * 2, batch.env_ids)
    assert [record["agents"] for record in pool.recv(min_envs=2).observations] == [["x", "y"]] * 2


# --- faults and restarts --------------------------------------------------------------------


class FailsOnce(DictEnv):
    """Fails in the first step of its first life; an agent is owed a reward then."""

    def __init__(self, flag: Path) -> None:
        super().__init__([({"a": 1}, {"b": 5}, GOES_ON, GOES_ON, {})])
        self.flag = flag

    def step(self, actions: Mapping[Any, Any]) -> Any:
        if self.time == 1 and not self.flag.exists():
            self.flag.touch()
            raise RuntimeError("broken")
        return super().step(dict(actions))


def test_a_failed_env_is_told_beside_the_others_and_begins_again_by_itself(
    make: Make, tmp_path: Path
) -> None:
    pool = make(
        [functools.partial(FailsOnce, tmp_path / "flag"), DictEnv],
        num_actors=1,
        restart=RestartPolicy(backoff=0.0),
    )
    poll_all(pool, [0, 1])
    for _ in range(2):
        pool.send_actions({0: {}, 1: {}})
        result = pool.poll()
        while not result.faults and 1 not in result.observations:
            result = pool.poll()
    assert [(fault.env_id, fault.cause) for fault in result.faults] == [(0, FaultCause.ERROR)]
    assert result.observations.keys() == {1}
    back = poll_until_back(pool, 0)
    assert back.incarnations[0] == 1
    assert back.rewards[0] == {"a": 0.0, "b": 0.0}  # nothing of the former episode
    pool.send_actions({0: {}})
    assert pool.poll().rewards[0] == {}


def test_a_killed_actor_is_a_fault_of_its_envs_and_the_others_go_on(make: Make) -> None:
    pool = make(
        counting(2),
        num_actors=2,
        restart=RestartPolicy(backoff=0.0),
    )
    poll_all(pool, [0, 1])
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    pool.send_actions(act([0, 1]))
    faults: list[Fault] = []
    incarnations: dict[int, int] = {}
    while incarnations != {0: 1, 1: 0}:
        result = pool.poll(timeout=PATIENCE)
        assert not result.late
        faults += result.faults
        incarnations.update(result.incarnations)
    assert [(fault.env_id, fault.cause) for fault in faults] == [(0, FaultCause.CRASH)]


def test_when_all_envs_are_gone_poll_says_so(make: Make) -> None:
    pool = make(counting(2), num_actors=1)
    poll_all(pool, [0, 1])
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    pool.send_actions(act([0, 1]))
    for _ in range(3):
        with pytest.raises(ActorLostError):
            pool.poll(timeout=PATIENCE)
    with pytest.raises(ActorLostError):
        pool.get_sub_environments()[0].call("render")
    with pytest.raises(ActorLostError):
        pool.try_restart(0)


def test_an_env_that_never_works_is_given_up_and_a_waiting_reset_says_so(make: Make) -> None:
    pool = make(
        [functools.partial(FailingEnv, "reset", 1), CountingEnv],
        num_actors=1,
        restart=RestartPolicy(max_restarts=0),
    )
    poll_all(pool, [0, 1])
    with pytest.raises(RestartLimitError, match="failing on purpose"):
        pool.try_reset(0, wait=True)
    pool.send_actions(act([1]))
    result = pool.poll()
    assert [fault.given_up for fault in result.faults] == [True]


def test_a_waiting_reset_of_all_takes_nothing_away_where_one_env_is_given_up(make: Make) -> None:
    pool = make(
        [CountingEnv, functools.partial(FailingEnv, "reset", 1)],
        num_actors=1,
        restart=RestartPolicy(max_restarts=0),
    )
    poll_all(pool, [0, 1])
    with pytest.raises(RestartLimitError, match="failing on purpose"):
        pool.try_reset(wait=True)
    assert list(pool.poll(timeout=PATIENCE).observations) == [0]


class SlowToBeginAgainEnv(CountingEnv):
    """Its reset waits for a file, if the env is not the first that was made there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1000)
        self._gate = folder / "gate" if (folder / "made").exists() else None
        (folder / "made").touch()

    def reset(self, **kwargs: Any) -> Any:
        if self._gate is not None:
            wait_until(self._gate.exists, "the gate")
        return super().reset(**kwargs)


def test_an_env_whose_new_life_began_too_late_can_be_reset(make: Make, tmp_path: Path) -> None:
    pool = make([functools.partial(SlowToBeginAgainEnv, tmp_path)], timeouts=Timeouts(reset=1.3))
    pool.poll()
    pool.try_restart(0)
    with pytest.raises(multiprocessing.TimeoutError):
        pool.poll()
    (tmp_path / "gate").touch()
    pool.try_reset(0)
    assert pool.poll(PATIENCE).observations[0][DUMMY_AGENT][1] == 0
    pool.send_actions(act([0]))
    assert pool.poll(PATIENCE).observations[0][DUMMY_AGENT][1] == 1


def test_try_restart_makes_an_env_anew_and_leaves_the_others_alone(make: Make) -> None:
    pool = make(counting(3), num_actors=1)
    pool.reset(seed=1)
    poll_all(pool, range(3))
    envs = pool.get_sub_environments()
    for env in envs:
        env.set_attr("mark", env.env_id)
    assert pool.try_restart(1) is None
    pool.send_actions(act([0]))
    seen = poll_all(pool, [0, 1])
    assert seen[1]["observations"][DUMMY_AGENT].tolist()[:2] == [1, 0]
    assert seen[1]["observations"][DUMMY_AGENT][3] not in (-1.0, 2.0)  # seeded anew
    assert seen[0]["observations"][DUMMY_AGENT].tolist() == [1, 1, 1, 1]
    with pytest.raises(AttributeError):
        envs[1].get_attr("mark")
    assert envs[2].get_attr("mark") == 2
    pool.send_actions(act([0]))
    with pytest.raises(AlreadyPendingCallError):
        pool.try_restart()
    poll_all(pool, [0])
    pool.try_restart()
    result = pool.poll(min_envs=3)
    assert result.incarnations == {0: 1, 1: 2, 2: 1}


def test_envs_whose_actor_is_exchanged_begin_again_by_themselves(make: Make) -> None:
    pool = make(counting(2, length=2), num_actors=1, recycle_after=RecycleAfter(episodes=2))
    pids = pool.actor_pids()
    incarnations: set[int] = set()
    for _ in range(40):
        result = pool.poll(timeout=PATIENCE)
        assert result.faults == []
        incarnations |= set(result.incarnations.values())
        for env_id, flags in result.terminateds.items():
            if flags["__all__"] or result.truncateds[env_id]["__all__"]:
                pool.try_reset(env_id)
            else:
                pool.send_actions(act([env_id]))
    assert {0, 1} <= incarnations
    assert pool.actor_pids() != pids


# --- single envs ----------------------------------------------------------------------------


def test_methods_of_one_env_are_called_by_name_while_others_step(
    make: Make, tmp_path: Path
) -> None:
    pool = make(gated(tmp_path, 2), num_actors=2)
    poll_all(pool, [0, 1])
    pool.send_actions(act([0]))
    env = pool.get_sub_environments()[1]
    env.set_attr("count", 9)
    assert env.get_attr("count") == 9
    assert env.call("has_wrapper_attr", "count") is True
    assert env.exec_func(lambda env, more: env.count + more, 5) == 14
    assert env.render().tolist() == [[[9, 9, 9]]]
    assert pool.try_render(1).tolist() == [[[9, 9, 9]]]
    with pytest.raises(AttributeError, match="nothing"):
        env.call("nothing")
    with pytest.raises(ValueError, match="use `step` directly"):
        env.call("step", 1)
    with pytest.raises(ValueError, match="unknown env id 2"):
        pool.try_render(2)
    (tmp_path / "0").touch()
    assert list(pool.poll(PATIENCE).observations) == [0]
    assert len(pool.try_render()) == 2


def test_a_call_that_takes_too_long_is_told_and_its_answer_dropped(
    make: Make, tmp_path: Path
) -> None:
    pool = make(gated(tmp_path, 1), timeouts=Timeouts(call=1.0))
    pool.poll()
    pool.send_actions(act([0]))
    env = pool.get_sub_environments()[0]
    with pytest.raises(TimeoutError):
        env.get_attr("count")
    (tmp_path / "0").touch()
    assert list(pool.poll(PATIENCE).observations) == [0]
    assert env.get_attr("count") == 1


def test_the_methods_of_an_env_with_agents_are_its_own(make: Make) -> None:
    pool = make([DictEnv])
    pool.try_reset(0, wait=True)
    env = pool.get_sub_environments()[0]
    assert env.call("ask", "resets") == 1
    assert env.exec_func(lambda env: type(env.unwrapped).__name__) == "DictEnv"


class Renaming:
    """An env of agents that it does not name beforehand: each is there for one episode."""

    agents: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.episode = 0

    def get_agent_ids(self) -> set[str]:
        return set()

    def get_observation_space(self, agent_id: str) -> Discrete:
        return Discrete(9)

    def get_action_space(self, agent_id: str) -> Discrete:
        return Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        return {f"agent-{self.episode}": 0}, {}

    def step(self, actions: Any) -> Any:
        return {}, {}, {"__all__": True}, {"__all__": False}, {}


def test_spaces_of_agents_that_were_not_named_are_kept_for_two_episodes(make: Make) -> None:
    pool = make([Renaming])
    known: list[weakref.ref[Any]] = []
    for episode in range(1, 5):
        pool.try_reset(0)
        assert poll_all(pool, [0])[0]["observations"] == {f"agent-{episode}": 0}
        space = pool.get_action_space(f"agent-{episode}")
        assert pool.get_action_space(f"agent-{episode}") is space, "it was asked for once more"
        if episode > 1:
            assert pool.get_action_space("agent-1") == space
        known.append(weakref.ref(space))
        del space
    gc.collect()
    assert [one() is not None for one in known] == [True, False, True, True]
