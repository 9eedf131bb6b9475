from __future__ import annotations

import itertools
from typing import Any

import pytest

from envbus.actors.protocol import MapBlocks, Mapped
from envbus.bus.broker.events import Complete, FailLocal
from envbus.bus.errors import ClosedError, NoPeerError
from envbus.bus.peer.worker import PlainCodec
from envbus.bus.wire.messages import Failed, FailureCode, Header, Kind, Tree
from envbus.runner.workers.worker import Actor, Lost, Replied
from envbus.runner.workers.worker_group import Requests

REQUEST = MapBlocks(observation_space=Tree(0), action_space=Tree(0), num_envs=1, first_row=0)


class Connections:
    """Of one actor; is its own broker."""

    def __init__(self) -> None:
        self.broker = self
        self.is_there = True
        self.ended: list[Actor] = []
        self.killed: list[Actor] = []
        self.cancelled: list[int] = []
        self._ids = itertools.count(1)

    def ask(self, to: bytes, name: str, frames: Any, *, timeout: float) -> int:
        assert timeout > 0
        if not self.is_there:
            raise NoPeerError("no such peer", request_id=0, peer="actor-0")
        return next(self._ids)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def kill(self, actor: Actor, *, reason: str) -> None:
        self.killed.append(actor)

    def end(self, actor: Actor) -> None:
        self.ended.append(actor)


def scene() -> tuple[Connections, Any, Actor]:
    connections: Any = Connections()
    actor = Actor(0, ["source"], 0, remote=False, shared=True)
    actor.codec = PlainCodec(writable=True)
    return connections, Requests(connections), actor


def reply(request_id: int) -> Complete:
    header = Header(version=1, kind=Kind.REPLY, request_id=request_id, payload_type="Mapped")
    return Complete(request_id, header, PlainCodec(writable=True).encode(Mapped()))


def failure(request_id: int, code: FailureCode) -> FailLocal:
    return FailLocal(request_id, Failed(code=code, message="why"))


def test_a_request_ends_once_with_the_tag_of_who_asked() -> None:
    _, requests, actor = scene()
    request_id = requests.ask(actor, REQUEST, timeout=None, tag="mine")
    assert len(requests) == 1
    assert requests.on_reply(reply(request_id)) == Replied(actor, "mine", Mapped())
    assert requests.on_reply(reply(request_id)) is None
    assert requests.on_failure(failure(request_id, FailureCode.TIMEOUT)) is None
    assert len(requests) == 0


def test_an_actor_is_behind_until_a_later_request_is_answered() -> None:
    connections, requests, actor = scene()
    first, second, third = (requests.ask(actor, REQUEST, timeout=1.0, tag=i) for i in range(3))
    requests.cancel(second)
    assert connections.cancelled == [second]
    assert actor.is_behind
    requests.on_reply(reply(first))
    assert actor.is_behind
    requests.on_reply(reply(third))
    assert not actor.is_behind
    late = requests.ask(actor, REQUEST, timeout=1.0, tag="late")
    lost = requests.on_failure(failure(late, FailureCode.TIMEOUT))
    assert lost is not None
    assert lost.tag == "late"
    assert actor.is_behind
    assert not connections.ended


def test_an_actor_that_cannot_be_asked_or_is_lost_is_ended() -> None:
    connections, requests, actor = scene()
    request_id = requests.ask(actor, REQUEST, timeout=1.0, tag=0)
    assert requests.on_failure(failure(request_id, FailureCode.PEER_LOST)) is not None
    assert connections.ended == [actor]
    connections.is_there = False
    with pytest.raises(NoPeerError):
        requests.ask(actor, REQUEST, timeout=1.0, tag=0)
    assert connections.ended == [actor, actor]
    assert len(requests) == 0


def test_an_actor_whose_pipe_has_hung_up_is_no_peer() -> None:
    class HungUp(PlainCodec):
        def encode(self, payload: Any) -> Any:
            raise ClosedError("the other side of the pipe is gone")

        def decode(self, payload_type: Any, frames: Any) -> Any:
            raise ClosedError("the other side of the pipe is gone")

    connections, requests, actor = scene()
    request_id = requests.ask(actor, REQUEST, timeout=1.0, tag=0)
    actor.codec = HungUp()
    lost = requests.on_reply(reply(request_id))
    assert isinstance(lost, Lost)
    assert lost.failed.code is FailureCode.PEER_LOST
    with pytest.raises(NoPeerError):
        requests.ask(actor, REQUEST, timeout=1.0, tag=0)
    assert connections.ended == [actor, actor]


def test_who_answers_what_cannot_be_read_is_let_go_where_replies_are_checked() -> None:
    connections, requests, actor = scene()
    actor.check = lambda request, reply: f"{type(reply).__name__} to {type(request).__name__}"
    request_id = requests.ask(actor, REQUEST, timeout=1.0, tag="mine")
    lost = requests.on_reply(Complete(request_id, reply(request_id).header, [b"\xc1"]))
    assert isinstance(lost, Lost)
    assert lost.failed.code is FailureCode.PEER_LOST
    assert "is let go, as it has answered DecodeError to MapBlocks" in lost.failed.message
    assert connections.killed == [actor]


def test_who_fails_what_does_not_fail_is_let_go_where_replies_are_checked() -> None:
    connections, requests, actor = scene()
    told: list[str | None] = ["nonsense", None]
    actor.check = lambda _request, _reply: told.pop(0)
    codes = (FailureCode.REMOTE, FailureCode.PROTOCOL, FailureCode.TIMEOUT)
    found = []
    for code in codes:
        request_id = requests.ask(actor, REQUEST, timeout=1.0, tag="mine")
        lost = requests.on_failure(failure(request_id, code))
        assert lost is not None
        found.append(lost.failed.code)
    assert found == [FailureCode.PEER_LOST, *codes[1:]]
    assert connections.killed == [actor]


def test_an_actor_that_says_that_nobody_is_there_is_judged_as_for_any_failure() -> None:
    connections, requests, actor = scene()
    told: list[str | None] = [None, "nonsense"]
    actor.check = lambda _request, _reply: told.pop(0)
    for code in (FailureCode.PROTOCOL, FailureCode.PEER_LOST):  # or its end would be waited for
        request_id = requests.ask(actor, REQUEST, timeout=1.0, tag="mine")
        lost = requests.on_failure(failure(request_id, FailureCode.NO_PEER))
        assert lost is not None
        assert lost.failed.code is code
    assert connections.killed == [actor]


def test_a_reply_that_cannot_be_read_is_a_loss() -> None:
    _, requests, actor = scene()
    request_id = requests.ask(actor, REQUEST, timeout=1.0, tag="mine")
    unreadable = Complete(request_id, reply(request_id).header, [b"\xc1"])
    lost = requests.on_reply(unreadable)
    assert isinstance(lost, Lost)
    assert lost.failed.code is FailureCode.PROTOCOL
    assert "actor-0" in lost.failed.message
