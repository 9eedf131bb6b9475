"""Connects to a bridge step by step, and says at which step it stops, and what to do."""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from envbus.actors.external.protocol import JoinBridge
from envbus.bus.errors import ConfigError
from envbus.bus.transport.curve_keys import PeerKeys
from envbus.bus.transport.interface import is_local
from envbus.bus.wire.messages import FailureCode, Kind, Token
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.talk import (
    BrokenRuleError,
    FailureError,
    LinkEndedError,
    NoAnswerError,
    Talk,
    open_link,
)

__all__ = ["Diagnosis", "Means", "examine", "find"]

#: Seconds in which a ZeroMQ server has begun its greeting, where it may be another one.
_GREETING_TIME = 0.5
#: Round trips of which the median is told.
_ROUND_TRIPS = 20


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One step that was tried."""

    name: str
    ok: bool
    #: What was found.
    found: str
    #: What to do about it; empty where nothing is wrong.
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Means:
    """What a client has to show."""

    token: str | None = None
    keys: PeerKeys | None = None
    #: None: what this host trusts, where the other side speaks TLS.
    tls: ssl.SSLContext | None = None


class _StoppedError(Exception):
    """A step has failed; those behind it cannot be tried."""

    def __init__(self, name: str, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.step = Diagnosis(name, False, found, advice)


def examine(address: Address, means: Means, timeout: float = 5.0) -> Iterator[Diagnosis]:
    """Yield the steps in their order, up to the first that fails.

    name, connection, transport, TLS (if any), handshake, hello, bridge, round trip. No episode is
    started: a bridge that is in use is not disturbed.

    Args:
        address: Where to connect to; its transport may be unknown.
        means: Token, keys, certificates.
        timeout: Seconds per step.

    Raises:
        ConfigError: What the caller gave does not go together.
    """
    try:
        if address.host:
            yield _resolve(address)
            yield _reach(address, timeout)
            step, address = _recognize(address, means, timeout)
            yield step
        begin = time.monotonic()
        try:
            link = open_link(
                address, timeout=timeout, token=means.token, tls=means.tls, keys=means.keys
            )
        except ConfigError:
            raise
        except Exception as exc:  # each library has its own
            raise _handshake_failed(exc, means) from exc
        took = 1e3 * (time.monotonic() - begin)
        yield Diagnosis("handshake", True, f"{_spoken(address)} stands after {took:.0f} ms")
        with closing(Talk(link, timeout)) as talk:
            yield _hello(talk, address, means)
            yield _join(talk)
            yield _round_trips(talk)
    except _StoppedError as stopped:
        yield stopped.step


def find(address: Address, means: Means, timeout: float = 5.0) -> Address:
    """Return the address with its transport, found out if it did not say so.

    Raises:
        ConfigError: There is no connection; what to do about it.
    """
    if not address.host:
        return address
    try:
        _resolve(address)
        _reach(address, timeout)
        return _recognize(address, means, timeout)[1]
    except _StoppedError as stopped:
        raise ConfigError(str(stopped)) from stopped


def _resolve(address: Address) -> Diagnosis:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise _StoppedError(
            "name",
            f"{address.host} has no address: {exc}",
            "is it spelled right? Try the numeric address, which the bridge's host shows with "
            "`ip address`.",
        ) from exc
    numbers = sorted({str(entry[4][0]) for entry in found})
    return Diagnosis("name", True, f"{address.host} is {', '.join(numbers)}")


def _reach(address: Address, timeout: float) -> Diagnosis:
    place = f"{address.host}:{address.port}"
    try:
        begin = time.monotonic()
        socket.create_connection((address.host, address.port), timeout).close()
    except ConnectionRefusedError as exc:
        raise _StoppedError(
            "connection",
            f"{place} refuses connections: nothing listens there",
            "is the bridge running, and is this its port? It prints its addresses when it starts; "
            "one that listens at 127.0.0.1 is reached from its own host only.",
        ) from exc
    except TimeoutError as exc:
        raise _StoppedError(
            "connection",
            f"{place} did not answer in {timeout:.3g} s",
            "a firewall drops the packets, or the host is off. Open the port there, or reach it "
            "through a tunnel: ssh -L.",
        ) from exc
    except OSError as exc:
        text = f"{place} cannot be reached: {exc}"
        raise _StoppedError("connection", text, "is the network up?") from exc
    return Diagnosis("connection", True, f"{place} accepts after {_ms(begin)}")


def _recognize(address: Address, means: Means, timeout: float) -> tuple[Diagnosis, Address]:
    """Find out how the other side carries messages, and compare it with what was asked for."""
    try:
        with socket.create_connection((address.host, address.port), timeout) as probe:
            is_zmq = address.transport == "zmq"
            greeting = _greeting(probe, timeout if is_zmq else _GREETING_TIME, timeout)
    except OSError as exc:
        text = f"the connection broke: {exc}"
        raise _StoppedError("transport", text, "look at its log") from exc
    if greeting is not None:
        return _zmq(address, greeting, means)
    if address.transport == "zmq":
        raise _StoppedError(
            "transport",
            "no ZeroMQ greeting came: what listens there is no ZeroMQ socket",
            f"if it is a gateway's port, use stream://{address.host}:{address.port} or "
            f"ws://{address.host}:{address.port}",
        )
    if address.transport is not None:
        return Diagnosis("transport", True, _spoken(address)), address
    with_tls = _answers_tls(address, timeout)
    is_http = _answers_http(address, timeout, with_tls)
    found = replace(address, transport="websocket" if is_http else "stream", tls=with_tls)
    if means.token is not None and not with_tls and not is_local(address.url()):
        secure = replace(found, tls=True)
        raise _StoppedError(
            "transport",
            f"{_spoken(found)}: it has not answered TLS, and others could read the token",
            f"if it has TLS, and is slow, use {secure}; if it has none on purpose, {found}",
        )
    return Diagnosis("transport", True, f"{_spoken(found)}: {found}"), found


def _zmq(address: Address, mechanism: str, means: Means) -> tuple[Diagnosis, Address]:
    found = replace(address, transport="zmq", tls=False)
    if address.transport not in (None, "zmq"):
        raise _StoppedError(
            "transport",
            f"a ZeroMQ socket listens there, and not {_spoken(address)}",
            f"use {found}, or the port that the gateway printed",
        )
    wanted = "NULL" if means.keys is None else "CURVE"
    if mechanism != wanted:
        advice = (
            "give your keys and the bridge's public key: --keys me.key_secret --server-key "
            "server.key (`envbus keys new` makes them)"
            if mechanism == "CURVE"
            else "the bridge was started without keys: leave yours off, or start it with keys="
        )
        raise _StoppedError("transport", f"ZeroMQ with security {mechanism}", advice)
    return Diagnosis("transport", True, f"ZeroMQ with security {mechanism}: {found}"), found


def _greeting(probe: socket.socket, patience: float, timeout: float) -> str | None:
    """Return the security mechanism that a ZeroMQ socket names, or None: it is none.

    ZMTP 3.1, "Greeting": signature (10 bytes), version (2), mechanism (20), as-server, filler.

    Args:
        probe: Connected to it.
        patience: Seconds for the greeting to begin.
        timeout: Seconds for what follows then.
    """
    probe.settimeout(patience)
    try:
        signature = _exactly(probe, 10)
        probe.settimeout(timeout)
        if signature[0] != 0xFF or signature[9] != 0x7F:
            return None
        # Up to the major version: who hears another mechanism than its own hangs up, mute.
        probe.sendall(struct.pack(">B8xBB", 0xFF, 0x7F, 3))
        rest = _exactly(probe, 54)
    except (OSError, EOFError):
        return None
    return rest[2:22].rstrip(b"\0").decode("ascii", "replace")


def _exactly(probe: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = probe.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # who it is, is looked at later
    return context


def _answers_tls(address: Address, timeout: float) -> bool:
    try:
        with (
            socket.create_connection((address.host, address.port), min(timeout, 2.0)) as plain,
            _any_certificate().wrap_socket(plain),
        ):
            return True
    except (OSError, ValueError):
        return False


def _answers_http(address: Address, timeout: float, tls: bool) -> bool:
    try:
        probe = socket.create_connection((address.host, address.port), min(timeout, 2.0))
        with _any_certificate().wrap_socket(probe) if tls else probe as wire:
            wire.sendall(b"GET / HTTP/1.1\r\nHost: doctor\r\nConnection: close\r\n\r\n")
            return _exactly(wire, 5) == b"HTTP/"
    except (OSError, EOFError, ValueError):
        return False


def _handshake_failed(exc: Exception, means: Means) -> _StoppedError:
    text = f"{type(exc).__name__}: {exc}".rstrip(": ")
    advice = "the bridge's log says more"
    if isinstance(exc, ssl.SSLCertVerificationError):
        advice = (
            "the certificate is not one that this host trusts, or is for another name: give the "
            "file of the authority that signed it (--ca), and the name that stands in it"
        )
    elif isinstance(exc, ssl.SSLError):
        advice = "one side uses TLS and the other does not: try ws:// or stream:// without an s"
    elif isinstance(exc, TimeoutError):
        advice = "what listens there is neither a bridge nor its gateway"
    elif isinstance(exc, LinkEndedError) and means.keys is not None:
        advice = (
            "is your public key in the folder that the bridge allows, and is --server-key the "
            "public key of this bridge?"
        )
    elif "401" in text or "403" in text:
        advice = "give the token that the bridge was started with: --token-file"
    return _StoppedError("handshake", text, advice)


def _hello(talk: Talk, address: Address, means: Means) -> Diagnosis:
    try:
        if means.token is not None and address.transport == "stream":
            talk.send(Token(token=means.token), Kind.NOTICE)
        welcome = talk.say_hello(f"doctor-{secrets.token_hex(4)}")
    except FailureError as exc:
        raise _StoppedError("hello", f"refused: {exc}", _advice(exc, means)) from exc
    except NoAnswerError as exc:
        advice = "what listens there does not speak envbus's protocol"
        raise _StoppedError("hello", str(exc), advice) from exc
    except (BrokenRuleError, LinkEndedError) as exc:
        raise _StoppedError("hello", str(exc), "what listens there is no envbus broker") from exc
    found = (
        f"welcome; silence is borne for {welcome.lease:.3g} s, messages up to "
        f"{welcome.max_message_bytes / 2**20:,.0f} MiB"
    )
    return Diagnosis("hello", True, found)


def _advice(exc: FailureError, means: Means) -> str:
    if exc.failed.code is FailureCode.VERSION:
        return "install the same release of envbus, or of the client, on both sides"
    if "token" in exc.failed.message:
        return (
            "give the token that the bridge was started with: --token-file"
            if means.token is None
            else "that is not the token that the bridge was started with"
        )
    return "the message says what is wrong"


def _join(talk: Talk) -> Diagnosis:
    try:
        joined = talk.ask(JoinBridge(client="envbus doctor"))
    except FailureError as exc:
        advice = (
            "a broker without a bridge listens there: start one with `envbus serve`, or give its "
            "own address"
            if exc.failed.code is FailureCode.NO_PEER
            else "the message says what is wrong"
        )
        raise _StoppedError("bridge", f"refused: {exc}", advice) from exc
    except NoAnswerError as exc:
        raise _StoppedError(
            "bridge",
            str(exc),
            "the bridge's process is there and does not poll: it trains, or hangs. Clients "
            "wait for it up to their time-outs.",
        ) from exc
    except (BrokenRuleError, LinkEndedError) as exc:
        raise _StoppedError("bridge", str(exc), "the bridge does not follow the protocol") from exc
    found = (
        f"joined; {'several agents' if joined.multi_agent else 'one agent'}, policies "
        f"{', '.join(joined.policy_ids) or '(none named)'}, lease {joined.lease:.3g} s"
    )
    return Diagnosis("bridge", True, found)


def _round_trips(talk: Talk) -> Diagnosis:
    times = []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        try:
            talk.ask(JoinBridge(client="envbus doctor"))
        except (FailureError, NoAnswerError, BrokenRuleError, LinkEndedError) as exc:
            raise _StoppedError("round trip", str(exc), "it worked once, and then no more") from exc
        times.append(time.perf_counter() - begin)
    times.sort()
    return Diagnosis(
        "round trip",
        True,
        f"{1e3 * times[len(times) // 2]:.2f} ms at the median of {len(times)}, at worst "
        f"{1e3 * times[-1]:.2f} ms",
    )


def _spoken(address: Address) -> str:
    name = {"zmq": "ZeroMQ", "stream": "plain TCP", "websocket": "WebSocket", None: "?"}
    return name[address.transport] + (" with TLS" if address.tls else "")


def _ms(begin: float) -> str:
    return f"{1e3 * (time.monotonic() - begin):.1f} ms"
