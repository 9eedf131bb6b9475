from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.env.construction import construct
from envbus.actors.env.source import GymId, parse_source, to_plain
from envbus.actors.protocol import Build
from envbus.actors.spaces.spaces import from_plain
from envbus.actors.testing import CountingEnv
from envbus.bus.wire.messages import Tree
from tests.actors.driver import Anything
from tests.envs import CustomSpaceEnv, FailingEnv, SpaceEnv


def request(*sources: Anything, mode: str = "NextStep", registry: Anything = None) -> Build:
    return Build(
        sources=Tree(list(sources)),
        autoreset_mode=mode,
        specs=None if registry is None else Tree(registry),
    )


def test_sources_of_all_kinds_are_built() -> None:
    groups, built = construct(
        request(
            to_plain(parse_source("envbus.actors.testing:CountingEnv", {"length": 4})),
            CountingEnv,
            lambda: CountingEnv(5),
        )
    )
    assert built.errors == []
    assert built.counts == [1, 1, 1]
    assert [group.num_slots for group in groups] == [3]
    assert groups[0].call(None, "length", [], {})[0] == [4, 3, 5]


def test_ids_are_built() -> None:
    _, built = construct(request(to_plain(GymId("CartPole-v1"))))
    assert built.metadata.value["render_fps"] == 50


def test_vector_envs_and_envs_share_an_actor() -> None:
    vector_env = partial(SyncVectorEnv, [CountingEnv, CountingEnv])
    groups, built = construct(request(CountingEnv, vector_env, CountingEnv, CountingEnv))
    assert built.errors == []
    assert built.counts == [1, 2, 1, 1]
    assert [group.num_slots for group in groups] == [1, 2, 2]
    assert built.space_of == [0, 0, 0, 0]
    assert from_plain(built.spaces.value[0][0]) == CountingEnv.observation_space


def test_equal_spaces_are_told_once() -> None:
    def make(n: int) -> SpaceEnv:
        return SpaceEnv(spaces.Discrete(n), spaces.Discrete(2))

    _, built = construct(request(*[partial(make, n) for n in (3, 4, 3, 4, 4)]))
    assert built.space_of == [0, 1, 0, 1, 1]
    assert [from_plain(pair[0]) for pair in built.spaces.value] == [
        spaces.Discrete(3),
        spaces.Discrete(4),
    ]


def test_custom_spaces_are_told_as_objects() -> None:
    _, built = construct(request(CustomSpaceEnv, CustomSpaceEnv))
    assert built.space_of == [0, 0]
    assert type(built.spaces.value[0][0]).__name__ == "CustomSpace"


def test_metadata_is_a_copy_and_the_render_mode_is_told() -> None:
    _, built = construct(request(partial(CountingEnv, render_mode="rgb_array")))
    assert built.render_mode == "rgb_array"
    assert built.metadata.value == {"render_modes": ["rgb_array"], "render_fps": 30}
    assert built.metadata.value is not CountingEnv.metadata


def test_what_cannot_leave_the_process_is_left_out() -> None:
    def make() -> CountingEnv:
        env = CountingEnv()
        env.metadata = {"lock": threading.Lock(), "render_fps": 5}
        return env

    _, built = construct(request(make))
    assert built.metadata.value == {"lock": None, "render_fps": 5}


def test_a_failing_constructor_is_told_and_the_others_are_closed() -> None:
    made: list[CountingEnv] = []

    def make(fails: bool) -> CountingEnv:
        made.append(FailingEnv("init") if fails else CountingEnv())
        return made[-1]

    groups, built = construct(request(*[partial(make, fails) for fails in (False, False, True)]))
    assert groups == []
    assert built.counts == []
    (error,) = built.errors
    assert (error.slot, error.phase, error.message) == (2, "build", "failing on purpose")
    assert "in _go_wrong" in error.traceback
    assert [env.closed for env in made] == [True, True]


@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.Wrapper], ids=["same", "wrapped"])
def test_one_env_for_several_slots_is_refused(wrap: Callable[[Any], Any]) -> None:
    env = CountingEnv()
    groups, built = construct(request(CountingEnv, partial(wrap, env), partial(wrap, env)))
    assert groups == []
    (error,) = built.errors
    assert (error.slot, error.phase, error.type_name) == (2, "build", "ValueError")
    assert "must make a new one in each call" in error.message
    assert env.closed


class _View(CountingEnv):
    """Its `unwrapped` is a new object each time."""

    @property
    def unwrapped(self) -> Any:
        return object()


def test_envs_are_not_taken_for_one_whose_memory_is_used_again() -> None:
    _, built = construct(request(*[_View] * 20))
    assert built.errors == []
    assert built.counts == [1] * 20


def test_errors_while_closing_are_told_too() -> None:
    _, built = construct(request(partial(FailingEnv, "close"), partial(FailingEnv, "init")))
    assert [(error.slot, error.phase) for error in built.errors] == [(1, "build"), (0, "close")]


def test_a_constructor_that_exits_does_not_end_the_actor() -> None:
    _, built = construct(request(partial(FailingEnv, "init", 0, SystemExit(2))))
    assert built.errors[0].type_name == "SystemExit"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: None, "expected a gymnasium.Env"),
        ({"gym": 3}, "not the plain form of an env source"),
        ({"gym": "NoSuchEnv-v0"}, "NoSuchEnv"),
        ({"call": "envbus_no_such_module:make"}, "envbus_no_such_module"),
        (partial(SyncVectorEnv, [CountingEnv], autoreset_mode="Disabled"), "NextStep was asked"),
    ],
)
def test_what_cannot_be_built_is_told(source: Anything, message: str) -> None:
    _, built = construct(request(source))
    assert message in built.errors[0].message


def test_an_env_without_spaces_is_told() -> None:
    class Bare(gymnasium.Env[Any, Any]):
        pass

    class Wrong(Bare):
        observation_space = spaces.Discrete(2)
        action_space = "left or right"  # type: ignore[assignment]

    _, built = construct(request(Bare))
    assert "observation_space" in built.errors[0].message
    _, built = construct(request(Wrong))
    assert "expected a gymnasium.Space as a space of <Wrong" in built.errors[0].message


def test_a_vector_env_in_the_asked_mode_is_taken() -> None:
    source = partial(SyncVectorEnv, [CountingEnv], autoreset_mode=AutoresetMode.SAME_STEP)
    _, built = construct(request(source, mode="SameStep"))
    assert built.errors == []
    assert "autoreset_mode" not in built.metadata.value


def test_specs_of_the_runner_are_registered() -> None:
    spec = EnvSpec("EnvbusCarried-v0", CountingEnv, disable_env_checker=True)
    try:
        _, built = construct(request(to_plain(GymId("EnvbusCarried-v0")), registry=[spec]))
    finally:
        gymnasium.registry.pop("EnvbusCarried-v0", None)
    assert built.errors == []


def test_an_unknown_autoreset_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        construct(request(CountingEnv, mode="sometimes"))


def test_generators_of_the_spaces_travel() -> None:
    def make() -> SpaceEnv:
        return SpaceEnv(spaces.Discrete(2), spaces.Discrete(1000, seed=3))

    _, built = construct(request(make))
    assert from_plain(built.spaces.value[0][1]).sample() == spaces.Discrete(1000, seed=3).sample()


def test_an_actor_may_have_no_env() -> None:
    groups, built = construct(request())
    assert groups == []
    assert built.counts == []
    assert np.size(built.space_of) == 0
