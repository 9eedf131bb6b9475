"""Entry of an env actor's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from envbus.actors.env_actor import EnvActor
from envbus.actors.hosting import HANDOVER_TIMEOUT, host
from envbus.actors.protocol import CallResult, StepResult
from envbus.bus.codec import encode
from envbus.bus.messages import Tree
from envbus.bus.pipe import Pipe, PipeOutbox

__all__ = ["ENTRY", "main"]

#: What the fork server runs in the child.
ENTRY: Final = f"{__name__}:main"


def main(pipe: Pipe) -> None:
    """Host envs for the runner at the other end of `pipe` until it says to stop."""
    host(
        pipe,
        lambda tell: EnvActor(
            receive_fd=lambda number: pipe.receive_fd(number, HANDOVER_TIMEOUT),
            check=_checker(pipe),
            report=tell,
        ),
        service="env",
        lenient=(StepResult,),
    )


def _checker(pipe: Pipe) -> Callable[[object], None]:
    trial = PipeOutbox(pipe)

    def check(value: object) -> None:
        try:
            encode(CallResult(values=Tree(value)), trial)
        finally:
            trial.discard()

    return check
