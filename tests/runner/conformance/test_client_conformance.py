from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.client import ClientTimeouts, ExternalEnvClient
from envbus.bus.errors import EnvbusError
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.client_conformance import Server, check_client
from envbus.runner.conformance.conformance import Finding
from tests.waiting import PATIENCE

BOX, CHOICE = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)
OBSERVATION = np.zeros(2, np.float32)
Act = Callable[[ExternalEnvClient, str], None]


def asks(client: ExternalEnvClient, episode_id: str) -> None:
    client.get_action(episode_id, OBSERVATION)


def play(address: str, stop: threading.Event, act: Act, *, patient: bool = True) -> None:
    """Run episodes in a loop, and begin another one after an error."""
    timeouts = ClientTimeouts(action=1.0, other=3.0, patience=2.0)
    with ExternalEnvClient(address, timeouts=timeouts) as client:
        while not stop.is_set():
            try:
                episode_id = client.start_episode()
                for _ in range(10):
                    act(client, episode_id)
                    client.log_returns(episode_id, 1.0)
                client.end_episode(episode_id, OBSERVATION)
            except (EnvbusError, RuntimeError):
                if not patient:
                    return


@contextmanager
def played(act: Act, **how: bool) -> Iterator[Callable[[], Server]]:
    """What opens the server, with a client that plays against it."""
    first = Server(Address.parse("tcp://127.0.0.1:0"), (BOX, CHOICE))
    address = Address.parse(first.address)
    stop = threading.Event()
    player = threading.Thread(target=play, args=(first.address, stop, act), kwargs=how)
    player.start()
    servers = [first]
    try:
        yield lambda: servers.pop() if servers else Server(address, (BOX, CHOICE))
    finally:
        stop.set()
        player.join(60)


def outcomes(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.outcome for finding in findings}


@pytest.mark.slow
def test_our_own_client_passes_every_check() -> None:
    with played(asks) as open_server:
        findings = list(check_client(open_server, PATIENCE))
    without_gateway = "resumes when its connection was cut"
    assert [one.name for one in findings if one.outcome != "passed"] == [without_gateway]
    assert len(findings) == 12


@pytest.mark.slow
def test_a_client_that_gives_up_at_the_first_error_fails_by_name() -> None:
    findings: list[Finding] = []
    with (
        played(asks, patient=False) as open_server,
        closing(check_client(open_server, patience=5.0)) as coming,
    ):
        while not findings or findings[-1].name != "bears a late action":
            findings.append(next(coming))
    told = {finding.name: finding.reason for finding in findings}
    assert outcomes(findings)["makes no mistakes"] == "passed"
    assert "after an action that came too late" in told["bears a late action"]


def test_a_client_that_acts_outside_the_space_fails_by_name() -> None:
    def wrong(client: ExternalEnvClient, episode_id: str) -> None:
        client.log_action(episode_id, OBSERVATION, 1)
        try:
            client.log_action(episode_id, OBSERVATION, 7)
        except EnvbusError:
            return

    with played(wrong) as open_server, closing(check_client(open_server, PATIENCE)) as findings:
        finding = next(one for one in findings if one.name == "makes no mistakes")
    assert (finding.outcome, "requests were refused" in finding.reason) == ("failed", True)


def test_nobody_who_comes_is_the_first_and_last_finding() -> None:
    server = Server(Address.parse("stream://127.0.0.1:0"), (BOX, CHOICE))
    assert server.address.startswith("stream://127.0.0.1:")
    (finding,) = check_client(lambda: server, patience=0.3)
    assert (finding.name, finding.outcome) == ("joins", "failed")
    assert "neither Hello nor JoinBridge" in finding.reason
