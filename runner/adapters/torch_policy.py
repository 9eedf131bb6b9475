"""`TorchPolicy`: a PyTorch module as a policy. PyTorch is imported when one is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from envbus.runner.nested import Tree, map_tree
from envbus.runner.policies import Policy, PolicyOutput, Weights

__all__ = ["TorchPolicy"]


class TorchPolicy(Policy):
    """Calls `module.act(observations, states, explore)` without gradients.

    What it is given are tensors `(rows, ...)` on `device`, which share the batch's memory where
    that is on the CPU. It returns `(actions, states, extras)`, tensors likewise; `states` is None
    if there are none, and `extras` a dict by name: `action_logp`, `vf_preds`, ...

    Args:
        module: A `torch.nn.Module` with that method; trained in place elsewhere, or by
            `set_weights`. May have `initial_state()`, of one row.
        device: Where it computes.
    """

    def __init__(self, module: Any, *, device: Any = "cpu") -> None:
        import torch

        self._torch = torch
        self.device = torch.device(device)
        self.module = module.to(self.device)

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return what the module answers, as arrays."""
        with self._torch.inference_mode():
            seen = map_tree(self._to_tensor, observations)
            before = None if states is None else map_tree(self._to_tensor, states)
            actions, after, extras = self.module.act(seen, before, explore)
        after = None if after is None else map_tree(_to_array, after)
        return PolicyOutput(map_tree(_to_array, actions), after, map_tree(_to_array, extras))

    def initial_state(self) -> Tree:
        """Return what the module has as its first state."""
        if not hasattr(self.module, "initial_state"):
            return None
        state = self.module.initial_state()
        return None if state is None else map_tree(_to_array, state)

    def get_weights(self) -> Weights:
        """Return the module's `state_dict` as arrays."""
        return {name: _to_array(value).copy() for name, value in self.module.state_dict().items()}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Load a `state_dict` of arrays, or tensors.

        Raises:
            RuntimeError: Names or shapes differ.
        """
        loaded = {name: self._torch.as_tensor(value) for name, value in weights.items()}
        self.module.load_state_dict(loaded)
        super().set_weights(weights, version)

    def _to_tensor(self, array: Any) -> Any:
        return self._torch.as_tensor(np.asarray(array), device=self.device)


def _to_array(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)
