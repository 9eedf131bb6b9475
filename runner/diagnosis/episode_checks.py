"""What episodes are, one check each; section numbers are those of docs/wire-protocol.md."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from envbus.actors.external.protocol import (
    EndEpisode,
    GetAction,
    LogAction,
    Logged,
    LogReturns,
    StartEpisode,
)
from envbus.runner.diagnosis.scene import CheckList, FailedCheck, Scene, expect_refused

__all__ = ["EPISODES"]

EPISODES = CheckList()


@EPISODES.check("10")
def _ids_of_episodes_are_unique(scene: Scene) -> None:
    ids = [scene.start() for _ in range(3)]
    if len(set(ids)) < 3 or not all(ids):
        raise FailedCheck(f"three episodes without an id were given {ids}")
    for episode_id in ids:
        scene.end(episode_id)


@EPISODES.check("10")
def _an_id_may_be_chosen_and_is_used_once(scene: Scene) -> None:
    wanted = f"conformance-{secrets.token_hex(4)}"
    got = scene.start(episode_id=wanted)
    if got != wanted:
        raise FailedCheck(f"episode {wanted!r} was started as {got!r}")
    expect_refused(
        "an id that is in use", ("EpisodeAlreadyStarted",), lambda: scene.start(episode_id=wanted)
    )
    scene.get_action(wanted)
    scene.end(wanted)
    expect_refused(
        "an id that is used up", ("EpisodeFinished",), lambda: scene.start(episode_id=wanted)
    )


@EPISODES.check("10")
def _actions_are_inside_the_space(scene: Scene) -> None:
    episode_id = scene.start()
    for _ in range(20):
        scene.get_action(episode_id)
        scene.talk.ask(LogReturns(episode_id=episode_id, reward=scene.sampler.reward(1.0)))
    scene.end(episode_id)


@EPISODES.check("10")
def _plain_clients_get_plain_actions(scene: Scene) -> None:
    talk, _ = scene.join_another(plain=True)
    try:
        started = talk.ask(StartEpisode())
        observation = scene.sampler.observation(plain=True)
        request = GetAction(episode_id=started.episode_id, observation=observation)
        action = talk.ask(request).action
        odd = _not_plain(action)
        if odd:
            raise FailedCheck(f"an action for a plain client holds {odd}")
        scene.check_action(action)
        talk.ask(EndEpisode(episode_id=started.episode_id, observation=observation))
    finally:
        talk.close()


@EPISODES.check("10")
def _actions_of_the_simulator_are_taken(scene: Scene) -> None:
    episode_id = scene.start()
    for _ in range(2):
        request = LogAction(
            episode_id=episode_id,
            observation=scene.observation(),
            action=scene.sampler.action(),
        )
        answer = scene.talk.ask(request)
        if not isinstance(answer, Logged):
            raise FailedCheck(f"LogAction was answered by {type(answer).__name__}")
    scene.get_action(episode_id)  # on-policy and off-policy steps mix
    scene.end(episode_id)


@EPISODES.check("10")
def _an_episode_may_end_as_soon_as_it_has_begun(scene: Scene) -> None:
    scene.end(scene.start())
    scene.end(scene.start(), truncated=True)
    scene.end(scene.start(training_enabled=False))


@EPISODES.check("10")
def _unknown_episodes_are_named(scene: Scene) -> None:
    unknown = f"never-started-{secrets.token_hex(4)}"
    calls: list[Callable[[], object]] = [
        lambda: scene.get_action(unknown),
        lambda: scene.talk.ask(
            LogAction(
                episode_id=unknown,
                observation=scene.observation(),
                action=scene.sampler.action(),
            )
        ),
        lambda: scene.talk.ask(LogReturns(episode_id=unknown, reward=scene.sampler.reward(1.0))),
        lambda: scene.end(unknown),
    ]
    for call in calls:
        expect_refused("a call for an unknown episode", ("EpisodeNotFound",), call)


@EPISODES.check("10")
def _finished_episodes_take_no_call(scene: Scene) -> None:
    episode_id = scene.start()
    scene.end(episode_id)
    names = ("EpisodeFinished", "EpisodeNotFound")
    expect_refused("an action after the end", names, lambda: scene.get_action(episode_id))
    expect_refused("a second end", names, lambda: scene.end(episode_id))


@EPISODES.check("10")
def _episodes_do_not_touch_each_other(scene: Scene) -> None:
    ids = [scene.start() for _ in range(5)]
    for turn in range(10):
        scene.get_action(ids[turn * 3 % 5])
    scene.end(ids[2])
    for episode_id in (ids[0], ids[1], ids[3], ids[4]):
        scene.get_action(episode_id)
        scene.end(episode_id)


@EPISODES.check("10")
def _clients_do_not_touch_each_other(scene: Scene) -> None:
    mine = scene.start()
    other, _ = scene.join_another()
    try:
        request = GetAction(episode_id=mine, observation=scene.observation())
        names = ("EpisodeNotFound", "EpisodeError")
        expect_refused("another client's episode", names, lambda: other.ask(request))
    finally:
        other.close()
    scene.get_action(mine)
    scene.end(mine)


def _not_plain(value: Any) -> str:
    """Return what in a value is neither number, string, list nor map; "" if nothing is."""
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, list):
        return next((odd for item in value if (odd := _not_plain(item))), "")
    if isinstance(value, dict):
        return next((odd for item in value.values() if (odd := _not_plain(item))), "")
    return f"a {type(value).__name__}"
