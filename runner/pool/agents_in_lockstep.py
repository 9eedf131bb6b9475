"""Envs with several agents in lock-step: one record of each env per step, the next step resets.

Leaves out what a record looks like to another library (`adapters/rllib.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from envbus.actors.env.agents import ALL
from envbus.runner.errors import Fault
from envbus.runner.pool.pool import ActorPool

__all__ = ["AgentsEpisode", "AgentsInLockstep", "Record"]

#: What an `AgentsEnv` returns: dicts by agent, by name ("observations", "rewards", ...).
Record: TypeAlias = dict[str, Any]


class AgentsInLockstep:
    """Steps all envs of a pool together.

    An env that fails, or whose actor does, ends its episode: all of its agents that were not done
    are truncated, as is `"__all__"`, with the last observation of each, reward 0 and
    `infos[agent]["fault"]`. The next step brings the first record of its next episode. A fault on
    the way to that is not seen here.

    Args:
        pool: Resets by the next step (`autoreset_mode`). Nobody else uses it meanwhile.
    """

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self._episodes = [AgentsEpisode() for _ in range(pool.num_envs)]

    def reset(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> list[Record]:
        """Reset all envs; return the first record of each.

        Raises:
            Exception: As from `ActorPool.reset` and `recv`.
        """
        self._pool.reset(seed, options)
        self._episodes = [AgentsEpisode() for _ in self._episodes]
        return self._collect({})

    def step(self, actions: Sequence[Mapping[Any, Any]]) -> list[Record]:
        """Step all envs, and return a record of each.

        Args:
            actions: Per env a dict by agent; of no use for envs whose episode is over.

        Raises:
            Exception: As from `ActorPool.send` and `recv`.
        """
        told: dict[int, Record] = {}
        asked = []
        for env_id, episode in enumerate(self._episodes):
            record = episode.take_known()
            if record is not None:
                told[env_id] = record
            elif not episode.begins_by_itself:
                asked.append(env_id)
        if asked:
            given = [dict(actions[i]) if self._episodes[i].runs else {} for i in asked]
            self._pool.send(given, asked)
        return self._collect(told)

    def _collect(self, told: dict[int, Record]) -> list[Record]:
        """Wait until there is a record of each env, and return them.

        Args:
            told: Records that are there already, by env.
        """
        num_envs = len(self._episodes)
        while len(told) < num_envs:
            batch = self._pool.recv(min_envs=num_envs - len(told))
            for row, env_id in enumerate(batch.env_ids.tolist()):
                episode, life = self._episodes[env_id], int(batch.incarnations[row])
                if env_id in told or not episode.continues(life):
                    episode.keep_first(batch.observations[row], life)
                else:
                    told[env_id] = episode.take(batch.observations[row], life)
            for fault in batch.faults:
                episode = self._episodes[fault.env_id]
                episode.fail(fault)
                if fault.env_id not in told and (record := episode.take_cut()) is not None:
                    told[fault.env_id] = record
        return [told[env_id] for env_id in range(num_envs)]


class AgentsEpisode:
    """What the caller of an env's steps knows of its episode, and what is to be told next. Pure.

    Attributes:
        runs: Whether the caller knows it as one that has begun and is not over.
        begins_by_itself: Whether the next record comes without being asked for: after a fault.
    """

    def __init__(self) -> None:
        self.runs = False
        self.begins_by_itself = False
        #: Which life of the env it is; None: no record has come yet.
        self._life: int | None = None
        #: By agent that is not done, the last observation.
        self._seen: dict[Any, Any] = {}
        #: A fault that has ended it, which the caller does not know yet.
        self._fault: Fault | None = None
        #: The first record of the next episode, which came before its turn.
        self._first: tuple[Record, int] | None = None

    def continues(self, life: int) -> bool:
        """Return whether a record of this life of the env is the next one to be told."""
        return not self.runs or life == self._life

    def take(self, record: Record, life: int) -> Record:
        """Return a record, which is told now."""
        if not self.runs:
            self._seen = {}
        self._life, self.begins_by_itself = life, False
        terminateds, truncateds = record["terminateds"], record["truncateds"]
        self.runs = not (terminateds[ALL] or truncateds[ALL])
        self._seen.update(record["observations"])
        for flags in (terminateds, truncateds):
            for agent, is_done in flags.items():
                if is_done:
                    self._seen.pop(agent, None)
        return record

    def keep_first(self, record: Record, life: int) -> None:
        """Keep the first record of the next episode until it is told how this one has ended."""
        self._first = record, life

    def fail(self, fault: Fault) -> None:
        """Take in that the env has failed: its next episode begins by itself."""
        if self._life is not None and self._life > fault.restarts:
            return  # of a life before this one
        if self.runs and self._fault is None:
            self._fault = fault
        if self._first is not None and self._first[1] > fault.restarts:
            return  # which has begun
        self._first = None  # nobody has seen it
        self.begins_by_itself = True

    def take_known(self) -> Record | None:
        """Return what is to be told now without asking the env; None: nothing."""
        if (cut := self.take_cut()) is not None:
            return cut
        if self._first is None:
            return None
        first, self._first = self._first, None
        return self.take(*first)

    def take_cut(self) -> Record | None:
        """Return the last record of an episode that a fault has ended; None: none has."""
        if self._fault is None:
            return None
        fault, self._fault, self.runs = self._fault, None, False
        return _cut_off(self._seen, fault)


def _cut_off(seen: Mapping[Any, Any], fault: Fault) -> Record:
    """Return the last record of an episode that a fault has ended."""
    return {
        "observations": dict(seen),
        "rewards": dict.fromkeys(seen, 0.0),
        "terminateds": {**dict.fromkeys(seen, False), ALL: False},
        "truncateds": {**dict.fromkeys(seen, True), ALL: True},
        "infos": {agent: {"fault": fault.info()} for agent in seen},
    }
