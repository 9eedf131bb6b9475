"""Answers the requests of `protocol.py` about the envs of one actor process.

Leaves out the socket and the loop (`host.py`): handlers are plain functions from a request to
its reply, so that tests call them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from envbus.actors import env_source, spaces
from envbus.actors.blocks import BlockLayout, Blocks
from envbus.actors.env_source import AnyEnv
from envbus.actors.failures import slot_error
from envbus.actors.protocol import (
    Build,
    Built,
    Call,
    CallResult,
    CloseEnvs,
    Exec,
    MapBlocks,
    Mapped,
    Reset,
    SetAttr,
    SlotError,
    Step,
    StepResult,
)
from envbus.actors.slots import EnvSlots, Exchange, Outcome, SlotGroup
from envbus.actors.spaces import Space
from envbus.actors.vector_slots import VectorSlots
from envbus.bus.arena import Arena
from envbus.bus.messages import Reply, Request, Tree

__all__ = ["EnvActor"]

#: A list, an array, or None.
Picked: TypeAlias = Any
Handler: TypeAlias = Callable[[Any], Reply]


class EnvActor:
    """k env slots and one handler per request type.

    A handler raises for a request that makes no sense, before any env is touched: a slot that
    is not there, a step before `MapBlocks`. What envs raise is in the reply, slot by slot.
    One thread only.

    Attributes:
        handlers: What answers each type of request.
    """

    def __init__(self, receive_fd: Callable[[int], int] | None = None) -> None:
        """Start without envs.

        Args:
            receive_fd: Returns the descriptor that came as the parcel of a given number; None if
                this actor shares no memory with its runner.
        """
        self.handlers: dict[type[Request[Any]], Handler] = {
            Build: self.build,
            MapBlocks: self.map_blocks,
            Reset: self.reset,
            Step: self.step,
            Call: self.call,
            SetAttr: self.set_attr,
            Exec: self.execute,
            CloseEnvs: self.close_envs,
        }
        self._receive_fd = receive_fd
        self._groups: list[SlotGroup] = []
        #: First slot of each group.
        self._firsts: list[int] = []
        self._num_slots = 0
        self._arena: Arena | None = None
        #: This actor's rows; None before `MapBlocks`.
        self._blocks: Blocks | None = None
        self._in_frames = False

    def build(self, request: Build) -> Built:
        """Create the envs; if one fails, report it and close those that exist.

        Raises:
            RuntimeError: The envs exist already.
            ValueError: The autoreset mode is unknown.
        """
        if self._groups:
            raise RuntimeError("this actor has its envs already; build a new actor instead")
        mode = AutoresetMode(request.autoreset_mode)
        envs: list[AnyEnv] = []
        try:
            if request.registry is not None:
                env_source.register_missing(request.registry.value)
            for plain in request.sources.value:
                envs.append(env_source.make(env_source.from_plain(plain)))
            groups = list(_group(envs, mode, request.first_env_id))
            found, space_of = _distinct_spaces(envs)
        except BaseException as error:
            failed = slot_error(sum(map(_count, envs)), "build", error)
            return _not_built([failed, *_close_all(envs)])
        self._groups = groups
        for group in groups:
            self._firsts.append(self._num_slots)
            self._num_slots += group.num_slots
        metadata, render_mode, spec = _description(envs)
        return Built(
            counts=[_count(env) for env in envs],
            spaces=Tree([[spaces.to_plain(space) for space in pair] for pair in found]),
            space_of=space_of,
            metadata=Tree(metadata),
            render_mode=render_mode,
            spec=Tree(spec),
        )

    def map_blocks(self, request: MapBlocks) -> Mapped:
        """Exchange arrays in the arena, or, without a parcel, in frames.

        Raises:
            ValueError: The rows are not in the pool, or there is no way to get the parcel.
        """
        last = request.first_row + self._num_slots
        if request.first_row < 0 or last > request.num_envs:
            raise ValueError(
                f"rows {request.first_row} to {last - 1} are not in a pool of {request.num_envs}"
            )
        observation_space = spaces.from_plain(request.observation_space.value)
        action_space = spaces.from_plain(request.action_space.value)
        self._unmap()
        rows = slice(0, self._num_slots)
        if request.parcel:
            if self._receive_fd is None:
                raise ValueError("this actor shares no memory with its runner: map with parcel=0")
            layout = BlockLayout.of(observation_space, action_space, request.num_envs)
            self._arena = Arena.attach(self._receive_fd(request.parcel), layout.size)
            buffer: Any = self._arena.buffer
            rows = slice(request.first_row, last)
        else:
            layout = BlockLayout.of(observation_space, action_space, max(self._num_slots, 1))
            buffer = bytearray(layout.size)
        self._in_frames = not request.parcel
        self._blocks = _part(layout.views(buffer), rows)
        for group, first in zip(self._groups, self._firsts, strict=True):
            part = _part(self._blocks, slice(first, first + group.num_slots))
            group.bind(Exchange(observation_space, action_space, part))
        return Mapped()

    def reset(self, request: Reset) -> StepResult:
        """Start new episodes.

        Raises:
            ValueError: Unknown slots, or not one seed per slot.
            RuntimeError: There are no envs, or no blocks yet.
        """
        addressed = self._addressed(request.slots)
        seeds = request.seeds
        if seeds is not None and len(seeds) != addressed:
            raise ValueError(f"{len(seeds)} seeds for {addressed} slots")
        options = None if request.options is None else request.options.value
        outcomes = [
            (positions, group.reset(slots, _pick(seeds, positions), options))
            for group, slots, positions in self._split(request.slots)
        ]
        return self._result(addressed, request.slots, outcomes, with_rewards=False)

    def step(self, request: Step) -> StepResult:
        """Advance by one step.

        Raises:
            ValueError: Unknown slots, not one action per slot, or only some envs of a vector env.
            RuntimeError: There are no envs, or no blocks yet.
        """
        addressed = self._addressed(request.slots)
        items = None if request.actions is None else request.actions.value
        leaves = None if items is not None else request.action_arrays
        self._check_actions(addressed, items, leaves)
        outcomes = []
        for group, slots, positions in self._split(request.slots):
            part = None if leaves is None else [_pick(leaf, positions) for leaf in leaves]
            outcomes.append((positions, group.step(slots, part, _pick(items, positions))))
        return self._result(addressed, request.slots, outcomes, with_rewards=True)

    def call(self, request: Call) -> CallResult:
        """Call a method of the envs, or read an attribute."""
        return self._each(
            request.slots,
            lambda group, slots, _positions: group.call(
                slots, request.name, request.args.value, request.kwargs.value
            ),
        )

    def set_attr(self, request: SetAttr) -> CallResult:
        """Set an attribute of the envs.

        Raises:
            ValueError: Not one value per slot.
        """
        values = request.values.value
        addressed = self._addressed(request.slots)
        if len(values) != addressed:
            raise ValueError(f"{len(values)} values for {addressed} slots")
        return self._each(
            request.slots,
            lambda group, slots, positions: group.set_attr(
                slots, request.name, _pick(values, positions)
            ),
        )

    def execute(self, request: Exec) -> CallResult:
        """Run a function beside the envs."""
        return self._each(
            request.slots,
            lambda group, slots, _positions: group.execute(
                slots, request.function.value, request.args.value, request.kwargs.value
            ),
        )

    def close_envs(self, _request: CloseEnvs) -> CallResult:
        """Close the envs. Idempotent."""
        num_slots = self._num_slots
        return CallResult(values=Tree([None] * num_slots), errors=self.close())

    def close(self) -> list[SlotError]:
        """Close the envs and let go of the arena. Idempotent; returns what the envs raised."""
        groups, self._groups, self._firsts, self._num_slots = self._groups, [], [], 0
        errors = [error for group in groups for error in group.close()]
        self._unmap()
        return errors

    def _unmap(self) -> None:
        for group in self._groups:
            group.bind(None)
        self._blocks = None
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _addressed(self, slots: Sequence[int] | None) -> int:
        """Check the slots of a request and return how many they are."""
        if not self._groups:
            raise RuntimeError("this actor has no envs: they were not built, or were closed")
        if slots is None:
            return self._num_slots
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots {slots} name one of them twice")
        for slot in slots:
            if not 0 <= slot < self._num_slots:
                raise ValueError(f"slot {slot} is not among this actor's {self._num_slots}")
        return len(slots)

    def _check_actions(
        self, addressed: int, items: Sequence[Any] | None, leaves: Sequence[Any] | None
    ) -> None:
        """See that each slot gets an action, before any env is stepped."""
        if self._blocks is None:
            raise RuntimeError("no place to exchange arrays yet: ask MapBlocks first")
        if items is not None:
            if len(items) != addressed:
                raise ValueError(f"{len(items)} actions for {addressed} slots")
        elif leaves is not None:
            expected = self._blocks.actions
            if expected is None or len(leaves) != len(expected):
                raise ValueError(
                    f"{len(leaves)} action arrays, but the action space has "
                    f"{'no fixed size' if expected is None else len(expected)}"
                )
            for leaf in leaves:
                if leaf.ndim < 1 or len(leaf) != addressed:
                    raise ValueError(f"action array of shape {leaf.shape} for {addressed} slots")
        elif self._in_frames or self._blocks.actions is None:
            raise ValueError("a step without actions: they are not exchanged in shared memory")

    def _split(
        self, slots: Sequence[int] | None
    ) -> Iterator[tuple[SlotGroup, Sequence[int] | None, Sequence[int] | None]]:
        """Yield each addressed group, its own slots, and their positions in the request.

        None instead of slots means all of the group's, None instead of positions all of the
        request's.
        """
        if len(self._groups) == 1:
            yield self._groups[0], slots, None
            return
        for group, first in zip(self._groups, self._firsts, strict=True):
            behind = first + group.num_slots
            if slots is None:
                yield group, None, range(first, behind)
                continue
            positions = [at for at, slot in enumerate(slots) if first <= slot < behind]
            if positions:
                yield group, [slots[at] - first for at in positions], positions

    def _result(
        self,
        addressed: int,
        slots: Sequence[int] | None,
        outcomes: list[tuple[Sequence[int] | None, Outcome]],
        *,
        with_rewards: bool,
    ) -> StepResult:
        blocks = self._blocks
        assert blocks is not None
        infos = _merge(addressed, [(at, one.infos) for at, one in outcomes], dict)
        ragged = _merge(addressed, [(at, one.observations) for at, one in outcomes], lambda: None)
        observation_arrays = rewards = terminations = truncations = None
        if self._in_frames:
            # Copies: what is sent must not change under the sender's hands.
            rows: Any = slice(None) if slots is None else list(slots)
            if blocks.observations is not None:
                observation_arrays = [array[rows].copy() for array in blocks.observations]
            if with_rewards:
                rewards = blocks.rewards[rows].copy()
                terminations = blocks.terminations[rows].copy()
                truncations = blocks.truncations[rows].copy()
        return StepResult(
            observation_arrays=observation_arrays,
            observations=None if ragged is None else Tree(ragged),
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos=None if infos is None else Tree(infos),
            errors=[error for _, outcome in outcomes for error in outcome.errors],
        )

    def _each(
        self,
        slots: Sequence[int] | None,
        run: Callable[
            [SlotGroup, Sequence[int] | None, Sequence[int] | None],
            tuple[list[Any], list[SlotError]],
        ],
    ) -> CallResult:
        addressed = self._addressed(slots)
        parts: list[tuple[Sequence[int] | None, list[Any] | None]] = []
        errors: list[SlotError] = []
        for group, own_slots, positions in self._split(slots):
            values, more = run(group, own_slots, positions)
            parts.append((positions, values))
            errors += more
        return CallResult(values=Tree(_merge(addressed, parts, lambda: None) or []), errors=errors)


def _group(envs: Sequence[AnyEnv], mode: AutoresetMode, first_env_id: int) -> Iterator[SlotGroup]:
    """Yield vector envs by themselves and the envs between them together."""
    first = 0
    singles: list[gymnasium.Env[Any, Any]] = []
    for env in [*envs, None]:
        if isinstance(env, gymnasium.Env):
            singles.append(env)
            continue
        if singles:
            yield EnvSlots(singles, mode, first_slot=first, first_env_id=first_env_id + first)
            first += len(singles)
            singles = []
        if env is not None:
            yield VectorSlots(env, mode, first_slot=first, first_env_id=first_env_id + first)
            first += _count(env)


def _count(env: AnyEnv) -> int:
    return int(env.num_envs) if isinstance(env, VectorEnv) else 1


def _distinct_spaces(envs: Sequence[AnyEnv]) -> tuple[list[tuple[Space, Space]], list[int]]:
    """Return the distinct pairs of spaces, and which of them each env has."""
    found: list[tuple[Space, Space]] = []
    space_of = []
    for env in envs:
        if isinstance(env, VectorEnv):
            pair = (env.single_observation_space, env.single_action_space)
        else:
            pair = (env.observation_space, env.action_space)
        for space in pair:
            if not isinstance(space, gymnasium.Space):
                raise TypeError(
                    f"expected a gymnasium.Space as a space of {env}, got "
                    f"{type(space).__module__}.{type(space).__qualname__}"
                )
        for number, (observation_space, action_space) in enumerate(found):
            if pair[0] == observation_space and pair[1] == action_space:
                space_of.append(number)
                break
        else:
            space_of.append(len(found))
            found.append(pair)
    return found, space_of


def _description(envs: Sequence[AnyEnv]) -> tuple[dict[str, Any], str | None, Any]:
    """Return metadata, render mode and spec of the first env."""
    if not envs:
        return {}, None, None
    env = envs[0]
    metadata = dict(env.metadata or {})
    if isinstance(env, VectorEnv):
        metadata.pop("autoreset_mode", None)  # the caller asked for it, and it is no plain value
    render_mode = env.render_mode if isinstance(env.render_mode, str) else None
    return metadata, render_mode, env.spec


def _not_built(errors: list[SlotError]) -> Built:
    return Built(
        counts=[],
        spaces=Tree([]),
        space_of=[],
        metadata=Tree({}),
        render_mode=None,
        spec=Tree(None),
        errors=errors,
    )


def _close_all(envs: Sequence[AnyEnv]) -> list[SlotError]:
    errors = []
    slot = 0
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            errors.append(slot_error(slot, "close", error))
        slot += _count(env)
    return errors


def _part(blocks: Blocks, rows: slice) -> Blocks:
    return Blocks(
        observations=_rows_of(blocks.observations, rows),
        actions=_rows_of(blocks.actions, rows),
        rewards=blocks.rewards[rows],
        terminations=blocks.terminations[rows],
        truncations=blocks.truncations[rows],
    )


def _rows_of(arrays: list[Any] | None, rows: slice) -> list[Any] | None:
    return None if arrays is None else [array[rows] for array in arrays]


def _pick(values: Picked, positions: Sequence[int] | None) -> Picked:
    """The values at `positions`, or all; None stays None."""
    if values is None or positions is None:
        return values
    if isinstance(values, list | tuple):
        return [values[at] for at in positions]
    return values[list(positions)]


def _merge(
    addressed: int,
    parts: list[tuple[Sequence[int] | None, list[Any] | None]],
    missing: Callable[[], Any],
) -> list[Any] | None:
    """One list from the groups' lists; None if none of them has one."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1]
    if all(values is None for _, values in parts):
        return None
    merged = [missing() for _ in range(addressed)]
    for positions, values in parts:
        for at, value in zip(positions or (), values or (), strict=False):
            merged[at] = value
    return merged
