"""The episodes of an `ExternalEnvBridge` as envs of a `DictSampler`."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envbus.actors.clipping import agent_clip, remembered
from envbus.actors.spaces import is_fixed_size
from envbus.runner.agent_results import PollResult
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.faults import Fault
from envbus.runner.shares import OpenShare
from envbus.runner.slot import Slot
from envbus.runner.sources import Polled
from envbus.runner.trajectory import AgentID

__all__ = ["BridgeSource", "EnvNumbers"]

logger = logging.getLogger("envbus.runner.bridge")

#: Longest wait without a word about nobody being there, in seconds.
_PATIENCE = 60.0


class EnvNumbers:
    """Env ids for episodes that come and go: the lowest that is free.

    Few of them are ever in use, so that what is kept per env (of connectors) is bounded.

    Args:
        first: The lowest of all.
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
    """The episodes of a bridge, which are one share together.

    Args:
        bridge: It stays its owner's.
        index: Of the share.
        width: As how many envs it counts.
        numbers: Env ids; bridges of one runner share them.
        min_envs: How many episodes to wait for, or all that are open.
        clip_actions: Bring actions into the bounds of their space.
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
        self._share = OpenShare(index, width=width)
        self.shares = [self._share]
        self._numbers = numbers
        self._min_envs = min_envs
        #: By episode id, and the other way round by env id.
        self._slots: dict[str, Slot] = {}
        self._env_ids: dict[int, str] = {}
        #: Episodes that are over: their numbers are free when nobody speaks of them any more.
        self._closed: list[Slot] = []
        #: Episodes in which somebody waits for an action.
        self._waiting: set[str] = set()
        #: Episodes whose clients wait to be told that they are over.
        self._unconfirmed: list[str] = []
        self._silent_since = time.monotonic()

    @property
    def is_ragged(self) -> bool:
        """Whether observations or actions of a single agent have no fixed size."""
        spaces = self._bridge.observation_space, self._bridge.action_space
        if self._bridge.is_multi_agent:
            return False
        return not all(space is None or is_fixed_size(space) for space in spaces)

    def has(self, env_id: int) -> bool:
        """Return whether an env is an episode of this bridge."""
        return env_id in self._env_ids

    def fileno(self) -> int:
        """Return the bridge's descriptor."""
        return self._bridge.fileno()

    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        """Wait for episodes; `min_envs` is the bridge's own number."""
        del min_envs
        closed, self._closed = self._closed, []
        for slot in closed:
            del self._env_ids[slot.env_id]
            self._numbers.give_back(slot.env_id)
        wait = _PATIENCE if timeout is None else min(timeout, _PATIENCE)
        result = self._bridge.poll(wait, min_envs=self._min_envs)
        told_of = [*result.observations, *(fault.episode_id for fault in result.faults)]
        opened = [self._open(i, result) for i in told_of if i not in self._slots]
        over = timeout is not None and timeout <= _PATIENCE
        polled = Polled(
            self._by_env(result, over=over),
            opened=[(self._share, slot) for slot in opened],
            closed=[self._slots[episode_id] for episode_id in result.ended],
            unacted={self._slots[i].env_id for i in result.unacted if i in result.observations},
            choices={self._slots[i].env_id: choice for i, choice in result.choices.items()},
        )
        self._waiting |= result.observations.keys() - result.off_policy_actions.keys()
        self._closed = [self._slots.pop(episode_id) for episode_id in result.ended]
        self._waiting -= set(result.ended)
        if self._bridge.confirm_ends:
            self._unconfirmed += result.ended
        self._tell_of_silence(polled)
        return polled

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
            self._waiting -= some.keys()
            self._bridge.send_actions(some, policy_version=version)

    def reset(self, env_ids: Sequence[int]) -> None:
        """Never called: episodes begin by themselves."""
        raise AssertionError(f"envs {list(env_ids)} are simulators' own")

    def reset_all(self, seed: int | None) -> None:
        """Do nothing: simulators cannot be told to begin anew."""

    def fail(self, error: BaseException) -> None:
        """Tell simulators that wait for an action, or for an end, why there is none."""
        waiting, self._waiting = sorted(self._waiting), set()
        ended, self._unconfirmed = self._unconfirmed, []
        if not self._bridge.closed:
            self._bridge.fail(waiting, error)
            self._bridge.confirm(ended, error)

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
