from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envbus.runner.vector.vector_spaces import (
    check_reset_mask,
    choose_spaces,
)
from tests.envs import CustomSpace

BOX, NUMBER = spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(3)


def test_equal_spaces_are_batched_as_gymnasium_batches_them() -> None:
    chosen = choose_spaces([(BOX, NUMBER)] * 4, "same", shared_memory=True)
    assert chosen.single_observation_space is BOX
    assert chosen.observation_space == batch_space(BOX, 4)
    assert chosen.single_action_space is NUMBER
    assert chosen.action_space == batch_space(NUMBER, 4)


def test_bounds_may_differ_if_asked_for() -> None:
    other = spaces.Box(0.0, 3.0, (2,))
    chosen = choose_spaces([(BOX, NUMBER), (other, NUMBER)], "different", shared_memory=True)
    assert chosen.observation_space == spaces.Box(0.0, np.array([[1, 1], [3, 3]], np.float32))


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ((spaces.Box(0.0, 2.0, (2,)), NUMBER), r"not equivalent.*Env 2 has Box\(0.0, 2.0"),
        ((BOX, spaces.Discrete(4)), r"action space different.*Env 2 has Discrete\(4\)"),
    ],
)
def test_the_env_and_the_space_that_differ_are_named(odd: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        choose_spaces([(BOX, NUMBER), (BOX, NUMBER), odd], "same", shared_memory=True)


@pytest.mark.parametrize(
    "space",
    [
        CustomSpace(),
        spaces.Tuple((BOX, CustomSpace())),
        spaces.Dict(a=spaces.Dict(b=CustomSpace())),
        spaces.OneOf((BOX, CustomSpace())),
    ],
    ids=["itself", "in a tuple", "in a dict", "in a choice"],
)
def test_shared_memory_is_refused_for_custom_spaces_and_for_what_holds_one(space: Any) -> None:
    with pytest.raises(ValueError, match=r"shared_memory=False.*custom space"):
        choose_spaces([(space, NUMBER)], "same", shared_memory=True)
    chosen = choose_spaces([(space, NUMBER)] * 2, "same", shared_memory=False)
    assert chosen.single_observation_space is space


def test_a_custom_action_space_needs_no_layout() -> None:
    chosen = choose_spaces([(BOX, CustomSpace())] * 2, "same", shared_memory=True)
    assert isinstance(chosen.action_space, spaces.Tuple)


def test_a_space_of_changing_size_goes_beside_shared_memory() -> None:
    for space in (spaces.Text(4), spaces.Sequence(BOX), spaces.Graph(BOX, None)):
        chosen = choose_spaces([(space, space)] * 2, "same", shared_memory=True)
        assert chosen.observation_space == chosen.action_space == batch_space(space, 2)


# --- reset_mask -------------------------------------------------------------------------------


def test_a_mask_is_taken_from_a_copy_of_the_options() -> None:
    mask = np.array([True, False])
    options = {"reset_mask": mask, "level": 3}
    taken, rest = check_reset_mask(options, 2)
    assert taken is mask
    assert rest == {"level": 3}
    assert options == {"reset_mask": mask, "level": 3}


@pytest.mark.parametrize("options", [None, {}, {"level": 3}])
def test_without_a_mask_the_options_are_handed_on(options: Any) -> None:
    assert check_reset_mask(options, 2) == (None, options)


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        ([True, True], TypeError, "must be a numpy array, got <class 'list'>"),
        (None, TypeError, "must be a numpy array, got <class 'NoneType'>"),
        (np.array(True), ValueError, "must have shape `(2,)`, got ()"),
        (np.array([True] * 3), ValueError, "must have shape `(2,)`, got (3,)"),
        (np.array([[True, True]]), ValueError, "must have shape `(2,)`, got (1, 2)"),
        (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`, got int64"),
        (np.array([1.0, 0.0]), TypeError, "must have `dtype=np.bool_`, got float64"),
        (np.array([False, False]), ValueError, "at least one True value, got reset_mask=[False F"),
    ],
)
def test_a_malformed_mask_is_refused_in_gymnasiums_words(
    mask: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        check_reset_mask({"reset_mask": mask}, 2)
