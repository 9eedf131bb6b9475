"""`to_tensor`: batches and nested values as tensors. PyTorch is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.extras import how_to_install

__all__ = ["to_tensor"]

#: Kinds of dtype that have no tensor: objects, texts, bytes, times, records.
_NO_TENSOR: Final = frozenset("OUSTMmV")


def to_tensor(value: Any, device: Any = "cpu", *, pin_memory: bool = False) -> Any:
    """Return a batch, or nested dicts, tuples and lists of arrays and numbers, as tensors.

        columns = to_tensor(runner.sample().single(), "cuda")
        loss = policy.loss(columns["obs"], columns["actions"], columns["rewards"])

    On the CPU tensors share the memory of their arrays, so that who writes to one writes to both;
    an array that is read-only, or not in this machine's byte order, is copied. Elsewhere they are
    copies.

    Args:
        value: A `SampleBatch` becomes a dict by column, a `MultiAgentBatch` (a `Sample`, too) a
            dict by policy id of these. What has no tensor stays as it is: arrays of objects
            (`infos`) and of texts (`agent_id`), None, and texts.
        device: Where the tensors are to be, as PyTorch takes it.
        pin_memory: Copy arrays to pinned memory first, from where a copy to `device` goes on while
            the caller computes. The tensors wait for it on their device, as PyTorch has it.

    Returns:
        The same structure, with tensors of the arrays' shapes and dtypes. Tensors stay tensors.

    Raises:
        ConfigError: PyTorch is not installed.
        RuntimeError: There is no such device, no memory on it, or none to pin memory for.
        TypeError: PyTorch has no such dtype.
    """
    try:
        import torch
    except ImportError as exc:
        how = how_to_install("torch")
        raise ConfigError(f"to_tensor needs PyTorch ({exc}): {how}") from exc
    target = torch.device(device)

    def move(tensor: Any) -> Any:
        if pin_memory and tensor.device.type == "cpu":
            return tensor.pin_memory().to(target, non_blocking=True)
        return tensor.to(target)

    return _convert(torch, value, move)


def _convert(torch: Any, value: Any, move: Callable[[Any], Any]) -> Any:
    if isinstance(value, MultiAgentBatch):
        value = dict(value.policy_batches)
    elif isinstance(value, SampleBatch):
        value = value.columns
    if isinstance(value, Mapping):
        return {key: _convert(torch, part, move) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_convert(torch, part, move) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in _NO_TENSOR:
            return value
        # PyTorch warns of one that is read-only, and knows no steps backwards nor bytes the other
        # way round.
        shares = value.flags.writeable and min(value.strides, default=0) >= 0
        native = value.dtype.newbyteorder("=")
        return move(torch.from_numpy(value.astype(native, copy=not shares)))
    if isinstance(value, np.generic | bool | int | float | complex):
        array = np.asarray(value)
        return value if array.dtype.kind in _NO_TENSOR else move(torch.from_numpy(array))
    if isinstance(value, torch.Tensor):
        return move(value)
    return value
