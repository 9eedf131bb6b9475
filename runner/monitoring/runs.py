"""Finds what works on this host, and asks it.

Leaves out what is told (`figures.py`), and how it looks (`envbus.runner.cli`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeVar

import msgspec
import psutil

from envbus.bus.errors import EnvbusError
from envbus.bus.memory.memfd import FOUND_BY_LABEL
from envbus.bus.process.descendants import process_state
from envbus.bus.process.exit_report import readable
from envbus.bus.process.stacks import STACK_SIGNAL, StackFile, describe_stacks
from envbus.bus.process.stderr import TAIL_BYTES, read_tail
from envbus.bus.transport.unix_sockets import owner_of
from envbus.runner.monitoring.figures import (
    EpisodeFigures,
    EpisodesFigures,
    PictureFigures,
    RunFigures,
)
from envbus.runner.monitoring.listener import PREFIX, Question

__all__ = [
    "RunAddress",
    "Usage",
    "UsageReader",
    "ask",
    "ask_episodes",
    "ask_picture",
    "find_runs",
    "kill_process",
    "log_of",
    "restart_process",
    "stacks_of",
]

_Told = TypeVar("_Told")

#: Where the kernel lists all Unix sockets, with their names.
_SOCKETS: Final = "/proc/net/unix"
#: What it says of those that listen; those that were taken there have the same name, and may be
#: held by a forked copy for long.
_LISTENS: Final = "00010000"
#: Words of a line.
_FIELDS: Final = 8
#: Seconds for an answer.
_TIMEOUT: Final = 2.0
#: Bytes of an answer: a run of 10,000 actors has 2 MB.
_LONGEST_ANSWER: Final = 16 * 2**20

#: Seconds for stacks: they need some ten milliseconds, on a busy machine some hundred.
_STACKS_TIMEOUT: Final = 1.0
#: What the kernel says of processes that do nothing until somebody lets them go on.
_STOPPED: Final = ("T", "t")
#: Processes whose memory is read again at one look.
_MEMORY_READS: Final = 64


class RunAddress(NamedTuple):
    """Where a run can be asked."""

    pid: int
    name: str


class Usage(NamedTuple):
    """What a process takes."""

    #: Cores, since the look before; 1.0: one of them, all the time.
    cpu: float
    #: Bytes; of pages that several processes share, each has its part (PSS).
    memory: int


def find_runs() -> list[RunAddress]:
    """Return the processes of this user, or for root of all, in which envbus works, by their ids.

    Raises:
        EnvbusError: The kernel does not tell; this needs Linux.
    """
    try:
        with open(_SOCKETS, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as exc:
        raise EnvbusError(f"runs are found in {_SOCKETS}, as Linux has it: {exc}") from exc
    user, found = os.geteuid(), set()
    for line in lines:
        fields = line.decode("ascii", "replace").split()
        # Names are shown as they are; anybody's may have an end of a line in it.
        if len(fields) != _FIELDS or fields[3] != _LISTENS:
            continue
        name = fields[-1]
        if not name.startswith(f"@{PREFIX}"):
            continue
        parts = name.removeprefix(f"@{PREFIX}").split("-")
        is_ours = len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal()
        if is_ours and user in (0, int(parts[0])):
            found.add(RunAddress(int(parts[1]), name[1:]))
    return sorted(found)


def ask(address: RunAddress, timeout: float = _TIMEOUT) -> RunFigures | None:
    """Return the figures of a run; None: it has ended, or does not answer in time."""
    told = _ask(address, Question(what="figures"), RunFigures, timeout)
    # Who tells another's id would have that one's processes killed.
    return told if told is not None and told.pid == address.pid else None


def ask_picture(address: RunAddress, part: str, env: int, timeout: float = _TIMEOUT) -> bytes:
    """Return the last observation of a part's env as a PNG; empty: there is none, or no answer."""
    question = Question(what="picture", part=part, env=env)
    told = _ask(address, question, PictureFigures, timeout)
    return b"" if told is None else told.png


def ask_episodes(address: RunAddress, part: str, timeout: float = _TIMEOUT) -> list[EpisodeFigures]:
    """Return the open episodes of a bridge; empty: there are none, or no answer."""
    told = _ask(address, Question(what="episodes", part=part), EpisodesFigures, timeout)
    return [] if told is None else told.episodes


def _ask(
    address: RunAddress, question: Question, kind: type[_Told], timeout: float
) -> _Told | None:
    deadline = time.monotonic() + timeout
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout)
            sock.connect(f"\0{address.name}")
            if owner_of(sock) != (address.pid, _user_of(address)):
                return None  # anybody may take such a name
            sock.sendall(msgspec.json.encode(question) + b"\n")
            while not answer.endswith(b"\n") and len(answer) < _LONGEST_ANSWER:
                left = deadline - time.monotonic()
                sock.settimeout(max(left, 1e-3))
                more = sock.recv(1 << 20)
                if not more or left < 0.0:
                    return None
                answer += more
            return msgspec.json.decode(bytes(answer), type=kind)
        # Gone, stopped, or of another version; or somebody has made it up.
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None


class UsageReader:
    """Reads what processes take of CPU and memory, each time since the time before."""

    def __init__(self) -> None:
        #: By process: when it was looked at, and the seconds of CPU time that it had had.
        self._before: dict[int, tuple[float, float]] = {}
        #: By process, those whose memory was read longest ago first.
        self._memory: dict[int, int] = {}

    def read(self, pids: Iterable[int]) -> dict[int, Usage]:
        """Return it by process; those that are gone are left out.

        Of many processes, the memory of some is read anew each time: it takes 0.3 ms for each.
        """
        found, seen, wanted = {}, {}, set(pids)
        known = [pid for pid in self._memory if pid in wanted]
        due = {*known[:_MEMORY_READS], *(wanted - self._memory.keys())}
        for pid in wanted:
            with contextlib.suppress(OSError, ValueError, IndexError):
                now, cpu = time.monotonic(), _cpu_seconds(pid)
                if pid in due:
                    self._memory.pop(pid, None)  # to the end
                    self._memory[pid] = _proportional_bytes(pid)
                at, had = self._before.get(pid, (now, cpu))
                seen[pid] = now, cpu
                found[pid] = Usage((cpu - had) / (now - at) if now > at else 0.0, self._memory[pid])
        self._before = seen
        self._memory = {pid: size for pid, size in self._memory.items() if pid in found}
        return found


def kill_process(run: RunFigures, name: str) -> int:
    """Kill a process of a run by its name, so that its owner starts it again; return its id.

    Raises:
        EnvbusError: There is none, it does not run here, or nobody would start it again.
    """
    for part in run.parts:
        for process in part.processes:
            if process.name != name:
                continue
            if process.pid is None or process.pid == run.pid:
                raise EnvbusError(f"{name} is no process of its own here, which could be killed")
            if not part.restarts:
                raise EnvbusError(
                    f"{part.name} does not start its processes again: that would end the run; "
                    "make it with restart=True"
                )
            if not _is_below(process.pid, run.pid):
                raise EnvbusError(
                    f"process {process.pid} was not started by run {run.pid}, and is not killed"
                )
            os.kill(process.pid, signal.SIGKILL)
            return process.pid
    names = ", ".join(process.name for part in run.parts for process in part.processes)
    raise EnvbusError(f"no process {name!r}; there are: {names or 'none'}")


def restart_process(run: int, part: str, name: str, pid: int) -> None:
    """Kill a process of a part, so that its owner starts it again.

    Args:
        run: Process id of the run, which is asked anew: another process may have the id since.
        part: Name of the part.
        name: Name of the process.
        pid: Its process id, as it was seen.

    Raises:
        EnvbusError: The run does not answer, or the process is another one by now; and as
            `kill_process` does.
    """
    address = next((address for address in find_runs() if address.pid == run), None)
    figures = None if address is None else ask(address)
    if figures is None:
        raise EnvbusError(f"run {run} does not answer, and would not start {name} again")
    parts = [one for one in figures.parts if one.name == part]
    now = [process.pid for one in parts for process in one.processes if process.name == name]
    if now and now[0] != pid:
        raise EnvbusError(f"{name} of {part} is process {now[0]} by now, not {pid}; look again")
    kill_process(msgspec.structs.replace(figures, parts=parts), name)


def stacks_of(pid: int, timeout: float = _STACKS_TIMEOUT) -> str:
    """Return the Python stacks of all threads of a process that a run has started.

    Needs no help of that run, which may hang itself.

    Args:
        pid: Its process id.
        timeout: Seconds.

    Returns:
        As text, the thread that works first; or why there are none.

    Raises:
        EnvbusError: It is no such process, another user's, or gone; it gets no signal then.
    """
    try:
        process = os.pidfd_open(pid)
    except (OSError, OverflowError) as exc:
        raise EnvbusError(f"process {pid} cannot be asked for its stacks: {exc}") from exc
    try:
        file = StackFile.of(pid)
        if file is None:
            raise EnvbusError(
                f"process {pid} does not show its stacks: no actor, runner or policy worker has "
                f"this id; `py-spy dump --pid {pid}` may see more"
            )
        with contextlib.closing(file):
            file.clear()
            with contextlib.suppress(ProcessLookupError):  # which the text says
                signal.pidfd_send_signal(process, STACK_SIGNAL)
            patience = 0.0 if process_state(pid) in _STOPPED else timeout
            return describe_stacks([(pid, file)], patience)[0]
    finally:
        os.close(process)


def log_of(pid: int) -> str:
    """Return the end of what a process that a run has started wrote to stderr.

    Needs no help of that run, which may hang itself.

    Args:
        pid: Its process id.

    Returns:
        As text, without anything that a terminal would obey; or that there is nothing.

    Raises:
        EnvbusError: It is no such process, another user's, or gone.
    """
    tail = read_tail(pid)
    if tail is None:
        why = (
            "no actor, runner or policy worker of this user has this id"
            if FOUND_BY_LABEL
            else "it is kept where others can read it on Linux only"
        )
        raise EnvbusError(
            f"what process {pid} wrote to stderr cannot be shown: {why}; look at the terminal or "
            "log of its program"
        )
    shown = readable(tail, is_cut=len(tail) == TAIL_BYTES)
    return shown or f"process {pid} has written nothing to stderr"


def _user_of(address: RunAddress) -> int:
    return int(address.name.removeprefix(PREFIX).partition("-")[0])


def _is_below(pid: int, run: int) -> bool:
    """Return whether a process descends from a run, which may tell of any process there is."""
    try:
        return any(parent.pid == run for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _proportional_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"the kernel does not tell how much memory process {pid} takes")
