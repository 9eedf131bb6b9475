"""Puts what a vector env's actors reply where its caller reads it. Knows no fault and no wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium

from envbus.actors.blocks import Blocks
from envbus.actors.protocol import Rebuild, Reset, StepResult
from envbus.runner.actor import Actor
from envbus.runner.lockstep import Round
from envbus.runner.observations import ObservationStore

__all__ = ["Infos", "VectorResults", "merge_infos"]

#: By env, those infos that are not empty.
Infos: TypeAlias = dict[int, dict[str, Any]]


class VectorResults:
    """The latest observation, reward and flags of each env.

    Args:
        space: The single observation space.
        num_envs: Rows.
        blocks: Where rewards and flags are, and observations of a fixed size; the actors write
            into the very same arrays, if memory is shared.
        actors: Whose replies are taken.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        num_envs: int,
        blocks: Blocks,
        actors: Sequence[Actor],
    ) -> None:
        self.blocks = blocks
        self.observations = ObservationStore(space, num_envs, blocks.observations)
        self._actors = actors
        #: By actor index: the slots that the present step asks, where not all.
        self.partial: Mapping[int, Sequence[int]] = {}

    def take(self, done: Round, openings: Mapping[int, Reset | Rebuild]) -> Infos:
        """Take in what a round's replies carry, once, and return the infos.

        The row of an env that raised keeps its former observation.

        Args:
            done: The round.
            openings: By actor index: the request that its reply is to, where that began episodes.
        """
        if done.infos is not None:
            return done.infos
        blocks = self.blocks
        infos: Infos = dict(done.early)
        done.infos = infos
        for index, reply in done.replies.items():
            if type(reply) is not StepResult:
                continue
            actor = self._actors[index]
            request = openings.get(index)
            slots = self.partial.get(index) if request is None else request.slots
            rows: Any = actor.rows
            if slots is not None:
                rows = [actor.env_ids[slot] for slot in slots]
            if reply.observation_arrays is not None or reply.observations is not None:
                self._take_observations(actor, slots, reply)
            if request is not None:
                blocks.rewards[rows] = 0.0
                blocks.terminations[rows] = False
                blocks.truncations[rows] = False
            elif reply.rewards is not None:
                blocks.rewards[rows] = reply.rewards
                blocks.terminations[rows] = reply.terminations
                blocks.truncations[rows] = reply.truncations
            if reply.infos is not None:
                env_ids = actor.env_ids if slots is None else rows
                for env_id, info in zip(env_ids, reply.infos.value, strict=True):
                    if info:
                        infos[env_id] = info
        return infos

    def _take_observations(
        self, actor: Actor, slots: Sequence[int] | None, reply: StepResult
    ) -> None:
        asked = range(len(actor.env_ids)) if slots is None else slots
        failed = {error.slot for error in reply.errors}
        good = [position for position, slot in enumerate(asked) if slot not in failed]
        env_ids = [actor.env_ids[asked[position]] for position in good]
        if reply.observation_arrays is not None:
            arrays = reply.observation_arrays
            if failed:
                arrays = [array[good] for array in arrays]
            self.observations.put_arrays(env_ids, arrays)
        if reply.observations is not None:
            singles = reply.observations.value
            self.observations.put_singles(env_ids, [singles[position] for position in good])


def merge_infos(
    infos: Infos, add_info: Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]
) -> dict[str, Any]:
    """Return the infos of all envs as one dict of arrays.

    Args:
        infos: Those that are not empty.
        add_info: Gymnasium's `VectorEnv._add_info`.

    Raises:
        ValueError: They cannot be merged; the message names the env.
    """
    merged: dict[str, Any] = {}
    for env_id in sorted(infos):
        try:
            merged = add_info(merged, infos[env_id], env_id)
        except Exception as exc:  # a different error for each kind of misfit
            raise ValueError(
                f"the info of env {env_id} cannot be merged with those before it: {exc}"
            ) from exc
    return merged
