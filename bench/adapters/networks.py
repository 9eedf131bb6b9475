"""The policy network that every library samples with: two hidden layers of 64 units, tanh, logits.

Imported in every library's own environment: needs NumPy only, and torch where it is asked for.
Of pixels it sees every fourth one in each direction, so that what is measured is the collecting
and not a large matrix product that is the same for all.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

__all__ = ["HIDDEN", "NumpyNet", "num_inputs", "torch_net", "view"]

HIDDEN = 64
#: Of pixels, every so many are seen.
_STRIDE = 4


def view(observations: Any) -> Any:
    """Return what the network sees of `(rows, *shape)`: `(rows, inputs)`, an array or a tensor.

    Pixels, `(rows, channels, height, width)`, are thinned out; their values stay from 0 to 255.
    """
    if observations.ndim == 4:
        observations = observations[:, :, ::_STRIDE, ::_STRIDE]
    return observations.reshape(len(observations), -1)


def num_inputs(space: gym.Space[Any]) -> int:
    """Return the number of inputs for observations of `space`."""
    shape = space.shape or ()
    if len(shape) == 3:
        shape = (shape[0], *(-(-size // _STRIDE) for size in shape[1:]))
    return math.prod(shape)


class NumpyNet:
    """Samples actions. Weights are random: nothing is learned here."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._rng = np.random.default_rng(0)
        sizes = [inputs, HIDDEN, HIDDEN, outputs]
        self._layers = [
            (
                (self._rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32),
                np.zeros(columns, np.float32),
            )
            for rows, columns in itertools.pairwise(sizes)
        ]
        #: Pixels come as bytes.
        self._layers[0][0][...] /= 255.0 if inputs > HIDDEN else 1.0

    def act(self, observations: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return sampled actions `(rows,)` int64, and their log probabilities `(rows,)`."""
        hidden = view(observations).astype(np.float32, copy=False)
        for weight, bias in self._layers[:-1]:
            hidden = np.tanh(hidden @ weight + bias)
        weight, bias = self._layers[-1]
        logits = hidden @ weight + bias
        # The largest of logits with Gumbel noise is a sample of the distribution.
        noise = self._rng.standard_exponential(logits.shape, np.float32)
        chosen = (logits - np.log(noise)).argmax(axis=1)
        total = np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return chosen, (logits - total)[np.arange(len(chosen)), chosen]


def torch_net(inputs: int, outputs: int) -> Any:
    """Return the same as a `torch.nn.Sequential` of observations, in this process on one thread.

    More threads are slower for networks of this size, and take the cores from the envs.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    return nn.Sequential(
        _view_module(),
        nn.Linear(inputs, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, outputs),
    )


def _view_module() -> Any:
    """Return `view` as the first layer, floats of about 1; other processes can unpickle it."""
    import torch

    class View(torch.nn.Module):
        def forward(self, observations: Any) -> Any:
            seen = view(observations)
            return seen / 255.0 if seen.dtype == torch.uint8 else seen.float()

        def __reduce__(self) -> Any:
            return _view_module, ()

    return View()
