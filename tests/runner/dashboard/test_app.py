"""Routes of the dashboard, and who may use them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import envbus
from envbus.bus.errors import ConfigError, TransportError
from envbus.bus.gateway.host import PIECE
from envbus.runner.dashboard.access import HEADERS
from envbus.runner.dashboard.server import DashboardServer, _Entrance
from envbus.runner.dashboard.watch import MOST_BROWSERS
from envbus.runner.monitoring.observer import Observer
from tests.bus.gateway.certificate import CERTIFICATE, PRIVATE_KEY
from tests.runner.dashboard.looks import (
    LOOPBACK,
    TOKEN,
    Answer,
    get,
    observed,
    part_of,
    running,
    serving,
)
from tests.waiting import PATIENCE, wait_until

PATHS = (
    *("/", "/events", "/details", "/stacks", "/log", "/nothing"),
    *("/static/app.js", "/static/style.css", "/static/uPlot.min.js"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[DashboardServer]:
    """A dashboard that shows a run made by hand."""
    with serving(lambda: [observed(part_of(2))]) as server:
        yield server


def cookie_of(server: DashboardServer) -> str:
    """Return the cookie of a browser that has shown the token."""
    return get(server, f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]


@contextlib.contextmanager
def looking(
    server: DashboardServer, *, room: int | None = None
) -> Iterator[http.client.HTTPResponse]:
    """A browser that looks; `room` is for how many bytes that it has not read."""
    with contextlib.closing(
        http.client.HTTPConnection(server.address, timeout=PATIENCE)
    ) as connection:
        if room is not None:
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.request("GET", "/events", headers={"Cookie": cookie_of(server)})
        with connection.getresponse() as answer:
            yield answer


def next_event(answer: http.client.HTTPResponse) -> tuple[str, object]:
    """Return name and data of a server-sent event."""
    name = answer.readline().decode().removeprefix("event: ").strip()
    data = json.loads(answer.readline().removeprefix(b"data: "))
    assert answer.readline() == b"\n"
    return name, data


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_told_without_the_token(server: DashboardServer, path: str) -> None:
    for headers in ({}, {"Cookie": "envbus=guess"}, {"Cookie": f"envbus={TOKEN}"}):
        answer = get(server, path, **headers)
        assert answer.status == 403
        assert b"envbus dashboard" in answer.body
        assert "set-cookie" not in answer.headers
    for token in ("", "guess", TOKEN[:-1]):
        assert get(server, f"{path}?token={token}").status == 403


def test_the_token_opens_the_page_only_and_its_cookie_the_rest(server: DashboardServer) -> None:
    page = get(server, f"/?token={TOKEN}")
    assert page.status == 200
    assert b"<title>envbus</title>" in page.body
    assert get(server, f"/details?token={TOKEN}").status == 403
    cookie = page.headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    own = {"Cookie": cookie.partition(";")[0]}
    assert get(server, "/", **own).status == 200
    assert (
        get(server, "/static/app.js", **own).headers["content-type"].startswith("text/javascript")
    )
    assert get(server, "/static/nothing.js", **own).status == 404
    assert get(server, "/static/..%2fapp.py", **own).status == 404
    assert get(server, "/nothing", **own).status == 404


def test_what_stands_in_quotes_in_a_cookie_is_not_undone(server: DashboardServer) -> None:
    name, _, ticket = cookie_of(server).partition("=")
    quoted = "".join(f"\\{ord(letter):03o}" for letter in ticket)
    assert get(server, "/details", Cookie=f"a=b; {name}={ticket}").status == 404
    assert get(server, "/details", Cookie=f'{name}="{quoted}"').status == 403


def test_a_name_that_was_led_to_this_host_is_refused(server: DashboardServer) -> None:
    port = server.address.rpartition(":")[2]
    cookie = cookie_of(server)
    for host in (f"evil.example:{port}", "evil.example", "", "[::1", "[", "%", "a b"):
        assert get(server, f"/?token={TOKEN}", Host=host).status == 421
        assert get(server, "/", Host=host, Cookie=cookie).status == 421
    assert get(server, "/", Host=f"localhost:{port}", Cookie=cookie).status == 200


def test_another_page_of_this_host_gets_nothing(server: DashboardServer) -> None:
    cookie = cookie_of(server)
    for site, status in (("same-site", 403), ("cross-site", 403), ("same-origin", 200)):
        assert get(server, "/", Cookie=cookie, Sec_Fetch_Site=site).status == status


def test_each_answer_says_what_the_page_may_do(server: DashboardServer) -> None:
    answers = [
        get(server, "/"),
        get(server, f"/?token={TOKEN}"),
        get(server, "/", Host="x.example"),
    ]
    for answer in answers:
        assert {name: answer.headers[name.lower()] for name in HEADERS} == HEADERS


def test_stacks_are_asked_by_post_only(server: DashboardServer) -> None:
    assert get(server, "/stacks", Cookie=cookie_of(server)).status == 405


def test_a_browser_gets_what_plots_show_and_then_frames(server: DashboardServer) -> None:
    with looking(server) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert next_event(answer)[0] == "points"
        name, frame = next_event(answer)
        assert name == "frame"
        assert isinstance(frame, dict)
        assert [row[2] for row in frame["processes"]] == ["actor-0", "actor-1"]


def details(server: DashboardServer, **query: object) -> Answer:
    """Return what is told of what was clicked."""
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    return get(server, f"/details?{asked}", Cookie=cookie_of(server))


def test_of_a_process_that_is_gone_it_is_told_why_there_is_no_log(server: DashboardServer) -> None:
    with looking(server) as answer:
        next_event(answer)
        next_event(answer)
    gone = get(server, "/log?run=7&part=BusVectorEnv-1&process=actor-1", Cookie=cookie_of(server))
    assert gone.status == 404
    assert b"process 1001 wrote" in gone.body


def test_details_are_those_of_the_last_look(server: DashboardServer) -> None:
    with looking(server) as answer:
        next_event(answer)
        next_event(answer)
    found = details(server, run=7, part="BusVectorEnv-1", process="actor-1")
    assert json.loads(found.body)["pid"] == 1001
    assert details(server, run=7, part="BusVectorEnv-1").status == 200
    for query in ({}, {"run": "x"}, {"run": 7, "part": "no"}, {"run": 8, "part": "BusVectorEnv-1"}):
        assert details(server, **query).status == 404


def test_more_browsers_than_may_look_are_told_so() -> None:
    with serving(lambda: []) as server, contextlib.ExitStack() as stack:
        for _ in range(MOST_BROWSERS):
            assert stack.enter_context(looking(server)).status == 200
        with looking(server) as answer:
            assert answer.status == 503
        stack.close()
        wait_until(lambda: status_of_one_more(server) == 200, "those that have left make room")


def test_connections_that_say_nothing_keep_nobody_out(server: DashboardServer) -> None:
    host, _, port = server.address.rpartition(":")
    cookie = cookie_of(server)
    with looking(server) as answer, contextlib.ExitStack() as stack:
        for number in range(200):
            silent = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            if number % 2:
                silent.sendall(b"GET / HTTP/1.1\r\nHost: ")
            if number % 20 == 0:
                assert get(server, "/", Cookie=cookie).status == 200
        assert get(server, "/", Cookie=cookie).status == 200
        assert [next_event(answer)[0] for _ in range(2)] == ["points", "frame"]


def test_what_connections_send_is_read_in_pieces() -> None:
    """Of nothing but TLS' changes of keys, what asyncio takes at once would keep all waiting."""
    with (
        _Entrance(socket.create_server(("127.0.0.1", 0)), ()) as entrance,
        socket.create_connection(entrance.getsockname(), PATIENCE) as client,
    ):
        found, _ = entrance.accept()
        with found:
            client.sendall(bytes(2 * PIECE))
            assert len(found.recv(2 * PIECE)) <= PIECE
            assert found.recv_into(bytearray(2 * PIECE)) <= PIECE


def test_the_cookies_of_all_that_a_host_serves_are_read(server: DashboardServer) -> None:
    cookies = "; ".join(f"other-{number}={'x' * 3000}" for number in range(10))
    assert get(server, "/details", Cookie=f"{cookies}; {cookie_of(server)}").status == 404


def status_of_one_more(server: DashboardServer) -> int:
    """Return what another browser is answered."""
    with looking(server) as answer:
        return answer.status


def test_a_browser_that_does_not_read_keeps_nobody_waiting() -> None:
    part = part_of(1000)
    with serving(lambda: [observed(part)]) as server:
        with looking(server), looking(server) as other:
            frames = [next_event(other) for _ in range(3)]
        assert [name for name, _ in frames] == ["points", "frame", "frame"]


@pytest.mark.slow
def test_a_run_is_stepped_while_a_browser_does_not_read() -> None:
    large, look = observed(part_of(10_000)), Observer(os.getpid()).look
    taken, over = 0, threading.Event()
    with envbus.make_vec("CartPole-v1", 4, num_actors=2) as envs:
        envs.reset(seed=0)

        def step() -> None:
            nonlocal taken
            while not over.is_set():
                envs.step(np.zeros(4, int))
                taken += 1

        stepping = threading.Thread(target=step)
        stepping.start()
        try:
            with (
                serving(lambda: [*look(), large]) as server,
                looking(server, room=4096),
                looking(server) as other,
            ):
                for _ in range(6):  # more than fits into what the kernel keeps of a connection
                    before = taken
                    name, frame = next_event(other)
                    assert name in ("points", "frame")
                    wait_until(lambda at=before: taken > at, "it goes on")
                assert isinstance(frame, dict)
                assert any(row[7] for row in frame["parts"] if row[0] == os.getpid())
        finally:
            over.set()
            stepping.join()


def test_stacks_and_log_of_an_actor_are_told_and_of_no_other_process() -> None:
    with (
        envbus.make_vec("CartPole-v1", 2, num_actors=1) as envs,
        serving() as server,
        looking(server) as answer,
    ):
        envs.reset(seed=0)
        next_event(answer)
        next_event(answer)
        mine = f"run={os.getpid()}&part=BusVectorEnv-"
        cookie = cookie_of(server)
        found = json.loads(
            get(server, f"/details?{mine}{number_of(server, cookie)}", Cookie=cookie).body
        )
        assert found["answers"]
        path = f"/stacks?{mine}{number_of(server, cookie)}"
        stacks = get(server, f"{path}&process=actor-0", method="POST", Cookie=cookie)
        assert b"File " in stacks.body
        assert get(server, path, method="POST", Cookie=cookie).status == 404
        path = path.replace("/stacks", "/log")
        log = get(server, f"{path}&process=actor-0", Cookie=cookie)
        assert log.headers["content-type"] == "text/plain; charset=utf-8"
        assert log.body.decode() == (
            f"process {envs.actor_pids()[0]} has written nothing to stderr"
        )
        assert get(server, path, Cookie=cookie).status == 404


def number_of(server: DashboardServer, cookie: str) -> int:
    """Return which of its class in this process the vector env is."""
    for number in range(1, 1000):
        query = f"run={os.getpid()}&part=BusVectorEnv-{number}"
        if get(server, f"/details?{query}", Cookie=cookie).status == 200:
            return number
    raise AssertionError("it is not shown")


def test_an_address_that_is_taken_or_too_wide_or_none_is_refused(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(TransportError, match="name another port"),
    ):
        DashboardServer(f"127.0.0.1:{taken.getsockname()[1]}")
    for address in ("0.0.0.0:0", "*:0", "10.1.2.3:0", "example.org:0"):
        with pytest.raises(ConfigError, match="certificate="):
            DashboardServer(address)
    with pytest.raises(ConfigError, match="not understood"):
        DashboardServer("nonsense")
    with pytest.raises(ConfigError, match="token"):
        DashboardServer(LOOPBACK, token="with blanks in it")
    with pytest.raises(ConfigError, match="TLS"):
        DashboardServer(LOOPBACK, certificate=str(tmp_path / "no"), private_key="no")


def test_whoever_says_insecure_may_serve_other_hosts() -> None:
    server = DashboardServer("0.0.0.0:0", token=TOKEN, insecure=True, look=lambda: [])
    try:
        assert server.url == f"http://{server.address}/?token={TOKEN}"
        assert server.address.startswith("127.0.0.1:")
    finally:
        server.close()


@contextlib.contextmanager
def serving_with_tls(folder: Path) -> Iterator[DashboardServer]:
    """A dashboard for other hosts, which shows nothing."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    with running(
        DashboardServer(
            "0.0.0.0:0",
            token=TOKEN,
            certificate=str(certificate),
            private_key=str(key),
            look=lambda: [],
        )
    ) as server:
        yield server


def cookie_of_tls(server: DashboardServer) -> str:
    """Return the header by which a browser gets the cookie that TLS alone carries."""
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    trusting.check_hostname = False
    with contextlib.closing(
        http.client.HTTPSConnection(server.address, timeout=PATIENCE, context=trusting)
    ) as connection:
        connection.request("GET", f"/?token={TOKEN}")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.getheader("Set-Cookie", "")


def test_with_tls_other_hosts_may_be_served_and_the_cookie_stays_within_it(tmp_path: Path) -> None:
    with serving_with_tls(tmp_path) as server:
        assert server.url.startswith("https://")
        assert cookie_of_tls(server).endswith("; Secure")


def test_of_connections_that_never_begin_tls_the_oldest_make_room(tmp_path: Path) -> None:
    with serving_with_tls(tmp_path) as server, contextlib.ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            for _ in range(200)
        ]
        silent[0].settimeout(PATIENCE / 2)  # asyncio would end it after a minute
        assert silent[0].recv(1) == b""
        assert cookie_of_tls(server)
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it may still begin
            silent[-1].recv(1)


def test_each_start_has_a_token_of_its_own() -> None:
    tokens = set()
    for _ in range(2):
        server = DashboardServer(LOOPBACK, look=lambda: [])
        server.close()
        tokens.add(server.url.partition("token=")[2])
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def test_all_runs_of_this_host_are_shown() -> None:
    server = DashboardServer(LOOPBACK, token=TOKEN)
    with envbus.make_vec("CartPole-v1", 1, num_actors=0), running(server), looking(server) as seen:
        next_event(seen)
        _, frame = next_event(seen)
        assert isinstance(frame, dict)
        assert os.getpid() in [row[0] for row in frame["parts"]]


def test_it_ends_though_browsers_look() -> None:
    with serving(lambda: []) as server, looking(server) as answer:
        next_event(answer)
        server.stop()
        while answer.readline():
            pass
