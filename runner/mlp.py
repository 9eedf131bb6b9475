"""`MlpPolicy`: two small networks in NumPy, for actions and for values.

For evaluation, baselines and tests without a deep-learning library; it does not learn by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from envbus.bus.errors import ConfigError
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy, PolicyOutput, Weights

__all__ = ["MlpPolicy"]

_Array: TypeAlias = npt.NDArray[np.float32]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class MlpPolicy(Policy):
    """Tanh layers; a categorical distribution for Discrete, a diagonal Gaussian for Box actions.

    Extras: `action_logp` and `vf_preds`, `(rows,)` float32. Gaussian actions are not clipped
    (`ClipActions` does that to what is sent), so that `action_logp` is theirs.

    Args:
        observation_space: A Box; its arrays are flattened. Others: `Flatten` first.
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
                f"MlpPolicy takes Box observations, not {observation_space}; use Flatten"
            )
        self._start: int | None = None
        if isinstance(action_space, spaces.Discrete):
            self._start, outputs = int(action_space.start), int(action_space.n)
        elif isinstance(action_space, spaces.Box) and action_space.dtype.kind == "f":
            outputs = math.prod(action_space.shape)
        else:
            raise ConfigError(f"MlpPolicy gives Discrete or Box actions, not {action_space}")
        self._space: Any = action_space
        self._rng = np.random.default_rng(seed)
        sizes = [math.prod(observation_space.shape), *hidden]
        self._pi = self._layers([*sizes, outputs], 0.01)
        self._vf = self._layers([*sizes, 1], 1.0)
        self._log_std = np.zeros(outputs, np.float32)

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return actions in the dtype of the space."""
        inputs = observations.reshape(len(observations), -1).astype(np.float32, copy=False)
        outputs = _forward(self._pi, inputs)
        values = _forward(self._vf, inputs)[:, 0]
        choose = self._gaussian if self._start is None else self._categorical
        actions, logp = choose(outputs, explore)
        return PolicyOutput(actions, states, {"action_logp": logp, "vf_preds": values})

    def get_weights(self) -> Weights:
        """Return `pi.0.weight`, `pi.0.bias`, ..., `vf. ...` and, of a Gaussian, `log_std`."""
        return {name: array.copy() for name, array in self._named()}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Take over arrays of the same names and shapes.

        Raises:
            ValueError: Names or shapes differ; nothing was changed.
        """
        own = dict(self._named())
        if weights.keys() != own.keys():
            raise ValueError(f"weights are named {sorted(weights)}, here {sorted(own)}")
        for name, array in own.items():
            if np.shape(weights[name]) != array.shape:
                raise ValueError(f"{name} has shape {np.shape(weights[name])}, not {array.shape}")
        for name, array in own.items():
            array[...] = weights[name]
        super().set_weights(weights, version)

    def _categorical(self, logits: _Array, explore: bool) -> tuple[Any, _Array]:
        shifted = logits - logits.max(axis=1, keepdims=True)
        logps = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        if explore:  # the largest of logits with Gumbel noise is a sample of the distribution
            noise = self._rng.standard_exponential(logps.shape, np.float32)
            chosen = (logps - np.log(noise)).argmax(axis=1)
        else:
            chosen = logps.argmax(axis=1)
        logp = logps[np.arange(len(chosen)), chosen]
        return (chosen + self._start).astype(self._space.dtype, copy=False), logp

    def _gaussian(self, means: _Array, explore: bool) -> tuple[Any, _Array]:
        noise = (
            self._rng.standard_normal(means.shape, np.float32) if explore else np.zeros_like(means)
        )
        flat = means + noise * np.exp(self._log_std)
        logp = -(0.5 * np.square(noise) + self._log_std + np.float32(_HALF_LOG_2PI)).sum(axis=1)
        shape = (len(flat), *self._space.shape)
        return flat.reshape(shape).astype(self._space.dtype, copy=False), logp

    def _layers(self, sizes: Sequence[int], last_gain: float) -> list[tuple[_Array, _Array]]:
        """Return orthogonal weights and zero biases, as PPO's implementations begin with."""
        gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [last_gain]
        return [
            (self._orthogonal(rows, columns, gain), np.zeros(columns, np.float32))
            for rows, columns, gain in zip(sizes[:-1], sizes[1:], gains, strict=True)
        ]

    def _orthogonal(self, rows: int, columns: int, gain: float) -> _Array:
        normal = self._rng.standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q = q * np.sign(np.diag(r))
        return (gain * (q if rows >= columns else q.T)).astype(np.float32)

    def _named(self) -> list[tuple[str, _Array]]:
        named = []
        for prefix, layers in (("pi", self._pi), ("vf", self._vf)):
            for index, (weight, bias) in enumerate(layers):
                named += [(f"{prefix}.{index}.weight", weight), (f"{prefix}.{index}.bias", bias)]
        return named if self._start is not None else [*named, ("log_std", self._log_std)]


def _forward(layers: list[tuple[_Array, _Array]], inputs: _Array) -> _Array:
    for weight, bias in layers[:-1]:
        inputs = np.tanh(inputs @ weight + bias)
    weight, bias = layers[-1]
    return inputs @ weight + bias
