"""The resets and steps of a vector env: from the caller's arguments to the rows of results."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from envbus.actors.copies import own
from envbus.actors.protocol import Rebuild, Reset, Step
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.messages import Request, Tree
from envbus.bus.settings import check_number
from envbus.runner.actions import STEP_ALL, ActionStore
from envbus.runner.actor import Actor
from envbus.runner.fleet import Fleet
from envbus.runner.lockstep import Round
from envbus.runner.quick_steps import QuickSteps
from envbus.runner.seeding import spread_seeds
from envbus.runner.vector_faults import NewLife, VectorFaults
from envbus.runner.vector_recycling import VectorRecycling
from envbus.runner.vector_results import Infos, VectorResults
from envbus.runner.vector_rounds import Pending, VectorRounds
from envbus.runner.vector_spaces import check_reset_mask

__all__ = ["VectorSteps"]


class VectorSteps:
    """Begins and ends the rounds that `reset` and `step` are.

    Args:
        fleet: Whose actors.
        action_space: The batched one.
        results: Where the rows are, once a round has ended.
        rounds: What is pending.
        faults: What becomes of failed envs.
        recycling: Exchanges actors between episodes; None: nobody does.
        mode: What happens at the end of an episode.
    """

    def __init__(
        self,
        fleet: Fleet,
        action_space: gymnasium.Space[Any],
        results: VectorResults,
        rounds: VectorRounds,
        faults: VectorFaults,
        recycling: VectorRecycling | None,
        mode: AutoresetMode,
    ) -> None:
        self._fleet = fleet
        self._timeouts = fleet.config.timeouts
        self._results = results
        self._blocks = results.blocks
        self._actions = ActionStore(action_space, fleet.num_envs, results.blocks.actions)
        self._rounds = rounds
        self._faults = faults
        self._recycling = recycling
        self._same_step = mode is AutoresetMode.SAME_STEP
        #: Steps without messages; None: there are none.
        self.quick: QuickSteps | None = None
        if fleet.words is not None:
            self.quick = QuickSteps(
                fleet.words,
                fleet,
                self._actions,
                results,
                rounds,
                faults,
                recycling,
                same_step=self._same_step,
            )
        #: Whether a fault may have to tell the last observation of an episode.
        self._keeps_last = self._same_step and faults.recovery is not None

    @uninterrupted_call
    def begin_reset(
        self, verb: str, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Ask for a reset; parameters and errors as in `BusVectorEnv.reset_async`."""
        self._rounds.check_open()
        seeds = spread_seeds(seed, self._fleet.num_envs)
        self._rounds.check_free(verb, ending="")
        self._faults.check_given_up()
        mask, rest = check_reset_mask(options, self._fleet.num_envs)
        requests: dict[int, Reset] = {}
        for actor in self._fleet.actors:
            slots = None if mask is None else np.flatnonzero(mask[actor.rows]).tolist()
            if slots == []:
                continue
            reborn = actor.index in self._faults.to_reset
            if reborn:
                slots = None  # none of its envs has an episode to keep
            addressed = range(len(actor.env_ids)) if slots is None else slots
            given = [seeds[actor.env_ids[slot]] for slot in addressed]
            request = Reset(
                slots=slots,
                seeds=None if all(s is None for s in given) else Tree(given),
                options=None if rest is None else Tree(own(rest)),
            )
            requests[actor.index] = self._faults.opening(actor, request) if reborn else request
            for slot in addressed:
                self._faults.lives.remember(actor.env_ids[slot], seeds[actor.env_ids[slot]])
        if self._recycling is not None:
            self._recycling.before_reset(requests)
        self._faults.expect(NewLife.SAME_REQUEST, requests)
        self._rounds.begin(Pending.RESET, requests, self._timeouts.reset, kill_late=True)

    def end_reset(self, verb: str, asked: str, timeout: float | None) -> Infos:
        """Wait for the reset and return its infos; the rest is in the rows."""
        if timeout is not None:
            check_number("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        done = self._rounds.collect(verb, asked, Pending.RESET, timeout)
        infos = self._results.take(done, self._faults.openings)
        if self._recycling is not None:
            with self._kept(Pending.RESET, done):
                self._recycling.after(done, step=False)
        self._settle(verb, Pending.RESET, done, infos, timeout, deadline)
        return infos

    @uninterrupted_call
    def begin_step(self, verb: str, actions: Any) -> None:
        """Ask for a step; parameters and errors as in `BusVectorEnv.step_async`."""
        rounds, faults = self._rounds, self._faults
        if rounds.closed or rounds.pending is not Pending.NOTHING or faults.given_up:
            rounds.check_free(verb)
            faults.check_given_up()
        singles = self._actions.store(actions)
        requests: dict[int, Request[Any]] = {}
        openings: dict[int, Reset | Rebuild] = {}
        partial: dict[int, list[int]] = {}
        untold = faults.look_back()
        if self._keeps_last:
            known = [i for i in range(self._fleet.num_envs) if i not in untold] if untold else None
            self._results.observations.remember(known)
        fresh = None if self._recycling is None else self._recycling.before_step()
        if fresh is not None:
            faults.to_reset.add(fresh.index)
        for actor in self._fleet.actors:
            index = actor.index
            is_untold = bool(untold) and not untold.isdisjoint(actor.env_ids)
            if index in faults.to_reset:
                if self._same_step or not is_untold:
                    requests[index] = openings[index] = faults.opening(actor)
            elif is_untold:
                slots = [i for i, env_id in enumerate(actor.env_ids) if env_id not in untold]
                if slots:
                    partial[index] = slots
                    requests[index] = self._step_of(actor, slots, singles)
            elif singles is not None:
                requests[index] = Step(actions=Tree(singles[actor.rows]))
            elif actor.reads_blocks:
                requests[index] = STEP_ALL
            else:
                assert self._blocks.actions is not None
                rows = [leaf[actor.rows].copy() for leaf in self._blocks.actions]
                requests[index] = Step(action_arrays=rows)
        self._results.partial = partial
        faults.expect(NewLife.RESET if self._same_step else NewLife.NOTHING, openings)
        rounds.begin(Pending.STEP, requests, self._timeouts.step, kill_late=True)

    def _step_of(self, actor: Actor, slots: list[int], singles: list[Any] | None) -> Step:
        """Return a step of some envs of an actor."""
        rows = [actor.env_ids[slot] for slot in slots]
        if singles is not None:
            return Step(slots=slots, actions=Tree([singles[row] for row in rows]))
        if actor.reads_blocks:
            return Step(slots=slots)
        assert self._blocks.actions is not None
        return Step(slots=slots, action_arrays=[leaf[rows] for leaf in self._blocks.actions])

    def end_step(self, verb: str, asked: str, timeout: float | None) -> Infos:
        """Wait for the step and return its infos; the rest is in the rows."""
        if timeout is not None:
            check_number("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        done = self._rounds.collect(verb, asked, Pending.STEP, timeout)
        infos = self._results.take(done, self._faults.openings)
        recycling = self._recycling
        first, goes_on = not done.counted, recycling is not None and recycling.is_under_way
        if recycling is not None:
            with self._kept(Pending.STEP, done):
                recycling.after(done, step=True)
        if not goes_on and (done.has_errors or self._faults.unsettled):
            self._settle(verb, Pending.STEP, done, infos, timeout, deadline)
        if recycling is not None and (first or goes_on):
            done.noted = True  # what follows is another round
            with self._kept(Pending.STEP, done):
                recycling.end_step(infos, deadline, may_begin=timeout is None)
        if self.quick is not None and not done.has_errors:
            self.quick.on_round(infos)
        return infos

    def _settle(
        self,
        verb: str,
        pending: Pending,
        done: Round,
        infos: Infos,
        timeout: float | None,
        deadline: float,
    ) -> None:
        """Have the round's faults settled by `deadline`."""
        reset = self._same_step or pending is Pending.RESET
        with self._kept(pending, done):
            late = self._faults.settle(
                done, infos, in_step=pending is Pending.STEP, reset=reset, deadline=deadline
            )
        if late:
            self._rounds.time_out(verb, timeout, late)

    @contextlib.contextmanager
    def _kept(self, pending: Pending, done: Round) -> Iterator[None]:
        """Keep a round's results, to be fetched or dropped, whatever is raised; also Ctrl-C."""
        try:
            yield
        except BaseException:
            self._rounds.keep(pending, done)
            raise
