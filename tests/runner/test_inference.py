from __future__ import annotations

from typing import Any

import numpy as np

from envbus.bus.messages import Tree
from envbus.runner.inference import fitted

LIKE: dict[str, Any] = {
    "action_logp": np.float32(0.0),
    "state_out": {"h": np.zeros(2, np.float32), "c": (np.int64(0),)},
}


def test_columns_have_the_structure_and_dtype_that_the_runners_policy_gives() -> None:
    row, wrong = fitted(
        {"action_logp": -0.5, "state_out": Tree({"h": [1, 2], "c": [3]}), "more": 1}, LIKE
    )
    assert wrong == []
    assert row.keys() == LIKE.keys()
    assert (row["action_logp"], row["action_logp"].dtype) == (-0.5, np.float32)
    np.testing.assert_array_equal(row["state_out"]["h"], [1.0, 2.0])
    assert row["state_out"]["h"].dtype == np.float32
    assert row["state_out"]["c"] == (3,)


def test_what_is_missing_or_of_another_form_is_blank_and_named() -> None:
    row, wrong = fitted({"state_out": {"h": [1.0], "c": [0]}}, LIKE)
    assert np.isnan(row["action_logp"])
    assert np.isnan(row["state_out"]["h"]).all()
    assert row["state_out"]["c"] == (0,)
    assert wrong[0] == "action_logp is missing"
    assert wrong[1].startswith("state_out: expected float32 of shape (2,)")
    for value in ("text", [[1, 2]], None, {"a": 1}):
        assert fitted({"action_logp": value}, LIKE)[1][0].startswith("action_logp: ")
