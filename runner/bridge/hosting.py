"""Simulators that a bridge runs itself, in threads and in processes, and the endpoint for them.

Leaves out the process itself (`actors/external/hosting.py`) and whether one that ended is started
again (`bus/supervision/supervision.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import SimulatorError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.external.hosting import ENTRY, run_env
from envbus.bus.complaints import Complaints
from envbus.bus.errors import ClosedError, ConfigError, EnvbusError, StartError, TransportError
from envbus.bus.folders import keep_endpoint, name_folder
from envbus.bus.interrupts import interruptible, uninterrupted_call
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.pickling import pickled
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.settings import check_number
from envbus.bus.supervision.restart import ChildState, Exit, Restart, RestartPolicy
from envbus.bus.supervision.supervision import (
    ChildGivenUp,
    StartChild,
    Supervision,
    SupervisionEffect,
)
from envbus.bus.transport.curve_keys import Entrance
from envbus.bus.transport.unix_sockets import Bell
from envbus.runner.errors import FaultCause

__all__ = ["HostedThread", "Hosts", "PrivateEndpoint", "Where"]

logger = logging.getLogger("envbus.runner.bridge")

#: Where a simulator runs.
Where = Literal["thread", "process"]

_PRELOAD = (ENTRY.partition(":")[0],)
#: Seconds that threads get together to end when the bridge is stopped.
_END_TIMEOUT = 2.0
#: Seconds between two looks at whether the bridge knows those in processes, and at its endpoint.
_LOOK = 1.0
#: Seconds for which the bridge may not know one that it knew: it may join anew, or be ending.
_GONE_TIMEOUT = 2.0
#: Of a simulator that is not to be started again.
_ONCE = RestartPolicy(restart=Restart.TEMPORARY)


class PrivateEndpoint:
    """The second endpoint of a bridge, for processes of the same user and host, without keys.

    It is a socket in a folder that only this user can enter; it is made when somebody needs it, and
    goes however its owner ends. A socket that was removed is made again: each client of a gateway
    comes in there, and each simulator that is started again.

    Args:
        bind: Binds an endpoint at the bridge's broker.
    """

    def __init__(self, bind: Callable[[str], object]) -> None:
        self._bind = bind
        self._endpoint = ""
        self._keeper: ProcessGroup | None = None
        self._look_at = math.inf
        self._complaints = Complaints(logger)

    def open(self, preload: Sequence[str] = ()) -> str:
        """Return where it is; the first call makes it.

        Args:
            preload: What the fork server imports that removes the folder should this process be
                killed: that of the children who come through this endpoint, so that one serves
                both.

        Raises:
            TransportError: It cannot be bound.
            StartError: There is no fork server.
        """
        if not self._endpoint:
            folder = name_folder()
            endpoint = f"ipc://{folder}/bridge"
            try:
                self._keeper = ProcessGroup(preload, folder)
                self._bind(endpoint)
            except BaseException:
                self.close()
                raise
            self._endpoint = endpoint
            self._look_at = 0.0
        return self._endpoint

    def wake_at(self) -> float:
        """Return by when `look_after` is due, in seconds of `time.monotonic`; may be inf."""
        return self._look_at

    def look_after(self, now: float) -> None:
        """See at times that it is there, and that it goes with this process.

        What cleans TMPDIR up may have removed it, and the fork server may have been killed.
        """
        if now < self._look_at or self._keeper is None:
            return
        self._look_at = now + _LOOK
        try:
            self._keeper.keep_server()
            keep_endpoint(self._endpoint, self._bind)
        except (StartError, TransportError) as exc:  # who is connected is served on
            self._complaints.add("endpoint", f"nobody new comes in beside a bridge's port: {exc}")

    def close(self) -> None:
        """Remove it; the broker is closed before. Idempotent."""
        if self._keeper is not None:
            self._keeper.close()


class HostedThread(threading.Thread):
    """A thread of this process that runs one `ExternalEnv`, to its end or until `end`.

    Args:
        env: The simulator.
        entrance: Where the bridge is.
        name: For people.
        on_end: A method, called in this thread when it has ended without having been asked to. Its
            object is not kept alive by the thread.

    Attributes:
        identity: Under which its client is known to the bridge; b"": it has not connected.
        outcome: How it has ended; what it has raised is the cause.
    """

    def __init__(
        self,
        env: ExternalEnv,
        entrance: Entrance,
        name: str,
        on_end: Callable[[HostedThread], object],
    ) -> None:
        super().__init__(name=f"envbus-{name}", daemon=True)
        self.identity = b""
        self.outcome: SimulatorError | None = None
        self._env = env
        self._entrance = entrance
        self._label = name
        self._on_end = weakref.WeakMethod(on_end)
        self._unwanted = threading.Event()
        self._client: ExternalEnvClient | None = None
        env.run_in(self)

    def run(self) -> None:
        """Run the simulator, and say how it ended, unless that was asked for."""
        what = f"simulator {self._label} (thread of process {os.getpid()})"
        try:
            run_env(
                self._env,
                self._entrance,
                self._label,
                is_wanted=lambda: not self._unwanted.is_set(),
                on_connected=self._take,
            )
            self.outcome = SimulatorError(f"{what}: run() returned")
        except BaseException as error:  # SystemExit, too, ends the simulator only
            self.outcome = SimulatorError(f"{what} raised:\n{traceback.format_exc()}")
            self.outcome.__cause__ = error
        if not self._unwanted.is_set() and (on_end := self._on_end()) is not None:
            on_end(self)

    def end(self) -> None:
        """Close its client, so that it ends with its next verb."""
        self._unwanted.set()
        client = self._client
        if client is not None:
            client.close()

    def _take(self, client: ExternalEnvClient) -> None:
        self._client = client
        self.identity = client.identity
        if self._unwanted.is_set():
            raise ClosedError("the bridge was stopped")


class _Simulator:
    """One that is hosted, over its lives."""

    def __init__(
        self, key: str, name: str, where: Where, env: ExternalEnv | Callable[[], ExternalEnv]
    ) -> None:
        #: Of the supervision: unlike names no two are equal.
        self.key = key
        self.name = name
        self.where = where
        self.env = env
        #: Of one in a process: what that is sent.
        self.pickled = b""
        self.start_timeout = 0.0
        self.thread: HostedThread | None = None
        self.child: Child | None = None
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A life in a process begins."""
        #: Under which its client is known to the bridge; b"": it has not joined.
        self.identity = b""
        #: Seconds for which the bridge still may not know it. Those in which the bridge's owner did
        #: not look do not count: it could not join.
        self.patience = self.start_timeout
        self.looked = now
        #: Why it is killed, for people; "": it is not.
        self.kill_reason = ""


class Hosts:
    """The simulators of one bridge.

    Args:
        entrance: Given what a fork server imports for them, returns where they come in.
        watch: Lets the bridge's wait return when a descriptor is readable.
        on_gone: Told of each client that has ended with its simulator: under which id it was
            connected, why, and that in words.
        is_known: Whether a client is there, or its lease is not over.
        lease: Seconds of that lease.

    Attributes:
        restarts: How often simulators were started again.
        last_end: Where none is left: how the last one has ended; None: there is one, or was none.
    """

    def __init__(
        self,
        entrance: Callable[[Sequence[str]], Entrance],
        watch: Callable[[int], object],
        on_gone: Callable[[bytes, FaultCause, str], object],
        is_known: Callable[[bytes], bool],
        lease: float,
    ) -> None:
        self.restarts = 0
        self.last_end: SimulatorError | None = None
        self._is_known = is_known
        self._lease = lease
        #: When those in processes are looked at.
        self._look_at = 0.0
        self._entrance = entrance
        self._watch = watch
        self._on_gone = on_gone
        self._supervision = Supervision(random.random)
        self._process_group: ProcessGroup | None = None
        self._simulators: dict[str, _Simulator] = {}
        #: What is to be raised.
        self._ends: deque[SimulatorError] = deque()
        #: What has broken off a start, likewise.
        self._broken_off: BaseException | None = None
        #: What ended in threads: appended there, taken by the owner.
        self._ended: deque[HostedThread] = deque()
        self._bell = Bell()
        self._ringing = threading.Lock()
        self._count = 0
        #: To be ended also where nobody calls `close`.
        self._threads: weakref.WeakSet[HostedThread] = weakref.WeakSet()
        weakref.finalize(self, _abandon, self._threads, self._bell).atexit = False

    @uninterrupted_call
    def start(
        self,
        env: ExternalEnv | Callable[[], ExternalEnv],
        where: Where,
        name: str | None,
        restart: RestartPolicy | None,
        start_timeout: float,
    ) -> str:
        """Run a simulator and return its name; see `ExternalEnvBridge.host`."""
        check_number("start_timeout", start_timeout, over=0.0)
        self._count += 1
        name = name or f"simulator-{self._count}"
        simulator = _Simulator(f"{self._count}", name, where, env)
        simulator.start_timeout = start_timeout
        if where == "thread":
            if restart is not None and isinstance(env, ExternalEnv):
                raise ConfigError(
                    f"{name} is to be started again: give a function that makes it anew"
                )
            self._start_thread(simulator)
        elif where == "process":
            make = (lambda: env) if isinstance(env, ExternalEnv) else env
            entrance = self._entrance(_PRELOAD)
            try:
                simulator.pickled = pickled((entrance, name, make))
            except Exception as error:  # whatever an object says when it cannot be pickled
                raise ConfigError(
                    f"{name} cannot be sent to a process: {error}; give a function that makes it"
                ) from error
            self._start_process(simulator)
        else:
            raise ConfigError(f"a simulator runs in a 'thread' or a 'process', not in {where!r}")
        self._simulators[simulator.key] = simulator
        self.last_end = None
        self._supervision.add(simulator.key, restart or _ONCE)
        if where == "thread":
            self._is_ready(simulator, time.monotonic())
        return name

    def wake_at(self) -> float | None:
        """Return by when `look_after` is due, in seconds of `time.monotonic`."""
        exits_at = None if self._process_group is None else self._process_group.wake_at()
        look_at = None if self._process_group is None else self._look_at
        times = [at for at in (self._supervision.wake_at(), exits_at, look_at) if at is not None]
        return min(times, default=None)

    def look_after(self, now: float) -> None:
        """Take in who has ended, and start again who is to be.

        Raises:
            SimulatorError: What has become of one that is not started again: of one at a time, each
                until it `was_raised`.
            BaseException: What has broken off a start, which counts as one that failed: Ctrl-C.
        """
        if not self._count:
            return
        self._take_threads(now)
        self._take_processes(now)
        if self._process_group is not None and now >= self._look_at:
            self._look_at = now + _LOOK
            for simulator in self._simulators.values():
                self._judge(simulator, self._process_group, now)
        if self._supervision.wake_at() is not None:
            self._perform(self._supervision.due(now), now)
        if self._broken_off is not None:  # by now all others have been looked after
            error, self._broken_off = self._broken_off, None
            raise error
        if self._ends:
            raise self._ends[0]

    def was_raised(self, error: BaseException) -> None:
        """The owner gets this; if it is what `look_after` raised, and not Ctrl-C, it was told."""
        if self._ends and self._ends[0] is error:
            self._ends.popleft()

    def close(self) -> None:
        """End all simulators: those in threads by closing their clients, processes by a kill."""
        threads = [one.thread for one in self._simulators.values() if one.thread is not None]
        for thread in threads:
            thread.end()
        try:
            if self._process_group is not None:
                self._process_group.close(0.0)
                self._process_group = None
            end = time.monotonic() + _END_TIMEOUT
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0.0))
        finally:
            self._bell.close()

    # --- starts -------------------------------------------------------------------------------

    def _start_thread(self, simulator: _Simulator) -> None:
        env = simulator.env
        if isinstance(env, ExternalEnv):
            made = env
        else:
            with interruptible():
                made = env()
        if not isinstance(made, ExternalEnv):
            raise ConfigError(f"expected an ExternalEnv, got {made!r}")
        self._watch(self._bell.fileno())
        simulator.thread = HostedThread(
            made, self._entrance(()), simulator.name, self._on_thread_end
        )
        self._threads.add(simulator.thread)
        simulator.thread.start()

    def _on_thread_end(self, thread: HostedThread) -> None:
        """Called in the thread of the simulator."""
        with self._ringing:
            self._ended.append(thread)
            self._bell.ring()

    def _start_process(self, simulator: _Simulator) -> None:
        if self._process_group is None:
            self._process_group = ProcessGroup(_PRELOAD)
            self._watch(self._process_group.fileno())
        child = self._process_group.start(simulator.name, ENTRY)
        try:
            with contextlib.suppress(ClosedError):  # it is dead already, which will be heard
                child.pipe.send(simulator.pickled)
        except BaseException:  # it would wait for that
            self._process_group.kill(child)
            raise
        simulator.child = child
        simulator.begin(time.monotonic())

    def _start_again(self, simulator: _Simulator, now: float) -> None:
        self.restarts += 1
        simulator.child = simulator.thread = None
        try:
            if simulator.where == "thread":
                self._start_thread(simulator)
            else:
                self._start_process(simulator)
        except BaseException as error:  # no process, no memory, Ctrl-C, or what its maker raises
            why = str(error) or type(error).__name__
            end = SimulatorError(f"simulator {simulator.name} was not started again: {why}")
            end.__cause__ = error
            self._supervise(simulator, Exit.CRASH, end, now, began=False)
            if not isinstance(error, Exception):
                self._broken_off = error
        else:
            if simulator.where == "thread":
                self._is_ready(simulator, now)
            logger.info("simulator %s runs again", simulator.name)

    def _is_ready(self, simulator: _Simulator, now: float) -> None:
        life = self._supervision.incarnation(simulator.key)
        self._supervision.on_ready(simulator.key, life, now)

    # --- those that hang ----------------------------------------------------------------------

    def _judge(self, simulator: _Simulator, process_group: ProcessGroup, now: float) -> None:
        """Kill a process that does not join in time, or gives no sign of life for its lease."""
        child = simulator.child
        if child is None or simulator.kill_reason:
            return
        away, simulator.looked = min(now - simulator.looked, _LOOK), now
        self._find_client(simulator, child, now)
        if simulator.identity and self._is_known(simulator.identity):
            simulator.patience = _GONE_TIMEOUT
            return
        simulator.patience -= away
        if simulator.patience > 0.0:
            return
        why = (
            f"it gave no sign of life for {self._lease:g} s (EpisodeLimits.lease)"
            if simulator.identity
            else f"it did not join within {simulator.start_timeout:g} s (start_timeout)"
        )
        (stacks,) = process_group.stacks([child])
        simulator.kill_reason = f"was killed, as {why}\n{stacks}"
        process_group.kill(child)

    def _find_client(self, simulator: _Simulator, child: Child, now: float) -> None:
        """Learn under which identity a process has joined, if it has."""
        if not simulator.identity:
            with contextlib.suppress(EnvbusError):  # it has not
                simulator.identity = child.pipe.receive(0.0)
                self._is_ready(simulator, now)

    # --- ends ---------------------------------------------------------------------------------

    def _take_threads(self, now: float) -> None:
        with self._ringing:
            self._bell.silence()
        while self._ended:
            thread = self._ended[0]
            assert thread.outcome is not None
            returned = thread.outcome.__cause__ is None
            cause = FaultCause.LOST if returned else FaultCause.ERROR
            self._on_gone(thread.identity, cause, str(thread.outcome))
            for simulator in self._simulators.values():
                if simulator.thread is thread:
                    why = Exit.NORMAL if returned else Exit.CRASH
                    self._supervise(simulator, why, thread.outcome, now)
                    break
            self._ended.popleft()  # it comes again until here

    def _take_processes(self, now: float) -> None:
        if self._process_group is None:
            return
        for child, status in self._process_group.exits():
            for simulator in self._simulators.values():
                if simulator.child is child:
                    self._on_exit(simulator, child, status, now)
                    break

    def _on_exit(self, simulator: _Simulator, child: Child, status: ExitStatus, now: float) -> None:
        returned = status.code == 0
        if returned:
            how, why, cause = "run() returned", Exit.NORMAL, FaultCause.LOST
        elif simulator.kill_reason:
            how, why, cause = simulator.kill_reason, Exit.HANG, FaultCause.TIMEOUT
        else:
            how, why, cause = f"ended with {status.report()}", Exit.CRASH, FaultCause.CRASH
        end = SimulatorError(f"simulator {simulator.name} (process {child.pid}): {how}")
        self._find_client(simulator, child, now)
        if simulator.identity:
            self._on_gone(simulator.identity, cause, str(end))
        child.pipe.close()
        self._supervise(simulator, why, end, now)

    def _supervise(
        self,
        simulator: _Simulator,
        why: Exit,
        end: SimulatorError,
        now: float,
        *,
        began: bool = True,
    ) -> None:
        """One has ended: start it again, now or later, or have `look_after` tell of it."""
        supervision, key = self._supervision, simulator.key
        life = supervision.incarnation(key)
        idle = self._lease if why is Exit.HANG else 0.0
        effects = supervision.on_exit(key, life, why, now, str(end), idle, began=began)
        simulator.child = None  # its end comes again until here
        if supervision.state(key) is ChildState.STOPPED:
            self._forget(simulator, end)
        else:
            logger.warning("%s", end)
            self._perform(effects, now)

    def _perform(self, effects: Sequence[SupervisionEffect], now: float) -> None:
        for effect in effects:
            simulator = self._simulators[effect.name]
            match effect:
                case StartChild():
                    self._start_again(simulator, now)
                case ChildGivenUp(_, how_often, cause):
                    what = f"simulator {simulator.name} {how_often}: {cause}"
                    self._forget(simulator, SimulatorError(what))

    def _forget(self, simulator: _Simulator, end: SimulatorError) -> None:
        self._ends.append(end)
        self._supervision.remove(simulator.key)
        del self._simulators[simulator.key]
        self.last_end = None if self._simulators else end


def _abandon(threads: Iterable[HostedThread], bell: Bell) -> None:
    for thread in list(threads):
        thread.end()
    bell.close()
