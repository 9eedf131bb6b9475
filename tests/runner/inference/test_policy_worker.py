from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from envbus.bus.errors import ProtocolError
from envbus.bus.process.pipe import Pipe
from envbus.bus.supervision.liveness_probe import PROBE
from envbus.runner.inference.policy_calls import HostedPolicy
from envbus.runner.inference.policy_worker import HostedPolicies, PushedWeights, WorkerReport
from envbus.runner.policies.policy import Policy


class Weighed(Policy):
    """Takes over any weights but `"bad"`."""

    def __init__(self) -> None:
        self.weights: Any = None

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        if weights == "bad":
            raise ValueError("no weights")
        super().set_weights({}, version)
        self.weights = weights


class Owner:
    """The other end of the pipe, and what it is told."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe.pair()
        self.policies = {name: Weighed() for name in ("a", "b")}
        self.told: list[tuple[str, int, str]] = []
        self.hosted = HostedPolicies(
            {name: HostedPolicy(policy) for name, policy in self.policies.items()},
            theirs,
            self.tell,
        )
        self._theirs = theirs

    def tell(self, report: WorkerReport) -> None:
        """Note a report."""
        self.told.append((report.policy_id, report.push, report.problem))

    def push(self, policy_id: str, push: int, weights: Any) -> None:
        """Send weights, of version `100 + push`."""
        self.send(pickle.dumps(tuple(PushedWeights(policy_id, push, 100 + push, weights))))

    def send(self, data: bytes) -> None:
        """Send a passed descriptor."""
        self.pipe.send(data)

    def close(self) -> None:
        """Close both ends."""
        self.pipe.close()
        self._theirs.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def test_of_several_pushes_the_latest_is_taken_over_and_each_is_reported(owner: Owner) -> None:
    owner.push("a", 1, "old")
    owner.push("b", 1, "other")
    owner.push("a", 2, "new")
    owner.hosted.take_weights()
    assert owner.policies["a"].weights == "new"
    assert owner.policies["b"].weights == "other"
    assert owner.policies["a"].policy_version == 102
    assert owner.hosted["a"].push == 2
    assert owner.told == [("a", 1, ""), ("b", 1, ""), ("a", 2, "")]
    owner.hosted.take_weights()  # nothing came
    assert len(owner.told) == 3


def test_weights_that_are_not_taken_over_leave_the_former_push(owner: Owner) -> None:
    owner.push("a", 1, "good")
    owner.hosted.take_weights()
    owner.push("a", 2, "bad")
    owner.push("b", 1, "good")
    owner.hosted.take_weights()
    assert owner.hosted["a"].push == 1
    assert owner.policies["a"].weights == owner.policies["b"].weights == "good"
    assert owner.told[1:] == [("a", 2, "ValueError: no weights"), ("b", 1, "")]


def test_a_question_for_a_sign_of_life_is_answered(owner: Owner) -> None:
    owner.send(PROBE)
    owner.push("a", 1, "good")
    owner.hosted.take_weights()
    assert owner.told == [("", 0, ""), ("a", 1, "")]
    assert not owner.hosted.is_over


@pytest.mark.parametrize("how", ["told", "owner gone"])
def test_it_is_over_once_the_owner_says_so_or_is_gone(owner: Owner, how: str) -> None:
    owner.push("a", 1, "last")
    if how == "told":
        owner.send(b"")
    else:
        owner.pipe.close()
    owner.hosted.take_weights()
    assert owner.hosted.is_over
    assert owner.policies["a"].weights == "last"


def test_a_policy_that_is_not_here_is_refused_with_those_that_are(owner: Owner) -> None:
    with pytest.raises(ProtocolError, match="'c' is here; there are: a, b"):
        owner.hosted["c"]
    assert list(owner.hosted) == ["a", "b"]


def test_a_worker_that_lost_weights_leaves_rather_than_go_on_without(owner: Owner) -> None:
    """It would wait for them for ever, and take over nothing that comes later."""
    with open(os.devnull) as other:
        owner.pipe.send_fd(owner.pipe.next_number(), other.fileno())
    owner.push("a", 2, "later")
    with pytest.raises(SystemExit, match="cannot be taken in"):
        owner.hosted.take_weights()


def test_a_worker_that_cannot_unpickle_weights_leaves(owner: Owner) -> None:
    owner.send(b"no pickle")
    with pytest.raises(SystemExit, match="cannot be taken in: UnpicklingError"):
        owner.hosted.take_weights()
