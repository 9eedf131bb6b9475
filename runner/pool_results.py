"""What the envs of a pool have brought, row by row, until the caller takes it.

Leaves out which rows are ready (`env_states.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from envbus.actors.blocks import Blocks
from envbus.actors.packing import unpack_records
from envbus.actors.protocol import StepResult
from envbus.runner.faults import Fault
from envbus.runner.observations import ObservationStore

__all__ = ["Batch", "PoolResults", "Rows"]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What `ActorPool.recv` returns: one row per env that was ready. Arrays are the caller's."""

    #: `(n,)` int64: which envs; pass them to `send` with the actions.
    env_ids: npt.NDArray[np.int64]
    #: As Gymnasium batches `n` observations: an array `(n, *shape)`, or a dict or tuple of them.
    observations: Any
    #: `(n,)` float64; 0 after a reset.
    rewards: npt.NDArray[np.float64]
    #: `(n,)` bool.
    terminations: npt.NDArray[np.bool_]
    #: `(n,)` bool.
    truncations: npt.NDArray[np.bool_]
    #: Merged as a vector env of `n` envs merges them: rows are those of this batch.
    infos: dict[str, Any]
    #: `(n,)` int64: which life of the env each row comes from, from 0.
    incarnations: npt.NDArray[np.int64]
    #: Envs that failed, alone or with their actor, since the last batch: their episodes are over,
    #: without a last row. The first observation of their next episode comes by itself.
    faults: list[Fault]
    #: Envs that were asked and have not answered, if the time-out ended this `recv`.
    late: list[int]


class Rows(NamedTuple):
    """What `ActorPool.step_in_place` returns: views of what the next step overwrites."""

    #: As Gymnasium batches `num_envs` observations.
    observations: Any
    #: `(num_envs,)` float64; 0 after a reset.
    rewards: npt.NDArray[np.float64]
    #: `(num_envs,)` bool.
    terminations: npt.NDArray[np.bool_]
    #: `(num_envs,)` bool.
    truncations: npt.NDArray[np.bool_]


class PoolResults:
    """The last result of each env.

    Args:
        observation_space: Of one env.
        num_envs: How many there are.
        blocks: Arrays of all envs; those of shared memory are written by the actors.

    Attributes:
        blocks: Rewards and flags are rows of it.
        observations: Row by row.
        rows: All of them; None where observations have no fixed size.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], num_envs: int, blocks: Blocks
    ) -> None:
        self.blocks = blocks
        self.observations = ObservationStore(observation_space, num_envs, blocks.observations)
        self.rows: Rows | None = None
        if blocks.observations is not None:
            self.rows = Rows(
                self.observations.batch(copy=False),
                blocks.rewards,
                blocks.terminations,
                blocks.truncations,
            )
        self._merger = VectorEnv[Any, Any, Any]()
        self._infos: dict[int, dict[str, Any]] = {}

    def put(self, members: list[int], result: StepResult, *, is_step: bool) -> None:
        """Take in what an actor replied about its envs `members`."""
        if result.observation_arrays is not None:
            self.observations.put_arrays(members, result.observation_arrays)
        if result.observations is not None:
            self.observations.put_singles(members, unpack_records(result.observations.value))
        blocks = self.blocks
        if not is_step:
            blocks.rewards[members] = 0.0
            blocks.terminations[members] = False
            blocks.truncations[members] = False
        elif result.rewards is not None:
            blocks.rewards[members] = result.rewards
            blocks.terminations[members] = result.terminations
            blocks.truncations[members] = result.truncations
        if result.infos is not None:
            for env_id, info in zip(members, result.infos.value, strict=True):
                if info:
                    self._infos[env_id] = info

    def has_ended(self, env_id: int) -> bool:
        """Return whether an env's last row was the last of its episode."""
        return bool(self.blocks.terminations[env_id] or self.blocks.truncations[env_id])

    def count_ended(self, members: list[int]) -> int:
        """Return how many envs' last rows were the last of their episodes."""
        blocks = self.blocks
        return int(np.count_nonzero(blocks.terminations[members] | blocks.truncations[members]))

    def take_info(self, env_id: int) -> dict[str, Any]:
        """Return the info of an env's last result; later calls return nothing."""
        return self._infos.pop(env_id, {})

    def drop_infos(self) -> None:
        """Forget the infos of all envs."""
        self._infos.clear()

    def batch(
        self,
        env_ids: list[int],
        *,
        incarnations: npt.NDArray[np.int64],
        faults: list[Fault],
        late: list[int],
        copy: bool = True,
    ) -> Batch:
        """Return the results of these envs, which are the caller's.

        Args:
            env_ids: Which, in the order of the rows.
            incarnations: `(num_envs,)` int64, of all envs.
            faults: Told with the batch.
            late: Told with the batch.
            copy: False: observations may be views.
        """
        index = np.asarray(env_ids, np.int64)
        infos = self._take_infos(env_ids) if self._infos else {}
        return Batch(
            env_ids=index,
            observations=self.observations.select(index, copy=copy),
            rewards=self.blocks.rewards[index],
            terminations=self.blocks.terminations[index],
            truncations=self.blocks.truncations[index],
            infos=infos,
            incarnations=incarnations[index],
            faults=faults,
            late=late,
        )

    def _take_infos(self, env_ids: Sequence[int]) -> dict[str, Any]:
        """Merge the infos of a batch; all are taken, also if they cannot be merged."""
        found = [(row, self._infos.pop(env_id, None)) for row, env_id in enumerate(env_ids)]
        infos: dict[str, Any] = {}
        self._merger.num_envs = len(env_ids)
        for row, info in found:
            if info:
                infos = self._merger._add_info(infos, info, row)
        return infos
