"""Rows of many envs side by side, `(N, T)`, cut into fragments. Pure.

What trajectory and episode of `runner/batches/` are for one env, for N envs with one agent each,
without a Python object per row: their rows (`Columns`), the episodes that run, and where each env
is and which rows leave when (`ColumnFragments`). Leaves out who is stepped, by which actions, and
when (`column_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.episode import EpisodeIds
from envbus.runner.batches.metrics import EpisodeResult, SampleMetrics
from envbus.runner.batches.nested import Tree, leaves_of, map_tree
from envbus.runner.batches.row_memory import LARGE, RowMemory
from envbus.runner.batches.trajectory import AgentID, agent_id_column
from envbus.runner.errors import Fault
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.sampling.config import EnvQuotas, Phase, RunnerConfig, Sample

__all__ = ["ColumnFragments", "Columns", "Make", "RunningEpisodes"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]
#: Where rows stand: an index of arrays `(N * T, ...)`.
_RowIndex: TypeAlias = "_Ints | slice"
#: `(shape, dtype) -> array` of arbitrary content where a column is wanted; None: nowhere special.
Make: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], "npt.NDArray[Any] | None"]

_MARKS = ("eps_id", "incarnation", "t")
# As plain numbers: NumPy compares with these many times faster than with an enum's members.
_ENDED, _RESETTING, _WAITING, _, _STEPPING, _LOST = map(int, Phase)


class Columns:
    """The rows of N envs in one fragment; env e's stand at `e * T` and behind.

    Env ids are given in increasing order, each once: so N of them are all envs.

    Args:
        num_envs: N.
        capacity: T at first.
        make: Asked for the memory of each column.

    Attributes:
        num_rows: `(N,)` complete rows of each env.
    """

    def __init__(self, num_envs: int, capacity: int, make: Make | None = None) -> None:
        self.num_rows: _Ints = np.zeros(num_envs, np.int64)
        self._num_envs = num_envs
        self._capacity = max(capacity, 1)
        #: No env has more rows.
        self._most_rows = 0
        self._make = make
        #: `(N * T, ...)` each.
        self._trees: dict[str, Tree] = {}
        self._extras: frozenset[str] | None = None
        self._memory = RowMemory()
        for name, dtype in (("rewards", np.float32), ("terminateds", bool), ("truncateds", bool)):
            self._allocate(name, np.zeros((0,), dtype))
        #: What holds from a row on, for the rest of its episode, where `marked` is set.
        self._marked: _Bools = np.zeros((num_envs, self._capacity), np.bool_)
        self._marks = {name: np.zeros_like(self._marked, np.int64) for name in _MARKS}
        #: Which weights chose the actions, from a row on; 0 where the row before says it.
        self._versions: _Ints = np.zeros((num_envs, self._capacity), np.int64)
        #: Whose rows `observe` has begun last, and their index, as long as those hold.
        self._begun: tuple[_Ints | None, _RowIndex] = (None, slice(0))

    def begin(
        self,
        env_ids: _Ints,
        *,
        eps_id: _Ints,
        incarnation: _Ints,
        t: _Ints | int = 0,
    ) -> None:
        """An episode begins, or goes on from an earlier fragment, with the next row of each env."""
        index = self._next_rows(env_ids)
        self._marked.reshape(-1)[index] = True
        for name, values in (("eps_id", eps_id), ("incarnation", incarnation), ("t", t)):
            self._marks[name].reshape(-1)[index] = values

    def observe(self, env_ids: _Ints, observations: Tree) -> Tree:
        """Begin a row of each env, and return the observations in the memory of the fragment.

        They are views where the rows are evenly spaced, as they are of neighbouring envs in step.

        Raises:
            ValueError: Shapes are not those of earlier rows.
        """
        index = self._next_rows(env_ids)
        self._begun = env_ids, index
        self._write("obs", index, observations)
        tree = self._trees["obs"]
        if isinstance(tree, np.ndarray):
            return tree[index]
        return map_tree(lambda leaf: leaf[index], tree)

    def act(
        self,
        env_ids: _Ints,
        actions: Tree,
        policy_version: int | _Ints,
        extras: Mapping[str, Tree],
    ) -> None:
        """Open the row of each env that was begun.

        Raises:
            ValueError: Shapes or names of extras are not those of earlier rows.
        """
        if self._extras is None:
            self._extras = frozenset(extras)
        elif self._extras != extras.keys():
            raise ValueError(
                f"extra columns are {sorted(extras)}, earlier ones {sorted(self._extras)}"
            )
        begun, index = self._begun
        if begun is not env_ids:
            index = self._next_rows(env_ids)
        self._write("actions", index, actions)
        for name, values in extras.items():
            self._write(name, index, values)
        self._versions.reshape(-1)[index] = policy_version

    def complete(
        self,
        env_ids: _Ints,
        next_observations: Tree,
        rewards: npt.NDArray[Any],
        terminateds: _Bools,
        truncateds: _Bools,
    ) -> None:
        """Close the open row of each env."""
        begun, index = self._begun
        if begun is not env_ids:
            index = self._row_index(env_ids)
        self._write("next_obs", index, next_observations)
        self._trees["rewards"][index] = rewards
        self._trees["terminateds"][index] = terminateds
        self._trees["truncateds"][index] = truncateds
        if len(env_ids) == self._num_envs:
            self.num_rows += 1
        else:
            self.num_rows[env_ids] += 1
        self._most_rows += 1
        self._begun = None, index

    def rewind(self, env_id: int, num_rows: int) -> None:
        """Forget an env's rows from `num_rows` on, and an open one."""
        self.num_rows[env_id] = num_rows
        self._marked[env_id, num_rows:] = False
        self._begun = None, self._begun[1]

    def truncate(self, env_id: int) -> None:
        """Mark an env's last row as the end of its episode."""
        self._trees["truncateds"][env_id * self._capacity + self.num_rows[env_id] - 1] = True

    def batch(self, counts: _Ints, agent_id: AgentID, unroll_id: int) -> SampleBatch:
        """Return the first `counts[e]` rows of each env e, in order of env; views if all are full.

        An env with rows must have begun an episode with its first one.
        """
        if not counts.any():
            return SampleBatch({})
        steps = np.arange(self._capacity)
        chosen = steps < counts[:, np.newaxis]
        begun = np.maximum.accumulate(np.where(self._marked, steps, 0), axis=1)
        columns = {
            name: np.take_along_axis(values, begun, axis=1) for name, values in self._marks.items()
        }
        columns["t"] += steps - begun
        columns["policy_version"] = self._versions
        columns["env_id"] = np.broadcast_to(
            np.arange(self._num_envs)[:, np.newaxis], self._marked.shape
        )
        full = bool(chosen.all())
        rows = np.flatnonzero(chosen)

        def select(leaf: npt.NDArray[Any]) -> Any:
            return leaf if full else leaf[rows]

        trees = {name: map_tree(select, tree) for name, tree in self._trees.items()}
        trees |= {name: select(values.reshape(-1)) for name, values in columns.items()}
        trees["next_obs_valid"] = np.ones(len(rows), np.bool_)
        trees["agent_id"] = agent_id_column(agent_id, len(rows))
        trees["unroll_id"] = np.full(len(rows), unroll_id, np.int64)
        return SampleBatch(trees)

    def following(self, capacity: int, kept: _Ints, opened: _Bools) -> Columns:
        """Return the columns of the next fragment, in new memory.

        Args:
            capacity: Rows of each env to make room for.
            kept: `(N,)` how many of the last complete rows of each env it begins with; they may be
                of several episodes, and begin within one.
            opened: `(N,)` whether an env's open row comes along.
        """
        taken = kept + opened
        columns = Columns(self._num_envs, max(capacity, int(np.max(taken, initial=0))), self._make)
        columns._extras = self._extras
        # Of three fragments, as the caller may still have the last.
        large = sum(leaf.nbytes >= LARGE for _, leaf in leaves_of(self._trees))
        self._memory.most_kept = 3 * large
        columns._memory = self._memory
        for name, tree in self._trees.items():
            columns._trees[name] = map_tree(columns._like, tree)
        for env_id in np.flatnonzero(taken).tolist():
            count, first = int(taken[env_id]), int(self.num_rows[env_id] - kept[env_id])
            here = env_id * self._capacity + first
            there = env_id * columns._capacity
            for name, tree in self._trees.items():
                map_tree(
                    lambda old, new, h=here, t=there, n=count: new.__setitem__(
                        slice(t, t + n), old[h : h + n]
                    ),
                    tree,
                    columns._trees[name],
                )
            columns._marked[env_id, :count] = self._marked[env_id, first : first + count]
            cut = bool(kept[env_id]) and not self._marked[env_id, first]
            columns._versions[env_id, :count] = self._versions[env_id, first : first + count]
            for name, marks in self._marks.items():
                columns._marks[name][env_id, :count] = marks[env_id, first : first + count]
            if cut:
                begun = int(np.flatnonzero(self._marked[env_id, :first])[-1])
                columns._marked[env_id, 0] = True
                for name, marks in self._marks.items():
                    columns._marks[name][env_id, 0] = marks[env_id, begun]
                columns._marks["t"][env_id, 0] += first - begun
        columns.num_rows[:] = kept
        columns._most_rows = int(np.max(kept))
        return columns

    def _next_rows(self, env_ids: _Ints) -> _RowIndex:
        """Return the index of the next rows; there is room for them then."""
        if self._most_rows >= self._capacity:
            self._most_rows = int(np.max(self.num_rows))
            if np.count_nonzero(self.num_rows[env_ids] >= self._capacity):
                self._grow()
        return self._row_index(env_ids)

    def _row_index(self, env_ids: _Ints) -> _RowIndex:
        """Return where the row stands that follows each env's complete ones.

        Those of neighbouring envs in step are evenly spaced, and a slice is read and written in a
        fraction of the time.
        """
        count, apart = len(env_ids), self._capacity
        rows = self.num_rows if count == self._num_envs else self.num_rows[env_ids]
        index: _Ints = env_ids * apart + rows
        if count == 0 or (count > 1 and np.count_nonzero(index[1:] - index[:-1] != apart)):
            return index
        first = int(index[0])
        return slice(first, first + (count - 1) * apart + 1, apart)

    def _grow(self) -> None:
        old, self._capacity = self._capacity, 2 * self._capacity
        self._begun = None, self._begun[1]

        def grow(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            wider = self._like(leaf)
            shape = leaf.shape[1:]
            by_env = wider.reshape(self._num_envs, self._capacity, *shape)
            by_env[:, :old] = leaf.reshape(self._num_envs, old, *shape)
            return wider

        self._trees = {name: map_tree(grow, tree) for name, tree in self._trees.items()}
        room = ((0, 0), (0, old))
        self._marked = np.pad(self._marked, room)
        self._versions = np.pad(self._versions, room)
        self._marks = {name: np.pad(marks, room) for name, marks in self._marks.items()}

    def _like(self, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shape = (self._num_envs * self._capacity, *leaf.shape[1:])
        made = None if self._make is None else self._make(shape, leaf.dtype)
        return self._memory.empty(shape, leaf.dtype) if made is None else made

    def _allocate(self, name: str, rows: Tree) -> None:
        self._trees[name] = map_tree(lambda leaf: self._like(np.asarray(leaf)), rows)

    def _write(self, name: str, index: _RowIndex, rows: Tree) -> None:
        if name not in self._trees:
            self._allocate(name, rows)
        tree = self._trees[name]
        if (  # the usual case, without a call per leaf
            isinstance(tree, np.ndarray)
            and rows.dtype == tree.dtype
            and rows.shape[1:] == tree.shape[1:]
        ):
            tree[index] = rows
            return
        self._trees[name] = map_tree(
            lambda leaf, values: _put(name, leaf, index, np.asarray(values)), tree, rows
        )


def _put(
    name: str, leaf: npt.NDArray[Any], index: _RowIndex, values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Write, and return the array written to: a wider one where a value needs it."""
    if values.shape[1:] != leaf.shape[1:]:
        raise ValueError(f"{name} has shape {values.shape[1:]}, earlier rows {leaf.shape[1:]}")
    if values.dtype != leaf.dtype:
        leaf = leaf.astype(np.result_type(values.dtype, leaf.dtype), copy=False)
    leaf[index] = values
    return leaf


class RunningEpisodes:
    """The running episodes: what `EpisodeRecorder` knows of one, for one per env.

    Arrays are `(num_envs,)`; of an env between two episodes they tell of the last one.

    Env ids are given in increasing order, each once: so `num_envs` of them are all envs.

    Attributes:
        ids: Of the episodes.
        first_row: Row of this fragment that it begins with.
        fragments: That it is in already, without this one.
        length: Env steps.
        incarnation: Life of the env.
        ended: Episodes that the env has ended in this sample, faulty ones left out.
    """

    def __init__(self, config: RunnerConfig, policy_id: str, num_envs: int) -> None:
        self._policy_id = policy_id
        self.ids = EpisodeIds(config.unique(0), num_envs)
        self.first_row: _Ints = np.zeros(num_envs, np.int64)
        self.fragments: _Ints = np.zeros(num_envs, np.int64)
        self.length: _Ints = np.zeros(num_envs, np.int64)
        self.incarnation: _Ints = np.zeros(num_envs, np.int64)
        self.ended: _Ints = np.zeros(num_envs, np.int64)
        self._return = np.zeros(num_envs, np.float64)

    def begin(self, env_ids: _Ints, incarnations: _Ints, first_rows: _Ints) -> None:
        """The next episode of each env begins."""
        self.incarnation[env_ids] = incarnations
        self.ids.begin(env_ids)
        self.first_row[env_ids] = first_rows
        self.fragments[env_ids] = self.length[env_ids] = 0
        self._return[env_ids] = 0.0

    def step(self, env_ids: _Ints, rewards: npt.NDArray[np.float64]) -> None:
        """Each env was stepped."""
        if len(env_ids) == len(self._return):  # all: in a third of the time
            self._return += rewards
            self.length += 1
            return
        self._return[env_ids] += rewards
        self.length[env_ids] += 1

    def result(
        self, env_id: int, terminated: bool, truncated: bool, dropped: int | None, *, has_rows: bool
    ) -> EpisodeResult:
        """Return the summary of an episode that is over, by the env's word or by a fault.

        `dropped` rows were forgotten for a fault; None: there was none.
        """
        value, length = float(self._return[env_id]), int(self.length[env_id])
        return EpisodeResult(
            eps_id=int(self.ids.running[env_id]),
            env_id=env_id,
            incarnation=int(self.incarnation[env_id]),
            episode_return=value,
            length=length,
            agent_returns={DUMMY_AGENT: value},
            agent_steps={DUMMY_AGENT: length - (dropped or 0)},
            agent_policies={DUMMY_AGENT: self._policy_id},
            terminated=terminated,
            truncated=truncated,
            faulty=dropped is not None,
            fragments=int(self.fragments[env_id]) + has_rows,
            unrecorded_reward=0.0,
            custom_metrics={},
        )


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
        hear_of_end: Callable[..., object] | None = None,
    ) -> None:
        self._config = config
        self._policy_id = policy_id
        self._metrics = metrics
        #: Called with the `result` of each episode that is over.
        self._hear_of_end = hear_of_end
        self.phase = np.full(num_envs, _ENDED, np.int8)
        self.recovering = np.zeros(num_envs, np.bool_)
        self.failed_some = False
        self.columns = Columns(num_envs, 1, make)
        self.episodes = RunningEpisodes(config, policy_id, num_envs)
        self._lost_some = False
        self._quotas = EnvQuotas(np.zeros(num_envs, np.int64), "env_steps", False)
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
        quotas = self._quotas
        phase, amounts = self.phase[ids], quotas.amounts[ids]
        counts = (
            self.episodes.ended[ids] if quotas.unit == "episodes" else self.columns.num_rows[ids]
        )
        unmet: _Bools = counts < amounts
        if quotas.complete:  # what runs; not what has begun by itself, and was asked nothing
            has_begun = (phase > _WAITING) | (self.episodes.length[ids] > 0)
            unmet |= (phase >= _WAITING) & has_begun & (amounts > 0)
        if self._lost_some:
            unmet &= phase != _LOST
        return unmet

    def going_on(self, ids: _Ints | slice = slice(None)) -> _Bools:
        """Return which envs, of some, are to step: those that are unmet, or run ahead of others."""
        ahead = self._config.run_ahead
        if not (ahead and np.count_nonzero(self.unmet())):
            return self.unmet(ids)
        going_on: _Bools = self.columns.num_rows[ids] < self._quotas.amounts[ids] + ahead
        if self._lost_some:
            going_on &= self.phase[ids] != _LOST
        return going_on

    def steps_together(self) -> int:
        """Return by how many steps all envs can go on before one has contributed its part.

        0 where parts are episodes, which end when they end.
        """
        quotas = self._quotas
        if quotas.complete:
            return 0
        return int(np.min(quotas.amounts - self.columns.num_rows))

    # --- what happens ------------------------------------------------------------------------

    def lose(self, env_ids: Sequence[int]) -> None:
        """These envs were given up."""
        self.phase[env_ids] = _LOST
        self._lost_some |= bool(env_ids)

    def reset(self) -> None:
        """All envs begin new episodes; no row stays."""
        if self._config.run_ahead:
            self._metrics.add_dropped_rows(int((self.columns.num_rows - self._left).sum()))
        self.phase[self.live] = _RESETTING
        self.columns.num_rows[:] = self._left[:] = 0
        self._over.clear()

    def begin(self, quotas: EnvQuotas) -> None:
        """A fragment begins, with what the one before has left."""
        self._quotas = quotas
        episodes, old, left = self.episodes, self.columns, self._left
        kept = old.num_rows - left
        capacity = 0
        if quotas.unit != "episodes":
            capacity = int(np.max(quotas.amounts, initial=0)) + self._config.run_ahead
        self.columns = old.following(capacity, kept, self.phase == _STEPPING)
        episodes.first_row = np.maximum(episodes.first_row - left, 0)
        self._left = np.zeros_like(left)
        #: Of whose episodes no row stands here yet.
        fresh = np.flatnonzero(self.running & (episodes.first_row == kept))
        self.columns.begin(
            fresh,
            eps_id=episodes.ids.running[fresh],
            incarnation=episodes.incarnation[fresh],
            t=episodes.length[fresh],
        )
        episodes.ended[:] = 0
        self._faults = []

    def begin_episodes(self, ids: _Ints, incarnations: _Ints) -> None:
        """The first observations of these envs' next episodes are there."""
        self.episodes.begin(ids, incarnations, self.columns.num_rows[ids])
        eps_id = self.episodes.ids.running[ids]
        self.columns.begin(ids, eps_id=eps_id, incarnation=incarnations)

    def take_steps(
        self,
        ids: _Ints,
        observations: Tree,
        rewards: npt.NDArray[np.float64],
        terminated: _Bools,
        truncated: _Bools,
        recorded: npt.NDArray[Any],
    ) -> bool:
        """These envs have stepped; return whether an episode has ended.

        `rewards` are what episodes have, `recorded` what the columns have.
        """
        self.columns.complete(ids, observations, recorded, terminated, truncated)
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
                self._end_episode(env_id, False, False, dropped=kept)
            else:
                if kept:
                    columns.truncate(env_id)
                columns.rewind(env_id, int(columns.num_rows[env_id]))
                self._end_episode(env_id, False, False, dropped=0)
        # The first observation of its next episode comes by itself.
        self.phase[env_id] = _LOST if fault.given_up else _RESETTING
        self.recovering[env_id] = not fault.given_up
        self.failed_some = True
        self._lost_some |= fault.given_up

    def end(self, late: tuple[int, ...], unroll_id: int) -> Sample:
        """The fragment ends, here and now; rows beyond what was asked for stay for the next one."""
        counts, running, episodes = self.columns.num_rows, self.running, self.episodes
        if self._quotas.complete:  # those that run stay
            counts = np.where(running, episodes.first_row, counts)
        elif self._config.run_ahead:  # of those that were given up nothing follows
            counts = np.where(self.live, np.minimum(counts, self._quotas.amounts), counts)
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
        self, env_id: int, terminated: bool, truncated: bool, dropped: int | None = None
    ) -> None:
        first_row = int(self.episodes.first_row[env_id])
        stop_row = int(self.columns.num_rows[env_id])
        has_rows = stop_row > first_row
        result = self.episodes.result(env_id, terminated, truncated, dropped, has_rows=has_rows)
        self._over.append(_Over(first_row, stop_row, result))
        if self._hear_of_end is not None:
            self._hear_of_end(result=result)

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
