from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.policies.policy_output import PolicyAnswer, ask, owned


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float32).reshape(count, 1)


STATES = {"h": np.zeros((3, 2), np.float32)}
AFTER = {"h": np.ones((3, 2))}
GOOD = np.zeros(3, np.int64)


def test_what_has_a_row_per_observation_comes_back_as_arrays_in_the_dtypes_of_the_states() -> None:
    out = PolicyOutput([1, 2, 3], AFTER, {"logp": (0.0, 1.0, 2.0), "parts": {"a": [1, 2, 3]}})
    out = out._replace(extras={"logp": np.arange(3.0), "parts": {"a": [1, 2, 3]}})
    found = PolicyAnswer.of(out, 3, 0, STATES)
    assert found.actions.tolist() == [1, 2, 3]
    assert found.states["h"].dtype == np.float32
    assert found.extras["parts"]["a"].tolist() == [1, 2, 3]
    same = PolicyAnswer.of(PolicyOutput(found.actions, found.states, found.extras), 3, 0, STATES)
    assert same.actions is found.actions
    assert same.states["h"] is found.states["h"]
    listed = PolicyAnswer.of(PolicyOutput(["a", "bb", "c"]), 3, 0, listed=True)
    assert listed.actions == ["a", "bb", "c"]


WRONG = [
    (np.zeros(3), "returned ndarray, not a PolicyOutput"),
    (PolicyOutput(np.zeros(2)), r"actions of shape \(2,\) for 3 rows"),
    (PolicyOutput(None), "returned None for 3 observations; does it lack a `return`"),
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
        PolicyAnswer.of(out, 3, 0, STATES)


NAN = np.array([0.0, np.nan, 1.0], np.float32)


@pytest.mark.parametrize(
    "actions",
    [NAN, NAN[:, np.newaxis], NAN.astype(np.float16), {"a": GOOD, "b": (GOOD, NAN)}, list(NAN)],
)
def test_an_action_that_is_nan_is_refused(actions: Any) -> None:
    with pytest.raises(ValueError, match=r"actions that are NaN: \[?nan"):
        PolicyAnswer.of(PolicyOutput(actions), 3, 0)
    with pytest.raises(ValueError, match=r"actions that are NaN: \[?nan"):
        PolicyAnswer.of(PolicyOutput(list(NAN)), 3, 0, listed=True)
    infinite = np.full(3, np.inf)  # some Boxes have it
    assert PolicyAnswer.of(PolicyOutput(infinite), 3, 0).actions is infinite


def test_single_actions_are_counted_too() -> None:
    with pytest.raises(ValueError, match=r"actions of shape \(1,\) for 3 rows"):
        PolicyAnswer.of(PolicyOutput(["a"]), 3, 0, listed=True)


def test_states_in_a_tuple_are_compared_part_by_part() -> None:
    given = (GOOD, GOOD)
    assert len(PolicyAnswer.of(PolicyOutput(GOOD, given), 3, 0, given).states) == 2
    with pytest.raises(ValueError, match="no tuple of 2"):
        PolicyAnswer.of(PolicyOutput(GOOD, (GOOD,)), 3, 0, given)


def test_what_is_owned_changes_with_nobody() -> None:
    tree = {"a": (np.zeros(2),)}
    copy = owned(tree)
    tree["a"][0][0] = 1.0
    assert copy["a"][0].tolist() == [0.0, 0.0]
    assert owned(None) is None


def test_an_answer_is_split_and_joined_without_a_loss() -> None:
    out = PolicyOutput({"move": np.arange(5)}, rows(5), {"logp": np.arange(5.0)})
    answer = PolicyAnswer.of(out, 5, version=7)
    parts = [answer.select(slice(0, 2)), answer.select(slice(2, 5))]
    assert parts[1].actions["move"].tolist() == [2, 3, 4]
    whole = PolicyAnswer.join(parts)
    assert whole.actions["move"].tolist() == [0, 1, 2, 3, 4]
    assert whole.states[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert whole.extras["logp"].tolist() == [0, 1, 2, 3, 4]
    assert (whole.rows, whole.version, whole.versions) == (5, 7, None)


def test_parts_that_other_weights_chose_say_so_row_by_row() -> None:
    parts = [
        PolicyAnswer.of(PolicyOutput(np.zeros(count)), count, version)
        for count, version in ((2, 4), (1, 5))
    ]
    whole = PolicyAnswer.join(parts)
    assert whole.versions is not None
    assert whole.versions.tolist() == [4, 4, 5]
    own = PolicyAnswer.of(PolicyOutput(np.zeros(2), versions=np.array([8, 9])), 2, version=0)
    assert own.select(slice(1, 2)).versions.tolist() == [9]  # type: ignore[union-attr]


def test_actions_of_no_fixed_size_are_split_and_joined_as_a_list() -> None:
    answer = PolicyAnswer.of(PolicyOutput(["a", "bb", "ccc"]), 3, version=0, listed=None)
    assert answer.listed
    assert PolicyAnswer.join([answer.select(slice(0, 1)), answer.select(slice(1, 3))]).actions == [
        "a",
        "bb",
        "ccc",
    ]


def test_an_answer_is_its_own_though_the_policy_uses_its_arrays_again() -> None:
    buffer = np.zeros(3)
    answer = PolicyAnswer.of(
        PolicyOutput(buffer, buffer, {"logp": buffer}), 3, 0, np.zeros(3)
    ).owned()
    buffer += 1
    assert answer.actions.tolist() == answer.states.tolist() == [0.0] * 3
    assert answer.extras["logp"].tolist() == [0.0] * 3


def test_single_actions_are_its_own_though_the_policy_uses_their_arrays_again() -> None:
    buffer = np.zeros((2, 1))
    objects = np.empty(2, np.object_)
    objects[:] = [(buffer[0],), (buffer[1],)]
    singles = [list(buffer), [{"move": buffer[0]}, {"move": buffer[1]}], objects]
    answers = [
        PolicyAnswer.of(PolicyOutput(actions), 2, 0, listed=True).owned().actions
        for actions in singles
    ]
    buffer += 1
    assert [row.tolist() for row in answers[0]] == [[0.0], [0.0]]
    assert [row["move"].tolist() for row in answers[1]] == [[0.0], [0.0]]
    assert answers[2].dtype == np.object_
    assert [row[0].tolist() for row in answers[2]] == [[0.0], [0.0]]


class Told(Policy):
    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, **told: Any
    ) -> Any:
        return PolicyOutput(told["prev_actions"] + 1, states, {"t_too": told["t"]})


def test_what_a_policy_was_told_stands_in_columns_where_no_other_column_says_it() -> None:
    inputs = {"prev_actions": np.array([4, 5, 6]), "t": np.arange(3)}
    answer = ask(Told(), rows(3), None, 3, explore=True, inputs=inputs).owned()
    columns = {name: column.tolist() for name, column in answer.columns().items()}
    assert columns == {"prev_actions": [4, 5, 6], "t_too": [0, 1, 2]}
    assert answer.select(slice(1, 2)).columns()["prev_actions"].tolist() == [5]
    assert answer.actions.tolist() == [5, 6, 7]


def test_an_extra_has_no_name_of_a_column_of_inputs_where_there_is_one() -> None:
    out = PolicyOutput(GOOD, None, {"prev_actions": GOOD})
    assert PolicyAnswer.of(out, 3, 0).columns().keys() == {"prev_actions"}
    with pytest.raises(ValueError, match=r"named as other columns: \['prev_actions'\]"):
        PolicyAnswer.of(out, 3, 0, inputs={"prev_actions": GOOD})
