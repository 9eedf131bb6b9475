"""The harness's end of an adapter's process: start, ask, stop for a while, measure, end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from envbus.bench.environments import Environments, without_paths
from envbus.bench.variants import Variant

__all__ = ["AdapterError", "AdapterProcess", "Memory"]

#: Seconds within which an adapter has imported its library (torch on a cold disk is slow).
START_TIMEOUT = 120.0
#: Seconds that its own shutdown may take before everything is killed.
CLOSE_TIMEOUT = 20.0
#: Seconds for one kill and all that follows; a library may hang twice, and start again slowly.
KILL_TIMEOUT = 120.0
READ_BYTES = 65536


class AdapterError(Exception):
    """An adapter failed or did not answer; the message is one line, without paths."""


@dataclass(frozen=True)
class Memory:
    """Memory of a process tree in bytes, summed over its processes.

    `rss` counts shared pages once per process, `uss` not at all, `pss` each once in total.
    """

    rss: int
    uss: int
    pss: int
    processes: int


class AdapterProcess:
    """One variant's process, in its library's own environment and its own session."""

    def __init__(self, variant: Variant, environments: Environments) -> None:
        self.variant = variant
        # A pipe would have to be drained, and a file says afterwards what went wrong.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # Some libraries leave logs and links in the current folder.
        self._folder = tempfile.TemporaryDirectory(prefix="envbus-bench-")
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [
                str(environments.python(variant.library)),
                "-m",
                "envbus.bench.adapters",
                variant.adapter,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environments.variables(variant.library),
            cwd=self._folder.name,
            start_new_session=True,
        )
        self._received = b""
        self._stopped: list[psutil.Process] = []

    def wait_started(self) -> dict[str, str]:
        """Wait until the library is imported; return versions by distribution."""
        versions: dict[str, str] = self._receive(START_TIMEOUT)["versions"]
        return versions

    def open(self, workload: str, num_envs: int, options: dict[str, Any], timeout: float) -> float:
        """Construct and reset the envs; return the seconds which that took."""
        reply = self._ask(
            {"op": "open", "workload": workload, "num_envs": num_envs, "options": options},
            timeout,
        )
        return float(reply["seconds"])

    def run(self, seconds: float, warm_up: float) -> dict[str, float]:
        """Step for `seconds` after `warm_up` untimed ones; return the adapter's `Measurement`."""
        # One vector step may last long (Ray, 64 envs), and a run ends between steps.
        return self._ask(
            {"op": "run", "seconds": seconds, "warm_up": warm_up}, seconds + warm_up + 120.0
        )

    def kill_one(self) -> dict[str, Any]:
        """Kill one worker process; return the adapter's `Recovered` or `Broken`, and which."""
        return self._ask({"op": "kill"}, KILL_TIMEOUT)

    def cpu_seconds(self) -> float:
        """Return the CPU time used so far by the processes of the tree that are alive now."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory(self) -> Memory:
        """Return the memory of the process tree now."""
        rss = uss = pss = count = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                full = process.memory_full_info()
                rss, uss, pss = rss + full.rss, uss + full.uss, pss + full.pss
                count += 1
        return Memory(rss, uss, pss, count)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run inside the context, and stop them at its end."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop the whole tree: idle libraries may spin (PufferLib) or tick (Ray)."""
        self._stopped = self._tree()
        for process in self._stopped:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped tree go on; children first, so that no parent meets a stopped child."""
        for process in reversed(self._stopped):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self._stopped = []

    def close(self) -> None:
        """Ask the adapter to end, then kill whatever is left of its tree."""
        self.resume()
        tree = self._tree()
        with contextlib.suppress(AdapterError):
            self._ask({"op": "close"}, CLOSE_TIMEOUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_TIMEOUT)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._folder.cleanup()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._process.stdin is None:
            raise AssertionError("started with a pipe")
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise AdapterError(self._last_words()) from error
        return self._receive(timeout)

    def _receive(self, timeout: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise AssertionError("started with a pipe")
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise AdapterError(f"no answer within {timeout:.0f} s")
            chunk = os.read(fd, READ_BYTES)
            if not chunk:
                raise AdapterError(self._last_words())
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise AdapterError(_one_line(reply["error"]))
        return reply

    def _last_words(self) -> str:
        """Return the last line that a process wrote to standard error before it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_TIMEOUT)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return _one_line(lines[-1] if lines else f"ended with code {self._process.returncode}")


def _one_line(text: str) -> str:
    return without_paths(" ".join(text.split()))[:300]
