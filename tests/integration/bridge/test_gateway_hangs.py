"""A gateway's process that stops without dying, with clients in the middle of episodes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from envbus.actors.external.protocol import (
    BridgeJoined,
    EndEpisode,
    GetAction,
    JoinBridge,
    LogReturns,
    StartEpisode,
)
from envbus.bus.gateway import GatewayConfig
from envbus.runner import ExternalEnvBridge
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.talk import LinkEndedError, Talk, open_link
from tests.integration.group_children import PATIENCE
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(60)

LOCAL = ("127.0.0.1:0",)


def joined(address: str, name: str, resume: str = "") -> tuple[Talk, BridgeJoined]:
    """Connect as a client in any language does."""
    talk = Talk(open_link(Address.parse(address)), PATIENCE)
    talk.say_hello(name)
    return talk, talk.ask(JoinBridge(client=name, plain=True, resume=resume))


def stop(bridge: ExternalEnvBridge) -> None:
    assert bridge.gateway is not None
    os.kill(bridge.gateway.pid, signal.SIGSTOP)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("transport", ["stream", "ws"])
def test_clients_of_a_gateway_that_hangs_resume_their_episodes_at_the_next_one(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = GatewayConfig(tcp=LOCAL, websocket=LOCAL, hang_timeout=1.0)
    with ExternalEnvBridge(OBSERVATION, ACTION, gateway=config) as bridge:
        (address,) = [one for one in bridge.addresses if one.startswith(f"{transport}:")]
        places, session = bridge.addresses, ""

        def play() -> None:
            nonlocal session
            talk, welcome = joined(address, "before")
            session = welcome.session
            talk.ask(StartEpisode(episode_id="e"))
            assert talk.ask(GetAction(episode_id="e", observation=[1, 0])).action == 1
            talk.ask(LogReturns(episode_id="e", reward=5.0))
            stop(bridge)
            with pytest.raises(LinkEndedError):  # by the kill: a hung one answers nobody
                talk.ask(GetAction(episode_id="e", observation=[2, 0]))
            talk.link.close()
            talk, welcome = joined(address, "after", session)
            assert welcome.episodes == ["e"]
            assert talk.ask(GetAction(episode_id="e", observation=[2, 0])).action == 2
            talk.ask(EndEpisode(episode_id="e", observation=[9, 0]))
            talk.close()

        runner = Runner(bridge)
        with in_thread(play) as client:
            runner.serve(client.over)
        runner.serve(lambda: runner.ended)
        assert runner.rows("e") == [(1.0, 0.0), (2.0, 5.0), (9.0, 0.0)]
        assert runner.faults == []
        assert bridge.gateway is not None
        assert bridge.gateway.restarts == 1
        assert bridge.addresses == places
    assert "the gateway's process hangs and is killed" in caplog.text


def test_a_gateway_that_hangs_while_its_owner_trains_is_found_when_that_is_back() -> None:
    config = GatewayConfig(tcp=LOCAL, hang_timeout=1.0)
    with ExternalEnvBridge(OBSERVATION, ACTION, gateway=config) as bridge:
        assert bridge.gateway is not None
        first = bridge.gateway.pid
        stop(bridge)
        pass_time(1.5)  # nobody polls
        os.kill(first, signal.SIGCONT)
        bridge.poll(1.5)
        assert bridge.gateway.restarts == 0, "it was not judged for the time that nobody looked"
        stop(bridge)
        deadline = time.monotonic() + PATIENCE
        while not bridge.gateway.restarts:
            assert time.monotonic() < deadline
            bridge.poll(0.1)
        assert bridge.gateway.pid != first
