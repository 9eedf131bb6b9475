"""Trajectories of real envs, equal to `SyncVectorEnv`'s in every bit.

Episodes are cut short, so that each run sees many ends; what the simulators do then is theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.testing import InfoEnv
from envbus.runner import BusVectorEnv
from envbus.runner.testing import assert_same, assert_same_trajectory

Factory = Callable[[], gymnasium.Env[Any, Any]]

MODES = [mode.value for mode in AutoresetMode]
each_mode = pytest.mark.parametrize("mode", MODES)


def newest(family: str) -> list[str]:
    """Return the ids of a family's envs, of each its highest version."""
    versions: dict[str, EnvSpec] = {}
    for spec in gymnasium.registry.values():
        if str(spec.entry_point).startswith(f"gymnasium.envs.{family}."):
            other = versions.get(spec.name)
            if other is None or (spec.version or 0) > (other.version or 0):
                versions[spec.name] = spec
    return sorted(spec.id for spec in versions.values())


def ale_pong() -> gymnasium.Env[Any, Any]:
    ale_py = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", max_episode_steps=12)


def minigrid(image_only: bool) -> gymnasium.Env[Any, Any]:
    import minigrid.wrappers

    env = gymnasium.make("MiniGrid-Empty-Random-5x5-v0", max_episode_steps=15)
    return minigrid.wrappers.ImgObsWrapper(env) if image_only else env


def equal(
    factories: list[Factory],
    mode: str,
    *,
    num_actors: int,
    shared_memory: bool,
    steps: int,
    ends: int = 1,
) -> None:
    sync = SyncVectorEnv(factories, autoreset_mode=AutoresetMode(mode))
    envs = BusVectorEnv(
        factories, shared_memory=shared_memory, autoreset_mode=mode, num_actors=num_actors
    )
    try:
        assert assert_same_trajectory(envs, sync, steps=steps, seed=17) >= ends
    finally:
        envs.close()
        sync.close()


def made(env_id: str, lengths: tuple[int, ...]) -> list[Factory]:
    return [partial(gymnasium.make, env_id, max_episode_steps=length) for length in lengths]


@pytest.mark.parametrize(
    ("env_id", "mode"),
    [
        pytest.param(env_id, mode, marks=[pytest.mark.slow] if (e + m) % 3 else [])
        for e, env_id in enumerate(newest("classic_control") + newest("toy_text"))
        for m, mode in enumerate(MODES)
    ],
)
def test_small_envs(env_id: str, mode: str) -> None:
    factories = made(env_id, (7, 9, 40))
    equal(factories, mode, num_actors=2, shared_memory=True, steps=120, ends=20)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("env_id", newest("classic_control") + newest("toy_text"))
def test_small_envs_without_shared_memory(env_id: str) -> None:
    equal(made(env_id, (7, 40)), "SameStep", num_actors=1, shared_memory=False, steps=60, ends=5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("num_actors", "shared_memory", "mode"),
    list(itertools.product([1, 2, 5], [True, False], MODES)),
)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1"])
def test_all_ways(env_id: str, num_actors: int, shared_memory: bool, mode: str) -> None:
    factories = made(env_id, (5, 11, 11, 30, 30))
    equal(factories, mode, num_actors=num_actors, shared_memory=shared_memory, steps=100, ends=25)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("num_actors", "shared_memory", "mode"),
    list(itertools.product([1, 2, 4], [True, False], MODES)),
)
def test_all_ways_with_infos_of_all_sorts(num_actors: int, shared_memory: bool, mode: str) -> None:
    factories = [partial(InfoEnv, length) for length in (1, 2, 3, 5)]
    equal(factories, mode, num_actors=num_actors, shared_memory=shared_memory, steps=25, ends=20)


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize(("env_id", "num_actors"), [("HalfCheetah-v5", 2), ("Humanoid-v5", 3)])
def test_mujoco(
    env_id: str, num_actors: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log of its warnings where it runs
    factories = made(env_id, (6, 25, 40))
    shared_memory = mode != "SameStep"
    equal(factories, mode, num_actors=num_actors, shared_memory=shared_memory, steps=80, ends=10)


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("shared_memory", [True, False])
def test_atari(mode: str, shared_memory: bool) -> None:
    pytest.importorskip("ale_py")
    num_actors = 2 if shared_memory else 1
    equal(
        [ale_pong] * 2, mode, num_actors=num_actors, shared_memory=shared_memory, steps=30, ends=2
    )


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize(
    ("image_only", "shared_memory"), [(True, True), (True, False), (False, False)]
)
def test_minigrid(image_only: bool, shared_memory: bool, mode: str) -> None:
    """With its text it has a space of MiniGrid's own, for which there is no shared memory."""
    pytest.importorskip("minigrid")
    factories: list[Factory] = [partial(minigrid, image_only)] * 3
    equal(factories, mode, num_actors=2, shared_memory=shared_memory, steps=50, ends=5)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("num_actors", "shared_memory", "mode"),
    list(itertools.product([1, 2, 4], [True, False], MODES)),
)
def test_resets_of_some_or_all_at_any_time(num_actors: int, shared_memory: bool, mode: str) -> None:
    """In every mode, with and without seeds."""
    factories = [partial(InfoEnv, length) for length in (1, 2, 3, 5)]
    sync = SyncVectorEnv(factories, autoreset_mode=AutoresetMode(mode))
    envs = BusVectorEnv(
        factories, shared_memory=shared_memory, autoreset_mode=mode, num_actors=num_actors
    )
    rng = np.random.default_rng(3)
    both = (envs, sync)
    assert_same(*[one.reset(seed=1) for one in both])
    over = np.zeros(4, np.bool_)
    for step in range(80):
        must_reset = mode == "Disabled" and over.any()
        if must_reset or rng.random() < 0.3:
            mask = (rng.random(4) < 0.5) | (over & must_reset)
            seeds = [None if rng.random() < 0.5 else int(rng.integers(99)) for _ in range(4)]
            seed = [None, int(rng.integers(99)), seeds][rng.integers(3)]
            options: Any = {"level": step}
            if mask.any() and not mask.all():
                options["reset_mask"] = mask
            assert_same(
                *[one.reset(seed=seed, options=dict(options)) for one in both], f"reset {step}"
            )
            over &= ~mask
            if "reset_mask" not in options:
                over[...] = False
        else:
            actions = rng.integers(100, size=4)
            result, expected = (one.step(actions) for one in both)
            assert_same(result, expected, f"step {step}")
            over = expected[2] | expected[3]
    for one in both:
        one.close()


@pytest.mark.slow
def test_a_second_vector_env_repeats_the_first_whatever_its_actors() -> None:
    seen = []
    for num_actors, context in ((1, "fork"), (3, "forkserver"), (2, "spawn")):
        envs = BusVectorEnv(["CartPole-v1"] * 3, num_actors=num_actors, context=context)
        observations = [envs.reset(seed=3)[0]]
        observations += [envs.step(np.arange(3) % 2)[0] for _ in range(40)]
        envs.close()
        seen.append(np.stack(observations).tobytes())
    assert seen[0] == seen[1] == seen[2]
