"""A policy worker's round trip, beside the bus alone with the same messages, and the policy alone.

Interleaved: in each round, each way is timed once, in another order. The bus alone is the bus as
env actors use it, with a worker that answers at once what a policy worker would have answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors import spaces as plain_spaces
from envbus.actors.blocks import BlockLayout
from envbus.actors.protocol import MapBlocks
from envbus.bench.adapters.base import Measurement, measurement_of
from envbus.bench.cases import Schedule
from envbus.bench.child import one_line
from envbus.bench.record import Record, new_record
from envbus.bench.summary import spread_of
from envbus.bench.vector import Keep, Say, forget
from envbus.bus.arena import Arena
from envbus.bus.broker import Broker
from envbus.bus.broker_core import BrokerCore
from envbus.bus.broker_vocabulary import BrokerConfig, Complete, PeerReady
from envbus.bus.codec import decode, encode
from envbus.bus.errors import EnvbusError
from envbus.bus.lane import LaneEnd, LanePeer
from envbus.bus.lane_router import LaneRouter
from envbus.bus.messages import Hello, Tree
from envbus.bus.serve import Worker
from envbus.runner.links import usable_cores
from envbus.runner.mlp import MlpPolicy
from envbus.runner.policies import FunctionPolicy, Policy
from envbus.runner.policy_protocol import ActionsChosen, ChooseActions
from envbus.runner.policy_workers import PolicyWorkers

__all__ = ["POLICY_CASES", "PolicyCase", "measure_policy"]

#: Seconds for a process to come up, and for one answer; far more than either ever takes.
TIMEOUT = 30.0
IDENTITY = b"worker"


@dataclass(frozen=True)
class PolicyCase:
    """What is asked: rows of an observation."""

    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def space(self) -> spaces.Box:
        """Of one observation."""
        return spaces.Box(0, 255, self.shape, np.dtype(self.dtype).type)

    @property
    def observations(self) -> npt.NDArray[Any]:
        """A batch."""
        return np.zeros((self.rows, *self.shape), self.dtype)


POLICY_CASES = (
    PolicyCase("1 x 4 floats", 1, (4,), "float32"),
    PolicyCase("64 x 4 floats", 64, (4,), "float32"),
    PolicyCase("32 x 4 x 84 x 84 bytes", 32, (4, 84, 84), "uint8"),
)


class Way(ABC):
    """One way to get actions."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, case: PolicyCase) -> None:
        """Start what it takes."""

    @abstractmethod
    def ask(self) -> None:
        """Ask, and wait for the answer."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class PolicyAlone(Way):
    """The policy in this process."""

    name = "policy alone"

    def __init__(self, case: PolicyCase) -> None:
        self._policy = _policy_of(case)
        self._observations = case.observations

    def ask(self) -> None:
        """Compute."""
        self._policy.compute_actions(self._observations, None)

    def close(self) -> None:
        """Nothing was started."""


class BusAlone(Way):
    """The same messages to a process that answers at once; each encoded and decoded."""

    name = "bus alone"

    def __init__(self, case: PolicyCase) -> None:
        self._case = case
        self._observations = case.observations
        router = LaneRouter(spin=usable_cores() > 1)
        self._broker = Broker(router, BrokerCore(BrokerConfig()))
        self._broker.expect(IDENTITY, "worker", 0)
        ours, theirs = LaneEnd.pair()
        router.add_lane(IDENTITY, ours)
        fd = theirs.fileno()
        self._worker = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "envbus.bench.policy_round_trip", str(fd), case.name],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
        )
        theirs.close()
        outcomes = self._broker.poll(TIMEOUT)
        if not any(isinstance(outcome, PeerReady) for outcome in outcomes):
            self.close()
            raise TimeoutError("the worker of the bus alone did not come up")

    def ask(self) -> None:
        """Send a request, and decode its answer."""
        frames = encode(
            ChooseActions(
                policy_id="default",
                num_rows=self._case.rows,
                explore=True,
                observations=Tree(self._observations),
                states=Tree(None),
            )
        )
        self._broker.ask(IDENTITY, "ChooseActions", frames, timeout=TIMEOUT)
        while not (outcomes := self._broker.poll(TIMEOUT)):
            pass
        (outcome,) = outcomes
        if not isinstance(outcome, Complete):
            raise TimeoutError(f"no answer: {outcome}")
        decode(ActionsChosen, outcome.frames, writable=True)

    def close(self) -> None:
        """End the worker."""
        self._worker.kill()
        self._worker.wait()
        self._broker.close()


class Workers(Way):
    """A policy worker; observations travel in the request."""

    name = "policy worker"

    def __init__(self, case: PolicyCase) -> None:
        self._observations = case.observations
        self._workers = PolicyWorkers(lambda: _policy_of(case))
        self._policy = self._workers.policy()

    def ask(self) -> None:
        """Send a request, and take its answer."""
        self._policy.compute_actions(self._observations, None)

    def close(self) -> None:
        """End the worker."""
        self._workers.close()


class SharedRows(Workers):
    """A policy worker that may read observations in a pool's shared memory."""

    name = "policy worker, shared rows"

    def __init__(self, case: PolicyCase) -> None:
        super().__init__(case)
        self._pool = _PoolOfRows(case)
        self._env_ids = np.arange(case.rows)
        self._policy.share_rows(self._pool)

    def ask(self) -> None:
        """Send a request, and take its answer."""
        ticket = self._policy.submit_actions(self._observations, None, env_ids=self._env_ids)
        self._policy.collect_actions(ticket)

    def close(self) -> None:
        """End the worker."""
        super().close()
        self._pool.arena.close()


class _PoolOfRows:
    """What a policy needs to know of a pool to read its rows."""

    closed = False

    def __init__(self, case: PolicyCase) -> None:
        actions = spaces.Discrete(2)
        self.arena = Arena.create(BlockLayout.of(case.space, actions, case.rows).size)
        self._layout = MapBlocks(
            observation_space=Tree(plain_spaces.to_plain(case.space)),
            action_space=Tree(plain_spaces.to_plain(actions)),
            num_envs=case.rows,
            first_row=0,
        )

    def shared_rows(self) -> tuple[int, int, MapBlocks]:
        """As `ActorPool.shared_rows`."""
        return self.arena.fd, self.arena.size, self._layout


WAYS: tuple[type[Way], ...] = (PolicyAlone, BusAlone, Workers, SharedRows)


@dataclass
class _Contender:
    """One way in one case, if it works, or the reason why not."""

    name: str
    way: Way | None = None
    failure: str = ""
    measured: list[Measurement] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take it out of the case if anything in the context fails."""
        try:
            yield
        except (EnvbusError, OSError, TimeoutError) as error:
            self.failure = one_line(f"{type(error).__name__}: {error}")
            self.close()

    def close(self) -> None:
        """End what was started."""
        if self.way is not None:
            self.way.close()
            self.way = None

    def row(self, case: PolicyCase) -> dict[str, Any]:
        """Return the result row."""
        row: dict[str, Any] = {"case": case.name, "way": self.name}
        if self.failure:
            return {**row, "status": "failed", "reason": self.failure}
        return {
            **row,
            "status": "ok",
            "p50_us": asdict(spread_of([one.latency_p50_us for one in self.measured])),
            "p99_us": asdict(spread_of([one.latency_p99_us for one in self.measured])),
        }


def measure_policy(
    schedule: Schedule,
    cases: Sequence[PolicyCase] = POLICY_CASES,
    say: Say = print,
    keep: Keep = forget,
) -> Record:
    """Measure all cases; return the record with one row per case and way.

    Args:
        schedule: How long and how often.
        cases: In this order.
        say: Takes lines of progress.
        keep: Takes the record after each case.
    """
    versions = {name: metadata.version(name) for name in ("msgspec", "numpy")}
    record = new_record("policy", schedule, {"policy": versions})
    for case in cases:
        for contender in _measure_case(case, schedule):
            row = contender.row(case)
            record["rows"].append(row)
            say(_line(row))
        keep(record)
    return record


def _measure_case(case: PolicyCase, schedule: Schedule) -> list[_Contender]:
    contenders = [_Contender(make.name) for make in WAYS]
    order, turns = schedule.order(case.name), [*contenders]
    try:
        for make, contender in zip(WAYS, contenders, strict=True):
            with contender.watched():
                contender.way = make(case)
        for _ in range(schedule.rounds):
            order.shuffle(turns)
            for contender in turns:
                if contender.way is None:
                    continue
                with contender.watched():
                    _time(contender.way, schedule.warm_up)
                    contender.measured.append(_time(contender.way, schedule.seconds))
    finally:
        for contender in contenders:
            contender.close()
    return contenders


def _line(row: dict[str, Any]) -> str:
    name = f"policy, {row['case']:22} {row['way']:27}"
    if row["status"] != "ok":
        return f"{name} - ({row['reason']})"
    return f"{name} p50 {row['p50_us']['median']:7.1f} us, p99 {row['p99_us']['median']:7.1f} us"


def _time(way: Way, seconds: float) -> Measurement:
    """Ask again and again for some time."""
    ask, clock = way.ask, time.perf_counter_ns
    latencies: list[int] = []
    start = now = clock()
    end = start + int(seconds * 1e9)
    while now < end:
        ask()
        before, now = now, clock()
        latencies.append(now - before)
    return measurement_of(len(latencies), latencies, (now - start) / 1e9)


def _policy_of(case: PolicyCase) -> Policy:
    """Return a small one: of images it looks at one corner, so that their way is what is timed."""
    if len(case.shape) > 1:
        return FunctionPolicy(lambda images: images[:, 0, 0, 0] > 0)
    return MlpPolicy(case.space, spaces.Discrete(2), seed=0)


def _answer(fd: str, case_name: str) -> None:
    """Answer for the bus alone, until killed."""
    (case,) = (case for case in POLICY_CASES if case.name == case_name)
    out = _policy_of(case).compute_actions(case.observations, None)
    reply = ActionsChosen(
        actions=Tree(out.actions),
        states=Tree(None),
        extras=Tree(dict(out.extras)),
        version=0,
        push=0,
    )
    lane = LaneEnd.from_fd(int(fd))
    worker = Worker(
        LanePeer(lane, IDENTITY, spin=usable_cores() > 1),
        Hello(name="worker", services=["bench"], capacity=1000, pid=os.getpid()),
        {ChooseActions: lambda _: reply},
    )
    worker.join(TIMEOUT)
    worker.run()


if __name__ == "__main__":
    os.chdir(Path(tempfile.gettempdir()))
    _answer(*sys.argv[1:])
