from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.adapters.torch_policy import TorchPolicy

torch: Any = pytest.importorskip("torch")


class Module(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def initial_state(self) -> Any:
        return {"count": torch.zeros(1)}

    def act(self, observations: Any, states: Any, explore: bool) -> Any:
        logits = self.linear(observations)
        return logits.argmax(-1), {"count": states["count"] + 1}, {"logits": logits}


def test_tensors_go_in_and_arrays_come_out() -> None:
    policy = TorchPolicy(Module())
    states = {"count": np.zeros((4, 1), np.float32)}
    out = policy.compute_actions(np.ones((4, 3), np.float32), states)
    assert out.actions.shape == (4,)
    assert out.states["count"].tolist() == [[1.0]] * 4
    assert out.extras["logits"].dtype == np.float32
    assert policy.initial_state()["count"].tolist() == [0.0]


def test_weights_are_arrays_and_make_another_module_the_same() -> None:
    one, other = TorchPolicy(Module()), TorchPolicy(Module())
    other.set_weights(one.get_weights())
    assert other.policy_version == 1
    rows = np.ones((1, 3), np.float32)
    state = {"count": np.zeros((1, 1), np.float32)}
    logits = [policy.compute_actions(rows, state).extras["logits"] for policy in (one, other)]
    assert np.array_equal(*logits)
