"""Envs of other libraries as sources: in actors they do what they do here, and are made again.

docs/how-to/sources-of-envs.md has a row for each. Those that `make test` does not install are run
by `make test-sources`, in an environment of their own.
Envs with several agents have tests of their own, `test_pettingzoo_envs.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from envbus.actors.env.atari import make_atari
from envbus.actors.env.source import make, parse_source
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner import ActorPool, BusVectorEnv, make_vec
from envbus.runner.testing import assert_same_trajectory

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

AT_ONCE = RestartPolicy(max_restarts=100, window=1000.0, backoff=0.001)
#: Envs of each vector env below.
ENVS = 3


# --- sources that have one env ----------------------------------------------------------------


def minigrid_env() -> Any:
    """Without its text, which is of a space of MiniGrid's own."""
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(gymnasium.make("MiniGrid-Empty-Random-5x5-v0", max_episode_steps=12))


def suite_env() -> Any:
    """DM Control, an env that is made by its own library."""
    from dm_control import suite
    from shimmy import DmControlCompatibilityV0

    return DmControlCompatibilityV0(suite.load("pendulum", "swingup"))


class DmEnv(gymnasium.Env[Any, Any]):
    """Any `dm_env.Environment`, by Shimmy's functions."""

    def __init__(self, make_env: Callable[[int | None], Any]) -> None:
        from shimmy.utils.dm_env import dm_spec2gym_space

        self._make, self._env = make_env, make_env(None)
        self.observation_space = dm_spec2gym_space(self._env.observation_spec())
        self.action_space = dm_spec2gym_space(self._env.action_spec())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        from shimmy.utils.dm_env import dm_env_step2gym_step

        if seed is not None:  # a dm_env is seeded when it is made
            self._env = self._make(seed)
        observation, *_, info = dm_env_step2gym_step(self._env.reset())
        return observation, info

    def step(self, action: Any) -> Any:
        from shimmy.utils.dm_env import dm_env_step2gym_step

        return dm_env_step2gym_step(self._env.step(action))


def catch(seed: int | None) -> Any:
    """A game that is a `dm_env.Environment` and nothing else: a ball falls, a paddle catches it."""
    import dm_env
    from dm_env import specs

    class Catch(dm_env.Environment):
        def __init__(self) -> None:
            self.rng = np.random.default_rng(seed)

        def reset(self) -> Any:
            self.row, self.ball, self.paddle = 0, int(self.rng.integers(5)), 2
            return dm_env.restart(self.seen())

        def step(self, action: Any) -> Any:
            self.paddle = min(max(self.paddle + int(action) - 1, 0), 4)
            self.row += 1
            if self.row == 4:
                return dm_env.termination(float(self.ball == self.paddle), self.seen())
            return dm_env.transition(0.0, self.seen())

        def seen(self) -> Any:
            return np.array([self.row, self.ball, self.paddle], np.float32)

        def observation_spec(self) -> Any:
            return specs.BoundedArray((3,), np.float32, 0, 5, "seen")

        def action_spec(self) -> Any:
            return specs.DiscreteArray(3, name="action")

    return Catch()


SINGLE: dict[str, tuple[Any, str]] = {
    "MiniGrid": (minigrid_env, "minigrid"),
    "MuJoCo": ("InvertedPendulum-v5", "mujoco"),
    "Atari": ("ale_py:ALE/Pong-v5", "ale_py"),
    "Atari as DQN plays it": (partial(make_atari, "Breakout"), "ale_py"),
    "DM Control by id": ("shimmy:dm_control/cartpole-swingup-v0", "shimmy"),
    "DM Control by a function": (suite_env, "shimmy"),
    "dm_env": (partial(DmEnv, catch), "shimmy"),
}
each_single = pytest.mark.parametrize("name", SINGLE)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log of its warnings where it runs


@pytest.mark.slow
@each_single
def test_in_actors_an_env_does_what_it_does_here(name: str) -> None:
    source, library = SINGLE[name]
    pytest.importorskip(library)
    here = SyncVectorEnv([partial(make, parse_source(source))] * 3)
    envs = make_vec(source, 3, num_actors=2)
    try:
        assert_same_trajectory(envs, here, steps=30, seed=3)
    finally:
        envs.close()
        here.close()


@pytest.mark.slow
@each_single
def test_an_env_of_a_pool_is_made_again_when_its_actor_is_killed(name: str) -> None:
    source, library = SINGLE[name]
    pytest.importorskip(library)
    with ActorPool([source] * 2, num_actors=2, restart=AT_ONCE) as pool:
        pool.reset(seed=1)
        told: list[int] = []
        victims = pool.actor_pids()[:1]
        steps = [0, 0]
        while len(told) < 1 or min(steps) < 5:
            batch = pool.recv(timeout=60.0)
            assert not batch.late
            for fault in batch.faults:
                told.append(fault.env_id)
                steps = [0, 0]
            for env_id in batch.env_ids.tolist():
                steps[env_id] += 1
            if sum(steps) >= 6 and victims:
                os.kill(victims.pop(), signal.SIGKILL)
            pool.send([pool.single_action_space.sample() for _ in batch.env_ids], batch.env_ids)
        assert told == [0]
        assert pool.statistics().restarts == 1


# --- sources that are vector envs -------------------------------------------------------------


class NativeMaze(VectorEnv[Any, Any, Any]):
    """A vector env in the manner of Procgen: pixels, one seed for all, resets by itself."""

    def __init__(self, num_envs: int = ENVS, length: int = 6) -> None:
        self.num_envs, self._length = num_envs, length
        self.single_observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.single_action_space = spaces.Discrete(15)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._rng = np.random.default_rng()
        self._at = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            if not isinstance(seed, int):
                raise TypeError("Unsupported seed type")
            self._rng = np.random.default_rng(seed)
        self._at[:] = self._rng.integers(self._length, size=self.num_envs)
        self._over[:] = False
        return self._see(), {"level_seed": self._at.copy()}

    def step(self, actions: Any) -> Any:
        begins = self._over.copy()
        self._at = np.where(begins, self._rng.integers(3, size=self.num_envs), self._at + 1)
        rewards = np.where(begins, 0.0, actions % 3).astype(np.float32)
        self._over = ~begins & (self._at >= self._length)
        none = np.zeros(self.num_envs, np.bool_)
        return self._see(), rewards, self._over.copy(), none, {"level_seed": self._at.copy()}

    def _see(self) -> Any:
        noise = self._rng.integers(256, size=(self.num_envs, 8, 8, 3), dtype=np.uint8)
        noise[:, 0, 0, 0] = self._at
        return noise


def ale_vector_env() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec(
        "ALE/Pong-v5", num_envs=ENVS, vectorization_mode="vector_entry_point", num_threads=1
    )


def envpool_env() -> Any:
    import envpool

    # Seeded when it is made, and not by a reset.
    return envpool.make_gymnasium("CartPole-v1", num_envs=ENVS, num_threads=1, seed=7)


def phys2d_env() -> Any:
    return gymnasium.make_vec(
        "phys2d/CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point"
    )


def gymnax_env() -> Any:
    import gymnax
    from gymnax.wrappers.gym import GymnaxToVectorGymWrapper

    class Gymnax(GymnaxToVectorGymWrapper):
        """Says that it resets in the same step, and what was seen last, in Gymnasium's form."""

        def step(self, action: Any) -> Any:
            seen, rewards, terminateds, truncateds, infos = super().step(action)
            over = np.asarray(terminateds | truncateds)
            final = {"final_obs": infos["final_observation"], "_final_obs": over}
            return seen, rewards, terminateds, truncateds, final if over.any() else {}

    env = Gymnax(gymnax.make("CartPole-v1")[0], num_envs=ENVS)
    env.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return env


class BraxEnv(VectorEnv[Any, Any, Any]):
    """Envs of Brax, in one computation; the step behind an episode's end resets."""

    def __init__(self, name: str, num_envs: int, episode_length: int = 1000) -> None:
        import jax
        import jax.numpy as jnp
        from brax import envs

        env = envs.create(name, episode_length, auto_reset=False, batch_size=num_envs)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (env.observation_size,))
        self.single_action_space = spaces.Box(-1.0, 1.0, (env.action_size,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

        def step(state: Any, actions: Any, key: Any) -> Any:
            def choose(new: Any, old: Any) -> Any:
                over = state.done.astype(bool)
                return jnp.where(over.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            return jax.tree.map(choose, env.reset(key), env.step(state, actions))

        self._key, self._split = jax.random.key, jax.random.split
        self._reset, self._step = jax.jit(env.reset), jax.jit(step)
        self._rng = self._key(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = self._key(seed)
        self._rng, key = self._split(self._rng)
        self._state = self._reset(key)
        return self._state.obs, {}

    def step(self, actions: Any) -> Any:
        self._rng, key = self._split(self._rng)
        self._state = state = self._step(self._state, actions, key)
        truncated = state.info["truncation"].astype(bool)
        return state.obs, state.reward, state.done.astype(bool) & ~truncated, truncated, {}


NATIVE: dict[str, tuple[Any, str]] = {
    "as Procgen": (NativeMaze, "gymnasium"),
    "ale-py's": (ale_vector_env, "ale_py"),
    "EnvPool": (envpool_env, "envpool"),
    "Gymnasium's in JAX": (phys2d_env, "jax"),
    "Gymnax": (gymnax_env, "gymnax"),
    "Brax": (partial(BraxEnv, "fast", ENVS, 8), "brax"),
}
each_native = pytest.mark.parametrize("name", NATIVE)


def mode_of(env: Any) -> Any:
    return env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)


@pytest.mark.slow_but_first
@each_native
def test_in_actors_a_vector_env_does_what_it_does_here(name: str) -> None:
    source, library = NATIVE[name]
    pytest.importorskip(library)
    here = [source(), source()]
    envs = BusVectorEnv([source, source], num_actors=2, autoreset_mode=mode_of(here[0]))
    assert envs.num_envs == 2 * ENVS
    envs.action_space.seed(2)
    seen, _ = envs.reset(seed=11)
    expected = [env.reset(seed=11 + ENVS * i)[0] for i, env in enumerate(here)]
    np.testing.assert_array_equal(seen, np.concatenate(expected))
    ended = 0
    for step in range(40):
        actions = envs.action_space.sample()
        halves = [actions[:ENVS], actions[ENVS:]]
        *result, infos = envs.step(actions)
        local = [env.step(half) for env, half in zip(here, halves, strict=True)]
        for mine, *theirs in zip(result, *[one[:4] for one in local], strict=True):
            np.testing.assert_array_equal(mine, np.concatenate(theirs), f"step {step}")
        over = result[2] | result[3]
        ended += int(over.sum())
        if mode_of(here[0]) is AutoresetMode.SAME_STEP and over.any():
            final = np.concatenate([one[4].get("final_obs", one[0]) for one in local])
            np.testing.assert_array_equal(np.stack(list(infos["final_obs"][over])), final[over])
    assert ended or name == "ale-py's"
    for one in (envs, *here):
        one.close()


@pytest.mark.slow_but_first
@each_native
def test_a_vector_env_is_made_again_when_its_actor_is_killed(name: str) -> None:
    source, library = NATIVE[name]
    pytest.importorskip(library)
    mode = mode_of(source())
    with ActorPool([source] * 2, num_actors=2, restart=AT_ONCE, autoreset_mode=mode) as pool:
        pool.reset(seed=1)
        told: list[int] = []
        victims = pool.actor_pids()[:1]
        steps = np.zeros(pool.num_envs, np.int64)
        while not told or min(steps) < 5:
            batch = pool.recv(min_envs=ENVS, timeout=60.0)
            assert not batch.late
            for fault in batch.faults:
                told.append(fault.env_id)
                steps[:] = 0
            steps[batch.env_ids] += 1
            if sum(steps) >= 4 * ENVS and victims:
                os.kill(victims.pop(), signal.SIGKILL)
            pool.send([pool.single_action_space.sample() for _ in batch.env_ids], batch.env_ids)
        assert told == list(range(ENVS))
        assert pool.statistics().restarts == 1


# --- atari ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_an_atari_env_equals_gymnasiums_wrappers_around_it(mode: AutoresetMode) -> None:
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

    def by_hand() -> Any:
        gymnasium.register_envs(ale_py)
        env: Any = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
        env = AtariPreprocessing(env, terminal_on_life_loss=True)
        return ClipReward(FrameStackObservation(env, 4), -1.0, 1.0)

    here = SyncVectorEnv([by_hand] * 3, autoreset_mode=mode)
    envs = make_vec(make_atari, 3, game="Breakout", num_actors=2, autoreset_mode=mode)
    assert envs.single_observation_space.shape == (4, 84, 84)
    assert assert_same_trajectory(envs, here, steps=120, seed=5) > 0
    envs.close()
    here.close()
