from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.env.old_gym import (
    OldGymEnv,
    five_values,
    in_new_api,
    is_with_info,
    takes,
)
from envbus.actors.testing import CountingEnv

LIMIT = {"TimeLimit.truncated": True}


@pytest.mark.parametrize(
    ("done", "info", "flags"),
    [
        (False, {}, (False, False)),
        (True, {}, (True, False)),
        (True, LIMIT, (False, True)),
        (False, LIMIT, (False, False)),
        (True, {"TimeLimit.truncated": False}, (True, False)),
        (np.True_, {}, (True, False)),
        (np.array([True]), {}, (True, False)),
    ],
)
def test_done_is_terminated_or_by_a_time_limit_truncated(
    done: Any, info: Any, flags: tuple[bool, bool]
) -> None:
    assert five_values((1, 2.0, done, info)) == (1, 2.0, *flags, info)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        (1, 2.0, False),
        (1, 2.0, False, False, {}),
        (1, 2.0, False, False),
        (1, 2.0, np.zeros(2, bool), {}),
        (1, 2.0, {"a": True}, {}),
    ],
)
def test_what_is_no_step_of_the_old_api_is_none(returned: Any) -> None:
    assert five_values(returned) is None


def test_an_observation_with_an_info_is_told_from_one_of_two_parts() -> None:
    assert is_with_info((1, {}))
    assert not is_with_info((1, 2))
    assert not is_with_info({"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("reset", "names"),
    [
        (lambda: None, set()),
        (lambda seed=None: None, {"seed"}),
        (lambda *, seed=None, options=None: None, {"seed", "options"}),
        (lambda **_: None, {"seed", "options"}),
    ],
)
def test_what_a_reset_takes_is_read_from_its_signature(reset: Any, names: set[str]) -> None:
    assert takes(reset) == names


def reset_without_arguments(env: gymnasium.Env[Any, Any]) -> int:
    return int(env.np_random.integers(1000))


class Unseeded(gymnasium.Env[Any, Any]):
    """Its `reset` takes nothing."""

    reset: Any = reset_without_arguments

    def step(self, action: Any) -> Any:
        return action, 1.0, True, LIMIT


class Seeded(Unseeded):
    """It has a method for its seed, as the old API says."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)


def test_an_env_of_today_stays_as_it_is() -> None:
    env = CountingEnv()
    assert in_new_api(env) is env


def test_a_seed_goes_to_the_method_for_it_or_to_the_random_numbers() -> None:
    env = in_new_api(Unseeded())
    assert isinstance(env, OldGymEnv)
    first, info = env.reset(seed=3)
    assert info == {}
    assert env.reset()[0] != first
    assert env.reset(seed=3)[0] == first
    assert env.step(5) == (5, 1.0, False, True, LIMIT)
    old = Seeded()
    in_new_api(old).reset(seed=4)
    in_new_api(old).reset()
    assert old.seeds == [4]
    with pytest.raises(TypeError, match="options"):
        env.reset(options={"level": 1})


def test_options_that_are_empty_as_those_of_a_mask_alone_are_not_handed_on() -> None:
    assert in_new_api(Unseeded()).reset(options={})[1] == {}


def test_it_is_told_once_per_class(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Unseeded):
        """Nobody has told of it."""

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            in_new_api(Own())
    (record,) = caplog.records
    assert "Own has the old Gym API" in record.getMessage()
