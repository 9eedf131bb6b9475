"""Where clients come in: the sockets of a bridge, their guards, and the broker behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envbus.actors.external.protocol import BRIDGE
from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import MAX_HEARTBEAT, BrokerConfig
from envbus.bus.keys import Allow, BrokerKeys, PathLike
from envbus.bus.lane_router import with_lanes
from envbus.bus.zmq_router import ZmqRouter
from envbus.runner.config import ENDPOINTS, list_of

__all__ = ["listen"]


def listen(
    bind: str | Sequence[str],
    *,
    keys: PathLike | None,
    allow: Allow | None,
    insecure: bool,
    lanes: bool,
) -> tuple[Broker, Callable[[str], object]]:
    """Return the broker, and what binds it to a private endpoint; see `ExternalEnvBridge`."""
    endpoints = [bind] if isinstance(bind, str) else list_of("bind", bind, ENDPOINTS)
    router = ZmqRouter(endpoints, keys=BrokerKeys.load(keys, allow), insecure=insecure)
    transport = with_lanes(router) if lanes and keys is None else router
    config = BrokerConfig(owner=BRIDGE, max_heartbeat=MAX_HEARTBEAT)
    return Broker(transport, BrokerCore(config)), transport.bind_private
