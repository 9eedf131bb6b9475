"""What fails, and what is to be told of it: faults, errors, envs that are lost.

Leaves out what envs are asked after a fault (`engine.py`), and which are made anew when
(`recovery.py`).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from envbus.actors.protocol import SlotError, StepResult
from envbus.bus.errors import RestartLimitError
from envbus.bus.interrupts import interruptible
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.env_results import EnvResults
from envbus.runner.engine.env_states import EnvState, EnvStates
from envbus.runner.engine.recovery import Incarnations, Recovery
from envbus.runner.errors import (
    ActorLostError,
    EnvError,
    Fault,
    FaultCause,
    advise,
    failure_of,
    to_exception,
    without_our_frames,
)
from envbus.runner.monitoring.figures import MOST_FAULTS, FaultFigures, fault_figures
from envbus.runner.workers.config import Hooks
from envbus.runner.workers.env_placement import EnvPlacement
from envbus.runner.workers.worker import Actor, ActorState, Gone

__all__ = ["ADVICE", "ENV_ADVICE", "EnvFaults", "FaultLog", "Trouble", "errors_of"]

logger = logging.getLogger("envbus.runner.errors")


def errors_of(actor: Actor, errors: Sequence[SlotError]) -> list[tuple[EnvError, Exception | None]]:
    """Return what envs of an actor raised, each with the exception that it was, if known."""
    return [
        to_exception(
            error,
            env_id=actor.env_ids[error.slot],
            actor=actor.name,
            incarnation=actor.incarnation,
            trusted=not actor.remote,
        )
        for error in errors
    ]


#: What to do about an actor that is not started again.
ADVICE: Final = "close this and make a new one, or pass restart=True to have its envs started again"
#: What to do about an env that raised.
ENV_ADVICE: Final = "mend it, or pass restart=True to have such envs made anew"


class FaultLog:
    """Counts, log lines and hooks of one pool."""

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks or Hooks()
        self._untold: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = []
        self._causes: Counter[FaultCause] = Counter()
        #: The latest of envs whose processes went on; of others, see `Lifecycle.ends`.
        self.recent: deque[FaultFigures] = deque(maxlen=MOST_FAULTS)

    def counts(self) -> dict[str, int]:
        """Return the number of faults so far by cause."""
        return {cause.value: number for cause, number in self._causes.items()}

    @property
    def untold(self) -> bool:
        """Whether `tell` has something to call."""
        return bool(self._untold)

    def fault(self, fault: Fault) -> None:
        """An env failed."""
        self._causes[fault.cause] += 1
        # A whole actor's end was logged where it was noticed.
        if fault.error is not None:
            quiet = fault.cause is FaultCause.REQUEST
            level = logging.INFO if quiet else logging.WARNING
            logger.log(level, "%s", fault.message, extra=_for_log(fault))
            self.recent.append(
                fault_figures(
                    time.time(), fault.cause.value, fault.error.actor, fault.message, fault.env_id
                )
            )
        self._queue("on_fault", self._hooks.on_fault, fault)
        if fault.given_up:
            text = "env %d is given up: %s"
            logger.error(text, fault.env_id, fault.message, extra=_for_log(fault))
            self._queue("on_give_up", self._hooks.on_give_up, fault)

    def restarted(self, env_id: int, life: int) -> None:
        """An env works again."""
        self._queue("on_restart", self._hooks.on_restart, env_id, life)

    def tell(self) -> None:
        """Call the hooks for what happened since the last call."""
        while self._untold:
            name, hook, arguments = self._untold.pop(0)
            try:
                with interruptible():
                    hook(*arguments)
            except Exception:
                logger.error("the hook %s raised", name, exc_info=True)
                raise

    def _queue(self, name: str, hook: Callable[..., object] | None, *arguments: object) -> None:
        if hook is not None:
            self._untold.append((name, hook, arguments))


def _for_log(fault: Fault) -> dict[str, object]:
    """Return what a line of the log says of a fault besides its text."""
    told: dict[str, object] = {"env": fault.env_id, "cause": fault.cause.value}
    if fault.error is not None:
        told["actor"] = fault.error.actor
    return told


class Trouble(NamedTuple):
    """What a request failed of that is not made good."""

    #: What to raise of it.
    error: Exception
    #: Who has not answered in time.
    late: Actor | None = None
    #: What envs raised, each with the exception that it was, if that could be rebuilt.
    raised: Sequence[tuple[EnvError, Exception | None]] = ()
    #: By env that raised: what it told besides.
    infos: Mapping[int, dict[str, Any]] = {}


class EnvFaults:
    """Ends the lives of envs that fail, and keeps what is to be told of it.

    Args:
        placement: Who is hosted where.
        states: What envs are doing.
        results: What they have brought.
        log: Told of each fault.
        policy: How often an env is made anew; None: faults are raised instead.
        all_or_nothing: Raise when an env is given up, also where faults are not raised.

    Attributes:
        incarnations: Which life each env is in.
        recovery: Which envs are made anew; None where faults are raised.
        lost: By env: why it is lost for good, and what it raised.
        untold: Faults that the next batch tells.
    """

    def __init__(
        self,
        placement: EnvPlacement,
        states: EnvStates,
        results: EnvResults,
        log: FaultLog,
        policy: RestartPolicy | None,
        *,
        all_or_nothing: bool,
    ) -> None:
        self._placement = placement
        self._states = states
        self._results = results
        self._log = log
        self._raises_losses = policy is None or all_or_nothing
        self.incarnations = Incarnations(len(states))
        self.recovery = Recovery(placement.units, policy, random.random) if policy else None
        self.lost: dict[int, tuple[str, EnvError | None]] = {}
        self.untold: list[Fault] = []
        #: Without restart, by env: what the end of its request said, which was at work then.
        self._reasons: dict[int, str] = {}
        #: What envs and requests failed of in this round, and actors and envs lost for good, each
        #: to be raised once.
        self._troubles: deque[Trouble] = deque()
        self._losses: deque[Exception] = deque()

    # --- what fails --------------------------------------------------------------------------

    def add_error(self, error: Exception, late: Actor | None = None) -> None:
        """Have the next call raise an error; `late` has not answered in time."""
        self._troubles.append(Trouble(error, late))

    def on_env_errors(self, actor: Actor, result: StepResult) -> None:
        """Envs raised: have them made anew, or the next call raise it."""
        rebuilt = errors_of(actor, result.errors)
        if self.recovery is not None:
            self._recover(self.recovery, [error for error, _ in rebuilt])
            return
        # Of a last step, whose row a pool does not tell, either.
        infos = {error.env_id: self._results.take_info(error.env_id) for error, _ in rebuilt}
        errors, originals = zip(*rebuilt, strict=True)
        failure = failure_of(errors, originals, ENV_ADVICE)
        # Raised by the next call, after this event is all taken.
        self._troubles.append(Trouble(failure, None, rebuilt, infos))

    def on_gone(self, event: Gone[Actor]) -> None:
        """An actor's process has ended."""
        env_ids = event.actor.env_ids
        for_good = event.actor.state is ActorState.LOST
        self.end_incarnations(env_ids, event.reason, event.cause, for_good=for_good)
        if for_good and self._raises_losses:
            self._losses.append(self.loss(env_ids.start))

    def end_incarnations(
        self,
        members: Sequence[int],
        reason: str,
        cause: FaultCause = FaultCause.CRASH,
        *,
        for_good: bool = False,
    ) -> None:
        """An actor died, or is about to: the episodes of `members` are over.

        Told once for each request that it held, and once for all of its envs. Those that are
        PENDING have a request whose own failure is still to come.
        """
        passed = [EnvState.PENDING, EnvState.LOST]
        if not for_good:
            passed.append(EnvState.RECOVERING)
        for env_id in members:
            if self._states[env_id] not in passed:
                self._end_life(env_id, cause, reason, for_good=for_good)

    def _recover(self, recovery: Recovery, errors: Sequence[EnvError]) -> None:
        """Envs raised and are made anew, each with those that it is one vector env with."""
        seen: set[int] = set()
        for error in errors:
            unit = recovery.unit_of(error.env_id)
            if unit.start in seen:
                continue
            seen.add(unit.start)
            how_often = recovery.failed(unit, error.summary, time.monotonic())
            for_good = how_often is not None
            message = f"env {unit.start} {how_often}: {error}" if for_good else error.summary
            for env_id in unit:
                self._end_life(env_id, error.cause, message, error, for_good=for_good)
            if for_good and self._raises_losses:
                self._losses.append(self.loss(unit.start))

    def _end_life(
        self,
        env_id: int,
        cause: FaultCause,
        reason: str,
        error: EnvError | None = None,
        *,
        for_good: bool,
    ) -> None:
        """An env's episode is over by a fault; another life follows, unless `for_good`."""
        unread = self._results.take_info(env_id)
        if for_good:
            self._states.lose(env_id)
            self.lost[env_id] = (self._reasons.pop(env_id, reason), error)
        else:
            self._states.recover(env_id)
        if self.recovery is None:
            self._reasons[env_id] = reason
            return
        fault = Fault(
            env_id=env_id,
            cause=cause,
            message=reason,
            restarts=int(self.incarnations.numbers[env_id]),
            error=error,
            given_up=for_good,
        )
        if self._results.cut is not None:
            self._results.cut.on_fault(fault, unread)
        self.untold.append(fault)
        self._log.fault(fault)
        self.incarnations.begin([env_id])

    # --- what works again --------------------------------------------------------------------

    def works(self, env_ids: Sequence[int]) -> None:
        """These envs have answered a reset."""
        if self.recovery:
            self.recovery.works(env_ids, time.monotonic())

    def runs_again(self, env_ids: Sequence[int]) -> None:
        """Tell that these envs are in their next lives."""
        for env_id in env_ids:
            self._log.restarted(env_id, int(self.incarnations.numbers[env_id]))

    # --- what is told ------------------------------------------------------------------------

    def any(self) -> bool:
        """Return whether anything is to be told, or raised."""
        return bool(self.untold or self._troubles or self._losses)

    def is_settled(self) -> bool:
        """Return whether nothing is to be told, and no env is being made anew, or lost."""
        return not (self.any() or self.recovery or self.lost or self._log.untold)

    def is_untold(self, env_id: int) -> bool:
        """Return whether a fault of this env is still to be told."""
        return any(fault.env_id == env_id for fault in self.untold)

    def take(self) -> list[Fault]:
        """Return the faults that were not told yet."""
        untold, self.untold = self.untold, []
        return untold

    def drop_errors(self) -> None:
        """Forget what requests of a round failed of that the caller has given up."""
        self._troubles.clear()

    def take_troubles(self) -> list[Trouble]:
        """Return what requests failed of; it is not raised any more."""
        troubles = list(self._troubles)
        self._troubles.clear()
        return troubles

    def tell(self) -> None:
        """Tell the hooks what is new."""
        self._log.tell()

    def raise_loss(self) -> None:
        """Raise the loss of an env that was not told yet, if there is one."""
        if self._losses:
            raise self._losses.popleft()

    def raise_next(self) -> None:
        """Tell the hooks what is new; raise an error if there is one, until it `was_raised`."""
        self._log.tell()
        if self._troubles:
            raise self._troubles[0].error
        if self._losses:
            raise self._losses[0]

    def was_raised(self, error: BaseException) -> None:
        """The caller gets this; if it is what `raise_next` raised, and not Ctrl-C, it was told."""
        without_our_frames(error)
        if self._troubles and self._troubles[0].error is error:
            self._troubles.popleft()
        elif self._losses and self._losses[0] is error:
            self._losses.popleft()

    def loss(self, env_id: int) -> ActorLostError | RestartLimitError:
        """Return the error that says that an env is gone for good."""
        reason, error = self.lost[env_id]
        if self.recovery is not None:
            loss = RestartLimitError(reason)
            loss.__cause__ = error
            return loss
        actor = self._placement.actor_of(env_id)
        return ActorLostError(
            advise(reason, ADVICE),
            env_ids=actor.env_ids,
            actor=actor.name,
        )

    def check_some_left(self) -> None:
        """See that not all envs are gone for good; where all are wanted, that none is."""
        if self.lost and (self._raises_losses or len(self.lost) == len(self._states)):
            raise self.loss(min(self.lost))
