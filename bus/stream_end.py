"""One end of a stream between a broker and a peer of the same user and host.

As `LaneEnd`, for those who were not given a socketpair: without descriptors that go with it, and
without trust that what was begun is ended. Leaves out who is at the other end.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import Final

from envbus.bus.errors import ClosedError
from envbus.bus.forking import disown_in_forks
from envbus.bus.framing import StreamReader, pack_for_stream
from envbus.bus.limits import MAX_MESSAGE_BYTES
from envbus.bus.transport import Buffer

__all__ = ["StreamEnd"]

#: Bytes to read at one go: more than a socket holds at most by default, so that a message that is
#: there is hardly ever cut; and at most, while a larger one comes.
_READ_BYTES: Final = 1 << 18
_MOST_READ_BYTES: Final = 1 << 20
#: Process, user and group.
_CREDENTIALS: Final = struct.Struct("3i")


class StreamEnd:
    """Messages in, messages out; nothing waits. Used by one thread.

    Args:
        sock: A Unix stream socket; closed with this.
        max_message_bytes: The other side is cut off when it sends a larger one.
    """

    def __init__(self, sock: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = StreamReader(max_message_bytes)
        self._inbox: deque[list[memoryview]] = deque()
        #: What of a packet that was begun waits for room.
        self._rest = memoryview(b"")
        disown_in_forks(self)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def is_of_this_user(self) -> bool:
        """Whether the process at the other end belongs to this one's user."""
        return self._owner()[1] == os.geteuid()

    def is_of_this_process(self) -> bool:
        """Whether the other end is in this process."""
        return self._owner()[0] == os.getpid()

    #: A packet from frames.
    pack = staticmethod(pack_for_stream)

    def write(self, packet: bytes) -> bool:
        """Send a packet; False if there is no room now. See `finish`.

        Raises:
            ClosedError: The other side is gone.
        """
        if self._rest and not self.finish():
            return False
        sent = self._send(packet)
        if sent == 0:
            return False
        if sent < len(packet):
            self._rest = memoryview(packet)[sent:]
        return True

    def finish(self) -> bool:
        """Send what `write` has only begun; False if there is still no room for all of it.

        Raises:
            ClosedError: The other side is gone.
        """
        while self._rest:
            sent = self._send(self._rest)
            if sent == 0:
                return False
            self._rest = self._rest[sent:]
        return True

    @property
    def has_begun(self) -> bool:
        """Whether there is something to `finish`."""
        return len(self._rest) > 0

    def receive(self) -> list[Buffer] | None:
        """Return the next message, or None if there is none that is whole now.

        Raises:
            ClosedError: The other side is gone.
            DecodeError: It sends what is no message. Nothing can be read behind it.
        """
        inbox = self._inbox
        if inbox:
            return inbox.popleft()
        missing = self._reader.missing
        size = _READ_BYTES if missing <= _READ_BYTES else min(missing, _MOST_READ_BYTES)
        try:
            data = self._socket.recv(size)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ClosedError(f"the other side of the lane is gone: {exc}") from exc
        if not data:
            raise ClosedError("the other side of the lane is gone")
        inbox.extend(self._reader.feed(data))
        return inbox.popleft() if inbox else None

    @property
    def has_more(self) -> bool:
        """Whether `receive` has a message without a look at the socket."""
        return bool(self._inbox)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def disown(self) -> None:
        """In a forked copy: close the descriptor, which the owner does not notice."""
        self._socket.close()

    def _owner(self) -> tuple[int, int]:
        """Return process and user at the other end, as the kernel knows them."""
        size = _CREDENTIALS.size
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        process, user, _ = _CREDENTIALS.unpack(told)
        return process, user

    def _send(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise ClosedError(f"the other side of the lane is gone: {exc}") from exc
