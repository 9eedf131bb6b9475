from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.errors import ConfigError
from envbus.runner.policies.connectors import (
    Connector,
    ConnectorError,
    Flatten,
    Normalize,
    Pipeline,
    RunningMeanStd,
    map_leaf_spaces,
    map_space,
)

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
KEYS = [(0, "a"), (1, "a")]


class Plus(Connector):
    def __init__(self, number: float) -> None:
        self.number = number
        self.resets: list[int] = []

    def __call__(self, batch: Any, keys: Any) -> Any:
        return batch + self.number

    def reset(self, env_ids: Iterable[int]) -> None:
        self.resets += env_ids


class Failing(Connector):
    def __call__(self, batch: Any, keys: Any) -> Any:
        raise RuntimeError("no such camera")


def test_a_pipeline_hands_on_from_one_to_the_next_and_resets_all() -> None:
    first, second = Plus(1.0), Plus(2.0)
    pipeline = Pipeline([first, second])
    assert pipeline(np.zeros(2), KEYS).tolist() == [3.0, 3.0]
    pipeline.reset(iter([4]))
    assert (first.resets, second.resets) == ([4], [4])
    assert Pipeline([])(7, KEYS) == 7


def test_a_connector_that_fails_is_named() -> None:
    pipeline = Pipeline([Plus(1.0), Failing()])
    with pytest.raises(ConnectorError, match="connector 1:Failing failed: RuntimeError: no such"):
        pipeline(np.zeros(2), KEYS)


def test_states_go_by_name_and_fit_only_the_same_connectors() -> None:
    pipeline = Pipeline([Plus(1.0), Normalize(BOX)])
    pipeline(np.zeros((2, 2), np.float32), KEYS)
    state = pipeline.get_state()
    assert list(state) == ["0:Plus", "1:Normalize"]
    other = Pipeline([Plus(1.0), Normalize(BOX)])
    other.set_state(state)
    assert other.get_state()["1:Normalize"]["count"] == 2
    for call in (pipeline.set_state, pipeline.sync, lambda odd: pipeline.merge(state, [odd])):
        with pytest.raises(ConfigError, match=r"\['0:Flatten'\] does not fit"):
            call(Pipeline([Flatten(BOX)]).get_state())


def test_what_runners_learn_is_merged_once_each() -> None:
    runners = [Pipeline([Normalize(BOX)]) for _ in range(2)]
    state = runners[0].get_state()
    for round_number in (1, 2, 3):
        for runner in runners:
            runner(np.zeros((2, 2), np.float32), KEYS)
        deltas = [runner.collect_delta() for runner in runners]
        runners[0](np.ones((2, 2), np.float32), KEYS)  # sampling goes on meanwhile
        state = runners[0].merge(state, deltas)
        for runner in runners:
            runner.sync(state)
        assert state["0:Normalize"]["count"] == 4 * round_number + 2 * (round_number - 1)
        assert runners[0].get_state()["0:Normalize"]["count"] == 6 * round_number
        assert runners[1].get_state()["0:Normalize"]["count"] == 6 * round_number - 2


def test_a_space_is_walked_beside_its_batch() -> None:
    space = spaces.Dict(a=spaces.Tuple([BOX, spaces.Discrete(3)]), b=BOX)
    names = map_space(lambda part, leaf: (type(part).__name__, leaf), space, {"a": (1, 2), "b": 3})
    assert names == {"a": (("Box", 1), ("Discrete", 2)), "b": ("Box", 3)}
    with pytest.raises(KeyError):
        map_space(lambda part, leaf: leaf, space, {"a": (1, 2)})
    assert map_leaf_spaces(lambda part: part, space) == space


def test_an_unlearned_connector_has_nothing_to_tell() -> None:
    connector = Plus(0.0)
    connector.set_state({})
    connector.sync({})
    assert (connector.get_state(), connector.collect_delta(), connector.merge({}, [])) == (
        {},
        {},
        {},
    )


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e6]),
)
def test_merged_statistics_are_those_of_all_rows_together(
    parts: list[list[float]], offset: float
) -> None:
    merged = RunningMeanStd()
    for part in parts:
        merged = merged.merge(RunningMeanStd.of([np.array(part) + offset]))
    rows = np.array([value for part in parts for value in part]) + offset
    assert merged.count == len(rows)
    if len(rows):
        assert merged.means[0] == pytest.approx(rows.mean(), abs=1e-6)
        assert merged.variances()[0] == pytest.approx(rows.var(), rel=1e-6, abs=1e-6)


def test_a_state_goes_there_and_back() -> None:
    before = RunningMeanStd.of([np.arange(6.0).reshape(3, 2)])
    after = RunningMeanStd.from_plain(before.to_plain())
    assert (after.count, after.means[0].tolist()) == (3, [2.0, 3.0])
    assert RunningMeanStd.from_plain(RunningMeanStd().to_plain()) == RunningMeanStd()


def test_what_would_spoil_the_statistics_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match="holds NaN"):
        RunningMeanStd.of([np.array([0.0, np.inf, np.nan])])


def test_rows_with_an_infinity_which_some_sensors_mean_are_left_out_of_the_statistics() -> None:
    moments = RunningMeanStd.of(
        [np.array([[1.0, np.inf], [2.0, 4.0], [3.0, 5.0]]), np.array([7, 8, 9])]
    )
    assert moments.count == 2
    assert [mean.tolist() for mean in moments.means] == [[2.5, 4.5], 8.5]
    assert RunningMeanStd.of([np.array([-np.inf])]) == RunningMeanStd()


def test_a_number_too_large_to_square_spoils_nothing() -> None:
    moments = RunningMeanStd.of([np.array([0.0, 1e200])])
    for value in (1e308, -1e308, 1.0):
        moments = moments.merge(RunningMeanStd.of([np.array([value])]))
    assert np.isfinite(moments.m2s[0])
    assert moments.count == 5


def test_rows_of_other_shapes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="do not merge"):
        RunningMeanStd.of([np.zeros((1, 2))]).merge(RunningMeanStd.of([np.zeros((1, 3))]))
