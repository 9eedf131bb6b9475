"""What a bridge refuses, as exceptions that the client raises and that cross by name.

```
EnvbusError
├── RefusedError (ValueError)          nothing has changed by the request
│   ├── EpisodeError                   a call that does not fit its episode
│   │   ├── EpisodeNotFoundError       this client started none of that id, or it was long ago
│   │   ├── EpisodeAlreadyStartedError
│   │   ├── EpisodeFinishedError       its id is used up
│   │   ├── EpisodeBusyError           its former get_action still waits
│   │   ├── EpisodeLostError           its client was away for too long
│   │   └── SpaceMismatchError         an element outside its space, or a client of other spaces
│   ├── RequestIdUsedError             another request of this session had that id
│   └── SessionLostError               the session to be resumed is not there any more
├── RequestTimeoutError
│   └── ActionTimeoutError             no action came in time; also a TimeoutError
└── SimulatorError                     `run()` of an `ExternalEnv` raised or returned
```
"""

from __future__ import annotations

from typing import ClassVar

from envbus.bus.errors import EnvbusError, RequestTimeoutError
from envbus.bus.wire.messages import Failed, FailureCode

__all__ = [
    "ActionTimeoutError",
    "EpisodeAlreadyStartedError",
    "EpisodeBusyError",
    "EpisodeError",
    "EpisodeFinishedError",
    "EpisodeLostError",
    "EpisodeNotFoundError",
    "RefusedError",
    "RequestIdUsedError",
    "SessionLostError",
    "SimulatorError",
    "SpaceMismatchError",
    "refusal_of",
]


class RefusedError(EnvbusError, ValueError):
    """A bridge refuses a request; nothing has changed by it."""

    #: `remote_type` of the FAILURE; part of the wire.
    wire_name: ClassVar[str] = "Refused"

    def failed(self) -> Failed:
        """Return what crosses."""
        return Failed(
            code=FailureCode.REMOTE, message=str(self), peer="bridge", remote_type=self.wire_name
        )


class EpisodeError(RefusedError):
    """A call does not fit its episode, which goes on as it was."""

    wire_name = "EpisodeError"


class EpisodeNotFoundError(EpisodeError):
    """No episode of that id was started by this client, or it ended long ago."""

    wire_name = "EpisodeNotFound"


class EpisodeAlreadyStartedError(EpisodeError):
    """An episode of that id is open."""

    wire_name = "EpisodeAlreadyStarted"


class EpisodeFinishedError(EpisodeError):
    """The episode is over; its id cannot be used again."""

    wire_name = "EpisodeFinished"


class EpisodeBusyError(EpisodeError):
    """The episode waits for an action already: calls of one episode come one after another."""

    wire_name = "EpisodeBusy"


class EpisodeLostError(EpisodeError):
    """The episode was ended as its client was away for longer than the lease."""

    wire_name = "EpisodeLost"


class SpaceMismatchError(EpisodeError):
    """An observation or action is outside its space, or a client has other spaces."""

    wire_name = "SpaceMismatch"


class RequestIdUsedError(RefusedError):
    """Another request of this session had that id: a mistake of the client's own program."""

    wire_name = "RequestIdUsed"


class SessionLostError(RefusedError):
    """The session to be resumed is not there any more, nor are its episodes."""

    wire_name = "SessionLost"


class ActionTimeoutError(RequestTimeoutError):
    """No action came in time; the observation is withdrawn and the episode goes on.

    Attributes:
        episode_id: Which episode waited.
    """

    episode_id: str = ""


class SimulatorError(EnvbusError):
    """`run()` of an `ExternalEnv` raised, returned, or its process ended.

    The message holds the complete traceback; in a thread, the exception itself is the cause.
    """


_BY_WIRE_NAME: dict[str, type[RefusedError]] = {
    kind.wire_name: kind
    for kind in (
        RefusedError,
        EpisodeError,
        EpisodeNotFoundError,
        EpisodeAlreadyStartedError,
        EpisodeFinishedError,
        EpisodeBusyError,
        EpisodeLostError,
        SpaceMismatchError,
        RequestIdUsedError,
        SessionLostError,
    )
}


def refusal_of(failed: Failed) -> RefusedError | None:
    """Return the exception that a FAILURE names; None: it is no refusal of a bridge."""
    if failed.code is not FailureCode.REMOTE:
        return None
    kind = _BY_WIRE_NAME.get(failed.remote_type)
    return None if kind is None else kind(failed.message)
