"""Slots that one `gymnasium.vector.VectorEnv` fills, stepped as a whole.

No message, socket or process in this file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from envbus.actors.arrays.copies import own, own_deeply
from envbus.actors.arrays.rows import as_array
from envbus.actors.env.renewal import check_fits, close_within
from envbus.actors.env.slot_group import Exchange, Options, Outcome, SlotGroup, check_callable_name
from envbus.actors.env.source import AnyEnv
from envbus.actors.protocol import SlotError
from envbus.actors.spaces.spaces import Element, Space, is_fixed_size, leaves, structurer

__all__ = ["VectorSlots", "split_infos"]

logger = logging.getLogger("envbus.actors.env.vector_slots")


class VectorSlots(SlotGroup):
    """A vector env with `num_envs` slots.

    Its envs are stepped together or not at all, it resets them by its own rule, which must be
    the asked one, and its errors hit all its slots. Calls and attributes address the vector env
    itself, and, what it does not have, its envs through its own `call` and `set_attr`. A list or
    tuple with one item per slot is dealt out to the slots, any other value goes to each of them.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        mode: AutoresetMode,
        maker: Callable[[], AnyEnv] | None = None,
        *,
        first_slot: int = 0,
        first_env_id: int = 0,
    ) -> None:
        """Take over `env`.

        Args:
            env: The vector env.
            mode: The autoreset mode that the actor was asked for.
            maker: What makes it anew; without it there is no `rebuild`.
            first_slot: Number of the first of its slots in the actor, for errors.
            first_env_id: Its number in the pool, for messages to people.

        Raises:
            ValueError: `env` has another autoreset mode, or no envs.
        """
        _check_env(env, mode)
        super().__init__(int(env.num_envs), first_slot)
        self._mode = mode
        self._maker = maker
        #: It was made anew, and not reset yet.
        self._is_new = False
        self._env: VectorEnv[Any, Any, Any] | None = env
        self._who = f"envs {first_env_id} to {first_env_id + self.num_slots - 1}"
        self._observations: list[Any] = [None] * self.num_slots

    def reset(
        self, slots: Sequence[int] | None, seeds: Sequence[int | None] | None, options: Options
    ) -> Outcome:
        """Reset all envs, or, by the option `reset_mask`, the addressed ones."""
        exchange = self._bound()
        addressed = self._addressed(slots)
        options = own_deeply(options)
        is_whole = len(addressed) == self.num_slots
        if not is_whole:
            mask = np.zeros(self.num_slots, np.bool_)
            mask[addressed] = True
            options = {**(options or {}), "reset_mask": mask}
        all_seeds: list[int | None] = [None] * self.num_slots
        for slot, seed in zip(addressed, seeds or (), strict=False):
            all_seeds[slot] = seed

        def run(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
            if not is_whole:
                self._check_not_new()
            observations, told = self._reset(env, _seed(all_seeds), options)
            infos: dict[str, Any] = told
            self._is_new = False
            self._write(exchange, observations)
            return infos

        return self._run("reset", addressed, run)

    def rebuild(self, slots: Sequence[int] | None, close_timeout: float) -> list[SlotError]:
        """Close the vector env and make it anew; it is to be reset whole first.

        Raises:
            ValueError: Only some of its slots were addressed.
        """
        exchange = self._bound()
        self.check_step(slots)
        try:
            self._renew(exchange, close_timeout)
        except BaseException as error:
            return self._errors("build", error, range(self.num_slots))
        return []

    def check_step(self, slots: Sequence[int] | None) -> None:
        """See that all envs are to be stepped.

        Raises:
            ValueError: They are not, or in another order.
        """
        if slots is not None and list(slots) != list(range(self.num_slots)):
            raise ValueError(
                f"the {self.num_slots} envs of a {type(self._env).__qualname__} are stepped "
                f"together and in order, but slots {list(slots)} of it were addressed"
            )

    def step(
        self,
        slots: Sequence[int] | None,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Outcome:
        """Step all envs."""
        exchange = self._bound()
        self.check_step(slots)
        addressed = self._addressed(slots)
        actions = self._actions(exchange, leaves, items)

        def run(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
            self._check_not_new()
            observations, rewards, terminations, truncations, infos = env.step(actions)
            exchange.blocks.rewards[...] = rewards
            exchange.blocks.terminations[...] = terminations
            exchange.blocks.truncations[...] = truncations
            self._write(exchange, observations)
            return infos

        outcome = self._run("step", addressed, run)
        if outcome.errors:
            exchange.blocks.rewards[...] = 0.0
            exchange.blocks.terminations[...] = exchange.blocks.truncations[...] = False
        return outcome

    def call(
        self, slots: Sequence[int] | None, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Call a method of the vector env, or read an attribute; dotted names reach further."""

        def run(env: VectorEnv[Any, Any, Any]) -> object:
            check_callable_name(name)
            try:
                found = attrgetter(name)(env)
            except AttributeError:
                per_env = getattr(env, "call", None)
                if per_env is None:
                    raise
                return per_env(name, *own_deeply(args), **own_deeply(kwargs))
            return found(*own_deeply(args), **own_deeply(kwargs)) if callable(found) else found

        return self._deal("call", slots, run)

    def set_attr(
        self, slots: Sequence[int] | None, name: str, values: Sequence[Any]
    ) -> tuple[list[Any], list[SlotError]]:
        """Set an attribute by the vector env's own `set_attr`, or, if equal for all, on itself."""

        def run(env: VectorEnv[Any, Any, Any]) -> None:
            if len(values) != self.num_slots:
                raise ValueError(
                    f"attribute {name!r} of a {type(env).__qualname__} can only be set for all "
                    f"{self.num_slots} envs"
                )
            per_env = getattr(env, "set_attr", None)
            if per_env is not None and not hasattr(env, name):
                per_env(name, own(list(values)))
                return
            if not all(_same(value, values[0]) for value in values[1:]):
                raise ValueError(
                    f"a {type(env).__qualname__} has one {name!r} only, but got different values"
                )
            path, _, last = name.rpartition(".")
            setattr(attrgetter(path)(env) if path else env, last, own(values[0]))

        return self._deal("call", slots, run)

    def execute(
        self,
        slots: Sequence[int] | None,
        function: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], list[SlotError]]:
        """Run `function(vector_env, *args, **kwargs)`, once."""

        def run(env: VectorEnv[Any, Any, Any]) -> object:
            if not callable(function):
                return [function] * self.num_slots
            return function(env, *own_deeply(args), **own_deeply(kwargs))

        return self._deal("call", slots, run)

    def close(self) -> list[SlotError]:
        """Close the vector env. Idempotent; never raises."""
        env, self._env = self._env, None
        self.bind(None)
        if env is None:
            return []
        try:
            env.close()
        except BaseException as error:
            env.closed = True  # before Gymnasium 1.3 its `__del__` would try once more
            return self._errors("close", error, range(self.num_slots))
        return []

    def _reset(self, env: VectorEnv[Any, Any, Any], seed: Any, options: Options) -> Any:
        """Reset it, by its first seed if it takes no list: after a restart there is no other way.

        Its other seeds follow from that one then, as the vector env has it.
        """
        is_list = isinstance(seed, list)
        if not is_list or seed[0] is None:
            return env.reset(seed=seed, options=options)
        try:
            return env.reset(seed=seed, options=own_deeply(options))
        # Gymnasium's own error: of its envs in JAX.
        except (TypeError, ValueError, OverflowError, GymnasiumError) as error:
            try:
                result = env.reset(seed=seed[0], options=options)
            except Exception:
                raise error from None
            logger.warning(
                "%s: %s.reset takes no list of seeds (%s): its envs are seeded from the first one",
                self._who,
                type(env).__qualname__,
                error,
            )
            return result

    def _present(self) -> VectorEnv[Any, Any, Any]:
        if self._env is None:
            raise RuntimeError(f"the vector env of {self._who} could not be made again")
        return self._env

    def _check_not_new(self) -> None:
        if self._is_new:
            raise RuntimeError(
                f"the vector env of {self._who} was made anew; reset all its envs together first"
            )

    def _addressed(self, slots: Sequence[int] | None) -> list[int]:
        return list(range(self.num_slots)) if slots is None else list(slots)

    def _actions(
        self,
        exchange: Exchange,
        leaves: Sequence[npt.NDArray[Any]] | None,
        items: Sequence[Any] | None,
    ) -> Element:
        """The batch of actions, the vector env's own."""
        if items is not None:
            return _batch(exchange.action_space, [own(item) for item in items])
        source = exchange.blocks.actions if leaves is None else leaves
        if source is None:
            raise ValueError("actions of a space without a fixed size must come as a list")
        return structurer(exchange.action_space)([array.copy() for array in source])

    def _write(self, exchange: Exchange, batch: Element) -> None:
        """Put the batched observations where they are exchanged.

        Raises:
            ValueError: They do not fit the observation space; nothing was written.
        """
        space, rows = exchange.observation_space, exchange.blocks.observations
        if rows is None:
            assert self._env is not None
            self._observations = list(iterate(self._env.observation_space, own(batch)))
            return
        arrays = []
        for leaf in leaves(space):
            value = batch
            for key in leaf.path:
                value = value[key]
            shape = (self.num_slots, *leaf.shape)
            arrays.append(as_array(value, leaf.dtype, shape, self._who, leaf))
        for row, array in zip(rows, arrays, strict=True):
            row[...] = array

    def _run(
        self,
        phase: str,
        addressed: Sequence[int],
        run: Callable[[VectorEnv[Any, Any, Any]], dict[str, Any]],
    ) -> Outcome:
        """Run it and return the addressed slots' part of what it returned or raised."""
        outcome = Outcome()
        try:
            infos = run(self._present())
            if infos:
                split = split_infos(own(infos), self.num_slots)  # vector envs may share them
                outcome.infos = [split[slot] for slot in addressed]
        except BaseException as error:
            outcome.errors = self._errors(phase, error, addressed)
        outcome.observations = self._ragged(addressed)
        return outcome

    def _ragged(self, addressed: Sequence[int]) -> list[Any] | None:
        """The observations that have no place in the blocks, or None."""
        if self._bound().blocks.observations is not None:
            return None
        return [self._observations[slot] for slot in addressed]

    def _renew(self, exchange: Exchange, close_timeout: float) -> None:
        assert self._maker is not None, "made without a maker"
        env, self._env = self._env, None
        if env is not None:
            close_within(env, close_timeout, self._who)
        new = self._maker()
        try:
            spaces_of_pool = exchange.observation_space, exchange.action_space
            check_fits(new, *spaces_of_pool, num_envs=self.num_slots)
            assert isinstance(new, VectorEnv)
            _check_env(new, self._mode)
        except BaseException:
            close_within(new, close_timeout, self._who)
            raise
        self._env = new
        self._is_new = True

    def _deal(
        self,
        phase: str,
        slots: Sequence[int] | None,
        run: Callable[[VectorEnv[Any, Any, Any]], Any],
    ) -> tuple[list[Any], list[SlotError]]:
        """Return each addressed slot's part of what it returned, and the errors."""
        addressed = self._addressed(slots)
        try:
            value = own(run(self._present()))
        except BaseException as error:
            return [None] * len(addressed), self._errors(phase, error, addressed)
        if isinstance(value, list | tuple) and len(value) == self.num_slots:
            return [value[slot] for slot in addressed], []
        return [value] * len(addressed), []

    def _errors(
        self, phase: str, error: BaseException, addressed: Sequence[int]
    ) -> list[SlotError]:
        """One error per slot; the traceback, which is the same, stands in the first only."""
        whole = self._failed(addressed[0], phase, error)
        others = [self._first_slot + slot for slot in addressed[1:]]
        short = f"(same vector env: the traceback stands with slot {whole.slot})"
        return [
            whole,
            *[msgspec.structs.replace(whole, slot=slot, traceback=short) for slot in others],
        ]


def _check_env(env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> None:
    # A vector env that does not say is taken for NEXT_STEP, as Gymnasium's wrappers do.
    own_mode = AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))
    if own_mode is not mode:
        raise ValueError(
            f"{type(env).__qualname__} resets its envs in mode {own_mode.value}, but "
            f"{mode.value} was asked for: make it with that mode, or ask for its own"
        )
    if env.num_envs < 1:
        raise ValueError(f"{type(env).__qualname__} has num_envs={env.num_envs}, expected >= 1")


def _seed(seeds: list[int | None]) -> Any:
    """`seeds` in the shortest form, which vector envs that take no list understand too.

    A list for the others: it is not in Gymnasium's annotations, but its own classes take it.
    """
    first = seeds[0]
    if first is None and not any(seed is not None for seed in seeds):
        return None
    if first is not None and seeds == list(range(first, first + len(seeds))):
        return first
    return seeds


def _batch(space: Space, items: list[Element]) -> Element:
    """Single actions as one batch; their dtype is kept, whatever the space's is."""
    if isinstance(space, spaces.Dict):
        return {key: _batch(sub, [item[key] for item in items]) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            [_batch(sub, [item[i] for item in items]) for i, sub in enumerate(space.spaces)]
        )
    return np.stack(items) if is_fixed_size(space) else tuple(items)


def split_infos(infos: Mapping[Any, Any], num_envs: int) -> list[dict[Any, Any]]:
    """Return one info dict per env, so that merging them again gives `infos`. Pure.

    The way back, merging, is `VectorEnv._add_info` in the runner.

    An entry `key` belongs to the envs that the mask `_key` names; without a mask, to those that
    its parent belongs to. Arrays, also those of JAX and other libraries, lists and tuples with one
    item per env are dealt out, dicts are taken apart, anything else goes to each env as it is.
    """
    split: list[dict[Any, Any]] = [{} for _ in range(num_envs)]
    _deal(infos, split, np.ones(num_envs, np.bool_))
    return split


def _deal(
    infos: Mapping[Any, Any], split: list[dict[Any, Any]], parents: npt.NDArray[np.bool_]
) -> None:
    infos = {key: _in_numpy(value) for key, value in infos.items()}
    for key, value in infos.items():
        if _is_mask_of_another(key, infos, len(split)):
            continue
        mask = parents
        if isinstance(key, str) and _is_mask(infos.get(f"_{key}"), len(split)):
            mask = infos[f"_{key}"]
        owners = np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            parts: list[dict[Any, Any]] = [{} for _ in split]
            _deal(value, parts, mask)
            for env in owners:
                split[env][key] = parts[env]
        else:
            for env in owners:
                split[env][key] = _item(value, env, len(split))


def _is_mask_of_another(key: object, infos: Mapping[Any, Any], num_envs: int) -> bool:
    return (
        isinstance(key, str)
        and key.startswith("_")
        and key[1:] in infos
        and _is_mask(infos[key], num_envs)
    )


def _is_mask(value: object, num_envs: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (num_envs,)


def _in_numpy(value: Any) -> Any:
    """Return an array of another library as one of NumPy; all else as it is."""
    is_other = hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic)
    return np.asarray(value) if is_other else value


def _item(value: object, env: int, num_envs: int) -> object:
    if isinstance(value, np.ndarray):
        if not value.ndim or len(value) != num_envs:
            return value.copy()
        item = value[env]
        # Merging makes an array of bools from `bool`, but one of objects from `np.bool_`.
        if isinstance(item, np.bool_):
            return bool(item)
        return item.copy() if isinstance(item, np.ndarray) else item
    if isinstance(value, list | tuple) and len(value) == num_envs:
        return value[env]
    return value


def _same(value: object, other: object) -> bool:
    if value is other:
        return True
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(value), np.asarray(other))
    return bool(type(value) is type(other) and value == other)
