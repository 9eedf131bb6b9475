"""The fragments of envs with one agent each: where each env is, and which rows leave when. Pure.

Leaves out who is stepped, by which actions, and when (`column_sampler.py`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.columns import Columns, Make
from envbus.runner.faults import Fault
from envbus.runner.metrics import EpisodeResult, SampleMetrics
from envbus.runner.nested import Tree
from envbus.runner.running_episodes import RunningEpisodes
from envbus.runner.sampling import Demand, Phase, RunnerConfig, Sample

__all__ = ["ColumnFragments"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]

# As plain numbers: NumPy compares with these many times faster than with an enum's members.
_ENDED, _RESETTING, _WAITING, _, _STEPPING, _LOST = map(int, Phase)


class _Over(NamedTuple):
    """An episode that is over, and where its rows stand in this fragment."""

    first_row: int
    #: Behind its last one.
    stop_row: int
    result: EpisodeResult


class ColumnFragments:
    """One fragment after the other, and what stays for the next one.

    Attributes:
        phase: `(N,)` int8, values of `Phase`.
        recovering: `(N,)` envs that failed, whose next episode will begin by itself.
        failed_some: Whether any env has ever failed.
        columns: Rows of this fragment, and those that are ahead of it.
        episodes: Those that run.
    """

    def __init__(
        self,
        config: RunnerConfig,
        policy_id: str,
        num_envs: int,
        metrics: SampleMetrics,
        make: Make | None = None,
    ) -> None:
        self._config = config
        self._policy_id = policy_id
        self._metrics = metrics
        self.phase = np.full(num_envs, _ENDED, np.int8)
        self.recovering = np.zeros(num_envs, np.bool_)
        self.failed_some = False
        self.columns = Columns(num_envs, 1, make)
        self.episodes = RunningEpisodes(config, policy_id, num_envs)
        self._lost_some = False
        self._demand = Demand(np.zeros(num_envs, np.int64), "env_steps", False)
        #: `(N,)` how many rows of the last fragment have left; those behind stay for this one.
        self._left: _Ints = np.zeros(num_envs, np.int64)
        #: In the order in which they ended; not told before their last row leaves.
        self._over: list[_Over] = []
        self._faults: list[Fault] = []

    # --- about it ----------------------------------------------------------------------------

    @property
    def live(self) -> _Bools:
        """Which envs were not given up, `(N,)`."""
        live: _Bools = self.phase != _LOST
        return live

    @property
    def running(self) -> _Bools:
        """Which envs are in an episode, `(N,)`."""
        running: _Bools = (self.phase >= _WAITING) & (self.phase <= _STEPPING)
        return running

    def has_cut_episode(self) -> bool:
        """Return whether an episode runs of which rows have left already."""
        return bool((self.running & (self.episodes.fragments > 0)).any())

    def unmet(self, ids: _Ints | slice = slice(None)) -> _Bools:
        """Return which envs, of some, have still to contribute."""
        demand = self._demand
        phase, quotas = self.phase[ids], demand.quotas[ids]
        counts = (
            self.episodes.ended[ids] if demand.unit == "episodes" else self.columns.num_rows[ids]
        )
        unmet: _Bools = counts < quotas
        if demand.complete:
            unmet |= (phase >= _WAITING) & (quotas > 0)
        if self._lost_some:
            unmet &= phase != _LOST
        return unmet

    def going_on(self, ids: _Ints | slice = slice(None)) -> _Bools:
        """Return which envs, of some, are to step: those that are unmet, or run ahead of others."""
        ahead = self._config.run_ahead
        if not (ahead and np.count_nonzero(self.unmet())):
            return self.unmet(ids)
        going_on: _Bools = self.columns.num_rows[ids] < self._demand.quotas[ids] + ahead
        if self._lost_some:
            going_on &= self.phase[ids] != _LOST
        return going_on

    def steps_together(self) -> int:
        """Return by how many steps all envs can go on before one has contributed its part.

        0 where parts are episodes, which end when they end.
        """
        demand = self._demand
        if demand.complete:
            return 0
        return int((demand.quotas - self.columns.num_rows).min())

    # --- what happens ------------------------------------------------------------------------

    def reset(self) -> None:
        """All envs begin new episodes; no row stays."""
        if self._config.run_ahead:
            self._metrics.add_dropped_rows(int((self.columns.num_rows - self._left).sum()))
        self.phase[self.live] = _RESETTING
        self.columns.num_rows[:] = self._left[:] = 0
        self._over.clear()

    def begin(self, demand: Demand) -> None:
        """A fragment begins, with what the one before has left."""
        self._demand = demand
        episodes, old, left = self.episodes, self.columns, self._left
        kept = old.num_rows - left
        capacity = 0
        if demand.unit != "episodes":
            capacity = int(demand.quotas.max(initial=0)) + self._config.run_ahead
        self.columns = old.following(capacity, kept, self.phase == _STEPPING)
        episodes.first_row = np.maximum(episodes.first_row - left, 0)
        self._left = np.zeros_like(left)
        #: Of whose episodes no row stands here yet.
        fresh = np.flatnonzero(self.running & (episodes.first_row == kept))
        self.columns.begin(
            fresh,
            eps_id=episodes.eps_ids(fresh),
            incarnation=episodes.incarnation[fresh],
            t=episodes.length[fresh],
        )
        episodes.ended[:] = 0
        self._faults = []

    def begin_episodes(self, ids: _Ints, incarnations: _Ints) -> None:
        """The first observations of these envs' next episodes are there."""
        self.episodes.begin(ids, incarnations, self.columns.num_rows[ids])
        self.columns.begin(ids, eps_id=self.episodes.eps_ids(ids), incarnation=incarnations)

    def take_steps(
        self,
        ids: _Ints,
        observations: Tree,
        rewards: npt.NDArray[np.float64],
        terminated: _Bools,
        truncated: _Bools,
    ) -> bool:
        """These envs have stepped; return whether an episode has ended."""
        self.columns.complete(ids, observations, rewards, terminated, truncated)
        self.episodes.step(ids, rewards)
        done = terminated | truncated
        if not np.count_nonzero(done):
            return False
        over = ids[done]
        self.phase[over] = _ENDED
        self.episodes.ended[over] += 1
        flags = zip(over.tolist(), terminated[done], truncated[done], strict=True)
        for env_id, was_terminated, was_truncated in flags:
            self._end_episode(env_id, bool(was_terminated), bool(was_truncated))
        return True

    def take_fault(self, fault: Fault) -> None:
        """An env has failed, or was given up."""
        env_id, columns = fault.env_id, self.columns
        self._faults.append(fault)
        if _WAITING <= self.phase[env_id] <= _STEPPING:
            first_row = int(self.episodes.first_row[env_id])
            kept = int(columns.num_rows[env_id]) - first_row
            if self._config.faulty_episodes == "drop":
                self._metrics.add_dropped_rows(kept)
                columns.rewind(env_id, first_row)
                self._end_episode(env_id, False, False, faulty=True, dropped=kept)
            else:
                if kept:
                    columns.truncate(env_id)
                columns.rewind(env_id, int(columns.num_rows[env_id]))
                self._end_episode(env_id, False, False, faulty=True)
        # The first observation of its next episode comes by itself.
        self.phase[env_id] = _LOST if fault.given_up else _RESETTING
        self.recovering[env_id] = not fault.given_up
        self.failed_some = True
        self._lost_some |= fault.given_up

    def end(self, late: tuple[int, ...], unroll_id: int) -> Sample:
        """The fragment ends, here and now; rows beyond what was asked for stay for the next one."""
        counts, running, episodes = self.columns.num_rows, self.running, self.episodes
        if self._demand.complete:  # those that run stay
            counts = np.where(running, episodes.first_row, counts)
        elif self._config.run_ahead:  # of those that were given up nothing follows
            counts = np.where(self.live, np.minimum(counts, self._demand.quotas), counts)
        episodes.fragments += running & (counts > episodes.first_row)
        self._left = counts.copy()
        batch = self.columns.batch(counts, DUMMY_AGENT, unroll_id)
        policy_batches = {self._policy_id: batch} if len(batch) else {}
        results = self._tell()
        return Sample(
            policy_batches,
            len(batch),
            late=late,
            faults=tuple(self._faults),
            episodes=tuple(results),
        )

    # --- private -----------------------------------------------------------------------------

    def _end_episode(
        self,
        env_id: int,
        terminated: bool,
        truncated: bool,
        *,
        faulty: bool = False,
        dropped: int = 0,
    ) -> None:
        first_row = int(self.episodes.first_row[env_id])
        stop_row = int(self.columns.num_rows[env_id])
        result = self.episodes.result(
            env_id,
            terminated,
            truncated,
            faulty=faulty,
            dropped=dropped,
            has_rows=stop_row > first_row,
        )
        self._over.append(_Over(first_row, stop_row, result))

    def _tell(self) -> list[EpisodeResult]:
        """Return the results of episodes whose rows have all left; the others stay."""
        told: list[EpisodeResult] = []
        staying: list[_Over] = []
        for first_row, stop_row, result in self._over:
            left = int(self._left[result.env_id])
            if stop_row <= left:
                self._metrics.add_episode(result)
                told.append(result)
                continue
            if first_row < left:
                result = msgspec.structs.replace(result, fragments=result.fragments + 1)
            staying.append(_Over(max(first_row - left, 0), stop_row - left, result))
        self._over = staying
        return told
