from __future__ import annotations

import math
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from envbus.actors.env.renewal import NoEnv, check_fits, close_within
from envbus.actors.testing import CountingEnv
from tests.envs import FailingEnv, SpaceEnv

BOX = spaces.Box(-1, 1, (2,), np.float32)


def test_an_env_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    env = CountingEnv()
    close_within(env, 60.0, "env 3")
    assert env.closed
    assert caplog.records == []


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_closing_raises_is_logged_only(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    close_within(FailingEnv("close", error=error), 60.0, "env 3")
    assert "env 3: closing it raised" in caplog.text


class ThreadBoundEnv(CountingEnv):
    """Knows which thread made it."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.thread = threading.get_ident()

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        if self.gate is not None:
            assert self.gate.wait(60.0)
        super().close()


@pytest.mark.parametrize("timeout", [60.0, math.inf])
def test_an_env_is_closed_in_the_thread_that_made_it(timeout: float) -> None:
    env = ThreadBoundEnv()
    close_within(env, timeout, "env 3")
    assert env.closed


def test_a_close_that_lasts_too_long_is_given_up() -> None:
    gate = threading.Event()
    told = []

    def give_up(reason: str) -> None:
        told.append(reason)
        gate.set()

    env = ThreadBoundEnv(gate)
    close_within(env, 0.01, "env 3", give_up)
    assert told == ["env 3: closing it took over 0.01 s: its process ends, with all envs in it"]
    assert env.closed


def test_what_stands_in_an_envs_place_fails_with_the_reason_and_can_be_closed() -> None:
    env = NoEnv("env 3 could not be made again")
    for use in (
        lambda: env.reset(seed=1),
        lambda: env.step(0),
        lambda: env.get_wrapper_attr("x"),
        lambda: env.set_wrapper_attr("x", 1),
    ):
        with pytest.raises(RuntimeError, match="env 3 could not be made again"):
            use()
    env.close()


def env_of(observation: spaces.Space[Any], action: spaces.Space[Any] = BOX) -> Any:
    return SpaceEnv(observation, action)


@pytest.mark.parametrize(
    "again",
    [
        BOX,
        spaces.Box(-9, 9, (2,), np.float32),  # another range in the same place
    ],
)
def test_a_space_with_the_same_layout_fits(again: spaces.Space[Any]) -> None:
    check_fits(env_of(again), BOX, BOX, num_envs=None)


@pytest.mark.parametrize(
    "again",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(-1, 1, (2,), np.float64),
        spaces.Dict(a=BOX),
        spaces.Text(4),
    ],
)
def test_a_space_with_another_layout_does_not(again: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"the env was made again with the space .*, expected Box"):
        check_fits(env_of(again), BOX, BOX, num_envs=None)
    with pytest.raises(ValueError, match=r"the env was made again with the space .*, expected Box"):
        check_fits(env_of(BOX, again), BOX, BOX, num_envs=None)


def test_spaces_without_a_fixed_size_fit_by_their_kind() -> None:
    check_fits(env_of(spaces.Text(9)), spaces.Text(4), BOX, num_envs=None)
    with pytest.raises(ValueError, match="expected Text"):
        check_fits(env_of(spaces.Sequence(BOX)), spaces.Text(4), BOX, num_envs=None)


def test_an_env_and_a_vector_env_do_not_take_each_others_place() -> None:
    one: gymnasium.Env[Any, Any] = CountingEnv()
    two = SyncVectorEnv([CountingEnv] * 2)
    pair = CountingEnv.observation_space, CountingEnv.action_space
    check_fits(one, *pair, num_envs=None)
    check_fits(two, *pair, num_envs=2)
    with pytest.raises(ValueError, match="expected one env"):
        check_fits(two, *pair, num_envs=None)
    for env in (one, two):
        with pytest.raises(ValueError, match="expected a vector env of 3"):
            check_fits(env, *pair, num_envs=3)
