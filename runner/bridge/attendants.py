"""What a bridge runs beside itself: its gateway, simulators, and the door by which both come in."""

from __future__ import annotations

from collections.abc import Callable

from envbus.bus.broker import Broker
from envbus.bus.gateway import Gateway, GatewayConfig
from envbus.bus.gateway.gateway import PRELOAD
from envbus.runner.bridge.hosting import Hosts
from envbus.runner.bridge.private_door import PrivateDoor
from envbus.runner.faults import FaultCause

__all__ = ["Attendants"]


class Attendants:
    """The processes and threads of one bridge. Used by its thread.

    Args:
        broker: The bridge's.
        bind: Binds a private endpoint at it.
        on_gone: As that of `Hosts`.

    Attributes:
        door: Opened for the first who needs it.
        hosts: Simulators that the bridge runs.
        gateway: What lets simulators without ZeroMQ in; None: nothing.
    """

    def __init__(
        self,
        broker: Broker,
        bind: Callable[[str], object],
        on_gone: Callable[[bytes, FaultCause, str], object],
    ) -> None:
        self._broker = broker
        self.door = PrivateDoor(bind)
        self.hosts = Hosts(self.door.open, broker.watch, on_gone)
        self.gateway: Gateway | None = None

    def open_gateway(self, config: GatewayConfig) -> None:
        """Start a gateway. Raises as `Gateway` does."""
        self.gateway = Gateway(self.door.open(PRELOAD), config)
        self._broker.watch(self.gateway.fileno())

    def look_after(self, now: float) -> None:
        """Start again what has ended, where that is to be.

        Raises:
            SimulatorError: A simulator has ended for good.
            RestartLimitError: The gateway died, or hung, too often.
        """
        self.hosts.look_after(now)
        if self.gateway is not None:
            self.gateway.check()

    def wake_at(self) -> float | None:
        """Return by when `look_after` is due, in seconds of `time.monotonic`; None: by no time."""
        restart_at = self.hosts.wake_at()
        check_at = None if self.gateway is None else self.gateway.wake_at()
        return min((at for at in (restart_at, check_at) if at is not None), default=None)

    def close(self) -> None:
        """End all of them. The door is closed by `door.close`, after the broker. Idempotent."""
        try:
            self.hosts.close()
        finally:
            if self.gateway is not None:
                self.gateway.close()
