"""Requests over a raw connection: one at a time, each answer judged by the protocol's rules."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import Any, ForwardRef, TypeVar, cast, get_args

from envbus.actors.external.protocol import BRIDGE
from envbus.bus.codec import decode, encode
from envbus.bus.errors import DecodeError, ProtocolError
from envbus.bus.headers import decode_header, encode_header
from envbus.bus.messages import (
    PROTOCOL_VERSION,
    Failed,
    Goodbye,
    Header,
    Hello,
    Kind,
    Notice,
    Payload,
    Reply,
    Request,
    Welcome,
)
from envbus.bus.transport import Frames
from envbus.runner.diagnosis.links import Link

__all__ = ["BrokenRuleError", "NoAnswerError", "RefusedError", "Talk"]

R = TypeVar("R", bound=Reply)


class BrokenRuleError(Exception):
    """The other side broke a rule of the protocol; the text says which."""


class NoAnswerError(Exception):
    """A request was not answered in time."""


class RefusedError(Exception):
    """A request ended in a FAILURE.

    Attributes:
        failed: What it said.
    """

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code.value}: {failed.message}")
        self.failed = failed


class Talk:
    """Asks over a link.

    Args:
        link: A connection that stands.
        timeout: Seconds to wait for an answer unless told otherwise; the deadline that requests
            carry is as far away.
    """

    def __init__(self, link: Link, timeout: float = 5.0) -> None:
        self.link = link
        self.timeout = timeout
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """Return an id that no request of this connection has had."""
        return next(self._ids)

    def ask(
        self,
        request: Request[R],
        *,
        to: str = BRIDGE,
        timeout: float | None = None,
        request_id: int | None = None,
    ) -> R:
        """Send a request and return its answer.

        Raises:
            RefusedError, NoAnswerError, BrokenRuleError, LinkEndedError: What else may come.
        """
        wait = self.timeout if timeout is None else timeout
        number = self.next_id() if request_id is None else request_id
        self.send(request, Kind.REQUEST, request_id=number, ttl=wait, to=to)
        # A server judges deadlines by its own clock; its failure needs time to arrive.
        return self.answer_to(request, number, wait + 1.0)

    def answer_to(self, request: Request[R], request_id: int, timeout: float) -> R:
        """Return the answer to a request that was sent."""
        deadline = time.monotonic() + timeout
        while True:
            frames = self.link.receive(max(deadline - time.monotonic(), 0.0))
            if frames is None:
                raise NoAnswerError(
                    f"{type(request).__name__} was not answered in {timeout:.3g} s: neither REPLY "
                    "nor FAILURE"
                )
            header = self._header(frames)
            if header.kind in (Kind.NOTICE, Kind.REQUEST):
                continue
            if header.request_id == request_id:
                return self._judge(request, header, frames)
            if header.request_id == 0 and header.kind is Kind.FAILURE:
                raise RefusedError(self._decode(Failed, frames))

    def tell(self, notice: Notice) -> None:
        """Send what wants no answer."""
        self.send(notice, Kind.NOTICE)

    def send(
        self,
        payload: Payload,
        kind: Kind,
        *,
        request_id: int = 0,
        ttl: float = 0.0,
        to: str = "",
        version: int = PROTOCOL_VERSION,
    ) -> None:
        """Send a message with exactly such a header."""
        header = Header(version, kind, request_id, type(payload).__name__, ttl, 0, to)
        self.link.send([encode_header(header), *encode(payload)])

    def say_hello(self, name: str, *, heartbeat: float = 10.0) -> Welcome:
        """Join the broker."""
        return self.ask(Hello(name=name, services=[], heartbeat=heartbeat), to="")

    def close(self) -> None:
        """Leave."""
        with suppress(Exception):  # whoever is gone need not be told
            self.tell(Goodbye())
        self.link.close()

    def _judge(self, request: Request[R], header: Header, frames: Frames) -> R:
        if header.kind is Kind.FAILURE:
            if header.payload_type != Failed.__name__:
                raise BrokenRuleError(f"a FAILURE carries {header.payload_type}, not Failed")
            raise RefusedError(self._decode(Failed, frames))
        wanted = _reply_class(type(request))
        if header.payload_type != wanted.__name__:
            raise BrokenRuleError(
                f"{type(request).__name__} is answered by {header.payload_type}, not by "
                f"{wanted.__name__}"
            )
        return cast("R", self._decode(wanted, frames))

    @staticmethod
    def _header(frames: Frames) -> Header:
        try:
            return decode_header(bytes(frames[0]))
        except ProtocolError as exc:
            raise BrokenRuleError(f"a header cannot be read: {exc}") from exc

    @staticmethod
    def _decode(kind: type[Any], frames: Frames) -> Any:
        try:
            return decode(kind, frames[1:])
        except DecodeError as exc:
            raise BrokenRuleError(f"{kind.__name__} cannot be read: {exc}") from exc


def _reply_class(kind: type[Request[Any]]) -> type[Payload]:
    for base in getattr(kind, "__orig_bases__", ()):
        for argument in get_args(base):
            if isinstance(argument, ForwardRef):
                return Payload.registry[argument.__forward_arg__]
            return cast("type[Payload]", argument)
    raise TypeError(f"{kind.__name__} names no reply")
