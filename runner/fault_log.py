"""What happened to the envs of a pool: counted, logged once, and told to the caller's hooks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envbus.bus.interrupts import interruptible
from envbus.runner.config import check_kind
from envbus.runner.faults import Fault, FaultCause

__all__ = ["FaultLog", "Hooks"]

logger = logging.getLogger("envbus.runner.faults")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Functions that are told of faults, in the thread of `step`, `reset` or `recv`.

    They are called when the results of that call are complete. What they raise comes out of it, and
    is logged with the hook's name; the results are kept: `step_wait()`, `reset_wait()` or `recv()`
    returns them.
    """

    #: An env or its actor failed; called once per env.
    on_fault: Callable[[Fault], object] | None = None
    #: An env works again: its id, and the number of its life, from 1.
    on_restart: Callable[[int, int], object] | None = None
    #: An env is not made anew any more; after `on_fault`.
    on_give_up: Callable[[Fault], object] | None = None


class FaultLog:
    """Counts, log lines and hooks of one pool."""

    def __init__(self, hooks: Hooks | None) -> None:
        if hooks is not None:
            check_kind("hooks", hooks, Hooks, example="Hooks(on_fault=print)")
        self._hooks = hooks or Hooks()
        self._untold: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = []
        self._causes: Counter[FaultCause] = Counter()

    def counts(self) -> dict[str, int]:
        """Return the number of faults so far by cause."""
        return {cause.value: number for cause, number in self._causes.items()}

    @property
    def untold(self) -> bool:
        """Whether `tell` has something to call."""
        return bool(self._untold)

    def fault(self, fault: Fault) -> None:
        """An env failed."""
        self._causes[fault.cause] += 1
        # A whole actor's end was logged where it was noticed.
        if fault.error is not None:
            quiet = fault.cause is FaultCause.REQUEST
            logger.log(logging.INFO if quiet else logging.WARNING, "%s", fault.message)
        self._queue("on_fault", self._hooks.on_fault, fault)
        if fault.given_up:
            logger.error("env %d is given up: %s", fault.env_id, fault.message)
            self._queue("on_give_up", self._hooks.on_give_up, fault)

    def restarted(self, env_id: int, life: int) -> None:
        """An env works again."""
        self._queue("on_restart", self._hooks.on_restart, env_id, life)

    def tell(self) -> None:
        """Call the hooks for what happened since the last call."""
        while self._untold:
            name, hook, arguments = self._untold.pop(0)
            try:
                with interruptible():
                    hook(*arguments)
            except Exception:
                logger.error("the hook %s raised", name, exc_info=True)
                raise

    def _queue(self, name: str, hook: Callable[..., object] | None, *arguments: object) -> None:
        if hook is not None:
            self._untold.append((name, hook, arguments))
