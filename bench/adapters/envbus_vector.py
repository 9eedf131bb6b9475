"""envbus's own BusVectorEnv.

Options: `shared_memory`; `num_actors`: a number, `"auto"` (one per core) or `"num_envs"` (one
per env, for envs that wait rather than compute).
"""

from __future__ import annotations

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.gymnasium_vector import VectorStepper
from envbus.bench.workloads import env_fns
from envbus.runner import BusVectorEnv

__all__ = ["DISTRIBUTIONS", "open_stepper"]

DISTRIBUTIONS = ("envbus", "pyzmq", "msgspec", "gymnasium", "numpy", "mujoco", "ale-py")


def open_stepper(opening: Opening) -> Stepper:
    num_actors = opening.options["num_actors"]
    envs = BusVectorEnv(
        env_fns(opening.workload, opening.num_envs),
        shared_memory=bool(opening.options["shared_memory"]),
        num_actors=opening.num_envs if num_actors == "num_envs" else num_actors,
    )
    envs.reset(seed=0)
    return VectorStepper(envs)
