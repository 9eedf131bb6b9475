"""Exchanges the actors of a vector env for fresh ones, between two rounds.

Leaves out who is due (`recycling.py`). In lock-step nobody can be held back: an actor is
exchanged when all of its envs are between two episodes at the same time, and the call waits for
the fresh one. If that does not happen for `max_hold` seconds, the episodes that still run in it
are truncated.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from envbus.actors.protocol import Reset
from envbus.runner.actor import Actor, ActorState
from envbus.runner.fault_log import FaultLog
from envbus.runner.fleet import Fleet
from envbus.runner.lockstep import Round
from envbus.runner.recycling import Recycling
from envbus.runner.vector_faults import NewLife, VectorFaults
from envbus.runner.vector_results import Infos, VectorResults

__all__ = ["VectorRecycling"]

#: What SAME_STEP's info tells of the step and the episode that ended; all else is of the next one.
_FINAL_KEYS = ("final_obs", "final_info", "recycled", "fault")


class VectorRecycling:
    """Exchanges at most one actor per call.

    Args:
        recycling: Who is due.
        fleet: Whose actors.
        results: Of the last step.
        faults: What becomes of one that fails in its new life.
        log: What is told.
        mode: What happens at the end of an episode.
        max_hold: Seconds that an actor is due before its envs' episodes are truncated.
    """

    def __init__(
        self,
        recycling: Recycling,
        fleet: Fleet,
        results: VectorResults,
        faults: VectorFaults,
        log: FaultLog,
        mode: AutoresetMode,
        max_hold: float,
    ) -> None:
        self._recycling = recycling
        self._fleet = fleet
        self._results = results
        self._faults = faults
        self._log = log
        self._mode = mode
        #: An actor whose first results in its new life have not come yet.
        self._exchanged: Actor | None = None
        #: SAME_STEP: an actor that was exchanged and has not reset its envs yet, and the rewards
        #: and flags of the step in which their episodes ended.
        self._opening: tuple[Actor, list[npt.NDArray[Any]]] | None = None
        self._max_hold = max_hold
        #: By index and life of actors that are due: since when, as far as was seen.
        self._due_since: dict[tuple[int, int], float] = {}
        #: Whose episodes had ended before the present step, `(num_envs,)`.
        self._ended_before = np.zeros(fleet.num_envs, np.bool_)

    def before_step(self) -> Actor | None:
        """Exchange an actor whose envs would be reset by this step; return it.

        Its envs are to be reset instead of stepped, which is what NEXT_STEP does with them.
        """
        self._opening = None
        if self._mode is not AutoresetMode.NEXT_STEP:
            return None
        self._ended_before = self._ended()
        actor = next(self._due_at_an_end(), None)
        if actor is not None:
            self._exchange(actor)
        return actor

    def before_reset(self, requests: dict[int, Reset]) -> None:
        """Exchange an actor all of whose envs are reset; its envs get what `requests` says.

        Those that are reset without a seed are seeded as after a fault: a fresh env would be at
        random.
        """
        self._opening = None
        for actor in self._due():
            request = requests.get(actor.index)
            if request is None or len(request.slots or actor.env_ids) < len(actor.env_ids):
                continue
            self._exchange(actor)
            requests[actor.index] = self._faults.opening(actor, request)
            return

    @property
    def is_under_way(self) -> bool:
        """Whether `end_step` was broken off while it waited for a fresh process."""
        return self._opening is not None

    def end_step(self, infos: Infos, deadline: float, *, may_begin: bool) -> None:
        """Do what follows from the ends of episodes in a step whose faults are settled.

        SAME_STEP: exchange an actor whose envs this step has reset. The first observations become
        those of the fresh process, which is waited for; rewards and flags stay those of the step.
        Called again after it was broken off, it goes on where it was.

        NEXT_STEP: truncate what runs in an actor that is due for too long.

        Args:
            infos: Of the step, by env; those of the resets are replaced.
            deadline: When to stop waiting, by `time.monotonic`.
            may_begin: Whether an exchange may begin that is to be waited for.

        Raises:
            multiprocessing.TimeoutError: The fresh process did not reset in time. This, and what
                follows, leaves the reset to the next step, unless this is called again before.
            ActorLostError, RestartLimitError: It ended and is not started again.
            Exception: What an env raised in it.
        """
        if self._mode is AutoresetMode.NEXT_STEP:
            cut = self._cut(infos)
            if cut is not None:  # the next step resets its envs, exchanged or not
                self._faults.to_reset.add(cut.index)
        if self._mode is not AutoresetMode.SAME_STEP:
            return
        if self._opening is None and may_begin:
            actor = next(self._due_at_an_end(), None) or self._cut(infos)
            if actor is not None:
                self._exchange(actor)
                self._opening = actor, [array[actor.rows].copy() for array in self._flags()]
        if self._opening is not None:
            self._begin_again(*self._opening, infos, deadline)
            self._tell()

    def _begin_again(
        self, actor: Actor, flags: list[npt.NDArray[Any]], infos: Infos, deadline: float
    ) -> None:
        """Wait until the envs of a fresh process are reset; their rows and infos then say so."""
        faults, timeout = self._faults, self._fleet.config.timeouts.reset
        openings = {actor.index: faults.opening(actor)}
        faults.expect(NewLife.SAME_REQUEST, openings)
        faults.to_reset.add(actor.index)  # until it has answered
        try:
            faults.lockstep.begin(openings, timeout, kill_late=True)
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            done = faults.lockstep.collect(left)
            if done is None or done.late:
                raise multiprocessing.TimeoutError(
                    f"{actor.describe()} was exchanged for a fresh one, which did not reset its "
                    f"envs within {timeout if left is None else left} second(s)\n"
                    + "\n".join(self._fleet.stacks([actor]))
                )
            self._opening = None
            first = self._results.take(done, faults.openings)
        except BaseException:
            faults.lockstep.abandon()
            if actor.state is ActorState.LOST:
                self._opening = None
            raise
        finally:  # a reset may have written over them
            for array, values in zip(self._flags(), flags, strict=True):
                array[actor.rows] = values
        for env_id in actor.env_ids:
            ended = {k: v for k, v in infos.get(env_id, {}).items() if k in _FINAL_KEYS}
            infos[env_id] = {**ended, **first.get(env_id, {})}
        try:
            faults.settle(done, infos, in_step=True, reset=True, deadline=math.inf)
        except BaseException:
            if faults.recovery is None:  # an env has raised, and none is made anew
                faults.to_reset.add(actor.index)
            raise

    def after(self, done: Round, *, step: bool) -> None:
        """Take in, once, what a round did that was collected."""
        if done.counted:
            return
        done.counted = True
        if step:
            self.count_step()
        self._tell()

    def count_step(self) -> None:
        """Take in that all envs have stepped."""
        ended = self._ended()
        for actor in self._fleet.actors:
            episodes = int(np.count_nonzero(ended[actor.rows]))
            self._recycling.count(actor.index, len(actor.env_ids), episodes)

    def is_idle(self) -> bool:
        """Return whether nobody is due, and no exchange under way."""
        return self._opening is None and self._exchanged is None and not self._due()

    def _tell(self) -> None:
        actor, self._exchanged = self._exchanged, None
        if actor is not None and actor.state is ActorState.READY:
            for env_id in actor.env_ids:
                self._log.restarted(env_id, int(self._faults.lives.numbers[env_id]))
            self._log.tell()

    def _flags(self) -> tuple[npt.NDArray[Any], ...]:
        blocks = self._results.blocks
        return blocks.rewards, blocks.terminations, blocks.truncations

    def _ended(self) -> npt.NDArray[np.bool_]:
        blocks = self._results.blocks
        return blocks.terminations | blocks.truncations

    def _due_at_an_end(self) -> Iterator[Actor]:
        """Yield those who are due and whose envs have all ended their episodes in the last step."""
        due = self._due()
        ended = self._ended() if due else None
        return (actor for actor in due if ended is not None and ended[actor.rows].all())

    def _cut(self, infos: Infos) -> Actor | None:
        """Truncate what runs in an actor that is due for too long; return it, if there is one.

        Not while one of its rows is a reset's, which has no episode that could be truncated.
        """
        due, now, ended = self._due(), time.monotonic(), None
        for actor in due:
            since = self._due_since.setdefault((actor.index, actor.incarnation), now)
            if now - since < self._max_hold or self._ended_before[actor.rows].any():
                continue
            ended = self._ended() if ended is None else ended
            for env_id in actor.env_ids:
                if not ended[env_id]:
                    self._truncate(env_id, infos)
            return actor
        return None

    def _truncate(self, env_id: int, infos: Infos) -> None:
        self._results.blocks.truncations[env_id] = True
        info = infos.get(env_id, {})
        infos[env_id] = {**info, "recycled": True}
        if self._mode is AutoresetMode.SAME_STEP:
            final_obs = self._results.observations.single(env_id)
            infos[env_id] |= {"final_obs": final_obs, "final_info": info}

    def _due(self) -> list[Actor]:
        found = self._recycling.due(time.monotonic())
        actors = [self._fleet.actors[index] for index in found]
        return [actor for actor in actors if actor.state is ActorState.READY]

    def _exchange(self, actor: Actor) -> None:
        self._due_since.pop((actor.index, actor.incarnation), None)
        self._faults.lives.begin(actor.env_ids)
        self._fleet.recycle(actor)
        self._exchanged = actor
