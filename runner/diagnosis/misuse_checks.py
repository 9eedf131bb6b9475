"""What a bridge refuses and survives; section numbers are those of docs/wire-protocol.md."""

from __future__ import annotations

from functools import partial

from envbus.actors.external.protocol import BRIDGE, GetAction, LogAction, StartEpisode
from envbus.bus.headers import encode_header
from envbus.bus.messages import PROTOCOL_VERSION, FailureCode, Header, Kind
from envbus.runner.diagnosis.scene import (
    CheckList,
    Scene,
    SkippedCheck,
    expect_failure,
    expect_refused,
)

__all__ = ["MISUSE"]

MISUSE = CheckList()


@MISUSE.check("10")
def _observations_outside_the_space_are_refused(scene: Scene) -> None:
    wrong = scene.sampler.wrong_observation()
    if wrong is None:
        raise SkippedCheck("nothing is known to be outside this observation space")
    episode_id = scene.start()
    request = GetAction(episode_id=episode_id, observation=wrong)
    expect_refused(
        "an observation outside the space", ("SpaceMismatch",), lambda: scene.talk.ask(request)
    )
    scene.get_action(episode_id)  # the episode has survived
    scene.end(episode_id)


@MISUSE.check("10")
def _actions_outside_the_space_are_refused(scene: Scene) -> None:
    wrong = scene.sampler.wrong_action()
    if wrong is None:
        raise SkippedCheck("nothing is known to be outside this action space")
    episode_id = scene.start()
    request = LogAction(episode_id=episode_id, observation=scene.observation(), action=wrong)
    expect_refused(
        "an action outside the space", ("SpaceMismatch",), lambda: scene.talk.ask(request)
    )
    scene.get_action(episode_id)
    scene.end(episode_id)


@MISUSE.check("5")
def _unknown_requests_are_refused_and_the_connection_stays(scene: Scene) -> None:
    expect_failure(
        "a request of an unknown type",
        (FailureCode.PROTOCOL, FailureCode.REMOTE),
        partial(_answer_to, scene, "NoSuchRequest", b"\x80"),
    )
    scene.end(scene.start())


@MISUSE.check("8")
def _malformed_payloads_are_refused_and_the_connection_stays(scene: Scene) -> None:
    for payload in (b"", b"\xc1", b"\x81\xa1", b"\x91\x01", b"\x81\xaaepisode_id\x07"):
        expect_failure(
            f"the payload {payload.hex() or '(empty)'}",
            (FailureCode.PROTOCOL, FailureCode.REMOTE),
            partial(_answer_to, scene, "StartEpisode", payload),
        )
    scene.end(scene.start())


@MISUSE.check("2")
def _unknown_notices_are_borne(scene: Scene) -> None:
    header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "NoSuchNotice")
    scene.talk.link.send([encode_header(header), b"\x80"])
    scene.end(scene.start())


def _answer_to(scene: Scene, payload_type: str, payload: bytes) -> object:
    """Send a request of these bytes; return its answer."""
    number = scene.talk.next_id()
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, number, payload_type, 5.0, 0, BRIDGE)
    scene.talk.link.send([encode_header(header), payload])
    return scene.talk.answer_to(StartEpisode(), number, scene.talk.timeout)
