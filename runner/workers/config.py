"""Settings of the runner's parts, checked when they are made. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar, get_args, get_type_hints

import numpy as np
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.finite import CheckFinite, in_words
from envbus.actors.env.source import EntryPoint, by_index
from envbus.bus.errors import ConfigError
from envbus.bus.process.threads import ThreadsPerProcess, check_threads
from envbus.bus.settings import check_number, positive_int
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.curve_keys import Allow, PathLike
from envbus.runner.errors import Fault
from envbus.runner.workers.recycling import RecycleAfter

__all__ = [
    "LONGEST_WAIT",
    "MOST_ENVS",
    "ActorSettings",
    "FleetConfig",
    "Hooks",
    "Timeouts",
    "Wait",
    "check_kind",
    "check_options",
    "choose_autoreset_mode",
    "choose_num_actors",
    "choose_start_method",
    "endpoints_of",
    "env_sources",
    "list_of",
    "with_settings",
]

F = TypeVar("F", bound=Callable[..., Any])


#: Longest single wait, in seconds, of callers without a time-out: they wait again.
LONGEST_WAIT: Final = 3600.0
#: More envs are a mistake.
MOST_ENVS: Final = 1_000_000
#: What a process does in a short wait: spin if there is a core for it, spin, or sleep.
Wait: TypeAlias = Literal["auto", "spin", "block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Default deadline of each verb, in seconds. None lifts it; a dead process is still noticed.

    Starting and resetting may load a simulator, so that theirs are far larger than a step's.
    """

    #: From the start of an actor's process until its envs are built. Before the first start, the
    #: imports of `preload` have as long for themselves.
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
class Hooks:
    """Functions that are told of faults, in the thread of `step`, `reset` or `recv`.

    They are called when the results of that call are complete. What they raise comes out of it, and
    is logged with the hook's name; the results are kept: `step_wait()`, `reset_wait()` or `recv()`
    returns them. They may close the envs, and must not step, reset or receive: the call that they
    are told in is still under way.
    """

    #: An env or its actor failed; called once per env.
    on_fault: Callable[[Fault], object] | None = None
    #: An env works again: its id, and the number of its life, from 1.
    on_restart: Callable[[int, int], object] | None = None
    #: An env is not made anew any more; after `on_fault`.
    on_give_up: Callable[[Fault], object] | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            hook = getattr(self, item.name)
            if hook is not None and not callable(hook):
                raise ConfigError(f"Hooks.{item.name} must be a function, not {hook!r:.80}")


class ActorSettings(TypedDict, total=False):
    """What `BusVectorEnv` and `ActorPool` take as keyword arguments about their env actors.

    `make_vec` hands them on. Each may be left out; `help(BusVectorEnv)` shows the defaults.

    Attributes:
        num_actors: Processes; "auto": as many as there are usable CPU cores. Choose more for envs
            that wait rather than compute. 0: none; the envs are stepped in this process, in the
            caller's thread, so that a `breakpoint()` in an env works. What ends an env's process
            ends this one then, and no deadline ends an env that hangs.
        restart: True, or a `RestartPolicy` that says how often and how soon, per env and per actor:
            make envs anew that raised, and start actors again that died or passed a deadline. The
            episodes of their envs end; the others go on. What was set in an env (`set_attr`) is
            lost with it. False: errors are raised. See docs/reliability.md.
        hooks: Functions that are told of faults and restarts.
        memory_limit_mb: Resident memory in MiB that an actor may use, with all that it started;
            one that uses more is killed, with or without restart. Looked at about once per
            second, for actors on this host, while a call waits.
        recycle_after: When actors on this host that work are exchanged for fresh ones; None:
            never. See docs/recovery.md.
        check_finite: What follows where a reward is NaN or infinite, or an observation NaN.
            "warn": a warning, once per env and field. True: the env has failed, as if it had
            raised. False: nobody looks. See docs/reliability.md.
        timeouts: Default deadline of each verb, in seconds.
        preload: Modules that are imported once, before actors are forked, e.g. a simulator.
        threads_per_process: Threads that NumPy, PyTorch and their like start in each actor on this
            host; "auto": usable cores over actors, at least one; None: as they choose. Where
            OMP_NUM_THREADS or another such variable is set, that holds.
        local_links: Carry the messages of local actors through a socketpair each, where the
            platform can; else, and with False, through ROUTER and DEALER sockets.
        wait: What this process and the actors do in waits that are short as a rule. "auto": look
            again and again where that has paid, if there are no more actors than cores, and more
            than one core; "spin": with more actors, too; "block": sleep, which leaves the cores
            to others, a learner for example, and makes a step longer by some wake-ups.
        remote_actors: How many of the actors join from other hosts (`envbus actor ENDPOINT`);
            they host the last envs, which must be given as ids or import paths.
        bind: Endpoints that they join at, e.g. `"tcp://127.0.0.1:5555"`.
        keys: File of this runner's secret key. Only actors with keys can join at `bind` then.
        allow: Which actors: a folder of their public keys, or one file, or a function of the
            public key that returns True or False. See docs/security.md.
        insecure: Allow binding to more than this host without keys, where anybody may join.
    """

    num_actors: int | Literal["auto"]
    restart: bool | RestartPolicy
    hooks: Hooks | None
    memory_limit_mb: float | None
    recycle_after: RecycleAfter | None
    check_finite: CheckFinite
    timeouts: Timeouts | None
    preload: Sequence[str]
    threads_per_process: ThreadsPerProcess
    local_links: bool
    wait: Wait
    remote_actors: int
    bind: str | Sequence[str]
    keys: PathLike | None
    allow: Allow | None
    insecure: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How the processes of one owner are started and watched: `ActorSettings`, and their defaults.

    Groups of runners, too, are started by these.
    """

    num_actors: int | Literal["auto"] = "auto"
    restart: bool | RestartPolicy = False
    hooks: Hooks | None = None
    memory_limit_mb: float | None = None
    recycle_after: RecycleAfter | None = None
    check_finite: CheckFinite = "warn"
    timeouts: Timeouts = field(default_factory=Timeouts)
    preload: Sequence[str] = ()
    threads_per_process: ThreadsPerProcess = "auto"
    local_links: bool = True
    wait: Wait = "auto"
    remote_actors: int = 0
    bind: Sequence[str] = ()
    keys: PathLike | None = None
    allow: Allow | None = None
    insecure: bool = False
    #: Exchange arrays of fixed size through shared memory instead of messages.
    shared_memory: bool = True
    #: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
    context: str | None = None
    #: Most envs that may step at one time; None: no limit.
    max_concurrency: int | None = None

    @classmethod
    def of(cls, settings: ActorSettings, **others: Any) -> FleetConfig:
        """Return what a caller has asked for, in `settings` and by `others` of these fields.

        Raises:
            TypeError: There is no such setting.
            ConfigError: One cannot be used.
        """
        known = ActorSettings.__annotations__
        if unknown := settings.keys() - known.keys():
            close = get_close_matches(min(unknown), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "see envbus.runner.ActorSettings"
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}; {hint}")
        given: dict[str, Any] = {**settings, **others}
        given["bind"] = endpoints_of(settings.get("bind", ()))
        given["preload"] = tuple(list_of("preload", settings.get("preload", ()), '["numpy"]'))
        if settings.get("timeouts") is None:
            given["timeouts"] = Timeouts()
        return cls(**given)

    def __post_init__(self) -> None:
        _check_max_concurrency(self.max_concurrency)
        if self.hooks is not None:
            check_kind("hooks", self.hooks, Hooks, example="Hooks(on_fault=print)")
        RestartPolicy.chosen(self.restart)
        in_words(self.check_finite)
        check_threads(self.threads_per_process)
        check_kind("timeouts", self.timeouts, Timeouts, example="Timeouts(step=5)")
        for name in ("local_links", "shared_memory", "insecure"):
            check_kind(name, getattr(self, name), bool, np.bool_, example="True")
        if self.wait not in get_args(Wait):
            known = ", ".join(map(repr, get_args(Wait)))
            raise ConfigError(f"wait must be one of {known}, not {self.wait!r:.80}")
        limit, recycle = self.memory_limit_mb, self.recycle_after
        check_number("memory_limit_mb", limit, over=0.0, finite=True, optional=True)
        if recycle is not None:
            check_kind("recycle_after", recycle, RecycleAfter, example="RecycleAfter(episodes=500)")
        if limit is not None and recycle is not None and (recycle.rss_mb or 0.0) >= limit:
            raise ConfigError(
                f"RecycleAfter.rss_mb={recycle.rss_mb} must be less than memory_limit_mb={limit}, "
                "at which actors are killed"
            )
        check_number("remote_actors", self.remote_actors, whole=True, least=0)
        if self.remote_actors and not self.bind:
            raise ConfigError("remote_actors need an endpoint to join at: pass bind='tcp://...'")
        if self.is_local:
            for name in _ABOUT_ACTORS:
                if value := getattr(self, name):
                    raise ConfigError(
                        f"{name}={value!r} is about actors, and num_actors=0 means that there are "
                        "none"
                    )
        if not self.bind and (self.keys is not None or self.allow is not None):
            raise ConfigError("keys= and allow= guard an endpoint: pass bind='tcp://...' too")

    @property
    def is_local(self) -> bool:
        """Whether there are no actors."""
        return not isinstance(self.num_actors, bool) and self.num_actors == 0

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """How often, and how soon, what failed is made anew; None: it is not."""
        return RestartPolicy.chosen(self.restart)


#: Settings that mean nothing where the envs are stepped in this process.
_ABOUT_ACTORS = ("remote_actors", "bind", "memory_limit_mb", "recycle_after", "context", "preload")


def with_settings(init: F) -> F:
    """Have `help()` and `inspect` show each of `ActorSettings` that `**settings` stands for.

    Args:
        init: A constructor, or function, that has such an argument.
    """
    own, defaults = signature(init), FleetConfig()
    parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=hint)
        for name, hint in get_type_hints(ActorSettings).items()
    ]
    vars(init)["__signature__"] = own.replace(parameters=parameters)
    return init


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
        chosen = min(chosen, int(max_concurrency))
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


def check_options(options: object) -> None:
    """Raise `ConfigError` unless these are options of a reset, or None."""
    if options is not None:
        check_kind("options", options, Mapping, example='{"difficulty": 3}')


def list_of(name: str, values: object, example: str) -> list[Any]:
    """Return a sequence as a list; a text is none of texts.

    Raises:
        ConfigError: It is no sequence.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is a sequence, {example} for example; not {values!r:.80}")
    return list(values)


def env_sources(name: str, given: object, num_envs: int | None, example: str) -> list[Any]:
    """Return one source per env.

    Args:
        name: Of the argument.
        given: A sequence with one source per env; or, with `num_envs`, one function of an env's
            index, or its import path.
        num_envs: How many envs such a function makes; None: it is a sequence.
        example: How the sequence may be written.

    Raises:
        ConfigError: It is neither.
    """
    if num_envs is None:
        if callable(given):
            example = f"{example}, or a function of an env's index with num_envs="
        return list_of(name, given, example)
    if not callable(given) and not isinstance(given, str | EntryPoint):
        raise ConfigError(
            f"num_envs={num_envs!r:.80} is for one function that is called with each env's index, "
            f"or its import path: {name} is {given!r:.80}; leave num_envs out for a sequence"
        )
    return by_index(given, positive_int("num_envs", num_envs, most=MOST_ENVS))


def endpoints_of(bind: str | Sequence[str]) -> tuple[str, ...]:
    """Return the endpoints that are meant by one, or by several.

    Raises:
        ConfigError: It is neither.
    """
    several = [bind] if isinstance(bind, str) else bind
    found = list_of("bind", several, '["tcp://127.0.0.1:5555"]')
    for endpoint in found:
        check_kind("bind", endpoint, str, example='"tcp://127.0.0.1:5555"')
    return tuple(found)


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


def _check_max_concurrency(limit: object) -> None:
    if limit is not None and not isinstance(limit, int | np.integer):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(limit)}.")
    if limit is not None and limit < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {limit}.")
