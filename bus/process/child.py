"""What happens in a child process between its birth and its entry, and at its end.

Runs in the child only, forked or freshly started. Leaves out who starts it (`forkserver.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from envbus.bus.errors import ClosedError
from envbus.bus.forking import exit_status
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.process.channel import Start
from envbus.bus.process.descendants import MARK_VARIABLE, die_with_parent
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.stacks import offer_stacks
from envbus.bus.process.threads import granted_threads

__all__ = ["ChildPlace", "become_child", "load_entry", "main"]

#: Seconds between looks at the parent where no signal and no descriptor tells of its death.
_PARENT_CHECK_INTERVAL = 1.0


class ChildPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a child inherits: descriptors, and whom it must not outlive."""

    pipe_fd: int
    stdout_fd: int
    stderr_fd: int
    #: Where it writes its stacks when asked.
    stacks_fd: int
    #: pidfd of the driver, or -1.
    driver_fd: int
    server_pid: int
    #: Value of `MARK_VARIABLE`.
    marks: str
    #: Address of the mark's digits in the server's own environment; 0 if unknown.
    marks_address: int


def become_child(start: Start, place: ChildPlace, command: Sequence[str]) -> NoReturn:
    """Turn a process just forked from the server into the child that `start` describes.

    Args:
        start: What was asked for.
        place: What the server prepared.
        command: For `method="spawn"`: a fresh interpreter's command line up to the number of
            the descriptor that `main` is to read.
    """
    try:
        _leave_the_server(start, place)
        if start.method == "spawn":
            _execute(start, place, command)
        _take_over_interpreter(start, place.marks)
        status = _run(start.entry, place)
    except BaseException:  # nothing may return into the server's loop
        traceback.print_exc()
        status = 1
    _exit(status)


def main(config: dict[str, Any]) -> NoReturn:
    """Entry of a freshly started interpreter; `config` is what `_execute` wrote."""
    sys.argv[:] = config["argv"]
    place = msgspec.convert(config["place"], ChildPlace)
    die_with_parent(place.server_pid)
    try:
        status = _run(config["entry"], place)
    except BaseException:
        traceback.print_exc()
        status = 1
    _exit(status)


def load_entry(entry: str) -> Callable[[Pipe], object]:
    """Return what `"module:function"` names; the function's name may be dotted."""
    module, _, name = entry.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[[Pipe], object] = found
    return function


def _leave_the_server(start: Start, place: ChildPlace) -> None:
    """Own process group, own signals, own standard streams, and death with the server.

    The session stays the driver's (with Python 3.10 the server's): Linux shares the cores out by
    sessions, and `sched_yield` gives them up only to processes of the same one (DECISIONS 154).
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setpgid(0, 0)
    die_with_parent(place.server_pid)
    if place.marks_address:
        # /proc/<pid>/environ shows the strings of the last exec. Written there, in place, the
        # mark is also seen on processes that this child forks without an exec.
        own = place.marks.rpartition("-")[2].encode()
        ctypes.memmove(place.marks_address, own, len(own))
    os.dup2(place.stdout_fd, 1)
    os.dup2(place.stderr_fd, 2)
    os.close(place.stdout_fd)
    os.close(place.stderr_fd)
    if start.cwd:
        os.chdir(start.cwd)


def _execute(start: Start, place: ChildPlace, command: Sequence[str]) -> NoReturn:
    """Replace this process by a fresh interpreter that goes on in `main`."""
    import json

    config = {
        "path": [os.fsdecode(entry) for entry in start.path],
        "argv": [os.fsdecode(argument) for argument in start.argv],
        "entry": start.entry,
        "place": msgspec.to_builtins(place),
    }
    with os.fdopen(create_memfd("envbus-config"), "w+b") as file:
        file.write(json.dumps(config).encode())
        file.flush()
        file.seek(0)
        for fd in (file.fileno(), place.pipe_fd, place.stacks_fd, place.driver_fd):
            if fd >= 0:
                os.set_inheritable(fd, True)
        environ = {**start.environ, MARK_VARIABLE.encode(): place.marks.encode()}
        os.execve(command[0], [*command, str(file.fileno())], environ)  # noqa: S606 (no shell)


def _take_over_interpreter(start: Start, marks: str) -> None:
    """Make the server's interpreter look as if the driver had started it."""
    had_threads = granted_threads(os.environ)
    os.environ.clear()
    os.environb.update(start.environ)
    os.environ[MARK_VARIABLE] = marks
    time.tzset()
    sys.path[:] = [os.fsdecode(entry) for entry in start.path]
    sys.argv[:] = [os.fsdecode(argument) for argument in start.argv]
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=number == 2 or os.isatty(number))
    # All children are copies of one process: without this they would draw the same numbers.
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    threads = granted_threads(os.environ)
    if threads is not None and threads != had_threads:
        _set_threads(threads)


def _set_threads(threads: int) -> None:
    """Have libraries that the server has loaded compute with so many threads.

    Those that are loaded later read the environment, as all do in a fresh interpreter.
    """
    threadpoolctl = sys.modules.get("threadpoolctl")
    if threadpoolctl is not None:
        threadpoolctl.threadpool_limits(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _run(entry: str, place: ChildPlace) -> int:
    """Call the entry and return the exit code, as the interpreter would choose it."""
    for fd in (place.pipe_fd, place.stacks_fd, place.driver_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    faulthandler.enable(file=2)  # a crash in C code says on stderr where it was
    offer_stacks(place.stacks_fd)
    watched_fd = os.dup(place.pipe_fd)  # stays open whatever the entry does with its own
    threading.Thread(
        target=_watch,
        args=(watched_fd, place.driver_fd, place.server_pid),
        name="envbus-watchdog",
        daemon=True,
    ).start()
    try:
        load_entry(entry)(Pipe.from_fd(place.pipe_fd))
    except SystemExit as error:
        return exit_status(error)
    except ClosedError:
        if not _driver_has_hung_up(watched_fd):
            raise
        # It was waiting for something from the driver, which has left. The SIGKILL that follows
        # is only by chance later than this: no traceback.
        return 1
    except KeyboardInterrupt:
        # Somebody interrupted this very process: end as if Python were not here, quietly.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _driver_has_hung_up(pipe_fd: int) -> bool:
    poller = select.poll()
    poller.register(pipe_fd, 0)  # a hang-up is always reported
    return bool(poller.poll(0))


def _watch(pipe_fd: int, driver_fd: int, server_pid: int) -> None:
    """Kill this process and its group when the driver or the server is gone. A thread.

    The server does the same from outside, and better: this is for a server that was stopped or
    is stuck.
    """
    poller = select.poll()
    poller.register(pipe_fd, 0)  # a hang-up is always reported
    interval: float | None = _PARENT_CHECK_INTERVAL * 1000
    if driver_fd >= 0:
        poller.register(driver_fd, select.POLLIN)
        interval = None  # and the server's death is a signal where there are pidfds
    while not poller.poll(interval) and os.getppid() == server_pid:
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _exit(status: int) -> NoReturn:
    """End as the interpreter does at its end, but without taking itself apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        # The program may have closed or replaced it, or nobody reads it any more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
