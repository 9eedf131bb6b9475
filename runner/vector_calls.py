"""What a vector env's caller may ask of the envs besides steps and resets.

Methods and attributes of each env, and functions that run beside it; one half of `BusVectorEnv`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from envbus.actors.copies import own
from envbus.actors.protocol import Call, Exec, SetAttr
from envbus.bus.interrupts import hand_out, uninterrupted_call
from envbus.bus.messages import Request, Tree
from envbus.runner.actor import Actor
from envbus.runner.lockstep import Lockstep, Pending

__all__ = ["CallableVectorEnv"]


class CallableVectorEnv(VectorEnv[Any, Any, npt.NDArray[Any]]):
    """A vector env whose envs can be reached into; how it steps is its subclass' affair."""

    _lockstep: Lockstep

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute, and return the results in order.

        Looks through wrappers; a dotted name reaches into attributes.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Ask for `call`; `call_wait` returns the results.

        Raises:
            ClosedEnvironmentError: After `close`.
            AlreadyPendingCallError: Another call is pending.
            EncodeError: An argument cannot be pickled. Nothing was sent.
        """
        self._ask_call("call_async", name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the calls and return their results; errors as in `reset_wait`."""
        return tuple(self._end_call("call_wait", "call_async", timeout))

    def get_attr(self, name: str, indices: int | Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return an attribute of each env, or of those at `indices`, in order."""
        if indices is None:
            return self.call(name)
        chosen = self._resolve(indices)
        self._ask_call("call_async", name, (), {}, chosen)
        values = self._end_call("call_wait", "call_async", None)
        return tuple(values[index] for index in chosen)

    def has_attr(self, name: str) -> bool:
        """Return whether every env has the attribute, looking through wrappers."""
        return all(self.exec_func(_has_attr, None, name))

    def set_attr(
        self,
        name: str,
        values: Any,
        *,
        indices: int | Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> None:
        """Set an attribute of the envs.

        Args:
            name: The attribute; created if it does not exist.
            values: A list or tuple with one value per addressed env, or one value for all.
            indices: Which envs; None: all.
            broadcast: Give `values` to each env whole, also if it is a list or tuple.

        Raises:
            ValueError: The number of values is not that of the envs. Nothing was sent.
        """
        self._lockstep.check_open()
        chosen = self._resolve(indices)
        if broadcast or not isinstance(values, list | tuple):
            values = [values] * len(chosen)
        if len(values) != len(chosen):
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {len(chosen)} environments."
            )
        by_env = dict(zip(chosen, values, strict=True))
        self._begin_call(
            "set_attr",
            chosen,
            lambda actor, slots: SetAttr(
                name=name,
                values=Tree([by_env[actor.env_ids[slot]] for slot in slots]),
                slots=slots,
            ),
        )
        self._end_call("set_attr", "set_attr", None)

    def render(self) -> tuple[Any, ...]:
        """Return each env's rendered frame, or None where it has none."""
        return self.call("render")

    def exec_func(
        self,
        func: Callable[..., Any] | Any,
        indices: int | Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `func(env, *args, **kwargs)` beside each env, in its process.

        Args:
            func: Any function, also a lambda or closure; what is not callable is returned.
            indices: Which envs; None: all; negative ones count from the end.
            *args: For `func`.
            **kwargs: For `func`.

        Returns:
            `num_envs` results, None for envs that were not addressed.
        """
        self.exec_func_send(func, indices, *args, **kwargs)
        return self.exec_func_fetch()

    def exec_func_send(
        self,
        func: Callable[..., Any] | Any,
        indices: int | Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Ask for `exec_func`; `exec_func_fetch` returns the results."""
        what, positional, named = Tree(func), Tree(own(args)), Tree(own(kwargs))
        self._begin_call(
            "exec_func_send",
            self._resolve(indices),
            lambda _, slots: Exec(function=what, args=positional, kwargs=named, slots=slots),
        )

    def exec_func_fetch(self, timeout: float | None = None) -> list[Any]:
        """Wait for `exec_func_send`'s results; errors as in `reset_wait`."""
        return self._end_call("exec_func_fetch", "exec_func_send", timeout)

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:
        """Return for each env whether one of its wrappers is a `wrapper_class`."""
        return self.exec_func(_is_wrapped, None, wrapper_class)

    @property
    def np_random_seed(self) -> Any:
        """Each env's `np_random_seed`, a tuple."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # without a setter, as in Gymnasium's AsyncVectorEnv
    def np_random(self) -> Any:
        """A copy of each env's `np_random`, a tuple."""
        return self.get_attr("np_random")

    def call_send(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """`call_async` under OpenRL's name."""
        self._ask_call("call_send", name, args, kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """`call_wait` under OpenRL's name."""
        return tuple(self._end_call("call_fetch", "call_send", timeout))

    def _ask_call(
        self,
        verb: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        indices: Sequence[int] | None = None,
    ) -> None:
        # Copies: what is sent must not change under the sender's hands.
        positional, named = Tree(own(args)), Tree(own(kwargs))
        self._begin_call(
            verb,
            indices,
            lambda _, slots: Call(name=name, args=positional, kwargs=named, slots=slots),
        )

    @uninterrupted_call
    def _begin_call(
        self,
        verb: str,
        indices: Sequence[int] | None,
        make_request: Callable[[Actor, list[int]], Request[Any]],
    ) -> None:
        chosen = range(self.num_envs) if indices is None else sorted(set(indices))
        self._lockstep.begin_call(verb, chosen, make_request)

    def _end_call(self, verb: str, asked: str, timeout: float | None) -> list[Any]:
        lockstep = self._lockstep

        def end() -> list[Any]:
            kept: list[Any] | None = lockstep.take_kept(Pending.CALL)
            if kept is not None:
                return kept
            values = lockstep.end_call(verb, asked, timeout)
            return [values.get(env_id) for env_id in range(self.num_envs)]

        return hand_out(end, lambda values: lockstep.keep(Pending.CALL, values))

    def _resolve(self, indices: int | Sequence[int] | None) -> list[int]:
        if indices is None:
            return list(range(self.num_envs))
        asked = [indices] if isinstance(indices, int | np.integer) else list(indices)
        for index in asked:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"env {index} does not exist; there are {self.num_envs}")
        return [int(index) % self.num_envs for index in asked]


def _has_attr(env: gymnasium.Env[Any, Any], name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


def _is_wrapped(env: gymnasium.Env[Any, Any], wrapper_class: type) -> bool:
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, wrapper_class):
            return True
        layer = layer.env
    return False
