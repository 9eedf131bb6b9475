"""Simulators that a bridge runs itself, and how it tells of their ends."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envbus.actors import ExternalEnv, ExternalMultiAgentEnv, SimulatorError
from envbus.bus.errors import ConfigError, OverloadedError
from envbus.bus.supervision.restart import Restart, RestartPolicy
from envbus.runner import ExternalEnvBridge
from envbus.runner.bridge.hosting import Where
from envbus.runner.bridge.vocabulary import EpisodeLimits
from envbus.runner.errors import FaultCause
from tests.integration.group_children import Driver, is_alive, traced, wait_until
from tests.integration.simulators import ACTION, OBSERVATION, Runner, seen
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(120)
BOTH = pytest.mark.parametrize("where", ["thread", "process"])


class Counting(ExternalEnv):
    """Plays one episode of three steps, and then does as it is told."""

    def __init__(self, then: str, name: str = "e") -> None:
        super().__init__(ACTION, OBSERVATION)
        self.then = then
        self.name = name

    def run(self) -> None:
        self.start_episode(self.name)
        for number in range(3):
            assert self.get_action(self.name, seen(number)) == number
            self.log_returns(self.name, 1.0, {"pid": os.getpid()})
        self.log_action(self.name, seen(3), 42)
        self.end_episode(self.name, seen(9))
        if self.then == "raise":
            raise RuntimeError("the motor is hot")
        if self.then == "exit":
            os._exit(3)
        if self.then == "wait":
            self.start_episode("endless")
            self.get_action("endless", seen(1))
            threading.Event().wait()


class Asking(ExternalEnv):
    """Asks without an end."""

    def run(self) -> None:
        episode = self.start_episode()
        while True:
            self.get_action(episode, seen(1))


@pytest.mark.slow_but_first
@BOTH
def test_a_bridge_takes_the_spaces_of_the_simulator_that_it_hosts(where: Where) -> None:
    with ExternalEnvBridge() as bridge:
        assert (bridge.action_space, bridge.observation_space) == (None, None)
        bridge.host(lambda: Asking(ACTION, OBSERVATION), where=where)
        runner = Runner(bridge)
        runner.serve(lambda: bridge.statistics().actions)
        assert (bridge.action_space, bridge.observation_space) == (ACTION, OBSERVATION)


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("then", ["raise", "return"])
def test_a_run_that_raises_or_returns_is_told_by_poll_at_once(where: Where, then: str) -> None:
    with ExternalEnvBridge() as bridge:
        runner = Runner(bridge)
        name = bridge.host(lambda: Counting(then), where=where)
        with pytest.raises(SimulatorError, match=f"simulator {name} ") as info:
            runner.serve(lambda: False)
        if then == "raise":
            assert "RuntimeError: the motor is hot" in str(info.value)
            assert "in run" in str(info.value)
            if where == "thread":
                assert isinstance(info.value.__cause__, RuntimeError)
        else:
            assert "run() returned" in str(info.value)
        runner.serve(lambda: runner.ended)  # nothing is lost by it
        assert [row[0] for row in runner.rows("e")] == [0.0, 1.0, 2.0, 3.0, 9.0]
        pids = {result.infos["e"]["agent0"].get("pid") for result in runner.results[1:4]}
        assert (pids == {os.getpid()}) is (where == "thread")


def test_a_process_that_dies_without_a_word_is_told_by_poll() -> None:
    with ExternalEnvBridge() as bridge:
        bridge.host(Counting("exit"), where="process", name="robot")
        with pytest.raises(SimulatorError, match=r"simulator robot .*exit code 3"):
            Runner(bridge).serve(lambda: False)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "use", ["", "bridge.private_endpoint", "host('thread')", "host('process')"]
)
def test_nothing_outlives_the_killed_process_of_a_bridge(
    use: str, tmp_path: Path, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = short_tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    source = f"""
    import json, signal, time
    from gymnasium import spaces
    from envbus.actors import ExternalEnv
    from envbus.bus.gateway import GatewayConfig
    from envbus.runner import ExternalEnvBridge

    SPACE = spaces.Discrete(3)

    class Idle(ExternalEnv):
        def __init__(self):
            super().__init__(SPACE, SPACE)
        def run(self):
            self.start_episode()
            time.sleep(600)

    gateway = GatewayConfig(tcp=("127.0.0.1:0",)) if "process" in {use!r} else None
    bridge = ExternalEnvBridge(SPACE, SPACE, gateway=gateway)
    def host(where):
        bridge.host(Idle, where=where)
        while not bridge.statistics().episodes_now:
            bridge.poll(0.02)
    {use}
    print(json.dumps(0), flush=True)
    signal.pause()
    """
    with Driver(textwrap.dedent(source), tmp_path) as driver:
        driver.read()
        assert ("private" in use) == bool(list(temporary.iterdir()))  # others come in by TCP
        driver.kill()
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    wait_until(lambda: not list(temporary.iterdir()), "its folder to be removed")


def test_a_forked_copy_stops_the_bridge_without_a_word_to_its_simulators() -> None:
    with ExternalEnvBridge() as bridge:
        bridge.host(lambda: Counting("raise"), where="process", name="mine")
        if not (child := os.fork()):
            try:
                bridge.stop()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(SimulatorError, match=r"(?s)simulator mine .*the motor is hot"):
            Runner(bridge).serve(lambda: False)


@BOTH
def test_stopping_the_bridge_ends_its_simulators(where: Where) -> None:
    before = set(threading.enumerate())
    pids: list[int] = []
    with ExternalEnvBridge() as bridge:
        bridge.host(Counting("wait" if where == "process" else "ask"), where=where)
        runner = Runner(bridge)
        if where == "process":
            runner.serve(lambda: "endless" in {e for r in runner.results for e in r.observations})
            pids = [runner.results[1].infos["e"]["agent0"]["pid"]]
            assert is_alive(pids[0])
    wait_until(lambda: set(threading.enumerate()) <= before, "threads to end")
    assert not any(is_alive(pid) for pid in pids)


def test_a_bridge_that_is_dropped_ends_its_simulators() -> None:
    def host_both() -> set[int]:
        bridge = ExternalEnvBridge(local_links=False)
        bridge.host(Asking(ACTION, OBSERVATION), where="thread")
        bridge.host(lambda: Counting("wait", "there"), where="process")
        runner = Runner(bridge)
        runner.serve(lambda: "endless" in {e for r in runner.results for e in r.observations})
        infos = [r.infos["there"]["agent0"] for r in runner.results if "there" in r.infos]
        return {info["pid"] for info in infos if "pid" in info}

    before = set(threading.enumerate())
    (pid,) = host_both()
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, "threads to end")
    wait_until(lambda: not is_alive(pid), "the process to end")


def test_a_simulator_waits_for_an_owner_that_does_not_poll_yet() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        bridge.host(Counting("return"))
        pass_time(1.3)  # longer than one try to connect
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="returned"):
            runner.serve(lambda: False)


class Playing(ExternalEnv):
    """Plays episodes of three steps for ever, or what its function says."""

    def __init__(self, ending: Callable[[], object] = lambda: None) -> None:
        super().__init__(ACTION, OBSERVATION)
        self.ending = ending

    def run(self) -> None:
        while True:
            episode = self.start_episode()
            for number in range(3):
                self.get_action(episode, seen(number))
                self.log_returns(episode, 1.0, {"pid": os.getpid()})
            self.end_episode(episode, seen(9))
            self.ending()


def pids(runner: Runner) -> set[int]:
    """The processes of hosted simulators that were seen so far."""
    infos = (agents["agent0"] for result in runner.results for agents in result.infos.values())
    return {info["pid"] for info in infos if "pid" in info}


def kill_in_an_episode(runner: Runner, pid: int) -> str:
    """Kill a simulator that waits for an action, and return its episode."""
    while True:
        result = runner.once(act=False)
        (episode,) = result.observations or [""]
        info = result.infos.get(episode, {}).get("agent0", {})
        if info.get("pid") == pid and episode not in result.ended:
            os.kill(pid, signal.SIGKILL)
            return episode
        actions = {i: {"agent0": 0} for i in result.observations if i not in result.ended}
        runner.bridge.send_actions(actions)


def test_a_killed_process_is_told_and_its_episode_ends_faulty_at_once() -> None:
    limits = EpisodeLimits(lease=600.0)  # nobody comes back: it is not waited for
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=limits) as bridge:
        runner = Runner(bridge)
        bridge.host(Playing, where="process", name="robot")
        runner.serve(lambda: pids(runner))
        episode = kill_in_an_episode(runner, pids(runner).pop())
        with pytest.raises(SimulatorError, match=r"simulator robot .*signal SIGKILL"):
            runner.serve(lambda: False)
        runner.serve(lambda: runner.faults)
        (fault,) = runner.faults
        assert (fault.episode_id, fault.cause) == (episode, FaultCause.CRASH)
        assert "simulator robot" in fault.message
        assert "signal SIGKILL" in fault.message
        assert episode in runner.ended
        assert bridge.statistics().clients_now == bridge.statistics().lost_clients_now == 0


def test_a_killed_process_is_started_again_where_that_is_asked_for() -> None:
    limits = EpisodeLimits(lease=600.0)
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=limits) as bridge:
        runner = Runner(bridge)
        bridge.host(Playing, where="process", restart=RestartPolicy(backoff=0.01))
        killed: set[int] = set()
        for _ in range(2):
            runner.serve(lambda: pids(runner) - killed)
            (pid,) = pids(runner) - killed
            killed.add(pid)
            kill_in_an_episode(runner, pid)
        runner.serve(lambda: pids(runner) - killed)
        runner.serve(lambda: len(runner.faults) == 2)
        assert {fault.cause for fault in runner.faults} == {FaultCause.CRASH}
        assert bridge.statistics().host_restarts == 2
        assert {fault.episode_id for fault in runner.faults} <= set(runner.ended)


def test_ctrl_c_while_a_simulator_is_made_again_is_raised_and_it_is_tried_again() -> None:
    lives = itertools.count()

    def fail() -> None:
        raise RuntimeError("the motor is hot")

    def make() -> Playing:
        life = next(lives)
        if life == 1:
            signal.raise_signal(signal.SIGINT)
        return Playing(fail) if life == 0 else Playing()

    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        runner = Runner(bridge)
        bridge.host(make, restart=RestartPolicy(backoff=0.01))
        with pytest.raises(KeyboardInterrupt):
            runner.serve(lambda: False)
        runner.serve(lambda: len(runner.ended) > 1)


class Stopping(Playing):
    """Stops its process, in its constructor or after the first episode; a later life does not."""

    def __init__(self, marker: Path, where: str) -> None:
        first = not marker.exists()
        marker.touch()
        if first and where == "constructor":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__(lambda: os.kill(os.getpid(), signal.SIGSTOP) if first else None)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("restart", [RestartPolicy(backoff=0.01), False])
@pytest.mark.parametrize("where", ["constructor", "run"])
def test_a_process_that_hangs_is_killed_and_has_ended(
    where: str, restart: bool | RestartPolicy, tmp_path: Path
) -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=EpisodeLimits(lease=0.1)) as bridge:
        runner = Runner(bridge)
        bridge.host(
            lambda: Stopping(tmp_path / "was here", where),
            where="process",
            name="robot",
            restart=restart,
            start_timeout=5.0 if where == "constructor" else 300.0,
        )
        why = "did not join within 5 s" if where == "constructor" else "gave no sign of life for"
        if restart is False:
            with pytest.raises(SimulatorError, match=f"simulator robot .*was killed, as it {why}"):
                runner.serve(lambda: False)
            return
        lives = 1 if where == "constructor" else 2
        runner.serve(lambda: len(pids(runner)) >= lives and bridge.statistics().host_restarts)
        assert sum(is_alive(pid) for pid in pids(runner)) == 1


@pytest.mark.slow
def test_a_process_that_cannot_join_as_nobody_looks_is_not_killed() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        bridge.host(lambda: Counting("return"), where="process", start_timeout=5.0)
        bridge.poll(0.0)
        pass_time(6.0)
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match=r"run\(\) returned"):
            runner.serve(lambda: False)


@pytest.mark.slow_but_first
@BOTH
def test_a_simulator_that_fails_again_and_again_is_given_up(where: Where) -> None:
    def fail() -> None:
        if where == "process":
            os._exit(3)
        raise RuntimeError("the motor is hot")

    restart = RestartPolicy(max_restarts=2, backoff=0.01)
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        runner = Runner(bridge)
        name = bridge.host(lambda: Playing(fail), where=where, restart=restart)
        with pytest.raises(SimulatorError) as info:
            runner.serve(lambda: False)
        assert f"simulator {name} failed again after 2 restarts" in str(info.value)
        how = "exit code 3" if where == "process" else "RuntimeError: the motor is hot"
        assert how in str(info.value)
        runner.serve(lambda: len(runner.ended) >= 3)  # the last one may come after the error
        assert len(runner.ended) == 3
        assert runner.faults == []
        assert bridge.statistics().host_restarts == 2


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("kind", [Restart.TRANSIENT, Restart.PERMANENT])
def test_a_run_that_returns_is_started_again_only_if_that_is_asked_for(
    where: Where, kind: Restart
) -> None:
    restart = RestartPolicy(restart=kind, max_restarts=1)
    lives = 2 if kind is Restart.PERMANENT else 1
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        runner = Runner(bridge)
        bridge.host(lambda: Counting("return", os.urandom(4).hex()), where=where, restart=restart)
        with pytest.raises(SimulatorError, match=r"run\(\) returned"):
            runner.serve(lambda: False)
        runner.serve(lambda: len(runner.ended) == lives)
        assert bridge.statistics().host_restarts == lives - 1


@BOTH
def test_episodes_that_a_run_leaves_open_end_faulty_at_once(where: Where) -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=EpisodeLimits(lease=600.0)) as bridge:
        runner = Runner(bridge)
        bridge.host(Leaving, where=where)
        with pytest.raises(SimulatorError, match=r"run\(\) returned"):
            runner.serve(lambda: False)
        runner.serve(lambda: runner.faults)
        assert [(f.episode_id, f.cause) for f in runner.faults] == [("left", FaultCause.LOST)]


class Leaving(ExternalEnv):
    """Leaves an episode open."""

    def __init__(self) -> None:
        super().__init__(ACTION, OBSERVATION)

    def run(self) -> None:
        self.start_episode("left")
        self.get_action("left", seen(1))


class Two(ExternalMultiAgentEnv):
    """Two agents, one of which leaves."""

    def run(self) -> None:
        self.start_episode("e")
        assert self.get_action("e", {"x": seen(1), "y": seen(2)}) == {"x": 1, "y": 2}
        self.log_returns("e", {"x": 1.0, "y": 2.0}, terminateds={"y": True})
        assert self.get_action("e", {"x": seen(3), "y": seen(4)}) == {"x": 3}
        self.end_episode("e", {"x": seen(5)}, truncated=True)


def test_a_simulator_of_several_agents() -> None:
    spaces: Any = ({"x": OBSERVATION, "y": OBSERVATION}, {"x": ACTION, "y": ACTION})
    with ExternalEnvBridge(*spaces) as bridge:
        bridge.host(Two(*reversed(spaces)))
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="returned"):
            runner.serve(lambda: False)
        runner.serve(lambda: runner.ended)
    assert runner.results[1].terminateds["e"] == {"x": False, "y": True, "__all__": False}
    with pytest.raises(ConfigError):
        Two(ACTION, OBSERVATION)  # type: ignore[arg-type]  # on purpose


def test_what_cannot_be_run_is_refused() -> None:
    with ExternalEnvBridge() as bridge:
        with pytest.raises(ConfigError, match="expected an ExternalEnv"):
            bridge.host(lambda: 3)  # type: ignore[arg-type, return-value]  # on purpose
        with pytest.raises(ConfigError, match="a function that makes it anew"):
            bridge.host(Counting("return"), restart=RestartPolicy())
        with pytest.raises(ConfigError, match="'thread' or a 'process'"):
            bridge.host(Counting("return"), where="moon")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="not being run"):
        Counting("return").start_episode()


class Crowded(ExternalEnv):
    """Starts more episodes than it may have."""

    def __init__(self) -> None:
        super().__init__(ACTION, OBSERVATION, max_concurrent=2)

    def run(self) -> None:
        first = self.start_episode()
        self.start_episode()
        with pytest.raises(OverloadedError, match=r"2 episodes of Crowded are open.*=2\)"):
            self.start_episode()
        self.end_episode(first, seen(1))
        self.start_episode("third")
        self.get_action("third", seen(3))


@pytest.mark.slow_but_first
@BOTH
def test_no_more_episodes_are_open_than_a_simulator_may_have(where: Where) -> None:
    with ExternalEnvBridge() as bridge:
        bridge.host(Crowded(), where=where)
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="returned"):
            runner.serve(lambda: False)
        runner.serve(lambda: "third" in runner.ended)
        assert [row[0] for row in runner.rows("third")] == [3.0]


@pytest.mark.parametrize("then", ["raise", "return"])
def test_a_bridge_of_one_simulator_says_again_and_again_how_that_has_ended(then: str) -> None:
    env = Counting(then)
    wrong: Any = Counting
    assert not env.is_alive()
    with ExternalEnvBridge.of(env) as bridge:
        assert env.is_alive()
        assert bridge.observation_space == OBSERVATION
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="simulator-1"):
            runner.serve(lambda: False)
        runner.serve(lambda: runner.ended)  # nothing is lost by it
        assert [row[0] for row in runner.rows("e")] == [0.0, 1.0, 2.0, 3.0, 9.0]
        for _ in range(2):
            with pytest.raises(SimulatorError, match="simulator-1") as info:
                bridge.poll()
            assert isinstance(info.value.__cause__, RuntimeError) is (then == "raise")
        wait_until(lambda: not env.is_alive(), "its thread's end")
        bridge.host(Asking(ACTION, OBSERVATION))
        assert bridge.poll().observations
    with pytest.raises(ConfigError, match="env must be ExternalEnv"):
        ExternalEnvBridge.of(wrong)


@pytest.mark.parametrize("limit", [0, 1.5, True])
def test_a_limit_of_episodes_is_a_positive_whole_number(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrent must be"):
        Asking(ACTION, OBSERVATION, limit)
