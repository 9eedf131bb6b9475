"""Drives env actors: a drop-in vector env, an asynchronous pool, the command line.

Reading order: `make.py`, `vector_env.py`, `lockstep.py`, `fleet.py`.
"""

if __name__ != "envbus.runner":
    raise ImportError("import envbus.runner, not runner: two copies would keep two registries")

from envbus.actors.renewal import RestartRequest
from envbus.bus.errors import RestartLimitError
from envbus.bus.restart import RestartPolicy
from envbus.runner.agent_results import ASYNC_RESET, DUMMY_AGENT, PollResult
from envbus.runner.config import Timeouts
from envbus.runner.fault_log import Hooks
from envbus.runner.faults import ActorLostError, EnvError, Fault, FaultCause, env_errors
from envbus.runner.make import make_vec
from envbus.runner.pool import ActorPool
from envbus.runner.pool_results import Batch
from envbus.runner.recycling import RecycleAfter
from envbus.runner.vector_env import BusVectorEnv

__all__ = [
    "ASYNC_RESET",
    "DUMMY_AGENT",
    "ActorLostError",
    "ActorPool",
    "Batch",
    "BusVectorEnv",
    "EnvError",
    "Fault",
    "FaultCause",
    "Hooks",
    "PollResult",
    "RecycleAfter",
    "RestartLimitError",
    "RestartPolicy",
    "RestartRequest",
    "Timeouts",
    "env_errors",
    "make_vec",
]
