"""Samples envs with one agent each and spaces of fixed size, in columns over all envs.

The fast one of two ways that give equal batches; `dict_sampler.py` is the general one. There is
no Python loop over envs and steps here, only over episodes that end.
"""

from __future__ import annotations

import time
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.callbacks import naming
from envbus.runner.column_policy import Asked, ColumnPolicy
from envbus.runner.columns import Columns
from envbus.runner.faults import Fault
from envbus.runner.metrics import EpisodeResult, PerfTimers, SampleMetrics
from envbus.runner.nested import Tree, map_tree
from envbus.runner.policies import Policy, RowReader, zero_action
from envbus.runner.pool import ActorPool
from envbus.runner.pool_results import Batch
from envbus.runner.running_episodes import EpisodeIds, RunningEpisodes
from envbus.runner.sampling import Demand, Phase, RunnerConfig, Sample

__all__ = ["ColumnSampler"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


# As plain numbers: NumPy compares with these many times faster than with an enum's members.
_ENDED, _RESETTING, _WAITING, _ASKED, _STEPPING, _LOST = map(int, Phase)


class ColumnSampler:
    """Rows of all envs in one set of columns.

    Args:
        pool: Its envs reset themselves (NEXT_STEP) or are reset here (DISABLED).
        policy_id: The one policy's, and `policy` itself.
    """

    def __init__(
        self,
        pool: ActorPool,
        config: RunnerConfig,
        policy_id: str,
        policy: Policy,
        metrics: SampleMetrics,
        timers: PerfTimers,
    ) -> None:
        count = pool.num_envs
        unchanged = config.connector("observation", policy_id) is None
        self._pool = pool
        self._config = config
        self._policy_id = policy_id
        if unchanged and isinstance(policy, RowReader):
            policy.share_rows(pool)
        self._policy = ColumnPolicy(policy, count, unchanged=unchanged)
        self._metrics, self._timers = metrics, timers
        self._sends_resets = pool.autoreset_mode is AutoresetMode.DISABLED
        self._observe = config.connector("observation", policy_id)
        self._convert = config.connector("action", policy_id)
        self._env_ids = np.arange(count)
        self._keys = [(env_id, DUMMY_AGENT) for env_id in range(count)]
        #: Whatever action, `(N, ...)`.
        self._fillers = map_tree(
            lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], count, axis=0),
            zero_action(pool.single_action_space),
        )
        self._phase = np.full(count, _ENDED, np.int8)
        self._columns = Columns(count, 1)
        self._episodes = RunningEpisodes(config, policy_id, count)
        #: Where they wait for an action, `(N, ...)`; None before the first observation.
        self._last: Tree = None
        self._lost_some = False
        #: Two groups of envs that step in turn, and whose turn it is; none: whoever is ready.
        self._groups = _groups_of(pool) if config.pipelined else ()
        self._turn = 0
        self._defers = config.pipelined and self._policy.works_elsewhere
        #: What the policy has been asked and has not been asked to answer, if it works elsewhere.
        self._asked: Asked | None = None
        #: Envs that failed, whose next episode will begin by itself.
        self._recovering = np.zeros(count, np.bool_)
        self._faults: list[Fault] = []
        self._results: list[EpisodeResult] = []

    @property
    def live(self) -> _Bools:
        """Which envs were not given up, `(N,)`."""
        live: _Bools = self._phase != _LOST
        return live

    @property
    def stepping(self) -> _Bools:
        """Which envs have been sent an action and have not answered, `(N,)`."""
        stepping: _Bools = self._phase == _STEPPING
        return stepping

    @property
    def ids(self) -> EpisodeIds:
        """Of the episodes."""
        return self._episodes.ids

    def reset(self, seed: int | None) -> None:
        """Give up what runs, and begin a new episode in each env."""
        self._pool.reset(seed)
        live = self.live
        self._phase[live] = _RESETTING
        self._columns.num_rows[:] = 0
        if self._asked is not None:
            self._policy.forget(self._asked)
            self._asked = None

    def has_cut_episode(self) -> bool:
        """Return whether an episode runs of which rows have left already."""
        return bool((self._running() & (self._episodes.fragments > 0)).any())

    def sample(
        self, demand: Demand, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the demand is met, or the deadline (monotonic time) has passed."""
        self._begin_fragment(demand)
        late: tuple[int, ...] = ()
        if self._groups:
            self._take_turns(demand, explore)
        else:
            self._go_on_from_last(slice(None), demand, explore)
        # All that are unmet are awaited: they were sent something, or recover.
        while number := int(np.count_nonzero(unmet := self._unmet(demand))):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            begin = time.perf_counter()
            least = self._awaited(demand) if self._groups else self._config.min_envs
            wanted = demand.to_wait_for(number, max(least, 1))
            if not wanted:
                late = tuple(np.flatnonzero(unmet).tolist())
                break
            # What the envs return goes from their memory straight to the columns.
            batch = self._pool.recv(wanted, timeout=left, copy=self._observe is not None)
            self._timers.add("env_wait", time.perf_counter() - begin)
            self._take(batch, demand, explore)
            self._timers.end_iteration()
            if batch.late:
                late = tuple(env_id for env_id in batch.late if unmet[env_id])
                break
        self._send_answers()
        return self._end_fragment(demand, late, unroll_id)

    # --- private -----------------------------------------------------------------------------

    def _unmet(self, demand: Demand, ids: _Ints | slice = slice(None)) -> _Bools:
        """Return which envs, of some, have still to contribute."""
        phase, quotas = self._phase[ids], demand.quotas[ids]
        counts = (
            self._episodes.ended[ids] if demand.unit == "episodes" else self._columns.num_rows[ids]
        )
        unmet: _Bools = counts < quotas
        if demand.complete:
            unmet |= (phase >= _WAITING) & (quotas > 0)
        if self._lost_some:
            unmet &= phase != _LOST
        return unmet

    def _running(self) -> _Bools:
        """Return which envs are in an episode, `(N,)`."""
        running: _Bools = (self._phase >= _WAITING) & (self._phase <= _STEPPING)
        return running

    # --- turns -------------------------------------------------------------------------------

    def _take_turns(self, demand: Demand, explore: bool) -> None:
        """Have each group go on of which no env is under way, one after the other."""
        for _ in self._groups:
            if self._awaited(demand):
                return
            self._go_on_from_last(self._groups[self._turn], demand, explore)
            self._turn = 1 - self._turn
        if self._asked is not None and not self._awaited(demand):
            self._send_answers()  # there is nothing to do meanwhile

    def _awaited(self, demand: Demand) -> int:
        """Return how many envs of the group whose turn it is have to answer first.

        Not those that recover, which can take long: they step with their group from its next turn.
        """
        members = self._groups[self._turn]
        phase = self._phase[members]
        under_way = (phase == _STEPPING) | ((phase == _RESETTING) & ~self._recovering[members])
        return int(np.count_nonzero(under_way & self._unmet(demand, members)))

    def _go_on_from_last(self, members: _Ints | slice, demand: Demand, explore: bool) -> None:
        """Have those of some envs go on that are unmet, from what was kept of them."""
        unmet, phase = self._unmet(demand, members), self._phase[members]
        env_ids = self._env_ids[members]
        ids, over = env_ids[unmet & (phase == _WAITING)], env_ids[unmet & (phase == _ENDED)]
        if len(ids) or len(over):
            observations = map_tree(lambda leaf: leaf[ids], self._last) if len(ids) else None
            self._go_on(ids, over, observations, explore)

    # --- actions -----------------------------------------------------------------------------

    def _go_on(self, ids: _Ints, over: _Ints, observations: Tree, explore: bool) -> None:
        """Have the envs `ids` step, and those that are `over` begin their next episodes.

        With a policy that works elsewhere, and turns, the envs step that the policy was asked
        about one turn before: these ones' actions are being chosen while those step.
        """
        asked = self._ask(ids, observations, explore) if len(ids) else None
        if self._defers:
            asked, self._asked = self._asked, asked
            self._send(asked, over)
            self._phase[ids] = _ASKED
        else:
            self._send(asked, over)

    def _send_answers(self) -> None:
        """Have those step that the policy has been asked about."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._send(asked, self._env_ids[:0])

    def _ask(self, ids: _Ints, observations: Tree, explore: bool) -> Asked:
        begin = time.perf_counter()
        seen = self._columns.observe(ids, observations)
        asked = self._policy.ask(ids, seen, explore=explore)
        self._timers.add("inference", time.perf_counter() - begin)
        return asked

    def _send(self, asked: Asked | None, over: _Ints) -> None:
        """Send the actions for what the policy was asked, and begin the episodes after `over`."""
        ids, actions = (over[:0], None) if asked is None else self._act(asked)
        if not len(over):
            if actions is not None:
                self._pool.send(actions, ids)
        elif self._sends_resets:
            if actions is not None:
                self._pool.send(actions, ids)
            self._pool.reset(env_ids=over)
        else:  # they reset themselves when they are stepped, by whatever action
            filler = map_tree(lambda leaf: leaf[: len(over)], self._fillers)
            both = filler
            if actions is not None:
                both = map_tree(lambda *parts: np.concatenate(parts), actions, filler)
            self._pool.send(both, np.concatenate([ids, over]))
        self._phase[ids] = _STEPPING
        self._phase[over] = _RESETTING

    def _act(self, asked: Asked) -> tuple[_Ints, Tree]:
        """Open a row of each env asked about that has not failed since; return what to send."""
        clock = time.perf_counter
        begin = clock()
        answers = self._policy.answer(asked)
        answered = clock()
        if self._defers and not (still := self._phase[asked.env_ids] == _ASKED).all():
            answers = answers.of(still)
        self._policy.keep_states(answers)
        ids, actions, extras = answers.env_ids, answers.actions, answers.extras
        self._columns.act(ids, actions, answers.versions, extras)
        if self._convert is not None:
            actions = self._convert(actions, [self._keys[i] for i in ids.tolist()])
        self._timers.add("inference", answered - begin)
        self._timers.add("action_processing", clock() - answered)
        return ids, actions if len(ids) else None

    def _take(self, batch: Batch, demand: Demand, explore: bool) -> None:
        """Take in what came, and have whoever can go on do so."""
        begin = time.perf_counter()
        for fault in batch.faults:
            self._take_fault(fault)
        ids, observations = batch.env_ids, batch.observations
        rewards, terminated, truncated = batch.rewards, batch.terminations, batch.truncations
        incarnations = batch.incarnations
        if not len(ids):
            if self._groups:
                self._take_turns(demand, explore)
            return
        if _some(ids[1:] < ids[:-1]):  # from several actors: in whichever order they came
            order = np.argsort(ids)
            ids, observations = ids[order], map_tree(lambda leaf: leaf[order], observations)
            rewards, terminated, truncated = rewards[order], terminated[order], truncated[order]
            incarnations = incarnations[order]
        stepped = self._phase[ids] == _STEPPING
        everyone = _all(stepped)
        if not everyone:
            self._begin_episodes(ids[~stepped], incarnations[~stepped])
        if self._observe is not None:
            observations = self._observe(observations, [self._keys[i] for i in ids.tolist()])
        self._phase[ids] = _WAITING
        self._recovering[ids] = False
        if everyone:
            self._take_steps(ids, observations, rewards, terminated, truncated)
        elif _some(stepped):
            self._take_steps(
                ids[stepped],
                map_tree(lambda leaf: leaf[stepped], observations),
                rewards[stepped],
                terminated[stepped],
                truncated[stepped],
            )
        if self._groups:
            self._timers.add("raw_obs_processing", time.perf_counter() - begin)
            self._keep(ids, observations)
            self._take_turns(demand, explore)
            return
        unmet = self._unmet(demand, ids)
        phase = self._phase[ids]
        acting = unmet & (phase == _WAITING)
        self._timers.add("raw_obs_processing", time.perf_counter() - begin)
        if _all(acting):
            self._go_on(ids, ids[:0], observations, explore)
            return
        if not _all(unmet):
            self._keep(ids, observations)
        over = ids[unmet & (phase == _ENDED)]
        chosen = map_tree(lambda leaf: leaf[acting], observations)
        self._go_on(ids[acting], over, chosen, explore)

    def _keep(self, ids: _Ints, observations: Tree) -> None:
        """Remember what those wait with that have contributed their part."""
        if self._last is None:
            count = len(self._phase)
            self._last = map_tree(
                lambda leaf: np.zeros((count, *leaf.shape[1:]), leaf.dtype), observations
            )
        map_tree(lambda kept, new: kept.__setitem__(ids, new), self._last, observations)

    def _take_steps(
        self,
        ids: _Ints,
        observations: Tree,
        rewards: npt.NDArray[np.float64],
        terminated: _Bools,
        truncated: _Bools,
    ) -> None:
        self._columns.complete(ids, observations, rewards, terminated, truncated)
        self._episodes.step(ids, rewards)
        done = terminated | truncated
        if _some(done):
            over = ids[done]
            self._phase[over] = _ENDED
            self._episodes.ended[over] += 1
            flags = zip(over.tolist(), terminated[done], truncated[done], strict=True)
            for env_id, was_terminated, was_truncated in flags:
                self._end_episode(env_id, bool(was_terminated), bool(was_truncated))

    def _begin_episodes(self, ids: _Ints, incarnations: _Ints) -> None:
        renewed = self._episodes.incarnation[ids] != incarnations
        if _some(renewed):
            for env_id, incarnation in zip(
                ids[renewed].tolist(), incarnations[renewed].tolist(), strict=True
            ):
                self._metrics.add_restart()
                with naming("on_sub_environment_created"):
                    self._config.callbacks.on_sub_environment_created(
                        env_id=env_id, incarnation=incarnation
                    )
        self._episodes.begin(ids, incarnations, self._columns.num_rows[ids])
        self._columns.begin(ids, eps_id=self._episodes.eps_ids(ids), incarnation=incarnations)
        for connector in (self._observe, self._convert):
            if connector is not None:
                connector.reset(ids.tolist())
        self._policy.begin(ids)

    def _take_fault(self, fault: Fault) -> None:
        env_id = fault.env_id
        self._faults.append(fault)
        if _WAITING <= self._phase[env_id] <= _STEPPING:
            kept = int(self._columns.num_rows[env_id] - self._episodes.first_row[env_id])
            if self._config.faulty_episodes == "drop":
                self._metrics.add_dropped_rows(kept)
                self._columns.rewind(env_id, int(self._episodes.first_row[env_id]))
                self._end_episode(env_id, False, False, faulty=True, dropped=kept)
            else:
                if kept:
                    self._columns.truncate(env_id)
                self._columns.rewind(env_id, int(self._columns.num_rows[env_id]))
                self._end_episode(env_id, False, False, faulty=True)
        # The first observation of its next episode comes by itself.
        self._phase[env_id] = _LOST if fault.given_up else _RESETTING
        self._recovering[env_id] = not fault.given_up
        self._lost_some |= fault.given_up
        with naming("on_fault"):
            self._config.callbacks.on_fault(fault=fault)

    def _end_episode(
        self,
        env_id: int,
        terminated: bool,
        truncated: bool,
        *,
        faulty: bool = False,
        dropped: int = 0,
    ) -> None:
        has_rows = bool(self._columns.num_rows[env_id] > self._episodes.first_row[env_id])
        result = self._episodes.result(
            env_id, terminated, truncated, faulty=faulty, dropped=dropped, has_rows=has_rows
        )
        self._metrics.add_episode(result)
        self._results.append(result)

    def _begin_fragment(self, demand: Demand) -> None:
        """Take over what the fragment before has left."""
        running = self._running()
        old = self._columns
        kept = np.where(running, old.num_rows - self._episodes.first_row, 0)
        capacity = 0 if demand.unit == "episodes" else int(demand.quotas.max(initial=0))
        self._columns = old.following(capacity, kept, self._phase == _STEPPING)
        self._episodes.first_row[:] = 0
        fresh = np.flatnonzero(running & (kept == 0))
        self._columns.begin(
            fresh,
            eps_id=self._episodes.eps_ids(fresh),
            incarnation=self._episodes.incarnation[fresh],
            t=self._episodes.length[fresh],
        )
        self._episodes.ended[:] = 0
        self._faults, self._results = [], []

    def _end_fragment(self, demand: Demand, late: tuple[int, ...], unroll_id: int) -> Sample:
        counts = self._columns.num_rows
        running = self._running()
        if demand.complete:  # those that run stay for the next fragment
            counts = np.where(running, self._episodes.first_row, counts)
        else:
            self._episodes.fragments += running & (counts > self._episodes.first_row)
            self._episodes.first_row[running] = counts[running]
        batch = self._columns.batch(counts, DUMMY_AGENT, unroll_id)
        policy_batches = {self._policy_id: batch} if len(batch) else {}
        return Sample(
            policy_batches,
            len(batch),
            late=late,
            faults=tuple(self._faults),
            episodes=tuple(self._results),
        )


def _groups_of(pool: ActorPool) -> tuple[_Ints, ...]:
    """Return the pool's envs in two groups.

    Raises:
        ConfigError: All envs are one vector env, or there is only one env.
    """
    groups = pool.env_groups(2)
    if not all(groups):
        raise ConfigError("pipelined=True takes at least two envs that can step apart")
    return tuple(np.asarray(group, np.int64) for group in groups)


# NumPy's own methods take several times as long for so few flags.
def _some(flags: _Bools) -> bool:
    return bool(np.count_nonzero(flags))


def _all(flags: _Bools) -> bool:
    return int(np.count_nonzero(flags)) == len(flags)
