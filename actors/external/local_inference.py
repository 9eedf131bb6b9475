"""Clients that choose actions themselves: with threads, and with an event loop.

Leaves out what is kept, sent and asked for (`local_episodes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from envbus.actors.external.fragments import Fragments
from envbus.actors.external.local_episodes import LocalEpisodes, Wait, Work
from envbus.actors.external.local_policy import LocalPolicy, LocalSettings, PolicyOrFactory
from envbus.actors.external.verbs import Verbs
from envbus.actors.spaces import Element
from envbus.bus.errors import ConfigError
from envbus.bus.messages import Payload
from envbus.bus.settings import check_number

__all__ = ["AsyncLocalInference", "LocalInference", "check_inference", "local_episodes"]

T = TypeVar("T")

#: Seconds for a task that was cancelled; it ends at its next turn.
_STOP_TIMEOUT = 2.0


def check_inference(inference: str, policy: object, update_interval: float) -> None:
    """Raise `ConfigError` unless a client's settings fit each other."""
    if inference not in ("server", "client"):
        raise ConfigError(f'inference must be "server" or "client", not {inference!r}')
    if (policy is None) != (inference == "server"):
        raise ConfigError('policy belongs to inference="client", which needs one')
    check_number("update_interval", update_interval)
    if not 0.0 < update_interval < 1e9:
        raise ConfigError(f"update_interval must be positive and finite, not {update_interval}")


def local_episodes(
    verbs: Verbs,
    policy: PolicyOrFactory,
    settings: LocalSettings | None,
    update_interval: float,
    patience: float,
) -> LocalEpisodes:
    """Return the episodes of a client that has joined; raises `ConfigError`."""
    settings = settings or LocalSettings()
    policy_id = settings.policy_id or verbs.joined.policy_ids[0]
    spaces = verbs.observation_space, verbs.action_space
    return LocalEpisodes(
        verbs,
        LocalPolicy(policy, *spaces, explore=settings.explore),
        policy_id,
        Fragments(
            policy_id,
            settings.fragment_length,
            settings.max_unsent,
            multi_agent=verbs.joined.multi_agent,
        ),
        update_interval,
        patience,
        time.monotonic,
    )


class _Inference:
    """What the verbs do that need not wait for the bridge.

    Args:
        episodes: Of the client.
        guard: Held while anything of them is touched, except that they choose.
        choosing: Held meanwhile.
    """

    def __init__(
        self,
        episodes: LocalEpisodes,
        guard: AbstractContextManager[Any],
        choosing: AbstractContextManager[Any],
    ) -> None:
        self._episodes = episodes
        self._guard, self._choosing = guard, choosing

    @property
    def policy_version(self) -> int:
        """Of the weights that choose."""
        return self._episodes.policy_version

    @property
    def num_unsent(self) -> int:
        """Steps that the bridge has not confirmed."""
        return self._episodes.num_unsent

    @property
    def num_dropped(self) -> int:
        """Steps that became no rows, as their weights were too old."""
        return self._episodes.num_dropped

    def begin(self, episode_id: str) -> None:
        """The bridge has started an episode."""
        with self._guard:
            self._episodes.begin(episode_id)

    def get_action(self, episode_id: str, observation: Element) -> Element:
        """Choose an action, and keep the step.

        Raises:
            SpaceMismatchError: The observation, or the policy's action, is outside its space.
            EpisodeError: The episode is not open, or the bridge has refused its steps.
            QueueFullError: Too many steps wait to be sent.
            Exception: What the policy raises.
        """
        with self._guard:
            taken = self._episodes.observe(episode_id, observation)
        with self._choosing:
            with self._guard:
                fresh = self._episodes.take_fresh()
            chosen = self._episodes.choose(episode_id, taken, fresh)
        with self._guard:
            return self._episodes.act(episode_id, taken, chosen.action, chosen)

    def log_action(self, episode_id: str, observation: Element, action: Element) -> None:
        """Keep a step that was chosen elsewhere; raises as `get_action`."""
        with self._guard:
            taken = self._episodes.observe(episode_id, observation)
            self._episodes.act(episode_id, taken, action, None)

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None,
        terminateds: Mapping[Any, bool] | None,
        truncateds: Mapping[Any, bool] | None,
    ) -> None:
        """Keep what the last action has led to; raises `EpisodeError`."""
        with self._guard:
            self._episodes.log_returns(episode_id, reward, info, terminateds, truncateds)


class LocalInference(_Inference):
    """For callers in any thread; a thread of its own sends fragments and pulls models.

    Args:
        episodes: Of the client; they belong to this one now.
        ask: `(request, seconds) -> reply`: sends and waits; may be called by any thread.

    Raises:
        Exception: As `LocalEpisodes.start`.
    """

    def __init__(self, episodes: LocalEpisodes, ask: Callable[[Payload, float], Any]) -> None:
        self._changed = threading.Condition()
        super().__init__(episodes, self._changed, threading.Lock())
        self._ask = ask
        episodes.changed = self._changed.notify_all
        self._do(episodes.start())
        work = episodes.run()
        threading.Thread(
            target=self._do, args=(work,), name="envbus-fragments", daemon=True
        ).start()

    def end(self, episode_id: str, request: Payload, timeout: float) -> None:
        """As `LocalEpisodes.end`."""
        self._do(self._episodes.end(episode_id, request, timeout))

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._episodes.stop()

    def _do(self, work: Work[T]) -> T:
        """Do what work asks for; others come in while it asks or waits."""
        outcome: Any = None
        error: Exception | None = None
        with self._changed:
            while True:
                try:
                    effect = work.send(outcome) if error is None else work.throw(error)
                except StopIteration as stop:
                    done: T = stop.value
                    return done
                outcome = error = None
                if isinstance(effect, Wait):
                    self._changed.wait(effect.seconds)
                    continue
                self._changed.release()
                try:
                    outcome = self._ask(*effect)
                except Exception as exc:
                    error = exc
                finally:
                    self._changed.acquire()


class AsyncLocalInference(_Inference):
    """For tasks of one event loop; one more sends fragments and pulls models.

    Args:
        episodes: Of the client; they belong to this one now.
        ask: `(request, seconds) -> reply`: sends and waits.
    """

    def __init__(
        self, episodes: LocalEpisodes, ask: Callable[[Payload, float], Awaitable[Any]]
    ) -> None:
        nobody = contextlib.nullcontext()  # else is there: nothing here waits while it works
        super().__init__(episodes, nobody, nobody)
        self._ask = ask
        self._waiting: set[asyncio.Future[None]] = set()
        episodes.changed = self._wake
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Get the first weights, and begin to send; raises as `LocalEpisodes.start`."""
        await self._do(self._episodes.start())
        self._task = asyncio.get_running_loop().create_task(self._do(self._episodes.run()))

    async def end(self, episode_id: str, request: Payload, timeout: float) -> None:
        """As `LocalEpisodes.end`."""
        await self._do(self._episodes.end(episode_id, request, timeout))

    async def stop(self) -> None:
        """End the task. Idempotent."""
        self._episodes.stop()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_STOP_TIMEOUT)

    def _wake(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def _do(self, work: Work[T]) -> T:
        """Do what work asks for."""
        outcome: Any = None
        error: Exception | None = None
        while True:
            try:
                effect = work.send(outcome) if error is None else work.throw(error)
            except StopIteration as stop:
                done: T = stop.value
                return done
            outcome = error = None
            if isinstance(effect, Wait):
                changed = asyncio.get_running_loop().create_future()
                self._waiting.add(changed)
                try:
                    await asyncio.wait([changed], timeout=effect.seconds)
                finally:
                    self._waiting.discard(changed)
                continue
            try:
                outcome = await self._ask(*effect)
            except Exception as exc:
                error = exc
