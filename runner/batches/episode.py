"""Records one episode of one env: from what a poll delivers to transitions per agent.

Pure: observations, rewards and flags in, batches out. Leaves out where they come from, who
chooses actions, and what becomes of the batches (the runner).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envbus.actors.env.agents import ALL
from envbus.bus.brief import brief
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.metrics import EpisodeResult
from envbus.runner.batches.nested import Tree
from envbus.runner.batches.trajectory import AgentID, Trajectory, split_at

__all__ = ["DEFAULT_POLICY_ID", "EpisodeIds", "EpisodeRecorder", "Fragment"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of an episode: the rows that were completed since the piece before."""

    #: Policy id and rows of each agent that completed some, in the order they were first seen; of
    #: an agent several, if actions of it did not happen.
    parts: list[tuple[str, SampleBatch]]
    env_steps: int
    #: The `t` of the first of its env steps.
    begin: int = 0

    @property
    def agent_steps(self) -> int:
        """Rows of all agents."""
        return sum(len(batch) for _, batch in self.parts)

    def split(self, env_steps: int) -> tuple[Fragment, Fragment]:
        """Return its first env steps and the others, as views."""
        end = self.begin + env_steps
        both: tuple[list[tuple[str, SampleBatch]], list[tuple[str, SampleBatch]]] = ([], [])
        for policy_id, batch in self.parts:
            for parts, rows in zip(both, split_at(batch, end), strict=True):
                if len(rows):
                    parts.append((policy_id, rows))
        return (
            Fragment(both[0], env_steps, self.begin),
            Fragment(both[1], self.env_steps - env_steps, end),
        )

    def env_steps_with(self, agent_steps: int) -> int:
        """Return how many of its env steps have at least that many rows, or all of them."""
        ts = [batch["t"] for _, batch in self.parts]
        return _env_steps_with(agent_steps, ts, self.begin, self.env_steps)


DEFAULT_POLICY_ID = "default_policy"


class EpisodeIds:
    """Numbers episodes: by env and how many it has had, not by who was faster.

    Attributes:
        running: `(num_envs,)` id of each env's last episode that has begun.
    """

    def __init__(self, first: int, num_envs: int) -> None:
        self._first = first
        self._base = 0
        self._begun = np.zeros(num_envs, np.int64)
        self.running: npt.NDArray[np.int64] = np.full(num_envs, -1, np.int64)

    def begin(self, env_ids: npt.NDArray[np.int64] | int) -> None:
        """The next episode of each env begins."""
        number = self._base + self._begun[env_ids] * len(self._begun) + env_ids
        self.running[env_ids] = self._first + number
        self._begun[env_ids] += 1

    @property
    def following(self) -> int:
        """What no id has reached yet, without the part that is the runner's."""
        return self._base + int(np.max(self._begun, initial=0)) * len(self._begun)

    def go_on_from(self, following: int) -> None:
        """Have all later ids be at least `following`; those of running episodes stay."""
        self._base = max(self.following, following)
        self._begun[:] = 0


class EpisodeRecorder:
    """One running episode, of one agent (`DUMMY_AGENT`) or many.

    Call `reset`, then `act` for each agent that it or `step` returned, then `step`, and so on.
    Agents may come, pause and leave at any step.

    - An agent is asked for an action if it got an observation and is not done. Its row is
      complete with its next observation; the row's `t` is the env step that brought that.
    - Rewards that come without an observation are summed into the agent's open row (those before
      its first action into its first row, those after its last one into that), infos are merged
      and flags are OR-ed.
    - An episode that ends while an agent waits for an observation completes its row all the
      same, with `next_obs` blank and `next_obs_valid` False. Flags are the agent's own, or where
      it has none, those of `"__all__"`.
    - An agent that is done when it is first seen is left out.
    - Actions that turn out not to have happened (`unact`) have no rows; those before are
      truncated, and the next observation begins anew.

    Args:
        eps_id: Unique among all episodes whose rows may meet.
        env_id: The env slot, and `incarnation` which life of it.
        policy_mapping_fn: `(agent_id, this recorder) -> policy id`, asked once per agent and
            episode, when it first observes. None: `DEFAULT_POLICY_ID` for all.
        infos: Keep a column `infos`.
        is_ragged: Whether an agent's observations and actions have no fixed size, and are kept as
            objects; asked when it observes. None: nobody's are.
        episode_id: What an external simulator calls it.
        training_enabled: Whether its rows are to be trained on.
        connect_reward: `(agent_id, policy id, reward of a row) -> what the row has of it`. None:
            the reward itself, which episodes' returns have in any case.
    """

    def __init__(
        self,
        eps_id: int,
        env_id: int,
        *,
        incarnation: int = 0,
        policy_mapping_fn: Callable[[Any, EpisodeRecorder], str] | None = None,
        infos: bool = False,
        is_ragged: Callable[[AgentID], bool] | None = None,
        episode_id: str = "",
        training_enabled: bool = True,
        connect_reward: Callable[[AgentID, str, float], float] | None = None,
    ) -> None:
        self.eps_id = eps_id
        self.env_id = env_id
        self.episode_id = episode_id
        self.training_enabled = training_enabled
        self.incarnation = incarnation
        #: Env steps so far; the `t` of the next one.
        self.length = 0
        #: Env steps and rows since the last `cut`.
        self.env_steps = 0
        self.agent_steps = 0
        #: Pieces with rows that were cut off so far.
        self.num_fragments = 0
        self.terminated = False
        self.truncated = False
        self.faulty = False
        #: The latest per agent, and `"__common__"`.
        self.last_infos: dict[AgentID, Mapping[str, Any]] = {}
        #: For callbacks to write to.
        self.custom_metrics: dict[str, float] = {}
        self.hist_data: dict[str, list[float]] = {}
        self.media: dict[str, Any] = {}
        self.user_data: dict[str, Any] = {}
        self._policy_mapping_fn = policy_mapping_fn
        self._infos = infos
        self._is_ragged = is_ragged
        self._connect_reward = connect_reward
        self._agents: dict[AgentID, Trajectory] = {}
        #: Who was asked for an action last.
        self._asked: list[AgentID] = []
        self._returns: dict[AgentID, float] = {}
        self._unrecorded_reward = 0.0
        #: An observation was lost, which may have been the first one of any agent.
        self._misses_some = False

    @property
    def done(self) -> bool:
        """Whether the episode is over, by the env's word or by a fault."""
        return self.terminated or self.truncated or self.faulty

    @property
    def has_acted(self) -> bool:
        """Whether any agent has completed a row."""
        return any(agent.total_rows for agent in self._agents.values())

    @property
    def is_cut(self) -> bool:
        """Whether env steps were cut off, with rows or without."""
        return self.length > self.env_steps

    def policy_for(self, agent_id: AgentID) -> str:
        """Return the policy of an agent that has observed.

        Raises:
            KeyError: It has not.
        """
        agent = self._agents.get(agent_id)
        if agent is None or agent.policy_id is None:
            raise KeyError(f"{self._where(agent_id)} has not observed yet")
        return agent.policy_id

    def last_reward(self, agent_id: AgentID) -> float | None:
        """Return the reward of the row that led to what an agent observes; None: there is none."""
        agent = self._agents.get(agent_id)
        return None if agent is None else agent.last_reward

    def reset(
        self,
        observations: Mapping[Any, Tree],
        infos: Mapping[Any, Mapping[str, Any]] | None = None,
        rewards: Mapping[Any, float] | None = None,
        *,
        void: bool = False,
        done: Container[AgentID] = (),
    ) -> list[AgentID]:
        """Take the first observations; return the agents to ask for actions.

        Args:
            observations: By agent.
            infos: By agent.
            rewards: By agent, of what came before.
            void: These rewards followed an observation that was lost: they count for the episode,
                and are in no row, as those of agents that are not observed yet.
            done: Agents that are so already, which are left out.
        """
        self._check_ids(observations)
        for agent_id, reward in (rewards or {}).items():
            self._add_reward(agent_id, reward)
        self._misses_some = void
        self.last_infos.update(infos or {})
        ready = []
        for agent_id, observation in observations.items():
            if agent_id in done:
                self._unrecorded_reward += self._agent(agent_id).end()
            else:
                self._begin(agent_id, observation)
                ready.append(agent_id)
        self._asked = list(ready)
        return ready

    def act(
        self,
        agent_id: AgentID,
        action: Tree,
        *,
        policy_version: int = 0,
        extras: Mapping[str, Tree] | None = None,
    ) -> None:
        """Record what `agent_id` does; all is copied.

        Args:
            agent_id: One that `reset` or `step` returned.
            action: As the policy gave it, or the off-policy action that took its place.
            policy_version: Which weights chose it.
            extras: More columns: `state_in`, `state_out`, `action_logp`, ...

        Raises:
            ValueError: The agent was not asked, or has been, or a column changed its form.
        """
        agent = self._agents.get(agent_id)
        if agent is None or not agent.observed or agent.acted or agent.done:
            raise ValueError(f"{self._where(agent_id)} was not asked for an action")
        try:
            agent.act(action, policy_version, extras or {})
        except ValueError as exc:
            raise ValueError(f"{self._where(agent_id)}: {exc}") from None

    def step(
        self,
        observations: Mapping[Any, Tree],
        rewards: Mapping[Any, float],
        terminateds: Mapping[Any, bool],
        truncateds: Mapping[Any, bool],
        infos: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> list[AgentID]:
        """Take in one env step; the mappings may name different agents, or none.

        Returns:
            The agents to ask for actions; empty at the episode's end, and also where it goes on
            without anybody observing: the env is then stepped with no action.

        Raises:
            ValueError: `"__all__"` is missing from the flags or stands for an agent, an agent
                that was done has come back, was not answered for, or a form changed.
        """
        assert not self.done, "the episode is over"
        try:
            all_terminated, all_truncated = bool(terminateds[ALL]), bool(truncateds[ALL])
        except KeyError:
            raise ValueError(
                f"env {self.env_id}: terminateds and truncateds must each hold '__all__', got "
                f"{list(terminateds)} and {list(truncateds)}"
            ) from None
        self._check_ids(observations)
        self._check_ids(rewards)
        agents = self._agents
        for agent_id, reward in rewards.items():
            self._add_reward(agent_id, reward)
        for agent_id, flag in terminateds.items():
            if flag and agent_id != ALL:
                self._agent(agent_id).flag(terminated=True)
        for agent_id, flag in truncateds.items():
            if flag and agent_id != ALL:
                self._agent(agent_id).flag(truncated=True)
        if infos:
            self._add_infos(infos)
        ended = all_terminated or all_truncated
        if ended:
            for agent in self._agents.values():
                if not (agent.terminated or agent.truncated):
                    agent.flag(terminated=all_terminated, truncated=all_truncated)
        ready = []
        for agent_id, observation in observations.items():
            known = agents.get(agent_id)
            if known is not None and known.goes_on and not ended:  # the usual one, by a short way
                self._complete(agent_id, known, observation)
                ready.append(agent_id)
                continue
            flagged = ended or terminateds.get(agent_id) or truncateds.get(agent_id)
            if self._observe(agent_id, observation, flagged=bool(flagged)):
                ready.append(agent_id)
        if ended:
            self.terminated, self.truncated = all_terminated, all_truncated
            self._end()
        self.length += 1
        self.env_steps += 1
        self._asked = ready
        return ready

    def unact(self, agent_ids: Iterable[AgentID] | None = None, *, everybody: bool = False) -> None:
        """The actions that `reset` or `step` have asked for last did not happen.

        Whatever the env did instead, it is no transition: rewards that come before these agents'
        next observations count for the episode, and are in no row.

        Args:
            agent_ids: Whose; None: of all that were asked.
            everybody: Also of those who had acted before, and wait: an observation was lost, which
                may have been theirs. Rewards of those that come later are in no row, either, before
                they are observed.
        """
        self._misses_some |= everybody
        void = set(self._asked if agent_ids is None else agent_ids)
        if everybody:
            void |= {agent_id for agent_id, agent in self._agents.items() if agent.goes_on}
        for agent_id in void:
            self._agents[agent_id].break_off(self._constants)
        self._asked = [agent_id for agent_id in self._asked if agent_id not in void]

    def close(self, *, terminated: bool, truncated: bool) -> None:
        """End the episode where it stands: its env has done so before anybody acted."""
        assert not self.done, "the episode is over"
        self.terminated, self.truncated = terminated, truncated
        self._end()

    def fault(self, *, keep: bool = False) -> int:
        """End the episode because its env failed.

        Args:
            keep: Keep the rows up to the fault, the last of each agent truncated, with the
                observation that it reached to bootstrap from. Else no row since the last `cut`
                ever leaves. Actions without an outcome are dropped either way.

        Returns:
            Rows that were dropped.
        """
        assert not self.done, "the episode is over"
        self.faulty = True
        if keep:
            for agent in self._agents.values():
                if not agent.done:
                    agent.cut_off()
            return 0
        dropped = sum(agent.drop() for agent in self._agents.values())
        self.env_steps = self.agent_steps = 0
        return dropped

    def cut(self, env_steps: int | None = None) -> Fragment:
        """Return the rows that were completed since the last cut; the episode goes on.

        The next fragment joins without a gap: per agent, its first observation is the last
        `next_obs` of this one, and `t` continues.

        Args:
            env_steps: Of how many of its env steps; None: all. Rows of the others stay here.
        """
        count = self.env_steps if env_steps is None else env_steps
        begin = self.length - self.env_steps
        parts = []
        for agent in self._agents.values():
            for batch in agent.take(begin + count, self._constants):
                assert agent.policy_id is not None
                parts.append((agent.policy_id, batch))
        fragment = Fragment(parts, count, begin)
        self.num_fragments += bool(parts)
        self.env_steps -= count
        self.agent_steps -= fragment.agent_steps
        return fragment

    def env_steps_with(self, agent_steps: int) -> int:
        """Return how many env steps since the last cut have at least that many rows, or all."""
        ts = [ts for agent in self._agents.values() for ts in agent.ts()]
        return _env_steps_with(agent_steps, ts, self.length - self.env_steps, self.env_steps)

    def forget(self) -> None:
        """Drop the rows that were completed since the last cut, as if they had left; it goes on."""
        fragments = self.num_fragments
        self.cut()
        self.num_fragments = fragments

    def check_metrics(self) -> None:
        """See that what callbacks have measured are numbers, which they become.

        Raises:
            TypeError: One is none: it could not be averaged, ever.
        """
        for name, value in self.custom_metrics.items():
            try:
                self.custom_metrics[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"custom_metrics[{name!r}] is {brief(value)}; they are numbers"
                ) from None
        for name, values in self.hist_data.items():
            try:
                self.hist_data[name] = [float(value) for value in values]
            except (TypeError, ValueError):
                raise TypeError(
                    f"hist_data[{name!r}] is {brief(values)}; they are lists of numbers"
                ) from None

    def result(self) -> EpisodeResult:
        """Return the episode's summary so far."""
        agents = self._agents.items()
        return EpisodeResult(
            eps_id=self.eps_id,
            env_id=self.env_id,
            incarnation=self.incarnation,
            episode_return=sum(self._returns.values(), 0.0),
            length=self.length,
            agent_returns=dict(self._returns),
            agent_steps={agent_id: agent.total_rows for agent_id, agent in agents},
            agent_policies={
                agent_id: agent.policy_id
                for agent_id, agent in agents
                if agent.policy_id is not None
            },
            terminated=self.terminated,
            truncated=self.truncated,
            faulty=self.faulty,
            fragments=self.num_fragments,
            unrecorded_reward=self._unrecorded_reward,
            custom_metrics=dict(self.custom_metrics),
            episode_id=self.episode_id,
            training_enabled=self.training_enabled,
            hist_data=dict(self.hist_data),
            media=dict(self.media),
        )

    @property
    def _constants(self) -> dict[str, int]:
        return {"eps_id": self.eps_id, "env_id": self.env_id, "incarnation": self.incarnation}

    def _where(self, agent_id: AgentID) -> str:
        return f"env {self.env_id}, agent {agent_id!r}, step {self.length} of episode {self.eps_id}"

    def _check_ids(self, mapping: Mapping[Any, Any]) -> None:
        if ALL in mapping:
            raise ValueError(f"env {self.env_id}: '__all__' belongs to flags and is no agent id")

    def _agent(self, agent_id: AgentID) -> Trajectory:
        agent = self._agents.get(agent_id)
        if agent is None:
            agent = Trajectory(agent_id, infos=self._infos, connect_reward=self._connect_reward)
            self._agents[agent_id] = agent
            self._returns[agent_id] = 0.0
        return agent

    def _add_reward(self, agent_id: AgentID, reward: Any) -> None:
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise ValueError(f"{self._where(agent_id)}: reward {reward!r} is no number") from None
        agent = self._agents.get(agent_id) or self._agent(agent_id)
        if not agent.add_reward(number):
            self._unrecorded_reward += number
        self._returns[agent_id] += number

    def _add_infos(self, infos: Mapping[Any, Mapping[str, Any]]) -> None:
        self.last_infos.update(infos)
        if self._infos:
            for agent_id, info in infos.items():
                if agent_id != "__common__":
                    self._agent(agent_id).add_info(info)

    def _begin(self, agent_id: AgentID, observation: Tree) -> None:
        agent, choose = self._agent(agent_id), self._policy_mapping_fn
        policy_id = agent.policy_id
        if policy_id is not None or self._misses_some:  # it was broken off, maybe unseen
            self._unrecorded_reward += agent.forget_reward()
        if policy_id is None:
            policy_id = DEFAULT_POLICY_ID if choose is None else choose(agent_id, self)
        # Not before: of some agents it is known once they have observed.
        ragged = self._is_ragged is not None and self._is_ragged(agent_id)
        agent.begin(observation, policy_id, ragged=ragged)

    def _observe(self, agent_id: AgentID, observation: Tree, *, flagged: bool) -> bool:
        """Return whether the agent is to be asked for an action."""
        agent = self._agent(agent_id)
        if agent.done:
            if flagged:
                return False  # Some envs go on telling that it is done.
            raise ValueError(f"{self._where(agent_id)} was done and has got an observation again")
        if not agent.observed:
            if flagged or agent.terminated or agent.truncated:
                self._unrecorded_reward += agent.end()
                return False
            self._begin(agent_id, observation)
            return True
        if not agent.acted:
            raise ValueError(f"{self._where(agent_id)} observes, and has not acted on the last one")
        self._complete(agent_id, agent, observation)
        if agent.terminated or agent.truncated:
            agent.end()
            return False
        return True

    def _complete(self, agent_id: AgentID, agent: Trajectory, observation: Tree) -> None:
        try:
            agent.complete(observation, self.length)
        except ValueError as exc:
            raise ValueError(f"{self._where(agent_id)}: {exc}") from None
        self.agent_steps += 1

    def _end(self) -> None:
        for agent in self._agents.values():
            if agent.done:
                continue
            if agent.acted:
                agent.complete_blank(self.length)
                self.agent_steps += 1
            self._unrecorded_reward += agent.end()


def _env_steps_with(
    agent_steps: int, ts: list[npt.NDArray[np.int64]], begin: int, env_steps: int
) -> int:
    """Return how many of the env steps from `begin` on have as many rows, which are of `ts`."""
    rows = np.sort(np.concatenate(ts))
    return int(rows[agent_steps - 1]) + 1 - begin if agent_steps <= len(rows) else env_steps
