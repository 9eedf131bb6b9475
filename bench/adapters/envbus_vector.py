"""envbus's own BusVectorEnv.

Options: `shared_memory`; `local_links`; `num_actors`: a number, `"auto"` (one per core) or
`"num_envs"` (one per env, for envs that wait rather than compute); `wait`; `restart`: failed envs
are made anew; `watched`: somebody looks at it each second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt

from envbus.bench.adapters.base import Opening, Recovered, Stepper
from envbus.bench.adapters.gymnasium_vector import VectorStepper
from envbus.bench.adapters.looking import look_at
from envbus.bench.adapters.workloads import autoreset_mode, env_fns
from envbus.runner import BusVectorEnv, RestartPolicy

__all__ = ["DISTRIBUTIONS", "POLICY", "QUIET_SECONDS", "actors_of", "open_stepper"]

DISTRIBUTIONS = ("envbus", "pyzmq", "msgspec", "gymnasium", "numpy", "mujoco", "ale-py")


def actors_of(opening: Opening) -> int | Literal["auto"]:
    """Return the number of actors that the options ask for."""
    chosen: int | Literal["auto", "num_envs"] = opening.options["num_actors"]
    return opening.num_envs if chosen == "num_envs" else chosen


_SPAWN = multiprocessing.get_context("spawn")
#: Seconds of stepping before a kill.
QUIET_SECONDS = 0.3
#: Each of many kills is the only one for long, as in a user's run.
POLICY = RestartPolicy(max_restarts=1000, backoff=0.0)
#: Vector steps until envs have made a step again: one tells the fault, one the first observation.
_STEPS_TO_COME_BACK = 3


class BusVectorStepper(VectorStepper):
    """A `BusVectorEnv`; a killed actor comes back by itself."""

    def __init__(self, envs: BusVectorEnv, *, watched: bool) -> None:
        super().__init__(envs)
        self._looking = _SPAWN.Process(target=look_at, args=(os.getpid(),), daemon=True)
        self._is_watched = watched
        if watched:
            self._looking.start()

    def close(self) -> None:
        """Close the vector env."""
        if self._is_watched:
            self._looking.terminate()
            self._looking.join()
        super().close()

    def kill_one(self, ring: Sequence[npt.NDArray[Any]]) -> Recovered:
        self.run(ring, QUIET_SECONDS)
        os.kill(self._envs.actor_pids()[-1], signal.SIGKILL)
        start = time.perf_counter()
        infos: dict[str, Any] = {}
        while "fault" not in infos:
            infos = self._step(ring[0])[4]
        for _ in range(_STEPS_TO_COME_BACK - 1):
            self._step(ring[0])
        return Recovered(seconds=time.perf_counter() - start)


def open_stepper(opening: Opening) -> Stepper:
    envs = BusVectorEnv(
        env_fns(opening.workload, opening.num_envs),
        shared_memory=bool(opening.options["shared_memory"]),
        num_actors=actors_of(opening),
        autoreset_mode=autoreset_mode(opening.workload),
        wait=opening.options.get("wait", "auto"),
        local_links=bool(opening.options.get("local_links", True)),
        restart=POLICY if opening.options.get("restart", False) else False,
    )
    envs.reset(seed=0)
    return BusVectorStepper(envs, watched=bool(opening.options.get("watched", False)))
