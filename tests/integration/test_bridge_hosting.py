"""Simulators that a bridge runs itself, and how it tells of their ends."""

from __future__ import annotations

import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from envbus.actors import ExternalEnv, ExternalMultiAgentEnv, SimulatorError
from envbus.bus.errors import ConfigError
from envbus.runner import ExternalEnvBridge
from envbus.runner.bridge.hosting import Where
from tests.integration.nursery_children import Driver, is_alive, traced, wait_until
from tests.integration.simulators import ACTION, OBSERVATION, Runner, seen

pytestmark = pytest.mark.timeout(120)
BOTH = pytest.mark.parametrize("where", ["thread", "process"])


class Counting(ExternalEnv):
    """Plays one episode of three steps, and then does as it is told."""

    def __init__(self, then: str, name: str = "e") -> None:
        super().__init__(OBSERVATION, ACTION)
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


@BOTH
@pytest.mark.parametrize("then", ["raise", "return"])
def test_x_15_a_run_that_raises_or_returns_is_told_by_poll_at_once(where: Where, then: str) -> None:
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


def test_x_15_a_process_that_dies_without_a_word_is_told_by_poll() -> None:
    with ExternalEnvBridge() as bridge:
        bridge.host(Counting("exit"), where="process", name="robot")
        with pytest.raises(SimulatorError, match=r"simulator robot .*exit code 3"):
            Runner(bridge).serve(lambda: False)


@pytest.mark.parametrize(
    "use", ["", "bridge.private_endpoint", "host('thread')", "host('process')"]
)
def test_nothing_outlives_the_killed_process_of_a_bridge(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "t"
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
        assert bool(use) == bool(list(temporary.iterdir()))
        driver.kill()
        wait_until(lambda: not traced(driver.trace), "the end of all that it has started")
    wait_until(lambda: not list(temporary.iterdir()), "its folder to be removed")


@BOTH
def test_stopping_the_bridge_ends_its_simulators(where: Where) -> None:
    before = threading.active_count()
    pids: list[int] = []
    with ExternalEnvBridge() as bridge:
        bridge.host(Counting("wait" if where == "process" else "ask"), where=where)
        runner = Runner(bridge)
        if where == "process":
            runner.serve(lambda: "endless" in {e for r in runner.results for e in r.observations})
            pids = [runner.results[1].infos["e"]["agent0"]["pid"]]
            assert is_alive(pids[0])
    wait_until(lambda: threading.active_count() <= before, "threads to end")
    assert not any(is_alive(pid) for pid in pids)


def test_a_simulator_waits_for_an_owner_that_does_not_poll_yet() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        bridge.host(Counting("return"))
        threading.Event().wait(1.3)  # longer than one try to connect
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="returned"):
            runner.serve(lambda: False)


class Two(ExternalMultiAgentEnv):
    """Two agents, one of which leaves."""

    def run(self) -> None:
        self.start_episode("e")
        assert self.get_action("e", {"x": seen(1), "y": seen(2)}) == {"x": 1, "y": 2}
        self.log_returns("e", {"x": 1.0, "y": 2.0}, terminateds={"y": True})
        assert self.get_action("e", {"x": seen(3), "y": seen(4)}) == {"x": 3}
        self.end_episode("e", {"x": seen(5)}, truncated=True)


def test_x_20_a_simulator_of_several_agents() -> None:
    spaces: Any = ({"x": OBSERVATION, "y": OBSERVATION}, {"x": ACTION, "y": ACTION})
    with ExternalEnvBridge(*spaces) as bridge:
        bridge.host(Two(*spaces))
        runner = Runner(bridge)
        with pytest.raises(SimulatorError, match="returned"):
            runner.serve(lambda: False)
        runner.serve(lambda: runner.ended)
    assert runner.results[1].terminateds["e"] == {"x": False, "y": True, "__all__": False}
    with pytest.raises(ConfigError):
        Two(OBSERVATION, ACTION)  # type: ignore[arg-type]  # on purpose


def test_what_cannot_be_run_is_refused() -> None:
    with ExternalEnvBridge() as bridge:
        with pytest.raises(ConfigError, match="expected an ExternalEnv"):
            bridge.host(lambda: 3)  # type: ignore[arg-type, return-value]  # on purpose
        with pytest.raises(ConfigError, match="'thread' or a 'process'"):
            bridge.host(Counting("return"), where="moon")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigError, match="not being run"):
        Counting("return").start_episode()
