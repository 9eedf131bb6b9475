from __future__ import annotations

import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from envbus.actors.arrays.blocks import BlockLayout, Blocks
from envbus.actors.env.old_gym import OldGymEnv
from envbus.actors.env.slot_group import Exchange
from envbus.actors.env.slots import EnvSlots
from envbus.actors.testing import CountingEnv
from tests.actors.driver import Anything
from tests.envs import FailingEnv, OldEnv, SpaceEnv

NEXT_STEP, SAME_STEP, DISABLED = (
    AutoresetMode.NEXT_STEP,
    AutoresetMode.SAME_STEP,
    AutoresetMode.DISABLED,
)


class Bench:
    """Some envs, their slots and the blocks in which they meet the test."""

    def __init__(self, *envs: gymnasium.Env[Any, Any], mode: AutoresetMode = NEXT_STEP) -> None:
        self.envs = envs
        self.slots = EnvSlots(envs, mode, first_slot=0, first_env_id=100)
        layout = BlockLayout.of(envs[0].observation_space, envs[0].action_space, len(envs))
        self.blocks: Blocks = layout.views(bytearray(layout.size))
        self.slots.bind(Exchange(envs[0].observation_space, envs[0].action_space, self.blocks))

    def act(self, *actions: Anything) -> Anything:
        return self.slots.step(None, None, list(actions))

    @property
    def rows(self) -> list[list[float]]:
        assert self.blocks.observations is not None
        return self.blocks.observations[0].tolist()


def started(*envs: gymnasium.Env[Any, Any], mode: AutoresetMode = NEXT_STEP) -> Bench:
    bench = Bench(*envs, mode=mode)
    assert bench.slots.reset(None, [7] * len(envs), None).errors == []
    return bench


def test_next_step_resets_instead_of_acting() -> None:
    env = CountingEnv(1)
    bench = started(env)
    bench.act(5)
    assert bench.blocks.terminations.tolist() == [True]
    outcome = bench.act(6)
    assert bench.rows == [[2.0, 0.0, 0.0, 7.0]]
    assert bench.blocks.rewards.tolist() == [0.0]
    assert bench.blocks.terminations.tolist() == [False]
    assert outcome.infos == [{"episode": 2}]
    assert env.actions == [5]
    bench.act(8)
    assert env.actions == [5, 8]
    assert bench.blocks.truncations.tolist() == [True]


def test_an_explicit_reset_clears_the_pending_one() -> None:
    env = CountingEnv(1)
    bench = started(env)
    bench.act(5)
    bench.slots.reset([0], None, None)
    bench.act(6)
    assert env.actions == [5, 6]
    assert env.episode == 2


def test_disabled_goes_on_stepping() -> None:
    env = CountingEnv(1)
    bench = started(env, mode=DISABLED)
    bench.act(5)
    bench.act(6)
    assert env.actions == [5, 6]
    assert bench.blocks.terminations.tolist() == [True]


def test_only_the_addressed_slots_are_stepped() -> None:
    bench = started(*[CountingEnv() for _ in range(4)])
    outcome = bench.slots.step([3, 1], None, [30, 10])
    assert outcome.errors == []
    assert [row[2] for row in bench.rows] == [0.0, 10.0, 0.0, 30.0]
    assert bench.blocks.rewards.tolist() == [0.0, 11.0, 0.0, 11.0]


def test_flags_of_slots_that_are_not_addressed_stay() -> None:
    bench = started(CountingEnv(1), CountingEnv(9))
    bench.act(1, 1)
    bench.slots.step([1], None, [1])
    assert bench.blocks.terminations.tolist() == [True, False]


def test_infos_stand_in_the_order_of_the_request() -> None:
    bench = started(*[CountingEnv(1) for _ in range(3)])
    bench.act(0, 0, 0)
    bench.slots.reset([1], None, None)
    outcome = bench.slots.step([2, 1, 0], None, [0, 0, 0])
    assert outcome.infos == [{"episode": 2}, {}, {"episode": 2}]


class SharingEnv(gymnasium.Env[Anything, Anything]):
    """Returns the same objects as all others of its class, with its own numbers in them."""

    observation_space = spaces.Sequence(spaces.Box(-9, 9, (1,), np.float32))
    action_space = spaces.Discrete(9)
    seen = np.zeros(1, np.float32)
    info: ClassVar[dict[str, Any]] = {"seen": seen}

    def reset(self, *, seed: int | None = None, options: Anything = None) -> Anything:
        self.number = seed
        return self._tell(seed)

    def step(self, action: Anything) -> Anything:
        observation, info = self._tell(action)
        return observation, 0.0, False, False, info

    def _tell(self, number: Anything) -> Anything:
        return (self.look(number),), self.info

    def look(self, number: Anything) -> Anything:
        self.seen[:] = self.info["number"] = number
        return self.seen


def test_envs_that_share_what_they_return_are_told_apart() -> None:
    bench = Bench(SharingEnv(), SharingEnv())
    for outcome in (bench.slots.reset(None, [3, 4], None), bench.act(3, 4)):
        assert outcome.observations == [(3.0,), (4.0,)]
        assert outcome.infos == [{"seen": 3.0, "number": 3}, {"seen": 4.0, "number": 4}]
    values, _ = bench.slots.execute(None, lambda env: env.look(env.number), [], {})
    assert values == [3.0, 4.0]


class EndingEnv(SharingEnv):
    """Each step ends an episode."""

    def reset(self, *, seed: int | None = None, options: Anything = None) -> Anything:
        return super().reset(seed=seed or 0)

    def step(self, action: Anything) -> Anything:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_ends_of_envs_that_share_what_they_return_are_told_apart(mode: AutoresetMode) -> None:
    bench = started(EndingEnv(), EndingEnv(), mode=mode)
    outcome = bench.act(3, 4)
    ends = [{"seen": 3.0, "number": 3}, {"seen": 4.0, "number": 4}]
    if mode is not SAME_STEP:
        assert outcome.observations == [(3.0,), (4.0,)]
        assert outcome.infos == ends
        return
    assert outcome.observations == [(0.0,), (0.0,)]
    assert [info.pop("final_info") for info in outcome.infos] == ends
    assert [info.pop("final_obs") for info in outcome.infos] == [(3.0,), (4.0,)]
    assert outcome.infos == [{"seen": 0.0, "number": 0}] * 2


class WritingEnv(gymnasium.Env[Anything, Anything]):
    """Returns its reward and flags as arrays, to which its reset writes."""

    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(9)

    def __init__(self) -> None:
        self.told = np.array(0.0), np.array(False), np.array(False)

    def reset(self, *, seed: int | None = None, options: Anything = None) -> Anything:
        for one in self.told:
            one[...] = 0
        return 0, {}

    def step(self, action: Anything) -> Anything:
        for one in self.told:
            one[...] = action
        return action, *self.told, {}


def test_a_reset_does_not_change_what_the_step_before_it_told() -> None:
    bench = started(WritingEnv(), mode=AutoresetMode.SAME_STEP)
    bench.act(1)
    assert bench.blocks.rewards.tolist() == [1.0]
    assert bench.blocks.terminations.tolist() == [True]
    assert bench.blocks.truncations.tolist() == [True]


def test_no_info_at_all_costs_nothing() -> None:
    assert started(CountingEnv(), CountingEnv()).act(0, 0).infos is None


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_one_env_fails_and_the_others_go_on(error: BaseException) -> None:
    bench = started(CountingEnv(), FailingEnv("step", 1, error), CountingEnv())
    bench.act(1, 2, 3)
    outcome = bench.act(4, 5, 6)
    (record,) = outcome.errors
    assert (record.slot, record.phase, record.type_name) == (1, "step", type(error).__name__)
    assert [row[2] for row in bench.rows] == [4.0, 2.0, 6.0]
    assert bench.blocks.rewards.tolist() == [12.0, 0.0, 12.0]


def test_several_envs_fail_in_one_step() -> None:
    bench = started(FailingEnv(), CountingEnv(), FailingEnv())
    assert [error.slot for error in bench.act(0, 0, 0).errors] == [0, 2]


def test_an_error_in_reset_is_one_of_its_slot() -> None:
    bench = Bench(CountingEnv(), FailingEnv("reset"))
    outcome = bench.slots.reset(None, None, None)
    (record,) = outcome.errors
    assert (record.slot, record.phase) == (1, "reset")
    assert outcome.infos == [{"episode": 1}, {}]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_an_error_in_an_automatic_reset_says_so(mode: AutoresetMode) -> None:
    bench = started(FailingEnv("reset", 1, length=1), CountingEnv(9), mode=mode)
    outcome = bench.act(0, 0)
    if mode is NEXT_STEP:
        assert outcome.errors == []
        outcome = bench.act(0, 0)
    (record,) = outcome.errors
    assert (record.slot, record.phase) == (0, "autoreset")
    assert bench.blocks.rewards[1] > 0


def test_a_step_that_ends_its_episode_is_told_also_if_the_reset_in_it_fails() -> None:
    bench = started(FailingEnv("reset", 1, length=1), CountingEnv(9), mode=SAME_STEP)
    outcome = bench.act(5, 5)
    assert bench.blocks.rewards.tolist() == [11.0, 11.0]
    assert bench.blocks.terminations.tolist() == [True, False]
    assert outcome.infos[0]["final_obs"].tolist() == [1.0, 1.0, 5.0, 7.0]
    assert outcome.infos[0]["final_info"] == {}
    bench.act(5, 5)  # refused: a reset is due
    assert (bench.blocks.rewards[0], bench.blocks.terminations[0]) == (0.0, False)


def test_after_a_failed_reset_in_same_step_only_a_reset_helps() -> None:
    env = FailingEnv("reset", 1, length=1)
    bench = started(env, mode=SAME_STEP)
    bench.act(0)
    (record,) = bench.act(0).errors
    assert "the episode is over" in record.message
    assert len(env.actions) == 1
    env.after = 99
    assert bench.slots.reset(None, None, None).errors == []
    assert bench.act(0).errors == []


def test_after_a_failed_reset_in_next_step_it_is_tried_again() -> None:
    env = FailingEnv("reset", 1, length=1)
    bench = started(env)
    bench.act(0)
    assert bench.act(0).errors[0].phase == "autoreset"
    env.after = 99
    assert bench.act(0).errors == []
    assert bench.rows == [[2.0, 0.0, 0.0, 7.0]]


class WrongEnv(CountingEnv):
    """Returns what `wrong` says."""

    wrong: Anything = None

    def step(self, action: np.int64) -> Anything:
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((np.zeros(3), 0.0, False, False, {}), r"env 101: observation is a ndarray of shape \(3,"),
        (
            (np.zeros(4), "much", False, False, {}),
            "env 101: its reward is 'much', expected one number",
        ),
        ((np.zeros(4), np.ones(2), False, False, {}), r"env 101: its reward .* shape \(2,\)"),
        ((np.zeros(4), [], False, False, {}), r"env 101: its reward is an array of shape \(0,\)"),
        ((np.zeros(4), 0.0, False, False, None), "info must be a dict, got NoneType"),
        ((np.zeros(4), 0.0, False, False, [1]), "info must be a dict, got list"),
        (
            (np.zeros(4), 0.0, False, False),
            r"env 101: its step returned 4 values, expected \(observation, reward, terminated, ",
        ),
        (
            (np.zeros(4), 0.0, np.zeros(2, bool), {}),
            r"env 101: its step returned 4 values, expected \(observation, reward, terminated, ",
        ),
        (None, r"env 101: its step returned None, expected \(observation, reward, terminated, "),
        (np.zeros(4), r"returned a ndarray, expected \(.*, terminated, truncated, info\)"),
        (
            (np.zeros(4), 0.0, np.zeros(2, bool), False, {}),
            r"returned flags of shapes \(2,\) and \(\), expected one True or False each",
        ),
        (
            (np.zeros(4), 0.0, False, np.ones(3, bool), {}),
            r"returned flags of shapes \(\) and \(3,\), expected one True or False each",
        ),
    ],
)
def test_a_wrong_result_is_named_and_the_others_stand(wrong: Anything, message: str) -> None:
    env = WrongEnv()
    env.wrong = wrong
    bench = started(CountingEnv(), env)
    (record,) = bench.act(1, 2).errors
    assert record.slot == 1
    assert record.phase == "step"
    with pytest.raises(ValueError, match=message):
        raise ValueError(record.message)
    assert [row[2] for row in bench.rows] == [1.0, 0.0]


def test_a_last_info_that_is_no_dict_is_named_in_same_step_too() -> None:
    env = WrongEnv()
    for wrong in (None, [], "over"):
        env.wrong = np.zeros(4), 0.0, True, False, wrong
        (record,) = started(CountingEnv(), env, mode=SAME_STEP).act(1, 2).errors
        assert (record.slot, record.phase) == (1, "step")
        assert "info must be a dict" in record.message


class WrongParts(CountingEnv):
    """What its methods return has another form than Gymnasium's."""

    of_step: Anything = None
    of_reset: Anything = (np.zeros(4, np.float32), {})

    def reset(self, **kwargs: Any) -> Anything:
        super().reset(**kwargs)
        return self.of_reset

    def step(self, action: Any) -> Anything:
        super().step(action)
        return self.of_step


SEEN = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("returned", "came"),
    [
        (np.zeros(2, np.float32), "a ndarray"),
        ("abc", "a str"),
        (None, "None"),
        ((SEEN, {}, 1), "3 values"),
    ],
)
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_a_reset_of_another_form_says_what_came_and_what_is_expected(
    returned: Anything, came: str, mode: AutoresetMode
) -> None:
    env = WrongParts(5)
    bench = started(env, mode=mode)
    env.of_step, env.of_reset = (SEEN, 1.0, True, False, {}), returned
    errors = bench.slots.reset(None, None, None).errors
    env.of_reset = SEEN, {}
    bench.slots.reset(None, None, None)
    env.of_reset = returned
    errors += bench.act(1).errors or bench.act(1).errors
    message = f"env 100: its reset returned {came}, expected (observation, info)"
    assert [error.message for error in errors] == [message] * 2
    assert [error.phase for error in errors] == ["reset", "autoreset"]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_an_env_of_the_old_api_gives_what_one_of_today_gives(mode: AutoresetMode) -> None:
    old, new = started(OldEnv(1), mode=mode), started(CountingEnv(1), mode=mode)
    for action in range(1, 5):
        ours, theirs = old.act(action), new.act(action)
        assert ours.errors == theirs.errors == []
        assert old.rows == new.rows
        assert old.blocks.rewards.tolist() == new.blocks.rewards.tolist()
        ended = [new.blocks.terminations[0] or new.blocks.truncations[0]]
        assert old.blocks.terminations.tolist() == ended
        assert old.blocks.truncations.tolist() == [False]
        if mode is DISABLED and ended[0]:
            for bench in (old, new):
                assert bench.slots.reset(None, None, None).errors == []


def test_an_episode_that_a_time_limit_has_ended_is_truncated_in_the_old_api_too() -> None:
    env = OldEnv(2, limited=True)
    bench = started(env)
    bench.act(1)
    assert bench.blocks.truncations.tolist() == [False]
    bench.act(1)
    assert bench.blocks.terminations.tolist() == [False]
    assert bench.blocks.truncations.tolist() == [True]


def test_an_env_of_the_old_api_is_wrapped_once_and_so_is_the_one_in_its_place() -> None:
    slots = EnvSlots([OldEnv(9)], NEXT_STEP, [lambda: OldEnv(9)], first_env_id=100)
    bench = Bench(OldEnv(9))
    layout = bench.blocks
    slots.bind(Exchange(CountingEnv.observation_space, CountingEnv.action_space, layout))
    for _ in range(2):
        assert slots.reset(None, None, None).errors == []
        assert slots.step(None, None, [1]).errors == []
        (env,), errors = slots.execute(None, lambda env: [type(env), type(env.env)], (), {})
        assert (env, errors) == ([OldGymEnv, OldEnv], [])
        assert slots.rebuild(None, 1.0) == []


class BareEnv(SpaceEnv):
    """Its `reset` returns an observation without an info."""

    def reset(self, **kwargs: Any) -> Anything:
        return super().reset(**kwargs)[0]


@pytest.mark.parametrize(
    "space",
    [spaces.Tuple([spaces.Discrete(5), spaces.Discrete(5)]), spaces.Text(5)],
    ids=["two parts", "no fixed size"],
)
def test_an_observation_without_an_info_may_be_of_any_space(space: spaces.Space[Any]) -> None:
    bench = Bench(BareEnv(space, spaces.Discrete(2)))
    assert bench.slots.reset(None, None, None).errors == []
    assert bench.act(1).errors == []


def test_an_env_whose_last_observation_is_wrong_is_reset_all_the_same() -> None:
    env = WrongEnv()
    env.wrong = (np.zeros(3), 0.0, True, False, {})
    bench = started(env)
    assert len(bench.act(0).errors) == 1
    assert bench.act(0).errors == []
    assert env.episode == 2


@pytest.mark.parametrize("reward", [np.array([2.5]), np.array([[2.5]]), [2.5], np.float32(2.5)])
def test_a_reward_may_be_an_array_of_one_item(reward: Anything) -> None:
    env = WrongEnv()
    env.wrong = (np.zeros(4), reward, False, False, {})
    bench = started(env)
    assert bench.act(0).errors == []
    assert bench.blocks.rewards.tolist() == [2.5]


@pytest.mark.parametrize("flag", [np.True_, 1, np.array(True), np.array([True])])
def test_flags_of_other_types_end_episodes_too(flag: Anything) -> None:
    env = WrongEnv()
    env.wrong = (np.zeros(4), 1, flag, np.False_, {})
    bench = started(env)
    bench.act(0)
    assert bench.blocks.terminations.tolist() == [True]
    assert bench.blocks.truncations.tolist() == [False]
    bench.act(0)
    assert env.episode == 2


def test_each_env_gets_its_own_options() -> None:
    class Changing(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Anything = None) -> Anything:
            options["path"].append(1)
            options["array"] += 1
            return super().reset(seed=seed, options=options)

    given = {"path": [0], "array": np.zeros(2)}
    given["array"].setflags(write=False)  # type: ignore[attr-defined]
    envs = [Changing(), Changing()]
    bench = Bench(*envs)
    assert bench.slots.reset(None, None, given).errors == []
    for env in envs:
        assert env.options[0]["path"] == [0, 1]
        assert env.options[0]["array"].tolist() == [1.0, 1.0]
    assert given["path"] == [0]


def test_options_that_cannot_be_copied_are_handed_over() -> None:
    lock = threading.Lock()
    env = CountingEnv()
    assert Bench(env).slots.reset(None, None, {"lock": lock}).errors == []
    assert env.options == [{"lock": lock}]


def test_no_options_are_none() -> None:
    env = CountingEnv()
    started(env)
    assert env.options == [None]


def test_actions_of_the_blocks_are_copies() -> None:
    space = spaces.Box(-1.0, 1.0, (2,))
    env = SpaceEnv(spaces.Discrete(2), space)
    bench = started(env)
    assert bench.blocks.actions is not None
    bench.blocks.actions[0][...] = 0.5
    bench.slots.step(None, None, None)
    bench.blocks.actions[0][...] = 1.0
    assert env.actions[0].tolist() == [0.5, 0.5]
    env.actions[0] += 1
    assert bench.blocks.actions[0].tolist() == [[1.0, 1.0]]


def test_leaves_of_a_dtype_of_their_own_reach_the_env_so() -> None:
    env = CountingEnv()
    bench = started(env)
    bench.slots.step(None, [np.array([3], np.int32)], None)
    assert env.actions[0].dtype == np.int32


def test_call_looks_through_wrappers() -> None:
    bench = started(TimeLimit(CountingEnv(), 5))
    assert bench.slots.call(None, "add", [3], {"times": 2}) == ([6], [])
    assert bench.slots.call(None, "length", [], {}) == ([3], [])


def test_call_follows_dotted_names() -> None:
    bench = started(TimeLimit(CountingEnv(), 5))
    assert bench.slots.call(None, "unwrapped.length", [], {}) == ([3], [])
    assert bench.slots.call(None, "actions.count", [0], {}) == ([0], [])
    (error,) = bench.slots.call(None, "actions.nothing", [], {})[1]
    assert (error.type_name, error.phase) == ("AttributeError", "call")


@pytest.mark.parametrize("name", ["reset", "step", "close", "_setattr", "_check_spaces"])
def test_call_refuses_what_has_a_request_of_its_own(name: str) -> None:
    (error,) = started(CountingEnv()).slots.call(None, name, [], {})[1]
    assert error.type_name == "ValueError"
    assert error.message == (
        f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
    )


def test_a_missing_attribute_harms_nobody() -> None:
    bench = started(CountingEnv(), FailingEnv("step", 9))
    values, errors = bench.slots.call(None, "where", [], {})
    assert values == [None, "step"]
    assert [(error.slot, error.type_name) for error in errors] == [(0, "AttributeError")]
    assert bench.act(0, 0).errors == []


def test_the_generator_can_be_read_before_any_reset() -> None:
    env = CountingEnv()
    values, errors = Bench(env).slots.call(None, "np_random_seed", [], {})
    assert errors == []
    assert values == [env.np_random_seed]
    assert env.episode == 0


def test_attributes_are_set_where_they_are() -> None:
    env = CountingEnv()
    wrapper = TimeLimit(env, 5)
    bench = started(wrapper)
    assert bench.slots.set_attr(None, "length", [8]) == ([None], [])
    assert env.length == 8
    assert "length" not in vars(wrapper)
    bench.slots.set_attr(None, "brand_new", [1])
    assert wrapper.brand_new == 1  # type: ignore[attr-defined]


def test_attributes_are_set_by_dotted_names() -> None:
    env = CountingEnv()
    bench = started(TimeLimit(env, 5))
    assert bench.slots.set_attr(None, "unwrapped.length", [9])[1] == []
    assert env.length == 9
    assert bench.slots.set_attr(None, "unwrapped.spec.id", [9])[1][0].type_name == "AttributeError"


def test_attributes_are_set_in_the_addressed_slots_only() -> None:
    envs = [CountingEnv() for _ in range(3)]
    started(*envs).slots.set_attr([2, 0], "length", [5, 6])
    assert [env.length for env in envs] == [6, 3, 5]


def test_a_function_runs_beside_the_env() -> None:
    bench = started(CountingEnv(), CountingEnv())
    number = 5
    values, errors = bench.slots.execute(
        [1], lambda env, a, b: env.add(a) + b + number, [1], {"b": 2}
    )
    assert (values, errors) == ([8], [])


def test_what_is_not_callable_is_returned() -> None:
    assert started(CountingEnv()).slots.execute(None, 3, [], {}) == ([3], [])


def test_an_assertion_in_a_function_is_told() -> None:
    def check(env: CountingEnv) -> None:
        assert env.count == 99, "not yet"

    (error,) = started(CountingEnv()).slots.execute(None, check, [], {})[1]
    assert (error.type_name, error.message[:7]) == ("AssertionError", "not yet")


def test_a_step_that_a_function_replaced_is_used() -> None:
    env = CountingEnv()
    bench = started(env)

    def patch(env: CountingEnv) -> None:
        original = env.step
        env.step = lambda action: original(action + 1)  # type: ignore[method-assign]

    bench.slots.execute(None, patch, [], {})
    bench.act(np.int64(5))
    assert env.actions == [6]


def test_closing_reports_errors_and_closes_all() -> None:
    last = CountingEnv()
    slots = started(FailingEnv("close"), last).slots
    (error,) = slots.close()
    assert (error.slot, error.phase) == (0, "close")
    assert last.closed
    assert slots.close() == []


def test_nothing_works_before_there_is_a_place_to_exchange() -> None:
    slots = EnvSlots([CountingEnv()], NEXT_STEP)
    with pytest.raises(RuntimeError, match="MapBlocks first"):
        slots.step(None, None, [0])
    with pytest.raises(RuntimeError, match="MapBlocks first"):
        slots.reset(None, None, None)


# --- rebuild --------------------------------------------------------------------------------


class Remade:
    """Two slots; `made` holds what was made for slot 1, `queue` what is to be made next."""

    def __init__(self, mode: AutoresetMode, *queue: Any) -> None:
        self.queue = list(queue)
        self.made: list[Any] = []
        self.first = CountingEnv(10)
        self.neighbour = CountingEnv(10)
        self.bench = Bench(self.neighbour, self.first, mode=mode)
        self.bench.slots._makers = [self.fail, self.make]
        assert self.bench.slots.reset(None, [7, 8], None).errors == []

    def fail(self) -> Any:
        raise AssertionError("this env works")

    def make(self) -> Any:
        thing = self.queue.pop(0)
        if isinstance(thing, BaseException):
            raise thing
        self.made.append(thing)
        return thing

    def rebuild(self) -> Anything:
        return self.bench.slots.rebuild([1], 60.0)

    def reset(self, seed: int | None = None) -> Anything:
        return self.bench.slots.reset([1], [seed], None)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_rebuilt_env_refuses_steps_until_it_is_reset_and_its_neighbour_goes_on(
    mode: AutoresetMode,
) -> None:
    remade = Remade(mode, CountingEnv(10))
    remade.bench.act(1, 1)
    assert remade.rebuild() == []
    assert remade.first.closed
    assert not remade.neighbour.closed
    assert remade.bench.rows == [[1, 1, 1, 7], [1, 1, 1, 8]]  # as before
    for step in (2, 3):
        (failed,) = remade.bench.act(2, 2).errors
        assert (failed.slot, failed.phase) == (1, "step")
        assert failed.message == "env 101 was made anew; reset it first"
        assert remade.bench.rows == [[1, step, 2, 7], [1, 1, 1, 8]]
        assert remade.bench.blocks.rewards.tolist() == [10 + step, 0]
    outcome = remade.reset(99)
    assert (outcome.errors, outcome.infos) == ([], [{"episode": 1}])
    assert remade.bench.rows == [[1, 3, 2, 7], [1, 0, 0, 99]]
    assert remade.bench.act(2, 4).errors == []
    assert remade.bench.rows == [[1, 4, 2, 7], [1, 1, 4, 99]]
    assert remade.made[0].actions == [4]


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("error", [RuntimeError("no licence"), SystemExit(2)])
def test_a_constructor_that_fails_is_an_error_until_the_next_rebuild(
    mode: AutoresetMode, error: BaseException
) -> None:
    remade = Remade(mode, error, CountingEnv(10))
    (failed,) = remade.rebuild()
    assert (failed.slot, failed.phase) == (1, "build")
    (failed,) = remade.bench.act(1, 1).errors
    assert "env 101 could not be made again" in failed.message
    (failed,) = remade.reset().errors
    assert "env 101 could not be made again" in failed.message
    assert remade.neighbour.actions == [1]
    assert remade.rebuild() == []
    assert remade.reset(99).errors == []
    assert remade.bench.rows[1] == [1, 0, 0, 99]


def test_a_rebuilt_env_whose_reset_fails_refuses_steps_still() -> None:
    remade = Remade(NEXT_STEP, FailingEnv("reset"))
    assert remade.rebuild() == []
    (failed,) = remade.reset().errors
    assert (failed.slot, failed.phase) == (1, "reset")
    (failed,) = remade.bench.act(1, 1).errors
    assert "was made anew" in failed.message


def test_an_env_made_again_with_another_space_is_closed_and_refused() -> None:
    other = SpaceEnv(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    closed = threading.Event()
    other.close = closed.set  # type: ignore[method-assign]
    remade = Remade(NEXT_STEP, other)
    (failed,) = remade.rebuild()
    assert failed.phase == "build"
    assert "the env was made again with the space" in failed.message
    assert closed.is_set()


def test_what_closing_the_old_env_raises_is_no_error_of_the_new_one() -> None:
    remade = Remade(NEXT_STEP, FailingEnv("close", length=10), CountingEnv(10))
    assert remade.rebuild() == []
    assert remade.rebuild() == []
    assert remade.reset(2).errors == []
    assert remade.bench.rows[1] == [1, 0, 0, 2]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_a_rebuild_clears_what_the_old_env_left(mode: AutoresetMode) -> None:
    remade = Remade(mode, CountingEnv(10), CountingEnv(10))
    remade.bench.slots._envs[1] = stuck = FailingEnv("reset", after=0, length=1)
    remade.bench.slots.set_attr([1], "length", [1])  # looks again what a step calls
    if mode is NEXT_STEP:
        assert remade.bench.act(1, 1).errors == []
    (failed,) = remade.bench.act(1, 1).errors
    assert failed.phase == "autoreset"
    if mode is SAME_STEP:
        (failed,) = remade.bench.act(1, 1).errors
        assert "automatic reset failed" in failed.message
    assert remade.rebuild() == []
    assert stuck.closed
    (failed,) = remade.bench.act(1, 1).errors
    assert (failed.phase, "was made anew" in failed.message) == ("step", True)
    assert remade.reset(3).errors == []
    assert remade.bench.act(1, 1).errors == []
    assert remade.bench.rows[1] == [1, 1, 1, 3]
