from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from gymnasium.spaces import GraphInstance

from envbus.actors.arrays.copies import own, own_deeply


def read_only(*values: int) -> np.ndarray:
    array = np.array(values)
    array.setflags(write=False)
    return array


def test_arrays_at_any_depth_become_writable_copies() -> None:
    array = read_only(1, 2)
    value = {"a": [array, (array,)], "graph": GraphInstance(array, None, array)}
    copy = own(value)
    for found in (copy["a"][0], copy["a"][1][0], copy["graph"].nodes):
        assert found.tolist() == [1, 2]
        assert found is not array
        assert found.flags.writeable
    assert type(copy["graph"]) is GraphInstance


def test_containers_are_copied() -> None:
    value: dict[str, list[int]] = {"a": []}
    copy = own(value)
    copy["a"].append(1)
    assert value == {"a": []}


class _Twice(NamedTuple("_Twice", [("a", int), ("b", int)])):
    def __new__(cls, one: int) -> _Twice:
        return super().__new__(cls, one, one)


def test_a_named_tuple_is_copied_whatever_its_constructor_takes() -> None:
    copy = own([_Twice(1)])[0]
    assert type(copy) is _Twice
    assert copy == (1, 1)


def test_what_contains_itself_stays_what_it_is() -> None:
    endless: dict[str, object] = {}
    endless["me"] = [endless]
    assert own(endless) is endless


def test_other_objects_stay_what_they_are() -> None:
    lock = threading.Lock()
    assert own([lock])[0] is lock
    assert own(np.float32(1.5)).dtype == np.float32


def test_a_deep_copy_copies_objects_too() -> None:
    class Box:
        def __init__(self) -> None:
            self.items = [1]

    box = Box()
    copy = own_deeply({"box": box})
    assert copy["box"] is not box
    assert copy["box"].items == [1]


def test_a_deep_copy_falls_back_where_an_object_refuses() -> None:
    lock, array = threading.Lock(), read_only(1)
    copy = own_deeply({"lock": lock, "array": array})
    assert copy["lock"] is lock
    assert copy["array"].flags.writeable


def test_a_deep_copy_of_a_read_only_array_is_writable() -> None:
    assert own_deeply(read_only(1)).flags.writeable
    assert own_deeply([read_only(1)])[0].flags.writeable
