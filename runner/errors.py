"""What the caller gets when an env or its actor fails: errors, and the record of a fault."""

from __future__ import annotations

import builtins
import enum
import logging
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from envbus.actors.env.renewal import RestartRequest
from envbus.actors.failures import original_of
from envbus.actors.protocol import SlotError
from envbus.bus.errors import EnvbusError

__all__ = [
    "ActorLostError",
    "EnvError",
    "Fault",
    "FaultCause",
    "FaultInfo",
    "advise",
    "as_cause",
    "env_errors",
    "failure_of",
    "to_exception",
    "without_our_frames",
]

logger = logging.getLogger("envbus.runner.errors")


class FaultCause(enum.Enum):
    """Why an env could not go on."""

    ERROR = "error"
    CRASH = "crash"
    TIMEOUT = "timeout"
    #: Its actor used more memory than it may.
    MEMORY = "memory"
    #: It asked for it, by a `RestartRequest`, or its owner did.
    REQUEST = "request"
    #: The external simulator that ran it is gone.
    LOST = "lost"


class FaultInfo(dict[str, Any]):
    """What infos say of a fault, as `fault`. What an env calls so itself is none of these."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An env or its actor failed, and its episode is over."""

    env_id: int
    cause: FaultCause
    #: What happened, to which process; for people.
    message: str
    #: Restarts of this env so far, alone or with its actor, also to recycle that; the one for
    #: this fault is not counted.
    restarts: int
    #: What the env raised, if it did.
    error: EnvError | None = None
    #: Whether it is not made anew any more: it has failed too often.
    given_up: bool = False

    def info(self) -> FaultInfo:
        """Return what an env's info says of it."""
        return FaultInfo(cause=self.cause.value, error=self.message, restarts=self.restarts)


class EnvError(EnvbusError):
    """An env raised; the message holds the complete remote traceback.

    It is the `__cause__` of the original exception where that could be rebuilt from its class
    and plain arguments, and is raised itself where it could not.

    Attributes:
        env_id: Which env of the pool.
        actor: Name of the actor that hosts it.
        incarnation: Which life of that actor, from 0.
        phase: What the env was doing: build, reset, step, autoreset, call.
        remote_type: Qualified name of the exception's class.
        remote_traceback: Formatted traceback, with causes.
    """

    def __init__(self, error: SlotError, *, env_id: int, actor: str, incarnation: int) -> None:
        self.env_id = env_id
        self.actor = actor
        self.incarnation = incarnation
        self.phase = error.phase
        self.remote_type = f"{error.type_module}.{error.type_name}"
        self.remote_traceback = error.traceback
        #: In one line.
        self.summary = (
            f"env {env_id} ({actor}, incarnation {incarnation}) failed in {error.phase}: "
            f"{self.remote_type}: {error.message}"
        )
        super().__init__(f"{self.summary}\n\nRemote traceback:\n{error.traceback}")

    @property
    def cause(self) -> FaultCause:
        """What kind of fault it is."""
        return FaultCause.REQUEST if self.remote_type == _REQUEST else FaultCause.ERROR

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


class ActorLostError(EnvbusError):
    """An actor's process ended while its envs were needed.

    Attributes:
        env_ids: The envs that it hosted.
        actor: Its name.
    """

    def __init__(self, message: str, *, env_ids: Sequence[int], actor: str) -> None:
        super().__init__(message)
        self.env_ids = list(env_ids)
        self.actor = actor

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


_REQUEST = f"{RestartRequest.__module__}.{RestartRequest.__qualname__}"


def advise(reason: str, advice: str) -> str:
    """Return `reason` with what to do at the end of its first line: a long text may follow."""
    first, *rest = reason.split("\n", 1)
    return "\n".join([f"{first}; {advice}", *rest])


def failure_of(
    errors: Sequence[EnvError], originals: Sequence[Exception | None], advice: str = ""
) -> Exception:
    """Return what is to be raised: the last error.

    As its own type where that could be rebuilt. All of them stand in its `__cause__`: the one
    `EnvError`, or, for several, an `ExceptionGroup` of them. Before Python 3.11 there are no
    groups: the cause is the last one's, and the others are logged.

    Args:
        errors: At least one.
        originals: For each, the rebuilt original exception or None.
        advice: What to do, at the end of the last one's first line; "": nothing.
    """
    if sys.version_info < (3, 11):
        for error in errors[:-1]:
            logger.error("%s", error)
    last, original = errors[-1], originals[-1]
    cause = as_cause(errors)
    if advice and advice not in str(last):
        last.args = (advise(str(last), advice),)
    failure = last if original is None else original
    if cause is not failure:
        failure.__cause__ = cause
    return failure


def without_our_frames(error: BaseException) -> None:
    """Drop the frames of what an env raised: they are of envbus, the env's are in its cause."""
    if isinstance(error, Exception) and env_errors(error):
        error.__traceback__ = None


def as_cause(errors: Sequence[EnvError]) -> Exception | None:
    """Return one exception for all of `errors`: an `ExceptionGroup` if there are several.

    A traceback that several have in common is in the text of the first one only. Before Python
    3.11 there are no groups, and the last one stands for all, with its traceback.
    """
    if len(errors) < 2 or sys.version_info < (3, 11):
        return errors[-1] if errors else None
    first: dict[str, int] = {}
    for error in errors:
        if (known := first.setdefault(error.remote_traceback, error.env_id)) != error.env_id:
            error.args = (f"{error.summary}\n\nRemote traceback: the same as of env {known}",)
    return builtins.ExceptionGroup(f"{len(errors)} envs failed", list(errors))


def env_errors(error: BaseException) -> list[EnvError]:
    """Return what envs raised that has led to `error`, in order of env; empty if none did.

    For exceptions of `reset`, `step`, `call`, `render`, `recv` and the constructors, which are
    the envs' own where that is possible and have the `EnvError` in their cause. Before Python
    3.11 it is the last one only; the log has all.
    """
    found = error.__cause__
    if sys.version_info >= (3, 11) and isinstance(found, builtins.ExceptionGroup):
        return [one for one in found.exceptions if isinstance(one, EnvError)]
    return [one for one in (error, found) if isinstance(one, EnvError)][:1]


def to_exception(
    error: SlotError, *, env_id: int, actor: str, incarnation: int, trusted: bool
) -> tuple[EnvError, Exception | None]:
    """Return the error, and the env's own exception if class and arguments give it back.

    Args:
        error: What the actor told.
        env_id: Which env of the pool.
        actor: Name of the actor.
        incarnation: Which life of it.
        trusted: Whether it is a child of this process; see `original_of`.
    """
    env_error = EnvError(error, env_id=env_id, actor=actor, incarnation=incarnation)
    told = None if error.args is None else error.args.value
    args = tuple(told) if isinstance(told, tuple | list) else None  # anybody's, if it is remote
    original = original_of(error.type_module, error.type_name, error.message, args, trusted=trusted)
    return env_error, original


def _rebuild(cls: type[EnvbusError], args: tuple[object, ...]) -> EnvbusError:
    return cls.__new__(cls, *args)
