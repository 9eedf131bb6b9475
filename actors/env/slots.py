"""Slots that each hold one `gymnasium.Env`, stepped one after the other, and when they reset.

No message, socket or process in this file. The loop in `EnvSlots.step` is the hottest code of
the project: what it costs is paid once per env and step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from envbus.actors.arrays.copies import own, own_deeply
from envbus.actors.arrays.rows import ObservationRows
from envbus.actors.env.old_gym import OldGymEnv, five_values, is_with_info
from envbus.actors.env.renewal import NoEnv, check_fits, close_within
from envbus.actors.env.slot_group import (
    Exchange,
    Info,
    Options,
    Outcome,
    SlotGroup,
    check_callable_name,
    info_list,
    wrong_info,
)
from envbus.actors.protocol import SlotError
from envbus.actors.spaces.spaces import Element, Space, structurer
from envbus.actors.spaces.spaces import leaves as leaves_of

__all__ = ["Autoreset", "EnvSlots", "same_step_info"]

#: What an env's methods return.
_STEP_PARTS = ("observation", "reward", "terminated", "truncated", "info")
_RESET_PARTS = ("observation", "info")
#: SAME_STEP only: why a slot refuses steps then.
_RESET_FAILED = "the episode is over and its automatic reset failed; reset this env"


class Autoreset:
    """When the slots of one actor are reset without being asked. Pure.

    | mode | after the end of an episode |
    |---|---|
    | NEXT_STEP | the next step ignores its action and resets: reward 0, flags False |
    | SAME_STEP | the same step resets; `final_obs` and `final_info` go into the info |
    | DISABLED | nothing, until somebody resets the slot |

    Attributes:
        mode: Gymnasium's mode.
        waiting: One bool per slot: its next step is a reset. To be read, not written.
    """

    def __init__(self, mode: AutoresetMode, num_slots: int) -> None:
        self.mode = mode
        self.waiting = [False] * num_slots

    def on_end(self, slot: int) -> bool:
        """An episode was terminated or truncated. Return whether to reset within this step."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.waiting[slot] = True
        return self.mode is AutoresetMode.SAME_STEP

    def on_reset(self, slot: int) -> None:
        """The slot was reset, by itself or because somebody asked: its next step acts."""
        self.waiting[slot] = False


class EnvSlots(SlotGroup):
    """k envs in k slots.

    A failing env costs the others nothing: whatever it raises, also SystemExit, becomes the
    `SlotError` of its slot, whose observation keeps its former value, with reward 0 and no flag.
    Where it fails in SAME_STEP's reset, the step that ended the episode is reported all the same.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        mode: AutoresetMode,
        makers: Sequence[Callable[[], Any]] = (),
        *,
        first_slot: int = 0,
        first_env_id: int = 0,
    ) -> None:
        """Take over `envs`.

        Args:
            envs: One per slot.
            mode: When to reset them without being asked.
            makers: What makes each of them anew; without them there is no `rebuild`.
            first_slot: Number of the first of these slots in the actor, for errors.
            first_env_id: Its number in the pool, for messages to people.
        """
        super().__init__(len(envs), first_slot)
        self._envs = list(envs)
        self._makers = list(makers)
        self._first_env_id = first_env_id
        self._autoreset = Autoreset(mode, self.num_slots)
        #: Why a step is refused until the slot is reset; empty: it is not.
        self._stuck = [""] * self.num_slots
        #: The slot that the present step resets, or -1: tells the phase of an error.
        self._resetting = -1
        #: SAME_STEP only: last observation and info of the episode that ended in that slot's step.
        self._last: tuple[Element, Info] | None = None
        self._resets = [self._reset_instead(slot) for slot in range(self.num_slots)]
        #: What a step of each slot calls: the env's `step`, or, at times, something else.
        self._calls: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._rows: ObservationRows | None = None
        #: None if actions have no fixed size.
        self._batched_action_space: Space | None = None
        #: Whether an action is just one array or number, as opposed to a Dict or Tuple.
        self._one_action_array = False

    def bind(self, exchange: Exchange | None) -> None:
        """Exchange arrays here from now on; None lets go of all views."""
        super().bind(exchange)
        self._rows = None
        if exchange is None:
            return
        self._rows = ObservationRows(
            exchange.observation_space,
            exchange.blocks.observations,
            self.num_slots,
            self._first_env_id,
        )
        self._batched_action_space = None
        if exchange.blocks.actions is not None:
            # `iterate` looks at the kind of the batched space only, not at its size.
            self._batched_action_space = batch_space(exchange.action_space, 1)
            self._structure = structurer(exchange.action_space)
            paths = [leaf.path for leaf in leaves_of(exchange.action_space)]
            self._one_action_array = paths == [()]

    def reset(
        self, slots: Sequence[int] | None, seeds: Sequence[int | None] | None, options: Options
    ) -> Outcome:
        """Reset the addressed slots, each with its own copy of `options`."""
        self._bound()
        rows = self._rows
        assert rows is not None
        addressed = range(self.num_slots) if slots is None else slots
        infos: dict[int, Any] = {}
        alone = self.num_slots == 1  # else envs may share what they return
        outcome = Outcome()
        for position, slot in enumerate(addressed):
            seed = None if seeds is None else seeds[position]
            try:
                info = self._reset_one(rows, slot, seed, options)
                if info or info is None:
                    infos[slot] = info if alone else own(info)
            except BaseException as error:
                outcome.errors.append(self._failed(slot, "reset", error))
        return self._finish(outcome, addressed, infos, "reset")

    def rebuild(self, slots: Sequence[int] | None, close_timeout: float) -> list[SlotError]:
        """Close the addressed slots' envs and make new ones, which are to be reset first."""
        exchange = self._bound()
        errors = []
        for slot in range(self.num_slots) if slots is None else slots:
            try:
                self._renew(slot, exchange, close_timeout)
            except BaseException as error:
                errors.append(self._failed(slot, "build", error))
        return errors

    def step(
        self,
        slots: Sequence[int] | None,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Outcome:
        """Step the addressed slots, in order."""
        exchange, prepared = self._bound(), self._rows
        assert prepared is not None
        actions = self._actions(exchange, slots, leaves, items)
        addressed: Sequence[int]
        if slots is None:
            addressed, calls, rows = range(self.num_slots), self._calls, prepared.rows
        else:
            addressed = slots
            calls = [self._calls[slot] for slot in slots]
            rows = [prepared.rows[slot] for slot in slots]
        rewards = exchange.blocks.rewards
        terminations = exchange.blocks.terminations
        truncations = exchange.blocks.truncations
        dtype, shape, ndarray = prepared.dtype, prepared.shape, np.ndarray
        infos: dict[int, Any] = {}
        alone = self.num_slots == 1  # else envs may share what they return
        outcome = Outcome()
        self._resetting = -1
        # Cleared at once and then written where True: two writes per env less.
        if slots is None:
            terminations[...] = truncations[...] = False
        else:
            terminations[list(slots)] = truncations[list(slots)] = False
        for slot, call, action, row in zip(addressed, calls, actions, rows, strict=False):
            is_own = alone
            try:
                returned = call(action)
                try:
                    observation, reward, terminated, truncated, info = returned
                    goes_on = not (terminated or truncated)
                except (TypeError, ValueError):
                    five = self._five_of_four(slot, returned)
                    observation, reward, terminated, truncated, info = five
                    goes_on = not (terminated or truncated)
                if not goes_on:
                    # Arrays, maybe, to which a reset may write.
                    reward, terminated, truncated = own((reward, terminated, truncated))
                    observation, info = self._on_end(slot, observation, info)
                    is_own = True
                if (
                    type(observation) is not ndarray
                    or observation.dtype is not dtype
                    or observation.shape != shape
                ):
                    observation = prepared.convert(slot, observation)
                try:
                    rewards[slot] = reward
                    if terminated is not False:
                        terminations[slot] = terminated
                    if truncated is not False:
                        truncations[slot] = truncated
                except (TypeError, ValueError):
                    rewards[slot] = _scalar("reward", reward, self._first_env_id + slot)
                    terminations[slot] = bool(terminated)
                    truncations[slot] = bool(truncated)
                row[...] = observation
                if info or info is None:
                    infos[slot] = info if is_own else own(info)
            except BaseException as error:
                phase = "autoreset" if self._resetting == slot else "step"
                outcome.errors.append(self._failed(slot, phase, error))
                rewards[slot] = 0.0
                terminations[slot] = truncations[slot] = False
                if phase == "autoreset" and self._last is not None:
                    with contextlib.suppress(TypeError, ValueError):
                        rewards[slot] = _scalar("reward", reward, self._first_env_id + slot)
                        terminations[slot], truncations[slot] = bool(terminated), bool(truncated)
                        infos[slot] = same_step_info(*self._last, {})
        return self._finish(outcome, addressed, infos, "step")

    def call(
        self, slots: Sequence[int] | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Call a method of each env, or read an attribute.

        Looks through wrappers; in a dotted name the first part does so, the others are plain
        attributes. Refuses the names that have requests of their own.
        """

        def call_one(slot: int, _position: int) -> object:
            check_callable_name(name)
            first, _, rest = name.partition(".")
            found = self._envs[slot].get_wrapper_attr(first)
            if rest:
                found = attrgetter(rest)(found)
            return found(*own_deeply(args), **own_deeply(kwargs)) if callable(found) else found

        return self._each(slots, call_one)

    def set_attr(
        self, slots: Sequence[int] | None, name: str, values: Sequence[Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Set an attribute where a wrapper or the env has it, else on the outermost wrapper.

        In a dotted name all parts but the last lead to the object whose attribute is set.
        """

        def set_one(slot: int, position: int) -> None:
            path, _, last = name.rpartition(".")
            value = own(values[position])
            if not path:
                self._envs[slot].set_wrapper_attr(last, value)
                return
            first, _, rest = path.partition(".")
            target = self._envs[slot].get_wrapper_attr(first)
            setattr(attrgetter(rest)(target) if rest else target, last, value)

        return self._each(slots, set_one)

    def execute(
        self,
        slots: Sequence[int] | None,
        function: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[SlotError]]:
        """Run `function(env, *args, **kwargs)`; what is not callable is returned as it is."""

        def run_one(slot: int, _position: int) -> object:
            if not callable(function):
                return function
            return function(self._envs[slot], *own_deeply(args), **own_deeply(kwargs))

        return self._each(slots, run_one)

    def close(self) -> list[SlotError]:
        """Close the envs. Idempotent; never raises."""
        envs, self._envs, self._calls, self._resets = self._envs, [], [], []
        self.num_slots = 0
        errors = []
        for slot, env in enumerate(envs):
            try:
                env.close()
            except BaseException as error:
                errors.append(self._failed(slot, "close", error))
        self.bind(None)
        return errors

    def _actions(
        self,
        exchange: Exchange,
        slots: Sequence[int] | None,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Iterator[Any]:
        """Single actions as `gymnasium.vector.utils.iterate` hands them out, each env's own."""
        if items is not None:
            return iter([own(item) for item in items])
        source = exchange.blocks.actions if leaves is None else leaves
        if source is None or self._batched_action_space is None:
            raise ValueError("actions of a space without a fixed size must come as a list")
        # Copies: an env may keep its action, and change it.
        rows = None if slots is None or leaves is not None else list(slots)
        if self._one_action_array:  # what `iterate` does, without its way there
            return iter(source[0].copy() if rows is None else source[0][rows])
        copies = [array.copy() if rows is None else array[rows] for array in source]
        return iterate(self._batched_action_space, self._structure(copies))

    def _reset_one(
        self, rows: ObservationRows, slot: int, seed: int | None, options: Options
    ) -> Info:
        returned = self._envs[slot].reset(seed=seed, options=own_deeply(options))
        observation, info = self._parts_of_reset(slot, returned)
        self._on_reset(slot)
        rows.rows[slot][...] = rows.convert(slot, observation)
        return info

    def _renew(self, slot: int, exchange: Exchange, close_timeout: float) -> None:
        who = f"env {self._first_env_id + slot}"
        close_within(self._envs[slot], close_timeout, who)
        self._envs[slot] = NoEnv(f"{who} could not be made again")
        self._on_reset(slot)
        env = self._makers[slot]()
        try:
            check_fits(env, exchange.observation_space, exchange.action_space, num_envs=None)
        except BaseException:
            close_within(env, close_timeout, who)
            raise
        self._envs[slot] = env
        self._stuck[slot] = f"{who} was made anew; reset it first"
        self._refresh([slot])

    def _on_end(self, slot: int, observation: Element, info: Info) -> tuple[Element, Info]:
        """An episode ended: return what its step reports: the observation, and an info of its own.

        Envs may share what they return, or go on using it.
        """
        if self._autoreset.on_end(slot):
            if not isinstance(info, dict):
                raise wrong_info(info)
            self._last = last = own_deeply(observation), own(info)
            self._resetting = slot
            try:
                observation, reset_info = self._parts_of_reset(slot, self._envs[slot].reset())
            except BaseException:
                self._stuck[slot] = _RESET_FAILED
                self._refresh([slot])
                raise
            self._calls[slot] = self._envs[slot].step
            return observation, same_step_info(*last, own(reset_info))
        self._refresh([slot])
        return observation, own(info)

    def _parts_of_reset(self, slot: int, returned: Any) -> tuple[Element, Info]:
        if is_with_info(returned):
            return returned[0], returned[1]
        if self._is_observation(slot, returned):
            self._wrap_old(slot)
            return returned, {}
        if isinstance(returned, (tuple, list)) and len(returned) == len(_RESET_PARTS):
            return returned[0], returned[1]  # the info is wrong, which is told later
        raise self._misfit(slot, "reset", returned, _RESET_PARTS)

    def _is_observation(self, slot: int, returned: Any) -> bool:
        """Return whether what a reset has returned is an observation alone."""
        rows, exchange = self._rows, self._bound()
        assert rows is not None
        try:
            if rows.is_ragged:  # any value can be kept
                return exchange.observation_space.contains(returned)
            rows.convert(slot, returned)
        except Exception:  # a custom space may have any code
            return False
        return True

    def _five_of_four(self, slot: int, returned: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Return the five values that an env of the old API means; later steps need no look.

        Raises:
            TypeError, ValueError: It has returned something else.
        """
        five = five_values(returned)
        if five is None:
            raise self._misfit(slot, "step", returned, _STEP_PARTS) from None
        self._wrap_old(slot)
        return five

    def _wrap_old(self, slot: int) -> None:
        """Have an env whose step or reset is of the old API give Gymnasium's form."""
        self._envs[slot] = OldGymEnv(self._envs[slot])
        self._refresh([slot])

    def _misfit(
        self, slot: int, verb: str, returned: object, parts: Sequence[str]
    ) -> TypeError | ValueError:
        """Return the error that tells what is wrong with what an env's `verb` returned."""
        who = f"env {self._first_env_id + slot}: its {verb} returned"
        expected = f"expected ({', '.join(parts)})"
        if not isinstance(returned, (tuple, list)):
            came = "None" if returned is None else f"a {type(returned).__qualname__}"
            return TypeError(f"{who} {came}, {expected}")
        if len(returned) != len(parts):
            return ValueError(f"{who} {len(returned)} values, {expected}")
        shapes = " and ".join(f"{np.shape(flag)}" for flag in returned[2:4])
        return ValueError(f"{who} flags of shapes {shapes}, expected one True or False each")

    def _on_reset(self, slot: int) -> None:
        self._autoreset.on_reset(slot)
        self._stuck[slot] = ""
        self._refresh([slot])

    def _reset_instead(self, slot: int) -> Callable[[Any], Any]:
        """What is called instead of `step` after the end of an episode in NEXT_STEP."""

        def reset_instead(_action: Element) -> tuple[Element, float, bool, bool, Info]:
            self._resetting = slot
            self._last = None
            observation, info = self._parts_of_reset(slot, self._envs[slot].reset())
            self._on_reset(slot)
            return observation, 0.0, False, False, info

        return reset_instead

    def _refresh(self, slots: Iterable[int]) -> None:
        """Look again what a step of each of `slots` is to call."""
        for slot in slots:
            if self._autoreset.waiting[slot]:
                self._calls[slot] = self._resets[slot]
            elif self._stuck[slot]:
                self._calls[slot] = partial(_refuse_step, self._stuck[slot])
            else:
                self._calls[slot] = self._envs[slot].step

    def _each(
        self, slots: Sequence[int] | None, function: Callable[[int, int], Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Return `function(slot, position)` of each addressed slot, and the errors."""
        addressed = range(self.num_slots) if slots is None else slots
        values: list[Any] = [None] * len(addressed)
        errors = []
        for position, slot in enumerate(addressed):
            try:
                values[position] = own(function(slot, position))  # envs may share it
            except BaseException as error:
                errors.append(self._failed(slot, "call", error))
        # Any of these may have given an env another `step`.
        self._refresh(addressed)
        return values, errors

    def _finish(
        self, outcome: Outcome, addressed: Sequence[int], infos: dict[int, Any], phase: str
    ) -> Outcome:
        if infos:
            outcome.infos = info_list(
                addressed, infos, outcome.errors, first_slot=self._first_slot, phase=phase
            )
        if self._rows is not None and self._rows.is_ragged:
            outcome.observations = [self._rows.rows[slot].value for slot in addressed]
        return outcome


def same_step_info(
    final_obs: object, final_info: Mapping[str, Any], reset_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the info of a SAME_STEP step that ended an episode and began the next one."""
    return {"final_obs": final_obs, "final_info": final_info, **reset_info}


def _scalar(name: str, value: Any, env_id: int) -> float:
    """Return the number that `value` is, also as an array of one item.

    Raises:
        ValueError: It is none.
    """
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        came = f"{value!r:.80}"
    else:
        if array.size == 1:
            return float(array.reshape(()))
        came = f"an array of shape {array.shape}"
    raise ValueError(f"env {env_id}: its {name} is {came}, expected one number")


def _refuse_step(why: str, _action: Element) -> NoReturn:
    raise RuntimeError(why)
