"""Models that a bridge hands out to clients which choose actions themselves. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from envbus.actors.arrays.copies import own
from envbus.actors.external.errors import RefusedError
from envbus.actors.external.protocol import GetModel, Model
from envbus.bus.errors import ConfigError
from envbus.bus.wire.codec import encode
from envbus.bus.wire.messages import Tree

__all__ = ["MAX_MODEL_BYTES", "Models"]

#: Largest model that is handed out.
MAX_MODEL_BYTES = 1 << 28


class Models:
    """The newest model of each policy. One thread may publish while another one reads.

    Args:
        max_version_lag: By how many versions a client's model may be behind; None: any number.
    """

    def __init__(self, max_version_lag: int | None = None) -> None:
        self._max_version_lag = max_version_lag
        self._by_id: dict[str, Model] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def publish(
        self,
        policy_id: str,
        *,
        weights: Mapping[str, Any] | None,
        onnx: bytes | None,
        version: int,
    ) -> None:
        """Put a model in the place of the policy's last one.

        Raises:
            ConfigError: Neither weights nor ONNX, or both; a negative version; or it is larger than
                `MAX_MODEL_BYTES`.
        """
        if (weights is None) == (onnx is None):
            raise ConfigError(f"policy {policy_id!r}: publish either weights or onnx")
        if version < 0:
            raise ConfigError(f"policy {policy_id!r}: a version is not negative, as {version} is")
        size = _size(weights) if onnx is None else len(onnx)
        if size > MAX_MODEL_BYTES:
            raise ConfigError(
                f"policy {policy_id!r}: its model has {size} bytes, and {MAX_MODEL_BYTES} can be "
                "handed out: choose the actions at the server"
            )
        model = Model(
            policy_id=policy_id,
            version=version,
            weights=None if weights is None else _sendable(weights),
            onnx=onnx,
        )
        self._by_id[policy_id] = msgspec.structs.replace(model, digest=_digest(model))

    def retain(self, policy_ids: set[str]) -> None:
        """Forget those of other policies."""
        self._by_id = {name: one for name, one in self._by_id.items() if name in policy_ids}

    def answer(self, request: GetModel) -> Model:
        """Return the model; only its version and digest, if the client has it.

        Versions may go back, and come again with other weights.

        Raises:
            RefusedError: There is none.
        """
        model = self._by_id.get(request.policy_id)
        if model is None:
            known = ", ".join(sorted(self._by_id)) or "none"
            raise RefusedError(
                f"there is no model of policy {request.policy_id!r}; there are: {known}"
            )
        has_it = request.have_digest in ("", model.digest)
        if request.have_version == model.version and has_it:
            return msgspec.structs.replace(model, weights=None, onnx=None)
        return model

    def is_stale(self, policy_id: str, version: int) -> bool:
        """Return whether steps of a version are too old for rows."""
        model, lag = self._by_id.get(policy_id), self._max_version_lag
        return model is not None and lag is not None and model.version - version > lag


def _digest(model: Model) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for frame in encode(model):
        digest.update(frame)
    return digest.hexdigest()


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_size(one) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(_size(one) for one in value)
    if isinstance(value, bytes | str):
        return len(value)
    return int(np.asarray(value).nbytes)


def _sendable(weights: Mapping[str, Any]) -> Any:
    """Return weights that other languages can read, where they are maps of arrays."""
    copied = _copied(weights)
    return copied if _is_simple(copied) else Tree(copied)


def _copied(value: Any) -> Any:
    """Return what a learner that goes on cannot change."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return own(value)


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_simple(one) for key, one in value.items())
    return isinstance(value, np.ndarray | int | float | bytes | str)
