"""Which injection a fault comes from, and how long it took until the env worked again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envbus.runner.chaos.messages import KindReport
from envbus.runner.chaos.schedule import HARMLESS, FaultKind, Injection

__all__ = ["Tracker"]

#: Lines of a message that are told: enough to see what a process that did not answer was doing.
_TOLD_LINES = 6


@dataclass
class _Open:
    kind: FaultKind
    at: float
    #: A fault of this env must follow; else it is of the same actor, or nothing need follow.
    must_fail: bool
    #: When it is over.
    over_at: float
    failed: bool = False


class Tracker:
    """Injections whose consequences are not over, by env.

    Args:
        pause: Seconds from an injection that had no consequence to the next one in the same env.
        patience: Seconds for which an injection explains faults after it is over.
    """

    def __init__(self, pause: float, patience: float) -> None:
        self.kinds: dict[str, KindReport] = {kind.name: KindReport() for kind in FaultKind}
        self.unexplained: list[str] = []
        self.faults = 0
        self._pause = pause
        self._patience = patience
        self._open: dict[int, _Open] = {}
        #: What reached an env on its way back from something else; it counts from then on.
        self._behind: dict[int, _Open] = {}

    def is_free(self, env_id: int, now: float) -> bool:
        """Whether nothing that was done to this env is under way."""
        found = self._open.get(env_id)
        if found is None:
            return True
        return not found.failed and not found.must_fail and now > found.over_at + self._pause

    def passed_over(self, kind: FaultKind) -> None:
        """An injection could not be made in time."""
        self.kinds[kind.name].passed_over += 1

    def injected(self, injection: Injection, companions: Iterable[int], now: float) -> None:
        """An injection was made; `companions` are the other envs that it may reach."""
        self.kinds[injection.kind.name].injected += 1
        harmless = injection.kind in HARMLESS
        lasts = (
            injection.amount if injection.kind in (FaultKind.PAUSE, FaultKind.NEARLY_SLOW) else 0.0
        )
        for env_id in (injection.env_id, *companions):
            aimed_at = env_id == injection.env_id
            found = _Open(injection.kind, now, aimed_at and not harmless, now + lasts)
            if aimed_at or self.is_free(env_id, now):
                self._open[env_id] = found
            else:
                self._behind[env_id] = found

    def answered(self, env_id: int) -> None:
        """A row of the env came. A slow step is not late if the driver was away for longer."""
        found = self._open.get(env_id)
        if found is not None and found.kind is FaultKind.SLOW and not found.failed:
            self._is_over(env_id)

    def recycled(self, env_id: int) -> None:
        """A row of a fresh process came without a fault: what was done hit the one that left."""
        found = self._open.get(env_id)
        if found is not None and not found.failed:
            self._is_over(env_id)

    def failed(self, env_id: int, cause: str, message: str, now: float) -> None:
        """A fault was reported."""
        self.faults += 1
        found = self._open.get(env_id)
        if found is None or not (
            found.must_fail or found.failed or now <= found.over_at + self._patience
        ):
            text = "\n".join(message.splitlines()[:_TOLD_LINES])
            self.unexplained.append(f"env {env_id}, {cause}: {text}")
            return
        report = self.kinds[found.kind.name]
        report.faults[cause] = report.faults.get(cause, 0) + 1
        if not found.failed:
            report.told.append(now - found.at)
        found.failed = True

    def works(self, env_id: int, now: float) -> None:
        """The first observation of a new life came."""
        found = self._open.get(env_id)
        if found is not None and found.failed:
            self.kinds[found.kind.name].recovered.append(now - found.at)
            self._is_over(env_id)

    def _is_over(self, env_id: int) -> None:
        """What was done to the env has had its consequence; what came behind it counts now."""
        del self._open[env_id]
        if env_id in self._behind:
            self._open[env_id] = self._behind.pop(env_id)

    def unnoticed(self) -> list[str]:
        """Return the injections that had to end an episode, and of which nothing was reported."""
        return [
            f"env {env_id}: {found.kind.value}"
            for env_id, found in self._open.items()
            if found.must_fail and not found.failed
        ]
