"""A faster way between a broker and the children of its own process: one socketpair each.

The same messages as over ROUTER and DEALER, without libzmq's I/O threads: a message costs one
wake-up instead of three. A large one is in a file that comes with a packet, and takes no room in
the socket. Leaves out what frames mean, how a child gets its end, and the broker's side
(`local_router.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from typing import Final

from envbus.bus.errors import ClosedError, QueueFullError, TransportError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.memory.memfd import content_of, file_of
from envbus.bus.transport.spinning import CHILD_SPIN_SECONDS, SpinBudget
from envbus.bus.transport.unix_sockets import receive_with_descriptors, rights
from envbus.bus.transport.words import RING, Doer
from envbus.bus.wire.frames import Buffer, Frames
from envbus.bus.wire.framing import pack, unpack

__all__ = ["LOCAL_LINKS_EXIST", "LocalLinkEnd", "LocalLinkPeer"]

#: Whether this platform has sockets that keep message boundaries and report a hang-up.
LOCAL_LINKS_EXIST: Final = hasattr(socket, "SOCK_SEQPACKET") and hasattr(select, "epoll")
#: Do not wait in `LocalLinkEnd.read`.
DONT_WAIT: Final = getattr(socket, "MSG_DONTWAIT", 0)
_PEEK: Final = DONT_WAIT | getattr(socket, "MSG_PEEK", 0)
#: Largest packet that goes through the socket; a larger one is handed over as a file. A socket's
#: buffer holds some 200 kB, and copying 32 kB costs less than a file does.
INLINE_BYTES: Final = 32 * 1024
#: Says that the next packet may be a file, and is what comes with the file. To look for files at
#: each packet would cost some microseconds.
FILE_FOLLOWS: Final = bytes(4)
#: Seconds until a file is sent again where too many are under way.
_MOMENT: Final = 0.02
#: Of waits that are over at once, so many tell as little about spinning as one, which takes half a
#: microsecond to take in.
_ONE_IN: Final = 16


class LocalLinkEnd:
    """One end of a local link: packets in, packets out. Used by one thread.

    Args:
        sock: One end of a SOCK_SEQPACKET pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        #: Whether it was said that the next packet may be a file.
        self._may_be_file = False
        disown_in_forks(self)

    @classmethod
    def pair(cls) -> tuple[LocalLinkEnd, LocalLinkEnd]:
        """Return both ends of a new local link."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> LocalLinkEnd:
        """Return the end that has this descriptor; takes it over."""
        return cls(socket.socket(fileno=fd))

    def set_timeout(self, timeout: float | None) -> None:
        """Let `read` wait up to `timeout` seconds, and `write` for room; None: nothing waits."""
        self._socket.setblocking(timeout is not None)
        if timeout is not None:
            # The kernel's own time-out: one system call per message, where Python's takes two.
            seconds, fraction = divmod(max(timeout, 1e-6), 1.0)
            interval = struct.pack("@ll", int(seconds), int(fraction * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)

    def fileno(self) -> int:
        """Return the descriptor to poll, or to hand a duplicate of it to a child."""
        return self._socket.fileno()

    #: A packet from frames, and back.
    pack = staticmethod(pack)
    unpack = staticmethod(unpack)

    def write(self, packet: bytes) -> bool:
        """Send a packet; False if there is no room now.

        Raises:
            ClosedError: The other side is gone.
            QueueFullError: Too many files are under way.
            TransportError: There is no memory or descriptor for a large one.
        """
        try:
            if len(packet) > INLINE_BYTES:
                self._write_file(packet)
            else:
                self._socket.send(packet)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno == errno.ETOOMANYREFS:
                raise QueueFullError("too many large messages under way") from exc
            raise ClosedError(f"the other side of the local link is gone: {exc}") from exc
        return True

    def read(self, flags: int = 0) -> bytes | None:
        """Return the next packet, or None if there is none (now, or within the time-out).

        Args:
            flags: `DONT_WAIT`, or 0.

        Raises:
            ClosedError: The other side is gone.
            TransportError: A file was lost.
        """
        try:
            if self._may_be_file:
                return self._read_file(flags)
            packet = self._socket.recv(2 * INLINE_BYTES, flags)
            if packet == FILE_FOLLOWS:
                self._may_be_file = True
                return self._read_file(flags)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ClosedError(f"the other side of the local link is gone: {exc}") from exc
        if not packet:
            raise ClosedError("the other side of the local link is gone")
        return packet

    def receive(self) -> list[Buffer] | None:
        """Return the next message, or None if there is none now.

        Raises as `read` does, and DecodeError for what is no message.
        """
        packet = self.read()
        return None if packet is None or packet == RING else self.unpack(packet)

    def ring(self) -> None:
        """Wake who sleeps at the other side; nothing follows if nobody does, or is there."""
        with contextlib.suppress(ClosedError):
            self.write(RING)

    def take_ring(self) -> bool:
        """Drop the next packet if it is only a ring; return whether it was."""
        try:
            if self._socket.recv(2, _PEEK) != RING:
                return False
            self._socket.recv(2, DONT_WAIT)
        except OSError:
            return False
        return True

    @property
    def has_more(self) -> bool:
        """False: what has come is in the socket."""
        return False

    @property
    def has_begun(self) -> bool:
        """False: packets are written whole."""
        return False

    def finish(self) -> bool:
        """Return True: see `has_begun`."""
        return True

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    #: In a forked copy, which the owner does not notice.
    disown = close

    @uninterrupted_call  # or the descriptor stays, and with it all that it holds
    def _write_file(self, packet: bytes) -> None:
        fd = file_of(packet, "envbus-passed")
        try:
            # Where there is room for the first only, both are sent again later.
            self._socket.send(FILE_FOLLOWS)
            self._socket.sendmsg([FILE_FOLLOWS], rights([fd]))
        finally:
            os.close(fd)

    def _read_file(self, flags: int) -> bytes | None:
        """Return the next packet, which may be a file."""
        data, fds, lost = receive_with_descriptors(self._socket, 2 * INLINE_BYTES, flags)
        try:
            if lost:
                raise TransportError("a message was lost: too many open files in this process")
            if not data:
                raise ClosedError("the other side of the local link is gone")
            if not fds and data == FILE_FOLLOWS:  # said again
                return None
            self._may_be_file = False
            return content_of(fds[0]) if fds else data
        finally:
            for fd in fds:
                os.close(fd)


class LocalLinkPeer:
    """A child's end, as a `PeerTransport`.

    Args:
        end: The local link to the broker; closed with this.
        identity: Routing id of this life of the peer.
        spin: Whether there is a core to spare for short waits.
        words: By which it may be asked besides; None: by none.
    """

    def __init__(
        self, end: LocalLinkEnd, identity: bytes, *, spin: bool = False, words: Doer | None = None
    ) -> None:
        self._identity = identity
        self._end = end
        self._words = Doer() if words is None else words
        self._timeout: float | None = None
        self._spinning = SpinBudget(CHILD_SPIN_SECONDS if spin else 0.0)
        #: Waits that were over at the first look.
        self._found = 0

    @property
    def identity(self) -> bytes:
        """Routing id of this life of the peer."""
        return self._identity

    def send(self, frames: Frames) -> None:
        """Send to the broker; waits while its socket is full, as when it is away for long.

        Raises as `LocalLinkEnd.write` does, but for QueueFullError.
        """
        self._set_timeout(self._timeout or 1.0)
        packet = self._end.pack(frames)
        while True:
            try:
                self._end.write(packet)
                return
            except QueueFullError:  # of files of all this user's processes: nobody tells of fewer
                time.sleep(_MOMENT)

    def receive(self, timeout: float) -> list[Buffer] | None:
        """Return the next message, or None after `timeout` seconds, or when a word asks.

        Raises as `LocalLinkEnd.receive` does.
        """
        self._set_timeout(timeout)
        end, words = self._end, self._words
        spin = self._spinning.seconds()
        start = time.perf_counter()
        if spin and words.look():
            waited = time.perf_counter() - start
            self._found += 1
            if waited > spin or not self._found % _ONE_IN:
                self._spinning.observe(waited, slept=False)
            return None
        packet = None
        if spin:
            give_up = start + spin
            while (packet := end.read(DONT_WAIT)) is None and time.perf_counter() < give_up:
                if words.look():
                    self._spinning.observe(time.perf_counter() - start, slept=False)
                    return None
                os.sched_yield()
        slept = packet is None
        if slept and words.fall_asleep():
            packet = end.read()
        words.wake_up()
        self._spinning.observe(time.perf_counter() - start, slept=slept)
        return None if packet is None or packet == RING else end.unpack(packet)

    def ring(self) -> None:
        """Wake the broker's owner, who sleeps until a word is answered."""
        self._end.ring()

    def lost_for(self) -> float:
        """Return 0.0: `receive` reports at once that a broker is gone."""
        return 0.0

    def trouble(self) -> str:
        """Return "": see `lost_for`."""
        return ""

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._end.close()

    def _set_timeout(self, timeout: float) -> None:
        if timeout != self._timeout:
            self._end.set_timeout(timeout)
            self._timeout = timeout
