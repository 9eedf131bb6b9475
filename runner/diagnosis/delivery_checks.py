"""Repetition, deadlines, lost connections; section numbers are those of docs/wire-protocol.md."""

from __future__ import annotations

import secrets
import time

from envbus.actors.external.elements import to_wire
from envbus.actors.external.protocol import BRIDGE, EndEpisode, GetAction, JoinBridge, StartEpisode
from envbus.bus.messages import FailureCode, Kind
from envbus.runner.diagnosis.scene import CheckList, FailedCheck, Scene, expect_refused
from envbus.runner.diagnosis.talk import RefusedError

__all__ = ["DELIVERY"]

DELIVERY = CheckList()


@DELIVERY.check("10")
def _a_request_that_is_sent_again_is_answered_again(scene: Scene) -> None:
    episode_id = scene.start()
    number = scene.talk.next_id()
    request = GetAction(episode_id=episode_id, observation=scene.observation())
    first = scene.talk.ask(request, request_id=number)
    second = scene.talk.ask(request, request_id=number)
    if to_wire(first.action, plain=True) != to_wire(second.action, plain=True):
        raise FailedCheck(
            f"the same request was answered by two actions: {first.action}, then {second.action}"
        )
    scene.end(episode_id)


@DELIVERY.check("3")
def _a_deadline_that_passes_ends_in_a_failure(scene: Scene) -> None:
    episode_id = scene.start()
    number = scene.talk.next_id()
    request = GetAction(episode_id=episode_id, observation=scene.observation())
    scene.talk.send(request, Kind.REQUEST, request_id=number, ttl=1e-6, to=BRIDGE)
    try:
        scene.talk.answer_to(request, number, scene.talk.timeout)
    except RefusedError as exc:
        if exc.failed.code is not FailureCode.TIMEOUT:
            raise FailedCheck(f"expected code timeout, got {exc}") from None
    # Fast enough to answer in time, or not: the next action is the next request's.
    deadline = time.monotonic() + 5.0
    while True:
        try:
            scene.get_action(episode_id)
            break
        except RefusedError as exc:
            if exc.failed.remote_type != "EpisodeBusy" or time.monotonic() > deadline:
                raise
    scene.end(episode_id)


@DELIVERY.check("10")
def _who_is_cut_off_resumes(scene: Scene) -> None:
    first, joined = scene.join_another()
    episode_id = first.ask(StartEpisode()).episode_id
    first.ask(GetAction(episode_id=episode_id, observation=scene.observation()))
    first.link.close()  # without a goodbye
    second = scene.connect()
    try:
        second.say_hello(f"conformance-{secrets.token_hex(4)}")
        again = second.ask(JoinBridge(client="conformance", resume=joined.session))
        if again.episodes != [episode_id]:
            raise FailedCheck(
                f"after a reconnection episode {episode_id!r} was open, and the bridge tells of "
                f"{again.episodes}"
            )
        second.ask(GetAction(episode_id=episode_id, observation=scene.observation()))
        second.ask(EndEpisode(episode_id=episode_id, observation=scene.observation()))
    finally:
        second.close()


@DELIVERY.check("10")
def _an_unknown_session_cannot_be_resumed(scene: Scene) -> None:
    other = scene.connect()
    try:
        other.say_hello(f"conformance-{secrets.token_hex(4)}")
        request = JoinBridge(client="conformance", resume=secrets.token_hex(16))
        expect_refused("a session that never was", ("SessionLost",), lambda: other.ask(request))
    finally:
        other.close()
