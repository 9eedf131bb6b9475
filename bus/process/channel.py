"""What a driver and its fork server say to each other, and how.

Typed messages with file descriptors over a Unix socket pair. Leaves out what they cause
(`forkserver.py`, `process_group.py`). This is not the bus: only the two processes can reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from envbus.bus.errors import ClosedError, TransportError
from envbus.bus.transport.unix_sockets import (
    receive_with_descriptors,
    rights,
    wait_for,
    wait_for_answer,
)

__all__ = [
    "Attach",
    "Attached",
    "Channel",
    "DumpStacks",
    "Exited",
    "Kill",
    "Message",
    "NotStarted",
    "Ping",
    "Pong",
    "Start",
    "Started",
]


class Attach(msgspec.Struct, frozen=True, tag=True):
    """To the server: serve a process group. Descriptors: its control and its event socket."""

    #: Removed with all that is in it when the process group ends; empty: none.
    directory: bytes = b""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """From the server, first on a control socket: it is up."""

    #: One text per module that could not be imported beforehand.
    failures: list[str]


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the server: start a child.

    Descriptors: its pipe, stdout, what the server passes its stderr on to, and the file for its
    stacks.
    """

    #: Chosen by the process group, unique in it.
    number: int
    #: `"module:function"`.
    entry: str
    #: `"fork"` or `"spawn"`.
    method: str
    #: Strings of the operating system may hold any bytes: undecodable ones are no valid text.
    #: Empty: the server's.
    cwd: bytes
    environ: dict[bytes, bytes]
    path: list[bytes]
    argv: list[bytes]


class Started(msgspec.Struct, frozen=True, tag=True):
    """From the server: child `number` runs."""

    number: int
    pid: int
    #: What the environment of the child and of all that it starts holds.
    mark: bytes


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """From the server: child `number` could not be started."""

    number: int
    message: str


class Kill(msgspec.Struct, frozen=True, tag=True):
    """To the server: kill child `number` and all that it started."""

    number: int


class DumpStacks(msgspec.Struct, frozen=True, tag=True):
    """To the server: have child `number` write the stacks of its threads to its file."""

    number: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """From the server, on the event socket: a child ended, and nothing that it started is left."""

    number: int
    #: Exit code, or minus the signal's number.
    status: int
    #: What else is known of the cause; may be empty.
    note: str = ""
    #: The end of what it wrote to stderr.
    stderr: bytes = b""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To the server: are you there?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """From the server: yes."""


Message: TypeAlias = (
    Attach | Attached | Start | Started | NotStarted | Kill | DumpStacks | Exited | Ping | Pong
)

#: Length of the message, and how many descriptors come with it.
_PREFIX: Final = struct.Struct("<II")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end. Used by one thread at a time.

    Attributes:
        ended: The other side has hung up; what it had sent before is still delivered.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.ended = False
        self._sock = sock
        self._incoming = bytearray()
        self._fds: deque[int] = deque()
        self._received: deque[tuple[Message, list[int]]] = deque()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = (), *, timeout: float) -> None:
        """Send a message, with duplicates of descriptors.

        Raises:
            ClosedError: The other side is gone.
            TransportError: It did not take the message within `timeout` seconds.
        """
        body = _encoder.encode(message)
        data = memoryview(_PREFIX.pack(len(body), len(fds)) + body)
        ancillary = rights(fds)
        deadline = time.monotonic() + timeout
        while data:
            try:
                data = data[self._sock.sendmsg([data], ancillary) :]
                ancillary = []  # the descriptors went with the first byte
            except BlockingIOError:
                if not wait_for(self._sock, select.POLLOUT, deadline):
                    raise TransportError(f"no room for a message within {timeout} s") from None
            except (BrokenPipeError, ConnectionResetError) as error:
                self.ended = True
                raise ClosedError("the other side of the channel is gone") from error

    def queue(self, *messages: Message) -> None:
        """Send messages as soon as there is room, without waiting. A hang-up drops them."""
        for message in messages:
            body = _encoder.encode(message)
            self._outgoing += _PREFIX.pack(len(body), 0) + body
        self.flush()

    def flush(self) -> None:
        """Send what `queue` could not."""
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                try:
                    del self._outgoing[: self._sock.send(self._outgoing)]
                except (BrokenPipeError, ConnectionResetError):
                    self._outgoing.clear()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when there is room."""
        return bool(self._outgoing)

    def read(self) -> list[tuple[Message, list[int]]]:
        """Return what has come, without waiting; the caller closes the descriptors."""
        self._take_in()
        received = list(self._received)
        self._received.clear()
        return received

    def receive(self, deadline: float) -> tuple[Message, list[int]]:
        """Return the next message; the caller closes its descriptors.

        Raises:
            ClosedError: The other side is gone.
            TransportError: Nothing came until `deadline`, in seconds of `time.monotonic`.
        """
        while not self._received:
            if self.ended:
                raise ClosedError("the other side of the channel is gone")
            if not wait_for_answer(self._sock, deadline):
                raise TransportError("no answer in time")
            self._take_in()
        return self._received.popleft()

    def replace(self, sock: socket.socket) -> None:
        """Go on with another socket, taken over, under the same descriptor number."""
        os.dup2(sock.fileno(), self._sock.fileno(), inheritable=False)
        sock.close()
        self._sock.setblocking(False)
        self._incoming.clear()
        self._outgoing.clear()
        self.ended = False

    def close(self, *, hang_up: bool = True) -> None:
        """Close this end. Idempotent.

        Args:
            hang_up: Let the other side see it even if copies of this end exist in processes
                that were forked meanwhile.
        """
        if self._sock.fileno() >= 0 and hang_up:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        while self._received:
            for fd in self._received.popleft()[1]:
                os.close(fd)

    def _take_in(self) -> None:
        while not self.ended:
            try:
                data, fds, lost = receive_with_descriptors(self._sock, 65536)
            except BlockingIOError:
                break
            self._fds.extend(fds)
            if not data:
                self.ended = True
            if lost:
                raise TransportError("descriptors were lost: too many open files")
            self._incoming += data
        while len(self._incoming) >= _PREFIX.size:
            length, count = _PREFIX.unpack_from(self._incoming)
            end = _PREFIX.size + length
            if len(self._incoming) < end:
                break
            message = _decoder.decode(self._incoming[_PREFIX.size : end])
            del self._incoming[:end]
            self._received.append((message, [self._fds.popleft() for _ in range(count)]))
