"""What `BusVectorEnv` does beyond the contract of `envbus.runner.testing`."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import random
import re
import select
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from envbus.actors.env.old_gym import OldGymEnv
from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.bus.errors import ConfigError
from envbus.runner import BusVectorEnv, env_errors
from envbus.runner.engine.env_results import ObservationStore
from envbus.runner.testing import assert_same, assert_same_trajectory
from envbus.runner.workers.config import Timeouts
from tests.envs import FailingEnv, OldEnv, SpaceEnv
from tests.integration.group_children import wait_until
from tests.runner.pool_envs import PATIENCE, GatedEnv, noted, still_alive
from tests.waiting import pass_time

Make = Callable[..., BusVectorEnv]

both_ways = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[BusVectorEnv] = []

    def _make(env_fns: Any, *args: Any, **kwargs: Any) -> BusVectorEnv:
        made.append(BusVectorEnv(env_fns, *args, **kwargs))
        return made[-1]

    yield _make
    for envs in made:
        envs.close(terminate=True)


# --- construction -----------------------------------------------------------------------------


def test_its_parameters_are_those_of_gymnasiums_async_vector_env() -> None:
    ours = list(inspect.signature(BusVectorEnv.__init__).parameters.values())
    theirs = list(inspect.signature(AsyncVectorEnv.__init__).parameters.values())
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]
    assert [p.default for p in ours][: len(theirs)] == [p.default for p in theirs]
    further = {p.name: p.kind for p in ours[len(theirs) :]}
    further.pop("max_concurrency", None)  # Gymnasium has it since 1.4
    assert set(further.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_envs_may_be_ids_import_paths_and_callables(make: Make) -> None:
    path = "gymnasium.envs.classic_control:CartPoleEnv"
    envs = make(["CartPole-v1", lambda: gymnasium.make("CartPole-v1"), path])
    observations, _ = envs.reset(seed=[1, 1, 1])
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=1)
    np.testing.assert_array_equal(observations, [expected] * 3)
    # Only an id and who makes by it have a spec; a class that is called by its path has none.
    assert [spec is None for spec in envs.get_attr("spec")] == [False, False, True]


def test_one_function_makes_each_env_by_its_index(make: Make) -> None:
    more = 3  # of a closure
    envs = make(lambda index: CountingEnv(index + more), num_envs=4, num_actors=2)
    assert envs.get_attr("length") == (3, 4, 5, 6)


@both_ways
def test_envs_of_the_old_gym_api_are_stepped_as_others_are(make: Make, shared_memory: bool) -> None:
    envs = make([OldEnv, partial(OldEnv, limited=True)], shared_memory, num_actors=1)
    assert envs.reset(seed=5)[0][:, 3].tolist() == [5, 6]
    for step in (1, 2, 3):
        observations, rewards, terminations, truncations, _ = envs.step([7, 8])
        assert observations[:, :3].tolist() == [[1, step, 7], [1, step, 8]]
        assert rewards.tolist() == [10 + step] * 2
    assert (terminations.tolist(), truncations.tolist()) == ([True, False], [False, True])
    assert envs.env_is_wrapped(OldGymEnv) == [True, True]


def test_no_env_is_built_in_this_process(make: Make) -> None:
    envs = make([partial(_BornEnv, os.getpid())] * 3, num_actors=2)
    assert os.getpid() not in envs.get_attr("pid")
    assert len(set(envs.get_attr("pid"))) == 2


class _BornEnv(CountingEnv):
    def __init__(self, not_in: int) -> None:
        super().__init__()
        self.pid = os.getpid()
        assert self.pid != not_in


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"num_actors": -1}, ConfigError, "num_actors must be .auto. or a positive integer.* -1"),
        ({"num_actors": 3}, ConfigError, r"num_actors=3 is more than the 2 env\(s\)"),
        ({"num_actors": "many"}, ConfigError, "'many'"),
        ({"context": "teleport"}, ValueError, "cannot find context for 'teleport'"),
        ({"worker": print}, ValueError, "`worker`"),
        ({"autoreset_mode": "Sometimes"}, ValueError, "Sometimes"),
        ({"max_concurrency": 0}, ValueError, "`max_concurrency` must be a positive"),
        ({"max_concurrency": 1.5}, ValueError, "`max_concurrency` must be an integer"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_anything_starts(
    settings: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    """Numbers that disagree stand in the message, both."""
    with pytest.raises(error, match=text):
        BusVectorEnv([noted(tmp_path)] * 2, **settings)
    assert list(tmp_path.iterdir()) == []


def test_no_envs_are_no_vector_env() -> None:
    with pytest.raises(ValueError, match="`env_fns` is empty"):
        BusVectorEnv([])


@pytest.mark.parametrize(
    ("failing", "error", "text"),
    [
        (partial(FailingEnv, "init"), RuntimeError, "failing on purpose"),
        (partial(gymnasium.make, "FrozenLake-v1"), RuntimeError, "space"),
        ("NoSuchEnv-v0", gymnasium.error.NameNotFound, "NoSuchEnv"),
    ],
    ids=["constructor", "spaces", "id"],
)
def test_a_failed_construction_gives_its_reason_and_leaves_no_process(
    failing: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        BusVectorEnv([noted(tmp_path), failing], num_actors=2)
    assert still_alive(tmp_path) == []


def test_make_vec_of_gymnasium_takes_the_class_in_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", BusVectorEnv)
    for num_envs in (1, 3, 10):
        envs = gymnasium.make_vec(
            "CartPole-v1",
            num_envs=num_envs,
            vectorization_mode="async",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        )
        assert type(envs) is BusVectorEnv
        assert (envs.num_envs, envs.autoreset_mode) == (num_envs, AutoresetMode.SAME_STEP)
        assert envs.spec is not None
        assert repr(envs) == f"BusVectorEnv(CartPole-v1, num_envs={num_envs})"
        envs.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("limit", "num_envs"), [(1, 4), (2, 4), (5, 2)])
def test_a_limit_of_concurrency_holds_for_step_and_reset_and_hinders_no_call(
    make: Make, limit: int, num_envs: int
) -> None:
    together = min(limit, num_envs)
    with multiprocessing.Manager() as manager:
        count = _Count(manager.Lock(), manager.list([0, 0]), manager.Event(), together)
        envs = make(
            [partial(_CountedEnv, count)] * num_envs, max_concurrency=limit, num_actors=num_envs
        )
        envs.reset()
        envs.step([0] * num_envs)
        assert count.values[1] == together
        assert len(set(envs.get_attr("pid"))) == together
        envs.close()


class _Count:
    """How many envs are at work now, and at most at one time."""

    def __init__(self, lock: Any, values: Any, reached: Any, together: int) -> None:
        self.lock, self.values = lock, values
        #: Set as soon as `together` envs were at work at one time.
        self.reached, self.together = reached, together

    def enter(self) -> None:
        with self.lock:
            self.values[0] += 1
            self.values[1] = max(self.values)
            if self.values[1] >= self.together:
                self.reached.set()
        assert self.reached.wait(PATIENCE), "fewer envs work at one time than may"

    def leave(self) -> None:
        with self.lock:
            self.values[0] -= 1


class _CountedEnv(CountingEnv):
    def __init__(self, count: _Count) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.counted = count

    def reset(self, **kwargs: Any) -> Any:
        return self._count(partial(super().reset, **kwargs))

    def step(self, action: Any) -> Any:
        return self._count(partial(super().step, action))

    def _count(self, work: Callable[[], Any]) -> Any:
        self.counted.enter()
        try:
            return work()
        finally:
            self.counted.leave()


def test_the_envs_metadata_is_copied_deeply_enough_to_be_changed(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.metadata["render_modes"].append("ascii")
    assert CountingEnv.metadata["render_modes"] == ["rgb_array"]
    assert envs.get_attr("metadata") == ({"render_modes": ["rgb_array"], "render_fps": 30},) * 2


# --- vector envs as envs ----------------------------------------------------------------------


@pytest.mark.slow_but_first
@both_ways
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_factory_may_return_a_vector_env_which_fills_several_places(
    make: Make, mode: str, shared_memory: bool
) -> None:
    lengths = (1, 2, 3, 4, 5)
    factories = [partial(InfoEnv, length) for length in lengths]
    halves = [partial(_sync, lengths[:2], mode), partial(_sync, lengths[2:], mode)]
    sync = SyncVectorEnv(factories, autoreset_mode=AutoresetMode(mode))
    envs = make(halves, num_actors=2, shared_memory=shared_memory, autoreset_mode=mode)
    assert envs.num_envs == 5
    assert assert_same_trajectory(envs, sync, steps=12) > 10
    assert envs.get_attr("length") == lengths
    sync.close()


def _sync(lengths: tuple[int, ...], mode: str) -> SyncVectorEnv:
    return SyncVectorEnv(
        [partial(InfoEnv, length) for length in lengths], autoreset_mode=AutoresetMode(mode)
    )


# --- seeds ------------------------------------------------------------------------------------


def test_global_generators_differ_from_env_to_env(make: Make) -> None:
    """Also among forked actors."""
    envs = make([CountingEnv] * 3, num_actors=3)
    numbers = envs.exec_func(lambda env: (random.random(), np.random.random()))
    assert len({number for pair in numbers for number in pair}) == 6


def test_the_factories_own_seeding_is_kept(make: Make) -> None:
    envs = make([partial(_seeded, seed) for seed in (5, 9)])
    assert envs.np_random_seed == (5, 9)
    assert envs.np_random_seed == (5, 9)
    expected = tuple(np.random.default_rng(seed).random() for seed in (5, 9))
    assert tuple(generator.random() for generator in envs.np_random) == expected


def _seeded(seed: int) -> CountingEnv:
    env = CountingEnv()
    env.reset(seed=seed)
    return env


def test_seeds_of_any_size_are_passed_on(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.reset(seed=2**66)
    assert envs.np_random_seed == (2**66, 2**66 + 1)


# --- order of calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["reset", "step", "call", "exec_func"])
def test_openrls_names_do_the_same_and_stand_in_the_errors(make: Make, verb: str) -> None:
    envs = make([partial(CountingEnv, 100)] * 2)
    text = f"Calling `{verb}_fetch` without any prior call to `{verb}_send`."
    with pytest.raises(NoAsyncCallError, match=re.escape(text)):
        getattr(envs, f"{verb}_fetch")()
    envs.reset(seed=0)
    arguments: dict[str, tuple[Any, ...]] = {
        "reset": (8,),
        "step": ([3, 4],),
        "call": ("add", 5),
        "exec_func": (lambda env, x: env.count + x, [1], 7),
    }
    getattr(envs, f"{verb}_send")(*arguments[verb])
    with pytest.raises(
        AlreadyPendingCallError, match=r"Calling `step_send` while waiting .*`\w+_wait` takes it up"
    ):
        envs.step_send([0, 0])
    with pytest.raises(AlreadyPendingCallError, match="Calling `exec_func_send` while waiting"):
        envs.exec_func_send(print)
    result = getattr(envs, f"{verb}_fetch")(timeout=PATIENCE)
    expected = {"reset": [8, 9], "step": [3, 4], "call": (5, 5), "exec_func": [None, 7]}
    if verb == "reset":
        result = result[0][:, 3].tolist()
    elif verb == "step":
        result = result[0][:, 2].tolist()
    assert result == expected[verb]


def test_refused_input_leaves_nothing_pending(make: Make) -> None:
    envs = make([CountingEnv] * 2)
    envs.reset(seed=0)
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, partial(envs.step, [1])),
        (TypeError, partial(envs.step, 1)),
        (ValueError, partial(envs.reset, seed=[1])),
        (TypeError, partial(envs.reset, seed="1")),
        (ValueError, partial(envs.reset, options={"reset_mask": np.array([True])})),
        (ValueError, partial(envs.set_attr, "x", [1])),
        (IndexError, partial(envs.get_attr, "length", 2)),
        (IndexError, partial(envs.exec_func, print, [0, -3])),
    ]
    for error, use in wrong:
        with pytest.raises(error):
            use()
    assert envs.statistics().in_flight == 0
    assert envs.step([1, 2])[0][:, 1:3].tolist() == [[1, 1], [1, 2]]


# --- time-outs --------------------------------------------------------------------------------


def test_a_time_out_names_the_envs_that_had_not_answered(make: Make, tmp_path: Path) -> None:
    open_gate, shut_gate = tmp_path / "open", tmp_path / "shut"
    open_gate.touch()
    gates = [open_gate, shut_gate, open_gate]
    envs = make([partial(GatedEnv, gate) for gate in gates], num_actors=3)
    envs.reset()

    def late() -> str:
        envs.step_async([0, 0, 0])
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.2)
        assert "env 1)" in str(caught.value)
        return str(caught.value)

    wait_until(lambda: "env 0" not in (text := late()) and "env 2" not in text, "the others")


@both_ways
def test_actions_of_a_step_that_timed_out_stay_its_own(
    make: Make, tmp_path: Path, shared_memory: bool
) -> None:
    """What is sent next must not reach the env in the place of what it still works on."""
    factories = [partial(GatedEnv, tmp_path / "gate")] * 2
    envs = make(factories, num_actors=1, shared_memory=shared_memory)
    envs.reset()
    for actions in ([1, 2], [3, 4]):
        envs.step_async(actions)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.02)
    (tmp_path / "gate").touch()
    observations, *_ = envs.step([5, 6])
    assert observations[:, 1:3].tolist() == [[3, 5], [3, 6]]
    assert [[int(a) for a in actions] for actions in envs.get_attr("actions")] == [
        [1, 3, 5],
        [2, 4, 6],
    ]


def test_default_deadlines_hold_where_no_time_out_is_given(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    envs = make([partial(GatedEnv, gate)], timeouts=Timeouts(step=0.05))
    envs.reset()
    with pytest.raises(multiprocessing.TimeoutError, match=r"`step_wait`.* 0\.05 second.*env 0"):
        envs.step([0])
    gate.touch()
    assert envs.get_attr("count") == (1,)  # it has caught up


def test_a_driver_that_was_away_finds_the_answer_and_no_time_out(
    make: Make, tmp_path: Path
) -> None:
    envs = make([partial(_TouchingEnv, tmp_path / "stepped")], timeouts=Timeouts(step=0.05))
    envs.reset()
    envs.step_async([4])
    wait_until((tmp_path / "stepped").exists, "the step")
    assert select.select([envs._fleet.fileno()], [], [], PATIENCE)[0]  # its answer
    pass_time(0.5)  # past the deadline
    assert envs.step_wait()[0][0, 2] == 4


class _TouchingEnv(CountingEnv):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def step(self, action: Any) -> Any:
        self.file.touch()
        return super().step(action)


# --- observations -----------------------------------------------------------------------------


@pytest.mark.slow_but_first
@both_ways
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.zeros(3), r"env 1: observation is .*shape \(3,\).*needs shape \(4,\)"),
        (np.zeros(4, np.complex128), "env 1: observation is .*complex128.*dtype float64"),
        ("words", "env 1: observation is .*str.*needs"),
        (None, "env 1: observation is a NoneType"),
    ],
    ids=["shape", "dtype", "text", "none"],
)
def test_an_observation_outside_its_space_is_named(
    make: Make, wrong: Any, text: str, shared_memory: bool
) -> None:
    envs = make([CountingEnv, partial(_WrongEnv, wrong)], shared_memory=shared_memory)
    envs.reset()
    with pytest.raises(ValueError, match=text):
        envs.step([0, 0])
    assert envs.reset(seed=1)[0][:, 3].tolist() == [1, 2]


class _WrongEnv(CountingEnv):
    def __init__(self, wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def step(self, action: Any) -> Any:
        return self.wrong, *super().step(action)[1:]


@both_ways
def test_a_copy_of_nested_observations_is_the_callers_own(make: Make, shared_memory: bool) -> None:
    """For all kinds of observations."""
    box = spaces.Box(-1.0, 1.0, (2,))
    for space in (
        spaces.Dict(a=box, b=spaces.Tuple((box, spaces.Discrete(3)))),
        spaces.Dict(a=box, words=spaces.Text(4)),
        spaces.Sequence(box, stack=True),
        spaces.Graph(box, box),
    ):
        factory = partial(SpaceEnv, space, spaces.Discrete(2))
        envs = make([factory] * 2, shared_memory=shared_memory)
        first, _ = envs.reset(seed=1)
        kept = _frozen(first)
        arrays = list(_arrays(first))
        assert arrays
        assert all(array.flags.writeable for array in arrays)
        envs.step([0, 0])
        assert _frozen(first) == kept
        for array in arrays:
            array[...] = 0
        envs.close()


def _arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _arrays(item)


def _frozen(value: Any) -> list[bytes]:
    return [array.tobytes() for array in _arrays(value)]


# --- infos ------------------------------------------------------------------------------------


class _ItemsEnv(CountingEnv):
    """Its info holds one item, which it makes anew in each step."""

    def __init__(self, make_item: Callable[[], Any]) -> None:
        super().__init__(100)
        self.make_item = make_item

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"item": self.make_item()}


@pytest.mark.slow_but_first
@both_ways
def test_infos_carry_any_object(make: Make, shared_memory: bool) -> None:
    """Also the env itself, a function, a class."""
    envs = make(
        [
            partial(_ItemsEnv, lambda: CountingEnv(7)),
            partial(_ItemsEnv, lambda: lambda x: x + 1),
            partial(_ItemsEnv, lambda: {1, 2}),
        ],
        shared_memory=shared_memory,
    )
    envs.reset()
    infos = envs.step([0, 0, 0])[4]
    env, function, numbers = infos["item"]
    assert type(env) is CountingEnv
    assert env.length == 7
    assert function(1) == 2
    assert numbers == {1, 2}
    assert infos["_item"].tolist() == [True] * 3


def test_an_info_that_cannot_be_sent_is_replaced_by_its_name(make: Make) -> None:
    envs = make([CountingEnv, partial(_ItemsEnv, threading.Lock)])
    envs.reset()
    infos = envs.step([0, 0])[4]
    assert "lock" in repr(infos["item"][1])
    assert envs.reset(seed=1)[0][:, 3].tolist() == [1, 2]


class _TwoArgumentsError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_an_info_that_cannot_be_rebuilt_here_is_replaced_by_the_reason(make: Make) -> None:
    """No row is lost with it."""
    envs = make([CountingEnv, partial(_ItemsEnv, lambda: _TwoArgumentsError(1, 2))], num_actors=1)
    envs.reset(seed=0)
    observations, _, _, _, infos = envs.step([3, 4])
    assert observations[:, 2].tolist() == [3, 4]
    assert "missing 1 required positional argument" in repr(infos["item"][1])


def _endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["me"] = found
    return found


@pytest.mark.parametrize("num_actors", [0, 1, 2])
def test_an_info_that_contains_itself_is_told_and_costs_no_row(make: Make, num_actors: int) -> None:
    envs = make([CountingEnv, partial(_ItemsEnv, _endless)], num_actors=num_actors)
    envs.reset(seed=0)
    gc.disable()  # at that depth nobody could say what is raised while it frees others' objects
    try:
        with pytest.raises(ValueError, match="the info of env 1 cannot be merged"):
            envs.step([3, 4])
    finally:
        gc.enable()
    assert envs.step_wait()[0][:, 2].tolist() == [3, 4]


def test_rows_for_which_there_was_no_memory_come_with_the_next_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(store: ObservationStore, *, copy: bool) -> Any:
        raise MemoryError

    envs = make([CountingEnv] * 2, num_actors=1)
    envs.reset(seed=0)
    envs.step_async([3, 4])
    for _ in range(2):
        monkeypatch.setattr(ObservationStore, "batch", batch)
        with pytest.raises(MemoryError):
            envs.step_wait()
        monkeypatch.undo()
    assert envs.step_wait()[0][:, 2].tolist() == [3, 4]


def test_numbers_of_different_types_are_merged_as_gymnasium_merges_them(make: Make) -> None:
    """The first env's type is that of the array; documented, not mended."""
    factories = [partial(_ItemsEnv, lambda: 1), partial(_ItemsEnv, lambda: 2.5)]
    sync, envs = SyncVectorEnv(factories), make(factories)
    envs.reset()
    sync.reset()
    infos = envs.step([0, 0])[4]
    assert infos["item"].tolist() == [1, 2]
    assert_same(infos, sync.step([0, 0])[4])
    sync.close()


def test_infos_have_no_key_of_ours(make: Make) -> None:
    envs = make([partial(gymnasium.make, "CartPole-v1")] * 2)
    assert envs.reset()[1] == {}
    assert envs.step([0, 1])[4] == {}


# --- errors -----------------------------------------------------------------------------------


def test_an_error_in_an_automatic_reset_is_told_as_one(make: Make) -> None:
    for mode in ("NextStep", "SameStep"):
        factory = partial(FailingEnv, "reset", after=1, length=1)
        envs = make([factory], autoreset_mode=mode)
        envs.reset()
        if mode == "NextStep":
            envs.step([0])
        with pytest.raises(RuntimeError, match="failing on purpose") as caught:
            envs.step([0])
        assert caught.value.__cause__ is not None
        assert "env 0 (actor-0, incarnation 0) failed in autoreset" in str(caught.value.__cause__)


@pytest.mark.parametrize("num_actors", [0, 2])
def test_what_an_env_raised_is_printed_once_with_frames_of_the_users_and_what_to_do(
    make: Make, num_actors: int
) -> None:
    envs = make(
        [partial(FailingEnv, "step", after=1 if i == 3 else 99) for i in range(8)],
        num_actors=num_actors,
    )
    envs.reset()
    envs.step([0] * 8)
    with pytest.raises(RuntimeError, match="failing on purpose") as caught:
        envs.step([0] * 8)
    text = "".join(traceback.format_exception(caught.value))
    (error,) = env_errors(caught.value)
    frames = error.remote_traceback.count("tests/envs.py")
    assert text.count("tests/envs.py") == frames > 0
    assert text.count("envs.step([0] * 8)") == 1
    assert text.count("restart=True") == 1
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4  # this one, and the way in


def test_after_an_error_the_other_envs_have_gone_on_and_all_can_be_used(make: Make) -> None:
    envs = make([CountingEnv, partial(FailingEnv, "step", after=1), CountingEnv], num_actors=2)
    envs.reset()
    envs.step([0, 0, 0])
    with pytest.raises(RuntimeError, match="failing on purpose"):
        envs.step([1, 1, 1])
    assert envs.get_attr("count") == (2, 1, 2)
    envs.reset(seed=4)
    assert envs.np_random_seed == (4, 5, 6)


def test_a_second_thread_that_steps_is_told_so_and_the_first_goes_on(
    make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    envs = make([partial(GatedEnv, gate)] * 2)
    envs.reset()
    rewards: list[Any] = []
    first = threading.Thread(target=lambda: rewards.append(envs.step([0, 0])[1].tolist()))
    first.start()
    wait_until(lambda: envs._stepped_by is not None, "its step")
    try:
        with pytest.raises(AlreadyPendingCallError, match="while another thread does"):
            envs.step([0, 0])
    finally:
        gate.touch()
        first.join(PATIENCE)
    assert rewards == [[11.0, 11.0]]
    assert envs.step([0, 0])[1].tolist() == [12.0, 12.0]
