"""From a network's outputs to actions and their log-probabilities, in NumPy. Pure."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from envbus.actors.spaces.spaces import shown
from envbus.bus.errors import ConfigError

__all__ = ["ActionHead"]

_Array: TypeAlias = npt.NDArray[np.float32]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
#: A probability of at most 1 divided by it is finite.
_LEAST_NOISE = np.finfo(np.float32).tiny


class ActionHead:
    """A categorical distribution for Discrete, a diagonal Gaussian for Box actions of floats.

    Attributes:
        size: Outputs per row: logits, or means.
        is_discrete: Which of both.

    Raises:
        ConfigError: The space is another one; `owner` is named.
    """

    def __init__(self, space: Space[Any], owner: str) -> None:
        self._space: Any = space
        self.is_discrete = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.size = int(space.n)
        elif isinstance(space, spaces.Box) and space.dtype.kind == "f":
            self.size = math.prod(space.shape)
        else:
            raise ConfigError(f"{owner} gives Discrete or Box actions, not {shown(space)}")

    def choose(
        self,
        outputs: _Array,
        rng: np.random.Generator | None,
        log_std: _Array | None = None,
    ) -> tuple[Any, _Array]:
        """Return actions in the dtype of the space, and their log-probabilities.

        Gaussian actions are not clipped to the space, so that the log-probability is theirs.

        Args:
            outputs: `(rows, size)` logits, or means; of another dtype they are cast to float32.
            rng: Of what is sampled; None: the most probable action.
            log_std: Of a Gaussian, `(size,)` or `(rows, size)`.

        An action that is masked, whose logit is so low that its probability is 0, is never chosen.

        Returns:
            `(rows, *shape of the space)`, and `(rows,)` float32.

        Raises:
            ValueError: A row has NaN or infinity among its outputs, or no action but masked ones;
                a logit of minus infinity masks its action.
        """
        outputs = _float32(outputs)
        if self.is_discrete:
            return self._categorical(outputs, rng)
        assert log_std is not None
        return self._gaussian(outputs, _float32(log_std), rng)

    def shaped(self, flat: npt.NDArray[Any]) -> Any:
        """Return Box actions `(rows, size)` as the space has them."""
        shape = (len(flat), *self._space.shape)
        return flat.reshape(shape).astype(self._space.dtype, copy=False)

    def _categorical(self, logits: _Array, rng: np.random.Generator | None) -> tuple[Any, _Array]:
        # The ufuncs themselves: for few rows the methods take twice as long.
        best = np.maximum.reduce(logits, axis=1, keepdims=True)
        _check_finite(best, logits, "logits")
        shifted = logits - best
        odds = np.exp(shifted)
        if rng is not None:  # the largest of probabilities over exponential noise is a sample
            noise = rng.standard_exponential(odds.shape, np.float32)
            # Noise can be 0: a masked action would be 0/0, and NaN the largest of all.
            np.maximum(noise, _LEAST_NOISE, out=noise)
            chosen = (odds / noise).argmax(axis=1)
        else:
            chosen = shifted.argmax(axis=1)
        logp = shifted[np.arange(len(chosen)), chosen] - np.log(odds.sum(axis=1))
        return (chosen + int(self._space.start)).astype(self._space.dtype, copy=False), logp

    def _gaussian(
        self, means: _Array, log_std: _Array, rng: np.random.Generator | None
    ) -> tuple[Any, _Array]:
        _check_finite(means, means, "means")
        _check_finite(log_std, log_std, "log_std")
        if rng is None:
            noise = np.zeros_like(means)
        else:
            noise = rng.standard_normal(means.shape, np.float32)
        flat = means + noise * np.exp(log_std)
        logp = -(0.5 * np.square(noise) + log_std + np.float32(_HALF_LOG_2PI)).sum(axis=1)
        return self.shaped(flat), logp


def _float32(outputs: npt.NDArray[Any]) -> _Array:
    """Return outputs of a network in half or double precision in that of the columns."""
    if outputs.dtype == np.float32:
        return outputs
    with np.errstate(over="ignore"):  # the least float64 masks, as minus infinity does
        return outputs.astype(np.float32)


def _check_finite(checked: npt.NDArray[Any], outputs: npt.NDArray[Any], name: str) -> None:
    """Raise ValueError if something in `checked` is not finite; says what is in its row."""
    finite = np.isfinite(checked)
    if np.count_nonzero(finite) < finite.size:
        row = int(np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))[0])
        raise ValueError(
            f"the network gives {name} that no action can be chosen by, in row {row}: "
            f"{outputs[row]}; NaN in weights or observations, or every action masked"
        )
