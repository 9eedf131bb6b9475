"""Where local links are, and who may come in."""

from __future__ import annotations

import pytest

from envbus.bus.transport.local_listener import (
    INTRODUCTION,
    introduced,
    local_link_address,
    path_of,
)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:5556", b"\0envbus.link.tcp.127.0.0.1.5556"),
        ("tcp://localhost:5556", b"\0envbus.link.tcp.127.0.0.1.5556"),
        ("tcp://127.0.0.2:5556", b"\0envbus.link.tcp.127.0.0.2.5556"),
        ("tcp://[::1]:5556", b"\0envbus.link.tcp.::1.5556"),
    ],
)
def test_a_loopback_port_has_a_local_link_beside_it(endpoint: str, address: bytes) -> None:
    assert local_link_address(endpoint) == address


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5556",
        "tcp://0.0.0.0:5556",
        "tcp://10.0.0.1:5556",
        "tcp://[::]:5556",
        "tcp://host:5556",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1",
        "inproc://x",
        "ipc://@abstract",
        "stream://127.0.0.1:7000",
        "",
    ],
)
def test_what_others_may_reach_has_none(endpoint: str) -> None:
    assert local_link_address(endpoint) is None
    assert local_link_address(endpoint, (1, 2)) is None
    assert path_of(endpoint) is None


def test_a_file_is_told_by_device_and_inode_not_by_its_path() -> None:
    assert path_of("ipc:///run/bus") == "/run/bus"
    assert local_link_address("ipc:///run/bus") is None
    assert local_link_address("ipc:///run/bus", (26, 255)) == b"\0envbus.link.ipc.1a.ff"


def test_who_comes_in_says_a_word_and_a_name() -> None:
    assert introduced([INTRODUCTION, b"sim"]) == b"sim"
    assert introduced([INTRODUCTION, b"x" * 255]) == b"x" * 255


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [INTRODUCTION],
        [b"envbus link 2", b"sim"],
        [INTRODUCTION, b""],
        [INTRODUCTION, b"x" * 256],
        [INTRODUCTION, b"\0x"],
        [INTRODUCTION, b"sim", b"more"],
    ],
    ids=repr,
)
def test_others_are_nobody(frames: list[bytes]) -> None:
    assert introduced(frames) is None
