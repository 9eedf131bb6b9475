"""Random calls of random clients against what a bridge promises to clients and to its runner."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from envbus.bus.wire.messages import Failed, FailureCode
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
from envbus.runner.errors import FaultCause
from envbus.runner.pool.agent_results import DUMMY_AGENT

CLIENTS = st.sampled_from(["p", "q", "r"])
NAMES = st.sampled_from(["e0", "e1", "e2"])
LIMITS = EpisodeLimits(
    lease=5.0,
    max_episodes=4,
    max_finished=50,
    max_client_finished=20,
    max_queued=2,
    max_answers=6,
    max_sessions=9,
)


class Said:
    """What was said of one episode, and what the runner was shown of it."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.shown: list[Record] = []
        self.reward = 0.0
        self.over = False


class EpisodesMachine(RuleBasedStateMachine):
    """Clients that name their episodes anew each time, and a runner that sees all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = itertools.count()
        self.episodes = Episodes(LIMITS, lambda: f"made{next(self.made)}")
        self.now = 0.0
        self.observations = itertools.count()
        self.numbers = {name: itertools.count(1) for name in "pqr"}
        self.lives = dict.fromkeys("pqr", 0)
        self.secrets: dict[str, str] = {}
        #: Ids in use, by name and client; they are never used twice.
        self.ids: dict[tuple[str, str], str] = {}
        self.said: dict[str, Said] = {}
        #: Requests that were not answered: client, number -> observation.
        self.asked: dict[tuple[str, int], int] = {}
        self.answered: set[tuple[str, int]] = set()
        #: What the runner was shown last in an episode, if it wants an action.
        self.acting: dict[str, int] = {}

    # --- rules ---

    @rule(client=CLIENTS, resume=st.booleans())
    def join(self, client: str, resume: bool) -> None:
        secret = self.secrets.get(client, "") if resume else ""
        effects = self.do(Join(self.peer(client), next(self.numbers[client]), client, secret))
        for effect in effects:
            if isinstance(effect, Admit):
                self.secrets[client] = effect.session

    @rule(client=CLIENTS, cause=st.sampled_from([None, None, FaultCause.CRASH]))
    def lose(self, client: str, cause: FaultCause | None) -> None:
        self.do(ClientLost(self.peer(client), "gone", cause))
        self.lives[client] += 1

    @rule(client=CLIENTS, name=NAMES, training=st.booleans())
    def start(self, client: str, name: str, training: bool) -> None:
        episode = f"{name}-{client}-{next(self.made)}"
        effects = self.do(self.request(StartCall, client, episode, training))
        if any(isinstance(effect, SendReply) for effect in effects):
            self.ids[client, name] = episode
            self.said[episode] = Said()

    @rule(client=CLIENTS, name=NAMES, timeout=st.sampled_from([1.0, 8.0]))
    def ask(self, client: str, name: str, timeout: float) -> None:
        seen = next(self.observations)
        episode = self.id(client, name)
        event = self.request(Observe, client, episode, {DUMMY_AGENT: seen}, timeout=timeout)
        self.asked[client, event.request_id] = seen
        self.do(event)

    @rule(client=CLIENTS, name=NAMES, again=st.booleans())
    def log_step(self, client: str, name: str, again: bool) -> None:
        seen, episode = next(self.observations), self.id(client, name)
        event = self.request(LogStep, client, episode, {DUMMY_AGENT: seen}, {DUMMY_AGENT: 0})
        effects = self.do(event)
        if not self.refused(effects, event.request_id) and episode in self.said:
            self.said[episode].logged.append(seen)
            if again:
                self.do(event)

    @rule(client=CLIENTS, name=NAMES, again=st.booleans())
    def log_reward(self, client: str, name: str, again: bool) -> None:
        episode = self.id(client, name)
        event = self.request(LogReward, client, episode, {DUMMY_AGENT: 1.0}, {}, {}, {})
        effects = self.do(event)
        if not self.refused(effects, event.request_id) and episode in self.said:
            self.said[episode].reward += 1.0
            if again:
                self.do(event)

    @rule(client=CLIENTS, name=NAMES, again=st.booleans())
    def end(self, client: str, name: str, again: bool) -> None:
        flags = dict.fromkeys([DUMMY_AGENT, "__all__"], True)
        seen, episode = next(self.observations), self.id(client, name)
        event = self.request(End, client, episode, {DUMMY_AGENT: seen}, flags, {})
        effects = self.do(event)
        if not self.refused(effects, event.request_id) and episode in self.said:
            self.said[episode].over = True
            if again:
                self.do(event)

    @rule()
    def collect(self) -> None:
        records, effects = self.episodes.collect()
        self.note(effects)
        assert len({record.episode_id for record in records}) == len(records)
        for record in records:
            said = self.said[record.episode_id]
            assert record.first is not bool(said.shown)
            assert not (said.shown and said.shown[-1].last), "something behind the end"
            said.shown.append(record)
            self.acting.pop(record.episode_id, None)
            if record.off_policy is None and not record.last:
                self.acting[record.episode_id] = record.content["observations"][DUMMY_AGENT]

    @rule(give_up=st.booleans())
    def choose(self, give_up: bool) -> None:
        failed = Failed(code=FailureCode.REMOTE, message="no")
        for episode, seen in self.acting.items():
            if give_up:
                self.do(GiveUp(episode, failed))
            else:  # the action says what it was chosen for
                self.do(Chosen(episode, {DUMMY_AGENT: seen}))
        self.acting.clear()

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(Tick())
        wake_at = self.episodes.wake_at()
        assert wake_at is None or wake_at > self.now

    # --- promises ---

    @invariant()
    def the_parts_agree(self) -> None:
        self.episodes.check_invariants()

    @invariant()
    def logged_steps_are_shown_once_and_in_their_order(self) -> None:
        for said in self.said.values():
            shown = [
                record.content["observations"][DUMMY_AGENT]
                for record in said.shown
                if record.off_policy is not None
            ]
            assert shown == said.logged[: len(shown)]
            if said.shown and said.shown[-1].last and said.shown[-1].fault is None:
                assert shown == said.logged

    @invariant()
    def rewards_are_neither_lost_nor_doubled(self) -> None:
        for said in self.said.values():
            told = sum(
                record.content.get("rewards", {}).get(DUMMY_AGENT, 0) for record in said.shown
            )
            assert told <= said.reward
            if said.shown and said.shown[-1].last and said.shown[-1].fault is None:
                assert told == said.reward

    @invariant()
    def memory_is_bounded(self) -> None:
        counts = self.episodes.statistics()
        assert counts.episodes_now <= LIMITS.max_episodes
        assert counts.finished_now <= LIMITS.max_finished

    # --- private ---

    def peer(self, client: str) -> bytes:
        return f"{client}{self.lives[client]}".encode()

    def id(self, client: str, name: str) -> str:
        return self.ids.get((client, name), "none")

    def request(self, kind: Any, client: str, *rest: Any, **more: Any) -> Any:
        return kind(self.peer(client), next(self.numbers[client]), *rest, **more)

    def do(self, event: Any) -> list[Effect]:
        effects = self.episodes.handle(event, self.now)
        self.note(effects)
        return effects

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            key = effect.peer.decode()[0], effect.request_id
            if isinstance(effect, Act):
                # It is the one that was chosen for what was asked.
                assert effect.action[DUMMY_AGENT] == self.asked[key]
            if key in self.asked and isinstance(effect, Act | Refuse):
                assert key not in self.answered
                self.answered.add(key)

    def refused(self, effects: list[Effect], number: int) -> bool:
        return any(isinstance(e, Refuse) and e.request_id == number for e in effects)


TestEpisodes = EpisodesMachine.TestCase
TestEpisodes.settings = settings(max_examples=60, stateful_step_count=60)
