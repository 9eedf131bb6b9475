"""One job: step an env in actor processes and measure it, beside Gymnasium's own if asked.

Opens the envs that a command names, and sees that no actor outlives it. Leaves out the command line
and the printing (`main.py`, `report.py`).
"""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import gymnasium
import msgspec

from envbus.actors.env import source as env_source
from envbus.bus.errors import ConfigError
from envbus.bus.process.threads import ThreadsPerProcess
from envbus.bus.settings import check_number
from envbus.runner.cli.comparison import compare
from envbus.runner.cli.stepping import Limits, Measured, OnProgress, Stepping
from envbus.runner.errors import EnvError
from envbus.runner.policies.policy import PolicyFactory, parse_policy
from envbus.runner.vector.make import make_vec
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts

__all__ = ["JobConfig", "JobResult", "run_job"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """Which envs to measure, and with what."""

    #: What `make_vec` takes as text: a Gymnasium id or `"module:function"`.
    env: str
    num_envs: int = 8
    #: Threads that NumPy, PyTorch and their like start in each actor; see `BusVectorEnv`.
    threads_per_process: ThreadsPerProcess = "auto"
    #: "random", "zero", or the import path `"module:function"`.
    policy: str = "random"
    #: Env i gets seed + i, the policy gets seed; None: all fresh.
    seed: int | None = None
    #: Seconds to step for; None: no limit of time.
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_number("the number of envs", self.num_envs, whole=True, least=1)
        check_number("seconds", self.seconds, over=0.0, finite=True, optional=True)
        check_number("the seed", self.seed, whole=True, least=0, optional=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(MeasureConfig):
    """What to step, with what, and for how long."""

    #: Processes; "auto": one per usable core.
    num_actors: int | Literal["auto"] = "auto"
    #: Env steps to take at least; None: no limit. Whichever limit is reached first ends the job.
    steps: int | None = None
    #: Kill one actor process half way, to see it come back.
    kill_one: bool = False
    #: Step the same envs for the same time in Gymnasium's vector envs afterwards.
    compare: bool = False

    def __post_init__(self) -> None:
        MeasureConfig.__post_init__(self)
        if self.num_actors != "auto" and not 1 <= self.num_actors <= self.num_envs:
            raise ConfigError(
                f"the number of actors must be from 1 to the number of envs, {self.num_envs}; "
                f"got {self.num_actors}"
            )
        if self.steps is None and self.seconds is None:
            raise ConfigError("a job needs an end: give steps or seconds")
        check_number("steps", self.steps, whole=True, least=1, optional=True)


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job."""

    env: str
    num_envs: int
    #: Actor processes.
    actors: int
    policy: str
    seed: int | None
    #: Process id of the actor that was killed half way, or None.
    killed: int | None
    #: Ctrl-C ended the job before its time.
    interrupted: bool
    #: What was stepped, envbus first. Empty if the job ended before the first step.
    measured: list[Measured]
    #: Why a vector env of Gymnasium's could not be measured, by its name.
    not_measured: dict[str, str]


def run_job(config: JobConfig, on_progress: OnProgress = lambda _: None) -> JobResult:
    """Run the job to its end, or to Ctrl-C, which the result then tells.

    Args:
        config: What to do.
        on_progress: Called some times per second, between two steps.

    Raises:
        ConfigError: There is no such env, or the policy cannot be used.
        Exception: What making or stepping the envs raises. No process is left.
    """
    job = _Job(config, parse_policy(config.policy), on_progress)
    interrupted = False
    try:
        job.run()
    except KeyboardInterrupt:
        interrupted = True
    return job.result(interrupted)


@contextmanager
def open_envs(
    env: str,
    num_envs: int,
    *,
    num_actors: int | Literal["auto"],
    threads_per_process: ThreadsPerProcess,
    restart: bool = False,
    timeouts: Timeouts | None = None,
) -> Iterator[BusVectorEnv]:
    """Make envs, and close them at the end; an exception ends their actors at once.

    Raises:
        ConfigError: There is no such env.
    """
    try:
        envs = make_vec(
            env,
            num_envs,
            num_actors=num_actors,
            threads_per_process=threads_per_process,
            restart=restart,
            timeouts=timeouts,
        )
    except Exception as exc:
        if not _is_not_found(exc):
            raise
        raise ConfigError(f"cannot make {env!r}: {exc}") from exc
    try:
        yield envs
    except BaseException:
        _abort(envs)
        raise
    envs.close()


def _is_not_found(exc: Exception) -> bool:
    """Whether there is no such env, as opposed to one whose own code failed."""
    if isinstance(exc, gymnasium.error.Error | ModuleNotFoundError):
        return True
    if not isinstance(exc.__cause__, EnvError):
        return False
    files = re.findall(r'^ *File "(.+?)", line', exc.__cause__.remote_traceback, re.MULTILINE)
    return bool(files) and files[-1] == env_source.__file__


def _abort(envs: BusVectorEnv) -> None:
    """Kill the actors at once. A step may be pending, which is no news after Ctrl-C."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        envs.close(terminate=True)


class _Job:
    """What is known of a job while it runs, so that Ctrl-C at any moment loses nothing."""

    def __init__(
        self, config: JobConfig, make_policy: PolicyFactory, on_progress: OnProgress
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._envs: BusVectorEnv | None = None
        self._killed: int | None = None
        self._actors = 0
        self._measured: list[Measured] = []
        self._not_measured: dict[str, str] = {}
        self._stepping = Stepping(
            "envbus",
            make_policy,
            on_progress,
            at_half_time=self._kill_one if config.kill_one else None,
            restarts=self._restarts,
        )

    def run(self) -> None:
        config = self._config
        made_at = time.perf_counter()
        with open_envs(
            config.env,
            config.num_envs,
            num_actors=config.num_actors,
            threads_per_process=config.threads_per_process,
            restart=config.kill_one,
        ) as envs:
            self._envs = envs
            self._actors = len(envs.actor_pids())
            limits = Limits(config.steps, config.seconds)
            self._stepping.run(envs, limits, seed=config.seed, made_at=made_at)
        if config.compare:
            self._compare()

    def _compare(self) -> None:
        config = self._config
        outcomes = compare(
            config.env,
            config.num_envs,
            config.policy,
            config.seed,
            self._stepping.seconds,
            self._on_progress,
        )
        with closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, Measured):
                    self._measured.append(outcome)
                else:
                    self._not_measured[outcome.backend] = outcome.reason

    def result(self, interrupted: bool) -> JobResult:
        config = self._config
        own = [self._stepping.measured()] if self._stepping.vector_steps else []
        return JobResult(
            env=config.env,
            num_envs=config.num_envs,
            actors=self._actors,
            policy=config.policy,
            seed=config.seed,
            killed=self._killed,
            interrupted=interrupted,
            measured=own + self._measured,
            not_measured=self._not_measured,
        )

    def _kill_one(self) -> int | None:
        assert self._envs is not None
        pids = self._envs.actor_pids()
        if not pids:
            return None
        # The last one: the first is the one that people look at when they debug.
        with suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)
        self._killed = pids[-1]
        return pids[-1]

    def _restarts(self) -> int:
        return 0 if self._envs is None else self._envs.statistics().restarts
