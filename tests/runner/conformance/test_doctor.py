from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.transport.curve_keys import PeerKeys, new_keys
from envbus.bus.wire.messages import Welcome
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.doctor import Diagnosis, Means, examine, find
from tests.bus.gateway.certificate import CERTIFICATE, PRIVATE_KEY
from tests.runner.conformance import serving


def steps(place: str, means: Means | None = None, timeout: float = 3.0) -> list[Diagnosis]:
    return list(examine(Address.parse(place), means or Means(), timeout))


def last(place: str, means: Means | None = None, timeout: float = 3.0) -> tuple[str, str, str]:
    """The step at which it stops, what was found, and the advice."""
    *before, step = steps(place, means, timeout)
    assert all(one.ok and not one.advice for one in before)
    assert not step.ok
    assert step.advice
    return step.name, step.found, step.advice


def test_a_bridge_that_works_passes_all_steps() -> None:
    with serving.bridge() as bridge:
        taken = steps(bridge.address)
        assert [step.name for step in taken] == [
            *("name", "connection", "transport", "handshake", "hello", "bridge", "round trip")
        ]
        assert all(step.ok for step in taken)
        assert taken == [step for step in taken if not step.advice]
        assert bridge.statistics().episodes == 0


def test_the_transport_of_a_gateway_is_found_out() -> None:
    with (
        serving.bridge() as bridge,
        serving.gateway(bridge, tcp=("127.0.0.1:0",), websocket=("127.0.0.1:0",)) as gateway,
    ):
        assert find(Address.parse(gateway.tcp[0]), Means()).transport == "stream"
        assert find(Address.parse(gateway.websocket[0]), Means()).transport == "websocket"
        for place in (*gateway.tcp, *gateway.websocket):
            assert all(step.ok for step in steps(place))


def test_a_name_without_an_address_is_where_it_stops() -> None:
    name, found, _ = last("no-such-host.invalid:5555")
    assert (name, "no-such-host.invalid has no address" in found) == ("name", True)


def test_a_port_at_which_nothing_listens_is_where_it_stops() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        name, found, advice = last(f"127.0.0.1:{silent.getsockname()[1]}")
    assert name == "connection"
    assert "nothing listens there" in found
    assert "is the bridge running" in advice


def test_a_server_that_says_nothing_is_no_bridge() -> None:
    with serving.mute() as place:
        assert last(f"tcp://{place}", timeout=0.3)[0] == "transport"
        name, found, _ = last(place, timeout=0.3)  # taken for a stream
        assert (name, "not answered" in found) == ("hello", True)


def test_another_transport_than_asked_for_is_named() -> None:
    with serving.bridge() as bridge:
        name, found, advice = last(bridge.address.replace("tcp://", "ws://"))
        assert name == "transport"
        assert "a ZeroMQ socket listens there" in found
        assert bridge.address in advice
        with serving.gateway(bridge, tcp=("127.0.0.1:0",)) as gateway:
            assert "no ZeroMQ greeting" in last(f"tcp://{gateway.tcp[0]}")[1]


def test_a_missing_or_wrong_token_is_named() -> None:
    with (
        serving.bridge() as bridge,
        serving.gateway(
            bridge, tcp=("127.0.0.1:0",), websocket=("127.0.0.1:0",), token="right"
        ) as gateway,
    ):
        for place in (f"stream://{gateway.tcp[0]}", f"ws://{gateway.websocket[0]}"):
            assert "--token-file" in last(place)[2]
            assert "token" in last(place, Means(token="wrong"))[2]
            assert all(step.ok for step in steps(place, Means(token="right")))


def test_keys_that_are_missing_or_not_allowed_are_named(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    server, _ = new_keys(tmp_path, "server"), new_keys(tmp_path / "clients", "friend")
    new_keys(tmp_path, "stranger")
    with serving.bridge(keys=tmp_path / "server.key_secret", allow=tmp_path / "clients") as bridge:
        name, found, advice = last(bridge.address)
        assert (name, "CURVE" in found, "--server-key" in advice) == ("transport", True, True)
        stranger = PeerKeys.load(tmp_path / "stranger.key_secret", tmp_path / "server.key")
        assert last(bridge.address, Means(keys=stranger))[0] == "handshake"
        friend = PeerKeys.load(tmp_path / "clients" / "friend.key_secret", tmp_path / "server.key")
        assert all(step.ok for step in steps(bridge.address, Means(keys=friend)))
    assert server


def test_keys_without_need_are_named(tmp_path: Path) -> None:
    new_keys(tmp_path, "me")
    keys = PeerKeys.load(tmp_path / "me.key_secret", tmp_path / "me.key")
    with serving.bridge() as bridge:
        assert "without keys" in last(bridge.address, Means(keys=keys))[2]
        with serving.gateway(bridge, tcp=("127.0.0.1:0",)) as gateway:
            place = Address.parse(f"stream://{gateway.tcp[0]}")
            with pytest.raises(ConfigError, match="keys belong to ZeroMQ"):
                list(examine(place, Means(keys=keys), 2.0))


def test_tls_that_one_side_only_speaks_is_named() -> None:
    with (
        serving.bridge() as bridge,
        serving.gateway(bridge, tcp=("127.0.0.1:0",)) as gateway,
    ):
        means = Means(tls=ssl.create_default_context())
        name, _, advice = last(f"streams://{gateway.tcp[0]}", means)
        assert (name, "TLS" in advice) == ("handshake", True)


def test_tls_that_was_found_out_is_spoken_before_the_token_is_shown(tmp_path: Path) -> None:
    files = {"certificate": CERTIFICATE, "private_key": PRIVATE_KEY}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths: dict[str, Any] = {name: str(tmp_path / name) for name in files}
    with (
        serving.bridge() as bridge,
        serving.gateway(
            bridge, tcp=("127.0.0.1:0",), websocket=("127.0.0.1:0",), token="right", **paths
        ) as gateway,
    ):
        trusted = ssl.create_default_context(cafile=paths["certificate"])
        for place in (*gateway.tcp, *gateway.websocket):
            name, _, advice = last(place, Means(token="right"))
            assert (name, "--ca" in advice) == ("handshake", True)
            assert all(step.ok for step in steps(place, Means(token="right", tls=trusted)))


def test_no_token_goes_to_another_host_without_tls_unless_the_address_says_so() -> None:
    with (
        serving.bridge() as bridge,
        serving.gateway(
            bridge, tcp=("0.0.0.0:0",), websocket=("0.0.0.0:0",), token="right", insecure=True
        ) as gateway,
    ):
        means = Means(token="right")
        for place, scheme in ((gateway.tcp[0], "stream"), (gateway.websocket[0], "ws")):
            name, found, advice = last(place, means)  # 0.0.0.0 is none of loopback
            assert (name, "read the token" in found) == ("transport", True)
            assert f"{scheme}s://{place}" in advice
            assert f" {scheme}://{place}" in advice
            assert all(step.ok for step in steps(f"{scheme}://{place}", means))
            local = f"127.0.0.1:{place.rpartition(':')[2]}"
            assert all(step.ok for step in steps(local, means))


def test_a_broker_without_a_bridge_is_named() -> None:
    with serving.broker() as place:
        name, found, advice = last(place)
        assert name == "bridge"
        assert "no_peer" in found
        assert "a broker without a bridge" in advice


def test_a_bridge_that_does_not_poll_is_named() -> None:
    def answer(header: object, payload: object) -> Welcome | None:
        welcomes = type(payload).__name__ == "Hello"
        return Welcome(lease=10.0, max_message_bytes=1 << 20) if welcomes else None

    with serving.liar(answer) as place:
        name, _, advice = last(place, timeout=1.0)
        assert (name, "does not poll" in advice) == ("bridge", True)


@pytest.mark.slow
def test_too_few_descriptors_are_a_finding_and_not_the_end_of_the_program() -> None:
    with serving.bridge() as bridge:
        program = f"""
import os, resource
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.doctor import Means, examine

def last():
    return list(examine(Address.parse("{bridge.address}"), Means()))[-1]

last()
lowest = os.dup(0)
allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(3, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, most))
    found = last()
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    print(found.name, found.ok, found.found)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert all("handshake False" in line and "takes 10 descr" in line for line in told[:7])
    assert len(told) == 9
