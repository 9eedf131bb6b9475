"""Time stamps at the seams of one vector step, on both sides of the bus.

The functions stamped are those that every step goes through: words in shared memory, or transport,
codec and round. Stamps of driver and actors are comparable: `perf_counter_ns` is one clock for all
processes of a host.
Nothing here is imported, and nothing slowed down, unless a profile is taken.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbus.actors.protocol import Step
from envbus.bus.process.pipe import PipeCodec
from envbus.bus.transport.interface import PeerTransport, RouterTransport
from envbus.bus.transport.local_link import LocalLinkPeer
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.transport.words import Doer
from envbus.bus.transport.zmq_sockets import ZmqPeer, ZmqRouter
from envbus.runner.engine.engine import Engine
from envbus.runner.vector.lockstep import Lockstep
from envbus.runner.workers.step_words import StepWords

__all__ = [
    "ActorStep",
    "DriverStep",
    "DriverWordStep",
    "driver_probes",
    "install_probes",
    "take_steps",
    "take_word_steps",
    "word_probes",
]

_clock = time.perf_counter_ns


@dataclass(frozen=True)
class ActorStep:
    """Stamps of one step in one actor, in nanoseconds."""

    received: int
    decoded: int
    stepped: int
    encoded: int
    sent: int


@dataclass
class DriverStep:
    """Stamps of one step in the driver, in nanoseconds; per peer where there are several."""

    begun: int = 0
    send_begun: dict[bytes, int] = field(default_factory=dict)
    sent: dict[bytes, int] = field(default_factory=dict)
    received: dict[bytes, int] = field(default_factory=dict)
    collected: int = 0


@dataclass
class DriverWordStep:
    """Stamps of one step by words in the driver, in nanoseconds."""

    number: int
    asking: int
    asked: int = 0
    #: When it saw that all have stepped; 0: the step became one of messages.
    answered: int = 0


class _ActorLog:
    """What an actor's process has stamped. One per process; emptied by `take_...`."""

    def __init__(self) -> None:
        self.identity = b""
        self.steps: list[ActorStep] = []
        #: By number of a step by words, when it was taken and when it was answered.
        self.word_steps: dict[int, tuple[int, int]] = {}
        self._taken = 0
        self._received = self._decoded = self._stepped = self._encoded = 0
        self._is_step = False

    def receive(self, original: Callable[..., Any], peer: PeerTransport, timeout: float) -> object:
        frames = original(peer, timeout)
        self._received = _clock()
        return frames

    def decode(
        self, original: Callable[..., Any], codec: PipeCodec, kind: type, frames: object
    ) -> object:
        payload = original(codec, kind, frames)
        self._is_step = kind is Step
        self._decoded = _clock()
        return payload

    def encode(self, original: Callable[..., Any], codec: PipeCodec, payload: object) -> object:
        self._stepped = _clock()
        frames = original(codec, payload)
        self._encoded = _clock()
        return frames

    def send(self, original: Callable[..., Any], peer: PeerTransport, frames: object) -> None:
        original(peer, frames)
        if self._is_step:
            self.identity = peer.identity
            self.steps.append(
                ActorStep(self._received, self._decoded, self._stepped, self._encoded, _clock())
            )
            self._is_step = False

    def take(self, original: Callable[..., Any], words: Doer) -> object:
        self._taken = _clock()
        return original(words)

    def answer(
        self, original: Callable[..., Any], words: Doer, number: int, *, has_more: bool
    ) -> object:
        is_asleep = original(words, number, has_more=has_more)
        self.word_steps[number] = self._taken, _clock()
        return is_asleep


_actor_log = _ActorLog()


def install_probes(_: object) -> None:
    """Put the probes into the actor that calls this, through `exec_func`; for its whole life."""
    for owner in (ZmqPeer, LocalLinkPeer):
        for name in ("receive", "send"):
            setattr(owner, name, _probed(getattr(owner, name), getattr(_actor_log, name)))
    for name in ("decode", "encode"):
        setattr(PipeCodec, name, _probed(getattr(PipeCodec, name), getattr(_actor_log, name)))
    for name in ("take", "answer"):
        setattr(Doer, name, _probed(getattr(Doer, name), getattr(_actor_log, name)))


def take_steps(_: object) -> tuple[bytes, list[tuple[int, ...]]]:
    """Return this actor's routing id and the stamps of its steps since the last call."""
    steps, _actor_log.steps = _actor_log.steps, []
    stamps: list[tuple[int, ...]] = [
        (step.received, step.decoded, step.stepped, step.encoded, step.sent) for step in steps
    ]
    return _actor_log.identity, stamps


def take_word_steps(_: object) -> dict[int, tuple[int, int]]:
    """Return, by number, when this actor took and answered steps by words since the last call."""
    steps, _actor_log.word_steps = _actor_log.word_steps, {}
    return steps


@contextlib.contextmanager
def driver_probes() -> Iterator[list[DriverStep]]:
    """Stamp the driver's side inside the context; yields the list that fills up."""
    steps: list[DriverStep] = []

    def begin(original: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        steps.append(DriverStep(begun=_clock()))
        return original(*args, **kwargs)

    def collect(original: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        done = original(*args, **kwargs)
        steps[-1].collected = _clock()
        return done

    def send(
        original: Callable[..., Any], router: RouterTransport, peer: bytes, frames: object
    ) -> None:
        begun = _clock()
        original(router, peer, frames)
        if steps:
            steps[-1].send_begun[peer] = begun
            steps[-1].sent[peer] = _clock()

    def receive(original: Callable[..., Any], router: RouterTransport) -> object:
        message = original(router)
        if message is not None and steps:
            steps[-1].received[message[0]] = _clock()
        return message

    seams: list[tuple[type, str, Callable[..., object]]] = [
        (Engine, "step", begin),
        (Lockstep, "end_step", collect),
        (ZmqRouter, "send", send),
        (ZmqRouter, "receive", receive),
        (LocalRouter, "send", send),
        (LocalRouter, "receive", receive),
    ]
    with _put_in(seams):
        yield steps


@contextlib.contextmanager
def word_probes() -> Iterator[list[DriverWordStep]]:
    """Stamp the driver's side of steps by words inside the context; yields the list that fills."""
    steps: list[DriverWordStep] = []

    def begin(original: Callable[..., Any], words: StepWords) -> object:
        asking = _clock()
        number = original(words)
        steps.append(DriverWordStep(number, asking))
        return number

    def ask(original: Callable[..., Any], words: StepWords) -> None:
        original(words)
        steps[-1].asked = _clock()

    def wait(original: Callable[..., Any], words: StepWords) -> object:
        have_all = original(words)
        if have_all:
            steps[-1].answered = _clock()
        return have_all

    with _put_in([(StepWords, "begin", begin), (StepWords, "ask", ask), (StepWords, "wait", wait)]):
        yield steps


@contextlib.contextmanager
def _put_in(seams: Sequence[tuple[type, str, Callable[..., object]]]) -> Iterator[None]:
    """Put probes into methods inside the context."""
    originals = [getattr(owner, name) for owner, name, _ in seams]
    for (owner, name, probe), original in zip(seams, originals, strict=True):
        setattr(owner, name, _probed(original, probe))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(seams, originals, strict=True):
            setattr(owner, name, original)


def _probed(original: Callable[..., Any], probe: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> object:
        return probe(original, *args, **kwargs)

    return call
