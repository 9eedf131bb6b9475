from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.adapters.torch_policy import TorchPolicy

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


class Module(torch.nn.Module):
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


def test_weights_that_do_not_fit_change_nothing() -> None:
    policy = TorchPolicy(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)))
    before = policy.get_weights()
    wrong = {name: value + 1.0 for name, value in before.items()} | {"1.bias": np.zeros(5)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.bias"):
        policy.set_weights(wrong)
    after = policy.get_weights()
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    assert policy.policy_version == 0


@pytest.mark.filterwarnings("error")
def test_read_only_weights_as_a_group_sends_them_are_taken_without_a_warning() -> None:
    # PyTorch warns once per process, unless it is told otherwise.
    torch.set_warn_always(True)
    try:
        policy = TorchPolicy(Module())
        weights = policy.get_weights()
        for value in weights.values():
            value.flags.writeable = False
        policy.set_weights(weights)
    finally:
        torch.set_warn_always(False)
    assert policy.policy_version == 1


DISCRETE = spaces.Discrete(3, start=5)
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
ROWS = np.linspace(-1.0, 1.0, 12_000, dtype=np.float32).reshape(4000, 3)


class Named(torch.nn.Module):
    """Gives what it was made with, beside a linear layer's outputs."""

    def __init__(self, name: str, outputs: int, **others: Any) -> None:
        super().__init__()
        self.name, self.others = name, others
        self.linear = torch.nn.Linear(3, outputs)

    def forward(self, observations: Any) -> Any:
        return {self.name: self.linear(observations), **self.others}


def logps_of(policy: TorchPolicy, rows: Any) -> Any:
    with torch.no_grad():
        return policy.module(torch.as_tensor(rows)).log_softmax(1).numpy()


def test_logits_are_sampled_and_the_actions_probability_is_exact() -> None:
    torch.manual_seed(3)
    policy = TorchPolicy(torch.nn.Linear(3, 3), DISCRETE, seed=1)
    out = policy.compute_actions(ROWS, None)
    logps = logps_of(policy, ROWS)
    assert out.actions.dtype == DISCRETE.dtype
    chosen = logps[np.arange(len(ROWS)), out.actions - 5]
    np.testing.assert_allclose(out.extras["action_logp"], chosen, atol=1e-5)
    shares = np.bincount(out.actions - 5) / len(ROWS)
    np.testing.assert_allclose(shares, np.exp(logps).mean(axis=0), atol=0.03)


def test_what_is_sampled_is_reproducible_by_its_seed() -> None:
    module = torch.nn.Linear(3, 3)

    def actions(seed: int) -> Any:
        policy = TorchPolicy(module, DISCRETE, seed=seed)
        return np.stack([policy.compute_actions(ROWS[:50], None).actions for _ in range(2)])

    assert np.array_equal(actions(1), actions(1))
    assert not np.array_equal(actions(1), actions(2))
    assert not np.array_equal(*actions(1))


def test_without_explore_the_most_probable_action_is_taken() -> None:
    policy = TorchPolicy(torch.nn.Linear(3, 3), DISCRETE, seed=1)
    out = policy.compute_actions(ROWS, None, explore=False)
    logps = logps_of(policy, ROWS)
    assert np.array_equal(out.actions, logps.argmax(1) + 5)
    np.testing.assert_allclose(out.extras["action_logp"], logps.max(1), atol=1e-5)


def test_means_of_a_box_are_sampled_with_their_deviation_and_the_rest_are_columns() -> None:
    log_std = torch.full((2,), -1.0)
    module = Named("means", 2, log_std=log_std, vf_preds=torch.arange(4000.0))
    out = TorchPolicy(module, BOX, seed=1).compute_actions(ROWS, None)
    with torch.no_grad():
        normal = torch.distributions.Normal(module.linear(torch.as_tensor(ROWS)), log_std.exp())
        logp = normal.log_prob(torch.as_tensor(out.actions)).sum(1).numpy()
    np.testing.assert_allclose(out.extras["action_logp"], logp, atol=1e-4)
    assert out.extras["vf_preds"].tolist() == list(range(4000))
    assert out.extras.keys() == {"action_logp", "vf_preds"}


def test_a_module_with_states_is_given_them() -> None:
    class Counting(torch.nn.Module):
        def initial_state(self) -> Any:
            return torch.zeros(1)

        def forward(self, observations: Any, states: Any) -> Any:
            return {"logits": observations, "state_out": states + 1}

    policy = TorchPolicy(Counting(), DISCRETE)
    out = policy.compute_actions(ROWS[:2], np.ones((2, 1), np.float32))
    assert out.states.tolist() == [[2.0], [2.0]]
    assert out.extras.keys() == {"action_logp"}


def test_what_does_not_fit_the_action_space_is_told() -> None:
    with pytest.raises(ConfigError, match="TorchPolicy gives Discrete or Box"):
        TorchPolicy(Module(), spaces.MultiBinary(3))
    for module, space in (
        (torch.nn.Linear(3, 2), DISCRETE),
        (Named("logit", 3), DISCRETE),
        (Named("means", 2), BOX),
    ):
        with pytest.raises(ValueError, match="the module"):
            TorchPolicy(module, space).compute_actions(ROWS[:1], None)
