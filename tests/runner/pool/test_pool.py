from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate

from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.bus.errors import ClosedError, ConfigError, RestartLimitError, StartError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.env_results import Batch
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import ActorLostError, FaultCause
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import Timeouts
from tests.envs import CustomSpaceEnv, FailingEnv, HangingEnv, SpaceEnv, all_spaces
from tests.integration.group_children import is_alive, refused_in_a_fork, wait_until
from tests.runner.pool_envs import (
    PATIENCE,
    EchoEnv,
    GatedEnv,
    KeyEnv,
    PidEnv,
    TouchingEnv,
    UnpicklableHere,
    killed_at_the_end,
    noted,
    receive_all,
    receive_for_ever,
    receive_until_back,
    split,
    still_alive,
)
from tests.runner.sampling_scenes import counting
from tests.waiting import pass_time

SHARED = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
Make = Callable[..., ActorPool]


@pytest.fixture
def make() -> Iterator[Make]:
    yield from killed_at_the_end(ActorPool)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# --- reset, send, recv ----------------------------------------------------------------------


@SHARED
@pytest.mark.parametrize("num_actors", [1, 2, 3])
def test_all_envs_answer_a_reset_and_each_step(
    make: Make, num_actors: int, shared_memory: bool
) -> None:
    pool = make(counting(3), num_actors=num_actors, shared_memory=shared_memory)
    pool.reset(seed=5)
    rows = receive_all(pool, range(3))
    assert [rows[i]["observation"].tolist() for i in range(3)] == [
        [1, 0, 0, 5 + i] for i in range(3)
    ]
    for step in range(1, 4):
        pool.send(np.array([10, 20, 30]) + step)
        rows = receive_all(pool, range(3))
        for i in range(3):
            assert rows[i]["observation"].tolist() == [1, step, 10 * (i + 1) + step, 5 + i]
            assert rows[i]["reward"] == 10 + step


@SHARED
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_each_env_goes_the_way_of_a_plain_env(make: Make, env_id: str, shared_memory: bool) -> None:
    num_envs, steps = 4, 60
    pool = make([env_id] * num_envs, num_actors=2, shared_memory=shared_memory)
    pool.single_action_space.seed(1)
    actions = [[pool.single_action_space.sample() for _ in range(steps)] for _ in range(num_envs)]
    ways: list[list[tuple[Any, ...]]] = [[] for _ in range(num_envs)]
    pool.reset(seed=3)
    while any(len(way) <= steps for way in ways):
        batch = pool.recv(max_envs=3, timeout=PATIENCE)
        again = []
        for row, i in enumerate(batch.env_ids):
            observation = _row(batch.observations, row)
            flags = (bool(batch.terminations[row]), bool(batch.truncations[row]))
            ways[i].append((observation, float(batch.rewards[row]), *flags))
            if len(ways[i]) <= steps:
                again.append(i)
        if again:
            pool.send(np.asarray([actions[i][len(ways[i]) - 1] for i in again]), again)
    for i, way in enumerate(ways):
        # Gymnasium's own vector env over this one env: what autoreset means is its to say.
        plain = SyncVectorEnv([lambda: gymnasium.make(env_id)])
        observation, _ = plain.reset(seed=3 + i)
        expected: list[tuple[Any, ...]] = [(_row(observation, 0), 0.0, False, False)]
        for action in actions[i]:
            observation, reward, terminated, truncated, _ = plain.step(np.asarray([action]))
            flags = (bool(terminated[0]), bool(truncated[0]))
            expected.append((_row(observation, 0), float(reward[0]), *flags))
        plain.close()
        assert way == expected


def test_after_the_batch_wait_whoever_is_ready_is_returned(make: Make, tmp_path: Path) -> None:
    envs = [CountingEnv, partial(GatedEnv, tmp_path / "open")]
    pool = make(envs, num_actors=2)
    pool.reset()
    batch = pool.recv(2, timeout=PATIENCE, batch_wait=PATIENCE)
    assert sorted(batch.env_ids.tolist()) == [0, 1]
    pool.send([1, 1])
    batch = pool.recv(2, timeout=PATIENCE, batch_wait=0.01)
    assert (batch.env_ids.tolist(), batch.late) == ([0], [])
    with pytest.raises(ConfigError, match="batch_wait must be a number"):
        pool.recv(2, batch_wait=True)
    with pytest.raises(ConfigError, match="batch_wait must be at least 0, not -1"):
        pool.recv(2, batch_wait=-1)


def _row(observations: Any, row: int) -> Any:
    if isinstance(observations, tuple):
        return tuple(part[row].tolist() for part in observations)
    return observations[row].tolist()


def test_whoever_is_ready_first_is_served_first(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make([partial(GatedEnv, gate), CountingEnv, CountingEnv], num_actors=3)
    pool.reset()
    receive_all(pool, range(3))
    pool.send(np.zeros(3, np.int64))
    assert set(receive_all(pool, [1, 2])) == {1, 2}
    gate.touch()
    assert pool.recv(timeout=PATIENCE).env_ids.tolist() == [0]


def test_an_env_that_does_not_answer_does_not_starve_the_others(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make([partial(GatedEnv, gate), *counting(3)], num_actors=4)
    pool.reset()
    receive_all(pool, range(4))
    pool.send(np.zeros(4, np.int64))
    steps = [0] * 4
    while min(steps[1:]) < 100:
        batch = pool.recv(timeout=PATIENCE)
        assert batch.late == []
        for i in batch.env_ids:
            steps[i] += 1
        pool.send(np.zeros(len(batch.env_ids), np.int64), batch.env_ids)
    assert steps[0] == 0
    gate.touch()
    while not steps[0]:
        for i in pool.recv(timeout=PATIENCE).env_ids:
            steps[i] += 1


def test_two_halves_are_stepped_alternately(make: Make) -> None:
    pool = make(counting(4), num_actors=2)
    halves = [[0, 1], [2, 3]]
    pool.reset(seed=0)
    receive_all(pool, range(4))
    pool.send(np.array([1, 1]), halves[0])
    rows: dict[int, Any] = {}
    for step in range(2, 30):
        pool.send(np.array([step, step]), halves[(step - 1) % 2])
        while not rows.keys() >= set(halves[step % 2]):
            rows.update(split(pool.recv(timeout=PATIENCE)))
        for i in halves[step % 2]:
            assert rows.pop(i)["observation"].tolist() == [1, step // 2, step - 1, i]


def test_an_actor_may_hold_several_requests(make: Make) -> None:
    pool = make(counting(6), num_actors=1)
    pool.reset()
    receive_all(pool, range(6))
    for i in reversed(range(6)):
        pool.send(np.array([i]), [i])
    rows = receive_all(pool, range(6))
    assert [int(rows[i]["observation"][2]) for i in range(6)] == list(range(6))


def test_actions_follow_the_order_of_the_env_ids(make: Make) -> None:
    for shared_memory in (True, False):
        pool = make(counting(4), num_actors=2, shared_memory=shared_memory)
        pool.reset()
        receive_all(pool, range(4))
        pool.send(np.array([33, 11, 0, 22]), np.array([3, 1, 0, 2]))
        rows = receive_all(pool, range(4))
        assert [int(rows[i]["observation"][2]) for i in range(4)] == [0, 11, 22, 33]


def test_max_envs_leaves_the_rest_for_the_next_call(make: Make) -> None:
    pool = make(counting(5), num_actors=1)
    pool.reset()
    first = pool.recv(min_envs=5, timeout=PATIENCE)
    assert len(first.env_ids) == 5
    pool.send(np.zeros(5, np.int64))
    assert len(pool.recv(2, 2, timeout=PATIENCE).env_ids) == 2
    assert len(pool.recv(2, 2, timeout=PATIENCE).env_ids) == 2
    assert len(pool.recv(2, 2, timeout=PATIENCE).env_ids) == 1
    with pytest.raises(NoAsyncCallError, match="Nothing to receive"):
        pool.recv()


def test_min_envs_is_waited_for(make: Make) -> None:
    pool = make(counting(4), num_actors=4)
    pool.reset()
    assert sorted(pool.recv(min_envs=4, timeout=PATIENCE).env_ids) == [0, 1, 2, 3]
    pool.send(np.zeros(2, np.int64), [1, 2])
    assert sorted(pool.recv(min_envs=4, timeout=PATIENCE).env_ids) == [1, 2]


def test_a_time_out_names_who_is_late_and_loses_nothing(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make([CountingEnv, partial(GatedEnv, gate)], num_actors=2)
    pool.reset()
    receive_all(pool, range(2))
    pool.send(np.array([3, 4]))
    batch = pool.recv(min_envs=2, timeout=1.0)
    while not len(batch.env_ids):  # a busy machine
        batch = pool.recv(min_envs=2, timeout=1.0)
    assert (batch.env_ids.tolist(), batch.late) == ([0], [1])
    batch = pool.recv(timeout=0)
    assert (batch.env_ids.tolist(), batch.late) == ([], [1])
    gate.touch()
    assert split(pool.recv(timeout=PATIENCE))[1]["observation"].tolist()[:3] == [1, 1, 4]


def test_a_batch_is_the_callers_own(make: Make) -> None:
    pool = make(counting(2), num_actors=1)
    pool.reset(seed=0)
    first = pool.recv(min_envs=2, timeout=PATIENCE)
    before = first.observations.copy(), first.rewards.copy()
    pool.send(np.array([7, 8]))
    second = pool.recv(min_envs=2, timeout=PATIENCE)
    np.testing.assert_array_equal(first.observations, before[0])
    np.testing.assert_array_equal(first.rewards, before[1])
    for array in (second.env_ids, second.observations, second.rewards, second.incarnations):
        assert array.flags.writeable
    assert (second.rewards.dtype, second.terminations.dtype) == (np.float64, np.bool_)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_the_end_of_an_episode_is_treated_as_the_mode_says(make: Make, mode: AutoresetMode) -> None:
    pool = make(counting(2, length=2), num_actors=1, autoreset_mode=mode)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    seen = []
    for _ in range(2):
        pool.send(np.array([5, 5]))
        seen.append(pool.recv(min_envs=2, timeout=PATIENCE))
    ended = seen[-1]
    assert ended.terminations.tolist() == [True, True]
    assert ended.rewards.tolist() == [12.0, 12.0]
    if mode is AutoresetMode.SAME_STEP:
        assert ended.observations[:, :2].tolist() == [[2, 0], [2, 0]]
        assert [final.tolist()[:3] for final in ended.infos["final_obs"]] == [[1, 2, 5]] * 2
        assert ended.infos["episode"].tolist() == [2, 2]
    else:
        assert ended.observations[:, :2].tolist() == [[1, 2], [1, 2]]
        assert ended.infos == {}
    if mode is AutoresetMode.DISABLED:
        pool.reset(env_ids=[1], seed=[9])
        assert receive_all(pool, [1])[1]["observation"].tolist() == [2, 0, 0, 9]
    elif mode is AutoresetMode.NEXT_STEP:
        pool.send(np.array([6, 6]))
        begun = pool.recv(min_envs=2, timeout=PATIENCE)
        assert begun.observations[:, :3].tolist() == [[2, 0, 0]] * 2
        assert (begun.rewards.tolist(), begun.infos["episode"].tolist()) == ([0.0, 0.0], [2, 2])


def test_seeds_of_some_envs_are_in_the_order_of_the_ids(make: Make) -> None:
    pool = make(counting(3), num_actors=2)
    pool.reset(seed=0)
    receive_all(pool, range(3))
    pool.reset(seed=[70, 90], env_ids=[2, 0])
    rows = receive_all(pool, [0, 2])
    assert [int(rows[i]["observation"][3]) for i in (0, 2)] == [90, 70]
    with pytest.raises(ValueError, match="3 seeds for 2 env_ids"):
        pool.reset(seed=[1, 2, 3], env_ids=[2, 0])


def test_an_env_with_a_negative_seed_that_fails_is_made_anew(make: Make) -> None:
    pool = make([partial(_AnySeedEnv, 1000)], restart=True)
    pool.reset(seed=-5)
    receive_all(pool, [0])
    pool.send(np.array([13]))
    [row] = receive_all(pool, [0]).values()
    assert row["observation"].tolist()[3] == restart_seed(-5, 0, 1)


def test_the_descriptor_tells_when_recv_is_worth_a_call(make: Make) -> None:
    pool = make(counting(1))
    pool.reset(seed=0)
    while not pool.recv(timeout=0.0).env_ids.size:
        ready, _, _ = select.select([pool.fileno()], [], [], PATIENCE)
        assert ready
    pool.close()
    with pytest.raises(ClosedEnvironmentError):
        pool.fileno()


def test_a_reset_drops_what_was_asked_before(make: Make) -> None:
    pool = make(counting(3), num_actors=2)
    for turn in range(20):
        pool.reset(seed=turn)
        if turn % 2:
            assert _after_the_reset(receive_all(pool, range(3))) == [turn, turn + 1, turn + 2]
            pool.send(np.full(3, turn))
    pool.reset(seed=100)
    assert _after_the_reset(receive_all(pool, range(3))) == [100, 101, 102]
    with pytest.raises(NoAsyncCallError):
        pool.recv()


def test_an_answer_to_what_a_reset_dropped_is_dropped(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make([partial(_HeldResetEnv, gate)])
    pool.reset(seed=1)
    pool.reset(seed=2, options={"hold": True})
    batch = pool.recv(timeout=0.5)  # the first answer comes; the second one cannot
    assert (batch.env_ids.tolist(), batch.late) == ([], [0])
    gate.touch()
    assert _after_the_reset(receive_all(pool, [0])) == [2]


class _HeldResetEnv(GatedEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None:
            self.await_gate()
        return super().reset(seed=seed)


def _after_the_reset(rows: dict[int, dict[str, Any]]) -> list[int]:
    """Return each env's seed, if its row is the first of an episode."""
    assert [rows[i]["observation"].tolist()[1:3] for i in sorted(rows)] == [[0, 0]] * len(rows)
    return [int(rows[i]["observation"][3]) for i in sorted(rows)]


def test_options_reach_the_envs_and_the_callers_dict_stays(make: Make) -> None:
    pool = make([partial(_OptionsEnv)], num_actors=1)
    options = {"level": 3}
    pool.reset(options=options)
    batch = pool.recv(timeout=PATIENCE)
    assert batch.infos["level"].tolist() == [3]
    assert options == {"level": 3}


class _OptionsEnv(CountingEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, _ = super().reset(seed=seed)
        assert options is not None
        return observation, {"level": options.pop("level")}


# --- infos ----------------------------------------------------------------------------------


def test_infos_are_merged_for_the_rows_of_the_batch(make: Make) -> None:
    pool = make([InfoEnv, CountingEnv, InfoEnv], num_actors=3)
    pool.reset()
    receive_all(pool, range(3))
    pool.send(np.zeros(3, np.int64))
    batch = pool.recv(min_envs=3, timeout=PATIENCE)
    rows = {int(i): row for row, i in enumerate(batch.env_ids)}
    assert [bool(batch.infos["_int"][rows[i]]) for i in range(3)] == [True, False, True]
    assert batch.infos["array"].shape == (3, 2, 3)
    assert batch.infos["text"][rows[2]] == "step 1"
    pool.send(np.zeros(1, np.int64), [1])
    assert pool.recv(timeout=PATIENCE).infos == {}


def test_infos_may_hold_any_object(make: Make) -> None:
    pool = make([partial(InfoEnv, item={1, "two"})], num_actors=1)
    pool.reset()
    receive_all(pool, [0])
    pool.send(np.zeros(1, np.int64))
    assert pool.recv(timeout=PATIENCE).infos["item"][0] == {1, "two"}


@pytest.mark.parametrize("num_actors", [0, 1])
@pytest.mark.parametrize("values", [(np.zeros(2), np.zeros(3), np.ones(2)), (5, {"in": 1}, 7)])
def test_infos_that_cannot_be_merged_take_no_row_away(
    make: Make, num_actors: int, values: tuple[Any, ...]
) -> None:
    pool = make([partial(KeyEnv, value) for value in values], num_actors=num_actors)
    pool.reset()
    receive_all(pool, range(3))
    for step in (1, 2):
        pool.send(np.zeros(3, np.int64))
        with pytest.raises(ValueError, match="info of env 1 cannot be merged"):
            pool.recv(min_envs=3, timeout=PATIENCE)
        with pytest.raises(AlreadyPendingCallError, match="by an error"):
            pool.send(np.zeros(1, np.int64), [1])
        batch = pool.recv(min_envs=3, timeout=PATIENCE)
        assert batch.env_ids.tolist() == [0, 1, 2]
        assert batch.observations[:, 1].tolist() == [step] * 3
        # Nothing is left of the info that does not fit, and all of the others.
        expected: dict[str, Any] = {}
        for row in (0, 2):
            expected = _merger._add_info(expected, {"first": 1, "key": values[row]}, row)
        assert data_equivalence(batch.infos, expected)
    pool.send(np.zeros(1, np.int64), [1])
    assert pool.recv(timeout=PATIENCE).infos["_key"].tolist() == [True]
    pool.reset()
    assert set(receive_all(pool, range(3))) == {0, 1, 2}


def test_faults_in_a_batch_that_was_kept_back_are_told_after_a_reset(make: Make) -> None:
    envs = [partial(FailingEnv, after=0), partial(KeyEnv, 5), partial(KeyEnv, {"in": 1})]
    pool = make(envs, num_actors=1, restart=True)
    pool.reset()
    receive_all(pool, range(3))
    pool.send(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="cannot be merged"):
        pool.recv(min_envs=3, timeout=PATIENCE)
    pool.reset()
    assert [fault.env_id for fault in pool.recv(min_envs=3, timeout=PATIENCE).faults] == [0]


_merger = VectorEnv[Any, Any, Any]()
_merger.num_envs = 3


def test_an_object_that_cannot_be_rebuilt_here_costs_no_row(make: Make) -> None:
    pool = make([partial(InfoEnv, item=None), _ObjectEnv], num_actors=1)
    pool.reset()
    receive_all(pool, range(2))
    for step in (1, 2):
        pool.send(np.zeros(2, np.int64))
        batch = pool.recv(min_envs=2, timeout=PATIENCE)
        assert batch.env_ids.tolist() == [0, 1]
        assert batch.observations[:, 1].tolist() == [step] * 2
        assert "only at home" in repr(batch.infos["object"][1])


class _ObjectEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"object": UnpicklableHere()}


# --- spaces ---------------------------------------------------------------------------------


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("name", sorted(all_spaces()))
def test_actions_and_observations_of_every_space(
    make: Make, name: str, shared_memory: bool
) -> None:
    space = all_spaces()[name]
    reference = SyncVectorEnv([partial(EchoEnv, space)] * 3)
    pool = make([partial(EchoEnv, space)] * 3, num_actors=2, shared_memory=shared_memory)
    pool.reset(seed=0)
    assert len(pool.recv(min_envs=3, timeout=PATIENCE).env_ids) == 3
    reference.reset(seed=0)
    reference.action_space.seed(4)
    for _ in range(3):
        actions = reference.action_space.sample()
        pool.send(actions)
        batch = pool.recv(min_envs=3, timeout=PATIENCE)
        expected, _, _, _, infos = reference.step(actions)
        order = np.argsort(batch.env_ids)
        assert batch.infos["type"][order].tolist() == infos["type"].tolist()
        singles = list(iterate(reference.observation_space, expected))
        found = list(iterate(reference.observation_space, batch.observations))
        assert data_equivalence([singles[i] for i in batch.env_ids], found)
    reference.close()


def test_an_env_with_custom_spaces(make: Make) -> None:
    pool = make([CustomSpaceEnv] * 2, num_actors=2, shared_memory=False)
    pool.reset()
    assert pool.recv(min_envs=2, timeout=PATIENCE).observations == ("reset", "reset")
    pool.send(["b", "a"], [1, 0])
    batch = pool.recv(min_envs=2, timeout=PATIENCE)
    assert dict(zip(batch.env_ids.tolist(), batch.observations, strict=True)) == {
        0: "step a",
        1: "step b",
    }


def test_envs_must_have_the_same_spaces_and_no_other_class_is_blamed(make: Make) -> None:
    spaces = all_spaces()
    told = r"^the envs of an ActorPool must .* make a pool for each kind\. Env 1 has MultiBinary"
    with pytest.raises(RuntimeError, match=told):
        make(
            [
                partial(SpaceEnv, spaces["discrete"], spaces["discrete"]),
                partial(SpaceEnv, spaces["multi_binary"], spaces["discrete"]),
            ],
            num_actors=2,
        )


@SHARED
def test_a_vector_env_is_stepped_as_a_whole(make: Make, shared_memory: bool) -> None:
    pool = make(
        [partial(_vector, 3), CountingEnv, partial(_vector, 2)],
        num_actors=2,
        shared_memory=shared_memory,
    )
    assert pool.num_envs == 6
    pool.reset(seed=0)
    rows = receive_all(pool, range(6))
    assert [int(rows[i]["observation"][3]) for i in range(6)] == list(range(6))
    with pytest.raises(ValueError, match=r"envs 0 to 2 are one vector env.*\[1\]"):
        pool.send(np.zeros(3, np.int64), [0, 2, 3])
    assert pool._fleet.statistics().in_flight == 0
    pool.send(np.array([50, 30, 40]), [5, 3, 4])
    assert {i: int(row["observation"][2]) for i, row in receive_all(pool, [3, 4, 5]).items()} == {
        3: 30,
        4: 40,
        5: 50,
    }
    pool.send(np.array([10, 0, 20]), [1, 0, 2])
    assert {i: int(row["observation"][2]) for i, row in receive_all(pool, range(3)).items()} == {
        0: 0,
        1: 10,
        2: 20,
    }


def _vector(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([partial(CountingEnv, 1000)] * num_envs)


# --- wrong use ------------------------------------------------------------------------------


def test_wrong_actions_and_ids_are_refused_before_anything_is_sent(make: Make) -> None:
    pool = make(counting(3), num_actors=2)
    pool.reset()
    receive_all(pool, range(3))
    for actions, env_ids, error, text in [
        (np.zeros(2, np.int64), None, ValueError, "expected 3 actions"),
        (np.zeros(3, np.int64), [0, 1], ValueError, "expected 2 actions"),
        ([1, 2, 3, 4], None, ValueError, "expected 3 actions"),
        (np.int64(1), None, TypeError, "iterate"),
        (np.zeros(2, np.int64), [0, 3], ValueError, r"unknown env ids \[3\]"),
        (np.zeros(1, np.int64), [-1], ValueError, r"unknown env ids \[-1\]"),
        (np.zeros(2, np.int64), [1, 1], ValueError, r"\[1\] are named more than once"),
        (np.zeros(1, np.int64), [0.5], TypeError, "integer"),
    ]:
        with pytest.raises(error, match=text):
            pool.send(actions, env_ids)
        assert pool.statistics().in_flight == 0
    with pytest.raises(NoAsyncCallError):
        pool.recv()
    pool.send(np.zeros(0, np.int64), [])
    with pytest.raises(NoAsyncCallError):
        pool.recv()
    pool.send(np.zeros(3, np.int64))
    rows = receive_all(pool, range(3))
    assert [int(rows[i]["observation"][1]) for i in range(3)] == [1, 1, 1]


def test_an_env_is_not_sent_two_actions(make: Make) -> None:
    pool = make(counting(3), num_actors=1)
    pool.reset()
    with pytest.raises(AlreadyPendingCallError, match="recv"):
        pool.send(np.zeros(3, np.int64))
    receive_all(pool, range(3))
    pool.send(np.zeros(1, np.int64), [1])
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[1\]"):
        pool.send(np.zeros(3, np.int64))
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[1\]"):
        pool.reset(env_ids=[0, 1])
    rows = receive_all(pool, [1])
    assert set(rows) == {1}
    pool.send(np.zeros(3, np.int64))
    rows = receive_all(pool, range(3))
    assert [int(rows[i]["observation"][1]) for i in range(3)] == [1, 2, 1]


def test_limits_of_recv_are_checked(make: Make) -> None:
    pool = make(counting(2), num_actors=1)
    pool.reset()
    with pytest.raises(ValueError, match="min_envs must be from 1 to 2, not 0"):
        pool.recv(min_envs=0)
    with pytest.raises(ValueError, match="not 3"):
        pool.recv(min_envs=3)
    with pytest.raises(ValueError, match="max_envs=1 is less than min_envs=2"):
        pool.recv(min_envs=2, max_envs=1)
    receive_all(pool, range(2))


def test_settings_that_cannot_be_used_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="env_fns"):
        make([])
    with pytest.raises(ConfigError, match="num_actors=3"):
        make(counting(2), num_actors=3)
    with pytest.raises(ValueError, match="cannot find context for 'green'"):
        make(counting(2), context="green")
    with pytest.raises(ConfigError, match=r"Timeouts\.step"):
        make(counting(2), timeouts=Timeouts(step=-1))


def test_a_closed_pool_says_so(make: Make) -> None:
    pool = make(counting(2), num_actors=1)
    pool.close()
    pool.close()
    for use in (pool.reset, partial(pool.send, np.zeros(2)), pool.recv):
        with pytest.raises(ClosedEnvironmentError, match="close"):
            use()
    assert repr(pool) == "ActorPool(closed)"


# --- errors of envs -------------------------------------------------------------------------


def test_an_envs_exception_keeps_its_type_and_the_others_results_are_kept(make: Make) -> None:
    pool = make([CountingEnv, partial(FailingEnv, after=1), CountingEnv], num_actors=3)
    pool.reset(seed=0)
    receive_all(pool, range(3))
    for _ in range(2):
        pool.send(np.zeros(3, np.int64))
        try:
            receive_all(pool, range(3))
        except RuntimeError as error:
            caught = error
    assert str(caught) == "failing on purpose"
    assert "tests/envs.py" in str(caught.__cause__)
    assert caught.__cause__.env_id == 1  # type: ignore[union-attr]
    rows: dict[int, Any] = {}
    while pool._states.awaited() or pool._states.num_ready:
        rows.update(split(pool.recv(timeout=PATIENCE)))
    assert all(int(row["observation"][1]) == 2 for row in rows.values())
    pool.reset(env_ids=[1])
    assert set(receive_all(pool, [1])) == {1}


def test_several_envs_that_fail_are_each_told_of(make: Make) -> None:
    pool = make([partial(FailingEnv, error=KeyError(i)) for i in range(3)], num_actors=3)
    pool.reset()
    receive_all(pool, range(3))
    pool.send(np.zeros(3, np.int64))
    told = set()
    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            pool.recv(timeout=PATIENCE)
        told.add(caught.value.args[0])
    assert told == {0, 1, 2}
    with pytest.raises(NoAsyncCallError):
        pool.recv()


def test_a_reset_forgets_the_errors_of_what_it_drops(make: Make) -> None:
    pool = make([FailingEnv] * 2, num_actors=1)
    pool.reset()
    receive_all(pool, range(2))
    pool.send(np.zeros(2, np.int64))
    wait_until(
        lambda: pool.statistics().in_flight == 0 or pool._engine.take_events(0.1), "the answer"
    )
    pool.reset()
    assert set(receive_all(pool, range(2))) == {0, 1}


def test_a_constructor_that_fails_leaves_no_pool(make: Make) -> None:
    with pytest.raises(RuntimeError, match="failing on purpose") as caught:
        make([CountingEnv, partial(FailingEnv, "init")], num_actors=2)
    assert "env 1 (actor-1" in str(caught.value.__cause__)


# --- deaths ---------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("action", "words"), [(13, "signal SIGKILL"), (14, "exit code 7"), (15, "SystemExit")]
)
def test_without_restart_a_lost_actor_is_named_and_the_others_go_on(
    make: Make, action: int, words: str
) -> None:
    pool = make([partial(PidEnv, 1000)] * 4, num_actors=2)
    pids = pool.actor_pids()
    pool.reset()
    receive_all(pool, range(4))
    actions = np.array([0, action, 5, 5])
    pool.send(actions)
    rows: dict[int, Any] = {}
    error: Exception | None = None
    while error is None or not {2, 3} <= rows.keys():
        try:
            rows.update(split(pool.recv(timeout=PATIENCE)))
        except Exception as exc:
            assert error is None
            error = exc
    assert words in str(error)
    assert {2, 3} <= rows.keys()
    if action != 15:  # SystemExit ends an env, not its actor
        assert isinstance(error, ActorLostError)
        assert (error.env_ids, error.actor) == ([0, 1], "actor-0")
        for text in ("actor-0", str(pids[0]), "envs 0-1", "restart=True"):
            assert text in str(error)
        with pytest.raises(ActorLostError, match="actor-0"):
            pool.send(np.zeros(4, np.int64))
        with pytest.raises(ActorLostError, match="actor-0"):
            pool.reset()
    pool.send(np.zeros(2, np.int64), [2, 3])
    assert set(receive_all(pool, [2, 3])) >= {2, 3}
    pool.reset(env_ids=[3])
    assert set(receive_all(pool, [3])) == {3}


def test_when_all_actors_are_lost_each_call_says_so(make: Make) -> None:
    pool = make(counting(2), num_actors=2)
    pool.reset()
    receive_all(pool, range(2))
    for pid in pool.actor_pids():
        kill(pid)
        wait_until(lambda pid=pid: not is_alive(pid), "the actor's end")
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(ActorLostError):
        receive_for_ever(pool)
    for _ in range(3):
        with pytest.raises(ActorLostError, match="SIGKILL"):
            pool.recv(timeout=PATIENCE)
    with pytest.raises(ActorLostError):
        pool.reset()


@pytest.mark.slow_but_first
@SHARED
def test_with_restart_the_env_comes_back_in_a_new_life(make: Make, shared_memory: bool) -> None:
    pool = make(
        [partial(PidEnv, 10**9)] * 3,
        num_actors=3,
        shared_memory=shared_memory,
        restart=True,
    )
    pids = pool.actor_pids()
    pool.reset(seed=40)
    receive_all(pool, range(3))
    pool.send(np.array([1, 13, 1]))
    faults, steps, back = [], {0: 0, 2: 0}, None
    while back is None or min(steps.values()) < 20:
        batch = pool.recv(timeout=PATIENCE)
        faults += batch.faults
        rows = split(batch)
        if 1 in rows and back is None:
            back = rows[1]
        again = [i for i in rows if i != 1]
        for i in again:
            steps[i] += 1
            assert rows[i]["observation"].tolist() == [1, steps[i], 1, 40 + i]
            assert rows[i]["incarnation"] == 0
        if again:
            pool.send(np.ones(len(again), np.int64), again)
    (fault,) = faults
    assert (fault.env_id, fault.cause, fault.restarts) == (1, FaultCause.CRASH, 0)
    assert str(pids[1]) in fault.message
    assert "SIGKILL" in fault.message
    assert back["observation"].tolist() == [1, 0, 0, restart_seed(41, 1, 1)]
    assert (back["incarnation"], back["reward"], back["terminated"]) == (1, 0.0, False)
    assert pool.statistics().restarts == 1
    assert pool.actor_pids()[0] == pids[0]
    assert pool.actor_pids()[1] != pids[1]
    assert pool.actor_pids()[2] == pids[2]


def test_an_env_of_one_function_comes_back_with_its_own_index(make: Make) -> None:
    more = 100  # of a closure
    pool = make(lambda index: PidEnv(index + more), num_envs=3, num_actors=3, restart=True)
    pool.reset(seed=0)
    receive_all(pool, range(3))
    pool.send(np.array([1, 13, 1]))  # kills the actor of env 1
    receive_until_back(pool, 1)
    envs = pool.get_sub_environments()
    assert [env.get_attr("length") for env in envs] == [100, 101, 102]
    assert pool.statistics().restarts == 1


def test_a_death_between_steps_is_a_fault_of_idle_envs_too(make: Make) -> None:
    pool = make(counting(2), num_actors=1, restart=True)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    (pid,) = pool.actor_pids()
    kill(pid)
    wait_until(lambda: not is_alive(pid), "the actor's end")
    pool.send(np.zeros(2, np.int64))  # it may be known or not
    faults = []
    seen: set[int] = set()
    while seen < {0, 1}:
        batch = pool.recv(timeout=PATIENCE)
        faults += batch.faults
        seen |= set(batch.env_ids.tolist())
        assert set(batch.incarnations.tolist()) <= {1}
    assert sorted(fault.env_id for fault in faults) == [0, 1]


def test_a_result_that_was_not_received_dies_with_its_actor(make: Make) -> None:
    pool = make(counting(2), num_actors=2, restart=True)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    pool.send(np.array([1, 1]))
    wait_until(lambda: pool._states.num_ready == 2 or pool._engine.take_events(0.1), "both results")
    kill(pool.actor_pids()[0])
    wait_until(lambda: pool._faults.untold or pool._engine.take_events(0.1), "the fault")
    batch = pool.recv(timeout=PATIENCE)
    assert batch.env_ids.tolist() == [1]
    assert [fault.env_id for fault in batch.faults] == [0]
    assert receive_until_back(pool, 0).incarnations.tolist() == [1]


def test_a_death_in_a_reset_is_followed_by_a_reset(make: Make) -> None:
    pool = make([partial(_DyingOnceEnv, 1000)], num_actors=1, restart=True)
    pool.reset(seed=7, options={"die": True})
    batch = receive_until_back(pool, 0)
    assert batch.incarnations.tolist() == [1]
    assert batch.observations[0, 3] == restart_seed(7, 0, 1)


class _DyingOnceEnv(CountingEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options:
            kill(os.getpid())
        return super().reset(seed=seed)


def test_a_reset_while_an_actor_is_down_reaches_it_in_its_new_life(make: Make) -> None:
    pool = make(counting(2), num_actors=2, restart=True)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    kill(pool.actor_pids()[1])
    pool.send(np.zeros(2, np.int64))
    faults: list[Any] = []
    while not faults:
        faults += pool.recv(timeout=PATIENCE).faults
    pool.reset(seed=70)
    rows = receive_all(pool, range(2))
    assert rows[0]["observation"].tolist()[1:] == [0, 0, 70]
    assert rows[1]["observation"].tolist()[1:] == [0, 0, restart_seed(71, 1, 1)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_an_actor_that_dies_too_often_is_given_up_and_the_others_go_on(
    make: Make, all_or_nothing: bool
) -> None:
    pool = make(
        [partial(PidEnv, 1000)] * 2,
        num_actors=2,
        restart=RestartPolicy(max_restarts=2, window=1000.0, backoff=0.001),
        all_or_nothing=all_or_nothing,
    )
    pool.reset(seed=0)
    receive_all(pool, range(2))
    pool.send(np.array([13, 1]))
    incarnations = []

    def kill_env_0_for_ever() -> None:
        while True:
            batch = pool.recv(timeout=PATIENCE)
            for i, life in zip(batch.env_ids.tolist(), batch.incarnations.tolist(), strict=True):
                if i == 0:
                    incarnations.append(life)
                pool.send(np.array([13 if i == 0 else 1]), [i])
            if any(fault.given_up for fault in batch.faults):
                pool.send(np.array([1]), [0])

    with pytest.raises(RestartLimitError, match=r"actor-0.*after 2 restarts.*SIGKILL"):
        kill_env_0_for_ever()
    assert incarnations == [1, 2]
    for _ in range(3):
        while 1 not in pool.recv(timeout=PATIENCE).env_ids:
            pass
        pool.send(np.array([1]), [1])
    with pytest.raises(RestartLimitError, match="actor-0"):
        pool.send(np.array([1]), [0])


@pytest.mark.slow
def test_an_actor_that_cannot_come_back_is_given_up(make: Make, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    pool = make(
        [partial(_BreakableEnv, flag)],  # a policy alone means restart
        restart=RestartPolicy(max_restarts=2, window=1000.0, backoff=0.001),
    )
    pool.reset()
    receive_all(pool, [0])
    flag.touch()
    pool.send(np.array([13]))
    with pytest.raises(RestartLimitError, match="after 2 restarts"):
        receive_for_ever(pool)
    with pytest.raises(RestartLimitError):
        pool.recv(timeout=PATIENCE)


class _AnySeedEnv(PidEnv):
    """Takes seeds that NumPy does not."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None if seed is None else abs(seed), options=options)


class _BreakableEnv(PidEnv):
    def __init__(self, flag: Path) -> None:
        super().__init__(1000)
        if flag.exists():
            raise RuntimeError("broken meanwhile")


def test_a_step_past_its_deadline_is_named(make: Make) -> None:
    pool = make([partial(HangingEnv, after=1), CountingEnv], num_actors=2, timeouts=_IMPATIENT)
    pool.reset()
    receive_all(pool, range(2))
    pool.send(np.zeros(2, np.int64))
    receive_all(pool, range(2))
    pool.send(np.zeros(2, np.int64))
    assert set(receive_all(pool, [1])) == {1}
    with pytest.raises(multiprocessing.TimeoutError, match=r"env\(s\) 0 did not answer"):
        pool.recv(timeout=PATIENCE)
    pool.send(np.zeros(1, np.int64), [1])
    assert set(receive_all(pool, [1])) == {1}


_IMPATIENT = Timeouts(step=2.0)


# --- end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["new", "pending", "ready", "hung", "dead", "down"])
@pytest.mark.parametrize("terminate", [False, True])
def test_close_ends_everything_whatever_is_going_on(
    make: Make, state: str, terminate: bool
) -> None:
    pool = make(
        [partial(HangingEnv, after=1), CountingEnv],
        num_actors=2,
        restart=state == "down",
    )
    pids = pool.actor_pids()
    if state != "new":
        pool.reset()
    if state in ("ready", "hung", "dead", "down"):
        receive_all(pool, range(2))
        pool.send(np.zeros(2, np.int64))
    if state == "ready":
        wait_until(
            lambda: pool._states.num_ready == 2 or pool._engine.take_events(0.1), "the results"
        )
    if state == "hung":
        receive_all(pool, range(2))
        pool.send(np.zeros(2, np.int64))
    if state in ("dead", "down"):
        kill(pids[0])
    if state == "down":
        wait_until(lambda: pool._faults.untold or pool._engine.take_events(0.1), "the fault")
    pids += pool.actor_pids()
    pool.close(timeout=0.5 if state == "hung" else PATIENCE, terminate=terminate)
    assert [pid for pid in pids if is_alive(pid)] == []
    assert pool.closed


def test_close_lets_the_envs_close(make: Make, tmp_path: Path) -> None:
    with ActorPool([partial(TouchingEnv, tmp_path / "closed")]) as pool:
        pool.reset()
        receive_all(pool, [0])
    assert pool.closed
    assert (tmp_path / "closed").exists()


class _MisshapenEnv(CountingEnv):
    """Its second step returns another shape than the others, of which each has its own length."""

    observation_space = gymnasium.spaces.Dict(
        box=gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64), text=gymnasium.spaces.Text(9)
    )

    def _observe(self, action: int) -> Any:
        return {"box": np.zeros(3 if self.count == 2 else 2), "text": "a" * (1 + self.count)}


class _TextEnv(_MisshapenEnv):
    def _observe(self, action: int) -> Any:
        return {"box": np.zeros(2), "text": "a"}


def test_an_observation_that_cannot_be_batched_is_its_envs_error(make: Make) -> None:
    pool = make([_TextEnv, _MisshapenEnv], num_actors=1)
    pool.reset(seed=0)
    for _ in range(2):
        assert pool.recv(min_envs=2, timeout=PATIENCE).env_ids.tolist() == [0, 1]
        pool.send([1, 1])
    with pytest.raises(ValueError, match=r"env 1: observation is .* does not fit"):
        pool.recv(min_envs=2, timeout=PATIENCE)
    others = pool.recv(timeout=PATIENCE)
    assert (others.env_ids.tolist(), others.rewards.tolist()) == ([0], [12.0])


class _PathEnv(CountingEnv):
    """Its infos hold what goes over its actor's pipe."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"path": Path("seen")}


@pytest.mark.parametrize("local_links", [True, False], ids=["local links", "ZeroMQ"])
def test_without_deadlines_a_pool_works(make: Make, local_links: bool) -> None:
    timeouts = Timeouts(start=None, reset=None, step=None)
    pool = make([CountingEnv], num_actors=1, timeouts=timeouts, local_links=local_links)
    pool.reset(seed=0)
    receive_all(pool, range(1))
    pool.send([1], [0])
    receive_all(pool, range(1))


def test_answers_that_are_given_up_leave_room_for_others(make: Make) -> None:
    pool = make([_PathEnv] * 100, num_actors=1)
    pool.reset(seed=0)
    pool.recv(min_envs=100)
    for _ in range(5):  # a pipe has room for less than 300
        for env_id in range(100):
            pool.send([1], [env_id])
        pool.reset()
        assert len(pool.recv(min_envs=100, timeout=PATIENCE).env_ids) == 100


class _WideEnv(TouchingEnv):
    """What it returns fills a socket after some steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3500,), np.float64)

    def _observe(self, action: int) -> Any:
        return np.zeros(3500)


def test_close_lets_envs_close_whose_answers_nobody_takes(make: Make, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(16)]
    envs = [partial(_WideEnv, path) for path in paths]
    pool = make(envs, num_actors=1, shared_memory=False)
    pool.reset(seed=0)
    receive_all(pool, range(16))
    for env_id in range(16):  # of one after the other, each has an answer of its own
        pool.send([1], [env_id])
    pool.close(timeout=PATIENCE)
    assert all(path.exists() for path in paths)


class _SlowEnv(TouchingEnv):
    def step(self, action: Any) -> Any:
        pass_time(0.001)
        return super().step(action)


@pytest.mark.slow
def test_close_lets_envs_close_that_were_asked_more_than_a_queue_holds(
    make: Make, tmp_path: Path
) -> None:
    pool = make([partial(_SlowEnv, tmp_path / "closed")] * 2500, num_actors=1)
    pool.reset(seed=0)
    receive_all(pool, range(2500))
    for env_id in range(2500):
        pool.send([1], [env_id])
    pool.close(timeout=PATIENCE)
    assert (tmp_path / "closed").exists()


def test_an_exception_in_the_with_block_kills_at_once_and_comes_through() -> None:
    pids: list[int] = []

    def fail_in_a_with_block() -> None:
        with ActorPool([HangingEnv]) as pool:
            pids.extend(pool.actor_pids())
            pool.reset()
            receive_all(pool, [0])
            pool.send(np.zeros(1, np.int64))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail_in_a_with_block()
    assert [pid for pid in pids if is_alive(pid)] == []


def test_a_dropped_pool_ends_its_processes() -> None:
    pool = ActorPool(counting(2), num_actors=2)
    pool.reset()
    pids = pool.actor_pids()
    del pool
    gc.collect()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the actors' end")


def test_a_forked_copy_of_the_driver_closes_nothing(make: Make) -> None:
    pool = make(counting(2), num_actors=2)
    pool.reset()
    receive_all(pool, range(2))
    if not (child := os.fork()):
        try:
            pool.close()
            del pool
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        pool.send(np.zeros(2, np.int64))
        assert set(receive_all(pool, range(2))) == {0, 1}


def test_a_forked_copy_has_no_descriptor_to_wait_for(make: Make) -> None:
    pool = make(counting(1))
    refused_in_a_fork(ClosedError, pool.fileno)


def test_statistics_count_actors_and_restarts(make: Make) -> None:
    pool = make(counting(2), num_actors=2, restart=True)
    assert (pool.statistics().actors, pool.statistics().actors_ready) == (2, 2)
    pool.reset()
    assert pool.statistics().in_flight == 2
    receive_all(pool, range(2))
    assert pool.statistics().in_flight == 0
    assert pool.statistics().restarts == 0
    assert repr(pool) == "ActorPool(num_envs=2, ready=0)"


def test_an_actor_that_ends_while_it_is_built_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"while starting, actor-1 .*env 1.* exit code 5"):
        ActorPool([noted(tmp_path), noted(tmp_path, partial(os._exit, 5))], num_actors=2)
    assert still_alive(tmp_path) == []


def test_a_batch_is_frozen(make: Make) -> None:
    pool = make(counting(1))
    pool.reset()
    batch = pool.recv(timeout=PATIENCE)
    assert isinstance(batch, Batch)
    with pytest.raises(AttributeError):
        batch.late = [1]  # type: ignore[misc]


@pytest.mark.slow
def test_actors_that_need_more_descriptors_than_there_may_be_are_told_how_many() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from envbus.runner import ActorPool\n"
        "ActorPool(['CartPole-v1'] * 32, num_actors=32)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    last = done.stderr.splitlines()[-1]
    assert "StartError: 32 processes cannot be started: each takes 2 descriptors" in last
    assert "may have 64" in last


@pytest.mark.slow
@pytest.mark.alone
def test_rows_that_no_memory_is_left_for_are_received_once_there_is() -> None:
    program = """
import resource
import gymnasium, numpy, psutil
from envbus.runner import ActorPool

class LargeEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (1 << 26,), numpy.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1 << 26, numpy.uint8), {}

    def step(self, action):
        return numpy.zeros(1 << 26, numpy.uint8), 0.0, False, False, {}

with ActorPool([LargeEnv]) as pool:
    pool.reset()
    pool.recv(copy=False)
    pool.send([0], [0])
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 23), most))
    try:
        pool.recv()
    except MemoryError:
        print("no memory")
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(pool.recv().env_ids, pool.statistics().restarts)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines() == ["no memory", "[0] 0"], done.stderr


class PlainPool(ActorPool):
    """As adapters have it, whose libraries take infos one by one, and any bounds."""

    _merges_infos = False
    _observation_mode = "different"


@pytest.mark.parametrize("num_actors", [1, 0])
def test_infos_may_stay_as_envs_return_them(num_actors: int) -> None:
    with PlainPool([partial(InfoEnv, 100), CountingEnv], num_actors=num_actors) as pool:
        pool.reset()
        assert pool.recv(min_envs=2).infos == {0: {"episode": 1}, 1: {"episode": 1}}
        for count in range(1, 6):  # told in messages first, and in columns then
            pool.send(np.zeros(1, np.int64), [0])
            infos: dict[Any, Any] = pool.recv().infos
            model = InfoEnv(100)
            model.count = count - 1
            assert infos.keys() == {0}
            assert data_equivalence(infos[0], model.step(np.int64(0))[4])


def test_bounds_of_observations_may_differ_but_not_their_shapes() -> None:
    boxes = [gymnasium.spaces.Box(-1.0, high, (2,)) for high in (1.0, 5.0)]
    action_space = gymnasium.spaces.Discrete(2)
    envs = [partial(SpaceEnv, box, action_space) for box in boxes]
    with PlainPool(envs, num_actors=0) as pool:
        assert pool.observation_space.shape == (2, 2)
    other = partial(SpaceEnv, gymnasium.spaces.Box(-1.0, 1.0, (3,)), action_space)
    with pytest.raises((RuntimeError, ValueError), match="Env 1 has"):
        PlainPool([envs[0], other], num_actors=0)
