"""The reference clients of examples/clients, each with the same checks, against a live bridge."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium.spaces import Box

from envbus.bus.wire.framing import pack_for_stream
from envbus.bus.wire.messages import Kind
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.client_conformance import Server, check_client
from tests.bus.gateway.certificate import CERTIFICATE, PRIVATE_KEY
from tests.clients.serving import ACTIONS, CLIENTS, OBSERVATIONS, PATIENCE, Serving, running

# Compilers and interpreters, which `make test` does not install. The limit is that of a machine
# that is busy with other things: the first test of a language waits for its compiler, too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHECKS = Path(__file__).parent
#: How a program is made from a source of a folder: what is called, and what to install.
TOOLS = {
    "javascript": ("node", "nodejs"),
    "cpp": ("g++", "g++"),
    "csharp": ("mcs", "mono-mcs mono-runtime"),
}


def built(language: str, source: Path, folder: Path) -> list[str]:
    """Return the command of the program that `source` is compiled to."""
    program = folder / source.stem
    library = CLIENTS / language
    match language:
        case "javascript":
            return ["node", str(source)]
        case "cpp":
            options = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{library}"]
            command = ["g++", "-pthread", *options, str(source), "-o", str(program)]
        case _:
            program = program.with_suffix(".exe")
            sources = [str(library / "Envbus.cs"), str(source)]
            command = ["mcs", "-langversion:6", "-warnaserror", f"-out:{program}", *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    # Mono's shared area would outlive it in /dev/shm if it is killed.
    mono = ["env", "MONO_DISABLE_SHARED_AREA=1", "mono"] if language == "csharp" else []
    return [*mono, str(program)]


@pytest.fixture(scope="module", params=TOOLS)
def language(request: pytest.FixtureRequest) -> str:
    tool, package = TOOLS[request.param]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (make system-packages, or apt install {package})")
    return str(request.param)


@pytest.fixture(scope="module")
def checks(language: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    (source,) = (CHECKS / language).glob("[Cc]hecks.*")
    return built(language, source, tmp_path_factory.mktemp(language))


@pytest.fixture(scope="module")
def cartpole(language: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    name = {"javascript": "cartpole_node.mjs", "cpp": "cartpole.cpp", "csharp": "CartPole.cs"}
    return built(language, CLIENTS / language / name[language], tmp_path_factory.mktemp(language))


def check(
    serving: Serving, checks: list[str], what: str, token: str = "", *more: str, **options: Any
) -> None:
    host, _, port = serving.gateway.tcp[0].rpartition(":")
    text = serving.run(*checks, "localhost" if more else host, port, what, token, *more, **options)
    assert f"passed: {what}" in text


def test_the_verbs_and_errors_of_one_agent(checks: list[str]) -> None:
    with Serving() as serving:
        check(serving, checks, "single")
        assert serving.rewards["own"] == pytest.approx(3.25)
        assert serving.ended["own"] == "terminated"
        assert serving.ended["cut"] == "truncated"
        assert serving.untrained == {"cut"}
        assert serving.off_policy["own"] == [{"agent0": 1}]
        assert serving.infos["own"] == [
            {"agent0": {"level": "é", "lives": [3, -70000, 2**40, None, True]}}
        ]
        assert set(serving.ended.values()) == {"terminated", "truncated"}


def test_several_agents_are_maps_by_agent(checks: list[str]) -> None:
    with Serving(agents=["left", "right"]) as serving:
        check(serving, checks, "agents")
        assert serving.rewards["team"] == 7.0
        assert serving.infos["team"] == [{"left": {"hit": True}}]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["death", "hang"])
def test_an_episode_survives_the_death_of_the_gateway(checks: list[str], how: int) -> None:
    with Serving(hang_timeout=0.5) as serving:

        def kill(line: str) -> None:
            if line == "ready":
                os.kill(serving.gateway.pid, how)

        check(serving, checks, "reconnect", on_line=kill)
        assert serving.rewards["survivor"] == 3.0
        assert serving.ended["survivor"] == "terminated"


def test_who_waits_is_told_that_the_bridge_was_stopped(checks: list[str]) -> None:
    with Serving() as serving:

        def stop(line: str) -> None:
            if line == "ready":
                serving.until_asked()
                serving.bridge.stop()

        check(serving, checks, "stopped", on_line=stop)


def test_who_waits_when_the_bridge_is_killed_goes_on_with_the_next_one(checks: list[str]) -> None:
    with Serving() as serving:

        def replace(line: str) -> None:
            if line == "ready":
                serving.until_asked()
                serving.replace()

        check(serving, checks, "replaced", on_line=replace)
        assert serving.ended == {"next": "terminated"}


def test_a_client_that_was_asleep_comes_back_to_its_episodes(checks: list[str]) -> None:
    with Serving() as serving:
        check(serving, checks, "pause")
        assert serving.rewards["sleeper"] == 3.0
        assert serving.ended["sleeper"] == "terminated"
        assert serving.bridge.statistics().resumed == 1


def carry(source: socket.socket, sink: socket.socket, lose: Callable[[bytes], bool]) -> None:
    """Pass messages on, until there are no more, but for those that are to be lost."""
    with source.makefile("rb") as incoming, contextlib.suppress(OSError):
        while len(head := incoming.read(4)) == 4:
            message = incoming.read(int.from_bytes(head, "big"))
            if not lose(message):
                sink.sendall(head + message)
        sink.shutdown(socket.SHUT_WR)


def nth(number: int, what: bytes) -> Callable[[bytes], bool]:
    """Return what says of one message after the other whether it is the nth that holds that."""
    found = itertools.count(1)
    return lambda message: what in message and next(found) == number


@contextlib.contextmanager
def losing(
    tcp: str, *, up: Callable[[bytes], bool], down: Callable[[bytes], bool]
) -> Iterator[int]:
    """Stand before a gateway, at a port of one's own, and lose messages each way."""

    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, _, port = tcp.rpartition(":")
        threads = []

        def let_in() -> None:
            client = stack.enter_context(door.accept()[0])
            server = stack.enter_context(socket.create_connection((host, int(port))))
            threads.append(threading.Thread(target=carry, args=(client, server, up)))
            threads[-1].start()
            carry(server, client, down)

        door.settimeout(PATIENCE)
        first = threading.Thread(target=let_in)
        first.start()
        yield door.getsockname()[1]
        for thread in (first, *threads):
            thread.join(PATIENCE)


def test_a_client_that_gave_up_says_that_it_took_no_action(
    language: str, checks: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(Serving())
        if language == "javascript":  # it is busy until its time is over, while the answer comes
            check(serving, checks, "late")
        else:
            lossy = losing(serving.gateway.tcp[0], up=nth(0, b""), down=nth(2, b"ActionChosen"))
            port = stack.enter_context(lossy)
            assert "passed" in serving.run(*checks, "127.0.0.1", str(port), "late", "")
        assert serving.unacted == ["late"]
        assert serving.rewards["late"] == 6.0


def test_over_a_call_that_was_given_up_and_never_came_no_row_leads(checks: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(Serving())
        lossy = losing(serving.gateway.tcp[0], up=nth(1, b"LogReturns"), down=nth(0, b""))
        port = stack.enter_context(lossy)
        assert "passed" in serving.run(*checks, "127.0.0.1", str(port), "lost", "")
        assert serving.unacted == ["lost"]


# The calls of the others do not come back before they are answered.
@pytest.mark.parametrize("language", ["javascript"], indirect=True, scope="module")
def test_what_is_asked_again_is_what_it_was(checks: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(Serving())
        host, _, port = serving.gateway.tcp[0].rpartition(":")
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        door.settimeout(PATIENCE)

        def cut(message: bytes) -> bool:
            if b"LogReturns" in message:
                raise ConnectionError
            return False

        def let_in() -> None:
            for up in (cut, nth(0, b"")):
                with door.accept()[0] as client, socket.create_connection((host, int(port))) as far:
                    back = threading.Thread(target=carry, args=(far, client, nth(0, b"")))
                    back.start()
                    carry(client, far, up)
                    for end in (client, far):
                        with contextlib.suppress(OSError):
                            end.shutdown(socket.SHUT_RDWR)
                    back.join(PATIENCE)

        thread = threading.Thread(target=let_in)
        thread.start()
        program = [*checks, "127.0.0.1", str(door.getsockname()[1]), "changed", ""]
        assert "passed" in serving.run(*program)
        thread.join(PATIENCE)
        assert serving.infos["changed"] == [{"agent0": {"position": [1.0]}}]
        assert serving.rewards["changed"] == 5.0


def test_pictures_go_through_and_what_is_too_large_is_told_once(checks: list[str]) -> None:
    with Serving(observations=Box(0, 255, (240, 320, 3), np.uint8)) as serving:
        check(serving, checks, "large")
        assert serving.ended == {"pictures": "terminated"}
        assert serving.bridge.statistics().resumed == 0


def test_a_token_lets_in_and_nothing_else_does(checks: list[str]) -> None:
    with Serving(token="secret") as serving:
        check(serving, checks, "refused")
        check(serving, checks, "single", "secret")


# The C++ client has none: its README says what to do instead.
@pytest.mark.parametrize("language", ["javascript", "csharp"], indirect=True, scope="module")
def test_tls_carries_the_verbs_too(checks: list[str], tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    with Serving(certificate=str(certificate), private_key=str(key), token="secret") as serving:
        trusted = {"NODE_EXTRA_CA_CERTS": str(certificate)}
        check(serving, checks, "single", "secret", "tls", environ=trusted)
        check(serving, checks, "untrusted", "secret", "tls")


def first_answer(kind: Kind, payload: object) -> bytes:
    """Return an answer to a client's first request, as a stream has it."""
    header = [1, kind, 1, "Failed", 0, 0, ""]
    return pack_for_stream([msgspec.msgpack.encode(part) for part in (header, payload)])


#: In JavaScript all objects have a toString.
FAILED = {"code": "remote", "remote_type": "toString", "message": "as told"}


@pytest.mark.parametrize(
    ("what", "sent", "is_endless"),
    [
        ("nonsense", b"\0\0\0\3\xc1\xc1\xc1", False),
        ("huge", b"\xff" * 4096, True),
        # A REPLY to a request that nobody has made; `[header, payload]`.
        ("flood", b"\0\0\0\x0f\x92\xc4\x09\x97\1\1\x7f\xa1x\0\0\xa0\xc4\1\x80" * 4096, True),
        ("failure", first_answer(Kind.FAILURE, FAILED), False),
        ("nil", first_answer(Kind.REPLY, None), False),
    ],
)
def test_whatever_a_server_sends_its_client_ends(
    checks: list[str], what: str, sent: bytes, is_endless: bool
) -> None:
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def answer() -> None:
            server = stack.enter_context(door.accept()[0])
            server.recv(4096)
            with contextlib.suppress(OSError):
                server.sendall(sent)
                while is_endless:
                    server.sendall(sent)

        door.settimeout(60)  # Mono may take long to start
        thread = threading.Thread(target=answer)
        thread.start()
        command = [*checks, "127.0.0.1", str(door.getsockname()[1]), what, ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        thread.join(PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("language", ["javascript", "csharp"], indirect=True, scope="module")
@pytest.mark.parametrize("pace", ["silent before TLS", "slow in TLS", "silent after TLS"])
def test_a_server_with_tls_that_is_silent_or_slow_holds_nobody_up(
    checks: list[str], pace: str, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def let_in() -> None:
            while True:
                try:
                    server = door.accept()[0]
                except OSError:
                    return
                with contextlib.suppress(OSError), server:
                    if pace == "silent after TLS":
                        server = context.wrap_socket(server, server_side=True)
                    elif pace == "slow in TLS":  # the beginning of a record of 16 KiB
                        for byte in b"\x16\3\3\x40\0" + bytes(2**14):
                            server.sendall(bytes([byte]))
                            if gone.wait(0.1):
                                break
                    gone.wait(PATIENCE)
                    server.close()

        thread = threading.Thread(target=let_in)
        thread.start()
        command = [*checks, "localhost", str(door.getsockname()[1]), "mute", "", "tls"]
        trusted = {**os.environ, "NODE_EXTRA_CA_CERTS": str(certificate)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, env=trusted
            )
        finally:
            gone.set()
            door.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("language", ["javascript"], indirect=True, scope="module")
def test_whatever_a_websocket_tells_does_not_end_the_program(checks: list[str]) -> None:
    subprocess.run([*checks, "nowhere", "0", "websocket", ""], timeout=60, check=True)


def test_its_messagepack_reads_what_it_writes_and_refuses_the_rest(checks: list[str]) -> None:
    subprocess.run([*checks, "nowhere", "0", "messagepack", ""], timeout=60, check=True)


def test_its_cartpole_is_played_by_the_policy(
    cartpole: list[str], where: Callable[[str], list[str]]
) -> None:
    with Serving() as serving:
        text = serving.run(*cartpole, *where(serving.gateway.tcp[0]), "4", "", "2")
        steps = [int(n) for n in re.findall(r"episode \S+: (\d+) steps", text)]
        assert len(steps) == 4
        assert min(steps) > 100
        assert sorted(serving.rewards.values()) == sorted(map(float, steps))


def test_a_simulator_that_was_there_first_waits_for_the_bridge(
    cartpole: list[str], where: Callable[[str], list[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with running(*cartpole, *where(address), "1") as process:
            nobody.settimeout(PATIENCE)
            nobody.accept()[0].close()  # so it has tried
            nobody.close()
            with Serving(tcp=(address,)) as serving:
                assert re.search(r"episode \S+: \d+ steps", serving.attend(process))


def test_it_resumes_when_its_lease_is_over_and_when_its_connection_is_cut(
    cartpole: list[str], where: Callable[[str], list[str]]
) -> None:
    """The checks of `envbus conformance --client` up to these."""
    last = "resumes when its connection was cut"
    server = Server(Address.parse("stream://127.0.0.1:0"), (OBSERVATIONS, ACTIONS))
    address = server.address.rpartition("//")[2].rstrip("/")
    with (
        contextlib.closing(check_client(lambda: server, PATIENCE)) as findings,
        running(*cartpole, *where(address), "100000"),
    ):
        told = {}
        while last not in told:
            finding = next(findings)
            told[finding.name] = (finding.outcome, finding.reason)
    assert set(told.values()) == {("passed", "")}, told
    assert "resumes when its lease is over" in told


@pytest.fixture
def where(language: str) -> Callable[[str], list[str]]:
    """How the language's CartPole is told where the bridge is."""
    if language == "javascript":
        return lambda address: [f"stream://{address}"]
    return lambda address: address.rsplit(":", 1)
