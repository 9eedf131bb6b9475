"""Simulators and runners of the tests of bridges; as a program, one that talks to its tester."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from envbus.actors import ClientTimeouts, ExternalEnvClient
from envbus.runner import DUMMY_AGENT, ExternalEnvBridge
from envbus.runner.bridge import BridgeResult
from tests.integration.group_children import PATIENCE
from tests.sources import ROOT

__all__ = ["ACTION", "OBSERVATION", "Program", "Runner", "in_thread", "seen"]

OBSERVATION = spaces.Box(-1000.0, 1000.0, (2,))
ACTION = spaces.Discrete(1000)


def seen(number: float) -> Any:
    """An observation that can be told from others."""
    return np.array([number, 0.0], np.float32)


class Runner:
    """Serves a bridge in the caller's thread, and keeps all that it was shown.

    Its action is the first number of the observation, by agent.
    """

    def __init__(self, bridge: ExternalEnvBridge) -> None:
        self.bridge = bridge
        self.results: list[BridgeResult] = []
        self.faults: list[Any] = []
        self.ended: list[str] = []
        self.unacted: list[str] = []

    def serve(self, until: Callable[[], object], *, act: bool = True) -> None:
        """Poll, and act upon what comes, until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.once(act=act)

    def once(self, *, act: bool = True) -> BridgeResult:
        result = self.bridge.poll(0.05)
        if result.observations or result.faults:
            self.results.append(result)
        self.faults += result.faults
        self.ended += result.ended
        self.unacted += result.unacted
        if act:
            self.bridge.send_actions(
                {
                    episode: {agent: int(value[0]) for agent, value in agents.items()}
                    for episode, agents in result.observations.items()
                    if episode not in result.ended
                }
            )
        return result

    def rows(self, episode: str) -> list[tuple[float, float]]:
        """Observations and rewards of one episode, in order."""
        return [
            (
                float(result.observations[episode][DUMMY_AGENT][0]),
                result.rewards[episode][DUMMY_AGENT],
            )
            for result in self.results
            if episode in result.observations
        ]


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[Outcome]:
    """Run a simulator beside the runner; its error is raised at the end."""
    outcome = Outcome(function)
    outcome.thread.start()
    yield outcome
    outcome.thread.join(PATIENCE)
    assert not outcome.thread.is_alive(), "the simulator did not end"
    if outcome.error is not None:
        raise outcome.error


class Outcome:
    """What became of a simulator in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as exc:
            self.error = exc

    def over(self) -> bool:
        return not self.thread.is_alive()


class Program:
    """A simulator in a process of its own."""

    def __init__(self, address: str, what: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.simulators", address, what]
            + [str(argument) for argument in arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Return the next line that it writes; "": it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def over(self) -> bool:
        return self.process.poll() is not None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


def endless(client: ExternalEnvClient, episode: str) -> None:
    """Step one episode for ever."""
    client.start_episode(episode)
    for number in range(10**9):
        assert client.get_action(episode, seen(number % 900)) == number % 900
        client.log_returns(episode, 1.0)


def episodes(client: ExternalEnvClient, name: str, open_at_once: int, steps: int) -> None:
    """Step several open episodes at random, and end them."""
    chance = np.random.default_rng(3)
    left = {client.start_episode(f"{name}-{i}"): steps for i in range(open_at_once)}
    while left:
        for episode in chance.permutation(sorted(left))[:2].tolist():
            number = steps - left[episode]
            assert client.get_action(episode, seen(number)) == number
            client.log_returns(episode, float(number))
            left[episode] -= 1
            if not left[episode]:
                client.end_episode(episode, seen(steps))
                del left[episode]
    sys.stdout.write("done\n")


if __name__ == "__main__":
    address, what, *rest = sys.argv[1:]
    heartbeat = 0.4
    with ExternalEnvClient(
        address, heartbeat=heartbeat, timeouts=ClientTimeouts(patience=5.0)
    ) as made:
        if what == "endless":
            endless(made, rest[0])
        else:
            episodes(made, rest[0], int(rest[1]), int(rest[2]))
