"""Vector envs and pools in every kind of program, with every kind of factory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import StartError
from envbus.runner.pool.pool import ActorPool
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts
from tests.envs import FailingEnv, HangingEnv
from tests.integration.group_children import PATIENCE, Driver, traced, wait_until
from tests.runner.pool_envs import noted, still_alive

pytestmark = pytest.mark.timeout(180)

CONTEXTS = pytest.mark.parametrize("context", [None, "fork", "forkserver", "spawn"])

#: What all programs begin with: an env of their own, not in any module that a child can import.
USE = """
import gymnasium, numpy as np
from gymnasium import spaces
from envbus.runner import BusVectorEnv

class OwnEnv(gymnasium.Env):
    observation_space = spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = spaces.Discrete(2)
    def __init__(self, number=0):
        self.number = number
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.number, 0], np.float32), {}
    def step(self, action):
        return np.array([self.number, action], np.float32), 1.0, False, False, {}

def use(context=None, **settings):
    envs = BusVectorEnv(
        [lambda i=i: OwnEnv(i) for i in range(3)], context=context, num_actors=2, **settings
    )
    observations, _ = envs.reset(seed=0)
    assert observations[:, 0].tolist() == [0, 1, 2], observations
    for action in (0, 1):
        observations, *_ = envs.step(np.full(3, action))
        assert observations[:, 1].tolist() == [action] * 3, observations
    return envs
"""


def run(
    source: str, tmp_path: Path, *options: str, stdin: bool = False, prelude: str = USE
) -> tuple[int, str, str]:
    """Run a program to its end, after which nothing of it may be left."""
    text = prelude + textwrap.dedent(source)
    with Driver(text, tmp_path, "-X", "dev", *options, stdin=stdin) as driver:
        outcome = driver.finish()
    wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    return outcome


GOOD = (0, "", "")

# --- programs -------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@CONTEXTS
def test_a_script_without_main_guard(context: str | None, tmp_path: Path) -> None:
    assert run(f"use({context!r}).close()", tmp_path) == GOOD


@pytest.mark.slow
@CONTEXTS
def test_a_script_on_standard_input(context: str | None, tmp_path: Path) -> None:
    assert run(f"use({context!r}).close()", tmp_path, stdin=True) == GOOD


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_daemon_thread(context: str, tmp_path: Path) -> None:
    program = f"""
    import threading
    done = []
    thread = threading.Thread(target=lambda: done.append(use({context!r}).close()), daemon=True)
    thread.start()
    thread.join()
    assert done == [None]
    """
    assert run(program, tmp_path) == GOOD


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_daemonic_multiprocessing_process(context: str, method: str, tmp_path: Path) -> None:
    program = f"""
    import multiprocessing
    def work(queue):
        use({context!r}).close()
        queue.put("done")
    if __name__ == "__main__":
        processes = multiprocessing.get_context({method!r})
        queue = processes.SimpleQueue()
        process = processes.Process(target=work, args=(queue,), daemon=True)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        assert queue.get() == "done"
        queue.close()
    """
    code, out, err = run(program, tmp_path)
    assert (code, out, err) == GOOD


@pytest.mark.slow
def test_a_process_that_was_forked_beside_a_vector_env(tmp_path: Path) -> None:
    program = """
    import os, sys
    mine = use()
    if not (child := os.fork()):
        use().close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        mine.step(np.zeros(3))
    mine.close()
    """
    # Python 3.12 warns of forks beside threads, which ZeroMQ's are not to it.
    assert run(program, tmp_path) == GOOD


@pytest.mark.slow
def test_an_asyncio_program(tmp_path: Path) -> None:
    program = """
    import asyncio
    async def main():
        envs = use()
        loop = asyncio.get_running_loop()
        envs.close()
        await asyncio.gather(*(asyncio.to_thread(lambda: use().close()) for _ in range(2)))
    asyncio.run(main(), debug=False)  # a vector env blocks, and that is no news
    """
    assert run(program, tmp_path) == GOOD


@pytest.mark.slow
def test_ipythons_interactive_shell(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    program = f"""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for cell in ({USE!r}, "use().close()", "use('spawn').close()"):
        shell.run_cell(cell).raise_error()
    print("done")
    """
    code, out, err = run(program, tmp_path, "-W", "default", prelude="")
    assert (code, out) == (0, "done\n"), err


@pytest.mark.slow
def test_a_jupyter_kernel() -> None:
    """Skipped without ipykernel, which brings more packages than the rest of the tests."""
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3", startup_timeout=PATIENCE)
    try:
        for cell in (USE, "use().close()", "use('spawn').close()", "kept = use()"):
            reply = client.execute_interactive(cell, timeout=PATIENCE, store_history=False)
            assert reply["content"]["status"] == "ok", reply
        process = psutil.Process(kernel.provisioner.pid)
        below = process.children(recursive=True)
        assert below
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    wait_until(lambda: not any(p.is_running() for p in below), "the end of the kernel's actors")


@pytest.mark.slow
def test_the_interactive_interpreter(tmp_path: Path) -> None:
    cells = [*USE.strip().split("\n\n"), "use().close()", "use('spawn').close()", "print('done')"]
    program = f"""
    import code
    console = code.InteractiveConsole({{"__name__": "__main__", "__builtins__": __builtins__}})
    for cell in {cells!r}:
        assert not console.runsource(cell, symbol="exec"), cell
    """
    code, out, err = run(program, tmp_path, prelude="")
    assert (code, out, err) == (0, "done\n", "")


@pytest.mark.slow
def test_modules_that_only_the_driver_finds(tmp_path: Path) -> None:
    hidden, beside = tmp_path / "hidden", tmp_path / "beside"
    for folder in (hidden, beside):
        folder.mkdir()
        (folder / f"{folder.name}_module.py").write_text(USE)
    program = f"""
    import os, sys
    sys.path.insert(0, {str(hidden)!r})
    sys.path.insert(0, "")
    os.chdir({str(beside)!r})
    import beside_module, hidden_module
    for context in ("fork", "spawn"):
        for module in (beside_module, hidden_module):
            envs = BusVectorEnv([module.OwnEnv, f"{{module.__name__}}:OwnEnv"], context=context)
            envs.reset()
            envs.close()
    """
    assert run(program, tmp_path) == GOOD


@pytest.mark.slow
def test_ids_that_only_the_driver_has_registered(tmp_path: Path) -> None:
    program = """
    gymnasium.register("Own-v0", entry_point=OwnEnv, kwargs={"number": 7}, max_episode_steps=1)
    gymnasium.register("Own/Other-v3", entry_point=lambda number: OwnEnv(number))
    from envbus.runner import make_vec
    for context in (None, "fork", "forkserver", "spawn"):
        envs = make_vec("Own-v0", 2, num_actors=2, context=context)
        assert envs.reset()[0][:, 0].tolist() == [7, 7]
        assert envs.step(np.zeros(2))[3].all()
        envs.close()
        envs = make_vec("Own/Other-v3", 2, number=9, context=context)
        assert envs.reset()[0][:, 0].tolist() == [9, 9]
        envs.close()
    """
    assert run(program, tmp_path) == GOOD


# --- factories ------------------------------------------------------------------------------


class ModuleEnv(CountingEnv):
    """An env of a module that pytest has imported."""


class Maker:
    """Makes envs by a bound method, a class method, and by being called."""

    length = 5

    def __init__(self, length: int) -> None:
        self.own_length = length

    def make(self) -> CountingEnv:
        return CountingEnv(self.own_length)

    @classmethod
    def make_by_class(cls) -> CountingEnv:
        return CountingEnv(cls.length)

    def __call__(self) -> CountingEnv:
        return CountingEnv(self.own_length)


@pytest.mark.slow_but_first
@CONTEXTS
def test_factories_of_all_kinds(context: str | None) -> None:
    space = gymnasium.spaces.Discrete(100)

    class LocalEnv(CountingEnv):
        def __init__(self, length: int = 4) -> None:
            super().__init__(length)
            self.action_space = space

    def nested(length: int) -> Callable[[], CountingEnv]:
        def make() -> CountingEnv:
            return LocalEnv(length)

        return make

    factories: list[Any] = [
        *(lambda length=length: CountingEnv(length) for length in (1, 2, 3)),
        LocalEnv,
        Maker.make_by_class,
        Maker(6).make,
        partial(ModuleEnv, length=7),
        nested(8),
        Maker(9),
        f"{__name__}:make_ten",
    ]
    envs = BusVectorEnv(factories, num_actors=3, context=context)
    envs.reset()
    ends: dict[int, int] = {}
    for step in range(1, 11):
        _, _, terminations, *_ = envs.step(np.zeros(len(factories), np.int64))
        for i in np.flatnonzero(terminations):
            ends.setdefault(int(i), step)
    assert ends == {i: i + 1 for i in range(10)}
    envs.close()


def make_ten() -> CountingEnv:
    return CountingEnv(10)


def test_a_factory_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"env 1 cannot be sent.*pickle"):
        BusVectorEnv([CountingEnv, lambda: CountingEnv(3) if lock else None])


class WithProcessEnv(CountingEnv):
    """Starts a subprocess, and a multiprocessing process, of its own."""

    def __init__(self, path: Path, close_them: bool) -> None:
        import multiprocessing

        super().__init__(1000)
        self.close_them = close_them
        self.subprocess = subprocess.Popen(["sleep", "600"])
        context = multiprocessing.get_context("fork")
        self.queue = context.SimpleQueue()
        self.process = context.Process(target=_put, args=(self.queue,))
        self.process.start()
        assert self.queue.get() == "from the process"
        path.write_text(json.dumps([self.subprocess.pid, self.process.pid]))

    def close(self) -> None:
        if self.close_them:
            self.subprocess.kill()
            self.subprocess.wait()
            self.process.kill()
            self.process.join()


def _put(queue: Any) -> None:
    queue.put("from the process")
    signal.pause()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("how", ["closes them", "forgets them", "is killed"])
def test_an_env_with_processes_of_its_own(context: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    envs = BusVectorEnv(
        [partial(WithProcessEnv, path, how == "closes them")], context=context, num_actors=1
    )
    envs.reset()
    envs.step(np.zeros(1))
    pids = [*json.loads(path.read_text()), *envs.actor_pids()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    # At its exit a process waits for those that it started with multiprocessing.
    envs.close(timeout=1.0 if how == "forgets them" else None, terminate=how == "is killed")
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


# --- constructors that fail -----------------------------------------------------------------


class TwoArgumentsError(Exception):
    """Cannot be made again from its message."""

    def __init__(self, one: str, *, two: str) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.slow
@pytest.mark.parametrize("make", [BusVectorEnv, ActorPool])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_constructor_that_raises(make: Callable[..., Any], context: str, tmp_path: Path) -> None:
    envs = [noted(tmp_path), noted(tmp_path), noted(tmp_path, partial(FailingEnv, "init"))]
    with pytest.raises(RuntimeError, match="failing on purpose") as caught:
        make(envs, num_actors=3, context=context)
    cause = str(caught.value.__cause__)
    assert "env 2 (actor-2" in cause
    assert "tests/envs.py" in cause
    assert still_alive(tmp_path) == []


def test_a_constructor_that_raises_what_cannot_be_rebuilt() -> None:
    with pytest.raises(Exception, match=r"TwoArgumentsError: this and that") as caught:
        BusVectorEnv([_raise], num_actors=1)
    assert "_raise" in str(caught.value)


def _raise() -> None:
    raise TwoArgumentsError("this", two="that")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make", [BusVectorEnv, ActorPool])
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_constructor_that_ends_its_process(
    make: Callable[..., Any], context: str, restart: bool, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=r"actor-1 .*env 1.*exit code 5"):
        make(
            [noted(tmp_path), noted(tmp_path, partial(os._exit, 5))],
            num_actors=2,
            context=context,
            restart=restart,
        )
    assert still_alive(tmp_path) == []


@pytest.mark.parametrize("make", [BusVectorEnv, ActorPool])
def test_a_constructor_that_exits_is_an_error_of_its_env(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"env 0 .*SystemExit"):
        make([noted(tmp_path, partial(sys.exit, 3))])
    assert still_alive(tmp_path) == []


def test_a_constructor_that_hangs_is_named_when_its_time_is_over(tmp_path: Path) -> None:
    message = r"not started within 2\.0 s: actor-1 .*env 1, making env 1\)"
    envs = [noted(tmp_path), noted(tmp_path, partial(HangingEnv, "init"))]
    with pytest.raises(StartError, match=message):
        BusVectorEnv(envs, num_actors=2, timeouts=Timeouts(start=2.0))
    assert still_alive(tmp_path) == []


def test_what_is_imported_beforehand_has_the_time_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_simulator.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartError, match=r"still imports .*endless_simulator"):
        BusVectorEnv([CountingEnv], preload=["endless_simulator"], timeouts=Timeouts(start=1.0))


def test_what_is_no_env_is_named() -> None:
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env.*got builtins\.int") as caught:
        BusVectorEnv([CountingEnv, lambda: 3], num_actors=1)
    assert "env 1 (actor-0" in str(caught.value.__cause__)
