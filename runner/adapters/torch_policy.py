"""`TorchPolicy`: a PyTorch module as a policy. PyTorch is imported when one is made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space

from envbus.bus.errors import ConfigError
from envbus.runner.batches.nested import Tree, map_tree
from envbus.runner.extras import how_to_install
from envbus.runner.policies.distributions import ActionHead
from envbus.runner.policies.policy import Policy, PolicyOutput, Weights

__all__ = ["TorchPolicy"]


class TorchPolicy(Policy):
    """Calls a module without gradients.

    What it is given are tensors `(rows, ...)` on `device`, which share the batch's memory where
    that is on the CPU.

    Without an action space, `module.act(observations, states, explore)` is called. It returns
    `(actions, states, extras)`, tensors likewise; `states` is None if there are none, and `extras`
    a dict by name: `action_logp`, `vf_preds`, ...

    With one, `module(observations)` is called, or, if there are states, `module(observations,
    states)`. It returns the logits `(rows, n)` of a Discrete space, or a dict of `logits`, or of
    `means` and `log_std` of a Box, of `state_out` if there are states, and of whatever else is to
    be a column. Actions are sampled here, or the most probable ones without `explore`; a column
    `action_logp` says how probable they were. Networks are small where many envs are stepped:
    sampling in PyTorch can take longer than all else that they do.

    Args:
        module: A `torch.nn.Module`; trained in place elsewhere, or by `set_weights`. May have
            `initial_state()`, of one row.
        action_space: Of one env, Discrete or a Box of floats; None: the module chooses itself.
        seed: Of what is sampled here.
        device: Where it computes.

    Raises:
        ConfigError: The action space is another one.
    """

    def __init__(
        self,
        module: Any,
        action_space: Space[Any] | None = None,
        *,
        seed: int | None = None,
        device: Any = "cpu",
    ) -> None:
        try:
            import torch
        except ImportError as exc:
            how = how_to_install("torch")
            raise ConfigError(f"TorchPolicy needs PyTorch ({exc}): {how}") from exc
        self._torch = torch
        self.device = torch.device(device)
        self._is_on_cpu = self.device.type == "cpu"
        self.module = module.to(self.device)
        self._head = None if action_space is None else ActionHead(action_space, "TorchPolicy")
        self._rng = np.random.default_rng(seed)

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return what the module answers, or what was sampled of that, as arrays."""
        with self._torch.inference_mode():
            seen = map_tree(self._to_tensor, observations)
            before = None if states is None else map_tree(self._to_tensor, states)
            if self._head is not None:
                given = self.module(seen) if before is None else self.module(seen, before)
                return self._choose(self._head, given, explore)
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
            RuntimeError: Names or shapes differ; nothing was changed.
        """
        loaded = {name: self._torch.as_tensor(_writable(value)) for name, value in weights.items()}
        before = copy.deepcopy(self.module.state_dict())
        try:
            self.module.load_state_dict(loaded)
        except BaseException:  # PyTorch has loaded those that fit
            self.module.load_state_dict(before)
            raise
        super().set_weights(weights, version)

    def _choose(self, head: ActionHead, given: Any, explore: bool) -> PolicyOutput:
        """Return actions, and what else the module has given."""
        name = "logits" if head.is_discrete else "means"
        if not isinstance(given, Mapping):
            given = {name: given}
        found = {key: map_tree(_to_array, value) for key, value in given.items()}
        outputs = found.pop(name, None)
        if outputs is None or outputs.shape[1:] != (head.size,):
            got = "none" if outputs is None else f"of shape {outputs.shape}"
            raise ValueError(
                f"the module must give {name!r}, (rows, {head.size}) for this action space; there "
                f"are {got}, and {sorted(found)}"
            )
        if not head.is_discrete and "log_std" not in found:
            raise ValueError("the module gives 'means' without 'log_std', (n,) or (rows, n)")
        states = found.pop("state_out", None)
        actions, found["action_logp"] = head.choose(
            outputs, self._rng if explore else None, found.pop("log_std", None)
        )
        return PolicyOutput(actions, states, found)

    def _to_tensor(self, array: Any) -> Any:
        if self._is_on_cpu and type(array) is np.ndarray:  # in a quarter of the time
            return self._torch.from_numpy(array)
        return self._torch.as_tensor(np.asarray(array), device=self.device)


def _to_array(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)


def _writable(value: Any) -> Any:
    """Return weights, those of an array that is read-only as a copy: PyTorch warns of such."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return value.copy()
    return value
