"""Kill drivers and servers in the worst moments: nothing that they started may stay."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.group_children import PATIENCE, Driver, is_alive, traced, wait_until

pytestmark = pytest.mark.timeout(180)

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
# In slices: a signal that comes just before a sleep is looked at behind it.
SLEEP = "while True: time.sleep(0.1)"

DRIVER = """
import json, os, sys, time
from envbus.bus.process.process_group import ProcessGroup

directory = os.path.join(os.getcwd(), "bus")
os.mkdir(directory)
open(os.path.join(directory, "socket"), "w").close()
process_group = ProcessGroup(preload=("numpy",), directory=directory)
pids = []
for _ in range(3):
    child = process_group.start("child", "group_children:{entry}", method="{method}")
    assert child.pipe.receive_bytes(1, 60.0) == b"up"
    pids.append(child.pid)
for what_then in {family}:
    child = process_group.start("family", "group_children:start_family", method="{method}")
    child.pipe.send_bytes(1, what_then)
    pids += [child.pid, *json.loads(child.pipe.receive_bytes(1, 60.0))]
{apart}
print(json.dumps(pids), flush=True)
{then}
"""


def start(
    tmp_path: Path,
    entry: str,
    method: str,
    then: str = SLEEP,
    family: tuple[bytes, ...] = (b"hold hide", b"wait hide"),
    apart: str = "",
    *,
    leads_session: bool = False,
) -> Driver:
    source = DRIVER.format(entry=entry, method=method, then=then, family=family, apart=apart)
    return Driver(source, tmp_path, leads_session=leads_session)


def wait_until_stopped(pid: int) -> None:
    process = psutil.Process(pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop of the server")


def wait_until_nothing_is_left(driver: Driver, pids: list[int], tmp_path: Path) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"the ends of {pids}")
    wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    wait_until(lambda: not (tmp_path / "bus").exists(), "the directory's removal")


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize(
    ("entry", "then", "signum"),
    [
        ("hold_the_interpreter_lock", SLEEP, signal.SIGKILL),
        ("wait_for_the_driver", SLEEP, signal.SIGKILL),
        ("wait_for_the_driver", "import ctypes; ctypes.PyDLL(None).sleep(600)", signal.SIGKILL),
        ("hold_the_interpreter_lock", SLEEP, signal.SIGTERM),
        ("hold_the_interpreter_lock", "os._exit(0)", None),
    ],
    ids=["killed", "killed as its children wait", "killed in a C call", "terminated", "exits hard"],
)
def test_a_driver_that_ends_leaves_nothing(
    entry: str, then: str, signum: signal.Signals | None, method: str, tmp_path: Path
) -> None:
    with start(tmp_path, entry, method, then) as driver:
        pids = driver.read()
        if signum is not None:
            assert all(map(is_alive, pids))
            driver.process.send_signal(signum)
        wait_until_nothing_is_left(driver, pids, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@METHODS
def test_a_killed_server_takes_its_children_along(
    signum: signal.Signals, method: str, tmp_path: Path
) -> None:
    then = """
import select
select.select([process_group], [], [], 60.0)
print(json.dumps([status.describe() for _, status in process_group.exits()]), flush=True)
child = process_group.start("child", "group_children:wait_for_the_driver")
assert child.pipe.receive_bytes(1, 60.0) == b"up"
process_group.close(0.0)
"""
    # Without the server's own doing, processes that hide their origin cannot be found.
    family = (b"hold", b"wait") if signum == signal.SIGKILL else (b"hold hide", b"wait hide")
    with start(tmp_path, "hold_the_interpreter_lock", method, then, family) as driver:
        pids = driver.read()
        server = psutil.Process(pids[0]).ppid()
        os.kill(server, signum)
        ended = driver.read()
        assert ended
        assert all("SIGKILL" in status for status in ended)
        assert driver.finish()[0] == 0
        wait_until(lambda: not any(map(is_alive, pids)), f"the ends of {pids}")
        wait_until_nothing_is_left(driver, pids, tmp_path)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.parametrize("hold", [False, True], ids=["sleeping", "holding the interpreter lock"])
def test_a_server_that_imports_for_ever_does_not_outlive_its_driver(
    end: signal.Signals, hold: bool, tmp_path: Path
) -> None:
    library = "ctypes.PyDLL(None)" if hold else "ctypes.CDLL(None)"
    (tmp_path / "endless_import.py").write_text(
        "import ctypes, subprocess\n"
        "kept = subprocess.Popen(['sleep', '600'])\n"
        "open('importing', 'w').close()\n"
        f"{library}.sleep(600)\n"
    )
    source = """
import json, os, time
from envbus.bus.process.process_group import ProcessGroup

os.mkdir("bus")
open(os.path.join("bus", "socket"), "w").close()
process_group = ProcessGroup(preload=("endless_import",), directory="bus")
print(json.dumps(process_group._server.pid), flush=True)
"""
    with Driver(source + SLEEP, tmp_path) as driver:
        server = driver.read()
        wait_until((tmp_path / "importing").exists, "the import")
        driver.process.send_signal(end)
        wait_until_nothing_is_left(driver, [server], tmp_path)
        _, _, err = driver.finish()
        assert err.count("Traceback") == (end == signal.SIGINT)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1])
def test_a_driver_that_is_killed_while_its_server_starts_leaves_nothing(
    delay: float, tmp_path: Path
) -> None:
    source = f"""
import os, signal, time
from envbus.bus.process.process_group import ProcessGroup

os.mkdir("bus")
process_group = ProcessGroup(directory="bus")
time.sleep({delay})
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Driver(source, tmp_path) as driver:
        driver.process.wait(PATIENCE)
        wait_until_nothing_is_left(driver, [], tmp_path)


#: Else Linux continues a stopped server whose driver dies.
APART = "os.setsid()"


@pytest.mark.slow
def test_driver_and_server_killed_at_once_leave_no_children(tmp_path: Path) -> None:
    with start(tmp_path, "hold_the_interpreter_lock", "fork", family=(), apart=APART) as driver:
        pids = driver.read()
        server = psutil.Process(pids[0]).ppid()
        os.kill(server, signal.SIGSTOP)  # it cannot do a thing when the driver dies
        driver.kill()
        driver.process.wait()
        wait_until_stopped(server)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)), f"the ends of {pids}")
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")


@pytest.mark.slow
def test_the_folder_of_a_bridge_goes_with_its_driver_also_after_its_fork_server_was_killed(
    tmp_path: Path,
) -> None:
    source = """
import json, os, time
import psutil
from envbus.bus.gateway import GatewayConfig
from envbus.runner.bridge.bridge import ExternalEnvBridge

gateway = GatewayConfig(tcp=("127.0.0.1:0",))
with ExternalEnvBridge(bind="ipc://bridge", gateway=gateway) as bridge:
    (first,) = psutil.Process().children()
    first.kill()
    first.wait()
    private = bridge._private
    deadline = time.monotonic() + 60.0
    while not private._keeper._server or not private._keeper._server.is_alive():
        assert time.monotonic() < deadline
        bridge.poll(timeout=0.1)
    print(json.dumps(os.path.dirname(private._endpoint.removeprefix("ipc://"))), flush=True)
    time.sleep(600)
"""
    with Driver(source, tmp_path) as driver:
        folder = Path(driver.read())
        assert folder.is_dir()
        driver.kill()
        wait_until(lambda: not folder.exists(), "the folder's removal")


@pytest.mark.slow
def test_children_of_a_stopped_server_see_their_driver_die(tmp_path: Path) -> None:
    with start(tmp_path, "wait_for_the_driver", "fork", apart=APART) as driver:
        pids = driver.read()
        server = psutil.Process(pids[0]).parent()
        assert server is not None
        server.suspend()
        driver.kill()
        driver.process.wait()
        wait_until(lambda: not any(map(is_alive, pids[:3])), f"the ends of {pids[:3]}")
        wait_until_stopped(server.pid)
        server.resume()
        wait_until_nothing_is_left(driver, pids, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the server has a session of its own")
@pytest.mark.skipif(sys.platform != "linux", reason="others may not continue it")
def test_a_stopped_server_is_continued_when_its_driver_dies_and_ends_in_order(
    tmp_path: Path,
) -> None:
    with start(tmp_path, "wait_for_the_driver", "fork", leads_session=True) as driver:
        pids = driver.read()
        server = psutil.Process(pids[0]).ppid()
        os.kill(server, signal.SIGSTOP)
        wait_until_stopped(server)
        driver.kill()
        wait_until_nothing_is_left(driver, pids, tmp_path)


def test_ctrl_c_reaches_the_driver_only(tmp_path: Path) -> None:
    with start(tmp_path, "wait_for_the_driver", "fork") as driver:
        pids = driver.read()
        driver.process.send_signal(signal.SIGINT)
        _, _, err = driver.finish()
        assert err.count("KeyboardInterrupt") == 1
        assert err.count("Traceback") == 1
        wait_until_nothing_is_left(driver, pids, tmp_path)
