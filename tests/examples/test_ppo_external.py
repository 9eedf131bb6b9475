"""Simulators of five kinds train one policy at one bridge, while parts are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.waiting import pass_time

pytest.importorskip("torch")
#: The limit is that of a machine that is busy with other things.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "examples"
#: Seconds for the whole; alone it needs thirty.
PATIENCE = 280.0
HERE = ["--bind", "tcp://127.0.0.1:*", "--tcp", "127.0.0.1:0", "--websocket", "127.0.0.1:0"]


class Program:
    """An example that runs, and what it has printed so far."""

    def __init__(self, *command: str | Path, deadline: float) -> None:
        self._deadline = deadline
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append(line)  # as they come

    def found(self, pattern: str) -> list[re.Match[str]]:
        return [match for line in list(self.lines) if (match := re.search(pattern, line))]

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            ended = self.process.poll() is not None
            assert not ended, "".join(self.lines[-40:])
            assert time.monotonic() < self._deadline, "".join(self.lines[-40:])
            pass_time(0.05)

    def kill(self, pid: int) -> None:
        """Kill one of its processes."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pytest.fail(f"process {pid} has ended by itself: " + "".join(self.lines[-40:]))

    def end(self) -> None:
        """Return when it has ended by itself; it may take until the deadline."""
        self.process.wait(max(self._deadline - time.monotonic(), 1.0))
        self._reader.join()

    @property
    def steps(self) -> int:
        """Env steps that a trainer has sampled."""
        return max((int(match[1]) for match in self.found(r"^ *(\d+) steps")), default=0)


@contextmanager
def running(*command: str | Path, deadline: float) -> Iterator[Program]:
    program = Program(*command, deadline=deadline)
    try:
        yield program
    finally:
        program.process.terminate()
        program.end()


def test_simulators_everywhere_train_one_policy_and_no_finished_episode_is_lost(
    tmp_path: Path,
) -> None:
    deadline = time.monotonic() + PATIENCE
    log = tmp_path / "episodes.jsonl"
    # Enough for a browser to start, which takes a third of that time, and to play whole episodes.
    options = [*HERE, "--total-steps", "45000", "--target", "501", "--episodes", str(log)]
    with running(EXAMPLES / "ppo_external.py", *options, deadline=deadline) as trainer:
        trainer.until(lambda: trainer.found("simulators connect to"))
        addresses = trainer.found("simulators connect to (.*)")[0][1].split()
        gateway = int(trainer.found(r"gateway: process (\d+)")[0][1])
        everybody = EXAMPLES / "simulators" / "everybody.py"
        with running(everybody, *addresses, "--games", "4", deadline=deadline) as simulators:
            trainer.until(lambda: trainer.steps >= 6_000)
            simulators.kill(int(simulators.found(r"^\w+: process (\d+)")[0][1]))
            os.kill(gateway, signal.SIGKILL)
            trainer.until(lambda: trainer.steps >= 18_000)
            # An episode without any answer, while the trainer trained, has no step of the policy's.
            ended = simulators.found(r"^episode (\S+): (\d+) steps(?! \(0 answers)")
            told = {match[1]: int(match[2]) for match in ended}
            trainer.end()
            parties = {match[1] for match in simulators.found(r"^(\w+): process")}
    assert trainer.process.returncode == 0, "".join(trainer.lines[-40:])
    episodes = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    known = {one["id"]: one["length"] for one in episodes}
    assert len(known) == len(episodes)
    assert told.keys() <= known.keys()
    # In real time a step may go without an answer, and then is no step of the policy's.
    exact = {name: steps for name, steps in told.items() if not name.startswith("realtime")}
    assert exact == {name: known[name] for name in exact}
    found = json.loads(trainer.lines[-1])
    assert found["parties"].keys() == parties
    assert "node" not in parties or found["resumed"] > 0
    # Nor does a busy machine answer those in real time soon enough to balance a pole.
    lengths = [one["length"] for one in episodes if not one["id"].startswith("realtime")]
    assert sum(lengths[-50:]) > 3 * sum(lengths[:50])
