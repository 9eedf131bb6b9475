from __future__ import annotations

import itertools
from typing import Any

from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import BrokerConfig


class Flood:
    """A transport by which nonsense comes without end; each look at its clock takes a while."""

    def __init__(self) -> None:
        self.taken = 0
        self._ticks = itertools.count()

    def clock(self) -> float:
        return next(self._ticks) * 1e-4

    def receive(self) -> tuple[bytes, list[bytes]]:
        self.taken += 1
        return b"peer", [b"nonsense"]

    def send(self, peer: bytes, frames: Any) -> None:
        assert peer == b"peer"
        assert frames

    def wait(self, timeout: float) -> bool:
        assert timeout >= 0
        return True


def test_a_flood_does_not_keep_the_owner_from_its_turn() -> None:
    flood: Any = Flood()
    broker = Broker(flood, BrokerCore(BrokerConfig()), flood.clock)
    begun = flood.clock()
    assert broker.poll(0.0) == []
    assert flood.clock() - begun < 1.0
    assert 1000 <= flood.taken < 5000
