"""A DEALER socket in an asyncio loop: one peer of the broker, for one connection.

Leaves out what frames mean. pyzmq's own `zmq.asyncio` makes a future per message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from envbus.bus.transport import Frames

__all__ = ["Dealer"]

#: Messages that wait for the broker, or for this process, per connection.
_HIGH_WATER_MARK: Final = 256
#: Milliseconds that the last messages of a connection get.
_LINGER_MS: Final = 500
#: Messages of the broker that one connection takes before others get their turn.
_BATCH: Final = 64
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class Dealer:
    """Connects to `endpoint` under `identity` and hands on what comes.

    Args:
        context: Shared by all of a process.
        endpoint: The broker's.
        identity: Routing id; must be fresh.
        on_message: Called with the frames of each message.
        on_writable: Called when `send`, which returned False, is worth another try.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        identity: bytes,
        on_message: Callable[[list[bytes]], object],
        on_writable: Callable[[], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_writable = on_writable
        self._blocked = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.connect(endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def send(self, frames: Frames) -> bool:
        """Queue a message for the broker; False: there is no room now. Never blocks."""
        last = len(frames) - 1
        sent = True
        try:
            for index, frame in enumerate(frames):
                flags = _NOBLOCK if index == last else _NOBLOCK_MORE
                self._socket.send(frame, flags, copy=len(frame) < zmq.COPY_THRESHOLD)
        except zmq.Again:
            self._blocked, sent = True, False
        self._look()  # what the descriptor had to tell may have been told to `send`
        return sent

    def close(self) -> None:
        """Close the socket, giving the last messages a bounded time. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(_LINGER_MS)

    def _look(self) -> None:
        """Take what has come. The descriptor tells only once of each change."""
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if self._blocked and events & zmq.POLLOUT:
                self._blocked = False
                self._loop.call_soon(self._on_writable)
            if not events & zmq.POLLIN:
                return
            self._on_message(self._socket.recv_multipart(_NOBLOCK))
        self._loop.call_soon(self._look)
