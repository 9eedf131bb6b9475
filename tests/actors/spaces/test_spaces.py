from __future__ import annotations

import pickle
import sys
from types import FrameType

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from envbus.actors.protocol import CallResult
from envbus.actors.spaces.spaces import (
    from_plain,
    is_fixed_size,
    leaves,
    shown,
    structurer,
    to_plain,
)
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Tree
from envbus.runner.testing import assert_same
from tests.actors.driver import Anything, carry
from tests.envs import CustomSpace, all_spaces

SPACES = all_spaces()
RAGGED = {"text", "sequence", "graph", "one_of"}


class NamedBox(spaces.Box):
    """A user's own kind of Box."""


def over_a_socket(value: Anything) -> Anything:
    """Without a pipe, objects would be refused."""
    result = CallResult(values=Tree(value))
    return decode(CallResult, [bytes(frame) for frame in encode(result)]).values.value


@pytest.mark.parametrize("name", SPACES)
def test_every_space_of_gymnasium_survives_a_socket(name: str) -> None:
    space = SPACES[name]
    copy = from_plain(over_a_socket(to_plain(space)))
    assert copy == space
    assert type(copy) is type(space)
    assert repr(copy) == repr(space)


@pytest.mark.parametrize("name", SPACES)
def test_both_sides_sample_the_same(name: str) -> None:
    space = all_spaces()[name]
    space.seed(7)
    space.sample()
    copy = from_plain(over_a_socket(to_plain(space)))
    for _ in range(5):
        sample = space.sample()
        assert_same(copy.sample(), sample)
        assert sample in copy


def test_a_space_without_a_generator_is_not_given_one() -> None:
    space = spaces.Discrete(3)
    to_plain(space)
    assert space._np_random is None
    assert from_plain(to_plain(space))._np_random is None


def test_bounds_of_an_unbounded_integer_box_survive() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.int32)
    copy = from_plain(over_a_socket(to_plain(space)))
    assert isinstance(copy, spaces.Box)
    assert not copy.is_bounded("below")
    assert not copy.is_bounded("above")


def test_a_rebuilt_box_owns_its_bounds() -> None:
    copy = from_plain(over_a_socket(to_plain(spaces.Box(0.0, 1.0, (5000,)))))
    assert isinstance(copy, spaces.Box)
    assert copy.low.flags.writeable
    assert copy.bounded_below.flags.writeable


def test_the_order_of_a_dict_survives() -> None:
    space = spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    copy = from_plain(over_a_socket(to_plain(space)))
    assert isinstance(copy, spaces.Dict)
    assert list(copy.spaces) == ["z", "a"]


def test_keys_of_a_dict_keep_their_type() -> None:
    space = spaces.Dict({0: spaces.Discrete(2), 1: spaces.Discrete(3)})  # type: ignore[dict-item]
    copy = from_plain(over_a_socket(to_plain(space)))
    assert isinstance(copy, spaces.Dict)
    assert list(copy.spaces) == [0, 1]


@pytest.mark.parametrize("space", [CustomSpace(), NamedBox(0.0, 1.0, (2,))])
def test_a_class_that_gymnasium_does_not_know_stays_an_object(space: Anything) -> None:
    assert to_plain(space) is space
    assert from_plain(space) is space


def test_a_custom_space_inside_a_known_one_stays_an_object() -> None:
    inner = NamedBox(0.0, 1.0, (2,))
    plain = to_plain(spaces.Dict(a=inner, b=spaces.Discrete(2)))
    copy = from_plain(carry(CallResult(values=Tree(plain))).values.value)
    assert isinstance(copy, spaces.Dict)
    assert copy["a"] is inner


def test_a_space_with_attributes_of_its_own_stays_an_object() -> None:
    space = spaces.Discrete(3)
    space.names = ["left", "right", "stay"]  # type: ignore[attr-defined]
    assert to_plain(space) is space


def test_a_space_within_many_others_is_built_anew_no_more_often_than_one_alone() -> None:
    depth, built = 20, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal built
        built += event == "call" and frame.f_code is from_plain.__code__

    space: spaces.Space[Anything] = spaces.Tuple([spaces.Discrete(2)] * 10)
    for _ in range(depth):
        space = spaces.Tuple([space])
    sys.setprofile(count)
    try:
        to_plain(space)
    finally:
        sys.setprofile(None)
    assert built <= 2 * (depth + 1 + 10)  # each space, and each as a part of another one


def test_a_generator_of_another_kind_makes_the_space_an_object() -> None:
    space = spaces.Discrete(3, seed=np.random.Generator(np.random.MT19937(1)))
    assert to_plain(space) is space


def test_what_is_no_space_is_named() -> None:
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Space, got str: 'Box'"):
        to_plain("Box")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"space": "Cube"},
        {"space": "Box"},
        {"space": "Discrete", "n": "x", "start": 0, "dtype": "<i8"},
        {"space": "Discrete", "n": 0, "start": 0, "dtype": "<i8"},
        {"space": "Dict", "items": [1], "sort_keys": True},
        {"space": ["Box"]},
    ],
)
def test_a_bad_plain_form_is_a_value_error(plain: Anything) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_plain(plain)


@pytest.mark.parametrize("name", SPACES)
def test_leaves_and_structure_give_what_gymnasium_gives(name: str) -> None:
    space = SPACES[name]
    if not is_fixed_size(space):
        assert any(word in name for word in (*RAGGED, "text", "ragged", "graph"))
        with pytest.raises(TypeError, match="not of fixed size"):
            leaves(space)
        return
    arrays = [np.zeros((3, *leaf.shape), leaf.dtype) for leaf in leaves(space)]
    nested = structurer(space)(arrays)
    assert_same(nested, create_empty_array(space, n=3))
    for leaf, array in zip(leaves(space), arrays, strict=True):
        found = nested
        for key in leaf.path:
            found = found[key]
        assert found is array


def test_a_subclass_that_gymnasium_stacks_is_of_fixed_size() -> None:
    assert is_fixed_size(NamedBox(0.0, 1.0, (2,)))
    assert not is_fixed_size(CustomSpace())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_arrays_is_refused(count: int) -> None:
    space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))
    with pytest.raises(ValueError, match="for the 2 leaves"):
        structurer(space)([np.zeros(1)] * count)


def test_a_graph_instance_keeps_its_class_over_a_socket() -> None:
    sample = spaces.Graph(spaces.Discrete(3), spaces.Discrete(2), seed=1).sample(num_nodes=4)
    copy = over_a_socket([sample, {"inner": sample}])
    assert_same(copy, [sample, {"inner": sample}])
    assert type(copy[0]) is spaces.GraphInstance


def test_all_spaces_of_this_module_can_be_pickled() -> None:
    for name, space in all_spaces().items():
        assert pickle.loads(pickle.dumps(space)) == space, name


@pytest.mark.parametrize("name", SPACES)
def test_a_small_space_is_shown_with_its_name(name: str) -> None:
    space = SPACES[name]
    text = shown(space)
    assert text.startswith(type(space).__name__)
    assert len(text) <= 400


def test_bounds_that_differ_are_not_all_shown() -> None:
    image = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    assert shown(image) == str(image)
    bounds = np.arange(2**12, dtype=np.float32).reshape((2,) * 12)  # NumPy would show each of them
    mixed = spaces.Box(bounds - 1.0, bounds)
    told = f"Box(shape {mixed.shape}, float32)"
    assert shown(mixed) == told
    assert shown(spaces.Tuple([mixed, spaces.Discrete(2)])) == f"Tuple({told}, Discrete(2))"
    assert shown(spaces.MultiDiscrete(bounds.astype(int) + 1)).startswith("MultiDiscrete(shape (2,")


def test_of_many_parts_a_few_are_looked_at() -> None:
    class Part(spaces.Discrete):
        looked_at = 0

        def __repr__(self) -> str:
            Part.looked_at += 1
            return "Part"

    text = shown(spaces.Dict([(str(i), Part(2)) for i in range(1000)]), 100)
    assert len(text) == 100
    assert Part.looked_at < 20
