"""What a vector env must do, as a test suite: inherit `VectorEnvContract`, say how to make one.

Public; needs the extra `testing` (pytest). Leaves out what only envbus promises: restarts,
statistics, `exec_func`.

    class TestMyVectorEnv(VectorEnvContract):
        def make(self, env_fns, **settings):
            return MyVectorEnv(env_fns, **settings)

The envs of the suite are those of `envbus.actors.testing`; their observations tell which episode,
step, action and seed they come from, so that a mixed-up reply shows.
"""

# ruff: noqa: D102 - the name of a test is its sentence.

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from envbus.actors.testing import CountingEnv, ExitingEnv, InfoEnv
from envbus.runner.extras import needed_for

with needed_for("envbus.runner.testing", "testing"):
    import pytest

__all__ = ["VectorEnvContract", "assert_same", "assert_same_trajectory"]

Factory: TypeAlias = Callable[[], gymnasium.Env[Any, Any]]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
New: TypeAlias = Callable[..., Any]

_MODES = list(AutoresetMode)
_EACH_MODE = pytest.mark.parametrize("mode", _MODES, ids=[mode.value for mode in _MODES])
#: Long enough that no episode ends while a test counts steps.
_ENDLESS = 1_000_000


def assert_same(actual: object, expected: object, place: str = "value") -> None:
    """Assert that two results are equal in every bit: types, dtypes, shapes, values, keys.

    Args:
        actual: What came: arrays, dicts, tuples, lists, scalars, or any objects.
        expected: What it must be.
        place: Where it stands, for the message.
    """
    assert type(actual) is type(expected), f"{place}: {type(actual)}, expected {type(expected)}"
    if isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray)
        assert actual.dtype == expected.dtype, f"{place}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{place}: {actual.shape}, not {expected.shape}"
        if expected.dtype.hasobject:
            for index in np.ndindex(expected.shape):
                assert_same(actual[index], expected[index], f"{place}{list(index)}")
        else:
            assert actual.tobytes() == expected.tobytes(), f"{place}: {actual}, not {expected}"
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert set(actual) == set(expected), f"{place}: {sorted(actual)}, not {sorted(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple)
        assert len(actual) == len(expected), f"{place}: {len(actual)}, not {len(expected)} items"
        for number, item in enumerate(expected):
            assert_same(actual[number], item, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert repr(actual) == repr(expected), place  # nan is itself, -0.0 is not 0.0
    else:
        assert actual == expected, f"{place}: {actual!r}, not {expected!r}"


def assert_same_trajectory(
    envs: AnyVectorEnv,
    reference: AnyVectorEnv,
    *,
    steps: int,
    seed: int = 0,
    actions: Callable[[int], Any] | None = None,
) -> int:
    """Assert that two vector envs give the same results for the same seeds and actions.

    Covers reset, steps, partial resets where the mode is DISABLED, and a reset without a seed in
    the end.

    Args:
        envs: What is tested.
        reference: What tells the truth, e.g. a `SyncVectorEnv` of the same factories.
        steps: How many.
        seed: Of the envs and of the sampled actions.
        actions: Returns the actions of a step; None: samples of `reference.action_space`.

    Returns:
        How many episodes ended on the way.
    """
    assert envs.num_envs == reference.num_envs
    for name in ("single_observation_space", "observation_space"):
        assert getattr(envs, name) == getattr(reference, name), name
    for name in ("single_action_space", "action_space"):
        assert getattr(envs, name) == getattr(reference, name), name
    reference.action_space.seed(seed)
    assert_same(envs.reset(seed=seed), reference.reset(seed=seed), "reset")
    ended = 0
    for step in range(steps):
        batch = reference.action_space.sample() if actions is None else actions(step)
        # Each its own copy: an env may change what it is given.
        result = envs.step(copy.deepcopy(batch))
        expected = reference.step(copy.deepcopy(batch))
        assert_same(result, expected, f"step {step}")
        over = expected[2] | expected[3]
        ended += int(over.sum())
        if over.any() and reference.metadata["autoreset_mode"] is AutoresetMode.DISABLED:
            # A dict for each: SyncVectorEnv takes the mask out of it.
            again = envs.reset(options={"reset_mask": over})
            assert_same(again, reference.reset(options={"reset_mask": over}), f"mask {step}")
    assert_same(envs.reset(), reference.reset(), "second reset")
    return ended


class VectorEnvContract(ABC):
    """What every vector env must do that promises what `gymnasium.vector.AsyncVectorEnv` does.

    Inherit it, implement `make`, and let pytest collect the subclass.

    Attributes:
        asynchronous: It has processes of its own, and `reset_async`, `step_async`, `call_async`
            with their `_wait`s.
        strict: Hold it also to what Gymnasium documents and its own classes do not do.
    """

    asynchronous: ClassVar[bool] = True
    strict: ClassVar[bool] = True

    @abstractmethod
    def make(self, env_fns: Sequence[Factory], **settings: Any) -> Any:
        """Return a vector env.

        Args:
            env_fns: One factory per env.
            **settings: `autoreset_mode`, `copy`; their defaults are Gymnasium's.
        """

    @pytest.fixture
    def new(self) -> Iterator[New]:
        """`make`, with all that was made closed in the end."""
        made: list[Any] = []

        def make(env_fns: Sequence[Factory], **settings: Any) -> Any:
            made.append(self.make(env_fns, **settings))
            return made[-1]

        yield make
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a pending call is told of; here it is meant
            for envs in made:
                envs.close()

    # --- four failures of Gymnasium's AsyncVectorEnv ------------------------------------------

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_the_first_step_after_a_reset_acts_also_if_an_episode_had_ended(
        self, new: New, mode: AutoresetMode
    ) -> None:
        envs = new([partial(CountingEnv, 2)] * 2, autoreset_mode=mode)
        envs.reset(seed=0)
        envs.step(np.array([1, 2]))
        assert envs.step(np.array([3, 4]))[2].all()
        envs.reset()
        observations, rewards, *_ = envs.step(np.array([5, 6]))
        assert observations[:, 1:3].tolist() == [[1, 5], [1, 6]]
        assert (rewards > 0).all()

    def test_a_late_reply_is_not_handed_to_the_next_step(self, new: New, tmp_path: Path) -> None:
        self._needs_asynchronous()
        envs = new([_GatedEnv] * 3)
        envs.reset(seed=0)
        envs.set_attr("gate", [tmp_path / "gate", None, None])
        envs.step_async(np.array([1, 1, 1]))
        with pytest.raises(multiprocessing.TimeoutError, match=r"step_wait.* 0\.05 second"):
            envs.step_wait(timeout=0.05)
        (tmp_path / "gate").touch()
        for action in range(2, 6):
            observations, *_ = envs.step(np.full(3, action))
            assert observations[:, 2].tolist() == [action] * 3
        observations, _ = envs.reset(seed=7)
        assert observations[:, 3].tolist() == [7, 8, 9]

    def test_an_exception_that_cannot_be_made_from_its_text_still_arrives_with_it(
        self, new: New
    ) -> None:
        envs = new([CountingEnv, _UnusualErrorEnv])
        envs.reset()
        with _quiet(), pytest.raises(Exception, match="left and right") as caught:
            envs.step(np.array([0, 0]))
        assert not isinstance(caught.value, TypeError)
        observations, _ = envs.reset(seed=3)
        assert observations[:, 3].tolist() == [3, 4]

    def test_a_process_that_ends_is_named_with_its_exit_code(self, new: New) -> None:
        self._needs_asynchronous()
        envs = new([CountingEnv, partial(ExitingEnv, 1, 9)])
        envs.reset()
        envs.step(np.array([0, 0]))
        with pytest.raises(Exception, match=r"\b9\b") as caught:
            envs.step(np.array([0, 0]))
        assert not isinstance(caught.value, EOFError | ConnectionError | BrokenPipeError)
        assert "env" in str(caught.value)
        envs.close()

    # --- construction and spaces --------------------------------------------------------------

    def test_its_spaces_are_those_of_a_sync_vector_env(self, new: New) -> None:
        envs, sync = new([CountingEnv] * 3), SyncVectorEnv([CountingEnv] * 3)
        assert isinstance(envs, VectorEnv)
        assert envs.num_envs == 3
        assert envs.single_observation_space == sync.single_observation_space
        assert envs.observation_space == sync.observation_space
        assert envs.single_action_space == sync.single_action_space
        assert envs.action_space == sync.action_space
        assert envs.render_mode is None
        sync.close()

    def test_differing_spaces_are_refused(self, new: New) -> None:
        with pytest.raises(self._refusal(RuntimeError), match="space"):
            new([CountingEnv, partial(gymnasium.make, "CartPole-v1")])

    @_EACH_MODE
    def test_its_metadata_is_a_copy_that_names_the_autoreset_mode(
        self, new: New, mode: AutoresetMode
    ) -> None:
        before = dict(CountingEnv.metadata)
        by_enum = new([CountingEnv], autoreset_mode=mode)
        by_value = new([CountingEnv], autoreset_mode=mode.value)
        for envs in (by_enum, by_value):
            assert envs.metadata["autoreset_mode"] is mode
            assert envs.metadata["render_fps"] == 30
        if by_enum.metadata is CountingEnv.metadata:
            self._needs_strict("before Gymnasium 1.4 SyncVectorEnv's is that of the class")
        by_enum.metadata["render_fps"] = 1
        assert by_value.metadata["render_fps"] == 30
        assert CountingEnv.metadata == before

    def test_a_spec_can_be_assigned(self, new: New) -> None:
        envs = new([CountingEnv] * 2)
        assert envs.spec is None
        envs.spec = gymnasium.spec("CartPole-v1")
        assert "CartPole-v1" in repr(envs)
        assert "num_envs=2" in repr(envs)

    # --- trajectories -------------------------------------------------------------------------

    @_EACH_MODE
    @pytest.mark.parametrize("env", [CountingEnv, InfoEnv])
    def test_trajectories_equal_those_of_a_sync_vector_env(
        self, new: New, env: type[CountingEnv], mode: AutoresetMode
    ) -> None:
        factories = [partial(env, length) for length in (1, 2, 3, 5)]
        sync = SyncVectorEnv(factories, autoreset_mode=mode)
        ended = assert_same_trajectory(new(factories, autoreset_mode=mode), sync, steps=20)
        assert ended > 20
        sync.close()

    def test_rewards_are_float64_and_flags_are_bool(self, new: New) -> None:
        envs = new([CountingEnv] * 3)
        observations, infos = envs.reset()
        assert (observations.dtype, observations.shape) == (np.float64, (3, 4))
        assert isinstance(infos, dict)
        _, rewards, terminations, truncations, _ = envs.step(np.zeros(3, np.int64))
        assert (rewards.dtype, rewards.shape) == (np.float64, (3,))
        assert (terminations.dtype, terminations.shape) == (np.bool_, (3,))
        assert (truncations.dtype, truncations.shape) == (np.bool_, (3,))

    def test_with_copy_results_are_the_callers_own(self, new: New) -> None:
        envs = new([partial(CountingEnv, 2)] * 2)
        results: list[Any] = [*envs.reset(), *envs.step([1, 2]), *envs.step([3, 4])]
        kept = copy.deepcopy(results)
        envs.step([5, 6])
        assert_same(results, kept)
        for result in results:
            if isinstance(result, np.ndarray):
                assert result.flags.writeable
                result[...] = 1
        observations, *_ = envs.step([7, 8])
        assert observations[:, 2].tolist() == [7, 8]

    def test_without_copy_the_same_buffer_is_returned_each_time(self, new: New) -> None:
        envs = new([CountingEnv] * 2, copy=False)
        first, _ = envs.reset()
        second, *_ = envs.step([1, 2])
        assert np.shares_memory(first, second)
        assert first[:, 2].tolist() == [1, 2]

    # --- actions ------------------------------------------------------------------------------

    def test_actions_may_be_a_batch_or_a_list_and_lie_outside_the_space(self, new: New) -> None:
        envs = new([partial(CountingEnv, _ENDLESS)] * 2)
        envs.reset()
        for actions in (np.array([3, 4]), [3, 4], (3, 4), [np.int64(3), 4], np.array([3, -400])):
            observations, *_ = envs.step(actions)
            assert observations[:, 2].tolist() == list(actions)

    @pytest.mark.parametrize(
        ("actions", "error"),
        [([1], ValueError), ([1, 2, 3], ValueError), ([], ValueError), (0, TypeError)],
        ids=["too few", "too many", "none", "scalar"],
    )
    def test_a_wrong_number_of_actions_is_refused_and_reaches_no_env(
        self, new: New, actions: Any, error: type[Exception]
    ) -> None:
        if gymnasium.__version__ in ("1.2.0", "1.2.1"):
            self._needs_strict("SyncVectorEnv steps those that there are actions for")
        envs = new([CountingEnv] * 2)
        envs.reset()
        with pytest.raises(error):
            envs.step(actions)
        if self.strict:  # SyncVectorEnv has stepped the first envs by then
            assert envs.step([1, 2])[0][:, 1].tolist() == [1, 1]

    # --- seeds and options --------------------------------------------------------------------

    def test_env_i_gets_seed_plus_i_and_keeps_its_generator(self, new: New) -> None:
        envs = new([CountingEnv] * 3)
        observations, _ = envs.reset(seed=42)
        assert observations[:, 3].tolist() == [42, 43, 44]
        assert envs.np_random_seed == (42, 43, 44)
        assert [generator.random() for generator in envs.np_random] == [
            np.random.default_rng(seed).random() for seed in (42, 43, 44)
        ]
        observations, _ = envs.reset(seed=None)
        assert observations[:, 3].tolist() == [42, 43, 44]

    def test_seeds_may_be_given_one_by_one_or_left_out(self, new: New) -> None:
        envs = new([CountingEnv] * 3)
        assert envs.reset(seed=[5, None, 6])[0][:, 3].tolist() == [5, -1, 6]
        assert envs.reset(seed=[None, 8, None])[0][:, 3].tolist() == [5, 8, 6]
        with pytest.raises(self._refusal(ValueError), match="num_envs=3 but got length=2"):
            envs.reset(seed=[1, 2])

    def test_numpy_integers_are_seeds(self, new: New) -> None:
        self._needs_strict("SyncVectorEnv takes a NumPy integer for a sequence")
        envs = new([CountingEnv] * 2)
        assert envs.reset(seed=np.int64(3))[0][:, 3].tolist() == [3, 4]
        assert envs.reset(seed=np.array([9, 8]))[0][:, 3].tolist() == [9, 8]

    def test_seeds_can_be_read_before_any_reset_and_cause_none(self, new: New) -> None:
        envs = new([_SeededEnv, _SeededEnv])
        assert envs.np_random_seed == (123, 123)
        assert envs.get_attr("episode") == (1, 1)

    def test_options_reach_each_env_and_stay_the_callers(self, new: New) -> None:
        envs = new([_GreedyEnv] * 2)
        options = {"level": {"number": 3}}
        envs.reset(options=options)
        if self.strict:  # the envs of a SyncVectorEnv share the caller's dict
            assert options == {"level": {"number": 3}}
            assert envs.get_attr("found") == (3, 3)
        else:
            assert envs.get_attr("found")[0] == 3

    # --- autoreset ----------------------------------------------------------------------------

    def test_next_step_ignores_the_action_of_the_step_that_resets(self, new: New) -> None:
        envs = new([partial(CountingEnv, 1), partial(CountingEnv, 3)])
        envs.reset(seed=0)
        _, rewards, terminations, _, infos = envs.step([1, 1])
        assert (rewards.tolist(), terminations.tolist()) == ([11, 11], [True, False])
        assert infos == {}
        observations, rewards, terminations, truncations, infos = envs.step([2, 2])
        assert observations[:, :3].tolist() == [[2, 0, 0], [1, 2, 2]]
        assert rewards.tolist() == [0, 12]
        assert not terminations.any()
        assert not truncations.any()
        assert_same(infos, {"episode": np.array([2, 0]), "_episode": np.array([True, False])})

    def test_same_step_returns_the_end_and_the_beginning_at_once(self, new: New) -> None:
        factories = [partial(CountingEnv, 1), partial(CountingEnv, 3)]
        envs = new(factories, autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset(seed=0)
        observations, rewards, terminations, _, infos = envs.step([1, 2])
        assert observations[:, :3].tolist() == [[2, 0, 0], [1, 1, 2]]
        assert (rewards.tolist(), terminations.tolist()) == ([11, 11], [True, False])
        assert infos["final_obs"].dtype == object
        assert infos["final_obs"][0].tolist() == [1, 1, 1, 0]
        assert infos["final_obs"][1] is None
        mask = np.array([True, False])
        assert_same({k: infos[k] for k in infos if k != "final_obs"}, {
            "_final_obs": mask,
            "final_info": {},
            "_final_info": mask,
            "episode": np.array([2, 0]),
            "_episode": mask,
        })  # fmt: skip

    def test_disabled_resets_only_whom_the_mask_names(self, new: New) -> None:
        factories = [partial(CountingEnv, 1), partial(CountingEnv, 3), partial(CountingEnv, 3)]
        envs = new(factories, autoreset_mode=AutoresetMode.DISABLED)
        envs.reset(seed=0)
        _, _, terminations, _, _ = envs.step([1, 2, 3])
        assert terminations.tolist() == [True, False, False]
        observations, infos = envs.reset(seed=[10, 11, 12], options={"reset_mask": terminations})
        assert observations.tolist() == [[2, 0, 0, 10], [1, 1, 2, 1], [1, 1, 3, 2]]
        mask = np.array([True, False, False])
        assert_same(infos, {"episode": np.array([2, 0, 0]), "_episode": mask})
        assert envs.np_random_seed == (10, 1, 2)
        observations, _, terminations, _, _ = envs.step([4, 5, 6])
        assert observations[:, 1].tolist() == [1, 2, 2]
        assert terminations.tolist() == [False, False, False]

    @pytest.mark.parametrize(
        ("mask", "error", "text"),
        [
            ([True, False], TypeError, "must be a numpy array, got <class 'list'>"),
            (np.array([True]), ValueError, "must have shape `(2,)`, got (1,)"),
            (np.array([[True, True]]), ValueError, "must have shape `(2,)`, got (1, 2)"),
            (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`, got int64"),
            (np.array([False, False]), ValueError, "must contain a boolean array"),
        ],
        ids=["list", "short", "2-d", "int", "all False"],
    )
    def test_a_malformed_mask_is_refused_before_anything_is_reset(
        self, new: New, mask: Any, error: type[Exception], text: str
    ) -> None:
        envs = new([CountingEnv] * 2, autoreset_mode=AutoresetMode.DISABLED)
        envs.reset()
        with pytest.raises(self._refusal(error), match=re.escape(text)):
            envs.reset(options={"reset_mask": mask})
        assert envs.get_attr("episode") == (1, 1)
        envs.step([0, 0])

    def test_the_mask_stays_in_the_callers_options(self, new: New) -> None:
        self._needs_strict("SyncVectorEnv takes the mask out")
        envs = new([CountingEnv] * 2, autoreset_mode=AutoresetMode.DISABLED)
        options = {"reset_mask": np.array([True, False]), "level": 1}
        envs.reset(options=options)
        assert set(options) == {"reset_mask", "level"}
        assert envs.get_attr("options")[0] == [{"level": 1}]

    # --- infos --------------------------------------------------------------------------------

    def test_infos_that_cannot_be_merged_wedge_nothing(self, new: New) -> None:
        envs = new([_ShapeEnv, partial(_ShapeEnv, 3)])
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="shape" if not self.strict else r"env 1 .*shape"):
            envs.step([0, 0])
        assert envs.reset(seed=4)[0][:, 3].tolist() == [4, 5]

    def test_a_large_info_does_not_deadlock(self, new: New) -> None:
        envs = new([_LargeInfoEnv] * 2)
        envs.reset()
        for _ in range(2):
            infos = envs.step([0, 0])[4]
            assert [len(text) for text in infos["text"]] == [5_000_000] * 2

    # --- call and attributes ------------------------------------------------------------------

    def test_call_returns_results_in_order_and_looks_through_wrappers(self, new: New) -> None:
        envs = new([partial(_wrapped, number) for number in range(4)])
        envs.reset()
        assert envs.call("add", 2, times=3) == (6, 6, 6, 6)
        assert envs.call("length") == envs.get_attr("length") == (0, 1, 2, 3)

    def test_a_missing_attribute_is_an_attribute_error_and_no_more(self, new: New) -> None:
        envs = new([CountingEnv] * 2)
        envs.reset()
        with _quiet(), pytest.raises(AttributeError, match="nonsense"):
            envs.get_attr("nonsense")
        assert envs.step([1, 2])[0][:, 2].tolist() == [1, 2]

    def test_what_has_a_method_of_its_own_cannot_be_called(self, new: New) -> None:
        self._needs_strict("SyncVectorEnv calls it")
        envs = new([CountingEnv] * 2)
        envs.reset()
        for name in ("reset", "step", "close"):
            with _quiet(), pytest.raises(ValueError, match=f"use `{name}` directly instead"):
                envs.call(name)
        assert envs.step([1, 2])[0][:, 2].tolist() == [1, 2]

    def test_attributes_are_set_one_by_one_or_for_all(self, new: New) -> None:
        envs = new([CountingEnv] * 3)
        envs.set_attr("length", [4, 5, 6])
        assert envs.get_attr("length") == (4, 5, 6)
        envs.set_attr("length", 7)
        assert envs.get_attr("length") == (7, 7, 7)
        envs.set_attr("brand_new", "x")
        assert envs.get_attr("brand_new") == ("x", "x", "x")
        with pytest.raises(ValueError, match=re.escape("Got `2` values for 3 environments.")):
            envs.set_attr("length", (1, 2))
        assert envs.get_attr("length") == (7, 7, 7)

    def test_render_returns_a_frame_per_env(self, new: New) -> None:
        envs = new([partial(CountingEnv, render_mode="rgb_array")] * 2)
        assert envs.render_mode == "rgb_array"
        envs.reset()
        envs.step([0, 0])
        frames = envs.render()
        assert_same(frames, (np.ones((1, 1, 3), np.uint8),) * 2)

    # --- errors, order of calls, end ----------------------------------------------------------

    def test_an_exception_keeps_its_type(self, new: New) -> None:
        envs = new([CountingEnv, partial(_RaisingEnv, KeyError("a key"))])
        envs.reset()
        with _quiet(), pytest.raises(KeyError, match="a key"):
            envs.step([0, 0])
        envs.reset()

    @pytest.mark.parametrize("verb", ["reset", "step", "call"])
    def test_nothing_is_waited_for_that_was_not_asked(self, new: New, verb: str) -> None:
        self._needs_asynchronous()
        envs = new([CountingEnv])
        text = f"Calling `{verb}_wait` without any prior call to `{verb}_async`."
        with pytest.raises(NoAsyncCallError, match=re.escape(text)) as caught:
            getattr(envs, f"{verb}_wait")()
        assert caught.value.name == verb

    @pytest.mark.parametrize("second", ["reset", "step", "call"])
    @pytest.mark.parametrize("first", ["reset", "step", "call"])
    def test_a_second_call_is_refused_and_the_first_can_still_be_fetched(
        self, new: New, first: str, second: str
    ) -> None:
        self._needs_asynchronous()
        arguments: dict[str, Any] = {"reset": {}, "step": {"actions": [1, 2]}, "call": {}}
        envs = new([CountingEnv] * 2)
        envs.reset(seed=0)

        def ask(verb: str) -> None:
            if verb == "call":
                envs.call_async("add", 1)
            else:
                getattr(envs, f"{verb}_async")(**arguments[verb])

        ask(first)
        text = f"Calling `{second}_async` while waiting for a pending call to `{first}` to complete"
        with pytest.raises(AlreadyPendingCallError, match=re.escape(text)) as caught:
            ask(second)
        assert caught.value.name == first
        with pytest.raises(AlreadyPendingCallError, match="set_attr"):
            envs.set_attr("length", 1)
        result = getattr(envs, f"{first}_wait")(timeout=60)
        if first == "call":
            assert result == (1, 1)
        else:
            assert result[0][:, 1].tolist() == ([1, 1] if first == "step" else [0, 0])

    @pytest.mark.parametrize("verb", ["reset", "step", "call"])
    def test_a_time_out_names_the_method_and_the_seconds(
        self, new: New, verb: str, tmp_path: Path
    ) -> None:
        self._needs_asynchronous()
        envs = new([_GatedEnv] * 2)
        envs.reset(seed=0)
        envs.set_attr("gate", tmp_path / "gate")
        ask: dict[str, Callable[[], None]] = {
            "reset": partial(envs.reset_async, seed=5),
            "step": partial(envs.step_async, [1, 2]),
            "call": partial(envs.call_async, "wait"),
        }
        ask[verb]()
        text = f"The call to `{verb}_wait` has timed out after 0 second(s)."
        with pytest.raises(multiprocessing.TimeoutError, match=re.escape(text)):
            getattr(envs, f"{verb}_wait")(timeout=0)
        (tmp_path / "gate").touch()
        assert envs.reset(seed=8)[0][:, 3].tolist() == [8, 9]

    def test_after_close_every_use_says_so(self, new: New) -> None:
        self._needs_asynchronous()
        envs = new([CountingEnv])
        envs.close()
        envs.close()
        uses: list[Callable[[], object]] = [
            envs.reset,
            envs.reset_async,
            envs.reset_wait,
            partial(envs.step, [0]),
            partial(envs.step_async, [0]),
            envs.step_wait,
            partial(envs.call, "add", 1),
            envs.call_wait,
            partial(envs.get_attr, "length"),
            partial(envs.set_attr, "length", 1),
            envs.render,
        ]
        for use in uses:
            with pytest.raises(ClosedEnvironmentError, match=r"after a call to `close\(\)`"):
                use()

    @pytest.mark.parametrize("settings", [{}, {"terminate": True}, {"timeout": 0}])
    def test_close_with_a_pending_call_warns_and_ends(
        self, new: New, settings: dict[str, Any]
    ) -> None:
        self._needs_asynchronous()
        envs = new([CountingEnv] * 2)
        envs.reset()
        envs.step_async([0, 0])
        text = "Calling `close` while waiting for a pending call to `step` to complete."
        with pytest.warns(UserWarning, match=re.escape(text)):
            envs.close(**settings)
        assert envs.closed

    # --- private ------------------------------------------------------------------------------

    def _needs_asynchronous(self) -> None:
        if not self.asynchronous:
            pytest.skip("has no processes of its own")

    def _refusal(self, error: type[Exception]) -> tuple[type[Exception], ...]:
        """What bad input is refused with; before 1.4 Gymnasium's own classes assert."""
        return (error,) if self.strict else (error, AssertionError)

    def _needs_strict(self, why: str) -> None:
        if not self.strict:
            pytest.skip(f"a defect of Gymnasium: {why}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let the log lines of an error pass, which Gymnasium prints as warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class _UnusualError(Exception):
    """Cannot be made from its text, nor be pickled."""

    def __init__(self, left: str, *, right: str) -> None:
        super().__init__(f"{left} and {right}")
        self.lock = threading.Lock()


class _UnusualErrorEnv(CountingEnv):
    def step(self, action: np.int64) -> NoReturn:  # noqa: ARG002
        raise _UnusualError("left", right="right")


class _RaisingEnv(CountingEnv):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def step(self, action: np.int64) -> NoReturn:  # noqa: ARG002
        raise self.error


class _SeededEnv(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.reset(seed=123)


class _GreedyEnv(CountingEnv):
    """Takes its options out of the dict that it is given."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.found = (options or {}).pop("level", {}).pop("number", None)
        return super().reset(seed=seed)


class _ShapeEnv(CountingEnv):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"array": np.zeros(self.size)}


class _LargeInfoEnv(CountingEnv):
    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"text": "x" * 5_000_000}


class _GatedEnv(CountingEnv):
    """Waits in each reset, step and `wait` until the file `gate`, if there is one, exists."""

    def __init__(self) -> None:
        super().__init__(length=_ENDLESS)
        self.gate: Path | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.wait()
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wait()
        return super().step(action)

    def wait(self) -> None:
        while self.gate is not None and not self.gate.exists():
            threading.Event().wait(0.005)


def _wrapped(length: int) -> gymnasium.Env[Any, Any]:
    env = CountingEnv(length)
    return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.OrderEnforcing(env), 100)
