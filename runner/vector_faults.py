"""What becomes of the failed envs of a vector env: raised, or made anew and told as truncated.

Leaves out which are due when (`recovery.py`) and how actors are started again (`fleet.py`).
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Mapping
from typing import Any

from envbus.actors.protocol import Rebuild, Reset
from envbus.bus.errors import RestartLimitError
from envbus.bus.messages import Request, Tree
from envbus.runner.fault_log import FaultLog
from envbus.runner.faults import Fault
from envbus.runner.fleet import Actor, Fleet
from envbus.runner.lockstep import Lockstep, Round
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
    """

    def __init__(self, fleet: Fleet, results: VectorResults, log: FaultLog) -> None:
        self._fleet = fleet
        self._results = results
        self._log = log
        self._timeouts = fleet.config.timeouts
        self.lockstep = Lockstep(fleet, self._after_fault)
        self.lives = Lives(fleet.num_envs)
        units = [unit for actor in fleet.actors for unit in actor.units()]
        policy = fleet.config.restart
        self.recovery = None if policy is None else Recovery(units, policy, random.random)
        self.to_reset: set[int] = set()
        self.openings: dict[int, Reset | Rebuild] = {}
        self._new_life = NewLife.NOTHING

    def expect(self, new_life: NewLife, openings: Mapping[int, Reset | Rebuild]) -> None:
        """Say what the round that is about to begin is.

        Args:
            new_life: What actors get that die in it.
            openings: By actor index, those of its requests that begin episodes.
        """
        self._new_life = new_life
        self.openings = dict(openings)

    def opening(self, actor: Actor) -> Reset:
        """Return the reset of all envs of an actor that was started again, or is about to be."""
        seeds = self.lives.seeds(actor.env_ids)
        return Reset(seeds=None if seeds is None else Tree(seeds))

    def settle(self, done: Round, infos: Infos, *, reset: bool) -> None:
        """Raise what envs raised, or make them anew and say so: truncated, reward 0, named.

        Args:
            done: The round.
            infos: Of this round, by env; get `fault`.
            reset: Envs that are made anew begin their episode at once, not at the next step.

        Raises:
            RestartLimitError: An env failed too often.
        """
        recovery = self.recovery
        if recovery is None:
            for error in raise_errors_once(done, self._fleet.actors):
                infos.setdefault(error.env_id, {})["fault"] = {
                    "cause": error.cause.value,
                    "error": error.summary,
                    "restarts": 0,
                }
            return
        faults: dict[int, Fault] = {}
        self._note(recovery, done, faults, reset=reset)
        while recovery:
            done = self._remake(recovery, reset=reset)
            if reset:
                infos.update(self._results.take(done, self.openings))
            self._note(recovery, done, faults, reset=reset)
        blocks = self._results.blocks
        for env_id, fault in faults.items():
            blocks.rewards[env_id] = 0.0
            blocks.terminations[env_id] = False
            blocks.truncations[env_id] = True
            infos.setdefault(env_id, {})["fault"] = {
                "cause": fault.cause.value,
                "error": fault.message,
                "restarts": fault.restarts,
            }
        self._log.tell()

    def _note(
        self, recovery: Recovery, done: Round, faults: dict[int, Fault], *, reset: bool
    ) -> None:
        """Take in what failed in a round.

        Raises:
            RestartLimitError: An env failed too often.
        """
        for index, loss in done.faults.items():
            actor = self._fleet.actors[index]
            recovery.works(actor.env_ids)  # made anew with their actor
            if not reset:
                self.to_reset.add(index)
            for env_id in actor.env_ids:
                faults[env_id] = fault = Fault(
                    env_id=env_id,
                    cause=loss.cause,
                    message=loss.reason,
                    restarts=int(self.lives.numbers[env_id]) - 1,
                )
                self._log.fault(fault)
        failed: set[int] = set()
        for error, _ in errors_of(done, self._fleet.actors):
            unit = recovery.unit_of(error.env_id)
            if unit.start in failed:
                continue
            failed.add(unit.start)
            restarts = recovery.failed(unit, error.summary, time.monotonic())
            for env_id in unit:
                faults[env_id] = fault = Fault(
                    env_id=env_id,
                    cause=error.cause,
                    message=error.summary,
                    restarts=int(self.lives.numbers[env_id]),
                    error=error,
                    given_up=restarts is not None,
                )
                self._log.fault(fault)
            self.lives.begin(unit)
            if restarts is not None:
                self._log.tell()
                raise RestartLimitError(
                    f"env {unit.start} failed again after {restarts} restarts: {error}"
                ) from error

    def _remake(self, recovery: Recovery, *, reset: bool) -> Round:
        """Make those failed envs anew that are due first."""
        while not (due := recovery.due(time.monotonic())):
            wake_at = recovery.wake_at()
            assert wake_at is not None, "an env failed and nobody makes it anew"
            self.lockstep.wait(wake_at - time.monotonic())
        requests: dict[int, Rebuild] = {}
        for actor in self._fleet.actors:
            env_ids = [i for unit in due if unit.start in actor.env_ids for i in unit]
            if env_ids:
                seeds = self.lives.seeds(env_ids)
                requests[actor.index] = Rebuild(
                    slots=[env_id - actor.env_ids.start for env_id in env_ids],
                    seeds=None if seeds is None else Tree(seeds),
                    reset=reset,
                    close_timeout=self._timeouts.close,
                )
        self.expect(NewLife.RESET if reset else NewLife.NOTHING, requests)
        try:
            self.lockstep.begin(requests, self._timeouts.start, kill_late=True)
            done = self.lockstep.collect(None)
        except BaseException:
            self.lockstep.abandon()
            raise
        finally:
            for unit in due:  # what failed again is told by its errors
                recovery.works(unit)
        assert done is not None
        failed = {error.env_id for error, _ in errors_of(done, self._fleet.actors)}
        for env_id in (i for unit in due for i in unit if i not in failed):
            self._log.restarted(env_id, int(self.lives.numbers[env_id]))
        return done

    def _after_fault(self, actor: Actor) -> Request[Any] | None:
        """Return what begins an actor's new life within this very round."""
        self.lives.begin(actor.env_ids)
        opening = self.openings.get(actor.index)
        if self._new_life is NewLife.SAME_REQUEST:
            return opening
        if self._new_life is NewLife.NOTHING and not isinstance(opening, Reset):
            return None
        self.openings[actor.index] = request = self.opening(actor)
        return request
