"""What crosses the bus: header, payload types and their registry, control messages.

Vocabulary only: no bytes (`codec.py`), no sockets, no decisions.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "Failed",
    "FailureCode",
    "Goodbye",
    "Header",
    "Heartbeat",
    "Hello",
    "Kind",
    "Notice",
    "Payload",
    "R",
    "Reply",
    "Request",
    "Shutdown",
    "Token",
    "Tree",
    "Welcome",
]

#: Raised by one with each change that an older peer cannot read.
PROTOCOL_VERSION = 1


class Kind(enum.IntEnum):
    """The four kinds of message. The broker switches on these, never on payload types."""

    REQUEST = 0
    REPLY = 1
    FAILURE = 2
    NOTICE = 3


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First frame of each message, and the only one that a broker decodes.

    New fields come last, with a default, so that older peers' headers still decode.
    """

    #: `PROTOCOL_VERSION` of the sender.
    version: int
    kind: Kind
    #: Chosen by the asker, unique among its requests in flight; a reply carries it back.
    request_id: int
    #: Name of the payload's class in `Payload.registry`.
    payload_type: str
    #: Seconds left until the deadline when this was sent; 0.0 for replies and notices.
    ttl: float = 0.0
    #: Which life of the sending peer this is, counted from 0.
    incarnation: int = 0
    #: Name of a peer, or of a service, that a request is for; empty: the receiver itself.
    to: str = ""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that follows a header. Subclasses register by class name."""

    registry: ClassVar[dict[str, type[Payload]]] = {}
    #: Whether the request may be sent a second time, e.g. to another peer, with no harm.
    idempotent: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = Payload.registry.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"payload type {cls.__name__!r} is already taken by {known.__module__}; "
                f"rename the one in {cls.__module__}"
            )


class Reply(Payload, frozen=True, kw_only=True):
    """Base of what answers a request."""


R = TypeVar("R", bound=Reply)


class Request(Payload, Generic[R], frozen=True, kw_only=True):
    """Base of what wants an answer; the type argument names the reply's class."""

    #: That class.
    reply_type: ClassVar[type[Reply]] = Reply

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is Request:
                (cls.reply_type,) = get_args(base)


class Notice(Payload, frozen=True, kw_only=True):
    """Base of what wants no answer."""


class Tree:
    """A free-form value inside a typed payload: infos, ragged observations, arguments.

    May hold None, bool, int, float, complex, str, bytes, list, tuple, dict with any hashable
    keys, NumPy scalars and arrays, nested. What else may be in it depends on the receiver
    (`codec.py`): over a local actor's pipe any object that cloudpickle takes.

    Immutable, though not a struct: msgspec hands only classes that it does not know to the
    codec's hooks, and must not encode `value` itself, as it would turn tuples into lists.
    """

    __match_args__ = ("value",)
    __slots__ = ("value",)

    value: Any

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Tree is immutable; make a new one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other.value) if isinstance(other, Tree) else NotImplemented

    def __hash__(self) -> int:
        return hash((Tree, self.value))

    def __repr__(self) -> str:
        return f"Tree({self.value!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Tree, (self.value,)


class Welcome(Reply, frozen=True, kw_only=True):
    """The broker knows the peer now."""

    #: Seconds of silence after which the broker takes the peer for gone; 0: never.
    lease: float
    #: Largest message that the broker takes, in bytes.
    max_message_bytes: int


class Hello(Request[Welcome], frozen=True, kw_only=True):
    """First message of a peer's life."""

    #: Readable name, e.g. `"actor-3"`; unique on the bus, stable over restarts.
    name: str
    #: What requests this peer answers, e.g. `["env"]`; empty for a pure client.
    services: list[str] = msgspec.field(default_factory=list)
    #: Most requests it wants in flight at one time.
    capacity: int = 1
    #: Process id on its own host, for messages to people.
    pid: int = 0
    #: Seconds between heartbeats it will send; 0: none, its process is watched instead.
    heartbeat: float = 0.0


class Heartbeat(Notice, frozen=True, kw_only=True):
    """A sign of life of the peer `identity`, which may be sent by a socket of its own.

    A peer that is busy in a long request cannot use its main socket, and sockets are not
    shared among threads.
    """

    #: Routing id of the peer that is alive; empty: the sender, which behind a gateway knows none.
    identity: bytes = b""


class Goodbye(Notice, frozen=True, kw_only=True):
    """The sender leaves on its own will and answers nothing more."""


class Shutdown(Notice, frozen=True, kw_only=True):
    """Asks a peer to finish what it does, clean up and leave."""


class Token(Notice, frozen=True, kw_only=True):
    """Shows a gateway that the sender may join: first of all, where the connection cannot."""

    token: str


class FailureCode(enum.Enum):
    """Why a request ended without a reply; each is one class in `errors.py`."""

    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    OVERLOADED = "overloaded"
    NO_PEER = "no_peer"
    #: The sender is nobody here: no hello, its lease is over, or this side was started again.
    NOT_JOINED = "not_joined"
    REMOTE = "remote"
    VERSION = "version"
    PROTOCOL = "protocol"

    @classmethod
    def _missing_(cls, _value: object) -> FailureCode:
        """Read a code that only a newer side knows as what it surely is: the other side failed."""
        return cls.REMOTE


class Failed(Payload, frozen=True, kw_only=True):
    """Payload of a FAILURE."""

    code: FailureCode
    #: What, which, and what to do.
    message: str
    #: Name of the peer that held the request, or empty.
    peer: str = ""
    #: For `REMOTE`: qualified name of the exception's class.
    remote_type: str = ""
    #: For `REMOTE`: the formatted traceback.
    remote_traceback: str = ""
