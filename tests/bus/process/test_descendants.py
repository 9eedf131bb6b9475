from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

from envbus.bus.process.descendants import MARK_VARIABLE, kill_marked

pytestmark = pytest.mark.timeout(60)


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        env={**os.environ, MARK_VARIABLE: f"outer,{mark}"},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )


def test_who_carries_the_mark_is_killed_and_nobody_else() -> None:
    mine, others = f"envbus-{secrets.token_hex(8)}", f"envbus-{secrets.token_hex(8)}"
    with (
        sleeper(f"{mine}-000001") as first,
        sleeper(f"{mine}-000002") as second,
        sleeper(others) as third,
    ):
        for process in (first, second, third):
            assert process.stdout is not None
            process.stdout.readline()
        assert kill_marked([f"{mine}-000002".encode()], 30.0)
        assert second.wait() == -9
        assert first.poll() is None
        assert kill_marked([b"no such mark", mine.encode()], 30.0)
        assert first.wait() == -9
        assert third.poll() is None
        third.kill()


def test_without_anybody_to_kill_there_is_nothing_to_wait_for() -> None:
    assert kill_marked([secrets.token_hex(16).encode()], 0.0)
