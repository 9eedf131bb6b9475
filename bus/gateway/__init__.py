"""A way into a broker for those without ZeroMQ: plain TCP and WebSocket.

Users import `GatewayConfig` from here, owners of a broker `Gateway` too.
"""

from envbus.bus.gateway.config import GatewayConfig
from envbus.bus.gateway.gateway import Gateway

__all__ = ["Gateway", "GatewayConfig"]
