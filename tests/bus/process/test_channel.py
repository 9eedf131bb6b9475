from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from envbus.bus.errors import ClosedError, TransportError
from envbus.bus.process.channel import Attach, Attached, Channel, Exited, Kill, Ping, Start, Started

pytestmark = pytest.mark.timeout(60)

LATER = float("inf")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def start(number: int, environ: dict[bytes, bytes]) -> Start:
    return Start(
        number=number, entry="m:f", method="fork", cwd=b"", environ=environ, path=[], argv=[]
    )


def test_messages_arrive_in_order_with_their_descriptors(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    pipes = [os.pipe() for _ in range(3)]
    one.send(Ping(), timeout=1.0)
    one.send(Attach(b"/tmp/\xff"), [pipes[0][1], pipes[1][1]], timeout=1.0)
    one.send(Kill(3), timeout=1.0)
    one.send(start(4, {b"name": b"\xff"}), [pipes[2][1]], timeout=1.0)
    received = other.read()
    assert [message for message, _ in received] == [
        Ping(),
        Attach(b"/tmp/\xff"),
        Kill(3),
        start(4, {b"name": b"\xff"}),
    ]
    fds = [fd for _, fds in received for fd in fds]
    assert [len(fds) for _, fds in received] == [0, 2, 0, 1]
    for number, (fd, (out, into)) in enumerate(zip(fds, pipes, strict=True)):
        assert not os.get_inheritable(fd)
        os.write(fd, b"%d" % number)
        assert os.read(out, 10) == b"%d" % number
        for used in (fd, out, into):
            os.close(used)


def test_a_message_larger_than_the_socket_arrives_in_parts(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    large = start(1, {b"name": b"x" * 3_000_000})
    sender = threading.Thread(target=lambda: one.send(large, timeout=30.0))
    sender.start()
    assert other.receive(LATER) == (large, [])
    sender.join()


def test_a_message_that_nobody_takes_is_an_error_and_not_a_hang(
    ends: tuple[Channel, Channel],
) -> None:
    with pytest.raises(TransportError, match="no room"):
        ends[0].send(start(1, {b"name": b"x" * 3_000_000}), timeout=0.01)


def test_queued_messages_wait_for_room_without_waiting(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sent = [Exited(number, 0) for number in range(20_000)]
    for message in sent:
        one.queue(message)
    assert one.has_unsent
    received = []
    while len(received) < len(sent):
        received += [message for message, _ in other.read()]
        one.flush()
    assert received == sent
    assert not one.has_unsent


def test_what_was_sent_before_a_hang_up_arrives(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(Started(1, 2, b"mark"), timeout=1.0)
    one.close()
    assert other.receive(LATER) == (Started(1, 2, b"mark"), [])
    with pytest.raises(ClosedError):
        other.receive(LATER)
    with pytest.raises(ClosedError):
        other.send(Ping(), timeout=1.0)
    other.queue(Ping())
    assert not other.has_unsent
    assert other.ended


def test_a_hang_up_is_seen_though_a_copy_of_the_end_is_open(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    copy = os.dup(one.fileno())
    one.close()
    assert other.read() == []
    assert other.ended
    os.close(copy)


def test_letting_go_of_a_copy_is_not_hanging_up(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    copy = Channel(socket.socket(fileno=os.dup(one.fileno())))
    copy.close(hang_up=False)
    assert other.read() == []
    assert not other.ended


def test_an_answer_is_waited_for_until_its_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TransportError, match="no answer"):
        ends[0].receive(0.0)


def test_a_channel_goes_on_with_another_socket_under_the_same_descriptor(
    ends: tuple[Channel, Channel],
) -> None:
    one, other = ends
    other.close()
    before = one.fileno()
    near, far = socket.socketpair()
    one.read()
    one.replace(near)
    successor = Channel(far)
    assert one.fileno() == before
    assert not one.ended
    assert not select.select([one], [], [], 0.0)[0]
    successor.queue(Attached([]), Exited(1, -9))
    assert [message for message, _ in one.read()] == [Attached([]), Exited(1, -9)]
    successor.close()
