"""Simulators that a bridge runs itself, in threads and in processes, and their ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import cloudpickle

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import SimulatorError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.hosting import ENTRY, ENV_PARCEL, run_env
from envbus.bus.errors import ClosedError, ConfigError
from envbus.bus.process import Nursery

__all__ = ["Hosts", "Where"]

#: Where a simulator runs.
Where = Literal["thread", "process"]

_PRELOAD = (ENTRY.partition(":")[0],)
#: Seconds that threads get to end when the bridge is stopped.
_END_TIMEOUT = 2.0


class Hosts:
    """The simulators of one bridge.

    Args:
        open_door: Given what a fork server imports for them, returns what they connect to.
        watch: Lets the bridge's wait return when a descriptor is readable.
    """

    def __init__(
        self, open_door: Callable[[Sequence[str]], str], watch: Callable[[int], object]
    ) -> None:
        self._open_door = open_door
        self._watch = watch
        self._nursery: Nursery | None = None
        self._threads: list[_Thread] = []
        #: What is to be raised.
        self._ends: deque[SimulatorError] = deque()
        #: What ended in threads: appended there, taken by the owner.
        self._ended: deque[SimulatorError] = deque()
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._count = 0

    def start(
        self, env: ExternalEnv | Callable[[], ExternalEnv], where: Where, name: str | None
    ) -> str:
        """Run a simulator and return its name; see `ExternalEnvBridge.host`."""
        self._count += 1
        name = name or f"simulator-{self._count}"
        if where == "thread":
            self._start_thread(env, name)
        elif where == "process":
            self._start_process(env, name)
        else:
            raise ConfigError(f"a simulator runs in a 'thread' or a 'process', not in {where!r}")
        return name

    def raise_end(self) -> None:
        """Raise what has become of a simulator that has ended: of one at a time, once for each.

        Raises:
            SimulatorError: Says how, with its traceback.
        """
        if self._count:
            self._ends += self._take_ends()
            if self._ends:
                raise self._ends.popleft()

    def _take_ends(self) -> list[SimulatorError]:
        ends: list[SimulatorError] = []
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                self._bell[0].recv(64)
        while self._ended:
            ends.append(self._ended.popleft())
        if self._nursery is not None:
            for child, status in self._nursery.exits():
                what = "run() returned" if status.code == 0 else f"ended with {status.report()}"
                ends.append(SimulatorError(f"simulator {child.name} (process {child.pid}): {what}"))
                child.pipe.close()
        return ends

    def close(self) -> None:
        """End all simulators: those in threads by closing their clients, processes by a kill."""
        for thread in self._threads:
            thread.end()
        if self._nursery is not None:
            for child in self._nursery.children:
                self._nursery.kill(child)
            self._nursery.close(_END_TIMEOUT)
            self._nursery = None
        for thread in self._threads:
            thread.join(_END_TIMEOUT)
        if self._bell is not None:
            bell, self._bell = self._bell, None
            for end in bell:
                end.close()

    def _start_thread(self, env: ExternalEnv | Callable[[], ExternalEnv], name: str) -> None:
        made = env if isinstance(env, ExternalEnv) else env()
        if not isinstance(made, ExternalEnv):
            raise ConfigError(f"expected an ExternalEnv, got {made!r}")
        if self._bell is None:
            self._bell = socket.socketpair()
            self._bell[0].setblocking(False)
            self._bell[1].setblocking(False)
            self._watch(self._bell[0].fileno())
        thread = _Thread(made, self._open_door(()), name, self._on_thread_end)
        self._threads.append(thread)
        thread.start()

    def _on_thread_end(self, end: SimulatorError) -> None:
        """Called in the thread of the simulator."""
        self._ended.append(end)
        bell = self._bell
        if bell is not None:
            with contextlib.suppress(OSError):  # closed meanwhile, or rung enough
                bell[1].send(b".")

    def _start_process(self, env: ExternalEnv | Callable[[], ExternalEnv], name: str) -> None:
        make = (lambda: env) if isinstance(env, ExternalEnv) else env
        endpoint = self._open_door(_PRELOAD)
        try:
            parcel = cloudpickle.dumps((endpoint, name, make))
        except Exception as error:  # whatever an object says when it cannot be pickled
            raise ConfigError(
                f"{name} cannot be sent to a process: {error}; give a function that makes it"
            ) from error
        if self._nursery is None:
            self._nursery = Nursery(_PRELOAD)
            self._watch(self._nursery.fileno())
        child = self._nursery.start(name, ENTRY)
        number = child.pipe.next_number()
        assert number == ENV_PARCEL
        child.pipe.send_bytes(number, parcel)


class _Thread(threading.Thread):
    """A simulator in a thread of this process."""

    def __init__(
        self,
        env: ExternalEnv,
        endpoint: str,
        name: str,
        on_end: Callable[[SimulatorError], None],
    ) -> None:
        super().__init__(name=f"envbus-{name}", daemon=True)
        self._env = env
        self._endpoint = endpoint
        self._label = name
        self._on_end = on_end
        self._unwanted = threading.Event()
        self._client: ExternalEnvClient | None = None

    def run(self) -> None:
        """Run the simulator, and say how it ended, unless that was asked for."""
        what = f"simulator {self._label} (thread of process {os.getpid()})"
        try:
            run_env(
                self._env,
                self._endpoint,
                self._label,
                is_wanted=lambda: not self._unwanted.is_set(),
                on_connected=self._take,
            )
            end = SimulatorError(f"{what}: run() returned")
        except BaseException as error:  # SystemExit, too, ends the simulator only
            end = SimulatorError(f"{what} raised:\n{traceback.format_exc()}")
            end.__cause__ = error
        if not self._unwanted.is_set():
            self._on_end(end)

    def end(self) -> None:
        """Close its client, so that it ends with its next verb."""
        self._unwanted.set()
        client = self._client
        if client is not None:
            client.close()

    def _take(self, client: ExternalEnvClient) -> None:
        self._client = client
        if self._unwanted.is_set():
            raise ClosedError("the bridge was stopped")
