"""The running episodes of a `DictSampler`: begun, stepped and ended by what a poll delivers.

Leaves out where that comes from (`sources.py`), who chooses actions (`inference.py`), and how
much is asked of whom (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from envbus.actors.agents import ALL
from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import PollResult
from envbus.runner.bridge.results import ClientChoice
from envbus.runner.callbacks import naming
from envbus.runner.episode import EpisodeRecorder
from envbus.runner.faults import Fault
from envbus.runner.inference import Asked, by_form, row_of, stack
from envbus.runner.metrics import EpisodeResult, SampleMetrics
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy
from envbus.runner.running_episodes import EpisodeIds
from envbus.runner.sampling import Phase, RunnerConfig
from envbus.runner.shares import OpenShare, Share
from envbus.runner.slot import Slot
from envbus.runner.trajectory import AgentID

__all__ = ["Episodes"]

#: Env steps of an episode whose rows nobody wants, after which they are dropped.
_MOST_FORGOTTEN = 1000


class Episodes:
    """Records each env's episode, and tells callbacks and metrics.

    Args:
        shares: Who contributes; their slots are the envs.
        policies: Returns the policies by id that an episode which begins now can have.
        is_ragged: Whether observations or actions have no fixed size.

    Attributes:
        ids: Of the episodes, by share.
        policy_mapping_fn: Of episodes that begin from now on.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        config: RunnerConfig,
        policies: Callable[[], Mapping[str, Policy]],
        metrics: SampleMetrics,
        is_ragged: Callable[[], bool],
    ) -> None:
        self._config = config
        self._policies = policies
        self._metrics = metrics
        self._is_ragged = is_ragged
        self._share_of = {env_id: share for share in shares for env_id in share.slots}
        #: Env ids that a bridge's episodes have had.
        self._opened: set[int] = set()
        self.ids = EpisodeIds(config, len(shares))
        self.policy_mapping_fn = config.policy_mapping_fn
        self._faults: list[Fault] = []
        self._results: list[EpisodeResult] = []

    def take_news(self) -> tuple[tuple[Fault, ...], tuple[EpisodeResult, ...]]:
        """Return the faults and the ends of episodes since the last call."""
        news = tuple(self._faults), tuple(self._results)
        self._faults, self._results = [], []
        return news

    def forget_results(self, env_ids: Collection[int]) -> None:
        """Tell nothing of episodes of these envs that have ended: their rows do not leave."""
        self._results = [one for one in self._results if one.env_id not in env_ids]

    def create(self, slot: Slot) -> None:
        """Begin an episode whose first observations are awaited."""
        share = self._share_of[slot.env_id]
        if slot.phase is not Phase.RESETTING:  # else that one never began
            self.ids.begin(share.index)
        episode = EpisodeRecorder(
            int(self.ids.running[share.index]),
            slot.env_id,
            incarnation=slot.incarnation,
            policy_mapping_fn=lambda agent_id, _: self._policy_of(slot, agent_id),
            infos=self._config.infos,
            ragged=self._is_ragged(),
            episode_id=slot.episode_id,
            training_enabled=slot.training_enabled,
        )
        slot.begin_episode(episode, self._policies(), self.policy_mapping_fn)
        if not slot.is_rest:
            with naming("on_episode_created"):
                self._config.callbacks.on_episode_created(episode=episode)

    def open(self, share: OpenShare, slot: Slot) -> None:
        """An episode has begun by itself; its first observations are in the next `take`."""
        share.slots[slot.env_id] = slot
        self._share_of[slot.env_id] = share
        if slot.env_id not in self._opened:
            self._opened.add(slot.env_id)
            with naming("on_sub_environment_created"):
                self._config.callbacks.on_sub_environment_created(env_id=slot.env_id, incarnation=0)
        self.create(slot)

    def close(self, slot: Slot) -> None:
        """Forget an episode of a bridge that is over."""
        if (share := self._share_of.pop(slot.env_id, None)) is not None:
            del share.slots[slot.env_id]

    def give_up(self, slot: Slot) -> None:
        """Let none of the rows leave that an episode of a bridge has and will have.

        Its simulator cannot be told to begin anew: it is answered to the end.
        """
        episode = slot.episode
        assert episode is not None
        slot.is_rest = True
        slot.episode = EpisodeRecorder(
            episode.eps_id,
            slot.env_id,
            policy_mapping_fn=lambda agent_id, _: self._policy_of(slot, agent_id),
            ragged=self._is_ragged(),
            episode_id=slot.episode_id,
        )
        if slot.phase is Phase.WAITING:
            slot.episode.reset(slot.seen)
        else:
            slot.phase = Phase.RESETTING

    def take(
        self,
        result: PollResult,
        unacted: Collection[int] = (),
        choices: Mapping[int, ClientChoice] | None = None,
    ) -> None:
        """Take in what a poll has delivered.

        Args:
            result: Faults are older than what it has of envs of a pool, and younger than what it
                has of episodes of a bridge.
            unacted: Envs that were sent no action, or too late, for the observations before.
            choices: By env: which policy of its own a simulator has acted with.
        """
        for fault in result.faults:
            if not isinstance(self._share_of[fault.env_id], OpenShare):
                self._take_fault(fault)
        env_ids = sorted(result.observations)
        for env_id in env_ids:
            slot = self._slot(env_id)
            if env_id in unacted:
                slot.off_policy.clear()
                if slot.phase is not Phase.RESETTING:
                    assert slot.episode is not None
                    slot.episode.unact()
            if slot.phase is Phase.RESETTING and not slot.is_rest:
                self._prepare_start(slot, result.incarnations.get(env_id, 0))
            slot.choice = None if choices is None else choices.get(env_id)
            slot.off_policy.update(result.off_policy_actions.get(env_id, {}))
        seen = self._transform({env_id: result.observations[env_id] for env_id in env_ids})
        for env_id in env_ids:
            slot = self._slot(env_id)
            if slot.phase is Phase.RESETTING:
                self._start(slot, seen[env_id], result)
            else:
                self._step(slot, seen[env_id], result)
        for fault in result.faults:
            if isinstance(self._share_of[fault.env_id], OpenShare):
                self._take_fault(fault)

    # --- private -----------------------------------------------------------------------------

    def _slot(self, env_id: int) -> Slot:
        return self._share_of[env_id].slots[env_id]

    def _start(self, slot: Slot, seen: dict[AgentID, Tree], result: PollResult) -> None:
        episode, env_id = slot.episode, slot.env_id
        assert episode is not None
        is_open = isinstance(self._share_of[env_id], OpenShare)
        rewards = result.rewards[env_id] if is_open else None  # a pool's may be of the last episode
        ready = episode.reset(seen, result.infos[env_id], rewards)
        slot.take(self._asked(slot, ready, result), seen)
        if not slot.is_rest:
            with naming("on_episode_start"):
                self._config.callbacks.on_episode_start(episode=episode)
        terminated, truncated = result.terminateds[env_id][ALL], result.truncateds[env_id][ALL]
        if is_open and (terminated or truncated):
            episode.close(terminated=terminated, truncated=truncated)
            self._end(slot, episode)

    def _step(self, slot: Slot, seen: dict[AgentID, Tree], result: PollResult) -> None:
        episode, env_id = slot.episode, slot.env_id
        assert episode is not None
        ready = episode.step(
            seen,
            result.rewards[env_id],
            result.terminateds[env_id],
            result.truncateds[env_id],
            result.infos[env_id],
        )
        slot.take(self._asked(slot, ready, result), seen)
        if not slot.is_rest:
            with naming("on_episode_step"):
                self._config.callbacks.on_episode_step(episode=episode)
        if episode.done:
            self._end(slot, episode)
        elif not slot.is_kept and episode.env_steps >= _MOST_FORGOTTEN:
            episode.forget()

    def _asked(self, slot: Slot, ready: list[AgentID], result: PollResult) -> list[AgentID]:
        """Return who acts: where a simulator has acted, the agents that it has moved."""
        actions = result.off_policy_actions.get(slot.env_id)
        is_open = isinstance(self._share_of[slot.env_id], OpenShare)
        if not is_open or actions is None or actions.keys() >= set(ready):
            return ready
        assert slot.episode is not None
        slot.episode.unact(agent_id for agent_id in ready if agent_id not in actions)
        return [agent_id for agent_id in ready if agent_id in actions]

    def _transform(
        self, observations: dict[int, dict[AgentID, Tree]]
    ) -> dict[int, dict[AgentID, Tree]]:
        """Send observations through their policies' connectors, all alike ones together."""
        if self._config.observation_connector is None:
            return observations
        ragged = self._is_ragged()
        asked = [
            Asked(self._slot(env_id), agent_id, observation)
            for env_id, agents in observations.items()
            for agent_id, observation in agents.items()
        ]
        out: dict[int, dict[AgentID, Tree]] = {env_id: {} for env_id in observations}
        groups = by_form(asked, lambda one: self._policy_of(one.slot, one.agent_id), ragged=ragged)
        for policy_id, group in groups:
            connector = self._config.connector("observation", policy_id)
            rows = stack([one.observation for one in group], ragged=ragged)
            keys = [(one.slot.env_id, one.agent_id) for one in group]
            changed = rows if connector is None else connector(rows, keys)
            for index, (env_id, agent_id) in enumerate(keys):
                out[env_id][agent_id] = row_of(changed, index, ragged=ragged)
        return {  # in the order in which the env named its agents
            env_id: {agent_id: out[env_id][agent_id] for agent_id in agents}
            for env_id, agents in observations.items()
        }

    def _policy_of(self, slot: Slot, agent_id: AgentID) -> str:
        """Return the id of an agent's policy, which it keeps until the episode's end.

        Raises:
            ConfigError: There is no such policy.
        """
        known = slot.policy_ids.get(agent_id)
        if known is not None:
            return known
        assert slot.episode is not None
        choose = slot.policy_mapping_fn
        policy_id = next(iter(slot.policies)) if choose is None else choose(agent_id, slot.episode)
        if policy_id not in slot.policies or (choose is None and len(slot.policies) > 1):
            raise ConfigError(
                f"env {slot.env_id}, agent {agent_id!r}: "
                + (
                    f"policy_mapping_fn says {policy_id!r}"
                    if choose
                    else "a policy_mapping_fn must say which policy is its own"
                )
                + f"; there are {sorted(slot.policies)}"
            )
        slot.policy_ids[agent_id] = policy_id
        return policy_id

    def _prepare_start(self, slot: Slot, incarnation: int) -> None:
        """An env's first observations are there: see who it is now."""
        assert slot.episode is not None
        if incarnation != slot.incarnation:
            slot.incarnation = incarnation
            self._metrics.add_restart()
            with naming("on_sub_environment_created"):
                self._config.callbacks.on_sub_environment_created(
                    env_id=slot.env_id, incarnation=incarnation
                )
        slot.episode.incarnation = incarnation
        for both in (self._config.observation_connector, self._config.action_connector):
            for connector in both.values() if isinstance(both, Mapping) else [both]:
                if connector is not None:
                    connector.reset([slot.env_id])

    def _take_fault(self, fault: Fault) -> None:
        slot, share = self._slot(fault.env_id), self._share_of[fault.env_id]
        self._faults.append(fault)
        episode = slot.episode
        if episode is not None and slot.phase in (Phase.WAITING, Phase.STEPPING):
            keep = self._config.faulty_episodes == "truncate"
            dropped = episode.fault(keep=keep)
            if not keep:
                if isinstance(share, OpenShare):
                    dropped += share.forget_episode(episode.eps_id)
                if slot.is_kept:
                    self._metrics.add_dropped_rows(dropped)
            self._end(slot, episode, fault)
        with naming("on_fault"):
            self._config.callbacks.on_fault(fault=fault)
        if fault.given_up:
            slot.phase, slot.episode = Phase.LOST, None
        elif not isinstance(share, OpenShare):
            self.create(slot)  # its first observations come by themselves

    def _end(self, slot: Slot, episode: EpisodeRecorder, fault: Fault | None = None) -> None:
        share = self._share_of[slot.env_id]
        if not slot.is_rest:
            with naming("on_episode_end"):
                self._config.callbacks.on_episode_end(episode=episode, fault=fault)
            if slot.is_kept:
                share.collect(episode.cut(), episode.eps_id, faulty=episode.faulty)
            result = episode.result()
            self._metrics.add_episode(result)
            self._results.append(result)
        slot.end_episode()
