"""A program that asks the processes of envbus how many threads their libraries use.

Prints one JSON object: who was asked, and what each has. Run with the environment of a user.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
from threadpoolctl import threadpool_info

from envbus.runner import (
    ActorPool,
    BusVectorEnv,
    EnvRunner,
    EnvRunnerGroup,
    GroupConfig,
    PolicyWorkers,
    make_vec,
)
from envbus.runner.policies import FunctionPolicy


def report() -> list[str]:
    """Return what NumPy's BLAS uses here, what libraries to come will read, and what is granted."""
    (blas,) = {
        str(found["num_threads"]) for found in threadpool_info() if found["user_api"] == "blas"
    }
    return [blas, os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("ENVBUS_THREADS", "")]


class ReportingEnv(gymnasium.Env[Any, Any]):
    """Does nothing but report."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1), 0.0, False, False, {}

    def report(self) -> list[str]:
        return report()


def reporting_policy(observations: Any) -> Any:
    """Return a report as actions; -1: nothing."""
    return np.array([[int(text or -1) for text in report()]] * len(observations))


def of_pool(pool: Any) -> list[list[str]]:
    return [env.call("report") for env in pool.get_sub_environments()]


#: In a runner's process: its pool.
POOLS: list[ActorPool] = []


def make_zeros(pool: ActorPool, index: int) -> Any:
    POOLS.append(pool)
    return FunctionPolicy(lambda observations: np.zeros(len(observations), int))


def of_runner(runner: EnvRunner) -> dict[str, Any]:
    return {"runner": report(), "actors": of_pool(POOLS[0])}


def of_group(settings: GroupConfig) -> Any:
    envs = [ReportingEnv] * 2
    with EnvRunnerGroup(1, envs, make_policies=make_zeros, settings=settings) as group:
        return group.foreach(of_runner)[0]


def main() -> None:
    """Ask processes of each kind."""
    found: dict[str, Any] = {}
    with closing(BusVectorEnv([ReportingEnv] * 2, num_actors=2)) as envs:
        found["two actors"] = list(envs.call("report"))
    with ActorPool([ReportingEnv], context="spawn", threads_per_process=3) as pool:
        found["spawned, three threads"] = of_pool(pool)
    with PolicyWorkers(lambda: reporting_policy, n=2, threads_per_process=5) as workers:
        answer = workers.policy().compute_actions(np.zeros((1, 1)), None)
        found["policy worker, five threads"] = [str(n) for n in answer.actions[0].tolist()]
    four = GroupConfig(threads_per_process=4, pool_settings={"num_actors": 2})
    found["group, four threads"] = of_group(four)
    if "the rest" in sys.argv:
        with closing(make_vec(ReportingEnv, 1, threads_per_process=3)) as envs:
            found["forked, three threads"] = list(envs.call("report"))
        with ActorPool([ReportingEnv], threads_per_process=None) as pool:
            found["left alone"] = of_pool(pool)
        with ActorPool([ReportingEnv], num_actors=0, threads_per_process=1) as pool:
            found["no process"] = of_pool(pool)
        found["this process"] = report()
    json.dump(found, sys.stdout)
