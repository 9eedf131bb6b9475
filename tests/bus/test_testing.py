from __future__ import annotations

import pytest

from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import (
    PeerReady,
)
from tests.bus.testing import FakeClock, drive, hello_from


def test_a_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(10.0)
    assert [clock(), clock()] == [10.0, 10.0]
    clock.advance(0.5)
    assert clock() == 10.5
    assert repr(clock) == "FakeClock(10.5)"


def test_a_fake_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="go back"):
        FakeClock().advance(-1.0)


def test_drive_returns_the_effects_of_all_events_in_order() -> None:
    effects = drive(BrokerCore(), [hello_from(b"a"), hello_from(b"b", name="other")])
    ready = [effect for effect in effects if isinstance(effect, PeerReady)]
    assert [(effect.peer, effect.hello.name) for effect in ready] == [(b"a", "a"), (b"b", "other")]
