"""A machine of episodes with short ways to drive it, for its tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from envbus.actors.external.protocol import EpisodeStarted
from envbus.bus.wire.messages import Failed
from envbus.runner.bridge.episodes import Episodes
from envbus.runner.bridge.results import Record
from envbus.runner.bridge.vocabulary import (
    Act,
    Admit,
    Chosen,
    ClientLost,
    Effect,
    End,
    EpisodeLimits,
    GiveUp,
    Join,
    LogReward,
    LogStep,
    Observe,
    Refuse,
    SendReply,
    StartCall,
    Tick,
)
from envbus.runner.pool.agent_results import DUMMY_AGENT

A = b"a"


class Scene:
    """One machine, a clock, and clients that number their requests."""

    def __init__(
        self,
        *peers: bytes,
        confirm_ends: bool = False,
        is_stale: Callable[[str, int], bool] = lambda _policy_id, _version: False,
        **limits: Any,
    ) -> None:
        made = itertools.count()
        self.episodes = Episodes(
            EpisodeLimits(**limits),
            lambda: f"made-{next(made)}",
            is_stale=is_stale,
            confirm_ends=confirm_ends,
        )
        self.table = self.episodes._table
        self.now = 0.0
        self.numbers = {peer: itertools.count(1) for peer in (A, *peers)}
        self.sessions = {peer: self.join(peer) for peer in self.numbers}

    def join(self, peer: bytes, resume: str = "", number: int | None = None) -> str:
        """Return the session's secret, or the name of the refusal."""
        if peer not in self.numbers:
            self.numbers[peer] = itertools.count(1)
        effect = self.do(Join(peer, self.number(peer, number), peer.decode(), resume))
        if isinstance(effect, Admit):
            return effect.session
        assert isinstance(effect, Refuse)
        return effect.failed.remote_type

    def number(self, peer: bytes, number: int | None = None) -> int:
        return next(self.numbers[peer]) if number is None else number

    def all(self, event: Any) -> list[Effect]:
        effects = self.episodes.handle(event, self.now)
        self.episodes.check_invariants()
        return effects

    def do(self, event: Any) -> Effect | None:
        effects = self.all(event)
        assert len(effects) <= 1, effects
        return effects[0] if effects else None

    def start(self, episode: str | None = None, peer: bytes = A, *, training: bool = True) -> str:
        effect = self.do(StartCall(peer, self.number(peer), episode, training))
        assert isinstance(effect, SendReply), effect
        assert isinstance(effect.reply, EpisodeStarted)
        return effect.reply.episode_id

    def ask(self, episode: str, observation: Any, peer: bytes = A, timeout: float = 10.0) -> int:
        number = self.number(peer)
        assert (
            self.do(Observe(peer, number, episode, by_agent(observation), timeout=timeout)) is None
        )
        return number

    def log(self, episode: str, observation: Any, action: Any, peer: bytes = A) -> Effect | None:
        return self.do(
            LogStep(peer, self.number(peer), episode, by_agent(observation), by_agent(action))
        )

    def reward(
        self,
        episode: str,
        reward: Any,
        info: Any = None,
        peer: bytes = A,
        terminateds: Any = None,
        truncateds: Any = None,
    ) -> Effect | None:
        infos = info or {}
        if infos and not isinstance(reward, dict):
            infos = {DUMMY_AGENT: info}
        return self.do(
            LogReward(
                peer,
                self.number(peer),
                episode,
                by_agent(reward),
                infos,
                terminateds or {},
                truncateds or {},
            )
        )

    def end(
        self, episode: str, observation: Any, peer: bytes = A, *, truncated: bool = False
    ) -> list[Effect]:
        seen = by_agent(observation)
        flags = [{"__all__": flag} for flag in (not truncated, truncated)]
        return self.all(End(peer, self.number(peer), episode, seen, *flags))

    def choose(self, episode: str, action: Any, version: int = 0) -> Effect | None:
        return self.do(Chosen(episode, by_agent(action), version))

    def give_up(self, episode: str, failed: Failed) -> Effect | None:
        return self.do(GiveUp(episode, failed))

    def lose(self, peer: bytes = A) -> None:
        assert self.all(ClientLost(peer, "gone")) == []

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.all(Tick())

    def take(self) -> dict[str, Record]:
        """Return what the runner is shown, by episode; nothing may be held."""
        records, effects = self.episodes.collect()
        assert not effects
        self.episodes.check_invariants()
        return {record.episode_id: record for record in records}

    def seen(self, episode: str) -> tuple[Any, float]:
        """Return observation and reward of the one episode that has something."""
        record = self.take()[episode]
        content = record.content
        return content["observations"][DUMMY_AGENT], content["rewards"][DUMMY_AGENT]


def by_agent(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {DUMMY_AGENT: value}


def refusal(effect: Effect | None) -> str:
    """Name and text of what was refused."""
    assert isinstance(effect, Refuse), effect
    failed = effect.failed
    return f"{failed.remote_type or failed.code.value}: {failed.message}"


def action_of(effect: Effect | None) -> tuple[bytes, int, Any]:
    """Who got which action, for which request."""
    assert isinstance(effect, Act), effect
    return effect.peer, effect.request_id, effect.action[DUMMY_AGENT]
