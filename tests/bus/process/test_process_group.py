from __future__ import annotations

from envbus.bus.process import process_group


def test_close_adds_less_than_three_seconds_to_its_time_out() -> None:
    assert process_group._KILL_TIMEOUT + process_group._DIRECT_KILL_TIMEOUT < 3.0
