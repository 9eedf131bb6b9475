"""Steps that a client has chosen itself, until a bridge has them. Pure.

Leaves out who chooses (`local_policy.py`) and who sends (`local_inference.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeError,
    EpisodeNotFoundError,
)
from envbus.actors.external.protocol import FragmentStep, LogFragment, Value
from envbus.bus.errors import QueueFullError

__all__ = ["Fragments"]


class _Logged(msgspec.Struct):
    """What was logged since the last observation, of one agent or by agent."""

    reward: Value = None
    info: Any = None
    terminateds: dict[Any, bool] | None = None
    truncateds: dict[Any, bool] | None = None

    @property
    def is_empty(self) -> bool:
        return self == _Logged()


class _Steps:
    """One episode: what is not confirmed yet."""

    def __init__(self) -> None:
        #: Number of the first that waits.
        self.first = 0
        self.waiting: deque[FragmentStep] = deque()
        self.logged = _Logged()
        #: All is to be sent, however little it is.
        self.is_due = False
        self.error: Exception | None = None


class Fragments:
    """The steps of all episodes of a client. Not thread-safe.

    One fragment is under way at a time: `take` it, then `confirm`, or `take` it again.

    Args:
        policy_id: Whose copy the client has.
        length: Steps after which a fragment of an episode that goes on is sent.
        most: Steps that may wait, of all episodes together.
        multi_agent: Whether values are maps by agent.
    """

    def __init__(self, policy_id: str, length: int, most: int, *, multi_agent: bool) -> None:
        self._policy_id = policy_id
        self._length = length
        self._most = most
        self._multi_agent = multi_agent
        self._episodes: dict[str, _Steps] = {}
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Steps that no bridge has confirmed."""
        return self._num_waiting

    def begin(self, episode_id: str) -> None:
        """An episode was started."""
        if episode_id in self._episodes:
            raise EpisodeAlreadyStartedError(f"Episode {episode_id} is already started.")
        self._episodes[episode_id] = _Steps()

    def check(self, episode_id: str) -> None:
        """Raise unless another step of an episode can be added.

        Raises:
            EpisodeNotFoundError: It was not started by this client, or is over.
            QueueFullError: Too much waits to be sent.
            EpisodeError: The bridge has refused what came before.
        """
        self._of(episode_id)
        if self._num_waiting >= self._most:
            raise QueueFullError(
                f"episode {episode_id}: {self._num_waiting} steps wait to be sent, which is the "
                "limit; the bridge is out of reach, or its runner does not sample: wait, and ask "
                "again"
            )

    def add(
        self,
        episode_id: str,
        observation: Value,
        action: Value,
        *,
        policy_version: int = -1,
        extras: Value = None,
    ) -> None:
        """Keep a step; -1: its action was chosen elsewhere. Raises as `check`."""
        self.check(episode_id)
        steps = self._of(episode_id)
        self._append(
            steps,
            observation=observation,
            action=action,
            policy_version=policy_version,
            extras=extras,
        )

    def log(
        self,
        episode_id: str,
        reward: Value,
        info: Mapping[Any, Any] | None,
        terminateds: Mapping[Any, bool] | None,
        truncateds: Mapping[Any, bool] | None,
    ) -> None:
        """Add what the last action has led to.

        Raises:
            EpisodeNotFoundError: As `check`.
            EpisodeError: It is not what it has to be. Nothing was added.
        """
        logged = self._of(episode_id).logged
        total = self._sum(episode_id, logged.reward, reward)
        merged = self._merged(episode_id, logged.info, info)
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if flags is not None and not (self._multi_agent and isinstance(flags, Mapping)):
                raise EpisodeError(f"Episode {episode_id}: {name} are a map by agent, of several.")
        logged.reward, logged.info = total, merged
        if terminateds:
            logged.terminateds = _or(logged.terminateds, terminateds)
        if truncateds:
            logged.truncateds = _or(logged.truncateds, truncateds)

    def finish(self, episode_id: str) -> None:
        """All of an episode is to be sent now. Raises `EpisodeNotFoundError`."""
        steps = self._of(episode_id)
        if not steps.logged.is_empty:
            self._append(steps)
        steps.is_due = bool(steps.waiting)

    def is_sent(self, episode_id: str) -> bool:
        """Return whether nothing of an episode waits. Raises what it was refused with."""
        return not self._of(episode_id).waiting

    def end(self, episode_id: str) -> None:
        """Forget an episode."""
        steps = self._episodes.pop(episode_id, None)
        if steps is not None:
            self._num_waiting -= len(steps.waiting)

    def fail(self, episode_id: str, error: Exception) -> None:
        """The bridge has refused a fragment for good: what waits is dropped, and later calls fail.

        `end` forgets the episode.
        """
        steps = self._episodes.get(episode_id)
        if steps is not None:
            self._num_waiting -= len(steps.waiting)
            steps.waiting.clear()
            steps.error, steps.is_due = error, False

    def take(self) -> LogFragment | None:
        """Return what is to be sent next, again if it was not confirmed; None: nothing is.

        Episodes take turns, those that are to be sent whole first.
        """
        found = None
        for episode_id, steps in self._episodes.items():
            if steps.is_due:
                found = episode_id
                break
            if found is None and len(steps.waiting) >= self._length:
                found = episode_id
        if found is None:
            return None
        steps = self._episodes[found]
        count = min(len(steps.waiting), self._length)
        return LogFragment(
            episode_id=found,
            policy_id=self._policy_id,
            first=steps.first,
            steps=[steps.waiting[index] for index in range(count)],
        )

    def confirm(self, fragment: LogFragment) -> None:
        """The bridge has these."""
        steps = self._episodes.get(fragment.episode_id)
        if steps is None or steps.first != fragment.first:
            return  # of an episode that is over, or told once more
        self._episodes[fragment.episode_id] = self._episodes.pop(fragment.episode_id)  # behind all
        count = min(len(fragment.steps), len(steps.waiting))
        for _ in range(count):
            steps.waiting.popleft()
        self._num_waiting -= count
        steps.first += count
        steps.is_due = steps.is_due and bool(steps.waiting)

    # --- private -----------------------------------------------------------------------------

    def _of(self, episode_id: str) -> _Steps:
        steps = self._episodes.get(episode_id)
        if steps is None:
            raise EpisodeNotFoundError(f"Episode {episode_id} not found.")
        if steps.error is not None:
            raise steps.error
        return steps

    def _append(self, steps: _Steps, **taken: Any) -> None:
        logged, steps.logged = steps.logged, _Logged()
        steps.waiting.append(
            FragmentStep(
                reward=logged.reward,
                info=logged.info,
                terminateds=logged.terminateds,
                truncateds=logged.truncateds,
                **taken,
            )
        )
        self._num_waiting += 1

    def _sum(self, episode_id: str, before: Value, reward: Value) -> Value:
        if not self._multi_agent:
            return _number(episode_id, reward) + (0.0 if before is None else before)
        if reward is None:
            reward = {}
        if not isinstance(reward, Mapping):
            raise EpisodeError(f"Episode {episode_id}: rewards are a map by agent.")
        total = dict(before or {})
        for agent, number in reward.items():
            total[agent] = total.get(agent, 0.0) + _number(episode_id, number)
        return total

    def _merged(self, episode_id: str, before: Any, info: Any) -> Any:
        if info is None:
            return before
        if not isinstance(info, Mapping):
            raise EpisodeError(
                f"Episode {episode_id}: an info is a map, not a {type(info).__name__}."
            )
        if not self._multi_agent:
            return {**(before or {}), **info}
        merged = dict(before or {})
        for agent, own in info.items():
            merged[agent] = {**merged.get(agent, {}), **(own or {})}
        return merged


def _number(episode_id: str, value: Value) -> float:
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return float(value)
    raise EpisodeError(f"Episode {episode_id}: a reward is a number, not {value!r:.80}.")


def _or(before: dict[Any, bool] | None, flags: Mapping[Any, bool]) -> dict[Any, bool]:
    after = dict(before or {})
    for agent, flag in flags.items():
        after[agent] = bool(flag or after.get(agent))
    return after
