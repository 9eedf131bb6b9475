"""Requests to actors that are in flight, and which end each of them had.

Leaves out what replies mean, and who waits for them (`crew.py`).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from envbus.bus.broker import NO_DEADLINE
from envbus.bus.broker_vocabulary import Complete, FailLocal
from envbus.bus.errors import ClosedError, DecodeError, NoPeerError, TransportError
from envbus.bus.messages import Failed, FailureCode, Payload, Reply, Request
from envbus.runner.actor import Member
from envbus.runner.links import Links
from envbus.runner.news import Answer, Lost

__all__ = ["Requests"]

M = TypeVar("M", bound=Member)


class Requests(Generic[M]):
    """The requests of one crew. Each that was asked and not cancelled ends once.

    Args:
        links: Where the actors are.
    """

    def __init__(self, links: Links[M]) -> None:
        self._links = links
        self._broker = links.broker
        #: By request id: who was asked, the caller's tag, and what, if the reply is checked.
        self._calls: dict[int, tuple[M, Any, Request[Any] | None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def ask(self, actor: M, request: Request[Any], *, timeout: float | None, tag: object) -> int:
        """Encode and send a request; return its id.

        Raises:
            EncodeError: Something in it cannot be sent; nothing was.
            NoPeerError: The actor is not running.
        """
        assert actor.codec is not None
        try:
            request_id = self._broker.ask(
                actor.identity,
                type(request).__name__,
                actor.codec.encode(request),
                timeout=NO_DEADLINE if timeout is None else timeout,
            )
        except NoPeerError:
            self._links.end(actor)
            raise
        except ClosedError as exc:  # its pipe hangs up before anybody is told of its end
            self._links.end(actor)
            raise NoPeerError(str(exc), request_id=0, peer=actor.name) from exc
        self._calls[request_id] = (actor, tag, None if actor.check is None else request)
        return request_id

    def is_asked(self, request_id: int) -> bool:
        """Return whether a request has neither ended nor been cancelled."""
        return request_id in self._calls and self._broker.is_pending(request_id)

    def cancel(self, request_id: int) -> None:
        """Forget a request; its reply will be dropped."""
        call = self._calls.pop(request_id, None)
        if call is not None:
            call[0].abandoned = request_id
            self._broker.cancel(request_id)

    def on_reply(self, outcome: Complete) -> Answer[M] | Lost[M] | None:
        """Return how a request ended; None: it was cancelled."""
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return None
        actor, tag, request = call
        if actor.abandoned < outcome.wire_id:
            actor.abandoned = 0
        assert actor.codec is not None
        reply_type = Payload.registry.get(outcome.header.payload_type, Reply)
        try:
            reply: Payload | Exception = actor.codec.decode(reply_type, outcome.frames)
        except ClosedError as exc:  # it died between the message and what belongs to it
            self._links.end(actor)
            failed = Failed(code=FailureCode.PEER_LOST, message=f"{actor.describe()}: {exc}")
            return Lost(actor, tag, failed, actor.cause)
        except (DecodeError, TransportError) as exc:
            # E.g. an object whose class cannot be imported here; other requests' ends follow.
            reply = exc
        if (misfit := self._judge(actor, request, reply)) is not None:
            return Lost(actor, tag, misfit, actor.cause)
        if isinstance(reply, Exception):
            failed = Failed(code=FailureCode.PROTOCOL, message=f"{actor.describe()}: {reply}")
            return Lost(actor, tag, failed, actor.cause)
        return Answer(actor, tag, reply)

    def on_failure(self, outcome: FailLocal) -> Lost[M] | None:
        """Return how a request failed; None: it was cancelled."""
        call = self._calls.pop(outcome.wire_id, None)
        if call is None:
            return None
        actor, tag, request = call
        failed = outcome.failed
        if failed.code is FailureCode.PEER_LOST:
            self._links.end(actor)
            if actor.remote:  # the broker knows neither its envs nor its number
                told = f"{actor.describe()} left: {failed.message}"
                failed = msgspec.structs.replace(failed, message=told)
        elif failed.code is FailureCode.TIMEOUT:
            actor.abandoned = outcome.wire_id
        elif failed.code is not FailureCode.NO_PEER:
            failed = self._judge(actor, request, failed) or failed
        return Lost(actor, tag, failed, actor.cause)

    def _judge(
        self, actor: M, request: Request[Any] | None, answer: Payload | Exception
    ) -> Failed | None:
        """Let an actor go that has answered what it cannot; None: it has not."""
        if actor.check is None or request is None:
            return None
        wrong = actor.check(request, answer)
        if wrong is None:
            return None
        text = f"{actor.describe()} is let go, as it has answered {wrong}"
        self._links.kill(actor, reason=text)
        return Failed(code=FailureCode.PEER_LOST, message=text)
