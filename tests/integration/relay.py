"""A TCP relay between a peer and its broker, which cuts connections when it is told to."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType

from tests.waiting import pass_time

__all__ = ["Relay"]


class Relay:
    """Passes bytes on, to and from one endpoint.

    Args:
        endpoint: `"tcp://127.0.0.1:port"` of a broker.
        pause: Seconds between two pieces of 64 KiB, as of a slow line.

    Attributes:
        endpoint: Where peers connect instead.
        accepted: Connections so far.
    """

    def __init__(self, endpoint: str, *, pause: float = 0.0) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._broker = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._pause = pause
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Cut all connections; who connects again is let through."""
        pairs, self._pairs = self._pairs, []
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):  # it is cut off already
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # this is at its end
                return
            pair = peer, socket.create_connection(self._broker)
            self._pairs.append(pair)
            self.accepted += 1
            thread = threading.Thread(target=self._pass_on, args=pair, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with one, other, contextlib.suppress(OSError):
            while True:
                for sock in select.select([one, other], [], [])[0]:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    (other if sock is one else one).sendall(data)
                    pass_time(self._pause)
