from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.mlp import MlpPolicy, policy_from_weights

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
