"""Values inside and outside a bridge's spaces, in the forms in which they are sent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import SpaceMismatchError
from envbus.actors.external.protocol import Value

__all__ = ["SpaceSampler"]

#: Outside of every space but texts: too long, and of letters that no space has by default.
_NO_ELEMENT = "\u2205" * 64


class SpaceSampler:
    """Makes up what a client would send.

    Args:
        agreement: The spaces that a bridge has told.
        seed: Of what is sampled.
    """

    def __init__(self, agreement: Agreement, seed: int = 0) -> None:
        self.agreement = agreement
        for space in (agreement.observation_space, agreement.action_space):
            space.seed(seed)

    def observation(self, *, plain: bool = False) -> Value:
        """Return an observation; with several agents of all of them."""
        return to_wire(self.agreement.observation_space.sample(), plain=plain)

    def action(self) -> Value:
        """Return an action; with several agents of all of them."""
        return to_wire(self.agreement.action_space.sample())

    def reward(self, value: float) -> Value:
        """Return a reward; with several agents one for each."""
        agents = self.agreement.agents
        return dict.fromkeys(agents, value) if agents else value

    def what_is_wrong_with(self, action: Value) -> str:
        """Return why an action is outside its space; "" if it is not."""
        try:
            self.agreement.take_action(action, "action")
        except SpaceMismatchError as exc:
            return str(exc)
        return ""

    def wrong_observation(self) -> Value:
        """Return what is no observation; None if all that could be sent is one."""
        return self._outside(self.agreement.take_observation)

    def wrong_action(self) -> Value:
        """Return what is no action; None if all that could be sent is one."""
        return self._outside(self.agreement.take_action)

    def other_spaces(self) -> tuple[Value, Value]:
        """Return the wire forms of observation and action spaces that are not these."""
        odd: gymnasium.Space[Any] = spaces.Discrete(12345)
        if self.agreement.multi_agent:
            by_agent = dict.fromkeys(self.agreement.agents, odd)
            return Agreement(by_agent, by_agent).wire
        return Agreement(odd, odd).wire

    def _outside(self, take: Callable[[Value, str], object]) -> Value:
        agents = self.agreement.agents
        value = dict.fromkeys(agents, _NO_ELEMENT) if agents else _NO_ELEMENT
        try:
            take(value, "value")
        except SpaceMismatchError:
            return value
        return None
