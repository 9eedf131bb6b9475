"""Drives env actors: a drop-in vector env, an asynchronous pool, sampling, the command line.

Reading order: `make.py`, `vector_env.py`, `lockstep.py`, `fleet.py`; for sampling
`env_runner.py`, `column_sampler.py`.
"""

if __name__ != "envbus.runner":
    raise ImportError("import envbus.runner, not runner: two copies would keep two registries")

from envbus.actors.renewal import RestartRequest
from envbus.bus.errors import RestartLimitError
from envbus.bus.restart import RestartPolicy
from envbus.runner.advantages import (
    add_gae,
    bootstrap_rows,
    discounted_returns,
    gae,
    n_step_returns,
)
from envbus.runner.agent_results import ASYNC_RESET, DUMMY_AGENT, PollResult
from envbus.runner.batch import MultiAgentBatch, SampleBatch
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult, EpisodeFault
from envbus.runner.bridge.vocabulary import BridgeStatistics, EpisodeLimits
from envbus.runner.callbacks import CallbackError, Callbacks
from envbus.runner.config import Timeouts
from envbus.runner.connectors import (
    ClipActions,
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
from envbus.runner.env_results import Batch
from envbus.runner.env_runner import EnvRunner
from envbus.runner.env_runner_group import EnvRunnerGroup
from envbus.runner.episode import EpisodeRecorder
from envbus.runner.fault_log import Hooks
from envbus.runner.faults import ActorLostError, EnvError, Fault, FaultCause, env_errors
from envbus.runner.group.config import GroupConfig, RunnerStatus
from envbus.runner.group.joining import GroupSample, RunnerFault
from envbus.runner.make import make_vec
from envbus.runner.metrics import EpisodeResult
from envbus.runner.mlp import MlpPolicy, policy_from_weights
from envbus.runner.policies import (
    ConstantPolicy,
    FunctionPolicy,
    Policy,
    PolicyOutput,
    RandomPolicy,
    TwoStepPolicy,
)
from envbus.runner.policy_workers import PolicyWorkers, PolicyWorkersStatistics
from envbus.runner.pool import ActorPool
from envbus.runner.recycling import RecycleAfter
from envbus.runner.remote_policy import PolicyHandle, RemotePolicy
from envbus.runner.sampling import RunnerConfig, Sample
from envbus.runner.vector_env import BusVectorEnv
from envbus.runner.video import VideoConfig

__all__ = [
    "ASYNC_RESET",
    "DUMMY_AGENT",
    "ActorLostError",
    "ActorPool",
    "Batch",
    "BridgeResult",
    "BridgeStatistics",
    "BusVectorEnv",
    "CallbackError",
    "Callbacks",
    "ClipActions",
    "Connector",
    "ConnectorError",
    "ConstantPolicy",
    "EnvError",
    "EnvRunner",
    "EnvRunnerGroup",
    "EpisodeFault",
    "EpisodeLimits",
    "EpisodeRecorder",
    "EpisodeResult",
    "ExternalEnvBridge",
    "Fault",
    "FaultCause",
    "Flatten",
    "FrameStack",
    "FreezeActions",
    "FunctionPolicy",
    "GroupConfig",
    "GroupSample",
    "Hooks",
    "MlpPolicy",
    "MultiAgentBatch",
    "Normalize",
    "OneHot",
    "Pipeline",
    "Policy",
    "PolicyHandle",
    "PolicyOutput",
    "PolicyWorkers",
    "PolicyWorkersStatistics",
    "PollResult",
    "RandomPolicy",
    "RecycleAfter",
    "RemotePolicy",
    "RescaleActions",
    "RestartLimitError",
    "RestartPolicy",
    "RestartRequest",
    "RunnerConfig",
    "RunnerFault",
    "RunnerStatus",
    "Sample",
    "SampleBatch",
    "Timeouts",
    "TwoStepPolicy",
    "VideoConfig",
    "add_gae",
    "bootstrap_rows",
    "discounted_returns",
    "env_errors",
    "gae",
    "make_vec",
    "n_step_returns",
    "policy_from_weights",
]
