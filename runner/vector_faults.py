"""What becomes of the failed envs of a vector env: raised, or made anew and told as truncated.

Leaves out which are due when (`recovery.py`) and how actors are started again (`endings.py`).
"""

from __future__ import annotations

import enum
import math
import random
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy.typing as npt

from envbus.actors.blocks import Blocks
from envbus.actors.protocol import Rebuild, Reset
from envbus.bus.errors import EnvbusError, RestartLimitError
from envbus.bus.messages import Request, Tree
from envbus.runner.actor import Actor
from envbus.runner.fault_log import FaultLog
from envbus.runner.faults import EnvError, Fault, FaultCause
from envbus.runner.fleet import Fleet
from envbus.runner.lockstep import Lockstep, Loss, Round
from envbus.runner.recovery import Lives, Recovery
from envbus.runner.vector_results import Infos, VectorResults
from envbus.runner.vector_rounds import errors_of, raise_errors_once

__all__ = ["NewLife", "VectorFaults"]


class NewLife(enum.Enum):
    """What an actor that is started again within a round gets in the same round."""

    SAME_REQUEST = "same request"  # that of the round, which begins episodes anyway
    RESET = "reset"
    NOTHING = "nothing"  # a later round begins its episodes


class VectorFaults:
    """Settles the faults of each round.

    A fault is told once, by the next step or reset that returns: also where settling it was
    interrupted, timed out, or a hook raised.

    Args:
        fleet: Whose actors, once started.
        results: Where the rows of failed envs are.
        log: What is told.

    Attributes:
        lockstep: Carries the rounds.
        lives: Which life each env is in.
        recovery: The envs that failed alone; None where errors are raised.
        to_reset: Indices of actors whose envs must be reset before they can be stepped.
        openings: By actor index: the request of the present round that began episodes.
        given_up: By env that is not made anew any more: what to tell whoever steps on.
    """

    def __init__(self, fleet: Fleet, results: VectorResults, log: FaultLog) -> None:
        self._fleet = fleet
        self._results = results
        self._log = log
        self._timeouts = fleet.config.timeouts
        self.lockstep = Lockstep(fleet, self._after_fault, self._on_actor_given_up)
        self.lives = Lives(fleet.num_envs)
        units = [unit for actor in fleet.actors for unit in actor.units()]
        policy = fleet.config.restart
        self.recovery = None if policy is None else Recovery(units, policy, random.random)
        self.to_reset: set[int] = set()
        self.openings: Mapping[int, Reset | Rebuild] = {}
        self.given_up: dict[int, str] = {}
        self._new_life = NewLife.NOTHING
        #: By env: faults that the caller was not told yet.
        self._untold: dict[int, Fault] = {}
        #: Units to make anew now, and whether the present round of `lockstep` does so.
        self._work: list[range] = []
        self._at_work = False
        #: Indices of actors whose new lives have not begun an episode yet.
        self._reviving: set[int] = set()
        #: Envs that the present round was to reset, and did: their rows begin an episode.
        self._begun: set[int] = set()
        #: SAME_STEP: rewards and flags that the present step brought, and the infos of the envs
        #: whose episodes ended by themselves in it.
        self._stepped: _Stepped | None = None

    @property
    def unsettled(self) -> bool:
        """Whether a former round left something to settle."""
        if self.recovery is None:
            return bool(self.to_reset)
        return bool(self._untold or self.to_reset or self.recovery or self._log.untold)

    @property
    def is_settled(self) -> bool:
        """Whether the next step is of all envs, and tells of nothing that was before."""
        return not (
            self.unsettled or self.to_reset or self.given_up or self._work or self.lockstep.owes
        )

    def expect(self, new_life: NewLife, openings: Mapping[int, Reset | Rebuild]) -> None:
        """Say what the round that is about to begin is.

        Args:
            new_life: What actors get that die in it.
            openings: By actor index, those of its requests that begin episodes.
        """
        self.look_back()
        self._new_life = new_life
        self.openings = openings
        self._begun.clear()
        self._stepped = None

    def look_back(self) -> AbstractSet[int]:
        """Take in what a round was given up with; return the envs whose faults were not told yet.

        Their episodes are over, but their caller does not know: in a step they do nothing.
        """
        if self._work or self._at_work:  # none is left of it if all of their actors died
            self._drop_work(worked=False)
        abandoned, self.lockstep.abandoned = self.lockstep.abandoned, None
        if abandoned is not None and self.recovery is not None:
            self._note_errors(self.recovery, abandoned)
        return self._untold.keys()

    def _note_openings(self, done: Round) -> None:
        """Take in whose episodes have begun in a round."""
        for index in self.to_reset & done.replies.keys():
            if not isinstance(self.openings.get(index), Reset):
                continue
            self.to_reset.discard(index)
            failed = {error.slot for error in done.replies[index].errors}
            env_ids = self._fleet.actors[index].env_ids
            good = [env_id for slot, env_id in enumerate(env_ids) if slot not in failed]
            self._begun.update(good)
            if index in self._reviving:
                self._reviving.discard(index)
                for env_id in good:
                    self._log.restarted(env_id, int(self.lives.numbers[env_id]))

    def opening(self, actor: Actor, given: Reset | None = None) -> Reset:
        """Return the reset of all envs of an actor that was started again, or is about to be.

        Args:
            actor: The actor.
            given: What its envs were to be reset by; what it does not seed is seeded here.
        """
        request = Reset() if given is None else given
        env_ids = [actor.env_ids[slot] for slot in request.slots or range(len(actor.env_ids))]
        seeds = self.lives.seeds(env_ids)
        if seeds is not None and request.seeds is not None:
            pairs = zip(request.seeds.value, seeds, strict=True)
            seeds = [derived if seed is None else seed for seed, derived in pairs]
        if seeds is None:
            return request
        return msgspec.structs.replace(request, seeds=Tree(seeds))

    def settle(
        self, done: Round, infos: Infos, *, in_step: bool, reset: bool, deadline: float
    ) -> list[Actor]:
        """Make the envs anew that failed, and say so: truncated, reward 0, named.

        Two rows of a step keep their flags, and have the fault in their infos only. One that
        begins an episode, since the one before was over: it failed on the way there, and works.
        And, with SAME_STEP, one whose episode ended by itself: what failed is the next one.

        Called again with the same round after it raised, it goes on where it was.

        Args:
            done: The round.
            infos: Of this round, by env; get `fault`.
            in_step: It was a step, which has rewards and flags.
            reset: Envs that are made anew begin their episode at once, not at the next step.
            deadline: When to stop waiting, by `time.monotonic`; infinite: when the requests' own
                deadlines have passed.

        Returns:
            Actors that did not do it in time: nothing was told then.

        Raises:
            RestartLimitError: An env failed too often.
            Exception: What an env raised, once, where envs are not made anew; what a hook raised.
        """
        recovery = self.recovery
        if not done.noted:
            self._note_openings(done)
        if recovery is None:
            for error in raise_errors_once(done, self._fleet.actors):
                infos.setdefault(error.env_id, {})["fault"] = {
                    "cause": error.cause.value,
                    "error": error.summary,
                    "restarts": 0,
                }
            return []
        self._note_errors(recovery, done)
        if in_step and reset and self._stepped is None:
            self._stepped = _Stepped(self._results.blocks, infos)
        while recovery:
            if self.given_up:
                break
            again = self._remake(recovery, deadline, reset=reset)
            if again is None:
                units = [self._fleet.actors[index] for index in self._indices(self._untold)]
                return self.lockstep.missing() or units
            if reset:
                infos.update(self._results.take(again, self.openings))
            self._note_openings(again)
            self._note_errors(recovery, again)
        self._log.tell()
        self.check_given_up()
        blocks = self._results.blocks
        for env_id, fault in self._untold.items():
            told = fault.info()
            info = infos.setdefault(env_id, {})
            info["fault"] = told
            if not in_step or (not reset and env_id in self._begun):
                continue
            if self._stepped is not None and env_id in self._stepped.ended:
                infos[env_id] = self._stepped.restore(blocks, env_id, info)
                continue
            blocks.rewards[env_id] = 0.0
            blocks.terminations[env_id] = False
            blocks.truncations[env_id] = True
            if reset:  # SAME_STEP: the row shows the next episode already
                info["final_obs"] = self._results.observations.before(env_id)
                info["final_info"] = {"fault": told}
        self._untold.clear()
        return []

    def _note_errors(self, recovery: Recovery, done: Round) -> None:
        """Take in, once, what envs raised in a round."""
        if done.noted:
            return
        done.noted = True
        failed: set[int] = set()
        for error, _ in errors_of(done, self._fleet.actors):
            unit = recovery.unit_of(error.env_id)
            if unit.start in failed:
                continue
            failed.add(unit.start)
            how_often = recovery.failed(unit, error.summary, time.monotonic())
            for env_id in unit:
                if how_often is not None:
                    self.given_up[env_id] = f"env {unit.start} {how_often}: {error}"
                self._fault(env_id, error.cause, error.summary, error)
            self.lives.begin(unit)

    def _fault(
        self,
        env_id: int,
        cause: FaultCause,
        message: str,
        error: EnvError | None = None,
    ) -> None:
        self._begun.discard(env_id)
        self._untold[env_id] = fault = Fault(
            env_id=env_id,
            cause=cause,
            message=message,
            restarts=int(self.lives.numbers[env_id]),
            error=error,
            given_up=env_id in self.given_up,
        )
        self._log.fault(fault)

    def check_given_up(self) -> None:
        """See that no env is gone for good: all of them step together.

        Raises:
            RestartLimitError: One is; the message holds its last failure.
        """
        if self.given_up:
            env_id = min(self.given_up)
            fault = self._untold.get(env_id)
            raise RestartLimitError(self.given_up[env_id]) from (fault.error if fault else None)

    def _remake(self, recovery: Recovery, deadline: float, *, reset: bool) -> Round | None:
        """Make those failed envs anew that are due first; None if that lasts past `deadline`."""
        while not self._work and not self._at_work:
            self._work = recovery.due(time.monotonic())
            if not self._work:
                wake_at = recovery.wake_at()
                assert wake_at is not None, "an env failed and nobody makes it anew"
                self.lockstep.wait(min(wake_at, deadline) - time.monotonic())
                if time.monotonic() >= deadline:
                    return None
        try:
            if not self._at_work:
                self._begin_work(reset=reset)
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            done = self.lockstep.collect(left)
        except EnvbusError:
            self._drop_work(worked=False)
            raise
        if done is None:
            return None
        failed = {error.env_id for error, _ in errors_of(done, self._fleet.actors)}
        for unit in self._work:
            if failed.isdisjoint(unit) and self._reviving.isdisjoint(self._indices(unit)):
                for env_id in unit:
                    self._log.restarted(env_id, int(self.lives.numbers[env_id]))
        self._drop_work(worked=True)
        return done

    def _begin_work(self, *, reset: bool) -> None:
        requests: dict[int, Rebuild] = {}
        for actor in self._fleet.actors:
            env_ids = [i for unit in self._work if unit.start in actor.env_ids for i in unit]
            if env_ids:
                seeds = self.lives.seeds(env_ids)
                requests[actor.index] = Rebuild(
                    slots=[env_id - actor.env_ids.start for env_id in env_ids],
                    seeds=None if seeds is None else Tree(seeds),
                    reset=reset,
                    close_timeout=self._timeouts.close,
                )
        self._new_life = NewLife.RESET if reset else NewLife.NOTHING
        self.openings = requests
        self.lockstep.begin(requests, self._timeouts.start, kill_late=True)
        self._at_work = True

    def _drop_work(self, *, worked: bool) -> None:
        """Wait no more for envs that are being made anew.

        Args:
            worked: All have answered: what failed is told by its errors. Else nobody knows how
                far it came, and they are made anew once more.
        """
        assert self.recovery is not None
        self.lockstep.abandon()
        for unit in self._work:
            if worked:
                self.recovery.works(unit, time.monotonic())
            else:
                self.recovery.once_more(unit)
        self._work, self._at_work = [], False

    def _indices(self, env_ids: Iterable[int]) -> set[int]:
        """Return which actors host these envs."""
        wanted = set(env_ids)
        return {a.index for a in self._fleet.actors if not wanted.isdisjoint(a.env_ids)}

    def _after_fault(self, actor: Actor, loss: Loss) -> Request[Any] | None:
        """Return what begins an actor's new life within this very round."""
        assert self.recovery is not None
        index = actor.index
        for env_id in actor.env_ids:
            self._fault(env_id, loss.cause, loss.reason)
        self.recovery.works(actor.env_ids, time.monotonic())  # made anew with their actor
        self.lives.begin(actor.env_ids)
        if not self._at_work:
            self._work = [unit for unit in self._work if unit.start not in actor.env_ids]
        self.to_reset.add(index)
        self._reviving.add(index)
        opening = self.openings.get(index)
        given = opening if isinstance(opening, Reset) else None
        if self._new_life is NewLife.NOTHING and given is None:
            return None
        if self._new_life is not NewLife.SAME_REQUEST:
            given = None
        request = self.opening(actor, None if given is None else _of_all(given, actor))
        self.openings = {**self.openings, index: request}
        return request

    def _on_actor_given_up(self, actor: Actor, loss: Loss) -> None:
        for env_id in actor.env_ids:
            self.given_up[env_id] = loss.reason
            self._fault(env_id, loss.cause, loss.reason)
        self._log.tell()


class _Stepped:
    """What a step brought that resets may write over before it is told. SAME_STEP only."""

    def __init__(self, blocks: Blocks, infos: Infos) -> None:
        self._rows = [array.copy() for array in _flags(blocks)]
        self.ended = {env_id: info for env_id, info in infos.items() if "final_obs" in info}

    def restore(self, blocks: Blocks, env_id: int, first: dict[str, Any]) -> dict[str, Any]:
        """Write an env's reward and flags again; return its info, `first` with what ended."""
        for array, former in zip(_flags(blocks), self._rows, strict=True):
            array[env_id] = former[env_id]
        ended = self.ended[env_id]
        keys = [key for key in ("final_obs", "final_info", "recycled") if key in ended]
        return first | {key: ended[key] for key in keys}


def _flags(blocks: Blocks) -> tuple[npt.NDArray[Any], ...]:
    return blocks.rewards, blocks.terminations, blocks.truncations


def _of_all(request: Reset, actor: Actor) -> Reset:
    """Return a reset of all envs of an actor: those that `request` leaves out have died, too."""
    if request.slots is None:
        return request
    seeds = None
    if request.seeds is not None:
        given = dict(zip(request.slots, request.seeds.value, strict=True))
        seeds = Tree([given.get(slot) for slot in range(len(actor.env_ids))])
    return msgspec.structs.replace(request, slots=None, seeds=seeds)
