from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from envbus.bench.adapters import killing
from envbus.bench.adapters.killing import kill_and_start_again
from tests.waiting import pass_time


class Worker:
    """A process with the interface of `multiprocessing`'s."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "60"])
        self.pid = self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.wait(10)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    workers = [Worker(), Worker()]
    yield workers
    for worker in workers:
        worker.kill()
        worker.join()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "HANGS_AFTER", 0.05)


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def hang() -> None:
    while True:  # not `pause`, which a signal just before does not end
        pass_time(0.01)


def nothing() -> None:
    """All is well."""


def test_what_stepping_raises_is_told_and_new_workers_are_made(workers: list[Worker]) -> None:
    made: list[str] = []

    def step() -> None:
        workers[-1].join()
        raise EOFError

    broken = kill_and_start_again(workers, step, nothing, lambda: made.append("new"))
    assert (broken.raised, broken.left, broken.close_error) == ("EOFError", 1, "")
    assert made == ["new"]
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.usefixtures("short_patience")
def test_calls_that_hang_are_told(workers: list[Worker]) -> None:
    broken = kill_and_start_again(workers, hang, hang, nothing)
    assert (broken.raised, broken.close_error) == ("hangs", "hangs")
    assert broken.surfaced >= 0.05


def test_a_close_that_raises_is_told_with_its_module(workers: list[Worker]) -> None:
    error = subprocess.SubprocessError()
    broken = kill_and_start_again(workers, raising(OSError()), raising(error), nothing)
    assert (broken.raised, broken.close_error) == ("OSError", "subprocess.SubprocessError")
