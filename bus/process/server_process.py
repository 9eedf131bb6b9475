"""The driver's hold on its fork server: start it once, share it, bury it.

Leaves out what the server does (`forkserver.py`) and what is asked of it (`process_group.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, Final

from envbus.bus.brief import cut
from envbus.bus.descriptors import opening
from envbus.bus.errors import ConfigError, EnvbusError, StartError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import without_interrupts
from envbus.bus.memory.memfd import create_memfd
from envbus.bus.process.channel import Attach, Channel
from envbus.bus.process.descendants import MARK_VARIABLE, kill_marked
from envbus.bus.process.forkserver import interpreter_command
from envbus.bus.process.threads import thread_variables

__all__ = ["ServerProcess", "current_directory", "module_path", "server_for"]

#: Seconds for the server to take a message of some hundred bytes. It reads while it is not
#: importing, and the socket has room for hundreds of them meanwhile.
_SEND_TIMEOUT: Final = 10.0
#: Seconds for all servers to kill their children and go, before they are killed themselves.
_STOP_TIMEOUT: Final = 4.0
#: Seconds for killed processes to be gone.
_KILL_TIMEOUT: Final = 2.0
#: Characters of the modules' names that an error shows.
_LONGEST_LIST: Final = 200
#: Characters of the server's stderr that an error shows.
_TAIL_CHARACTERS: Final = 4000
#: What keeps Ctrl-C in a terminal from the server. Its session is this process', for the sake of
#: the scheduler (`child.py`); Python 3.10 cannot do that without a moment in which Ctrl-C counts.
_APART: Final[dict[str, Any]] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


class ServerProcess:
    """One fork server process. Safe to use from several threads.

    Attributes:
        pid: Its process id.
        stopped: It was told to end, as this interpreter ends. Who is still there when that
            happens, finalizers for example, has nothing to report.
        retired: It has not answered in time: it serves those that it serves, and no new ones.
        served_after: Seconds until it was seen to serve, after all of its imports; it answers at
            once from then on. None: it was not yet.
    """

    @opening("the fork server could not be started", StartError)
    def __init__(self, preload: Sequence[str], *, one_thread: bool) -> None:
        """Start it, without waiting for its imports.

        Args:
            preload: What it imports.
            one_thread: Load libraries with one thread each. Its children raise that to what each
                is given; threads that a library has prepared, a child cannot take back.

        Raises:
            StartError: No process could be started.
        """
        if not hasattr(socket, "AF_UNIX") or os.name != "posix":
            raise StartError("child processes need a POSIX system: Linux, macOS, or WSL")
        if not sys.executable:
            raise StartError("sys.executable is empty: there is no interpreter to start")
        self._owner = os.getpid()
        self._token = f"envbus-{secrets.token_hex(8)}"
        self._lock = threading.RLock()  # a garbage collection within it may bury this server
        self._buried = False
        self.retired = self.stopped = False
        self.served_after: float | None = None
        self._began = time.monotonic()
        modules = ", ".join(preload) or "what it needs"
        self._importing = (
            f"still imports {cut(modules, _LONGEST_LIST)}: allow a longer start if it needs that"
        )
        #: What the server writes itself, most of it while importing; children write to the
        #: driver's own streams.
        #: Without a name, even for a moment: who is killed in it would leave a file.
        with contextlib.ExitStack() as undone:
            self._log: IO[bytes] = undone.enter_context(
                os.fdopen(create_memfd("envbus-log"), "w+b")
            )
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self._main = undone.enter_context(contextlib.closing(Channel(ours)))
            with theirs:
                self._process = self._start(theirs, list(preload), one_thread=one_thread)
            undone.pop_all()
        self.pid = self._process.pid

    def attach(self, control_fd: int, events_fd: int, directory: str | None) -> None:
        """Hand a process group's sockets to the server; the caller closes its copies.

        Raises:
            StartError: The server is gone.
        """
        message = Attach(os.fsencode(directory) if directory else b"")
        try:
            with self._lock:
                self._main.send(message, [control_fd, events_fd], timeout=_SEND_TIMEOUT)
        except EnvbusError as error:
            raise StartError(self.describe_end()) from error

    def is_alive(self) -> bool:
        """Whether its process runs, and is this process' own."""
        return self._owner == os.getpid() and not self._buried and self._process.poll() is None

    def note_that_it_serves(self) -> None:
        """It has told that its imports are over."""
        if self.served_after is None:
            self.served_after = time.monotonic() - self._began

    def describe_end(self) -> str:
        """Return how the server ended and the last it wrote; waits a moment for its end."""
        try:
            code: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        what = "does not answer" if self.served_after is not None else self._importing
        if code is not None:
            what = f"ended with exit code {code}" if code >= 0 else f"ended with signal {-code}"
        tail = self._read_log()
        return f"the fork server (pid {self.pid}) {what}" + (f"; it wrote:\n{tail}" if tail else "")

    def hang_up(self) -> None:
        """Ask it to kill all children and end."""
        with self._lock:
            self._main.close()

    def wait(self, timeout: float) -> None:
        """Wait for its end, up to `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(timeout, 0.0))

    def bury(self) -> None:
        """Kill it if it lives, and all that it or its children have left. Idempotent."""
        with self._lock:
            if self._buried:
                return
            self._buried = True
            deadline = time.monotonic() + _KILL_TIMEOUT
            self._process.kill()
            self.wait(_KILL_TIMEOUT)
            kill_marked([self._token.encode()], deadline - time.monotonic())
            self._main.close()
            self._log.close()

    def disown(self) -> None:
        """In a process forked from the driver: let go of what is the driver's."""
        self._lock = threading.RLock()  # a thread that does not exist here may hold the old one
        self._buried = True
        self._process.returncode = 0  # it is not this process' child: nothing to wait for
        self._main.close(hang_up=False)
        self._log.close()

    def __repr__(self) -> str:
        return f"<ServerProcess pid={self.pid} {'alive' if self.is_alive() else 'ended'}>"

    def _start(
        self, theirs: socket.socket, preload: list[str], *, one_thread: bool
    ) -> subprocess.Popen[bytes]:
        marks = os.environ.get(MARK_VARIABLE, "")
        environ = {
            **os.environ,
            # As long as the marks of any child, which are written over it (`child.py`).
            MARK_VARIABLE: f"{marks},{self._token}-000000".lstrip(","),
        }
        if one_thread:
            environ |= thread_variables(1, environ, cores=1, processes=1)
        config = {
            "path": module_path(),
            "preload": preload,
            "main_fd": theirs.fileno(),
            "driver_pid": self._owner,
            "token": self._token,
        }
        with os.fdopen(create_memfd("envbus-config"), "w+b") as file:
            file.write(json.dumps(config).encode())
            file.flush()
            file.seek(0)
            return subprocess.Popen(  # noqa: S603 (our own interpreter)
                [*interpreter_command("forkserver"), str(file.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Imports of some Python versions fail in a directory that was removed.
                cwd=current_directory() or "/",
                env=environ,
                pass_fds=(theirs.fileno(), file.fileno()),
                **_APART,
            )

    def _read_log(self) -> str:
        with self._lock:  # or another thread buries it meanwhile
            if self._log.closed:
                return ""
            size = os.fstat(self._log.fileno()).st_size
            start = max(0, size - _TAIL_CHARACTERS)
            text = os.pread(self._log.fileno(), size - start, start)
        return text.decode(errors="replace").strip()


def module_path() -> list[str]:
    """Return where this process finds modules now, in a form that holds in other directories."""
    entries: list[object] = list(sys.path)  # programs do put other things there
    here = current_directory()
    path = [entry or here for entry in entries if isinstance(entry, str)]
    return [entry for entry in path if entry]


def current_directory() -> str:
    """Return the working directory, empty if it was removed or may not be looked up."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def server_for(preload: Sequence[str], *, one_thread: bool = False) -> ServerProcess:
    """Return this process' fork server with these imports, started if need be.

    Raises:
        ConfigError: `preload` is not a sequence of module names.
        StartError: No process could be started.
    """
    if isinstance(preload, str) or not all(isinstance(module, str) for module in preload):
        raise ConfigError(f"preload is a sequence of module names, not {preload!r}")
    key = (tuple(preload), one_thread)
    with _registry.lock:
        if _registry.is_over:
            raise StartError("this interpreter is ending: no process is started any more")
        server = _registry.servers.get(key)
        if server is not None and not server.is_alive():
            server.bury()
            server = None
        elif server is not None and server.retired:
            _registry.retired.append(server)
            server = None
        if server is None:
            server = _registry.servers[key] = ServerProcess(key[0], one_thread=one_thread)
        return server


class _Registry:
    """This process' fork servers."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.servers: dict[tuple[tuple[str, ...], bool], ServerProcess] = {}
        self.retired: list[ServerProcess] = []
        #: Whether the interpreter ends; a server that is started now would be left behind.
        self.is_over = False

    def stop_all(self) -> None:
        """At the interpreter's end: leave no process, not even for a moment."""
        with self.lock:
            self.is_over = True
            servers = self._take_all()
        deadline = time.monotonic() + _STOP_TIMEOUT
        with without_interrupts():
            for server in servers:
                server.stopped = True
                server.hang_up()
            for server in servers:
                server.wait(deadline - time.monotonic())
                server.bury()

    def disown(self) -> None:
        """In a forked process: the servers are its parent's."""
        self.lock = threading.RLock()
        for server in self._take_all():
            server.disown()
        disown_in_forks(self)

    def _take_all(self) -> list[ServerProcess]:
        servers = [*self.servers.values(), *self.retired]
        self.servers.clear()
        self.retired.clear()
        return servers


_registry: Final = _Registry()
atexit.register(_registry.stop_all)
disown_in_forks(_registry)
