from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
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


@pytest.mark.parametrize("kind", [OrderedDict, defaultdict, list, deque])
def test_containers_of_derived_classes_are_copied_and_stay_of_their_class(kind: type[Any]) -> None:
    derived = type("Derived", (kind,), {})
    is_dict = issubclass(kind, dict)
    value = derived({0: []} if is_dict else [[]]) if kind is not defaultdict else derived(list)
    copy = own({"a": value, "b": (value[0],)})["a"]
    copy[0].append(1)
    copy.update({1: 2}) if is_dict else copy.append(2)
    assert len(value) == 1
    assert value[0] == []
    assert type(copy) is derived


def test_sets_and_bytes_that_may_change_are_copied() -> None:
    numbers, data = {1}, bytearray(b"a")
    copy = own([numbers, data])
    numbers.add(2)
    data[0] = 0
    assert copy == [{1}, b"a"]


def test_what_is_in_an_array_of_objects_is_copied() -> None:
    array = np.empty((1, 2), object)
    array[0, 0], array[0, 1] = [1], np.zeros(1)
    copy = own(array)
    array[0, 0].append(2)
    array[0, 1][0] = 3.0
    assert copy[0, 0] == [1]
    assert copy[0, 1].tolist() == [0.0]


def test_a_record_is_copied() -> None:
    """Taken out of an array of records it is a view."""
    records = np.zeros(2, [("x", "f4"), ("y", object)])
    records["y"][0] = [1]
    copy = own({"record": records[0]})["record"]
    records["x"] = 3.0
    records["y"][0].append(2)
    assert type(copy) is np.void
    assert copy.item() == (0.0, [1])


def test_objects_in_fields_of_records_are_copied() -> None:
    records = np.zeros((2, 1), [("x", "f4"), ("inner", [("y", object, (2,))])])
    records["inner"]["y"][1, 0, 1] = inner = [1]
    copy = own(records)
    inner.append(2)
    assert copy["inner"]["y"].tolist() == [[[0, 0]], [[0, [1]]]]
    assert copy.dtype == records.dtype


def test_a_derived_container_that_cannot_be_copied_stays_what_it_is() -> None:
    class Single(dict[str, int]):
        def __copy__(self) -> Single:
            return self

    class Refuses(dict[str, int]):
        def __copy__(self) -> Refuses:
            raise TypeError

    for value in (Single(a=1), Refuses(a=1), UserDict(a=1)):
        assert own([value])[0] is value


class _Fields(tuple[int, ...]):
    """As SciPy's results: it has fields, and nothing to make one by."""

    _fields = ("a", "b")


def _refuse(*_: object) -> Any:
    raise TypeError


@pytest.mark.parametrize(
    "value",
    [
        _Fields((1, 2)),
        type("Refuses", (np.ndarray,), {"copy": _refuse})(1),
        type("Refuses", (dict,), {"items": _refuse})(a=1),
        type("Refuses", (list,), {"__iter__": _refuse})(),
        type("Refuses", (deque,), {"__iter__": _refuse})(),
    ],
)
def test_what_a_derived_class_raises_leaves_the_value_as_it_is_and_the_rest_copied(
    value: object,
) -> None:
    rest = [1]
    copy = own([value, rest])
    assert copy[0] is value
    assert copy[1] is not rest


def test_a_matrix_of_objects_is_copied() -> None:
    matrix = np.empty((1, 2), object).view(np.matrix)
    matrix[0, 0] = inner = [1]
    copy = own(matrix)
    assert type(copy) is np.matrix
    assert copy[0, 0] == [1]
    assert copy[0, 0] is not inner


class _Twice(NamedTuple("_Twice", [("a", int), ("b", int)])):
    def __new__(cls, one: int) -> _Twice:
        return super().__new__(cls, one, one)


def test_a_named_tuple_is_copied_whatever_its_constructor_takes() -> None:
    copy = own([_Twice(1)])[0]
    assert type(copy) is _Twice
    assert copy == (1, 1)


def test_what_contains_itself_stays_what_it_is() -> None:
    for endless in ({}, OrderedDict[str, object]()):
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
