"""Counts that a pool of envs gives of itself."""

from __future__ import annotations

import msgspec

from envbus.runner.crew import CrewStatistics
from envbus.runner.fault_log import FaultLog
from envbus.runner.local_fleet import AnyFleet
from envbus.runner.recovery import Recovery

__all__ = ["Statistics", "gather"]


class Statistics(CrewStatistics, frozen=True, kw_only=True):
    """Counts since the start."""

    #: Envs made anew in their actor, which went on; 0 before any.
    env_restarts: int
    #: Envs that are not made anew any more.
    envs_given_up: int
    #: How often an actor was asked to step by a word in shared memory instead of a message.
    steps_by_word: int
    #: By cause (`FaultCause`): envs whose episode a fault ended.
    faults: dict[str, int]


def gather(fleet: AnyFleet, log: FaultLog, recovery: Recovery | None, given_up: int) -> Statistics:
    """Return the counts of a pool's parts."""
    return Statistics(
        **msgspec.structs.asdict(fleet.statistics()),
        env_restarts=0 if recovery is None else recovery.restarts(),
        envs_given_up=given_up,
        steps_by_word=0 if fleet.words is None else fleet.words.asked,
        faults=log.counts(),
    )
