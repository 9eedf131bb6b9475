"""A thread of the bridge's own process that runs a simulator."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import SimulatorError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.hosting import run_env
from envbus.bus.errors import ClosedError

__all__ = ["HostedThread"]


class HostedThread(threading.Thread):
    """Runs one `ExternalEnv`, to its end or until `end`.

    Args:
        env: The simulator.
        endpoint: Where the bridge is.
        name: For people.
        on_end: Called in this thread when it has ended without having been asked to.

    Attributes:
        identity: Under which its client is known to the bridge; b"": it has not connected.
        outcome: How it has ended; what it has raised is the cause.
    """

    def __init__(
        self,
        env: ExternalEnv,
        endpoint: str,
        name: str,
        on_end: Callable[[HostedThread], object],
    ) -> None:
        super().__init__(name=f"envbus-{name}", daemon=True)
        self.identity = b""
        self.outcome: SimulatorError | None = None
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
            self.outcome = SimulatorError(f"{what}: run() returned")
        except BaseException as error:  # SystemExit, too, ends the simulator only
            self.outcome = SimulatorError(f"{what} raised:\n{traceback.format_exc()}")
            self.outcome.__cause__ = error
        if not self._unwanted.is_set():
            self._on_end(self)

    def end(self) -> None:
        """Close its client, so that it ends with its next verb."""
        self._unwanted.set()
        client = self._client
        if client is not None:
            client.close()

    def _take(self, client: ExternalEnvClient) -> None:
        self._client = client
        self.identity = client.identity
        if self._unwanted.is_set():
            raise ClosedError("the bridge was stopped")
