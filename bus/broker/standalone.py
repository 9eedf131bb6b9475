"""A broker in a process of its own, until it is told to end.

Leaves out the loop (`loop.py`) and the command line.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType

from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import MAX_HEARTBEAT, BrokerConfig, BrokerStatistics
from envbus.bus.broker.loop import Broker
from envbus.bus.transport.curve_keys import Allow, BrokerKeys, PathLike
from envbus.bus.transport.unix_sockets import Bell
from envbus.bus.transport.zmq_sockets import ZmqRouter

__all__ = ["serve_broker"]

logger = logging.getLogger("envbus.bus.broker.standalone")


def serve_broker(
    bind: str | Sequence[str],
    *,
    keys: PathLike | None = None,
    allow: Allow | None = None,
    insecure: bool = False,
    config: BrokerConfig | None = None,
    on_ready: Callable[[tuple[str, ...]], object] | None = None,
) -> BrokerStatistics:
    """Run a broker until SIGINT or SIGTERM; peers find each other through it.

    Call it from the main thread, which gets its own signal handlers back at the end. Peers are
    not told to leave: clients join whoever is bound to the same endpoint next, env actors leave.

    Args:
        bind: Endpoints, e.g. `"tcp://127.0.0.1:5555"`, `"ipc:///tmp/bus"`.
        keys: File of the broker's secret key. All endpoints then take clients with keys only.
        allow: Which clients: a folder of their public keys, or one file, looked at anew whenever
            one comes; or a function of the public key, called in a thread of its own, that
            returns True or False, soon.
        insecure: Allow binding to more than this host without keys, where anybody may join.
        config: Limits; `embedded` is always off. Peers must promise heartbeats, at least every
            60 s unless `max_heartbeat` says otherwise.
        on_ready: Called with the endpoints, a `*` port replaced by the real one, when peers can
            connect.

    Returns:
        Its counts, at the end.

    Raises:
        ConfigError: An endpoint is malformed, or wider than this host without keys; a key file
            cannot be used.
        TransportError: An endpoint cannot be bound, e.g. is in use.
        RuntimeError: This is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread is told of signals; use Broker.run elsewhere")
    config = replace(config or BrokerConfig(), embedded=False)
    if config.max_heartbeat == math.inf:
        config = replace(config, max_heartbeat=MAX_HEARTBEAT)
    router = ZmqRouter(
        [bind] if isinstance(bind, str) else list(bind),
        max_frame_bytes=config.max_message_bytes,
        keys=BrokerKeys.load(keys, allow),
        insecure=insecure,
    )
    broker = Broker(router, BrokerCore(config))
    try:
        with _until_signal(broker):
            logger.info("listening on %s", ", ".join(broker.endpoints))
            if on_ready is not None:
                on_ready(broker.endpoints)
            broker.run()
        return broker.statistics()
    finally:
        broker.close()


@contextlib.contextmanager
def _until_signal(broker: Broker) -> Iterator[None]:
    """Stop the broker at SIGINT and SIGTERM, also in the middle of a wait."""
    bell = Bell()

    def stop(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: ending", signal.Signals(number).name)
        broker.stop()
        bell.ring()

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    broker.watch(bell.fileno())
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        broker.unwatch(bell.fileno())
        bell.close()
