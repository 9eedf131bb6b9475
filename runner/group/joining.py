"""Samples of several runners become one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.metrics import EpisodeResult
from envbus.runner.batches.nested import JoinArrays
from envbus.runner.errors import FaultCause
from envbus.runner.group.protocol import Report
from envbus.runner.group.sample_memory import ArrayLocation
from envbus.runner.sampling.config import Sample

__all__ = ["GroupSample", "RunnerFault", "RunnerPart", "join"]


class RunnerFault(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a runner has ended, and what it had sampled is lost."""

    #: Its index.
    runner: int
    cause: FaultCause
    #: What happened, to which process; for people.
    message: str
    #: Restarts of this runner so far; the one for this fault is not counted.
    restarts: int
    #: Whether it had been asked for a sample, which is lost with it.
    lost_share: bool
    #: Whether it is not started again any more: it has failed too often.
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class GroupSample(Sample):
    """What an `EnvRunnerGroup` has sampled: rows by runner, then as in `Sample`.

    Env ids, also those of faults and episodes, count through all runners.
    """

    #: Indices of the runners whose rows these are, in their order.
    runners: tuple[int, ...] = ()
    #: Runners that had not answered when the time was over; their rows come with a later call.
    late_runners: tuple[int, ...] = ()
    #: Processes of runners that have ended since the last call.
    runner_faults: tuple[RunnerFault, ...] = ()

    def _why_empty(self) -> str:
        if self.runner_faults:
            ended = ", ".join(map(str, sorted({fault.runner for fault in self.runner_faults})))
            why = f"runners ended, and what they had sampled is lost ({ended}; see `runner_faults`)"
        elif self.late_runners:
            why = "no runner had answered in time (see `late_runners`)"
        else:
            why = "nothing was sampled"
        return f"there are no rows: {why}; skip this sample where `agent_steps` is 0, and sample on"


@dataclass(frozen=True, slots=True)
class RunnerPart:
    """What one runner has delivered."""

    runner: int
    #: Id in the group of its env 0.
    first_env: int
    #: `{policy id: {column: arrays}}`; the arrays may be read-only.
    rows: Mapping[str, Mapping[str, Any]]
    env_steps: int
    #: Under the group's env ids.
    report: Report
    #: Of those arrays that are in shared memory.
    locations: Sequence[ArrayLocation] = ()

    def episodes(self) -> list[EpisodeResult]:
        """Return the results of the episodes that ended in this sample."""
        results = self.report.metrics.results
        return results[max(len(results) - self.report.num_episodes, 0) :]

    def batches(self) -> MultiAgentBatch:
        """Return its rows, under the group's env ids."""
        batches = {}
        for policy_id, columns in self.rows.items():
            batch = SampleBatch(columns)
            if "env_id" in batch:
                batch = batch.with_columns(env_id=batch["env_id"] + self.first_env)
            batches[policy_id] = batch
        return MultiAgentBatch(batches, self.env_steps)


def join(
    parts: Iterable[RunnerPart],
    late_runners: Sequence[int] = (),
    runner_faults: Sequence[RunnerFault] = (),
    join_arrays: JoinArrays = np.concatenate,
) -> GroupSample:
    """Return the parts as one sample, ordered by runner, in memory of its own.

    Raises:
        ValueError: Rows of one policy have different columns.
    """
    ordered = sorted(parts, key=lambda part: part.runner)
    rows = MultiAgentBatch.concatenate([part.batches() for part in ordered], join_arrays)
    return GroupSample(
        rows.policy_batches,
        rows.env_steps,
        late=tuple(env_id for part in ordered for env_id in part.report.late),
        faults=tuple(fault for part in ordered for fault in part.report.faults),
        episodes=tuple(result for part in ordered for result in part.episodes()),
        runners=tuple(part.runner for part in ordered),
        late_runners=tuple(late_runners),
        runner_faults=tuple(runner_faults),
    )
