from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from hypothesis import given

from envbus.bus.errors import ClosedError, DecodeError, EncodeError
from envbus.bus.wire import limits
from envbus.bus.wire.codec import (
    OUT_OF_BAND_BYTES,
    Ext,
    Placeholders,
    constant,
    decode,
    encode,
)
from envbus.bus.wire.framing import begun_request
from envbus.bus.wire.messages import Failed, FailureCode, Goodbye, Heartbeat, Hello, Payload, Tree
from tests.bus.codec_samples import Sample, arrays, identical, values

BIG = np.arange(OUT_OF_BAND_BYTES, dtype=np.uint8)


def rejected(frames: list[Any]) -> str:
    """Return the message of the `DecodeError` that `frames` cause."""
    with pytest.raises(DecodeError) as caught:
        decode(Sample, frames)
    return str(caught.value)


# --- typed fields ---------------------------------------------------------------------------


@given(arrays())
def test_an_array_in_a_typed_field_arrives_as_it_was(array: npt.NDArray[Any]) -> None:
    copy = decode(Sample, encode(Sample(array=array, arrays=[array, array])))
    assert copy.array is not None
    assert copy.arrays is not None
    assert all(identical(other, array) for other in (copy.array, *copy.arrays))
    assert not copy.array.flags.writeable


@pytest.mark.parametrize(
    "payload",
    [
        Goodbye(),
        Hello(name="sim", services=["env"], capacity=2, pid=7, heartbeat=1.5),
        Heartbeat(identity=b"\x00\xff"),
        Failed(code=FailureCode.REMOTE, message="boom", remote_traceback="tb"),
        Sample(),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_a_payload_without_arrays_is_one_frame(payload: Payload) -> None:
    (frame,) = encode(payload)
    assert decode(type(payload), [frame]) == payload
    assert decode(type(payload), [memoryview(frame)]) == payload


def test_a_constant_is_sent_as_any_other_payload() -> None:
    heartbeat = constant(Heartbeat(identity=b"a"))
    assert encode(heartbeat) == encode(Heartbeat(identity=b"a"))
    encode(heartbeat).append(b"changes nothing")
    assert len(encode(heartbeat)) == 1


def test_what_holds_an_array_cannot_be_a_constant() -> None:
    with pytest.raises(EncodeError, match="constant"):
        constant(Sample(array=BIG))


def test_numpy_scalars_in_typed_fields_become_what_the_field_says() -> None:
    payload: Any = Sample(number=np.int64(3), scale=np.float32(0.5), text=np.str_("x"))  # type: ignore[arg-type]
    copy = decode(Sample, encode(payload))
    assert (copy.number, copy.scale, copy.text) == (3, 0.5, "x")
    assert (type(copy.number), type(copy.scale), type(copy.text)) == (int, float, str)


def test_lone_surrogates_do_not_stop_a_message_for_people() -> None:
    failed = Failed(code=FailureCode.REMOTE, message="no file \udc80", remote_type="E")
    assert decode(Failed, encode(failed)).message == "no file \\udc80"
    sample = Sample(text="\udc80", tree=Tree({"\udc80": BIG}))
    copy = decode(Sample, encode(sample))
    assert copy.text == "\\udc80"
    assert copy.tree is not None
    assert identical(copy.tree.value, {"\udc80": BIG})


def test_what_does_not_belong_into_a_typed_field_is_named() -> None:
    for payload, text in (
        (Sample(array=np.array([1, None])), "^array: an array of dtype object"),
        (Sample(arrays=[BIG, np.zeros(2, [("a", "O")])]), r"^arrays\[1\]: an array of dtype"),
        (Sample(array=np.ma.masked_array([1], [True])), "^array: .*MaskedArray"),
        (Sample(number=object()), "^number: .*object"),  # type: ignore[arg-type]
        (Sample(number=2**70), "cannot encode Sample"),
    ):
        with pytest.raises(EncodeError, match=text):
            encode(payload, Placeholders())


def test_an_array_of_another_dtype_than_declared_is_refused_with_its_place() -> None:
    frames = encode(Sample(rewards=np.zeros(3, np.float32)))  # type: ignore[arg-type]
    assert "expected an array of float64, got float32 - at `$.rewards`" in rejected(frames)
    assert decode(Sample, encode(Sample(rewards=np.zeros(3, ">f8")))).rewards is not None


@pytest.mark.parametrize("field", ["tree", "array", "rewards"])
@pytest.mark.parametrize("value", [3, "x", {}, [], {"value": 3}, b"x"])
def test_a_tree_or_array_cannot_be_spelled_as_a_plain_value(field: str, value: object) -> None:
    assert "Sample" in rejected([msgpack.packb({field: value})])


def test_a_tree_is_not_an_array_nor_the_other_way_round() -> None:
    tree = msgpack.ExtType(Ext.TREE, msgpack.packb(3))
    array = msgpack.ExtType(Ext.ARRAY, msgpack.packb(["<i4", [1], "C", bytes(4)]))
    for fields in ({"tree": array}, {"array": tree}, {"number": tree}, {"trees": [array]}):
        assert "Sample" in rejected([msgpack.packb(fields)])
    assert "ext type 4" in rejected([msgpack.packb({"tree": msgpack.ExtType(4, b"")})])


def test_fields_that_a_newer_peer_adds_are_ignored() -> None:
    data = msgpack.packb({"text": "x", "new": [1, {"y": 2}]})
    assert decode(Sample, [data]) == Sample(text="x")


# --- frames ---------------------------------------------------------------------------------


def test_big_arrays_and_bytes_travel_in_frames_of_their_own_without_a_copy() -> None:
    blob = bytes(BIG)
    payload = Sample(array=BIG, tree=Tree([BIG.astype(">u2"), blob]), arrays=[BIG[:-1]])
    frames = encode(payload)
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [2 * len(BIG), len(BIG), len(BIG)]
    assert frames[2] is blob
    assert np.shares_memory(np.frombuffer(frames[3], np.uint8), BIG)
    received = [bytes(frame) for frame in frames]
    copy = decode(Sample, received)
    assert copy.array is not None
    assert np.shares_memory(copy.array, np.frombuffer(received[3], np.uint8))
    assert identical(copy.array, BIG)


def test_writable_arrays_on_request() -> None:
    value = [BIG, np.zeros(3), np.zeros((2, 2), order="F"), np.zeros(3, "M8[s]")]
    frames = [bytes(frame) for frame in encode(Sample(tree=Tree(value), array=BIG))]
    copy = decode(Sample, frames, writable=True)
    assert copy.tree is not None
    assert identical(copy.tree.value, value)
    for array in (*copy.tree.value, copy.array):
        array[...] = 0
    assert bytes(frames[1]) == bytes(BIG)


def test_with_all_frames_taken_the_rest_goes_into_the_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_FRAMES", 3)
    value = [BIG, BIG, BIG, bytes(BIG)]
    frames = encode(Sample(tree=Tree(value)))
    assert len(frames) == 3
    copy = decode(Sample, frames)
    assert copy.tree is not None
    assert identical(copy.tree.value, value)


def test_what_is_over_a_limit_is_refused_on_both_sides_naming_size_and_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload, plain = Sample(array=BIG, data=bytes(100)), Sample(data=bytes(100))
    frames, plain_frames = encode(payload), encode(plain)
    for name, limit, text in (
        ("MAX_FRAME_BYTES", 4095, "4096 bytes.* max_frame_bytes = 4095"),
        ("MAX_MESSAGE_BYTES", 4200, r"4\d+ bytes.* max_message_bytes = 4200"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, limit)
            with pytest.raises(EncodeError, match=text):
                encode(payload)
            with pytest.raises(DecodeError, match=text):
                decode(Sample, frames)
    monkeypatch.setattr(limits, "MAX_FRAMES", 1)
    with pytest.raises(DecodeError, match="2 frames behind its header; 1 to 1"):
        decode(Sample, frames)
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", 50)
    with pytest.raises(EncodeError, match="max_frame_bytes = 50"):
        encode(plain)
    with pytest.raises(DecodeError, match="max_frame_bytes = 50"):
        decode(Sample, plain_frames)


def test_more_than_a_gibibyte_is_refused_before_it_is_sent() -> None:
    huge = np.zeros(2**30 + 1, np.uint8)  # never touched, so it takes no memory
    for payload in (Sample(array=huge), Sample(arrays=[huge[:-2], huge[:9999]])):
        with pytest.raises(EncodeError, match=r"1073\d+ bytes, over max_\w+_bytes = 1073741824"):
            encode(payload)


def test_a_message_without_frames_is_a_decode_error() -> None:
    assert "0 frames" in rejected([])


@pytest.mark.parametrize("index", [1, -1, 2**40, None, "0", True, 0.0])
def test_a_buffer_that_is_not_there_is_a_decode_error(index: object) -> None:
    body = msgpack.packb(["|u1", [4], "C", index])
    payload = msgpack.packb({"array": msgpack.ExtType(Ext.ARRAY, body)})
    assert "Sample" in rejected([payload, b"abcd"])


def test_a_buffer_of_another_size_is_a_decode_error() -> None:
    frames = [bytes(frame) for frame in encode(Sample(array=BIG))]
    assert "needs 4096 bytes, got 4095" in rejected([frames[0], frames[1][:-1]])
    assert "the message has 0" in rejected(frames[:1])


def test_what_fitted_once_is_not_taken_for_granted_the_next_time() -> None:
    frames = [bytes(frame) for frame in encode(Sample(array=BIG))]
    for first in (BIG, np.zeros_like(BIG)):
        np.testing.assert_array_equal(decode(Sample, [frames[0], first.tobytes()]).array, first)
        assert "needs 4096 bytes, got 4095" in rejected([frames[0], frames[1][:-1]])
        assert "the message has 0" in rejected(frames[:1])


def test_any_number_of_forms_of_arrays_is_read() -> None:
    for size in range(len(BIG), len(BIG) + 400):
        array = np.arange(size)
        np.testing.assert_array_equal(decode(Sample, encode(Sample(array=array))).array, array)


# --- hostile input --------------------------------------------------------------------------


def only_decode_errors(frames: list[Any]) -> None:
    for payload_type in (Sample, Hello, Failed):
        with suppress(DecodeError):
            decode(payload_type, frames)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_frames_give_nothing_but_decode_errors(frames: list[bytes]) -> None:
    only_decode_errors(frames)


wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.sampled_from(["<f4", "|O", "|V0", "C", "names", "formats", "offsets", "itemsize"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=2) | st.sampled_from([b"nd", b"type"]), inner, max_size=3
        )
        | st.builds(
            lambda code, content: msgpack.ExtType(code, msgpack.packb(content)),
            st.integers(0, 15),
            inner,
        )
        | st.builds(msgpack.ExtType, st.integers(0, 15), st.binary(max_size=9))
    ),
    max_leaves=10,
)


@given(wire_values, st.lists(st.binary(max_size=16), max_size=2))
def test_well_formed_nonsense_gives_nothing_but_decode_errors(
    value: object, buffers: list[bytes]
) -> None:
    body = msgpack.packb(value)
    for fields in (
        value,
        {"tree": msgpack.ExtType(Ext.TREE, body)},
        {"array": msgpack.ExtType(Ext.ARRAY, body)},
        {"trees": [msgpack.ExtType(Ext.TREE, body)]},
    ):
        only_decode_errors([msgpack.packb(fields), *buffers])


@given(st.data(), values, arrays())
def test_damaged_messages_give_nothing_but_decode_errors(
    data: st.DataObject, value: object, array: npt.NDArray[Any]
) -> None:
    frames = [bytes(frame) for frame in encode(Sample(tree=Tree(value), array=array))]
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[which])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "cut"])):
            case "flip" if at < len(frame):
                frame[at] ^= data.draw(st.integers(1, 255))
            case "insert":
                frame[at:at] = data.draw(st.binary(max_size=5))
            case "delete":
                del frame[at : at + data.draw(st.integers(1, 5))]
            case "cut":
                del frame[at:]
    frames[which] = bytes(frame)
    only_decode_errors(frames)


@pytest.mark.parametrize("depth", [300, 900, 2000, 200_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x00", b"\x92\xc7\x00\x04", b"\x81\x91"])
def test_deep_input_is_a_decode_error(opening: bytes, depth: int) -> None:
    deep = opening * depth + b"\xc0"
    message = rejected([msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, deep)})])
    assert "Sample" in message
    for field in ("tree", "number", "array"):
        rejected([b"\x81" + msgpack.packb(field) + deep])
    only_decode_errors([b"\x81" + msgpack.packb("new") + deep])  # skipped if not too deep for that


@pytest.mark.parametrize("value", [b"\x91" * 900 + b"\xc0", msgpack.packb(list(range(10**6)))])
def test_bytes_behind_a_value_are_told_of_without_all_of_it(value: bytes) -> None:
    packed = msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, value + b"\xc0")})
    assert len(rejected([packed])) < 500


def test_deeply_nested_ext_values_do_no_harm() -> None:
    for code in range(1, 16):
        data = b"\xc0"
        for _ in range(3000):
            data = b"\xc9" + struct.pack(">Ib", len(data), code) + data
        only_decode_errors([msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, data)})])


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_a_claimed_size_is_not_believed(head: bytes) -> None:
    bomb = head + b"\xff\xff\xff\xff\x00"
    rejected([bomb])
    rejected([b"\x81" + msgpack.packb("trees") + bomb])
    rejected([msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, bomb)})])
    rejected([msgpack.packb({"array": msgpack.ExtType(Ext.ARRAY, bomb)})])


def test_claims_within_claims_keep_no_memory() -> None:
    bomb = (b"\xdd" + struct.pack(">I", 50_000)) * 200 + b"\xc0" * 50_000
    hostile = [
        [msgpack.packb({"tree": msgpack.ExtType(Ext.TREE, bomb)})],
        [b"\x81" + msgpack.packb("trees") + bomb],
    ]
    address_space = psutil.Process().memory_info
    before = address_space().vms
    for frames in hostile * 10:
        rejected(frames)
    assert begun_request(b"\x92" + bomb) == 0
    assert address_space().vms - before < 2**28


# --- objects --------------------------------------------------------------------------------


class Passed:
    """An outbox and inbox of one process: hands out what was put in."""

    number = 7

    def __init__(self) -> None:
        self.objects: list[object] = []

    def add(self, obj: object) -> int:
        if obj is Ellipsis:
            raise EncodeError("Ellipsis cannot be pickled")
        self.objects.append(obj)
        return len(self.objects) - 1

    def get(self, number: int, index: int) -> object:
        if self.objects[index] is NotImplemented:
            raise ClosedError("the pipe is closed")
        assert number == self.number
        return self.objects[index]


def test_without_an_outbox_the_place_and_type_are_named() -> None:
    infos = [{}, {}, {}, {"env": object()}]
    with pytest.raises(EncodeError, match=r"^tree\[3\]\['env'\]: a builtins\.object cannot cross"):
        encode(Sample(tree=Tree(infos)))
    with pytest.raises(EncodeError, match=r"^trees\[1\]\['a'\]\[0\]: an array of dtype object"):
        encode(Sample(trees=[Tree(1), Tree({"a": (np.array([{}]),)})]))


def test_an_object_comes_out_of_the_inbox_once_per_message() -> None:
    passed, thing = Passed(), object()
    frames = encode(Sample(tree=Tree([thing, {"x": thing}, {thing: 1}])), passed)
    assert passed.objects == [thing]
    copy = decode(Sample, frames, passed)
    assert copy.tree is not None
    assert copy.tree.value == [thing, {"x": thing}, {thing: 1}]


def test_an_object_that_came_over_a_socket_is_a_decode_error() -> None:
    frames = encode(Sample(tree=Tree(object())), Passed())
    assert "came over a socket" in rejected(frames)


def test_an_object_that_the_outbox_refuses_is_named_with_its_place() -> None:
    with pytest.raises(EncodeError, match=r"^tree\['a'\]\[1\]: Ellipsis cannot be pickled"):
        encode(Sample(tree=Tree({"a": [object(), ...]})), Passed())


def test_errors_of_the_inbox_keep_their_class_or_become_decode_errors() -> None:
    passed = Passed()
    frames = encode(Sample(tree=Tree([object()])), passed)
    passed.objects[0] = NotImplemented
    with pytest.raises(ClosedError):
        decode(Sample, frames, passed)
    passed.objects.clear()
    with pytest.raises(DecodeError, match="IndexError"):
        decode(Sample, frames, passed)


def test_lone_surrogates_do_not_send_objects_twice() -> None:
    passed = Passed()
    encode(Sample(tree=Tree([object(), BIG, "\ud800"])), passed)
    assert len(passed.objects) == 1
