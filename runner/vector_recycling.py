"""Exchanges the actors of a vector env for fresh ones, between two rounds.

Leaves out who is due (`recycling.py`). In lock-step nobody can be held back: an actor is
exchanged when all of its envs are between two episodes at the same time, and the round that then
begins waits for the fresh one.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from gymnasium.vector import AutoresetMode

from envbus.actors.blocks import Blocks
from envbus.actors.protocol import Reset
from envbus.bus.messages import Tree
from envbus.runner.fault_log import FaultLog
from envbus.runner.fleet import Actor, ActorState, Fleet
from envbus.runner.recovery import Lives
from envbus.runner.recycling import Recycling

__all__ = ["VectorRecycling"]


class VectorRecycling:
    """Exchanges at most one actor per round.

    Args:
        recycling: Who is due.
        fleet: Whose actors.
        blocks: Where the flags of the last step are.
        lives: Which life each env is in.
        log: What is told.
        mode: What happens at the end of an episode.
    """

    def __init__(
        self,
        recycling: Recycling,
        fleet: Fleet,
        blocks: Blocks,
        lives: Lives,
        log: FaultLog,
        mode: AutoresetMode,
    ) -> None:
        self._recycling = recycling
        self._fleet = fleet
        self._blocks = blocks
        self._lives = lives
        self._log = log
        self._mode = mode
        #: An actor whose first results in its new life have not come yet.
        self._exchanged: Actor | None = None

    def before_step(self) -> Actor | None:
        """Exchange an actor whose envs would be reset by this step; return it.

        Its envs are to be reset instead of stepped, which is what NEXT_STEP does with them.
        """
        if self._mode is not AutoresetMode.NEXT_STEP:
            return None
        for actor in self._due():
            rows = actor.rows
            if (self._blocks.terminations[rows] | self._blocks.truncations[rows]).all():
                self._exchange(actor)
                return actor
        return None

    def before_reset(self, requests: dict[int, Reset]) -> None:
        """Exchange an actor all of whose envs are reset; its envs get what `requests` says.

        Those that are reset without a seed are seeded as after a fault: a fresh env would be at
        random.
        """
        for actor in self._due():
            request = requests.get(actor.index)
            if request is None or len(request.slots or actor.env_ids) < len(actor.env_ids):
                continue
            self._exchange(actor)
            seeds = self._lives.seeds(actor.env_ids)
            if seeds is not None and request.seeds is not None:
                given = request.seeds.value
                seeds = [old if new is None else new for new, old in zip(given, seeds, strict=True)]
            if seeds is not None:
                requests[actor.index] = msgspec.structs.replace(request, seeds=Tree(seeds))
            return

    def after(self, *, step: bool) -> None:
        """Take in what a round did that was collected."""
        if step:
            ended = self._blocks.terminations | self._blocks.truncations
            for actor in self._fleet.actors:
                episodes = int(np.count_nonzero(ended[actor.rows]))
                self._recycling.count(actor.index, len(actor.env_ids), episodes)
        fresh, self._exchanged = self._exchanged, None
        if fresh is not None and fresh.state is ActorState.READY:
            for env_id in fresh.env_ids:
                self._log.restarted(env_id, int(self._lives.numbers[env_id]))
            self._log.tell()

    def _due(self) -> list[Actor]:
        found = self._recycling.due(time.monotonic())
        actors = [self._fleet.actors[index] for index in found]
        return [actor for actor in actors if actor.state is ActorState.READY]

    def _exchange(self, actor: Actor) -> None:
        self._lives.begin(actor.env_ids)
        self._fleet.recycle(actor)
        self._exchanged = actor
