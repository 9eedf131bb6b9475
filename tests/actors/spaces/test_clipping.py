"""What is brought into the bounds of its space, and what stays as it is."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.clipping import agent_clip, clip_of, remembered

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_actions_of_a_bounded_box_are_clipped_one_or_a_batch() -> None:
    clip = clip_of(BOX)
    assert clip is not None
    assert clip(np.array([-3.0, 0.5], np.float32)).tolist() == [-1.0, 0.5]
    assert clip(np.full((3, 2), 2.0, np.float32)).tolist() == [[1.0, 1.0]] * 3
    assert clip(np.full((3, 2), 2.0, np.float32)).dtype == np.float32
    assert clip([7.0, -7.0]).tolist() == [1.0, -1.0]


def test_a_box_is_clipped_where_it_has_a_bound() -> None:
    half = spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 1.0]), (2,), np.float64)
    clip = clip_of(half)
    assert clip is not None
    assert clip(np.array([-9.0, -9.0])).tolist() == [0.0, -9.0]
    assert clip(np.array([9.0, 9.0])).tolist() == [9.0, 1.0]


def test_what_has_no_bounds_needs_no_clipping() -> None:
    for space in (
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Discrete(3),
        spaces.Dict({"a": spaces.Discrete(2)}),
        None,
    ):
        assert clip_of(space) is None
        assert agent_clip(space) is None


def test_parts_are_clipped_inside_dict_and_tuple() -> None:
    space = spaces.Dict({"move": spaces.Tuple([BOX, spaces.Discrete(3)]), "go": spaces.Discrete(2)})
    clip = clip_of(space)
    assert clip is not None
    given = {"move": (np.array([[5.0, 0.0]]), np.array([2])), "go": np.array([1])}
    clipped = clip(given)
    assert clipped["move"][0].tolist() == [[1.0, 0.0]]
    assert clipped["move"][1] is given["move"][1]
    assert clipped["go"] is given["go"]


def test_what_is_no_action_of_the_space_is_left_to_whoever_sends_it() -> None:
    clip = clip_of(BOX)
    assert clip is not None
    for wrong in (np.zeros(3), "text", None):
        assert clip(wrong) is wrong
    assert clip_of(spaces.Dict({"a": BOX}))(7) == 7  # type: ignore[misc]  # it is not None


def test_by_agent_each_has_its_own_bounds() -> None:
    clip = agent_clip(AgentSpaces({"a": BOX, "b": spaces.Discrete(2)}))
    assert clip is not None
    clipped = clip({"a": np.array([2.0, 2.0]), "b": 1, "new": 5})
    assert clipped["a"].tolist() == [1.0, 1.0]
    assert (clipped["b"], clipped["new"]) == (1, 5)
    only = agent_clip(BOX)
    assert only is not None
    assert only({"agent0": np.array([2.0, 2.0])})["agent0"].tolist() == [1.0, 1.0]


def test_what_clips_is_made_once_per_space() -> None:
    asked: list[object] = []
    clip_for = remembered(lambda space: asked.append(space) or clip_of(space))
    first, second = spaces.Box(-1, 1, (2,)), spaces.Box(-3, 3, (2,))
    for space in (first, first, second, second, None, None):
        clip = clip_for(space)
        top = None if clip is None else clip(np.full(2, 9.0, np.float32)).max()
        assert top == (None if space is None else space.high.max())
    assert asked == [first, second, None]
