from __future__ import annotations

from typing import Any

import pytest

from envbus.bus.broker.events import (
    BrokerConfig,
)
from envbus.bus.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_in_flight_per_peer": 0}, "max_in_flight_per_peer"),
        ({"max_backlog": 1.5}, "max_backlog"),
        ({"max_peers": -1}, "max_peers"),
        ({"max_message_bytes": 0}, "max_message_bytes"),
        ({"liveness": 1.0}, "liveness"),
        ({"liveness": float("nan")}, "liveness"),
    ],
)
def test_unusable_limits_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        BrokerConfig(**settings)
