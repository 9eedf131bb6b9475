"""Where a bridge is: `HOST:PORT`, or an address that also says how messages are carried. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from envbus.bus.errors import ConfigError

__all__ = ["Address", "Transport"]

Transport: TypeAlias = Literal["zmq", "stream", "websocket"]

#: Scheme -> how messages are carried, and whether by TLS.
_SCHEMES: dict[str, tuple[Transport, bool]] = {
    "tcp": ("zmq", False),
    "ipc": ("zmq", False),
    "stream": ("stream", False),
    "streams": ("stream", True),
    "ws": ("websocket", False),
    "wss": ("websocket", True),
}


@dataclass(frozen=True, slots=True)
class Address:
    """A place to connect to."""

    host: str
    port: int
    #: None: to be found out.
    transport: Transport | None
    tls: bool = False
    #: Of `ipc://`; of a WebSocket's URL.
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return what `text` names.

        Raises:
            ConfigError: It names no place.
        """
        if text.startswith("ipc://"):
            return cls("", 0, "zmq", path=text.removeprefix("ipc://"))
        scheme, separator, rest = text.partition("://")
        if separator and scheme not in _SCHEMES:
            known = ", ".join(f"{name}://" for name in _SCHEMES)
            raise ConfigError(f"address {text!r}: there is no {scheme}://; there are {known}")
        try:
            parts = urlsplit(f"//{rest if separator else text}")
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise ConfigError(f"address {text!r} cannot be used: {exc}") from exc
        if not host or port is None:
            raise ConfigError(f"address {text!r} needs host and port, 127.0.0.1:5555 for example")
        if not separator:
            return cls(host, port, None)
        transport, tls = _SCHEMES[scheme]
        return cls(host, port, transport, tls, parts.path)

    def url(self, query: str = "") -> str:
        """Return the address as ZeroMQ, or a WebSocket, takes it."""
        if not self.host:
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.transport == "websocket":
            return f"{'wss' if self.tls else 'ws'}://{host}:{self.port}{self.path or '/'}{query}"
        return f"tcp://{host}:{self.port}"

    def __str__(self) -> str:
        if self.transport is None:
            return f"{self.host}:{self.port}"
        if self.transport == "stream":
            return f"{'streams' if self.tls else 'stream'}://{self.url().partition('//')[2]}"
        return self.url()
