"""What clients' calls do to a bridge's episodes, group X of the behaviours."""

from __future__ import annotations

import pytest

from envbus.actors.external.protocol import EpisodeEnded
from envbus.runner.bridge.vocabulary import Refuse, SendReply
from tests.runner.bridge.scenes import A, Scene, action_of, refusal

B = b"b"


# --- steps ---


def test_rewards_add_up_and_belong_to_the_action_before() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0")
    assert scene.seen("e") == ("o0", 0.0)
    action_of(scene.choose("e", 1))
    scene.reward("e", 1.0)
    scene.reward("e", 0.5)
    scene.ask("e", "o1")
    assert scene.seen("e") == ("o1", 1.5)
    scene.choose("e", 1)
    scene.reward("e", 4.0)
    scene.end("e", "o2")
    assert scene.seen("e") == ("o2", 4.0)


def test_two_logged_actions_in_a_row_leave_nothing_to_the_first() -> None:
    scene = Scene()
    scene.start("e")
    scene.log("e", "o0", 7)
    scene.log("e", "o1", 8)
    scene.reward("e", 3.0)
    scene.end("e", "o2")
    records = [scene.take()["e"] for _ in range(3)]
    rewards = [record.content["rewards"]["agent0"] for record in records]
    assert rewards == [0.0, 0.0, 3.0]
    assert [record.off_policy for record in records] == [{"agent0": 7}, {"agent0": 8}, None]


def test_steps_of_both_kinds_may_be_mixed() -> None:
    scene = Scene()
    scene.start("e")
    scene.log("e", "o0", 42)
    number = scene.ask("e", "o1")
    assert scene.take()["e"].off_policy == {"agent0": 42}
    assert scene.choose("e", 99) is None  # nobody waits for an action for o0
    assert scene.take()["e"].off_policy is None
    assert action_of(scene.choose("e", 5)) == (A, number, 5)
    scene.log("e", "o2", 42)
    assert scene.take()["e"].off_policy == {"agent0": 42}
    counts = scene.episodes.statistics()
    assert (counts.actions, counts.logged_actions, counts.dropped_actions) == (1, 2, 1)


def test_infos_belong_to_their_step() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0")
    assert scene.take()["e"].content["infos"] == {"agent0": {}}
    scene.choose("e", 1)
    scene.reward("e", 1.0, {"a": 1, "b": 1})
    scene.reward("e", 1.0, {"b": 2})
    scene.ask("e", "o1")
    assert scene.take()["e"].content["infos"] == {"agent0": {"a": 1, "b": 2}}
    scene.choose("e", 1)
    scene.ask("e", "o2")
    assert scene.take()["e"].content["infos"] == {"agent0": {}}


@pytest.mark.parametrize("observation", ["o", {"x": "o", "y": "o"}])
def test_an_untrained_episode_says_so_in_each_record_and_not_in_its_infos(
    observation: object,
) -> None:
    scene = Scene()
    scene.start("e", training=False)
    scene.ask("e", observation)
    scene.end("e", observation)
    for _ in range(2):
        record = scene.take()["e"]
        assert not record.training_enabled
        assert not any(record.content["infos"].values())


def test_many_episodes_of_many_clients_interleave() -> None:
    scene = Scene(B)
    names = [(peer, f"{peer.decode()}{i}") for i in range(50) for peer in (A, B)]
    for peer, name in names:
        scene.start(name, peer)
    numbers = {name: scene.ask(name, name, peer) for peer, name in names}
    taken = scene.take()
    assert set(taken) == set(numbers)
    for peer, name in reversed(names):
        assert action_of(scene.choose(name, name)) == (peer, numbers[name], name)


def test_ending_one_episode_disturbs_no_other() -> None:
    scene = Scene()
    scene.start("waits")
    scene.start("ends")
    number = scene.ask("waits", "o")
    (effect,) = scene.end("ends", "o")
    assert isinstance(effect, SendReply)
    assert effect.reply == EpisodeEnded()
    assert set(scene.take()) == {"waits"}
    assert action_of(scene.choose("waits", 1)) == (A, number, 1)


def test_an_episode_that_ends_at_once_is_dropped() -> None:
    scene = Scene()
    scene.start("e")
    scene.reward("e", 1.0)
    scene.end("e", "o")
    assert scene.take() == {}
    assert scene.episodes.statistics().empty == 1


@pytest.mark.parametrize("kind", ["ask", "log"])
def test_a_step_and_the_end_behind_it_are_both_delivered_in_order(kind: str) -> None:
    scene = Scene()
    scene.start("e")
    if kind == "ask":
        number = scene.ask("e", "o0")
    else:
        scene.log("e", "o0", 1)
    effects = scene.end("e", "o1")
    if kind == "ask":
        assert refusal(effects[0]).startswith("EpisodeFinished")
        assert isinstance(effects[0], Refuse)
        assert effects[0].request_id == number
    first, last = scene.take()["e"], scene.take()["e"]
    assert (first.content["observations"]["agent0"], first.last) == ("o0", False)
    assert (last.content["observations"]["agent0"], last.last) == ("o1", True)
    assert last.unacted is (kind == "ask")
    assert scene.take() == {}


def test_an_action_for_an_episode_that_has_ended_is_dropped_and_counted() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", "o0")
    scene.take()
    scene.end("e", "o1")
    assert scene.choose("e", 1) is None
    assert scene.choose("never", 1) is None
    assert scene.episodes.statistics().dropped_actions == 2
    assert scene.take()["e"].unacted


@pytest.mark.parametrize("truncated", [False, True])
def test_an_end_is_a_termination_or_a_truncation(truncated: bool) -> None:
    scene = Scene()
    scene.start("e")
    scene.log("e", "o0", 1)
    scene.end("e", "o1", truncated=truncated)
    first, last = scene.take()["e"], scene.take()["e"]
    assert first.content["terminateds"] == first.content["truncateds"]
    assert first.content["terminateds"] == {"agent0": False, "__all__": False}
    assert last.content["terminateds"] == dict.fromkeys(["agent0", "__all__"], not truncated)
    assert last.content["truncateds"] == dict.fromkeys(["agent0", "__all__"], truncated)


# --- several agents ---


def test_agents_differ_from_call_to_call_and_rewards_add_up_for_each() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", {"x": 1, "y": 2})
    assert scene.take()["e"].content["rewards"] == {"x": 0.0, "y": 0.0}
    assert scene.episodes.awaited("e") == ["x", "y"]
    scene.choose("e", {"x": 0, "y": 0})
    scene.reward("e", {"x": 1.0})
    scene.reward("e", {"x": 1.0, "y": 5.0}, {"y": {"hit": 1}})
    scene.ask("e", {"x": 3})
    content = scene.take()["e"].content
    assert content["rewards"] == {"x": 2.0}  # y's waits for its next observation
    assert content["infos"] == {"x": {}, "y": {"hit": 1}}
    assert scene.episodes.awaited("e") == ["x"]
    scene.choose("e", {"x": 0})
    scene.reward("e", {"y": 1.0})
    scene.ask("e", {"y": 4, "z": 5})
    assert scene.take()["e"].content["rewards"] == {"y": 6.0, "z": 0.0}


def test_single_agents_end_before_the_episode_does() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", {"x": 1, "y": 2})
    scene.take()
    scene.choose("e", {"x": 0, "y": 0})
    scene.reward("e", {"x": -1.0}, terminateds={"x": True})
    scene.ask("e", {"x": 9, "y": 3})
    content = scene.take()["e"].content
    assert content["terminateds"] == {"x": True, "y": False, "__all__": False}
    assert scene.episodes.awaited("e") == ["y"]


@pytest.mark.parametrize("at_once", [False, True])
def test_an_agent_that_was_told_how_it_ends_does_not_end_as_the_episode_does(
    at_once: bool,
) -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", {"x": 1, "y": 2})
    scene.take()
    scene.choose("e", {"x": 0, "y": 0})
    scene.reward("e", {"x": -1.0}, truncateds={"x": True})
    if not at_once:  # its last observation comes later than the word that it is done
        scene.ask("e", {"y": 3})
        scene.take()
        scene.choose("e", {"y": 0})
    scene.end("e", {"x": 9, "y": 4})
    content = scene.take()["e"].content
    assert content["terminateds"] == {"x": False, "y": True, "__all__": True}
    assert content["truncateds"] == {"x": True, "y": False, "__all__": False}


def test_an_agent_that_is_done_stays_so_whatever_its_client_observes() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", {"x": 1, "y": 2})
    scene.take()
    scene.choose("e", {"x": 0, "y": 0})
    scene.reward("e", {}, truncateds={"x": True})
    scene.ask("e", {"y": 3})  # it comes with its next observation
    assert scene.take()["e"].content["truncateds"] == {"y": False, "__all__": False}
    for number in (4, 5):
        scene.choose("e", {"x": 0, "y": 0})
        scene.ask("e", {"x": number, "y": number})
        content = scene.take()["e"].content
        assert content["truncateds"] == {"x": True, "y": False, "__all__": False}
        assert scene.episodes.awaited("e") == ["y"]


def test_an_info_that_is_added_to_is_not_made_anew() -> None:
    scene = Scene()
    scene.start("e")
    scene.ask("e", 0)
    scene.take()
    scene.choose("e", 0)
    scene.reward("e", 1.0, {"a": 1})
    own = scene.table.open["e"]._infos["agent0"]
    scene.reward("e", 1.0, {"b": 2})
    scene.ask("e", 1)
    assert scene.take()["e"].content["infos"]["agent0"] is own
    assert own == {"a": 1, "b": 2}
