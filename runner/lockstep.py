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
from envbus.bus.errors import EnvbusError, NoPeerError, RestartLimitError
from envbus.bus.messages import Failed, FailureCode, Request
from envbus.runner.actor import Actor, ActorState
from envbus.runner.faults import ActorLostError, FaultCause, advise
from envbus.runner.fleet import Fleet
from envbus.runner.news import STRAY, Answer, Gone, Lost, News, Ready

__all__ = ["Lockstep", "Loss", "Round"]

#: Longest single wait, in seconds. After one that brought nothing, and after the time-out of the
#: requests, it is looked whether what is waited for is still under way.
_LONGEST_WAIT = 1.0


class Loss(msgspec.Struct, frozen=True):
    """Why an actor lost its envs."""

    cause: FaultCause
    reason: str


class Round(msgspec.Struct):
    """What became of the requests of one round."""

    #: By actor index: its reply.
    replies: dict[int, Any] = msgspec.field(default_factory=dict)
    #: Actors whose request passed its deadline.
    late: list[Actor] = msgspec.field(default_factory=list)
    #: Whether what envs raised in it was raised to the caller.
    told: bool = False
    #: Whether what envs raised in it was taken in by whoever makes them anew.
    noted: bool = False
    #: Whether it was taken in by whoever exchanges actors.
    counted: bool = False
    #: By env: infos of those that had stepped before they were asked by message.
    early: dict[int, dict[str, Any]] = msgspec.field(default_factory=dict)
    #: By env: the infos that its replies brought, once taken.
    infos: dict[int, dict[str, Any]] | None = None

    @property
    def has_errors(self) -> bool:
        """Whether an env raised."""
        return any(reply.errors for reply in self.replies.values())


class Lockstep:
    """Sends one request to each of several actors and waits for all.

    Args:
        fleet: Whose actors.
        after_fault: Told that an actor has ended and is started again, once per life. Returns
            the request that begins its new life within the present round, or None to leave that
            to a later round.
        given_up: Told of an actor that is not started again any more, before the error is raised
            that says so.
    """

    def __init__(
        self,
        fleet: Fleet,
        after_fault: Callable[[Actor, Loss], Request[Any] | None],
        given_up: Callable[[Actor, Loss], object],
    ) -> None:
        self._fleet = fleet
        self._after_fault = after_fault
        self._given_up = given_up
        self._restarts = fleet.config.restart is not None
        #: Whether a round was ended after which nothing was to be settled, and none begun since.
        self.is_quiet = False
        #: By actor index: id of the request in flight, or 0 while it waits for its actor.
        self._waiting: dict[int, int] = {}
        self._held: dict[int, Request[Any]] = {}
        self._timeout: float | None = None
        self._kill_late = False
        self._round = Round()
        self._number = 0
        #: The last round that was given up while somebody had not answered.
        self.abandoned: Round | None = None
        #: Whether the present round tells of faults; else they are kept for the next that does.
        self._tells = True
        #: Actors that died and were not told of, and why; told by the next round that tells.
        self._died: dict[int, Loss] = {}
        #: By actor index: the life that its request went to, and its last life whose end is
        #: known. An end is heard of twice: from the request that the actor held, and as `Gone`.
        self._asked: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def begin(
        self,
        requests: Mapping[int, Request[Any]],
        timeout: float | None,
        *,
        kill_late: bool = False,
        tells: bool = True,
    ) -> None:
        """Send the requests, by actor index.

        Args:
            requests: What to send to whom.
            timeout: Deadline of each, in seconds from when it is sent; None lifts it.
            kill_late: Where actors are started again: an actor that passes its deadline is hung,
                and killed.
            tells: Whether faults are part of the round's results. If not, the death of an actor
                that was asked is an error of the round, and the next one that tells has it too.

        Raises:
            ActorLostError: One of the actors has ended and is not started again. Nothing was
                sent.
            RestartLimitError: The same, after it was started again too often.
            EncodeError: A request cannot be sent. None stays in flight.
        """
        self.is_quiet = False
        actors = self._fleet.actors
        for index in requests:
            if actors[index].state is ActorState.LOST:
                loss = self._died.get(index)
                self._raise_lost(actors[index], None if loss is None else loss.reason)
        self._number += 1
        self._round = Round()
        self._timeout = timeout
        self._kill_late = kill_late and self._restarts
        self._tells = tells
        try:
            for index, request in requests.items():
                loss = self._died.pop(index, None) if tells else None
                if loss is None:
                    self._send(actors[index], request)
                else:
                    self._on_end(actors[index], loss)
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
        longest = _LONGEST_WAIT if self._timeout is None else min(_LONGEST_WAIT, self._timeout)
        while self._waiting:
            left = longest
            if deadline is not None:
                left = min(left, max(deadline - time.monotonic(), 0.0))
            try:
                if not self._take_news(left):
                    for news in self._strays():
                        self._take(news)
            except EnvbusError:
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
            self._take_news(left)

    @property
    def round(self) -> Round:
        """What has become of the last round's requests so far."""
        return self._round

    @property
    def owes(self) -> bool:
        """Whether a later round has to tell of something."""
        return self.abandoned is not None or bool(self._died)

    def missing(self) -> list[Actor]:
        """Return the actors that have not answered yet."""
        return [self._fleet.actors[index] for index in sorted(self._waiting)]

    def abandon(self) -> None:
        """Give the round up; replies that still come are dropped."""
        if self._waiting and self._tells:
            self.abandoned = self._round
        for request_id in self._waiting.values():
            if request_id:
                self._fleet.cancel(request_id)
        self._waiting.clear()
        self._held.clear()

    def _send(self, actor: Actor, request: Request[Any]) -> None:
        """Send now, or once the actor is back."""
        index = actor.index
        self._asked[index] = actor.incarnation
        if actor.state is not ActorState.READY:
            self._waiting[index] = 0
            self._held[index] = request
            return
        try:
            self._waiting[index] = self._fleet.ask(
                actor, request, timeout=self._timeout, tag=self._number
            )
        except NoPeerError:  # it left, and its exit has not been told yet
            life = actor.incarnation
            self._fault(actor, life, Loss(actor.cause, self._fleet.why_gone(actor)))

    def _take_news(self, timeout: float) -> bool:
        """Take what comes within `timeout` seconds; return whether anything did.

        Raises:
            EnvbusError: What the first news led to that led to an error; all are taken.
        """
        failed, take, found = None, self._take, False
        for news in self._fleet.poll(timeout):
            found = True
            try:
                take(news)
            except EnvbusError as exc:  # the other news are news all the same
                failed = failed or exc
        if failed is not None:
            raise failed
        return found

    def _strays(self) -> list[Lost[Actor]]:
        """Return the requests whose ends were lost, as when an exception broke off their taking.

        The broker has settled them, so that no deadline of its ends them any more.
        """
        return [
            Lost(
                self._fleet.actors[index],
                self._number,
                Failed(code=FailureCode.TIMEOUT, message=STRAY),
            )
            for index, request_id in self._waiting.items()
            if request_id and not self._fleet.is_asked(request_id)
        ]

    def _take(self, news: News[Actor]) -> None:
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

    def _on_lost(self, news: Lost[Actor]) -> None:
        index = news.actor.index
        if news.tag != self._number or not self._waiting.get(index):
            return
        life = self._asked[index]
        if news.failed.code is FailureCode.TIMEOUT:
            if self._kill_late:
                self._fleet.kill(news.actor, FaultCause.TIMEOUT, news.failed.message)
                self._fault(news.actor, life, Loss(FaultCause.TIMEOUT, news.failed.message))
                return
            del self._waiting[index]
            self._round.late.append(news.actor)
        elif news.failed.code in (FailureCode.PEER_LOST, FailureCode.NO_PEER):
            self._fault(news.actor, life, Loss(news.cause, news.failed.message))
        else:
            raise failure_to_error(news.failed, 0)

    def _on_gone(self, news: Gone[Actor]) -> None:
        """An actor's process ended; the request that it held may be told before or after."""
        actor, index = news.actor, news.actor.index
        loss = Loss(news.cause, news.reason)
        if actor.state is ActorState.LOST:
            if self._restarts:
                self._given_up(actor, loss)
            if self._restarts or index in self._waiting:
                self._raise_lost(actor, news.reason)
        if index in self._waiting:
            self._fault(actor, news.incarnation, loss)
        elif self._is_news(index, news.incarnation):
            self._died[index] = loss

    def _is_news(self, index: int, life: int) -> bool:
        """Take in that a life of an actor has ended; False if that is known already."""
        if self._ended.get(index, -1) >= life:
            return False
        self._ended[index] = life
        return True

    def _fault(self, actor: Actor, life: int, loss: Loss) -> None:
        """An actor that was asked has ended, or is about to."""
        if self._is_news(actor.index, life):
            self._on_end(actor, loss)

    def _on_end(self, actor: Actor, loss: Loss) -> None:
        self._waiting.pop(actor.index, None)
        self._held.pop(actor.index, None)
        if not self._restarts:
            self._raise_lost(actor, loss.reason)
        if not self._tells:
            self._died[actor.index] = loss
            raise ActorLostError(
                advise(loss.reason, "its envs are started again: the next step says so"),
                env_ids=actor.env_ids,
                actor=actor.name,
            )
        request = self._after_fault(actor, loss)
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
