"""Makes the policy of a client that chooses actions itself from the weights that it is handed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from gymnasium import Space

from envbus.bus.errors import ConfigError
from envbus.runner.extras import how_to_install
from envbus.runner.mlp import MlpPolicy
from envbus.runner.policies import Policy

__all__ = ["policy_from_weights"]


def policy_from_weights(
    observation_space: Space[Any], action_space: Space[Any], weights: Mapping[str, Any]
) -> Policy:
    """Return an `OnnxPolicy` of `{"model": bytes}`, or else an `MlpPolicy` of such layers.

    Raises:
        ConfigError: They are the weights of neither, or onnxruntime is not installed.
    """
    if isinstance(weights.get("model"), bytes):
        try:
            # By name: whoever has no such model needs no onnxruntime.
            adapter = importlib.import_module("envbus.runner.adapters.onnx_policy")
        except ImportError as exc:
            raise ConfigError(f"to run an ONNX model: {how_to_install('onnx')}") from exc
        policy: Policy = adapter.OnnxPolicy(weights["model"], action_space)
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
