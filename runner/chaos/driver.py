"""The driver of a chaos run: an `ActorPool` that steps, while what it steps with is broken.

Run by `run.py` as a process of its own, since it is stopped at times, too:
`python -m envbus.runner.chaos.driver CONFIG`. It writes `Line`s to standard output.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
from gymnasium.error import NoAsyncCallError

from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner import ActorPool, RecycleAfter, Timeouts
from envbus.runner.chaos.audit import NOTHING_NOTED
from envbus.runner.chaos.envs import ChaosEnv
from envbus.runner.chaos.messages import MARK, ChaosProgress, DriverConfig, Line, Result
from envbus.runner.chaos.records import DriverJournal
from envbus.runner.chaos.schedule import COMMANDS, WHOLE_ACTOR, FaultKind, Injection, make_schedule
from envbus.runner.chaos.tracking import Tracker
from envbus.runner.engine.env_results import Batch

__all__ = ["main"]

#: Longest single wait, in seconds: injections are made between two.
_WAIT = 0.02
#: Seconds before and after a kill that the driver does not see: all have answered, all is told.
_UNSEEN = 0.1
#: Seconds between two lines of progress.
_TELL_EVERY = 0.25
#: Seconds that all envs have to answer at the end; a restart may wait for its turn.
_SETTLE = 30.0
#: Deadlines of a step that pass between two things done to one env, where the first one did nothing
#: to it: what it may do, it does within one.
_PAUSES = 1.5
#: An actor's restart may fail and be tried again a few times in these many seconds.
_PATIENCE = 15.0
#: Far more restarts than a schedule brings: nothing is to be given up. The pauses are short, so
#: that recovery is measured and not patience.
_POLICY = RestartPolicy(max_restarts=1000, window=120.0, backoff=0.02, max_backoff=0.1)
#: Often enough to meet every fault; leaks are among what it is for.
_RECYCLE = RecycleAfter(seconds=8.0, rss_mb=200.0, max_hold=2.0)

Rows = npt.NDArray[np.int64]


class Driver:
    """One run."""

    def __init__(self, config: DriverConfig, out: IO[bytes]) -> None:
        self._config = config
        self._out = out
        self._folder = Path(config.folder)
        self._journal = DriverJournal(self._folder)
        self._tracker = Tracker(_PAUSES * config.step_timeout, _PATIENCE)
        schedule = make_schedule(
            config.seed, config.seconds, config.num_envs, step_timeout=config.step_timeout
        )
        self._schedule = deque(schedule if config.chaos else ())
        #: What is due and waits for an env that works.
        self._due: list[Injection] = []
        self._pool = ActorPool(
            [
                functools.partial(ChaosEnv, env_id, config.folder, config.step_seconds)
                for env_id in range(config.num_envs)
            ],
            num_actors=config.num_actors,
            shared_memory=config.shared_memory,
            local_links=config.local_links,
            bind="tcp://127.0.0.1:*",
            restart=_POLICY,
            recycle_after=_RECYCLE,
            timeouts=Timeouts(start=20.0, reset=5.0, step=config.step_timeout, close=3.0),
            preload=["envbus.runner.chaos.envs"],
        )
        #: By env: all envs of its actor.
        self._companions = [
            actor.env_ids for actor in self._pool._fleet.actors for _ in actor.env_ids
        ]
        #: By env: process of its last row, whether that ended an episode, and whether a fault was
        #: reported since.
        self._pids = np.zeros(config.num_envs, np.int64)
        self._over = np.zeros(config.num_envs, np.bool_)
        self._broken: set[int] = set()
        #: Envs that were told to be late with their present step.
        self._slow: set[int] = set()
        #: What the next action of an env commands.
        self._commands: dict[int, Injection] = {}
        #: Stopped processes that go on at a time.
        self._paused: list[tuple[float, int]] = []
        self._draw = random.Random(config.seed)  # noqa: S311 - not for secrets
        self._nonce = 0
        self._env_steps = 0
        self._injections = 0
        self._next_tell = 0.0

    def run(self) -> None:
        """Step until the time is over, wait for all, and tell what was seen."""
        config = self._config
        with self._pool as pool:
            pool.reset(seed=config.seed)
            self._take(pool.recv(min_envs=config.num_envs))
            self._tell(Line(ready=list(pool._fleet.endpoints)))
            self._send(np.arange(config.num_envs))
            start = time.monotonic()
            while (now := time.monotonic()) < start + config.seconds:
                self._break_what_is_due(now - start)
                batch = self._receive()
                self._take(batch)
                if len(batch.env_ids):
                    self._send(batch.env_ids)
                self._tell_progress(start)
            seconds = time.monotonic() - start
            env_steps = self._env_steps
            for injection in (*self._due, *self._commands.values()):
                self._tracker.passed_over(injection.kind)
            settled = self._settle(start)
            statistics = pool.statistics()
            self._tell(Line(settled=True))
            sys.stdin.readline()
        self._journal.close()
        self._tell(
            Line(
                result=Result(
                    seconds=seconds,
                    env_steps=env_steps,
                    kinds=self._tracker.kinds,
                    unexplained=self._tracker.unexplained,
                    unnoticed=self._tracker.unnoticed(),
                    counted=statistics.faults,
                    actor_restarts=statistics.restarts,
                    env_restarts=statistics.env_restarts,
                    recycled=statistics.recycled,
                    settled=settled,
                )
            )
        )

    def _receive(self) -> Batch:
        """Take rows as callers do: as they come, in larger batches, or leaving some for later."""
        most = max(1, self._config.num_envs // 4)
        least = self._draw.choice((1, 1, 1, most))
        limit = self._draw.choice((None, None, least, most))
        return self._pool.recv(least, limit, timeout=_WAIT)

    def _settle(self, start: float) -> bool:
        """Take what is under way, and wait until all envs are back."""
        deadline = time.monotonic() + _SETTLE
        with suppress(NoAsyncCallError):
            while time.monotonic() < deadline:
                self._resume_paused(time.monotonic())
                self._take(self._pool.recv(timeout=_WAIT))
                self._tell_progress(start)
        return not self._broken and time.monotonic() < deadline

    def _take(self, batch: Batch) -> None:
        now = time.monotonic()
        for fault in batch.faults:
            self._journal.faulty(fault.env_id, fault.restarts)
            self._tracker.failed(fault.env_id, fault.cause.value, fault.message, now)
            self._slow.discard(fault.env_id)
            if not fault.given_up:  # else the audit says that it never came back
                self._broken.add(fault.env_id)
        ids = batch.env_ids
        if not len(ids):
            return
        observations: Rows = batch.observations
        noted = np.full(len(ids), NOTHING_NOTED, np.int64)
        if "nonce" in batch.infos:
            mask = batch.infos["_nonce"]
            noted[mask] = batch.infos["nonce"][mask]
        over = batch.terminations | batch.truncations
        self._journal.delivered(ids, observations, batch.incarnations, batch.rewards, over, noted)
        for env_id in set(ids[self._pids[ids] != observations[:, 4]].tolist()) - self._broken:
            self._tracker.recycled(env_id)
        self._pids[ids] = observations[:, 4]
        self._over[ids] = over
        self._env_steps += int(np.count_nonzero(observations[:, 3]))
        if self._slow:
            for env_id in self._slow.intersection(ids.tolist()):
                self._slow.discard(env_id)
                self._tracker.answered(env_id)
        if self._broken:
            for env_id in self._broken.intersection(ids.tolist()):
                self._broken.discard(env_id)
                self._tracker.works(env_id, now)

    def _send(self, ids: Rows) -> None:
        actions = np.zeros((len(ids), 3), np.int64)
        actions[:, 0] = np.arange(self._nonce + 1, self._nonce + 1 + len(ids))
        self._nonce += len(ids)
        if self._commands:
            for row, env_id in enumerate(ids.tolist()):
                if self._over[env_id]:
                    continue  # the env is reset, and gets no action
                injection = self._commands.pop(env_id, None)
                if injection is not None:
                    actions[row, 1:] = (COMMANDS[injection.kind], int(injection.amount * 1000))
                    self._inject(injection)
                    if injection.kind is FaultKind.SLOW:
                        self._slow.add(env_id)
        self._journal.sent(ids, actions[:, 0])
        self._pool.send(actions, ids)

    # --- breaking things -----------------------------------------------------------------------

    def _break_what_is_due(self, elapsed: float) -> None:
        now = time.monotonic()
        self._resume_paused(now)
        while self._schedule and self._schedule[0].at <= elapsed:
            self._due.append(self._schedule.popleft())
        for injection in list(self._due):
            if self._break(injection, now):
                self._due.remove(injection)
                self._injections += 1

    def _break(self, injection: Injection, now: float) -> bool:
        """Do it; return whether it was possible: it waits until some env works again."""
        if injection.kind in (FaultKind.GARBAGE, FaultKind.FREEZE, FaultKind.AWAY):
            self._break_elsewhere(injection)
            return True
        env_id = self._next_well(injection.env_id, now)
        if env_id is None:
            return False
        injection = replace(injection, env_id=env_id)
        if injection.kind in COMMANDS:
            self._commands[env_id] = injection
        else:
            return self._signal(injection, now)
        return True

    def _next_well(self, env_id: int, now: float) -> int | None:
        """Return the first env from `env_id` on to which nothing is done; None without any."""
        count, pids = self._config.num_envs, set(self._pool.actor_pids())
        for candidate in ((env_id + step) % count for step in range(count)):
            if (
                candidate not in self._broken
                and candidate not in self._commands
                and self._pids[candidate] in pids
                and self._tracker.is_free(candidate, now)
            ):
                return candidate
        return None

    def _signal(self, injection: Injection, now: float) -> bool:
        pid = int(self._pids[injection.env_id])
        away = injection.kind is FaultKind.KILL_UNSEEN
        if away:
            time.sleep(_UNSEEN)
        kills = away or injection.kind is FaultKind.KILL
        if not _send_signal(pid, signal.SIGKILL if kills else signal.SIGSTOP):
            return False
        self._inject(injection)
        if away:
            time.sleep(_UNSEEN)
        if injection.kind is FaultKind.PAUSE:
            self._paused.append((now + injection.amount, pid))
        return True

    def _break_elsewhere(self, injection: Injection) -> None:
        self._tracker.kinds[injection.kind.name].injected += 1
        match injection.kind:
            case FaultKind.GARBAGE:
                self._tell(Line(stranger=int(injection.amount)))
            case FaultKind.FREEZE:
                self._tell(Line(freeze=injection.amount))
            case _:
                time.sleep(injection.amount)

    def _inject(self, injection: Injection) -> None:
        reached: list[int] = []
        if injection.kind in WHOLE_ACTOR:
            reached = [i for i in self._companions[injection.env_id] if i != injection.env_id]
        self._tracker.injected(injection, reached, time.monotonic())

    def _resume_paused(self, now: float) -> None:
        for item in [item for item in self._paused if item[0] <= now]:
            self._paused.remove(item)
            _send_signal(item[1], signal.SIGCONT)

    # --- telling -------------------------------------------------------------------------------

    def _tell_progress(self, start: float) -> None:
        now = time.monotonic()
        if now >= self._next_tell:
            self._next_tell = now + _TELL_EVERY
            progress = ChaosProgress(
                seconds=now - start,
                env_steps=self._env_steps,
                injections=self._injections,
                faults=self._tracker.faults,
                recovering=len(self._broken),
            )
            self._tell(Line(progress=progress))

    def _tell(self, line: Line) -> None:
        self._out.write(msgspec.json.encode(line) + b"\n")
        self._out.flush()


def _send_signal(pid: int, number: int) -> bool:
    """Send a signal to an actor; return whether it was there.

    It may have ended, which the pool is told a moment later, and its number may be another's.
    """
    mine = os.environ.get(MARK, "")
    with suppress(psutil.Error, ProcessLookupError):
        if psutil.Process(pid).environ().get(MARK, "") == mine:
            os.kill(pid, number)
            return True
    return False


def main(arguments: list[str]) -> int:
    """Run with the `DriverConfig` that is given as JSON; return the exit code."""
    # Its own copy: envs and what they start inherit descriptor 1.
    out: Any = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Driver(msgspec.json.decode(arguments[0].encode(), type=DriverConfig), out).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
