"""The harness's end of an adapter's process: start, ask, stop for a while, measure, end."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from envbus.bench.harness.child import CLOSE_TIMEOUT, ChildError, LibraryProcess, one_line
from envbus.bench.harness.environments import Environments
from envbus.bench.steps.variants import Variant

__all__ = ["AdapterProcess", "Memory"]

#: Seconds within which an adapter has imported its library (torch on a cold disk is slow).
START_TIMEOUT = 120.0
#: Seconds for one kill and all that follows; a library may hang twice, and start again slowly.
KILL_TIMEOUT = 120.0


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
    """One variant's process, and the tree below it."""

    def __init__(self, variant: Variant, environments: Environments) -> None:
        self.variant = variant
        self._child = LibraryProcess(variant.library, environments, "adapters", [variant.adapter])
        self._stopped: list[psutil.Process] = []

    def wait_started(self) -> dict[str, str]:
        """Wait until the library is imported; return versions by distribution."""
        versions: dict[str, str] = _checked(self._child.read_line(START_TIMEOUT))["versions"]
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

    def descriptors(self) -> int:
        """Return how many descriptors the adapter's own process has open now.

        Raises:
            ChildError: It has ended.
        """
        try:
            return psutil.Process(self._child.pid).num_fds()
        except psutil.Error as error:
            raise ChildError("the adapter's process has ended") from error

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
        with contextlib.suppress(ChildError):
            self._ask({"op": "close"}, CLOSE_TIMEOUT)
        self._child.wait(CLOSE_TIMEOUT)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._child.kill()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._child.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        return _checked(self._child.ask(json.dumps(request), timeout))


def _checked(line: str) -> dict[str, Any]:
    """Return an adapter's answer, or raise what it says."""
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise ChildError(one_line(reply["error"]))
    return reply
