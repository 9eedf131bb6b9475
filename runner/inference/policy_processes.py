"""The processes of policy workers: started, watched, started again, given weights, ended.

A thread watches them, so that a worker is replaced also while its owner trains, or waits in another
part of the program. Whether one hangs, and is started again, is decided in `bus/supervision/`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from envbus.actors.process import host as env_host
from envbus.bus.complaints import Complaints
from envbus.bus.errors import ClosedError, EnvbusError, StartError, TransportError
from envbus.bus.folders import make_folder, name_folder
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import join_ending, uninterrupted_call
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.process.threads import ThreadsPerProcess
from envbus.bus.supervision.liveness_probe import PROBE, LivenessProbe, Verdict
from envbus.bus.supervision.restart import Exit, RestartPolicy
from envbus.bus.supervision.supervision import StartChild, Supervision, SupervisionEffect
from envbus.bus.transport.unix_sockets import Bell
from envbus.runner.inference.policy_batching import BatchingConfig
from envbus.runner.inference.policy_worker import (
    ENTRY,
    PolicyBootstrap,
    PushedWeights,
    WorkerReport,
    read_report,
)
from envbus.runner.inference.worker_discovery import (
    OwnerSign,
    StatusFile,
    WorkerStatus,
    handover_path,
    status_exists,
    write_status,
)
from envbus.runner.monitoring.figures import (
    MOST_FAULTS,
    FaultFigures,
    ProcessFigures,
    fault_figures,
)
from envbus.runner.policies.policy_map import check_version

__all__ = ["PolicyProcesses", "PolicyWorkerHandle", "Pushes", "WorkerSpec"]

#: Pushes under way to one worker. Few, as each may be large; more than one, as a worker must
#: know weights by the time that a request comes which was made after they were pushed.
MAX_UNDER_WAY: Final = 8

logger = logging.getLogger("envbus.runner.inference.policy_workers")

#: Seconds between looks at what stands in the folder.
_FOLDER_LOOK: Final = 1.0
#: Seconds between two lines of the log about one that cannot be made again.
_COMPLAINT_INTERVAL: Final = 60.0
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


class WorkerSpec(NamedTuple):
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


class PolicyWorkerHandle:
    """One worker. Whoever calls holds its owner's lock.

    Attributes:
        state: "starting", "up", "down" or "lost", as in the status file.
        reason: Why it is not up, for people.
        hung_up: Its pipe hung up: the end of its process will be told.
        exit: How its present life ended, where that is known before its process ends.
    """

    def __init__(
        self, index: int, spec: WorkerSpec, process_group: ProcessGroup, directory: Path
    ) -> None:
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
        self._spec = spec
        self._process_group = process_group
        self._directory = directory
        #: Why its present life did not come up, as it said itself.
        self._problem = ""
        #: Whether its present life has not answered yet since it was asked to look at its socket.
        self._was_asked_to_listen = False
        #: Of a life that may be found to hang, before it is up or after.
        self._liveness_probe: LivenessProbe | None = None

    def describe(self) -> str:
        """Return its name and process, for messages to people."""
        pid = self.child.pid if self.child is not None else "none"
        return f"{self.name} (pid {pid}, incarnation {self.incarnation})"

    def entry(self) -> WorkerStatus:
        """Return what the status file says of it."""
        return WorkerStatus(
            name=self.name, incarnation=self.incarnation, state=self.state, reason=self.reason
        )

    def wake_at(self) -> float | None:
        """Return when `probe` has something to do; None: never."""
        return None if self._liveness_probe is None else self._liveness_probe.wake_at()

    def launch(self, weights: list[bytes], now: float) -> None:
        """Start a process; that it is up it tells by its pipe.

        `weights` are the latest `PushedWeights` of policies that were given any, each pickled.

        Raises:
            StartError: There is no process or no memory for it.
        """
        spec = self._spec
        self.state, self._problem = "starting", ""
        self.hung_up, self._liveness_probe, self.exit = False, None, Exit.CRASH
        self._was_asked_to_listen = False
        self.pushes = Pushes()
        self.child = self._process_group.start(
            self.name, ENTRY, method=spec.method, timeout=spec.start_timeout
        )
        self._liveness_probe = LivenessProbe(spec.start_timeout, now)
        bootstrap = PolicyBootstrap(
            name=self.name,
            worker_index=self._index,
            incarnation=self.incarnation,
            handover_socket=str(handover_path(self._directory, self.name, self.incarnation)),
            spin=self._index < spec.spinning,
            batching=spec.batching,
            factories=spec.factories,
            weights=weights,
        )
        self.child.pipe.send(pickle.dumps(tuple(bootstrap), pickle.HIGHEST_PROTOCOL))

    def send(self, data: bytes) -> None:
        """Send a pickled `PushedWeights`, a probe, or the end."""
        assert self.child is not None
        try:
            self.child.pipe.send(data)
        except ClosedError as exc:  # its end is told soon
            logger.debug("%s got no weights: %s", self.describe(), exc)
        except EnvbusError as exc:  # it would wait for this one, and never take a later one
            self.kill(f"a passed descriptor was lost on its way to it: {exc}")

    def kill(self, why: str) -> None:
        """Kill its process, which cannot be used any more; its end is told."""
        assert self.child is not None
        self._problem = f"killed, as {why}"
        self._process_group.kill(self.child)

    def take_reports(self, now: float) -> list[WorkerReport]:
        """Take in what it says of itself, and return it."""
        reports: list[WorkerReport] = []
        while self.child is not None:
            try:
                data = self.child.pipe.receive(0.0)
            except ClosedError:
                self.hung_up = True
                break
            except EnvbusError:  # nothing more now
                break
            report = read_report(data)
            self._was_asked_to_listen = False
            if self._liveness_probe is not None:
                self._liveness_probe.alive(now)
            if report.up:
                self.state = "up"
                timeout = self._spec.hang_timeout
                self._liveness_probe = None if timeout is None else LivenessProbe(timeout, now)
            elif report.problem and not report.policy_id:
                self._problem = report.problem
            reports.append(report)
        return reports

    def keep_socket(self) -> None:
        """See that its handover socket is there: a life that is up makes it again when asked."""
        if self.state != "up" or self.child is None or self._was_asked_to_listen:
            return
        if not os.path.exists(handover_path(self._directory, self.name, self.incarnation)):
            self._was_asked_to_listen = True  # once, or its pipe might fill up
            self.send(PROBE)

    def probe(self, now: float) -> None:
        """Ask for a sign of life at times; kill it if it gives none."""
        if self._liveness_probe is None or self.child is None:
            return
        verdict = self._liveness_probe.look(now)
        if verdict is Verdict.ASK:
            self.send(PROBE)
        elif verdict is Verdict.HUNG:
            self._liveness_probe, self.exit = None, Exit.HANG
            spec = self._spec
            why = (
                f"it gave no sign of life for {spec.hang_timeout:g} s (hang_timeout), in one "
                "call of a policy, or stopped"
                if self.state == "up"
                else f"it was not up within {spec.start_timeout:g} s (start_timeout)"
            )
            (stack,) = self._process_group.stacks([self.child])
            logger.warning("%s hangs and is killed:\n%s", self.describe(), stack)
            self.kill(why)

    def on_exit(self, status: ExitStatus) -> str:
        """Its process has ended, and `take_reports` was called since: return how."""
        how = self._problem or status.report()
        self.reason = f"{self.describe()} ended: {how}"
        assert self.child is not None
        self.child.pipe.close()
        self.hung_up, self._liveness_probe = True, None
        with contextlib.suppress(OSError):
            handover_path(self._directory, self.name, self.incarnation).unlink()
        return how

    def drop(self, state: str = "lost") -> None:
        """There is no process any more, and its end, if it is to be told, was acted upon."""
        self.child, self.state = None, state


class PolicyProcesses:
    """All workers of one owner. `start`, `push`, `close` and the rest may be called by any thread.

    Attributes:
        directory: Where their handover sockets and the status file are; only this user may enter.
    """

    def __init__(
        self,
        num_workers: int,
        spec: WorkerSpec,
        restart: RestartPolicy | None,
        *,
        preload: Sequence[str],
        threads_per_process: ThreadsPerProcess,
    ) -> None:
        #: Of each policy, number and version of the latest push, and all of it pickled: arrays may
        #: be written to later.
        self._latest: dict[str, tuple[int, int, bytes]] = {}
        #: By number, those pushes of a policy that a next life may have: the latest, the last one
        #: that a worker has taken over, and those between them that no worker has refused.
        self._usable: dict[str, dict[int, bytes]] = {}
        self._spec = spec
        #: Of those that are started again: of all, or of nobody.
        self._supervision = Supervision(random.random)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._started = self._closed = False
        #: When the folder is looked at.
        self._look_at = 0.0
        #: Whether the status file there says how things are: not if it found no room, for example.
        self._told = False
        self._complaints = Complaints(logger, every=_COMPLAINT_INTERVAL)
        #: The latest ends, for a window.
        self.ends: deque[FaultFigures] = deque(maxlen=MOST_FAULTS)
        self._owner = os.getpid()
        self._bell = Bell()
        self._thread = threading.Thread(
            target=self._watch, name="envbus-policy-workers", daemon=True
        )
        self.directory = name_folder()
        # The fork server of env actors, which has imported nearly all that is needed.
        self._process_group = ProcessGroup(
            (env_host.__name__, *preload),
            directory=self.directory,
            threads_per_process=threads_per_process,
            processes=num_workers,
        )
        self._sign = OwnerSign(self.directory)
        self._sign.show()
        self._workers = [
            PolicyWorkerHandle(index, spec, self._process_group, self.directory)
            for index in range(num_workers)
        ]
        if restart is not None:
            for worker in self._workers:
                self._supervision.add(worker.name, restart)
        disown_in_forks(self)

    # --- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers and wait until they are up.

        Raises:
            StartError: One ended, or was not up within `start_timeout`; or there may not
                be as many descriptors. Says why.
        """
        timeout = self._spec.start_timeout
        deadline = time.monotonic() + timeout
        with self._lock:
            self._process_group.check_room(len(self._workers))
            for worker in self._workers:
                worker.launch(self._weights(), time.monotonic())
            self._tell()
            self._thread.start()
            while waiting := [each for each in self._workers if each.state != "up"]:
                for worker in waiting:
                    if worker.reason:
                        raise StartError(worker.reason)
                left = deadline - time.monotonic()
                if left <= 0:
                    children = [each.child for each in waiting if each.child is not None]
                    stacks = "\n".join(self._process_group.stacks(children))
                    raise StartError(
                        f"not up within {timeout:g} s: "
                        f"{', '.join(each.describe() for each in waiting)}; raise start_timeout if "
                        f"the policies need longer\n{stacks}"
                    )
                self._changed.wait(left)
            self._started = True

    @uninterrupted_call
    def push(self, policy_id: str, weights: Any, version: int | None) -> tuple[int, int]:
        """Send weights to all workers, and to each that is started later; returns at once.

        Who has many pushes to look at gets the latest once it has looked at some.

        Returns:
            Number and version of this push.
        """
        check_version("version", version, optional=True)
        with self._lock:
            self._check_open()
            number, former = self.latest(policy_id)
            pushed = PushedWeights(
                policy_id, number + 1, former + 1 if version is None else int(version), weights
            )
            data = pickle.dumps(tuple(pushed), pickle.HIGHEST_PROTOCOL)
            self._latest[policy_id] = pushed.push, pushed.version, data
            pushes = self._usable.setdefault(policy_id, {})
            pushes[pushed.push] = data
            if len(pushes) > MAX_UNDER_WAY:  # nobody looks: the first is the one taken over
                del pushes[list(pushes)[1]]
            for worker in self._workers:
                if worker.child is not None and worker.pushes.offer(policy_id):
                    worker.send(data)
            return pushed.push, pushed.version

    @uninterrupted_call
    def latest(self, policy_id: str) -> tuple[int, int]:
        """Return number and version of a policy's latest push; 0 and 0 before the first."""
        with self._lock:
            number, version, _ = self._latest.get(policy_id, (0, 0, b""))
            return number, version

    @uninterrupted_call
    def restarts(self) -> int:
        """Return how many processes were started again."""
        with self._lock:
            return self._supervision.all_restarts()

    @uninterrupted_call
    def up(self) -> list[str]:
        """Return the names of the workers that are up."""
        with self._lock:
            return [worker.name for worker in self._workers if worker.state == "up"]

    def figures(self) -> list[ProcessFigures]:
        """Return what a window shows of each."""
        with self._lock:
            return [
                ProcessFigures(
                    name=worker.name,
                    pid=None if worker.child is None else worker.child.pid,
                    state="ready" if worker.state == "up" else worker.state,
                    incarnation=worker.incarnation,
                )
                for worker in self._workers
            ]

    @property
    def is_supervised(self) -> bool:
        """Whether those that end are started again."""
        return self._workers[0].name in self._supervision

    @uninterrupted_call
    def pids(self) -> list[int]:
        """Return the process ids of those that run."""
        with self._lock:
            return [worker.child.pid for worker in self._workers if worker.child is not None]

    @uninterrupted_call
    def close(self, timeout: float) -> None:
        """Have all workers leave; kill those that do not within `timeout` seconds. Idempotent."""
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            self._sign.hide()
            self._changed.notify_all()
        self._bell.ring()
        # It is about to see that this is closed; not so where a garbage collection closes this with
        # the lock held, so that it waits for the lock.
        join_ending(self._thread)
        try:
            for worker in self._workers:
                if worker.child is not None and timeout:
                    worker.send(b"")  # which they take for the end
            for child in self._process_group.close(timeout):
                if timeout:
                    logger.warning("%s did not leave in %.3g s and was killed", child.name, timeout)
        finally:
            for worker in self._workers:
                worker.drop()
            self._bell.close()

    def disown(self) -> None:
        """In a forked copy: be closed."""
        # A thread that does not exist here may hold the old one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = True
        self._sign.hide()

    # --- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            poller = select.poll()
            poller.register(self._bell, select.POLLIN)
            with self._lock:
                if self._closed:
                    return
                poller.register(self._process_group, select.POLLIN)
                for worker in self._workers:
                    if worker.child is not None and not worker.hung_up:
                        poller.register(worker.child.pipe.fileno(), select.POLLIN)
                timeout = self._patience()
            poller.poll(timeout * 1e3)
            with self._lock:
                if self._process_group.is_ending or self._closed:
                    return
                try:
                    self._look(time.monotonic())
                except Exception:  # or nobody would be replaced any more
                    logger.exception("looking after policy workers failed")
                    # Without the lock: others push weights meanwhile, or close.
                    self._changed.wait(_FAILED_PAUSE)

    def _patience(self) -> float:
        times = [self._look_at]
        times += [at for each in self._workers if (at := each.wake_at()) is not None]
        restart_at, exits_at = self._supervision.wake_at(), self._process_group.wake_at()
        times += [at for at in (restart_at, exits_at) if at is not None]
        return max(min(times) - time.monotonic(), 0.0)

    def _look(self, now: float) -> None:
        changed = False
        if now >= self._look_at:
            self._look_at = now + _FOLDER_LOOK
            self._keep_folder()
        for worker in self._workers:
            changed |= self._take_reports(worker, now)
            worker.probe(now)
        for child, status in self._process_group.exits():
            for worker in self._workers:
                if worker.child is child:
                    self._on_exit(worker, status, now)
                    changed = True
        effects = self._supervision.due(now)
        changed |= bool(effects)
        self._perform(effects)
        if changed:
            self._tell()

    # --- with the lock -----------------------------------------------------------------------

    def _keep_folder(self) -> None:
        """Have made again what was removed, or nobody who comes later would find the workers."""
        if not self._told or not status_exists(self.directory):
            self._tell()
        for worker in self._workers:
            worker.keep_socket()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("these policy workers were closed, or belong to another process")

    def _weights(self) -> list[bytes]:
        """Return what a new life is given: of each policy the latest first."""
        return [data for pushes in self._usable.values() for data in reversed(pushes.values())]

    def _take_reports(self, worker: PolicyWorkerHandle, now: float) -> bool:
        """Take what a worker says of itself; return whether it has come up."""
        came_up = False
        for report in worker.take_reports(now):
            if report.up:
                came_up = True
                self._supervision.on_ready(worker.name, worker.incarnation, now)
                if worker.incarnation:
                    logger.info("%s runs again", worker.describe())
            elif report.policy_id:
                self._on_pushed(worker, report)
        return came_up

    def _on_pushed(self, worker: PolicyWorkerHandle, report: WorkerReport) -> None:
        if report.problem:
            logger.error(
                "%s did not take over push %d of the weights of %r: %s",
                worker.describe(),
                report.push,
                report.policy_id,
                report.problem,
            )
        pushes, latest = self._usable[report.policy_id], self._latest[report.policy_id][0]
        for number in list(pushes):
            is_former = number == report.push if report.problem else number < report.push
            if is_former and number != latest:
                del pushes[number]
        for policy_id in worker.pushes.taken():
            worker.send(self._latest[policy_id][2])

    def _on_exit(self, worker: PolicyWorkerHandle, status: ExitStatus, now: float) -> None:
        self._take_reports(worker, now)
        how = worker.on_exit(status)
        cause = "timeout" if worker.exit is Exit.HANG else "crash"
        self.ends.append(fault_figures(time.time(), cause, worker.name, worker.reason))
        if self._started:  # else `start` raises it
            extra = {"actor": worker.name, "cause": cause}
            logger.warning("%s", worker.reason, extra=extra)
        idle = (self._spec.hang_timeout or 0.0) if worker.exit is Exit.HANG else 0.0
        name, life = worker.name, worker.incarnation
        effects = self._supervision.on_exit(name, life, worker.exit, now, how, idle)
        worker.drop("down" if name in self._supervision else "lost")
        self._perform(effects)

    def _perform(self, effects: Sequence[SupervisionEffect]) -> None:
        for effect in effects:
            worker = next(each for each in self._workers if each.name == effect.name)
            if isinstance(effect, StartChild):
                worker.incarnation = effect.incarnation
                self._start_again(worker)
            else:
                worker.state = "lost"
                worker.reason = f"{worker.name} {effect.how_often}: {effect.cause}"
                logger.error("%s; giving up on it", worker.reason)

    def _start_again(self, worker: PolicyWorkerHandle) -> None:
        try:
            worker.launch(self._weights(), time.monotonic())
        except Exception as exc:  # no process, no memory, no descriptor: it has failed
            if worker.child is not None:
                worker.kill(f"it could not be told what to do: {exc}")
                return
            worker.state, worker.reason = "down", f"{worker.name} was not started again: {exc}"
            logger.warning("%s", worker.reason)
            name, life, now = worker.name, worker.incarnation, time.monotonic()
            self._perform(
                self._supervision.on_exit(name, life, Exit.CRASH, now, str(exc), began=False)
            )

    def _tell(self) -> None:
        """Write in the status file, and wake who waits for a change."""
        status = StatusFile(workers=[each.entry() for each in self._workers])
        self._told = False
        try:
            if not make_folder(self.directory):
                self._sign.hide()  # who comes later is told at once, and does not wait
                raise FileNotFoundError(f"{self.directory} was removed, and cannot be made again")
            write_status(self.directory, status)
            self._told = True
            if not self._closed:
                self._sign.show()
        except (OSError, TransportError) as exc:  # those who know the workers go on
            self._complaints.add("folder", f"nobody new can find the policy workers: {exc}")
        self._changed.notify_all()
