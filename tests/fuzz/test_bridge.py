"""The short form of the attack on a living bridge; `make fuzz` is the long one."""

from __future__ import annotations

import pytest

from tests.fuzz.bridge import attack


@pytest.mark.timeout(300)
def test_no_message_of_a_stranger_hurts_a_bridge_or_its_honest_clients() -> None:
    told, log = attack(3.0, seed=20)
    assert told["findings"] == [], log[-5000:]
    assert told["answered"] > 100
    assert told["refused"] > 100
