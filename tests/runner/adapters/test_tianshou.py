"""`ActorVectorEnv` beside Tianshou's own `DummyVectorEnv`, and where that has nothing like it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.bus.errors import ConfigError
from envbus.runner import ActorLostError
from tests.envs import FailingEnv, HangingEnv, SpaceEnv
from tests.integration.group_children import is_alive
from tests.waiting import wait_until

pytest.importorskip("tianshou")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

tianshou: Any = pytest.importorskip("envbus.runner.adapters.tianshou")
DummyVectorEnv: Any = pytest.importorskip("tianshou.env").DummyVectorEnv
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def make_one(env_fns: Any, *args: Any, **settings: Any) -> Any:
        made.append(tianshou.ActorVectorEnv(env_fns, *args, **{"num_actors": 2, **settings}))
        return made[-1]

    yield make_one
    for one in made:
        one.pool.close(terminate=True)


def assert_equal(found: Any, expected: Any) -> None:
    """See that values are equal, arrays element by element."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, tuple) or getattr(expected, "dtype", "") == np.dtype("O"):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "its end")


# --- steps and resets ---------------------------------------------------------------------------

DICT = spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Discrete(3))
PAIR = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))))
KINDS: dict[str, Callable[[], Any]] = {
    "cartpole": partial(gymnasium.make, "CartPole-v1"),
    "pendulum": partial(gymnasium.make, "Pendulum-v1", max_episode_steps=7),
    "no info": partial(CountingEnv, 5),
    "infos": partial(InfoEnv, 5),
    "dict": partial(SpaceEnv, DICT, spaces.Discrete(2)),
    "actions of a dict": partial(SpaceEnv, spaces.Discrete(4), DICT),
    "actions of a tuple": partial(SpaceEnv, spaces.MultiBinary(3), PAIR),
}


@pytest.mark.parametrize("num_actors", [2, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_infos_are_those_of_dummy_vector_env(
    make: Make, kind: str, num_actors: int
) -> None:
    env_fns = [KINDS[kind]] * 4
    envs, model = make(env_fns, num_actors=num_actors), DummyVectorEnv(env_fns)
    assert len(envs) == envs.env_num == 4
    assert envs.observation_space == model.observation_space
    assert envs.action_space == model.action_space
    assert_equal(envs.reset(seed=3), model.reset(seed=3))
    assert envs.seed(5) == [[5], [6], [7], [8]]
    model.seed(5)
    assert_equal(envs.reset(), model.reset())
    for number in range(40):
        chosen = [3, 0, 2] if number % 3 == 1 else None
        count = 4 if chosen is None else 3
        actions: Any = [space.sample() for space in envs.action_space[:count]]
        if not isinstance(model.action_space[0], spaces.Dict | spaces.Tuple):
            actions = np.array(actions)
        found, expected = envs.step(actions, chosen), model.step(actions, chosen)
        assert [info.pop("fault") for info in found[4]] == [False] * count
        for one, other in zip(found[:1] + found[2:], expected[:1] + expected[2:], strict=True):
            assert_equal(one, other)
        np.testing.assert_array_equal(found[1], expected[1])
        done = np.flatnonzero(expected[2] | expected[3])
        if len(done):
            ended = np.array(range(4) if chosen is None else chosen)[done][::-1]
            assert_equal(envs.reset(ended), model.reset(ended))


def test_observations_are_the_callers_own(make: Make) -> None:
    envs = make([CountingEnv] * 2, restart=True)
    first, _ = envs.reset(seed=0)
    before = first.copy()
    envs.step(np.zeros(2, np.int64))
    assert first.tolist() == before.tolist()
    last = envs.step(np.zeros(2, np.int64))[0]
    last[:] = -1
    kill(envs.pool.actor_pids()[0])
    assert (envs.step(np.zeros(2, np.int64))[0][0] >= 0).all()


def test_observation_spaces_may_differ_in_their_bounds(make: Make) -> None:
    space = spaces.Discrete(2)
    envs = make([partial(SpaceEnv, spaces.Box(-1.0, high, (2,)), space) for high in (1.0, 5.0)])
    assert [float(one.high[0]) for one in envs.observation_space] == [1.0, 5.0]
    assert envs.reset()[0].shape == (2, 2)


def test_tensors_are_actions_too(make: Make) -> None:
    torch: Any = pytest.importorskip("torch")
    envs = make([CountingEnv] * 2)
    envs.reset()
    assert envs.step(torch.zeros(2, dtype=torch.int64))[0].shape[0] == 2


# --- asynchronous -------------------------------------------------------------------------------


def test_those_that_are_done_first_are_returned(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 4, 2, num_actors=4)
    envs.reset(seed=0)
    assert envs.is_async
    seen = []
    ids: Any = None
    actions = np.zeros(4, np.int64)
    for _ in range(10):
        observations, *_, infos = envs.step(actions, ids)
        ids = [info["env_id"] for info in infos]
        assert len(ids) >= 2
        assert len(set(ids)) == len(ids) == len(observations)
        assert sorted(envs.ready_id + envs.waiting_id) == [0, 1, 2, 3]
        seen += ids
        actions = np.zeros(len(ids), np.int64)
    while envs.waiting_id:
        seen += [info["env_id"] for info in envs.step(None)[4]]
    steps = [int(envs.get_env_attr("count", i)[0]) for i in range(4)]
    assert steps == [seen.count(i) for i in range(4)]


def test_a_time_out_returns_those_that_have_stepped(make: Make) -> None:
    hangs = partial(HangingEnv, "step", after=1, length=100)
    envs = make([partial(CountingEnv, 100), hangs], timeout=0.05, num_actors=2)
    envs.reset()
    ids: list[int] = []
    for _ in range(5):  # the first call that is too early for env 1 is of a busy machine
        ids = [info["env_id"] for info in envs.step(np.zeros(2, np.int64))[4]]
        while envs.waiting_id and ids != [0]:
            ids = [info["env_id"] for info in envs.step(None)[4]]
        if ids == [0]:
            break
    assert envs.waiting_id == [1]
    for call in (envs.reset, partial(envs.step, np.zeros(2)), partial(envs.get_env_attr, "count")):
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(RuntimeError, match="stepping"):
        envs.render()


def test_envs_that_are_awaited_one_by_one_have_an_actor_each() -> None:
    envs = tianshou.ActorVectorEnv([CountingEnv] * 3, wait_num=1)
    assert len(envs.pool.actor_pids()) == 3
    envs.close()


# --- attributes, and the end --------------------------------------------------------------------


def test_attributes_are_got_through_wrappers_and_set_below_them(make: Make) -> None:
    envs = make([partial(gymnasium.make, "CartPole-v1")] * 3)
    envs.set_env_attr("gravity", 1.0, 1)
    envs.set_env_attr("mark", "new", [0, 2])
    assert envs.get_env_attr("gravity") == [9.8, 1.0, 9.8]
    assert envs.get_env_attr("mark", np.array([2, 0])) == ["new", "new"]
    with pytest.raises(AttributeError):
        envs.get_env_attr("mark", 1)
    assert [one["render_fps"] for one in envs.metadata] == [50] * 3
    assert [spec.id for spec in envs.spec] == ["CartPole-v1"] * 3


def test_envs_are_drawn(make: Make) -> None:
    envs = make([partial(CountingEnv, 100, render_mode="rgb_array")] * 2)
    envs.reset()
    assert [image.tolist() for image in envs.render()] == [[[[0, 0, 0]]]] * 2


def test_after_close_nothing_can_be_called(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    pids = envs.pool.actor_pids()
    envs.close()
    envs.close()
    assert [pid for pid in pids if is_alive(pid)] == []
    for call in (envs.reset, partial(envs.step, [0, 0]), envs.seed, envs.render):
        with pytest.raises(AssertionError, match="after close"):
            call()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"wait_num": 3}, "wait_num must be at least 1 and at most 2 or None, not 3"),
        ({"wait_num": 0}, "wait_num"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tianshou.ActorVectorEnv([CountingEnv] * 2, **kwargs)


def test_calls_that_cannot_be_made_are_refused(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.reset()
    with pytest.raises(ValueError, match="action is None"):
        envs.step(None)
    with pytest.raises(ValueError, match="got 1 actions for 2 envs"):
        envs.step([0])
    with pytest.raises(ValueError, match="expected 2 seeds"):
        envs.seed([1])
    with pytest.raises(TypeError, match="return_info"):
        envs.reset(return_info=True)
    with pytest.raises(TypeError, match="no tuples"):
        make([partial(SpaceEnv, PAIR, spaces.Discrete(2))] * 2)


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_num", [None, 4])
def test_a_kill_truncates_the_episodes_of_that_actor_only(make: Make, wait_num: Any) -> None:
    timeout = None if wait_num is None else 30.0
    envs = make([partial(CountingEnv, 10**6)] * 4, wait_num, timeout, restart=True)
    assert envs.is_async == (timeout is not None)
    envs.reset()
    for _ in range(5):
        envs.step(np.full(4, 3))
    kill(envs.pool.actor_pids()[0])
    rows = envs.step(np.full(4, 3))
    ids = [info["env_id"] for info in rows[4]]
    order = np.argsort(ids)
    observations, rewards, terminated, truncated, infos = (column[order] for column in rows)
    assert sorted(ids) == [0, 1, 2, 3]
    assert terminated.tolist() == [False] * 4
    assert truncated.tolist() == [True, True, False, False]
    assert observations[:, 1].tolist() == [5, 5, 6, 6]
    assert rewards[:2].tolist() == [0.0, 0.0]
    assert infos.tolist() == [{"env_id": i, "fault": i < 2} for i in range(4)]
    first, infos = envs.reset([1, 0])
    assert first[:, 1].tolist() == [0, 0]
    assert ["fault" in info for info in infos] == [False, False]
    rows = envs.step(np.full(4, 3))
    order = np.argsort([info["env_id"] for info in rows[4]])
    assert rows[0][order][:, 1].tolist() == [1, 1, 7, 7]
    assert envs.pool.statistics().restarts == 1


def test_observations_of_a_dict_are_known_after_a_kill(make: Make) -> None:
    envs = make([partial(SpaceEnv, DICT, spaces.Discrete(2), 100)] * 2, restart=True)
    envs.reset(seed=0)
    last = envs.step(np.zeros(2, np.int64))[0]
    kill(envs.pool.actor_pids()[1])
    observations, _, _, truncated, _ = envs.step(np.zeros(2, np.int64))
    assert truncated.tolist() == [False, True]
    assert_equal(observations[1], last[1])


def test_an_env_that_raises_is_made_anew(make: Make) -> None:
    envs = make([partial(FailingEnv, after=4, length=100), partial(CountingEnv, 100)], restart=True)
    envs.reset()
    for _ in range(4):
        envs.step(np.zeros(2, np.int64))
    observations, _, _, truncated, infos = envs.step(np.zeros(2, np.int64))
    assert truncated.tolist() == [True, False]
    assert [info["fault"] for info in infos] == [True, False]
    assert observations[:, 1].tolist() == [4, 5]
    assert envs.reset(0)[0][:, 1].tolist() == [0]
    assert envs.step(np.zeros(2, np.int64))[0][:, 1].tolist() == [1, 6]


def test_a_fault_in_a_reset_is_told_there(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 2, restart=True)
    envs.reset()
    kill(envs.pool.actor_pids()[1])
    observations, infos = envs.reset()
    assert observations[:, 1].tolist() == [0, 0]
    assert "fault" not in infos[0]
    assert infos[1]["fault"] is True
    assert envs.step(np.zeros(2, np.int64))[3].tolist() == [False, False]


def test_without_restart_a_fault_is_raised_and_reset_goes_on_with_the_rest(make: Make) -> None:
    envs = make([partial(FailingEnv, after=2, length=100), partial(CountingEnv, 100)])
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(RuntimeError, match="failing on purpose"):
        envs.step(np.zeros(2, np.int64))
    assert envs.reset()[0][:, 1].tolist() == [0, 0]
    kill(envs.pool.actor_pids()[0])
    with pytest.raises(ActorLostError):
        envs.step(np.zeros(2, np.int64))


class RefusingEnv(CountingEnv):
    """Raises at action 3."""

    def step(self, action: Any) -> Any:
        if action == 3:
            raise RuntimeError("failing on purpose")
        return super().step(action)


def test_rows_of_a_step_that_has_raised_are_not_those_of_the_next_one(make: Make) -> None:
    envs = make([partial(RefusingEnv, 100)] * 2)
    envs.reset()
    with pytest.raises(RuntimeError, match="failing on purpose"):
        envs.step(np.array([3, 0]))
    for call in (partial(envs.reset, [0]), partial(envs.step, np.zeros(2, np.int64))):
        with pytest.raises(AssertionError, match="of all envs"):
            call()
    assert envs.reset()[0][:, 1].tolist() == [0, 0]
    assert envs.reset([1])[0][:, 1].tolist() == [0]
    assert envs.step(np.zeros(2, np.int64))[0][:, 1].tolist() == [1, 1]


def test_envs_that_are_awaited_one_by_one_can_be_reset_after_an_error(make: Make) -> None:
    envs = make([partial(RefusingEnv, 100)] * 2, timeout=30.0)
    assert envs.is_async
    envs.reset()
    with pytest.raises(RuntimeError, match="failing on purpose"):
        envs.step(np.array([3, 0]))
    assert envs.reset()[0][:, 1].tolist() == [0, 0]
    assert envs.waiting_id == []
    assert envs.step(np.zeros(2, np.int64))[0][:, 1].tolist() == [1, 1]
