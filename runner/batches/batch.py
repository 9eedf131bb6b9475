"""What sampling returns: transitions as columns of NumPy arrays, per policy. Pure.

Leaves out how rows are recorded (`episode.py`) and what is computed from them (`advantages.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from envbus.bus.settings import positive_int
from envbus.runner.batches.nested import JoinArrays, Tree, concatenate_trees, leaves_of, map_tree

__all__ = ["COLUMN_DTYPES", "Chunks", "MultiAgentBatch", "SampleBatch"]

#: Chooses rows: a slice gives views; a mask or indices, `(n,)`, give copies.
Rows: TypeAlias = "slice | npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]"

#: Columns of one number per row, `(rows,)`, and their dtypes. Rewards are float32, as losses and
#: networks take them: a float64 column would widen, or be refused by, all that it meets. They are
#: summed in float64 before (rewards that accumulate, returns of episodes).
COLUMN_DTYPES: Mapping[str, np.dtype[Any]] = {
    "rewards": np.dtype(np.float32),
    "terminateds": np.dtype(np.bool_),
    "truncateds": np.dtype(np.bool_),
    #: False: there was no last observation, `next_obs` is blank and no value may be taken of it.
    "next_obs_valid": np.dtype(np.bool_),
    "eps_id": np.dtype(np.int64),
    "env_id": np.dtype(np.int64),
    #: Which life of the env slot.
    "incarnation": np.dtype(np.int64),
    #: Env step of the episode, from 0, that completed the transition.
    "t": np.dtype(np.int64),
    #: Which weights chose the action; -1: none, it is `off_policy`.
    "policy_version": np.dtype(np.int64),
    #: The action was chosen elsewhere, by an external simulator: `action_logp` is NaN. There is
    #: such a column wherever there may be such rows.
    "off_policy": np.dtype(np.bool_),
    #: Which fragment the row came in; no two calls of `sample` share one.
    "unroll_id": np.dtype(np.int64),
}


#: Columns of recurrent states: before and after each row.
_STATES = ("state_in", "state_out")


class Chunks(NamedTuple):
    """Trajectories cut into chunks: what `SampleBatch.chunked` returns."""

    #: `(max_seq_len, N, ...)` of N chunks, or `(rows, ...)`; without states.
    columns: dict[str, Tree]
    #: Rows of each chunk, `(N,)` int64.
    seq_lens: npt.NDArray[np.int64]
    #: Before the first row of each chunk, `(N, ...)`; None of a policy without a state.
    states: Tree


class SampleBatch:
    """Transitions of one policy: named columns with one row per transition.

    A column is an array `(rows, ...)`, or, for Dict and Tuple spaces, a dict or tuple of such.
    Recorded are

    - `obs`, `actions`, `next_obs`: in the dtype of what env and policy gave;
    - `COLUMN_DTYPES`: one number per row;
    - `agent_id`: strings, or int64 if all ids are integers;
    - `infos`: objects (dicts), on request; they belong to the step that completed the row;
    - `state_in`, `state_out`, `action_logp`, `vf_preds`, ...: whatever else the policy gave.

    Rows of one agent's episode stand together, in the order of time. Arrays may be views of each
    other (`obs` and `next_obs` of a fragment are): copy before writing to them.

    Args:
        columns: Kept, not copied.

    Raises:
        ValueError: Two columns have different numbers of rows, or one has the wrong shape.
        TypeError: A column is not an array, or has another dtype than `COLUMN_DTYPES` says.
    """

    __slots__ = ("columns", "num_rows")

    def __init__(self, columns: Mapping[str, Tree]) -> None:
        self.columns: dict[str, Tree] = dict(columns)
        self.num_rows = _check(self.columns)

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iterate over batch.columns, or over batch.split_by_trajectory()")

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Rows) -> SampleBatch: ...
    def __getitem__(self, key: str | Rows) -> Any:
        if isinstance(key, str):
            try:
                return self.columns[key]
            except KeyError:
                raise KeyError(f"no column {key!r}; there are {sorted(self.columns)}") from None
        if not isinstance(key, slice | np.ndarray):
            raise TypeError(
                f"a batch is indexed by a column's name, a slice, a mask or an array of rows, not "
                f"{key!r}"
            )
        if isinstance(key, np.ndarray) and key.dtype == np.bool_ and key.shape != (len(self),):
            raise ValueError(f"a mask over {len(self)} rows has shape {key.shape}")
        columns = {
            name: map_tree(lambda leaf: leaf[key], column) for name, column in self.columns.items()
        }
        return _unchecked(columns, len(np.broadcast_to(np.True_, len(self))[key]))

    def __repr__(self) -> str:
        return f"SampleBatch({len(self)} rows: {', '.join(self.columns)})"

    def __reduce__(self) -> tuple[object, ...]:
        return SampleBatch, (self.columns,)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns; what objects (infos) hold is not counted."""
        return sum(leaf.nbytes for _, leaf in leaves_of(self.columns))

    def with_columns(self, **columns: Tree) -> SampleBatch:
        """Return a batch with more, or other, columns; the arrays are shared.

        Raises:
            ValueError, TypeError: As when a batch is made.
        """
        return SampleBatch({**self.columns, **columns})

    @classmethod
    def concatenate(
        cls, batches: Iterable[SampleBatch], join: JoinArrays = np.concatenate
    ) -> SampleBatch:
        """Return the rows of all, in their order, in new memory. Empty batches count for nothing.

        `join` joins the arrays of a column.

        Raises:
            ValueError: They have different columns, or columns of different structure or shape.
        """
        parts = [batch for batch in batches if len(batch)]
        if not parts:
            return _unchecked({}, 0)
        names = parts[0].columns.keys()
        for part in parts:
            if part.columns.keys() != names:
                odd = sorted(part.columns.keys() ^ names)
                raise ValueError(f"batches cannot be joined: only some have the columns {odd}")
        columns = {}
        for name in names:
            trees = [part.columns[name] for part in parts]
            if name == "agent_id" and len({tree.dtype.kind for tree in trees}) > 1:
                trees = [tree.astype(np.str_) for tree in trees]
            columns[name] = concatenate_trees(trees, name, join)
        return _unchecked(columns, sum(len(part) for part in parts))

    @classmethod
    def from_time_major(cls, columns: Mapping[str, Tree]) -> SampleBatch:
        """Return rows from arrays `(T, N, ...)`: step by step, all envs of a step together.

        Contiguous arrays are not copied. `time_major(N, order="time")` is the way back.

        Raises:
            ValueError: An array has fewer than two axes, or its first two differ from another's.
        """
        shapes = {leaf.shape[:2] for _, leaf in leaves_of(dict(columns))}
        if len(shapes) > 1 or any(len(shape) < 2 for shape in shapes):
            raise ValueError(f"columns must all be (T, N, ...), not {sorted(shapes)}")
        rows = {
            name: map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), column)
            for name, column in columns.items()
        }
        return cls(rows)

    def time_major(
        self, num_trajectories: int, *, order: Literal["trajectory", "time"] = "trajectory"
    ) -> dict[str, Tree]:
        """Return the columns as views `(T, N, ...)`; nothing is ever copied.

        Args:
            num_trajectories: N.
            order: How the rows lie: one env slot's T rows after the other's ("trajectory", what
                concatenated fragments of equal length are), or step by step ("time", what
                `from_time_major` makes).

        Raises:
            ValueError: The rows do not divide by N, or `env_id` or `agent_id` shows that they lie
                otherwise.
        """
        count = num_trajectories
        if count < 1 or len(self) % count:
            raise ValueError(f"{len(self)} rows do not make {count} trajectories of equal length")

        def view(leaf: npt.NDArray[Any]) -> Any:
            # Splitting the first axis is a view whatever the strides are.
            if order == "time":
                return leaf.reshape(-1, count, *leaf.shape[1:])
            return leaf.reshape(count, -1, *leaf.shape[1:]).swapaxes(0, 1)

        views = {name: map_tree(view, column) for name, column in self.columns.items()}
        for name in ("env_id", "agent_id"):
            if name in views and (views[name] != views[name][:1]).any():
                raise ValueError(
                    f"{name} changes within a column of (T={len(self) // count}, N={count}): the "
                    f"rows do not lie in the order of {order!r}, or fragments differ in length"
                )
        return views

    def padded(
        self, length: int | None = None, *, by: Literal["trajectory", "env"] = "trajectory"
    ) -> tuple[dict[str, Tree], npt.NDArray[np.bool_]]:
        """Return columns `(T, N, ...)` of runs of unequal length, and which rows are real.

        Rows that fill a run up are zeros (None where rows are objects). For sequence models, and
        for samples with envs that have contributed less than the others.

        Args:
            length: T, to which longer runs are cut; None: that of the longest.
            by: What a run is: what `split_by_trajectory` returns, or all rows of one env slot and
                agent that stand together.

        Returns:
            The columns, in new memory, and `(T, N)` bool: False where there was no row.
        """
        starts = self.trajectory_starts() if by == "trajectory" else self._starts("env_id")
        first = np.flatnonzero(starts)
        counts = np.diff(first, append=len(self))
        steps = int(counts.max(initial=0)) if length is None else length
        return _spread(self.columns, first, counts, steps)

    def chunked(self, max_seq_len: int, *, pad: bool = True) -> Chunks:
        """Return trajectories in chunks of at most `max_seq_len` rows, each with one state.

        For recurrent models: the state is that before a chunk's first row, `state_in`. The states
        of all other rows are left out.

        Args:
            max_seq_len: A trajectory's chunks are that long, but for its last.
            pad: Columns are `(max_seq_len, N, ...)` of N chunks, in new memory, filled up with
                zeros (None where rows are objects). False: they are the rows as they are, `(rows,
                ...)`, one chunk after the other.

        Raises:
            ConfigError: `max_seq_len` is no positive integer.
        """
        max_seq_len = positive_int("max_seq_len", max_seq_len)
        begins = np.flatnonzero(self.trajectory_starts())
        counts = np.diff(begins, append=len(self))
        numbers = -(-counts // max_seq_len)  # of chunks
        run = np.repeat(np.arange(len(begins)), numbers)
        place = np.arange(len(run)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        first = begins[run] + max_seq_len * place
        seq_lens = np.minimum((begins + counts)[run] - first, max_seq_len)
        states = None
        if "state_in" in self.columns:
            states = map_tree(lambda leaf: leaf[first], self.columns["state_in"])
        columns = {name: column for name, column in self.columns.items() if name not in _STATES}
        if pad:
            columns, _ = _spread(columns, first, seq_lens, max_seq_len)
        return Chunks(columns, seq_lens, states)

    def trajectory_starts(self) -> npt.NDArray[np.bool_]:
        """Return where a row does not continue the one before: `(rows,)` bool.

        It continues it if episode and agent are the same, `t` is later, and the one before neither
        terminated nor truncated. In another unroll `t` has to be the next one: rows in between may
        be missing, as of an observation without an answer, and the one before had left by then.
        These columns are used as far as there are any of them.
        """
        starts = self._starts("eps_id")
        if "t" in self.columns:
            later = np.diff(self.columns["t"])
            starts[1:] |= later <= 0
            if "unroll_id" in self.columns:
                starts[1:] |= (np.diff(self.columns["unroll_id"]) != 0) & (later > 1)
        for name in ("terminateds", "truncateds"):
            if name in self.columns:
                starts[1:] |= self.columns[name][:-1]
        return starts

    def split_by_trajectory(self) -> list[SampleBatch]:
        """Return views of the runs that `trajectory_starts` tells apart."""
        return self._split(self.trajectory_starts())

    def map_trajectories(self, function: Callable[[SampleBatch], SampleBatch]) -> SampleBatch:
        """Return what a function makes of each trajectory, one after the other, in new memory.

        Raises:
            ValueError: As `concatenate`.
        """
        return SampleBatch.concatenate(map(function, self.split_by_trajectory()))

    def split_by_episode(self) -> list[SampleBatch]:
        """Return views of the runs of rows with one `eps_id`, whatever their agents.

        Raises:
            KeyError: There is no column `eps_id`.
        """
        ids = self["eps_id"]
        starts = np.ones(len(self), np.bool_)
        starts[1:] = ids[1:] != ids[:-1]
        return self._split(starts)

    def _starts(self, name: str) -> npt.NDArray[np.bool_]:
        """Return where `name`, or the agent, is another than in the row before."""
        starts = np.zeros(len(self), np.bool_)
        starts[:1] = True
        for column in (name, "agent_id"):
            if column in self.columns:
                starts[1:] |= self.columns[column][1:] != self.columns[column][:-1]
        return starts

    def _split(self, starts: npt.NDArray[np.bool_]) -> list[SampleBatch]:
        edges = [*np.flatnonzero(starts).tolist(), len(self)]
        return [self[start:stop] for start, stop in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class MultiAgentBatch:
    """Transitions by policy id: batches never mix policies, nor their columns."""

    policy_batches: Mapping[str, SampleBatch]
    #: Env steps that were taken for these rows, also those in which no agent acted.
    env_steps: int

    @property
    def agent_steps(self) -> int:
        """Transitions of all agents."""
        return sum(len(batch) for batch in self.policy_batches.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(batch.nbytes for batch in self.policy_batches.values())

    def __len__(self) -> int:
        return self.env_steps

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self.policy_batches

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iterate over batch.policy_batches.items(), or over batch.single().columns")

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self.policy_batches[policy_id]
        except KeyError:
            known = sorted(self.policy_batches)
            raise KeyError(f"no rows of policy {policy_id!r}; there are some of {known}") from None

    def single(self) -> SampleBatch:
        """Return the one policy's batch.

        Raises:
            ValueError: There are rows of several policies, or of none.
        """
        if not self.policy_batches:
            raise ValueError(self._why_empty())
        if len(self.policy_batches) != 1:
            ids = sorted(self.policy_batches)
            raise ValueError(f"rows of {ids}, not of one policy: take each by its id, [{ids[0]!r}]")
        return next(iter(self.policy_batches.values()))

    def _why_empty(self) -> str:
        """Say why there may be no rows, and what to do."""
        return "there are no rows of any policy; skip it where `agent_steps` is 0"

    @classmethod
    def of(
        cls,
        parts: Iterable[tuple[str, SampleBatch]],
        env_steps: int,
        join: JoinArrays = np.concatenate,
    ) -> MultiAgentBatch:
        """Return the pairs of policy id and rows joined per policy, rows in their order.

        Raises:
            ValueError: Rows of one policy have different columns; it is named.
        """
        by_policy: dict[str, list[SampleBatch]] = {}
        for policy_id, batch in parts:
            by_policy.setdefault(policy_id, []).append(batch)
        joined = {}
        for policy_id, batches in by_policy.items():
            try:
                joined[policy_id] = SampleBatch.concatenate(batches, join)
            except ValueError as exc:
                raise ValueError(
                    f"policy {policy_id!r}: {exc}; its agents must have the same spaces and "
                    "columns. After another policy was put in its place, episodes that run keep "
                    "the one before: where the columns differ, sample with force_reset=True next"
                ) from None
        return cls(joined, env_steps)

    @classmethod
    def concatenate(
        cls, batches: Sequence[MultiAgentBatch], join: JoinArrays = np.concatenate
    ) -> MultiAgentBatch:
        """Return the rows of all, per policy, and the sum of their env steps.

        Raises:
            ValueError: As `of`.
        """
        pairs = [pair for batch in batches for pair in batch.policy_batches.items()]
        return cls.of(pairs, sum(batch.env_steps for batch in batches), join)


def _spread(
    columns: Mapping[str, Tree],
    first: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    steps: int,
) -> tuple[dict[str, Tree], npt.NDArray[np.bool_]]:
    """Return runs of rows as `(steps, runs, ...)`, and which of those are rows, `(steps, runs)`.

    Args:
        columns: With all rows.
        first: Row that each run begins with.
        counts: Rows of each run; more than `steps` are left out.
        steps: Of each run.
    """
    place = np.arange(steps)[:, np.newaxis]
    valid = place < counts
    rows = (place + first)[valid]

    def spread(leaf: npt.NDArray[Any]) -> Any:
        out = np.zeros((*valid.shape, *leaf.shape[1:]), leaf.dtype)
        if leaf.dtype == np.object_:
            out[...] = None
        out[valid] = leaf[rows]
        return out

    return {name: map_tree(spread, column) for name, column in columns.items()}, valid


def _unchecked(columns: dict[str, Tree], num_rows: int) -> SampleBatch:
    """Return a batch of columns that come from a checked one."""
    batch = SampleBatch.__new__(SampleBatch)
    batch.columns = columns
    batch.num_rows = num_rows
    return batch


def _check(columns: Mapping[str, Tree]) -> int:
    """Return the number of rows, or raise."""
    num_rows, counted = -1, ""
    for name, column in columns.items():
        wanted = COLUMN_DTYPES.get(name)
        for path, leaf in leaves_of(column, name):
            if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
                raise TypeError(f"column {path} must be an array (rows, ...), not {leaf!r:.80}")
            if num_rows < 0:
                num_rows, counted = len(leaf), path
            elif len(leaf) != num_rows:
                raise ValueError(
                    f"column {path} has {len(leaf)} rows and column {counted} {num_rows}"
                )
            if wanted is not None and leaf.dtype != wanted:
                raise TypeError(f"column {path} must be of {wanted}, not of {leaf.dtype}")
            if wanted is not None and leaf.ndim != 1:
                raise ValueError(f"column {path} must be (rows,), not {leaf.shape}")
    return max(num_rows, 0)
