"""Samples by env and agent: any number of agents, policies and spaces, with callbacks.

The general one of two ways that give equal batches; `column_sampler.py` is the fast one. Envs may
come and go here: the episodes of a bridge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from envbus.actors.external.errors import SimulatorError
from envbus.bus.errors import EnvbusError
from envbus.runner.batch import MultiAgentBatch
from envbus.runner.endless import EndlessEpisodes
from envbus.runner.episodes import Episodes
from envbus.runner.inference import Inference
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import Policy
from envbus.runner.running_episodes import EpisodeIds
from envbus.runner.sampling import Demand, Phase, PolicyMapping, RunnerConfig, Sample
from envbus.runner.shares import EnvShare, OpenShare, Share
from envbus.runner.sources import Source, poll_any

__all__ = ["DictSampler"]

_Bools: TypeAlias = npt.NDArray[np.bool_]

#: Seconds after which `serve` looks whether it is over.
_LONGEST_LOOK = 0.05


class DictSampler:
    """Drives envs by their dicts, and records each one's episode.

    Args:
        sources: Where envs come from. A pool's caller resets its envs (DISABLED).
        policies: Returns the policies by id that an episode which begins now can have.
        asking: Held while a policy is asked.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        config: RunnerConfig,
        policies: Callable[[], Mapping[str, Policy]],
        metrics: SampleMetrics,
        timers: PerfTimers,
        asking: AbstractContextManager[Any],
    ) -> None:
        self._config = config
        self._metrics, self._timers = metrics, timers
        self._sources = sources
        self._polls = 0
        self._shares = [share for source in sources for share in source.shares]
        self._open = [share for share in self._shares if isinstance(share, OpenShare)]
        self._inference = Inference(
            config, timers, self._is_ragged, asking, off_policy=bool(self._open)
        )
        self._episodes = Episodes(self._shares, config, policies, metrics, self._is_ragged)
        self._endless = EndlessEpisodes(config)

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
        """Who can contribute a part, `(parts,)`: envs that were not given up; bridges always."""
        return self._by_part(lambda share: share.live)

    @property
    def stepping(self) -> _Bools:
        """Which envs have been sent actions and have not answered, `(parts,)`."""
        return self._by_part(lambda share: share.stepping)

    def reset(self, seed: int | None) -> None:
        """Give up what runs in a pool, and begin a new episode in each of its envs."""
        for share in self._shares:
            if isinstance(share, EnvShare):
                share.forget()
                self._episodes.forget_results(share.slots)
                for slot in share.slots.values():
                    if slot.phase is not Phase.LOST:
                        self._episodes.create(slot)
        for source in self._sources:
            source.reset_all(seed)

    def give_up(self) -> None:
        """Let no more rows leave of the episodes of bridges that run; they are answered."""
        for share in self._open:
            for slot in share.slots.values():
                self._episodes.give_up(slot)

    def abandon(self) -> None:
        """Be used no more: simulators that wait are told that another will answer them."""
        for source in self._sources:
            source.fail(EnvbusError("policies are being exchanged; ask again"))

    def has_cut_episode(self) -> bool:
        """Return whether an episode of a pool runs of which rows have left already."""
        return any(
            slot.episode and slot.episode.num_fragments
            for share in self._shares
            if isinstance(share, EnvShare)
            for slot in share.slots.values()
        )

    def sample(
        self, demand: Demand, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the demand is met, or the deadline (monotonic time) has passed."""
        self._begin(demand)
        late: Sequence[int] = ()
        with self._telling():
            unmet = self._unmet(demand)
            self._go_on(unmet, explore)
            while awaited := self._awaited(unmet):
                parts = sum(share.width for share in unmet)
                if not (wanted := demand.to_wait_for(parts, self._config.min_envs)):
                    late = sorted(self._stepping(awaited))
                    break
                overdue = self._poll(awaited, deadline, wanted)
                unmet = self._unmet(demand)
                self._go_on(unmet, explore)
                self._timers.end_iteration()
                if demand.complete and self._endless.is_due():
                    self._endless.look(self._lengths())
                if overdue is not None:
                    # All may have answered in time, and be at their next step.
                    late = overdue or sorted(self._stepping(self._awaited(unmet)))
                    break
        return self._end(demand, tuple(late), unroll_id)

    def serve(self, deadline: float, explore: bool, is_over: Callable[[], bool]) -> None:
        """Answer the episodes of bridges until the deadline (monotonic time), or until it is over.

        Their rows wait for the next sample.
        """
        with self._telling():
            self._go_on(self._open, explore)
            while not is_over() and time.monotonic() < deadline:
                self._poll(self._open, min(deadline, time.monotonic() + _LONGEST_LOOK), 1)
                self._go_on(self._open, explore)
                for share in self._open:
                    self._metrics.add_dropped_rows(share.shrink(self._config.max_waiting_steps))

    # --- private -----------------------------------------------------------------------------

    def _is_ragged(self) -> bool:
        return any(source.is_ragged for source in self._sources)

    def _by_part(self, ask: Callable[[Share], bool]) -> _Bools:
        parts: _Bools = np.repeat(
            [ask(share) for share in self._shares], [share.width for share in self._shares]
        )
        return parts

    def _begin(self, demand: Demand) -> None:
        first = 0
        for share in self._shares:
            share.begin(int(demand.quotas[first : first + share.width].sum()))
            first += share.width
        if demand.complete:  # what has left in part cannot be had whole
            for share in self._open:
                self._metrics.add_dropped_rows(share.forget_parts())
                for slot in share.slots.values():
                    if slot.episode and slot.episode.num_fragments and slot.is_kept:
                        self._metrics.add_dropped_rows(slot.episode.agent_steps)
                        self._episodes.give_up(slot)

    def _unmet(self, demand: Demand) -> list[Share]:
        return [share for share in self._shares if not share.met(demand)]

    def _awaited(self, unmet: Sequence[Share]) -> list[Share]:
        """Return those of whom something can come."""
        return [
            share
            for share in unmet
            if isinstance(share, OpenShare) or any(s.is_awaited for s in share.slots.values())
        ]

    def _stepping(self, shares: Sequence[Share]) -> list[int]:
        return [s.env_id for share in shares for s in share.slots.values() if s.is_awaited]

    def _lengths(self) -> dict[int, int]:
        """Return the env steps so far of the episodes that run and are kept, by env."""
        return {
            slot.env_id: slot.episode.length
            for share in self._shares
            for slot in share.slots.values()
            if slot.episode and slot.is_kept and not slot.episode.done
        }

    def _poll(
        self, awaited: Sequence[Share], deadline: float | None, wanted: int
    ) -> list[int] | None:
        """Take in what some bring; if the time is over, return the envs that are late."""
        asked = set(self._stepping(awaited))
        sources = [
            source for source in self._sources if any(share in awaited for share in source.shares)
        ]
        begin = time.perf_counter()
        self._polls += 1
        polled = poll_any(sources, deadline, wanted, self._polls)
        now = time.perf_counter()
        self._timers.add("env_wait", now - begin)
        try:
            for share, slot in polled.opened:
                self._episodes.open(share, slot)
            self._episodes.take(polled.result, polled.unacted, polled.choices)
        finally:
            for slot in polled.closed:
                self._episodes.close(slot)
        for source in sources:
            source.confirm()
        late = polled.result.late
        self._timers.add("raw_obs_processing", time.perf_counter() - now)
        if late or (deadline is not None and time.monotonic() >= deadline):
            return sorted(env_id for env_id in late if env_id in asked)
        return None

    def _go_on(self, unmet: Sequence[Share], explore: bool) -> None:
        """Have the envs step whose agents wait, and those that are between episodes begin."""
        slots = [slot for share in unmet for slot in share.slots.values()]
        acting = [slot for slot in slots if slot.phase is Phase.WAITING]
        over = {slot.env_id for slot in slots if slot.phase is Phase.ENDED}
        if acting:
            actions = self._inference.act(acting, explore)
            for slot in acting:
                slot.phase = Phase.STEPPING
        for slot in slots:
            if slot.env_id in over:
                self._episodes.create(slot)
        for source in self._sources:
            own = [slot for slot in acting if source.has(slot.env_id)]
            if own:
                source.send_actions(own, actions)
            if resetting := [env_id for env_id in over if source.has(env_id)]:
                source.reset(resetting)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell simulators that wait what is raised here."""
        try:
            yield
        except SimulatorError:
            raise  # of the one that has ended; others are not concerned
        except BaseException as exc:
            is_own = isinstance(exc, Exception)
            told = exc if is_own else EnvbusError(f"sampling was broken off: {type(exc).__name__}")
            for source in self._sources:
                source.fail(told)
            raise

    def _end(self, demand: Demand, late: tuple[int, ...], unroll_id: int) -> Sample:
        fragments = [fragment for share in self._shares for fragment in share.take(demand)]
        rows = MultiAgentBatch.of(
            (part for fragment in fragments for part in fragment.parts),
            sum(fragment.env_steps for fragment in fragments),
        )
        batches = {
            policy_id: batch.with_columns(unroll_id=np.full(len(batch), unroll_id, np.int64))
            for policy_id, batch in rows.policy_batches.items()
        }
        faults, results = self._episodes.take_news()
        return Sample(batches, rows.env_steps, late=late, faults=faults, episodes=results)
