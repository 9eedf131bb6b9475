"""Samples by env and agent: any number of agents, policies and spaces, with callbacks.

The general one of two ways that give equal batches; `column_sampler.py` is the fast one. Envs may
come and go here: the episodes of a bridge. Leaves out where envs come from (`sources.py`), who
chooses actions (`inference.py`), and how much is asked of whom (`quotas.py`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.copies import own
from envbus.actors.env.agents import ALL
from envbus.actors.external.errors import SimulatorError
from envbus.actors.spaces.spaces import Space
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.bus.interrupts import uninterrupted
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.batches.episode import EpisodeIds, EpisodeRecorder, Fragment
from envbus.runner.batches.metrics import (
    MOST_RESULTS,
    EpisodeResult,
    PerfTimers,
    RecentResults,
    SampleMetrics,
)
from envbus.runner.batches.nested import Tree, row_of
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.bridge.results import acting
from envbus.runner.errors import Fault
from envbus.runner.policies.connectors import Connector, connected_rewards
from envbus.runner.policies.policy_map import PolicyMap
from envbus.runner.pool.agent_results import PollResult
from envbus.runner.sampling.callbacks import naming
from envbus.runner.sampling.config import (
    CONNECTED,
    EndlessEpisodes,
    EnvQuotas,
    Phase,
    RunnerConfig,
    Sample,
)
from envbus.runner.sampling.inference import AgentObservation, Inference, by_form, stack
from envbus.runner.sampling.quotas import BridgeQuotaHolder, EnvQuotaHolder, QuotaHolder, Slot
from envbus.runner.sampling.sources import BridgeSource, Polled, Source, poll_any

__all__ = ["DictSampler"]

_Bools: TypeAlias = npt.NDArray[np.bool_]

_log = logging.getLogger(__name__)

#: Seconds after which `serve` looks whether it is over.
_LONGEST_LOOK = 0.05
#: Env steps of an episode whose rows nobody wants, after which they are dropped.
_MOST_FORGOTTEN = 1000
#: Env steps that an episode of a bridge may have at least, where it is to leave as a whole.
_LONGEST_EPISODE = 100_000


class _Episodes:
    """Records each env's episode, and tells callbacks and metrics.

    Args:
        holders: Who contributes; their slots are the envs.

    Attributes:
        ids: Of the episodes, by holder.
        policy_mapping_fn: Of episodes that begin from now on.
    """

    def __init__(
        self,
        holders: Sequence[QuotaHolder],
        config: RunnerConfig,
        policies: PolicyMap,
        metrics: SampleMetrics,
        is_ragged: Callable[[AgentID], bool],
    ) -> None:
        self._config = config
        self._policies = policies
        self._metrics = metrics
        self._is_ragged = is_ragged
        self._holder_of = {env_id: holder for holder in holders for env_id in holder.slots}
        given = [getattr(config, f"{kind}_connector") for kind in CONNECTED]
        by_policy = [one if isinstance(one, Mapping) else {"": one} for one in given]
        #: Those of all kinds.
        self._connectors: list[Connector] = [
            one for named in by_policy for one in named.values() if one is not None
        ]
        #: Env ids that a bridge's episodes have had.
        self._opened: set[int] = set()
        self.ids = EpisodeIds(config.unique(0), len(holders))
        self.policy_mapping_fn = config.policy_mapping_fn
        # As many as metrics have, which are the same ones: no sample may be taken for long.
        self._faults: deque[Fault] = deque(maxlen=MOST_RESULTS)
        self._results = RecentResults()

    def take_events(self) -> tuple[tuple[Fault, ...], tuple[EpisodeResult, ...]]:
        """Return the faults and the ends of episodes since the last call, the latest of many."""
        faults = tuple(self._faults)
        self._faults.clear()
        return faults, tuple(self._results.take())

    def forget_results(self, env_ids: Collection[int]) -> None:
        """Tell nothing of episodes of these envs that have ended: their rows do not leave."""
        for result in self._results.take():
            if result.env_id not in env_ids:
                self._results.append(result)

    def create(self, slot: Slot) -> None:
        """Begin an episode whose first observations are awaited."""
        holder = self._holder_of[slot.env_id]
        if slot.phase is not Phase.RESETTING:  # else that one never began
            self.ids.begin(holder.index)
        episode = self._recorder(slot, int(self.ids.running[holder.index]))
        slot.begin_episode(episode, self._policies.by_id, self.policy_mapping_fn)
        if not slot.is_rest:
            with naming("on_episode_created"):
                self._config.callbacks.on_episode_created(episode=episode)

    def open(self, holder: BridgeQuotaHolder, slot: Slot) -> None:
        """An episode has begun by itself; its first observations are in the next `take`."""
        self._add(holder, slot)
        if slot.env_id not in self._opened:
            self._opened.add(slot.env_id)
            with naming("on_sub_environment_created"):
                self._config.callbacks.on_sub_environment_created(env_id=slot.env_id, incarnation=0)
        self.create(slot)

    def close(self, slot: Slot) -> None:
        """Forget an episode of a bridge that is over."""
        if (holder := self._holder_of.pop(slot.env_id, None)) is not None:
            del holder.slots[slot.env_id]

    def give_up(self, slot: Slot) -> None:
        """Let none of the rows leave that an episode of a bridge has and will have.

        Its simulator cannot be told to begin anew: it is answered to the end.
        """
        slot.is_rest = True
        episode = slot.episode
        if episode is None:
            self.create(slot)
            return
        slot.episode = self._recorder(slot, episode.eps_id)
        if slot.phase is Phase.WAITING:
            slot.episode.reset(slot.seen)
        else:
            slot.phase = Phase.RESETTING

    def give_up_all(self, holder: BridgeQuotaHolder, running: Sequence[Slot]) -> None:
        """Give up all episodes of a bridge.

        Args:
            holder: Whose part they are.
            running: All that are not over. What an exception has broken off may have opened only
                some of them, and have left others open.
        """
        for env_id in holder.slots:
            self._holder_of.pop(env_id, None)
        holder.slots.clear()
        for slot in running:
            self._add(holder, slot)
            self.give_up(slot)

    def lose(self, env_id: int) -> None:
        """An env of a pool was given up."""
        slot = self._slot(env_id)
        slot.phase, slot.episode = Phase.LOST, None

    def take(self, polled: Polled) -> None:
        """Take in what a poll has delivered.

        Its faults are older than what it has of envs of a pool, and younger than what it has of
        episodes of a bridge.
        """
        result = polled.result
        for fault in result.faults:
            if not isinstance(self._holder_of[fault.env_id], BridgeQuotaHolder):
                self._take_fault(fault)
        env_ids = sorted(result.observations)
        for env_id in env_ids:
            slot = self._slot(env_id)
            if slot.phase is Phase.ENDED:  # its actor was recycled before anybody asked it
                self.create(slot)
            if env_id in polled.unacted:
                slot.off_policy.clear()
                if slot.phase is not Phase.RESETTING:
                    assert slot.episode is not None
                    slot.episode.unact(everybody=env_id in polled.missed)
            if slot.phase is Phase.RESETTING and not slot.is_rest:
                self._prepare_start(slot, result.incarnations.get(env_id, 0))
            slot.choice = polled.choices.get(env_id)
            slot.off_policy.update(result.off_policy_actions.get(env_id, {}))
        seen = self._transform({env_id: result.observations[env_id] for env_id in env_ids})
        for env_id in env_ids:
            slot = self._slot(env_id)
            if slot.phase is Phase.RESETTING:
                self._start(slot, seen[env_id], result, missed=env_id in polled.missed)
            else:
                self._step(slot, seen[env_id], result)
        for fault in result.faults:
            if isinstance(self._holder_of[fault.env_id], BridgeQuotaHolder):
                self._take_fault(fault)

    # --- private -----------------------------------------------------------------------------

    def _add(self, holder: BridgeQuotaHolder, slot: Slot) -> None:
        holder.slots[slot.env_id] = slot
        self._holder_of[slot.env_id] = holder

    def _recorder(self, slot: Slot, eps_id: int) -> EpisodeRecorder:
        return EpisodeRecorder(
            eps_id,
            slot.env_id,
            incarnation=slot.incarnation,
            policy_mapping_fn=lambda agent_id, _: self._policy_of(slot, agent_id),
            infos=self._config.infos,
            is_ragged=self._is_ragged,
            episode_id=slot.episode_id,
            training_enabled=slot.training_enabled,
            connect_reward=None
            if self._config.reward_connector is None
            else functools.partial(self._connect_reward, slot.env_id),
        )

    def _connect_reward(
        self, env_id: int, agent_id: AgentID, policy_id: str, reward: float
    ) -> float:
        connector = self._config.connector("reward", policy_id)
        if connector is None:
            return reward
        return float(connected_rewards(connector, np.array([reward]), [(env_id, agent_id)])[0])

    def _slot(self, env_id: int) -> Slot:
        return self._holder_of[env_id].slots[env_id]

    def _start(
        self, slot: Slot, seen: dict[AgentID, Tree], result: PollResult, *, missed: bool
    ) -> None:
        episode, env_id = slot.episode, slot.env_id
        assert episode is not None
        is_open = isinstance(self._holder_of[env_id], BridgeQuotaHolder)
        terminateds, truncateds = result.terminateds[env_id], result.truncateds[env_id]
        rewards, done = None, set[AgentID]()  # a pool's may be of the last episode
        if is_open:
            rewards = result.rewards[env_id]
            done = seen.keys() - acting(seen, terminateds, truncateds)
        ready = episode.reset(seen, result.infos[env_id], rewards, void=missed, done=done)
        slot.take(self._asked(slot, ready, result), seen)
        if not slot.is_rest:
            for policy in slot.policies.values():
                if (hear := getattr(policy, "on_episode_start", None)) is not None:
                    hear(env_id=env_id, eps_id=episode.eps_id)
            with naming("on_episode_start"):
                self._config.callbacks.on_episode_start(episode=episode)
        terminated, truncated = terminateds[ALL], truncateds[ALL]
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
        is_open = isinstance(self._holder_of[slot.env_id], BridgeQuotaHolder)
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
        asked = [
            AgentObservation(self._slot(env_id), agent_id, observation)
            for env_id, agents in observations.items()
            for agent_id, observation in agents.items()
        ]
        out: dict[int, dict[AgentID, Tree]] = {env_id: {} for env_id in observations}
        groups = by_form(
            asked, lambda one: self._policy_of(one.slot, one.agent_id), self._is_ragged
        )
        for policy_id, group in groups:
            ragged = self._is_ragged(group[0].agent_id)
            connector = self._config.connector("observation", policy_id)
            rows = stack([one.observation for one in group], ragged=ragged)
            keys = [(one.slot.env_id, one.agent_id) for one in group]
            # Agents may wait with it until the connector writes to its arrays again.
            changed = rows if connector is None else own(connector(rows, keys))
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
        for connector in self._connectors:
            connector.reset([slot.env_id])

    def _take_fault(self, fault: Fault) -> None:
        slot, holder = self._slot(fault.env_id), self._holder_of[fault.env_id]
        self._faults.append(fault)
        episode = slot.episode
        if episode is not None and slot.phase in (Phase.WAITING, Phase.STEPPING):
            keep = self._config.faulty_episodes == "truncate"
            dropped = episode.fault(keep=keep)
            if slot.is_kept:
                self._metrics.add_dropped_rows(dropped)
            self._end(slot, episode, fault)
        with naming("on_fault"):
            self._config.callbacks.on_fault(fault=fault)
        if fault.given_up:
            self.lose(fault.env_id)
        elif not isinstance(holder, BridgeQuotaHolder):
            self.create(slot)  # its first observations come by themselves

    def _end(self, slot: Slot, episode: EpisodeRecorder, fault: Fault | None = None) -> None:
        holder = self._holder_of[slot.env_id]
        if not slot.is_rest:
            with naming("on_episode_end"):
                self._config.callbacks.on_episode_end(episode=episode, fault=fault)
                episode.check_metrics()
            if slot.is_kept:
                holder.collect(episode.cut(), faulty=episode.faulty)
            result = episode.result()
            self._metrics.add_episode(result)
            self._results.append(result)
            for policy in slot.policies.values():
                if (hear := getattr(policy, "on_episode_end", None)) is not None:
                    hear(result=result)
        slot.end_episode()
        if self._config.episodes_without_actions == "raise" and not (
            fault or episode.has_acted or isinstance(holder, BridgeQuotaHolder)
        ):
            raise ValueError(
                f"env {slot.env_id}: its episode {episode.eps_id} is over after {episode.length} "
                "env steps, and no agent has acted in it: none was observed before its end. See "
                'what its reset returns; or set RunnerConfig(episodes_without_actions="count")'
            )


class DictSampler:
    """Drives envs by their dicts, and records each one's episode.

    Args:
        sources: Where envs come from. A pool's caller resets its envs (DISABLED).
        asking: Held while a policy is asked.

    Attributes:
        ids: Of the episodes.
        episodes: Has the `policy_mapping_fn`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        config: RunnerConfig,
        policies: PolicyMap,
        metrics: SampleMetrics,
        timers: PerfTimers,
        asking: AbstractContextManager[Any],
    ) -> None:
        self._config = config
        self._metrics, self._timers = metrics, timers
        self._sources = sources
        self._polls = 0
        self._holders = [holder for source in sources for holder in source.holders]
        self._bridge_holders = [
            holder for holder in self._holders if isinstance(holder, BridgeQuotaHolder)
        ]
        self._inference = Inference(
            config,
            timers,
            self._is_ragged,
            self._lists_actions,
            self._action_space,
            asking,
            metrics,
            off_policy=bool(self._bridge_holders),
        )
        self.episodes = _Episodes(self._holders, config, policies, metrics, self._is_ragged)
        self._endless = EndlessEpisodes(config)
        self._told_of_idle_agents = False
        self.ids = self.episodes.ids

    @property
    def live(self) -> _Bools:
        """Who can contribute a part, `(parts,)`: envs that were not given up; bridges always."""
        return self._by_part(lambda holder: holder.live)

    @property
    def stepping(self) -> _Bools:
        """Which envs have been sent actions and have not answered, `(parts,)`."""
        return self._by_part(lambda holder: holder.stepping)

    def lose(self, env_ids: Sequence[int]) -> None:
        """These envs of a pool were given up."""
        for env_id in env_ids:
            self.episodes.lose(env_id)

    def reset(self, seed: int | None) -> None:
        """Give up what runs in a pool, and begin a new episode in each of its envs."""
        for holder in self._holders:
            if isinstance(holder, EnvQuotaHolder):
                holder.forget()
                self.episodes.forget_results(holder.slots)
                for slot in holder.slots.values():
                    if slot.phase is not Phase.LOST:
                        self.episodes.create(slot)
        for source in self._sources:
            source.reset_all(seed)

    def give_up(self) -> None:
        """Let no more rows leave of the episodes of bridges that run; they are answered."""
        for source in self._sources:
            if isinstance(source, BridgeSource):
                for holder in source.holders:
                    self.episodes.give_up_all(holder, source.running())

    def abandon(self) -> None:
        """Be used no more: simulators that wait are told that another will answer them."""
        for source in self._sources:
            source.fail(EnvbusError("policies are being exchanged; ask again"))

    def has_cut_episode(self) -> bool:
        """Return whether an episode of a pool runs of which env steps have left already."""
        return any(
            slot.episode and slot.episode.is_cut
            for holder in self._holders
            if isinstance(holder, EnvQuotaHolder)
            for slot in holder.slots.values()
        )

    def sample(
        self, quotas: EnvQuotas, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the quotas are met, or the deadline (monotonic time) has passed."""
        self._begin(quotas)
        late: Sequence[int] = ()
        with self._notifying():
            unmet = self._unmet(quotas)
            self._go_on(unmet, explore)
            while awaited := self._awaited(unmet):
                parts = sum(holder.width for holder in unmet)
                least = self._config.envs_to_wait_for(parts)
                if not (wanted := quotas.to_wait_for(parts, least)):
                    late = sorted(self._stepping(awaited))
                    break
                overdue = self._poll(awaited, deadline, wanted)
                unmet = self._unmet(quotas)
                self._go_on(unmet, explore)
                self._timers.end_iteration()
                if quotas.complete:
                    self._give_up_endless()
                    if self._endless.is_due():
                        self._endless.look(self._lengths())
                if overdue is not None:
                    # All may have answered in time, and be at their next step.
                    late = overdue or sorted(self._stepping(self._awaited(unmet)))
                    break
        return self._end(quotas, tuple(late), unroll_id)

    def serve(self, deadline: float, explore: bool, is_over: Callable[[], bool]) -> None:
        """Answer the episodes of bridges until the deadline (monotonic time), or until it is over.

        Their rows wait for the next sample.
        """
        with self._notifying():
            self._go_on(self._bridge_holders, explore)
            while not is_over() and time.monotonic() < deadline:
                self._poll(self._bridge_holders, min(deadline, time.monotonic() + _LONGEST_LOOK), 1)
                self._go_on(self._bridge_holders, explore)
                for holder in self._bridge_holders:
                    self._metrics.add_dropped_rows(holder.shrink(self._config.max_waiting_steps))

    # --- private -----------------------------------------------------------------------------

    def _is_ragged(self, agent_id: AgentID) -> bool:
        return any(source.is_ragged(agent_id) for source in self._sources)

    def _lists_actions(self, agent_id: AgentID) -> bool:
        return any(source.lists_actions(agent_id) for source in self._sources)

    def _action_space(self, agent_id: AgentID) -> Space | None:
        found = (source.action_space(agent_id) for source in self._sources)
        return next((space for space in found if space is not None), None)

    def _by_part(self, ask: Callable[[QuotaHolder], bool]) -> _Bools:
        parts: _Bools = np.repeat(
            [ask(holder) for holder in self._holders], [holder.width for holder in self._holders]
        )
        return parts

    def _begin(self, quotas: EnvQuotas) -> None:
        first = 0
        for holder in self._holders:
            holder.begin(int(quotas.amounts[first : first + holder.width].sum()))
            first += holder.width
        if quotas.complete:  # what has left in part cannot be had whole
            for holder in self._bridge_holders:
                self._metrics.add_dropped_rows(holder.forget_parts())
                for slot in holder.slots.values():
                    if slot.episode and slot.episode.is_cut and slot.is_kept:
                        self._drop(slot, slot.episode)

    def _give_up_endless(self) -> None:
        """Let no episode of a bridge grow without end."""
        most = max(self._config.max_waiting_steps, _LONGEST_EPISODE)
        for holder in self._bridge_holders:
            for slot in holder.slots.values():
                if slot.episode and slot.episode.env_steps > most and slot.is_kept:
                    _log.warning(
                        "episode %s of a bridge goes on after %d env steps, and whole episodes are "
                        "sampled: it is answered to its end, and its rows are dropped",
                        slot.episode_id,
                        slot.episode.env_steps,
                    )
                    self._drop(slot, slot.episode)

    def _drop(self, slot: Slot, episode: EpisodeRecorder) -> None:
        self._metrics.add_dropped_rows(episode.agent_steps)
        self.episodes.give_up(slot)

    def _unmet(self, quotas: EnvQuotas) -> list[QuotaHolder]:
        return [holder for holder in self._holders if not holder.met(quotas)]

    def _awaited(self, unmet: Sequence[QuotaHolder]) -> list[QuotaHolder]:
        """Return those of whom something can come."""
        return [
            holder
            for holder in unmet
            if isinstance(holder, BridgeQuotaHolder)
            or any(s.is_awaited for s in holder.slots.values())
        ]

    def _stepping(self, holders: Sequence[QuotaHolder]) -> list[int]:
        return [s.env_id for holder in holders for s in holder.slots.values() if s.is_awaited]

    def _lengths(self) -> dict[int, int]:
        """Return the env steps so far of the episodes that run and are kept, by env."""
        return {
            slot.env_id: slot.episode.length
            for holder in self._holders
            for slot in holder.slots.values()
            if slot.episode and slot.is_kept and not slot.episode.done
        }

    def _poll(
        self, awaited: Sequence[QuotaHolder], deadline: float | None, wanted: int
    ) -> list[int] | None:
        """Take in what some bring; if the time is over, return the envs that are late."""
        asked = set(self._stepping(awaited))
        sources = [
            source
            for source in self._sources
            if any(holder in awaited for holder in source.holders)
        ]
        begin = time.perf_counter()
        self._polls += 1
        polled = poll_any(sources, deadline, wanted, self._polls)
        now = time.perf_counter()
        self._timers.add("env_wait", now - begin)
        try:
            for holder, slot in polled.opened:
                self.episodes.open(holder, slot)
            self.episodes.take(polled)
        finally:
            for slot in polled.closed:
                self.episodes.close(slot)
        for source in sources:
            source.confirm()
        late = polled.result.late
        self._timers.add("raw_obs_processing", time.perf_counter() - now)
        if late or (deadline is not None and time.monotonic() >= deadline):
            return sorted(env_id for env_id in late if env_id in asked)
        return None

    def _go_on(self, unmet: Sequence[QuotaHolder], explore: bool) -> None:
        """Have the envs step whose agents wait, and those that are between episodes begin."""
        slots = [slot for holder in unmet for slot in holder.slots.values()]
        acting = [slot for slot in slots if slot.phase is Phase.WAITING]
        over = {slot.env_id for slot in slots if slot.phase is Phase.ENDED}
        if acting:
            actions = self._inference.act(acting, explore)
            for slot in acting:
                slot.phase = Phase.STEPPING
        for slot in slots:
            if slot.env_id in over:
                self.episodes.create(slot)
        for source in self._sources:
            own = [slot for slot in acting if source.has(slot.env_id)]
            if own:
                source.send_actions(own, actions)
            if resetting := [env_id for env_id in over if source.has(env_id)]:
                source.reset(resetting)

    @contextmanager
    def _notifying(self) -> Iterator[None]:
        """Tell simulators that wait what is raised here."""
        try:
            yield
        except SimulatorError:
            raise  # of the one that has ended; others are not concerned
        except BaseException as exc:
            is_own = isinstance(exc, Exception)
            told = exc if is_own else EnvbusError(f"sampling was broken off: {type(exc).__name__}")
            with uninterrupted():
                for source in self._sources:
                    source.fail(told)
            raise

    def _end(self, quotas: EnvQuotas, late: tuple[int, ...], unroll_id: int) -> Sample:
        fragments: list[Fragment] = []
        for holder in self._holders:
            taken = holder.take(quotas)
            fragments += taken
            if not self._told_of_idle_agents and taken:
                self._look_for_agents(holder, taken)
        rows = MultiAgentBatch.of(
            (part for fragment in fragments for part in fragment.parts),
            sum(fragment.env_steps for fragment in fragments),
        )
        batches = {
            policy_id: batch.with_columns(unroll_id=np.full(len(batch), unroll_id, np.int64))
            for policy_id, batch in rows.policy_batches.items()
        }
        faults, results = self.episodes.take_events()
        return Sample(batches, rows.env_steps, late=late, faults=faults, episodes=results)

    def _look_for_agents(self, holder: QuotaHolder, taken: Sequence[Fragment]) -> None:
        """Warn if envs have taken steps in which no agent was asked to act."""
        if any(fragment.parts for fragment in taken):
            return
        self._told_of_idle_agents = True
        _log.warning(
            "env %s: %d env steps of a sample, and no agent has acted in them: there are no rows. "
            "Does it return observations of agents that are to act? This is said once.",
            ", ".join(map(str, holder.slots)),
            sum(fragment.env_steps for fragment in taken),
        )
