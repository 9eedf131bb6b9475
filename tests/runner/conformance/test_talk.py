from __future__ import annotations

from typing import Any

import pytest

from envbus.actors.external.protocol import JoinBridge
from envbus.bus.wire.codec import encode, encode_header
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Heartbeat, Kind
from envbus.runner.conformance.talk import NoAnswerError, Talk


class Chatter:
    """A connection at whose other end somebody talks without end, and answers nothing."""

    def send(self, frames: Frames) -> None:
        """Take a message."""

    def receive(self, timeout: float) -> list[Any] | None:
        """Return a notice at once."""
        header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "Heartbeat", 0.0, 0, "")
        return [encode_header(header), *encode(Heartbeat())]

    def close(self) -> None:
        """End it."""


@pytest.mark.slow
def test_who_talks_without_end_has_not_answered() -> None:
    with pytest.raises(NoAnswerError, match="JoinBridge was not answered"):
        Talk(Chatter()).ask(JoinBridge(client="me"), timeout=0.0)
