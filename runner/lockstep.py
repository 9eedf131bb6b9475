"""One round of requests to the actors of a fleet, and what became of each.

Leaves out what the replies mean. Actors that died and are started again are waited for: their
request is sent once they are back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from envbus.bus.broker import failure_to_error
from envbus.bus.errors import NoPeerError, RestartLimitError
from envbus.bus.messages import FailureCode, Request
from envbus.bus.transport import Frames
from envbus.runner.faults import ActorLostError, FaultCause, advise
from envbus.runner.fleet import Actor, ActorState, Answer, Fleet, Gone, Lost, News, Ready

__all__ = ["Encoded", "Lockstep", "Loss", "Round"]

#: Longest single wait, in seconds; a round without a time-out waits again.
_LONGEST_WAIT = 3600.0


class Encoded(msgspec.Struct, frozen=True):
    """A request that was encoded once and is sent many times."""

    name: str
    frames: Frames


class Loss(msgspec.Struct, frozen=True):
    """Why an actor lost its envs."""

    cause: FaultCause
    reason: str


class Round(msgspec.Struct):
    """What became of the requests of one round."""

    #: By actor index: its reply.
    replies: dict[int, Any] = msgspec.field(default_factory=dict)
    #: By actor index: why it lost its envs in this round. It may have a reply besides, to the
    #: request that began its new life.
    faults: dict[int, Loss] = msgspec.field(default_factory=dict)
    #: Actors whose request passed its deadline.
    late: list[Actor] = msgspec.field(default_factory=list)
    #: Whether what envs raised in it was raised to the caller.
    told: bool = False

    @property
    def has_errors(self) -> bool:
        """Whether an env raised."""
        return any(reply.errors for reply in self.replies.values())


class Lockstep:
    """Sends one request to each of several actors and waits for all.

    Args:
        fleet: Whose actors.
        after_fault: Returns the request that begins an actor's new life within the round in
            which it died, or None to leave that to a later round. Only called where the fleet
            starts its actors again.
    """

    def __init__(self, fleet: Fleet, after_fault: Callable[[Actor], Request[Any] | None]) -> None:
        self._fleet = fleet
        self._after_fault = after_fault
        self._restarts = fleet.config.restart is not None
        #: By actor index: id of the request in flight, or 0 while it waits for its actor.
        self._waiting: dict[int, int] = {}
        self._held: dict[int, Request[Any] | Encoded] = {}
        self._timeout: float | None = None
        self._kill_late = False
        self._round = Round()
        self._number = 0
        #: Actors that died between two rounds, and why; told by the next one.
        self._died: dict[int, Loss] = {}

    def begin(
        self,
        requests: Mapping[int, Request[Any] | Encoded],
        timeout: float | None,
        *,
        afresh: bool = False,
        kill_late: bool = False,
    ) -> None:
        """Send the requests, by actor index.

        Args:
            requests: What to send to whom.
            timeout: Deadline of each, in seconds from when it is sent; None lifts it.
            afresh: The requests begin new episodes, so that actors which died since the last
                round are no news.
            kill_late: Where actors are started again: an actor that passes its deadline is hung,
                and killed.

        Raises:
            ActorLostError: One of the actors has ended and is not started again. Nothing was
                sent.
            RestartLimitError: The same, after it was started again too often.
            EncodeError: A request cannot be sent. None stays in flight.
        """
        actors = self._fleet.actors
        for index in requests:
            if actors[index].state is ActorState.LOST:
                self._raise_lost(actors[index])
        self._number += 1
        self._round = Round()
        self._timeout = timeout
        self._kill_late = kill_late and self._restarts
        try:
            for index, request in requests.items():
                loss = self._died.pop(index, None)
                if loss is not None and not afresh:
                    self._fault(actors[index], loss)
                else:
                    self._send(actors[index], request)
        except BaseException:
            self.abandon()
            raise

    def collect(self, timeout: float | None) -> Round | None:
        """Wait until each request has ended; None if `timeout` seconds pass before.

        After None the round is still on: collect again, or `abandon` it.

        Raises:
            ActorLostError: An actor ended and is not started again. The round is over.
            RestartLimitError: An actor was started again too often. The round is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        poll, take = self._fleet.poll, self._take
        while self._waiting:
            left = _LONGEST_WAIT
            if deadline is not None:
                left = min(left, max(deadline - time.monotonic(), 0.0))
            try:
                for news in poll(left):
                    take(news)
            except (ActorLostError, RestartLimitError):
                self.abandon()
                raise
            if deadline is not None and self._waiting and time.monotonic() >= deadline:
                return None
        return self._round

    def wait(self, seconds: float) -> None:
        """Let time pass between two rounds, while the actors are looked after.

        Raises:
            ActorLostError, RestartLimitError: As `collect`.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for news in self._fleet.poll(left):
                self._take(news)

    @property
    def round(self) -> Round:
        """What has become of the last round's requests so far."""
        return self._round

    def missing(self) -> list[Actor]:
        """Return the actors that have not answered yet."""
        return [self._fleet.actors[index] for index in sorted(self._waiting)]

    def abandon(self) -> None:
        """Give the round up; replies that still come are dropped."""
        for request_id in self._waiting.values():
            if request_id:
                self._fleet.cancel(request_id)
        self._waiting.clear()
        self._held.clear()

    def _send(self, actor: Actor, request: Request[Any] | Encoded) -> None:
        """Send now, or once the actor is back."""
        index = actor.index
        if actor.state is not ActorState.READY:
            self._waiting[index] = 0
            self._held[index] = request
            return
        try:
            if isinstance(request, Encoded):
                self._waiting[index] = self._fleet.ask_encoded(
                    actor, request.frames, request.name, timeout=self._timeout, tag=self._number
                )
            else:
                self._waiting[index] = self._fleet.ask(
                    actor, request, timeout=self._timeout, tag=self._number
                )
        except NoPeerError:  # it left, and its exit has not been told yet
            self._fault(actor, Loss(actor.cause, self._fleet.why_gone(actor)))

    def _take(self, news: News) -> None:
        if type(news) is Answer:
            if news.tag == self._number:
                index = news.actor.index
                self._round.replies[index] = news.reply
                self._waiting.pop(index, None)
        elif type(news) is Lost:
            self._on_lost(news)
        elif type(news) is Ready:
            request = self._held.pop(news.actor.index, None)
            if request is not None:
                self._send(news.actor, request)
        elif type(news) is Gone:
            self._on_gone(news)

    def _on_lost(self, news: Lost) -> None:
        index = news.actor.index
        if news.tag != self._number or index not in self._waiting:
            return
        if news.failed.code is FailureCode.TIMEOUT:
            if self._kill_late:
                self._fleet.kill(news.actor, FaultCause.TIMEOUT, news.failed.message)
                self._fault(news.actor, Loss(FaultCause.TIMEOUT, news.failed.message))
                return
            del self._waiting[index]
            self._round.late.append(news.actor)
        elif news.failed.code in (FailureCode.PEER_LOST, FailureCode.NO_PEER):
            self._fault(news.actor, Loss(news.cause, news.failed.message))
        else:
            self.abandon()
            raise failure_to_error(news.failed, 0)

    def _on_gone(self, news: Gone) -> None:
        actor = news.actor
        if actor.state is ActorState.LOST and (self._restarts or actor.index in self._waiting):
            self._raise_lost(actor, news.reason)
        if actor.index not in self._waiting and actor.index not in self._round.faults:
            self._died[actor.index] = Loss(news.cause, news.reason)

    def _fault(self, actor: Actor, loss: Loss) -> None:
        self._waiting.pop(actor.index, None)
        if not self._restarts:
            self._raise_lost(actor, loss.reason)
        self._round.faults.setdefault(actor.index, loss)
        request = self._after_fault(actor)
        if request is not None:
            self._send(actor, request)

    def _raise_lost(self, actor: Actor, reason: str | None = None) -> None:
        message = reason or f"{actor.describe()} has ended"
        if self._restarts:
            raise RestartLimitError(message)
        raise ActorLostError(
            advise(
                message,
                "close this and make a new one, or pass restart_failed_sub_environments=True to "
                "have its envs started again",
            ),
            env_ids=actor.env_ids,
            actor=actor.name,
        )
