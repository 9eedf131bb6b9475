"""Figures as Prometheus reads them."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import envbus
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.monitoring.exporter import MetricsServer, metrics_of
from envbus.runner.monitoring.figures import PartFigures, ProcessFigures, RunFigures
from envbus.runner.monitoring.observer import ObservedRun
from envbus.runner.monitoring.registry import show, unshow
from envbus.runner.monitoring.runs import Usage
from tests.waiting import wait_until


def samples(part: PartFigures, **observed: Any) -> dict[tuple[str, str], float]:
    """Return the values of a run with this part, by name and what else its labels say."""
    run = RunFigures(pid=7, at=0.0, began=0.0, command="", version="", parts=[part])
    found = {}
    for metric in metrics_of([ObservedRun(run, 7, **observed)]):
        for sample in metric.samples:
            labels = dict(sample.labels)
            assert labels.pop("pid") == "7"
            assert labels.pop("part") == part.name
            found[sample.name, " ".join(value for value in labels.values() if value)] = sample.value
    return found


@pytest.fixture
def served() -> Iterator[tuple[envbus.BusVectorEnv, str]]:
    """Two actors, and where their figures are."""
    with (
        envbus.make_vec("CartPole-v1", 4, num_actors=2, restart=True) as envs,
        MetricsServer("127.0.0.1:0") as server,
    ):
        envs.reset(seed=0)
        yield envs, f"http://{server.address}"


def get(url: str) -> tuple[int, str]:
    """Return status and text of a page."""
    host, _, path = url.removeprefix("http://").partition("/")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=30.0)) as connection:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_counts_and_levels_have_names_with_units() -> None:
    part = PartFigures(
        name="EnvRunner-1",
        kind="EnvRunner",
        counts={"env_steps": 40.0, "faults.crash": 2.0, "steps/default_policy": 3.0},
        levels={"mean_env_wait_ms": 250.0, "version.a": 4.0},
    )
    found = samples(part)
    assert found["envbus_env_steps_total", ""] == 40.0
    assert found["envbus_faults_total", "crash"] == 2.0
    assert found["envbus_steps_total", "default_policy"] == 3.0
    assert found["envbus_mean_env_wait_seconds", ""] == 0.25
    assert found["envbus_version", "a"] == 4.0


def test_durations_are_a_histogram() -> None:
    latency = LatencyHistogram()
    for seconds in (0.0015, 0.0015, 0.3, 500.0):
        latency.add(seconds)
    part = PartFigures(name="b", kind="b", latencies={"get_action": latency.counts()})
    found = samples(part)
    assert found["envbus_latency_seconds_count", "get_action"] == 4
    assert found["envbus_latency_seconds_bucket", "get_action 0.001"] == 0
    assert found["envbus_latency_seconds_bucket", "get_action 0.002"] == 2
    assert found["envbus_latency_seconds_bucket", "get_action 0.5"] == 3
    assert found["envbus_latency_seconds_bucket", "get_action 50.0"] == 3
    assert found["envbus_latency_seconds_bucket", "get_action +Inf"] == 4
    assert found["envbus_latency_seconds_sum", "get_action"] == pytest.approx(500.303, rel=0.01)


def test_a_process_has_one_state_and_what_it_takes() -> None:
    process = ProcessFigures(name="actor-0", pid=9, state="down", incarnation=3, env_steps=5)
    part = PartFigures(name="p", kind="p", processes=[process])
    found = samples(part, usage={9: Usage(0.5, 1024)}, stalled={("p", "actor-0"): 2.0})
    states = {labels: value for (name, labels), value in found.items() if name.endswith("_state")}
    assert [labels for labels, value in states.items() if value] == ["actor-0 down"]
    assert found["envbus_process_env_steps_total", "actor-0"] == 5
    assert found["envbus_process_incarnation", "actor-0"] == 3
    assert found["envbus_process_cpu_cores", "actor-0"] == 0.5
    assert found["envbus_process_memory_bytes", "actor-0"] == 1024
    assert found["envbus_process_stalled_seconds", "actor-0"] == 2.0


def test_prometheus_reads_what_is_served(served: tuple[envbus.BusVectorEnv, str]) -> None:
    envs, url = served
    for _ in range(10):
        envs.step(np.zeros(4, int))
    status, text = get(f"{url}/metrics")
    assert status == 200
    values = {
        (sample.name, sample.labels.get("part")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [value for (name, _), value in values.items() if name == "envbus_env_steps_total"] == [
        40.0
    ]


def test_it_is_ready_when_all_processes_are(served: tuple[envbus.BusVectorEnv, str]) -> None:
    envs, url = served
    assert get(f"{url}/healthz") == (200, "ok\n")
    assert get(f"{url}/readyz") == (200, "ready\n")
    os.kill(envs.actor_pids()[0], signal.SIGKILL)
    while envs.statistics().restarts == 0:
        envs.step(np.zeros(4, int))
        if envs.statistics().actors_ready < 2:
            status, text = get(f"{url}/readyz")
            assert (status, "actor-0 is " in text) in ((503, True), (200, False))
    wait_until(lambda: envs.step(np.zeros(4, int)) and get(f"{url}/readyz")[0] == 200, "it is back")
    assert get(f"{url}/")[0] == 404


@pytest.mark.slow
def test_it_is_not_ready_before_anything_has_started() -> None:
    source = """
import urllib.error
import urllib.request

import envbus
from envbus.runner.monitoring.exporter import MetricsServer

def look(server):
    try:
        with urllib.request.urlopen(f"http://{server.address}/readyz") as answer:
            print(answer.status)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
        error.close()

with MetricsServer("127.0.0.1:0") as server:
    look(server)
    with envbus.make_vec("CartPole-v1", 1, num_actors=0):
        look(server)
"""
    run = [sys.executable, "-c", source]
    done = subprocess.run(run, check=True, timeout=60.0, capture_output=True, text=True)
    before = "503 nothing works here yet, or ENVBUS_MONITORING=0 keeps it from being shown"
    assert done.stdout.splitlines() == [before, "200"]


class Raises:
    """A part that cannot tell its figures."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def figures(self, name: str) -> PartFigures:
        raise self._error


@pytest.mark.parametrize("error", [ValueError("half closed"), RuntimeError("it has changed")])
def test_of_a_part_that_cannot_tell_its_figures_all_others_are_served(
    served: tuple[envbus.BusVectorEnv, str], error: Exception
) -> None:
    envs, url = served
    raises = Raises(error)
    show(raises, "Raises")
    try:
        envs.step(np.zeros(4, int))
        status, text = get(f"{url}/metrics")
        assert status == 200
        assert "Raises" not in text
        (steps,) = (line for line in text.splitlines() if line.startswith("envbus_env_steps_total"))
        assert steps.endswith(" 4.0")
        assert get(f"{url}/readyz") == (200, "ready\n")
        envs.step(np.zeros(4, int))
    finally:
        unshow(raises)


class BlindServer(MetricsServer):
    """Cannot look."""

    def _look(self) -> list[ObservedRun]:
        raise EnvbusError("nobody can look on this system")


def test_where_nobody_can_look_that_is_answered_and_logged_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with envbus.make_vec("CartPole-v1", 1, num_actors=0) as envs, BlindServer("127.0.0.1:0") as own:
        envs.reset(seed=0)
        for page in ("metrics", "readyz"):
            status, text = get(f"http://{own.address}/{page}")
            assert (status, "the log of this process says why" in text) == (500, True)
            assert "nobody can look" in caplog.text
            caplog.clear()
            envs.step(np.zeros(1, int))
        assert get(f"http://{own.address}/healthz") == (200, "ok\n")
    assert capfd.readouterr().err == ""  # where each line may have to be JSON


def test_a_port_that_is_taken_and_an_address_that_is_none_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="name another port"):
            MetricsServer(f"127.0.0.1:{port}")
    for address in (
        *("9090", ":9090", "[]:9090", "::1:9090"),
        *("127.0.0.1:port", "127.0.0.1:99999", "127.0.0.1:\N{SUPERSCRIPT TWO}"),
    ):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            MetricsServer(address)
    for host in ("a\0b", "é..x", "\udcff"):
        with pytest.raises(ConfigError, match="cannot be served"):
            MetricsServer(f"{host}:0")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_it_is_served_at_ipv6() -> None:
    with MetricsServer("[::1]:0") as server:
        assert server.address.startswith("[::1]:")
        assert get(f"http://{server.address}/healthz") == (200, "ok\n")


def test_clients_that_say_nothing_keep_no_other_out(
    served: tuple[envbus.BusVectorEnv, str],
) -> None:
    _, url = served
    host, _, port = url.removeprefix("http://").rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(6)]
    try:
        assert get(f"{url}/healthz")[0] == 200
    finally:
        for sock in silent:
            sock.close()


def test_clients_that_say_little_again_and_again_do_not_hold_up_its_end() -> None:
    server, ended = MetricsServer("127.0.0.1:0"), threading.Event()
    host, _, port = server.address.rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(6)]

    def drip() -> None:
        while not ended.wait(0.5):
            for sock in slow:
                with contextlib.suppress(OSError):  # it was cut off
                    sock.send(b"G")

    for sock in slow:
        sock.send(b"G")
    dripping = threading.Thread(target=drip)
    dripping.start()
    closing = threading.Thread(target=server.close, daemon=True)
    try:
        for sock in slow[:2]:  # those that were let in
            sock.settimeout(60.0)
            with contextlib.suppress(ConnectionResetError):  # it has not read all
                assert sock.recv(1) == b""
        closing.start()
        closing.join(60.0)
        assert not closing.is_alive()
    finally:
        ended.set()
        dripping.join()
        for sock in slow:
            sock.close()


def test_a_forked_copy_that_closes_it_comes_to_its_end() -> None:
    with MetricsServer("127.0.0.1:0") as server:
        copy = os.fork()
        if copy == 0:
            server.close()
            os._exit(3)
        try:
            wait_until(lambda: os.waitpid(copy, os.WNOHANG)[0] == copy, "it ends")
        except BaseException:
            os.kill(copy, signal.SIGKILL)
            raise
        assert get(f"http://{server.address}/healthz")[0] == 200
