"""What is pending in a vector env, and how it ends: with a round's results, too late, or closed.

Leaves out what the results mean (`vector_results.py`, `vector_faults.py`).
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import gymnasium
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from envbus.bus.errors import EnvbusError
from envbus.bus.messages import Request
from envbus.runner.actor import Actor
from envbus.runner.faults import EnvError, as_cause, raise_env_errors, to_exception
from envbus.runner.fleet import Fleet
from envbus.runner.lockstep import Lockstep, Round

__all__ = ["Pending", "VectorRounds", "errors_of", "raise_errors_once"]

R = TypeVar("R")
logger = logging.getLogger("envbus.runner.vector_env")


class Pending(enum.Enum):
    """What is pending; the values are Gymnasium's, and stand in messages."""

    NOTHING = "default"
    RESET = "reset"
    STEP = "step"
    CALL = "call"


class VectorRounds:
    """One round at a time, with Gymnasium's errors for whoever asks out of turn.

    Args:
        owner: Class name of the vector env, for messages.
        fleet: Whose actors.
        lockstep: What carries the rounds.
    """

    def __init__(self, owner: str, fleet: Fleet, lockstep: Lockstep) -> None:
        self.pending = Pending.NOTHING
        self.closed = False
        self._owner = owner
        self._fleet = fleet
        self._lockstep = lockstep
        #: Called before a round is collected, which it may begin.
        self.on_collect: Callable[[], object] = _nothing
        #: What was collected last, until the next round begins.
        self._last: tuple[Pending, Round] | None = None
        #: What was given out last, which `keep_last` takes back.
        self._given: tuple[Pending, Round] | None = None
        #: Seconds that each request of the present round has.
        self._timeout: float | None = None

    def check_open(self) -> None:
        """See that it was not closed.

        Raises:
            ClosedEnvironmentError: It was.
        """
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{self._owner}`, after a call to `close()`."
            )

    def unless_closed(self, end: Callable[[], R]) -> R:
        """Return what `end` returns, which waits, so that a signal's handler may close all.

        Raises:
            ClosedEnvironmentError: One did.
            Exception: What `end` raises.
        """
        try:
            return end()
        except EnvbusError:
            self.check_open()
            raise

    def check_free(self, verb: str, ending: str = ".") -> None:
        """See that `verb` may begin a round.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another round is pending.
        """
        self.check_open()
        if self.pending is not Pending.NOTHING:
            raise AlreadyPendingCallError(
                f"Calling `{verb}` while waiting for a pending call to "
                f"`{self.pending.value}` to complete{ending}",
                self.pending.value,
            )

    def begin(
        self,
        pending: Pending,
        requests: Mapping[int, Request[Any]],
        timeout: float | None,
        *,
        kill_late: bool = False,
        tells: bool = True,
    ) -> None:
        """Send the requests; parameters and errors as in `Lockstep.begin`."""
        self.forget()
        self._lockstep.begin(
            requests,
            timeout,
            kill_late=kill_late,
            tells=tells,
        )
        self.pending, self._timeout = pending, timeout

    def forget(self) -> None:
        """Let go of what was collected last: the next round begins."""
        self._given = self._last = None

    def collect(self, verb: str, asked: str, pending: Pending, timeout: float | None) -> Round:
        """Wait for the round's end; after what envs raised in it was raised, return it again.

        Args:
            verb: What the caller called, for messages.
            asked: What had to be called before.
            pending: What that was.
            timeout: Seconds; None: until the requests' own deadlines.

        Raises:
            ClosedEnvironmentError: After `close`.
            NoAsyncCallError: No such round is pending.
            multiprocessing.TimeoutError: Not all answered; the message names who did not.
            ActorLostError, RestartLimitError: An actor ended and was not started again.
        """
        if self.closed or self.pending is not pending:
            self.check_open()
            last, self._last = self._last, None
            if last is not None and last[0] is pending and last[1].told:
                self._given = last
                return last[1]
            raise NoAsyncCallError(
                f"Calling `{verb}` without any prior call to `{asked}`.", pending.value
            )
        try:
            self.on_collect()
            done = self._lockstep.collect(timeout)
        except EnvbusError as exc:
            self.pending = Pending.NOTHING
            cause = self._cause()
            if cause is None:
                raise
            raise exc from cause
        # Not so after Ctrl-C, or what else a signal's handler raises: it can be fetched, or closed.
        if done is None:
            missing = self._lockstep.missing()
            self._lockstep.abandon()
            self.time_out(verb, timeout, missing)
        self._given = self._last = (pending, done)
        self.pending = Pending.NOTHING
        if done.late:
            self.time_out(verb, self._timeout, done.late)
        return done

    def close(self, timeout: float | None, *, terminate: bool) -> None:
        """Wait for what is pending, then end all actors.

        Args:
            timeout: Seconds for both; None: `timeouts.close`.
            terminate: Kill the actors at once.
        """
        allowed = self._fleet.config.timeouts.close if timeout is None else timeout
        deadline = time.monotonic() + allowed
        if self.pending is not Pending.NOTHING and not self._fleet.closed:
            gymnasium.logger.warn(
                "Calling `close` while waiting for a pending call to "
                f"`{self.pending.value}` to complete."
            )
            self.pending = Pending.NOTHING
            try:
                self.on_collect()
                if terminate or self._lockstep.collect(allowed) is None:
                    terminate = True
            except EnvbusError as error:  # an actor that has ended needs no closing
                logger.info("closed while a call was pending: %s", error)
            self._lockstep.abandon()
        self._fleet.close(timeout=deadline - time.monotonic(), terminate=terminate)
        self.closed = True

    def keep(self, pending: Pending, done: Round) -> None:
        """Let `collect`, called again, return this round, whose results were not given out."""
        done.told = True
        self._last = pending, done

    def keep_last(self, _results: object = None) -> None:
        """As `keep`, of what was collected last."""
        if self._given is not None:
            self.keep(*self._given)

    def time_out(self, verb: str, timeout: float | None, late: Sequence[Actor]) -> NoReturn:
        """Say that `verb` has timed out, and who has not answered.

        Raises:
            multiprocessing.TimeoutError: Always.
        """
        self.pending = Pending.NOTHING
        raise multiprocessing.TimeoutError(
            f"The call to `{verb}` has timed out after {timeout} second(s). "
            f"Not answered: {', '.join(actor.describe() for actor in late)}.\n"
            + "\n".join(self._fleet.stacks(late))
        ) from self._cause()

    def _cause(self) -> Exception | None:
        """Return what envs raised in a round that something else ended."""
        return as_cause([error for error, _ in errors_of(self._lockstep.round, self._fleet.actors)])


def _nothing() -> None:
    pass


def errors_of(done: Round, actors: Sequence[Actor]) -> list[tuple[EnvError, Exception | None]]:
    """Return what envs raised in a round, in their order."""
    return [
        to_exception(
            error,
            env_id=actor.env_ids[error.slot],
            actor=actor.name,
            incarnation=actor.incarnation,
        )
        for index, reply in sorted(done.replies.items())
        for actor in [actors[index]]
        for error in reply.errors
    ]


def raise_errors_once(done: Round, actors: Sequence[Actor]) -> list[EnvError]:
    """Raise what envs raised in a round, or return it if that was raised before."""
    found = errors_of(done, actors)
    errors = [error for error, _ in found]
    if found and not done.told:
        done.told = True
        raise_env_errors(errors, [original for _, original in found])
    return errors
