"""A process of the benchmark that answers lines with lines: deadlines, and its last words."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from envbus.bench.harness.environments import Environments, without_paths

__all__ = ["ChildError", "LibraryProcess", "one_line"]

#: Seconds that its own shutdown may take before everything is killed.
CLOSE_TIMEOUT = 20.0
READ_BYTES = 65536


class ChildError(Exception):
    """A child failed or did not answer; the message is one line, without paths."""


class LibraryProcess:
    """A module of the benchmark in a library's environment, a session and a folder of its own.

    Args:
        library: In whose environment it runs.
        environments: Where libraries are installed.
        module: Below `envbus.bench`.
        arguments: Of its command line.
    """

    def __init__(
        self, library: str, environments: Environments, module: str, arguments: Sequence[str]
    ) -> None:
        with contextlib.ExitStack() as stack:
            # A pipe would have to be drained, and a file says afterwards what went wrong.
            self._errors = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            # Some libraries leave logs and links in the current folder.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="envbus-bench-"))
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [str(environments.python(library)), "-m", f"envbus.bench.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environments.variables(library),
                cwd=Path(folder),
                start_new_session=True,
            )
            #: What `kill` lets go of; if the process does not start, nothing is left.
            self._kept = stack.pop_all()
        self._received = b""

    @property
    def pid(self) -> int:
        """Its process id, also its session's."""
        return self._process.pid

    def ask(self, line: str, timeout: float) -> str:
        """Send a line, and return the one that answers it.

        Raises:
            ChildError: It has died, or did not answer within `timeout` seconds.
        """
        if self._process.stdin is None:
            raise AssertionError("started with a pipe")
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildError(self._last_words()) from error
        return self.read_line(timeout)

    def read_line(self, timeout: float) -> str:
        """Return the next line that it writes; errors as of `ask`."""
        if self._process.stdout is None:
            raise AssertionError("started with a pipe")
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise ChildError(f"no answer within {timeout:.0f} s")
            chunk = os.read(fd, READ_BYTES)
            if not chunk:
                raise ChildError(self._last_words())
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def wait(self, timeout: float) -> None:
        """Wait until it ends by itself, but no longer than `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout)

    def kill(self) -> None:
        """End its session by force, and let go of what belongs to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(CLOSE_TIMEOUT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._kept.close()

    def _last_words(self) -> str:
        """Return the last line that it wrote to standard error before it ended."""
        self.wait(CLOSE_TIMEOUT)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return one_line(lines[-1] if lines else f"ended with code {self._process.returncode}")


def one_line(text: str) -> str:
    """Return `text` as one line, cut off and without paths: results are published."""
    return without_paths(" ".join(text.split()))[:300]
