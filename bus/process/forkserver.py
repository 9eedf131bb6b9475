"""The fork server: a small process that starts children, reports their ends, and leaves none.

It has one thread, no ZeroMQ context, and the heavy imports done, so a child is a fork of it: there
in milliseconds, and safe, which a fork of the driver with its threads and sockets is not. It is the
parent of all children, so their deaths are its to see; and it outlives a killed driver for the
moment that it takes to kill all that the driver has started.

Runs in its own process; the driver's side is `server_process.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from envbus.bus.errors import EnvbusError
from envbus.bus.memory.usage import memory_limit, oom_kills
from envbus.bus.process.channel import (
    Attach,
    Attached,
    Channel,
    DumpStacks,
    Exited,
    Kill,
    Message,
    NotStarted,
    Ping,
    Pong,
    Start,
    Started,
)
from envbus.bus.process.child import ChildPlace, become_child
from envbus.bus.process.descendants import (
    MARK_VARIABLE,
    Orphan,
    adopt_orphans,
    die_with_parent,
    kill_marked,
    orphans,
    outlive_parent,
)
from envbus.bus.process.exit_report import KillExplainer
from envbus.bus.process.stacks import STACK_SIGNAL
from envbus.bus.process.stderr import StderrRelay, StderrTails
from envbus.bus.process.threads import granted_threads

__all__ = [
    "ForkServer",
    "Reaped",
    "interpreter_command",
    "kill",
    "main",
    "reap_one",
]

#: First code of a fresh interpreter: `argv[1]` is an open file that says where to look for
#: modules, so that envbus is found wherever the driver found it. `{module}` is filled in.
_BOOTSTRAP: Final = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json
with open(int(sys.argv[1]), encoding="ascii") as file:
    config = json.load(file)
sys.path[:] = config["path"]
from envbus.bus.process.{module} import main
main(config)
"""
#: Seconds between looks at the driver's process id, should its pidfd not be available.
_DRIVER_CHECK_INTERVAL: Final = 1.0
#: Seconds that a child's end may be held back while what it left is being killed.
_SWEEP_TIMEOUT: Final = 2.0
#: Seconds between sweeps while something is still dying.
_SWEEP_INTERVAL: Final = 0.02
#: Seconds that an orphan with no environment may take to get one: the kernel shows none while a
#: program is being loaded. After that it is one that hides its origin.
_LOADING_TIMEOUT: Final = 0.25
#: Seconds for all children to be gone after the driver is.
_END_TIMEOUT: Final = 5.0
#: Seconds for the last that they wrote to find room in the driver's stderr.
_FLUSH_TIMEOUT: Final = 1.0


def main(config: dict[str, Any]) -> NoReturn:
    """Entry of the server's process; `config` is what `ServerProcess` wrote."""
    server = ForkServer(
        socket.socket(fileno=config["main_fd"]), config["driver_pid"], config["token"]
    )
    status = 0
    try:
        server.preload(config["preload"])
        server.serve()
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        server.end()
        sys.stderr.flush()
    os._exit(status)


@dataclass(eq=False)
class _Child:
    """One child process, until its end is reported."""

    process_group: _ProcessGroup
    number: int
    pid: int
    mark: bytes
    relay: StderrRelay
    #: Whether it was killed from here.
    killed: bool = False
    #: What else is known of the cause of its end.
    note: str = ""
    #: Exit code or minus the signal's number, once it has ended.
    status: int | None = None
    #: When its end is reported at the latest, and until when orphans may be loading.
    report_at: float = 0.0
    loading_until: float = 0.0
    #: What it has left and was killed. The kernel takes a dying process' environment away before
    #: the process itself, so they are known by their ids until they are reaped.
    remains: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _ProcessGroup:
    """One process group of the driver: its sockets and its children."""

    control: Channel
    events: Channel
    directory: bytes
    #: Those whose ends are not reported yet.
    children: dict[int, _Child] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.control.ended


def interpreter_command(module: str) -> list[str]:
    """A fresh interpreter that runs `main` of this module of the bus.

    It wants one more argument: the descriptor of the open file that `_BOOTSTRAP` reads.
    """
    # -W, -X, -E, -I and their like. Private, as nothing public tells them; multiprocessing has
    # them from there, too.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _BOOTSTRAP.format(module=module)]


class ForkServer:
    """The server's state and loop."""

    def __init__(self, main_socket: socket.socket, driver_pid: int, token: str) -> None:
        self._main = Channel(main_socket)
        self._driver_pid = driver_pid
        self._driver_fd = _open_pidfd(driver_pid)
        self._token = token
        self._marks, self._marks_address = _find_marks(token)
        self._failures: list[str] = []
        self._process_groups: list[_ProcessGroup] = []
        #: Children that run, by process id.
        self._running: dict[int, _Child] = {}
        #: Children that have ended, and whose descendants are being looked for.
        self._dying: list[_Child] = []
        #: Children's streams, until all is passed on.
        self._relays: list[StderrRelay] = []
        #: What other processes may see of those.
        self._tails = StderrTails()
        self._kills = KillExplainer(oom_kills, memory_limit)
        self._started = 0
        self._stopping = False
        self._wakeup, self._wakeup_out = socket.socketpair()
        self._take_signals()
        _give_up_terminal()
        adopt_orphans()

    def preload(self, modules: list[str]) -> None:
        """Import modules once, for all children. One that fails is left to the children.

        Nobody is served meanwhile, and an import may take for ever: another process then sees
        to it that the driver's end is this one's too.
        """
        watched = {self._main.fileno(): 0}
        if self._driver_fd >= 0:
            watched[self._driver_fd] = select.POLLIN
        with _watchdog(watched, self._end_importing):
            for module in modules:
                try:
                    importlib.import_module(module)
                except Exception as error:
                    traceback.print_exc()
                    self._failures.append(f"{module}: {type(error).__name__}: {error}")
            if granted_threads(os.environ) is not None:
                # Once for all children. Without it those have one thread.
                with contextlib.suppress(ImportError):
                    importlib.import_module("threadpoolctl")
        gc.collect()
        gc.freeze()  # children then do not copy these objects' pages by collecting them

    def serve(self) -> None:
        """Serve until the driver hangs up or is gone."""
        while not self._stopping and not self._main.ended and self._driver_lives():
            self._wait()
            self._reap()
            self._pump()
            for message, fds in self._main.read():
                self._on_main(message, fds)
            for process_group in list(self._process_groups):
                self._serve_process_group(process_group)
            self._sweep()

    def end(self) -> None:
        """Kill all children and what they started, remove registered directories."""
        for process_group in self._process_groups:
            process_group.control.ended = True
        for child in self._running.values():
            kill(child.pid)
        deadline = time.monotonic() + _END_TIMEOUT
        while time.monotonic() < deadline:
            self._reap()
            self._sweep()
            left = self._orphans()
            for orphan in left:
                kill(orphan.pid)
            if not (self._running or self._dying or left):
                break
            self._pause()
        for process_group in self._process_groups:
            _remove(process_group.directory)
        with contextlib.suppress(EnvbusError):
            self._remove_unattended()  # of a driver that was killed while this began
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        for relay in self._relays:
            relay.finish()
            relay.flush(deadline)

    # --- the loop's parts --------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until there is something to do."""
        poller = select.poll()
        poller.register(self._main, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        if self._driver_fd >= 0:
            poller.register(self._driver_fd, select.POLLIN)
        for process_group in self._process_groups:
            if not process_group.ended:
                poller.register(
                    process_group.control, select.POLLIN | _if_unsent(process_group.control)
                )
            if process_group.events.has_unsent:
                poller.register(process_group.events, select.POLLOUT)
        for relay in self._relays:
            relay.register(poller)
        timeout = _SWEEP_INTERVAL if self._dying else _DRIVER_CHECK_INTERVAL
        poller.poll(timeout * 1000)
        self._clear_wakeup()

    def _driver_lives(self) -> bool:
        if self._driver_fd >= 0 and select.select([self._driver_fd], [], [], 0.0)[0]:
            return False
        return os.getppid() == self._driver_pid

    def _on_main(self, message: Message, fds: list[int]) -> None:
        if not isinstance(message, Attach) or len(fds) != 2:
            raise AssertionError(f"{message} with {len(fds)} descriptors on the main socket")
        control, events = (Channel(socket.socket(fileno=fd)) for fd in fds)
        self._process_groups.append(_ProcessGroup(control, events, message.directory))
        control.queue(Attached(self._failures))

    def _serve_process_group(self, process_group: _ProcessGroup) -> None:
        process_group.events.flush()
        process_group.control.flush()
        try:
            for message, fds in process_group.control.read():
                self._on_control(process_group, message, fds)
        except EnvbusError:
            traceback.print_exc()
            process_group.control.ended = True
        if process_group.ended:
            for child in process_group.children.values():
                if child.status is None:
                    child.killed = True
                    kill(child.pid)
            if not process_group.children:
                self._process_groups.remove(process_group)
                process_group.control.close()
                process_group.events.close()
                _remove(process_group.directory)

    def _on_control(self, process_group: _ProcessGroup, message: Message, fds: list[int]) -> None:
        match message:
            case Start():
                try:
                    self._start(process_group, message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            case Kill(number):
                child = process_group.children.get(number)
                if child is not None and child.status is None:
                    child.killed = True
                    kill(child.pid)
            case DumpStacks(number):
                child = process_group.children.get(number)
                if child is not None and child.status is None:
                    os.kill(child.pid, STACK_SIGNAL)
            case Ping():
                process_group.control.queue(Pong())
            case _:
                raise AssertionError(f"{message} on a control socket")

    def _start(self, process_group: _ProcessGroup, start: Start, fds: list[int]) -> None:
        self._started += 1
        mark = f"{self._token}-{self._started % 1_000_000:06d}"
        relay = None
        try:
            pipe_fd, stdout_fd, stderr_fd, stacks_fd = fds
            relay = StderrRelay(stderr_fd)
            place = ChildPlace(
                pipe_fd=pipe_fd,
                stdout_fd=stdout_fd,
                stderr_fd=relay.child_fd,
                stacks_fd=stacks_fd,
                driver_fd=self._driver_fd,
                server_pid=os.getpid(),
                marks=self._marks.replace(f"{self._token}-000000", mark),
                marks_address=self._marks_address,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            with warnings.catch_warnings():
                # Python warns that the process has threads: those of OpenBLAS, which prepares
                # for forks. None of them is Python's, and none holds a lock meanwhile.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except (OSError, ValueError) as error:
            if relay is not None:
                relay.close()
            process_group.control.queue(
                NotStarted(start.number, f"{type(error).__name__}: {error}")
            )
            return
        if pid == 0:
            with _never_returning():
                self._let_go()
                relay.close_server_fds()
                os.close(stderr_fd)
                become_child(start, place, interpreter_command("child"))
        relay.close_child_fd()
        relay.show_as(pid, self._tails)
        self._relays.append(relay)
        child = _Child(process_group, start.number, pid, mark.encode(), relay)
        process_group.children[start.number] = child
        self._running[pid] = child
        process_group.control.queue(Started(start.number, pid, child.mark))

    def _reap(self) -> None:
        """Take note of each process below this one that has ended."""
        now = time.monotonic()
        self._kills.look(now)
        while (ended := reap_one(self._running)) is not None:
            child = self._running.pop(ended.pid, None)
            if child is not None:
                child.status = ended.status
                if ended.status == -signal.SIGKILL and not child.killed:
                    child.note = self._kills.explain(ended.peak, now)
                child.report_at = now + _SWEEP_TIMEOUT
                child.loading_until = now + _LOADING_TIMEOUT
                self._dying.append(child)

    def _pump(self) -> None:
        """Pass on what children have written to stderr."""
        for relay in list(self._relays):
            relay.pump()
            if relay.is_done:
                relay.close()
                self._relays.remove(relay)

    def _sweep(self) -> None:
        """Kill what ended children have left; report those that have nothing left."""
        if not self._dying:
            return
        left = self._orphans()
        now = time.monotonic()
        for child in list(self._dying):
            mine = {
                orphan.pid
                for orphan in left
                if orphan.pid in child.remains
                or child.mark in orphan.environ
                or orphan.process_group == child.pid
                # Nobody else could have started those that hide their origin.
                or not (self._running or self._token.encode() in orphan.environ)
            }
            for pid in mine - child.remains:
                kill(pid)
            child.remains = mine
            loading = now < child.loading_until and any(not orphan.environ for orphan in left)
            if not (mine or loading) or now >= child.report_at:
                self._dying.remove(child)
                del child.process_group.children[child.number]
                assert child.status is not None
                child.relay.finish()
                tail = bytes(child.relay.tail)
                child.process_group.events.queue(
                    Exited(child.number, child.status, child.note, tail)
                )
                if child.process_group.ended:
                    self._serve_process_group(child.process_group)

    # --- the rest ----------------------------------------------------------------------------

    def _end_importing(self) -> None:
        """In the process on the watchdog: the driver is gone, kill the server in its import."""
        self._remove_unattended()
        kill_marked([self._token.encode()], _END_TIMEOUT)

    def _remove_unattended(self) -> None:
        """Remove the directories of process groups that came too late to be served."""
        for message, fds in self._main.read():
            for fd in fds:
                os.close(fd)
            if isinstance(message, Attach):
                _remove(message.directory)

    def _orphans(self) -> list[Orphan]:
        return orphans(self._running, self._token.encode())

    def _pause(self) -> None:
        """Wait a moment, or until a child has ended."""
        select.select([self._wakeup], [], [], _SWEEP_INTERVAL)
        self._clear_wakeup()

    def _clear_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _take_signals(self) -> None:
        self._wakeup.setblocking(False)
        self._wakeup_out.setblocking(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the driver's thread may block some
        signal.set_wakeup_fd(self._wakeup_out.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)
        # A handler, not SIG_IGN: an ignored signal stays ignored in all that is started from here.
        signal.signal(signal.SIGINT, _do_nothing)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            # Linux sends it to a stopped process whose driver dies, and sets it going again.
            signal.signal(signal.SIGHUP, _do_nothing)
        signal.signal(signal.SIGTERM, self._on_terminate)
        # But this one must not kill a child that is about to take care of it (`child.py`).
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def _on_terminate(self, signum: int, frame: object) -> None:
        del signum, frame
        self._stopping = True

    def _let_go(self) -> None:
        """In a forked child: close what is the server's."""
        self._main.close(hang_up=False)
        self._wakeup.close()
        self._wakeup_out.close()
        for relay in self._relays:
            relay.close()
        self._tails.close()
        for process_group in self._process_groups:
            process_group.control.close(hang_up=False)
            process_group.events.close(hang_up=False)


def _do_nothing(signum: int, frame: object) -> None:
    """Wake the loop up, through the wake-up descriptor."""


@contextlib.contextmanager
def _never_returning() -> Iterator[None]:
    try:
        yield
    finally:
        os._exit(1)


def _if_unsent(channel: Channel) -> int:
    return select.POLLOUT if channel.has_unsent else 0


def _open_pidfd(pid: int) -> int:
    """Return a descriptor that tells when the driver ends, -1 where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # a sandbox or an old kernel
        return -1
    if os.getppid() != pid:  # it is gone already, and `fd` may be somebody else's
        os.close(fd)
        return -1
    return fd


def _find_marks(token: str) -> tuple[str, int]:
    """Return this process' marks, and where in memory the last one's digits stand."""
    marks = os.environ[MARK_VARIABLE]
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(MARK_VARIABLE.encode())
    own = f"{token}-000000"
    if not address or not marks.endswith(own):
        return marks, 0
    return marks, address + len(os.fsencode(marks)) - len("000000")


def _remove(directory: bytes) -> None:
    """Remove a registered directory, if it is one and this user's own."""
    with contextlib.suppress(OSError):
        found = os.lstat(directory)
        if directory and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(directory, ignore_errors=True)


# --- the watchdog while this process imports --------------------------------------------------


@contextlib.contextmanager
def _watchdog(watched: Mapping[int, int], act: Callable[[], object]) -> Iterator[None]:
    """Within the context, have a forked process call `act` once a descriptor has an event.

    Another process, as no thread gets to run beside a call that holds the interpreter's lock.
    For a process that has one thread when the context is entered. On leaving the context the
    other process is gone; if it has begun to act, that is waited for.

    Args:
        watched: Events of `select.poll` by descriptor; hang-ups are always looked out for.
        act: Called in the other process, which then ends. May kill this one.

    Raises:
        OSError: There is no room for another process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)  # else its copies of the sockets would hide the end
                ours.close()
                _look_out(watched, theirs.fileno(), act)
            except BaseException:  # nothing may return into what this process was forked from
                traceback.print_exc()
            finally:
                os._exit(0)
        try:
            yield
        finally:
            # Not only closed: what happened meanwhile may have forked processes that hold a copy.
            ours.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(ChildProcessError):  # reaped by what happened meanwhile
                while os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
                    os.kill(pid, signal.SIGCONT)  # else this process would wait for ever


def _look_out(watched: Mapping[int, int], over_fd: int, act: Callable[[], object]) -> None:
    poller = select.poll()
    poller.register(over_fd, 0)
    for fd, events in watched.items():
        poller.register(fd, events)
    seen = {fd for fd, _ in poller.poll()}
    if over_fd not in seen:
        outlive_parent()
        act()


# --- how children are killed, and how they ended ---------------------------------------------


class Reaped(NamedTuple):
    """A child that has ended."""

    pid: int
    #: Its exit code, or minus the signal's number.
    status: int
    #: The most memory that it ever had, in bytes.
    peak: int


def reap_one(leaders: Container[int]) -> Reaped | None:
    """Reap a child that has ended, if any; kill its process group if it is one of `leaders`."""
    try:
        if hasattr(os, "waitid"):
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return None
            if info.si_pid in leaders:
                _kill_group(info.si_pid)  # while the id is certain to be still its own
            pid, status, usage = os.wait4(info.si_pid, 0)
        else:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in leaders:
                _kill_group(pid)
    except ChildProcessError:
        return None
    if not pid:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return Reaped(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * unit)


def _give_up_terminal() -> None:
    """Have no controlling terminal any more, nor do children: none is stopped for using it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)
    except OSError as exc:
        if exc.errno != errno.ENXIO:  # there may be one, which cannot be opened here
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def kill(pid: int) -> None:
    """Kill a child that is not reaped yet, and its process group."""
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
