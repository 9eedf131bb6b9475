"""What a bridge remembers of its episodes, group X of the behaviours."""

from __future__ import annotations

import pytest

from envbus.runner.bridge.vocabulary import Confirm, Observe, StartCall
from tests.runner.bridge.scenes import A, Scene, action_of, by_agent, refusal

B = b"b"


def test_an_id_is_made_up_or_taken_once_and_strange_ones_are_refused() -> None:
    scene = Scene()
    assert scene.start() != scene.start()
    assert scene.start("mine") == "mine"
    again = scene.do(StartCall(A, scene.number(A), "mine"))
    assert refusal(again) == "EpisodeAlreadyStarted: Episode mine is already started."
    scene.end("mine", 1)
    once_more = scene.do(StartCall(A, scene.number(A), "mine"))
    assert refusal(once_more) == "EpisodeFinished: Episode mine has already completed."
    for effect in (
        scene.do(Observe(A, 100, "no", by_agent(1), timeout=1.0)),
        scene.log("no", 1, 2),
        scene.reward("no", 1.0),
        scene.end("no", 1)[0],
    ):
        assert refusal(effect) == "EpisodeNotFound: Episode no not found."
    assert refusal(scene.reward("mine", 1.0)).endswith("Episode mine has already completed.")
    assert scene.episodes.statistics().refused == 7


@pytest.mark.parametrize("episode_id", ["", "x" * 257])
def test_an_id_has_a_sensible_length(episode_id: str) -> None:
    scene = Scene()
    assert "256" in refusal(scene.do(StartCall(A, 50, episode_id)))


def test_finished_ids_are_remembered_within_bounds_and_old_ones_still_fail() -> None:
    scene = Scene(max_finished=3)
    for i in range(1000):
        scene.start(f"e{i}")
        scene.end(f"e{i}", 1)
    assert scene.episodes.statistics().finished_now == 3
    assert refusal(scene.reward("e999", 1.0)).startswith("EpisodeFinished")
    assert refusal(scene.reward("e0", 1.0)).startswith("EpisodeNotFound")


def test_one_client_does_not_have_the_ids_of_others_forgotten() -> None:
    scene = Scene(B, max_finished=5, max_client_finished=3)
    for name in ("old", "older", "mine"):
        scene.start(name)
        scene.end(name, 1)
    for i in range(10):
        scene.start(f"e{i}", B)
        scene.end(f"e{i}", 1, B)
    assert refusal(scene.reward("mine", 1.0)).startswith("EpisodeFinished")
    assert refusal(scene.reward("e9", 1.0, peer=B)).startswith("EpisodeFinished")
    assert refusal(scene.reward("e6", 1.0, peer=B)).startswith("EpisodeNotFound")


@pytest.mark.parametrize("confirm_ends", [False, True])
def test_an_id_is_used_up_until_the_runner_was_shown_all_of_its_episode(
    confirm_ends: bool,
) -> None:
    scene = Scene(confirm_ends=confirm_ends, max_finished=1)
    scene.start("e")
    scene.log("e", 1, 0)
    scene.end("e", 2)
    scene.start("other")
    scene.end("other", 1)  # now the id of the first is forgotten
    for _ in range(2):
        again = scene.do(StartCall(A, scene.number(A), "e"))
        assert refusal(again) == "EpisodeFinished: Episode e has already completed."
        assert list(scene.take()) == ["e"]
    if confirm_ends:
        again = scene.do(StartCall(A, scene.number(A), "e"))
        assert refusal(again) == "EpisodeFinished: Episode e has already completed."
        scene.do(Confirm("e"))
    scene.start("e")


def test_too_many_episodes_are_refused_by_number() -> None:
    scene = Scene(max_episodes=1)
    scene.start("a")
    assert refusal(scene.do(StartCall(A, 50, "b"))).startswith("overloaded: 1 episodes are open")
    scene.end("a", 1)
    scene.start("b")


def test_a_client_reaches_its_own_episodes_only() -> None:
    scene = Scene(B)
    scene.start("e", A)
    assert "belongs to another client" in refusal(scene.reward("e", 1.0, peer=B))
    assert refusal(scene.do(StartCall(B, 50, "e"))).startswith("EpisodeAlreadyStarted")


def test_who_did_not_join_is_told_so() -> None:
    assert "JoinBridge" in refusal(Scene().do(StartCall(b"stranger", 1, None)))


def test_answers_are_remembered_within_bounds() -> None:
    scene = Scene(max_answers=2)
    scene.start("e")
    for _ in range(10):
        scene.reward("e", 1.0)
    session = scene.table.sessions.find(A)
    assert session is not None
    assert len(session.answers) == 2


def test_ten_thousand_ids_may_be_taken_beforehand() -> None:
    scene = Scene()
    for i in range(10_000):
        scene.episodes.handle(StartCall(A, scene.number(A), f"e{i}"), 0.0)
    assert len(scene.table.open) == 10_000
    number = scene.ask("e7777", "o")
    assert scene.seen("e7777") == ("o", 0.0)
    assert action_of(scene.choose("e7777", 1)) == (A, number, 1)
