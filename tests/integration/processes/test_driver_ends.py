"""How programs with vector envs and pools end: nothing stays, and little is said about it."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.integration.group_children import PATIENCE, Driver, is_alive, traced, wait_until

pytestmark = pytest.mark.timeout(180)

CONTEXTS = pytest.mark.parametrize("context", ["fork", "spawn"])

#: Envs whose simulator, a process of its own, left the session and ignores SIGTERM.
PROGRAM = """
import contextlib, ctypes, gc, json, os, signal, subprocess, sys, threading
import numpy as np
from envbus.actors.testing import CountingEnv
from tests.envs import HangingEnv
from envbus.runner import ActorPool, BusVectorEnv

class SimulatorEnv(CountingEnv):
    def __init__(self, hangs=False):
        super().__init__(10**6)
        self.hangs = hangs
        command = "trap '' TERM INT; echo up; exec sleep 600"
        self.simulator = subprocess.Popen(
            ["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE
        )
        assert self.simulator.stdout.readline() == b"up\\n"
    def step(self, action):
        if self.hangs:
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
        return super().step(action)
    def close(self):
        self.simulator.kill()
        self.simulator.communicate()

def make(kind=BusVectorEnv, env=SimulatorEnv, context="fork", **settings):
    envs = kind([env] * 3, num_actors=3, context=context, **settings)
    if kind is BusVectorEnv:
        envs.reset(seed=0)
    return envs

def tell(value):
    print(json.dumps(value), flush=True)
"""


@pytest.fixture
def temporary(short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = short_tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def start(source: str, tmp_path: Path, *options: str) -> Driver:
    return Driver(PROGRAM + textwrap.dedent(source), tmp_path, *options)


def named_shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "envbus" in name]  # noqa: S108


# --- killed ---------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@CONTEXTS
@pytest.mark.parametrize("state", ["idle", "in a C call", "stopped"])
def test_nothing_outlives_a_killed_driver(
    context: str, state: str, tmp_path: Path, temporary: Path
) -> None:
    source = f"""
    envs = make(env=lambda: SimulatorEnv(hangs={state == "in a C call"}), context={context!r})
    if {state != "idle"}:
        envs.step_async(np.zeros(3))
    tell(envs.actor_pids())
    signal.pause()
    """
    with start(source, tmp_path) as driver:
        pids = driver.read()
        if state == "stopped":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        assert list(temporary.iterdir())
        driver.kill()
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    wait_until(lambda: not list(temporary.iterdir()), "its folder to be removed")
    assert named_shared_memory() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "ActorPool([CountingEnv])",
        "PolicyWorkers(RandomPolicy(Discrete(2)), 1)",
        "ExternalEnvBridge(bind='ipc://bridge', gateway=GatewayConfig(tcp=('127.0.0.1:0',)))",
    ],
)
def test_a_driver_that_is_killed_when_its_folder_is_just_made_leaves_none(
    what: str, tmp_path: Path, temporary: Path
) -> None:
    source = f"""
    from gymnasium.spaces import Discrete
    from envbus.bus.gateway import GatewayConfig
    from envbus.runner import ExternalEnvBridge, PolicyWorkers
    from envbus.runner.policies import RandomPolicy

    make_directory = os.mkdir
    def make_it_and_die(path, *args):
        make_directory(path, *args)
        if os.path.basename(path).startswith("envbus-"):
            os.stat(path)
            os.kill(os.getpid(), signal.SIGKILL)
    os.mkdir = make_it_and_die
    {what}
    """
    with start(source, tmp_path) as driver:
        assert driver.finish() == (-signal.SIGKILL, "", "")
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_terminated_driver_says_nothing_and_leaves_nothing(
    tmp_path: Path, temporary: Path
) -> None:
    source = """
    envs = make()
    tell(envs.actor_pids())
    envs.step_async(np.zeros(3))
    signal.pause()
    """
    with start(source, tmp_path) as driver:
        driver.read()
        driver.process.terminate()
        assert driver.finish() == (-signal.SIGTERM, "", "")
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    wait_until(lambda: not list(temporary.iterdir()), "its folder to be removed")


# --- Ctrl-C ---------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@CONTEXTS
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_is_the_drivers_only_and_told_once(
    context: str, times: int, temporary: Path
) -> None:
    """Pressed again, it comes in the middle of the end that the first one has begun."""
    source = f"""
    from envbus.bus.process.process_group import ProcessGroup
    from envbus.bus.process.server_process import ServerProcess
    def press_again(function):
        def pressed(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            return function(*args, **kwargs)
        return pressed
    if {times} == 2:
        ProcessGroup.close = press_again(ProcessGroup.close)
        ServerProcess.bury = press_again(ServerProcess.bury)

    envs = make(env=HangingEnv, context={context!r})
    envs.step_async(np.zeros(3))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        tell(envs.actor_pids())
        envs.step_wait()
    except KeyboardInterrupt:
        tell("interrupted")
        sys.stdin.readline()
        raise
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        assert json.loads(process.stdout.readline()) == "interrupted"
        assert all(is_alive(pid) for pid in pids)
        _, errors = process.communicate("\n", timeout=PATIENCE)
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@CONTEXTS
def test_a_terminal_and_its_keys_are_the_drivers_alone(temporary: Path, context: str) -> None:
    source = f"""
    import fcntl, termios
    def terminal():
        try:
            os.close(os.open("/dev/tty", os.O_RDWR))
        except OSError as error:
            return error.errno
        return 0
    class TerminalEnv(CountingEnv):
        def step(self, action):
            return *super().step(action)[:4], {{"terminal": terminal()}}

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.default_int_handler)
    envs = make(env=TerminalEnv, context={context!r})
    def look():
        infos = envs.step(np.zeros(3))[4]
        tell([terminal(), infos["terminal"].tolist(), envs.actor_pids()])

    for _ in range(3):
        try:
            look()
            while True:  # a key just before a wait does not end it
                threading.Event().wait(0.02)
        except KeyboardInterrupt:
            pass
    """
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(source)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())]
        for key in (b"\x03", b"\x1c"):  # Ctrl-C, Ctrl-\
            os.write(keyboard, key)
            seen.append(json.loads(process.stdout.readline()))
        assert seen[0][:2] == [0, [errno.ENXIO] * 3]
        assert seen[1:] == seen[:1] * 2  # by the same processes
        os.write(keyboard, b"\x03")
        assert process.communicate(timeout=PATIENCE) == ("", "")
    finally:
        process.kill()
        process.communicate()
        os.close(keyboard)
        os.close(terminal)


@pytest.mark.slow
def test_ctrl_c_breaks_off_a_close_that_waits_and_all_are_killed(
    tmp_path: Path, temporary: Path
) -> None:
    source = """
    envs = make(env=lambda: HangingEnv("close"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        envs.close(timeout=600)
    except KeyboardInterrupt:
        tell("interrupted")
    envs.close()
    """
    with start(source, tmp_path) as driver:
        assert driver.finish() == (0, '"interrupted"\n', "")
        assert traced(driver.trace) == []
    assert list(temporary.iterdir()) == []


# --- orderly --------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("kind", "context"), [("BusVectorEnv", "fork"), ("ActorPool", "spawn")])
@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("pass", 0, ""),
        ("for _ in range(9): sys.exit(3)", 3, ""),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("del envs; gc.collect()", 0, ""),
        ("envs.itself = envs; del envs; gc.collect()", 0, ""),
    ],
)
def test_a_program_that_closes_nothing_leaves_nothing(
    context: str, kind: str, end: str, code: int, error: str, tmp_path: Path, temporary: Path
) -> None:
    source = f"""
    envs = make({kind}, context={context!r})
    {end}
    """
    with start(source, tmp_path, "-X", "dev") as driver:
        returned, out, err = driver.finish()
        assert (returned, out) == (code, "")
        assert (err.splitlines() or [""])[-1] == error
        assert err.count("Traceback") == bool(error)
        assert traced(driver.trace) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_hook_may_exit(tmp_path: Path) -> None:
    source = """
    import logging
    from envbus.runner.workers.config import Hooks
    logging.getLogger("envbus").setLevel(logging.CRITICAL)
    class DyingEnv(CountingEnv):
        def step(self, action):
            os._exit(7)
    hooks = Hooks(on_fault=lambda fault: sys.exit(3))
    envs = make(env=DyingEnv, restart=True, hooks=hooks)
    envs.step(np.zeros(3))
    """
    with start(source, tmp_path, "-X", "dev") as driver:
        assert driver.finish() == (3, "", "")
        assert traced(driver.trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("pending", [False, True])
def test_close_may_be_called_from_a_destructor(pending: bool, tmp_path: Path) -> None:
    source = f"""
    import warnings
    warnings.simplefilter("ignore", UserWarning)  # that a call is pending
    class Owner:
        def __init__(self):
            self.envs = make()
            if {pending}:
                self.envs.step_async(np.zeros(3))
        def __del__(self):
            self.envs.close()
            self.envs.close(terminate=True)
    owner = Owner()
    del owner
    owner = Owner()  # collected while the interpreter takes itself apart
    """
    with start(source, tmp_path, "-X", "dev") as driver:
        assert driver.finish() == (0, "", "")
        assert traced(driver.trace) == []


# --- forked copies --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_a_forked_copy_leaves_its_owners_envs_alone(
    pending: bool, closes: bool, tmp_path: Path
) -> None:
    source = f"""
    envs, pool = make(), make(ActorPool)
    if {pending}:
        envs.step_async(np.full(3, 7))
    if not (child := os.fork()):
        try:
            envs.step_wait() if {pending} else envs.step(np.zeros(3))
        except Exception as error:
            tell(type(error).__name__)
        if {closes}:
            envs.close()
            pool.close()
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    if not {pending}:
        envs.step_async(np.full(3, 7))
    observations, *_ = envs.step_wait()
    assert observations[:, 2].tolist() == [7, 7, 7], observations
    envs.close()
    pool.close()
    """
    with start(source, tmp_path, "-X", "dev") as driver:
        assert driver.finish() == (0, '"ClosedError"\n', "")
        assert traced(driver.trace) == []


FORGETFUL = """
import weakref

class Thing:
    pass

# As PyTorch does: finalizers of weakref run after what envbus registers with atexit, not before.
thing = Thing()
weakref.finalize(thing, int)

import gymnasium
from functools import partial
from envbus.runner import BusVectorEnv, PolicyWorkers
from envbus.runner.policies import MlpPolicy

envs = BusVectorEnv(["CartPole-v1"] * 2, num_actors=2)
envs.reset(seed=0)
make = partial(MlpPolicy, envs.single_observation_space, envs.single_action_space)
workers = PolicyWorkers(make, 1)
raise RuntimeError("of the user's own")
"""


@pytest.mark.slow
def test_below_the_error_of_a_program_that_closes_nothing_stands_nothing_of_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "RuntimeError: of the user's own"
    assert len(done.stderr.splitlines()) == 3


LONG_FOLDER = """
import gymnasium
from functools import partial
from envbus.runner import ActorPool, ExternalEnvBridge, PolicyWorkers
from envbus.runner.policies import MlpPolicy

with ActorPool(["CartPole-v1"], local_links=False) as pool:
    pool.reset(seed=0)
    seen = pool.recv().observations
    spaces = pool.single_observation_space, pool.single_action_space
    with PolicyWorkers(partial(MlpPolicy, *spaces), 1) as workers:
        workers.policy().compute_actions(seen, None)
"""


@pytest.mark.slow
def test_below_a_folder_for_temporary_files_with_a_long_name_all_starts(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name" * 10)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LONG_FOLDER],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
