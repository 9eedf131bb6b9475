"""One policy worker as its owner sees it, over its lives: started, asked for signs of life, ended.

Leaves out whether it is started again, and when (`policy_processes.py`).
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from envbus.bus.errors import ClosedError, EnvbusError
from envbus.bus.nursery import Nursery
from envbus.bus.probing import Probing, Verdict
from envbus.bus.process import Child, ExitStatus
from envbus.bus.restart import Exit
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_board import BoardEntry, door_of
from envbus.runner.policy_host import (
    BOOTSTRAP_PARCEL,
    ENTRY,
    PolicyBootstrap,
    WorkerReport,
    read_report,
)
from envbus.runner.policy_pushes import Pushes
from envbus.runner.policy_weights import PROBE

__all__ = ["Member", "Outfit"]

logger = logging.getLogger("envbus.runner.policy_workers")


class Outfit(NamedTuple):
    """What each life of each worker is given."""

    nursery: Nursery
    method: str | None
    #: Of their doors.
    directory: Path
    batching: BatchingConfig
    #: By policy id, each pickled by cloudpickle.
    factories: Mapping[str, bytes]
    #: How many of them may spin in short waits.
    spinning: int
    #: Seconds without a sign of life after which one is killed; None: never.
    hang_timeout: float | None


class Member:
    """One worker. Whoever calls holds its owner's lock.

    Args:
        index: Its number among the workers.
        outfit: What it is given.

    Attributes:
        state: "starting", "up", "down" or "lost", as on the board.
        reason: Why it is not up, for people.
        hung_up: Its pipe hung up: the end of its process will be told.
        exit: How its present life ended, where that is known before its process ends.
    """

    def __init__(self, index: int, outfit: Outfit) -> None:
        self.name = f"policy-worker-{index}"
        self.incarnation = 0
        self.child: Child | None = None
        self.state = "starting"
        self.reason = ""
        self.hung_up = False
        self.exit = Exit.CRASH
        #: Which weights it has been sent.
        self.pushes = Pushes()
        self._index = index
        self._outfit = outfit
        #: Why its present life did not come up, as it said itself.
        self._problem = ""
        #: Number of the next parcel from it.
        self._next_parcel = 1
        #: Of a life that is up, and may be found to hang.
        self._probing: Probing | None = None

    def describe(self) -> str:
        """Return its name and process, for messages to people."""
        pid = self.child.pid if self.child is not None else "none"
        return f"{self.name} (pid {pid}, incarnation {self.incarnation})"

    def entry(self) -> BoardEntry:
        """Return what the board says of it."""
        return BoardEntry(
            name=self.name, incarnation=self.incarnation, state=self.state, reason=self.reason
        )

    def wake_at(self) -> float | None:
        """Return when `probe` has something to do; None: never."""
        return None if self._probing is None else self._probing.wake_at()

    def launch(self, weights: list[bytes]) -> None:
        """Start a process; that it is up it tells by its pipe.

        Args:
            weights: The latest `Pushed` of those policies that were given any, each pickled.

        Raises:
            StartError: There is no process or no memory for it.
        """
        outfit = self._outfit
        self.state, self._problem, self._next_parcel = "starting", "", 1
        self.hung_up, self._probing, self.exit = False, None, Exit.CRASH
        self.pushes = Pushes()
        self.child = outfit.nursery.start(self.name, ENTRY, method=outfit.method)
        bootstrap = PolicyBootstrap(
            name=self.name,
            worker_index=self._index,
            incarnation=self.incarnation,
            door=str(door_of(outfit.directory, self.name, self.incarnation)),
            spin=self._index < outfit.spinning,
            batching=outfit.batching,
            factories=outfit.factories,
            weights=weights,
        )
        number = self.child.pipe.next_number()
        assert number == BOOTSTRAP_PARCEL
        data = pickle.dumps(tuple(bootstrap), pickle.HIGHEST_PROTOCOL)
        self.child.pipe.send_bytes(number, data)

    def send(self, data: bytes) -> None:
        """Send a pickled `Pushed`, a probe, or the end."""
        assert self.child is not None
        pipe = self.child.pipe
        try:
            pipe.send_bytes(pipe.next_number(), data)
        except EnvbusError as exc:  # its end is told soon
            logger.debug("%s got no weights: %s", self.describe(), exc)

    def take_reports(self, now: float) -> list[WorkerReport]:
        """Take in what it says of itself, and return it."""
        reports: list[WorkerReport] = []
        while self.child is not None:
            try:
                data = self.child.pipe.receive_bytes(self._next_parcel, 0.0)
            except ClosedError:
                self.hung_up = True
                break
            except EnvbusError:  # nothing more now
                break
            self._next_parcel += 1
            report = read_report(data)
            if self._probing is not None:
                self._probing.alive(now)
            if report.up:
                self.state = "up"
                if self._outfit.hang_timeout is not None:
                    self._probing = Probing(self._outfit.hang_timeout, now)
            elif report.problem and not report.policy_id:
                self._problem = report.problem
            reports.append(report)
        return reports

    def probe(self, now: float) -> None:
        """Ask for a sign of life at times; kill it if it gives none."""
        if self._probing is None or self.child is None:
            return
        verdict = self._probing.look(now)
        if verdict is Verdict.ASK:
            self.send(PROBE)
        elif verdict is Verdict.HUNG:
            self._probing, self.exit = None, Exit.HANG
            self._problem = (
                f"killed, as it gave no sign of life for {self._outfit.hang_timeout:g} s "
                "(hang_timeout), in one call of a policy, or stopped"
            )
            nursery = self._outfit.nursery
            (stack,) = nursery.stacks([self.child])
            logger.warning("%s hangs and is killed:\n%s", self.describe(), stack)
            nursery.kill(self.child)

    def on_exit(self, status: ExitStatus) -> str:
        """Its process has ended, and `take_reports` was called since: return how."""
        how = self._problem or status.report()
        self.reason = f"{self.describe()} ended: {how}"
        assert self.child is not None
        self.child.pipe.close()
        self.child = self._probing = None
        with contextlib.suppress(OSError):
            door_of(self._outfit.directory, self.name, self.incarnation).unlink()
        self.state = "lost"
        return how

    def drop(self) -> None:
        """All is closed: there is no process any more."""
        self.child, self.state = None, "lost"
