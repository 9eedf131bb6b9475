"""Process groups in every kind of program that people write; each is a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.group_children import Driver, traced, wait_until

pytestmark = pytest.mark.timeout(180)

#: No main guard, and nothing closed.
USE = """
from envbus.bus.process.process_group import ProcessGroup

def use(method):
    process_group = ProcessGroup(preload=("numpy",))
    child = process_group.start("child", "group_children:wait_for_the_driver", method=method)
    assert child.pipe.receive_bytes(1, 60.0) == b"up"
    return process_group, child

def use_and_close(method):
    process_group, child = use(method)
    assert process_group.close(0.0) == [child]
    assert child.exit_status.describe() == "signal SIGKILL"
"""

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])


def run(source: str, tmp_path: Path, *options: str, stdin: bool = False) -> tuple[int, str, str]:
    """Run a program to its end, after which nothing of it may be left."""
    with Driver(USE + source, tmp_path, *options, stdin=stdin) as driver:
        outcome = driver.finish()
    # Nothing at all if it ended in order; a server that was hung up on needs a moment.
    wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    return outcome


@pytest.mark.slow
@METHODS
def test_a_script_without_main_guard(method: str, tmp_path: Path) -> None:
    assert run(f"use_and_close({method!r})", tmp_path) == (0, "", "")


@pytest.mark.slow
@METHODS
def test_a_script_on_standard_input(method: str, tmp_path: Path) -> None:
    assert run(f"use_and_close({method!r})", tmp_path, stdin=True) == (0, "", "")


@pytest.mark.slow
@METHODS
def test_a_script_that_closes_nothing_leaves_nothing(method: str, tmp_path: Path) -> None:
    assert run(f"kept = use({method!r})", tmp_path) == (0, "", "")


@pytest.mark.slow
def test_no_process_is_left_when_the_interpreter_has_ended_in_order(tmp_path: Path) -> None:
    with Driver(USE + "kept = use('fork')", tmp_path) as driver:
        assert driver.finish() == (0, "", "")
        assert traced(driver.trace) == []


@pytest.mark.slow
def test_an_uncaught_exception_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    code, _, err = run("kept = use('fork')\nraise RuntimeError('uncaught')", tmp_path)
    assert code == 1
    assert err.splitlines()[-1] == "RuntimeError: uncaught"
    assert err.count("Traceback") == 1


@pytest.mark.slow
@METHODS
def test_a_daemon_thread(method: str, tmp_path: Path) -> None:
    source = f"""
import threading
thread = threading.Thread(target=use_and_close, args=({method!r},), daemon=True)
thread.start()
thread.join()
threading.Thread(target=lambda: (use({method!r}), ready.set(), forever.wait()), daemon=True)
ready, forever = threading.Event(), threading.Event()
"""
    assert run(source, tmp_path) == (0, "", "")


@pytest.mark.slow
def test_a_daemon_thread_that_the_interpreter_ends_under(tmp_path: Path) -> None:
    source = """
import threading
ready, forever = threading.Event(), threading.Event()
def work():
    kept = use("fork")
    ready.set()
    forever.wait()
threading.Thread(target=work, daemon=True).start()
ready.wait()
"""
    assert run(source, tmp_path) == (0, "", "")


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_daemonic_multiprocessing_process(method: str, context: str, tmp_path: Path) -> None:
    source = f"""
import multiprocessing
if __name__ == "__main__":
    context = multiprocessing.get_context({context!r})
    process = context.Process(target=use_and_close, args=({method!r},), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    assert run(source, tmp_path) == (0, "", "")


@pytest.mark.slow
@METHODS
def test_a_driver_that_forks_itself(method: str, tmp_path: Path) -> None:
    source = f"""
import os, sys
process_group, child = use({method!r})
if not (pid := os.fork()):
    try:
        process_group.exits()
    except Exception as error:
        print(type(error).__name__, flush=True)
    assert process_group.close(0.0) == []
    use_and_close({method!r})
    kept = use({method!r})
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert list(process_group.exits()) == []
child.pipe.send_bytes(1, b"go")
import select
select.select([process_group], [], [], 60.0)
((_, status),) = process_group.exits()
print(status.describe())
process_group.close()
"""
    assert run(source, tmp_path) == (0, "ClosedError\nexit code 0\n", "")


@pytest.mark.slow
@METHODS
def test_a_forked_copy_of_a_forked_driver_leaves_its_children_alone(
    method: str, tmp_path: Path
) -> None:
    source = f"""
import os, sys
use_and_close({method!r})
if not (pid := os.fork()):
    process_group, child = use({method!r})
    for starts in (False, True):
        if not (copy := os.fork()):
            if starts:
                use_and_close({method!r})
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 3
    assert list(process_group.exits()) == []
    child.pipe.send_bytes(1, b"go")
    import select
    select.select([process_group], [], [], 60.0)
    ((_, status),) = process_group.exits()
    print(status.describe(), flush=True)
    process_group.close()
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
"""
    assert run(source, tmp_path) == (0, "exit code 0\n", "")


@pytest.mark.slow
def test_a_forked_copy_of_the_driver_does_not_keep_its_children_alive(tmp_path: Path) -> None:
    source = """
import os, time
process_group, child = use("fork")
if not (pid := os.fork()):
    time.sleep(600)
process_group.close(0.0)
kept = use("fork")
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""
    with Driver(USE + source, tmp_path) as driver:
        copy = driver.read()
        driver.process.wait()
        wait_until(
            lambda: [process.pid for process in traced(driver.trace)] == [copy],
            "the end of all but the copy",
        )
        (process,) = traced(driver.trace)
        process.kill()


@pytest.mark.slow
def test_interpreter_options_are_passed_on(tmp_path: Path) -> None:
    source = """
import json
process_group = ProcessGroup()
for method in ("fork", "spawn"):
    child = process_group.start("child", "group_children:tell_about_itself", method=method)
    facts = json.loads(child.pipe.receive_bytes(1, 60.0))
    print(json.dumps([facts["warnings"], "dev" in facts["xoptions"], facts["optimize"]]))
process_group.close()
"""
    options = ["-O", "-X", "dev", "-W", "ignore::UserWarning"]
    with Driver(USE + source, tmp_path, *options) as driver:
        for _ in ("fork", "spawn"):
            warnings, dev, optimize = driver.read()
            assert "error" in warnings
            assert "ignore::UserWarning" in warnings
            assert dev
            assert optimize == 1
        assert driver.finish()[0] == 0


@pytest.mark.slow
def test_a_program_whose_standard_streams_are_closed(tmp_path: Path) -> None:
    source = """
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
sys.stdin = sys.stdout = sys.stderr = None
process_group = ProcessGroup()
children = [process_group.start("child", "group_children:tell_about_itself") for _ in range(3)]
for child in children:
    child.pipe.receive_bytes(1, 60.0)
process_group.close()
"""
    assert run(source, tmp_path)[0] == 0


@pytest.mark.slow
def test_a_program_whose_working_directory_is_gone(tmp_path: Path) -> None:
    source = """
import os, tempfile
with tempfile.TemporaryDirectory() as directory:
    os.chdir(directory)
use_and_close("fork")
"""
    assert run(source, tmp_path) == (0, "", "")


@pytest.mark.slow
def test_a_program_that_blocks_and_ignores_signals(tmp_path: Path) -> None:
    source = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
use_and_close("fork")
use_and_close("spawn")
"""
    assert run(source, tmp_path) == (0, "", "")


def test_a_program_with_a_module_named_like_one_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    assert run("use_and_close('fork')", tmp_path, "-I" if sys.version_info < (3, 11) else "-P")


def test_a_python_process_that_replaces_itself(tmp_path: Path) -> None:
    source = """
import os, sys
kept = use("fork")
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-c", "print('replaced')"])
"""
    assert run(source, tmp_path) == (0, "replaced\n", "")
