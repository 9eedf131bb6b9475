from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from envbus.bus.errors import ClosedError, ConfigError, EnvbusError, StartError
from envbus.bus.memory.memfd import FOUND_BY_LABEL
from envbus.bus.process import process_group as process_group_module
from envbus.bus.process.exit_report import ExitStatus
from envbus.bus.process.process_group import Child, ProcessGroup
from envbus.bus.process.stderr import read_tail
from tests.descriptors import no_more_files
from tests.integration.group_children import PATIENCE, is_alive, wait_until

pytestmark = pytest.mark.timeout(180)

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])


@pytest.fixture(autouse=True)
def children_can_import_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


@pytest.fixture
def process_group() -> Iterator[ProcessGroup]:
    with ProcessGroup(preload=("numpy",)) as process_group:
        yield process_group
        process_group.close(0.0)


def start(process_group: ProcessGroup, entry: str, method: str = "fork") -> Child:
    return process_group.start(entry, f"group_children:{entry}", method=method)


def start_up(process_group: ProcessGroup, entry: str, method: str = "fork") -> Child:
    child = start(process_group, entry, method)
    assert child.pipe.receive_bytes(1, PATIENCE) == b"up"
    return child


def tell_to_exit(child: Child, code: object) -> None:
    child.pipe.send_bytes(1, json.dumps(code).encode())


def next_exits(process_group: ProcessGroup) -> list[tuple[Child, ExitStatus]]:
    assert select.select([process_group], [], [], PATIENCE)[0]
    return list(process_group.exits())


# --- start ----------------------------------------------------------------------------------


@METHODS
def test_a_child_finds_the_world_of_its_driver(
    process_group: ProcessGroup, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process_group.start("earlier", "group_children:raise_error")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ODD_BYTES", os.fsdecode(b"\xff\xfe"))
    monkeypatch.syspath_prepend("/nowhere/at/all")
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    child = start(process_group, "tell_about_itself", method)
    facts = json.loads(child.pipe.receive_bytes(1, PATIENCE))
    assert facts["cwd"] == str(tmp_path)
    assert facts["environ"]["ODD_BYTES"] == os.environ["ODD_BYTES"]
    assert facts["environ"]["PATH"] == os.environ["PATH"]
    assert facts["path"][0] == "/nowhere/at/all"
    assert facts["argv"] == ["program", "--option"]
    assert facts["pid"] == facts["process_group"] == child.pid
    if sys.version_info >= (3, 11):
        assert facts["session"] == os.getsid(0)
    assert facts["stdin"] == ""
    assert facts["sigint"]
    assert facts["sigterm"]
    assert not facts["context"]


@METHODS
def test_a_child_has_its_own_descriptors_only(process_group: ProcessGroup, method: str) -> None:
    others = [start_up(process_group, "wait_for_the_driver") for _ in range(3)]
    child = start(process_group, "tell_about_itself", method)
    facts = json.loads(child.pipe.receive_bytes(1, PATIENCE))
    # Standard streams, the pipe, the watchdog's copy, the file for stacks, the driver's pidfd, and
    # the listing's own.
    assert len(facts["descriptors"]) <= 8
    assert facts["threads"] == ["MainThread", "envbus-watchdog"]
    assert all(is_alive(other.pid) for other in others)


def test_forked_children_draw_different_random_numbers(process_group: ProcessGroup) -> None:
    children = [start(process_group, "tell_about_itself") for _ in range(3)]
    drawn = [json.loads(child.pipe.receive_bytes(1, PATIENCE))["numbers"] for child in children]
    assert len({number for numbers in drawn for number in numbers}) == 6


@pytest.mark.parametrize("entry", ["module", "module:", ":function"])
def test_an_entry_names_a_function_of_a_module(process_group: ProcessGroup, entry: str) -> None:
    with pytest.raises(ConfigError, match="module:function"):
        process_group.start("child", entry)


def test_an_unknown_method_is_refused(process_group: ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="threads"):
        process_group.start("child", "os:getpid", method="threads")


def test_a_string_is_no_list_of_modules() -> None:
    with pytest.raises(ConfigError, match="numpy"):
        ProcessGroup(preload="numpy")


def test_a_module_that_cannot_be_preloaded_is_left_to_the_children(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ProcessGroup(preload=("no_such_module_at_all", "json")) as process_group:
        start_up(process_group, "wait_for_the_driver")
        assert process_group.close(0.0)
    assert "no_such_module_at_all: ModuleNotFoundError" in caplog.text


def test_a_server_that_dies_while_importing_is_named_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deadly_import.py").write_text(
        "import os, sys\nprint('about to go', file=sys.stderr, flush=True)\nos._exit(7)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process_group = ProcessGroup(preload=("deadly_import",))
    with pytest.raises(StartError, match=r"(?s)exit code 7.*about to go"):
        start(process_group, "wait_for_the_driver")
    assert process_group.close() == []


def test_a_server_that_imports_for_ever_is_waited_for_within_the_time_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        ProcessGroup(preload=("endless_import",)) as process_group,
        pytest.raises(StartError, match=r"still imports endless_import"),
    ):
        process_group.start("child", "group_children:wait_for_the_driver", timeout=0.2)


def test_ctrl_c_while_a_server_imports_is_not_kept_until_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "lasting_import.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def interrupt() -> None:
        wait_until(lambda: begun.exists() and waits_in("_wait_for_imports"), "the import")
        os.kill(os.getpid(), signal.SIGINT)

    with ProcessGroup(preload=("lasting_import",)) as process_group:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            process_group.start("child", "group_children:wait_for_the_driver", timeout=20.0)
        assert not isinstance(caught.value.__context__, EnvbusError)  # "not started in time"
        thread.join()


def test_an_import_that_leaves_a_copy_of_the_server_does_not_hold_it_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "forking_import.py").write_text(
        "import os, time\nif not os.fork():\n    time.sleep(600)\n    os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ProcessGroup(preload=("forking_import",)) as process_group:
        child = start_up(process_group, "wait_for_the_driver")
        assert process_group.close(0.0) == [child]


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@METHODS
@pytest.mark.parametrize(("told", "code"), [(0, 0), (None, 0), (7, 7), (256 + 3, 3), ("text", 1)])
def test_system_exit_gives_the_code_that_the_interpreter_would(
    process_group: ProcessGroup, method: str, told: object, code: int
) -> None:
    child = start(process_group, "exit_as_told", method)
    tell_to_exit(child, told)
    status = ExitStatus(code=code, stderr="text" if told == "text" else "")
    assert next_exits(process_group) == [(child, status)]
    assert child.exit_status == status
    assert list(process_group.exits()) == []


@METHODS
def test_an_exception_is_printed_and_gives_exit_code_one(
    process_group: ProcessGroup, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(process_group, "raise_error", method)
    ((_, status),) = next_exits(process_group)
    assert (status.code, child.exit_status) == (1, status)
    printed = capfd.readouterr().err
    assert status.stderr == printed.rstrip()
    assert "ValueError: raised by the entry" in printed
    assert "group_children.py" in printed


def test_an_entry_that_is_not_there_is_the_childs_error(
    process_group: ProcessGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    process_group.start("child", "group_children:no_such_function")
    ((_, status),) = next_exits(process_group)
    assert status.code == 1
    assert "no_such_function" in status.stderr
    assert "no_such_function" in capfd.readouterr().err


@METHODS
def test_what_is_printed_is_flushed_and_exit_handlers_run(
    process_group: ProcessGroup, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    start(process_group, "print_at_exit", method)
    ((_, status),) = next_exits(process_group)
    assert status == ExitStatus(code=0)
    assert capfd.readouterr().out == (
        "printed by the entry;printed by a thread\nprinted by an exit handler"
    )


@pytest.mark.slow
@METHODS
@pytest.mark.skipif(not FOUND_BY_LABEL, reason="no memfd or no /proc here")
def test_what_a_running_child_wrote_to_stderr_is_seen_by_whoever_may(
    process_group: ProcessGroup, method: str
) -> None:
    children = [start(process_group, "write_as_told", method) for _ in range(3)]
    assert [read_tail(child.pid) for child in children] == [b""] * 3
    for number, child in enumerate(children):
        child.pipe.send_bytes(1, b"from child %d\n" % number)
    for number, child in enumerate(children):
        said = b"from child %d\n" % number
        wait_until(lambda child=child, said=said: read_tail(child.pid) == said, "it is seen")
    server = server_of(children[0]).pid
    assert len(tail_files(server)) == 1, "one file for all of them"
    size = os.stat(tail_files(server)[0]).st_size
    gone = children.pop(1)
    gone.pipe.send_bytes(1, b"")
    assert next_exits(process_group) == [(gone, ExitStatus(code=0, stderr="from child 1"))]
    assert read_tail(gone.pid) is None
    child = start(process_group, "write_as_told", method)
    assert read_tail(child.pid) == b""
    child.pipe.send_bytes(1, b"new\n")
    wait_until(lambda: read_tail(child.pid) == b"new\n", "the new one is seen")
    assert os.stat(tail_files(server)[0]).st_size == size, "the free slot is used again"
    assert [path for one in [*children, child] for path in tail_files(one.pid)] == []


def tail_files(pid: int) -> list[str]:
    """Return the descriptors of a process at which tails are kept."""
    found = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    return [path for path in found if "envbus-stderr" in os.readlink(path)]


@pytest.mark.slow
@pytest.mark.skipif(not FOUND_BY_LABEL, reason="no memfd or no /proc here")
def test_of_three_hundred_children_each_has_a_tail_of_its_own(
    process_group: ProcessGroup,
) -> None:
    children = [start(process_group, "write_as_told") for _ in range(300)]
    for child in children:
        child.pipe.send_bytes(1, b"%d\n" % child.pid * 4000)
    for child in children:
        wait_until(
            lambda child=child: read_tail(child.pid) == (b"%d\n" % child.pid * 4000)[-16384:],
            "its own is seen",
        )


@METHODS
def test_an_interrupted_child_ends_quietly(
    process_group: ProcessGroup, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start(process_group, "interrupt_itself", method)
    assert next_exits(process_group) == [(child, ExitStatus(signal=signal.SIGINT))]
    assert capfd.readouterr().err == ""


@METHODS
def test_a_hard_exit_is_reported_with_its_code(process_group: ProcessGroup, method: str) -> None:
    child = start_up(process_group, "exit_hard", method)
    assert next_exits(process_group) == [(child, ExitStatus(code=9))]
    with pytest.raises(ClosedError):
        child.pipe.receive_bytes(2, PATIENCE)


@METHODS
def test_a_killed_child_is_reported_with_its_signal(
    process_group: ProcessGroup, method: str
) -> None:
    child = start_up(process_group, "hold_the_interpreter_lock", method)
    other = start_up(process_group, "wait_for_the_driver", method)
    os.kill(child.pid, signal.SIGKILL)
    ((ended, status),) = next_exits(process_group)
    assert (ended, status.describe()) == (child, "signal SIGKILL")
    assert process_group.children == (other,)


@METHODS
def test_kill_ends_a_child_in_a_call_that_never_returns(
    process_group: ProcessGroup, method: str
) -> None:
    child = start_up(process_group, "hold_the_interpreter_lock", method)
    process_group.kill(child)
    assert next_exits(process_group) == [(child, ExitStatus(signal=signal.SIGKILL))]
    process_group.kill(child)  # it may have ended by itself: not an error


@pytest.mark.slow_but_first
@METHODS
@pytest.mark.parametrize("what_then", [b"exit hide", b"hold hide", b"wait hide", b"wait"])
def test_when_an_end_is_reported_nothing_that_the_child_started_is_left(
    process_group: ProcessGroup, method: str, what_then: bytes
) -> None:
    # Who hides all traces of where it comes from is taken for the last child's that dies.
    neighbour = None if b"hide" in what_then else start_up(process_group, "wait_for_the_driver")
    child = start(process_group, "start_family", method)
    child.pipe.send_bytes(1, what_then)
    pids = json.loads(child.pipe.receive_bytes(1, PATIENCE))
    if b"exit" not in what_then:
        os.kill(child.pid, signal.SIGKILL)
    ((ended, _),) = next_exits(process_group)
    assert ended is child
    assert [pid for pid in pids if is_alive(pid)] == []
    assert neighbour is None or is_alive(neighbour.pid)


# --- close ----------------------------------------------------------------------------------


@METHODS
def test_close_kills_whoever_does_not_leave_and_says_who(
    process_group: ProcessGroup, method: str
) -> None:
    stubborn = start_up(process_group, "ignore_terminate", method)
    polite = start(process_group, "exit_as_told", method)
    os.kill(stubborn.pid, signal.SIGTERM)
    tell_to_exit(polite, 0)
    assert select.select([process_group], [], [], PATIENCE)[0], "the polite child's end"
    assert process_group.close(0.5) == [stubborn]
    assert not is_alive(stubborn.pid)
    assert polite.exit_status == ExitStatus(code=0)
    assert stubborn.exit_status == ExitStatus(signal=signal.SIGKILL)


def test_a_close_that_waits_for_long_says_for_whom_and_until_when(
    process_group: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    child = start_up(process_group, "wait_for_the_driver")
    assert process_group.close(2.5) == [child]
    (record,) = [one for one in caplog.records if "waiting" in one.message]
    assert record.levelname == "WARNING"
    assert "killed in 0.5 s" in record.message
    assert f"{child.name} (pid {child.pid})" in record.message


def test_close_twice_is_close_once(process_group: ProcessGroup) -> None:
    start_up(process_group, "wait_for_the_driver")
    assert len(process_group.close(0.0)) == 1
    assert process_group.close(0.0) == []
    for use in (
        process_group.exits,
        process_group.fileno,
        lambda: start(process_group, "raise_error"),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_process_group_may_be_closed_in_another_thread(process_group: ProcessGroup) -> None:
    child = start_up(process_group, "wait_for_the_driver")
    killed: list[Child] = []
    thread = threading.Thread(target=lambda: killed.extend(process_group.close(0.0)))
    thread.start()
    thread.join(PATIENCE)
    assert killed == [child]
    assert not is_alive(child.pid)


def test_a_process_group_that_is_dropped_takes_its_children_along(tmp_path: Path) -> None:
    directory = tmp_path / "bus"
    directory.mkdir()
    process_group = ProcessGroup(preload=("numpy",), directory=directory)
    children = [start_up(process_group, "hold_the_interpreter_lock") for _ in range(2)]
    pids = [child.pid for child in children]
    del process_group, children
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)), "the children's ends")
    wait_until(lambda: not directory.exists(), "the directory's removal")


def test_dropping_one_process_group_leaves_the_others_alone(process_group: ProcessGroup) -> None:
    child = start_up(process_group, "wait_for_the_driver")
    with ProcessGroup(preload=("numpy",)) as other:
        (killed,) = [start_up(other, "wait_for_the_driver")]
        assert other.close(0.0) == [killed]
    assert is_alive(child.pid)


def test_a_process_group_makes_its_directory_for_this_user_only(tmp_path: Path) -> None:
    directory = tmp_path / "bus"
    with ProcessGroup(preload=("numpy",), directory=directory):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_the_directory_goes_with_the_process_group(tmp_path: Path) -> None:
    directory = tmp_path / "bus"
    directory.mkdir(mode=0o700)
    (directory / "socket").touch()
    with ProcessGroup(preload=("numpy",), directory=directory) as process_group:
        start_up(process_group, "wait_for_the_driver")
        assert directory.exists()
        process_group.close(0.0)
    assert not directory.exists()


# --- the server's death ---------------------------------------------------------------------


def test_a_process_group_that_is_dropped_after_its_server_died_leaves_no_directory(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "bus"
    process_group = ProcessGroup(preload=("numpy",), directory=directory)
    child = start_up(process_group, "wait_for_the_driver")
    server = server_of(child)
    server.kill()
    server.wait(PATIENCE)
    del process_group, child
    gc.collect()
    assert not directory.exists()


def server_of(child: Child) -> psutil.Process:
    parent = psutil.Process(child.pid).parent()
    assert parent is not None
    return parent


@pytest.mark.slow_but_first
@METHODS
def test_when_the_server_is_killed_its_children_are_and_a_new_one_starts(
    process_group: ProcessGroup, method: str
) -> None:
    child = start(process_group, "start_family", method)
    child.pipe.send_bytes(1, b"wait")
    family = [child.pid, *json.loads(child.pipe.receive_bytes(1, PATIENCE))]
    watched = process_group.fileno()
    server_of(child).kill()
    ((ended, status),) = next_exits(process_group)
    assert ended is child
    assert status.signal == signal.SIGKILL
    assert "fork server" in status.describe()
    assert [pid for pid in family if is_alive(pid)] == []
    assert not select.select([process_group], [], [], 0.0)[0]
    successor = start_up(process_group, "wait_for_the_driver", method)
    assert process_group.fileno() == watched
    os.kill(successor.pid, signal.SIGKILL)
    assert next_exits(process_group) == [(successor, ExitStatus(signal=signal.SIGKILL))]


def test_without_a_descriptor_for_a_new_server_ends_are_told_when_there_is_one(
    process_group: ProcessGroup,
) -> None:
    child = start_up(process_group, "wait_for_the_driver")
    server_of(child).kill()
    assert select.select([process_group], [], [], PATIENCE)[0]
    with no_more_files(), pytest.raises(StartError, match="ulimit -n"):
        process_group.exits()
    ((ended, status),) = process_group.exits()
    assert ended is child
    assert "fork server" in status.describe()
    start_up(process_group, "wait_for_the_driver")


def test_an_end_is_told_again_where_the_servers_cannot_be_or_who_takes_it_fails(
    process_group: ProcessGroup,
) -> None:
    first, second = (start_up(process_group, "wait_for_the_driver") for _ in range(2))
    server = server_of(second)
    os.kill(first.pid, signal.SIGKILL)
    assert select.select([process_group], [], [], PATIENCE)[0]
    server.kill()
    wait_until(lambda: not is_alive(server.pid), "the server's end")
    with no_more_files(), pytest.raises(StartError, match="ulimit -n"):
        process_group.exits()
    assert next(process_group.exits())[0] is first  # whose taker fails
    assert process_group.wake_at() == 0.0
    assert [child for child, _ in process_group.exits()] == [first, second]
    assert process_group.wake_at() is None
    assert list(process_group.exits()) == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_server_that_died_importing_is_not_waited_for_though_its_sockets_are_held(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hangs_once_{when}"
    (tmp_path / f"{name}.py").write_text(
        "import os, pathlib, time\n"
        "if not (begun := pathlib.Path(__file__).with_suffix('.begun')).exists():\n"
        "    if (pid := os.fork()):\n"
        "        begun.with_suffix('.pid').write_text(str(pid))\n"
        "        begun.touch()\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = psutil.Process().children()
    with ProcessGroup((name,)) as process_group:
        wait_until((tmp_path / f"{name}.begun").exists, "the import")
        holder = int((tmp_path / f"{name}.pid").read_text())
        (server,) = set(psutil.Process().children()) - set(before)

        def kill() -> None:
            if when == "while":
                wait_until(lambda: waits_in("_wait_for_imports"), "the start")
            server.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        if when == "before":
            wait_until(lambda: not is_alive(server.pid), "the server's end")
        process_group.start("late", "group_children:wait_for_the_driver", timeout=PATIENCE)
        killer.join()
        assert not is_alive(holder)
        process_group.close(0.0)


def waits_in(function: str) -> bool:
    """Return whether the main thread is in a function."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(entry.name == function for entry in traceback.extract_stack(frame))


def test_a_stopped_watchdog_ends_with_the_server_that_it_watches_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = psutil.Process().children()
    with ProcessGroup(("long_import",)):
        (server,) = set(psutil.Process().children()) - set(before)
        wait_until(lambda: bool(server.children()), "the watchdog")
        (watchdog,) = server.children()
        # Only a process that looks out sleeps: before, its parent's end would not end it.
        wait_until(lambda: watchdog.status() == psutil.STATUS_SLEEPING, "that it looks out")
        watchdog.suspend()
        server.kill()
        wait_until(lambda: not is_alive(watchdog.pid), "the watchdog's end")


@pytest.mark.slow
def test_all_ends_are_told_also_of_more_last_words_than_a_new_servers_socket_holds(
    process_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [start_up(process_group, "exit_with_many_words") for _ in range(4)]
    server, events = server_of(children[0]), process_group._connections.events._sock
    for child in children[1:]:
        tell_to_exit(child, 0)
    assert select.select([process_group], [], [], PATIENCE)[0]
    wait_until(lambda: len(events.recv(1 << 20, socket.MSG_PEEK)) > 3 * 16_000, "their last words")
    pairs = process_group_module._socket_pairs()
    for end in pairs[1]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    monkeypatch.setattr(process_group_module, "_socket_pairs", lambda: pairs)
    server.kill()
    wait_until(lambda: not is_alive(server.pid), "the server's end")
    start_up(process_group, "wait_for_the_driver")
    assert {child for child, _ in process_group.exits()} == set(children)


def test_an_end_is_not_lost_where_there_is_no_memory_to_note_it(
    process_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(tail: bytes) -> str:
        if not failed:
            failed.append(tail)
            raise MemoryError
        return ""

    failed: list[bytes] = []
    child = start_up(process_group, "wait_for_the_driver")
    monkeypatch.setattr(process_group_module, "last_words", note)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(MemoryError):
        next_exits(process_group)
    assert process_group.wake_at() == 0.0
    assert list(process_group.exits()) == [(child, ExitStatus(signal=signal.SIGKILL))]


def test_an_epoll_sees_ends_also_after_the_server_was_replaced(process_group: ProcessGroup) -> None:
    with select.epoll() as poller:
        poller.register(process_group.fileno(), select.EPOLLIN)
        child = start_up(process_group, "wait_for_the_driver")
        server_of(child).kill()
        assert poller.poll(PATIENCE)
        next_exits(process_group)
        successor = start_up(process_group, "wait_for_the_driver")
        assert not poller.poll(0.0)
        os.kill(successor.pid, signal.SIGKILL)
        assert poller.poll(PATIENCE)
        assert next_exits(process_group) == [(successor, ExitStatus(signal=signal.SIGKILL))]


def test_a_start_after_the_servers_death_does_not_swallow_the_ends_of_others(
    process_group: ProcessGroup,
) -> None:
    lost = start_up(process_group, "wait_for_the_driver")
    server = server_of(lost)
    server.kill()
    wait_until(lambda: not is_alive(server.pid), "the server's end")
    fresh = start_up(process_group, "wait_for_the_driver")
    ((ended, status),) = next_exits(process_group)
    assert (ended, status.signal) == (lost, signal.SIGKILL)
    assert process_group.children == (fresh,)


def test_a_server_that_is_stopped_does_not_keep_close_from_ending(
    process_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbus.bus.process.process_group._KILL_TIMEOUT", 0.2)
    child = start(process_group, "start_family")
    child.pipe.send_bytes(1, b"hold")
    family = [child.pid, *json.loads(child.pipe.receive_bytes(1, PATIENCE))]
    server = server_of(child)
    with ProcessGroup(preload=("numpy",)) as neighbours:
        neighbour = start_up(neighbours, "wait_for_the_driver")
        assert server_of(neighbour) == server
        server.suspend()
        assert process_group.close(0.0) == [child]
        assert child.exit_status == ExitStatus(signal=signal.SIGKILL)
        assert [pid for pid in family if is_alive(pid)] == []
        with ProcessGroup(preload=("numpy",)) as later:
            newcomer = start_up(later, "wait_for_the_driver")
            assert later.close(0.0) == [newcomer]
        server.resume()
        assert is_alive(neighbour.pid)
        assert neighbours.close(0.0) == [neighbour]


def test_a_close_that_ctrl_c_breaks_off_leaves_nobody_to_a_server_that_is_stopped(
    process_group: ProcessGroup,
) -> None:
    child = start_up(process_group, "wait_for_the_driver")
    os.kill(child.pid, signal.SIGSTOP)  # it does not see that its pipe hangs up
    server = server_of(child)
    server.suspend()

    def interrupt() -> None:
        wait_until(lambda: waits_in("_wait_for_ends"), "the wait")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        process_group.close(PATIENCE)
    thread.join()
    wait_until(lambda: not is_alive(child.pid), "the child's end")
    assert server.status() == psutil.STATUS_STOPPED
    server.resume()


@pytest.fixture
def stopped_server(
    process_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Child, psutil.Process]]:
    child = start_up(process_group, "wait_for_the_driver")
    server = server_of(child)
    monkeypatch.setattr("envbus.bus.process.process_group._ANSWER_TIMEOUT", 0.2)
    server.suspend()
    yield child, server
    with contextlib.suppress(psutil.NoSuchProcess):
        server.kill()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("by_the_process_group", [True, False])
def test_a_server_that_is_stopped_is_replaced_when_the_end_of_a_child_is_awaited(
    process_group: ProcessGroup,
    stopped_server: tuple[Child, psutil.Process],
    by_the_process_group: bool,
) -> None:
    child, server = stopped_server
    if by_the_process_group:
        process_group.kill(child)
    else:
        os.kill(child.pid, signal.SIGKILL)
        assert select.select([child.pipe], [], [], PATIENCE)[0]
    exits = list(process_group.exits())
    while not exits:
        wake_at = process_group.wake_at()
        assert wake_at is not None
        select.select([process_group], [], [], max(wake_at - time.monotonic(), 0.0))
        exits = list(process_group.exits())
    ((ended, status),) = exits
    assert (ended, status.signal) == (child, signal.SIGKILL)
    assert "does not answer" in status.describe()
    assert not is_alive(server.pid)
    start_up(process_group, "wait_for_the_driver")
    assert process_group.wake_at() is None


def test_a_server_that_is_stopped_is_replaced_when_a_child_is_to_be_started(
    process_group: ProcessGroup, stopped_server: tuple[Child, psutil.Process]
) -> None:
    child, server = stopped_server
    fresh = start_up(process_group, "wait_for_the_driver")
    ((ended, status),) = next_exits(process_group)
    assert (ended, status.signal) == (child, signal.SIGKILL)
    assert not is_alive(server.pid)
    assert process_group.children == (fresh,)


STOPS_AT_ITS_SECOND_IMPORT = """
import os, signal
import psutil

count_file = os.path.splitext(__file__)[0] + ".count"
with open(count_file, "a") as file:
    file.write(".")
if os.path.getsize(count_file) == 2:
    os.kill({pid}, signal.SIGSTOP)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "pid"),
    [("server", "os.getpid()"), ("watchdog", "psutil.Process().children()[0].pid")],
)
def test_a_server_that_is_stopped_while_it_imports_in_place_of_another_is_replaced(
    stopped: str, pid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"stops_{stopped}_at_import"
    (tmp_path / f"{module}.py").write_text(STOPS_AT_ITS_SECOND_IMPORT.format(pid=pid))
    monkeypatch.setattr("envbus.bus.process.process_group._ANSWER_TIMEOUT", 0.2)
    with ProcessGroup(preload=(module,)) as process_group:
        lost = start_up(process_group, "wait_for_the_driver")
        server = server_of(lost)
        server.kill()
        wait_until(lambda: not is_alive(server.pid), "the server's end")
        fresh = start_up(process_group, "wait_for_the_driver")
        ((ended, status),) = next_exits(process_group)
        assert (ended, status.signal) == (lost, signal.SIGKILL)
        assert process_group.children == (fresh,)
        process_group.close(0.0)


# --- leaks ----------------------------------------------------------------------------------


@pytest.mark.slow
@METHODS
def test_fifty_process_groups_leave_no_descriptor_process_or_thread(method: str) -> None:
    def cycle(round_number: int) -> None:
        with ProcessGroup(preload=("numpy",)) as process_group:
            child = start(process_group, "exit_as_told", method)
            tell_to_exit(child, 0)
            if round_number % 5 == 0:
                process_group.kill(child)

    cycle(0)
    this = psutil.Process()

    def held() -> tuple[int, int, int]:
        return this.num_fds(), this.num_threads(), len(this.children(recursive=True))

    before = held()
    for round_number in range(50):
        cycle(round_number)
    wait_until(
        # What earlier tests have left may go meanwhile.
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
        f"the state before: {before}",
    )


def test_a_start_while_the_interpreter_ends_is_refused() -> None:
    process_group = ProcessGroup()
    start(process_group, "exit_as_told")
    process_group._finalizer()  # in the main thread, while another one starts a child
    with pytest.raises(StartError, match=r"child could not be started: .*Bad file descriptor"):
        process_group._start_by(time.monotonic() + PATIENCE, "child", "tests:none", "fork")


def test_a_garbage_collection_may_bury_a_server_whose_lock_is_held() -> None:
    with ProcessGroup() as process_group:
        server = process_group._server
        assert server is not None

        def collect() -> None:
            with server._lock:  # as where a group that nobody has any more is collected
                server.bury()

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        collecting.join(PATIENCE)
        assert not collecting.is_alive()
        assert not server.is_alive()
