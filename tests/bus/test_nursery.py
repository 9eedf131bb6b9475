from __future__ import annotations

from envbus.bus import nursery


def test_close_adds_less_than_three_seconds_to_its_time_out() -> None:
    assert nursery._KILL_TIMEOUT + nursery._DIRECT_KILL_TIMEOUT < 3.0
