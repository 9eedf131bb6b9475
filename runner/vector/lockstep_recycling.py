"""Exchanges the actors of envs that step together for fresh ones, between two rounds.

Leaves out who is due (`workers/recycling.py`). In lock-step nobody can be held back: an actor is
exchanged when all of its envs are between two episodes at the same time, and the call waits for the
fresh one. If that does not happen for `max_hold` seconds, the episodes that still run in it are
truncated.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from envbus.runner.engine.engine import Engine
from envbus.runner.engine.env_results import Infos
from envbus.runner.engine.env_states import EnvState
from envbus.runner.workers.recycling import Recycling
from envbus.runner.workers.worker import Actor, ActorState

__all__ = ["LockstepRecycling"]

#: What SAME_STEP's info tells of the step and the episode that ended; all else is of the next one.
_FINAL_KEYS = ("final_obs", "final_info", "recycled")


class LockstepRecycling:
    """Exchanges at most one actor per round.

    Args:
        recycling: Who is due.
        engine: Exchanges them.
    """

    def __init__(self, recycling: Recycling, engine: Engine) -> None:
        self._recycling = recycling
        self._actors: Sequence[Actor] = engine.fleet.actors
        self._engine = engine
        self._states = engine.states
        self._results = engine.results
        self._mode = engine.mode
        #: Whether the present step has exchanged an actor.
        self._has_exchanged = False
        #: By index and life of actors that are due: since when, as far as was seen.
        self._due_since: dict[tuple[int, int], float] = {}
        #: Whose episodes had ended before the present step, `(num_envs,)`.
        self._ended_before: npt.NDArray[np.bool_] = np.zeros(len(engine.states), np.bool_)

    def before_step(self) -> Sequence[int]:
        """NEXT_STEP: exchange an actor all of whose envs this step resets; return these."""
        self._has_exchanged = False
        if self._mode is AutoresetMode.NEXT_STEP:
            self._ended_before = self._ended()
            actor = next(self._due_at_an_end(), None)
            if actor is not None and self._is_at_rest(actor):
                self._exchange(actor)
                return actor.env_ids
        return ()

    def before_reset(self, named: Container[int]) -> None:
        """Exchange an actor all of whose envs are reset."""
        for actor in self._due():
            if self._is_at_rest(actor) and all(i in named for i in actor.env_ids):
                self._exchange(actor)
                return

    def after_step(self, *, may_wait: bool) -> bool:
        """SAME_STEP: exchange an actor all of whose envs this step has reset.

        Their rows are to be those of the fresh process; rewards and flags stay those of the step.

        Args:
            may_wait: Whether an exchange may begin.

        Returns:
            Whether one has, which is to be waited for.
        """
        if self._mode is not AutoresetMode.SAME_STEP or self._has_exchanged or not may_wait:
            return False
        actor = next(self._due_at_an_end(), None) or self._overdue()
        if actor is None or any(self._states[i] is not EnvState.READY for i in actor.env_ids):
            return False
        self._has_exchanged = True
        results, cut = self._results, self._results.cut
        assert cut is not None
        for env_id in actor.env_ids:
            info = results.take_info(env_id)
            if results.has_ended(env_id):
                last = {key: info[key] for key in _FINAL_KEYS if key in info}
            else:
                results.blocks.truncations[env_id] = True
                final_obs = results.observations.single(env_id)
                last = {"final_obs": final_obs, "final_info": info, "recycled": True}
            cut.keep(env_id, last)
        self._exchange(actor)
        return True

    def cut_those_due(self, infos: Infos) -> list[int]:
        """NEXT_STEP: truncate what runs in an actor that is due for too long; return its envs.

        They are to be reset next. `infos` say so.
        """
        actor = self._overdue() if self._mode is AutoresetMode.NEXT_STEP else None
        if actor is None or any(self._states[i] is not EnvState.IDLE for i in actor.env_ids):
            return []
        env_ids = list(actor.env_ids)
        for env_id in env_ids:
            if not self._results.has_ended(env_id):
                self._results.blocks.truncations[env_id] = True
                infos[env_id] = {**infos.get(env_id, {}), "recycled": True}
        self._states.freshen(env_ids)
        return env_ids

    def count_step(self) -> None:
        """Take in that all envs have stepped."""
        ended = self._ended()
        for actor in self._actors:
            episodes = int(np.count_nonzero(ended[actor.rows]))
            self._recycling.count(actor.index, len(actor.env_ids), episodes)

    def is_idle(self) -> bool:
        """Return whether nobody is due."""
        return not self._due()

    def _ended(self) -> npt.NDArray[np.bool_]:
        blocks = self._results.blocks
        return blocks.terminations | blocks.truncations

    def _due_at_an_end(self) -> Iterator[Actor]:
        """Yield those who are due and whose envs have all ended their episodes in the last step."""
        due = self._due()
        ended = self._ended() if due else None
        return (actor for actor in due if ended is not None and ended[actor.rows].all())

    def _overdue(self) -> Actor | None:
        """Return one who is due for too long.

        Not while one of its rows is a reset's, which has no episode that could be truncated.
        """
        now = time.monotonic()
        for actor in self._due():
            since = self._due_since.setdefault((actor.index, actor.incarnation), now)
            is_late = now - since >= self._recycling.max_hold
            if is_late and not self._ended_before[actor.rows].any():
                return actor
        return None

    def _is_at_rest(self, actor: Actor) -> bool:
        at_rest = (EnvState.IDLE, EnvState.FRESH)
        return all(self._states[env_id] in at_rest for env_id in actor.env_ids)

    def _due(self) -> list[Actor]:
        found = self._recycling.due(time.monotonic())
        actors = [self._actors[index] for index in found]
        return [actor for actor in actors if actor.state is ActorState.READY]

    def _exchange(self, actor: Actor) -> None:
        self._due_since.pop((actor.index, actor.incarnation), None)
        self._engine.exchange(actor)
