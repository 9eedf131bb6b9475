from __future__ import annotations

import re

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.transport.interface import is_local


@pytest.mark.parametrize("port", ["*", "0", "5555", "65535"])
def test_an_endpoint_has_a_port(port: str) -> None:
    assert is_local(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("port", ["", "x", "-1", "65536", "99999"])
def test_an_endpoint_without_a_port_that_there_is_is_refused(port: str) -> None:
    """ZeroMQ takes port 34463 for 99999."""
    with pytest.raises(ConfigError, match="port"):
        is_local(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("scheme", ["stream", "wss"])
def test_who_means_a_gateway_is_told_how_to_have_one(scheme: str) -> None:
    keyword = {"stream": "tcp", "wss": "websocket"}[scheme]
    advice = re.escape(f"gateway=GatewayConfig({keyword}=['h:1'])")
    with pytest.raises(ConfigError, match=advice):
        is_local(f"{scheme}://h:1")
