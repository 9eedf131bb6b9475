"""Messages of clients that this program has no answer to."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.protocol import (
    ActionChosen,
    BridgeJoined,
    EpisodeStarted,
    GetAction,
    GetModel,
    JoinBridge,
    Model,
    StartEpisode,
)
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.loop import Broker
from envbus.bus.wire.codec import decode, decode_header, encode, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Payload,
)
from envbus.runner.bridge.dispatcher import EpisodeDispatcher
from envbus.runner.bridge.episodes import Episodes
from envbus.runner.bridge.models import Models
from envbus.runner.bridge.vocabulary import Chosen, EpisodeLimits
from envbus.runner.pool.agent_results import DUMMY_AGENT
from tests.bus.memory_transport import MemoryNetwork, MemoryPeer


class FragileModels(Models):
    """Has a defect that some requests reach."""

    def answer(self, request: GetModel) -> Model:
        raise RecursionError("a defect\nof the bridge")


def send(peer: MemoryPeer, request_id: int, payload: Payload) -> None:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, request_id, type(payload).__name__, 60.0)
    peer.send([encode_header(header), *encode(payload)])


def receive(peer: MemoryPeer, payload_type: Any) -> tuple[int, Any]:
    frames = peer.receive(0.0)
    assert frames is not None
    header = decode_header(frames[0])
    assert header.payload_type == payload_type.__name__
    return header.request_id, decode(payload_type, frames[1:])


class SlowModels(Models):
    """Takes a second for each request."""

    now = 0.0

    def answer(self, request: GetModel) -> Model:
        self.now += 1.0
        return Model(policy_id=request.policy_id, version=0)


def dispatcher_of(network: MemoryNetwork, models: Models) -> EpisodeDispatcher:
    return EpisodeDispatcher(
        Broker(network.router(), BrokerCore()),
        Episodes(EpisodeLimits(), lambda: "secret", is_stale=lambda *_: False, confirm_ends=False),
        models,
        Agreement.of(spaces.Discrete(2), spaces.Discrete(2)),
        30.0,
    )


def test_requests_that_take_long_are_done_one_by_one_between_which_the_owner_has_its_turn() -> None:
    network = MemoryNetwork()
    models = SlowModels()
    dispatcher = dispatcher_of(network, models)
    dispatcher._clock = lambda: models.now
    evil, honest = network.peer(b"evil"), network.peer(b"honest")
    send(evil, 1, Hello(name="evil"))
    for number in range(2, 6):
        send(evil, number, GetModel(policy_id="p"))
    send(honest, 1, Hello(name="honest"))
    send(honest, 2, JoinBridge(client="honest"))
    dispatcher.serve(0.0)
    evil.receive(0.0)
    for number in range(2, 6):
        assert receive(evil, Model)[0] == number
        assert evil.receive(0.0) is None
        dispatcher.serve(0.0)
    honest.receive(0.0)
    assert receive(honest, BridgeJoined)[0] == 2


def test_an_owner_that_was_away_takes_no_more_at_one_go_than_any_other() -> None:
    """What it took and has not done yet comes before what others ask by then."""
    network = MemoryNetwork()
    models = SlowModels()
    dispatcher = dispatcher_of(network, models)
    dispatcher._clock = lambda: models.now
    dispatcher.serve(0.0)
    evil = network.peer(b"evil")
    send(evil, 1, Hello(name="evil"))
    for number in range(2, 600):
        send(evil, number, GetModel(policy_id="p"))
    models.now += 100.0
    dispatcher.serve(0.0)
    assert 0 < len(dispatcher._waiting) < 64
    assert dispatcher.has_more


def test_what_a_request_makes_the_bridge_raise_is_its_senders_trouble_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    dispatcher = dispatcher_of(network, FragileModels())
    dispatcher._clock = lambda: 0.0  # all in one turn, however slow the machine is
    evil, honest = network.peer(b"evil"), network.peer(b"honest")
    send(evil, 1, Hello(name="evil"))
    for number in range(2, 30):
        send(evil, number, GetModel(policy_id="p"))
    send(honest, 1, Hello(name="honest"))
    send(honest, 2, JoinBridge(client="honest"))
    dispatcher.serve(0.0)
    evil.receive(0.0)
    for number in range(2, 30):
        request_id, failed = receive(evil, Failed)
        assert (request_id, failed.code) == (number, FailureCode.REMOTE)
        assert failed.remote_type == "RecursionError"
        assert "a defect" in failed.message
    honest.receive(0.0)
    assert receive(honest, BridgeJoined)[0] == 2
    assert dispatcher.complaints.counts["request"] == 28
    assert len(caplog.messages) < 5
    assert not any("\n" in message for message in caplog.messages)


def test_actions_for_which_there_was_no_room_come_when_there_is() -> None:
    network = MemoryNetwork(queue_size=4)
    dispatcher = dispatcher_of(network, Models())
    now = 0.0
    dispatcher._clock = lambda: now
    client = network.peer(b"client")
    send(client, 1, Hello(name="client"))
    send(client, 2, JoinBridge(client="client"))
    dispatcher.serve(0.0)
    client.receive(0.0)
    receive(client, BridgeJoined)
    names = [f"e{number}" for number in range(20)]
    for number, name in enumerate(names):
        send(client, 10 + number, StartEpisode(episode_id=name))
        dispatcher.serve(0.0)
        receive(client, EpisodeStarted)
        send(client, 100 + number, GetAction(episode_id=name, observation=0))
        dispatcher.serve(0.0)
    assert set(dispatcher.collect().observations) == set(names)
    dispatcher.handle_all([Chosen(name, {DUMMY_AGENT: 1}) for name in names])
    answered: list[int] = []
    for _ in range(10):
        while client.inbox:
            answered.append(receive(client, ActionChosen)[0])
        now += 0.1
        dispatcher.serve(0.0)
        dispatcher._episodes.check_invariants()
    assert sorted(answered) == [100 + number for number in range(20)]
    assert dispatcher._episodes.wake_at() is None
