"""What a pool tells of episodes that faults cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.arrays.blocks import BlockLayout
from envbus.runner.engine.env_results import CutEpisodes, ObservationStore
from envbus.runner.workers.faults import Fault, FaultCause


def test_the_last_observation_is_the_one_that_was_received_whatever_was_written_since() -> None:
    rows = np.ones((2, 1), np.float32)
    space = spaces.Box(-9.0, 9.0, (1,), np.float32)
    layout = BlockLayout.of(space, space, 2)
    blocks = layout.views(bytearray(layout.size))
    cut = CutEpisodes(ObservationStore(space, 2, [rows]), blocks, 2)
    cut.on_receive(np.array([0, 1]))
    for _ in range(2):  # a first step timed out
        cut.on_send([0])
        rows[0] += 4.0  # by a step that then fails
    for env_id in range(2):
        cut.on_fault(
            Fault(
                env_id=env_id,
                cause=FaultCause.ERROR,
                message="on purpose",
                restarts=0,
            ),
            {},
        )
        info = cut.tell(env_id, {})
        assert info["final_obs"].tolist() == [1.0]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Text(3)),
        spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))),
        spaces.Text(3),
    ],
)
def test_of_no_env_there_is_a_batch_of_no_rows(space: spaces.Space[Any]) -> None:
    batch = ObservationStore(space, 2, None).select(np.zeros(0, np.int64))
    assert all(len(part) == 0 for part in (batch.values() if type(batch) is dict else batch))
