"""Where clients' messages become events of the rules, and effects become answers.

Performs what `episodes.py` decides, over the bridge's broker. Each message stands for itself:
whatever it makes this program raise is answered to its sender, counted, logged within a rate, and
is nobody else's trouble.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import RefusedError, SpaceMismatchError
from envbus.actors.external.protocol import (
    BRIDGE,
    ActionChosen,
    BridgeJoined,
    EpisodeStarted,
    GetModel,
    JoinBridge,
)
from envbus.bus.brief import brief, cut
from envbus.bus.broker.events import Notify, PeerLeft, PeerReady
from envbus.bus.broker.loop import Broker, Outcome
from envbus.bus.complaints import Complaints, Lines
from envbus.bus.errors import EncodeError, ProtocolError, TransportError
from envbus.bus.gateway.client_identity import GatewayClient
from envbus.bus.wire.codec import decode
from envbus.bus.wire.frames import Frames
from envbus.bus.wire.messages import Failed, FailureCode, Header, Kind, Reply
from envbus.runner.bridge.episode_table import NOT_JOINED
from envbus.runner.bridge.episodes import Episodes
from envbus.runner.bridge.models import Models
from envbus.runner.bridge.requests import VERBS, check_size, read
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.bridge.vocabulary import (
    Act,
    Admit,
    ClientCall,
    ClientIdentity,
    ClientLost,
    Confirm,
    Effect,
    Event,
    GiveUp,
    Join,
    Refuse,
    RequestNote,
    SendReply,
    Tick,
    Unsent,
)
from envbus.runner.errors import FaultCause
from envbus.runner.pool.agent_results import DUMMY_AGENT

__all__ = ["EpisodeDispatcher"]

logger = logging.getLogger("envbus.runner.bridge")

# Looking up a member of an enum costs as much as a method call; this is read per message.
_REQUEST = Kind.REQUEST

#: Messages that are taken at one go. Whoever sends the next ones does so while the owner acts upon
#: these; taking all there are would have both wait for each other by turns, and the first of many
#: have left the caches when they are answered. Of the others the transport gives one of each peer
#: by turns, so that who sends many that take long does not come before all others.
_MOST_TAKEN = 64
#: Seconds after which a client that hears nothing has given up, at the earliest, beside its own
#: time-out; it is half of what they grant.
_AWAY = 0.5
#: Seconds after which a flood is left for later.
_FLOOD_SECONDS = 0.25
#: Characters of a client's name, as of a peer's.
_MAX_NAME = 256
#: Characters of what a client is told of its mistake: a few bytes must not bring back a flood.
_LONGEST = 4000


class EpisodeDispatcher:
    """Between the broker of a bridge and its rules.

    Args:
        broker: Has the connections.
        episodes: The rules.
        models: What clients are handed to choose by themselves.
        agreement: The spaces; None: the first client tells them.
        lease: As clients are told.

    Attributes:
        agreement: As above; None until the first client has told it.
        policy_ids: What clients are told of who may act.
        on_spaces: See `ExternalEnvBridge.use_spaces`; None: any spaces will do, for good.
        find_client: Returns who has come in at the gateway under a peer's id.
        on_request: Told of each request for an episode, and of each that joins, before its answer;
            None: nobody wants to know.
        refused: Requests that were refused for what they hold, before any episode was asked.
        complaints: About requests that made this program raise what is no refusal.
    """

    def __init__(
        self,
        broker: Broker,
        episodes: Episodes,
        models: Models,
        agreement: Agreement | None,
        lease: float,
    ) -> None:
        self._broker = broker
        self._episodes = episodes
        self._models = models
        self._lease = lease
        self.agreement = agreement
        self._is_given = agreement is not None
        self.on_spaces: Callable[[Agreement], object] | None = None
        self.policy_ids: list[str] = []
        self.find_client: Callable[[bytes], GatewayClient | None] = lambda _: None
        self.on_request: Callable[[RequestNote], object] | None = None
        self.refused = 0
        self.complaints = Complaints(logger)
        self._lines = Lines(logger)
        #: Peers that know no ext types.
        self._plain: set[bytes] = set()
        self._names: dict[bytes, str] = {}
        #: Public keys of peers, where there are keys, or names of the tokens that they have shown.
        self._users: dict[bytes, str] = {}
        #: Of those that have come in at the gateway.
        self._addresses: dict[bytes, str] = {}
        #: Those of whom the log has told.
        self._greeted: set[bytes] = set()
        #: What the broker has taken and this has not.
        self._waiting: deque[Outcome] = deque()
        self._clock = time.monotonic
        #: When `serve` ended last.
        self._left_at = self._clock()

    @property
    def has_more(self) -> bool:
        """Whether `serve` has left messages that were there."""
        return bool(self._waiting) or self._broker.has_more

    def serve(self, timeout: float) -> None:
        """Wait for messages and take those that are there; then judge deadlines."""
        begun = self._clock()
        if begun - self._left_at > _AWAY:
            self._catch_up(begun + _AWAY)
        if not self._waiting:
            self._waiting.extend(self._broker.poll(timeout, most=_MOST_TAKEN))
        self._take_until(self._clock() + _FLOOD_SECONDS)
        wake_at = self._episodes.wake_at()
        if wake_at is not None and wake_at <= self._clock():
            self._take_all()
            self.handle(Tick())
        self._left_at = self._clock()

    def _catch_up(self, until: float) -> None:
        """Take all messages that are there, for so long at most.

        Where this was not looked at for long, clients have given up waiting meanwhile, and say what
        they did instead behind their request for an action. Who answered that before would have a
        row of an action that nobody took.
        """
        while self._clock() < until:
            if not self._waiting:
                self._waiting.extend(self._broker.poll(0.0, most=_MOST_TAKEN))
            if not self.has_more:
                return
            self._take_until(until)

    def end_client(self, peer: bytes, cause: FaultCause, why: str) -> None:
        """A client's process has ended: nobody comes back for its episodes."""
        self._take_all()
        self._broker.peer_gone(peer, why)
        self.handle(ClientLost(peer, why, cause))

    def handle(self, event: Event) -> None:
        """Have the rules decide about an event, and send what they say."""
        effects = self._episodes.handle(event, self._clock())
        if effects:
            self.perform(effects)

    def handle_all(self, events: Iterable[Event]) -> None:
        """As `handle` one after the other; who gets several answers gets them at once."""
        with self._broker.together():
            for event in events:
                self.handle(event)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Send what was decided. For whom there is no room the rules are told what was not sent."""
        full: set[bytes] = set()
        for effect in effects:
            if effect.peer in full:
                self.handle(Unsent(effect.peer, effect.request_id))
                continue
            if isinstance(effect, Act):
                agreement = self.agreement
                assert agreement is not None
                action = effect.action
                if not agreement.multi_agent:
                    action = action[DUMMY_AGENT]
                value = to_wire(action, plain=effect.peer in self._plain)
                reply: Reply | Failed = ActionChosen(
                    action=value, policy_version=effect.policy_version
                )
            elif isinstance(effect, SendReply):
                reply = effect.reply
            elif isinstance(effect, Refuse):
                reply = effect.failed
            else:
                reply = self._welcome(effect)
            if not self._answer(effect.peer, effect.request_id, reply):
                full.add(effect.peer)
                self.handle(Unsent(effect.peer, effect.request_id))

    def collect(self, most: int | None = None) -> BridgeResult:
        """Return what the episodes have for the runner: a record of each, or of so many."""
        records, effects = self._episodes.collect(most)
        if effects:
            self.perform(effects)
        return BridgeResult.of(records)

    def client_of(self, episode_id: str) -> ClientIdentity | None:
        """Return whose an open episode is."""
        holder = self._episodes.holder(episode_id)
        if holder is None:
            return None
        peer, name, user = holder
        return ClientIdentity(name, user, self._addresses.get(peer, ""))

    def dismiss(self, failed: Failed) -> None:
        """Tell all clients that the bridge ends, and those who wait for something why."""
        for episode_id in self._episodes.open_ids():
            self.handle(GiveUp(episode_id, failed))
        for episode_id in self._episodes.unconfirmed_ids():
            self.handle(Confirm(episode_id, failed))
        for peer in self._names:
            self._broker.shut_down(peer)

    def _take_all(self) -> None:
        """Take all messages that are there, but for a flood: what was said before counts."""
        self._catch_up(self._clock() + _FLOOD_SECONDS)

    def _take_until(self, until: float) -> None:
        """Take what waits, at least one: a message of megabytes may take a second."""
        waiting, clock = self._waiting, self._clock
        try:
            while waiting:
                self._take(waiting.popleft())
                if clock() >= until:
                    return
        finally:
            if waiting:
                self._broker.ring()

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Notify):
            if outcome.header.kind is _REQUEST:
                self._on_request(outcome.peer, outcome.header, outcome.frames)
        elif isinstance(outcome, PeerReady):
            client = self.find_client(outcome.peer)
            if client is not None:
                self._addresses[outcome.peer] = client.address
            user = outcome.user if client is None else client.name or outcome.user
            if user:
                self._users[outcome.peer] = user
        elif isinstance(outcome, PeerLeft):
            self._users.pop(outcome.peer, None)
            self._addresses.pop(outcome.peer, None)
            self._plain.discard(outcome.peer)
            self._greeted.discard(outcome.peer)
            if (name := self._names.pop(outcome.peer, None)) is not None:
                self._lines.add(logging.INFO, f"client {name} is gone: {outcome.reason}")
            self.handle(ClientLost(outcome.peer, outcome.reason))

    def _on_request(self, peer: bytes, header: Header, frames: Frames) -> None:
        try:
            if not 0.0 < header.ttl < math.inf:
                raise ProtocolError(
                    f"the ttl of a {header.payload_type} is finite and over 0 s, not {header.ttl}"
                )
            check_size(header, frames)
            if header.payload_type in VERBS:
                if self.agreement is None:
                    self._turn_away(peer, header, NOT_JOINED)
                    return
                event: Any = read(header, frames, peer, self.agreement)
            elif header.payload_type == GetModel.__name__:
                self._answer(peer, header.request_id, self._models.answer(decode(GetModel, frames)))
                return
            elif header.payload_type == JoinBridge.__name__:
                event = self._join(peer, header, decode(JoinBridge, frames))
            else:
                known = ", ".join((JoinBridge.__name__, GetModel.__name__, *VERBS))
                raise ProtocolError(
                    f"a bridge answers no {brief(header.payload_type)}; it does: {known}"
                )
            effects = self._episodes.handle(event, self._clock())
            if self.on_request is not None:
                self._note(event, header, effects)
            self.perform(effects)
        except RefusedError as error:
            self._turn_away(peer, header, error.failed())
        except ProtocolError as error:
            failed = Failed(code=FailureCode.PROTOCOL, message=str(error), peer=BRIDGE)
            self._turn_away(peer, header, failed)
        except TransportError:  # not the message: this bridge itself is in trouble
            raise
        except Exception as error:  # the border: a message of one client ends nobody else's work
            self._on_surprise(peer, header, error)

    def _turn_away(self, peer: bytes, header: Header, failed: Failed) -> None:
        """Refuse a request of which the rules have not heard."""
        self.refused += 1
        if self.on_request is not None:
            note = RequestNote(self._asker(peer), header.payload_type, "", _kind_of(failed))
            self.on_request(note)
        self._answer(peer, header.request_id, failed)

    def _note(self, event: Join | ClientCall, header: Header, effects: Sequence[Effect]) -> None:
        """Tell of a request, and what has come of it at once."""
        assert self.on_request is not None
        episode_id, error = getattr(event, "episode_id", None) or "", ""
        for effect in effects:
            if effect.peer == event.peer and effect.request_id == event.request_id:
                if isinstance(effect, Refuse):
                    error = _kind_of(effect.failed)
                elif isinstance(effect, SendReply) and isinstance(effect.reply, EpisodeStarted):
                    episode_id = effect.reply.episode_id
        note = RequestNote(self._asker(event.peer), header.payload_type, episode_id, error)
        self.on_request(note)

    def _asker(self, peer: bytes) -> ClientIdentity:
        name = self._names.get(peer, "")
        return ClientIdentity(name, self._users.get(peer, ""), self._addresses.get(peer, ""))

    def _on_surprise(self, peer: bytes, header: Header, error: Exception) -> None:
        """A request made this program raise what is no refusal."""
        what = f"{type(error).__name__}: {brief(str(error))}"
        name = brief(self._names.get(peer, peer.hex()))
        text = f"a {brief(header.payload_type)} of client {name} was not taken: {what}"
        self.complaints.add("request", text, error)
        failed = Failed(
            code=FailureCode.REMOTE,
            message=f"the bridge could not take this {header.payload_type}: {what}",
            peer=BRIDGE,
            remote_type=type(error).__qualname__,
        )
        self._answer(peer, header.request_id, failed)

    def _join(self, peer: bytes, header: Header, payload: JoinBridge) -> Join:
        spaces = payload.observation_space, payload.action_space
        for what, text in (("client", payload.client), ("resume", payload.resume)):
            if len(text) > _MAX_NAME or not (text.isprintable() or not text):
                raise RefusedError(
                    f"{what} is a text of at most {_MAX_NAME} characters, without control "
                    f"characters, not {brief(text)}"
                )
        if (spaces[0] is None) != (spaces[1] is None):
            raise SpaceMismatchError("tell both spaces, or neither")
        if spaces[0] is not None:
            announced = Agreement.from_wire(*spaces)
            if self.agreement is None or (self._is_open() and announced != self.agreement):
                self._adopt(announced)
            assert self.agreement is not None
            self.agreement.check_equal(announced)
        elif self.agreement is None:
            raise SpaceMismatchError("the bridge has no spaces yet: tell yours")
        (self._plain.add if payload.plain else self._plain.discard)(peer)
        self._names[peer] = payload.client
        user = self._users.get(peer, "")
        return Join(peer, header.request_id, payload.client, payload.resume, user)

    def _is_open(self) -> bool:
        """Return whether other spaces may be told than a former client's: nobody uses those."""
        return not self._is_given and self.on_spaces is not None and self._episodes.is_idle()

    def _adopt(self, agreement: Agreement) -> None:
        """Take a client's spaces for the bridge's."""
        if self.on_spaces is not None:
            try:
                self.on_spaces(agreement)
            except Exception as error:  # the border: it is the client's spaces that do not fit
                self.complaints.add("spaces", f"a client's spaces were refused: {error}")
                raise SpaceMismatchError(f"these spaces cannot be used here: {error}") from error
        self.agreement = agreement

    def _welcome(self, effect: Admit) -> BridgeJoined:
        assert self.agreement is not None
        observation_space, action_space = self.agreement.wire
        name, held = self._names[effect.peer], len(effect.episodes)
        if effect.peer not in self._greeted:  # it may ask again, for the spaces
            self._greeted.add(effect.peer)
            episodes = f"; its episodes: {held}" if held else ""
            self._lines.add(logging.INFO, f"client {name} has joined{episodes}")
        return BridgeJoined(
            observation_space=observation_space,
            action_space=action_space,
            multi_agent=self.agreement.multi_agent,
            policy_ids=self.policy_ids,
            lease=self._lease,
            session=effect.session,
            inference=["server", "client"] if self._models else ["server"],
            episodes=effect.episodes,
        )

    def _answer(self, peer: bytes, request_id: int, answer: Reply | Failed) -> bool:
        if type(answer) is Failed and len(answer.message) > _LONGEST:
            answer = structs.replace(answer, message=cut(answer.message, _LONGEST))
        try:
            return self._broker.answer(peer, request_id, answer)
        except EncodeError as error:
            text = cut(str(error), _LONGEST)
            failed = Failed(code=FailureCode.PROTOCOL, message=text, peer=BRIDGE)
            return self._broker.answer(peer, request_id, failed)


def _kind_of(failed: Failed) -> str:
    """Return what kind of refusal this is; its text may hold what the client has sent."""
    return failed.remote_type or failed.code.value
