from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from envbus.actors.failures import slot_error
from envbus.actors.protocol import SlotError
from envbus.bus.errors import EnvbusError
from envbus.runner.errors import (
    ActorLostError,
    EnvError,
    advise,
    env_errors,
    failure_of,
    to_exception,
)


class TwoWordsError(Exception):
    def __init__(self, left: str, *, right: str) -> None:
        super().__init__(left, right)


class ChangingTextError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"{id(self)}: {self.text}"


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class ExitingError(Exception):
    def __init__(self, text: str) -> None:
        if any(frame.name == "to_exception" for frame in traceback.extract_stack()):
            raise SystemExit(text)
        super().__init__(text)


class Outer:
    class InnerError(ValueError):
        pass


def caught(error: BaseException, phase: str = "step") -> SlotError:
    """Return what an actor tells about `error`."""
    try:
        raise error
    except BaseException as raised:
        return slot_error(1, phase, raised)


def rebuilt(error: BaseException, phase: str = "step") -> tuple[EnvError, Exception | None]:
    return to_exception(
        caught(error, phase), env_id=5, actor="actor-1", incarnation=2, trusted=True
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("a key"),
        OSError(2, "No such file"),
        ZeroDivisionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        Outer.InnerError("nested", 3),
        AssertionError(("a", 1, None)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_its_own_type(error: Exception) -> None:
    _, original = rebuilt(error)
    assert type(original) is type(error)
    assert original is not None
    assert original.args == error.args
    assert str(original) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        TwoWordsError("left", right="right"),
        ChangingTextError("x"),
        KeyError(object()),
        UnprintableError("x"),
        ExitingError("x"),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_rebuilt_or_would_end_the_caller_stands_in_the_text(
    error: BaseException,
) -> None:
    env_error, original = rebuilt(error)
    assert original is None
    assert type(error).__qualname__ in str(env_error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/no/such/file"),
        ValueError(object()),
        ValueError(2**80),
        RuntimeError({"a": "dict"}),
    ],
    ids=lambda error: str(error)[:20],
)
def test_where_the_arguments_do_not_give_it_back_the_text_may(error: Exception) -> None:
    _, original = rebuilt(error)
    assert type(original) is type(error)
    assert str(original) == str(error)


def test_a_class_of_a_function_is_not_looked_for() -> None:
    class LocalError(Exception):
        pass

    assert rebuilt(LocalError("x"))[1] is None


def test_a_name_from_a_message_imports_no_module() -> None:
    told = SlotError(
        slot=0,
        phase="step",
        type_module="antigravity",
        type_name="Error",
        message="x",
        traceback="",
        args=caught(ValueError("x")).args,
    )
    assert to_exception(told, env_id=0, actor="a", incarnation=0, trusted=True)[1] is None


@pytest.mark.parametrize("name", ["len", "print", "object", "__import__", "no.such.thing"])
def test_only_exceptions_are_rebuilt(name: str) -> None:
    told = SlotError(
        slot=0,
        phase="step",
        type_module="builtins",
        type_name=name,
        message="x",
        traceback="",
        args=caught(ValueError("x")).args,
    )
    assert to_exception(told, env_id=0, actor="a", incarnation=0, trusted=True)[1] is None


def test_the_error_names_env_actor_life_and_phase_and_shows_the_remote_line() -> None:
    """An automatic reset is not taken for a step."""
    env_error, _ = rebuilt(ValueError("no"), "autoreset")
    assert (env_error.env_id, env_error.actor, env_error.incarnation) == (5, "actor-1", 2)
    assert env_error.phase == "autoreset"
    assert env_error.remote_type == "builtins.ValueError"
    assert str(env_error).startswith(
        "env 5 (actor-1, incarnation 2) failed in autoreset: builtins.ValueError: no\n"
    )
    assert "raise error" in env_error.remote_traceback
    assert "test_errors.py" in str(env_error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rebuilt(ValueError("no"))[0],
        lambda: ActorLostError("actor-1 ended", env_ids=range(2, 4), actor="actor-1"),
    ],
)
def test_errors_survive_pickling(make: Callable[[], EnvbusError]) -> None:
    error = make()
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def raised_by(errors: list[tuple[EnvError, Exception | None]]) -> Exception:
    with pytest.raises(Exception) as caught_error:  # noqa: PT011 - any, to look at
        raise failure_of([error for error, _ in errors], [original for _, original in errors])
    return caught_error.value


def test_one_error_is_raised_as_its_type_because_of_the_env_error_and_told_nowhere_else(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    env_error, original = rebuilt(ValueError("no"))
    error = raised_by([(env_error, original)])
    assert error is original
    assert error.__cause__ is env_error
    assert not caplog.records
    assert not recwarn.list


def test_a_traceback_that_several_envs_have_in_common_is_told_once() -> None:
    several = [
        to_exception(caught(ValueError("no")), env_id=i, actor="a", incarnation=0, trusted=True)
        for i in range(8)
    ]
    text = "".join(traceback.format_exception(raised_by(several)))
    assert text.count("in caught") == 1
    assert all(error.remote_traceback.count("in caught") == 1 for error, _ in several)


def test_an_error_that_could_not_be_rebuilt_is_raised_as_env_error() -> None:
    env_error, original = rebuilt(TwoWordsError("left", right="right"))
    error = raised_by([(env_error, original)])
    assert error is env_error
    assert error.__cause__ is None


def test_of_several_the_last_is_raised_and_all_are_told() -> None:
    several = [rebuilt(ValueError("first")), rebuilt(KeyError("second"))]
    error = raised_by(several)
    assert error is several[1][1]
    cause: Any = error.__cause__
    if sys.version_info < (3, 11):  # without groups
        assert cause is several[1][0]
        return
    assert list(cause.exceptions) == [several[0][0], several[1][0]]


def test_the_errors_of_envs_are_found_behind_what_was_raised() -> None:
    several = [rebuilt(ValueError("first")), rebuilt(TwoWordsError("left", right="right"))]
    expected = [error for error, _ in several[-2 if sys.version_info >= (3, 11) else -1 :]]
    assert env_errors(raised_by(several[:1])) == [several[0][0]]
    assert env_errors(raised_by(several[1:])) == [several[1][0]]
    assert env_errors(raised_by(several)) == expected
    assert env_errors(ValueError("of nobody")) == []


def test_advice_stands_before_what_may_be_long() -> None:
    assert advise("it ended", "close it") == "it ended; close it"
    assert advise("it ended\nlong\nlist", "close it") == "it ended; close it\nlong\nlist"
