"""Who asked what, in a file of JSON lines, which holds no observation and no action.

Leaves out when something is to be told (`server.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import msgspec

from envbus.bus.brief import cut, printable
from envbus.bus.complaints import Complaints
from envbus.bus.errors import ConfigError
from envbus.runner.bridge.vocabulary import ClientIdentity

__all__ = ["AuditEntry", "AuditLog"]

logger = logging.getLogger("envbus.runner.serving")

#: Seconds between two complaints about a file that takes nothing.
_EVERY: Final = 60.0
#: Characters of what clients have told.
_LONGEST: Final = 300


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    client: ClientIdentity
    #: As clients call it: "get_action".
    verb: str
    episode: str = ""
    #: What has chosen the action, if one was chosen.
    policy: str = ""
    version: int | None = None
    #: Name of the error, or code of the failure; "": there was none. No text: that may hold what
    #: was observed.
    error: str = ""


class AuditLog:
    """Appends to a file what clients ask. What it cannot write is counted, and stops nobody.

    Whoever reads needs no more rights than the file's owner: others may not read a new one. It is
    rotated by somebody else, who moves it away and has it reopened.

    Args:
        path: The file. A pipe will do if somebody reads it.
        clock: Seconds since 1970.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._complaints = Complaints(logger, every=_EVERY)
        #: Entries that were not written.
        self.lost = 0
        self._file = self._open()
        #: Whether the file ends amid a line.
        self._is_torn = self._ends_amid_line()

    def write(self, entries: Iterable[AuditEntry]) -> None:
        """Append entries, in one piece; they are the kernel's when this returns."""
        at = datetime.fromtimestamp(self._clock(), timezone.utc).isoformat(timespec="milliseconds")
        lines = [msgspec.json.encode(_told(at, entry)) for entry in entries]
        if not lines:
            return
        data = b"\n" * self._is_torn + b"\n".join(lines) + b"\n"
        try:
            written = os.write(self._file, data)
        except OSError as exc:
            self._complain(len(lines), exc.strerror or str(exc))
            return
        self._is_torn = data[:written][-1:] not in (b"", b"\n")
        if written < len(data):
            self._complain(data[written:].count(b"\n"), "there was no room for all")

    def reopen(self) -> None:
        """Go on in a file of the same name, after somebody has moved this one away.

        Raises:
            ConfigError: It cannot be opened; the former one is written on.
        """
        former, self._file = self._file, self._open()
        os.close(former)
        self._is_torn = self._ends_amid_line()

    def close(self) -> None:
        """Write no more. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(self._path, flags, 0o600)
        except OSError as exc:
            raise ConfigError(f"the audit log {self._path} cannot be opened: {exc}") from exc

    def _ends_amid_line(self) -> bool:
        """Return whether the file has an end that a full disk, or the end of a server, cut off."""
        try:
            # Not to be waited for: a pipe may be there.
            reading = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # this process may only write it
            return False
        try:
            size = os.fstat(reading).st_size
            return size > 0 and os.pread(reading, 1, size - 1) != b"\n"
        except OSError:  # a disk that fails; what is written next will tell
            return False
        finally:
            os.close(reading)

    def _complain(self, count: int, why: str) -> None:
        self.lost += count
        self._complaints.add("audit", f"{self._path} lacks entries, {self.lost} by now: {why}")


def _told(at: str, entry: AuditEntry) -> dict[str, str | int]:
    """Return what a line says; what there is nothing of is left out."""
    client = entry.client
    told: dict[str, str | int] = {"time": at}
    for name, text in (
        ("client", client.name),
        ("user", client.user),
        ("address", client.address),
        ("verb", entry.verb),
        ("episode", entry.episode),
        ("policy", entry.policy),
        ("error", entry.error),
    ):
        if text:
            told[name] = printable(cut(text, _LONGEST))
    if entry.version is not None:
        told["version"] = entry.version
    return told
