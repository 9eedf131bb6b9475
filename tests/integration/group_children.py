"""Entries of the children that the tests of process groups start, and how those tests wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from envbus.bus.process.pipe import Pipe

#: Variable whose value, unique per test, all processes of one driver carry.
TRACE_VARIABLE = "ENVBUS_TEST_TRACE"
#: Seconds; never expected to pass, and long enough for a machine that is busy with other things.
PATIENCE = 60.0


# --- forked copies of the test --------------------------------------------------------------


def refused_in_a_fork(error: type[Exception], *calls: Callable[[], object]) -> None:
    """See that each call raises that in a forked copy of this process, which takes no long time."""
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE))
        refused = 0
        try:
            for call in calls:
                with contextlib.suppress(error):
                    call()
                    break
                refused += 1
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)


# --- what children do -----------------------------------------------------------------------


def wait_for_the_driver(pipe: Pipe) -> None:
    pipe.send_bytes(1, b"up")
    pipe.receive_bytes(1, 600.0)


def hold_the_interpreter_lock(pipe: Pipe) -> None:
    pipe.send_bytes(1, b"up")
    ctypes.PyDLL(None).sleep(600)


def ignore_terminate(pipe: Pipe) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_the_driver(pipe)
    wait_for_the_driver(pipe)


def exit_as_told(pipe: Pipe) -> None:
    sys.exit(json.loads(pipe.receive_bytes(1, 60.0)))


def exit_with_many_words(pipe: Pipe) -> None:
    pipe.send_bytes(1, b"up")
    code = json.loads(pipe.receive_bytes(1, 60.0))
    sys.stderr.write("many words\n" * 2000)
    sys.exit(code)


def write_as_told(pipe: Pipe) -> None:
    """Write to stderr what the driver sends, until that leaves."""
    while text := pipe.receive_bytes(1, 600.0):
        os.write(2, text)


def exit_hard(pipe: Pipe) -> None:
    pipe.send_bytes(1, b"up")
    os._exit(9)


def raise_error(pipe: Pipe) -> None:
    raise ValueError("raised by the entry")


def interrupt_itself(pipe: Pipe) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60.0)


def print_at_exit(pipe: Pipe) -> None:
    atexit.register(print, "printed by an exit handler", end="")
    sys.stdout.write("printed by the entry;")
    threading.Timer(0.2, print, ["printed by a thread"]).start()


def tell_about_itself(pipe: Pipe) -> None:
    import zmq

    threads = [thread.name for thread in threading.enumerate()]
    facts = {
        "argv": sys.argv,
        "context": zmq.Context._instance is not None,
        "cwd": os.getcwd(),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "environ": dict(os.environ),
        "process_group": os.getpgrp(),
        "session": os.getsid(0),
        "numbers": [random.random(), float(np.random.random())],
        "path": sys.path,
        "pid": os.getpid(),
        "stdin": sys.stdin.read(),
        "threads": threads,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "warnings": sys.warnoptions,
        "xoptions": list(sys._xoptions),
        "optimize": sys.flags.optimize,
    }
    pipe.send_bytes(1, json.dumps(facts).encode())


#: Kept until the process ends: a dropped Popen warns that it is still running.
_family: list[subprocess.Popen[bytes]] = []


def start_family(pipe: Pipe) -> None:
    """Start descendants that do all they can not to be found, then go on as it is told first.

    `exit`, `hold` (the interpreter lock) or `wait`, and `hide` if one of them is to drop its
    environment too.
    """
    orders = pipe.receive_bytes(1, 60.0).split()
    sleep = ["sleep", "600"]
    _family.append(subprocess.Popen(sleep))
    _family.append(subprocess.Popen(sleep, start_new_session=True))
    pids = [
        *(process.pid for process in _family),
        _daemon(lambda: os.execvp("sleep", sleep)),
        _daemon(lambda: threading.Event().wait(600.0)),  # not seen by its command line either
    ]
    if b"hide" in orders:
        pids.append(_daemon(lambda: os.execve("/bin/sleep", sleep, {})))
    pipe.send_bytes(1, json.dumps(pids).encode())
    if b"exit" in orders:
        os._exit(0)
    if b"hold" in orders:
        ctypes.PyDLL(None).sleep(600)
    pipe.receive_bytes(2, 600.0)


def _daemon(work: Callable[[], object]) -> int:
    """Do `work` in a process with its own session, whose parent is gone; return its id."""
    out, into = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        if not (grandchild := os.fork()):
            os.close(into)
            work()
            os._exit(0)
        os.write(into, b"%d" % grandchild)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(into)
    with open(out) as file:
        return int(file.read())


# --- how tests wait -------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll `condition`: other processes' ends, or a file, cannot be waited for otherwise."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def traced(trace: str) -> list[psutil.Process]:
    """Return the living processes that carry `trace`."""
    return list(_traced(trace))


def _traced(trace: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TRACE_VARIABLE) == trace:
                yield process


#: What stands beside this file, and `tests`.
_IMPORTED_FROM = (Path(__file__).parent, Path(__file__).parents[2])


class Driver:
    """A driver in a process of its own, running the Python program `source`."""

    def __init__(
        self,
        source: str,
        tmp_path: Path,
        *options: str,
        stdin: bool = False,
        leads_session: bool = False,
    ) -> None:
        self.trace = f"{tmp_path}"
        script = tmp_path / "driver.py"
        script.write_text(source)
        with open(script if stdin else os.devnull) as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", *options, "-" if stdin else str(script)],
                stdin=stream,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                start_new_session=leads_session,
                env={
                    **os.environ,
                    TRACE_VARIABLE: self.trace,
                    "PYTHONPATH": os.pathsep.join(map(str, _IMPORTED_FROM)),
                },
            )

    def read(self) -> Any:
        """Return the next line of its output, which is JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        return json.loads(line)

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end; return exit code, output and errors."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
