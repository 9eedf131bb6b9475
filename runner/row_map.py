"""The arrays that a pool and those who step its envs exchange, and how they are told of.

Leaves out what is where in them (`actors/blocks.py`) and who is told (`building.py`,
`local_fleet.py`).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec

from envbus.actors import spaces
from envbus.actors.blocks import BlockLayout
from envbus.actors.finite import CheckFinite, in_words
from envbus.actors.info_columns import RECORD_BYTES, InfoReader, records_of
from envbus.actors.protocol import MapBlocks
from envbus.bus.arena import Arena
from envbus.bus.messages import Tree
from envbus.bus.words import BYTES_PER_DOER, Asker

__all__ = ["RowMap"]


class RowMap:
    """One row per env, in shared memory or in this process' own.

    Args:
        observation_space: The single one.
        action_space: Likewise.
        num_envs: Rows.
        shared: Whether others map the same memory.
        check_finite: What follows where an env writes what is not finite.
        num_doers: How many others may be asked by words; 0: nobody.

    Attributes:
        blocks: This process' views of all rows.
        request: Maps the rows of env 0; what else is needed for those of others is theirs to add.
        arena: The shared memory; None: there is none.
        words: By which all may be asked to step; None: they are asked by messages only.

        infos: What they leave there besides of steps that were asked so; None with `words`.

    Raises:
        ConfigError: There is not enough shared memory.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        *,
        shared: bool,
        check_finite: CheckFinite,
        num_doers: int = 0,
    ) -> None:
        layout = BlockLayout.of(observation_space, action_space, num_envs)
        is_fixed = layout.observations is not None and layout.actions is not None
        num_doers = num_doers if shared and is_fixed else 0
        self._words_at = layout.size
        self._infos_at = self._words_at + num_doers * BYTES_PER_DOER
        size = self._infos_at + (num_envs * RECORD_BYTES if num_doers else 0)
        self.arena = Arena.create(size) if shared else None
        self.words: Asker | None = None
        self.infos: InfoReader | None = None
        if self.arena is not None and num_doers:
            memory = self.arena.buffer
            self.words = Asker(memory[self._words_at : self._infos_at], num_doers)
            self.infos = InfoReader(records_of(memory[self._infos_at :], num_envs))
        self.blocks = layout.views(
            bytearray(layout.size) if self.arena is None else self.arena.buffer
        )
        self.request = MapBlocks(
            observation_space=Tree(spaces.to_plain(observation_space)),
            action_space=Tree(spaces.to_plain(action_space)),
            num_envs=num_envs,
            first_row=0,
            check_finite=in_words(check_finite),
        )
        self._has_observations = layout.observations is not None

    def request_of(self, index: int, first_row: int) -> MapBlocks:
        """Return what maps the rows of one of those who may be asked, and its words."""
        request = msgspec.structs.replace(self.request, first_row=first_row)
        if self.words is None:
            return request
        words = self._words_at + index * BYTES_PER_DOER
        return msgspec.structs.replace(request, words=words, infos=self._infos_at)

    def shared_rows(self) -> tuple[int, int, MapBlocks] | None:
        """Return descriptor and bytes of the shared memory and what is where.

        For another process of this host to read; the descriptor stays this object's. None: there
        is none, or observations are not in it.
        """
        if self.arena is None or not self._has_observations:
            return None
        return self.arena.fd, self.arena.size, self.request

    def close(self) -> None:
        """Let go of the shared memory. Idempotent."""
        if self.arena is not None:
            self.arena.close()
