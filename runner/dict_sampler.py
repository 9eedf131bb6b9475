"""Samples by env and agent: any number of agents, policies and spaces, with callbacks.

The general one of two ways that give equal batches; `column_sampler.py` is the fast one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import PollResult
from envbus.runner.batch import MultiAgentBatch
from envbus.runner.callbacks import naming
from envbus.runner.episode import EpisodeRecorder
from envbus.runner.faults import Fault
from envbus.runner.inference import Asked, Inference, by_form, row_of, stack
from envbus.runner.metrics import EpisodeResult, PerfTimers, SampleMetrics
from envbus.runner.nested import Tree
from envbus.runner.policies import Policy
from envbus.runner.pool import ActorPool
from envbus.runner.running_episodes import EpisodeIds
from envbus.runner.sampling import Demand, Phase, RunnerConfig, Sample
from envbus.runner.slot import Slot
from envbus.runner.trajectory import AgentID

__all__ = ["DictSampler"]

_Bools: TypeAlias = npt.NDArray[np.bool_]


class DictSampler:
    """Drives a pool's dict side, and records each env's episode.

    Args:
        pool: Its caller resets its envs (DISABLED).
        policies: Returns the policies by id that an episode which begins now can have.
        ragged: Observations or actions have no fixed size.
    """

    def __init__(
        self,
        pool: ActorPool,
        config: RunnerConfig,
        policies: Callable[[], Mapping[str, Policy]],
        metrics: SampleMetrics,
        timers: PerfTimers,
        *,
        ragged: bool,
    ) -> None:
        self._pool = pool
        self._config = config
        self._policies = policies
        self._metrics, self._timers = metrics, timers
        self._ragged = ragged
        self._inference = Inference(config, timers, ragged=ragged)
        self._slots = [Slot(env_id) for env_id in range(pool.num_envs)]
        #: Of the episodes.
        self.ids = EpisodeIds(config, pool.num_envs)
        self._faults: list[Fault] = []
        self._results: list[EpisodeResult] = []
        #: `(agent_id, episode) -> policy id`, of episodes that begin from now on.
        self.policy_mapping_fn = config.policy_mapping_fn

    @property
    def live(self) -> _Bools:
        """Which envs were not given up, `(N,)`."""
        return np.array([slot.phase is not Phase.LOST for slot in self._slots])

    @property
    def stepping(self) -> _Bools:
        """Which envs have been sent actions and have not answered, `(N,)`."""
        return np.array([slot.phase is Phase.STEPPING for slot in self._slots])

    def reset(self, seed: int | None) -> None:
        """Give up what runs, and begin a new episode in each env."""
        slots = [slot for slot in self._slots if slot.phase is not Phase.LOST]
        for slot in slots:
            self._create_episode(slot)
        self._pool.reset(seed)

    def has_cut_episode(self) -> bool:
        """Return whether an episode runs of which rows have left already."""
        return any(slot.episode and slot.episode.num_fragments for slot in self._slots)

    def sample(
        self, demand: Demand, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the demand is met, or the deadline (monotonic time) has passed."""
        for slot in self._slots:
            slot.begin_fragment(int(demand.quotas[slot.env_id]))
        self._faults, self._results = [], []
        late: tuple[int, ...] = ()
        self._go_on(demand, explore)
        while True:
            awaited = {
                slot.env_id for slot in self._slots if slot.is_awaited and not slot.met(demand)
            }
            if not awaited:
                break
            wanted = demand.to_wait_for(len(awaited), self._config.min_envs)
            if not wanted:
                late = tuple(sorted(awaited))
                break
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            begin = time.perf_counter()
            result = self._pool.poll(left, min_envs=wanted)
            now = time.perf_counter()
            self._timers.add("env_wait", now - begin)
            self._take(result, unroll_id)
            self._timers.add("raw_obs_processing", time.perf_counter() - now)
            self._go_on(demand, explore)
            self._timers.end_iteration()
            if result.late:
                late = tuple(env_id for env_id in result.late if env_id in awaited)
                break
        return self._end_fragment(demand, late, unroll_id)

    # --- private -----------------------------------------------------------------------------

    def _go_on(self, demand: Demand, explore: bool) -> None:
        """Have the envs step whose agents wait, and those that are between episodes begin."""
        unmet = [slot for slot in self._slots if not slot.met(demand)]
        acting = [slot for slot in unmet if slot.phase is Phase.WAITING]
        over = [slot for slot in unmet if slot.phase is Phase.ENDED]
        if acting:
            actions = self._inference.act(acting, explore)
            for slot in acting:
                slot.phase = Phase.STEPPING
            self._pool.send_actions(actions)
        if over:
            for slot in over:
                self._create_episode(slot)
            self._pool.reset(env_ids=[slot.env_id for slot in over])

    def _take(self, result: PollResult, unroll_id: int) -> None:
        for fault in result.faults:
            self._take_fault(fault, unroll_id)
        env_ids = sorted(result.observations)
        for env_id in env_ids:
            slot = self._slots[env_id]
            if slot.phase is Phase.RESETTING:
                self._prepare_start(slot, result.incarnations[env_id])
            slot.off_policy.update(result.off_policy_actions.get(env_id, {}))
        seen = self._transform({env_id: result.observations[env_id] for env_id in env_ids})
        for env_id in env_ids:
            slot = self._slots[env_id]
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
                self._end_episode(slot, episode, unroll_id)

    def _transform(
        self, observations: dict[int, dict[AgentID, Tree]]
    ) -> dict[int, dict[AgentID, Tree]]:
        """Send observations through their policies' connectors, all alike ones together."""
        if self._config.observation_connector is None:
            return observations
        asked = [
            Asked(self._slots[env_id], agent_id, observation)
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

    def _create_episode(self, slot: Slot) -> None:
        env_id = slot.env_id
        if slot.phase is not Phase.RESETTING:  # else that one never began
            self.ids.begin(env_id)
        episode = EpisodeRecorder(
            int(self.ids.running[env_id]),
            env_id,
            incarnation=slot.incarnation,
            policy_mapping_fn=lambda agent_id, _: self._policy_of(slot, agent_id),
            infos=self._config.infos,
            ragged=self._ragged,
        )
        slot.begin_episode(episode, self._policies(), self.policy_mapping_fn)
        with naming("on_episode_created"):
            self._config.callbacks.on_episode_created(episode=episode)

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

    def _take_fault(self, fault: Fault, unroll_id: int) -> None:
        slot = self._slots[fault.env_id]
        self._faults.append(fault)
        episode = slot.episode
        if episode is not None and slot.phase in (Phase.WAITING, Phase.STEPPING):
            keep = self._config.faulty_episodes == "truncate"
            dropped = episode.fault(keep=keep)
            if not keep:
                self._metrics.add_dropped_rows(dropped)
            self._end_episode(slot, episode, unroll_id, fault)
        with naming("on_fault"):
            self._config.callbacks.on_fault(fault=fault)
        if fault.given_up:
            slot.phase, slot.episode = Phase.LOST, None
        else:  # the first observations of the next one come by themselves
            self._create_episode(slot)

    def _end_episode(
        self, slot: Slot, episode: EpisodeRecorder, unroll_id: int, fault: Fault | None = None
    ) -> None:
        with naming("on_episode_end"):
            self._config.callbacks.on_episode_end(episode=episode, fault=fault)
        slot.collect(episode.cut(unroll_id=unroll_id))
        slot.end_episode(faulty=episode.faulty)
        result = episode.result()
        self._metrics.add_episode(result)
        self._results.append(result)

    def _end_fragment(self, demand: Demand, late: tuple[int, ...], unroll_id: int) -> Sample:
        for slot in self._slots:
            if slot.episode is not None and not demand.complete and slot.episode.env_steps:
                slot.collect(slot.episode.cut(unroll_id=unroll_id))
        rows = MultiAgentBatch.of(
            (part for slot in self._slots for part in slot.parts),
            sum(slot.env_steps for slot in self._slots),
        )
        return Sample(
            rows.policy_batches,
            rows.env_steps,
            late=late,
            faults=tuple(self._faults),
            episodes=tuple(self._results),
        )
