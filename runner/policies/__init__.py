"""What chooses actions, what stands between it and the env, and how it is called. Pure.

Samplers, policy workers and servers import it.
"""

from envbus.runner.policies.connectors import (
    ClipActions,
    ClipRewards,
    Connector,
    ConnectorError,
    Flatten,
    FrameStack,
    FreezeActions,
    Normalize,
    OneHot,
    Pipeline,
    RescaleActions,
)
from envbus.runner.policies.mlp import MlpPolicy, policy_from_weights
from envbus.runner.policies.policy import (
    ConstantPolicy,
    EpisodeListener,
    FunctionPolicy,
    InputPolicy,
    Policy,
    PolicyOutput,
    RandomPolicy,
    TwoStepPolicy,
)

__all__ = [
    "ClipActions",
    "ClipRewards",
    "Connector",
    "ConnectorError",
    "ConstantPolicy",
    "EpisodeListener",
    "Flatten",
    "FrameStack",
    "FreezeActions",
    "FunctionPolicy",
    "InputPolicy",
    "MlpPolicy",
    "Normalize",
    "OneHot",
    "Pipeline",
    "Policy",
    "PolicyOutput",
    "RandomPolicy",
    "RescaleActions",
    "TwoStepPolicy",
    "policy_from_weights",
]
