"""Drives env actors: a drop-in vector env, an asynchronous pool, sampling, the command line.

Users import from here what runs envs and samples them; policies and connectors from
`envbus.runner.policies`, batches and advantages from `envbus.runner.batches`, what a bridge tells
from `envbus.runner.bridge`, handles of policy workers from `envbus.runner.inference`.

Reading order: `vector/make.py`, `vector/vector_env.py`, `vector/lockstep.py`, `workers/fleet.py`;
for sampling `sampling/env_runner.py`, `sampling/column_sampler.py`.
"""

if __name__ != "envbus.runner":
    raise ImportError("import envbus.runner, not runner: two copies would keep two registries")

from envbus.actors.env.renewal import RestartRequest
from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.engine.env_results import Batch
from envbus.runner.errors import ActorLostError, EnvError, Fault, FaultCause, env_errors
from envbus.runner.group.config import GroupConfig, RunnerStatus
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.group.joining import GroupSample, RunnerFault
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.pool.agent_results import ASYNC_RESET, DUMMY_AGENT, PollResult
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.callbacks import CallbackError, Callbacks
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.sampling.video import VideoConfig
from envbus.runner.vector.make import make_vec
from envbus.runner.vector.registration import vector_entry_point
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import ActorSettings, Hooks, Timeouts
from envbus.runner.workers.recycling import RecycleAfter

__all__ = [
    "ASYNC_RESET",
    "DUMMY_AGENT",
    "ActorLostError",
    "ActorPool",
    "ActorSettings",
    "BaseEnvRunner",
    "Batch",
    "BusVectorEnv",
    "CallbackError",
    "Callbacks",
    "EnvError",
    "EnvRunner",
    "EnvRunnerGroup",
    "ExternalEnvBridge",
    "Fault",
    "FaultCause",
    "GroupConfig",
    "GroupSample",
    "Hooks",
    "PolicyWorkers",
    "PollResult",
    "RecycleAfter",
    "RestartLimitError",
    "RestartPolicy",
    "RestartRequest",
    "RunnerConfig",
    "RunnerFault",
    "RunnerStatus",
    "Sample",
    "Timeouts",
    "VideoConfig",
    "env_errors",
    "make_vec",
    "vector_entry_point",
]
