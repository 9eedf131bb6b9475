"""Ctrl-C that waits for the end of what it must not break off."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from envbus.bus import interrupts
from envbus.bus.interrupts import (
    exit_on_termination,
    hand_out,
    interruptible,
    uninterrupted,
    uninterrupted_call,
    without_interrupts,
)


@pytest.fixture
def told() -> Iterator[list[int]]:
    """What a handler of the user's own was told."""
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    yield told
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_raised_at_the_end_of_the_context_and_what_was_begun_is_done() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            ctrl_c()
            done.append(1)
            with uninterrupted():
                ctrl_c()
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_waits_within_the_context_are_broken_off_also_by_what_came_before() -> None:
    def wait(before: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        with uninterrupted():
            before()
            with interruptible():
                meanwhile()
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        wait(lambda: None, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        wait(ctrl_c, lambda: pytest.fail("it waited"))


def border_of_a_wait(line: int) -> bool:
    """Come to and leave a wait, with Ctrl-C at the n-th line of that; return whether it came."""

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        is_border = frame.f_code in codes
        return on_line if is_border else None

    def on_line(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal line
        line -= event == "line"
        if event == "line" and line == 0:
            ctrl_c()
        return on_line

    codes = [interruptible.__enter__.__code__, interruptible.__exit__.__code__]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with interruptible():
            pass
    finally:
        sys.settrace(before)
    return line <= 0


def test_what_broke_off_a_wait_at_its_border_opens_nothing_to_the_next_ctrl_c() -> None:
    line, in_time = 0, 0
    is_over = False
    while not is_over:
        line += 1
        went_on = []
        try:
            with uninterrupted():
                try:
                    is_over = not border_of_a_wait(line)
                except KeyboardInterrupt:
                    in_time += 1
                    ctrl_c()
                    went_on.append(line)
                    raise
        except KeyboardInterrupt:
            assert went_on == [line]
        else:
            assert is_over
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert in_time > 1


def test_what_breaks_off_a_call_that_got_stuck_opens_nothing_to_the_next_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    done = []

    def work() -> None:
        with uninterrupted():
            try:
                ctrl_c()
                ctrl_c()
                pytest.fail("it went on")
            except KeyboardInterrupt:
                ctrl_c()
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_uninterrupted_within_a_users_code_is_so_there_too() -> None:
    done = []

    def work() -> None:
        with uninterrupted(), interruptible():
            with uninterrupted():
                ctrl_c()
                done.append(1)
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class TimeIsUp(Exception):
    """What the handler of a time limit raises."""


@pytest.fixture(params=["SIGALRM", "SIGTERM", "SIGUSR1"])
def limit(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises."""

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    number = getattr(signal, request.param)
    before = signal.signal(number, raise_it)
    yield number
    assert signal.getsignal(number) is raise_it
    signal.signal(number, before)


def test_other_signals_whose_handlers_raise_are_kept_likewise(limit: int) -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(limit)
            done.append(1)

    def wait() -> None:
        with uninterrupted(), interruptible():
            signal.raise_signal(limit)
            pytest.fail("it went on")

    with pytest.raises(TimeIsUp):
        work()
    assert done == [1]
    with pytest.raises(TimeIsUp):
        wait()


def test_signals_that_came_together_are_all_told(limit: int, told: list[int]) -> None:
    def work() -> None:
        with uninterrupted():
            ctrl_c()
            signal.raise_signal(limit)
            ctrl_c()

    with pytest.raises(TimeIsUp):
        work()
    assert told == [signal.SIGINT]


def test_a_handler_of_the_users_own_is_told_once_and_put_back(told: list[int]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        ctrl_c()
        ctrl_c()
        assert told == []
        with interruptible():
            assert told == [signal.SIGINT]
            ctrl_c()
    assert told == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_within_the_context_stays(told: list[int]) -> None:
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    assert told == []


def test_what_a_debugger_puts_back_after_the_context_keeps_nothing() -> None:
    with uninterrupted():
        stand_in = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, stand_in)
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_does_with_ctrl_c_is_left_alone(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted(), interruptible():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    with without_interrupts(), uninterrupted():
        ctrl_c()


def test_other_threads_are_never_interrupted_and_change_nothing() -> None:
    found = []

    def look() -> None:
        with uninterrupted(), interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    with uninterrupted():
        mine = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        ctrl = pytest.raises(KeyboardInterrupt)
        with ctrl, interruptible():
            ctrl_c()
    assert found == [mine]


def test_a_result_that_cannot_be_handed_out_is_kept() -> None:
    kept: list[int] = []

    def make(interrupt: Callable[[], None]) -> int:
        interrupt()
        return 7

    with pytest.raises(KeyboardInterrupt):
        hand_out(lambda: make(ctrl_c), kept.append)
    assert kept == [7]
    assert hand_out(lambda: make(lambda: None), kept.append) == 7
    with pytest.raises(ZeroDivisionError):
        hand_out(lambda: make(lambda: 1 // 0), kept.append)  # type: ignore[arg-type, return-value]
    assert kept == [7]


def test_a_function_is_uninterrupted_as_a_whole() -> None:
    done = []

    @uninterrupted_call
    def work() -> None:
        """Do it."""
        ctrl_c()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert work.__doc__ == "Do it."


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_program_that_is_to_end_leaves_the_context_and_its_handlers_are_put_back(
    kind: str,
) -> None:
    number = getattr(signal, kind)

    def work() -> None:
        with exit_on_termination(), uninterrupted():
            with interruptible():
                signal.raise_signal(number)
            pytest.fail("it went on")

    before = signal.signal(number, signal.SIG_DFL)  # a shell may have these tests ignore it
    try:
        with pytest.raises(SystemExit) as caught:
            work()
        assert caught.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_program_that_ignores_hangups_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_termination():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
