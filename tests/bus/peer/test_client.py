"""What callers' threads and a client's own hand each other; the rest is in `tests/integration`."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest

from envbus.bus.errors import ClosedError, OverloadedError, QueueFullError
from envbus.bus.peer import client as client_module
from envbus.bus.peer.client import _Loop
from envbus.bus.peer.session import PeerCall, PeerSession
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Hello, Welcome


def no_socket() -> ZmqPeer:
    raise ClosedError("there is no broker")


class FullSocket:
    def send(self, _frames: Frames) -> None:
        raise QueueFullError("the queue to the broker is full")


def loop_of(max_pending: int) -> _Loop:
    """A client's thread that was not started."""
    return _Loop(no_socket, PeerSession(Hello(name="me")), max_pending)


def test_after_all_was_taken_nothing_rings_wherever_a_submitter_was_interrupted() -> None:
    loop = loop_of(10)
    takers: list[threading.Thread] = []

    def take_meanwhile(frame: FrameType, event: str, _: object) -> Any:
        """The client's thread gets its turn before each line; where it may not, it waits."""
        if event == "line" and frame.f_code.co_filename == client_module.__file__:
            takers.append(threading.Thread(target=loop._take))
            takers[-1].start()
            takers[-1].join(0.05)
        return take_meanwhile

    before = sys.gettrace()
    sys.settrace(take_meanwhile)
    try:
        loop.submit(partial(loop.tell, [b""]), "log")
    finally:
        sys.settrace(before)
    for taker in takers:
        taker.join()
    assert len(takers) > 5
    loop._take()
    assert not loop._bell.rung
    loop._run()


def test_what_was_handed_over_before_a_thread_that_finds_no_broker_is_settled() -> None:
    loop = loop_of(2)
    done: list[float] = []
    loop.submit(done.append, "log")
    loop.submit(done.append, "log")
    with pytest.raises(OverloadedError, match="2 requests of this client are unsettled") as caught:
        loop.submit(done.append, "adder", 3)
    assert (caught.value.request_id, caught.value.peer) == (3, "adder")
    loop._run()
    assert len(done) == 2
    with pytest.raises(ClosedError, match="no broker"):
        loop.submit(done.append, "log")
    with pytest.raises(ClosedError, match="no broker"):
        loop.joined.result(0.0)


def test_where_the_broker_does_not_read_each_request_is_told_so() -> None:
    loop, ends = loop_of(10), list[Any]()
    loop.session.ready = True
    loop.session.welcome = Welcome(lease=9.0, max_message_bytes=1000)
    for _ in range(4):
        loop.session.submit(PeerCall(Hello(name="x"), [b""], None, 0.0, 9.0, ends.append, "log"), 0)
    loop._flush(cast(ZmqPeer, FullSocket()))
    assert [type(end) for end in ends] == 4 * [OverloadedError]
    assert not loop.session.outgoing


def test_a_garbage_collection_may_end_a_client_at_any_line() -> None:
    loop = loop_of(2)

    def collect() -> None:
        with loop._lock:  # as where a client that nobody has any more is collected in its thread
            loop.stop(os.getpid())

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(10.0)
    assert not collecting.is_alive()
    with pytest.raises(ClosedError, match="was closed"):
        loop.submit(lambda _: None, "log")
    loop._run()
