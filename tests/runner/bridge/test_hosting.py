from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from envbus.actors import ExternalEnv, SimulatorError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport.curve_keys import Entrance
from envbus.runner.bridge import hosting
from envbus.runner.bridge.hosting import Hosts
from tests.integration.simulators import ACTION, OBSERVATION
from tests.waiting import wait_until


class Idle(ExternalEnv):
    def run(self) -> None:
        """Play nothing."""


class Failing:
    """Fails where it is called first."""

    def __init__(self) -> None:
        self.called = 0

    def __call__(self, *_: object) -> None:
        self.called += 1
        if self.called == 1:
            raise MemoryError


class NoProcessGroup:
    """Starts no processes, which stand for themselves and their pipes."""

    def __init__(self) -> None:
        self.pipe = self
        self.send = Failing()
        self.killed: list[Any] = []

    def start(self, name: str, entry: str) -> NoProcessGroup:
        return self

    def kill(self, child: object) -> None:
        self.killed.append(child)

    def wake_at(self) -> None:
        """Tell that nothing is due."""

    def close(self, timeout: float) -> None:
        """End nothing."""


@pytest.fixture
def on_gone() -> Failing:
    return Failing()


@pytest.fixture
def hosts(on_gone: Failing) -> Iterator[Hosts]:
    nowhere = Entrance("ipc:///nowhere")
    hosts = Hosts(lambda _: nowhere, lambda _: None, on_gone, lambda _: True, 1.0)
    yield hosts
    hosts.close()


def test_the_end_of_a_thread_comes_again_where_it_was_not_taken_note_of(
    hosts: Hosts, on_gone: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "run_env", lambda *_, **__: None)
    hosts.start(Idle(ACTION, OBSERVATION), "thread", None, None, 1.0)
    wait_until(lambda: hosts._ended, "its end")
    with pytest.raises(MemoryError):
        hosts.look_after(0.0)
    with pytest.raises(SimulatorError, match="returned"):
        hosts.look_after(0.0)
    assert on_gone.called == 2


def test_a_process_that_cannot_be_told_what_to_do_is_killed(hosts: Hosts) -> None:
    group: Any = NoProcessGroup()
    hosts._process_group = group
    env = Idle(ACTION, OBSERVATION)
    with pytest.raises(MemoryError):
        hosts.start(env, "process", None, RestartPolicy(), 1.0)
    assert group.killed == [group]
    assert hosts.start(env, "process", "second", RestartPolicy(), 1.0) == "second"
    assert group.killed == [group]
