from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeError,
    EpisodeLostError,
    EpisodeNotFoundError,
)
from envbus.actors.external.local_episodes import Fragments
from envbus.actors.external.protocol import FragmentStep, LogFragment
from envbus.bus.errors import QueueFullError
from envbus.bus.wire.codec import encode


def make(length: int = 2, most: int = 100, *, multi_agent: bool = False) -> Fragments:
    fragments = Fragments("p", length, most, multi_agent=multi_agent)
    fragments.begin("e")
    return fragments


def taken(fragments: Fragments) -> LogFragment:
    fragment = fragments.take()
    assert fragment is not None
    return fragment


def test_rewards_and_infos_add_up_until_the_next_observation() -> None:
    fragments = make()
    fragments.log("e", 1, {"a": 1}, None, None)
    fragments.add("e", 0, 7, policy_version=3, extras={"v": 0.5})
    fragments.log("e", 1.0, {"a": 1, "b": 2}, None, None)
    fragments.log("e", 2.0, {"a": 3}, None, None)
    fragments.add("e", 1, 8)
    first, second = taken(fragments).steps
    assert first == FragmentStep(
        reward=1.0, info={"a": 1}, observation=0, action=7, policy_version=3, extras={"v": 0.5}
    )
    assert second == FragmentStep(reward=3.0, info={"a": 3, "b": 2}, observation=1, action=8)


def test_with_several_agents_each_has_its_own() -> None:
    fragments = make(1, multi_agent=True)
    fragments.log("e", {"x": 1.0}, {"x": {"a": 1}}, {"x": False}, None)
    fragments.log("e", {"x": 1.0, "y": 3}, {"x": {"b": 2}}, {"x": True}, {"y": True})
    fragments.add("e", {"x": 0}, {"x": 1})
    (step,) = taken(fragments).steps
    assert (step.reward, step.info) == ({"x": 2.0, "y": 3.0}, {"x": {"a": 1, "b": 2}})
    assert (step.terminateds, step.truncateds) == ({"x": True}, {"y": True})


def test_a_fragment_waits_for_its_length_and_is_taken_again_until_it_is_confirmed() -> None:
    fragments = make(2)
    fragments.add("e", 0, 0)
    assert fragments.take() is None
    fragments.add("e", 1, 1)
    fragments.add("e", 2, 2)
    fragment = taken(fragments)
    assert (fragment.first, len(fragment.steps)) == (0, 2)
    assert fragments.take() == fragment
    fragments.confirm(fragment)
    fragments.confirm(fragment)  # of a request that was sent twice
    assert fragments.take() is None
    assert fragments.num_waiting == 1


def test_a_fragment_of_large_arrays_is_one_that_a_bridge_has_room_for() -> None:
    fragments = make(64)
    for _ in range(64):
        fragments.add("e", np.zeros(1 << 18, np.uint8), 0)
    fragments.add("e", np.zeros(50 << 20, np.uint8), 0)
    fragments.finish("e")
    counts = []
    while not fragments.is_sent("e"):
        fragment = taken(fragments)
        assert fragments.take() == fragment
        counts.append(len(fragment.steps))
        fragments.confirm(fragment)
    assert counts == [3] * 21 + [1, 1]
    assert fragments.num_waiting == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("observation", "info"),
    [("é" * 150_000, None), (0, {"x": [0.5] * 20_000}), (0, {"x": [{}] * 5_000})],
)
def test_a_fragment_without_arrays_is_one_that_a_bridge_reads(observation: Any, info: Any) -> None:
    fragments = make(64)
    for _ in range(64):
        fragments.add("e", observation, 0)
        fragments.log("e", 0.0, info, None, None)
    fragments.finish("e")
    while not fragments.is_sent("e"):
        fragment = taken(fragments)
        assert len(encode(fragment)[0]) <= 1 << 20
        assert sum(step.info["x"].count({}) for step in fragment.steps if step.info) < 1 << 19
        assert 1 < len(fragment.steps) < 64
        fragments.confirm(fragment)


def test_an_episode_that_ends_is_sent_to_the_last_reward_before_others() -> None:
    fragments = make(2)
    fragments.begin("other")
    for t in range(2):
        fragments.add("other", t, t)
    fragments.add("e", 0, 0)
    fragments.log("e", 5.0, None, None, None)
    fragments.finish("e")
    assert not fragments.is_sent("e")
    fragment = taken(fragments)
    assert fragment.episode_id == "e"
    assert fragment.steps[-1] == FragmentStep(reward=5.0)
    fragments.confirm(fragment)
    fragments.finish("e")  # called again: nothing comes twice
    assert fragments.is_sent("e")
    assert taken(fragments).episode_id == "other"


def test_episodes_take_turns() -> None:
    fragments = make(1)
    fragments.begin("other")
    for t in range(2):
        fragments.add("e", t, t)
        fragments.add("other", t, t)
    turns = []
    while (fragment := fragments.take()) is not None:
        turns.append((fragment.episode_id, fragment.first))
        fragments.confirm(fragment)
    assert turns == [("e", 0), ("other", 0), ("e", 1), ("other", 1)]


def test_a_full_buffer_refuses_steps_and_says_why_until_some_were_sent() -> None:
    fragments = make(1, most=2)
    fragments.add("e", 0, 0)
    fragments.add("e", 1, 1)
    with pytest.raises(QueueFullError, match="2 steps wait to be sent, which is the limit"):
        fragments.add("e", 2, 2)
    fragments.confirm(taken(fragments))
    fragments.add("e", 2, 2)


def test_what_the_bridge_refuses_is_raised_by_the_episode_and_no_other() -> None:
    fragments = make(1)
    fragments.begin("other")
    fragments.add("e", 0, 0)
    fragments.fail("e", EpisodeLostError("gone"))
    assert fragments.num_waiting == 0
    with pytest.raises(EpisodeLostError, match="gone"):
        fragments.add("e", 1, 1)
    fragments.end("e")
    with pytest.raises(EpisodeNotFoundError):
        fragments.check("e")
    fragments.check("other")


def test_wrong_calls_are_told_and_change_nothing() -> None:
    fragments = make()
    with pytest.raises(EpisodeAlreadyStartedError):
        fragments.begin("e")
    for reward, info in (("1", None), (True, None), (1.0, 5)):
        with pytest.raises(EpisodeError):
            fragments.log("e", reward, info, None, None)  # type: ignore[arg-type]
    with pytest.raises(EpisodeError, match="terminateds are a map by agent"):
        fragments.log("e", 1.0, None, {"x": True}, None)
    with pytest.raises(EpisodeError, match="rewards are a map by agent"):
        make(multi_agent=True).log("e", 1.0, None, None, None)
    fragments.finish("e")
    assert fragments.is_sent("e")


def test_what_is_confirmed_a_second_time_takes_nothing_away() -> None:
    fragments = make(2)
    for number in range(5):
        fragments.add("e", number, 0)
    first = taken(fragments)
    fragments.confirm(first)
    fragments.confirm(first)
    assert fragments.num_waiting == 3
    assert (taken(fragments).first, len(taken(fragments).steps)) == (2, 2)
    fragments.add("e", 5, 0)
    fragments.finish("e")
    assert not fragments.is_sent("e")
