"""`MlpPolicy`: two small networks in NumPy, for actions and for values.

For evaluation, baselines and tests without a deep-learning library; it does not learn by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from envbus.actors.spaces.spaces import shown
from envbus.bus.errors import ConfigError
from envbus.runner.batches.nested import Tree
from envbus.runner.extras import onnx_adapter
from envbus.runner.policies.distributions import ActionHead
from envbus.runner.policies.policy import Policy, PolicyOutput, Weights

__all__ = ["MlpPolicy", "policy_from_weights"]

_Array: TypeAlias = npt.NDArray[np.float32]
_Layers: TypeAlias = tuple[tuple[_Array, _Array], ...]


#: What larger numbers of observations count as.
_LARGEST = 1e18


class _Networks(NamedTuple):
    """All weights of one version; nothing writes to them."""

    pi: _Layers
    vf: _Layers
    log_std: _Array


class MlpPolicy(Policy):
    """Tanh layers; a categorical distribution for Discrete, a diagonal Gaussian for Box actions.

    Extras: `action_logp` and `vf_preds`, `(rows,)` float32. Gaussian actions are not clipped
    (an `EnvRunner` does that to what it sends), so that `action_logp` is theirs.

    Args:
        observation_space: A Box; its arrays are flattened. Others: `Flatten` first. Numbers beyond
            1e18 count as 1e18.
        action_space: Discrete or Box of floats.
        hidden: Units of each hidden layer, of both networks.
        seed: Of the weights and of what is sampled.

    Raises:
        ConfigError: A space is another one.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        hidden: Sequence[int] = (64, 64),
        seed: int | None = None,
    ) -> None:
        if not isinstance(observation_space, spaces.Box):
            raise ConfigError(
                f"MlpPolicy takes Box observations, not {shown(observation_space)}; use Flatten"
            )
        self._head = ActionHead(action_space, "MlpPolicy")
        outputs = self._head.size
        self._rng = np.random.default_rng(seed)
        sizes = [math.prod(observation_space.shape), *hidden]
        #: Set as a whole: a call in another thread has the old ones or the new ones.
        self._networks = _Networks(
            self._layers([*sizes, outputs], 0.01),
            self._layers([*sizes, 1], 1.0),
            np.zeros(outputs, np.float32),
        )

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return actions in the dtype of the space."""
        inputs = observations.reshape(len(observations), -1)
        if inputs.dtype != np.float64:
            inputs = inputs.astype(np.float32, copy=False)
        # Sums of larger ones are infinite, or NaN: as logits for all rows an end, as values silent.
        inputs = np.clip(inputs, -_LARGEST, _LARGEST).astype(np.float32, copy=False)
        pi, vf, log_std = self._networks
        if inputs.shape[1] != len(pi[0][0]):
            raise ValueError(
                f"this MlpPolicy is for observations of {len(pi[0][0])} numbers, and one here has "
                f"{inputs.shape[1]}: make it with the observation space of these envs"
            )
        outputs = _forward(pi, inputs)
        values = _forward(vf, inputs)[:, 0]
        rng = self._rng if explore else None
        actions, logp = self._head.choose(outputs, rng, log_std)
        return PolicyOutput(actions, states, {"action_logp": logp, "vf_preds": values})

    def get_weights(self) -> Weights:
        """Return `pi.0.weight`, `pi.0.bias`, ..., `vf. ...` and, of a Gaussian, `log_std`."""
        return {name: array.copy() for name, array in self._named()}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Take over arrays of the same names and shapes; from any thread, for later calls.

        Raises:
            ValueError: Names or shapes differ; nothing was changed.
        """
        own = dict(self._named())
        if weights.keys() != own.keys():
            raise ValueError(f"weights are named {sorted(weights)}, here {sorted(own)}")
        for name, array in own.items():
            if np.shape(weights[name]) != array.shape:
                raise ValueError(f"{name} has shape {np.shape(weights[name])}, not {array.shape}")
        new = {name: np.array(weights[name], np.float32) for name in own}

        def layers(prefix: str, former: _Layers) -> _Layers:
            names = [f"{prefix}.{index}" for index in range(len(former))]
            return tuple((new[f"{name}.weight"], new[f"{name}.bias"]) for name in names)

        pi, vf, log_std = self._networks
        self._networks = _Networks(layers("pi", pi), layers("vf", vf), new.get("log_std", log_std))
        super().set_weights(weights, version)

    def _layers(self, sizes: Sequence[int], last_gain: float) -> _Layers:
        """Return orthogonal weights and zero biases, as PPO's implementations begin with."""
        gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [last_gain]
        return tuple(
            (self._orthogonal(rows, columns, gain), np.zeros(columns, np.float32))
            for rows, columns, gain in zip(sizes[:-1], sizes[1:], gains, strict=True)
        )

    def _orthogonal(self, rows: int, columns: int, gain: float) -> _Array:
        normal = self._rng.standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q = q * np.sign(np.diag(r))
        scaled: _Array = (gain * (q if rows >= columns else q.T)).astype(np.float32)
        return scaled

    def _named(self) -> list[tuple[str, _Array]]:
        named = []
        pi, vf, log_std = self._networks
        for prefix, layers in (("pi", pi), ("vf", vf)):
            for index, (weight, bias) in enumerate(layers):
                named += [(f"{prefix}.{index}.weight", weight), (f"{prefix}.{index}.bias", bias)]
        return named if self._head.is_discrete else [*named, ("log_std", log_std)]


def _forward(layers: _Layers, inputs: _Array) -> _Array:
    for weight, bias in layers[:-1]:
        inputs = np.tanh(inputs @ weight + bias)
    weight, bias = layers[-1]
    return inputs @ weight + bias


def policy_from_weights(
    observation_space: Space[Any], action_space: Space[Any], weights: Mapping[str, Any]
) -> Policy:
    """Return an `OnnxPolicy` of `{"model": bytes}`, or else an `MlpPolicy` of such layers.

    Raises:
        ConfigError: They are the weights of neither, or onnxruntime is not installed.
    """
    if isinstance(weights.get("model"), bytes):
        policy: Policy = onnx_adapter("run").OnnxPolicy(weights["model"], action_space)
        return policy
    biases = sorted(
        (int(name.split(".")[1]), len(value))
        for name, value in weights.items()
        if name.startswith("pi.") and name.endswith(".bias")
    )
    if not biases:
        raise ConfigError(
            f"these are the weights of neither an MlpPolicy nor an ONNX model: {sorted(weights)}; "
            "give a function that makes the policy"
        )
    return MlpPolicy(observation_space, action_space, hidden=[size for _, size in biases[:-1]])
