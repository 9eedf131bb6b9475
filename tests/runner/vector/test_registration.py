from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from envbus.actors.env.source import local_registry
from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import BusVectorEnv, vector_entry_point
from envbus.runner.testing import assert_same_trajectory

ANY = "envbus.runner:envbus/VectorEnv-v0"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forget what the test has registered."""
    known = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


def test_gymnasium_makes_our_vector_env_of_any_env_by_one_id() -> None:
    envs = gymnasium.make_vec(ANY, num_envs=3, env="Pendulum-v1", g=9.81, num_actors=1)
    assert isinstance(envs, BusVectorEnv)
    assert envs.get_attr("g") == (9.81,) * 3
    assert len(envs.actor_pids()) == 1
    envs.close()


@pytest.mark.parametrize("env", [partial(CountingEnv, 7), "envbus.actors.testing:CountingEnv"])
def test_the_env_may_be_given_as_make_vec_takes_it(env: Any) -> None:
    envs = gymnasium.make_vec(ANY, num_envs=2, env=env, autoreset_mode="SameStep")
    assert isinstance(envs, BusVectorEnv)
    assert envs.autoreset_mode is AutoresetMode.SAME_STEP
    assert envs.get_attr("count") == (0, 0)
    envs.close()


def test_the_spec_that_gymnasium_leaves_makes_the_same_again() -> None:
    made = gymnasium.make_vec(ANY, num_envs=2, env="CartPole-v1", num_actors=1)
    assert made.spec is not None
    assert json.loads(made.spec.to_json())["kwargs"]["env"] == "CartPole-v1"
    again = gymnasium.make_vec(made.spec)
    assert isinstance(again, BusVectorEnv)
    assert again.num_envs == 2
    np.testing.assert_array_equal(made.reset(seed=3)[0], again.reset(seed=3)[0])
    for envs in (made, again):
        envs.close()


def test_without_an_env_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"vector envs of any env: pass env=\"CartPole-v1\""):
        gymnasium.make_vec(ANY, num_envs=2)


def test_actors_are_not_told_of_it() -> None:
    assert "envbus/VectorEnv-v0" not in [spec.id for spec in local_registry()]


def test_an_id_may_be_registered_with_a_vector_entry_point_of_its_own() -> None:
    gymnasium.register(
        "EnvbusOwn-v0",
        entry_point=CountingEnv,
        max_episode_steps=4,
        kwargs={"length": 100},
        vector_entry_point=vector_entry_point("EnvbusOwn-v0", num_actors=1, restart=True),
    )
    envs = gymnasium.make_vec("EnvbusOwn-v0", num_envs=3)
    sync = gymnasium.make_vec("EnvbusOwn-v0", num_envs=3, vectorization_mode="sync")
    assert isinstance(envs, BusVectorEnv)
    assert isinstance(sync, SyncVectorEnv)
    assert len(envs.actor_pids()) == 1
    assert envs.env_is_wrapped(TimeLimit) == [True] * 3
    assert assert_same_trajectory(envs, sync, steps=15, seed=2) == 9
    envs.close()
    sync.close()


@pytest.mark.parametrize("env", [CountingEnv, "envbus.actors.testing:CountingEnv"])
def test_the_limit_of_a_spec_holds_for_factories_and_import_paths(env: Any) -> None:
    gymnasium.register(
        "EnvbusLimited-v0",
        entry_point=env,
        max_episode_steps=2,
        vector_entry_point=vector_entry_point(env, length=100),
    )
    envs = gymnasium.make_vec("EnvbusLimited-v0", num_envs=2)
    envs.reset()
    assert [bool(envs.step(np.zeros(2, int))[3].all()) for _ in range(2)] == [False, True]
    envs.close()


def test_what_the_caller_says_wins_over_what_was_registered() -> None:
    entry = vector_entry_point(CountingEnv, length=5, num_actors=2)
    gymnasium.register("EnvbusSettled-v0", vector_entry_point=entry)
    envs = gymnasium.make_vec("EnvbusSettled-v0", num_envs=2, length=6, num_actors=1)
    assert isinstance(envs, BusVectorEnv)
    assert envs.get_attr("length") == (6, 6)
    assert len(envs.actor_pids()) == 1
    envs.close()


def test_the_caller_wins_over_mappings_that_were_registered() -> None:
    entry = vector_entry_point(
        CountingEnv, env_kwargs={"length": 5}, vector_kwargs={"copy": False, "num_actors": 2}
    )
    gymnasium.register("EnvbusMappings-v0", vector_entry_point=entry)
    envs = gymnasium.make_vec("EnvbusMappings-v0", num_envs=2, length=6, copy=True)
    assert isinstance(envs, BusVectorEnv)
    assert envs.get_attr("length") == (6, 6)
    assert envs.copy
    assert len(envs.actor_pids()) == 2
    envs.close()


def test_what_is_no_env_is_refused_when_it_is_registered() -> None:
    with pytest.raises(ConfigError, match="Gymnasium id"):
        vector_entry_point(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "more"),
    [(ANY, 'env="CartPole-v1", num_actors=1'), ("of_mine:Mine/CartPole-v1", "")],
    ids=["an id of ours", "an id of one's own"],
)
def test_a_program_that_imports_gymnasium_only_reaches_it_by_id_and_mode(
    env_id: str, more: str, tmp_path: Path
) -> None:
    (tmp_path / "of_mine.py").write_text(
        "import envbus, gymnasium\n"
        'entry = envbus.vector_entry_point("CartPole-v1", num_actors=1)\n'
        'gymnasium.register("Mine/CartPole-v1", vector_entry_point=entry)\n'
    )
    (tmp_path / "program.py").write_text(
        "import sys, gymnasium\n"
        'assert not [name for name in sys.modules if name.split(".")[0] == "envbus"]\n'
        'mode = "vector_entry_point"\n'
        f'envs = gymnasium.make_vec("{env_id}", num_envs=2, vectorization_mode=mode, {more})\n'
        "shape = envs.reset(seed=1)[0].shape\n"
        "print(type(envs).__module__.split('.')[0], len(envs.actor_pids()), shape)\n"
        "envs.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("envbus 1 (2, 4)\n", "")
