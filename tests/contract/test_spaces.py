"""Every kind of space as observation and as action space."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.runner import BusVectorEnv
from envbus.runner.testing import assert_same, assert_same_trajectory
from tests.envs import ANY_GRAPHS, CustomSpaceEnv, SpaceEnv, all_spaces

Space = gymnasium.Space[Any]

_BOX = spaces.Box(-1.0, 1.0, (2, 1))
SPACES: dict[str, Space] = {
    **all_spaces(),
    "box_bounded_below": spaces.Box(0.0, np.inf, (2, 2)),
    "box_bounded_above": spaces.Box(-np.inf, 0.0, (2, 1)),
    "box_bool_fixed": spaces.Box(np.array([0, 0, 1]), np.array([1, 0, 1]), dtype=np.bool_),
    "box_mixed_int32": spaces.Box(
        np.array([-np.inf, -np.inf, 0, -10]), np.array([np.inf, 0, np.inf, 10]), dtype=np.int32
    ),
    "multi_discrete_2d_start": spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[10, 20], [30, 40]]),
    "tuple_with_graph": spaces.Tuple((spaces.Graph(_BOX, None), spaces.Discrete(2))),
    "tuple_with_dict": spaces.Tuple((spaces.Discrete(3), spaces.Dict(a=_BOX, b=_BOX))),
    "dict_of_dict_of_graph": spaces.Dict(
        a=spaces.Dict(a=spaces.Graph(_BOX, None), b=_BOX), b=spaces.Tuple((_BOX, _BOX))
    ),
    "graph_of_numbers": spaces.Graph(spaces.Discrete(3), spaces.Discrete(4)),
    "sequence_of_graphs": spaces.Sequence(spaces.Graph(_BOX, spaces.Discrete(4))),
    "one_of_arrays": spaces.OneOf((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2]))),
}  # fmt: skip
if ANY_GRAPHS:
    SPACES |= {
        "graph_of_bits": spaces.Graph(spaces.MultiBinary(4), None),
        "graph_of_multi_discrete": spaces.Graph(spaces.MultiDiscrete([3, 4]), spaces.Discrete(3)),
        "graph_of_dicts": spaces.Graph(
            spaces.Dict(n=spaces.Discrete(5), bits=spaces.MultiBinary(5)), spaces.Box(1.0, 4.0)
        ),
        "graph_of_tuples": spaces.Graph(
            spaces.Tuple((spaces.Dict(a=spaces.Discrete(3)), spaces.MultiBinary(2))),
            spaces.Tuple((spaces.Discrete(4), spaces.Box(0.0, 1.0, (2,)))),
        ),
        "graph_with_dict_edges": spaces.Graph(
            spaces.Discrete(3),
            spaces.Dict(weight=spaces.Box(0.0, 1.0, ()), kind=spaces.Discrete(4)),
        ),
    }

#: Without processes these are tried in tests/actors/test_trajectories.py.
PLAIN = all_spaces()

both_ways = pytest.mark.parametrize("shared_memory", [True, False])


@pytest.mark.parametrize(
    ("mode", "shared_memory"),
    [("NextStep", True), pytest.param("SameStep", False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in PLAIN else name for name in SPACES],
)
def test_observations_and_actions_of_every_space(name: str, mode: str, shared_memory: bool) -> None:
    """Also those of changing size, with shared memory for what has a fixed one."""
    space = SPACES[name]
    factories = [partial(SpaceEnv, space, space, length) for length in (2, 3, 4)]
    sync = SyncVectorEnv(factories, autoreset_mode=AutoresetMode(mode))
    envs = BusVectorEnv(factories, shared_memory=shared_memory, autoreset_mode=mode, num_actors=1)
    try:
        assert_same_trajectory(envs, sync, steps=8, seed=5)
        assert_same(envs.get_attr("actions"), sync.get_attr("actions"))
        with warnings.catch_warnings():
            # Gymnasium's own check of a Box without axes warns of Python floats.
            warnings.filterwarnings("ignore", message=".*Casting input x to numpy array")
            assert envs.reset()[0] in envs.observation_space
    finally:
        envs.close()
        sync.close()


_BATCHES: dict[str, tuple[Space, list[Any]]] = {
    "numbers": (
        spaces.Discrete(5),
        [
            [1, 2, 3],
            (1, 2.5, True),
            np.array([1.0, 2.5, np.nan]),
            np.array([[1], [2], [3]]),
            np.array(["a", "b", "c"]),
            np.array([1, "x", None], dtype=object),
            [np.int8(1), "word", None],
            {0: "a", 1: "b", 2: "c"},
        ],
    ),
    "arrays": (
        spaces.Box(-1.0, 1.0, (2,)),
        [
            [np.zeros(2), np.ones(3), 5],
            np.ones((3, 2), np.float64),
            np.ones((3, 2), np.float32, order="F"),
            np.ones((6, 4), np.float32)[::2, ::2],
            np.full((3, 7), 9, np.int16),
            np.array([[np.nan, -0.0]] * 3, np.float32),
            [[0.5, 1], [2, 3], [4, 5]],
        ],
    ),
    "dicts": (
        spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1.0, 1.0, (2,))),
        [
            {"a": np.arange(3), "b": np.zeros((3, 2), np.float32)},
            {"b": np.zeros((3, 2), np.float32), "a": np.arange(3)},
            {"a": [7, 8, 9], "b": [[0, 1], [2, 3], [4, 5]]},
            {"a": np.arange(3), "b": np.zeros((3, 2)), "more": 1},
        ],
    ),
    "tuples": (
        spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
        [
            (np.arange(3), np.ones((3, 2), np.int8)),
            (np.arange(3), np.ones((3, 2), np.int64)),
            [np.arange(3), np.ones((3, 2), np.int8)],
        ],
    ),
}


@both_ways
@pytest.mark.parametrize("kind", _BATCHES)
def test_each_env_sees_its_action_as_gymnasium_hands_it(kind: str, shared_memory: bool) -> None:
    """Type, dtype, shape and value, also of what is not in the space."""
    space, batches = _BATCHES[kind]
    factories = [partial(SpaceEnv, spaces.Discrete(2), space, 100)] * 3
    sync, envs = SyncVectorEnv(factories), BusVectorEnv(factories, shared_memory, num_actors=2)
    try:
        for vector in (sync, envs):
            vector.reset()
            for batch in batches:
                vector.step(batch)
        assert_same(envs.get_attr("actions"), sync.get_attr("actions"))
        assert len(sync.get_attr("actions")[0]) == len(batches)
    finally:
        envs.close()
        sync.close()


@both_ways
@pytest.mark.parametrize(
    ("space", "batch"),
    [
        (spaces.Discrete(5), np.array([1, 2, 3], np.int32)),
        (spaces.Box(-1.0, 1.0, (2,)), np.ones((3, 2), ">f4")),
    ],
    ids=["int32", "big-endian"],
)
def test_an_action_that_casts_safely_comes_in_the_dtype_of_its_space(
    space: Space, batch: Any, shared_memory: bool
) -> None:
    """So it goes by shared memory; Gymnasium hands on the dtype that came."""
    factories = [partial(SpaceEnv, spaces.Discrete(2), space, 100)] * 3
    envs = BusVectorEnv(factories, shared_memory, num_actors=2)
    try:
        envs.reset()
        envs.step(batch)
        expected = tuple([row] for row in batch.astype(space.dtype))
        assert_same(envs.get_attr("actions"), expected)
    finally:
        envs.close()


@both_ways
def test_actions_may_be_changed_once_they_are_sent(shared_memory: bool) -> None:
    """Also large ones, which are not copied on their way."""
    space = spaces.Box(-np.inf, np.inf, (100_000,), np.float64)
    envs = BusVectorEnv([partial(SpaceEnv, spaces.Discrete(2), space)] * 2, shared_memory)
    envs.reset()
    for actions in (np.ones((2, 100_000)), [np.ones(100_000), np.ones(100_000)]):
        envs.step_async(actions)
        for action in actions:
            action[...] = 2
        envs.step_wait()
    for taken in envs.get_attr("actions"):
        assert [(action.min(), action.max()) for action in taken] == [(1, 1)] * 2
    envs.close()


@both_ways
@pytest.mark.parametrize(
    "name", ["box_uint8", "discrete", "dict_nested", "tuple_with_text", "text", "graph", "one_of"]
)
def test_a_partial_reset_leaves_the_other_observations_as_they_are(
    name: str, shared_memory: bool
) -> None:
    space = SPACES[name]
    factories = [partial(SpaceEnv, space, spaces.Discrete(2), length) for length in (1, 2, 3)]
    sync = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED)
    envs = BusVectorEnv(
        factories, shared_memory=shared_memory, autoreset_mode="Disabled", num_actors=2
    )
    try:
        assert assert_same_trajectory(envs, sync, steps=6) >= 8
    finally:
        envs.close()
        sync.close()


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_a_custom_space_takes_any_object_in_and_out(num_actors: int) -> None:
    envs = BusVectorEnv([CustomSpaceEnv] * 4, shared_memory=False, num_actors=num_actors)
    assert type(envs.single_action_space).__name__ == "CustomSpace"
    assert isinstance(envs.observation_space, spaces.Tuple)
    assert isinstance(envs.action_space, spaces.Tuple)
    assert envs.reset()[0] == ("reset",) * 4
    observations, rewards, *_ = envs.step(("a", "b", "c", "d"))
    assert observations == ("step a", "step b", "step c", "step d")
    assert rewards.dtype == np.float64
    envs.close()


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: _InTuple(env)])
def test_a_custom_space_is_refused_with_shared_memory(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"shared_memory=False.*CustomSpace"):
        BusVectorEnv([lambda: wrap(CustomSpaceEnv())] * 2, shared_memory=True)


class _InTuple(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = spaces.Tuple((env.observation_space, spaces.Discrete(2)))

    def observation(self, observation: Any) -> Any:
        return observation, 0


# --- observation_mode -------------------------------------------------------------------------


def boxed(*highs: float) -> list[Callable[[], SpaceEnv]]:
    action = spaces.Discrete(2)
    return [partial(SpaceEnv, spaces.Box(0.0, high, (5,)), action) for high in highs]


@both_ways
def test_spaces_of_one_shape_may_differ_in_their_bounds(shared_memory: bool) -> None:
    envs = BusVectorEnv(boxed(1, 2, 3), shared_memory, observation_mode="different")
    high = np.repeat(np.array([1, 2, 3], np.float32), 5).reshape(3, 5)
    assert envs.observation_space == spaces.Box(0.0, high)
    assert envs.single_observation_space == spaces.Box(0.0, 1.0, (5,))
    assert envs.reset(seed=0)[0] in envs.observation_space
    envs.close()


def test_a_pair_of_spaces_is_taken_as_it_is() -> None:
    batched, single = spaces.Box(0, 9, (2, 5)), spaces.Box(0, 9, (5,))
    envs = BusVectorEnv(boxed(1, 2), observation_mode=(batched, single))
    assert envs.observation_space is batched
    assert envs.single_observation_space is single
    envs.close()


_SHAPES = [partial(SpaceEnv, spaces.Box(0, 1, (size,)), spaces.Discrete(2)) for size in (2, 2, 3)]
_KINDS = [partial(SpaceEnv, space, spaces.Discrete(2)) for space in (_BOX, spaces.Discrete(5))]
_DTYPES = [
    partial(SpaceEnv, spaces.Box(0, 1, (2,), dtype), spaces.Discrete(2))
    for dtype in (np.float32, np.float64)
]
_ACTIONS = [partial(SpaceEnv, _BOX, spaces.Discrete(size)) for size in (2, 2, 3)]
_PAIR = (spaces.Box(0, 4, (3, 5)), spaces.Box(0, 4, (5,)))


@pytest.mark.parametrize(
    ("factories", "mode", "error", "text"),
    [
        (boxed(1, 2), "same", RuntimeError, "are not equivalent.*different.*Env 1 has Box.*2.0"),
        (_SHAPES, "same", RuntimeError, "not equivalent.*Env 2 has"),
        (_SHAPES, "different", ValueError, "shape to be equal.*Env 2 has"),
        (_SHAPES, _PAIR, RuntimeError, "common shape and dtype.*Env 0 has"),
        (_KINDS, "same", RuntimeError, r"Env 1 has Discrete\(5\)"),
        (_KINDS, "different", TypeError, r"same (?:type|shape).*Env 1 has Discrete\(5\)"),
        (_DTYPES, "different", ValueError, "dtype.*Env 1 has Box.*float64"),
        (_ACTIONS, "same", RuntimeError, r"action space different.*Env 2 has Discrete\(3\)"),
        (boxed(1, 2), "unheard of", ValueError, "Invalid `observation_mode`.*unheard of"),
        (boxed(1, 2), (_BOX, "x"), TypeError, "Expected both elements.*str"),
    ],
)
def test_spaces_that_do_not_go_together_are_refused_by_name(
    factories: Sequence[Any], mode: Any, error: type[Exception], text: str
) -> None:
    """Which env, which space."""
    with pytest.raises(error, match=re.compile(text, re.DOTALL)):
        BusVectorEnv(factories, observation_mode=mode)
