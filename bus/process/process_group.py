"""Child processes of a driver: start, watch, kill, and never leave one behind.

Leaves out what a child is told to do (it gets one end of a pipe), and whether one that ended is
started again (`bus/supervision/`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from envbus.bus.brief import cut
from envbus.bus.complaints import PROGRESS_AFTER
from envbus.bus.descriptors import descriptors_advice, descriptors_in_use, opening
from envbus.bus.errors import ClosedError, ConfigError, EnvbusError, StartError, TransportError
from envbus.bus.folders import FOLDER_VARIABLE
from envbus.bus.interrupts import interruptible, uninterrupted_call
from envbus.bus.process.channel import (
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
from envbus.bus.process.descendants import kill_marked, wait_until_gone
from envbus.bus.process.exit_report import ExitStatus, last_words
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.server_process import (
    ServerProcess,
    current_directory,
    module_path,
    server_for,
)
from envbus.bus.process.stacks import LEFT_TO_WRITERS, StackFile, describe_stacks, native_stacks
from envbus.bus.process.threads import ThreadsPerProcess, thread_variables
from envbus.bus.supervision.liveness_probe import LivenessProbe, Verdict
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.unix_sockets import wait_for, wait_for_answer

__all__ = ["DEFAULT_METHOD", "Child", "ProcessGroup"]

logger = logging.getLogger("envbus.bus.process.process_group")

#: How children start unless told otherwise. macOS' frameworks crash in processes that were
#: forked after they were loaded, and numpy alone loads one (Accelerate).
DEFAULT_METHOD: Final = "spawn" if sys.platform == "darwin" else "fork"
#: Descriptors of this process per child: its pipe and its local link; and what a program should
#: have left for itself.
_DESCRIPTORS: Final = 2 if LEFT_TO_WRITERS else 3
_SPARE_DESCRIPTORS: Final = 16
_NO_CONNECTION: Final = "the fork server cannot be connected"
#: Seconds for a killed child to be reported by the server, which may hold that back for the sake
#: of what the child has left (`forkserver.py`).
_KILL_TIMEOUT: Final = 2.2
#: Seconds for one that was killed without the server to be gone. Only what the kernel holds (a dead
#: network disk, a broken driver) takes longer. `close` promises the sum of both, with some air.
_DIRECT_KILL_TIMEOUT: Final = 0.5
#: Characters of their names.
_LONGEST_LIST: Final = 500
#: Seconds between looks whether a server that is waited for lives: others may have copies of its
#: sockets, which then tell nothing.
_LOOK_INTERVAL: Final = PROGRESS_AFTER
#: Seconds for a server that is not importing to take a message, and to answer one.
_ANSWER_TIMEOUT: Final = 10.0
#: As many times as long as its predecessor, a server in its place may import.
_IMPORT_FACTOR: Final = 5.0


class ProcessGroup:
    """A set of child processes that end with it. Used by one thread at a time.

    Not to be confused with the process groups of the operating system.

    The children are those of a *fork server*, one process per driver and set of `preload`,
    started by the first process group. Whatever becomes of the driver (a normal end, an exception,
    SIGKILL), of this object (closed, or dropped without) or of a child (also in the middle of a C
    call that never returns): the processes below it are killed, with all that they started
    themselves, and `directory` is removed.

    Args:
        preload: Modules that the server imports once for all children. One that cannot be
            imported is logged and left to the children.
        directory: Made if it is not there, for this user only. Removed, with what is in it, when
            the process group ends, also if that is because the driver was killed.
        threads_per_process: How many threads NumPy, PyTorch and their like start in each child;
            "auto": its part of the cores. None, or where the user has set one of
            `THREAD_VARIABLES`: nothing is done about it.
        processes: How many children share the cores.
    """

    @uninterrupted_call
    def __init__(
        self,
        preload: Sequence[str] = (),
        directory: str | os.PathLike[str] | None = None,
        *,
        threads_per_process: ThreadsPerProcess = None,
        processes: int = 1,
    ) -> None:
        self._preload = tuple(preload) if not isinstance(preload, str) else preload
        self._directory = os.path.abspath(directory) if directory is not None else None
        #: What each child has in its environment besides. All lives have the same.
        self._variables = thread_variables(
            threads_per_process, os.environ, cores=usable_cores(), processes=processes
        )
        self._owner = os.getpid()
        self._children: dict[int, Child] = {}
        self._numbers = 0
        #: Ends as they were told, until they are noted; and those that nobody has taken.
        self._told: deque[Message] = deque()
        self._ended: deque[tuple[Child, ExitStatus]] = deque()
        self._killed: set[int] = set()
        self._closed = False
        #: While ends are awaited: whether the server is there to tell them.
        self._liveness_probe: LivenessProbe | None = None
        self._connections = ProcessGroupConnections()
        self._server: ServerProcess | None = None
        #: How long the last one that served, and was lost, had imported; None: there was none.
        self._imported_in: float | None = None
        self._finalizer = weakref.finalize(
            self, _abandon, self._connections, self._children, self._directory, self._owner
        )
        try:
            self._attach()  # the server's imports then run while the driver goes on
            if self._directory is not None:  # not before the server knows that it is to remove it
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._directory, 0o700)
        except BaseException:
            self._finalizer()
            raise

    # --- start -------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        entry: str,
        *,
        method: str | None = None,
        timeout: float = 60.0,
    ) -> Child:
        """Start a child that calls `entry` with its end of a pipe (a `Pipe`, `pipe.py`).

        It has the driver's working directory, environment, `sys.path`, `sys.argv` and stdout as
        they are now, `/dev/null` as stdin, and a process group of the system's to itself. What it
        writes to stderr the server passes on to what is the driver's stderr now; the end of it is
        kept for `exits`.
        An exception from `entry` is printed to stderr and gives exit code 1.

        Args:
            name: For messages to people.
            entry: `"module:function"`.
            method: `"fork"`: a copy of the server, with its imports; `"spawn"`: a fresh
                interpreter. None: `DEFAULT_METHOD`.
            timeout: Seconds to wait. The first start waits for the server's imports; later ones
                take milliseconds.

        Raises:
            ConfigError: `entry` or `method` is malformed.
            StartError: The child did not come up; says why.
            ClosedError: The process group was closed, or belongs to another process.
        """
        self._check_usable()
        method = method or DEFAULT_METHOD
        if method not in ("fork", "spawn"):
            raise ConfigError(f"method is 'fork' or 'spawn', not {method!r}")
        if not all(entry.partition(":")):
            raise ConfigError(f"an entry is 'module:function', not {entry!r}")
        deadline = time.monotonic() + timeout
        self._wait_for_imports(deadline)
        return self._start_by(deadline, name, entry, method)

    @uninterrupted_call  # or descriptors stay, or are closed twice
    def _start_by(self, deadline: float, name: str, entry: str, method: str) -> Child:
        self._numbers += 1
        message = Start(
            number=self._numbers,
            entry=entry,
            method=method,
            cwd=os.fsencode(current_directory()),
            environ=self._environ(),
            path=[os.fsencode(part) for part in module_path()],
            argv=[os.fsencode(part) for part in getattr(sys, "argv", ["-c"])],
        )
        try:
            return self._start_or_lose_server(name, message, deadline)
        except StartError:
            if self._server is not None or time.monotonic() >= deadline:
                raise
        return self._start_or_lose_server(name, message, deadline)

    # --- watch -------------------------------------------------------------------------------

    def keep_server(self) -> None:
        """Give the server a successor if it is gone, which removes the folder then.

        `start` does so itself: this is for a process group that only has a folder.

        Raises:
            StartError: There is none to be had.
        """
        self._check_usable()
        if self._server is None or not self._server.is_alive() or self._connections.control.ended:
            self._lose_server()
            self._attach()

    @property
    def children(self) -> tuple[Child, ...]:
        """The children whose ends have not been reported."""
        return tuple(self._children.values())

    def fileno(self) -> int:
        """Return a descriptor, always the same, readable when `exits` can tell something."""
        self._check_usable()
        return self._connections.fileno()

    def check_room(self, children: int) -> None:
        """See that this process may have the descriptors that so many more children take.

        Raises:
            StartError: It may not; says how many are needed.
        """
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = descriptors_in_use() + _DESCRIPTORS * children + _SPARE_DESCRIPTORS
        if allowed != resource.RLIM_INFINITY and needed > allowed:
            raise StartError(
                f"{children} processes cannot be started: each takes {_DESCRIPTORS} descriptors. "
                f"Start fewer; or {descriptors_advice(needed)}"
            )

    def wake_at(self) -> float | None:
        """Return by when `exits` is due, also without an event, in seconds of `time.monotonic`."""
        if self._told or self._ended:
            return 0.0
        return None if self._liveness_probe is None else self._liveness_probe.wake_at()

    @property
    def is_ending(self) -> bool:
        """Whether this interpreter ends, and all children with it."""
        return self._server is not None and self._server.stopped

    def exits(self) -> Iterator[tuple[Child, ExitStatus]]:
        """Return the children that have ended, one after the other, without waiting.

        When a child is reported, nothing that it started is left either. A fork server that gives
        no sign of life while an end is awaited is replaced, as one that died is.

        An end comes again with the next call until who takes it asks for the next one: an exception
        before, here or there, loses none.

        Raises:
            StartError: There is no descriptor for a new server's sockets.
        """
        self._check_usable()
        self._read_ends()
        if self._connections.events.ended or self._server_hangs():
            self._lose_server()
            self._read_ends()
        return self._taken_ends()

    def stacks(
        self, children: Sequence[Child], timeout: float = 0.3, *, native: bool = True
    ) -> list[str]:
        """Ask children for the Python stacks of all their threads, also those that are stuck.

        Takes some ten milliseconds if they can answer. With py-spy installed, native frames are
        shown too where the system permits it, which takes up to five seconds each.

        Returns:
            For each, the stacks as text, or why there are none.
        """
        self._check_usable()
        found = {child: native_stacks(child.pid) if native else "" for child in children}
        silent = [child for child, text in found.items() if not text]
        for child in silent:
            child.stacks.clear()
            with contextlib.suppress(EnvbusError):  # then nothing is answered, which is told
                self._connections.control.send(DumpStacks(child.number), timeout=timeout)
        texts = describe_stacks([(child.pid, child.stacks) for child in silent], timeout)
        found.update(zip(silent, texts, strict=True))
        return [found[child] for child in children]

    # --- end ---------------------------------------------------------------------------------

    def kill(self, child: Child) -> None:
        """Kill a child and all that it started, at once; `exits` reports its end."""
        self._check_usable()
        if child.number in self._children:
            self._killed.add(child.number)
            with contextlib.suppress(EnvbusError):  # a dead server's children are dead
                self._connections.control.send(Kill(child.number), timeout=_ANSWER_TIMEOUT)

    @uninterrupted_call
    def close(
        self, timeout: float = 5.0, wait: Callable[[float], bool] | None = None
    ) -> list[Child]:
        """Wait until all children have ended, kill those that have not. Idempotent.

        Whoever wants them to end by themselves asks them before. Returns within `timeout` and
        three more seconds, also if the fork server is stopped or stuck. After two seconds the log
        says who is waited for, and until when.

        Args:
            timeout: Seconds that they have.
            wait: Waits until `fileno` is readable, or a time of `time.monotonic`, and returns
                whether it is: for who has something else to do meanwhile.

        Returns:
            Those that had to be killed.
        """
        if self._closed or self._owner != os.getpid():
            return []
        late: list[Child] = []
        try:
            self._wait_for_ends(timeout, wait or self._wait)
            late = list(self._children.values())
            if late:
                self._have_killed(late)
            if self._children:
                self._kill_directly()
        except BaseException:  # Ctrl-C: the server, to which the rest is left, may be stopped
            kill_marked([child.mark for child in self.children], 0.0)
            raise
        finally:
            self._closed = True
            for child in late:
                child.pipe.close()
            self._finalizer()
        return late

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._children)} children"
        return f"<ProcessGroup {state}, {self._server}>"

    # --- private -----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this process group was closed")
        if self._owner != os.getpid():
            raise ClosedError(
                f"this process group belongs to process {self._owner}; make a new one here"
            )

    def _environ(self) -> dict[bytes, bytes]:
        environ = {**os.environ, **self._variables}
        if self._directory is not None:
            environ[FOLDER_VARIABLE] = self._directory
        return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}

    def _wait_for_imports(self, deadline: float) -> None:
        """Wait until a new server answers, or has ended; Ctrl-C may come, as nothing is begun."""
        server, begun = self._server, time.monotonic()
        deadline = min(deadline, begun + self._answer_timeout())
        if server is None or server.served_after is not None:
            return
        look_at = begun
        while server.is_alive() and look_at < deadline:
            look_at = min(deadline, look_at + _LOOK_INTERVAL)
            if wait_for_answer(self._connections.control, look_at):
                return
            if look_at == begun + _LOOK_INTERVAL:
                names = ", ".join(self._preload)
                logger.info("waiting for what a fork server imports: %s", cut(names, _LONGEST_LIST))

    def _start_or_lose_server(self, name: str, message: Start, deadline: float) -> Child:
        try:
            return self._start(name, message, deadline)
        except StartError as error:
            unanswered = isinstance(error.__cause__, TransportError)
            if unanswered and self._answer_timeout() < math.inf:
                # It, or one before it, served; it has ended meanwhile, or is stopped or stuck.
                self._lose_server()
            raise

    def _start(self, name: str, message: Start, deadline: float) -> Child:
        """Have the server start a child, after giving it a successor if it is gone."""
        self.keep_server()
        assert self._server is not None
        deadline = min(deadline, time.monotonic() + self._answer_timeout())
        refused = f"{name} could not be started"
        with opening(refused, StartError):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            pipe = Pipe(ours)
            try:
                stacks = StackFile()
            except BaseException:
                pipe.close()
                theirs.close()
                raise
        try:
            with opening(refused, StartError), theirs, standard_streams() as streams:
                self._send(message, [theirs.fileno(), *streams, stacks.fd], deadline)
            started = self._wait_for_start(message.number, deadline)
            stacks.leave_to(started.pid)
        except BaseException:
            pipe.close()
            stacks.close()
            # Where the interpreter ends, the finalizer has closed the socket under this thread.
            with contextlib.suppress(EnvbusError, OSError):
                self._connections.control.send(Kill(message.number), timeout=0.0)
            raise
        child = Child(name, started, pipe, stacks)
        self._children[message.number] = child
        self._liveness_probe = None  # the server has just answered
        return child

    @uninterrupted_call  # or a lock is kept, for which all later starts would wait
    def _attach(self) -> None:
        """Give the far ends of new links to a server that lives."""
        self._server = server_for(self._preload, one_thread=bool(self._variables))
        self._server.attach(*self._connections.far_ends(), self._directory)
        self._connections.drop_far_ends()

    def _answer_timeout(self) -> float:
        """Return how many seconds the server may take to answer; infinite: nobody knows."""
        if self._server is not None and self._server.served_after is not None:
            return _ANSWER_TIMEOUT
        if self._imported_in is None:
            return math.inf
        return _ANSWER_TIMEOUT + _IMPORT_FACTOR * self._imported_in

    def _send(self, message: Message, fds: Sequence[int], deadline: float) -> None:
        try:
            self._connections.control.send(message, fds, timeout=deadline - time.monotonic())
        except EnvbusError as error:
            raise StartError(f"{error}: {self._describe_server()}") from error

    def _wait_for_start(self, number: int, deadline: float) -> Started:
        while True:
            try:
                message = self._receive(deadline)
            except EnvbusError as error:
                raise StartError(f"{error}: {self._describe_server()}") from error
            match message:
                case Started(answered) if answered == number:
                    return message
                case NotStarted(answered, text) if answered == number:
                    raise StartError(f"the fork server could not start a child: {text}")
                case Attached(failures):
                    assert self._server is not None
                    self._server.note_that_it_serves()
                    for failure in failures:
                        logger.warning("the fork server could not import %s", failure)
                case _:
                    pass  # the answer to a start that was given up

    def _receive(self, deadline: float) -> Message:
        """Return the server's next answer; raises as `Channel.receive`, also where it has ended."""
        assert self._server is not None
        while True:
            look_at = min(deadline, time.monotonic() + _LOOK_INTERVAL)
            try:
                return self._connections.control.receive(look_at)[0]
            except TransportError:
                if self._connections.control.ended or look_at == deadline:
                    raise
                if not self._server.is_alive():
                    raise

    def _describe_server(self) -> str:
        assert self._server is not None
        return self._server.describe_end()

    def _read_ends(self) -> None:
        self._told.extend(message for message, _ in self._connections.events.read())
        while self._told:
            self._on_exit(self._told[0])
            self._told.popleft()

    def _taken_ends(self) -> Iterator[tuple[Child, ExitStatus]]:
        while self._ended:
            end = self._ended[0]
            yield end
            if self._ended and self._ended[0] is end:  # not so where `close` came in between
                self._ended.popleft()

    def _on_exit(self, message: Message) -> None:
        assert isinstance(message, Exited)
        child = self._children.get(message.number)
        if child is None:
            return  # its start was given up
        child.stacks.close()
        by_signal = message.status < 0
        status = ExitStatus(
            code=None if by_signal else message.status,
            signal=-message.status if by_signal else None,
            note=message.note,
            stderr=last_words(message.stderr),
        )
        child.exit_status = status
        self._ended.append((child, status))
        del self._children[message.number]
        self._killed.discard(message.number)

    def _server_hangs(self) -> bool:
        """Return whether the server gives no sign of life while the end of a child is awaited."""
        poller = select.poll()
        for child in self._children.values():
            if child.pipe.fileno() >= 0:
                poller.register(child.pipe, 0)  # a hang-up is always reported
        if self._killed.isdisjoint(self._children) and not poller.poll(0):
            self._liveness_probe = None
            return False
        now = time.monotonic()
        if self._liveness_probe is None:
            self._liveness_probe = LivenessProbe(_ANSWER_TIMEOUT, now)
        if self._connections.control.read():
            self._liveness_probe.alive(now)
        verdict = self._liveness_probe.look(now)
        if verdict is Verdict.ASK:
            with contextlib.suppress(EnvbusError):  # it is dead, or has no room for a message
                self._connections.control.send(Ping(), timeout=0.0)
        return verdict is Verdict.HUNG

    def _lose_server(self) -> None:
        """Take note that the server is gone, and of the ends of all children.

        Raises:
            StartError: There is no descriptor for new sockets. All is as before, for the next call.
        """
        if self._server is None:
            return
        fresh = _socket_pairs()
        stopped, note = self._server.stopped, self._server.describe_end().splitlines()[0]
        if self._server.served_after is not None:
            self._imported_in = self._server.served_after
        self._server.bury()
        wait_until_gone([child.pid for child in self._children.values()], _KILL_TIMEOUT)
        if not stopped:
            logger.warning("%s; its children are killed", note)
        self._read_ends()
        for number in list(self._children):
            self._on_exit(Exited(number, -signal.SIGKILL, note))
        self._connections.renew(fresh)
        self._server = self._liveness_probe = None

    def _wait_for_ends(self, timeout: float, wait: Callable[[float], bool]) -> None:
        """Wait for children that were asked to end; tell of a longer wait."""
        begun = time.monotonic()
        self._wait_for_exits(begun + min(timeout, PROGRESS_AFTER), wait)
        if self._children and timeout > PROGRESS_AFTER:
            late = ", ".join(f"{child.name} (pid {child.pid})" for child in self.children)
            logger.warning(
                "waiting since %g s for processes to end, which are killed in %.3g s: %s",
                PROGRESS_AFTER,
                timeout - PROGRESS_AFTER,
                cut(late, _LONGEST_LIST),
            )
            self._wait_for_exits(begun + timeout, wait)

    def _wait_for_exits(self, deadline: float, wait: Callable[[float], bool]) -> None:
        while self._children and wait(deadline):
            for child, _ in self.exits():
                child.pipe.close()

    def _wait(self, deadline: float) -> bool:
        with interruptible():
            return bool(wait_for(self._connections.events, select.POLLIN, deadline))

    def _have_killed(self, children: Sequence[Child]) -> None:
        """Have the server kill children, and wait for their ends for a while."""
        deadline = time.monotonic() + _KILL_TIMEOUT
        self._killed.update(child.number for child in children)
        messages: list[Message] = [*(Kill(child.number) for child in children), Ping()]
        with contextlib.suppress(EnvbusError):  # dead, and so are its children; or stuck
            for message in messages:
                self._connections.control.send(message, timeout=deadline - time.monotonic())
        self._wait_for_exits(deadline, self._wait)

    def _kill_directly(self) -> None:
        """Kill the children that are left without the server, which is stuck or overloaded."""
        answers = [message for message, _ in self._connections.control.read()]
        if self._server is not None and not any(isinstance(answer, Pong) for answer in answers):
            logger.warning("%s does not answer and gets no new children", self._server)
            self._server.retired = True
        kill_marked([child.mark for child in self.children], _DIRECT_KILL_TIMEOUT)
        self._wait_for_exits(0.0, self._wait)  # it may have answered after all
        for child in self.children:
            if wait_until_gone([child.pid], 0.0):
                self._on_exit(Exited(child.number, -signal.SIGKILL))
            else:
                logger.warning("%s (pid %d) was killed and has not ended", child.name, child.pid)


def _abandon(
    links: ProcessGroupConnections, children: dict[int, Child], directory: str | None, owner: int
) -> None:
    """Hang up, so that the server kills what is left. In a forked process: only let go."""
    is_own = os.getpid() == owner
    links.close(hang_up=is_own)
    for child in children.values():
        child.pipe.close()
        child.stacks.close()
    if is_own and directory is not None:
        shutil.rmtree(directory, ignore_errors=True)  # the server may be dead


# --- what connects a process group with its server, and what it hands on to children -----------


#: Near and far end for commands, and for events.
SocketPairs: TypeAlias = tuple[
    tuple[socket.socket, socket.socket], tuple[socket.socket, socket.socket]
]


class ProcessGroupConnections:
    """A process group's two sockets to its server.

    Commands and their answers have one, events have another: an end that is reported while an
    answer is waited for stays visible on the descriptor of the events, which a caller polls.
    """

    @opening(_NO_CONNECTION, StartError)
    def __init__(self) -> None:
        #: Stands for the event socket, whichever that is: a caller's epoll would forget a
        #: socket that is replaced, also by one of the same number. None: there is none here.
        self._watched = select.epoll() if hasattr(select, "epoll") else None
        try:
            (near, self._far_control), (events, self._far_events) = _socket_pairs()
        except BaseException:
            if self._watched is not None:
                self._watched.close()
            raise
        self.control, self.events = Channel(near), Channel(events)
        self._watch()

    def fileno(self) -> int:
        """Return a descriptor, always the same, that is readable when there is an event."""
        return self.events.fileno() if self._watched is None else self._watched.fileno()

    def renew(self, fresh: SocketPairs) -> None:
        """Replace both sockets. The new one is readable: who waits for it looks for ends."""
        self.control.close()
        self.drop_far_ends()
        (control, self._far_control), (near, self._far_events) = fresh
        self.control = Channel(control)
        if self._watched is not None:
            self._watched.unregister(self.events.fileno())
        self.events.replace(near)
        self._watch()
        Channel(self._far_events).queue(Exited(0, 0))  # of nobody: numbers begin at 1

    def far_ends(self) -> tuple[int, int]:
        """Return the descriptors that are the server's to be."""
        return self._far_control.fileno(), self._far_events.fileno()

    def drop_far_ends(self) -> None:
        """Close this process' copies of the server's ends."""
        self._far_control.close()
        self._far_events.close()

    def close(self, *, hang_up: bool) -> None:
        """Close both sockets; `hang_up` as in `Channel.close`."""
        self.control.close(hang_up=hang_up)
        self.events.close(hang_up=hang_up)
        if self._watched is not None:
            self._watched.close()
        self.drop_far_ends()

    def _watch(self) -> None:
        if self._watched is not None:
            self._watched.register(self.events.fileno(), select.EPOLLIN)


@opening(_NO_CONNECTION, StartError)
def _socket_pairs() -> SocketPairs:
    control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return control, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except BaseException:
        for end in control:
            end.close()
        raise


@contextlib.contextmanager
def standard_streams() -> Iterator[list[int]]:
    """Yield what becomes of a child's stdout and stderr: the driver's, or the null device."""
    with open(os.devnull, "wb", buffering=0) as null:
        streams = []
        for fd in (1, 2):
            try:
                os.fstat(fd)
                streams.append(fd)
            except OSError:  # closed, as in a daemon
                streams.append(null.fileno())
        yield streams


class Child:
    """One child process.

    Attributes:
        name: As given to `start`.
        pid: Its process id; also that of its process group (the system's).
        pipe: The driver's end of its pipe. Closed by `ProcessGroup.close`; after the child's end it
            may still hold passed descriptors.
        exit_status: How it ended; None until `exits` or `close` has reported it.
        number: The fork server's of it.
        mark: By which what it has started is known (`descendants.py`).
        stacks: Where it writes its stacks when asked.
    """

    def __init__(self, name: str, started: Started, pipe: Pipe, stacks: StackFile) -> None:
        self.name = name
        self.pid = started.pid
        self.pipe = pipe
        self.exit_status: ExitStatus | None = None
        self.number = started.number
        self.mark = started.mark
        self.stacks = stacks

    def __repr__(self) -> str:
        state = self.exit_status.describe() if self.exit_status else "running"
        return f"<Child {self.name} pid={self.pid} {state}>"
