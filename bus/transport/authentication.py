"""Who may connect to a broker with keys: a thread that answers libzmq and counts who is refused.

Leaves out the keys themselves (`curve_keys.py`). libzmq proves that a client holds the secret to
the public key that it shows; which public keys are welcome is asked here, by ZAP
(https://rfc.zeromq.org/spec/27/). A broker without keys has no such thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from envbus.bus.interrupts import join_ending
from envbus.bus.transport.curve_keys import BrokerKeys, PeerKeys

__all__ = [
    "MONITOR_QUEUE",
    "NOBODY",
    "ZAP_DOMAIN",
    "Authenticator",
    "disable_curve",
    "enable_client_curve",
    "enable_curve",
    "handshake_trouble",
]

logger = logging.getLogger("envbus.bus.transport.authentication")

#: Domain in which a ZAP handler is asked, where there is one.
ZAP_DOMAIN = "envbus"
#: User of a connection without keys that a `Authenticator` has let in; no key looks like that.
NOBODY = "anonymous"
#: Events that a socket's monitor keeps. libzmq's threads stand still when there is no room.
MONITOR_QUEUE = 100_000
#: Milliseconds that a client has for its handshake.
_HANDSHAKE_MS = 10_000
#: Refused keys that were logged, so that each is logged once. Strangers choose them, so it has to
#: end somewhere.
_MAX_LOGGED = 1024

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def enable_curve(router: zmq.Socket[bytes], keys: BrokerKeys) -> None:
    """Let endpoints that are bound from now on take clients with keys only."""
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    router.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Refuses everybody if nobody answers; by default libzmq would let everybody in.
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def disable_curve(router: zmq.Socket[bytes]) -> None:
    """Let endpoints that are bound from now on take clients without keys; no others.

    A `Authenticator` is asked all the same, as a domain cannot be taken back, and lets them in.
    """
    router.setsockopt(zmq.CURVE_SERVER, 0)


def enable_client_curve(dealer: zmq.Socket[bytes], keys: PeerKeys) -> None:
    """Let connections that are made from now on show these keys, and check the broker's."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


def handshake_trouble(event: int, value: int, keys: PeerKeys | None) -> str:
    """Return, for people, why a peer's handshake failed."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keys is not None:
        return (
            "authentication failed: the broker does not allow this peer's public key "
            f"{keys.own.public.decode()}; add its file to what the broker allows"
        )
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if keys is None:
            return (
                "authentication failed: the broker takes peers with keys only; pass keys= and "
                "server_key="
            )
        return "authentication failed: the broker has no keys, and this peer has"
    # libzmq tells no more to the side that hangs up last, also where the mechanisms differ, or the
    # broker ends.
    if keys is None:
        return (
            "authentication failed: the broker broke the handshake off; probably it takes peers "
            "with keys only (then pass keys= and server_key=), or was ending"
        )
    return (
        "authentication failed: the broker broke the handshake off; probably server_key is not "
        "the broker's, the peer's secret key does not belong to its public one, the broker has "
        "no keys, or was ending"
    )


class Authenticator:
    """Decides who comes in, and counts who does not, in a thread of its own.

    A thread, as the broker's owner may be away for minutes, training, while clients come.

    Args:
        router: The socket to watch over, not bound yet. `close` this before it.
        allow: Whether the holder of a public key may come in. Called in the thread; must return
            soon, as nobody else comes in meanwhile. Who cannot be judged is refused.
    """

    def __init__(self, router: zmq.Socket[bytes], allow: Callable[[str], bool]) -> None:
        self._router = router
        self._allow = allow
        self._logged: set[object] = set()
        self._refused = 0
        self._closed = False
        self._authenticator = zmq.auth.Authenticator(router.context, log=logger)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self)
        self._authenticator.start()
        router.context.setsockopt(zmq.RCVHWM, MONITOR_QUEUE)
        self._monitor = router.get_monitor_socket(_FAILED)
        self._bell, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="envbus-authenticator", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections that were refused, or broken off before it was clear whose they are."""
        return self._refused

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether the client may come in; pyzmq's name for it."""
        name = key.decode("ascii")
        try:
            allowed = self._allow(name)
            if not isinstance(allowed, bool):  # a coroutine, for example, would pass for a yes
                raise TypeError(f"allow must return True or False, not {allowed!r}")
        except BaseException as exc:  # also SystemExit: the thread goes on, and lets nobody in
            reason = type(exc).__name__
            with contextlib.suppress(BaseException):  # its text is anybody's code, too
                reason = f"{reason}: {exc}"
            self._log_once(
                reason, "it could not be found out whether %s may join: %s", name, reason
            )
            return False
        if not allowed:
            self._log_once(name, "a client with the public key %s is not allowed", name)
        return allowed

    def close(self) -> bool:
        """End the thread; return whether it has let go of its sockets. Idempotent."""
        if not self._closed:
            self._closed = True
            self._router.disable_monitor()
            self._waker.close()
            join_ending(self._thread)  # only a slow `allow` function can need its time
        return not self._thread.is_alive()

    def _run(self) -> None:
        zap = self._authenticator.zap_socket
        watched: list[tuple[Any, int]] = [
            (zap, zmq.POLLIN),
            (self._monitor, zmq.POLLIN),
            (self._bell.fileno(), zmq.POLLIN),
        ]
        try:
            while self._bell.fileno() not in (ready := dict(zmq.zmq_poll(watched, -1))):
                if zap in ready:
                    # A coroutine for callbacks that are some; ours is none, so that it never
                    # pauses.
                    with contextlib.suppress(StopIteration):
                        self._authenticator.handle_zap_message(zap.recv_multipart()).send(None)
                if self._monitor in ready:
                    self._take_event()
        finally:  # also without memory, or the end of their context is waited for in vain
            self._authenticator.stop()
            self._monitor.close(0)
            self._bell.close()

    def _take_event(self) -> None:
        event = recv_monitor_message(self._monitor)
        if not event["event"] & _FAILED:  # that the monitor ends
            return
        self._refused += 1
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return  # logged with the key
        if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            reason = "it has another server key, or not the secret to the public key that it shows"
        else:
            reason = "it broke off, or has no keys"
        endpoint = event["endpoint"].decode("utf-8", "replace")
        self._log_once(reason, "a connection to %s was refused: %s", endpoint, reason)

    def _log_once(self, what: object, message: str, *arguments: str) -> None:
        if what not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(what)
            logger.warning(message + " (further ones like it are only counted)", *arguments)
