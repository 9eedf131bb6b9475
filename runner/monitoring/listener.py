"""Tells processes of this user what works here: a thread that waits for them at a Unix socket.

The socket has an abstract name, so that no file of it can be left, and ends with the process.
Whoever connects sends one question and gets one answer, both JSON in one line. Nobody who does not
ask costs anything: the thread sleeps. Leaves out what is told (`registry.py`) and who asks
(`runs.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from envbus.bus.transport.unix_sockets import owner_of

__all__ = ["LONGEST_QUESTION", "PREFIX", "Listener", "Question", "read_until"]

logger = logging.getLogger("envbus.runner.monitoring")

#: Begin of the names of the sockets; the user's id and the process' follow.
PREFIX: Final = "envbus-run-"
#: Bytes of a question.
LONGEST_QUESTION: Final = 4096
#: Seconds for a question to come, and for an answer to be taken.
_QUESTION_TIMEOUT: Final = 1.0
_ANSWER_TIMEOUT: Final = 2.0
#: Seconds of rest after a connection could not be taken.
_PAUSE: Final = 0.5
_BACKLOG: Final = 8
#: What `accept` says once it was closed.
_CLOSED: Final = (errno.EINVAL, errno.EBADF)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What may be asked."""

    #: "figures"; "picture", of what an env was observed to be last; or "episodes", of a bridge.
    what: str
    #: Name of a part, and which of its envs a picture is of.
    part: str = ""
    env: int = -1


class Listener:
    """The thread and its socket. Made by `open`.

    Args:
        listening: Bound, and listened at.
        answer: Called in the thread; returns what is told, None: nothing is.
    """

    def __init__(
        self, listening: socket.socket, answer: Callable[[Question], msgspec.Struct | None]
    ) -> None:
        self._socket = listening
        self._told = answer
        self._thread = threading.Thread(target=self._run, name="envbus monitoring", daemon=True)

    @classmethod
    def open(cls, answer: Callable[[Question], msgspec.Struct | None]) -> Listener | None:
        """Begin to listen; None: it cannot be done here, and nobody can look."""
        if not sys.platform.startswith("linux"):  # others have no abstract names
            return None
        name = f"\0{PREFIX}{os.geteuid()}-{os.getpid()}-{secrets.token_hex(4)}"
        listening = None
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(name)
            listening.listen(_BACKLOG)
            listener = cls(listening, answer)
            listener._start()
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread, is left
            if listening is not None:
                listening.close()
            logger.info("`envbus top` will not show this process: %s", exc)
            return None
        return listener

    def close(self) -> None:
        """Listen no more; who is being answered gets the answer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it

    def disown(self) -> None:
        """In a forked copy, which has no such thread: let go of the socket."""
        self._socket.close()

    def _start(self) -> None:
        # Signals are for the program's own threads.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run(self) -> None:
        with self._socket:
            while True:
                try:
                    connection, _ = self._socket.accept()
                except OSError as exc:
                    if exc.errno in _CLOSED:
                        return
                    time.sleep(_PAUSE)  # e.g. no descriptor is left
                    continue
                try:
                    with connection:
                        self._answer(connection)
                except (OSError, msgspec.MsgspecError) as exc:  # it has left, or asks nonsense
                    logger.debug("a look at this process came to nothing: %s", exc)
                except Exception:
                    logger.exception("the figures of this process cannot be told")

    def _answer(self, connection: socket.socket) -> None:
        if owner_of(connection)[1] not in (os.geteuid(), 0):
            return
        line = read_until(connection, b"\n", LONGEST_QUESTION, _QUESTION_TIMEOUT)
        question = msgspec.json.decode(line, type=Question)
        answer = self._told(question)
        if answer is not None:
            connection.settimeout(_ANSWER_TIMEOUT)
            connection.sendall(msgspec.json.encode(answer) + b"\n")


def read_until(connection: socket.socket, end: bytes, most: int, timeout: float) -> bytes:
    """Return what comes up to `end`; what came of it, where the other side has ended.

    Args:
        connection: Its timeout is another one afterwards.
        end: With which the other side stops.
        most: Bytes, after which nothing is waited for.
        timeout: Seconds for all of it.

    Raises:
        TimeoutError: They have passed.
    """
    deadline = time.monotonic() + timeout
    data = b""
    while end not in data and len(data) < most:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = connection.recv(most)
        if not more:
            break
        data += more
    return data
