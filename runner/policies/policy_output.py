"""A policy's call: what it is asked, and a look at what it says, the same for all. Pure.

Leaves out who asks, and what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from envbus.actors.arrays.copies import own
from envbus.runner.batches.batch import COLUMN_DTYPES
from envbus.runner.batches.nested import Tree, as_rows, concatenate_trees, map_tree
from envbus.runner.policies.policy import Policy, PolicyOutput

__all__ = ["RECORDED_INPUTS", "PolicyAnswer", "ask", "check_shapes", "owned"]

#: Columns that a batch has anyway: no extra may have such a name.
_TAKEN: Final = frozenset(
    {*COLUMN_DTYPES, "obs", "actions", "next_obs", "infos", "agent_id", "state_in", "state_out"}
)
#: Inputs of a policy that rows have a column of.
RECORDED_INPUTS: Final = ("prev_actions", "prev_rewards")
#: Spaces of which each element is an array of one shape.
_SHAPED: Final = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class PolicyAnswer(msgspec.Struct, frozen=True, eq=False):
    """What a policy has said, one row per observation; arrays may be the policy's own."""

    #: A batch, or where `listed`, single ones in a list or in an array of objects.
    actions: Any
    #: For the rows' next calls; None of a policy without a state.
    states: Tree
    #: What it was told instead, and has no part in.
    told: Tree
    extras: Mapping[str, Tree]
    rows: int
    #: Which weights chose the rows; `(rows,)` where they are not the same for all.
    version: int
    versions: npt.NDArray[np.int64] | None = None
    listed: bool = False
    #: What it was told besides, and rows have columns of; None: nothing.
    inputs: Mapping[str, Tree] | None = None

    @classmethod
    def of(
        cls,
        out: Any,
        rows: int,
        version: int,
        states: Tree = None,
        *,
        listed: bool | None = False,
        inputs: Mapping[str, Tree] | None = None,
    ) -> PolicyAnswer:
        """Return what a policy has returned, after a look at its form.

        `states` and `inputs` are what it was told. With `listed` actions are single ones, and stay
        so; None: where their type says so.

        Raises:
            ValueError: Something has another number of rows, an action is NaN, states are not as
                those that it was told, or an extra has the name of another column.
        """
        if not isinstance(out, PolicyOutput):
            raise ValueError(f"the policy returned {type(out).__name__}, not a PolicyOutput")
        actions = out.actions
        if actions is None:
            text = f"the policy returned None for {rows} observations; does it lack a `return`?"
            raise ValueError(text)
        if listed is None:
            is_array = isinstance(actions, np.ndarray)
            listed = actions.dtype.hasobject if is_array else isinstance(actions, list)
        if not listed:
            actions = _counted(actions, rows, "actions")
        elif len(actions) != rows:
            raise _wrong("actions", (len(actions),), rows)
        _check_are_numbers(actions)
        extras = out.extras
        if type(extras) is not dict and not isinstance(extras, Mapping):  # the latter takes long
            raise ValueError(f"the policy returned extras of {type(extras).__name__}, not by name")
        if extras:
            names = _TAKEN if inputs is None else _TAKEN | inputs.keys()
            if not names.isdisjoint(extras):
                taken = sorted(names & extras.keys())
                raise ValueError(
                    f"the policy returned extras that are named as other columns: {taken}"
                )
            extras = {name: _counted(tree, rows, name) for name, tree in extras.items()}
        after = out.states
        if states is not None:
            if after is None:
                raise ValueError("the policy has an initial_state, and returned no states")
            after = _like(after, states, rows, "states")
        elif after is not None:
            after = _counted(after, rows, "states")
        versions = out.versions
        if versions is not None and np.shape(versions) != (rows,):
            raise _wrong("versions", np.shape(versions), rows)
        if inputs is not None:
            inputs = {name: inputs[name] for name in RECORDED_INPUTS if name in inputs}
        return cls(actions, after, states, extras, rows, version, versions, listed, inputs)

    def columns(self) -> Mapping[str, Tree]:
        """Return what the policy adds to rows, with what it was told, and states after it."""
        if self.told is None and self.inputs is None:
            return self.extras
        extras = {**self.extras, **(self.inputs or {})}
        if self.told is None:
            return extras
        return {**extras, "state_in": self.told, "state_out": self.states}

    def owned(self) -> PolicyAnswer:
        """Return it in arrays that nobody else writes to: a policy may use its own again."""
        return msgspec.structs.replace(
            self,
            actions=_owned_singles(self.actions) if self.listed else owned(self.actions),
            states=owned(self.states),
            extras={name: owned(tree) for name, tree in self.extras.items()},
        )

    def select(self, rows: slice | npt.NDArray[np.bool_]) -> PolicyAnswer:
        """Return some rows; not of single actions by a mask."""

        def some(tree: Tree) -> Tree:
            return None if tree is None else map_tree(lambda leaf: leaf[rows], tree)

        return PolicyAnswer(
            self.actions[rows] if self.listed else some(self.actions),
            some(self.states),
            some(self.told),
            {name: some(tree) for name, tree in self.extras.items()},
            len(np.empty(self.rows, np.bool_)[rows]),
            self.version,
            some(self.versions),
            self.listed,
            None if self.inputs is None else {n: some(tree) for n, tree in self.inputs.items()},
        )

    @staticmethod
    def join(answers: Sequence[PolicyAnswer]) -> PolicyAnswer:
        """Return the rows of several answers as one, without what the policy was told.

        Raises:
            ValueError: They differ in structure.
        """
        first = answers[0]
        if first.listed:
            actions: Any = [action for answer in answers for action in answer.actions]
        else:
            actions = concatenate_trees([answer.actions for answer in answers], "actions")
        states = None
        if first.states is not None:
            states = concatenate_trees([answer.states for answer in answers], "states")
        versions = None
        if any(one.version != first.version or one.versions is not None for one in answers):
            versions = np.concatenate(
                [
                    np.full(one.rows, one.version) if one.versions is None else one.versions
                    for one in answers
                ]
            )
        return PolicyAnswer(
            actions,
            states,
            None,
            concatenate_trees([dict(answer.extras) for answer in answers], "extras"),
            sum(answer.rows for answer in answers),
            answers[-1].version,
            versions,
            first.listed,
        )


def ask(
    policy: Policy,
    observations: Tree,
    states: Tree,
    rows: int,
    *,
    explore: bool,
    listed: bool | None = False,
    inputs: Mapping[str, Tree] | None = None,
) -> PolicyAnswer:
    """Ask a policy about so many rows, and return what it says; raises as `PolicyAnswer.of`.

    `inputs` are what it wants to be told besides (`InputPolicy`).
    """
    if inputs is None:
        out = policy.compute_actions(observations, owned(states), explore=explore)
        return PolicyAnswer.of(out, rows, policy.policy_version, states, listed=listed)
    compute: Any = policy.compute_actions
    out = compute(observations, owned(states), explore=explore, **inputs)
    version = policy.policy_version
    return PolicyAnswer.of(out, rows, version, states, listed=listed, inputs=inputs)


def check_shapes(actions: Any, space: Space[Any] | None, *, rows: bool = False) -> None:
    """Look whether actions that go to envs have the shapes of the action space.

    Args:
        actions: After their connector: one, nested as the space is, or a batch of them.
        space: Of one action. Of parts without a shape nothing is said, nor of a wrong structure.
        rows: It is a batch.

    Raises:
        ValueError: One has another shape: an action `(1,)` where the space is Discrete, for
            example, which most envs take in silence, and most losses broadcast.
    """
    if isinstance(space, spaces.Dict):
        if isinstance(actions, Mapping):
            for key, part in space.spaces.items():
                if key in actions:
                    check_shapes(actions[key], part, rows=rows)
    elif isinstance(space, spaces.Tuple):
        if isinstance(actions, tuple):
            for part, one in zip(space.spaces, actions, strict=False):
                check_shapes(one, part, rows=rows)
    elif isinstance(space, _SHAPED):
        shape = np.shape(actions)
        if (shape[1:] if rows else shape) != space.shape:
            each = shape[1:] if rows else shape
            raise ValueError(
                f"actions of shape {each} for each env, where its action space has {space.shape}: "
                f"{space}; see what the policy, or its action connector, returns"
            )


def owned(tree: Tree) -> Tree:
    """Return a copy that nobody else writes to: a policy may use its arrays again."""
    return None if tree is None else map_tree(np.array, tree)


def _owned_singles(actions: Any) -> Any:
    """Return single actions that nobody else writes to, in a list or in an array of objects."""
    singles = [own(action) for action in actions]
    return as_rows(singles) if isinstance(actions, np.ndarray) else singles


def _check_are_numbers(actions: Any) -> None:
    """Raise ValueError if some are NaN, which is in no space: an env would take it in silence."""
    if type(actions) is np.ndarray and actions.dtype.kind in "biu":  # the usual case
        return
    if isinstance(actions, Mapping):
        for part in actions.values():
            _check_are_numbers(part)
    elif isinstance(actions, tuple | list):
        for part in actions:
            _check_are_numbers(part)
    elif isinstance(actions, np.ndarray | np.generic):
        if actions.dtype.kind in "fc" and np.isnan(actions).any():
            rows = np.atleast_1d(actions)
            wrong = next(row for row in rows if np.isnan(row).any())
            raise ValueError(
                f"the policy returned actions that are NaN: {wrong}; NaN in its weights or in its "
                "observations?"
            )
        if actions.dtype == np.object_:
            for part in actions.flat:
                _check_are_numbers(part)


def _counted(tree: Tree, rows: int, what: str) -> Tree:
    if type(tree) is np.ndarray and tree.ndim and len(tree) == rows:  # the usual case
        return tree

    def check(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if not array.ndim or len(array) != rows:
            raise _wrong(what, array.shape, rows)
        return array

    return map_tree(check, tree)


def _like(tree: Tree, given: Tree, rows: int, what: str) -> Tree:
    """Return states in the structure, shapes and dtypes of those that were given."""
    if isinstance(given, dict):
        if not isinstance(tree, dict) or tree.keys() != given.keys():
            raise ValueError(f"the policy returned {what} that are no dict of {list(given)}")
        return {
            key: _like(tree[key], part, rows, f"{what}[{key!r}]") for key, part in given.items()
        }
    if isinstance(given, tuple):
        if not isinstance(tree, tuple) or len(tree) != len(given):
            raise ValueError(f"the policy returned {what} that are no tuple of {len(given)}")
        pairs = enumerate(zip(tree, given, strict=True))
        return tuple(_like(one, part, rows, f"{what}[{index}]") for index, (one, part) in pairs)
    array = np.asarray(tree)
    if array.shape != given.shape:
        raise _wrong(what, array.shape, rows, f", where initial_state has {given.shape[1:]}")
    if not np.can_cast(array.dtype, given.dtype, "same_kind"):
        raise ValueError(
            f"the policy returned {what} of {array.dtype}, where initial_state has {given.dtype}"
        )
    return array.astype(given.dtype, copy=False)


def _wrong(what: str, shape: tuple[int, ...], rows: int, more: str = "") -> ValueError:
    return ValueError(f"the policy returned {what} of shape {shape} for {rows} rows{more}")
