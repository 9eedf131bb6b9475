"""Where a `DictSampler`'s envs come from: a pool, or the episodes of an `ExternalEnvBridge`."""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.clipping import Clip, agent_clip, clip_of, remembered
from envbus.actors.spaces.spaces import Space, is_fixed_size
from envbus.bus.errors import RequestTimeoutError
from envbus.bus.interrupts import uninterrupted_call
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult, ClientChoice
from envbus.runner.errors import ActorLostError, Fault
from envbus.runner.policies.policy_output import check_shapes
from envbus.runner.pool.agent_results import PollResult
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.quotas import BridgeQuotaHolder, EnvQuotaHolder, Slot

__all__ = ["BridgeSource", "EnvNumbers", "Polled", "PoolSource", "Source", "poll_any"]

logger = logging.getLogger("envbus.runner.bridge")

#: Seconds after which sources look after their processes and clients, whatever comes meanwhile.
_LONGEST_WAIT = 0.05
#: Longest wait without a word about nobody being there, in seconds.
_PATIENCE = 60.0
#: Agents of which a pool's source knows the spaces, beside those that the envs name beforehand.
_MOST_AGENTS = 10_000


def _ragged_in(space: Space | None) -> Callable[[AgentID], bool]:
    """Return what says of an agent whether its part of a space has no fixed size.

    Args:
        space: An `AgentSpaces`, or that of the only agent, whatever its name is. Of an agent that
            is in none, and of a space that is not known yet, nothing is: it has one.
    """
    if isinstance(space, AgentSpaces):
        return {agent for agent, own in space.spaces.items() if not is_fixed_size(own)}.__contains__
    is_ragged = space is not None and not is_fixed_size(space)
    return lambda _: is_ragged


class Polled(NamedTuple):
    """What a source has brought."""

    #: By env id.
    result: PollResult
    #: Episodes that have begun by themselves, and whose part they are; their first observations
    #: are in `result`.
    opened: Sequence[tuple[BridgeQuotaHolder, Slot]] = ()
    #: Those of such episodes that are over.
    closed: Sequence[Slot] = ()
    #: Envs that were sent no action, or too late, for the observations before.
    unacted: Collection[int] = ()
    #: Those of them in which an observation in between never arrived.
    missed: Collection[int] = ()
    #: By env: which policy of its own a simulator has acted with.
    choices: Mapping[int, ClientChoice] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return not self.result.observations and not self.result.faults


class _AgentForm(NamedTuple):
    """What follows from an agent's spaces."""

    #: None: it is not known.
    action_space: Space | None = None
    #: None: nothing is to be clipped.
    clip: Clip | None = None
    #: Observations or actions have no fixed size.
    is_ragged: bool = False
    #: Actions have none.
    lists_actions: bool = False


class PoolSource:
    """The envs of a pool, each with a quota of its own.

    Args:
        pool: It stays its owner's.
        batch_wait: As of `ActorPool.poll`.
    """

    def __init__(
        self, pool: ActorPool, *, clip_actions: bool, batch_wait: float | None = None
    ) -> None:
        self._pool = pool
        self._batch_wait = batch_wait
        self._clips = clip_actions
        self.holders = [EnvQuotaHolder(env_id, [Slot(env_id)]) for env_id in range(pool.num_envs)]
        self._named = {
            agent_id: self._form(
                pool.get_observation_space(agent_id), pool.get_action_space(agent_id)
            )
            for agent_id in pool.get_agent_ids()
        }
        #: Of agents that the envs did not name beforehand.
        self._others: dict[AgentID, _AgentForm] = {}
        self._told_of_unknown = False

    def is_ragged(self, agent_id: AgentID) -> bool:
        """Return whether an agent's observations or actions have no fixed size."""
        return self._form_of(agent_id).is_ragged

    def lists_actions(self, agent_id: AgentID) -> bool:
        """Return whether an agent's actions have no fixed size."""
        return self._form_of(agent_id).lists_actions

    def action_space(self, agent_id: AgentID) -> Space | None:
        """Return an agent's action space; None: it is not known."""
        return self._form_of(agent_id).action_space

    def has(self, env_id: int) -> bool:
        """Return whether an env is one of the pool's."""
        return env_id < len(self.holders)

    def fileno(self) -> int:
        """Return the pool's descriptor."""
        return self._pool.fileno()

    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        """Wait for envs, as `ActorPool.poll`."""
        polled = Polled(self._pool.poll(timeout, min_envs=min_envs, batch_wait=self._batch_wait))
        for env_id, agents in polled.result.observations.items():
            for agent_id in agents.keys() - self._named.keys() - self._others.keys():
                self._meet(agent_id, env_id)
        return polled

    def send_actions(
        self, slots: Sequence[Slot], actions: Mapping[int, Mapping[AgentID, Any]]
    ) -> None:
        """Have envs step by `{env_id: {agent_id: action}}`, which names others, too.

        Raises:
            ValueError: An action has not the shape that its space has.
        """
        own: dict[int, dict[AgentID, Any]] = {}
        for slot in slots:
            sent = own[slot.env_id] = dict(actions[slot.env_id])
            for agent_id, action in sent.items():
                form = self._form_of(agent_id)
                check_shapes(action, form.action_space)
                if form.clip is not None:
                    sent[agent_id] = form.clip(action)
        self._pool.send_actions(own)

    def _form_of(self, agent_id: AgentID) -> _AgentForm:
        form = self._named.get(agent_id)
        return self._others.get(agent_id, _AgentForm()) if form is None else form

    def _form(self, observation_space: Space, action_space: Space) -> _AgentForm:
        return _AgentForm(
            action_space,
            clip_of(action_space) if self._clips else None,
            not (is_fixed_size(observation_space) and is_fixed_size(action_space)),
            not is_fixed_size(action_space),
        )

    def _meet(self, agent_id: AgentID, env_id: int) -> None:
        """Ask an env for the spaces of an agent that it shows, and did not name beforehand."""
        ask = self._pool
        form = _AgentForm()
        try:
            form = self._form(
                ask.get_observation_space(agent_id, env_id), ask.get_action_space(agent_id, env_id)
            )
        except (ActorLostError, RequestTimeoutError):
            return  # its episode is over, or the next observation asks again
        except Exception as exc:  # whatever the env raises
            if not self._told_of_unknown:
                self._told_of_unknown = True
                logging.getLogger("envbus.runner").warning(
                    "env %d does not tell the spaces of its agent %r, whose actions are neither "
                    "clipped nor looked at: %s: %s. This is said once.",
                    env_id,
                    agent_id,
                    type(exc).__name__,
                    exc,
                )
        if len(self._others) >= _MOST_AGENTS:  # those that are there are asked for again
            self._others.clear()
        self._others[agent_id] = form

    def reset(self, env_ids: Sequence[int]) -> None:
        """Have envs begin their next episodes."""
        self._pool.reset(env_ids=env_ids)

    def reset_all(self, seed: int | None) -> None:
        """Have all envs begin anew."""
        self._pool.reset(seed)

    def fail(self, error: BaseException) -> None:
        """Do nothing: nobody waits. Envs of a pool are asked, and will be reset."""

    def confirm(self) -> None:
        """Do nothing: nobody waits."""


class EnvNumbers:
    """Env ids for episodes that come and go: the lowest that is free.

    Few of them are ever in use, so that what is kept per env (of connectors) is bounded.
    """

    def __init__(self, first: int) -> None:
        self._unused: Iterator[int] = itertools.count(first)
        self._freed: list[int] = []

    def take(self) -> int:
        """Return one that nobody has."""
        return heapq.heappop(self._freed) if self._freed else next(self._unused)

    def give_back(self, env_id: int) -> None:
        """It is free again."""
        heapq.heappush(self._freed, env_id)


class BridgeSource:
    """The episodes of a bridge, which have one quota together.

    Args:
        bridge: It stays its owner's.
        width: As how many envs it counts.
        numbers: Env ids; bridges of one runner share them.
        min_envs: How many episodes to wait for, or all that are open.
    """

    def __init__(
        self,
        bridge: ExternalEnvBridge,
        index: int,
        width: int,
        numbers: EnvNumbers,
        min_envs: int,
        *,
        clip_actions: bool,
    ) -> None:
        self._bridge = bridge
        self._clip_of = remembered(agent_clip) if clip_actions else None
        self._ragged_observations = remembered(_ragged_in)
        self._ragged_actions = remembered(_ragged_in)
        self._holder = BridgeQuotaHolder(index, width=width)
        self.holders = [self._holder]
        self._numbers = numbers
        self._min_envs = min_envs
        #: By episode id, and the other way round by env id.
        self._slots: dict[str, Slot] = {}
        self._env_ids: dict[int, str] = {}
        #: Episodes that are over: their numbers are free when nobody speaks of them any more.
        self._closed: list[Slot] = []
        #: What the bridge has brought, until all of it was taken in.
        self._brought: BridgeResult | None = None
        #: Episodes in which somebody waits for an action.
        self._waiting: set[str] = set()
        #: Episodes whose clients wait to be told that they are over.
        self._unconfirmed: list[str] = []
        self._silent_since = time.monotonic()

    def is_ragged(self, agent_id: AgentID) -> bool:
        """Return whether an agent's observations or actions have no fixed size."""
        has_ragged_observation = self._ragged_observations(self._bridge.observation_space)
        return has_ragged_observation(agent_id) or self.lists_actions(agent_id)

    def lists_actions(self, agent_id: AgentID) -> bool:
        """Return whether an agent's actions have no fixed size."""
        return self._ragged_actions(self._bridge.action_space)(agent_id)

    def action_space(self, agent_id: AgentID) -> Space | None:
        """Return an agent's action space; None: it is not known."""
        space = self._bridge.action_space
        return space.spaces.get(agent_id) if isinstance(space, AgentSpaces) else space

    def has(self, env_id: int) -> bool:
        """Return whether an env is an episode of this bridge."""
        return env_id in self._env_ids

    def fileno(self) -> int:
        """Return the bridge's descriptor."""
        return self._bridge.fileno()

    def running(self) -> list[Slot]:
        """Return the episodes that the bridge has told of, and not that they are over."""
        return list(self._slots.values())

    @uninterrupted_call
    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        """Wait for episodes; `min_envs` is the bridge's own number.

        Who waits for an action is known then, also if Ctrl-C keeps what came from the caller, or
        where memory runs out on the way: the next call returns it then.
        """
        del min_envs
        closed, self._closed = self._closed, []
        for slot in closed:
            del self._env_ids[slot.env_id]
            self._numbers.give_back(slot.env_id)
        if self._brought is None:
            wait = _PATIENCE if timeout is None else min(timeout, _PATIENCE)
            self._brought = self._bridge.poll(wait, min_envs=self._min_envs)
        result = self._brought
        # First of all: what fails below is told to them.
        self._waiting |= result.observations.keys() - result.off_policy_actions.keys()
        self._waiting -= set(result.ended)
        if self._bridge.confirm_ends:
            self._unconfirmed += result.ended
        told_of = [*result.observations, *(fault.episode_id for fault in result.faults)]
        opened = [self._open(i, result) for i in told_of if i not in self._slots]
        over = timeout is not None and timeout <= _PATIENCE
        polled = Polled(
            self._by_env(result, over=over),
            opened=[(self._holder, slot) for slot in opened],
            closed=[self._slots[episode_id] for episode_id in result.ended],
            unacted={self._slots[i].env_id for i in result.unacted if i in result.observations},
            missed={self._slots[i].env_id for i in result.missed if i in result.observations},
            choices={self._slots[i].env_id: choice for i, choice in result.choices.items()},
        )
        self._closed = [self._slots.pop(episode_id) for episode_id in result.ended]
        self._brought = None
        self._tell_of_silence(polled)
        return polled

    @uninterrupted_call
    def send_actions(
        self, slots: Sequence[Slot], actions: Mapping[int, Mapping[AgentID, Any]]
    ) -> None:
        """Answer simulators; each is told which weights have chosen.

        Raises:
            SpaceMismatchError: A policy gave an action outside the space; its client is told.
        """
        by_version: dict[int, dict[str, Mapping[AgentID, Any]]] = {}
        # Looked up each time: the first client may have brought the spaces.
        clip = None if self._clip_of is None else self._clip_of(self._bridge.action_space)
        for slot in slots:
            if slot.episode_id in self._waiting:
                own = actions[slot.env_id]
                some = by_version.setdefault(slot.policy_version, {})
                some[slot.episode_id] = own if clip is None else clip(own)
        for version, some in by_version.items():
            self._bridge.send_actions(some, policy_version=version)
            self._waiting -= some.keys()  # not before: who got nothing is told what was raised

    def reset(self, env_ids: Sequence[int]) -> None:
        """Never called: episodes begin by themselves."""
        raise AssertionError(f"envs {list(env_ids)} are simulators' own")

    def reset_all(self, seed: int | None) -> None:
        """Do nothing: simulators cannot be told to begin anew."""

    @uninterrupted_call
    def fail(self, error: BaseException) -> None:
        """Tell simulators that wait for an action, or for an end, why there is none."""
        waiting, self._waiting = sorted(self._waiting), set()
        ended, self._unconfirmed = self._unconfirmed, []
        if not self._bridge.closed:
            self._bridge.fail(waiting, error)
            self._bridge.confirm(ended, error)

    @uninterrupted_call
    def confirm(self) -> None:
        """Tell simulators of the ends of their episodes, where the bridge holds that back."""
        if self._unconfirmed:
            ended, self._unconfirmed = self._unconfirmed, []
            self._bridge.confirm(ended)

    # --- private -----------------------------------------------------------------------------

    def _open(self, episode_id: str, result: BridgeResult) -> Slot:
        slot = Slot(
            self._numbers.take(),
            episode_id=episode_id,
            training_enabled=episode_id not in result.untrained,
        )
        # Else somebody has polled the bridge before, and has seen how it began.
        slot.is_rest = episode_id not in result.started
        self._slots[episode_id] = slot
        self._env_ids[slot.env_id] = episode_id
        return slot

    def _by_env(self, result: BridgeResult, *, over: bool) -> PollResult:
        """Return the same result by env id; with those who are late, if the time is over."""
        slots = self._slots

        def renamed(part: Mapping[str, Any]) -> dict[int, Any]:
            return {slots[episode_id].env_id: agents for episode_id, agents in part.items()}

        by_env = PollResult._make(renamed(part) for part in result)
        by_env.faults = [
            Fault(
                env_id=slots[fault.episode_id].env_id,
                cause=fault.cause,
                message=fault.message,
                restarts=0,
            )
            for fault in result.faults
        ]
        by_env.late, by_env.incarnations = [], {}
        if over and not result.observations and not result.faults:
            by_env.late = [slot.env_id for slot in slots.values() if slot.is_awaited]
        return by_env

    def _tell_of_silence(self, polled: Polled) -> None:
        now = time.monotonic()
        if not polled.is_empty:
            self._silent_since = now
        elif now - self._silent_since >= _PATIENCE:
            self._silent_since = now
            logger.warning(
                "no simulator has had anything for %.0f s; %d episodes run; they connect to %s",
                _PATIENCE,
                len(self._slots),
                ", ".join(self._bridge.endpoints),
            )


#: Envs, by env id, that are polled and sent actions.
Source: TypeAlias = PoolSource | BridgeSource


def poll_any(sources: Sequence[Source], deadline: float | None, min_envs: int, turn: int) -> Polled:
    """Wait for one of them, at most until the deadline (monotonic time); it does not spin.

    Args:
        sources: With envs that are awaited.
        deadline: None: as long as they do of themselves.
        min_envs: For how many to wait, where there is one source.
        turn: Who is looked at first; another one each time, so that all get their turn.

    Raises:
        Exception: What one of them raises; nothing that others have brought is lost by it.
    """
    if len(sources) == 1:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return sources[0].poll(left, min_envs)
    first = turn % len(sources)
    while True:
        late: list[int] = []
        for source in (*sources[first:], *sources[:first]):
            polled = source.poll(0.0, 1)
            if not polled.is_empty:
                polled.result.late.clear()  # they were not waited for
                return polled
            late += polled.result.late
        left = _LONGEST_WAIT if deadline is None else deadline - time.monotonic()
        if left <= 0.0:
            polled.result.late[:] = late
            return polled
        poller = select.poll()  # not `select`, which takes no descriptor from 1024 on
        for source in sources:
            poller.register(source, select.POLLIN)
        poller.poll(min(left, _LONGEST_WAIT) * 1e3)
