"""The codec with the frames that pyzmq hands out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.dynamic_values import Value
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind, Tree
from tests.bus.codec_samples import Sample, identical


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://codec")
        two.connect("inproc://codec")
        one.rcvtimeo = two.rcvtimeo = 5000
        yield one, two


@pytest.mark.parametrize("copy", [True, False])
def test_a_message_crosses_a_socket(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], copy: bool
) -> None:
    header = Header(PROTOCOL_VERSION, Kind.REPLY, 3, "Sample")
    value: Value = {
        "big": np.arange(5000.0)[::2],
        "small": (np.ones(3), b"x" * 5000),
        "F": np.asfortranarray(np.random.default_rng(0).random((50, 60))),
    }
    frames = encode(Sample(tree=Tree(value), array=np.arange(1000)))
    pair[0].send_multipart([encode_header(header), *frames], copy=copy)
    first, *rest = pair[1].recv_multipart(copy=copy)
    assert decode_header(first) == header
    sample = decode(Sample, rest)
    del first, rest  # arrays keep their frames alive
    assert sample.tree is not None
    assert sample.array is not None
    assert identical(sample.tree.value["big"], value["big"].copy())
    assert identical(sample.tree.value["small"], value["small"])
    assert identical(sample.tree.value["F"], value["F"])
    assert identical(sample.array, np.arange(1000))
    assert not sample.array.flags.writeable


def test_an_array_that_may_be_written_into_is_not_copied() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        two.rcvtimeo = 5000
        one.connect(f"tcp://127.0.0.1:{two.bind_to_random_port('tcp://127.0.0.1')}")
        sent = np.arange(5000)
        one.send_multipart(encode(Sample(array=sent)), copy=False)
        frames = two.recv_multipart(copy=False)
        array = decode(Sample, frames, writable=True).array
    assert array is not None
    assert np.shares_memory(array, np.frombuffer(frames[1], np.uint8))
    array += 1
    assert identical(sent, np.arange(5000))
    assert identical(array, np.arange(1, 5001))
