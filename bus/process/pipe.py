"""The inherited pipe between a driver and its local child: passed descriptors beside the bus.

A passed descriptor is that of a file, with a number. What it holds (an arena, or the bytes of
pickled objects) is in memory that both sides share, so a passed descriptor of any size costs 16
bytes on the socket and never waits for the other side to read it. A few bytes, such as a sign of
life, lie in the socket itself: they arrive also when a process may open no more files. Nobody but
the two processes can reach the pipe, which is why pickles may go here and nowhere else. `PipeCodec`
has messages whose objects the bus cannot express take it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import pickle
import select
import socket
import struct
import sys
import termios
import time
from typing import Final, TypeVar

import cloudpickle

from envbus.bus.errors import (
    ClosedError,
    DecodeError,
    EncodeError,
    QueueFullError,
    TransportError,
)
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.memory.memfd import content_of, file_of
from envbus.bus.process.pickling import pickled
from envbus.bus.transport.unix_sockets import receive_with_descriptors, rights, wait_for
from envbus.bus.wire.codec import Placeholder, decode, encode
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Payload

__all__ = ["HANDOVER_TIMEOUT", "Pipe", "PipeCodec", "PipeInbox", "PipeOutbox"]

logger = logging.getLogger("envbus.bus.process.pipe")

P = TypeVar("P", bound=Payload)
#: Characters of an object's `repr` that a placeholder keeps.
_PLACEHOLDER_TEXT: Final = 200

#: Magic, kind, number of bytes that follow, number of the passed descriptor.
_HEADER: Final = struct.Struct("<4sHHQ")
_MAGIC: Final = b"EBP1"
_BYTES, _DESCRIPTOR, _FEW_BYTES = 1, 2, 3
#: Most bytes that need no descriptor.
_FEW: Final = 128
#: Undelivered passed descriptors kept per side. Each is a descriptor, of which a process may have
#: 1024 by default on Linux.
MAX_UNDELIVERED: Final = 64
#: How far below the last one asked for a passed descriptor may be and still be asked for. One
#: message refers to one or two; what is further back belongs to messages that were dropped.
_WINDOW: Final = 16
#: Seconds that a send may wait for the other side to take passed descriptors from a full socket. A
#: socket holds some 250 of them, so a wait at all means that the other side has stopped reading.
SEND_TIMEOUT: Final = 10.0
#: Seconds until a passed descriptor is sent again where too many are under way.
_MOMENT: Final = 0.02
#: Seconds that a child waits for its owner's side of a hand-over that has begun.
HANDOVER_TIMEOUT: Final = 30.0


class Pipe:
    """One end of the pipe. Used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._numbers = 0
        #: Number of the passed descriptor that was received last.
        self._received = 0
        self._hung_up = False
        self._partial = b""
        self._partial_fds: list[int] = []
        #: Number -> (kind, descriptor or few bytes), in order of arrival.
        self._stash: dict[int, tuple[int, int | bytes]] = {}
        self._oldest_wanted = 0

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        """Return two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    @classmethod
    def from_fd(cls, fd: int) -> Pipe:
        """Return the end whose descriptor was inherited as `fd`; takes it over."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor: readable when something came or the other side is gone."""
        self._check_open()
        return self._sock.fileno()

    def next_number(self) -> int:
        """Return a number that this end has not used yet; they count up from 1."""
        self._numbers += 1
        return self._numbers

    @property
    def next_expected(self) -> int:
        """Number of the passed descriptor after the one that was received last."""
        return self._received + 1

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes to a side that takes all by `receive`; raises as `send_bytes`."""
        self.send_bytes(self.next_number(), data)

    def receive(self, timeout: float) -> bytes:
        """Return the bytes of the next passed descriptor; raises as `receive_bytes`."""
        return self.receive_bytes(self.next_expected, timeout)

    def send_bytes(
        self, number: int, data: bytes | bytearray | memoryview, timeout: float = SEND_TIMEOUT
    ) -> None:
        """Send a passed descriptor of bytes.

        Args:
            number: Of `next_number`.
            data: What it holds.
            timeout: Seconds to wait while the socket is full; 0: not at all.

        Raises:
            ClosedError: The other side is gone, or this end was closed.
            QueueFullError: The other side has not read for so long.
            TransportError: There is no memory or descriptor left for it.
        """
        if len(few := bytes(data[: _FEW + 1])) <= _FEW:
            self._send(number, _FEW_BYTES, None, timeout, few)
            return
        self._send_file(number, data, timeout)

    def send_fd(self, number: int, fd: int) -> None:
        """Send a duplicate of the descriptor `fd`, e.g. an arena's; the caller keeps its own.

        Raises:
            ClosedError: The other side is gone, or this end was closed.
            QueueFullError: The other side has not read for `SEND_TIMEOUT` seconds.
        """
        self._send(number, _DESCRIPTOR, fd)

    def receive_bytes(self, number: int, timeout: float) -> bytes:
        """Return the bytes of passed descriptor `number`.

        Passed descriptors of messages that were dropped are forgotten once later ones are asked
        for.

        Args:
            number: As the other side sent it. Ask in the order of the messages.
            timeout: Seconds to wait for it.

        Raises:
            ClosedError: The other side is gone and the passed descriptor did not come before.
            TransportError: It did not come in time, or is not a passed descriptor of bytes.
        """
        fd = self._take(number, (_BYTES, _FEW_BYTES), timeout)
        if isinstance(fd, bytes):
            return fd
        try:
            return content_of(fd)
        finally:
            os.close(fd)

    def receive_fd(self, number: int, timeout: float) -> int:
        """Return the descriptor that was passed as `number`; the caller closes it.

        Raises as `receive_bytes` does.
        """
        fd = self._take(number, (_DESCRIPTOR,), timeout)
        assert isinstance(fd, int)
        return fd

    def has(self, number: int) -> bool:
        """Return whether a passed descriptor has come, without waiting.

        Raises:
            ClosedError: The other side is gone, and it did not come before.
            TransportError: A passed descriptor was lost.
        """
        self.drain()
        if number not in self._stash and self._hung_up:
            raise ClosedError(
                f"the other side of the pipe left before passed descriptor {number} came"
            )
        return number in self._stash

    def drain(self, most: int = sys.maxsize, keep: int = MAX_UNDELIVERED) -> None:
        """Take in what has come, without waiting, so that the other side never has to.

        A hang-up is not an error here: the next `receive_bytes` tells.

        Args:
            most: Passed descriptors to take.
            keep: How many are kept, of `MAX_UNDELIVERED`: the newest.
        """
        self._check_open()
        while most > 0 and self._read_one():
            most -= 1
        while len(self._stash) > keep:
            self._drop(next(iter(self._stash)))

    def is_filling_up(self) -> bool:
        """Return whether dozens of them wait to be taken in: a socket holds some 250."""
        self._check_open()
        waiting = fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > MAX_UNDELIVERED * _HEADER.size

    def close(self) -> None:
        """Close this end; the other side sees a hang-up. Idempotent."""
        self._sock.close()
        for _, held in self._stash.values():
            _let_go(held)
        for fd in self._partial_fds:
            os.close(fd)
        self._stash.clear()
        self._partial_fds.clear()

    def __del__(self) -> None:
        # Dropping a pipe is a way to close it, as dropping a multiprocessing.Connection is; the
        # socket inside would warn.
        if hasattr(self, "_stash"):
            self.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = self._sock.fileno() < 0
        state = "closed" if closed else "hung up" if self._hung_up else "open"
        return f"<Pipe {state}, undelivered={len(self._stash)}>"

    def _check_open(self) -> None:
        if self._sock.fileno() < 0:
            raise ClosedError("this pipe was closed")

    @uninterrupted_call  # or the descriptor stays, and with it all that it holds
    def _send_file(self, number: int, data: bytes | bytearray | memoryview, timeout: float) -> None:
        fd = file_of(data, "envbus-passed")
        try:
            self._send(number, _BYTES, fd, timeout)
        finally:
            os.close(fd)

    def _send(
        self,
        number: int,
        kind: int,
        fd: int | None,
        timeout: float = SEND_TIMEOUT,
        few: bytes = b"",
    ) -> None:
        self._check_open()
        self._numbers = max(self._numbers, number)
        data = _HEADER.pack(_MAGIC, kind, len(few), number) + few
        ancillary = rights([] if fd is None else [fd])
        begun = time.monotonic()
        while data:
            try:
                data = data[self._sock.sendmsg([data], ancillary) :]
                ancillary = []  # the descriptor went with the first byte
            except BlockingIOError:
                self._wait_until_writable(number, begun, timeout)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ClosedError("the other side of the pipe is gone") from error
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise TransportError(
                        f"passed descriptor {number} was not sent: {error}"
                    ) from error
                if timeout < math.inf:  # an owner would wait for what it has not read itself
                    raise QueueFullError(
                        f"passed descriptor {number}: too many passed descriptors under way"
                    ) from error
                self._wait_a_moment()

    def _wait_until_writable(self, number: int, begun: float, timeout: float) -> None:
        deadline = begun + timeout
        if time.monotonic() >= deadline:
            raise QueueFullError(
                f"passed descriptor {number} was not sent: the pipe is full, and the other side "
                f"has not read it for {timeout:g} s"
            )
        events = wait_for(self._sock, select.POLLIN | select.POLLOUT, deadline)
        if events & select.POLLIN and not events & select.POLLOUT:
            # Both sides may be sending: taking in what came keeps that from being a deadlock.
            self.drain()

    def _wait_a_moment(self) -> None:
        """Wait where too many of this user are under way: nobody tells of fewer.

        Raises:
            ClosedError: The other side is gone.
        """
        if wait_for(self._sock, select.POLLIN, time.monotonic() + _MOMENT):
            self.drain()
            if self._hung_up:
                raise ClosedError("the other side of the pipe is gone")

    def _take(self, number: int, kinds: tuple[int, ...], timeout: float) -> int | bytes:
        self._check_open()
        deadline = time.monotonic() + timeout
        self._oldest_wanted = max(self._oldest_wanted, number - _WINDOW)
        for old in [known for known in self._stash if known < self._oldest_wanted]:
            self._drop(old)
        while number not in self._stash:
            if number < self._oldest_wanted:
                raise TransportError(
                    f"passed descriptor {number} is gone: later ones were asked for"
                )
            if self._read_one():
                continue
            if self._hung_up:
                raise ClosedError(
                    f"the other side of the pipe left before passed descriptor {number} came"
                )
            if time.monotonic() >= deadline:
                raise TransportError(f"passed descriptor {number} did not come within {timeout} s")
            wait_for(self._sock, select.POLLIN, deadline)
        found, held = self._stash.pop(number)
        self._received = number
        if found not in kinds:
            _let_go(held)
            raise TransportError(
                f"passed descriptor {number} is of kind {found}, {kinds[0]} was expected"
            )
        return held

    def _read_one(self) -> bool:
        """Take one passed descriptor from the socket; False if there is none now."""
        if self._hung_up:
            return False
        size = _HEADER.size
        if len(self._partial) >= size:
            size += _HEADER.unpack_from(self._partial)[2]
        try:
            data, fds, lost = receive_with_descriptors(self._sock, size - len(self._partial))
        except BlockingIOError:
            return False
        self._partial_fds += fds
        if not data:
            self._hung_up = True
            return False
        if lost:
            raise TransportError(
                "a passed descriptor was lost: too many open files in this process"
            )
        self._partial += data
        if len(self._partial) < _HEADER.size:
            return True  # the rest follows at once
        magic, kind, length, number = _HEADER.unpack_from(self._partial)
        few = self._partial[_HEADER.size :]
        if magic == _MAGIC and len(few) < length:
            return True
        self._partial = b""
        fds, self._partial_fds = self._partial_fds, []
        if magic != _MAGIC or len(fds) != (kind != _FEW_BYTES):
            for fd in fds:
                os.close(fd)
            raise TransportError("something else than a passed descriptor came over the pipe")
        self._keep(number, kind, fds[0] if fds else few)
        return True

    def _keep(self, number: int, kind: int, held: int | bytes) -> None:
        if number < self._oldest_wanted or number in self._stash:
            _let_go(held)
            return
        self._stash[number] = (kind, held)
        if len(self._stash) > MAX_UNDELIVERED:
            self._drop(next(iter(self._stash)))

    def _drop(self, number: int) -> None:
        _let_go(self._stash.pop(number)[1])


class PipeOutbox:
    """Collects the objects of one message that the codec cannot express; pickles each by itself.

    One outbox serves one message after the other: `add` while it is encoded, then `flush`
    before it is sent (or `discard` if it is not), so that the passed descriptor is there first.

    Args:
        pipe: This side's end.
        timeout: Seconds that `flush` may wait for room.

    Attributes:
        lenient: A `Placeholder` stands for what cannot be pickled, with one warning.
    """

    def __init__(self, pipe: Pipe, *, timeout: float = SEND_TIMEOUT) -> None:
        self.lenient = False
        self._warned = False
        self._pipe = pipe
        self._timeout = timeout
        self._pickles: list[bytes] = []
        self._number = 0

    @property
    def number(self) -> int:
        """Number of the passed descriptor that the objects of this message will be in."""
        if not self._number:  # not before it is needed: numbers count up in the order of sending
            self._number = self._pipe.next_number()
        return self._number

    def add(self, obj: object) -> int:
        """Pickle `obj` and return its index in the passed descriptor.

        Raises:
            EncodeError: It cannot be pickled; what was added before stays.
        """
        try:
            passed = pickled(obj)
        except Exception as error:  # any object's own code may run here
            name = f"{type(obj).__module__}.{type(obj).__qualname__}"
            why = f"{name} cannot be pickled: {type(error).__name__}: {error}"
            if not self.lenient:
                raise EncodeError(why) from error
            _warn_once(self, why)
            try:
                text = repr(obj)[:_PLACEHOLDER_TEXT]
            except Exception:  # its own code may do anything
                text = ""
            passed = pickled(Placeholder(name, text))
        self._pickles.append(passed)
        return len(self._pickles) - 1

    def flush(self) -> None:
        """Send the passed descriptor, if anything was added. Raises as `Pipe.send_bytes` does."""
        if not self._pickles:
            return
        number, pickles = self.number, self._pickles
        self.discard()
        self._pipe.send_bytes(number, pickle.dumps(pickles), self._timeout)

    def discard(self) -> None:
        """Forget what was added; its message is not sent."""
        self._pickles = []
        self._number = 0


class PipeInbox:
    """Hands out the objects in passed descriptors, by number and index.

    Attributes:
        lenient: A `Placeholder` stands for what cannot be rebuilt here, with one warning.
    """

    def __init__(self, pipe: Pipe, *, timeout: float = 10.0) -> None:
        """Read from `pipe`, waiting at most `timeout` seconds for a passed descriptor.

        A passed descriptor is sent before the message that names it, so it is there already unless
        its sender died between the two.
        """
        self.lenient = False
        self._warned = False
        self._pipe = pipe
        self._timeout = timeout
        self._number = 0
        self._pickles: list[bytes] = []

    def get(self, number: int, index: int) -> object:
        """Return object `index` of passed descriptor `number`.

        Raises:
            DecodeError: The passed descriptor has no such object, or it cannot be unpickled here.
            ClosedError: The sender is gone and the passed descriptor did not come before.
            TransportError: The passed descriptor did not come in time.
        """
        if number != self._number:
            data = self._pipe.receive_bytes(number, self._timeout)
            try:
                self._pickles = pickle.loads(data)  # noqa: S301 (a pipe of owner and child)
            except Exception as error:  # it is something else
                raise DecodeError(
                    f"passed descriptor {number} holds no objects: {error}"
                ) from error
            self._number = number
        if not 0 <= index < len(self._pickles):
            raise DecodeError(f"passed descriptor {number} has no object {index}")
        try:
            return pickle.loads(self._pickles[index])  # noqa: S301 (a pipe of owner and child)
        except Exception as error:  # any object's own code may run here
            text = f"{type(error).__name__}: {error}"
            why = f"object {index} of passed descriptor {number} cannot be rebuilt here: {text}"
            if not self.lenient:
                raise DecodeError(why) from error
            _warn_once(self, why)
            return Placeholder("?", text[:_PLACEHOLDER_TEXT])  # the class is not known here

    def forget(self) -> None:
        """Free the last passed descriptor; it is kept until another one is asked for."""
        self._number, self._pickles = 0, []


def _let_go(held: int | bytes) -> None:
    if isinstance(held, int):
        os.close(held)


def _warn_once(box: PipeOutbox | PipeInbox, why: str) -> None:
    if not box._warned:
        box._warned = True
        logger.warning("replaced by a placeholder, like all that follow: %s", why)


class PipeCodec:
    """Encodes and decodes payloads that may hold any object that cloudpickle takes.

    The frames go over the bus; objects that they cannot express go over `pipe`, which nobody
    but parent and child can reach, and the frames refer to them.

    Args:
        pipe: This side's end.
        lenient: Payload types in which an object that cannot be pickled, or not be rebuilt here, is
            replaced by a `Placeholder`, with one warning, instead of failing the payload.
        writable: Decoded arrays are copies of the caller's own, not read-only views.
        timeout: Seconds that `encode` may wait for the other side to read.
    """

    def __init__(
        self,
        pipe: Pipe,
        *,
        lenient: tuple[type[Payload], ...] = (),
        writable: bool = False,
        timeout: float = SEND_TIMEOUT,
    ) -> None:
        _take_main_along()
        self._outbox = PipeOutbox(pipe, timeout=timeout)
        self._inbox = PipeInbox(pipe)
        self._lenient = lenient
        self._writable = writable

    def encode(self, payload: Payload) -> Frames:
        """Return payload and buffer frames, after the objects that they refer to were sent.

        Raises:
            EncodeError: Something in it cannot be pickled, or a limit is exceeded.
            TransportError: The other side of the pipe is gone or does not read.
        """
        outbox = self._outbox
        outbox.lenient = isinstance(payload, self._lenient)
        try:
            frames = encode(payload, outbox)
        except BaseException:
            outbox.discard()
            raise
        outbox.flush()
        return frames

    def check(self, payload: Payload) -> None:
        """See that a payload could be sent; nothing is.

        Raises:
            EncodeError: Something in it cannot be pickled, or a limit is exceeded.
        """
        self._outbox.lenient = isinstance(payload, self._lenient)
        try:
            encode(payload, self._outbox)
        finally:
            self._outbox.discard()

    def decode(self, payload_type: type[P], frames: Frames) -> P:
        """Return the payload, its objects fetched from the pipe.

        Raises:
            DecodeError: The frames are malformed, or an object cannot be unpickled here.
            TransportError: The other side of the pipe is gone.
        """
        self._inbox.lenient = issubclass(payload_type, self._lenient)
        payload = decode(payload_type, frames, self._inbox, writable=self._writable)
        self._inbox.forget()
        return payload


def _take_main_along() -> None:
    """Have the main program's classes pickled by value also in a child of `multiprocessing`.

    There the main module goes by another name, which cloudpickle does not know, and which no
    other process can import.
    """
    main = sys.modules.get("__mp_main__")
    if main is not None:
        cloudpickle.register_pickle_by_value(main)
