"""Envs that step together: one round of resets, steps or calls at a time, by the engine.

From the caller's arguments to the rows of results, with Gymnasium's errors for whoever asks out of
turn. Leaves out what becomes of envs that fail (`engine/engine.py`, `engine/env_faults.py`), and
steps that take no message (`quick_steps.py`).
"""

from __future__ import annotations

import enum
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from envbus.actors.arrays.copies import own
from envbus.actors.protocol import CallResult
from envbus.bus.errors import EnvbusError
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.settings import check_number
from envbus.bus.wire.messages import Request
from envbus.runner.engine.engine import Engine, Given
from envbus.runner.engine.env_calls import EnvCalls, PendingCalls
from envbus.runner.engine.env_faults import ENV_ADVICE, Trouble
from envbus.runner.engine.env_results import Infos
from envbus.runner.engine.env_states import EnvState
from envbus.runner.engine.seeding import spread_seeds
from envbus.runner.errors import (
    EnvError,
    Fault,
    FaultInfo,
    as_cause,
    failure_of,
    without_our_frames,
)
from envbus.runner.monitoring.registry import unshow
from envbus.runner.vector.lockstep_recycling import LockstepRecycling
from envbus.runner.vector.vector_spaces import check_reset_mask
from envbus.runner.workers.actions import ActionStore
from envbus.runner.workers.config import LONGEST_WAIT
from envbus.runner.workers.worker import Actor, ActorState

__all__ = ["Lockstep", "PendingVerb"]

R = TypeVar("R")

logger = logging.getLogger("envbus.runner.vector.vector_env")


class PendingVerb(enum.Enum):
    """What is pending; the values are Gymnasium's, and stand in messages."""

    NOTHING = "default"
    RESET = "reset"
    STEP = "step"
    CALL = "call"


#: What returns a round's results that its caller did not get, and what they told: faults, and whose
#: episodes the caller had known to be over before.
_Kept: TypeAlias = tuple[PendingVerb, Callable[[], Any], list[Fault], Collection[int]]


class Lockstep:
    """The rounds of a vector env.

    Args:
        engine: Asks the actors.
        actions: Where batches of actions go.
        recycling: Exchanges actors between episodes; None: nobody does.

    Attributes:
        pending: What the caller has asked for and not fetched.
        closed: Whether it was closed.
        is_quiet: Whether the next step is of all envs, and tells of nothing that was before.
        on_collect: Called before a round is waited for; may ask for something first.
        on_stepped: Called with the infos when a step has ended.
    """

    def __init__(
        self, engine: Engine, actions: ActionStore, recycling: LockstepRecycling | None
    ) -> None:
        self.pending = PendingVerb.NOTHING
        self.closed = False
        self.is_quiet = False
        self.on_collect: Callable[[], object] = _nothing
        self.on_stepped: Callable[[Infos], object] = _nothing
        self._fleet = fleet = engine.fleet
        self._engine = engine
        self._placement = engine.placement
        self._states = engine.states
        self._results = engine.results
        self._faults = engine.faults
        self._calls = EnvCalls(engine)
        self._actions = actions
        self._recycling = recycling
        self._timeouts = fleet.config.timeouts
        self._num_envs = fleet.num_envs
        self._everyone = list(range(fleet.num_envs))
        self._all = frozenset(self._everyone)
        #: Whether envs that fail begin anew at once, and their rows tell of the episode before.
        is_shown = engine.mode is AutoresetMode.SAME_STEP
        self._begins_at_once = is_shown or fleet.config.restart_policy is None
        #: Envs that were asked to step in the present round.
        self._acting: frozenset[int] = frozenset()
        #: Seconds that each of its requests has.
        self._limit: float | None = None
        #: Envs whose next row begins an episode, since the caller knows that the last is over.
        self._over: Collection[int] = ()
        #: A round that has ended, and raised something else than its results.
        self._fetchable = PendingVerb.NOTHING
        #: By env: what it raised in that round, and what it told besides.
        self._raised: dict[int, tuple[EnvError, dict[str, Any]]] = {}
        self._kept: _Kept | None = None
        #: Whether Ctrl-C came in the place of what is kept.
        self._is_withheld = False
        #: What a round raised, until its caller got it.
        self._untold: tuple[PendingVerb, Exception] | None = None
        #: What was told last, as `_Kept` has it.
        self._told: tuple[list[Fault], Collection[int]] = ([], ())
        #: What is or was called, and of whom.
        self._asked: PendingCalls | None = None

    # --- whose turn it is --------------------------------------------------------------------

    def check_open(self) -> None:
        """See that it was not closed.

        Raises:
            ClosedEnvironmentError: It was.
        """
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{self._engine.owner}`, after a call to `close()`."
            )

    def check_free(self, verb: str, ending: str = ".") -> None:
        """See that `verb` may begin a round.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another round is pending.
        """
        self.check_open()
        pending = self.pending
        if self._kept is not None and self._is_withheld:
            pending = self._kept[0]
        if self._untold is not None:  # Ctrl-C came in the place of an error
            pending = self._untold[0]
        if pending is not PendingVerb.NOTHING:
            raise AlreadyPendingCallError(
                f"Calling `{verb}` while waiting for a pending call to "
                f"`{pending.value}` to complete; `{pending.value}_wait` takes it up, "
                f"also after Ctrl-C{ending}",
                pending.value,
            )

    def keep(
        self, pending: PendingVerb, make: Callable[[], Any], *, is_withheld: bool = False
    ) -> None:
        """Have the results of a round, which its caller did not get and `make` returns, be fetched.

        The next round drops them; or, if they are withheld by Ctrl-C, they are waited for first, as
        if it had come before they were there.
        """
        self._kept, self._is_withheld = (pending, make, *self._told), is_withheld
        self.is_quiet = False

    def forget(self) -> None:
        """A round begins: what was not fetched of the last is dropped, but for its faults."""
        self.is_quiet = False
        self._untold = None
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is not PendingVerb.CALL:
            self._faults.untold[:0] = kept[2]
            self._over = kept[3]
        self._fetchable = PendingVerb.NOTHING
        self._raised.clear()
        self._results.drop_ends()
        if self._states.ready:  # a first row of an episode is told by this round
            untold = {fault.env_id for fault in self._faults.untold}
            self._drop_rows(
                [i for i in self._states.ready if i in self._acting and i not in untold]
            )

    # --- reset and step ----------------------------------------------------------------------

    @uninterrupted_call
    def begin_reset(
        self,
        verb: str,
        seed: int | Sequence[int | None] | None,
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Ask for a reset; parameters and errors as in `BusVectorEnv.reset_async`.

        With a `mask`, `options` has none, and is handed on as it is, None too.
        """
        self.check_open()
        seeds = spread_seeds(seed, self._num_envs)
        self.check_free(verb, ending="")
        self._faults.check_some_left()
        if mask is None:
            mask, options = check_reset_mask(options, self._num_envs)
        named = self._everyone if mask is None else np.flatnonzero(mask).tolist()
        given = Given({i: seeds[i] for i in named}, None if options is None else own(options))
        self.forget()
        self._engine.give_up(incarnations=True)
        self._drop_rows(list(self._states.ready))
        self._faults.drop_errors()
        for env_id in named:
            self._faults.incarnations.remember(env_id, seeds[env_id])
        if self._results.cut is not None:
            self._results.cut.on_reset(named)
        if self._recycling is not None:
            self._recycling.before_reset(named)
        self._acting = frozenset(named)
        # Others whose caller knows that their episodes are over begin the next ones with a step;
        # but a vector env that was made anew is reset whole.
        groups = self._placement.vector_groups
        begin = {i for env_id in named for i in groups.get(env_id, (env_id,))}
        self._engine.waits = frozenset(self._over) - begin
        self._engine.failed_wait = False
        self._limit = self._timeouts.reset
        self._engine.given = given
        try:
            self._engine.reset(self._states.idle(named), seeds, given.options)
            self._engine.begin_incarnations(self._everyone)
        except BaseException:
            self._engine.give_up(incarnations=False)
            raise
        self.pending = PendingVerb.RESET

    def end_reset(self, verb: str, timeout: float | None) -> Infos:
        """Wait for the reset and return its infos; the rest is in the rows."""
        return self._end(verb, PendingVerb.RESET, timeout)

    @uninterrupted_call
    def begin_step(self, verb: str, actions: Any) -> None:
        """Ask for a step; parameters and errors as in `BusVectorEnv.step_async`."""
        is_free = self.pending is PendingVerb.NOTHING and not (self._kept or self._untold)
        if self.closed or not is_free or self._faults.lost:
            self.check_free(verb)
            self._faults.check_some_left()
        singles = self._actions.store(actions)
        self.forget()
        self._engine.given = Given({}, None)
        if self._recycling is not None:  # whose episodes had ended, as their caller knows
            self._over = {*self._over, *self._recycling.before_step()}
        acting = self._states.idle(self._everyone)
        self._expect(self._all if acting is self._everyone else frozenset(acting))
        self._limit = self._timeouts.step
        if self._results.cut is not None:
            self._results.cut.on_send(acting)
        try:
            self._engine.step(acting, None if singles is None else dict(enumerate(singles)))
            if acting is not self._everyone:
                self._engine.begin_incarnations(self._everyone)
        except BaseException:
            self._engine.give_up(incarnations=False)
            raise
        self.pending = PendingVerb.STEP

    def on_all_asked(self) -> None:
        """A step has begun in which all envs act."""
        self.is_quiet = False
        self._expect(self._all)

    def _expect(self, acting: frozenset[int]) -> None:
        """These envs act in the present step.

        Others that failed, and whose caller does not know, do nothing: their rows say so.
        """
        self._acting = acting
        self._engine.waits = () if self._begins_at_once else acting
        self._engine.failed_wait = not self._begins_at_once

    def end_step(self, verb: str, timeout: float | None) -> Infos:
        """Wait for the step and return its infos; the rest is in the rows."""
        infos = self._end(verb, PendingVerb.STEP, timeout)
        self.on_stepped(infos)
        return infos

    # --- what came ---------------------------------------------------------------------------

    def _end(self, verb: str, pending: PendingVerb, timeout: float | None) -> Infos:
        """Wait for a round's end and return its infos; called again after it raised, likewise."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        in_step = pending is PendingVerb.STEP
        self._collect(verb, pending, timeout, deadline)
        self._settle(verb)
        recycling = self._recycling
        if recycling is not None and in_step and recycling.after_step(may_wait=timeout is None):
            # The rows of a fresh process take the place of those of the one that has left.
            self._collect(verb, pending, timeout, deadline, is_exchange=True)
            self._settle(verb)
        self._faults.tell()
        infos = self._take_rows(in_step=in_step)
        self._fetchable = PendingVerb.NOTHING
        return infos

    def hand_out(self, pending: PendingVerb, make: Callable[[], R]) -> R:
        """Return what `make` returns, which fetches a round; what Ctrl-C keeps is fetched again."""
        return hand_out(
            make,
            lambda results: self.keep(pending, lambda: results, is_withheld=True),
            self._was_raised,
        )

    def _was_raised(self, error: BaseException) -> None:
        """The caller gets this; if it is what a round raised, and not Ctrl-C, it was told."""
        without_our_frames(error)
        if self._untold is not None and self._untold[1] is error:
            self._untold = None

    def fetch(
        self,
        verb: str,
        asked: str,
        pending: PendingVerb,
        timeout: float | None,
        end: Callable[[str, float | None], R],
    ) -> R:
        """Return what `end` makes of a round, or what its caller did not get of the last.

        Raises:
            ClosedEnvironmentError: After `close`.
            NoAsyncCallError: There is nothing of that kind to be fetched.
            Exception: As `end`.
        """
        if timeout is not None:
            check_number("timeout", timeout)
        if self._untold is not None and self._untold[0] is pending:
            raise self._untold[1]
        kept = self._kept
        if kept is not None and kept[0] is pending and self.pending is PendingVerb.NOTHING:
            results: R = kept[1]()
            self._kept = None
            self._told = kept[2:]
            return results
        self.check_open()
        if self.pending is not pending and self._fetchable is not pending:
            raise NoAsyncCallError(
                f"Calling `{verb}` without any prior call to `{asked}`.", pending.value
            )
        try:
            return end(verb, timeout)
        except Exception as exc:
            self._untold = pending, exc
            raise

    def _collect(
        self,
        verb: str,
        pending: PendingVerb,
        timeout: float | None,
        deadline: float,
        *,
        is_exchange: bool = False,
    ) -> None:
        """Wait until each request has ended, and each env is where the round's end wants it.

        Then the round is not pending any more, but can be fetched; also after an exchange of actors
        has failed. Until then Ctrl-C leaves it pending: no other takes its place.
        """
        self.pending, self._fetchable = pending, PendingVerb.NOTHING
        try:
            self.on_collect()
            while not self._is_settled():
                self._faults.raise_loss()
                left = deadline - time.monotonic()
                if left <= 0 and not self._poll_once():
                    break
                self._engine.take_events(min(max(left, 0.0), LONGEST_WAIT))
            self._faults.raise_loss()
        except EnvbusError as exc:
            self._abandon(pending if is_exchange else PendingVerb.NOTHING)
            self._faults.tell()
            cause = as_cause([error for error, _ in self._errors()])
            if cause is None or exc.__cause__ is not None:
                raise
            raise exc from cause
        if not self._is_settled():
            missing = self._engine.missing()
            self._abandon(pending if is_exchange else PendingVerb.NOTHING)
            self.time_out(verb, timeout, missing)
        self.pending, self._fetchable = PendingVerb.NOTHING, pending

    def _poll_once(self) -> bool:
        """Take what is there already; return whether that was what was missing."""
        self._engine.take_events(0.0)
        return self._is_settled()

    def _abandon(self, fetchable: PendingVerb) -> None:
        """Give the round up: nothing is pending."""
        self.pending = PendingVerb.NOTHING
        self._fetchable = fetchable
        if fetchable is PendingVerb.NOTHING:
            self._engine.give_up(incarnations=False)

    def _is_settled(self) -> bool:
        """Return whether nothing more will come that belongs to the present round."""
        states = self._states
        if states.num_pending:
            return False
        if states.num_ready == self._num_envs:
            return True
        is_waiting = self._engine.is_waiting
        for env_id, state in enumerate(states):
            if state is EnvState.FRESH and not is_waiting(env_id):
                return False
            # Those whose actor is being started again are not waited for, if they need not be.
            if state is EnvState.RECOVERING and (
                not is_waiting(env_id) or self._placement.actor_of(env_id).state is ActorState.READY
            ):
                return False
        return True

    def _errors(self) -> list[tuple[EnvError, Exception | None]]:
        """Take what envs raised, in their order."""
        return _raised_in(self._faults.take_troubles())

    def _settle(self, verb: str) -> None:
        """Raise what requests failed of, once."""
        troubles = self._faults.take_troubles()
        if not troubles:
            return
        late = [trouble.late for trouble in troubles if trouble.late is not None]
        raised = _raised_in(troubles)
        failed = [trouble.error for trouble in troubles if not trouble.raised]
        if failed:  # some rows are those of the round before
            self._drop_rows(list(self._states.ready))
            self._fetchable = PendingVerb.NOTHING
            cause = as_cause([error for error, _ in raised])
            if late:
                self.time_out(verb, self._limit, late, cause)
            raise failed[0] from cause
        for trouble in troubles:
            for error, _ in trouble.raised:
                self._raised[error.env_id] = error, trouble.infos.get(error.env_id, {})
        if raised:
            errors, originals = zip(*raised, strict=True)
            raise failure_of(errors, originals, ENV_ADVICE)

    def _take_rows(self, *, in_step: bool) -> Infos:
        """Take what all envs have brought; who has failed gets a row, too."""
        states, results = self._states, self._results
        cut, before = results.cut, self._over
        infos = results.take_infos(states.receive(states.num_ready))
        faults = self._faults.take()
        for fault in faults:
            infos.setdefault(fault.env_id, {})["fault"] = fault.info()
        for env_id, (error, info) in self._raised.items():
            told = FaultInfo(cause=error.cause.value, error=error.summary, restarts=0)
            infos[env_id] = {**info, "fault": told}
        self._raised.clear()
        over: set[int] = set()
        if not states.are_all_idle():
            idle = EnvState.IDLE
            over = {env_id for env_id, state in enumerate(states) if state is not idle}
            blocks = results.blocks
            for env_id in over if in_step else ():
                if cut is not None:
                    infos[env_id] = cut.tell(env_id, infos.get(env_id, {}))
                else:
                    blocks.rewards[env_id] = 0.0
                    blocks.terminations[env_id] = False
                    blocks.truncations[env_id] = True
        self._told = faults, before
        self._over = over
        if not self._begins_at_once:  # whoever fails before the next round has a caller to be told
            self._engine.waits = self._all
        if cut is not None:
            cut.on_receive(results.everyone)
        if in_step and self._recycling is not None:
            over.update(self._recycling.cut_those_due(infos))
        return infos

    def _drop_rows(self, env_ids: Sequence[int]) -> None:
        """Let go of results that nobody will fetch."""
        for env_id in env_ids:
            self._states.take(env_id)
            self._results.take_info(env_id)

    def time_out(
        self,
        verb: str,
        timeout: float | None,
        late: Sequence[Actor],
        cause: BaseException | None = None,
    ) -> NoReturn:
        """Say that `verb` has timed out, and who has not answered.

        Raises:
            multiprocessing.TimeoutError: Always.
        """
        raise multiprocessing.TimeoutError(
            f"The call to `{verb}` has timed out after {timeout} second(s). "
            f"Not answered: {', '.join(actor.describe() for actor in late)}.\n"
            + "\n".join(self._fleet.stacks(late))
        ) from cause or as_cause([error for error, _ in self._errors()])

    # --- calls -------------------------------------------------------------------------------

    @uninterrupted_call
    def begin_call(
        self,
        verb: str,
        env_ids: Sequence[int] | None,
        make: Callable[[Actor, list[int]], Request[CallResult]],
    ) -> None:
        """Ask some envs, or all, by the requests that `make` makes of an actor and its slots."""
        self.check_free(verb)
        if self._faults.recovery is None:
            self._faults.check_some_left()
        self.forget()
        chosen = self._everyone if env_ids is None else sorted(set(env_ids))
        self._asked = self._calls.ask(chosen, make, wait=True)
        self.pending = PendingVerb.CALL

    def end_call(self, verb: str, timeout: float | None) -> dict[int, Any]:
        """Wait for the calls and return what they returned, by env."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        found = self._asked
        assert found is not None
        missing = self._calls.wait(found, deadline)
        self.pending = self._fetchable = PendingVerb.NOTHING
        if missing or found.late:
            self._calls.drop(found)
            limit = timeout if missing else self._timeouts.call
            cause = as_cause([error for error, _ in found.errors])
            self.time_out(verb, limit, missing or found.late, cause)
        self._calls.raise_loss(found)
        if found.errors:
            errors, found.errors = found.errors, []
            self._fetchable = PendingVerb.CALL
            raise failure_of([error for error, _ in errors], [original for _, original in errors])
        return found.values

    # --- end ---------------------------------------------------------------------------------

    def close(self, timeout: float | None, *, terminate: bool) -> None:
        """Wait for what is pending, then end all actors.

        Args:
            timeout: Seconds for both; None: `timeouts.close`.
            terminate: Kill the actors at once.
        """
        allowed = self._timeouts.close if timeout is None else timeout
        deadline = time.monotonic() + allowed
        pending, self.pending = self.pending, PendingVerb.NOTHING
        try:
            if pending is not PendingVerb.NOTHING and not self._fleet.closed:
                gymnasium.logger.warn(
                    "Calling `close` while waiting for a pending call to "
                    f"`{pending.value}` to complete."
                )
                self.on_collect()
                terminate = terminate or not self._comes_to_an_end(pending, deadline)
        except EnvbusError as error:  # an actor that has ended needs no closing
            logger.info("closed while a call was pending: %s", error)
        except BaseException:  # Ctrl-C, a hook: they are at work, and would not leave
            terminate = True
            raise
        finally:
            self.closed = True
            try:
                self._fleet.close(timeout=deadline - time.monotonic(), terminate=terminate)
            finally:
                unshow(self._engine)

    def _comes_to_an_end(self, pending: PendingVerb, deadline: float) -> bool:
        """Wait for what is pending, whose results nobody wants; return whether it has ended."""
        if pending is PendingVerb.CALL:
            assert self._asked is not None
            return not self._calls.wait(self._asked, deadline)
        while self._states.num_pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._faults.raise_loss()
            self._engine.take_events(left)
        return True


def _nothing(_: object = None) -> None:
    pass


def _raised_in(troubles: Sequence[Trouble]) -> list[tuple[EnvError, Exception | None]]:
    """Return what envs raised, in their order."""
    found = [pair for trouble in troubles for pair in trouble.raised]
    return sorted(found, key=lambda pair: pair[0].env_id)
