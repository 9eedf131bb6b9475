"""Fragments of clients that choose actions themselves."""

from __future__ import annotations

from typing import Any

from envbus.actors.external.protocol import FragmentLogged
from envbus.bus.wire.messages import FailureCode
from envbus.runner.bridge.results import ClientChoice
from envbus.runner.bridge.vocabulary import (
    ClientFragment,
    FragmentPart,
    LogReward,
    LogStep,
    Refuse,
    SendReply,
)
from tests.runner.bridge.scenes import A, Scene, by_agent


def part(number: int, reward: float | None = None, version: int | None = 0) -> FragmentPart:
    logged = None if reward is None else LogReward(A, 0, "e", by_agent(reward), {}, {}, {})
    step = LogStep(A, 0, "e", by_agent(number), by_agent(10 + number))
    return FragmentPart(logged, step, None if version is None else ClientChoice("p", version, {}))


def fragment(scene: Scene, first: int, *parts: FragmentPart, number: int | None = None) -> Any:
    return scene.do(ClientFragment(A, scene.number(A, number), "e", "p", first, list(parts)))


def taken(scene: Scene) -> list[Any]:
    seen = []
    while records := scene.take():
        content = records["e"].content
        seen.append((*content["observations"].values(), *content["rewards"].values()))
    return seen


def test_steps_arrive_in_order_with_the_rewards_before_them() -> None:
    scene = Scene()
    scene.start("e")
    tail = FragmentPart(LogReward(A, 0, "e", by_agent(5.0), {}, {}, {}), None)
    answer = fragment(scene, 0, part(0), part(1, 2.0), tail)
    assert answer.reply == FragmentLogged()
    scene.end("e", 2)
    assert taken(scene) == [(0, 0.0), (1, 2.0), (2, 5.0)]
    assert scene.episodes.statistics().local_actions == 2


def test_steps_that_come_again_are_passed_over_under_whatever_request() -> None:
    scene = Scene()
    scene.start("e")
    number = scene.number(A)
    fragment(scene, 0, part(0), part(1, 1.0), number=number)
    fragment(scene, 0, part(0), part(1, 1.0), number=number)
    fragment(scene, 1, part(1, 1.0), part(2, 1.0))
    assert taken(scene) == [(0, 0.0), (1, 1.0), (2, 1.0)]


def test_steps_that_were_refused_and_come_again_with_another_cut_leave_no_gap() -> None:
    scene = Scene(max_queued=1)
    scene.start("e")

    def steps(*numbers: int) -> Any:
        parts = [part(number) for number in numbers]
        event = ClientFragment(A, scene.number(A), "e", "p", numbers[0], parts, digest=len(parts))
        return scene.do(event)

    def unacted() -> list[bool]:
        shown = []
        while records := scene.episodes.collect()[0]:
            shown += [record.unacted for record in records]
        return shown

    steps(0, 1, 2, 3)
    assert isinstance(refused := steps(4, 5, 6), Refuse)
    assert refused.failed.code is FailureCode.OVERLOADED
    assert unacted() == [False] * 4
    steps(4, 5)
    steps(6)
    assert unacted() == [False] * 3


def test_rewards_of_a_fragment_do_not_add_up_to_infinity() -> None:
    scene = Scene()
    scene.start("e")
    tail = FragmentPart(LogReward(A, 0, "e", by_agent(3e38), {}, {}, {}), None)
    assert isinstance(fragment(scene, 0, part(0), part(1, 3e38), tail), SendReply)
    refused = fragment(scene, 3, part(2, 3e38))
    assert isinstance(refused, Refuse)
    assert "rewards add up to more" in str(refused.failed)
    refused = fragment(scene, 3, part(2, -1.0), tail, tail)
    assert isinstance(refused, Refuse)  # as a whole
    assert isinstance(fragment(scene, 3, part(2, -1.0), tail), SendReply)
    scene.end("e", 3)
    assert taken(scene) == [(0, 0.0), (1, 3e38), (2, 3e38 - 1.0), (3, 3e38)]


def test_a_gap_is_refused_and_the_episode_goes_on() -> None:
    scene = Scene()
    scene.start("e")
    refusal = fragment(scene, 1, part(1))
    assert isinstance(refusal, Refuse)
    assert "begins with step 1, and only 0" in refusal.failed.message
    assert isinstance(fragment(scene, 0, part(0)), SendReply)


def test_choices_go_with_their_steps_and_steps_of_old_weights_are_acted_upon_by_nobody() -> None:
    scene = Scene(is_stale=lambda policy_id, version: (policy_id, version) == ("p", 1))
    scene.start("e")
    answer = fragment(scene, 0, part(0, version=1), part(1, version=2), part(2, version=None))
    assert answer.reply == FragmentLogged(dropped=1)
    records = [scene.take()["e"] for _ in range(3)]
    assert [record.off_policy for record in records] == [{}, by_agent(11), by_agent(12)]
    versions = [record.choice and record.choice.policy_version for record in records]
    assert versions == [None, 2, None]
    counts = scene.episodes.statistics()
    assert (counts.local_actions, counts.stale_actions, counts.logged_actions) == (2, 1, 1)


def test_a_fragment_beyond_the_limit_is_answered_when_the_runner_has_taken_it() -> None:
    scene = Scene(max_queued=1)
    scene.start("e")
    assert fragment(scene, 0, part(0), part(1)) is None
    assert scene.episodes.collect()[1] == []
    (answer,) = scene.episodes.collect()[1]
    assert isinstance(answer, SendReply)
    assert answer.reply == FragmentLogged()
