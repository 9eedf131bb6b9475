"""What errors say."""

from __future__ import annotations

from envbus.bus.errors import RemoteError


def test_a_failure_whose_exception_is_not_named_is_told_by_its_message() -> None:
    named = {"request_id": 7, "peer": "sim", "remote_traceback": ""}
    assert str(RemoteError("late", remote_type="", **named)) == "request 7 to sim: late"
    assert str(RemoteError("late", remote_type="Odd", **named)) == "request 7 to sim: Odd: late"
