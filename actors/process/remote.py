"""An env actor on another host: joins a runner's bus by itself and waits to be given envs.

Leaves out how the runner chooses it (`envbus.runner.workers.connections`). It has no pipe and no
shared memory with its runner: arrays travel in messages, and envs are given as ids or import paths,
of which it makes what `env/import_rule.py` lets pass.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from envbus.actors.env.actor import EnvActor
from envbus.actors.env.import_rule import ImportRule
from envbus.actors.protocol import CallResult
from envbus.bus.peer.worker import Heartbeats, PlainCodec, Worker
from envbus.bus.transport.curve_keys import PathLike, PeerKeys
from envbus.bus.transport.interface import PeerTransport
from envbus.bus.transport.zmq_sockets import ZmqPeer
from envbus.bus.wire.codec import encode
from envbus.bus.wire.messages import Hello, Tree

__all__ = ["HEARTBEAT", "REMOTE_SERVICE", "serve_remote"]

#: What a remote actor offers: to become one of a runner's env actors.
REMOTE_SERVICE = "remote-env"
#: Seconds between signs of life, which it also gives in the middle of a long step.
HEARTBEAT = 1.0
#: Seconds without its runner after which it leaves.
PATIENCE = 30.0
#: Requests that its runner may have in flight to it.
_CAPACITY = 4096


def serve_remote(
    endpoint: str,
    *,
    name: str | None = None,
    timeout: float = 60.0,
    keys: PathLike | None = None,
    server_key: PathLike | None = None,
    allow: Iterable[str] = (),
) -> bool:
    """Join the runner at `endpoint`, host the envs it asks for, and leave when it says so.

    Ctrl-C is raised once what the envs do for the runner now is done; the second one breaks it off.

    Args:
        endpoint: What the runner is bound to, e.g. `"tcp://10.0.0.5:5555"`.
        name: For messages to people; None: host name and process id.
        timeout: Seconds to wait for the runner to answer.
        keys: File of this actor's secret key, for a runner that has keys.
        server_key: File of the runner's public key.
        allow: Modules of which the runner may have classes and functions called to make envs,
            with all below them: `["my_sims"]`. Without any it makes the Gymnasium ids that are
            registered here, and nothing else.

    Returns:
        Whether the runner said so; else it was lost, as the log says.

    Raises:
        ConfigError: The endpoint is malformed, a key file cannot be used, or what is allowed is
            no module's name.
        RequestTimeoutError: No runner answered; if keys do not fit, the message says so.
        VersionMismatchError: The runner speaks another protocol version.
        ProtocolError: The runner refuses this actor, e.g. as the name is taken.
    """
    chosen = name or f"{socket.gethostname()}-{os.getpid()}"
    identity = f"{chosen}.{secrets.token_hex(8)}".encode()
    rule = ImportRule(allow)
    peer_keys = PeerKeys.load(keys, server_key)

    def connect(suffix: bytes = b"") -> PeerTransport:
        return ZmqPeer(endpoint, identity + suffix, keys=peer_keys)

    actor = EnvActor(
        check=lambda value: encode(CallResult(values=Tree(value))),
        report=lambda making: worker.tell(making),
        rule=rule,
    )
    transport = connect()
    worker = Worker(
        transport,
        Hello(
            name=chosen,
            services=[REMOTE_SERVICE],
            capacity=_CAPACITY,
            pid=os.getpid(),
            heartbeat=HEARTBEAT,
        ),
        actor.handlers,
        # Infos of one agent; of many, packed or not.
        codec=PlainCodec(
            placeholders=("infos", "observations['infos']", "observations[*]['infos']", "metadata")
        ),
        patience=PATIENCE,
        amend=actor.amend,
    )
    heartbeats = Heartbeats(
        lambda: connect(b".heartbeat"), identity, HEARTBEAT, on_unknown=worker.on_unknown
    )
    try:
        worker.join(timeout)
        heartbeats.start()
        with _ctrl_c_after_the_request(worker.stop):
            return worker.run()
    finally:
        heartbeats.stop()
        transport.close()
        actor.close()


@contextlib.contextmanager
def _ctrl_c_after_the_request(stop: Callable[[], object]) -> Iterator[None]:
    """Have the first Ctrl-C call `stop`, and raise it at the end of the context.

    Raised in an env it would be that env's own error: the runner is told so, and goes on with this
    actor, which nobody could end by Ctrl-C.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # there is none here, or it is somebody else's
        return
    came = False

    def leave(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
