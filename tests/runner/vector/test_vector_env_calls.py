"""`call`, attributes, `exec_func` and `render` of `BusVectorEnv` (group C)."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import EncodeError, ProtocolError
from envbus.runner import BusVectorEnv, EnvError
from tests.runner.pool_envs import UnpicklableHere

Make = Callable[..., BusVectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[BusVectorEnv] = []

    def _make(env_fns: Any, **kwargs: Any) -> BusVectorEnv:
        made.append(BusVectorEnv(env_fns, **kwargs))
        return made[-1]

    yield _make
    for envs in made:
        envs.close(terminate=True)


class _TalkingEnv(CountingEnv):
    """Has methods that return and raise all sorts of things."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.engine = _Engine()

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def lock(self) -> Any:
        return threading.Lock()

    def home(self) -> Any:
        return UnpicklableHere()

    def fail(self, error: Exception) -> None:
        raise error

    def name(self, name: str) -> str:
        return name * 2


class _Engine:
    def __init__(self) -> None:
        self.speed = 3

    def double(self, factor: int = 2) -> int:
        return self.speed * factor


def wrapped(number: int) -> gymnasium.Env[Any, Any]:
    return TimeLimit(OrderEnforcing(_TalkingEnv(number)), 50)


def working(envs: BusVectorEnv) -> bool:
    observations, _ = envs.reset(seed=3)
    return observations[:, 3].tolist() == list(range(3, 3 + envs.num_envs))


# --- call -------------------------------------------------------------------------------------


def test_arguments_and_results_may_be_any_objects(make: Make) -> None:
    envs = make([_TalkingEnv] * 2)
    assert envs.call("echo", 1, [2], key={"a": 3}) == (((1, [2]), {"key": {"a": 3}}),) * 2
    assert envs.call("name", "x") == ("xx",) * 2
    (((function, array), _), _) = envs.call("echo", lambda x: x + 1, np.arange(3, dtype=np.int8))
    assert function(2) == 3
    assert array.dtype == np.int8
    array[...] = 0
    assert type(envs.get_attr("engine")[1]).__name__ == "_Engine"


@pytest.mark.parametrize("num_actors", [2, 0])
def test_what_a_call_returned_is_let_go_of_at_the_next_one(make: Make, num_actors: int) -> None:
    envs = make([_TalkingEnv] * 2, num_actors=num_actors)
    returned = [weakref.ref(array) for (array,), _ in envs.call("echo", np.arange(3))]
    envs.call("name", "x")
    gc.collect()
    assert [reference() for reference in returned] == [None, None]


def test_a_dotted_name_reaches_into_attributes(make: Make) -> None:
    envs = make([partial(wrapped, 0)] * 2)
    assert envs.get_attr("engine.speed") == (3, 3)
    assert envs.call("engine.double", factor=5) == (15, 15)
    envs.set_attr("engine.speed", [4, 5])
    assert envs.get_attr("engine.speed") == (4, 5)
    assert envs.has_attr("engine")
    assert envs.has_attr("engine.speed")
    assert not envs.has_attr("engine.nonsense")
    assert not envs.has_attr("nonsense")


def test_gymnasiums_own_calls_are_refused_with_advice(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    for name in ("_setattr", "_check_spaces"):
        text = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
        with pytest.raises(ValueError, match=re.escape(text)):
            envs.call(name)
    with pytest.raises(AttributeError, match="nonsense"):
        envs.call("nonsense")
    assert working(envs)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [ValueError("bad"), AssertionError("1 == 2"), StopIteration(3)])
def test_what_a_method_raises_comes_back(make: Make, error: Exception) -> None:
    envs = make([_TalkingEnv] * 2)
    with pytest.raises(type(error)) as caught:
        envs.call("fail", error)
    assert caught.value.args == error.args
    assert working(envs)


# --- what cannot be sent ----------------------------------------------------------------------


def test_an_argument_that_cannot_be_pickled_is_refused_and_reaches_no_env(make: Make) -> None:
    envs = make([_TalkingEnv] * 2)
    lock = threading.Lock()
    for use in (
        partial(envs.call, "echo", lock),
        partial(envs.call, "echo", key=[lock]),
        partial(envs.set_attr, "x", lock),
        partial(envs.exec_func, lambda env: lock),
        partial(envs.reset, options={"lock": lock}),
    ):
        with pytest.raises(EncodeError, match="lock"):
            use()
    assert envs.statistics().in_flight == 0
    assert not envs.has_attr("x")
    assert working(envs)


class Counted:
    """Counts how often it is pickled."""

    def __init__(self) -> None:
        self.pickled = 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        return int, (self.pickled,)


def test_a_result_is_pickled_once(make: Make) -> None:
    envs = make([CountingEnv] * 2, num_actors=1)
    envs.set_attr("thing", [Counted, Counted])
    assert envs.exec_func(lambda env: env.get_wrapper_attr("thing")()) == [1, 1]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_env(make: Make) -> None:
    envs = make([_TalkingEnv] * 4, num_actors=2)
    with pytest.raises(EncodeError, match=r"`lock` gave .*_thread.lock cannot be pickled"):
        envs.call("lock")
    with pytest.raises(EncodeError, match=r"the function gave .*_thread.lock") as caught:
        envs.exec_func(lambda env: {"a": [1, threading.Lock()]}, [2, 0])
    cause: Any = caught.value.__cause__
    last = cause if isinstance(cause, EnvError) else cause.exceptions[-1]
    assert (last.env_id, last.phase) == (2, "call")
    assert working(envs)


def test_a_result_that_cannot_be_rebuilt_here_leaves_the_envs_usable(make: Make) -> None:
    envs = make([_TalkingEnv] * 2)
    with pytest.raises(ProtocolError, match="cannot be rebuilt here: ValueError: only at home"):
        envs.call("home")
    assert working(envs)


# --- attributes -------------------------------------------------------------------------------


def test_a_list_is_dealt_out_and_another_value_goes_to_all(make: Make) -> None:
    envs = make([partial(wrapped, number) for number in range(3)], num_actors=2)
    envs.set_attr("number", [4, 5, 6])
    assert envs.get_attr("number") == (4, 5, 6)
    envs.set_attr("number", (7, 8, 9))
    assert envs.get_attr("number") == (7, 8, 9)
    envs.set_attr("number", {"a": 1})
    assert envs.get_attr("number") == ({"a": 1},) * 3
    envs.set_attr("number", np.arange(3))
    assert [array.tolist() for array in envs.get_attr("number")] == [[0, 1, 2]] * 3
    envs.set_attr("fresh", "x")
    assert envs.get_attr("fresh") == ("x",) * 3


def test_a_tuple_can_be_given_to_all(make: Make) -> None:
    """Also where it has as many items as there are envs."""
    envs = make([CountingEnv] * 2)
    envs.set_attr("pair", (1, 2), broadcast=True)
    assert envs.get_attr("pair") == ((1, 2), (1, 2))


def test_attributes_can_be_set_before_the_first_reset(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.set_attr("length", [1, 2])
    envs.reset()
    assert (envs.step([0, 0])[2]).tolist() == [True, False]


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_some_envs_can_be_addressed(make: Make, num_actors: int) -> None:
    envs = make([partial(wrapped, number) for number in range(4)], num_actors=num_actors)
    assert envs.get_attr("number", 2) == (2,)
    assert envs.get_attr("number", -1) == (3,)
    assert envs.get_attr("number", [3, 0]) == (3, 0)
    assert envs.get_attr("number", np.array([1, -2])) == (1, 2)
    assert envs.get_attr("number", range(1, 3)) == (1, 2)
    assert envs.get_attr("number", []) == ()
    envs.set_attr("number", [30, 10], indices=[3, 1])
    envs.set_attr("number", 20, indices=2)
    with pytest.raises(ValueError, match=re.escape("Got `3` values for 2 environments.")):
        envs.set_attr("number", [1, 2, 3], indices=[0, 1])
    assert envs.get_attr("number") == (0, 10, 20, 30)


def test_what_addresses_no_env_is_refused(make: Make) -> None:
    envs = make([CountingEnv] * 4, num_actors=1)
    indices: Any
    for indices in (4, -5, [0, 4], [7]):
        with pytest.raises(IndexError, match=r"env (4|-5|7) does not exist; there are 4"):
            envs.get_attr("length", indices)
    for indices in (True, [False, True], np.array([False, True])):  # not the envs 0 and 1
        with pytest.raises(TypeError, match="indices has integers"):
            envs.exec_func(id, indices)
    assert envs.get_attr("length") == (3,) * 4


# --- exec_func --------------------------------------------------------------------------------


def module_level(env: Any, factor: int = 1) -> int:
    return int(env.get_wrapper_attr("number")) * factor


def test_a_function_runs_beside_each_env_in_its_process(make: Make) -> None:
    envs = make([partial(wrapped, number) for number in range(3)], num_actors=3)
    pids = envs.exec_func(lambda env: os.getpid())
    assert len(set(pids)) == 3
    assert sorted(pids) == sorted(envs.actor_pids())
    assert envs.exec_func(module_level, None, factor=10) == [0, 10, 20]
    base = 100
    assert envs.exec_func(lambda env: module_level(env) + base) == [100, 101, 102]
    assert envs.exec_func(partial(module_level, factor=2)) == [0, 2, 4]
    assert (
        envs.exec_func(lambda env, *args, **kwargs: (args, kwargs), None, 1, a=2)
        == [((1,), {"a": 2})] * 3
    )


def test_a_function_sees_the_outermost_wrapper(make: Make) -> None:
    envs = make([partial(wrapped, 1)])
    assert envs.exec_func(lambda env: type(env).__name__) == ["TimeLimit"]


def test_envs_that_are_not_addressed_have_none(make: Make) -> None:
    envs = make([partial(wrapped, number) for number in range(3)], num_actors=2)
    assert envs.exec_func(module_level, 1) == [None, 1, None]
    assert envs.exec_func(module_level, -1) == [None, None, 2]
    assert envs.exec_func(module_level, [2, 0]) == [0, None, 2]
    assert envs.exec_func(module_level, []) == [None, None, None]


def test_a_function_renders_the_one_env_that_is_named(make: Make) -> None:
    envs = make([partial(CountingEnv, 9, render_mode="rgb_array")] * 3, num_actors=2)
    envs.reset()
    envs.step([0] * 3)
    envs.exec_func(lambda env: env.step(0), [0])
    frame, *others = envs.exec_func(lambda env: env.render(), 0)
    np.testing.assert_array_equal(frame, np.full((1, 1, 3), 2, np.uint8))
    assert others == [None, None]


def test_what_is_not_callable_is_returned_as_it_is(make: Make) -> None:
    assert make([CountingEnv] * 2).exec_func({"a": 1}) == [{"a": 1}] * 2


def test_an_assertion_of_a_function_comes_back(make: Make) -> None:
    envs = make([partial(wrapped, number) for number in range(3)], num_actors=1)

    def check(env: Any) -> None:
        assert env.get_wrapper_attr("number") != 1, "number is 1"

    with pytest.raises(AssertionError, match="number is 1") as caught:
        envs.exec_func(check)
    assert isinstance(caught.value.__cause__, EnvError)
    assert caught.value.__cause__.env_id == 1
    assert working(envs)


def test_wrappers_can_be_asked_for(make: Make) -> None:
    envs = make([partial(wrapped, 0), _TalkingEnv])
    assert envs.env_is_wrapped(TimeLimit) == [True, False]
    assert envs.env_is_wrapped(gymnasium.Wrapper) == [True, False]
    assert envs.env_is_wrapped(gymnasium.wrappers.Autoreset) == [False, False]


# --- render -----------------------------------------------------------------------------------


def test_lists_of_frames_come_as_they_are(make: Make) -> None:
    pytest.importorskip("pygame")
    factory = partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array_list")
    envs = make([factory] * 2)
    assert envs.render_mode == "rgb_array_list"
    envs.reset()
    envs.step([0, 1])
    images = envs.call("render")
    assert [len(frames) for frames in images] == [2, 2]
    assert images[0][0].dtype == np.uint8
