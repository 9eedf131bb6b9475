"""What a pool tells of episodes that faults cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from envbus.actors.arrays.blocks import BlockLayout
from envbus.runner.engine.env_results import CutEpisodes, ObservationStore, merge_infos
from envbus.runner.errors import Fault, FaultCause, FaultInfo


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


class Merged(NamedTuple):
    infos: dict[str, Any]
    misfit: ValueError | None
    strange: dict[int, str]


def merged(infos: list[dict[str, Any]], remote: tuple[int, ...]) -> Merged:
    merger = VectorEnv[Any, Any, Any]()
    merger.num_envs = len(infos)
    env_ids = [10 + row for row in range(len(infos))]
    rows = dict(enumerate(infos))
    return Merged(*merge_infos(rows, merger._add_info, env_ids, {10 + row for row in remote}))


def test_infos_that_fit_are_merged_by_those_of_this_host_first() -> None:
    for remote, dtype in (((), np.int16), ((1,), np.int16), ((0, 1), np.int16), ((0,), float)):
        found = merged([{"x": np.int16(1)}, {"x": 2.5}], remote)
        assert found.misfit is None
        assert not found.strange
        assert found.infos["x"].dtype == dtype  # else a remote one would have others' rounded


@pytest.mark.parametrize("strange", ["s", np.zeros(3), {"y": 1}, [1, 2]])
def test_an_info_from_elsewhere_that_does_not_fit_is_left_out_and_no_error(strange: Any) -> None:
    for infos, remote in (
        ([{"x": 1.0}, {"x": strange}, {"x": 2.0}], (1,)),
        ([{"x": 1.0}, {"x": strange}, {"x": 2.0}], (1, 2)),
    ):
        found = merged(infos, remote)
        assert found.misfit is None
        assert found.infos["x"].tolist() == [1.0, 0.0, 2.0]
        assert found.infos["_x"].tolist() == [True, False, True]
        assert list(found.strange) == [11]
        assert found.strange[11].startswith("the info of env 11 cannot be merged")


def test_an_info_from_elsewhere_has_to_fit_those_of_this_host_also_where_it_is_first() -> None:
    found = merged([{"x": np.zeros(3)}, {"x": 1.0}, {"x": 2.0}], remote=(0,))
    assert found.misfit is None
    assert found.infos["x"].tolist() == [0.0, 1.0, 2.0]
    assert list(found.strange) == [10]


@pytest.mark.parametrize("own", [1, None, "s", np.zeros(3), {"cause": 3}, {"cause": {"x": 1}}])
@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("wrap", [dict, lambda info: {"final_info": info}], ids=["step", "end"])
def test_where_a_fault_is_told_an_info_that_is_called_so_gives_way(
    own: Any, failed: int, wrap: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    told = FaultInfo(cause="crash", error="exit code 7", restarts=1)
    infos = [{"x": 1, "fault": told if row == failed else own} for row in range(3)]
    found = merged([wrap(info) for info in infos], remote=())
    assert found.misfit is None
    shown = found.infos if wrap is dict else found.infos["final_info"]
    assert shown["fault"].keys() == {name for key in told for name in (key, f"_{key}")}
    assert shown["fault"]["cause"][failed] == "crash"
    assert np.flatnonzero(shown["_fault"]).tolist() == [failed]
    assert shown["x"].tolist() == [1, 1, 1]
    assert all(info["fault"] is own for row, info in enumerate(infos) if row != failed)


def test_infos_of_this_host_that_do_not_fit_are_an_error_whatever_others_say() -> None:
    found = merged([{"x": 1.0}, {"x": "s"}, {"x": np.zeros(2)}], remote=(2,))
    assert found.infos["x"].tolist() == [1.0, 0.0, 0.0]
    assert "the info of env 11 cannot be merged" in str(found.misfit)
    assert list(found.strange) == [12]
