"""Rows of many envs side by side, `(N, T)`, written by batches of envs. Pure.

What `trajectory.py` is for one agent, for N envs with one agent each, without a Python object per
row. Leaves out where rows come from (`column_sampler.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.runner.batch import SampleBatch
from envbus.runner.nested import Tree, leaves_of, map_tree
from envbus.runner.trajectory import AgentID, agent_id_column

__all__ = ["Columns", "Make"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]
#: Where rows stand: an index of arrays `(N * T, ...)`.
_Places: TypeAlias = "_Ints | slice"
#: `(shape, dtype) -> array` of arbitrary content where a column is wanted; None: nowhere special.
Make: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], "npt.NDArray[Any] | None"]


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
        #: Large arrays of earlier fragments; those that nobody else has a reference to are used
        #: again: the system takes longer to hand out fresh memory than to copy as much.
        self._spares: list[npt.NDArray[Any]] = []
        for name, dtype in (("rewards", np.float32), ("terminateds", bool), ("truncateds", bool)):
            self._allocate(name, np.zeros((0,), dtype))
        #: What holds from a row on, for the rest of its episode, where `marked` is set.
        self._marked: _Bools = np.zeros((num_envs, self._capacity), np.bool_)
        self._marks = {name: np.zeros_like(self._marked, np.int64) for name in _MARKS}
        #: Which weights chose the actions, from a row on; 0 where the row before says it.
        self._versions: _Ints = np.zeros((num_envs, self._capacity), np.int64)
        #: Whose rows `observe` has begun last, and their places, as long as those hold.
        self._begun: tuple[_Ints | None, _Places] = (None, slice(0))

    def begin(
        self,
        env_ids: _Ints,
        *,
        eps_id: _Ints,
        incarnation: _Ints,
        t: _Ints | int = 0,
    ) -> None:
        """An episode begins, or goes on from an earlier fragment, with the next row of each env."""
        places = self._next_rows(env_ids)
        self._marked.reshape(-1)[places] = True
        for name, values in (("eps_id", eps_id), ("incarnation", incarnation), ("t", t)):
            self._marks[name].reshape(-1)[places] = values

    def observe(self, env_ids: _Ints, observations: Tree) -> Tree:
        """Begin a row of each env, and return the observations in the memory of the fragment.

        They are views where the rows are evenly spaced, as they are of neighbouring envs in step.

        Raises:
            ValueError: Shapes are not those of earlier rows.
        """
        places = self._next_rows(env_ids)
        self._begun = env_ids, places
        self._write("obs", places, observations)
        tree = self._trees["obs"]
        if isinstance(tree, np.ndarray):
            return tree[places]
        return map_tree(lambda leaf: leaf[places], tree)

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
        begun, places = self._begun
        if begun is not env_ids:
            places = self._next_rows(env_ids)
        self._write("actions", places, actions)
        for name, values in extras.items():
            self._write(name, places, values)
        self._versions.reshape(-1)[places] = policy_version

    def complete(
        self,
        env_ids: _Ints,
        next_observations: Tree,
        rewards: npt.NDArray[Any],
        terminateds: _Bools,
        truncateds: _Bools,
    ) -> None:
        """Close the open row of each env."""
        begun, places = self._begun
        if begun is not env_ids:
            places = self._places(env_ids)
        self._write("next_obs", places, next_observations)
        self._trees["rewards"][places] = rewards
        self._trees["terminateds"][places] = terminateds
        self._trees["truncateds"][places] = truncateds
        if len(env_ids) == self._num_envs:
            self.num_rows += 1
        else:
            self.num_rows[env_ids] += 1
        self._most_rows += 1
        self._begun = None, places

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
        columns = Columns(self._num_envs, max(capacity, int(taken.max(initial=0))), self._make)
        columns._extras = self._extras
        columns._spares = self._spares
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
        columns._most_rows = int(kept.max())
        columns._spare(self._trees)
        return columns

    def _next_rows(self, env_ids: _Ints) -> _Places:
        """Return the places of the next rows; there is room for them then."""
        if self._most_rows >= self._capacity:
            self._most_rows = int(self.num_rows.max())
            if np.count_nonzero(self.num_rows[env_ids] >= self._capacity):
                self._grow()
        return self._places(env_ids)

    def _places(self, env_ids: _Ints) -> _Places:
        """Return where the row stands that follows each env's complete ones.

        Those of neighbouring envs in step are evenly spaced, and a slice is read and written in a
        fraction of the time.
        """
        count, apart = len(env_ids), self._capacity
        rows = self.num_rows if count == self._num_envs else self.num_rows[env_ids]
        places: _Ints = env_ids * apart + rows
        if count == 0 or (count > 1 and np.count_nonzero(places[1:] - places[:-1] != apart)):
            return places
        first = int(places[0])
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
        if made is not None:
            return made
        spares = self._spares
        for index in range(len(spares)):
            # Two: the list's, and the argument.
            if (
                spares[index].shape == shape
                and spares[index].dtype == leaf.dtype
                and sys.getrefcount(spares[index]) <= 2
            ):
                return spares.pop(index)
        return np.empty(shape, leaf.dtype)

    def _spare(self, trees: Mapping[str, Tree]) -> None:
        """Keep what may be used again: of two fragments, as the caller may still have the last."""
        found = [
            leaf
            for tree in trees.values()
            for _, leaf in leaves_of(tree)
            if leaf.nbytes >= _LARGE and leaf.flags.owndata
        ]
        self._spares += found
        most = 2 * len(found)
        del self._spares[: max(len(self._spares) - most, 0)]

    def _allocate(self, name: str, rows: Tree) -> None:
        self._trees[name] = map_tree(lambda leaf: self._like(np.asarray(leaf)), rows)

    def _write(self, name: str, places: _Places, rows: Tree) -> None:
        if name not in self._trees:
            self._allocate(name, rows)
        tree = self._trees[name]
        if (  # the usual case, without a call per leaf
            isinstance(tree, np.ndarray)
            and rows.dtype == tree.dtype
            and rows.shape[1:] == tree.shape[1:]
        ):
            tree[places] = rows
            return
        self._trees[name] = map_tree(
            lambda leaf, values: _put(name, leaf, places, np.asarray(values)), tree, rows
        )


#: Bytes from which on an array is worth to be kept.
_LARGE = 1 << 18
_MARKS = ("eps_id", "incarnation", "t")


def _put(
    name: str, leaf: npt.NDArray[Any], places: _Places, values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Write, and return the array written to: a wider one where a value needs it."""
    if values.shape[1:] != leaf.shape[1:]:
        raise ValueError(f"{name} has shape {values.shape[1:]}, earlier rows {leaf.shape[1:]}")
    if values.dtype != leaf.dtype:
        leaf = leaf.astype(np.result_type(values.dtype, leaf.dtype), copy=False)
    leaf[places] = values
    return leaf
