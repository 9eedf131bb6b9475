"""Who has a quota of a sample, and which rows of theirs wait to be taken. Pure.

Leaves out how much is asked of whom (`config.py`) and how rows come about (`dict_sampler.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envbus.runner.batches.episode import EpisodeRecorder, Fragment
from envbus.runner.batches.nested import Tree
from envbus.runner.batches.trajectory import AgentID
from envbus.runner.bridge.results import ClientChoice
from envbus.runner.policies.policy import Policy
from envbus.runner.sampling.config import EnvQuotas, Phase, PolicyMapping

__all__ = ["BridgeQuotaHolder", "EnvQuotaHolder", "QuotaHolder", "Slot"]


class Slot:
    """What is known of an env: one of a pool, or an episode of a bridge."""

    def __init__(self, env_id: int, *, episode_id: str = "", training_enabled: bool = True) -> None:
        self.env_id = env_id
        self.episode_id = episode_id
        self.training_enabled = training_enabled
        #: What runs is the rest of an episode that was given up: it is answered, and that is all.
        self.is_rest = False
        self.phase = Phase.ENDED
        self.incarnation = 0
        self.episode: EpisodeRecorder | None = None
        #: What there was when the episode began: policies by id, and who says which one is an
        #: agent's; by agent what was said.
        self.policies: Mapping[str, Policy] = {}
        self.policy_mapping_fn: PolicyMapping | None = None
        self.policy_ids: dict[AgentID, str] = {}
        #: By agent: what those that are to act have seen.
        self.seen: dict[AgentID, Tree] = {}
        #: By agent: states of policies; actions that were chosen elsewhere.
        self.states: dict[AgentID, Tree] = {}
        self.off_policy: dict[AgentID, Any] = {}
        #: By agent: its last action, as the batch has it, where its policy wants to know it.
        self.prev_actions: dict[AgentID, Tree] = {}
        #: Which policy of the simulator's has chosen the actions in `off_policy`; None: none.
        self.choice: ClientChoice | None = None
        #: Which weights chose its last action.
        self.policy_version = 0

    @property
    def is_kept(self) -> bool:
        """Whether rows of what runs may leave."""
        return self.training_enabled and not self.is_rest

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of the env is awaited."""
        return self.phase in (Phase.RESETTING, Phase.STEPPING)

    def begin_episode(
        self,
        episode: EpisodeRecorder,
        policies: Mapping[str, Policy],
        policy_mapping_fn: PolicyMapping | None,
    ) -> None:
        """Its first observations are awaited."""
        self.phase = Phase.RESETTING
        self.episode, self.policies = episode, policies
        self.policy_mapping_fn = policy_mapping_fn
        self.policy_ids, self.states, self.off_policy, self.seen = {}, {}, {}, {}
        self.prev_actions = {}

    def take(self, ready: list[AgentID], observations: Mapping[AgentID, Tree]) -> None:
        """The agents in `ready` are to act on what they have seen."""
        self.phase = Phase.WAITING
        self.seen = {agent_id: observations[agent_id] for agent_id in ready}

    def end_episode(self) -> None:
        """The episode is over."""
        self.phase, self.episode = Phase.ENDED, None


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    fragment: Fragment
    #: It ends its episode, and that was not cut off by a fault.
    ends: bool

    @property
    def is_episode(self) -> bool:
        """Whether it is a whole episode."""
        return self.ends and self.fragment.begin == 0


class QuotaHolder(ABC):
    """One that has a quota of a sample, and its rows that wait to be taken.

    Attributes:
        index: Which of all holders.
        width: For how many envs it counts.
        slots: Its envs, by id.
    """

    def __init__(self, index: int, slots: Iterable[Slot] = (), width: int = 1) -> None:
        self.index = index
        self.width = width
        self.slots = {slot.env_id: slot for slot in slots}
        #: Of episodes that are over; and how much these have.
        self._waiting: deque[_Piece] = deque()
        self._env_steps = 0
        self._agent_steps = 0
        self._episodes = 0
        self._quota = 0

    @property
    def live(self) -> bool:
        """Whether it can contribute; simulators can come, always."""
        return True

    @property
    def stepping(self) -> bool:
        """Whether one of its envs was sent actions and has not answered."""
        return any(slot.phase is Phase.STEPPING for slot in self.slots.values())

    def begin(self, quota: int) -> None:
        """Begin a sample to which it is to contribute as much."""
        self._quota = quota

    def collect(self, fragment: Fragment, *, faulty: bool) -> None:
        """An episode is over, with these rows."""
        if fragment.env_steps:
            self._put(_Piece(fragment, not faulty))

    @abstractmethod
    def met(self, quotas: EnvQuotas) -> bool:
        """Return whether it has filled its quota, or cannot."""

    @abstractmethod
    def take(self, quotas: EnvQuotas) -> list[Fragment]:
        """Return what it contributes to the sample that ends."""

    def forget(self) -> None:
        """Drop all that waits."""
        self._waiting.clear()
        self._env_steps = self._agent_steps = self._episodes = 0

    def _put(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._count(piece, 1)

    def _pop(self) -> _Piece:
        piece = self._waiting.popleft()
        self._count(piece, -1)
        return piece

    def _count(self, piece: _Piece, sign: int) -> None:
        self._env_steps += sign * piece.fragment.env_steps
        self._agent_steps += sign * piece.fragment.agent_steps
        self._episodes += sign * piece.is_episode

    def _running(self) -> list[EpisodeRecorder]:
        """Return the episodes that run of which rows may leave."""
        return [
            slot.episode
            for slot in self.slots.values()
            if slot.episode is not None and slot.is_kept
        ]

    def _ready(self, quotas: EnvQuotas) -> int:
        """Return how much there is of what the quotas count."""
        if quotas.unit == "episodes":
            return self._episodes
        running = [] if quotas.complete else self._running()
        if quotas.unit == "agent_steps":
            return self._agent_steps + sum(episode.agent_steps for episode in running)
        return self._env_steps + sum(episode.env_steps for episode in running)


def _is_on_its_way(slot: Slot) -> bool:
    """Return whether an episode runs; not one that has begun by itself, and was asked nothing."""
    if slot.phase is Phase.WAITING:
        assert slot.episode is not None
        return slot.episode.length > 0
    return slot.phase > Phase.WAITING


class EnvQuotaHolder(QuotaHolder):
    """One env of a pool, which steps as long as its quota is not met."""

    @property
    def live(self) -> bool:
        """Whether the env was not given up."""
        return all(slot.phase is not Phase.LOST for slot in self.slots.values())

    def met(self, quotas: EnvQuotas) -> bool:
        """Return whether the env has filled its quota, or cannot; whole episodes are ended."""
        if not self.live or (self._quota == 0 and quotas.complete):
            return True
        if quotas.complete and any(_is_on_its_way(slot) for slot in self.slots.values()):
            return False
        return self._ready(quotas) >= self._quota

    def take(self, quotas: EnvQuotas) -> list[Fragment]:
        """Return all rows, in complete mode without those of an episode that runs."""
        fragments = [piece.fragment for piece in self._waiting]
        self.forget()
        if not quotas.complete:
            fragments += [episode.cut() for episode in self._running() if episode.env_steps]
        return fragments


class BridgeQuotaHolder(QuotaHolder):
    """A bridge, whose quota all of its episodes fill together, whoever is first.

    They come and go as their simulators like, so that there may be more rows than were asked for:
    these wait for the next sample.
    """

    def met(self, quotas: EnvQuotas) -> bool:
        """Return whether enough is there."""
        return self._quota == 0 or self._ready(quotas) >= self._quota

    def take(self, quotas: EnvQuotas) -> list[Fragment]:
        """Return as much as was asked for, if there is as much: what is over first."""
        left = self._quota
        fragments = []
        while left > 0 and self._waiting:
            piece = self._pop()
            if quotas.complete or self._size(piece.fragment, quotas) <= left:
                first = piece.fragment
                left -= piece.is_episode if quotas.unit == "episodes" else self._size(first, quotas)
            else:
                first, rest = piece.fragment.split(self._steps_with(left, piece.fragment, quotas))
                self._waiting.appendleft(_Piece(rest, piece.ends))
                self._count(self._waiting[0], 1)
                left = 0
            fragments.append(first)
        if quotas.complete:
            return fragments
        for episode in self._running():
            if left <= 0:
                break
            if not episode.env_steps:
                continue
            # What is left over stays there: the episode can still be broken off behind it.
            fragment = episode.cut(min(self._steps_with(left, episode, quotas), episode.env_steps))
            left -= self._size(fragment, quotas)
            fragments.append(fragment)
        return fragments

    def forget_parts(self) -> int:
        """Drop pieces that are no whole episodes; return how many rows that was."""
        pieces, dropped = list(self._waiting), 0
        self.forget()
        for piece in pieces:
            if piece.fragment.begin == 0:
                self._put(piece)
            else:
                dropped += piece.fragment.agent_steps
        return dropped

    def shrink(self, most: int) -> int:
        """Drop the oldest rows until at most as many env steps wait; return how many rows.

        Of a running episode that has more alone, all are dropped.
        """
        running = self._running()
        dropped, steps = 0, self._env_steps + sum(episode.env_steps for episode in running)
        while steps > most and self._waiting:
            fragment = self._pop().fragment
            dropped, steps = dropped + fragment.agent_steps, steps - fragment.env_steps
        for episode in sorted(running, key=lambda episode: -episode.env_steps):
            if steps <= most:
                break
            fragment = episode.cut()
            dropped, steps = dropped + fragment.agent_steps, steps - fragment.env_steps
        return dropped

    @staticmethod
    def _size(fragment: Fragment, quotas: EnvQuotas) -> int:
        return fragment.agent_steps if quotas.unit == "agent_steps" else fragment.env_steps

    @staticmethod
    def _steps_with(left: int, rows: Fragment | EpisodeRecorder, quotas: EnvQuotas) -> int:
        """Return how many env steps have as much as is left to take."""
        return rows.env_steps_with(left) if quotas.unit == "agent_steps" else left
