"""The policies of one worker, and the weights that come for them over its owner's pipe.

Leaves out who sends weights, and to whom (`policy_processes.py`).
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from envbus.bus.errors import ClosedError, EnvbusError, ProtocolError
from envbus.bus.pipe import Pipe
from envbus.runner.policies import Policy
from envbus.runner.policy_counts import Counting
from envbus.runner.policy_protocol import PolicyCounts

__all__ = ["PROBE", "HostedPolicies", "HostedPolicy", "Pushed", "Report"]

logger = logging.getLogger("envbus.runner.policy_workers")

#: Over the pipe, in the place of weights: asks for a sign of life, which is a report of nothing.
PROBE: Final = b"?"
#: Tells the owner, after weights were taken over, or not: policy id, push, and what was raised;
#: nothing of these to say that this lives.
Report = Callable[[str, int, str], None]


class Pushed(NamedTuple):
    """Weights on their way to a worker, over its pipe."""

    policy_id: str
    #: Counts the pushes of this policy, from 1.
    push: int
    version: int
    weights: Any


class HostedPolicy:
    """A policy, and how new its weights are."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.push = 0
        self.counting = Counting()

    def counts(self) -> PolicyCounts:
        """Return what was counted of it."""
        return self.counting.counts(self.policy.policy_version, self.push)


class HostedPolicies:
    """The policies of one worker.

    Args:
        pipe: To the process that owns the worker: weights come there, each a pickled `Pushed`,
            questions for a sign of life (`PROBE`), and at the end an empty parcel.

    Attributes:
        is_over: Whether the owner said to leave, or is gone.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        pipe: Pipe,
        next_parcel: int,
        report: Report,
    ) -> None:
        self.is_over = False
        self._policies = policies
        self._pipe = pipe
        self._next_parcel = next_parcel
        self._report = report

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __getitem__(self, policy_id: str) -> HostedPolicy:
        """Return a policy.

        Raises:
            ProtocolError: It is not here.
        """
        try:
            return self._policies[policy_id]
        except KeyError:
            known = ", ".join(self._policies)
            raise ProtocolError(f"no policy {policy_id!r} is here; there are: {known}") from None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_weights` is worth a call."""
        return self._pipe.fileno()

    def take_weights(self) -> None:
        """Take over the weights that have come; of each policy the latest.

        Raises:
            SystemExit: Some were lost: no memory or descriptor is left for them, for example.
        """
        pushes = self._received()
        latest = {pushed.policy_id: pushed for pushed in pushes}
        problems: dict[str, str] = {}
        for policy_id, pushed in latest.items():
            hosted = self._policies[policy_id]
            try:
                hosted.policy.set_weights(pushed.weights, pushed.version)
            except Exception as exc:  # the border: the policy is the user's
                logger.exception("the weights of %r were not taken over", policy_id)
                problems[policy_id] = f"{type(exc).__name__}: {exc}"
            else:
                hosted.push = pushed.push
        for pushed in pushes:
            with contextlib.suppress(EnvbusError):
                self._report(pushed.policy_id, pushed.push, problems.get(pushed.policy_id, ""))

    def _received(self) -> list[Pushed]:
        """Return the weights that have come, after an answer to each other thing that has."""
        pushes: list[Pushed] = []
        try:
            while self._pipe.has(self._next_parcel):
                data = self._pipe.receive_bytes(self._next_parcel, 0.0)
                self._next_parcel += 1
                if not data:  # nothing more will come
                    self.is_over = True
                    break
                if data == PROBE:
                    with contextlib.suppress(EnvbusError):
                        self._report("", 0, "")
                    continue
                pushes.append(Pushed(*pickle.loads(data)))  # noqa: S301 (our own pipe)
        except ClosedError:  # its owner is gone: so will it be at once
            self.is_over = True
        except Exception as exc:  # they are lost: the next life of this worker is given them
            raise SystemExit(f"weights that were pushed cannot be taken in: {exc!r}") from exc
        return pushes
