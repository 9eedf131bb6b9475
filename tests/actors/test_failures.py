from __future__ import annotations

import ctypes  # noqa: F401 (looked up by its name)
import io
import sys
import traceback
from typing import Any, ClassVar

import pytest

from envbus.actors.failures import original_of, slot_error
from envbus.actors.protocol import CallResult, SlotError
from envbus.bus.wire.messages import Tree
from tests.actors.driver import carry


class TwoArgumentsError(Exception):
    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(what, code)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def caught(error: BaseException) -> SlotError:
    """The error as the runner gets it."""
    try:
        raise error
    except BaseException as raised:
        record = slot_error(3, "step", raised)
    return carry(CallResult(values=Tree([]), errors=[record])).errors[0]


def test_type_message_and_traceback_are_told() -> None:
    record = caught(ValueError("bad action"))
    assert (record.slot, record.phase) == (3, "step")
    assert (record.type_module, record.type_name) == ("builtins", "ValueError")
    assert record.message == "bad action"
    assert "in caught" in record.traceback
    assert record.traceback.endswith("ValueError: bad action\n")
    assert record.args == Tree(("bad action",))


def test_an_exception_with_an_odd_constructor_is_told() -> None:
    record = caught(TwoArgumentsError("x", code=5))
    assert record.type_name == "TwoArgumentsError"
    assert record.args == Tree(("x", 5))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_that_would_end_a_program_are_told(error: BaseException) -> None:
    assert caught(error).type_name == type(error).__name__


def test_an_exception_without_arguments_is_told() -> None:
    record = caught(RuntimeError())
    assert record.message == ""
    assert record.args == Tree(())


def test_an_exception_without_a_text_is_told() -> None:
    record = caught(UnprintableError())
    assert record.message == "(its text cannot be shown: KeyError in __str__)"
    assert "UnprintableError" in record.traceback


class ExitingTextError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class TextLikeError(Exception):
    class Text(str):
        __slots__ = ()

        def encode(self, *args: str) -> bytes:
            raise RuntimeError("no bytes")

    def __str__(self) -> str:
        return self.Text("a text")


class PropertyError(Exception):
    @property
    def args(self) -> Any:
        raise RuntimeError("no arguments")


class Nameless(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no module")


@pytest.mark.parametrize(
    "cls", [ExitingTextError, TextLikeError, PropertyError, Nameless("E", (Exception,), {})]
)
def test_no_class_keeps_its_exceptions_from_being_told(cls: type[Exception]) -> None:
    record = caught(cls("x"))
    assert record.type_name == cls.__qualname__
    assert "in caught" in record.traceback
    assert record.args == Tree(("x",))


def test_a_cause_without_a_text_does_not_hide_the_rest() -> None:
    error = RuntimeError("outer")
    error.__cause__ = ExitingTextError("x")
    error.__context__ = error
    record = caught(error)
    assert record.message == "outer"
    assert "in caught" in record.traceback


def test_causes_are_told() -> None:
    error = RuntimeError("outer")
    error.__cause__ = ValueError("the cause")
    record = caught(error)
    assert "ValueError: the cause" in record.traceback
    assert "direct cause" in record.traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_groups_are_told() -> None:
    group = eval("ExceptionGroup('both', [ValueError('one'), TypeError('two')])")  # noqa: S307
    record = caught(group)
    assert "ValueError: one" in record.traceback
    assert "TypeError: two" in record.traceback
    assert record.args is None


@pytest.mark.parametrize(
    "args", [(object(),), ([1],), (2**70,), (1, (object(),)), ("\udc80",), (b"x" * 10**6,)]
)
def test_arguments_that_are_not_plain_are_left_out(args: tuple[Any, ...]) -> None:
    assert caught(ValueError(*args)).args is None


def test_plain_arguments_keep_their_types() -> None:
    args = ("a", 1, 2.5, True, None, b"x", (1, ("y",)))
    assert caught(ValueError(*args)).args == Tree(args)


def test_a_text_that_utf8_cannot_express_is_escaped() -> None:
    assert caught(ValueError("file \udc80")).message == "file \\udc80"


def test_a_huge_text_is_cut() -> None:
    record = caught(ValueError("x" * 10**7))
    assert len(record.message) < 70_000
    assert "characters left out" in record.message
    assert len(record.traceback) < 70_000


def test_a_recursion_is_told() -> None:
    def deeper() -> None:
        deeper()

    try:
        deeper()
    except RecursionError as error:
        record = slot_error(0, "step", error)
    assert record.type_name == "RecursionError"
    assert "deeper" in record.traceback


def test_an_exception_is_found_by_its_dotted_name_alone() -> None:
    found = original_of("", "builtins.ValueError", "no", trusted=True)
    assert type(found) is ValueError
    assert str(found) == "no"
    assert original_of("", "no.such.Error", "no", trusted=True) is None
    assert original_of("", "ValueError", "no", trusted=True) is None
    assert original_of("", "builtins.SystemExit", "no", trusted=True) is None


class Sims:
    class CrashedError(Exception):
        pass

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for")


sims = Sims()


def test_a_name_that_is_told_is_looked_up_and_runs_nothing() -> None:
    assert type(original_of(__name__, "Sims.CrashedError", "no", trusted=True)) is Sims.CrashedError
    assert original_of(__name__, "sims.CrashedError", "no", trusted=True) is None
    assert original_of(__name__, "sims.anything", "no", trusted=True) is None
    assert (
        original_of("ctypes", "cdll.no_such_library", "no", trusted=True) is None
    )  # else it were loaded
    assert original_of("", "ctypes.cdll.no_such_library", "no", trusted=True) is None


class OwnCodeError(Exception):
    """Tells what of it runs."""

    ran: ClassVar[list[str]] = []

    def __init__(self, text: str) -> None:
        self.ran.append("__init__")
        super().__init__(text)


class BelowError(OwnCodeError):
    pass


class NewError(ValueError):
    def __new__(cls, *args: str) -> NewError:
        OwnCodeError.ran.append("__new__")
        return super().__new__(cls, *args)


class ShownError(Exception):
    def __str__(self) -> str:
        OwnCodeError.ran.append("__str__")
        return str(self.args[0])


class AskedError(Exception):
    def __getattr__(self, name: str) -> Any:
        OwnCodeError.ran.append(name)
        raise AttributeError(name)


class NotedError(Exception):
    @property
    def __notes__(self) -> list[str]:
        OwnCodeError.ran.append("__notes__")
        return []


class Calling(type):
    def __call__(cls, *args: object) -> Any:
        OwnCodeError.ran.append("__call__")
        return super().__call__(*args)


class MadeOtherwiseError(Exception, metaclass=Calling):
    pass


@pytest.mark.parametrize(
    "cls",
    [
        OwnCodeError,
        BelowError,
        NewError,
        ShownError,
        MadeOtherwiseError,
        AskedError,
        NotedError,
    ],
)
def test_who_is_not_trusted_has_no_code_of_a_class_run(cls: type[Exception]) -> None:
    OwnCodeError.ran.clear()
    for told in ((__name__, cls.__name__), ("", f"{__name__}.{cls.__name__}")):
        assert original_of(*told, "no", ("no",), trusted=False) is None
    assert OwnCodeError.ran == []
    made = original_of(__name__, cls.__name__, "no", trusted=True)
    assert type(made) is cls
    traceback.print_exception(made, file=io.StringIO())
    assert OwnCodeError.ran != []


@pytest.mark.parametrize("cls", [ValueError, KeyError, OSError, Sims.CrashedError])
def test_who_is_not_trusted_may_name_classes_without_code_of_their_own(
    cls: type[Exception],
) -> None:
    found = original_of(cls.__module__, cls.__qualname__, str(cls("no")), ("no",), trusted=False)
    assert type(found) is cls


def test_names_without_end_are_not_looked_up() -> None:
    assert original_of("", "a." * 10**6, "no", trusted=False) is None
