"""What a bridge has to do, one check each; run against any third party's server.

A check raises `FailedCheck` with what was expected and what came, or `SkippedCheck` with why it
cannot be decided. Section numbers are those of docs/wire-protocol.md.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import (
    BRIDGE,
    BridgeJoined,
    EndEpisode,
    EpisodeEnded,
    GetAction,
    JoinBridge,
    LogAction,
    Logged,
    LogReturns,
    StartEpisode,
    Value,
)
from envbus.bus.errors import ConfigError
from envbus.bus.wire.codec import encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Hello,
    Kind,
    Token,
)
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.doctor import Means
from envbus.runner.conformance.talk import (
    BrokenRuleError,
    FailureError,
    LinkEndedError,
    NoAnswerError,
    Talk,
    open_link,
)

__all__ = ["FailedCheck", "Finding", "SkippedCheck", "check_server", "finding_of"]


class FailedCheck(Exception):
    """The server does not do what it has to."""


class SkippedCheck(Exception):
    """It cannot be decided."""


#: Outside of every space but texts: too long, and of letters that no space has by default.
_NO_ELEMENT = "\u2205" * 64


class Scene:
    """What a check has at hand.

    Args:
        connect: Opens another connection, to which nothing was said.
        talk: One that has joined.
        joined: What it was told.
    """

    def __init__(self, connect: Callable[[], Talk], talk: Talk, joined: BridgeJoined) -> None:
        self.connect = connect
        self.talk = talk
        self.joined = joined
        self.agreement = Agreement.from_wire(joined.observation_space, joined.action_space)
        for space in (self.agreement.observation_space, self.agreement.action_space):
            space.seed(0)

    def observation(self, *, plain: bool = False) -> Value:
        """Return an observation; with several agents of all of them."""
        return to_wire(self.agreement.observation_space.sample(), plain=plain)

    def action(self) -> Value:
        """Return an action; with several agents of all of them."""
        return to_wire(self.agreement.action_space.sample())

    def reward(self, value: float) -> Value:
        """Return a reward; with several agents one for each."""
        agents = self.agreement.agents
        return dict.fromkeys(agents, value) if agents else value

    def outside(self, take: Callable[[Value, str], object]) -> Value:
        """Return what `take` does not take; None if it takes all that could be sent."""
        agents = self.agreement.agents
        value = dict.fromkeys(agents, _NO_ELEMENT) if agents else _NO_ELEMENT
        try:
            take(value, "value")
        except SpaceMismatchError:
            return value
        return None

    def start(self, **settings: Any) -> str:
        """Begin an episode."""
        return self.talk.ask(StartEpisode(**settings)).episode_id

    def get_action(self, episode_id: str, **how: Any) -> Any:
        """Return an action, checked."""
        request = GetAction(episode_id=episode_id, observation=self.observation())
        chosen = self.talk.ask(request, **how)
        self.check_action(chosen.action)
        return chosen.action

    def check_action(self, action: Any) -> None:
        """Fail if it is outside the space."""
        try:
            self.agreement.take_action(action, "action")
        except SpaceMismatchError as exc:
            raise FailedCheck(f"the action is outside the declared space: {exc}") from exc

    def end(self, episode_id: str, **settings: Any) -> EpisodeEnded:
        """End an episode."""
        request = EndEpisode(episode_id=episode_id, observation=self.observation(), **settings)
        return self.talk.ask(request)

    def join_another(self, **settings: Any) -> tuple[Talk, BridgeJoined]:
        """Return another client that has joined."""
        other = self.connect()
        try:
            other.say_hello(f"conformance-{secrets.token_hex(4)}")
            return other, other.ask(JoinBridge(client="conformance", **settings))
        except BaseException:
            other.close()
            raise


@dataclass(frozen=True)
class Check:
    """One rule."""

    name: str
    section: str
    run: Callable[[Scene], None]


#: In the order in which they are run.
_CHECKS: list[Check] = []


def _check(section: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Add the decorated function, which is called as the check is."""

    def add(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        name = function.__name__.strip("_").replace("_", " ")
        _CHECKS.append(Check(name, section, function))
        return function

    return add


def _expect_refused(what: str, names: tuple[str, ...], call: Callable[[], object]) -> None:
    """Fail unless the call is refused by one of these names (`remote_type`)."""
    failed = _failure_of(what, call)
    if failed.remote_type not in names:
        raise FailedCheck(
            f"{what}: expected a FAILURE with remote_type {' or '.join(names)}, got "
            f"{failed.remote_type or failed.code.value!r}: {failed.message}"
        )
    if not failed.message:
        raise FailedCheck(f"{what}: the FAILURE has no message")


def _expect_failure(what: str, codes: tuple[FailureCode, ...], call: Callable[[], object]) -> None:
    """Fail unless the call ends in a FAILURE of one of these codes."""
    failed = _failure_of(what, call)
    if failed.code not in codes:
        wanted = " or ".join(code.value for code in codes)
        raise FailedCheck(
            f"{what}: expected code {wanted}, got {failed.code.value}: {failed.message}"
        )


def _failure_of(what: str, call: Callable[[], object]) -> Failed:
    try:
        answer = call()
    except FailureError as exc:
        return exc.failed
    raise FailedCheck(f"{what}: expected a FAILURE, got {type(answer).__name__}")


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check."""

    name: str
    #: Of docs/wire-protocol.md.
    section: str
    outcome: Literal["passed", "failed", "skipped"]
    #: Why it failed or was skipped.
    reason: str
    seconds: float


def check_server(
    address: Address, means: Means, timeout: float = 5.0, only: str = ""
) -> Iterator[Finding]:
    """Yield the outcome of each check, as soon as it is there.

    The server must answer requests for actions; what it is trained on meanwhile is nonsense.

    Args:
        address: With a transport (`doctor.examine` finds it out).
        means: Token, keys, certificates.
        timeout: Seconds to wait for one answer.
        only: Run only the checks whose names hold this.

    Raises:
        ConfigError: No name holds `only`, or nobody could join: `envbus doctor` says why.
    """
    chosen = [check for check in _CHECKS if only.lower() in check.name]
    if not chosen:
        raise ConfigError(
            f"no check is called {only!r}; there are {'; '.join(check.name for check in _CHECKS)}"
        )

    def connect() -> Talk:
        link = open_link(
            address, timeout=timeout, token=means.token, tls=means.tls, keys=means.keys
        )
        talk = Talk(link, timeout)
        if means.token is not None and address.transport == "stream":
            talk.send(Token(token=means.token), Kind.NOTICE)
        return talk

    for check in chosen:
        yield finding_of(check.name, check.section, partial(_run, check, connect))


def finding_of(name: str, section: str, check: Callable[[], None]) -> Finding:
    """Return what comes of a check."""
    begin = time.monotonic()
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    reason = ""
    try:
        check()
    except FailedCheck as exc:
        outcome, reason = "failed", str(exc)
    except SkippedCheck as exc:
        outcome, reason = "skipped", str(exc)
    return Finding(name, section, outcome, reason, time.monotonic() - begin)


def _run(check: Check, connect: Callable[[], Talk]) -> None:
    """Run a check on a connection of its own, so that none suffers from what another broke."""
    try:
        talk = connect()
    except Exception as exc:  # each library has its own
        raise ConfigError(f"there is no connection: {exc}; `envbus doctor` says more") from exc
    with closing(talk):
        try:
            talk.say_hello(f"conformance-{secrets.token_hex(4)}")
            joined = talk.ask(JoinBridge(client="conformance"))
            check.run(Scene(connect, talk, joined))
        except SpaceMismatchError as exc:
            raise FailedCheck(f"BridgeJoined: {exc}") from exc
        except FailureError as exc:
            raise FailedCheck(f"a request that is right was refused: {exc}") from exc
        except (BrokenRuleError, NoAnswerError) as exc:
            raise FailedCheck(str(exc)) from exc
        except LinkEndedError as exc:
            raise FailedCheck(f"the connection ended: {exc}") from exc


# --- How clients join ----------------------------------------------------------------------


@_check("5")
def _hello_comes_first(scene: Scene) -> None:
    with closing(scene.connect()) as talk:
        _expect_failure(
            "a request before Hello",
            (FailureCode.NOT_JOINED,),
            lambda: talk.ask(JoinBridge(client="conformance")),
        )
        talk.say_hello("conformance-late-hello")  # and the connection stays


@_check("5")
def _hello_is_answered_again(scene: Scene) -> None:
    with closing(scene.connect()) as talk:
        name = f"conformance-{secrets.token_hex(4)}"
        first, second = talk.say_hello(name), talk.say_hello(name)
        for welcome in (first, second):
            if not 0 < welcome.lease < math.inf or welcome.max_message_bytes < 1024:
                raise FailedCheck(f"Welcome has no usable limits: {welcome}")


@_check("3")
def _another_version_is_named(scene: Scene) -> None:
    with closing(scene.connect()) as talk:
        number = talk.next_id()
        hello = Hello(name="conformance-version", services=[])
        talk.send(hello, Kind.REQUEST, request_id=number, ttl=5.0, version=PROTOCOL_VERSION + 1)
        try:
            _expect_failure(
                "a header of another version",
                (FailureCode.VERSION,),
                lambda: talk.answer_to(hello, number, talk.timeout),
            )
        except LinkEndedError:
            raise FailedCheck("the connection was closed before the FAILURE came") from None


@_check("10")
def _spaces_are_told(scene: Scene) -> None:
    joined = scene.joined
    if "server" not in joined.inference and "client" not in joined.inference:
        raise FailedCheck(f"inference must name server or client, got {joined.inference}")
    if not 0 < joined.lease < math.inf:
        raise FailedCheck(f"the lease must be a positive number of seconds, got {joined.lease}")
    if not joined.session:
        raise FailedCheck("no session was given: who is cut off cannot resume")
    if joined.episodes:
        raise FailedCheck(f"a new session has open episodes: {joined.episodes}")


@_check("10")
def _other_spaces_are_refused(scene: Scene) -> None:
    odd: gymnasium.Space[Any] = spaces.Discrete(12345)
    agents = scene.agreement.agents if scene.agreement.multi_agent else None
    other: Any = odd if agents is None else dict.fromkeys(agents, odd)
    observation_space, action_space = Agreement(other, other).wire
    with closing(scene.connect()) as talk:
        talk.say_hello(f"conformance-{secrets.token_hex(4)}")
        request = JoinBridge(
            client="conformance", observation_space=observation_space, action_space=action_space
        )
        _expect_refused("a client with other spaces", ("SpaceMismatch",), lambda: talk.ask(request))


# --- What episodes are ---------------------------------------------------------------------


@_check("10")
def _ids_of_episodes_are_unique(scene: Scene) -> None:
    ids = [scene.start() for _ in range(3)]
    if len(set(ids)) < 3 or not all(ids):
        raise FailedCheck(f"three episodes without an id were given {ids}")
    for episode_id in ids:
        scene.end(episode_id)


@_check("10")
def _an_id_may_be_chosen_and_is_used_once(scene: Scene) -> None:
    wanted = f"conformance-{secrets.token_hex(4)}"
    got = scene.start(episode_id=wanted)
    if got != wanted:
        raise FailedCheck(f"episode {wanted!r} was started as {got!r}")
    _expect_refused(
        "an id that is in use", ("EpisodeAlreadyStarted",), lambda: scene.start(episode_id=wanted)
    )
    scene.get_action(wanted)
    scene.end(wanted)
    _expect_refused(
        "an id that is used up", ("EpisodeFinished",), lambda: scene.start(episode_id=wanted)
    )


@_check("10")
def _actions_are_inside_the_space(scene: Scene) -> None:
    episode_id = scene.start()
    for _ in range(20):
        scene.get_action(episode_id)
        scene.talk.ask(LogReturns(episode_id=episode_id, reward=scene.reward(1.0)))
    scene.end(episode_id)


@_check("10")
def _plain_clients_get_plain_actions(scene: Scene) -> None:
    talk, _ = scene.join_another(plain=True)
    with closing(talk):
        started = talk.ask(StartEpisode())
        observation = scene.observation(plain=True)
        request = GetAction(episode_id=started.episode_id, observation=observation)
        action = talk.ask(request).action
        odd = _not_plain(action)
        if odd:
            raise FailedCheck(f"an action for a plain client holds {odd}")
        scene.check_action(action)
        talk.ask(EndEpisode(episode_id=started.episode_id, observation=observation))


@_check("10")
def _actions_of_the_simulator_are_taken(scene: Scene) -> None:
    episode_id = scene.start()
    for _ in range(2):
        request = LogAction(
            episode_id=episode_id,
            observation=scene.observation(),
            action=scene.action(),
        )
        answer = scene.talk.ask(request)
        if not isinstance(answer, Logged):
            raise FailedCheck(f"LogAction was answered by {type(answer).__name__}")
    scene.get_action(episode_id)  # on-policy and off-policy steps mix
    scene.end(episode_id)


@_check("10")
def _an_episode_may_end_as_soon_as_it_has_begun(scene: Scene) -> None:
    scene.end(scene.start())
    scene.end(scene.start(), truncated=True)
    scene.end(scene.start(training_enabled=False))


@_check("10")
def _unknown_episodes_are_named(scene: Scene) -> None:
    unknown = f"never-started-{secrets.token_hex(4)}"
    calls: list[Callable[[], object]] = [
        lambda: scene.get_action(unknown),
        lambda: scene.talk.ask(
            LogAction(
                episode_id=unknown,
                observation=scene.observation(),
                action=scene.action(),
            )
        ),
        lambda: scene.talk.ask(LogReturns(episode_id=unknown, reward=scene.reward(1.0))),
        lambda: scene.end(unknown),
    ]
    for call in calls:
        _expect_refused("a call for an unknown episode", ("EpisodeNotFound",), call)


@_check("10")
def _finished_episodes_take_no_call(scene: Scene) -> None:
    episode_id = scene.start()
    scene.end(episode_id)
    names = ("EpisodeFinished", "EpisodeNotFound")
    _expect_refused("an action after the end", names, lambda: scene.get_action(episode_id))
    _expect_refused("a second end", names, lambda: scene.end(episode_id))


@_check("10")
def _episodes_do_not_touch_each_other(scene: Scene) -> None:
    ids = [scene.start() for _ in range(5)]
    for turn in range(10):
        scene.get_action(ids[turn * 3 % 5])
    scene.end(ids[2])
    for episode_id in (ids[0], ids[1], ids[3], ids[4]):
        scene.get_action(episode_id)
        scene.end(episode_id)


@_check("10")
def _clients_do_not_touch_each_other(scene: Scene) -> None:
    mine = scene.start()
    other, _ = scene.join_another()
    with closing(other):
        request = GetAction(episode_id=mine, observation=scene.observation())
        names = ("EpisodeNotFound", "EpisodeError")
        _expect_refused("another client's episode", names, lambda: other.ask(request))
    scene.get_action(mine)
    scene.end(mine)


def _not_plain(value: Any) -> str:
    """Return what in a value is neither number, string, list nor map; "" if nothing is."""
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, list):
        return next((odd for item in value if (odd := _not_plain(item))), "")
    if isinstance(value, dict):
        return next((odd for item in value.values() if (odd := _not_plain(item))), "")
    return f"a {type(value).__name__}"


# --- What is refused and survived ----------------------------------------------------------


@_check("10")
def _observations_outside_the_space_are_refused(scene: Scene) -> None:
    wrong = scene.outside(scene.agreement.take_observation)
    if wrong is None:
        raise SkippedCheck("nothing is known to be outside this observation space")
    episode_id = scene.start()
    request = GetAction(episode_id=episode_id, observation=wrong)
    _expect_refused(
        "an observation outside the space", ("SpaceMismatch",), lambda: scene.talk.ask(request)
    )
    scene.get_action(episode_id)  # the episode has survived
    scene.end(episode_id)


@_check("10")
def _actions_outside_the_space_are_refused(scene: Scene) -> None:
    wrong = scene.outside(scene.agreement.take_action)
    if wrong is None:
        raise SkippedCheck("nothing is known to be outside this action space")
    episode_id = scene.start()
    request = LogAction(episode_id=episode_id, observation=scene.observation(), action=wrong)
    _expect_refused(
        "an action outside the space", ("SpaceMismatch",), lambda: scene.talk.ask(request)
    )
    scene.get_action(episode_id)
    scene.end(episode_id)


@_check("5")
def _unknown_requests_are_refused_and_the_connection_stays(scene: Scene) -> None:
    _expect_failure(
        "a request of an unknown type",
        (FailureCode.PROTOCOL, FailureCode.REMOTE),
        partial(_answer_to, scene, "NoSuchRequest", b"\x80"),
    )
    scene.end(scene.start())


@_check("8")
def _malformed_payloads_are_refused_and_the_connection_stays(scene: Scene) -> None:
    for payload in (b"", b"\xc1", b"\x81\xa1", b"\x91\x01", b"\x81\xaaepisode_id\x07"):
        _expect_failure(
            f"the payload {payload.hex() or '(empty)'}",
            (FailureCode.PROTOCOL, FailureCode.REMOTE),
            partial(_answer_to, scene, "StartEpisode", payload),
        )
    scene.end(scene.start())


@_check("2")
def _unknown_notices_are_borne(scene: Scene) -> None:
    header = Header(PROTOCOL_VERSION, Kind.NOTICE, 0, "NoSuchNotice")
    scene.talk.link.send([encode_header(header), b"\x80"])
    scene.end(scene.start())


def _answer_to(scene: Scene, payload_type: str, payload: bytes) -> object:
    """Send a request of these bytes; return its answer."""
    number = scene.talk.next_id()
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, number, payload_type, 5.0, 0, BRIDGE)
    scene.talk.link.send([encode_header(header), payload])
    return scene.talk.answer_to(StartEpisode(), number, scene.talk.timeout)


# --- Repetition, deadlines, lost connections -----------------------------------------------


@_check("10")
def _a_request_that_is_sent_again_is_answered_again(scene: Scene) -> None:
    episode_id = scene.start()
    number = scene.talk.next_id()
    request = GetAction(episode_id=episode_id, observation=scene.observation())
    first = scene.talk.ask(request, request_id=number)
    second = scene.talk.ask(request, request_id=number)
    if to_wire(first.action, plain=True) != to_wire(second.action, plain=True):
        raise FailedCheck(
            f"the same request was answered by two actions: {first.action}, then {second.action}"
        )
    scene.end(episode_id)


@_check("3")
def _a_deadline_that_passes_ends_in_a_failure(scene: Scene) -> None:
    episode_id = scene.start()
    number = scene.talk.next_id()
    request = GetAction(episode_id=episode_id, observation=scene.observation())
    scene.talk.send(request, Kind.REQUEST, request_id=number, ttl=1e-6, to=BRIDGE)
    try:
        scene.talk.answer_to(request, number, scene.talk.timeout)
    except FailureError as exc:
        if exc.failed.code is not FailureCode.TIMEOUT:
            raise FailedCheck(f"expected code timeout, got {exc}") from None
    # Fast enough to answer in time, or not: the next action is the next request's.
    deadline = time.monotonic() + 5.0
    while True:
        try:
            scene.get_action(episode_id)
            break
        except FailureError as exc:
            if exc.failed.remote_type != "EpisodeBusy" or time.monotonic() > deadline:
                raise
    scene.end(episode_id)


@_check("10")
def _who_is_cut_off_resumes(scene: Scene) -> None:
    first, joined = scene.join_another()
    episode_id = first.ask(StartEpisode()).episode_id
    first.ask(GetAction(episode_id=episode_id, observation=scene.observation()))
    first.link.close()  # without a goodbye
    with closing(scene.connect()) as second:
        second.say_hello(f"conformance-{secrets.token_hex(4)}")
        again = second.ask(JoinBridge(client="conformance", resume=joined.session))
        if again.episodes != [episode_id]:
            raise FailedCheck(
                f"after a reconnection episode {episode_id!r} was open, and the bridge tells of "
                f"{again.episodes}"
            )
        second.ask(GetAction(episode_id=episode_id, observation=scene.observation()))
        second.ask(EndEpisode(episode_id=episode_id, observation=scene.observation()))


@_check("10")
def _an_unknown_session_cannot_be_resumed(scene: Scene) -> None:
    with closing(scene.connect()) as other:
        other.say_hello(f"conformance-{secrets.token_hex(4)}")
        request = JoinBridge(client="conformance", resume=secrets.token_hex(16))
        _expect_refused("a session that never was", ("SessionLost",), lambda: other.ask(request))
