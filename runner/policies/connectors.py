"""Small steps between env and policy: what observations, actions and rewards become. Pure.

A connector takes a batch `(rows, ...)`, an array or dicts and tuples of arrays as the space has
them, and returns another; it writes to nothing that it was given. What the policy gave stays in
the batch of transitions; what the action connectors make of it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.spaces.utils import flatten_space
from gymnasium.vector.utils import batch_space

from envbus.actors.spaces.spaces import Space
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.bus.settings import check_number, positive_int
from envbus.runner.batches.nested import Tree, leaves_of, map_tree
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.workers.config import check_kind

__all__ = [
    "ClipActions",
    "ClipRewards",
    "Connector",
    "ConnectorError",
    "Flatten",
    "FrameStack",
    "FreezeActions",
    "Keys",
    "Normalize",
    "OneHot",
    "Pipeline",
    "RescaleActions",
    "RunningMeanStd",
    "State",
    "connected_rewards",
    "given_space",
    "map_leaf_spaces",
    "map_space",
    "single_connectors",
]

#: Which env slot and agent each row belongs to.
Keys: TypeAlias = Sequence[tuple[int, AgentID]]
State: TypeAlias = Mapping[str, Any]
_Kind: TypeAlias = "type[Any] | tuple[type[Any], ...]"


class ConnectorError(EnvbusError):
    """A connector failed; the message names it, the cause is what it raised."""


class Connector:
    """One step.

    Attributes:
        space: Of what comes out, one row of it. Of an action connector: of what comes in, the
            actions that the policy is to give.
        update: Whether to learn from what comes in; the owner's to set, for evaluation. In a
            group, that of the group's `config` holds for all runners, from their next samples on.
        is_evaluated: The runner samples without `explore`: nothing is to be learnt.
    """

    space: Space
    update: bool = True
    is_evaluated: bool = False

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return what `batch` becomes."""
        raise NotImplementedError

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return what would become `batch`; of an action connector, which see actions of others.

        An env's own action (off-policy, of an external simulator) stands in the batch of
        transitions as the policy would have given it.

        Raises:
            NotImplementedError: It cannot be undone.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot tell what an action was before it")

    def reset(self, env_ids: Iterable[int]) -> None:
        """Begin new episodes: forget what is kept of the envs' agents."""

    def get_metrics(self) -> dict[str, float]:
        """Return what it has measured, for `connector_metrics` of a runner's metrics."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Return what was learnt so far, not what belongs to running episodes."""
        return {}

    def set_state(self, state: State) -> None:
        """Take over what `get_state` returned, in the place of what was learnt here."""

    def collect_delta(self) -> dict[str, Any]:
        """Return what was learnt since the last call, as a state for `merge`, and begin anew."""
        return {}

    def sync(self, state: State) -> None:
        """Take over a merged state, and keep what was learnt since `collect_delta`."""

    def merge(self, state: State, deltas: Iterable[State]) -> dict[str, Any]:
        """Return `state` with what others have learnt; nothing changes here."""
        del deltas
        return dict(state)


class Pipeline(Connector):
    """Connectors one after the other.

    Raises:
        ConnectorError: From any call, if a connector raises; it is named.
    """

    def __init__(self, connectors: Iterable[Connector]) -> None:
        self.connectors = {
            f"{index}:{type(connector).__name__}": connector
            for index, connector in enumerate(connectors)
        }

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return what the last connector makes of what the others made of `batch`."""
        for name, connector in self.connectors.items():
            try:
                batch = self.apply(connector, batch, keys)
            except Exception as exc:
                raise _failure(name, exc) from exc
        return batch

    def apply(self, connector: Connector, batch: Tree, keys: Keys) -> Tree:
        """Return what one of the connectors makes of a batch."""
        return connector(batch, keys)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return what the first connector would have been given, to give `batch` in the end."""
        for name, connector in reversed(self.connectors.items()):
            try:
                batch = connector.invert(batch, keys)
            except Exception as exc:
                raise _failure(name, exc) from exc
        return batch

    def reset(self, env_ids: Iterable[int]) -> None:
        """Reset all."""
        ids = list(env_ids)
        for connector in self.connectors.values():
            connector.reset(ids)

    def get_state(self) -> dict[str, Any]:
        """Return the states by the connectors' names."""
        return {name: connector.get_state() for name, connector in self.connectors.items()}

    def set_state(self, state: State) -> None:
        """Set all states.

        Raises:
            ConfigError: They are of other connectors.
        """
        self._check(state)
        for name, connector in self.connectors.items():
            connector.set_state(state[name])

    def collect_delta(self) -> dict[str, Any]:
        """Return the deltas by the connectors' names."""
        return {name: connector.collect_delta() for name, connector in self.connectors.items()}

    def sync(self, state: State) -> None:
        """Sync all; raises as `set_state`."""
        self._check(state)
        for name, connector in self.connectors.items():
            connector.sync(state[name])

    def merge(self, state: State, deltas: Iterable[State]) -> dict[str, Any]:
        """Merge per connector; raises as `set_state`."""
        parts = list(deltas)
        for part in (state, *parts):
            self._check(part)
        return {
            name: connector.merge(state[name], [part[name] for part in parts])
            for name, connector in self.connectors.items()
        }

    def _check(self, state: State) -> None:
        if state.keys() != self.connectors.keys():
            raise ConfigError(
                f"a state of the connectors {list(state)} does not fit {list(self.connectors)}"
            )


def _failure(name: str, error: Exception) -> ConnectorError:
    return ConnectorError(f"connector {name} failed: {type(error).__name__}: {error}")


def single_connectors(name: str, connector: Connector) -> dict[str, Connector]:
    """Return a connector by a name, or those of a pipeline, each by a name of its own."""
    if type(connector) is not Pipeline:  # one derived from it may have a state of its own
        return {name: connector}
    return {
        full_name: one
        for part, inner in connector.connectors.items()
        for full_name, one in single_connectors(f"{name}/{part}", inner).items()
    }


def map_space(
    function: Callable[..., Any], space: Space, batch: Tree, kind: _Kind = gymnasium.Space
) -> Tree:
    """Return a tree like `space`, with `function(part of the space, its arrays)` in each place.

    Only of parts of some kind: those of others are as they are.

    Raises:
        KeyError, TypeError, ValueError: `batch` has not the structure of `space`.
    """
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return {key: map_space(function, part, batch[key], kind) for key, part in parts}
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, batch, strict=True)
        return tuple(map_space(function, part, item, kind) for part, item in pairs)
    return function(space, batch) if isinstance(space, kind) else batch


def map_leaf_spaces(
    function: Callable[..., Any], space: Space, kind: _Kind = gymnasium.Space
) -> Any:
    """Return a space like `space`, with `function(part)` in the place of each Box, Discrete, ...

    Only of those of some kind.
    """
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return spaces.Dict([(key, map_leaf_spaces(function, part, kind)) for key, part in parts])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaf_spaces(function, part, kind) for part in space.spaces])
    return function(space) if isinstance(space, kind) else space


# --- observations ----------------------------------------------------------------------------


#: What larger numbers count as: squares of these can be added up for ever.
_LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class RunningMeanStd:
    """Mean and variance of rows of several arrays at once, which come in batches and are merged.

    A value: nothing changes it. `RunningMeanStd()` is that of no rows and merges with all.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", Stanford STAN-CS-79-773, 1979: for parts A and B, with `d` the
    difference of their means, `mean = mean_A + d * n_B / n` and `M2 = M2_A + M2_B + d^2 * n_A *
    n_B / n`. It does not cancel as the difference of the mean square and the squared mean does.
    """

    #: Rows.
    count: int = 0
    #: Per array, float64, shape of a row.
    means: tuple[npt.NDArray[np.float64], ...] = ()
    #: Sums of squared deviations from the mean, likewise.
    m2s: tuple[npt.NDArray[np.float64], ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[npt.NDArray[Any]]) -> RunningMeanStd:
        """Return the statistics of arrays `(rows, ...)`, without rows that hold infinities.

        Nothing would ever wash these out again, but some sensors mean them.

        Raises:
            ValueError: A row holds NaN.
        """
        if not arrays or not len(arrays[0]):
            return cls()
        if not all(np.isfinite(array).all() for array in arrays):
            if any(np.isnan(array).any() for array in arrays):
                raise ValueError("an observation holds NaN")
            parts = [np.isfinite(array).reshape(len(array), -1).all(axis=1) for array in arrays]
            finite = np.all(parts, axis=0)
            return cls.of([array[finite] for array in arrays])
        rows = [np.clip(array.astype(np.float64), -_LARGEST, _LARGEST) for array in arrays]
        means = tuple(array.mean(axis=0) for array in rows)
        m2s = tuple(
            np.square(array - mean).sum(axis=0) for array, mean in zip(rows, means, strict=True)
        )
        return cls(len(rows[0]), means, m2s)

    def merge(self, other: RunningMeanStd) -> RunningMeanStd:
        """Return the statistics of both sets of rows together.

        Raises:
            ValueError: They are of arrays of different numbers or shapes.
        """
        if not self.count or not other.count:
            return self if self.count else other
        shapes = [mean.shape for mean in self.means]
        if shapes != [mean.shape for mean in other.means]:
            raise ValueError(
                f"rows of shapes {shapes} and {[mean.shape for mean in other.means]} do not merge"
            )
        count = self.count + other.count
        means, m2s = [], []
        for mean, m2, mean_b, m2_b in zip(
            self.means, self.m2s, other.means, other.m2s, strict=True
        ):
            difference = mean_b - mean
            means.append(mean + difference * (other.count / count))
            m2s.append(m2 + m2_b + np.square(difference) * (self.count * other.count / count))
        return RunningMeanStd(count, tuple(means), tuple(m2s))

    def variances(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Return the variance of the rows (not an estimate from a sample); 0 without any."""
        return tuple(m2 / max(self.count, 1) for m2 in self.m2s)

    def to_plain(self) -> dict[str, Any]:
        """Return numbers, lists and arrays."""
        return {"count": self.count, "means": list(self.means), "m2s": list(self.m2s)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunningMeanStd:
        """Return what `to_plain` was called on."""
        means, m2s = (
            tuple(np.array(array, np.float64) for array in plain[name]) for name in ("means", "m2s")
        )
        return cls(int(plain["count"]), means, m2s)


_WHOLE = (spaces.Discrete, spaces.MultiDiscrete)
#: Spaces whose elements Gymnasium flattens, and that have one shape.
_FLAT = (*_WHOLE, spaces.Box, spaces.MultiBinary)


class Flatten(Connector):
    """Rows as vectors, `(rows, n)`: Gymnasium's `flatten`, with its dtype and order.

    Raises:
        ConfigError: The space has a part that is not of fixed size.
    """

    def __init__(self, space: Space) -> None:
        _check_space(space)
        odd = [part for part in _leaf_spaces(space) if not isinstance(part, _FLAT)]
        if odd:
            raise ConfigError(
                f"Flatten takes Box, Discrete, MultiDiscrete and MultiBinary, not {odd}"
            )
        self._space = space
        self.space = flatten_space(space)

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return `(rows, n)`."""
        leaves = leaves_of(map_space(_one_hot, self._space, batch, _WHOLE))
        parts = [leaf.reshape(len(keys), -1) for _, leaf in leaves]
        return np.concatenate(parts, axis=1).astype(self.space.dtype, copy=False)


class OneHot(Connector):
    """Discrete parts as float32 vectors, `(rows, n)`, MultiDiscrete ones side by side."""

    def __init__(self, space: Space) -> None:
        _check_space(space)
        self._space = space
        self.space = map_leaf_spaces(
            lambda part: spaces.Box(0.0, 1.0, flatten_space(part).shape, np.float32),
            space,
            _WHOLE,
        )

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return a tree of the same structure."""
        del keys
        return map_space(_one_hot, self._space, batch, _WHOLE)


class FrameStack(Connector):
    """The last `num_frames` observations of each agent, the newest last: `(rows, frames, ...)`.

    An episode begins with its first one repeated, as in Gymnasium's `FrameStackObservation`.
    """

    def __init__(self, space: Space, num_frames: int) -> None:
        _check_space(space)
        self.num_frames = num_frames = positive_int("num_frames", num_frames)
        self.space: Space = batch_space(space, num_frames)
        #: Per env and agent.
        self._frames: dict[int, dict[AgentID, Tree]] = {}

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return the stacks; every row counts as one more observation of its agent."""
        stacked = map_tree(
            lambda leaf: np.repeat(leaf[:, np.newaxis], self.num_frames, axis=1), batch
        )
        for row, (env_id, agent_id) in enumerate(keys):
            agents = self._frames.setdefault(env_id, {})
            if agent_id in agents:
                map_tree(  # the older frames in front of the newest, which it is full of
                    lambda leaf, old, r=row: np.copyto(leaf[r, :-1], old[1:]),
                    stacked,
                    agents[agent_id],
                )
            agents[agent_id] = map_tree(lambda leaf, r=row: leaf[r].copy(), stacked)
        return stacked

    def reset(self, env_ids: Iterable[int]) -> None:
        """Forget the frames of these envs."""
        for env_id in env_ids:
            self._frames.pop(env_id, None)


class Normalize(Connector):
    """Box parts as float32 with mean 0 and variance 1, by what was seen so far.

    Args:
        space: Of what comes in; parts that are no Box stay as they are.
        clip: Bound of what comes out.
        epsilon: Added to the variance.

    It learns from what comes in, unless `update` is off or the runner samples without `explore`.
    An infinity is the bound, and its row is none to learn from.
    Before it has learnt anything, rows are taken for such of mean 0 and variance 1.
    """

    def __init__(self, space: Space, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        _check_space(space)
        check_number("clip", clip, over=0.0)
        check_number("epsilon", epsilon, least=0.0)
        self._space = space
        self.clip = clip
        self.epsilon = epsilon
        self.space = map_leaf_spaces(
            lambda box: spaces.Box(-clip, clip, box.shape, np.float32), space, spaces.Box
        )
        self._statistics = RunningMeanStd()
        self._fresh = RunningMeanStd()
        #: Of the rows of each Box.
        self._shapes = [part.shape for part in _leaf_spaces(space) if isinstance(part, spaces.Box)]

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return the rows, by the statistics that they themselves are part of."""
        del keys
        if self.update and not self.is_evaluated:
            boxes: list[npt.NDArray[Any]] = []
            map_space(lambda _, leaf: boxes.append(leaf), self._space, batch, spaces.Box)
            seen = RunningMeanStd.of(boxes)
            self._statistics = self._statistics.merge(seen)
            self._fresh = self._fresh.merge(seen)
        scales = zip(self._statistics.means, self._statistics.variances(), strict=True)
        has_learnt = self._statistics.count > 0

        def normalize(_: Space, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            scaled = leaf
            if has_learnt:
                mean, variance = next(scales)
                scaled = (leaf - mean) / np.sqrt(variance + self.epsilon)
            clipped: npt.NDArray[Any] = np.clip(scaled, -self.clip, self.clip)
            return clipped.astype(np.float32)

        return map_space(normalize, self._space, batch, spaces.Box)

    def get_state(self) -> dict[str, Any]:
        """Return count, means and sums of squares."""
        return self._statistics.to_plain()

    def set_state(self, state: State) -> None:
        """Go on from another's state.

        Raises:
            ConfigError: It is of other observations, or of none that there can be. Nothing was set.
        """
        self._statistics, self._fresh = self._fitting(state), RunningMeanStd()

    def collect_delta(self) -> dict[str, Any]:
        """Return the statistics of what was seen since the last call."""
        fresh, self._fresh = self._fresh, RunningMeanStd()
        return fresh.to_plain()

    def sync(self, state: State) -> None:
        """Take over merged statistics, with what was seen here meanwhile."""
        self._statistics = self._fitting(state).merge(self._fresh)

    def merge(self, state: State, deltas: Iterable[State]) -> dict[str, Any]:
        """Return the statistics of all rows: each runner's are counted once."""
        merged = self._fitting(state)
        for delta in deltas:
            merged = merged.merge(RunningMeanStd.from_plain(delta))
        return merged.to_plain()

    def _fitting(self, state: State) -> RunningMeanStd:
        """Return the statistics of a state, or raise ConfigError."""
        try:
            statistics = RunningMeanStd.from_plain(state)
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(f"this is no state of a Normalize: {exc!r}") from exc
        shapes = self._shapes if statistics.count else []
        for arrays in (statistics.means, statistics.m2s):
            if [array.shape for array in arrays] != shapes:
                raise ConfigError(
                    f"the state of a Normalize has rows of shapes {[one.shape for one in arrays]}, "
                    f"its space {shapes}: {self._space}"
                )
        if statistics.count < 0 or not all(
            np.isfinite(mean).all() and np.isfinite(m2).all() and (m2 >= 0.0).all()
            for mean, m2 in zip(statistics.means, statistics.m2s, strict=True)
        ):
            raise ConfigError(
                "the state of a Normalize has NaN, infinity, or what is below 0 and cannot be"
            )
        return statistics


def _one_hot(
    space: spaces.Discrete | spaces.MultiDiscrete, values: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    """Return `(rows, n)`, each number of a row a vector of its own, side by side.

    Raises:
        ValueError: A number is outside the space.
    """
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    starts = np.ravel(space.start)
    indices = np.asarray(values).reshape(-1, len(sizes)) - starts
    if ((indices < 0) | (indices >= sizes)).any():
        raise ValueError(f"a value of {np.unique(values)} is outside {space}")
    out = np.zeros((len(indices), int(sizes.sum())), np.float32)
    offsets = np.cumsum(sizes) - sizes
    np.put_along_axis(out, indices + offsets, 1.0, axis=1)
    return out


def _check_space(space: object) -> None:
    check_kind("space", space, gymnasium.Space, example="pool.single_observation_space")


def _leaf_spaces(space: Space) -> list[Space]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [leaf for part in parts for leaf in _leaf_spaces(part)]
    return [space]


# --- actions ---------------------------------------------------------------------------------


class ClipActions(Connector):
    """Box parts brought into their bounds, in the space's dtype.

    Args:
        space: The env's action space; parts that are no Box stay as they are.
    """

    def __init__(self, space: Space) -> None:
        _check_space(space)
        self.space = space

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return actions that the space contains."""
        del keys
        return map_space(_clip, self.space, batch, spaces.Box)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions themselves: they are inside."""
        del keys
        return batch


class RescaleActions(Connector):
    """Box parts from [-1, 1] to the bounds of the space, in its dtype; what is outside is clipped.

    Args:
        space: The env's action space; parts that are no Box stay as they are.

    Raises:
        ConfigError: A Box has an infinite bound.
    """

    def __init__(self, space: Space) -> None:
        _check_space(space)
        self._env_space = space
        self.space = map_leaf_spaces(_unit_space, space, spaces.Box)

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return actions that the space contains."""
        del keys

        def rescale(space: spaces.Box, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            part = np.clip(0.5 * np.asarray(leaf, np.float64) + 0.5, 0.0, 1.0)
            scaled = low * (1.0 - part) + high * part  # `high - low` may be infinite
            # The centre of a Box of integers may lie between two of them.
            if np.issubdtype(space.dtype, np.integer):
                scaled = np.rint(scaled)
            return _clip(space, scaled)

        return map_space(rescale, self._env_space, batch, spaces.Box)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions in [-1, 1], as float32; of a bound that is a point, 0."""
        del keys

        def scale(space: spaces.Box, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            half = np.where(high > low, 0.5 * high - 0.5 * low, 1.0)
            inside = 2.0 * ((0.5 * np.asarray(leaf, np.float64) - 0.5 * low) / half) - 1.0
            return np.where(high > low, inside, 0.0).astype(np.float32)

        return map_space(scale, self._env_space, batch, spaces.Box)


class FreezeActions(Connector):
    """Read-only copies: neither an env nor a callback changes what the policy or the batch holds.

    Goes last; `space` is the env's action space.
    """

    def __init__(self, space: Space) -> None:
        _check_space(space)
        self.space = space

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return the same values in new memory that refuses to be written."""
        del keys

        def freeze(leaf: Any) -> npt.NDArray[Any]:
            frozen = np.array(leaf)
            frozen.flags.writeable = False
            return frozen

        return map_tree(freeze, batch)

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return the actions themselves."""
        del keys
        return batch


def _clip(space: spaces.Box, leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers within the bounds of a Box, in its dtype."""
    if not np.issubdtype(space.dtype, np.integer):
        clipped: npt.NDArray[Any] = np.clip(leaf, space.low, space.high).astype(space.dtype)
        return clipped
    # A float64 that is the highest int64 is one more, and would become the lowest.
    low, high = np.less_equal(leaf, space.low), np.greater_equal(leaf, space.high)
    inside = np.where(low | high, np.zeros_like(leaf), leaf).astype(space.dtype)
    return np.where(low, space.low, np.where(high, space.high, inside))


def _unit_space(space: spaces.Box) -> Space:
    if not space.is_bounded():
        raise ConfigError(f"actions cannot be rescaled to infinite bounds: {space}; clip them")
    return spaces.Box(-1.0, 1.0, space.shape, np.float32)


def given_space(connector: Connector | None, space: Space) -> Space:
    """Return the space of what a policy gives, where an env has `space` and a connector is between.

    Raises:
        ConfigError: The connector does not say it.
    """
    first = connector
    while isinstance(first, Pipeline):
        first = next(iter(first.connectors.values()), None)
    if first is None:
        return space
    found = getattr(first, "space", None)
    if not isinstance(found, gymnasium.Space):
        raise ConfigError(
            f"the action connector {type(first).__name__} has no `space`: it says which actions "
            "the policy gives"
        )
    return found


# --- rewards ---------------------------------------------------------------------------------


def connected_rewards(
    connector: Connector, rewards: npt.NDArray[np.float64], keys: Keys
) -> npt.NDArray[Any]:
    """Return what a connector makes of rewards `(rows,)`.

    Raises:
        ConnectorError: It raised, or made something else of them than a number per row.
    """
    made: npt.NDArray[Any] = np.asarray(connector(rewards, keys))
    if made.shape != rewards.shape or made.dtype.kind not in "biuf":
        raise ConnectorError(
            f"the reward connector made {made.dtype} of shape {made.shape} of {len(rewards)} "
            "rewards; it returns a number per row"
        )
    return made


class ClipRewards(Connector):
    """Rewards brought into bounds, or to their signs.

    Args:
        limit: They are within [-limit, limit] then; None: -1, 0 or 1.

    Raises:
        ConfigError: `limit` is no number over 0.
    """

    def __init__(self, limit: float | None = None) -> None:
        check_number("limit", limit, over=0.0, optional=True)
        self._limit = limit
        bound = 1.0 if limit is None else float(limit)
        self.space = spaces.Box(-bound, bound, (), np.float64)

    def __call__(self, batch: Tree, keys: Keys) -> Tree:
        """Return `(rows,)` of the dtype that was given."""
        del keys
        return np.sign(batch) if self._limit is None else np.clip(batch, -self._limit, self._limit)
