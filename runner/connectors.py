"""Small steps between env and policy: what observations and actions are turned into. Pure.

A connector takes a batch `(rows, ...)`, an array or dicts and tuples of arrays as the space has
them, and returns another; it writes to nothing that it was given. What the policy gave stays in
the batch of transitions; what the action connectors make of it is sent. Leaves out the connectors
themselves (`observation_connectors.py`, `action_connectors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from gymnasium import spaces

from envbus.actors.spaces import Space
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.runner.nested import Tree
from envbus.runner.trajectory import AgentID

__all__ = [
    "Connector",
    "ConnectorError",
    "Keys",
    "Pipeline",
    "State",
    "map_leaf_spaces",
    "map_space",
    "single_connectors",
]

#: Which env slot and agent each row belongs to.
Keys: TypeAlias = Sequence[tuple[int, AgentID]]
State: TypeAlias = Mapping[str, Any]


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
            with _naming(name):
                batch = connector(batch, keys)
        return batch

    def invert(self, batch: Tree, keys: Keys) -> Tree:
        """Return what the first connector would have been given, to give `batch` in the end."""
        for name, connector in reversed(self.connectors.items()):
            with _naming(name):
                batch = connector.invert(batch, keys)
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


@contextmanager
def _naming(connector: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        raise ConnectorError(f"connector {connector} failed: {type(exc).__name__}: {exc}") from exc


def single_connectors(name: str, connector: Connector) -> dict[str, Connector]:
    """Return a connector by a name, or those of a pipeline, each by a name of its own."""
    if type(connector) is not Pipeline:  # one derived from it may have a state of its own
        return {name: connector}
    return {
        full_name: one
        for part, inner in connector.connectors.items()
        for full_name, one in single_connectors(f"{name}/{part}", inner).items()
    }


def map_space(function: Callable[[Space, Any], Any], space: Space, batch: Tree) -> Tree:
    """Return a tree like `space`, with `function(part of the space, its arrays)` in each place.

    Raises:
        KeyError, TypeError, ValueError: `batch` has not the structure of `space`.
    """
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, part, batch[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            map_space(function, part, item) for part, item in zip(space.spaces, batch, strict=True)
        )
    return function(space, batch)


def map_leaf_spaces(function: Callable[[Space], Any], space: Space) -> Any:
    """Return a space like `space`, with `function(part)` in the place of each Box, Discrete, ..."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            [(key, map_leaf_spaces(function, part)) for key, part in space.spaces.items()]
        )
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaf_spaces(function, part) for part in space.spaces])
    return function(space)
