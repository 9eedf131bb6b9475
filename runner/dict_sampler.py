"""Samples by env and agent: any number of agents, policies and spaces, with callbacks.

The general one of two ways that give equal batches; `column_sampler.py` is the fast one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.runner.batch import MultiAgentBatch
from envbus.runner.episodes import Episodes
from envbus.runner.inference import Inference
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import Policy
from envbus.runner.pool import ActorPool
from envbus.runner.running_episodes import EpisodeIds
from envbus.runner.sampling import Demand, Phase, PolicyMapping, RunnerConfig, Sample
from envbus.runner.sources import PoolSource

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
        self._timers = timers
        self._inference = Inference(config, timers, ragged=ragged)
        self._source = PoolSource(pool)
        self._shares = self._source.shares
        self._episodes = Episodes(self._shares, config, policies, metrics, ragged=ragged)

    @property
    def ids(self) -> EpisodeIds:
        """Of the episodes."""
        return self._episodes.ids

    @property
    def policy_mapping_fn(self) -> PolicyMapping | None:
        """Who says which policy is an agent's; if set, of episodes that begin from now on."""
        return self._episodes.policy_mapping_fn

    @policy_mapping_fn.setter
    def policy_mapping_fn(self, policy_mapping_fn: PolicyMapping | None) -> None:
        self._episodes.policy_mapping_fn = policy_mapping_fn

    @property
    def live(self) -> _Bools:
        """Which envs were not given up, `(N,)`."""
        return np.array([share.live for share in self._shares])

    @property
    def stepping(self) -> _Bools:
        """Which envs have been sent actions and have not answered, `(N,)`."""
        return np.array([share.stepping for share in self._shares])

    def reset(self, seed: int | None) -> None:
        """Give up what runs, and begin a new episode in each env."""
        for share in self._shares:
            for slot in share.slots.values():
                if slot.phase is not Phase.LOST:
                    self._episodes.create(slot)
        self._pool.reset(seed)

    def has_cut_episode(self) -> bool:
        """Return whether an episode runs of which rows have left already."""
        return any(
            slot.episode and slot.episode.num_fragments
            for share in self._shares
            for slot in share.slots.values()
        )

    def sample(
        self, demand: Demand, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the demand is met, or the deadline (monotonic time) has passed."""
        for share in self._shares:
            share.begin(int(demand.quotas[share.index]))
        self._episodes.begin_sample()
        late: tuple[int, ...] = ()
        self._go_on(demand, explore)
        while True:
            awaited = {
                slot.env_id
                for share in self._shares
                for slot in share.slots.values()
                if slot.is_awaited and not share.met(demand)
            }
            if not awaited:
                break
            wanted = demand.to_wait_for(len(awaited), self._config.min_envs)
            if not wanted:
                late = tuple(sorted(awaited))
                break
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            begin = time.perf_counter()
            result = self._source.poll(left, wanted)
            now = time.perf_counter()
            self._timers.add("env_wait", now - begin)
            self._episodes.take(result)
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
        unmet = [
            slot for share in self._shares if not share.met(demand) for slot in share.slots.values()
        ]
        acting = [slot for slot in unmet if slot.phase is Phase.WAITING]
        over = [slot for slot in unmet if slot.phase is Phase.ENDED]
        if acting:
            actions = self._inference.act(acting, explore)
            for slot in acting:
                slot.phase = Phase.STEPPING
            self._source.send_actions(actions)
        if over:
            for slot in over:
                self._episodes.create(slot)
            self._source.reset([slot.env_id for slot in over])

    def _end_fragment(self, demand: Demand, late: tuple[int, ...], unroll_id: int) -> Sample:
        fragments = [fragment for share in self._shares for fragment in share.take(demand)]
        rows = MultiAgentBatch.of(
            (part for fragment in fragments for part in fragment.parts),
            sum(fragment.env_steps for fragment in fragments),
        )
        batches = {
            policy_id: batch.with_columns(unroll_id=np.full(len(batch), unroll_id, np.int64))
            for policy_id, batch in rows.policy_batches.items()
        }
        return Sample(
            batches,
            rows.env_steps,
            late=late,
            faults=tuple(self._episodes.faults),
            episodes=tuple(self._episodes.results),
        )
