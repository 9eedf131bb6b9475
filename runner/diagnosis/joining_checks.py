"""How clients join a bridge, one check each; section numbers are those of docs/wire-protocol.md."""

from __future__ import annotations

import math
import secrets

from envbus.actors.external.protocol import JoinBridge
from envbus.bus.messages import PROTOCOL_VERSION, FailureCode, Hello, Kind
from envbus.runner.diagnosis.links import LinkEndedError
from envbus.runner.diagnosis.scene import (
    CheckList,
    FailedCheck,
    Scene,
    expect_failure,
    expect_refused,
)

__all__ = ["JOINING"]

JOINING = CheckList()


@JOINING.check("5")
def _hello_comes_first(scene: Scene) -> None:
    talk = scene.connect()
    try:
        expect_failure(
            "a request before Hello",
            (FailureCode.NOT_JOINED,),
            lambda: talk.ask(JoinBridge(client="conformance")),
        )
        talk.say_hello("conformance-late-hello")  # and the connection stays
    finally:
        talk.close()


@JOINING.check("5")
def _hello_is_answered_again(scene: Scene) -> None:
    talk = scene.connect()
    try:
        name = f"conformance-{secrets.token_hex(4)}"
        first, second = talk.say_hello(name), talk.say_hello(name)
        for welcome in (first, second):
            if not 0 < welcome.lease < math.inf or welcome.max_message_bytes < 1024:
                raise FailedCheck(f"Welcome has no usable limits: {welcome}")
    finally:
        talk.close()


@JOINING.check("3")
def _another_version_is_named(scene: Scene) -> None:
    talk = scene.connect()
    try:
        number = talk.next_id()
        hello = Hello(name="conformance-version", services=[])
        talk.send(hello, Kind.REQUEST, request_id=number, ttl=5.0, version=PROTOCOL_VERSION + 1)
        try:
            expect_failure(
                "a header of another version",
                (FailureCode.VERSION,),
                lambda: talk.answer_to(hello, number, talk.timeout),
            )
        except LinkEndedError:
            raise FailedCheck("the connection was closed before the FAILURE came") from None
    finally:
        talk.close()


@JOINING.check("10")
def _spaces_are_told(scene: Scene) -> None:
    joined = scene.joined
    if "server" not in joined.inference and "client" not in joined.inference:
        raise FailedCheck(f"inference must name server or client, got {joined.inference}")
    if not 0 < joined.lease < math.inf:
        raise FailedCheck(f"the lease must be a positive number of seconds, got {joined.lease}")
    if not joined.session:
        raise FailedCheck("no session was given: who is cut off cannot resume")
    if joined.episodes:
        raise FailedCheck(f"a new session has open episodes: {joined.episodes}")


@JOINING.check("10")
def _other_spaces_are_refused(scene: Scene) -> None:
    observation_space, action_space = scene.sampler.other_spaces()
    talk = scene.connect()
    try:
        talk.say_hello(f"conformance-{secrets.token_hex(4)}")
        request = JoinBridge(
            client="conformance", observation_space=observation_space, action_space=action_space
        )
        expect_refused("a client with other spaces", ("SpaceMismatch",), lambda: talk.ask(request))
    finally:
        talk.close()
