from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    EncodeError,
    QueueFullError,
    TransportError,
)
from envbus.bus.memory.arena import Arena
from envbus.bus.process.pipe import _BYTES, MAX_UNDELIVERED, Pipe, PipeInbox, PipeOutbox
from tests.descriptors import CrowdedSocket, no_more_files, open_descriptors

pytestmark = pytest.mark.timeout(60)

SOON = 10.0
NOW = 0.0


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    one, other = Pipe.pair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("size", [0, 1, 128, 129, 4096, 3_000_000])
def test_bytes_of_any_size_arrive_without_a_reader_at_the_other_end(
    ends: tuple[Pipe, Pipe], size: int
) -> None:
    one, other = ends
    data = os.urandom(size)
    one.send_bytes(1, data)
    one.send_bytes(2, memoryview(data)[:1])
    assert other.receive_bytes(1, SOON) == data
    assert other.receive_bytes(2, SOON) == data[:1]


def test_a_few_bytes_arrive_also_where_no_file_may_be_opened(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    with no_more_files():
        with pytest.raises(TransportError, match="Too many open files"):
            one.send_bytes(1, bytes(4096))
        one.send_bytes(2, b"a sign of life")
        assert other.receive_bytes(2, SOON) == b"a sign of life"
    one.send_bytes(3, bytes(4096))
    assert other.receive_bytes(3, SOON) == bytes(4096)


def test_who_takes_all_passed_descriptors_gets_one_after_the_other(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    one.send(b"first")
    with open(os.devnull) as file:
        one.send_fd(one.next_number(), file.fileno())
    with pytest.raises(TransportError):
        one.receive(NOW)  # nothing has come to this side
    one.send(b"last")
    assert other.receive(SOON) == b"first"
    os.close(other.receive_fd(other.next_expected, SOON))
    assert other.receive(SOON) == b"last"
    other.send(b"back")
    assert one.receive(SOON) == b"back"


def test_an_arena_arrives_as_the_same_memory(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    with Arena.create(8) as arena:
        one.send_fd(5, arena.fd)
        fd = other.receive_fd(5, SOON)
        assert not os.get_inheritable(fd)
        with Arena.attach(fd, 8) as attached:
            arena.buffer[:] = b"from one"
            assert bytes(attached.buffer) == b"from one"
            attached.buffer[:4] = b"back"
            assert bytes(arena.buffer) == b"back one"


def test_passed_descriptors_are_found_by_number_in_whatever_order_they_came(
    ends: tuple[Pipe, Pipe],
) -> None:
    one, other = ends
    for number in (3, 1, 2):
        one.send_bytes(number, b"%d" % number)
    assert [other.receive_bytes(number, SOON) for number in (1, 2, 3)] == [b"1", b"2", b"3"]


def test_one_message_may_have_a_passed_descriptor_of_objects_and_an_older_descriptor(
    ends: tuple[Pipe, Pipe],
) -> None:
    one, other = ends
    number = one.next_number()
    outbox = PipeOutbox(one)
    with Arena.create(1) as arena:
        one.send_fd(number, arena.fd)
        index = outbox.add("an object")
        objects = outbox.number
        outbox.flush()
    assert PipeInbox(other).get(objects, index) == "an object"
    os.close(other.receive_fd(number, SOON))


def test_a_passed_descriptor_that_does_not_come_is_waited_for_within_the_time_out(
    ends: tuple[Pipe, Pipe],
) -> None:
    with pytest.raises(TransportError, match="passed descriptor 4 did not come within"):
        ends[0].receive_bytes(4, 0.01)


def test_a_passed_descriptor_of_the_other_kind_is_refused(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    one.send_bytes(1, b"bytes")
    with pytest.raises(TransportError, match="kind"):
        other.receive_fd(1, SOON)


def test_a_passed_descriptor_that_is_no_file_of_bytes_is_refused(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    folder = os.open("/", os.O_RDONLY)
    one._send(1, _BYTES, folder)
    os.close(folder)
    with pytest.raises(TransportError, match="directory"):
        other.receive_bytes(1, SOON)


def test_passed_descriptors_that_nobody_asks_for_are_dropped(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    before = open_descriptors()
    for number in range(1, MAX_UNDELIVERED + 11):
        one.send_bytes(number, b"content" * 100)
    other.drain()
    assert len(open_descriptors() - before) == MAX_UNDELIVERED
    assert other.receive_bytes(MAX_UNDELIVERED, SOON) == b"content" * 100
    with pytest.raises(TransportError, match="gone"):
        other.receive_bytes(1, SOON)
    assert len(open_descriptors() - before) < MAX_UNDELIVERED
    other.close()
    assert open_descriptors() < before


def test_what_was_sent_before_a_hang_up_arrives_and_nothing_else(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    one.send_bytes(1, b"last words")
    one.close()
    other.drain()
    assert other.receive_bytes(1, SOON) == b"last words"
    with pytest.raises(ClosedError, match="passed descriptor 2"):
        other.receive_bytes(2, SOON)
    with pytest.raises(ClosedError):
        other.send_bytes(1, b"to nobody")


def test_a_closed_end_says_so(ends: tuple[Pipe, Pipe]) -> None:
    one, _ = ends
    one.close()
    one.close()
    for use in (
        lambda: one.send_bytes(1, b""),
        lambda: one.receive_bytes(1, NOW),
        one.fileno,
        one.drain,
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_reader_that_stopped_reading_is_an_error_and_not_a_hang(
    ends: tuple[Pipe, Pipe],
) -> None:
    def send_without_end() -> None:
        for number in range(1, 20_000):
            ends[0].send_bytes(number, b"", timeout=0.05)

    with pytest.raises(QueueFullError):
        send_without_end()


def test_where_too_many_passed_descriptors_are_under_way_who_may_wait_does_so() -> None:
    ours, theirs = socket.socketpair()
    crowded = CrowdedSocket(fileno=ours.detach())
    with Pipe(crowded) as one, Pipe(theirs) as other:
        with pytest.raises(QueueFullError, match="too many passed descriptors"):
            one.send_bytes(1, bytes(4096), timeout=SOON)
        one.send_bytes(2, bytes(4096), timeout=math.inf)
        assert other.receive_bytes(2, NOW) == bytes(4096)
        crowded.refusals = 1_000_000
        other.close()
        with pytest.raises(ClosedError):
            one.send_bytes(3, bytes(4096), timeout=math.inf)


def test_two_ends_that_only_send_do_not_wait_for_each_other_for_ever(
    ends: tuple[Pipe, Pipe],
) -> None:
    def send(end: Pipe) -> None:
        for number in range(1, 1500):
            end.send_bytes(number, b"")

    threads = [threading.Thread(target=send, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    # One may be through and the other still sending: somebody must read then, as the driver does.
    while any(thread.is_alive() for thread in threads):
        for thread, end in zip(threads, ends, strict=True):
            if not thread.is_alive():
                end.drain()
        threads[0].join(0.01)
    assert [end.receive_bytes(1499, SOON) for end in ends] == [b"", b""]


def test_a_dropped_pipe_closes_quietly() -> None:
    before = open_descriptors()
    one, other = Pipe.pair()
    one.send_bytes(1, b"undelivered")
    other.drain()
    del one, other
    assert open_descriptors() <= before


class NeedsTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def test_objects_that_no_codec_knows_arrive(ends: tuple[Pipe, Pipe]) -> None:
    outbox, inbox = PipeOutbox(ends[0]), PipeInbox(ends[1])
    offset = 3
    indices = [outbox.add(lambda x: x + offset), outbox.add({1, 2}), outbox.add(np.arange(3))]
    number = outbox.number
    outbox.flush()
    function, numbers, array = (inbox.get(number, index) for index in indices)
    assert callable(function)
    assert function(4) == 7
    assert numbers == {1, 2}
    assert isinstance(array, np.ndarray)
    inbox.forget()


def test_an_empty_outbox_sends_nothing_and_uses_no_number(ends: tuple[Pipe, Pipe]) -> None:
    outbox = PipeOutbox(ends[0])
    outbox.flush()
    outbox.add("dropped")
    outbox.discard()
    outbox.flush()
    outbox.add("sent")
    number = outbox.number
    outbox.flush()
    assert PipeInbox(ends[1]).get(number, 0) == "sent"
    assert not ends[1].has(number + 1)


def test_what_cannot_be_pickled_is_named_and_the_rest_is_kept(ends: tuple[Pipe, Pipe]) -> None:
    outbox = PipeOutbox(ends[0])
    outbox.add("good")
    with pytest.raises(EncodeError, match=r"_thread\.lock"):
        outbox.add(threading.Lock())
    number = outbox.number
    outbox.flush()
    inbox = PipeInbox(ends[1])
    assert inbox.get(number, 0) == "good"
    with pytest.raises(DecodeError, match="no object 1"):
        inbox.get(number, 1)


def test_what_cannot_be_rebuilt_is_named(ends: tuple[Pipe, Pipe]) -> None:
    outbox = PipeOutbox(ends[0])
    outbox.add(NeedsTwo(1, 2))
    number = outbox.number
    outbox.flush()
    with pytest.raises(DecodeError, match=r"object 0 .*TypeError"):
        PipeInbox(ends[1]).get(number, 0)


def test_a_passed_descriptor_with_a_broken_table_is_refused(ends: tuple[Pipe, Pipe]) -> None:
    for number, data in enumerate((b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"\0" * 15), 1):
        ends[0].send_bytes(number, data)
        with pytest.raises(DecodeError):
            PipeInbox(ends[1]).get(number, 0)


def test_an_inbox_does_not_wait_for_a_passed_descriptor_for_ever(ends: tuple[Pipe, Pipe]) -> None:
    with pytest.raises(TransportError, match="did not come"):
        PipeInbox(ends[0], timeout=0.01).get(1, 0)
    ends[1].close()
    with pytest.raises(ClosedError):
        PipeInbox(ends[0], timeout=SOON).get(1, 0)
