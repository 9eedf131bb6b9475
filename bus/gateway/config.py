"""What a gateway listens at, whom it lets in, and what it bears.

Leaves out the sockets: raised errors come before any of them exists.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final

import msgspec

from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.settings import check_number
from envbus.bus.transport.curve_keys import Entrance
from envbus.bus.transport.interface import is_local

__all__ = [
    "RELOAD",
    "STOP",
    "GatewayBootstrap",
    "GatewayConfig",
    "GatewayTerms",
    "TlsFiles",
    "split_address",
]

#: Over the pipe to a gateway's process come a `GatewayBootstrap`; the listening sockets, those for
#: TCP first; then any number of `PROBE`, and of `RELOAD` with `GatewayTerms` behind it; at the
#: end, `STOP`. From the process comes a message, of no bytes, when it serves, and one for each
#: `PROBE`.
STOP: Final = b"stop"
RELOAD: Final = b"reload"

#: What fits into an HTTP header and into a URL as it is.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
#: Of one of several tokens. Shorter than a public key: none is taken for one.
_NAME_CHARS: Final = 32
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{_NAME_CHARS}}}")
#: Characters of a token that guards a wide address: 96 bits, if they are drawn from 64.
_LONG_TOKEN: Final = 16
#: Most bytes of a file for TLS.
_LONGEST_PEM: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Settings of one gateway.

    Raises:
        ConfigError: A setting cannot be used, or an address is wider than this host without both
            a token and TLS, and `insecure` was not said.
    """

    #: Addresses for plain TCP, `"127.0.0.1:7000"`, `"[::1]:0"`; port 0: any that is free.
    tcp: tuple[str, ...] = ()
    #: Addresses for WebSocket.
    websocket: tuple[str, ...] = ()
    #: What each client has to show, of letters, digits and `._~+/=-`; or several such tokens by
    #: names for those who have them, `{"alice": "..."}`; None: nothing.
    token: str | dict[str, str] | None = field(default=None, repr=False)
    #: TLS: files of the certificate (chain) and its private key, PEM. For all addresses.
    certificate: str | None = None
    private_key: str | None = None
    #: Let whoever reaches a wide address try, without token or TLS.
    insecure: bool = False
    #: Web pages that may connect besides those from this host, `"https://game.example"`; `"*"`:
    #: all. Browsers tell where a page is from; other programs need not.
    origins: tuple[str, ...] = ()
    #: Longest message of a client, in bytes. A hundred frames of 84x84x4 fit.
    max_message_bytes: int = 4 * 2**20
    #: Clients that have said hello, behind token and TLS. Each takes three file descriptors here
    #: and one at the broker.
    max_connections: int = 256
    #: Connections that have not yet, or that end: one more, and the oldest of them is cut off. Each
    #: gets `handshake_timeout`, 64 KiB and a file descriptor. Nothing of it reaches the broker.
    max_strangers: int = 256
    #: Bytes that may wait for a client that reads slowly, besides the message that goes over it.
    max_unsent_bytes: int = 16 * 2**20
    #: Bytes of a client's messages that may wait for the broker to take them, besides the one that
    #: goes over it: its connection is not read meanwhile. All clients together, with those that
    #: have left since: times `max_peers`, twice `max_connections` and some.
    max_untaken_bytes: int = 8 * 2**20
    #: Seconds from the connection to its hello, with what comes before it: TLS, HTTP, the token.
    handshake_timeout: float = 10.0
    #: Seconds of silence until a connection is probed (a ping, or TCP's keepalive); after twice
    #: that time without a sign of life it is closed.
    keepalive: float = 20.0
    #: Seconds within which the gateway's process has to give a sign of life when it is asked for
    #: one; else it is killed, and started again as one that died. It hangs for up to one and a half
    #: of it then, which should be well within the patience of clients (15 s). None: never.
    hang_timeout: float | None = 5.0

    def __post_init__(self) -> None:
        if not self.tcp and not self.websocket:
            raise ConfigError("a gateway needs an address: tcp=('127.0.0.1:0',) or websocket=")
        for name in ("tcp", "websocket", "origins"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is a tuple of strings, not a string")
        self._check_tokens()
        for name in ("certificate", "private_key"):
            file = getattr(self, name)
            if file is not None and (not isinstance(file, str) or "\0" in file):
                raise ConfigError(f"{name} is the name of a file, a string, not {brief(file)}")
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("TLS needs both files: certificate= and private_key=")
        self._check_numbers()
        for address in (*self.tcp, *self.websocket):
            self._check_width(address)

    @property
    def tokens(self) -> dict[str, str]:
        """Tokens by name, which is "" where there is one without a name; empty: none is wanted."""
        if self.token is None:
            return {}
        return {"": self.token} if isinstance(self.token, str) else self.token

    @property
    def max_peers(self) -> int:
        """Connections to the broker at a time.

        With those of clients that have gone, until it has taken what they sent.
        """
        return 2 * self.max_connections + 64

    def read_tls(self) -> TlsFiles | None:
        """Return what the files for TLS hold now, which can be used; None without TLS.

        Raises:
            ConfigError: They cannot be used.
        """
        if self.certificate is None or self.private_key is None:
            return None
        try:
            found = TlsFiles(_read_pem(self.certificate), _read_pem(self.private_key))
            found.context()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"TLS cannot use {self.certificate} and {self.private_key}: {error}"
            ) from error
        return found

    def _check_tokens(self) -> None:
        given: object = self.token
        each = [*given, *given.values()] if isinstance(given, dict) else [given]
        if given is not None and not all(isinstance(one, str) for one in each):
            # Without what was given, which may be a secret.
            raise ConfigError("token is a string, or a dict of strings by names that are strings")
        tokens = self.tokens
        if self.token is not None and not tokens:
            raise ConfigError("token= names nobody; None: no token is wanted")
        if not all(map(_TOKEN.fullmatch, tokens.values())):
            raise ConfigError("a token has 1 to 512 letters, digits and ._~+/=- and nothing else")
        for name in tokens if isinstance(self.token, dict) else ():
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"the name of a token has 1 to {_NAME_CHARS} letters, digits and ._- and "
                    "nothing else"
                )
        if len(set(tokens.values())) < len(tokens):
            raise ConfigError("two names have one token: nobody could be told from the other")

    def _check_numbers(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.startswith("max_") and (type(value) is not int or value < 1):
                raise ConfigError(f"{setting.name} must be a positive int, not {value!r}")
        if self.max_message_bytes >= 2**32:
            raise ConfigError("max_message_bytes must be below 4 GiB: 4 bytes tell the length")
        for name in ("handshake_timeout", "keepalive", "hang_timeout"):
            value, optional = getattr(self, name), name == "hang_timeout"
            check_number(name, value, over=0.0, finite=True, optional=optional)

    def _check_width(self, address: str) -> None:
        split_address(address)
        if self.insecure or is_local(f"tcp://{address}"):
            return
        missing = [
            what
            for what, there in (
                (
                    f"token= of {_LONG_TOKEN} characters or more",
                    min(map(len, self.tokens.values()), default=0) >= _LONG_TOKEN,
                ),
                ("certificate= and private_key=", self.certificate is not None),
            )
            if not there
        ]
        if missing:
            raise ConfigError(
                f"listening at {address} would let other hosts join unguarded; pass "
                f"{' and '.join(missing)}, listen at 127.0.0.1 instead, or say insecure=True"
            )


class TlsFiles(msgspec.Struct, frozen=True):
    """What the files for TLS held when they were read, PEM: the files may change, or go."""

    certificate: bytes
    private_key: bytes

    @uninterrupted_call  # or a descriptor of the key stays
    def context(self) -> ssl.SSLContext:
        """Return what TLS connections are made with.

        Raises:
            OSError: They cannot be used: `ssl.SSLError`.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL reads files only; these have no name and never lie on a disk.
        with _nameless(self.certificate) as certificate, _nameless(self.private_key) as key:
            context.load_cert_chain(certificate, key, password=_no_password)
        return context

    def __repr__(self) -> str:
        return "TlsFiles(...)"  # a key is no text for a log


class GatewayTerms(msgspec.Struct, frozen=True):
    """By what those are judged who come from now on: tokens, and the certificate that is shown."""

    config: GatewayConfig
    tls: TlsFiles | None


class GatewayBootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gateway's process must know."""

    #: The broker's.
    entrance: Entrance
    #: Process id of the broker's owner.
    owner: int
    #: Signs the identities of clients.
    secret: bytes
    terms: GatewayTerms


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `"host:port"`; the host of `"*:7000"` is empty: everywhere.

    Raises:
        ConfigError: It is none.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"address {address!r} is not understood; IPv6 needs '[::1]:7000'")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"address {address!r} is not understood; use '127.0.0.1:7000'")
    return "" if host == "*" else host, int(port)


def _read_pem(path: str) -> bytes:
    """Return a file's content.

    Raises:
        OSError: There is none, or what is there is no file of PEM.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file, and might never end")
        content = file.read(_LONGEST_PEM + 1)
    if len(content) > _LONGEST_PEM:
        raise OSError(f"{path} has more than {_LONGEST_PEM} bytes, which no certificate has")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would block


@contextlib.contextmanager
def _nameless(content: bytes) -> Iterator[str]:
    """Yield a path by which a file of this content can be read once."""
    with open(create_memfd("envbus-tls"), "w+b") as file:
        file.write(content)
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _no_password() -> str:
    # Asked for only by a key that is encrypted; the default would ask the terminal.
    raise ssl.SSLError("the private key is encrypted; give one that is not")
