"""`envbus serve` with simulators, all in processes of their own, some of which are killed."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from envbus.actors import (
    ClientTimeouts,
    EpisodeNotFoundError,
    ExternalEnvClient,
    SpaceMismatchError,
)
from envbus.bus.errors import OverloadedError
from envbus.bus.wire.codec import decode_header
from envbus.bus.wire.messages import Kind, Token, Welcome
from envbus.runner import ExternalEnvBridge
from envbus.runner.recordings import read_episodes
from envbus.runner.serving.loading import policy_maker
from envbus.runner.serving.server import PolicyServer
from tests.bus.gateway.bus import TcpClient, hello, message
from tests.bus.gateway.certificate import (
    CERTIFICATE,
    NEXT_CERTIFICATE,
    NEXT_PRIVATE_KEY,
    PRIVATE_KEY,
)
from tests.integration.bus_programs import free_port
from tests.integration.group_children import wait_until
from tests.integration.served_policies import FAILURE, MODEL, SPACES, WORKERS
from tests.integration.simulators import in_thread
from tests.sources import ROOT

pytestmark = pytest.mark.timeout(180)

#: Seconds; never expected to pass.
PATIENCE = 60.0
STEPS = 8


class Server:
    """`envbus serve` with the policy `echo`, or another function of that file."""

    def __init__(self, *options: str, policy: str = "echo", stdin: int | None = None) -> None:
        own = policy if policy.endswith(".onnx") else f"tests.integration.served_policies:{policy}"
        served = ("--policy", own)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envbus.runner.cli.main", "serve", *served, *options],
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addresses: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"serving at (\S+)", line)
            if found is None:
                break
            self.addresses.append(found[1])
        assert self.addresses, "the server did not start"

    def end(self, number: int = signal.SIGTERM) -> str:
        """Send a signal, and return what it said until its end."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=PATIENCE)[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


class Simulator:
    """A program that plays, and says which episodes have ended."""

    def __init__(self, address: str, name: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.served_policies"),
                *(address, name, "1000000", str(STEPS)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        #: Those whose end it was told.
        self.ended: set[str] = set()
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def line(self) -> str:
        """Wait for the end of an episode, for as long as this process itself runs."""
        for _ in range(int(PATIENCE)):
            with suppress(queue.Empty):
                return self._lines.get(timeout=1.0)
        raise AssertionError(f"no episode has ended in {PATIENCE:g} s: {self.process.poll()=}")

    def fresh_line(self) -> str:
        """Wait for the end of an episode that was not told yet."""
        with suppress(queue.Empty):
            while True:
                self._lines.get_nowait()
        return self.line()

    def kill(self) -> set[str]:
        """Return all episodes whose end it was told; those in its last words, too."""
        self.process.kill()
        self._thread.join(PATIENCE)
        return self.ended

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    self.ended.add(line.strip())
                    self._lines.put(line.strip())
        self.process.wait()


class Asking:
    """A client that asks all the time, in a thread, until the block ends; nothing may fail.

    Each of its episodes has a few steps.
    """

    def __init__(self, server: Server) -> None:
        self.actions: list[int] = []
        self._client = connect(server)
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            while not self._over.is_set():
                episode = self._client.start_episode()
                for _ in range(STEPS):
                    self.actions.append(int(self._client.get_action(episode, seen(1))))
                self._client.end_episode(episode, seen(2))
        except BaseException as exc:
            self._failed.append(exc)

    def wait_for(self, action: int) -> None:
        """Wait until the last action was this one."""
        wait_until(
            lambda: self._failed or (self.actions and self.actions[-1] == action),
            f"action {action}",
        )
        assert self._failed == []

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        self._client.close()
        assert self._failed == []


@contextmanager
def simulators(address: str, count: int) -> Iterator[list[Simulator]]:
    """Programs that play; killed at the end."""
    with ExitStack() as stack:
        programs = []
        for index in range(count):
            programs.append(Simulator(address, f"s{index}"))
            stack.callback(programs[-1].kill)
        yield programs


def recorded(folder: Path) -> dict[str, Any]:
    """Return the rows of each recorded episode by the name that its simulator gave it."""
    found = {}
    for episode in read_episodes(folder):
        rows = episode.policy_batches["default_policy"]
        found[str(rows["episode_id"][0])] = rows
    return found


def listens(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.NoSuchProcess):  # some live for a moment only
        return any(
            one.laddr.port == port and one.status == psutil.CONN_LISTEN
            for one in process.net_connections("tcp")
        )
    return False


def is_reached(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PATIENCE):
        return True
    return False


def connect(server: Server, **options: Any) -> ExternalEnvClient:
    return ExternalEnvClient(server.addresses[0], **SPACES, **options)


def figures(port: int) -> str:
    """Return what Prometheus is told."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as page:
        return str(page.read().decode())


def start_for_ever(client: ExternalEnvClient) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        client.end_episode(client.start_episode(), seen(0))


def seen(number: float) -> Any:
    return np.array([number, 0.0], np.float32)


@pytest.mark.slow
def test_killing_the_server_loses_no_episode_whose_end_was_told(tmp_path: Path) -> None:
    bind = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        server = stack.enter_context(Server("--bind", bind, "--record", str(tmp_path)))
        programs = stack.enter_context(simulators(bind, 3))
        for program in programs:
            assert program.line()
        server.process.kill()
        server.process.wait(PATIENCE)
        before = set(recorded(tmp_path))
        # The simulators come back by themselves to another server at the same address.
        stack.enter_context(Server("--bind", bind, "--record", str(tmp_path)))
        for program in programs:
            while program.line() in before:
                pass
        ended = set[str]().union(*(program.kill() for program in programs))
        found = recorded(tmp_path)
    assert len(ended) > 2 * len(programs)
    assert ended <= set(found)
    for rows in found.values():
        assert rows["actions"].tolist() == list(range(STEPS))
        assert rows["obs"][:, 0].tolist() == list(range(STEPS))
        assert rows["rewards"].tolist() == [1.0] * STEPS
        assert rows["terminateds"].tolist() == [False] * (STEPS - 1) + [True]


@pytest.mark.slow
def test_many_clients_of_which_one_is_killed(tmp_path: Path) -> None:
    options = ("--record", str(tmp_path), "--lease", "0.5")
    with Server(*options) as server:
        with simulators(server.addresses[0], 4) as programs:
            for program in programs:
                assert program.line()
            programs[0].kill()
            for program in programs[1:]:
                for _ in range(40):
                    assert program.line()
            ended = set[str]().union(*(program.kill() for program in programs))
        said = server.end()
    assert server.process.returncode == 0, said
    assert re.search(r"client s0\S* is gone", said), said
    assert ended <= set(recorded(tmp_path))


@pytest.mark.slow
def test_figures_are_served_while_simulators_play() -> None:
    port = free_port()
    with Server("--metrics", f"127.0.0.1:{port}") as server, connect(server) as client:
        client.start_episode("e")
        assert client.get_action("e", seen(3)) == 3
        told = figures(port)
    assert re.search(r"^envbus_actions_total\{.*ExternalEnvBridge-1.*\} 1.0$", told, re.MULTILINE)
    assert re.search(r"^envbus_rows_total\{.*PolicyServer-1.*\} 1.0$", told, re.MULTILINE)


def test_a_model_is_loaded_anew_ten_times_and_no_request_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    monkeypatch.setenv(MODEL, str(model))
    model.write_text("0")
    port = free_port()
    options = ("--metrics", f"127.0.0.1:{port}", "--drain-timeout", "5")
    with Server(*options, policy="from_file") as server:
        with Asking(server) as asking:
            asking.wait_for(0)
            for number in range(1, 11):
                model.write_text(str(number))
                server.process.send_signal(signal.SIGHUP)
                asking.wait_for(number)
            assert asking.actions == sorted(asking.actions)
            for failures, text in ((1, "nonsense"), (2, "5000")):  # 5000 is no action of the space
                model.write_text(text)
                server.process.send_signal(signal.SIGHUP)
                told = rf"^envbus_model_load_failures_total\{{.*\}} {failures}.0$"
                wait_until(
                    lambda told=told: re.search(told, figures(port), re.MULTILINE), "it failed"
                )
            asking.wait_for(10)
        said = server.end()
    assert server.process.returncode == 0, said
    assert "was loaded: version 10" in said
    assert said.count("was not loaded, and the one before goes on") == 2
    assert "errors: policy" not in said


@pytest.mark.slow
def test_sighup_while_a_server_starts_ends_nothing() -> None:
    with Server("--env", "CartPole-v1", "--seconds", "0", policy="demanded_early") as server:
        said = server.process.communicate(timeout=PATIENCE)[0]
    assert server.process.returncode == 0, said
    assert "0 answers" in said  # its last words, in order


@pytest.mark.slow
def test_sighup_of_a_terminal_that_is_gone_ends_the_server() -> None:
    terminal, end = os.openpty()
    with Server(stdin=end) as server, connect(server) as client:
        os.close(end)
        server.process.send_signal(signal.SIGHUP)
        client.start_episode("e")
        assert client.get_action("e", seen(3)) == 3
        client.end_episode("e", seen(4))
        os.close(terminal)
        said = server.end(signal.SIGHUP)
    assert server.process.returncode == 0, said
    assert "SIGHUP: no new episodes" in said


@pytest.mark.slow
def test_a_model_whose_file_is_replaced_is_loaded_anew(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, model = onnx.helper, tmp_path / "model.onnx"

    def write(action: int) -> None:
        graph = helper.make_graph(
            [
                helper.make_node("ReduceSum", ["obs", "axis"], ["sum"], keepdims=0),
                helper.make_node("Mul", ["sum", "zero"], ["zeros"]),
                helper.make_node("Add", ["zeros", "action"], ["float"]),
                helper.make_node("Cast", ["float"], ["actions"], to=7),
            ],
            "constant",
            [helper.make_tensor_value_info("obs", 1, ["rows", 2])],
            [helper.make_tensor_value_info("actions", 7, None)],
            [
                onnx.numpy_helper.from_array(np.array([1]), "axis"),
                onnx.numpy_helper.from_array(np.float32(0.0), "zero"),
                onnx.numpy_helper.from_array(np.float32(action), "action"),
            ],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(made, tmp_path / "new")
        (tmp_path / "new").replace(model)

    write(0)
    with Server("--reload", policy=str(model)) as server, Asking(server) as asking:
        asking.wait_for(0)
        for number in range(1, 11):
            write(number)
            asking.wait_for(number)
        model.write_bytes(b"nonsense")
        asked = len(asking.actions)
        wait_until(lambda: len(asking.actions) > asked + 500, "it goes on")
        asking.wait_for(10)


@pytest.mark.slow
def test_a_share_of_the_episodes_is_answered_by_a_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, port = tmp_path / "model", free_port()
    monkeypatch.setenv(MODEL, str(model))
    model.write_text("77")
    canary = "tests.integration.served_policies:from_file"
    options = ("--canary", f"{canary}=0.5", "--metrics", f"127.0.0.1:{port}")
    chosen: dict[str, set[int]] = {}
    with Server(*options) as server, connect(server) as client:
        for number in range(40):
            episode = client.start_episode(f"e{number}")
            for step in (1, 2):
                action = int(client.get_action(episode, seen(step)))
                chosen.setdefault(episode, set()).add(action)
            client.end_episode(episode, seen(0))
        told = figures(port)
        said = server.end()
    of_canary = [episode for episode, actions in chosen.items() if actions == {77}]
    assert 8 < len(of_canary) < 32
    assert all(actions == {1, 2} for i, actions in chosen.items() if i not in of_canary)
    answers = rf'^envbus_answers_total\{{of="{canary}".*\}} {2 * len(of_canary)}.0$'
    assert re.search(answers, told, re.MULTILINE), told
    assert re.search(rf"model {canary} +{2 * len(of_canary)} answers", said), said


@pytest.mark.slow
def test_who_asks_too_often_is_refused_and_can_come_again() -> None:
    with Server("--max-rate", "2") as server, connect(server) as client:
        client.start_episode("e")
        refusals, answered = [], 0
        while answered < 4:
            try:
                assert client.get_action("e", seen(answered)) == answered
                answered += 1
            except OverloadedError as exc:
                refusals.append(str(exc))
        client.end_episode("e", seen(answered))
        said = server.end()
    assert refusals
    assert re.search(r"more than 2 actions per second.*ask again in 0\.\d\d\d s", refusals[0])
    assert re.search(rf"refused for --max-rate +{len(refusals):,} ", said), said


@pytest.mark.slow
def test_workers_that_die_or_get_another_model_lose_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = tmp_path / "model", tmp_path / "workers"
    folder.mkdir()
    monkeypatch.setenv(MODEL, str(model))
    monkeypatch.setenv(WORKERS, str(folder))
    model.write_text("1")

    def pids() -> set[int]:
        return {int(file.name) for file in folder.iterdir()}

    with Server("--workers", "2", "--drain-timeout", "5", policy="noted") as server:
        with Asking(server) as asking:
            asking.wait_for(1)
            first = pids()
            assert len(first) == 2
            psutil.Process(min(first)).kill()
            wait_until(lambda: len(pids()) == 3, "it is replaced")
            asking.wait_for(1)
            before = pids()
            model.write_text("2")
            server.process.send_signal(signal.SIGHUP)
            asking.wait_for(2)
            wait_until(lambda: not any(map(psutil.pid_exists, before)), "the former ones end")
            assert len(pids() - before) == 2
        said = server.end()
    assert server.process.returncode == 0, said
    assert "errors: policy" not in said
    wait_until(lambda: not any(map(psutil.pid_exists, pids())), "all end with the server")


def audited(file: Path) -> list[tuple[Any, ...]]:
    told = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    names = ("verb", "episode", "version", "error")
    return [tuple(line.get(name, "") for name in names) for line in told]


@pytest.mark.slow
def test_the_audit_log_says_who_asked_what_and_can_be_rotated(tmp_path: Path) -> None:
    log, moved = tmp_path / "log", tmp_path / "log.1"
    with Server("--audit", str(log), "--drain-timeout", "0.1") as server:
        with ExternalEnvClient(server.addresses[0], name="sim", **SPACES) as client:
            client.start_episode("e")
            client.get_action("e", seen(3))
            client.log_returns("e", 1.0)
            with pytest.raises(ArithmeticError):
                client.get_action("e", seen(FAILURE))
            with pytest.raises(EpisodeNotFoundError):
                client.get_action("f", seen(3))
            log.rename(moved)
            server.process.send_signal(signal.SIGHUP)
            wait_until(log.exists, "the next log")
            client.end_episode("e", seen(4))
        said = server.end()
    assert audited(moved) == [
        ("join_bridge", "", "", ""),
        ("start_episode", "e", "", ""),
        ("get_action", "e", 0, ""),
        ("log_returns", "e", "", ""),
        ("get_action", "e", "", "ArithmeticError"),
        ("get_action", "f", "", "EpisodeNotFound"),
    ]
    assert audited(log) == [("end_episode", "e", "", "")]
    assert json.loads(moved.read_text("utf-8").splitlines()[0])["client"] == "sim"
    assert server.process.returncode == 0, said


def is_let_in(address: str, token: str) -> bool:
    """Say hello at a gateway with a token, and go."""
    with TcpClient(address.removeprefix("stream://")) as client:
        client.send(message(Token(token=token), Kind.NOTICE), hello("sim"))
        return decode_header(client.receive()[0]).payload_type == Welcome.__name__


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [True, False], ids=["SIGHUP", "change"])
def test_tokens_are_read_again_and_who_is_connected_stays(tmp_path: Path, signalled: bool) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:first\nbob:second\n")
    tokens.chmod(0o600)
    options = ("--tcp", "127.0.0.1:0", "--token-file", str(tokens), "--drain-timeout", "0.1")
    with Server(*options) as server, connect(server) as client:
        client.start_episode("e")
        address = server.addresses[1]
        assert is_let_in(address, "second")
        assert not is_let_in(address, "third")
        tokens.write_text("alice:first\nalice:third\n")  # is none, and changes nothing
        server.process.send_signal(signal.SIGHUP)
        assert is_let_in(address, "second")
        tokens.write_text("alice:first\nbob:third\n")
        if signalled:
            server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: is_let_in(address, "third"), "the next token counts")
        assert not is_let_in(address, "second")
        tokens.unlink()
        os.mkfifo(tokens, 0o600)  # its end would be waited for
        server.process.send_signal(signal.SIGHUP)
        assert is_let_in(address, "third")
        assert client.get_action("e", seen(3)) == 3
        said = server.end()
    assert "tokens: looked at again" in said
    assert "there is no file" in said
    assert "third" not in said


def shown_certificate(address: str) -> str:
    host, port = address.removeprefix("streams://").split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE)


def says_hello(client: TcpClient) -> bool:
    """Say hello, also once more: who knows the client answers the same."""
    client.send(hello("sim"))
    return decode_header(client.receive()[0]).payload_type == Welcome.__name__


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [True, False], ids=["SIGHUP", "change"])
def test_a_certificate_is_read_again_and_who_is_connected_stays(
    tmp_path: Path, signalled: bool
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with Server("--tcp", "127.0.0.1:0", *tls, "--drain-timeout", "0.1") as server:
        address = server.addresses[1]
        trusting = ssl.create_default_context(cadata=CERTIFICATE)
        with TcpClient(address.removeprefix("streams://"), trusting) as client:
            assert says_hello(client)
            certificate.write_text(NEXT_CERTIFICATE)  # its key is missing yet
            if signalled:
                server.process.send_signal(signal.SIGHUP)
            assert server.process.stdout is not None
            while "certificate: not loaded anew" not in (line := server.process.stdout.readline()):
                assert line, "the server has ended"
            assert shown_certificate(address) == CERTIFICATE
            key.write_text(NEXT_PRIVATE_KEY)
            if signalled:
                server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: shown_certificate(address) == NEXT_CERTIFICATE, "the next one")
            assert says_hello(client)
        said = server.end()
    assert server.process.returncode == 0, said
    assert "certificate: looked at again" in said
    assert "PRIVATE KEY" not in said


@pytest.mark.slow
def test_killing_the_gateway_interrupts_nobody_for_long(tmp_path: Path) -> None:
    places = ("--tcp", "127.0.0.1:0", "--ws", "127.0.0.1:0")
    options = (*places, "--record", str(tmp_path), "--drain-timeout", "0.1")
    with Server(*options) as server:
        _, stream, websocket = server.addresses
        assert (stream[:9], websocket[:5]) == ("stream://", "ws://")
        with simulators(server.addresses[0], 1) as (program,):
            assert program.line()
            port = int(stream.rpartition(":")[2])
            gateway = next(
                child
                for child in psutil.Process(server.process.pid).children(recursive=True)
                if listens(child, port)
            )
            gateway.kill()
            gateway.wait(PATIENCE)
            for _ in range(5):
                assert program.fresh_line()
            wait_until(lambda: is_reached(port), "the next gateway")
        said = server.end()
    assert server.process.returncode == 0, said
    assert "the gateway's process ended" in said


@pytest.mark.slow
def test_sigterm_lets_running_episodes_end_and_none_begin(tmp_path: Path) -> None:
    options = ("--record", str(tmp_path), "--drain-timeout", "60")
    with Server(*options) as server, connect(server) as client:
        client.start_episode("e")
        assert client.get_action("e", seen(3)) == 3
        server.process.terminate()
        refused = ClientTimeouts(patience=0.5)
        with (
            ExternalEnvClient(server.addresses[0], timeouts=refused) as other,
            pytest.raises(OverloadedError, match="no more episodes"),
        ):
            start_for_ever(other)
        assert client.get_action("e", seen(4)) == 4
        client.end_episode("e", seen(5))
        said = server.process.communicate(timeout=PATIENCE)[0]
    assert server.process.returncode == 0, said
    assert "SIGTERM: no new episodes" in said
    assert list(recorded(tmp_path)) == ["e"]
    assert list((tmp_path / "default_policy").glob("*.parquet")), "the shard is complete"


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True], ids=["drain time-out", "second Ctrl-C"])
def test_an_episode_that_does_not_end_holds_nobody_up(second: bool) -> None:
    drain_timeout = "30" if second else "0.3"
    with Server("--drain-timeout", drain_timeout) as server, connect(server) as client:
        client.start_episode("e")
        client.get_action("e", seen(3))
        server.process.send_signal(signal.SIGINT)
        if second:
            assert server.process.stdout is not None
            while "SIGINT" not in server.process.stdout.readline():
                pass
            server.process.send_signal(signal.SIGINT)
        said = server.process.communicate(timeout=PATIENCE)[0]
    assert server.process.returncode == (130 if second else 0), said
    assert second or "1 episodes have not ended within 0.3 s" in said


@pytest.mark.slow
def test_a_policy_that_raises_is_told_to_its_client_and_the_server_lives() -> None:
    with Server("--drain-timeout", "0.1") as server, connect(server) as client:
        client.start_episode("e")
        with pytest.raises(ArithmeticError, match="the policy fails, as told") as caught:
            client.get_action("e", seen(FAILURE))
        assert ".py" not in str(caught.value.__cause__)  # that stands in the server's log
        assert client.get_action("e", seen(1)) == 1
        said = server.end(signal.SIGINT)
    assert "ArithmeticError" in said
    assert "served_policies.py" in said
    assert re.search(r"errors: policy +1", said), said


@pytest.mark.slow
def test_off_policy_and_untrained_episodes_are_recorded_too(tmp_path: Path) -> None:
    with Server("--record", str(tmp_path)) as server, connect(server) as client:
        client.start_episode("e", training_enabled=False)
        client.log_action("e", seen(1), 7)
        client.log_returns("e", 2.0)
        assert client.get_action("e", seen(2)) == 2
        client.end_episode("e", seen(3), truncated=True)
        rows = recorded(tmp_path)["e"]
    assert rows["actions"].tolist() == [7, 2]
    assert rows["off_policy"].tolist() == [True, False]
    assert rows["training_enabled"].tolist() == [False, False]
    assert rows["truncateds"].tolist() == [False, True]


@pytest.mark.slow
def test_several_agents_are_served_and_recorded(tmp_path: Path) -> None:
    by_agent: dict[str, Any] = {name: dict.fromkeys("xy", space) for name, space in SPACES.items()}
    with (
        Server("--record", str(tmp_path)) as server,
        ExternalEnvClient(server.addresses[0], **by_agent) as client,
    ):
        client.start_episode("e")
        assert client.get_action("e", {"x": seen(1), "y": seen(2)}) == {"x": 1, "y": 2}
        client.log_returns("e", {"x": 1.0}, terminateds={"x": True})
        assert client.get_action("e", {"y": seen(4)}) == {"y": 4}
        client.end_episode("e", {"y": seen(5)})
        rows = recorded(tmp_path)["e"]
    assert sorted(zip(rows["agent_id"].tolist(), rows["actions"].tolist(), strict=True)) == [
        ("x", 1),
        ("y", 2),
        ("y", 4),
    ]


@pytest.mark.slow
def test_a_client_whose_spaces_the_policy_cannot_use_is_refused_and_the_server_goes_on() -> None:
    """Nobody has told the spaces: whoever is first does, and not for good."""
    other = {
        "observation_space": SPACES["observation_space"],
        "action_space": spaces.Box(-1.0, 1.0, (1,)),
    }
    with Server("--lease", "0.2", policy="picky") as server:
        with pytest.raises(SpaceMismatchError, match=r"cannot be used here.*Discrete actions only"):
            ExternalEnvClient(server.addresses[0], **other)
        with connect(server) as client:
            assert client.policy_ids == ["default_policy"]
            client.start_episode("e")
            assert client.get_action("e", seen(4)) == 4
            client.end_episode("e", seen(5))
            with pytest.raises(SpaceMismatchError, match="the bridge has the action space"):
                ExternalEnvClient(server.addresses[0], **other)
        few = {**SPACES, "action_space": spaces.Discrete(2)}
        by_agent: dict[str, Any] = {
            name: {"x": space, 1: few[name], "1": space, "y": few[name]}
            for name, space in SPACES.items()
        }
        deadline = time.monotonic() + PATIENCE
        while True:  # the one before is a client until its goodbye was taken, and its lease is over
            try:
                with ExternalEnvClient(server.addresses[0], **by_agent) as client:
                    assert client.policy_ids == ["x", "1"]
                break
            except SpaceMismatchError:
                assert time.monotonic() < deadline
        assert server.process.poll() is None


def test_large_actions_are_chosen_few_at_a_time() -> None:
    space = spaces.MultiBinary(2**21)

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        assert client.get_action(episode, seen(1), timeout=PATIENCE).shape == space.shape
        client.end_episode(episode, seen(2))

    def play_all() -> None:
        with ExternalEnvClient(bridge.address) as client, ThreadPoolExecutor(20) as threads:
            for played in [threads.submit(play, client) for _ in range(20)]:
                played.result()

    bind = "tcp://127.0.0.1:*"
    with ExternalEnvBridge(SPACES["observation_space"], space, bind=bind) as bridge:
        server = PolicyServer(bridge, policy_maker("zero"))
        with in_thread(play_all) as playing:
            while playing.thread.is_alive():
                server.serve(0.05)
        counts = server.snapshot()
    assert counts.rows == 20
    assert counts.largest_batch <= 8
