"""The processes of policy workers: started, watched, started again, given weights, ended.

A thread watches them, so that a worker is replaced also while its owner trains, or waits in
another part of the program. Whether one is started again is decided by `bus/supervision.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import select
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envbus.actors import host as env_host
from envbus.bus.errors import ClosedError, EnvbusError, StartError
from envbus.bus.folders import make_folder
from envbus.bus.forking import disown_in_forks
from envbus.bus.process import Child, ExitStatus, Nursery
from envbus.bus.restart import Exit, RestartPolicy
from envbus.bus.supervision import (
    ChildExited,
    ChildReady,
    StartChild,
    Supervision,
    SupervisionEffect,
    SupervisionTick,
)
from envbus.runner.config import choose_start_method
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_board import Board, BoardEntry, door_of, write_board
from envbus.runner.policy_host import (
    BOOTSTRAP_PARCEL,
    ENTRY,
    PolicyBootstrap,
    WorkerReport,
    read_report,
)
from envbus.runner.policy_probing import Probing, Verdict
from envbus.runner.policy_pushes import Pushes
from envbus.runner.policy_worker import PROBE, Pushed

__all__ = ["PolicyProcesses"]

logger = logging.getLogger("envbus.runner.policy_workers")

#: Longest wait of the thread, in seconds.
_LONGEST_WAIT: Final = 60.0


class _Member:
    """One worker, over its lives."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"policy-worker-{index}"
        self.incarnation = 0
        self.child: Child | None = None
        self.state = "starting"
        self.reason = ""
        #: Why its present life did not come up, as it said itself.
        self.problem = ""
        #: Number of the next parcel from it.
        self.next_parcel = 1
        #: Its pipe hung up: the end of its process will be told.
        self.hung_up = False
        self.pushes = Pushes()
        #: Of a life that is up, and may be found to hang.
        self.probing: Probing | None = None
        #: How its present life ended, where that is known before its process ends.
        self.exit = Exit.CRASH

    def describe(self) -> str:
        """Return its name and process, for messages to people."""
        pid = self.child.pid if self.child is not None else "none"
        return f"{self.name} (pid {pid}, incarnation {self.incarnation})"


class PolicyProcesses:
    """All workers of one owner. `start`, `push`, `close` and the rest may be called by any thread.

    Args:
        num_workers: How many.
        factories: By policy id, each pickled by cloudpickle.
        batching: How they gather requests.
        restart: Whether, and how often, those that ended are started again.
        context: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
        preload: Modules that the fork server imports beforehand.
        spinning: How many of them may spin in short waits.
        hang_timeout: Seconds without a sign of life after which one is killed, and started again
            as any other that ended; None: never.

    Attributes:
        directory: Where their doors and the board are; only this user may enter.
    """

    def __init__(
        self,
        num_workers: int,
        factories: Mapping[str, bytes],
        batching: BatchingConfig,
        restart: RestartPolicy | None,
        *,
        context: str | None,
        preload: Sequence[str],
        spinning: int,
        hang_timeout: float | None,
    ) -> None:
        self._factories = factories
        self._batching = batching
        self._method = choose_start_method(context)
        self._spinning = spinning
        self._hang_timeout = hang_timeout
        self._members = [_Member(index) for index in range(num_workers)]
        #: Of each policy, the latest push, and the same pickled: arrays may be written to later.
        self._latest: dict[str, tuple[Pushed, bytes]] = {}
        #: None: who ends is not started again.
        self._supervision = None if restart is None else Supervision(random.random)
        if self._supervision is not None and restart is not None:
            for member in self._members:
                self._supervision.add(member.name, restart)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._owner = os.getpid()
        self._bell, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(
            target=self._watch, name="envbus-policy-workers", daemon=True
        )
        self.directory = make_folder()
        try:
            # The fork server of env actors, which has imported nearly all that is needed.
            self._nursery = Nursery((env_host.__name__, *preload), directory=self.directory)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._bell.close()
            self._waker.close()
            raise
        disown_in_forks(self)

    # --- any thread --------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start all workers and wait until they are up.

        Raises:
            StartError: One ended, or was not up within `timeout` seconds; says why.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            for member in self._members:
                self._launch(member)
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

    def push(self, policy_id: str, weights: Any, version: int | None) -> Pushed:
        """Send weights to all workers, and to each that is started later; returns at once.

        Who has many pushes to look at gets the latest once it has looked at some.
        """
        with self._lock:
            self._check_open()
            former, _ = self._latest.get(policy_id, (Pushed(policy_id, 0, 0, None), b""))
            if version is None:
                version = former.version + 1
            pushed = Pushed(policy_id, former.push + 1, version, weights)
            data = pickle.dumps(tuple(pushed), pickle.HIGHEST_PROTOCOL)
            pushed = pushed._replace(weights=None)
            self._latest[policy_id] = pushed, data
            for member in self._members:
                if member.child is not None and member.pushes.offer(policy_id):
                    self._send(member, data)
            return pushed

    def latest(self, policy_id: str) -> tuple[int, int]:
        """Return number and version of a policy's latest push; 0 and 0 before the first."""
        with self._lock:
            pushed = self._latest.get(policy_id)
            return (0, 0) if pushed is None else (pushed[0].push, pushed[0].version)

    def restarts(self) -> int:
        """Return how many processes were started again."""
        with self._lock:
            return 0 if self._supervision is None else self._supervision.statistics().restarts

    def ready(self) -> int:
        """Return how many workers are up."""
        with self._lock:
            return len(self.up())

    def up(self) -> list[str]:
        """Return the names of the workers that are up."""
        with self._lock:
            return [member.name for member in self._members if member.state == "up"]

    def pids(self) -> list[int]:
        """Return the process ids of those that run."""
        with self._lock:
            return [member.child.pid for member in self._members if member.child is not None]

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
                    self._send(member, b"")  # which they take for the end
            for child in self._nursery.close(timeout):
                if timeout:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, timeout)
        finally:
            for member in self._members:
                member.child, member.state = None, "lost"
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
                if self._closed:
                    return
                try:
                    self._look(time.monotonic())
                except Exception:  # or nobody would be replaced any more
                    logger.exception("looking after policy workers failed")
                    time.sleep(0.1)

    def _patience(self) -> float:
        times = [each.probing.wake_at() for each in self._members if each.probing is not None]
        restart_at = None if self._supervision is None else self._supervision.wake_at()
        if restart_at is not None:
            times.append(restart_at)
        if not times:
            return _LONGEST_WAIT
        return min(max(min(times) - time.monotonic(), 0.0), _LONGEST_WAIT)

    def _look(self, now: float) -> None:
        changed = False
        for member in self._members:
            changed |= self._take_reports(member, now)
            self._probe(member, now)
        for child, status in self._nursery.exits():
            for member in self._members:
                if member.child is child:
                    self._on_exit(member, status, now)
                    changed = True
        if self._supervision is not None and self._supervision.wake_at() is not None:
            effects = self._supervision.handle(SupervisionTick(), now)
            changed |= bool(effects)
            self._perform(effects)
        if changed:
            self._tell()

    # --- with the lock -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("these policy workers were closed, or belong to another process")

    def _launch(self, member: _Member) -> None:
        """Start a worker's process; that it is up it tells by its pipe.

        Raises:
            StartError: There is no process or no memory for it.
        """
        member.state, member.problem, member.next_parcel = "starting", "", 1
        member.hung_up, member.probing, member.exit = False, None, Exit.CRASH
        member.pushes = Pushes()
        member.child = self._nursery.start(member.name, ENTRY, method=self._method)
        bootstrap = PolicyBootstrap(
            name=member.name,
            worker_index=member.index,
            incarnation=member.incarnation,
            door=str(door_of(self.directory, member.name, member.incarnation)),
            spin=member.index < self._spinning,
            batching=self._batching,
            factories=self._factories,
            weights=[data for _, data in self._latest.values()],
        )
        number = member.child.pipe.next_number()
        assert number == BOOTSTRAP_PARCEL
        data = pickle.dumps(tuple(bootstrap), pickle.HIGHEST_PROTOCOL)
        member.child.pipe.send_bytes(number, data)

    def _send(self, member: _Member, data: bytes) -> None:
        assert member.child is not None
        pipe = member.child.pipe
        try:
            pipe.send_bytes(pipe.next_number(), data)
        except EnvbusError as exc:  # its end is told soon
            logger.debug("%s got no weights: %s", member.describe(), exc)

    def _take_reports(self, member: _Member, now: float) -> bool:
        """Take what a worker says of itself; return whether it has come up."""
        came_up = False
        while member.child is not None:
            try:
                data = member.child.pipe.receive_bytes(member.next_parcel, 0.0)
            except ClosedError:
                member.hung_up = True
                break
            except EnvbusError:  # nothing more now
                break
            member.next_parcel += 1
            report = read_report(data)
            if member.probing is not None:
                member.probing.alive(now)
            if report.up:
                came_up = True
                member.state = "up"
                if self._hang_timeout is not None:
                    member.probing = Probing(self._hang_timeout, now)
                if self._supervision is not None:
                    self._supervision.handle(ChildReady(member.name, member.incarnation), now)
                if member.incarnation:
                    logger.info("%s runs again", member.describe())
            elif report.policy_id:
                self._on_pushed(member, report)
            elif report.problem:
                member.problem = report.problem
        return came_up

    def _probe(self, member: _Member, now: float) -> None:
        """Ask a worker for a sign of life at times; kill one that gives none."""
        if member.probing is None or member.child is None:
            return
        verdict = member.probing.look(now)
        if verdict is Verdict.ASK:
            self._send(member, PROBE)
        elif verdict is Verdict.HUNG:
            member.probing, member.exit = None, Exit.HANG
            member.problem = (
                f"killed, as it gave no sign of life for {self._hang_timeout:g} s (hang_timeout), "
                "in one call of a policy, or stopped"
            )
            (stack,) = self._nursery.stacks([member.child])
            logger.warning("%s hangs and is killed:\n%s", member.describe(), stack)
            self._nursery.kill(member.child)

    def _on_pushed(self, member: _Member, report: WorkerReport) -> None:
        if report.problem:
            logger.error(
                "%s did not take over push %d of the weights of %r: %s",
                member.describe(),
                report.push,
                report.policy_id,
                report.problem,
            )
        for policy_id in member.pushes.taken():
            self._send(member, self._latest[policy_id][1])

    def _on_exit(self, member: _Member, status: ExitStatus, now: float) -> None:
        self._take_reports(member, now)
        how = member.problem or status.report()
        member.reason = f"{member.describe()} ended: {how}"
        logger.warning("%s", member.reason)
        assert member.child is not None
        member.child.pipe.close()
        member.child = member.probing = None
        with contextlib.suppress(OSError):
            door_of(self.directory, member.name, member.incarnation).unlink()
        member.state = "lost"
        if self._supervision is not None:
            member.state = "down"
            exited = ChildExited(member.name, member.incarnation, member.exit, how)
            self._perform(self._supervision.handle(exited, now))

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            member = next(each for each in self._members if each.name == effect.name)
            if isinstance(effect, StartChild):
                member.incarnation = effect.incarnation
                self._start_again(member)
            else:
                member.state = "lost"
                member.reason = (
                    f"{member.name} failed again after {effect.restarts} restarts: {effect.cause}"
                )
                logger.error("%s; giving up on it", member.reason)

    def _start_again(self, member: _Member) -> None:
        try:
            self._launch(member)
        except EnvbusError as exc:  # no process, no memory: another failure of this worker
            if member.child is not None:
                self._nursery.kill(member.child)  # its exit follows
                return
            member.state, member.reason = "down", f"{member.name} was not started again: {exc}"
            assert self._supervision is not None
            exited = ChildExited(member.name, member.incarnation, Exit.CRASH, str(exc))
            self._perform(self._supervision.handle(exited, time.monotonic()))

    def _tell(self) -> None:
        """Write on the board, and wake who waits for news."""
        entries = [
            BoardEntry(
                name=member.name,
                incarnation=member.incarnation,
                state=member.state,
                reason=member.reason,
            )
            for member in self._members
        ]
        with contextlib.suppress(OSError):  # the folder goes as this ends
            write_board(self.directory, Board(workers=entries))
        self._changed.notify_all()
