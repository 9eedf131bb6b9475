from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.wire.codec import Ext, decode, encode
from envbus.bus.wire.ext import register_struct, struct_by_class, struct_by_name
from envbus.bus.wire.messages import Tree
from tests.bus.codec_samples import Sample, identical, round_trip


class Point(NamedTuple):
    x: Any
    y: Any


class Pixel(Point):
    """Not registered: a subclass is another type."""


@pytest.fixture
def point() -> Iterator[None]:
    register_struct(Point, "test.Point", list, lambda plain: Point(*plain))
    yield
    del struct_by_class[Point], struct_by_name["test.Point"]


@pytest.mark.usefixtures("point")
def test_a_registered_named_tuple_keeps_its_type_and_content() -> None:
    value = {"p": Point((1, 2), Point(np.arange(3), bytes(5000))), "q": [Point(1, 2)]}
    copy = round_trip(value)
    assert type(copy["p"]) is Point
    assert type(copy["p"].y) is Point
    assert identical(tuple(copy["p"].y), (np.arange(3), bytes(5000)))
    assert copy["q"] == [Point(1, 2)]


@pytest.mark.usefixtures("point")
def test_a_subclass_is_not_taken_for_the_registered_class() -> None:
    with pytest.raises(EncodeError, match=r"tree\[0\]: a .*Pixel cannot cross"):
        encode(Sample(tree=Tree([Pixel(1, 2)])))


@pytest.mark.usefixtures("point")
def test_an_object_inside_a_struct_is_named() -> None:
    with pytest.raises(EncodeError, match=r"tree\['p'\]\[1\]: a builtins.object"):
        encode(Sample(tree=Tree({"p": Point(1, object())})))


@pytest.mark.parametrize(
    "value", [set(), {1, "a", (2, 3)}, frozenset({1}), OrderedDict(b=1, a=[2]), {frozenset(): 1}]
)
def test_sets_and_ordered_dicts_cross(value: object) -> None:
    copy = round_trip(value)
    assert (type(copy), copy) == (type(value), value)


def test_an_unknown_name_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="no struct 'nobody'"):
        decode_tree([msgpack.ExtType(Ext.STRUCT, b"nobody"), 1])


@pytest.mark.parametrize("content", [3, None, [[]], [{}], "text"])
def test_content_that_does_not_fit_is_a_decode_error(content: object) -> None:
    with pytest.raises(DecodeError, match="does not fit struct 'OrderedDict'"):
        decode_tree([msgpack.ExtType(Ext.STRUCT, b"OrderedDict"), content])


@pytest.mark.parametrize("array", [[], [1, 2], [msgpack.ExtType(Ext.TUPLE, b"")]])
def test_a_struct_has_exactly_one_content(array: list[object]) -> None:
    with pytest.raises(DecodeError):
        decode_tree([msgpack.ExtType(Ext.STRUCT, b"set"), *array])


@pytest.mark.usefixtures("point")
def test_a_name_or_class_is_registered_once() -> None:
    with pytest.raises(ValueError, match="cannot register"):
        register_struct(Pixel, "test.Point", list, lambda plain: Pixel(*plain))
    with pytest.raises(ValueError, match="cannot register"):
        register_struct(Point, "other", list, lambda plain: Point(*plain))
    register_struct(Point, "test.Point", list, lambda plain: Point(*plain))  # a reloaded module


def decode_tree(value: object) -> object:
    body = msgpack.packb(value)
    return decode(Sample, [msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, body)})])
