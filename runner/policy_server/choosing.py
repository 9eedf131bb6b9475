"""Asks policies for the actions of many episodes at once, and keeps policies' states by episode.

Pure: no socket, clock, thread or process. Leaves out the recording of rows (`recording.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envbus.actors.spaces import is_fixed_size
from envbus.runner.inference import stack
from envbus.runner.nested import Tree, row_of
from envbus.runner.policy_output import ask, owned
from envbus.runner.policy_server.loading import ServedPolicies, clipped

__all__ = ["Asked", "Batch", "Chooser"]


class Asked(NamedTuple):
    """An agent that observes."""

    episode_id: str
    agent: Any
    observation: Tree


class Batch(NamedTuple):
    """What one call of a policy has come to."""

    policy_id: str
    rows: Sequence[Asked]
    #: As many; None: the policy raised `error`.
    actions: Any
    #: Log-probabilities of the actions, `(rows,)`; None: it tells none.
    logp: Any
    version: int
    error: Exception | None
    ragged: bool

    def action(self, index: int) -> Any:
        """Return the action of a row."""
        return row_of(self.actions, index, ragged=self.ragged)


class Chooser:
    """The policies of a server, and their states by episode and agent."""

    def __init__(self, policies: ServedPolicies, *, explore: bool) -> None:
        self._policies = policies
        self._explore = explore
        self._first = {name: one.initial_state() for name, one in policies.by_id.items()}
        self._action_spaces: dict[str, Any] = {}
        #: By policy: whether observations or actions have no fixed size.
        self._ragged: dict[str, bool] = {}
        for agent, name in policies.policy_of.items():
            pair = policies.spaces[agent]
            self._action_spaces[name] = pair[1]
            self._ragged[name] = not all(map(is_fixed_size, pair))
        #: States by episode, then agent; empty if no policy has one.
        self._states: dict[str, dict[Any, Tree]] = {}
        self.has_states = any(first is not None for first in self._first.values())

    def choose(self, asked: Sequence[Asked]) -> list[Batch]:
        """Return actions for all; each policy is called once.

        One that raises is asked again row by row: an observation that it cannot take fails its
        own episode and no others.
        """
        groups: dict[str, list[Asked]] = {}
        for one in asked:
            groups.setdefault(self._policies.policy_of[one.agent], []).append(one)
        return [one for name, rows in groups.items() for one in self._ask_all(name, rows)]

    def forget(self, episode_id: str) -> None:
        """An episode is over."""
        self._states.pop(episode_id, None)

    def _ask_all(self, name: str, rows: Sequence[Asked]) -> list[Batch]:
        batch = self._ask(name, rows)
        if batch.error is None or len(rows) == 1:
            return [batch]
        return [self._ask(name, [row]) for row in rows]

    def _ask(self, name: str, rows: Sequence[Asked]) -> Batch:
        policy, first, ragged = self._policies.by_id[name], self._first[name], self._ragged[name]
        try:
            observations = stack([one.observation for one in rows], ragged=ragged)
            states = None if first is None else self._stacked_states(rows, first)
            answer = ask(
                policy, observations, states, len(rows), explore=self._explore, listed=ragged
            )
            actions = answer.actions
            if not ragged:
                actions = clipped(actions, self._action_spaces[name])
            if first is not None:
                self._keep_states(rows, owned(answer.states))
        except Exception as exc:  # the policy is the user's: clients are told, others go on
            return Batch(name, rows, None, None, 0, exc, ragged)
        logp = answer.extras.get("action_logp")
        return Batch(name, rows, actions, logp, answer.version, None, ragged)

    def _stacked_states(self, rows: Sequence[Asked], first: Tree) -> Tree:
        states, none = self._states, dict[Any, Tree]()
        return stack([states.get(one.episode_id, none).get(one.agent, first) for one in rows])

    def _keep_states(self, rows: Sequence[Asked], after: Tree) -> None:
        for index, one in enumerate(rows):
            own = self._states.setdefault(one.episode_id, {})
            own[one.agent] = row_of(after, index)


def acting(
    observations: Mapping[Any, Tree],
    terminateds: Mapping[Any, bool],
    truncateds: Mapping[Any, bool],
) -> list[Any]:
    """Return the agents that an action is wanted of."""
    return [
        agent for agent in observations if not terminateds.get(agent) and not truncateds.get(agent)
    ]
