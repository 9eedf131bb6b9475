"""envbus's own BusVectorEnv.

Options: `shared_memory`; `lanes`; `num_actors`: a number, `"auto"` (one per core) or `"num_envs"`
(one per env, for envs that wait rather than compute).
"""

from __future__ import annotations

from typing import Literal

from envbus.bench.adapters.base import Opening, Stepper
from envbus.bench.adapters.gymnasium_vector import VectorStepper
from envbus.bench.workloads import env_fns
from envbus.runner import BusVectorEnv

__all__ = ["DISTRIBUTIONS", "actors_of", "open_stepper"]

DISTRIBUTIONS = ("envbus", "pyzmq", "msgspec", "gymnasium", "numpy", "mujoco", "ale-py")


def actors_of(opening: Opening) -> int | Literal["auto"]:
    """Return the number of actors that the options ask for."""
    chosen: int | Literal["auto", "num_envs"] = opening.options["num_actors"]
    return opening.num_envs if chosen == "num_envs" else chosen


def open_stepper(opening: Opening) -> Stepper:
    envs = BusVectorEnv(
        env_fns(opening.workload, opening.num_envs),
        shared_memory=bool(opening.options["shared_memory"]),
        num_actors=actors_of(opening),
        lanes=bool(opening.options.get("lanes", True)),
    )
    envs.reset(seed=0)
    return VectorStepper(envs)
