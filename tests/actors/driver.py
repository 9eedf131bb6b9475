"""Drives env actors as a runner would, without sockets and processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeAlias, TypeVar

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envbus.actors.arrays.blocks import BlockLayout
from envbus.actors.env.actor import EnvActor
from envbus.actors.protocol import Build, Built, MapBlocks, Reset, SlotError, Step, StepResult
from envbus.actors.spaces import spaces
from envbus.bus.memory.arena import Arena
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Payload, Tree

P = TypeVar("P", bound=Payload)
#: Observations, actions, infos, requests: what a test compares as a whole.
Anything: TypeAlias = Any


class Objects(list[Any]):
    """Stands for the pipe: keeps the objects that the codec cannot express."""

    number = 1

    def add(self, obj: object) -> int:
        self.append(obj)
        return len(self) - 1

    def get(self, number: int, index: int) -> object:
        assert number == self.number
        return self[index]


def carry(payload: P) -> P:
    """Return `payload` as it arrives on the other side; its arrays are read-only."""
    objects = Objects()
    frames = [bytes(frame) for frame in encode(payload, objects)]
    return decode(type(payload), frames, objects)


def ask(actor: EnvActor, request: Anything) -> Anything:
    return carry(actor.handlers[type(request)](carry(request)))


def build(
    actor: EnvActor, sources: Sequence[Any], mode: str = "NextStep", first_env_id: int = 0
) -> Built:
    request = Build(sources=Tree(list(sources)), autoreset_mode=mode, first_env_id=first_env_id)
    built = ask(actor, request)
    assert isinstance(built, Built)
    return built


def mapped_actor(sources: Sequence[Any], mode: str = "NextStep", first_env_id: int = 0) -> EnvActor:
    """An actor with envs that exchanges arrays in frames."""
    actor = EnvActor()
    built = build(actor, sources, mode, first_env_id)
    assert built.errors == []
    observation_space, action_space = built.spaces.value[0]
    ask(
        actor,
        MapBlocks(
            observation_space=Tree(observation_space),
            action_space=Tree(action_space),
            num_envs=sum(built.counts),
            first_row=0,
        ),
    )
    return actor


class Driver(VectorEnv[Any, Any, Any]):
    """A small `BusVectorEnv`: lock-step, in one process."""

    def __init__(
        self,
        sources: Sequence[Any],
        mode: str = "NextStep",
        *,
        actors: int = 1,
        shared_memory: bool = True,
    ) -> None:
        self.parts = [list(part) for part in np.array_split(np.arange(len(sources)), actors)]
        self.arena: Arena | None = None
        self.actors = [EnvActor(self._fd) for _ in self.parts]
        counts = []
        for actor, part in zip(self.actors, self.parts, strict=True):
            built = build(actor, [sources[i] for i in part], mode)
            assert built.errors == []
            assert len(built.spaces.value) == 1
            counts.append(sum(built.counts))
            plain = built.spaces.value[0]
        self.num_envs = sum(counts)
        self.single_observation_space, self.single_action_space = map(spaces.from_plain, plain)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        layout = BlockLayout.of(
            self.single_observation_space, self.single_action_space, self.num_envs
        )
        self.shared_memory = shared_memory
        if shared_memory:
            self.arena = Arena.create(layout.size)
            self.blocks = layout.views(self.arena.buffer)
        else:
            self.blocks = layout.views(bytearray(layout.size))
        self.rows = []
        first = 0
        for actor, count in zip(self.actors, counts, strict=True):
            request = MapBlocks(
                observation_space=Tree(plain[0]),
                action_space=Tree(plain[1]),
                num_envs=self.num_envs,
                first_row=first,
                passed=7 if shared_memory else 0,
            )
            ask(actor, request)
            self.rows.append(slice(first, first + count))
            first += count
        self.single_observations: list[Any] = [None] * self.num_envs
        self.errors: list[SlotError] = []

    def _fd(self, number: int) -> int:
        assert number == 7
        assert self.arena is not None
        return os.dup(self.arena.fd)

    def reset(
        self, *, seed: Anything = None, options: Anything = None
    ) -> tuple[Anything, dict[str, Any]]:
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        if isinstance(seed, int):
            seeds = [seed + i for i in range(self.num_envs)]
        infos: dict[str, Any] = {}
        for actor, rows in zip(self.actors, self.rows, strict=True):
            slots = list(range(rows.stop - rows.start))
            if mask is not None:
                slots = [slot for slot in slots if mask[rows.start + slot]]
            if not slots:
                continue
            request = Reset(
                slots=None if mask is None else slots,
                seeds=Tree([seeds[rows.start + slot] for slot in slots]),
                options=None if options is None else Tree(options),
            )
            result = ask(actor, request)
            infos = self._take(result, [rows.start + slot for slot in slots], infos, stepped=False)
        return self._observe(), infos

    def step(
        self, actions: Anything
    ) -> tuple[Anything, Anything, Anything, Anything, dict[str, Any]]:
        singles = list(iterate(self.action_space, actions))
        infos: dict[str, Any] = {}
        for actor, rows in zip(self.actors, self.rows, strict=True):
            part = singles[rows]
            if self.blocks.actions is None:
                request = Step(actions=Tree(part))
            else:
                out = create_empty_array(self.single_action_space, len(part))
                batch = concatenate(self.single_action_space, part, out)
                arrays = [
                    _reach(batch, leaf.path) for leaf in spaces.leaves(self.single_action_space)
                ]
                if self.shared_memory:
                    for block, array in zip(self.blocks.actions, arrays, strict=True):
                        block[rows] = array
                    request = Step()
                else:
                    request = Step(action_arrays=arrays)
            result = ask(actor, request)
            infos = self._take(result, list(range(rows.start, rows.stop)), infos, stepped=True)
        blocks = self.blocks
        return (
            self._observe(),
            blocks.rewards.copy(),
            blocks.terminations.copy(),
            blocks.truncations.copy(),
            infos,
        )

    def close_extras(self, **kwargs: Any) -> None:
        for actor in self.actors:
            self.errors += actor.close()
        if self.arena is not None:
            del self.blocks
            self.arena.close()

    def _take(
        self, result: StepResult, env_ids: list[int], infos: dict[str, Any], *, stepped: bool
    ) -> dict[str, Any]:
        assert result.errors == [], result.errors[0].traceback
        if self.shared_memory:
            assert result.observation_arrays is None
            assert result.rewards is None
        else:
            for block, array in zip(
                self.blocks.observations or [], result.observation_arrays or [], strict=True
            ):
                block[env_ids] = array
            if stepped:
                self.blocks.rewards[env_ids] = result.rewards
                self.blocks.terminations[env_ids] = result.terminations
                self.blocks.truncations[env_ids] = result.truncations
        if result.observations is not None:
            for env_id, observation in zip(env_ids, result.observations.value, strict=True):
                self.single_observations[env_id] = observation
        if result.infos is not None:
            for env_id, info in zip(env_ids, result.infos.value, strict=True):
                infos = self._add_info(infos, info, env_id)
        return infos

    def _observe(self) -> Anything:
        if self.blocks.observations is not None:
            return deepcopy(
                spaces.structurer(self.single_observation_space)(self.blocks.observations)
            )
        out = create_empty_array(self.single_observation_space, self.num_envs)
        return deepcopy(concatenate(self.single_observation_space, self.single_observations, out))


def _reach(value: Anything, path: Sequence[Any]) -> Anything:
    for key in path:
        value = value[key]
    return value
