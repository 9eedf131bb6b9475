from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.mlp import MlpPolicy, policy_from_weights

SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
ROWS = np.random.default_rng(0).standard_normal((2000, 3)).astype(np.float32)


def test_samples_of_a_categorical_come_as_often_as_their_logp_says() -> None:
    policy = MlpPolicy(SEEN, spaces.Discrete(3, start=5), seed=0)
    same = np.repeat(ROWS[:1], 20000, axis=0)
    actions, states, extras, _ = policy.compute_actions(same, None)
    assert states is None
    assert actions.dtype == np.int64
    for action in (5, 6, 7):
        found = actions == action
        assert found.mean() == pytest.approx(math.exp(extras["action_logp"][found][0]), abs=0.015)
    assert extras["vf_preds"].shape == (20000,)


def test_the_logp_of_a_gaussian_is_that_of_its_density() -> None:
    policy = MlpPolicy(SEEN, spaces.Box(-2.0, 2.0, (2,), np.float32), seed=0)
    weights = dict(policy.get_weights())
    weights["log_std"] = np.array([0.5, -1.0], np.float32)
    policy.set_weights(weights)
    means = policy.compute_actions(ROWS, None, explore=False).actions
    actions, _, extras, _ = policy.compute_actions(ROWS, None)
    std = np.exp([0.5, -1.0])
    density = -0.5 * ((actions - means) / std) ** 2 - np.log(std * math.sqrt(2 * math.pi))
    assert extras["action_logp"] == pytest.approx(density.sum(axis=1), abs=1e-3)
    assert (actions - means).std(axis=0) == pytest.approx(std, rel=0.1)


def test_without_exploring_it_gives_the_best_action_each_time() -> None:
    policy = MlpPolicy(SEEN, spaces.Discrete(4), seed=1)
    first, second = (policy.compute_actions(ROWS, None, explore=False).actions for _ in range(2))
    assert np.array_equal(first, second)


def test_weights_make_another_policy_the_same_and_count_the_version() -> None:
    one, other = (MlpPolicy(SEEN, spaces.Discrete(4), seed=seed) for seed in (1, 2))
    weights = one.get_weights()
    other.set_weights(weights)
    assert other.policy_version == 1
    other.set_weights(weights, 7)
    assert other.policy_version == 7
    best = [policy.compute_actions(ROWS, None, explore=False).actions for policy in (one, other)]
    assert np.array_equal(*best)


def test_a_call_has_the_weights_that_there_were_when_it_began() -> None:
    seen: list[Any] = []

    class Rows(np.ndarray):  # type: ignore[type-arg]  # tells when the first layer is computed
        def __matmul__(self, other: Any) -> Any:
            seen.append(other)
            policy.set_weights({name: np.zeros_like(old) for name, old in weights.items()})
            return np.asarray(self) @ other

    policy = MlpPolicy(SEEN, spaces.Discrete(4), seed=1)
    weights = policy.get_weights()
    expected = policy.compute_actions(ROWS, None, explore=False)
    found = policy.compute_actions(ROWS.view(Rows), None, explore=False)
    assert seen
    assert np.array_equal(found.extras["vf_preds"], expected.extras["vf_preds"])
    assert np.array_equal(found.extras["action_logp"], expected.extras["action_logp"])
    after = policy.compute_actions(ROWS, None, explore=False)
    assert not after.extras["vf_preds"].any()


def test_weights_that_do_not_fit_change_nothing() -> None:
    policy = MlpPolicy(SEEN, spaces.Discrete(4), hidden=[8])
    weights = dict(policy.get_weights())
    with pytest.raises(ValueError, match="named"):
        policy.set_weights({})
    with pytest.raises(ValueError, match=r"pi.0.weight has shape \(1,\)"):
        policy.set_weights({**weights, "pi.0.weight": np.zeros(1)})
    assert policy.policy_version == 0


@pytest.mark.parametrize(
    ("seen", "acts"),
    [(spaces.Discrete(2), spaces.Discrete(2)), (SEEN, spaces.MultiBinary(2))],
    ids=str,
)
def test_other_spaces_are_refused(seen: spaces.Space, acts: spaces.Space) -> None:
    with pytest.raises(ConfigError, match="MlpPolicy"):
        MlpPolicy(seen, acts)


BOX, TWO = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)


@pytest.mark.parametrize("hidden", [(), (8,), (16, 4, 8)])
@pytest.mark.parametrize("action_space", [TWO, spaces.Box(-1.0, 1.0, (2,), np.float32)])
def test_an_mlp_of_the_same_layers_is_made_that_acts_alike(hidden: Any, action_space: Any) -> None:
    policy = MlpPolicy(BOX, action_space, hidden=hidden, seed=1)
    weights = policy.get_weights()
    copy = policy_from_weights(BOX, action_space, weights)
    copy.set_weights(weights, 3)
    rows = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
    one, other = (each.compute_actions(rows, None, explore=False) for each in (policy, copy))
    np.testing.assert_array_equal(one.actions, other.actions)
    assert copy.policy_version == 3


def test_a_model_in_onnx_is_run_by_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = SimpleNamespace(OnnxPolicy=lambda model, space: (model, space))
    monkeypatch.setitem(sys.modules, "envbus.runner.adapters.onnx_policy", adapter)
    made: Any = policy_from_weights(BOX, TWO, {"model": b"net"})
    assert made == (b"net", TWO)


def test_other_weights_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="give a function that makes the policy"):
        policy_from_weights(BOX, TWO, {"layer.weight": np.zeros(3)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dtype", "large"), [(np.float32, 3.3e38), (np.float64, 1e300), (np.float16, 6e4)]
)
def test_the_largest_finite_numbers_make_no_nan(dtype: Any, large: float) -> None:
    signs = np.where(np.random.default_rng(0).random((20, 32)) < 0.5, -1.0, 1.0)
    rows = (signs * large).astype(dtype)
    space = spaces.Box(-np.inf, np.inf, (32,), dtype)
    for seed in range(10):
        policy = MlpPolicy(space, spaces.Discrete(2), seed=seed)
        assert np.isfinite(policy.compute_actions(rows, None).extras["vf_preds"]).all()
