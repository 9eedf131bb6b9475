"""Every error envbus raises.

```
EnvbusError
├── ConfigError                 a setting is unusable; raised before anything starts
├── ProtocolError               bytes on the wire break the protocol
│   ├── DecodeError             frames that cannot be read
│   ├── EncodeError             a value that cannot be sent; nothing was sent
│   └── VersionMismatchError    the two sides speak different protocol versions
├── TransportError              a socket or a pipe failed
│   ├── UnknownPeerError        nobody with that identity is connected
│   ├── QueueFullError          the socket's queue to that peer is full
│   └── ClosedError             *you* closed it; a peer's death is PeerLostError
├── StartError                  a child process did not come up
├── RequestError                one request did not get its reply
│   ├── RequestTimeoutError     the deadline passed; also a TimeoutError
│   ├── PeerLostError           the peer died holding the request
│   ├── OverloadedError         refused at once: a queue is full
│   ├── NoPeerError             refused at once: nobody offers the service
│   └── RemoteError             the handler raised; carries text, never a pickle
└── RestartLimitError           the supervisor gave up on a child
```

Leaves out Gymnasium's own exceptions, which the runner raises where Gymnasium does.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ClosedError",
    "ConfigError",
    "DecodeError",
    "EncodeError",
    "EnvbusError",
    "NoPeerError",
    "OverloadedError",
    "PeerLostError",
    "ProtocolError",
    "QueueFullError",
    "RemoteError",
    "RequestError",
    "RequestTimeoutError",
    "RestartLimitError",
    "StartError",
    "TransportError",
    "UnknownPeerError",
    "VersionMismatchError",
]


class EnvbusError(Exception):
    """Base of every error raised by envbus."""


class ConfigError(EnvbusError, ValueError):
    """A setting is unusable. Raised before any process or socket exists."""


class ProtocolError(EnvbusError):
    """Bytes, or a value to be turned into bytes, break the wire protocol."""


class DecodeError(ProtocolError):
    """Frames could not be read: malformed, over a limit, or of an unknown type.

    Attributes:
        request_id: Id of the refused message, so that it can be answered; 0 if not readable.
    """

    def __init__(self, message: str, *, request_id: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id


class EncodeError(ProtocolError, TypeError):
    """A value cannot be expressed on the wire, or is over a limit. Nothing was sent."""


class VersionMismatchError(ProtocolError):
    """The two sides speak different protocol versions; the message names both.

    Attributes:
        version: The other side's protocol version.
        request_id: Id of the refused message, so that it can be answered; 0 if not readable.
    """

    def __init__(self, message: str, *, version: int = 0, request_id: int = 0) -> None:
        super().__init__(message)
        self.version = version
        self.request_id = request_id


class TransportError(EnvbusError):
    """A socket or pipe failed."""


class UnknownPeerError(TransportError):
    """No connected peer has that identity; the message was not sent."""


class QueueFullError(TransportError):
    """The queue towards a peer is full; the message was not sent."""


class ClosedError(TransportError):
    """This side was closed by its owner."""


class StartError(EnvbusError):
    """A child process, or the process that starts them, did not come up."""


class RequestError(EnvbusError):
    """A request ended without a reply.

    Attributes:
        request_id: Id of the request, as printed in the logs.
        peer: Name of the peer that held it, or None if none did.
        retryable: Whether asking again may help, if the request is idempotent.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, request_id: int, peer: str | None) -> None:
        super().__init__(f"request {request_id} to {peer or 'nobody yet'}: {message}")
        self.request_id = request_id
        self.peer = peer

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self)), self.__dict__


class RequestTimeoutError(RequestError, TimeoutError):
    """The deadline passed. The peer may still be running the request."""

    retryable = True


class PeerLostError(RequestError):
    """The peer that held the request died, left, or its lease ran out."""

    retryable = True


class OverloadedError(RequestError):
    """Refused at once because a limit of requests in flight or queued is reached."""

    retryable = True


class NoPeerError(RequestError):
    """Refused at once because no ready peer has that name or offers that service."""

    retryable = True


class RemoteError(RequestError):
    """The peer's handler raised.

    The remote exception crosses as text. Rebuilding foreign exceptions breaks on
    any class whose constructor is not `(message)`, and unpickling them runs code.

    Attributes:
        remote_type: Qualified name of the remote exception's class.
        remote_traceback: Formatted remote traceback.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: int,
        peer: str | None,
        remote_type: str,
        remote_traceback: str,
    ) -> None:
        text = f"{remote_type}: {message}" if remote_type else message
        if remote_traceback:
            text = f"{text}\n\nRemote traceback:\n{remote_traceback}"
        super().__init__(text, request_id=request_id, peer=peer)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class RestartLimitError(EnvbusError):
    """The supervisor gave up on a child: it failed more often than its policy allows."""


def _rebuild(cls: type[RequestError], text: str) -> RequestError:
    return cls.__new__(cls, text)
