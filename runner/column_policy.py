"""Asks a policy for the actions of envs with one agent each, and keeps the states of their rows.

Leaves out where the rows are written (`columns.py`) and who is asked when (`column_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.runner.nested import Tree, map_tree
from envbus.runner.policies import Policy, PolicyOutput, TwoStepPolicy
from envbus.runner.policy_output import checked_output, owned

__all__ = ["Answers", "Asked", "ColumnPolicy"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


class Asked(NamedTuple):
    """Rows that a policy was asked about."""

    env_ids: _Ints
    #: What the policy was told, and has no part in: it may write to its own.
    states: Tree
    #: The answer itself, or of a policy that works elsewhere, its ticket.
    answer: Any


class Answers(NamedTuple):
    """What a policy says, one row per env."""

    env_ids: _Ints
    actions: Tree
    #: More columns, states among them.
    extras: Mapping[str, Tree]
    #: Which weights chose the rows: of each, or of all.
    versions: int | _Ints

    def of(self, rows: _Bools) -> Answers:
        """Return some of the rows."""

        def select(leaf: Any) -> Any:
            return np.asarray(leaf)[rows]

        versions = self.versions
        return Answers(
            self.env_ids[rows],
            map_tree(select, self.actions),
            {name: map_tree(select, tree) for name, tree in self.extras.items()},
            versions if isinstance(versions, int) else versions[rows],
        )


class ColumnPolicy:
    """A policy, and its state in each env.

    Args:
        policy: Whose.
        num_envs: How many there are.
        unchanged: Observations are what the pool's envs returned, untouched by connectors.
    """

    def __init__(self, policy: Policy, num_envs: int, *, unchanged: bool) -> None:
        self._policy = policy
        self._two_step = policy if isinstance(policy, TwoStepPolicy) else None
        self._num_envs = num_envs
        self._unchanged = unchanged
        #: Of all envs, `(N, ...)`; None before the first question, and without.
        self._states: Tree = None
        #: `(N,)` whose next question is an episode's first: their state is the policy's first one,
        #: as it is then.
        self._fresh: _Bools = np.ones(num_envs, np.bool_)
        #: Known from the first question on.
        self._is_stateless = False

    @property
    def works_elsewhere(self) -> bool:
        """Whether something else can be done between question and answer."""
        return self._two_step is not None

    def ask(self, env_ids: _Ints, observations: Tree, *, explore: bool) -> Asked:
        """Have the policy begin with the rows of these envs."""
        states = self._states_of(env_ids)
        answer: Any
        if self._two_step is None:
            answer = self._policy.compute_actions(observations, owned(states), explore=explore)
        else:
            answer = self._two_step.submit_actions(
                observations,
                states,
                explore=explore,
                env_ids=env_ids if self._unchanged else None,
            )
        return Asked(env_ids, states, answer)

    def answer(self, asked: Asked) -> Answers:
        """Return what the policy says, waiting for it if it works elsewhere.

        Raises:
            ValueError: It is not one row per env: see `checked_output`.
        """
        out: PolicyOutput = asked.answer
        if self._two_step is not None:
            out = self._two_step.collect_actions(asked.answer)
        out = checked_output(out, len(asked.env_ids), asked.states)
        extras = out.extras
        if asked.states is not None:
            extras = {**extras, "state_in": asked.states, "state_out": out.states}
        return Answers(
            asked.env_ids,
            out.actions,
            extras,
            self._policy.policy_version if out.versions is None else out.versions,
        )

    def keep_states(self, answers: Answers) -> None:
        """Remember the states that these rows have come to."""
        if self._states is not None:
            map_tree(
                lambda kept, new: kept.__setitem__(answers.env_ids, new),
                self._states,
                answers.extras["state_out"],
            )

    def begin(self, env_ids: _Ints) -> None:
        """Episodes begin: their states are the first ones."""
        self._fresh[env_ids] = True

    def forget(self, asked: Asked) -> None:
        """Do without an answer."""
        if self._two_step is not None:
            self._two_step.discard_actions(asked.answer)

    def _states_of(self, env_ids: _Ints) -> Tree:
        if self._is_stateless:
            return None
        fresh = env_ids[self._fresh[env_ids]]
        if len(fresh):
            first = self._policy.initial_state()
            if first is None:
                self._is_stateless = True
                return None
            if self._states is None:
                self._states = map_tree(
                    lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], self._num_envs, axis=0),
                    first,
                )
            map_tree(lambda kept, new: kept.__setitem__(fresh, new), self._states, first)
            self._fresh[fresh] = False
        return map_tree(lambda leaf: leaf[env_ids], self._states)
