"""Settings of the runner's parts, checked when they are made. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from gymnasium.vector import AutoresetMode

from envbus.actors.finite import CheckFinite, in_words
from envbus.bus.errors import ConfigError
from envbus.bus.keys import Allow, PathLike
from envbus.bus.restart import RestartPolicy
from envbus.bus.settings import check_number, positive_int
from envbus.bus.threads import ThreadsPerProcess, check_threads
from envbus.runner.recycling import RecycleAfter

__all__ = [
    "ENDPOINTS",
    "FleetConfig",
    "Timeouts",
    "Wait",
    "check_kind",
    "choose_autoreset_mode",
    "choose_num_actors",
    "choose_start_method",
    "list_of",
]


#: What a process does in a short wait: spin if there is a core for it, spin, or sleep.
Wait: TypeAlias = Literal["auto", "spin", "block"]
#: For messages: how endpoints are given.
ENDPOINTS = '["tcp://127.0.0.1:5555"]'


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Default deadline of each verb, in seconds. None lifts it; a dead process is still noticed.

    Starting and resetting may load a simulator, so that theirs are far larger than a step's.
    """

    #: From the start of an actor's process until its envs are built.
    start: float | None = 300.0
    reset: float | None = 300.0
    step: float | None = 60.0
    #: `call`, `get_attr`, `set_attr`, `render`, `exec_func`.
    call: float | None = 60.0
    #: For all envs to close and their processes to exit, before they are killed.
    close: float = 10.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.name != "close":
                continue
            if not isinstance(value, int | float) or math.isnan(value) or not value > 0:
                raise ConfigError(
                    f"Timeouts.{item.name} must be a positive number of seconds, not {value!r}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How env actors are started and watched."""

    #: Processes; `"auto"`: one per CPU core that this process may use, at most one per env; 0:
    #: none, the envs are stepped in this one.
    num_actors: int | Literal["auto"] = "auto"
    #: Exchange arrays of fixed size through shared memory instead of messages.
    shared_memory: bool = True
    #: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
    context: str | None = None
    #: Most envs that may step at one time; None: no limit.
    max_concurrency: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    #: Whether, and how often, actors that died are started again; None: they are not.
    restart: RestartPolicy | None = None
    #: Resident memory in MiB that the process of an actor may use, with all below it; one that
    #: uses more is killed. None: no limit.
    memory_limit_mb: float | None = None
    #: When actors that work are exchanged for fresh ones; None: never.
    recycle: RecycleAfter | None = None
    #: What follows where a reward, or an observation, is not finite: see `BusVectorEnv`.
    check_finite: CheckFinite = "warn"
    #: Modules that the fork server imports before it forks actors, for a quicker start.
    preload: tuple[str, ...] = ()
    #: Threads that NumPy, PyTorch and their like start in each local actor; "auto": its part of
    #: the cores; None: as they choose. Nothing is set where the user has set such a variable.
    threads_per_process: ThreadsPerProcess = "auto"
    #: Carry the messages of local actors through socketpairs instead of ROUTER and DEALER, where
    #: the platform can: a message costs one wake-up instead of three.
    lanes: bool = True
    #: What driver and actors do in short waits: see `BusVectorEnv`.
    wait: Wait = "auto"
    #: How many of the actors join from elsewhere, by `envbus actor`, instead of being started.
    remote_actors: int = 0
    #: Endpoints that they join at, e.g. `("tcp://127.0.0.1:5555",)`.
    bind: tuple[str, ...] = ()
    #: File of the runner's secret key, and which actors may join with which public keys.
    keys: PathLike | None = None
    allow: Allow | None = None
    #: Allow binding wider than this host without keys.
    insecure: bool = False

    def __post_init__(self) -> None:
        in_words(self.check_finite)
        check_threads(self.threads_per_process)
        check_kind("timeouts", self.timeouts, Timeouts, example="Timeouts(step=5)")
        if self.wait not in get_args(Wait):
            known = ", ".join(map(repr, get_args(Wait)))
            raise ConfigError(f"wait must be one of {known}, not {self.wait!r:.80}")
        limit, recycle = self.memory_limit_mb, self.recycle
        if limit is not None:
            check_kind("memory_limit_mb", limit, int, float, Real, example="2000")
        if recycle is not None:
            check_kind("recycle_after", recycle, RecycleAfter, example="RecycleAfter(episodes=500)")
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"memory_limit_mb must be positive and finite, not {limit!r}")
        if limit is not None and recycle is not None and (recycle.rss_mb or 0.0) >= limit:
            raise ConfigError(
                f"RecycleAfter.rss_mb={recycle.rss_mb} must be less than memory_limit_mb={limit}, "
                "at which actors are killed"
            )
        check_number("remote_actors", self.remote_actors, whole=True, least=0)
        if self.remote_actors and not self.bind:
            raise ConfigError("remote_actors need an endpoint to join at: pass bind='tcp://...'")
        if self.is_local:
            self._refuse_what_takes_processes()
        if not self.bind and (self.keys is not None or self.allow is not None):
            raise ConfigError("keys= and allow= guard an endpoint: pass bind='tcp://...' too")

    @property
    def is_local(self) -> bool:
        """Whether there are no actors."""
        return not isinstance(self.num_actors, bool) and self.num_actors == 0

    def _refuse_what_takes_processes(self) -> None:
        for name in ("remote_actors", "bind", "memory_limit_mb", "recycle", "context", "preload"):
            if value := getattr(self, name):
                told = "recycle_after" if name == "recycle" else name
                raise ConfigError(
                    f"{told}={value!r} is about actors, and num_actors=0 means that there are none"
                )


def choose_num_actors(
    num_sources: int,
    requested: object,
    *,
    cores: int,
    max_concurrency: int | None,
    remote: int = 0,
) -> int:
    """Return how many actors host `num_sources` envs.

    Envs in one actor step one after another, so that a limit of concurrent envs is a limit of
    actors.

    Args:
        num_sources: Envs, or vector envs.
        requested: A number, or `"auto"`: one per core, and the remote ones.
        cores: CPU cores that this process may use.
        max_concurrency: Most envs that may step at one time; None: no limit.
        remote: How many of the actors run elsewhere.

    Raises:
        ConfigError: `requested` is neither `"auto"` nor from 1 to `num_sources`, or there are
            fewer actors than remote ones.
    """
    if requested == "auto":
        chosen = min(cores + remote, num_sources)
    else:
        wanted = "'auto' or a positive integer, or 0, for envs in this process"
        chosen = positive_int("num_actors", requested, wanted=wanted)
        if chosen > num_sources:
            raise ConfigError(
                f"num_actors={chosen} is more than the {num_sources} env(s); each actor needs one"
            )
    if max_concurrency is not None:
        chosen = min(chosen, max_concurrency)
    if remote > chosen:
        raise ConfigError(f"remote_actors={remote} is more than the {chosen} actor(s) in all")
    return chosen


def check_kind(name: str, value: object, *kinds: type, example: str) -> None:
    """See that an argument is what it should be, before something far away fails of it.

    Args:
        name: Of the argument.
        value: Given for it.
        *kinds: What it may be; None is checked by the caller.
        example: How it may be written.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} must be {wanted}, {example} for example; not {value!r:.80}")


def list_of(name: str, values: object, example: str) -> list[Any]:
    """Return a sequence as a list; a text is none of texts.

    Raises:
        ConfigError: It is no sequence.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is a sequence, {example} for example; not {values!r:.80}")
    return list(values)


def choose_autoreset_mode(mode: object) -> AutoresetMode:
    """Return the mode that is meant by one of Gymnasium's values, or by its name.

    Raises:
        ValueError: There is no such mode.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    word = mode.replace("_", "").lower() if isinstance(mode, str) else None
    for known in AutoresetMode:
        if known.value.lower() == word:
            return known
    words = ", ".join(repr(known.value) for known in AutoresetMode)
    raise ValueError(f"autoreset_mode must be one of {words}, not {mode!r}")


def choose_start_method(context: str | None) -> Literal["fork", "spawn"] | None:
    """Return how children are started: forked from a clean server, or a fresh interpreter.

    "fork" is served by the fork server too: this process, which may have threads and ZeroMQ
    contexts, is never forked. None leaves the choice to the platform.

    Raises:
        ValueError: An unknown context, in the words of `multiprocessing`.
    """
    match context:
        case None:
            return None
        case "fork" | "forkserver":
            return "fork"
        case "spawn":
            return "spawn"
        case _:
            raise ValueError(f"cannot find context for {context!r}")
