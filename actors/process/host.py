"""Entry of an env actor's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from envbus.actors.env.actor import EnvActor
from envbus.actors.process.joining import host
from envbus.actors.protocol import CallResult, Making, StepResult
from envbus.bus.process.pipe import HANDOVER_TIMEOUT, Pipe, PipeOutbox
from envbus.bus.transport.words import Doer
from envbus.bus.wire.codec import encode
from envbus.bus.wire.messages import Tree

__all__ = ["ENTRY", "main"]

#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"


def main(pipe: Pipe) -> None:
    """Host envs for the runner at the other end of `pipe` until it says to stop."""
    words = Doer()
    actors: list[EnvActor] = []

    def make(tell: Callable[[Making], None]) -> EnvActor:
        actor = EnvActor(
            receive_fd=lambda number: pipe.receive_fd(number, HANDOVER_TIMEOUT),
            check=_checker(pipe),
            report=tell,
            words=words,
        )
        actors.append(actor)
        return actor

    host(
        pipe,
        make,
        service="env",
        lenient=(StepResult,),
        words=words,
        on_word=lambda: actors[0].step_by_word(),
    )


def _checker(pipe: Pipe) -> Callable[[object], None]:
    trial = PipeOutbox(pipe)

    def check(value: object) -> None:
        try:
            encode(CallResult(values=Tree(value)), trial)
        finally:
            trial.discard()

    return check
