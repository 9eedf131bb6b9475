"""The envs of an `ActorPool` one by one: their methods, attributes and frames.

Others may be stepping meanwhile. Leaves out how they are asked (`env_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envbus.actors.copies import own
from envbus.actors.protocol import Call, Exec, SetAttr
from envbus.bus.messages import Tree
from envbus.runner.env_calls import MakeOne

__all__ = ["SubEnvironment"]


class SubEnvironment:
    """One env of a pool, in its actor.

    Its methods wait for the answer, and for the end of a step of the same actor that is under
    way. They raise what the env raises; `ActorLostError` if its actor is not there now;
    `RequestTimeoutError` after `timeouts.call`.

    Attributes:
        env_id: Its number in the pool.
    """

    def __init__(self, ask: Callable[[int, MakeOne], Any], env_id: int) -> None:
        self._ask = ask
        self.env_id = env_id

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, or read an attribute; looks through wrappers."""
        positional, named = Tree(own(args)), Tree(own(kwargs))
        return self._ask(
            self.env_id,
            lambda slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    def get_attr(self, name: str) -> Any:
        """Return an attribute; one that is a method is called without arguments."""
        return self.call(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute."""
        values = Tree([own(value)])
        self._ask(self.env_id, lambda slots: SetAttr(name=name, values=values, slots=slots))

    def exec_func(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `func(env, *args, **kwargs)`, run beside the env; local actors only."""
        what, positional, named = Tree(func), Tree(own(args)), Tree(own(kwargs))
        return self._ask(
            self.env_id,
            lambda slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def render(self) -> Any:
        """Return what the env draws."""
        return self.call("render")

    def __repr__(self) -> str:
        return f"SubEnvironment({self.env_id})"
