"""`serve_broker` in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envbus.bus.broker.standalone import serve_broker
from envbus.bus.errors import ConfigError, TransportError
from envbus.bus.peer.client import Client
from tests.integration.bus_programs import Name, worker
from tests.integration.group_children import PATIENCE

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import json, signal, sys
from envbus.bus.broker.standalone import serve_broker
before = signal.getsignal(signal.SIGINT)
statistics = serve_broker(sys.argv[1:], on_ready=lambda ends: print(json.dumps(ends), flush=True))
assert signal.getsignal(signal.SIGINT) is before
print(statistics.replies)
"""


@contextmanager
def running(*endpoints: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "dev", "-c", PROGRAM, *endpoints],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_ends_in_order(number: signal.Signals, tmp_path: Path) -> None:
    ipc = tmp_path / "bus"
    with running("tcp://127.0.0.1:*", f"ipc://{ipc}") as (process, endpoints):
        assert endpoints[0].startswith("tcp://127.0.0.1:")
        assert not endpoints[0].endswith("*")
        with worker("w", endpoints[0], heartbeat=1.0), Client(endpoints[1]) as client:
            assert client.ask("names", Name(), timeout=PATIENCE).result(PATIENCE).name == "w"
            process.send_signal(number)
            assert process.communicate(timeout=PATIENCE) == ("1\n", "")
            assert process.returncode == 0
    assert not ipc.exists()


def test_a_wide_bind_is_refused() -> None:
    with pytest.raises(ConfigError, match="insecure=True"):
        serve_broker("tcp://0.0.0.0:5555")
    with pytest.raises(ConfigError, match="not understood"):
        serve_broker("udp://127.0.0.1:5555")


def test_an_endpoint_in_use_is_named_and_the_handlers_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    with (
        running("tcp://127.0.0.1:*") as (_, endpoints),
        pytest.raises(TransportError, match=f"cannot bind {endpoints[0]}"),
    ):
        serve_broker(endpoints)
    assert signal.getsignal(signal.SIGINT) is before


def test_only_the_main_thread_may() -> None:
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            serve_broker("tcp://127.0.0.1:*")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(PATIENCE)
    assert "main thread" in str(errors[0])
