"""A live bridge with a gateway and a policy for CartPole, for programs of other languages."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from envbus.bus.gateway import GatewayConfig
from envbus.runner import ExternalEnvBridge
from tests.sources import ROOT
from tests.waiting import PATIENCE

CLIENTS = ROOT / "examples" / "clients"
#: First number of an observation that is never answered, of one for which the policy fails, and of
#: one that is answered after the gateway was started again.
SILENCE, FAILURE, HELD = 99.0, 98.0, 97.0
OBSERVATIONS = Box(-100.0, 100.0, (4,), np.float32)
ACTIONS = Discrete(2)


def balance(observation: Any) -> int:
    """Push to where the pole falls: that keeps it up for some hundred steps."""
    if observation.ndim > 1:
        return 0
    return int(observation[2] + 0.3 * observation[3] > 0.0)


@contextmanager
def running(
    *command: str | Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, whose output is one stream; it is killed in the end."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environ or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Serving:
    """Answers clients while `run` runs their program.

    Attributes:
        rewards: Sums by episode.
        ended: How episodes ended: "terminated", "truncated" or "fault".
        untrained: Episodes that are not to be trained on.
        off_policy: Actions that clients chose themselves, by episode.
        infos: All that were not empty, by episode.
        unacted: Episodes in which an action was not taken, once for each.
    """

    def __init__(
        self, *, agents: Sequence[str] = (), observations: Box = OBSERVATIONS, **settings: Any
    ) -> None:
        spaces: tuple[Any, Any] = observations, ACTIONS
        if agents:
            spaces = {a: OBSERVATIONS for a in agents}, {a: ACTIONS for a in agents}
        local = ("127.0.0.1:0",)
        self._spaces = spaces
        self._settings = {"tcp": local, "websocket": local, **settings}
        self._open()
        self.rewards: defaultdict[str, float] = defaultdict(float)
        self.ended: dict[str, str] = {}
        self.untrained: set[str] = set()
        self.off_policy: dict[str, list[Any]] = {}
        self.infos: dict[str, list[Any]] = {}
        self.unacted: list[str] = []
        self.held: dict[str, dict[str, int]] = {}

    def _open(self) -> None:
        config = GatewayConfig(**self._settings)
        self.bridge = ExternalEnvBridge(*self._spaces, gateway=config)
        assert self.bridge.gateway is not None
        self.gateway = self.bridge.gateway

    def replace(self) -> None:
        """As if the bridge's process was killed and started again: nobody is told anything."""
        os.kill(self.gateway.pid, signal.SIGKILL)
        self.bridge.stop()
        self._settings |= {"tcp": self.gateway.tcp, "websocket": self.gateway.websocket}
        self._open()

    @property
    def stream(self) -> str:
        return f"stream://{self.gateway.tcp[0]}"

    @property
    def websocket(self) -> str:
        return f"ws://{self.gateway.websocket[0]}"

    def serve(self) -> None:
        """Take what is there, and act."""
        result = self.bridge.poll(0.02)
        self.untrained |= result.untrained
        self.unacted += result.unacted
        self.ended.update((fault.episode_id, "fault") for fault in result.faults)
        actions: dict[str, dict[str, int]] = {}
        if self.gateway.restarts:
            actions, self.held = self.held, {}
        for episode, observations in result.observations.items():
            self.rewards[episode] += sum(result.rewards[episode].values())
            infos = {agent: info for agent, info in result.infos[episode].items() if info}
            if infos:
                self.infos.setdefault(episode, []).append(infos)
            if result.terminateds[episode]["__all__"]:
                self.ended[episode] = "terminated"
            elif result.truncateds[episode]["__all__"]:
                self.ended[episode] = "truncated"
            elif episode in result.off_policy_actions:
                self.off_policy.setdefault(episode, []).append(result.off_policy_actions[episode])
            else:
                first = next(iter(observations.values())).flat[0]
                if first == FAILURE:
                    self.bridge.fail([episode], ArithmeticError("the policy fails, as told"))
                elif first != SILENCE:
                    chosen = self.held if first == HELD else actions
                    chosen[episode] = {a: balance(o) for a, o in observations.items()}
        self.bridge.send_actions(actions, policy_version=7)

    def until_asked(self) -> None:
        """Serve until somebody waits for an action."""
        deadline = time.monotonic() + PATIENCE
        while not self.bridge.statistics().waiting_now:
            assert time.monotonic() < deadline, "nobody asks"
            self.serve()

    def run(
        self,
        *command: str | Path,
        on_line: Callable[[str], object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Serve a program until it ends well, and return what it printed."""
        with running(*command, environ=environ) as process:
            return self.attend(process, on_line)

    def attend(
        self, process: subprocess.Popen[bytes], on_line: Callable[[str], object] | None = None
    ) -> str:
        """As `run`, of one that runs already."""
        assert process.stdout is not None
        stream = process.stdout
        os.set_blocking(stream.fileno(), False)
        text, told = "", 0
        deadline = time.monotonic() + 2 * PATIENCE  # hundreds of steps, each by five threads
        while True:
            ended = process.poll() is not None
            text += (stream.read() or b"").decode()
            lines = text.split("\n")[:-1]
            for line in lines[told:]:
                if on_line is not None:
                    on_line(line)
            told = len(lines)
            if ended:
                break
            assert time.monotonic() < deadline, f"{process.args!r} is not done:\n{text}"
            if not self.bridge.closed:
                self.serve()
        if not self.bridge.closed:
            self.serve()
        assert process.returncode == 0, text
        return text

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bridge.stop()
