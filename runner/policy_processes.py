"""The processes of policy workers: started, watched, started again, given weights, ended.

A thread watches them, so that a worker is replaced also while its owner trains, or waits in
another part of the program. Whether one is started again is decided by `bus/supervision.py`. Leaves
out a single worker's life (`policy_member.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envbus.actors import host as env_host
from envbus.bus.errors import ClosedError, EnvbusError, StartError
from envbus.bus.folders import make_folder, name_folder
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.nursery import Nursery
from envbus.bus.process import ExitStatus
from envbus.bus.restart import Exit, RestartPolicy
from envbus.bus.settings import check_number
from envbus.bus.supervision import (
    ChildExited,
    ChildReady,
    StartChild,
    Supervision,
    SupervisionEffect,
    SupervisionTick,
)
from envbus.bus.threads import ThreadsPerProcess
from envbus.runner.config import choose_start_method
from envbus.runner.policy_batching import BatchingConfig
from envbus.runner.policy_board import Board, board_exists, write_board
from envbus.runner.policy_host import WorkerReport
from envbus.runner.policy_member import Member, Outfit
from envbus.runner.policy_weights import Pushed

__all__ = ["PolicyProcesses"]

logger = logging.getLogger("envbus.runner.policy_workers")

#: Longest wait of the thread, in seconds.
_LONGEST_WAIT: Final = 60.0
#: Seconds until it looks again after that has failed.
_FAILED_PAUSE: Final = 0.1


class PolicyProcesses:
    """All workers of one owner. `start`, `push`, `close` and the rest may be called by any thread.

    Args:
        num_workers: How many.
        factories: By policy id, each pickled by cloudpickle.
        batching: How they gather requests.
        restart: Whether, and how often, those that ended are started again.
        context: None, "fork", "forkserver" or "spawn", as in `multiprocessing`.
        preload: Modules that the fork server imports beforehand.
        threads_per_process: As in `PolicyWorkers`.
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
        threads_per_process: ThreadsPerProcess,
        spinning: int,
        hang_timeout: float | None,
    ) -> None:
        method = choose_start_method(context)
        #: Of each policy, the latest push, and the same pickled: arrays may be written to later.
        self._latest: dict[str, tuple[Pushed, bytes]] = {}
        self._hang_timeout = hang_timeout
        #: None: who ends is not started again.
        self._supervision = None if restart is None else Supervision(random.random)
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
        outfit = Outfit(
            self._nursery, method, self.directory, batching, factories, spinning, hang_timeout
        )
        self._members = [Member(index, outfit) for index in range(num_workers)]
        if self._supervision is not None and restart is not None:
            for member in self._members:
                self._supervision.add(member.name, restart)
        disown_in_forks(self)

    # --- any thread --------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start all workers and wait until they are up.

        Raises:
            StartError: One ended, or was not up within `timeout` seconds; or there may not
                be as many descriptors. Says why.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._nursery.check_room(len(self._members))
            for member in self._members:
                member.launch(self._weights())
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
        restart_at = None if self._supervision is None else self._supervision.wake_at()
        if restart_at is not None:
            times.append(restart_at)
        if not times:
            return _LONGEST_WAIT
        return min(max(min(times) - time.monotonic(), 0.0), _LONGEST_WAIT)

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

    def _weights(self) -> list[bytes]:
        """Return the latest weights of each policy that was given any, pickled."""
        return [data for _, data in self._latest.values()]

    def _take_reports(self, member: Member, now: float) -> bool:
        """Take what a worker says of itself; return whether it has come up."""
        came_up = False
        for report in member.take_reports(now):
            if report.up:
                came_up = True
                if self._supervision is not None:
                    self._supervision.handle(ChildReady(member.name, member.incarnation), now)
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
        if self._supervision is not None:
            member.state = "down"
            idle = (self._hang_timeout or 0.0) if member.exit is Exit.HANG else 0.0
            exited = ChildExited(member.name, member.incarnation, member.exit, how, idle)
            self._perform(self._supervision.handle(exited, now))

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
            member.launch(self._weights())
        except (EnvbusError, OSError) as exc:  # no process, no memory, no descriptor: it has failed
            if member.child is not None:
                self._nursery.kill(member.child)  # its exit follows
                return
            member.state, member.reason = "down", f"{member.name} was not started again: {exc}"
            logger.warning("%s", member.reason)
            assert self._supervision is not None
            exited = ChildExited(member.name, member.incarnation, Exit.CRASH, str(exc))
            self._perform(self._supervision.handle(exited, time.monotonic()))

    def _tell(self) -> None:
        """Write on the board, and wake who waits for news."""
        with contextlib.suppress(OSError):  # the folder goes as this ends
            if make_folder(self.directory):
                write_board(self.directory, Board(workers=[each.entry() for each in self._members]))
        self._changed.notify_all()
