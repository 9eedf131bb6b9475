from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate

from envbus.bus.errors import ConfigError
from envbus.runner.policies.policy import (
    ConstantPolicy,
    FunctionPolicy,
    PolicyOutput,
    RandomPolicy,
    parse_policy,
    zero_action,
)

SPACES: list[Space[Any]] = [
    spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    spaces.Box(2.0, 3.0, (2,), np.float64),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4], start=[0, 7]),
    spaces.MultiBinary(4),
    spaces.Text(5),
    spaces.Text(5, min_length=2, charset="xyz"),
    spaces.OneOf([spaces.Discrete(2), spaces.MultiBinary(2)]),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(-1, 1), spaces.Text(3)])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_zero_action_is_in_its_space(space: Space[Any]) -> None:
    assert space.contains(zero_action(space))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_zero_action_of_a_batched_space_is_in_each_envs_space(space: Space[Any]) -> None:
    batched = batch_space(space, 3)
    actions = list(iterate(batched, zero_action(batched)))
    assert len(actions) == 3
    assert all(space.contains(action) for action in actions)


def test_zero_is_zero_where_the_space_has_it() -> None:
    assert zero_action(spaces.Discrete(5, start=-2)) == 0
    assert zero_action(spaces.Discrete(3, start=5)) == 5
    assert zero_action(spaces.Box(2.0, 3.0)).tolist() == [2.0]


def test_a_space_without_zero_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no zero action is known for Sequence; use another"):
        zero_action(spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]))


def test_a_seeded_random_policy_gives_the_same_again() -> None:
    def sample(rows: int) -> Any:
        policy = parse_policy("random")(spaces.Discrete(9), 1)
        batches = [policy.compute_actions(np.zeros((n, 2)), None).actions for n in (8, rows)]
        assert [len(batch) for batch in batches] == [8, rows]
        return np.concatenate(batches)

    for rows in (3, 8, 20):
        assert np.array_equal(sample(rows), sample(rows))
        assert sample(rows)[:8].tolist() == sample(8)[:8].tolist()


def test_a_random_policy_heeds_an_action_mask() -> None:
    mask = np.tile(np.array([0, 1, 0, 1], np.int8), (4000, 1))
    seen = {"observation": np.zeros((4000, 2)), "action_mask": mask}
    first, again = (
        RandomPolicy(spaces.Discrete(4, start=3), 1).compute_actions(seen, None).actions
        for _ in range(2)
    )
    assert np.array_equal(first, again)
    assert first.dtype == np.int64
    assert (first == 4).mean() == pytest.approx(0.5, abs=0.05)
    assert set(first) == {4, 6}
    mask[7] = 0
    with pytest.raises(ValueError, match="the action_mask of row 7 allows no action"):
        RandomPolicy(spaces.Discrete(4), 1).compute_actions(seen, None)
    other = RandomPolicy(spaces.MultiBinary(2), 1).compute_actions(seen, None).actions
    assert other.shape == (4000, 2)


def test_an_import_path_names_a_function_also_a_method() -> None:
    assert parse_policy("collections:OrderedDict.fromkeys") is not None


def test_a_constant_policy_gives_its_action_to_each_row() -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1.0, 1.0, (2,)))
    for action, wanted in ((None, 0), ({"a": 2, "b": np.ones(2, np.float32)}, 2)):
        policy = ConstantPolicy(space, action)
        for rows in (3, 1, 3):
            actions = policy.compute_actions(np.zeros((rows, 4)), None).actions
            assert actions["a"].tolist() == [wanted] * rows
            assert actions["b"].shape == (rows, 2)


@pytest.mark.parametrize("make", [RandomPolicy, ConstantPolicy])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(3), spaces.Text(4))),
        spaces.Dict(a=spaces.Discrete(3), b=spaces.Text(3)),
    ],
)
def test_actions_without_a_fixed_size_come_one_by_one(space: Space[Any], make: Any) -> None:
    actions = make(space).compute_actions(np.zeros((3, 4)), None).actions
    assert type(actions) is list
    assert len(actions) == 3
    assert all(action in space for action in actions)


def test_a_function_may_give_actions_or_a_whole_output() -> None:
    seen = np.arange(3)
    assert FunctionPolicy(lambda rows: rows + 1).compute_actions(seen, 5) == (
        pytest.approx(seen + 1),
        5,
        {},
        None,
    )
    output = PolicyOutput(seen, None, {"logp": seen})
    assert FunctionPolicy(lambda rows: output).compute_actions(seen, 5) is output


def test_setting_weights_counts_the_version() -> None:
    policy = FunctionPolicy(lambda rows: rows)
    policy.set_weights({})
    assert policy.policy_version == 1
    policy.set_weights({}, 9)
    assert policy.policy_version == 9


def acts_on_nothing() -> None:
    """No policy."""


def acts_on_three(observations: Any, action_space: Any, state: Any) -> None:
    """No policy either."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "random, zero or module:function"),
        ("best", "random, zero or module:function"),
        ("module:", "random, zero or module:function"),
        (":function", "random, zero or module:function"),
        ("no_such_module:act", "cannot import the policy's module 'no_such_module'"),
        ("math:act", "module 'math' has no 'act'"),
        ("math:pi", "not a function but a float"),
        (
            f"{__name__}:acts_on_nothing",
            r"called as acts_on_nothing\(observations, action_space\).*too many positional",
        ),
        (f"{__name__}:acts_on_three", r"acts_on_three\(.*missing a required argument: 'state'"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policy(text)


def test_a_script_that_ends_when_it_is_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_without_a_guard.py").write_text("raise SystemExit(3)", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'script_without_a_guard': SystemExit: 3"):
        parse_policy("script_without_a_guard:act")
