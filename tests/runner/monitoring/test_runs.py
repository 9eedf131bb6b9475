"""Runs of this host: found, asked, and what their processes take."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import gymnasium
import msgspec
import numpy as np
import psutil
import pytest

import envbus
from envbus.actors.testing import CountingEnv
from envbus.bus.errors import EnvbusError
from envbus.runner.engine.engine import Statistics
from envbus.runner.group.env_runner_group import EnvRunnerGroup
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.monitoring.figures import PartFigures, RunFigures
from envbus.runner.monitoring.listener import LONGEST_QUESTION
from envbus.runner.monitoring.observer import Observer
from envbus.runner.monitoring.runs import (
    RunAddress,
    UsageReader,
    ask,
    ask_picture,
    find_runs,
    kill_process,
    log_of,
    restart_process,
    stacks_of,
)
from envbus.runner.policies.policy import RandomPolicy
from tests.runner.group.test_env_runner_group import Steps
from tests.runner.monitoring_scenes import actor, figures
from tests.waiting import PATIENCE, wait_until

NOTHING = np.zeros(4, int)


class Heavy(gymnasium.Env[int, int]):
    """Waits in its step until it is killed."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        return 0, {}

    def step(self, action: int) -> object:
        if action:
            threading.Event().wait()
        return 0, 0.0, False, False, {}


def here() -> RunAddress | None:
    """Return where this process can be asked."""
    return next((run for run in find_runs() if run.pid == os.getpid()), None)


def look() -> RunFigures:
    """Return the figures of this process."""
    address = here()
    assert address is not None
    figures = ask(address)
    assert figures is not None
    return figures


#: Parts that other tests of this process have left, until they are collected.
KNOWN: set[str] = set()


def tells_all_or_nothing() -> bool:
    """Whether this process does not just cease to listen."""
    address = here()
    return address is None or ask(address) is not None


@pytest.fixture(autouse=True)
def known() -> None:
    """Note what is there before a test."""
    gc.collect()
    KNOWN.clear()
    wait_until(tells_all_or_nothing, "the test before to have ended")
    if here() is not None:
        KNOWN.update(part.name for part in look().parts)


def parts() -> list[PartFigures]:
    """Return the figures of the test's own parts."""
    return [] if here() is None else [part for part in look().parts if part.name not in KNOWN]


def part(kind: str) -> PartFigures:
    """Return the figures of the only part of its kind."""
    (found,) = (part for part in parts() if part.kind == kind)
    return found


def own() -> RunFigures:
    """Return the figures of this process without what other tests have left."""
    return msgspec.structs.replace(look(), parts=parts())


def nothing_is_told() -> bool:
    """Whether no part of the test is shown, and nobody listens if there is no other."""
    return not parts() if KNOWN else here() is None


@pytest.fixture
def envs() -> Iterator[envbus.BusVectorEnv]:
    """A vector env of two actors, which are started again."""
    with envbus.make_vec(Heavy, 4, num_actors=2, restart=True) as envs:
        envs.reset()
        yield envs


def test_a_vector_env_tells_its_steps_and_processes(envs: envbus.BusVectorEnv) -> None:
    for _ in range(10):
        envs.step(NOTHING)
    told = part("BusVectorEnv")
    assert told.counts["env_steps"] == 40
    assert told.levels["actors_ready"] == 2
    assert told.restarts
    assert [(process.name, process.pid, process.envs) for process in told.processes] == [
        ("actor-0", envs.actor_pids()[0], (0, 2)),
        ("actor-1", envs.actor_pids()[1], (2, 4)),
    ]
    assert [process.env_steps for process in told.processes] == [20, 20]
    assert not any(process.busy for process in told.processes)
    statistics = envs.statistics()
    assert isinstance(statistics, Statistics)
    assert told.counts["steps_by_word"] == statistics.steps_by_word > 0


def test_who_has_not_answered_is_busy(envs: envbus.BusVectorEnv) -> None:
    for _ in range(3):
        envs.step(NOTHING)
    envs.step_async(np.array([0, 0, 1, 0]))
    wait_until(
        lambda: [p.busy for p in part("BusVectorEnv").processes] == [False, True], "it is shown"
    )
    os.kill(envs.actor_pids()[1], signal.SIGKILL)
    envs.step_wait()
    assert [fault.process for fault in part("BusVectorEnv").faults] == ["actor-1"]


def test_a_pool_tells_its_steps_also_those_of_this_process() -> None:
    for num_actors in (0, 2):
        with envbus.ActorPool([Heavy] * 4, num_actors=num_actors) as pool:
            pool.reset()
            pool.recv(4)
            for _ in range(5):
                pool.send(NOTHING)
                pool.recv(4)
            told = part("ActorPool")
            assert told.counts["env_steps"] == 20
            assert told.levels["envs"] == 4
            assert not any(process.busy for process in told.processes)


def part_when(kind: str, holds: Callable[[PartFigures], object], what: str) -> PartFigures:
    """Return the figures of the only part of its kind, once something holds of them."""
    told: list[PartFigures] = []

    def look_again() -> bool:
        told[:] = [part(kind)]
        return bool(holds(told[0]))

    wait_until(look_again, what)
    return told[0]


@pytest.mark.slow
def test_a_group_tells_its_runners_and_who_died() -> None:
    with EnvRunnerGroup(2, [CountingEnv] * 2, Steps()) as group:
        pids = group.runner_pids()
        group.sample(num_env_steps=8)
        told = part("EnvRunnerGroup")
        assert told.counts["num_env_steps_sampled"] == 8
        assert told.levels["actors_ready"] == 2
        assert [(one.name, one.pid, one.state, one.busy) for one in told.processes] == [
            ("runner-0", pids[0], "ready", False),
            ("runner-1", pids[1], "ready", False),
        ]
        assert told.faults == []
        assert told.restarts
        group.sample_async(num_env_steps=4)
        assert [one.busy for one in part("EnvRunnerGroup").processes] == [True, True]
        group.collect(2)

        def is_back(told: PartFigures) -> bool:
            group.sample(num_env_steps=4)  # which is when it looks after its runners
            return told.counts["restarts"] == 1 and told.levels["actors_ready"] == 2

        os.kill(pids[1], signal.SIGKILL)
        told = part_when("EnvRunnerGroup", is_back, "its next life is shown")
        assert [one.incarnation for one in told.processes] == [0, 1]
        assert told.processes[1].pid == group.runner_pids()[1] != pids[1]
        (fault,) = told.faults
        assert (fault.cause, fault.process, fault.env) == ("crash", "runner-1", -1)
        assert "SIGKILL" in fault.message


@pytest.mark.slow
def test_policy_workers_tell_what_waits_which_version_and_who_died() -> None:
    def waiting(rows: int) -> Callable[[PartFigures], object]:
        return lambda told: told.levels["rows_waiting"] == rows

    with (
        PolicyWorkers(Steps(), max_batch=3, max_wait=PATIENCE) as workers,
        workers.policy() as policy,
    ):
        (pid,) = workers.pids()
        first = policy.submit_actions(np.zeros((2, 4)), None)
        told = part_when("PolicyWorkers", waiting(2), "two rows wait for a third")
        assert told.counts["rows.default_policy"] == 0
        second = policy.submit_actions(np.zeros((1, 4)), None)
        for ticket in (first, second):
            policy.collect_actions(ticket)
        told = part_when(
            "PolicyWorkers", lambda told: told.counts["requests.default_policy"] == 2, "all went"
        )
        assert waiting(0)(told)
        assert told.counts["rows.default_policy"] == 3
        assert sum(told.latencies["default_policy"].values()) == 2
        assert [(one.name, one.pid, one.state) for one in told.processes] == [
            ("policy-worker-0", pid, "ready")
        ]
        assert told.faults == []
        workers.set_weights({"number": np.ones(1, np.int64)}, 7)
        assert part("PolicyWorkers").levels["version.default_policy"] == 7
        os.kill(pid, signal.SIGKILL)
        told = part_when(
            "PolicyWorkers",
            lambda told: [(one.incarnation, one.state) for one in told.processes] == [(1, "ready")],
            "its next life is shown",
        )
        assert told.counts["restarts"] == 1
        assert [one.pid for one in told.processes] == workers.pids() != [pid]
        (fault,) = told.faults
        assert (fault.cause, fault.process, fault.env) == ("crash", "policy-worker-0", -1)
        assert "SIGKILL" in fault.message


def test_nothing_listens_when_the_last_part_is_closed() -> None:
    with envbus.make_vec(Heavy, 1, num_actors=0), envbus.make_vec(Heavy, 1, num_actors=0):
        assert len(parts()) == 2
    wait_until(nothing_is_told, "nobody listens")
    if not KNOWN:
        names = [thread.name for thread in threading.enumerate()]
        assert "envbus monitoring" not in names


def test_a_part_that_was_dropped_is_not_shown() -> None:
    dropped = envbus.make_vec(Heavy, 1, num_actors=0)
    with envbus.make_vec(Heavy, 1, num_actors=0):
        del dropped
        wait_until(lambda: len(parts()) == 1, "the other is gone")


def test_nothing_listens_when_the_last_part_was_dropped() -> None:
    dropped = envbus.make_vec(Heavy, 1, num_actors=0)
    assert here() is not None
    del dropped
    gc.collect()
    wait_until(nothing_is_told, "it is gone")


def test_nothing_listens_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUS_MONITORING", "0")
    with envbus.make_vec(Heavy, 1, num_actors=0):
        assert nothing_is_told()


def test_a_forked_copy_is_not_asked_for_its_owner(envs: envbus.BusVectorEnv) -> None:
    copy = os.fork()
    if copy == 0:
        signal.pause()
    try:
        assert look().pid == os.getpid()
        envs.close()
        wait_until(nothing_is_told, "it is gone")
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


@pytest.mark.slow
def test_a_forked_copy_of_a_forked_copy_is_shown_by_itself() -> None:
    source = """
import os
import envbus
from envbus.runner.monitoring.runs import ask, find_runs

def here():
    return [ask(run).pid == os.getpid() for run in find_runs() if run.pid == os.getpid()]

def in_a_copy(act):
    if not (copy := os.fork()):
        act()
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0

def look():
    with envbus.make_vec("CartPole-v1", 1, num_actors=0):
        assert here() == [True]

def look_twice():
    with envbus.make_vec("CartPole-v1", 1, num_actors=0):
        in_a_copy(look)
        assert here() == [True]

in_a_copy(look_twice)
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60.0)


class Filmed(gymnasium.Env[object, int]):
    """Is observed to be grey."""

    observation_space = gymnasium.spaces.Dict(
        {
            "picture": gymnasium.spaces.Box(0, 255, (10, 20, 3), np.uint8),
            "speed": gymnasium.spaces.Box(-1.0, 1.0, (2,)),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        return {"picture": np.full((10, 20, 3), seed, np.uint8), "speed": np.zeros(2, "f")}, {}


@pytest.mark.parametrize("num_actors", [0, 2])
def test_the_last_observation_of_an_env_is_told_as_a_picture(num_actors: int) -> None:
    with envbus.make_vec(Filmed, 4, num_actors=num_actors) as envs:
        envs.reset(seed=50)
        address = here()
        assert address is not None
        name = part("BusVectorEnv").name
        png = np.frombuffer(ask_picture(address, name, 3), np.uint8)
        read = cv2.imdecode(png, cv2.IMREAD_UNCHANGED)
        assert read is not None
        assert read.shape == (10, 20, 3)
        assert np.all(read == 53)
        for other, env in ((name, 4), (name, -1), ("BusVectorEnv-0", 0), ("", 0)):
            assert ask_picture(address, other, env) == b""


def test_an_observation_that_is_no_picture_is_not_told(envs: envbus.BusVectorEnv) -> None:
    address = here()
    assert address is not None
    assert ask_picture(address, part("BusVectorEnv").name, 0) == b""


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\n",
        b"what\n",
        b'{"what": 3}\n',
        b'{"what": "everything"}\n',
        b"x" * 2 * LONGEST_QUESTION,
        b"\xff\x00\n",
    ],
)
def test_nonsense_gets_no_answer_and_the_next_one_does(
    envs: envbus.BusVectorEnv, question: bytes
) -> None:
    address = here()
    assert address is not None
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10.0)
        sock.connect(f"\0{address.name}")
        sock.sendall(question)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it has not read all
            assert sock.recv(100) == b""
    assert look().parts


def test_whoever_says_nothing_does_not_keep_others_waiting_for_long(
    envs: envbus.BusVectorEnv,
) -> None:
    address = here()
    assert address is not None
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{address.name}")
        assert ask(address, timeout=30.0) is not None


#: What a run without parts tells.
TOLD = msgspec.json.encode(RunFigures(pid=os.getpid(), at=0.0, began=0.0, command="", version=""))


@contextlib.contextmanager
def answering(name: str, told: bytes = TOLD) -> Iterator[None]:
    """Answer questions at a name, as this process."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)  # unread, it would end the connection with a reset
                    connection.sendall(told + b"\n")

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_whoever_takes_the_name_of_another_process_or_user_is_not_believed() -> None:
    user, own = os.geteuid(), os.getpid()
    for of_user, pid, believed in ((user, own, True), (user, 1, False), (user + 1, own, False)):
        name = f"envbus-run-{of_user}-{pid}-test"
        with answering(name):
            assert (ask(RunAddress(pid, name)) is not None) == believed


def test_a_run_that_tells_another_ones_process_id_is_not_believed() -> None:
    name = f"envbus-run-{os.geteuid()}-{os.getpid()}-test"
    with answering(name, TOLD.replace(b'"pid":%d' % os.getpid(), b'"pid":1', 1)):
        assert ask(RunAddress(os.getpid(), name)) is None


@pytest.mark.parametrize("name", ["x\n@envbus-run-0-1-a", "x @envbus-run-0-1-a", "\u2028\x0b"])
def test_sockets_of_any_name_disturb_nobody(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(b"\0" + name.encode())
        sock.listen()
        assert not [run for run in find_runs() if run.pid == 1]


@pytest.mark.parametrize(
    "lie",
    [
        b'"parts":[],"more":' + b"[" * 100_000,
        b'"parts":[{"name":"a","kind":"a","latencies":{"get_action":{"9999999":1}}}]',
        b'"parts":[{"name":"a","kind":"a","latencies":{"get_action":{"7":-1}}}]',
        b'"parts":[{"name":"a","kind":"a","processes":[{"name":"b","pid":1,"state":"ready",'
        b'"env_steps":1' + b"0" * 400 + b"}]}]",
        b'"parts":[{"name":"a","kind":"a","faults":[{"at":1e300,"cause":"","process":"","env":0,'
        b'"message":""}]}]',
    ],
)
def test_what_no_run_tells_counts_as_no_answer(lie: bytes) -> None:
    name = f"envbus-run-{os.geteuid()}-{os.getpid()}-test"
    with answering(name, TOLD.partition(b'"parts"')[0] + lie + b"}"):
        assert ask(RunAddress(os.getpid(), name)) is None


def test_all_runs_are_asked_at_one_time() -> None:
    addresses = [RunAddress(os.getpid(), name) for name in "abc"]
    together = threading.Barrier(len(addresses))

    def ask_slowly(address: RunAddress) -> RunFigures:
        together.wait(PATIENCE)
        return RunFigures(pid=1, at=0.0, began=0.0, command=address.name, version="")

    seen = Observer(find=lambda: addresses, ask=ask_slowly).look()
    assert [run.figures.command for run in seen] == ["a", "b", "c"]


def test_a_question_that_is_held_by_a_copy_is_no_run() -> None:
    with envbus.make_vec(Heavy, 1, num_actors=0):
        address = here()
        assert address is not None
        with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as listening:
            name = f"envbus-run-{os.geteuid()}-{os.getpid()}-0"
            listening.bind(f"\0{name}")
            listening.listen()
            other.connect(f"\0{name}")
            with listening.accept()[0]:
                listening.close()
                assert [run for run in find_runs() if run.pid == os.getpid()] == [address]


def test_another_run_that_gets_the_id_of_one_that_hung_does_not_hang() -> None:
    shown = [figures(actor(0, busy=True))]
    observer = Observer(find=lambda: [RunAddress(7, "a")], ask=lambda _: shown[0])
    observer.look()
    shown[0] = msgspec.structs.replace(shown[0], at=110.0)
    (seen,) = observer.look()
    assert list(seen.stalled.values()) == [10.0]
    shown[0] = msgspec.structs.replace(shown[0], at=120.0, began=119.0)
    (seen,) = observer.look()
    assert seen.stalled == {}


def test_who_hangs_is_seen_also_when_the_clock_was_put_back() -> None:
    shown = [figures(actor(0, busy=True))]
    observer = Observer(find=lambda: [RunAddress(7, "a")], ask=lambda _: shown[0])
    for at in (100.0, 95.0, 97.0):
        shown[0] = msgspec.structs.replace(shown[0], at=at)
        (seen,) = observer.look()
    assert list(seen.stalled.values()) == [2.0]


@pytest.mark.slow
def test_a_command_that_is_no_text_is_told_as_what_can_be_told() -> None:
    source = r"""
import os
import envbus
from envbus.runner.monitoring.observer import Observer

with envbus.make_vec("CartPole-v1", 1, num_actors=0):
    for ask in ({}, {"ask": lambda _: None}):
        (seen,) = Observer(os.getpid(), **ask).look()
        print(seen.answers, seen.figures.command.endswith(r"\udcff\x1b[31m\n"))
"""
    run = [sys.executable, "-c", source, b"\xff\x1b[31m\n"]
    done = subprocess.run(run, check=True, timeout=60.0, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True True", "False True"]
    assert done.stderr == ""


def test_a_version_may_be_of_numpy() -> None:
    policy = RandomPolicy(gymnasium.spaces.Discrete(2))
    version: Any = np.int64(3)
    policy.policy_version = version
    pool = envbus.ActorPool([Heavy], num_actors=1)
    with envbus.EnvRunner(pool, policy):
        assert part("EnvRunner").levels["version.default_policy"] == 3


@pytest.mark.parametrize("pid", ["\N{SUPERSCRIPT TWO}", "9" * 40, "-1", ""])
def test_a_name_that_no_run_has_disturbs_nobody(pid: str) -> None:
    with answering(f"envbus-run-{os.geteuid()}-{pid}-test"):
        assert {run.figures.pid for run in Observer(find=find_runs).look()} <= set(psutil.pids())


def test_nobody_is_killed_whom_the_run_has_not_started(envs: envbus.BusVectorEnv) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        told = look()
        (shown,) = told.parts
        lies = [msgspec.structs.replace(shown.processes[0], pid=stranger.pid)]
        told = msgspec.structs.replace(
            told, pid=envs.actor_pids()[1], parts=[msgspec.structs.replace(shown, processes=lies)]
        )
        with pytest.raises(EnvbusError, match="was not started by run"):
            kill_process(told, "actor-0")
        stranger.communicate(b"\n")
        assert stranger.returncode == 0


def test_a_run_that_is_gone_has_no_figures() -> None:
    assert ask(RunAddress(1, "envbus-run-0-1-00000000")) is None


def test_cpu_time_and_memory_are_read_by_process() -> None:
    program = "import sys\nprint('up', flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        reader = UsageReader()
        reader.read([busy.pid, os.getpid()])
        wait_until(lambda: reader.read([busy.pid, os.getpid()])[busy.pid].cpu > 0.0, "it is shown")
        assert reader.read([busy.pid])[busy.pid].memory > 2**20
    finally:
        busy.kill()
        busy.communicate()
    assert reader.read([busy.pid]) == {}


def test_an_actor_is_killed_by_its_name_and_comes_back(envs: envbus.BusVectorEnv) -> None:
    first = envs.actor_pids()[0]
    assert kill_process(own(), "actor-0") == first
    for _ in range(2):
        envs.step(NOTHING)
    assert part("BusVectorEnv").counts["restarts"] == 1


def test_nobody_is_killed_whom_nobody_starts_again(envs: envbus.BusVectorEnv) -> None:
    with pytest.raises(EnvbusError, match=r"no process 'actor-9'; there are: actor-0, actor-1"):
        kill_process(own(), "actor-9")
    envs.close()
    with envbus.make_vec(Heavy, 2, num_actors=1) as others:
        with pytest.raises(EnvbusError, match="restart=True"):
            kill_process(own(), "actor-0")
        assert len(others.actor_pids()) == 1
    with (
        envbus.make_vec(Heavy, 2, num_actors=0),
        pytest.raises(EnvbusError, match="no process of its own"),
    ):
        kill_process(own(), "this process")


def test_a_process_is_restarted_by_part_and_name(envs: envbus.BusVectorEnv) -> None:
    with envbus.make_vec(Heavy, 2, num_actors=1, restart=True) as others:
        others.reset()
        names = [part.name for part in parts()]
        (pid,) = others.actor_pids()
        with pytest.raises(EnvbusError, match=f"is process {pid} by now, not 1; look again"):
            restart_process(os.getpid(), names[1], "actor-0", 1)
        with pytest.raises(EnvbusError, match="there are: actor-0"):
            restart_process(os.getpid(), names[1], "actor-1", pid)
        restart_process(os.getpid(), names[1], "actor-0", pid)
        wait_until(lambda: not psutil.pid_exists(pid), "it is killed")
    with pytest.raises(EnvbusError, match="run 1 does not answer"):
        restart_process(1, names[0], "actor-0", pid)


def test_a_run_that_has_never_answered_is_seen(envs: envbus.BusVectorEnv) -> None:
    address = here()
    assert address is not None
    gone = RunAddress(2**22 + 1, "")  # no process has such an id
    (seen,) = Observer(find=lambda: [address, gone], ask=lambda _: None).look()
    assert (seen.figures.pid, seen.answers, seen.figures.parts) == (os.getpid(), False, [])
    assert "python" in seen.figures.command


def test_the_stacks_of_an_actor_that_hangs_are_shown_without_its_owner(
    envs: envbus.BusVectorEnv,
) -> None:
    envs.step_async(np.array([0, 0, 1, 0]))
    pid = envs.actor_pids()[1]
    wait_until(lambda: "in step" in stacks_of(pid), "it is in its step")
    assert "test_runs.py" in stacks_of(pid)
    os.kill(pid, signal.SIGKILL)
    envs.step_wait()


def test_a_stopped_actor_has_no_stacks_and_takes_no_time(envs: envbus.BusVectorEnv) -> None:
    pid = envs.actor_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        assert "SIGSTOP" in stacks_of(pid, timeout=3600.0)
    finally:
        os.kill(pid, signal.SIGCONT)


def said_by(pid: int, text: str) -> None:
    """Wait until the log of a process ends with a text."""
    wait_until(lambda: log_of(pid).endswith(text), "it is in the log")


def test_what_a_running_actor_wrote_to_stderr_is_shown_and_then_that_of_its_next_life() -> None:
    with envbus.make_vec(Talkative, 2, num_actors=2, restart=True) as envs:
        pids = envs.actor_pids()
        for pid in pids:
            assert log_of(pid) == f"process {pid} has written nothing to stderr"
        envs.reset()
        for pid in pids:
            said_by(pid, f"reset in {pid}")
        with pytest.raises(EnvbusError, match=rf"process {os.getpid()} .* no actor"):
            log_of(os.getpid())
        os.kill(pids[1], signal.SIGKILL)
        for _ in range(2):
            envs.step(NOTHING[:2])
        again = envs.actor_pids()
        assert again[0] == pids[0]
        assert again[1] != pids[1]
        said_by(again[0], f"reset in {pids[0]}" + 2 * f"\nstep in {pids[0]}")
        said_by(again[1], f"reset in {again[1]}")
        assert str(pids[1]) not in log_of(again[1])
        with pytest.raises(EnvbusError, match="look at the terminal"):
            log_of(pids[1])
    for pid in again:
        with pytest.raises(EnvbusError, match=f"process {pid} "):
            log_of(pid)


class Talkative(Heavy):
    """Says what it does, in colours, with what would change a terminal's title."""

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        self._say("reset")
        return super().reset()

    def step(self, action: int) -> object:
        self._say("step")
        return super().step(action)

    def _say(self, what: str) -> None:
        sys.stderr.write(f"\x1b[31m{what} in\x1b[0m {os.getpid()}\n")


@pytest.mark.slow
def test_the_log_of_an_actor_needs_no_help_of_its_driver() -> None:
    program = (
        "import envbus; from tests.runner.monitoring.test_runs import Talkative\n"
        "with envbus.make_vec(Talkative, 1, num_actors=1) as envs:\n"
        "    envs.reset(); print(envs.actor_pids()[0], flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.send_signal(signal.SIGSTOP)
        said_by(pid, f"reset in {pid}")
        driver.send_signal(signal.SIGCONT)
        driver.communicate("\n")
    assert driver.returncode == 0


def make_steps(*_: object) -> Steps:
    """Return a policy, and say where."""
    sys.stderr.write(f"made in {os.getpid()}\n")
    return Steps()


@pytest.mark.slow
def test_runners_of_a_group_and_policy_workers_have_logs_too() -> None:
    with (
        PolicyWorkers(make_steps) as workers,
        EnvRunnerGroup(1, [CountingEnv], make_policies=make_steps) as group,
    ):
        for pid in (*workers.pids(), *group.runner_pids()):
            said_by(pid, f"made in {pid}")


def test_who_is_no_actor_gets_no_signal(envs: envbus.BusVectorEnv) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for pid in (stranger.pid, os.getpid()):
            with pytest.raises(EnvbusError, match="no actor, runner or policy worker has this id"):
                stacks_of(pid)
        stranger.communicate(b"\n")
        assert stranger.returncode == 0
    for pid in (stranger.pid, 0, 2**70):
        with pytest.raises(EnvbusError, match="cannot be asked for its stacks"):
            stacks_of(pid)
