"""Samples envs with one agent each and spaces of fixed size, in columns over all envs.

The fast one of two ways that give equal batches; `dict_sampler.py` is the general one. There is
no Python loop over envs here, only over episodes that end. Leaves out where the rows go
and which of them leave (`columns.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from envbus.actors.spaces.clipping import clip_of
from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import PerfTimers, SampleMetrics
from envbus.runner.batches.nested import Tree, map_tree
from envbus.runner.engine.env_results import Batch
from envbus.runner.policies.connectors import connected_rewards
from envbus.runner.policies.policy import (
    Policy,
    RowReader,
    TwoStepPolicy,
    inputs_of,
    zero_action,
)
from envbus.runner.policies.policy_output import PolicyAnswer, ask, check_shapes
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import naming
from envbus.runner.sampling.columns import ColumnFragments, Make
from envbus.runner.sampling.config import EndlessEpisodes, EnvQuotas, Phase, RunnerConfig, Sample
from envbus.runner.sampling.policy_inputs import ColumnInputs

__all__ = ["ColumnPolicy", "ColumnSampler"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]

# As plain numbers: NumPy compares with these many times faster than with an enum's members.
_ENDED, _RESETTING, _WAITING, _ASKED, _STEPPING, _ = map(int, Phase)


class AskedRows(NamedTuple):
    """Rows that a policy was asked about."""

    env_ids: _Ints
    #: What the policy was told, and has no part in: it may write to its own.
    states: Tree
    #: What it says, or of a policy that works elsewhere, its ticket.
    answer: Any


class ColumnPolicy:
    """A policy, and its state in each env.

    Args:
        unchanged: Observations are what the pool's envs returned, untouched by connectors.
    """

    def __init__(self, policy: Policy, num_envs: int, *, unchanged: bool) -> None:
        self._policy = policy
        self._two_step = policy if isinstance(policy, TwoStepPolicy) else None
        self._num_envs = num_envs
        self._unchanged = unchanged
        #: Of all envs, `(N, ...)`; None before the first question, and without.
        self._states: Tree = None
        #: `(N,)` whose next question is an episode's first: their state is the policy's first one,
        #: as it is then.
        self._fresh: _Bools = np.ones(num_envs, np.bool_)
        #: Known from the first question on.
        self._is_stateless = False

    @property
    def works_elsewhere(self) -> bool:
        """Whether something else can be done between question and answer."""
        return self._two_step is not None

    def ask(
        self,
        env_ids: _Ints,
        observations: Tree,
        inputs: Mapping[str, Tree] | None = None,
        *,
        explore: bool,
    ) -> AskedRows:
        """Have the policy begin with the rows of these envs."""
        states = self._states_of(env_ids)
        answer: Any
        if self._two_step is None:
            rows = len(env_ids)
            answer = ask(self._policy, observations, states, rows, explore=explore, inputs=inputs)
        else:
            answer = self._two_step.submit_actions(
                observations,
                states,
                explore=explore,
                env_ids=env_ids if self._unchanged else None,
            )
        return AskedRows(env_ids, states, answer)

    def answer(self, asked: AskedRows) -> PolicyAnswer:
        """Return what the policy says, waiting for it if it works elsewhere.

        Raises:
            ValueError: It is not one row per env: see `PolicyAnswer.of`.
        """
        if self._two_step is None:
            answer: PolicyAnswer = asked.answer
            return answer
        out = self._two_step.collect_actions(asked.answer)
        return PolicyAnswer.of(out, len(asked.env_ids), self._policy.policy_version, asked.states)

    def keep_states(self, env_ids: _Ints, states: Tree) -> None:
        """Remember the states that the rows of these envs have come to."""
        if self._states is not None:
            map_tree(lambda kept, new: kept.__setitem__(env_ids, new), self._states, states)

    def begin(self, env_ids: _Ints) -> None:
        """Episodes begin: their states are the first ones."""
        self._fresh[env_ids] = True

    def forget(self, asked: AskedRows) -> None:
        """Do without an answer."""
        if self._two_step is not None:
            self._two_step.discard_actions(asked.answer)

    def _states_of(self, env_ids: _Ints) -> Tree:
        if self._is_stateless:
            return None
        fresh = env_ids[self._fresh[env_ids]]
        if len(fresh):
            first = self._policy.initial_state()
            if first is None:
                self._is_stateless = True
                return None
            if self._states is None:
                self._states = map_tree(
                    lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], self._num_envs, axis=0),
                    first,
                )
            map_tree(lambda kept, new: kept.__setitem__(fresh, new), self._states, first)
            self._fresh[fresh] = False
        return map_tree(lambda leaf: leaf[env_ids], self._states)


class ColumnSampler:
    """Rows of all envs in one set of columns.

    Args:
        pool: Its envs reset themselves (NEXT_STEP) or are reset here (DISABLED).
        policy_id: The one policy's, and `policy` itself.
        make: Asked for the memory of columns; None: fresh one.

    Attributes:
        ids: Of the episodes.
    """

    def __init__(
        self,
        pool: ActorPool,
        config: RunnerConfig,
        policy_id: str,
        policy: Policy,
        metrics: SampleMetrics,
        timers: PerfTimers,
        make: Make | None = None,
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
        self._reward = config.connector("reward", policy_id)
        self._clip = clip_of(pool.single_action_space) if config.clip_actions else None
        self._env_ids = np.arange(count)
        self._keys = [(env_id, DUMMY_AGENT) for env_id in range(count)]
        #: Whatever action, `(N, ...)`.
        self._fillers = map_tree(
            lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], count, axis=0),
            zero_action(pool.single_action_space),
        )
        hear_of_end = getattr(policy, "on_episode_end", None)
        self._rows = ColumnFragments(config, policy_id, count, metrics, make, hear_of_end)
        self.ids = self._rows.episodes.ids
        self._hear_of_start = getattr(policy, "on_episode_start", None)
        #: What the policy wants to be told besides observations.
        self._inputs: ColumnInputs | None = None
        if names := inputs_of(policy_id, policy):
            self._inputs = ColumnInputs(
                names,
                count,
                pool.single_action_space,
                self._convert,
                self._rows.episodes,
                metrics,
            )
        self._phase = self._rows.phase
        #: Where they wait for an action, `(N, ...)`; None before the first observation.
        self._last: Tree = None
        #: Two groups of envs that step in turn, and whose turn it is; none: whoever is ready.
        self._groups = _groups_of(pool) if config.pipelined else ()
        self._turn = 0
        self._defers = config.pipelined and self._policy.works_elsewhere
        #: What the policy has been asked and has not been asked to answer, if it works elsewhere.
        self._asked: AskedRows | None = None
        self._looks_at_rewards = self._reward is not None or self._inputs is not None
        self._endless = EndlessEpisodes(config)
        self._min_envs = config.envs_to_wait_for(count)
        #: Whether all envs can be stepped by a call; else what they are sent they answer some time.
        self._steps_in_place = pool.steps_in_place and not self._groups
        #: Of the present sample, monotonic time.
        self._deadline: float | None = None

    @property
    def live(self) -> _Bools:
        """Which envs were not given up, `(N,)`."""
        return self._rows.live

    @property
    def stepping(self) -> _Bools:
        """Which envs will have a row for the next sample whether asked or not, `(N,)`."""
        stepping: _Bools = self._phase == _STEPPING
        if self._config.run_ahead:  # it can wait
            stepping[:] = False
        return stepping

    def lose(self, env_ids: Sequence[int]) -> None:
        """These envs were given up."""
        self._rows.lose(env_ids)

    def reset(self, seed: int | None) -> None:
        """Give up what runs, and begin a new episode in each env."""
        self._pool.reset(seed)
        self._rows.reset()
        if self._asked is not None:
            self._policy.forget(self._asked)
            self._asked = None

    def has_cut_episode(self) -> bool:
        """Return whether an episode runs of which rows have left already."""
        return self._rows.has_cut_episode()

    def sample(
        self, quotas: EnvQuotas, deadline: float | None, explore: bool, unroll_id: int
    ) -> Sample:
        """Return rows until the quotas are met, or the deadline (monotonic time) has passed."""
        self._rows.begin(quotas)
        self._deadline = deadline
        late: tuple[int, ...] = ()
        if self._groups:
            self._take_turns(explore)
        else:
            self._go_on_from_last(slice(None), explore)
        # All that are unmet are awaited: they were sent something, or recover.
        while number := int(np.count_nonzero(unmet := self._rows.unmet())):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            begin = time.perf_counter()
            least = self._awaited() if self._groups else self._min_envs
            wanted = quotas.to_wait_for(number, max(least, 1))
            if not wanted:
                late = tuple(np.flatnonzero(unmet).tolist())
                break
            # What the envs return goes from their memory straight to the columns.
            own = self._observe is not None
            batch = self._pool.recv(
                wanted, timeout=left, batch_wait=self._config.batch_wait, copy=own, infos=False
            )
            self._timers.add("env_wait", time.perf_counter() - begin)
            self._take(batch, explore)
            self._timers.end_iteration()
            if quotas.complete and self._endless.is_due():
                running = np.where(self._phase > _ENDED, self._rows.episodes.length, 0)
                self._endless.look(dict(enumerate(running.tolist())))
            if batch.late:
                late = tuple(env_id for env_id in batch.late if unmet[env_id])
                break
            if self._is_over_time():
                # Some env may always be ready: the time is over all the same.
                late = tuple(np.flatnonzero(self._rows.unmet()).tolist())
                break
        self._send_answers()
        return self._rows.end(late, unroll_id)

    # --- private -----------------------------------------------------------------------------

    # --- turns -------------------------------------------------------------------------------

    def _take_turns(self, explore: bool) -> None:
        """Have each group go on of which no env is under way, one after the other."""
        for _ in self._groups:
            if self._awaited():
                return
            self._go_on_from_last(self._groups[self._turn], explore)
            self._turn = 1 - self._turn
        if self._asked is not None and not self._awaited():
            self._send_answers()  # there is nothing to do meanwhile

    def _awaited(self) -> int:
        """Return how many envs of the group whose turn it is have to answer first.

        Not those that recover, which can take long: they step with their group from its next turn.
        """
        members = self._groups[self._turn]
        phase = self._phase[members]
        under_way = (phase == _STEPPING) | ((phase == _RESETTING) & ~self._rows.recovering[members])
        return int(np.count_nonzero(under_way & self._rows.unmet(members)))

    def _go_on_from_last(self, members: _Ints | slice, explore: bool) -> None:
        """Have those of some envs go on that are to step, from what was kept of them."""
        going_on, phase = self._rows.going_on(members), self._phase[members]
        env_ids = self._env_ids[members]
        ids, over = env_ids[going_on & (phase == _WAITING)], env_ids[going_on & (phase == _ENDED)]
        if len(ids) or len(over):
            observations = map_tree(lambda leaf: leaf[ids], self._last) if len(ids) else None
            self._go_on(ids, over, observations, explore)

    # --- actions -----------------------------------------------------------------------------

    def _go_on(self, ids: _Ints, over: _Ints, observations: Tree, explore: bool) -> None:
        """Have the envs `ids` step, and those that are `over` begin their next episodes.

        With a policy that works elsewhere, and turns, the envs step that the policy was asked
        about one turn before: these ones' actions are being chosen while those step.
        """
        if self._steps_in_place and len(ids) == len(self._env_ids) and not self._is_over_time():
            together = self._rows.steps_together()
            if together > 0:
                self._step_in_place(together, observations, explore)
                return
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

    def _ask(self, ids: _Ints, observations: Tree, explore: bool) -> AskedRows:
        begin = time.perf_counter()
        seen = self._rows.columns.observe(ids, observations)
        inputs = None if self._inputs is None else self._inputs.of(ids)
        asked = self._policy.ask(ids, seen, inputs, explore=explore)
        self._timers.add("inference", time.perf_counter() - begin)
        return asked

    def _send(self, asked: AskedRows | None, over: _Ints) -> None:
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

    def _act(self, asked: AskedRows) -> tuple[_Ints, Tree]:
        """Open a row of each env asked about that has not failed since; return what to send."""
        clock = time.perf_counter
        begin = clock()
        ids, answer = asked.env_ids, self._policy.answer(asked)
        answered = clock()
        if self._defers and not (still := self._phase[ids] == _ASKED).all():
            ids, answer = ids[still], answer.select(still)
        self._policy.keep_states(ids, answer.states)
        actions = answer.actions
        if self._inputs is not None:
            self._inputs.act(ids, actions)
        versions = answer.version if answer.versions is None else answer.versions
        self._rows.columns.act(ids, actions, versions, answer.columns())
        if self._convert is not None:
            actions = self._convert(actions, [self._keys[i] for i in ids.tolist()])
        check_shapes(actions, self._pool.single_action_space, rows=True)
        if self._clip is not None:
            actions = self._clip(actions)
        self._timers.add("inference", answered - begin)
        self._timers.add("action_processing", clock() - answered)
        return ids, actions if len(ids) else None

    def _take(self, batch: Batch, explore: bool) -> None:
        """Take in what came, and have whoever can go on do so."""
        begin = time.perf_counter()
        for fault in batch.faults:
            self._rows.take_fault(fault)
            with naming("on_fault"):
                self._config.callbacks.on_fault(fault=fault)
        ids, incarnations = batch.env_ids, batch.incarnations
        rows = batch.observations, batch.rewards, batch.terminations, batch.truncations
        if not len(ids):
            if self._groups:
                self._take_turns(explore)
            return
        if _some(ids[1:] < ids[:-1]):  # from several actors: in whichever order they came
            order = np.argsort(ids)
            ids, incarnations, rows = map_tree(lambda leaf: leaf[order], (ids, incarnations, rows))
        stepped = self._phase[ids] == _STEPPING
        everyone = _all(stepped)
        if not everyone:
            self._begin_episodes(ids[~stepped], incarnations[~stepped])
        observations, rewards, terminated, truncated = rows
        if self._observe is not None:
            observations = self._observe(observations, [self._keys[i] for i in ids.tolist()])
        self._phase[ids] = _WAITING
        if self._rows.failed_some:
            self._rows.recovering[ids] = False
        whose, seen = ids, observations
        if not everyone:
            whose, seen = ids[stepped], map_tree(lambda leaf: leaf[stepped], observations)
            rewards = rewards[stepped]
            terminated, truncated = terminated[stepped], truncated[stepped]
        recorded = self._recorded(whose, rewards) if self._looks_at_rewards else rewards
        ended = _some(stepped) and self._rows.take_steps(
            whose, seen, rewards, terminated, truncated, recorded
        )
        self._timers.add("raw_obs_processing", time.perf_counter() - begin)
        if self._groups:
            self._keep(ids, observations)
            self._take_turns(explore)
        else:
            self._have_go_on(ids, observations, ended, explore)

    def _step_in_place(self, steps: int, observations: Tree, explore: bool) -> None:
        """Have all envs step by calls, up to `steps` times, as long as only rows come of it.

        What `_send` and `_take` do, without what only envs need that go different ways.
        """
        ids, pool, rows, timers = self._env_ids, self._pool, self._rows, self._timers
        clock = time.perf_counter
        ended = False
        while steps and not (ended or self._is_over_time()):
            _, actions = self._act(self._ask(ids, observations, explore))
            begin = clock()
            new = pool.step_in_place(actions)
            stepped = clock()
            timers.add("env_wait", stepped - begin)
            if new is None:  # it is told like everything else
                self._phase[ids] = _STEPPING
                return
            observations = new.observations
            if self._observe is not None:
                own = map_tree(np.copy, observations)
                observations = self._observe(own, self._keys)
            recorded = new.rewards
            if self._looks_at_rewards:
                recorded = self._recorded(ids, new.rewards)
            ended = rows.take_steps(
                ids, observations, new.rewards, new.terminations, new.truncations, recorded
            )
            timers.add("raw_obs_processing", clock() - stepped)
            timers.end_iteration()
            steps -= 1
        self._have_go_on(ids, observations, ended, explore)

    def _have_go_on(self, ids: _Ints, observations: Tree, ended: bool, explore: bool) -> None:
        """Have those envs go on that are to, and keep what the others wait with.

        `ended`: an episode is over for which an env has just brought the last observation.
        """
        going_on = self._rows.going_on(ids)
        over, acting = ids[:0], going_on
        if ended:
            phase = self._phase[ids]
            over, acting = ids[going_on & (phase == _ENDED)], going_on & (phase == _WAITING)
        if _all(acting):
            self._go_on(ids, over, observations, explore)
            return
        if not _all(going_on):
            self._keep(ids, observations)
        chosen = map_tree(lambda leaf: leaf[acting], observations)
        self._go_on(ids[acting], over, chosen, explore)

    def _recorded(self, ids: _Ints, rewards: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        """Return what the batch is to have of rewards."""
        recorded: npt.NDArray[Any] = rewards
        if self._reward is not None and len(ids):
            keys = [self._keys[i] for i in ids.tolist()]
            recorded = connected_rewards(self._reward, rewards, keys)
        if self._inputs is not None:
            self._inputs.reward(ids, recorded)
        return recorded

    def _is_over_time(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _keep(self, ids: _Ints, observations: Tree) -> None:
        """Remember what those wait with that have contributed their part."""
        if self._last is None:
            count = len(self._phase)
            self._last = map_tree(
                lambda leaf: np.zeros((count, *leaf.shape[1:]), leaf.dtype), observations
            )
        map_tree(lambda kept, new: kept.__setitem__(ids, new), self._last, observations)

    def _begin_episodes(self, ids: _Ints, incarnations: _Ints) -> None:
        renewed = self._rows.episodes.incarnation[ids] != incarnations
        if _some(renewed):
            for env_id, incarnation in zip(
                ids[renewed].tolist(), incarnations[renewed].tolist(), strict=True
            ):
                self._metrics.add_restart()
                with naming("on_sub_environment_created"):
                    self._config.callbacks.on_sub_environment_created(
                        env_id=env_id, incarnation=incarnation
                    )
        self._rows.begin_episodes(ids, incarnations)
        if self._inputs is not None:
            self._inputs.begin(ids)
        if self._hear_of_start is not None:
            begun = self._rows.episodes.ids.running[ids].tolist()
            for env_id, eps_id in zip(ids.tolist(), begun, strict=True):
                self._hear_of_start(env_id=env_id, eps_id=eps_id)
        for connector in (self._observe, self._convert, self._reward):
            if connector is not None:
                connector.reset(ids.tolist())
        self._policy.begin(ids)


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
