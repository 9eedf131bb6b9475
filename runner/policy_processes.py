"""The processes of policy workers: started, watched, started again, given weights, ended.

A thread watches them, so that a worker is replaced also while its owner trains, or waits in
another part of the program. Whether one is started again is decided by `bus/supervision.py`, and
whether it hangs by `bus/probing.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import random
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from envbus.actors import host as env_host
from envbus.bus.errors import ClosedError, EnvbusError, StartError
from envbus.bus.folders import make_folder, name_folder
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.nursery import Child, ExitStatus, Nursery
from envbus.bus.probing import Probing, Verdict
from envbus.bus.restart import Exit, RestartPolicy
from envbus.bus.settings import check_number
from envbus.bus.supervision import StartChild, Supervision, SupervisionEffect
from envbus.bus.threads import ThreadsPerProcess
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_door import Board, BoardEntry, board_exists, door_of, write_board
from envbus.runner.policy_worker import (
    BOOTSTRAP_PARCEL,
    ENTRY,
    PROBE,
    PolicyBootstrap,
    Pushed,
    WorkerReport,
    read_report,
)

__all__ = ["Member", "Outfit", "PolicyProcesses", "Pushes"]

#: Pushes under way to one worker. Few, as each may be large; more than one, as a worker must
#: know weights by the time that a request comes which was made after they were pushed.
MAX_UNDER_WAY: Final = 8

logger = logging.getLogger("envbus.runner.policy_workers")

#: Longest wait of the thread, in seconds.
_LONGEST_WAIT: Final = 60.0
#: Seconds until it looks again after that has failed.
_FAILED_PAUSE: Final = 0.1


class Pushes:
    """What is under way to one life of one worker."""

    def __init__(self) -> None:
        self._under_way = 0
        #: Policies whose latest weights are still to be sent, in the order in which they changed.
        self._held: dict[str, None] = {}

    def offer(self, policy_id: str) -> bool:
        """Return whether new weights of a policy are to be sent now; else `taken` tells when."""
        if self._under_way >= MAX_UNDER_WAY:
            self._held[policy_id] = None
            return False
        self._under_way += 1
        return True

    def taken(self) -> list[str]:
        """The worker has looked at one; return the policies whose latest weights it is to get."""
        self._under_way -= 1
        if not self._held:
            return []
        policy_id = next(iter(self._held))
        del self._held[policy_id]
        self._under_way += 1
        return [policy_id]


class Outfit(NamedTuple):
    """What each life of each worker is given."""

    #: How its process is started: see `choose_start_method`.
    method: Literal["fork", "spawn"] | None
    #: How it gathers requests.
    batching: BatchingConfig
    #: By policy id, each pickled by cloudpickle.
    factories: Mapping[str, bytes]
    #: How many of them may spin in short waits.
    spinning: int
    #: Seconds for all to come up, and later for each that is started again, before it is killed.
    start_timeout: float
    #: Seconds without a sign of life after which one is killed; None: never.
    hang_timeout: float | None


class Member:
    """One worker. Whoever calls holds its owner's lock.

    Attributes:
        state: "starting", "up", "down" or "lost", as on the board.
        reason: Why it is not up, for people.
        hung_up: Its pipe hung up: the end of its process will be told.
        exit: How its present life ended, where that is known before its process ends.
    """

    def __init__(self, index: int, outfit: Outfit, nursery: Nursery, directory: Path) -> None:
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
        self._nursery = nursery
        self._directory = directory
        #: Why its present life did not come up, as it said itself.
        self._problem = ""
        #: Number of the next parcel from it.
        self._next_parcel = 1
        #: Of a life that may be found to hang, before it is up or after.
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

    def launch(self, weights: list[bytes], now: float) -> None:
        """Start a process; that it is up it tells by its pipe.

        `weights` are the latest `Pushed` of those policies that were given any, each pickled.

        Raises:
            StartError: There is no process or no memory for it.
        """
        outfit = self._outfit
        self.state, self._problem, self._next_parcel = "starting", "", 1
        self.hung_up, self._probing, self.exit = False, None, Exit.CRASH
        self.pushes = Pushes()
        self.child = self._nursery.start(self.name, ENTRY, method=outfit.method)
        self._probing = Probing(outfit.start_timeout, now)
        bootstrap = PolicyBootstrap(
            name=self.name,
            worker_index=self._index,
            incarnation=self.incarnation,
            door=str(door_of(self._directory, self.name, self.incarnation)),
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
                timeout = self._outfit.hang_timeout
                self._probing = None if timeout is None else Probing(timeout, now)
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
            outfit = self._outfit
            why = (
                f"gave no sign of life for {outfit.hang_timeout:g} s (hang_timeout), in one call "
                "of a policy, or stopped"
                if self.state == "up"
                else f"was not up within {outfit.start_timeout:g} s (start_timeout)"
            )
            self._problem = f"killed, as it {why}"
            (stack,) = self._nursery.stacks([self.child])
            logger.warning("%s hangs and is killed:\n%s", self.describe(), stack)
            self._nursery.kill(self.child)

    def on_exit(self, status: ExitStatus) -> str:
        """Its process has ended, and `take_reports` was called since: return how."""
        how = self._problem or status.report()
        self.reason = f"{self.describe()} ended: {how}"
        assert self.child is not None
        self.child.pipe.close()
        self.child = self._probing = None
        with contextlib.suppress(OSError):
            door_of(self._directory, self.name, self.incarnation).unlink()
        self.state = "lost"
        return how

    def drop(self) -> None:
        """All is closed: there is no process any more."""
        self.child, self.state = None, "lost"


class PolicyProcesses:
    """All workers of one owner. `start`, `push`, `close` and the rest may be called by any thread.

    Attributes:
        directory: Where their doors and the board are; only this user may enter.
    """

    def __init__(
        self,
        num_workers: int,
        outfit: Outfit,
        restart: RestartPolicy | None,
        *,
        preload: Sequence[str],
        threads_per_process: ThreadsPerProcess,
    ) -> None:
        #: Of each policy, the latest push, and the same pickled: arrays may be written to later.
        self._latest: dict[str, tuple[Pushed, bytes]] = {}
        self._outfit = outfit
        #: Of those that are started again: of all, or of nobody.
        self._supervision = Supervision(random.random)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._started = self._closed = False
        self._owner = os.getpid()
        self._bell, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(
            target=self._watch, name="envbus-policy-workers", daemon=True
        )
        self.directory = name_folder()
        try:
            # The fork server of env actors, which has imported nearly all that is needed.
            self._nursery = Nursery(
                (env_host.__name__, *preload),
                directory=self.directory,
                threads_per_process=threads_per_process,
                processes=num_workers,
            )
        except BaseException:
            self._bell.close()
            self._waker.close()
            raise
        self._members = [
            Member(index, outfit, self._nursery, self.directory) for index in range(num_workers)
        ]
        if restart is not None:
            for member in self._members:
                self._supervision.add(member.name, restart)
        disown_in_forks(self)

    # --- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers and wait until they are up.

        Raises:
            StartError: One ended, or was not up within `start_timeout`; or there may not
                be as many descriptors. Says why.
        """
        timeout = self._outfit.start_timeout
        deadline = time.monotonic() + timeout
        with self._lock:
            self._nursery.check_room(len(self._members))
            for member in self._members:
                member.launch(self._weights(), time.monotonic())
            self._tell()
            self._thread.start()
            while waiting := [each for each in self._members if each.state != "up"]:
                for member in waiting:
                    if member.reason:
                        raise StartError(member.reason)
                left = deadline - time.monotonic()
                if left <= 0:
                    children = [each.child for each in waiting if each.child is not None]
                    stacks = "\n".join(self._nursery.stacks(children))
                    raise StartError(
                        f"not up within {timeout:g} s: "
                        f"{', '.join(each.describe() for each in waiting)}; raise start_timeout if "
                        f"the policies need longer\n{stacks}"
                    )
                self._changed.wait(left)
            self._started = True

    @uninterrupted_call
    def push(self, policy_id: str, weights: Any, version: int | None) -> Pushed:
        """Send weights to all workers, and to each that is started later; returns at once.

        Who has many pushes to look at gets the latest once it has looked at some.
        """
        check_number("version", version, whole=True, optional=True)
        with self._lock:
            self._check_open()
            former, _ = self._latest.get(policy_id, (Pushed(policy_id, 0, 0, None), b""))
            if version is None:
                version = former.version + 1
            pushed = Pushed(policy_id, former.push + 1, int(version), weights)
            data = pickle.dumps(tuple(pushed), pickle.HIGHEST_PROTOCOL)
            pushed = pushed._replace(weights=None)
            self._latest[policy_id] = pushed, data
            for member in self._members:
                if member.child is not None and member.pushes.offer(policy_id):
                    member.send(data)
            return pushed

    @uninterrupted_call
    def latest(self, policy_id: str) -> tuple[int, int]:
        """Return number and version of a policy's latest push; 0 and 0 before the first."""
        with self._lock:
            pushed = self._latest.get(policy_id)
            return (0, 0) if pushed is None else (pushed[0].push, pushed[0].version)

    @uninterrupted_call
    def restarts(self) -> int:
        """Return how many processes were started again."""
        with self._lock:
            return self._supervision.all_restarts()

    @uninterrupted_call
    def up(self) -> list[str]:
        """Return the names of the workers that are up."""
        with self._lock:
            return [member.name for member in self._members if member.state == "up"]

    @uninterrupted_call
    def pids(self) -> list[int]:
        """Return the process ids of those that run."""
        with self._lock:
            return [member.child.pid for member in self._members if member.child is not None]

    @uninterrupted_call
    def close(self, timeout: float) -> None:
        """Have all workers leave; kill those that do not within `timeout` seconds. Idempotent."""
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._waker.send(b".")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()  # it is about to see that this is closed
        try:
            for member in self._members:
                if member.child is not None and timeout:
                    member.send(b"")  # which they take for the end
            for child in self._nursery.close(timeout):
                if timeout:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, timeout)
        finally:
            for member in self._members:
                member.drop()
            self._bell.close()
            self._waker.close()

    def disown(self) -> None:
        """In a forked copy: be closed."""
        self._closed = True

    # --- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            poller = select.poll()
            poller.register(self._bell, select.POLLIN)
            with self._lock:
                if self._closed:
                    return
                poller.register(self._nursery, select.POLLIN)
                for member in self._members:
                    if member.child is not None and not member.hung_up:
                        poller.register(member.child.pipe.fileno(), select.POLLIN)
                timeout = self._patience()
            poller.poll(timeout * 1e3)
            with self._lock:
                if self._nursery.is_ending or self._closed:
                    return
                try:
                    self._look(time.monotonic())
                except Exception:  # or nobody would be replaced any more
                    logger.exception("looking after policy workers failed")
                    # Without the lock: others push weights meanwhile, or close.
                    self._changed.wait(_FAILED_PAUSE)

    def _patience(self) -> float:
        times = [at for each in self._members if (at := each.wake_at()) is not None]
        restart_at, exits_at = self._supervision.wake_at(), self._nursery.wake_at()
        times += [at for at in (restart_at, exits_at) if at is not None]
        due = min(times, default=math.inf)
        return min(max(due - time.monotonic(), 0.0), _LONGEST_WAIT)

    def _look(self, now: float) -> None:
        # What cleans TMPDIR up may have removed it, and nobody would find those who come up next.
        changed = not board_exists(self.directory)
        for member in self._members:
            changed |= self._take_reports(member, now)
            member.probe(now)
        for child, status in self._nursery.exits():
            for member in self._members:
                if member.child is child:
                    self._on_exit(member, status, now)
                    changed = True
        effects = self._supervision.due(now)
        changed |= bool(effects)
        self._perform(effects)
        if changed:
            self._tell()

    # --- with the lock -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("these policy workers were closed, or belong to another process")

    def _weights(self) -> list[bytes]:
        """Return the latest weights of each policy that was given any, pickled."""
        return [data for _, data in self._latest.values()]

    def _take_reports(self, member: Member, now: float) -> bool:
        """Take what a worker says of itself; return whether it has come up."""
        came_up = False
        for report in member.take_reports(now):
            if report.up:
                came_up = True
                self._supervision.on_ready(member.name, member.incarnation, now)
                if member.incarnation:
                    logger.info("%s runs again", member.describe())
            elif report.policy_id:
                self._on_pushed(member, report)
        return came_up

    def _on_pushed(self, member: Member, report: WorkerReport) -> None:
        if report.problem:
            logger.error(
                "%s did not take over push %d of the weights of %r: %s",
                member.describe(),
                report.push,
                report.policy_id,
                report.problem,
            )
        for policy_id in member.pushes.taken():
            member.send(self._latest[policy_id][1])

    def _on_exit(self, member: Member, status: ExitStatus, now: float) -> None:
        self._take_reports(member, now)
        how = member.on_exit(status)
        if self._started:  # else `start` raises it
            logger.warning("%s", member.reason)
        if member.name in self._supervision:
            member.state = "down"
            idle = (self._outfit.hang_timeout or 0.0) if member.exit is Exit.HANG else 0.0
            name, life = member.name, member.incarnation
            self._perform(self._supervision.on_exit(name, life, member.exit, now, how, idle))

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            member = next(each for each in self._members if each.name == effect.name)
            if isinstance(effect, StartChild):
                member.incarnation = effect.incarnation
                self._start_again(member)
            else:
                member.state = "lost"
                member.reason = f"{member.name} {effect.how_often}: {effect.cause}"
                logger.error("%s; giving up on it", member.reason)

    def _start_again(self, member: Member) -> None:
        try:
            member.launch(self._weights(), time.monotonic())
        except (EnvbusError, OSError) as exc:  # no process, no memory, no descriptor: it has failed
            if member.child is not None:
                self._nursery.kill(member.child)  # its exit follows
                return
            member.state, member.reason = "down", f"{member.name} was not started again: {exc}"
            logger.warning("%s", member.reason)
            name, life, now = member.name, member.incarnation, time.monotonic()
            self._perform(self._supervision.on_exit(name, life, Exit.CRASH, now, str(exc)))

    def _tell(self) -> None:
        """Write on the board, and wake who waits for news."""
        with contextlib.suppress(OSError):  # the folder goes as this ends
            if make_folder(self.directory):
                write_board(self.directory, Board(workers=[each.entry() for each in self._members]))
        self._changed.notify_all()
