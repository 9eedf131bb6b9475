"""Settings of a group of runners, and how its envs are shared out. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from envbus.bus.errors import ConfigError
from envbus.bus.process.threads import ThreadsPerProcess, check_threads
from envbus.bus.settings import check_number, positive_int
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.group.protocol import AnyEnvs
from envbus.runner.workers.config import MOST_ENVS, Timeouts, check_kind, env_sources, list_of

__all__ = ["GroupConfig", "RunnerStatus", "counts_of", "envs_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """How the processes of an `EnvRunnerGroup` are started and watched."""

    #: Whether runners that died or hang are started again; a policy says how often and how soon.
    restart: bool | RestartPolicy = True
    #: `start`: until a runner has made its envs; `call`: of `foreach`; `close`.
    timeouts: Timeouts = field(default_factory=Timeouts)
    #: Seconds after which a runner that has not come back from a sample is taken for hung, killed
    #: and started again; None: never. A sample with a longer time-out of its own has that.
    sample_timeout: float | None = 300.0
    #: Arguments of each runner's `ActorPool`, where envs are given as a sequence.
    pool_settings: Mapping[str, Any] = field(default_factory=dict)
    #: Resident memory in MiB that a runner may use, with its env actors; None: no limit.
    memory_limit_mb: float | None = None
    #: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
    context: str | None = None
    #: Modules that are imported once, before runners are forked.
    preload: tuple[str, ...] = ()
    #: Threads that NumPy, PyTorch and their like start in each runner; "auto": cores over runners.
    #: Env actors below a runner share what it has. None: as the libraries choose, also in those.
    #: Nothing is set where the user has set a variable as OMP_NUM_THREADS.
    threads_per_process: ThreadsPerProcess = "auto"

    def __post_init__(self) -> None:
        check_threads(self.threads_per_process)
        check_number("sample_timeout", self.sample_timeout, over=0.0, optional=True)
        check_number("memory_limit_mb", self.memory_limit_mb, over=0.0, optional=True)
        RestartPolicy.chosen(self.restart)
        list_of("preload", self.preload, '("torch",)')
        check_kind("timeouts", self.timeouts, Timeouts, example="Timeouts(call=10.0)")
        check_kind("pool_settings", self.pool_settings, Mapping, example='{"num_actors": 2}')


class RunnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a runner was found."""

    #: "ready", or "sampling"; "silent": it has nothing to do and did not answer; "starting", also
    #: again; "lost": given up.
    state: Literal["ready", "sampling", "silent", "starting", "lost"]
    #: Which life of it, from 0.
    incarnation: int
    #: Of its process; 0: there is none.
    pid: int
    #: Seconds since it was asked for the sample that it takes now; 0.0: it takes none.
    sampling_for: float


def envs_of(
    num_runners: int,
    envs: AnyEnvs | Callable[[int], Any],
    settings: GroupConfig,
    *,
    cores: int,
    num_envs: int | None = None,
) -> list[tuple[AnyEnvs, Mapping[str, Any]]]:
    """Return the envs of each runner, and how their pool is made.

    With `num_envs`, `envs` is a function of an env's index.

    Raises:
        ConfigError: There is not one env per runner.
    """
    num_runners = positive_int("num_runners", num_runners)
    if callable(envs) and num_envs is None:
        if settings.pool_settings:
            raise ConfigError("pool_settings are for envs given as a sequence, not as a function")
        return [(envs, {})] * num_runners
    example = '["CartPole-v1"] * 8, or a function that makes a pool'
    sources = env_sources("envs", envs, num_envs, example)
    parts: list[tuple[AnyEnvs, Mapping[str, Any]]] = []
    for first, last in _shares(num_runners, len(sources)):
        actors = min(max(cores // num_runners, 1), last - first)
        pool: dict[str, Any] = {"num_actors": actors}
        if settings.threads_per_process is None:
            pool["threads_per_process"] = None
        parts.append((sources[first:last], pool | dict(settings.pool_settings)))
    return parts


def counts_of(num_runners: int, num_envs: int | None) -> list[int]:
    """Return how many envs each runner makes, of all together; None: one each.

    Raises:
        ConfigError: There is not one env per runner.
    """
    num_runners = positive_int("num_runners", num_runners)
    if num_envs is None:
        return [1] * num_runners
    positive_int("num_envs", num_envs, most=MOST_ENVS)
    return [last - first for first, last in _shares(num_runners, num_envs)]


def _shares(num_runners: int, num_envs: int) -> Iterable[tuple[int, int]]:
    """Return the first env of each runner, and the one behind its last."""
    if num_envs < num_runners:
        raise ConfigError(f"{num_envs} env(s) are not enough for {num_runners} runners")
    return itertools.pairwise([index * num_envs // num_runners for index in range(num_runners + 1)])
