"""Answers the requests of `protocol.py` about the envs of one actor process.

Leaves out the socket and the loop (`process/host.py`): handlers are plain functions from a request
to its reply, so that tests call them directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from envbus.actors.arrays.blocks import BlockLayout, Blocks
from envbus.actors.arrays.finite import FiniteCheck, without_nan
from envbus.actors.arrays.info_columns import RECORD_BYTES, InfoLayout, InfoWriter, records_of
from envbus.actors.arrays.packing import pack_records, unpack_by_agent
from envbus.actors.env.construction import construct
from envbus.actors.env.import_rule import ImportRule
from envbus.actors.env.slot_group import (
    Exchange,
    Outcome,
    Part,
    SlotGroup,
    SlotTable,
    merge,
    pick,
)
from envbus.actors.failures import slot_error
from envbus.actors.protocol import (
    Build,
    Built,
    Call,
    CallResult,
    CloseEnvs,
    Exec,
    Finish,
    Making,
    MapBlocks,
    MapInfos,
    Mapped,
    Rebuild,
    Reset,
    SetAttr,
    SlotError,
    Step,
    StepResult,
)
from envbus.actors.spaces import spaces
from envbus.actors.spaces.agent_spaces import RecordSpace
from envbus.bus.errors import EncodeError
from envbus.bus.memory.arena import Arena
from envbus.bus.transport.words import BYTES_PER_DOER, Doer
from envbus.bus.wire.messages import Reply, Request, Tree

__all__ = ["EnvActor"]

logger = logging.getLogger("envbus.actors")
Handler: TypeAlias = Callable[[Any], Reply]

#: A step of all slots by actions in the arena, and the reply if all that it gave is there too.
_STEP_ALL, _NOTHING_TO_SAY = Step(), StepResult()


class EnvActor:
    """k env slots and one handler per request type.

    A handler raises for a request that makes no sense, before any env is touched: a slot that
    is not there, a step before `MapBlocks`. What envs raise is in the reply, slot by slot.
    One thread only.

    Attributes:
        handlers: What answers each type of request.
    """

    def __init__(
        self,
        receive_fd: Callable[[int], int] | None = None,
        check: Callable[[object], object] | None = None,
        report: Callable[[Making], object] | None = None,
        rule: ImportRule | None = None,
        words: Doer | None = None,
    ) -> None:
        """Start without envs.

        Args:
            receive_fd: Returns the descriptor that was passed under a number; None if
                this actor shares no memory with its runner.
            check: Raises `EncodeError` for what cannot be sent; what `amend` finds out by.
            report: Tells the runner which env is being made.
            rule: What may be imported and called by name, where the runner is not trusted with
                more; functions are not taken then. None: everything.
            words: By which it may be asked to step, once `MapBlocks` says where they are.
        """
        self.handlers: dict[type[Request[Any]], Handler] = {
            Build: self.build,
            MapBlocks: self.map_blocks,
            MapInfos: self.map_infos,
            Rebuild: self.rebuild,
            Reset: self.reset,
            Step: self.step,
            Finish: self.finish,
            Call: self.call,
            SetAttr: self.set_attr,
            Exec: self.execute,
            CloseEnvs: self.close_envs,
        }
        self._rule = rule
        if rule is not None:
            del self.handlers[Exec]
        self._receive_fd = receive_fd
        self._check = check
        self._report = report or _tell_nobody
        self._slots = SlotTable()
        self._arena: Arena | None = None
        #: This actor's rows; None before `MapBlocks`.
        self._blocks: Blocks | None = None
        self._in_frames = False
        #: Whether observations are records of several agents.
        self._has_agents = False
        #: The only group, if its actions and results are all in the arena.
        self._direct: SlotGroup | None = None
        #: Looks for what is not finite; None: nobody does.
        self._finite: FiniteCheck | None = None
        self._finite_faults = False
        #: Slots and fields that were warned of.
        self._warned: set[tuple[int, str]] = set()
        self._first_env_id = 0
        self._num_steps = 0
        self._words = words
        #: Where infos of steps are left that are asked by words; None: nowhere.
        self._infos: InfoWriter | None = None
        #: Number of the last step that was asked by a word.
        self._last_word = 0
        #: What came of it, told when it is asked for, which it is if not all stands in the arena.
        self._unsaid: StepResult | Exception | None = None
        #: Infos of it that were left in records.
        self._left: list[dict[str, Any]] | None = None

    def build(self, request: Build) -> Built:
        """Create the envs; if one fails, report it and close those that exist.

        Raises:
            RuntimeError: The envs exist already.
            ValueError: The autoreset mode is unknown.
        """
        if self._slots.groups:
            raise RuntimeError("this actor has its envs already; build a new actor instead")
        groups, built = construct(
            request, lambda source: self._report(Making(source=source)), self._rule
        )
        self._slots = SlotTable(groups)
        return built

    def map_blocks(self, request: MapBlocks) -> Mapped:
        """Exchange arrays in the arena, or, without a passed descriptor, in frames.

        Raises:
            ValueError: The rows are not in the pool, or there is no way to get the passed
                descriptor.
        """
        last = request.first_row + self._slots.num_slots
        if request.first_row < 0 or last > request.num_envs:
            raise ValueError(
                f"rows {request.first_row} to {last - 1} are not in a pool of {request.num_envs}"
            )
        observation_space = spaces.from_plain(request.observation_space.value)
        action_space = spaces.from_plain(request.action_space.value)
        self._unmap()
        rows = slice(0, self._slots.num_slots)
        if request.passed:
            if self._receive_fd is None:
                raise ValueError("this actor shares no memory with its runner: map with passed=0")
            layout = BlockLayout.of(observation_space, action_space, request.num_envs)
            records = request.num_envs * RECORD_BYTES if request.infos else 0
            size = max(layout.size, request.words + BYTES_PER_DOER, request.infos + records)
            self._arena = Arena.attach(self._receive_fd(request.passed), size)
            buffer: Any = self._arena.buffer
            if request.words and self._words is not None:
                self._words.attach(buffer[request.words : request.words + BYTES_PER_DOER])
            if request.infos and self._words is not None:
                memory = buffer[request.infos : request.infos + records]
                own = records_of(memory, request.num_envs)[request.first_row : last]
                self._infos = InfoWriter(own)
            rows = slice(request.first_row, last)
        else:
            layout = BlockLayout.of(observation_space, action_space, max(self._slots.num_slots, 1))
            buffer = bytearray(layout.size)
        self._in_frames = not request.passed
        self._has_agents = isinstance(observation_space, RecordSpace)
        self._blocks = layout.views(buffer).part(rows)
        if request.check_finite != "off":
            self._finite = FiniteCheck(observation_space, self._blocks)
        self._finite_faults = request.check_finite == "fault"
        self._first_env_id = request.first_row
        for group, first in zip(self._slots.groups, self._slots.firsts, strict=True):
            part = self._blocks.part(slice(first, first + group.num_slots))
            group.bind(Exchange(observation_space, action_space, part))
        if request.passed and self._blocks.actions is not None and len(self._slots.groups) == 1:
            self._direct = self._slots.groups[0]
        return Mapped()

    def map_infos(self, request: MapInfos) -> Mapped:
        """Leave infos of these forms in their records from now on."""
        if self._infos is not None:
            self._infos.learn(InfoLayout.from_plain(request.layout.value))
        return Mapped()

    def reset(self, request: Reset) -> StepResult:
        """Start new episodes.

        Raises:
            ValueError: Unknown slots, or not one seed per slot.
            RuntimeError: There are no envs, or no blocks yet.
        """
        addressed = self._slots.addressed(request.slots)
        seeds = self._seeds(request.seeds, addressed)
        options = None if request.options is None else request.options.value
        outcomes = [
            (positions, group.reset(slots, pick(seeds, positions), options))
            for group, slots, positions in self._slots.split(request.slots)
        ]
        return self._result(addressed, request.slots, outcomes, with_rewards=False)

    def rebuild(self, request: Rebuild) -> StepResult:
        """Make the addressed envs anew.

        Raises:
            ValueError: Unknown slots, or only some envs of a vector env.
            RuntimeError: There are no envs, or no blocks yet.
        """
        self._slots.addressed(request.slots)
        groups = list(self._slots.split(request.slots))
        for group, slots, _ in groups:
            group.check_step(slots)
        errors = [group.rebuild(slots, request.close_timeout) for group, slots, _ in groups]
        return StepResult(errors=[error for some in errors for error in some])

    def step(self, request: Step) -> StepResult:
        """Advance by one step.

        Raises:
            ValueError: Unknown slots, not one action per slot, or only some envs of a vector env.
            RuntimeError: There are no envs, or no blocks yet.
        """
        if request == _STEP_ALL and self._direct is not None:  # the usual step, by the short way
            return self._step_directly(self._direct, None)
        self._num_steps += 1
        addressed = self._slots.addressed(request.slots)
        items = None if request.actions is None else unpack_by_agent(request.actions.value)
        leaves = None if items is not None else request.action_arrays
        self._check_actions(addressed, items, leaves)
        groups = list(self._slots.split(request.slots))
        for group, slots, _ in groups:
            group.check_step(slots)
        outcomes = []
        for group, slots, positions in groups:
            part = None if leaves is None else [pick(leaf, positions) for leaf in leaves]
            outcomes.append((positions, group.step(slots, part, pick(items, positions))))
        return self._result(addressed, request.slots, outcomes, with_rewards=True)

    def step_by_word(self) -> bool:
        """Step all slots if a word asks that; return whether the asker sleeps, and is to be rung.

        What is more than stands in the arena is kept for `finish`.
        """
        words = self._words
        if words is None or not words.is_asked():
            return False
        self._last_word = number = words.take()
        direct = self._direct
        result: StepResult | Exception
        try:
            if direct is not None:
                result = self._step_directly(direct, self._infos)
            else:
                result = self.step(_STEP_ALL)
        except Exception as exc:  # the border: as in a worker, it fails this request only
            result = exc
        self._unsaid = result
        is_told = result is _NOTHING_TO_SAY or self._is_told(result)
        return words.answer(number, has_more=not is_told)

    def _step_directly(self, group: SlotGroup, records: InfoWriter | None) -> StepResult:
        """Step the only group, whose results are all in the arena.

        Args:
            group: That group.
            records: Where infos are left that fit; None: the reply has them.
        """
        self._num_steps += 1
        outcome = group.step(None, None, None)
        infos = outcome.infos
        if (
            not outcome.errors
            and outcome.observations is None
            and (self._finite is None or self._finite.is_fine(infos))
            and (infos is None if records is None else records.write(infos))
        ):
            self._left = infos
            return _NOTHING_TO_SAY
        return self._result(self._slots.num_slots, None, [(None, outcome)], with_rewards=True)

    def _is_told(self, result: StepResult | Exception) -> bool:
        """Return whether all that a step gave stands in the arena, having left its infos there."""
        if isinstance(result, Exception) or not result.stands_in_arena:
            return False
        infos = None if result.infos is None else result.infos.value
        return infos is None if self._infos is None else self._infos.write(infos)

    def finish(self, request: Finish) -> StepResult:
        """Tell what came of a step that was asked by a word, or take it now.

        Raises:
            Exception: What `step` raised.
        """
        if self._words is not None and self._words.is_asked():
            self._words.take()
        if request.number != self._last_word:
            self._last_word, self._unsaid = request.number, None
            return self.step(_STEP_ALL)
        assert self._unsaid is not None, "each step is told of once"
        unsaid, self._unsaid = self._unsaid, None
        if isinstance(unsaid, Exception):
            raise unsaid
        if unsaid is _NOTHING_TO_SAY and self._left is not None:
            return StepResult(infos=Tree(self._left))
        return unsaid

    def call(self, request: Call) -> CallResult:
        """Call a method of the envs, or read an attribute.

        Raises:
            PermissionError: The rule is against the name.
        """
        if self._rule is not None:
            self._rule.check_call(request.name, request.args.value, request.kwargs.value)
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
            PermissionError: The rule is against the name.
        """
        if self._rule is not None:
            self._rule.check_attribute(request.name)
        values = request.values.value
        addressed = self._slots.addressed(request.slots)
        if len(values) != addressed:
            raise ValueError(f"{len(values)} values for {addressed} slots")
        return self._each(
            request.slots,
            lambda group, slots, positions: group.set_attr(
                slots, request.name, pick(values, positions)
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

    def amend(self, request: Call | Exec, reply: Reply) -> Reply:
        """Return a reply that could not be sent without what of it cannot be.

        Such a result of a call is an error of its slot, and the others' are sent.
        """
        if not isinstance(reply, CallResult) or self._check is None:
            return reply
        what = f"`{request.name}`" if isinstance(request, Call) else "the function"
        values, errors = list(reply.values.value), list(reply.errors)
        for position, value in enumerate(values):
            try:
                self._check(value)
            except EncodeError as exc:
                values[position] = None
                unsent = EncodeError(f"{what} gave what cannot be sent: {exc}")
                slot = position if request.slots is None else request.slots[position]
                errors.append(slot_error(slot, "call", unsent))
        return CallResult(values=Tree(values), errors=errors)

    def close_envs(self, _request: CloseEnvs) -> CallResult:
        """Close the envs. Idempotent."""
        num_slots = self._slots.num_slots
        return CallResult(values=Tree([None] * num_slots), errors=self.close())

    def close(self) -> list[SlotError]:
        """Close the envs and let go of the arena. Idempotent; returns what the envs raised."""
        slots, self._slots = self._slots, SlotTable()
        errors = [error for group in slots.groups for error in group.close()]
        self._unmap()
        return errors

    def _unmap(self) -> None:
        for group in self._slots.groups:
            group.bind(None)
        self._blocks = self._direct = self._finite = self._infos = None
        if self._words is not None:
            self._words.detach()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _seeds(self, seeds: Tree | None, addressed: int) -> list[int | None] | None:
        if seeds is None:
            return None
        if len(seeds.value) != addressed:
            raise ValueError(f"{len(seeds.value)} seeds for {addressed} slots")
        return list(seeds.value)

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

    def _result(
        self,
        addressed: int,
        slots: Sequence[int] | None,
        outcomes: list[tuple[Sequence[int] | None, Outcome]],
        *,
        with_rewards: bool,
    ) -> StepResult:
        """Return what is sent."""
        blocks = self._blocks
        assert blocks is not None
        infos = merge(addressed, [(at, one.infos) for at, one in outcomes], dict)
        ragged = merge(addressed, [(at, one.observations) for at, one in outcomes], lambda: None)
        observation_arrays = rewards = terminations = truncations = None
        errors = [error for _, outcome in outcomes for error in outcome.errors]
        if self._finite is not None:
            rows_of = range(addressed) if slots is None else slots
            errors += self._not_finite(
                self._finite, rows_of, infos, ragged, errors, in_step=with_rewards
            )
        observations = pack_records(ragged) if ragged is not None and self._has_agents else ragged
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
            observations=None if observations is None else Tree(observations),
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos=None if infos is None else Tree(infos),
            errors=errors,
        )

    def _not_finite(
        self,
        check: FiniteCheck,
        slots: Sequence[int],
        infos: list[dict[str, Any]] | None,
        elements: list[Any] | None,
        errors: Sequence[SlotError],
        *,
        in_step: bool,
    ) -> list[SlotError]:
        """Return the errors of envs that returned what is not finite, or warn of it once.

        The row of one that has failed by that is cleared, and its info too. `elements` are
        observations without a place in the blocks.
        """
        if not elements and check.is_fine(infos):
            return []
        finals = {
            slot: info["final_obs"]
            for slot, info in zip(slots, infos or (), strict=False)
            if "final_obs" in info
        }
        by_slot = dict(zip(slots, elements or (), strict=False))
        failed = {error.slot for error in errors}
        found: dict[int, SlotError] = {}
        for slot, name, value in check.wrong(slots, finals, by_slot):
            if slot in found or (slot in failed and not self._finite_faults):
                continue
            text = (
                f"env {self._first_env_id + slot}: {name} is {value}"
                + (f", in step {self._num_steps} of its process" if in_step else "")
                + "; check_finite says what follows"
            )
            if self._finite_faults:
                found[slot] = slot_error(slot, "step" if in_step else "reset", ValueError(text))
                check.clear(slot)
                place = list(slots).index(slot)
                if infos is not None:
                    infos[place] = {}
                if elements:
                    elements[place] = without_nan(elements[place])
                assert self._blocks is not None
                self._blocks.terminations[slot] = self._blocks.truncations[slot] = False
            elif (slot, name) not in self._warned:
                self._warned.add((slot, name))
                logger.warning("%s", text)
        return [error for slot, error in found.items() if slot not in failed]

    def _each(
        self,
        slots: Sequence[int] | None,
        run: Callable[
            [SlotGroup, Sequence[int] | None, Sequence[int] | None],
            tuple[list[Any], list[SlotError]],
        ],
    ) -> CallResult:
        addressed = self._slots.addressed(slots)
        parts: list[Part] = []
        errors: list[SlotError] = []
        for group, own_slots, positions in self._slots.split(slots):
            values, more = run(group, own_slots, positions)
            parts.append((positions, values))
            errors += more
        return CallResult(values=Tree(merge(addressed, parts, lambda: None) or []), errors=errors)


def _tell_nobody(_: Making) -> None:
    pass
