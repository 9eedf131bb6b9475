"""What the episodes of a server are answered, many by one call of a policy; and their rows. Pure.

Leaves out who polls and sends (`server.py`), and the files (`recordings/writer.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envbus.actors.env.agents import ALL
from envbus.actors.spaces.spaces import is_fixed_size
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.nested import Tree, row_of
from envbus.runner.bridge.results import BridgeResult, acting
from envbus.runner.sampling.inference import NO_VERSION, ask_rows
from envbus.runner.serving.loading import ServedPolicies, clipped

__all__ = ["AnsweredBatch", "Chooser", "ObservingAgent", "Recording"]

#: Env steps of an episode that is recorded: its rows are held until its end.
_LONGEST_EPISODE = 100_000


class ObservingAgent(NamedTuple):
    """An agent that observes."""

    episode_id: str
    agent: Any
    observation: Tree


class AnsweredBatch(NamedTuple):
    """What one call of a policy has come to."""

    policy_id: str
    rows: Sequence[ObservingAgent]
    #: As many; None: the policy raised `error`.
    actions: Any
    #: Log-probabilities of the actions, `(rows,)`; None: it tells none.
    logp: Any
    version: int
    error: Exception | None
    #: They are single ones in a list.
    listed: bool
    #: Which of several models it is that has answered.
    model: str = ""

    def action(self, index: int) -> Any:
        """Return the action of a row."""
        return row_of(self.actions, index, ragged=self.listed)


class Chooser:
    """The policies of a server, and their states by episode and agent."""

    def __init__(self, policies: ServedPolicies, *, explore: bool) -> None:
        self._policies = policies
        self._explore = explore
        self._action_spaces: dict[str, Any] = {}
        #: By policy: whether observations or actions have no fixed size; whether actions have none.
        self._ragged: dict[str, bool] = {}
        self._lists_actions: dict[str, bool] = {}
        for agent, name in policies.policy_of.items():
            pair = policies.spaces[agent]
            self._action_spaces[name] = pair[1]
            self._ragged[name] = not all(map(is_fixed_size, pair))
            self._lists_actions[name] = not is_fixed_size(pair[1])
        #: States by episode, then agent; empty if no policy has one.
        self._states: dict[str, dict[Any, Tree]] = {}
        self.has_states = any(one.initial_state() is not None for one in policies.by_id.values())

    @property
    def policy_ids(self) -> list[str]:
        """Ids of the policies."""
        return list(self._policies.by_id)

    def choose(self, asked: Sequence[ObservingAgent]) -> list[AnsweredBatch]:
        """Return actions for all; each policy is called once.

        One that raises is asked again row by row: an observation that it cannot take fails its
        own episode and no others.
        """
        groups: dict[str, list[ObservingAgent]] = {}
        for one in asked:
            groups.setdefault(self._policies.policy_of[one.agent], []).append(one)
        return [one for name, rows in groups.items() for one in self._ask_all(name, rows)]

    def forget(self, episode_id: str) -> None:
        """An episode is over."""
        self._states.pop(episode_id, None)

    def _ask_all(self, name: str, rows: Sequence[ObservingAgent]) -> list[AnsweredBatch]:
        batch = self._ask(name, rows)
        if batch.error is None or len(rows) == 1:
            return [batch]
        return [self._ask(name, [row]) for row in rows]

    def _ask(self, name: str, rows: Sequence[ObservingAgent]) -> AnsweredBatch:
        policy, none = self._policies.by_id[name], dict[Any, Tree]()
        observations = [one.observation for one in rows]
        states = [self._states.get(one.episode_id, none).get(one.agent) for one in rows]
        try:
            answer = ask_rows(
                policy,
                observations,
                states,
                explore=self._explore,
                ragged=self._ragged[name],
                lists_actions=self._lists_actions[name],
            )
            actions = answer.actions
            if not answer.listed:
                actions = clipped(actions, self._action_spaces[name])
            for index, one in enumerate(rows if answer.told is not None else ()):
                own = self._states.setdefault(one.episode_id, {})
                own[one.agent] = row_of(answer.states, index)
        except Exception as exc:  # the policy is the user's: clients are told, others go on
            return AnsweredBatch(name, rows, None, None, 0, exc, listed=False)
        logp = answer.extras.get("action_logp")
        return AnsweredBatch(name, rows, actions, logp, answer.version, None, answer.listed)


class Recording:
    """Records the running episodes row by row, each in one piece when it has ended.

    Columns besides those of every sample: `episode_id`, the simulator's; `training_enabled`;
    `off_policy`, whether the simulator has acted itself; `action_logp`, NaN where nobody told it.
    """

    def __init__(self, policies: ServedPolicies) -> None:
        self._policy_of = policies.policy_of
        #: Agents whose observations or actions have no fixed size.
        self._ragged = {
            agent for agent, pair in policies.spaces.items() if not all(map(is_fixed_size, pair))
        }
        self._running: dict[str, EpisodeRecorder] = {}
        #: Those of which no more rows can be had, and why.
        self._broken: dict[str, Exception] = {}
        self._ids = itertools.count()

    def take(self, result: BridgeResult) -> dict[str, MultiAgentBatch | Exception | None]:
        """Take in what a poll has delivered; return the whole episodes that it ended.

        None: of that one there are no rows. An exception: its agents came and went in ways that
        no rows have, or it was too long. Episodes that ended by a fault are dropped.
        """
        for episode_id, observations in result.observations.items():
            if episode_id in self._broken:
                continue
            try:
                self._step(episode_id, observations, result)
            except ValueError as exc:
                self._running.pop(episode_id, None)
                self._broken[episode_id] = exc
        ended: dict[str, MultiAgentBatch | Exception | None] = {}
        for episode_id in result.ended:
            if (error := self._broken.pop(episode_id, None)) is not None:
                ended[episode_id] = error
            episode = self._running.pop(episode_id, None)
            if episode is not None and episode.done:
                try:
                    ended[episode_id] = _whole(episode)
                except Exception as exc:  # what one client has told of ends nobody else's work
                    ended[episode_id] = exc
        return ended

    def acted(self, batch: AnsweredBatch, off_policy: Container[str]) -> None:
        """Take in what a policy has chosen, for agents of which no other actions were taken."""
        for index, one in enumerate(batch.rows):
            episode = self._running.get(one.episode_id)
            if episode is None or one.episode_id in off_policy:
                continue
            logp = np.nan if batch.logp is None else batch.logp[index]
            extras = _extras(off_policy=False, logp=logp)
            action = batch.action(index)
            try:
                episode.act(one.agent, action, policy_version=batch.version, extras=extras)
            except ValueError as exc:
                self._broken[one.episode_id] = exc
                del self._running[one.episode_id]

    def _step(self, episode_id: str, observations: Mapping[Any, Any], result: BridgeResult) -> None:
        episode = self._running.get(episode_id)
        if episode is None:
            ready = self._begin(episode_id, observations, result)
        else:
            if episode.env_steps >= _LONGEST_EPISODE:
                raise ValueError(
                    f"episode {episode_id} has more than {_LONGEST_EPISODE} env steps, and is not "
                    "recorded: its rows would be held until its end"
                )
            if episode_id in result.unacted:
                episode.unact(everybody=episode_id in result.missed)
            ready = episode.step(
                observations,
                result.rewards[episode_id],
                result.terminateds[episode_id],
                result.truncateds[episode_id],
            )
        actions = result.off_policy_actions.get(episode_id)
        if actions is not None and episode_id not in result.ended:
            self._log(episode_id, ready, actions)

    def _begin(
        self, episode_id: str, observations: Mapping[Any, Any], result: BridgeResult
    ) -> list[Any]:
        episode = self._running[episode_id] = EpisodeRecorder(
            next(self._ids),
            0,
            policy_mapping_fn=lambda agent, _: self._policy_of[agent],
            is_ragged=self._ragged.__contains__,
            episode_id=episode_id,
            training_enabled=episode_id not in result.untrained,
        )
        terminateds, truncateds = result.terminateds[episode_id], result.truncateds[episode_id]
        ready = episode.reset(
            observations,
            None,
            result.rewards[episode_id],
            void=episode_id in result.missed,
            done=observations.keys() - acting(observations, terminateds, truncateds),
        )
        terminated, truncated = bool(terminateds[ALL]), bool(truncateds[ALL])
        if terminated or truncated:
            episode.close(terminated=terminated, truncated=truncated)
        return ready

    def _log(self, episode_id: str, ready: list[Any], actions: Mapping[Any, Any]) -> None:
        """The simulator has acted itself, for some of its agents at least."""
        episode = self._running[episode_id]
        episode.unact([agent for agent in ready if agent not in actions])
        for agent in ready:
            if agent in actions:
                extras = _extras(off_policy=True, logp=np.nan)
                episode.act(agent, actions[agent], policy_version=NO_VERSION, extras=extras)


def _extras(*, off_policy: bool, logp: float) -> dict[str, Any]:
    return {"off_policy": np.bool_(off_policy), "action_logp": np.float32(logp)}


def _whole(episode: EpisodeRecorder) -> MultiAgentBatch | None:
    fragment = episode.cut()
    if not fragment.parts:
        return None
    parts = [
        (
            policy_id,
            rows.with_columns(
                episode_id=np.full(len(rows), episode.episode_id),
                training_enabled=np.full(len(rows), episode.training_enabled),
            ),
        )
        for policy_id, rows in fragment.parts
    ]
    return MultiAgentBatch.of(parts, fragment.env_steps)
