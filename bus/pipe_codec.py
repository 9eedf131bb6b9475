"""The codec of a runner and its own local child: what the bus cannot express takes the pipe.

Leaves out how objects and parcels are made (`codec.py`, `pipe.py`).
"""

from __future__ import annotations

import logging
import sys
from typing import TypeVar

import cloudpickle

from envbus.bus.codec import Placeholder, decode, encode
from envbus.bus.errors import EncodeError
from envbus.bus.messages import Payload
from envbus.bus.pipe import Pipe, PipeInbox, PipeOutbox
from envbus.bus.transport import Frames

__all__ = ["PipeCodec"]

logger = logging.getLogger("envbus.bus.pipe_codec")

P = TypeVar("P", bound=Payload)
#: Characters of an object's `repr` that a placeholder keeps.
_PLACEHOLDER_TEXT = 200


class PipeCodec:
    """Encodes and decodes payloads that may hold any object that cloudpickle takes.

    The frames go over the bus; objects that they cannot express go over `pipe`, which nobody
    but parent and child can reach, and the frames refer to them.

    Args:
        pipe: This side's end.
        lenient: Payload types in which an object that cannot be pickled is replaced by a
            `Placeholder`, with one warning, instead of failing the payload.
        writable: Decoded arrays are copies of the caller's own, not read-only views.
    """

    def __init__(
        self, pipe: Pipe, *, lenient: tuple[type[Payload], ...] = (), writable: bool = False
    ) -> None:
        _take_main_along()
        self._outbox = PipeOutbox(pipe)
        self._lenient_outbox = _LenientOutbox(pipe)
        self._inbox = PipeInbox(pipe)
        self._lenient = lenient
        self._writable = writable

    def encode(self, payload: Payload) -> Frames:
        """Return payload and buffer frames, after the objects that they refer to were sent.

        Raises:
            EncodeError: Something in it cannot be pickled, or a limit is exceeded.
            TransportError: The other side of the pipe is gone or does not read.
        """
        outbox = self._lenient_outbox if isinstance(payload, self._lenient) else self._outbox
        try:
            frames = encode(payload, outbox)
        except BaseException:
            outbox.discard()
            raise
        outbox.flush()
        return frames

    def decode(self, payload_type: type[P], frames: Frames) -> P:
        """Return the payload, its objects fetched from the pipe.

        Raises:
            DecodeError: The frames are malformed, or an object cannot be unpickled here.
            TransportError: The other side of the pipe is gone.
        """
        payload = decode(payload_type, frames, self._inbox, writable=self._writable)
        self._inbox.forget()
        return payload


def _take_main_along() -> None:
    """Have the main program's classes pickled by value also in a child of `multiprocessing`.

    There the main module goes by another name, which cloudpickle does not know, and which no
    other process can import.
    """
    main = sys.modules.get("__mp_main__")
    if main is not None:
        cloudpickle.register_pickle_by_value(main)


class _LenientOutbox(PipeOutbox):
    _warned = False

    def add(self, obj: object) -> int:
        """Pickle `obj`, or a placeholder where it does not let itself be pickled."""
        try:
            return super().add(obj)
        except EncodeError as exc:
            if not self._warned:
                self._warned = True
                logger.warning("replaced by a placeholder, like all that follow: %s", exc)
            kind = type(obj)
            name = f"{kind.__module__}.{kind.__qualname__}"
            try:
                text = repr(obj)[:_PLACEHOLDER_TEXT]
            except Exception:  # its own code may do anything
                text = ""
            return super().add(Placeholder(name, text))
