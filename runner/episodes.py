"""The running episodes of a `DictSampler`: begun, stepped and ended by what a poll delivers.

Leaves out where that comes from (`sources.py`), who chooses actions (`inference.py`), and how
much is asked of whom (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import PollResult
from envbus.runner.callbacks import naming
from envbus.runner.episode import EpisodeRecorder
from envbus.runner.faults import Fault
from envbus.runner.inference import Asked, by_form, row_of, stack
from envbus.runner.metrics import EpisodeResult, SampleMetrics
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy
from envbus.runner.running_episodes import EpisodeIds
from envbus.runner.sampling import Phase, RunnerConfig
from envbus.runner.shares import Share
from envbus.runner.slot import Slot
from envbus.runner.trajectory import AgentID

__all__ = ["Episodes"]


class Episodes:
    """Records each env's episode, and tells callbacks and metrics.

    Args:
        shares: Who contributes; their slots are the envs.
        policies: Returns the policies by id that an episode which begins now can have.
        ragged: Observations or actions have no fixed size.

    Attributes:
        ids: Of the episodes, by share.
        policy_mapping_fn: Of episodes that begin from now on.
        faults, results: Of the sample that runs.
    """

    def __init__(
        self,
        shares: Iterable[Share],
        config: RunnerConfig,
        policies: Callable[[], Mapping[str, Policy]],
        metrics: SampleMetrics,
        *,
        ragged: bool,
    ) -> None:
        self._config = config
        self._policies = policies
        self._metrics = metrics
        self._ragged = ragged
        self._share_of = {env_id: share for share in shares for env_id in share.slots}
        self.ids = EpisodeIds(config, len({id(share) for share in self._share_of.values()}))
        self.policy_mapping_fn = config.policy_mapping_fn
        self.faults: list[Fault] = []
        self.results: list[EpisodeResult] = []

    def begin_sample(self) -> None:
        """Forget what was told with the sample before."""
        self.faults, self.results = [], []

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
            ragged=self._ragged,
        )
        slot.begin_episode(episode, self._policies(), self.policy_mapping_fn)
        with naming("on_episode_created"):
            self._config.callbacks.on_episode_created(episode=episode)

    def take(self, result: PollResult) -> None:
        """Take in what a poll has delivered."""
        for fault in result.faults:
            self._take_fault(fault)
        env_ids = sorted(result.observations)
        for env_id in env_ids:
            slot = self._slot(env_id)
            if slot.phase is Phase.RESETTING:
                self._prepare_start(slot, result.incarnations[env_id])
            slot.off_policy.update(result.off_policy_actions.get(env_id, {}))
        seen = self._transform({env_id: result.observations[env_id] for env_id in env_ids})
        for env_id in env_ids:
            slot = self._slot(env_id)
            episode = slot.episode
            assert episode is not None
            if slot.phase is Phase.RESETTING:
                slot.take(episode.reset(seen[env_id], result.infos[env_id]), seen[env_id])
                with naming("on_episode_start"):
                    self._config.callbacks.on_episode_start(episode=episode)
                continue
            ready = episode.step(
                seen[env_id],
                result.rewards[env_id],
                result.terminateds[env_id],
                result.truncateds[env_id],
                result.infos[env_id],
            )
            slot.take(ready, seen[env_id])
            with naming("on_episode_step"):
                self._config.callbacks.on_episode_step(episode=episode)
            if episode.done:
                self._end(slot, episode)

    # --- private -----------------------------------------------------------------------------

    def _slot(self, env_id: int) -> Slot:
        return self._share_of[env_id].slots[env_id]

    def _transform(
        self, observations: dict[int, dict[AgentID, Tree]]
    ) -> dict[int, dict[AgentID, Tree]]:
        """Send observations through their policies' connectors, all alike ones together."""
        if self._config.observation_connector is None:
            return observations
        asked = [
            Asked(self._slot(env_id), agent_id, observation)
            for env_id, agents in observations.items()
            for agent_id, observation in agents.items()
        ]
        out: dict[int, dict[AgentID, Tree]] = {env_id: {} for env_id in observations}
        groups = by_form(
            asked, lambda one: self._policy_of(one.slot, one.agent_id), ragged=self._ragged
        )
        for policy_id, group in groups:
            connector = self._config.connector("observation", policy_id)
            rows = stack([one.observation for one in group], ragged=self._ragged)
            keys = [(one.slot.env_id, one.agent_id) for one in group]
            changed = rows if connector is None else connector(rows, keys)
            for index, (env_id, agent_id) in enumerate(keys):
                out[env_id][agent_id] = row_of(changed, index, ragged=self._ragged)
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
        slot = self._slot(fault.env_id)
        self.faults.append(fault)
        episode = slot.episode
        if episode is not None and slot.phase in (Phase.WAITING, Phase.STEPPING):
            keep = self._config.faulty_episodes == "truncate"
            dropped = episode.fault(keep=keep)
            if not keep:
                self._metrics.add_dropped_rows(dropped)
            self._end(slot, episode, fault)
        with naming("on_fault"):
            self._config.callbacks.on_fault(fault=fault)
        if fault.given_up:
            slot.phase, slot.episode = Phase.LOST, None
        else:  # the first observations of the next one come by themselves
            self.create(slot)

    def _end(self, slot: Slot, episode: EpisodeRecorder, fault: Fault | None = None) -> None:
        with naming("on_episode_end"):
            self._config.callbacks.on_episode_end(episode=episode, fault=fault)
        self._share_of[slot.env_id].collect(episode.cut(), faulty=episode.faulty)
        slot.end_episode()
        result = episode.result()
        self._metrics.add_episode(result)
        self.results.append(result)
