from __future__ import annotations

import enum
import pickle
import sys
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given

from envbus.bus.errors import DecodeError, EncodeError
from envbus.bus.wire import limits
from envbus.bus.wire.arrays import num_fields
from envbus.bus.wire.codec import Ext, decode, encode
from envbus.bus.wire.dynamic_values import (
    TreeDecoder,
    TreeEncoder,
    Value,
    place_of,
    short_repr,
    survey,
)
from envbus.bus.wire.messages import Tree
from tests.bus.codec_samples import Sample, identical, round_trip, values

Pair = namedtuple("Pair", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Text(str): ...


class Words(list[str]): ...


class Half(np.float16): ...


def nested(depth: int, kind: type[Any] = list) -> Value:
    value: Any = 0
    for _ in range(depth):
        value = {"k": value} if kind is dict else kind([value])
    return value


@given(values)
def test_every_value_arrives_with_its_exact_types(value: object) -> None:
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        np.int64(1),
        np.uint8(1),
        np.bool_(True),
        2**63,
        2**64,
        -(2**63) - 1,
        -(2**64),
        10**5000,
        1.0,
        np.float64(1),
        np.float32(1),
        np.float16(1),
        np.longdouble(1) / 3,
        1j,
        complex(-0.0, float("nan")),
        np.complex64(1j),
        np.complex128(1j),
        "a\x00",
        "\ud800",
        np.str_("a\x00"),
        b"a\x00",
        np.bytes_(b"a\x00"),
        np.datetime64("2020-01-01", "ns"),
        np.datetime64("NaT"),
        np.timedelta64(3, "h"),
        np.zeros((), [("a", "i4"), ("b", "U3", (2,))])[()],
        (),
        ((),),
        [(), []],
        {(): [], (1, ("a", None)): 0},
        {1: 0, "1": 0, b"1": 0, None: 0, (1,): 0, 1.5: 0, np.int8(2): 0, np.str_("z"): 0},
        {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [], b"data": pickle.dumps(1)},
        {b"nd": False, b"type": "<f8", b"data": b"x" * 8},
        {b"complex": True, b"data": "1j"},
        {"__class__": "os.system", "$ext": 3},
        [msgpack.Timestamp(3, 4)],
    ],
    ids=short_repr,
)
def test_types_that_are_easily_confused_arrive_as_they_were(value: object) -> None:
    assert identical(round_trip(value), value)
    assert identical(round_trip([{"x": (value,)}]), [{"x": (value,)}])


def test_agent_ids_keep_type_and_identity() -> None:
    observations = {0: "int", "0": "str", ("team", 0): "tuple", (b"a", (1,)): "nested"}
    assert list(round_trip(observations).items()) == list(observations.items())


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, 2),
        Colour.RED,
        Text("x"),
        Words(["x"]),
        Half(1),
        defaultdict(int),
        type("Sub", (OrderedDict,), {})(),
        bytearray(b"x"),
        memoryview(b"x"),
        msgpack.ExtType(Ext.TUPLE, b""),
        msgpack.ExtType(99, b""),
        np.ma.masked_array([1], [True]),
        np.zeros(2, [("a", "i4")]).view(np.recarray),
        np.array([None]),
        np.array([(1, [2])], [("a", "i4"), ("b", "O")]),
        np.array([(1, [2])], [("a", "i4"), ("b", "O")])[0],
        range(3),
        object(),
        int,
        print,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_value_is_refused_not_flattened(value: object) -> None:
    for tree in (value, [value], {"k": (value, 1)}):
        with pytest.raises(EncodeError, match=rf"{type(value).__name__}|dtype"):
            encode(Sample(tree=Tree(tree)))


def test_msgpack_numpy_never_pickles_nor_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("pickle was reached")

    monkeypatch.setattr(msgpack_numpy.pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "dumps", refuse)
    for array in (np.array([1, None]), np.zeros(2, [("a", "i4"), ("b", "O")])):
        for value in (array, [array], {"x": (array,)}):
            with pytest.raises(EncodeError, match="Python objects"):
                encode(Sample(tree=Tree(value)))
    for kind in (b"O", b"V", b"", None, "O"):
        for dtype in ("|O", "O", [["a", "|O"]], "<f8", "i4,O"):
            for nd in (True, False, 1, None):
                fields = {b"nd": nd, b"type": dtype, b"kind": kind, b"shape": [1], b"data": b"."}
                with pytest.raises(DecodeError):
                    decode_ext(Ext.NUMPY, fields)
                fields[b"complex"] = True
                assert round_trip(fields) == fields


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        {b"nd": True},
        {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [2], b"data": bytes(8)},
        {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [-1], b"data": bytes(8)},
        {b"nd": True, b"type": "<f8", b"kind": b"", b"data": bytes(8)},
        {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [1]},
        {b"nd": False, b"type": "<f8", b"data": bytes(7)},
        {b"nd": False, b"type": "<f8", b"data": "x" * 8},
        {b"nd": False, b"type": "<M8[s]", b"data": bytes(8)},
        {b"complex": True, b"data": "1j"},
    ],
)
def test_a_malformed_map_of_msgpack_numpy_is_a_decode_error(fields: object) -> None:
    with pytest.raises(DecodeError):
        decode_ext(Ext.NUMPY, fields)


def test_maps_of_other_writers_of_msgpack_numpy_decode() -> None:
    array = np.arange(6, dtype="<i2").reshape(2, 3)
    assert identical(decode_ext(Ext.NUMPY, msgpack_numpy.encode(array)), array)
    for scalar in (np.float64(1.5), np.complex128(1j), np.longdouble(2), np.bool_(True)):
        assert identical(decode_ext(Ext.NUMPY, msgpack_numpy.encode(scalar)), scalar)


@pytest.mark.parametrize(
    "value",
    [
        [1, msgpack.ExtType(Ext.TUPLE, b"")],
        msgpack.ExtType(Ext.TUPLE, b""),
        {"k": msgpack.ExtType(Ext.TUPLE, b"")},
        [msgpack.ExtType(Ext.TUPLE, b""), msgpack.ExtType(Ext.STRUCT, b"set")],
        [msgpack.ExtType(Ext.TUPLE, b"x"), 1],
        msgpack.ExtType(Ext.TREE, b"\xc0"),
        msgpack.ExtType(99, b""),
        msgpack.ExtType(Ext.COMPLEX, b"x"),
        msgpack.ExtType(Ext.NUMPY_STR, b"\xff"),
        msgpack.ExtType(Ext.OBJECT, msgpack.packb([1, "x"])),
        msgpack.ExtType(Ext.PLACEHOLDER, msgpack.packb(["x"])),
        msgpack.ExtType(Ext.PLACEHOLDER, msgpack.packb(["x", 1])),
        msgpack.ExtType(Ext.SCALAR, msgpack.packb(["<i4", [1], "C", bytes(4)])),
        msgpack.ExtType(Ext.SCALAR, msgpack.packb(["<i4", [], "C", 0])),
        msgpack.ExtType(Ext.BYTES, msgpack.packb(0)),
    ],
)
def test_an_ext_type_used_wrongly_is_a_decode_error(value: object) -> None:
    with pytest.raises(DecodeError):
        decode_tree(value)


def test_an_unhashable_key_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="unhashable"):
        decode_tree_bytes(b"\x81\x91\x01\x02")


@pytest.mark.parametrize(
    "named",
    [
        msgpack.ExtType(Ext.BYTES, msgpack.packb(0)),
        msgpack.ExtType(Ext.ARRAY, msgpack.packb(["|u1", [5000], "C", 0])),
    ],
    ids=["bytes", "array"],
)
def test_a_buffer_is_one_value(named: msgpack.ExtType) -> None:
    def found(times: int) -> Any:
        body = msgpack.packb([named] * times)
        frames = [msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, body)}), bytes(5000)]
        tree = decode(Sample, frames).tree
        assert tree is not None
        return tree.value

    assert len(found(1)[0]) == 5000
    with pytest.raises(DecodeError, match="buffer 0 is named more than once"):
        found(2)


def test_keys_that_were_made_to_have_one_hash_are_refused() -> None:
    alike = [number * sys.hash_info.modulus for number in range(1, 2001)]
    usual = [(number, str(number)) for number in range(2000)]
    kinds = (dict.fromkeys, set, frozenset, lambda keys: OrderedDict.fromkeys(keys))
    for kind in kinds:
        assert round_trip(kind(usual)) == kind(usual)
        with pytest.raises(DecodeError, match="have others' hashes"):
            round_trip(kind(alike))
        assert round_trip(kind(alike[:200])) == kind(alike[:200])
    for many in ([dict.fromkeys(alike[:200])] * 100, [set(alike[:200])] * 100):
        with pytest.raises(DecodeError, match="have others' hashes"):
            round_trip(many)
    cells = {(x, y) for x in (-1, -2) for y in range(1000)}  # -1 and -2 have one hash
    assert round_trip(cells) == cells


def test_sets_of_sets_with_one_hash_are_refused() -> None:
    alike = [number * sys.hash_info.modulus for number in range(1, 121)]
    sets = {frozenset([*alike[:60], own]) for own in alike[60:]}  # compared by their members
    with pytest.raises(DecodeError, match="have others' hashes"):
        round_trip(sets)


def test_keys_of_many_small_trees_in_one_message_are_looked_at_together() -> None:
    alike = dict.fromkeys(number * sys.hash_info.modulus for number in range(1, 1001))
    small = TreeEncoder(None, None).pack(alike)
    decoder = TreeDecoder([], None, False)
    assert decoder.unpack(small) == alike
    with pytest.raises(DecodeError, match="have others' hashes"):
        decoder.unpack(small)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_depth_is_bounded_on_both_sides_alike(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert round_trip(nested(64, kind)) == nested(64, kind)
    with pytest.raises(EncodeError, match=r"^tree is nested deeper than 64 levels, or contains"):
        encode(Sample(tree=Tree(nested(65, kind))))
    frames = encode(Sample(tree=Tree(nested(6, kind))))
    monkeypatch.setattr(limits, "MAX_DEPTH", 5)
    with pytest.raises(DecodeError, match="nested deeper than 5"):
        decode(Sample, frames)
    frames = encode(Sample(tree=Tree(nested(5, kind))))
    assert decode(Sample, frames).tree == Tree(nested(5, kind))


def test_a_tuple_as_key_counts_as_depth() -> None:
    with pytest.raises(EncodeError, match="nested deeper"):
        encode(Sample(tree=Tree({nested(64, tuple): 0})))


def test_what_is_too_deep_or_contains_itself_goes_out_as_one_object() -> None:
    class Passed:
        number = 1
        objects: tuple[object, ...] = ()

        def add(self, obj: object) -> int:
            self.objects += (obj,)
            return len(self.objects) - 1

        def get(self, _: int, index: int) -> object:
            return self.objects[index]

    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    for value in (cycle, nested(1000)):
        passed = Passed()
        copy = decode(Sample, encode(Sample(tree=Tree(value)), passed), passed).tree
        assert copy is not None
        assert copy.value is value


@pytest.mark.parametrize(
    ("value", "deep", "special"),
    [
        (1, False, 0),
        (b"x", False, 1),
        ([], False, 0),
        ([[b"x"], b"y"], False, 2),
        ([[[]]], True, 0),
        ({(1, 2): {b"k": bytearray()}}, False, 2),
    ],
)
def test_a_survey_finds_depth_and_special_values(
    value: object, deep: bool, special: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_DEPTH", 2)
    too_deep, found = survey(value)
    assert (too_deep, len(found)) == (deep, special)


def decode_tree_bytes(body: bytes) -> object:
    tree = decode(Sample, [msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, body)})]).tree
    assert tree is not None
    return tree.value


def decode_tree(value: object) -> object:
    return decode_tree_bytes(msgpack.packb(value))


def decode_ext(code: int, content: object) -> object:
    return decode_tree([msgpack.ExtType(code, msgpack.packb(content))])[0]  # type: ignore[index]


# --- where a value stands --------------------------------------------------------------------


def test_a_place_reads_like_the_code_that_reaches_it() -> None:
    target = object()
    payload = Sample(trees=[Tree(0), Tree({"a": [0, {"env": (1, target)}]})])
    assert place_of(payload, target) == "trees[1]['a'][1]['env'][1]"


def test_a_key_is_named_as_one() -> None:
    target = (1, frozenset())
    assert place_of(Sample(tree=Tree({target: 0})), target) == "tree, in the key (1, frozenset())"


def test_what_contains_itself_is_searched_once() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert place_of(cycle, object()) is None


def test_the_root_itself_has_an_empty_place() -> None:
    payload = Sample()
    assert place_of(payload, payload) == ""


def test_a_repr_is_cut_and_never_fails() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Shy" in short_repr(Shy())
    assert short_repr(10**5000) == "<repr failed: ValueError>"
    assert short_repr("\ud800") == "'\\ud800'"
    assert len(short_repr(["x" * 1000] * 1000)) <= 200


@pytest.mark.parametrize("code", [Ext.ARRAY, Ext.SCALAR], ids=["array", "scalar"])
def test_dtypes_of_one_message_have_no_more_fields_than_it_is_worth(code: int) -> None:
    def sent(fields: int, times: int) -> list[bytes]:
        names = [format(number, "x") for number in range(fields)]
        dtype = {"names": names, "formats": ["|u1"] * fields, "offsets": [0] * fields}
        shape = [] if code == Ext.SCALAR else [1]
        body = msgpack.packb([{**dtype, "itemsize": 1}, shape, "C", b"a"])
        tree = msgpack.packb([msgpack.ExtType(code, body)] * times)
        return [msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, tree)})]

    few = decode(Sample, sent(2000, 3)).tree
    assert few is not None
    assert len(few.value) == 3
    for fields, times in ((2**16, 1), (2000, 40)):
        with pytest.raises(DecodeError, match="more than 65536 fields"):
            decode(Sample, sent(fields, times))


def test_dtypes_within_dtypes_count_as_well() -> None:
    inner = {"base": {"names": ["a"] * 9, "formats": ["|u1"] * 9}, "shape": [2]}
    assert num_fields({"names": ["x"], "formats": [inner]}) == 1 + 1 + 1 + 1 + 9
    assert num_fields("<f4") == num_fields(None) == num_fields([{}]) == 0
