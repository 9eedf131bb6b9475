"""What checks of servers are made of: what they have at hand, how they tell what they expect."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envbus.actors.external.protocol import (
    BridgeJoined,
    EndEpisode,
    EpisodeEnded,
    GetAction,
    JoinBridge,
    StartEpisode,
)
from envbus.bus.messages import FailureCode
from envbus.runner.diagnosis.spaces import SpaceSampler
from envbus.runner.diagnosis.talk import RefusedError, Talk

__all__ = [
    "Check",
    "CheckList",
    "FailedCheck",
    "Scene",
    "SkippedCheck",
    "expect_failure",
    "expect_refused",
]


class FailedCheck(Exception):
    """The server does not do what it has to."""


class SkippedCheck(Exception):
    """It cannot be decided."""


@dataclass
class Scene:
    """What a check has at hand."""

    #: Opens another connection, to which nothing was said.
    connect: Callable[[], Talk]
    #: One that has joined, and what it was told.
    talk: Talk
    joined: BridgeJoined
    sampler: SpaceSampler

    def observation(self) -> Any:
        """Return an observation inside the space."""
        return self.sampler.observation()

    def start(self, **settings: Any) -> str:
        """Begin an episode."""
        return self.talk.ask(StartEpisode(**settings)).episode_id

    def get_action(self, episode_id: str, **how: Any) -> Any:
        """Return an action, checked."""
        request = GetAction(episode_id=episode_id, observation=self.observation())
        chosen = self.talk.ask(request, **how)
        self.check_action(chosen.action)
        return chosen.action

    def check_action(self, action: Any) -> None:
        """Fail if it is outside the space."""
        reason = self.sampler.what_is_wrong_with(action)
        if reason:
            raise FailedCheck(f"the action is outside the declared space: {reason}")

    def end(self, episode_id: str, **settings: Any) -> EpisodeEnded:
        """End an episode."""
        request = EndEpisode(episode_id=episode_id, observation=self.observation(), **settings)
        return self.talk.ask(request)

    def join_another(self, **settings: Any) -> tuple[Talk, BridgeJoined]:
        """Return another client that has joined."""
        other = self.connect()
        try:
            other.say_hello(f"conformance-{secrets.token_hex(4)}")
            return other, other.ask(JoinBridge(client="conformance", **settings))
        except BaseException:
            other.close()
            raise


@dataclass(frozen=True)
class Check:
    """One rule."""

    name: str
    section: str
    run: Callable[[Scene], None]


class CheckList(list[Check]):
    """Checks of one kind, in the order in which they are run."""

    def check(self, section: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
        """Add the decorated function, which is called as the check is."""

        def add(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
            name = function.__name__.strip("_").replace("_", " ")
            self.append(Check(name, section, function))
            return function

        return add


def expect_refused(what: str, names: tuple[str, ...], call: Callable[[], object]) -> None:
    """Fail unless the call is refused by one of these names (`remote_type`)."""
    try:
        answer = call()
    except RefusedError as exc:
        if exc.failed.remote_type not in names:
            raise FailedCheck(
                f"{what}: expected a FAILURE with remote_type {' or '.join(names)}, got "
                f"{exc.failed.remote_type or exc.failed.code.value!r}: {exc.failed.message}"
            ) from None
        if not exc.failed.message:
            raise FailedCheck(f"{what}: the FAILURE has no message") from None
    else:
        raise FailedCheck(f"{what}: expected a FAILURE, got {type(answer).__name__}")


def expect_failure(what: str, codes: tuple[FailureCode, ...], call: Callable[[], object]) -> None:
    """Fail unless the call ends in a FAILURE of one of these codes."""
    try:
        answer = call()
    except RefusedError as exc:
        if exc.failed.code not in codes:
            wanted = " or ".join(code.value for code in codes)
            raise FailedCheck(
                f"{what}: expected code {wanted}, got {exc.failed.code.value}: {exc.failed.message}"
            ) from None
    else:
        raise FailedCheck(f"{what}: expected a FAILURE, got {type(answer).__name__}")
