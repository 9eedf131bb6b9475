"""One client's connection in the gateway's loop: performs what its `Session` says."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.dealer import Dealer
from envbus.bus.gateway.door import TurnedAwayError
from envbus.bus.gateway.session import Session
from envbus.bus.messages import FailureCode
from envbus.bus.transport import Frames

__all__ = ["Connection"]

logger = logging.getLogger("envbus.bus.gateway")

#: Seconds for a client to take the last words.
_LINGER: Final = 1.0


MakeDealer: TypeAlias = Callable[
    [bytes, Callable[[list[bytes]], object], Callable[[], object]], Dealer
]


class Connection(asyncio.Protocol):
    """Passes messages between a client and a DEALER of its own, in order, untouched.

    Args:
        session: Decides.
        config: Limits.
        make_dealer: From routing id, and what to call for messages and for room.
        others: All connections; this one is among them from its first to its last moment.
    """

    def __init__(
        self,
        session: Session,
        config: GatewayConfig,
        make_dealer: Callable[
            [bytes, Callable[[list[bytes]], object], Callable[[], object]], Dealer
        ],
        others: set[Connection],
    ) -> None:
        self._session = session
        self._config = config
        self._make_dealer = make_dealer
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._dealer: Dealer | None = None
        #: Messages for which the broker's queue had no room; nothing is read meanwhile.
        self._waiting: deque[Frames] = deque()
        self._since = self._heard = self._loop.time()
        self._probed = False
        self._abort_at: float | None = None

    @property
    def is_served(self) -> bool:
        """Whether it was let in and goes on."""
        return self._dealer is not None and self._session.ended is None

    # --- the client ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; TLS, where there is any, is done."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._others.add(self)
        _set_options(transport.get_extra_info("socket"), self._config.keepalive)
        if len(self._others) > 2 * self._config.max_connections:
            transport.abort()  # nor is there room for those who are told why
            return
        if sum(other.is_served for other in self._others) >= self._config.max_connections:
            return  # told when it says something: HTTP answers requests, it does not forestall them
        identity = f"gateway.{secrets.token_hex(8)}".encode()
        self._dealer = self._make_dealer(identity, self._on_message, self._on_writable)

    def data_received(self, data: bytes) -> None:
        """Something came from the client."""
        self._heard, self._probed = self._loop.time(), False
        if self._dealer is None:
            limit = self._config.max_connections
            self.end(f"{limit} clients are connected, which is the limit")
            return
        self._waiting += self._session.receive(data)
        self._pass_on()
        self._say(self._session.take_unsent())

    def eof_received(self) -> bool:
        """The client sends no more: its transport may be closed."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes or goes any more: tell the broker, who would wait for heartbeats else."""
        del exc
        self._others.discard(self)
        if self._dealer is not None:
            farewell = self._session.goodbye()
            if farewell is not None:
                self._dealer.send(farewell)
            self._dealer.close()
        if self._session.ended:
            logger.info("a connection was ended: %s", self._session.ended)

    # --- the broker ----------------------------------------------------------------------------

    def _on_message(self, frames: list[bytes]) -> None:
        self._say(self._session.wrap(frames))

    def _on_writable(self) -> None:
        self._pass_on()
        if not self._waiting and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pass_on(self) -> None:
        """Hand messages to the broker as long as it takes them."""
        while self._waiting and self._dealer is not None:
            if not self._dealer.send(self._waiting[0]):
                self._transport.pause_reading()
                return
            self._waiting.popleft()

    # --- time, and the end ---------------------------------------------------------------------

    def look_after(self, now: float) -> None:
        """Judge how long things take; called about once a second."""
        if self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
            return
        config = self._config
        if self._waiting:
            self._heard = now  # it is not heard, as nobody listens
        if not self._session.joined and now - self._since > config.handshake_timeout:
            self.end(
                f"no message for the broker came within {config.handshake_timeout:g} s",
                FailureCode.TIMEOUT,
            )
        elif now - self._heard > config.keepalive and not self._probed:
            probe = self._session.probe()
            self._probed = bool(probe)
            self._say(probe)
        elif self._probed and now - self._heard > 2 * config.keepalive:
            self.end(f"no sign of life for {2 * config.keepalive:g} s", FailureCode.TIMEOUT)

    def end(self, why: str, code: FailureCode = FailureCode.OVERLOADED) -> None:
        """Say why and close the connection."""
        self._session.end(TurnedAwayError(why, code))
        self._say(self._session.take_unsent())

    def hang_up(self) -> None:
        """Close the connection once the last words are sent."""
        self._transport.close()

    def _say(self, words: bytes) -> None:
        """Write to the client, and nothing more after its session's end.

        Then the client is left to close the connection, for a while: closed here, with something
        unread in it, the system would take the last words back (a reset).
        """
        if self._transport.is_closing() or self._abort_at is not None:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent > self._config.max_unsent_bytes and self._session.ended is None:
            self.end(f"{unsent} bytes wait for this client, which does not read")
            return
        if words:
            self._transport.write(words)
        if self._session.ended is not None:
            self._abort_at = self._loop.time() + _LINGER
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS
                self._transport.close()


def _set_options(sock: socket.socket, keepalive: float) -> None:
    """Small messages leave at once; the system looks whether a silent client lives."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(round(keepalive), 1)
    # macOS calls the first one otherwise.
    for option in ("TCP_KEEPIDLE", "TCP_KEEPALIVE"):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_KEEPINTVL"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 4, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
