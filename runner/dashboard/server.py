"""Serves the dashboard at an address, until it is told to stop.

Needs the extra `dashboard`. Leaves out what is served (`app.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from envbus.bus.errors import TransportError
from envbus.bus.gateway.config import GatewayConfig, split_address
from envbus.bus.gateway.host import InPieces
from envbus.runner.dashboard.access import Access
from envbus.runner.dashboard.app import make_app
from envbus.runner.dashboard.watch import Watch
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.monitoring.runs import find_runs

__all__ = ["DashboardServer"]

#: Connections at one time; those of browsers that look are some of them. Beyond that the oldest of
#: those that are not being answered ends: anybody may hold some, and say nothing.
_MOST_CONNECTIONS: Final = 128
#: Besides them, those that are not through TLS yet.
_MOST_STRANGERS: Final = 128
_BACKLOG: Final = 128
#: Bytes of a request's head: a browser sends the cookies of all that this host serves.
_LONGEST_HEAD: Final = 65536
#: Seconds for what is being sent at the end.
_GRACE: Final = 2


class DashboardServer:
    """The dashboard of all runs of this user on this host.

    Args:
        address: "HOST:PORT"; port 0 is any that is free.
        token: What a browser has to show first; None: a new one.
        certificate: File of the TLS certificate (chain), PEM.
        private_key: File of its private key, PEM.
        insecure: Serve other hosts without TLS.
        look: Returns the runs; None: asks all of this host.

    Attributes:
        url: Where a browser finds it, with the token.
        address: Host and port at which it serves.

    Raises:
        ConfigError: A setting cannot be used, or the address is wider than this host without TLS.
        EnvbusError: Nobody can look on this system.
        TransportError: The address is taken, or is none of this host.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        certificate: str | None = None,
        private_key: str | None = None,
        insecure: bool = False,
        look: Callable[[], Sequence[ObservedRun]] | None = None,
    ) -> None:
        token = secrets.token_urlsafe(24) if token is None else token
        # What is said of who may listen where, and of tokens, is said of gateways, too.
        settings = GatewayConfig(
            websocket=(address,),
            token=token,
            certificate=certificate,
            private_key=private_key,
            insecure=insecure,
        )
        has_tls = settings.read_tls() is not None
        if look is None:
            find_runs()
            look = Observer().look
        host, port = split_address(address)
        listening = _listen(address, host, port)
        port = listening.getsockname()[1]
        self.address = f"{_reached_at(host)}:{port}"
        self.url = f"{'https' if has_tls else 'http'}://{self.address}/?token={token}"
        names = {"localhost", socket.gethostname(), host} - {""}
        self._watch = Watch(look)
        self._server = _PageServer(
            uvicorn.Config(
                make_app(
                    Access(token, secrets.token_urlsafe(24), names, port),
                    self._watch,
                    tls=has_tls,
                ),
                access_log=False,
                h11_max_incomplete_event_size=_LONGEST_HEAD,
                http=_Connection,
                lifespan="off",
                limit_concurrency=_MOST_CONNECTIONS,
                log_config=None,
                log_level="critical",
                proxy_headers=False,
                server_header=False,
                ssl_certfile=certificate,
                ssl_keyfile=private_key,
                timeout_graceful_shutdown=_GRACE,
                ws="none",
            )
        )
        self._socket = _Entrance(listening, self._server.server_state.connections)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self,
        seconds: float | None = None,
        *,
        signals: bool = False,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until `stop`.

        Args:
            seconds: Or until so many have gone by.
            signals: Or until SIGTERM or Ctrl-C; for the main thread only.
            on_start: Called when any of these ends it.
        """
        asyncio.run(self._run(seconds, on_start, signals=signals))

    def stop(self) -> None:
        """Have `run` return; called by any thread. Idempotent."""
        self._server.should_exit = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._watch.close)

    def close(self) -> None:
        """Let go of the address, also where it never ran. Idempotent."""
        self._socket.close()

    async def _run(
        self, seconds: float | None, on_start: Callable[[], None], *, signals: bool
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        if seconds is not None:
            loop.call_later(seconds, self.stop)
        on_start()
        await self._server.serve([self._socket])


class _Connection(H11Protocol):
    #: When it was made.
    began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room, if need be; with too many, uvicorn would answer nobody any more."""
        self.began = self.loop.time()
        idle = [one for one in self.connections if isinstance(one, _Connection) and one.is_idle]
        if len(self.connections) >= _MOST_CONNECTIONS - 1 and idle:
            oldest = min(idle, key=attrgetter("began"))
            self.connections.discard(oldest)
            oldest.transport.abort()
        super().connection_made(cast(asyncio.Transport, transport))

    @property
    def is_idle(self) -> bool:
        """Whether it has not asked yet, or was answered; or does not read what it is told."""
        return self.flow.write_paused or bool(getattr(self.cycle, "response_complete", True))


class _Entrance(socket.socket):
    """Takes in who comes; of too many who are not through TLS yet, the oldest ends.

    Of those uvicorn knows nothing, and asyncio gives each of them a minute.

    Args:
        listening: Bound, and listened at; it is taken over.
        known: Connections that uvicorn knows.
    """

    def __init__(self, listening: socket.socket, known: Collection[Any]) -> None:
        super().__init__(fileno=listening.detach())
        self._known = known
        #: Those that have not ended, oldest first.
        self._taken: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Take one in.

        Raises:
            BlockingIOError: Nobody is there, or there is no room yet: soon there will be.
        """
        known = {one.transport.get_extra_info("socket").fileno() for one in self._known}
        self._taken = [sock for sock in self._taken if sock.fileno() >= 0]
        strangers = [sock for sock in self._taken if sock.fileno() not in known]
        if len(strangers) >= _MOST_STRANGERS:
            with contextlib.suppress(OSError):  # it has left, or was told before
                strangers[0].shutdown(socket.SHUT_RDWR)  # the loop, which has it, then closes it
            raise BlockingIOError
        accepted, address = super().accept()
        found = InPieces(fileno=accepted.detach())
        self._taken.append(found)
        return found, address


class _PageServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to whoever runs it."""
        yield


def _reached_at(host: str) -> str:
    """Return, as URLs have it, where this host's own browser finds what listens at `host`."""
    with contextlib.suppress(ValueError):
        if not host or ipaddress.ip_address(host).is_unspecified:
            return "[::1]" if ":" in host else "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _listen(address: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as exc:
        raise TransportError(
            f"the dashboard cannot be served at {address}: {exc.strerror or exc}; name another "
            "port, or 0 for any that is free"
        ) from exc
