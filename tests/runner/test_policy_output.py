from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.policies import PolicyOutput
from envbus.runner.policy_output import checked_output, owned

STATES = {"h": np.zeros((3, 2), np.float32)}
AFTER = {"h": np.ones((3, 2))}
GOOD = np.zeros(3, np.int64)


def test_what_has_a_row_per_observation_comes_back_as_arrays_in_the_dtypes_of_the_states() -> None:
    out = PolicyOutput([1, 2, 3], AFTER, {"logp": (0.0, 1.0, 2.0), "parts": {"a": [1, 2, 3]}})
    out = out._replace(extras={"logp": np.arange(3.0), "parts": {"a": [1, 2, 3]}})
    found = checked_output(out, 3, STATES)
    assert found.actions.tolist() == [1, 2, 3]
    assert found.states["h"].dtype == np.float32
    assert found.extras["parts"]["a"].tolist() == [1, 2, 3]
    same = checked_output(found, 3, STATES)
    assert same.actions is found.actions
    assert same.states["h"] is found.states["h"]
    listed = checked_output(PolicyOutput(["a", "bb", "c"]), 3, listed=True)
    assert listed.actions == ["a", "bb", "c"]


WRONG = [
    (np.zeros(3), "returned ndarray, not a PolicyOutput"),
    (PolicyOutput(np.zeros(2)), r"actions of shape \(2,\) for 3 rows"),
    (PolicyOutput(np.int64(1)), r"actions of shape \(\) for 3 rows"),
    (PolicyOutput((GOOD, np.zeros((1, 2)))), r"actions of shape \(1, 2\) for 3 rows"),
    (PolicyOutput(GOOD, AFTER, {"vf": np.zeros(1)}), r"vf of shape \(1,\) for 3 rows"),
    (PolicyOutput(GOOD, AFTER, {"vf": 0.0}), r"vf of shape \(\) for 3 rows"),
    (PolicyOutput(GOOD, AFTER, {"obs": GOOD}), r"named as other columns: \['obs'\]"),
    (PolicyOutput(GOOD, AFTER, [GOOD]), "extras of list, not by name"),  # type: ignore[arg-type]  # on purpose
    (PolicyOutput(GOOD), "has an initial_state, and returned no states"),
    (PolicyOutput(GOOD, AFTER["h"]), r"states that are no dict of \['h'\]"),
    (PolicyOutput(GOOD, {"h": np.zeros((1, 2))}), r"states\['h'\] of shape \(1, 2\) for 3 rows"),
    (PolicyOutput(GOOD, {"h": np.zeros((3, 5))}), r"where initial_state has \(2,\)"),
    (PolicyOutput(GOOD, {"h": np.zeros((3, 2), complex)}), "of complex128, where initial_state"),
    (PolicyOutput(GOOD, AFTER, versions=np.zeros(1, np.int64)), r"versions of shape \(1,\)"),
]


@pytest.mark.parametrize(("out", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_does_not_fit_is_refused_and_named(out: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        checked_output(out, 3, STATES)


NAN = np.array([0.0, np.nan, 1.0], np.float32)


@pytest.mark.parametrize(
    "actions",
    [NAN, NAN[:, np.newaxis], NAN.astype(np.float16), {"a": GOOD, "b": (GOOD, NAN)}, list(NAN)],
)
def test_an_action_that_is_nan_is_refused(actions: Any) -> None:
    with pytest.raises(ValueError, match=r"actions that are NaN: \[?nan"):
        checked_output(PolicyOutput(actions), 3)
    with pytest.raises(ValueError, match=r"actions that are NaN: \[?nan"):
        checked_output(PolicyOutput(list(NAN)), 3, listed=True)
    infinite = np.full(3, np.inf)  # some Boxes have it
    assert checked_output(PolicyOutput(infinite), 3).actions is infinite


def test_single_actions_are_counted_too() -> None:
    with pytest.raises(ValueError, match=r"actions of shape \(1,\) for 3 rows"):
        checked_output(PolicyOutput(["a"]), 3, listed=True)


def test_states_in_a_tuple_are_compared_part_by_part() -> None:
    given = (GOOD, GOOD)
    assert len(checked_output(PolicyOutput(GOOD, given), 3, given).states) == 2
    with pytest.raises(ValueError, match="no tuple of 2"):
        checked_output(PolicyOutput(GOOD, (GOOD,)), 3, given)


def test_what_is_owned_changes_with_nobody() -> None:
    tree = {"a": (np.zeros(2),)}
    copy = owned(tree)
    tree["a"][0][0] = 1.0
    assert copy["a"][0].tolist() == [0.0, 0.0]
    assert owned(None) is None
