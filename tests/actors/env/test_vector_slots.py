from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from envbus.actors.arrays.blocks import BlockLayout, Blocks
from envbus.actors.env.slot_group import Exchange
from envbus.actors.env.vector_slots import VectorSlots
from envbus.actors.testing import CountingEnv
from tests.actors.driver import Anything
from tests.envs import FailingEnv, SpaceEnv


class Bench:
    """A vector env in slots, and the blocks in which it meets the test."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], mode: AutoresetMode = AutoresetMode.NEXT_STEP
    ) -> None:
        self.slots = VectorSlots(env, mode, first_slot=2, first_env_id=100)
        pair = env.single_observation_space, env.single_action_space
        layout = BlockLayout.of(*pair, env.num_envs)
        self.blocks: Blocks = layout.views(bytearray(layout.size))
        self.slots.bind(Exchange(*pair, self.blocks))

    @property
    def rows(self) -> list[list[float]]:
        assert self.blocks.observations is not None
        return self.blocks.observations[0].tolist()


class NativeEnv(VectorEnv[Any, Any, Any]):
    """A vector env of its own kind: keeps what it was asked, knows no `call` and no `set_attr`."""

    num_envs = 3

    def __init__(self) -> None:
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.single_action_space = spaces.Discrete(5)
        self.action_space = batch_space(self.single_action_space, 3)
        self.metadata = {}
        self.asked: list[Any] = []
        self.answer: Anything = np.zeros((3, 2), np.float32)
        self.gravity = 9.8

    def reset(self, *, seed: Anything = None, options: Anything = None) -> Anything:
        self.asked.append((seed, options))
        return self.answer, {"x": np.arange(3)}

    def step(self, actions: Anything) -> Anything:
        self.asked.append(actions)
        return self.answer, np.ones(3, np.float32), np.zeros(3, bool), [False, True, False], {}


class OneSeedEnv(NativeEnv):
    """Takes no list of seeds; fails for the seed 13."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def reset(self, *, seed: Anything = None, options: Anything = None) -> Anything:
        if isinstance(seed, list) or seed == 13:
            raise self.error(f"Unsupported seed {seed}")
        return super().reset(seed=seed, options=options)


def counting(*lengths: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    envs = SyncVectorEnv([partial(CountingEnv, length) for length in lengths], autoreset_mode=mode)
    envs.metadata = dict(envs.metadata)  # before Gymnasium 1.4 all share that of the class
    return envs


def test_another_autoreset_mode_is_refused() -> None:
    with pytest.raises(
        ValueError, match="SyncVectorEnv resets its envs in mode SameStep, but Next"
    ):
        VectorSlots(counting(3, mode=AutoresetMode.SAME_STEP), AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("error", [TypeError, gymnasium.error.Error])
def test_a_vector_env_that_takes_no_list_of_seeds_gets_the_first(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    env = OneSeedEnv(error)
    outcome = Bench(env).slots.reset(None, [7, 100, 3], {"level": 1})
    assert not outcome.errors
    assert env.asked == [(7, {"level": 1})]
    assert "OneSeedEnv.reset takes no list of seeds (Unsupported seed [7, 100, 3])" in caplog.text
    failed = Bench(env).slots.reset(None, [13, 100, 3], None)
    assert "Unsupported seed [13, 100, 3]" in failed.errors[0].traceback


def test_a_vector_env_that_does_not_say_its_mode_is_taken_for_next_step() -> None:
    assert VectorSlots(NativeEnv(), AutoresetMode.NEXT_STEP).num_slots == 3
    with pytest.raises(ValueError, match="mode NextStep, but Disabled was asked for"):
        VectorSlots(NativeEnv(), AutoresetMode.DISABLED)


def test_envs_are_stepped_together_or_not_at_all() -> None:
    bench = Bench(counting(3, 3))
    bench.slots.reset(None, None, None)
    for slots in ([0], [1, 0]):
        with pytest.raises(ValueError, match="2 envs of a SyncVectorEnv are stepped together"):
            bench.slots.step(slots, None, [0] * len(slots))
    bench.slots.step([0, 1], None, [5, 6])
    assert [row[1:3] for row in bench.rows] == [[1.0, 5.0], [1.0, 6.0]]


def test_some_envs_are_reset_by_a_mask() -> None:
    bench = Bench(counting(1, 1, mode=AutoresetMode.DISABLED), AutoresetMode.DISABLED)
    bench.slots.reset(None, [1, 2], None)
    bench.slots.step(None, None, [5, 6])
    outcome = bench.slots.reset([1], [9], {"level": 1})
    assert outcome.errors == []
    assert bench.rows == [[1.0, 1.0, 5.0, 1.0], [2.0, 0.0, 0.0, 9.0]]
    assert outcome.infos == [{"episode": 2}]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (None, None),
        ([None] * 3, None),
        ([5, 6, 7], 5),
        ([5, 6, 8], [5, 6, 8]),
        ([5, None, 7], [5, None, 7]),
    ],
)
def test_seeds_take_the_form_that_most_vector_envs_know(
    seeds: Anything, expected: Anything
) -> None:
    env = NativeEnv()
    Bench(env).slots.reset(None, seeds, None)
    assert env.asked == [(expected, None)]


def test_results_and_infos_are_taken_apart() -> None:
    env = NativeEnv()
    env.answer = np.arange(6.0).reshape(3, 2)
    bench = Bench(env)
    assert bench.slots.reset(None, None, None).infos == [{"x": 0}, {"x": 1}, {"x": 2}]
    outcome = bench.slots.step(None, [np.array([1, 2, 3])], None)
    assert outcome.infos is None
    assert bench.rows == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert bench.blocks.rewards.tolist() == [1.0, 1.0, 1.0]
    assert bench.blocks.truncations.tolist() == [False, True, False]
    assert env.asked[1].tolist() == [1, 2, 3]


def test_actions_are_the_vector_envs_own() -> None:
    env = NativeEnv()
    bench = Bench(env)
    assert bench.blocks.actions is not None
    bench.slots.step(None, None, None)
    bench.blocks.actions[0][...] = 4
    assert env.asked[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            np.zeros((3, 3), np.float32),
            r"envs 100 to 102: observation is a ndarray of shape \(3, 3",
        ),
        (np.zeros((2, 2), np.float32), r"needs shape \(3, 2\)"),
        (None, "is a NoneType"),
    ],
)
def test_observations_that_do_not_fit_are_errors_of_all_slots(
    answer: Anything, message: str
) -> None:
    env = NativeEnv()
    env.answer = answer
    bench = Bench(env)
    errors = bench.slots.step(None, None, [0, 0, 0]).errors
    assert [(error.slot, error.phase) for error in errors] == [
        (2, "step"),
        (3, "step"),
        (4, "step"),
    ]
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors[0].message)
    assert not any(map(any, bench.rows))
    assert bench.blocks.rewards.tolist() == [0.0, 0.0, 0.0]


def test_an_error_hits_all_slots_and_its_traceback_stands_once() -> None:
    bench = Bench(SyncVectorEnv([CountingEnv, FailingEnv]))
    bench.slots.reset(None, None, None)
    errors = bench.slots.step(None, None, [0, 0]).errors
    assert [error.message for error in errors] == ["failing on purpose"] * 2
    assert "Traceback" in errors[0].traceback
    assert errors[1].traceback == "(same vector env: the traceback stands with slot 2)"


def test_observations_and_actions_without_a_fixed_size() -> None:
    def make() -> SpaceEnv:
        return SpaceEnv(spaces.Text(5), spaces.Dict(say=spaces.Text(4), go=spaces.Discrete(3)))

    env = SyncVectorEnv([make, make])
    bench = Bench(env)
    outcome = bench.slots.reset(None, [1, 2], None)
    assert outcome.observations is not None
    actions = [{"say": "a", "go": 1}, {"say": "b", "go": 2}]
    outcome = bench.slots.step(None, None, actions)
    assert outcome.errors == []
    assert outcome.observations is not None
    assert all(isinstance(observation, str) for observation in outcome.observations)
    assert [sub.actions[0] for sub in env.envs] == actions  # type: ignore[attr-defined]


def test_calls_reach_the_vector_env_and_then_its_envs() -> None:
    slots = Bench(counting(3, 4)).slots
    assert slots.call(None, "num_envs", [], {}) == ([2, 2], [])
    assert slots.call(None, "length", [], {}) == ([3, 4], [])
    assert slots.call([1], "add", [5], {"times": 2}) == ([10], [])
    assert slots.call(None, "unwrapped.num_envs", [], {}) == ([2, 2], [])
    values, errors = slots.call(None, "nothing", [], {})
    assert values == [None, None]
    assert [(error.slot, error.type_name) for error in errors] == [
        (2, "AttributeError"),
        (3, "AttributeError"),
    ]
    assert slots.call(None, "step", [], {})[1][0].type_name == "ValueError"


class KeepingEnv(VectorEnv[Any, Any, Any]):
    """Returns what it goes on with."""

    num_envs = 2

    def __init__(self) -> None:
        self.single_observation_space = spaces.Sequence(spaces.Discrete(9))
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.single_action_space = spaces.Discrete(5)
        self.action_space = batch_space(self.single_action_space, 2)
        self.metadata = {}
        self.seen = [1], [2]
        self.info: dict[str, Any] = {"x": [[1], [2]]}

    def reset(self, *, seed: Anything = None, options: Anything = None) -> Anything:
        return self.seen, self.info


def test_what_a_vector_env_returns_it_may_change() -> None:
    env = KeepingEnv()
    slots = Bench(env).slots
    told, (called, _) = slots.reset(None, None, None), slots.call(None, "seen", [], {})
    env.info["x"][0].append(9)
    env.seen[0].append(9)
    assert told.infos == [{"x": [1]}, {"x": [2]}]
    assert told.observations == [[1], [2]]
    assert called == [[1], [2]]


def test_attributes_of_the_envs_are_set_one_by_one() -> None:
    env = counting(3, 4)
    slots = Bench(env).slots
    assert slots.set_attr(None, "length", [7, 8]) == ([None, None], [])
    assert env.get_attr("length") == (7, 8)
    assert "all 2 envs" in slots.set_attr([0], "length", [1])[1][0].message


def test_an_attribute_of_the_vector_env_has_one_value() -> None:
    env = NativeEnv()
    slots = Bench(env).slots
    assert slots.set_attr(None, "gravity", [1.6, 1.6, 1.6]) == ([None] * 3, [])
    assert env.gravity == 1.6
    assert slots.call(None, "gravity", [], {}) == ([1.6] * 3, [])
    assert "different values" in slots.set_attr(None, "gravity", [1, 2, 3])[1][0].message
    array = np.ones(2)
    assert slots.set_attr(None, "field", [array, array.copy(), array.copy()])[1] == []


def test_a_function_gets_the_vector_env_once() -> None:
    env = counting(3, 4)
    seen: list[Any] = []

    def function(given: Anything, number: int) -> Anything:
        seen.append(given)
        return [sub.length + number for sub in given.envs]

    slots = Bench(env).slots
    assert slots.execute([1], function, [1], {}) == ([5], [])
    assert seen == [env]
    assert slots.execute(None, "not callable", [], {}) == (["not callable"] * 2, [])


def test_gymnasiums_own_vector_env_is_hosted() -> None:
    env = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    other = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    bench = Bench(env)
    bench.slots.reset(None, [4, 5, 6], None)
    observations, _ = other.reset(seed=4)
    assert bench.rows == observations.tolist()
    for _ in range(40):
        actions = np.array([0, 1, 1])
        assert bench.slots.step(None, [actions], None).errors == []
        observations, rewards, terminations, *_ = other.step(actions)
        assert bench.rows == observations.tolist()
        assert bench.blocks.rewards.tolist() == rewards.tolist()
        assert bench.blocks.terminations.tolist() == terminations.tolist()


def test_closing_reports_and_closes_once() -> None:
    slots = Bench(SyncVectorEnv([partial(FailingEnv, "close"), CountingEnv])).slots
    assert [(error.slot, error.phase) for error in slots.close()] == [(2, "close"), (3, "close")]
    assert slots.close() == []


# --- rebuild --------------------------------------------------------------------------------


def ten(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> SyncVectorEnv:
    return counting(10, 10, 10, mode=mode)


def remade(*queue: Any, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Bench:
    """A bench that has taken a step, and makes the vector envs of `queue`, or raises them."""
    bench = Bench(ten(mode=mode), mode)
    things = list(queue)

    def make() -> Any:
        thing = things.pop(0)
        if isinstance(thing, BaseException):
            raise thing
        return thing

    bench.slots._maker = make
    bench.slots.reset(None, [1, 2, 3], None)
    bench.slots.step(None, None, [4, 5, 6])
    return bench


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_env_made_anew_refuses_steps_until_it_is_reset_whole(mode: AutoresetMode) -> None:
    bench = remade(ten(mode=mode), mode=mode)
    assert bench.slots.rebuild(None, 60.0) == []
    before = [[1, 1, 4], [1, 1, 5], [1, 1, 6]]
    told = "the vector env of envs 100 to 102 was made anew; reset all its envs together first"
    errors = bench.slots.step(None, None, [1, 1, 1]).errors
    assert [(error.slot, error.phase) for error in errors] == [
        (2, "step"),
        (3, "step"),
        (4, "step"),
    ]
    assert errors[0].message == told
    assert bench.blocks.rewards.tolist() == [0, 0, 0]
    (error,) = bench.slots.reset([1], [50], None).errors
    assert (error.slot, error.phase, error.message) == (3, "reset", told)
    assert [row[:3] for row in bench.rows] == before
    outcome = bench.slots.reset([0, 1, 2], [7, None, 9], None)
    assert outcome.errors == []
    assert [info["episode"] for info in outcome.infos or ()] == [1, 1, 1]
    assert [row[3] for row in bench.rows][::2] == [7, 9]
    assert bench.slots.step(None, None, [4, 5, 6]).errors == []
    assert [row[:3] for row in bench.rows] == before


def test_after_that_reset_some_envs_may_be_reset_alone() -> None:
    mode = AutoresetMode.DISABLED
    bench = remade(ten(mode=mode), mode=mode)
    bench.slots.rebuild(None, 60.0)
    bench.slots.reset(None, [7, 8, 9], None)
    assert bench.slots.reset([1], [50], None).errors == []
    assert bench.rows == [[1, 0, 0, 7], [2, 0, 0, 50], [1, 0, 0, 9]]


def test_only_some_envs_of_a_vector_env_are_not_made_anew() -> None:
    bench = remade()
    with pytest.raises(ValueError, match="together"):
        bench.slots.rebuild([1], 60.0)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (RuntimeError("no licence"), "no licence"),
        (CountingEnv(), "expected a vector env of 3"),
        (SyncVectorEnv([CountingEnv] * 2), "expected a vector env of 3"),
        (ten(mode=AutoresetMode.SAME_STEP), "NextStep was asked for"),
        (
            SyncVectorEnv([partial(SpaceEnv, spaces.Discrete(3), spaces.Discrete(3))] * 3),
            "made again with the space",
        ),
    ],
)
def test_a_vector_env_that_cannot_be_made_anew_fails_all_its_slots(made: Any, words: str) -> None:
    bench = remade(made, ten())
    errors = bench.slots.rebuild(None, 60.0)
    assert [(error.slot, error.phase) for error in errors] == [
        (2, "build"),
        (3, "build"),
        (4, "build"),
    ]
    assert words in errors[0].message
    errors = bench.slots.step(None, None, [1, 1, 1]).errors
    assert len(errors) == 3
    assert "envs 100 to 102 could not be made again" in errors[0].message
    assert len(bench.slots.call(None, "length", (), {})[1]) == 3
    assert bench.slots.rebuild(None, 60.0) == []
    assert bench.slots.reset(None, [7, 8, 9], None).errors == []
    assert bench.rows[2] == [1, 0, 0, 9]
    assert bench.slots.close() == []
