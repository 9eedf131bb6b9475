"""The driver's hold on a gateway: its listening sockets, and the process that serves them.

Leaves out what that process does (`host.py`), whether it hangs and when a
dead one is started again (`bus/supervision/`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import random
import resource
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from envbus.bus.descriptors import descriptors_in_use
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    EnvbusError,
    RestartLimitError,
    StartError,
    TransportError,
)
from envbus.bus.forking import disown_in_forks
from envbus.bus.gateway.client_identity import GatewayClient, client_of
from envbus.bus.gateway.config import (
    RELOAD,
    STOP,
    GatewayBootstrap,
    GatewayConfig,
    GatewayTerms,
    split_address,
)
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.supervision.liveness_probe import PROBE, LivenessProbe, Verdict
from envbus.bus.supervision.restart import Exit, RestartPolicy
from envbus.bus.supervision.supervision import (
    ChildGivenUp,
    StartChild,
    Supervision,
    SupervisionEffect,
)
from envbus.bus.transport.curve_keys import Entrance, PeerKeys
from envbus.bus.transport.interface import BACKLOG

__all__ = ["PRELOAD", "Gateway"]

logger = logging.getLogger("envbus.bus.gateway")

_NAME: Final = "gateway"
_HOST: Final = "envbus.bus.gateway.host"
#: What the fork server imports before it forks a gateway; the driver need not.
PRELOAD: Final = (_HOST,)
#: Seconds for a process' first sign of life, on a busy machine, and between looks for it.
_START_TIMEOUT: Final = 30.0
_START_LOOK: Final = 0.2
#: Descriptors that this process may want for other things later: at least, and where it may.
_LEAST_SPARE: Final = 64
_SPARE: Final = 1024


class Gateway:
    """Lets clients without ZeroMQ join a broker, over plain TCP and WebSocket.

    A process of its own does the work; it ends with this one, however that ends. This one keeps
    the listening sockets, so that a process that died is followed by one at the same ports, and
    who connects meanwhile just waits. Connections are lost with it: clients connect again. A
    process that hangs (`hang_timeout`) is killed, and followed likewise.

    Used by one thread, which calls `check` now and then, and soon after `fileno` is readable.

    Args:
        endpoint: Where the broker is bound, reachable from this host: `"ipc:///..."`.
        config: Addresses, guards and limits.
        restart: How often a process that died is started again.
        keys: What the broker asks for there; None: nothing.

    Raises:
        ConfigError: An address is none of this host's, or the files for TLS cannot be used.
        TransportError: An address is in use.
        StartError: No process could be started, or this one may not have the descriptors.
    """

    def __init__(
        self,
        endpoint: str,
        config: GatewayConfig,
        restart: RestartPolicy | None = None,
        *,
        keys: PeerKeys | None = None,
    ) -> None:
        tls = config.read_tls()
        _allow_descriptors(config)
        self._owner = os.getpid()
        self._secret = secrets.token_bytes(32)
        self._bootstrap = GatewayBootstrap(
            entrance=Entrance(endpoint, keys),
            owner=self._owner,
            secret=self._secret,
            terms=GatewayTerms(config, tls),
        )
        self._supervision = Supervision(random.random)
        self._child: Child | None = None
        self._hang_timeout = config.hang_timeout
        #: Of the process that serves; None: it is not asked for signs of life (any more).
        self._liveness_probe: LivenessProbe | None = None
        #: When to look for signs of life. Not with each `check`, which is called for each message.
        self._look_at = math.inf
        self._hung = False
        self._closed = False
        self._listeners: list[socket.socket] = []
        try:
            for address in (*config.tcp, *config.websocket):
                self._listeners.append(_listen(address))
            self._process_group = ProcessGroup(PRELOAD)
        except BaseException:
            self._close_listeners()
            raise
        addresses = [_name_of(listener) for listener in self._listeners]
        #: Where clients connect; port 0 is replaced by the real one.
        self.tcp = tuple(addresses[: len(config.tcp)])
        self.websocket = tuple(addresses[len(config.tcp) :])
        self._tls = config.certificate is not None
        self._events = select.poll()
        self._events.register(self._process_group.fileno(), select.POLLIN)
        disown_in_forks(self)
        try:
            self._perform(self._supervision.add(_NAME, restart or RestartPolicy()))
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of them, as clients write them: `stream://`, `ws://`, with TLS `streams://`, `wss://`."""
        s = "s" if self._tls else ""
        return (
            *(f"stream{s}://{address}" for address in self.tcp),
            *(f"ws{s}://{address}" for address in self.websocket),
        )

    @property
    def restarts(self) -> int:
        """How often its process was started again."""
        return self._supervision.restarts(_NAME)

    @property
    def pid(self) -> int:
        """Id of the process that serves now, or was the last to."""
        assert self._child is not None
        return self._child.pid

    @property
    def config(self) -> GatewayConfig:
        """As given, with the token that was set last."""
        return self._bootstrap.terms.config

    def set_token(self, token: str | dict[str, str]) -> None:
        """Ask those who come from now on for another token, or for one of others.

        Connections that there are stay, also those whose token is none any more.

        Raises:
            ConfigError: It cannot be one; all stays as it was.
            ClosedError: This gateway was closed.
        """
        config = dataclasses.replace(self.config, token=token)
        self._change(GatewayTerms(config, self._bootstrap.terms.tls))

    def reload_certificate(self) -> None:
        """Show those who come from now on what the files of TLS hold now.

        Raises:
            ConfigError: They cannot be used; all stays as it was.
            ClosedError: This gateway was closed.
        """
        self._change(GatewayTerms(self.config, self.config.read_tls()))

    def client_of(self, identity: bytes) -> GatewayClient | None:
        """Return who has come in here under a peer's routing id; None: nobody has."""
        return client_of(identity, self._secret)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended."""
        return self._process_group.fileno()

    def wake_at(self) -> float | None:
        """Return by when `check` is due, in seconds of `time.monotonic`; None: not by itself."""
        times = self._look_at, self._supervision.wake_at(), self._process_group.wake_at()
        at = min(at for at in times if at is not None)
        return None if at == math.inf else at

    def check(self) -> None:
        """Kill the process if it hangs; start it again if it has ended and its turn has come.

        Waits for the stacks of one that hangs (0.3 s at most), and for the fork server to begin the
        next one; not for anything else.

        Raises:
            RestartLimitError: It ended too often; how it ended last is in the message.
            ClosedError: This gateway was closed.
        """
        if self._closed:
            raise ClosedError("this gateway was closed")
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
        due = self.wake_at()
        if (due is None or now < due) and not self._events.poll(0):
            return  # asking the group takes ten times as long, and this is asked all the time
        for child, status in self._process_group.exits():
            if child is self._child:
                self._on_exit(status, now)
        self._perform(self._supervision.due(now))

    def close(self, timeout: float = 2.0) -> None:
        """Tell clients that it ends, and end. Idempotent.

        Args:
            timeout: Seconds for the process to do so before it is killed.
        """
        if self._closed:
            return
        self._closed = True
        self._forget_key()
        self._close_listeners()
        if self._child is not None and self._child.exit_status is None:
            with contextlib.suppress(EnvbusError):  # it is dead
                self._child.pipe.send(STOP)
        self._process_group.close(timeout)

    def disown(self) -> None:
        """In a forked copy: let go of the listening sockets, and of the private key."""
        self._closed = True
        self._forget_key()
        self._close_listeners()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        places = [f"tcp {a}" for a in self.tcp] + [f"websocket {a}" for a in self.websocket]
        return f"<Gateway {', '.join(places)}{', closed' if self._closed else ''}>"

    def _forget_key(self) -> None:
        terms = GatewayTerms(self.config, None)
        self._bootstrap = msgspec.structs.replace(self._bootstrap, terms=terms)

    def _change(self, terms: GatewayTerms) -> None:
        if self._closed:
            raise ClosedError("this gateway was closed")
        self._bootstrap = msgspec.structs.replace(self._bootstrap, terms=terms)
        assert self._child is not None
        with contextlib.suppress(ClosedError):  # it is dead: the next one is told all of it
            self._child.pipe.send(RELOAD + msgspec.msgpack.encode(terms))

    def _look(self, now: float) -> None:
        """Look for signs of life; ask for one at times, and kill a process that gives none."""
        assert self._child is not None
        assert self._liveness_probe is not None
        self._take_signs(self._child.pipe, now)
        verdict = self._liveness_probe.look(now)
        if verdict is Verdict.HUNG:
            self._hung, self._look_at = True, math.inf
            # Without native frames, which take seconds: the owner's other clients wait meanwhile.
            (stack,) = self._process_group.stacks([self._child], native=False)
            logger.warning("the gateway's process hangs and is killed:\n%s", stack)
            self._process_group.kill(self._child)
            return
        if verdict is Verdict.ASK:
            with contextlib.suppress(EnvbusError):  # it is dead already
                self._child.pipe.send(PROBE)
        self._look_at = self._liveness_probe.wake_at()
        if self._child.pipe.next_expected == 1:
            self._look_at = min(self._look_at, now + _START_LOOK)

    def _take_signs(self, pipe: Pipe, now: float) -> None:
        try:
            while True:
                pipe.receive(0.0)
                if pipe.next_expected == 2:  # the first one: it serves
                    assert self._hang_timeout is not None
                    self._liveness_probe = LivenessProbe(self._hang_timeout, now)
                elif self._liveness_probe is not None:
                    self._liveness_probe.alive(now)
        except EnvbusError:
            return  # nothing more now; that it has ended is told elsewhere

    def _on_exit(self, status: ExitStatus, now: float) -> None:
        assert self._child is not None
        self._child.pipe.close()
        self._look_at = math.inf
        how, cause, idle = status.report(), Exit.CRASH, 0.0
        if self._hung:
            how, cause = f"a hang, for which it was killed ({status.describe()})", Exit.HANG
            idle = self._hang_timeout or 0.0
        logger.warning("the gateway's process ended with %s", how)
        life = self._supervision.incarnation(_NAME)
        self._perform(self._supervision.on_exit(_NAME, life, cause, now, how, idle))

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            match effect:
                case StartChild(_, 0):
                    self._start()
                case StartChild(_, life):
                    try:
                        self._start()
                    except BaseException as error:  # no process, Ctrl-C: another failure
                        how = str(error) or type(error).__name__
                        logger.warning("the gateway's process was not started again: %s", how)
                        assert self._child is not None
                        self._process_group.kill(self._child)  # one that was not told what it needs
                        self._look_at, now = math.inf, time.monotonic()
                        self._perform(self._supervision.on_exit(_NAME, life, Exit.CRASH, now, how))
                        if not isinstance(error, EnvbusError):
                            raise
                case ChildGivenUp(_, how_often, cause):
                    self._close_listeners()  # else clients would wait for somebody to take them in
                    raise RestartLimitError(f"the gateway's process {how_often}: {cause}")

    @uninterrupted_call  # or the process takes what comes next for what it needs first
    def _start(self) -> None:
        self._child = self._process_group.start(_NAME, f"{_HOST}:main")
        life = self._supervision.incarnation(_NAME)
        self._supervision.on_ready(_NAME, life, time.monotonic())
        self._hung = False
        if self._hang_timeout is not None:
            now = time.monotonic()
            self._liveness_probe = LivenessProbe(max(self._hang_timeout, _START_TIMEOUT), now)
            self._look_at = now + _START_LOOK
        pipe = self._child.pipe
        with contextlib.suppress(ClosedError):  # it is dead already, which `check` will hear
            pipe.send(msgspec.msgpack.encode(self._bootstrap))
            for listener in self._listeners:
                pipe.send_fd(pipe.next_number(), listener.fileno())

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()


def _allow_descriptors(config: GatewayConfig) -> None:
    """Let this process have a descriptor for each connection to its broker.

    libzmq ends a process that has none for a connection to a Unix socket: clients could do that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = descriptors_in_use()
    needed = used + config.max_peers + _LEAST_SPARE
    wanted = used + config.max_peers + _SPARE
    if hard != resource.RLIM_INFINITY:
        if needed > hard:
            raise StartError(
                f"max_connections={config.max_connections} takes up to {config.max_peers} "
                f"descriptors of this process, which has {used} and may have {hard}. Lower it, or "
                f"allow {needed} at least: `ulimit -Hn` in the shell before"
            )
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(address: str) -> socket.socket:
    """Return a socket that listens at `address`."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{address} is no address of this host: {error}") from error
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise TransportError(f"cannot listen at {address}: {error}") from error
    return listener


def _name_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
