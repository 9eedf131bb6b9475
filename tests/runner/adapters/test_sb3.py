"""`BusVecEnv` beside Stable-Baselines3's own `DummyVecEnv`, and where that has nothing like it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from envbus.actors.testing import CountingEnv, ExitingEnv, InfoEnv
from envbus.bus.errors import ConfigError
from envbus.runner import ActorLostError, RecycleAfter
from tests.envs import FailingEnv, SpaceEnv
from tests.integration.group_children import is_alive
from tests.runner.pool_envs import KeyEnv, PidEnv
from tests.waiting import wait_until

pytest.importorskip("stable_baselines3")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

sb3: Any = pytest.importorskip("envbus.runner.adapters.sb3")
sb3_envs: Any = pytest.importorskip("stable_baselines3.common.vec_env")
Monitor: Any = pytest.importorskip("stable_baselines3.common.monitor").Monitor
TRUNCATED = "TimeLimit.truncated"
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def make_one(env_fns: Any, **settings: Any) -> Any:
        made.append(sb3.BusVecEnv(env_fns, **{"num_actors": 2, **settings}))
        return made[-1]

    yield make_one
    for one in made:
        pids = one.vector_env.actor_pids()
        one.vector_env.close(terminate=True)
        assert [pid for pid in pids if is_alive(pid)] == []


def assert_equal(found: Any, expected: Any) -> None:
    """See that values are equal, arrays element by element; monitors' times are left out."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected.keys() - {"t"}:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert type(found) is type(expected)
        assert found == expected


def monitored(make_env: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes a monitored env: by value, so that no actor imports this module for it."""
    return lambda: Monitor(make_env())


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
    "actions of a tuple": partial(SpaceEnv, PAIR, PAIR),
}


@pytest.mark.parametrize("num_actors", [2, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_infos_are_those_of_dummy_vec_env(make: Make, kind: str, num_actors: int) -> None:
    env_fns = [monitored(KINDS[kind])] * 4
    envs, model = make(env_fns, num_actors=num_actors), sb3_envs.DummyVecEnv(env_fns)
    assert envs.observation_space == model.observation_space
    assert envs.action_space == model.action_space
    for one in (envs, model):
        one.seed(3)
    assert_equal(envs.reset(), model.reset())
    assert_equal(envs.reset_infos, model.reset_infos)
    assert isinstance(envs.reset_infos, list)
    envs.action_space.seed(0)
    for number in range(60):
        actions: Any = [envs.action_space.sample() for _ in range(4)]
        if isinstance(envs.action_space, spaces.Box | spaces.Discrete):
            actions = np.array(actions)
        if number % 2:
            found = envs.step(actions)
        else:
            envs.step_async(actions)
            found = envs.step_wait()
        observations, rewards, dones, infos = model.step(actions)
        assert_equal(found[0], observations)
        assert found[1].astype(np.float32).tolist() == rewards.tolist()
        assert_equal(found[2], dones)
        assert_equal(found[3], infos)
        assert_equal(envs.reset_infos, model.reset_infos)
    model.close()


def test_steps_of_which_only_rows_come_take_no_message(make: Make) -> None:
    envs = make([monitored(KINDS["cartpole"])] * 4)
    envs.reset()
    for _ in range(100):
        envs.step(np.zeros(4, np.int64))
    assert envs.vector_env.statistics().steps_by_word > 100


@pytest.mark.parametrize("values", [(1, "one"), (np.zeros(2), np.zeros(3)), (None, 1.5)])
def test_infos_need_not_fit_together(make: Make, values: tuple[Any, Any]) -> None:
    envs = make([partial(KeyEnv, value) for value in values])
    envs.reset()
    for _ in range(3):
        *_, infos = envs.step(np.zeros(2, np.int64))
        expected = [{"first": 1, "key": value, TRUNCATED: False} for value in values]
        assert_equal(infos, expected)


def test_what_is_returned_is_the_callers_own(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 2)
    rows = [envs.reset()]
    for _ in range(5):
        observations, *_, infos = envs.step(np.zeros(2, np.int64))
        rows.append(observations)
        infos[0]["mine"] = True
        assert "mine" not in infos[1]
    assert [row[:, 1].tolist() for row in rows] == [[count] * 2 for count in range(6)]
    assert "mine" not in envs.step(np.zeros(2, np.int64))[3][0]


def test_seeds_and_options_are_for_the_next_reset_only(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 3)
    assert envs.seed(5) == [5, 6, 7]
    envs.set_options({"level": 1})
    assert envs.reset()[:, 3].tolist() == [5, 6, 7]
    assert envs.reset()[:, 3].tolist() == [5, 6, 7]  # told by the env: the seed it has had last
    envs.set_options([{"level": 2}, {}, {"level": 3}])
    envs.reset()
    levels = [
        [None if one is None else one.get("level") for one in options]
        for options in envs.get_attr("options")
    ]
    assert levels == [[1, None, 2], [1, None, None], [1, None, 3]]
    # As from `DummyVecEnv`, those without options get none, whatever others get.
    last = [options[-1] for options in envs.get_attr("options")]
    assert last == [{"level": 2}, None, {"level": 3}]
    assert envs.reset_infos == [{"episode": 3}] * 3


def test_a_reset_drops_a_step_that_is_under_way(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 2)
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    envs.step_async(np.zeros(2, np.int64))
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async(np.zeros(2, np.int64))
    assert envs.reset()[:, 1].tolist() == [0, 0]
    assert envs.step(np.zeros(2, np.int64))[0][:, 1].tolist() == [1, 1]


@pytest.mark.parametrize("space", [spaces.Discrete(2), DICT], ids=["discrete", "dict"])
def test_not_one_action_per_env_is_refused(make: Make, space: spaces.Space[Any]) -> None:
    envs = make([partial(SpaceEnv, spaces.Discrete(2), space)] * 2)
    envs.reset()
    with pytest.raises(ValueError, match="expected 2 actions"):
        envs.step([space.sample()] * 3)
    envs.step([space.sample()] * 2)


def test_close_may_be_called_again(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.close()
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_start_methods_are_those_of_subproc_vec_env(make: Make, start_method: str) -> None:
    envs = make([partial(CountingEnv, 100)] * 2, start_method=start_method)
    assert envs.reset().shape == (2, 4)


def test_another_start_method_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="cannot find context for 'other'"):
        make([CountingEnv] * 2, start_method="other")


def test_remote_actors_are_refused() -> None:
    with pytest.raises(ConfigError, match="remote_actors"):
        sb3.BusVecEnv(["CartPole-v1"] * 2, remote_actors=1, bind="tcp://127.0.0.1:*")


# --- beside the envs ----------------------------------------------------------------------------


def test_methods_and_attributes_are_as_those_of_dummy_vec_env(make: Make) -> None:
    env_fns: list[Any] = [monitored(CountingEnv), CountingEnv, partial(CountingEnv, 8)]
    envs, model = make(env_fns), sb3_envs.DummyVecEnv(env_fns)
    for one in (envs, model):
        one.reset()
        one.set_attr("mark", [1, 2], indices=[0, -1])
        one.set_attr("count", 5, indices=1)
        one.set_attr("length", 7)
    calls: list[Callable[[Any], Any]] = [
        lambda one: one.get_attr("length"),
        lambda one: one.get_attr("count", indices=[2, 0]),
        lambda one: one.get_attr("mark", indices=(0, 2)),
        lambda one: one.get_attr("length", indices=-1),
        lambda one: one.env_method("add", 2, times=3),
        lambda one: one.env_method("add", 2, indices=[1, -1]),
        lambda one: one.env_method("add", 2, indices=range(0)),
        lambda one: one.env_is_wrapped(Monitor),
        lambda one: one.env_is_wrapped(Monitor, indices=[1, 0]),
        lambda one: one.has_attr("add"),
        lambda one: one.has_attr("nothing"),
        lambda one: one.metadata,
        lambda one: one.render_mode,
    ]
    for call in calls:
        assert call(envs) == call(model)
    for one in (envs, model):
        with pytest.raises(AttributeError):
            one.get_attr("nothing")
        with pytest.raises(AttributeError):
            one.env_method("nothing")
    # Where a wrapper does not have it, it is set on the wrapper.
    assert envs.env_method("add", 0) == model.env_method("add", 0)


def reset_by_seed(env: CountingEnv, seed: int | None = None) -> Any:
    return CountingEnv.reset(env, seed=seed)


class NoOptionsEnv(CountingEnv):
    """Its `reset` takes no options, for which its actor wraps it."""

    reset: Any = reset_by_seed
    bonus = 0.0

    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, self.bonus, *others


def test_an_env_that_envbus_alone_has_wrapped_gets_its_attributes(make: Make) -> None:
    envs = make([NoOptionsEnv] * 2)
    envs.reset()
    envs.set_attr("bonus", 7.0)
    assert envs.step(np.zeros(2, np.int64))[1].tolist() == [7.0, 7.0]


def test_methods_are_not_called_by_who_asks_for_them(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    assert callable(envs.get_attr("add")[0])


def test_images_are_tiled(make: Make) -> None:
    envs = make([partial(CountingEnv, 100, render_mode="rgb_array")] * 4)
    envs.reset()
    envs.step(np.zeros(4, np.int64))
    assert envs.render_mode == "rgb_array"
    assert [image.tolist() for image in envs.get_images()] == [[[[1, 1, 1]]]] * 4
    assert envs.render().tolist() == [[[1, 1, 1]] * 2] * 2
    assert envs.metadata["render_fps"] == 30


def test_without_a_render_mode_there_are_no_images(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    with pytest.warns(UserWarning, match="render mode is None"):
        assert envs.get_images() == [None, None]


def test_render_modes_that_differ_leave_no_process() -> None:
    with pytest.raises(AssertionError, match="render_mode"):
        sb3.BusVecEnv([CountingEnv, partial(CountingEnv, render_mode="rgb_array")])


# --- faults -------------------------------------------------------------------------------------


def test_a_kill_truncates_the_episodes_of_that_actor_only(make: Make) -> None:
    envs = make([monitored(partial(CountingEnv, 10**6))] * 4, restart=True)
    envs.seed(0)
    before = envs.reset()
    for _ in range(9):
        before = envs.step(np.full(4, 3))[0]
    kill(envs.vector_env.actor_pids()[0])
    observations, rewards, dones, infos = envs.step(np.full(4, 3))
    assert dones.tolist() == [True, True, False, False]
    for env_id in (0, 1):
        info = infos[env_id]
        assert info.keys() == {"fault", "terminal_observation", TRUNCATED}
        assert info[TRUNCATED] is True
        assert info["terminal_observation"].tolist() == before[env_id].tolist()
        assert info["fault"]["cause"] == "crash"
        assert rewards[env_id] == 0.0
        assert envs.reset_infos[env_id] == {"episode": 1}
    assert observations[:, 1].tolist() == [0, 0, 10, 10]
    assert infos[2:] == [{TRUNCATED: False}] * 2
    assert envs.reset_infos[2:] == [{"episode": 1}] * 2
    observations, *_, infos = envs.step(np.full(4, 3))
    assert observations[:, 1].tolist() == [1, 1, 11, 11]
    assert infos == [{TRUNCATED: False}] * 4
    assert envs.vector_env.statistics().restarts == 1


def test_one_that_dies_in_its_step_is_told_with_that_step(make: Make) -> None:
    envs = make([partial(PidEnv, 10**6)] * 2, restart=True)
    envs.reset()
    for number in range(1, 5):
        last = envs.step(np.array([1, 1]))[0]
        _, _, dones, infos = envs.step(np.array([13, 1]))
        assert dones.tolist() == [True, False]
        assert infos[0]["terminal_observation"].tolist() == last[0].tolist()
        assert infos[0]["fault"]["restarts"] == number - 1
        assert infos[1].keys() == {"pid", TRUNCATED}


def test_an_env_that_raises_is_made_anew(make: Make) -> None:
    envs = make([partial(FailingEnv, after=4, length=100), partial(CountingEnv, 100)], restart=True)
    envs.reset()
    for _ in range(4):
        envs.step(np.zeros(2, np.int64))
    observations, _, dones, infos = envs.step(np.zeros(2, np.int64))
    assert dones.tolist() == [True, False]
    assert infos[0]["fault"]["cause"] == "error"
    assert "failing on purpose" in infos[0]["fault"]["error"]
    assert infos[0][TRUNCATED] is True
    assert infos[0]["terminal_observation"][1] == 4
    assert observations[:, 1].tolist() == [0, 5]


class Lives:
    """Makes one env after the other."""

    def __init__(self, *lives: Callable[[], Any]) -> None:
        self._lives = iter(lives)

    def __call__(self) -> Any:
        return next(self._lives)()


def test_an_episode_is_whole_whose_env_fails_in_the_reset_after_it(make: Make) -> None:
    fails = monitored(partial(FailingEnv, "reset", after=1, length=2))
    envs = make([Lives(fails, monitored(CountingEnv))], num_actors=1, restart=True)
    envs.reset()
    envs.step(np.zeros(1, np.int64))
    observations, rewards, dones, infos = envs.step(np.zeros(1, np.int64))
    assert dones.tolist() == [True]
    assert infos[0].keys() == {"episode", "terminal_observation", TRUNCATED}
    assert infos[0][TRUNCATED] is False  # the first episode is terminated
    assert infos[0]["terminal_observation"][1] == 2
    assert infos[0]["episode"]["l"] == 2
    assert rewards.tolist() == [12.0]
    assert envs.reset_infos[0]["fault"]["cause"] == "error"
    assert observations[0, :2].tolist() == [1, 0]


def test_a_fault_in_a_reset_is_told_there(make: Make) -> None:
    envs = make([partial(CountingEnv, 100)] * 2, restart=True)
    envs.reset()
    kill(envs.vector_env.actor_pids()[1])
    assert envs.reset()[:, 1].tolist() == [0, 0]
    assert "fault" not in envs.reset_infos[0]
    assert envs.reset_infos[1]["fault"]["cause"] == "crash"


def test_without_restart_a_fault_is_raised(make: Make) -> None:
    envs = make([partial(ExitingEnv, 2), CountingEnv])
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(ActorLostError, match="exit code 9"):
        envs.step(np.zeros(2, np.int64))


def test_what_a_recycled_actor_was_at_is_truncated(make: Make) -> None:
    envs = make(
        [monitored(partial(CountingEnv, 10**6))] * 2,
        num_actors=1,
        recycle_after=RecycleAfter(steps=8, max_hold=1e-9),
    )
    envs.reset()
    dones = np.zeros(2, bool)
    for _ in range(20):
        observations, _, dones, infos = envs.step(np.zeros(2, np.int64))
        if dones.any():
            break
    assert dones.tolist() == [True, True]
    for info in infos:
        assert info.keys() == {"recycled", "terminal_observation", TRUNCATED}
        assert info[TRUNCATED] is True
    assert observations[:, 1].tolist() == [0, 0]


# --- make_vec_env -------------------------------------------------------------------------------


class Halved(gymnasium.RewardWrapper[Any, Any]):
    """Its rewards are a part of the env's."""

    def __init__(self, env: Any, factor: float = 0.5) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> Any:
        return reward * self.factor


def read_monitor(file: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the first line of a monitor's file, and its rows by column."""
    first, names, *rows = file.read_text("utf-8").splitlines()
    found = [dict(zip(names.split(","), row.split(","), strict=True)) for row in rows]
    return first, found


def test_made_envs_are_those_that_stable_baselines_makes(tmp_path: Path) -> None:
    theirs: Any = pytest.importorskip("stable_baselines3.common.env_util").make_vec_env
    rows = []
    for number, make in enumerate((sb3.make_vec_env, theirs)):
        envs = make(
            "Pendulum-v1",
            n_envs=2,
            seed=4,
            start_index=3,
            monitor_dir=tmp_path / str(number),
            wrapper_class=Halved,
            env_kwargs={"g": 5.0, "max_episode_steps": 6},
            wrapper_kwargs={"factor": 0.25},
        )
        assert envs.env_is_wrapped(Monitor) == [True, True]
        assert envs.env_is_wrapped(Halved) == [True, True]
        assert envs.get_attr("g") == [5.0, 5.0]
        assert envs.render_mode == "rgb_array"
        rows.append([envs.reset()])
        envs.action_space.seed(0)
        for _ in range(13):
            actions = np.array([envs.action_space.sample() for _ in range(2)])
            observations, rewards, dones, infos = envs.step(actions)
            rows[-1] += [observations, np.float32(rewards), dones, infos]
        envs.close()
        files = sorted((tmp_path / str(number)).iterdir())
        assert [file.name for file in files] == ["3.monitor.csv", "4.monitor.csv"]
        rows[-1].append([])
        for file in files:
            first, lines = read_monitor(file)
            assert '"env_id": "Pendulum-v1"' in first
            rows[-1][-1].append([{**line, "t": ""} for line in lines])
            assert len(lines) == 2
    assert_equal(*rows)


def test_a_new_life_goes_on_in_the_file_of_its_monitor(tmp_path: Path) -> None:
    (tmp_path / "0.monitor.csv").write_text("of a run before\n")
    envs = sb3.make_vec_env(
        partial(CountingEnv, 3),
        seed=0,
        monitor_dir=str(tmp_path),
        monitor_kwargs={"info_keywords": ()},
        restart=True,
    )
    envs.reset()
    ends = 0
    for _ in range(3):
        for _ in range(4):
            infos = envs.step(np.zeros(1, np.int64))[3]
            ends += "episode" in infos[0]
        kill(envs.vector_env.actor_pids()[0])
        infos = envs.step(np.zeros(1, np.int64))[3]
        assert "fault" in infos[0]
    envs.close()
    first, rows = read_monitor(tmp_path / "0.monitor.csv")
    assert first.startswith('#{"t_start"')
    assert len(rows) == ends == 3
    times = [float(row["t"]) for row in rows]
    assert times == sorted(times)


def test_files_of_a_run_before_are_added_to_on_request(tmp_path: Path) -> None:
    kwargs = {"override_existing": False}
    text = "#{}\nr,l,t\n1.0,1,1.0\n"
    (tmp_path / "0.monitor.csv").write_text(text)
    envs = sb3.make_vec_env(
        partial(CountingEnv, 2), monitor_dir=str(tmp_path), monitor_kwargs=kwargs
    )
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(1, np.int64))
    envs.close()
    assert len(read_monitor(tmp_path / "0.monitor.csv")[1]) == 2


def test_stable_baselines_is_imported_before_actors_are_forked(make: Make) -> None:
    envs = make([monitored(CountingEnv)] * 2)
    assert have_torch(envs) == [True, True]


def test_envs_without_it_need_none_of_stable_baselines(make: Make) -> None:
    envs = make([partial(CountingEnv, render_mode="rgb_array")] * 2, preload=())
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    envs.set_attr("count", 1)
    envs.env_method("add", 1)
    envs.render()
    assert have_torch(envs) == [False, False]


def have_torch(envs: Any) -> list[bool]:
    # A lambda goes by value: nobody imports this module for it.
    found: list[bool] = envs.vector_env.exec_func(lambda _: "torch" in sys.modules)
    return found
