from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from envbus.bus.errors import ClosedError, DecodeError, EncodeError
from envbus.bus.process.pipe import Pipe, PipeCodec
from envbus.bus.wire.codec import Placeholder
from envbus.bus.wire.messages import Reply, Tree


class Strict(Reply, frozen=True, kw_only=True):
    tree: Tree


class Lenient(Reply, frozen=True, kw_only=True):
    tree: Tree


@dataclass
class Thing:
    """Nothing that the codec itself can express."""

    value: int


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")

    def __repr__(self) -> str:
        return "u" * 1000


class Mute(Unpicklable):
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


class Unreadable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise LookupError("gone")


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    ours, theirs = Pipe.pair()
    with ours, theirs:
        yield ours, theirs


def test_what_the_frames_express_does_not_use_the_pipe(pipes: tuple[Pipe, Pipe]) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    pipes[0].close()
    frames = one.encode(Strict(tree=Tree({"a": (1, np.arange(3))})))
    assert other.decode(Strict, frames).tree.value["a"][0] == 1


def test_any_object_goes_over_the_pipe(pipes: tuple[Pipe, Pipe]) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    for turn in range(50):
        frames = one.encode(Strict(tree=Tree([turn, Thing(turn), lambda turn=turn: turn * 2])))
        number, some, function = other.decode(Strict, frames).tree.value
        assert (number, some, function()) == (turn, Thing(turn), turn * 2)


def test_both_directions_at_once(pipes: tuple[Pipe, Pipe]) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    for turn in range(20):
        there, back = (
            one.encode(Strict(tree=Tree(Thing(turn)))),
            other.encode(Strict(tree=Tree(Thing(-1)))),
        )
        assert one.decode(Strict, back).tree.value == Thing(-1)
        assert other.decode(Strict, there).tree.value == Thing(turn)


def test_messages_that_are_never_decoded_do_not_shift_the_others(
    pipes: tuple[Pipe, Pipe],
) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    all_frames = [one.encode(Strict(tree=Tree(Thing(turn)))) for turn in range(30)]
    for turn in (3, 4, 20, 29):
        assert other.decode(Strict, all_frames[turn]).tree.value == Thing(turn)


def test_an_object_that_cannot_be_pickled_is_named_and_nothing_is_sent(
    pipes: tuple[Pipe, Pipe],
) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    for culprit in (threading.Lock(), Unpicklable()):
        with pytest.raises(EncodeError, match=type(culprit).__name__):
            one.encode(Strict(tree=Tree([Thing(1), culprit])))
    frames = one.encode(Strict(tree=Tree(Thing(7))))
    assert other.decode(Strict, frames).tree.value == Thing(7)


def test_a_lenient_payload_gets_a_placeholder_and_one_warning(
    pipes: tuple[Pipe, Pipe], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = PipeCodec(pipes[0], lenient=(Lenient,)), PipeCodec(pipes[1])
    for _ in range(2):
        frames = one.encode(Lenient(tree=Tree([Unpicklable(), Mute(), Thing(1)])))
        first, second, third = other.decode(Lenient, frames).tree.value
        assert isinstance(first, Placeholder)
        assert "Unpicklable" in repr(first)
        assert len(repr(first)) < 500
        assert isinstance(second, Placeholder)
        assert third == Thing(1)
    assert caplog.text.count("replaced by a placeholder") == 1
    with pytest.raises(EncodeError):
        one.encode(Strict(tree=Tree(Unpicklable())))


def test_in_a_lenient_payload_a_placeholder_stands_for_what_cannot_be_rebuilt(
    pipes: tuple[Pipe, Pipe], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = PipeCodec(pipes[0]), PipeCodec(pipes[1], lenient=(Lenient,))
    for _ in range(2):
        frames = one.encode(Lenient(tree=Tree([Unreadable(), Thing(1)])))
        first, second = other.decode(Lenient, frames).tree.value
        assert isinstance(first, Placeholder)
        assert first.text == "LookupError: gone"
        assert second == Thing(1)
    assert caplog.text.count("replaced by a placeholder") == 1
    with pytest.raises(DecodeError, match="LookupError: gone"):
        other.decode(Strict, one.encode(Strict(tree=Tree(Unreadable()))))


def test_an_object_that_cannot_be_rebuilt_fails_its_message_only(
    pipes: tuple[Pipe, Pipe],
) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    bad, good = one.encode(Strict(tree=Tree(Unreadable()))), one.encode(Strict(tree=Tree(Thing(1))))
    with pytest.raises(DecodeError, match="LookupError: gone"):
        other.decode(Strict, bad)
    assert other.decode(Strict, good).tree.value == Thing(1)


def test_a_hung_up_pipe_is_told_apart(pipes: tuple[Pipe, Pipe]) -> None:
    one, other = (PipeCodec(pipe) for pipe in pipes)
    frames = one.encode(Strict(tree=Tree(Thing(1))))
    pipes[0].close()
    assert other.decode(Strict, frames).tree.value == Thing(1)  # sent before
    with pytest.raises(ClosedError):
        other.encode(Strict(tree=Tree(Thing(2))))


@pytest.mark.parametrize("writable", [False, True])
def test_decoded_arrays_are_the_callers_own_if_it_wants(
    pipes: tuple[Pipe, Pipe], writable: bool
) -> None:
    one, other = PipeCodec(pipes[0]), PipeCodec(pipes[1], writable=writable)
    frames = one.encode(Strict(tree=Tree(np.arange(10_000))))
    assert other.decode(Strict, frames).tree.value.flags.writeable is writable
