"""Steps that go by words in shared memory: the same rows, faults and texts as by messages."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing import TimeoutError as StepTimeoutError
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ClosedError
from envbus.bus.transport.words import WORDS_EXIST
from envbus.runner import ActorPool, BusVectorEnv, Hooks, RecycleAfter, Timeouts
from envbus.runner.testing import assert_same
from tests.envs import FailingEnv
from tests.integration.row_model import LifeEnv
from tests.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not WORDS_EXIST, reason="words are for x86-64 only"),
]

NUM_ENVS = 4
ENV = partial(LifeEnv, 10**6)
#: Actions by which `MoodyEnv` hangs, and dies.
HANG, DIE = 97.0, 98.0


class MoodyEnv(LifeEnv):
    """A `LifeEnv` that hangs or dies when it is told to."""

    def step(self, action: Any) -> Any:
        if action == HANG:
            signal.pause()
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make_one(kind: Callable[..., Any], env: Any = ENV, **arguments: Any) -> Any:
        made.append(kind([env] * NUM_ENVS, **({"num_actors": 2} | arguments)))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def counts(steps: int, action: float = 0.0) -> list[list[float]]:
    return [[1.0, steps, action]] * NUM_ENVS


def nothing() -> None:
    pass


def python_calls(
    call: Callable[[], object], enough: int, before: Callable[[], object] = nothing
) -> int:
    """Return how many Python functions a call calls; the fewest of many times, or less than enough.

    They are more where a process has no core for a while, of a busy machine for many calls.
    """
    found, deadline = [sys.maxsize], time.monotonic() + PATIENCE
    while min(found) >= enough and time.monotonic() < deadline:
        before()
        calls = 0

        def profile(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
        found.append(calls)
    return min(found)


def test_a_step_takes_no_message_and_few_calls(make: Any) -> None:
    envs = make(BusVectorEnv, num_actors=1)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for _ in range(10):
        envs.step(actions)
    assert envs.statistics().steps_by_word >= 8
    assert python_calls(partial(envs.step, actions), 30) < 30


def asked_and_waited_for(envs: BusVectorEnv, actions: Any) -> Any:
    envs.step_async(actions)
    return envs.step_wait()


def test_a_step_that_is_asked_and_waited_for_takes_no_message_and_few_calls(make: Any) -> None:
    envs = make(BusVectorEnv, num_actors=1)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for _ in range(10):
        asked_and_waited_for(envs, actions)
    assert envs.statistics().steps_by_word >= 8
    assert python_calls(partial(asked_and_waited_for, envs, actions), 30) < 30


def test_a_send_and_recv_takes_no_message_and_few_calls(make: Any) -> None:
    pool = make(ActorPool, num_actors=1)
    pool.reset()
    pool.recv(NUM_ENVS)
    actions = np.zeros(NUM_ENVS)

    receive = partial(pool.recv, NUM_ENVS)
    assert python_calls(receive, 40, before=lambda: pool.send(actions)) < 40
    assert pool.statistics().steps_by_word >= 1


def test_rows_with_and_without_infos_are_those_of_sync_vector_env(make: Any) -> None:
    envs = make(BusVectorEnv, partial(CountingEnv, 5))
    model = gymnasium.vector.SyncVectorEnv([partial(CountingEnv, 5)] * NUM_ENVS)
    envs.reset(seed=1), model.reset(seed=1)
    for number in range(100):
        actions = np.full(NUM_ENVS, number)
        found, expected = envs.step(actions), model.step(actions)
        for one, other in zip(found[:-1], expected[:-1], strict=True):
            np.testing.assert_array_equal(one, other)
        assert found[4].keys() == expected[4].keys()
        for key in expected[4]:
            np.testing.assert_array_equal(found[4][key], expected[4][key])
    assert envs.statistics().steps_by_word > 20


class TellingEnv(LifeEnv):
    """A `LifeEnv` that tells things in its infos, and now and then what has no column."""

    def step(self, action: Any) -> Any:
        *stepped, _ = super().step(action)
        info: dict[str, Any] = {"count": self.count, "half": self.count / 2, "rows": {"of": 1.0}}
        if self.count % 7 == 0:
            info["text"] = "seven"
        if self.count % 5 == 0:
            info = {}
        return (*stepped, info)

    def reset(self, **arguments: Any) -> Any:
        first, _ = super().reset(**arguments)
        return first, {"life": self.episode}


def assert_same_infos(found: Any, expected: Any) -> None:
    assert_same(found, expected)
    assert repr(found) == repr(expected)  # in the same order


def lengths() -> list[Any]:
    """Envs whose infos differ from each other in each step."""
    return [partial(TellingEnv, 9 + number) for number in range(NUM_ENVS)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_actors_are_recycled_though_steps_take_no_message(make: Any, mode: str) -> None:
    envs = make(
        BusVectorEnv,
        partial(LifeEnv, 10),
        recycle_after=RecycleAfter(steps=100),
        autoreset_mode=mode,
    )
    envs.reset()
    actions, lives = np.zeros(NUM_ENVS), set()
    for _ in range(2000):
        lives.update(envs.step(actions)[0][:, 0].tolist())
        if len(lives) >= 4 * NUM_ENVS:
            break
    assert len(lives) >= 4 * NUM_ENVS
    assert envs.statistics().recycled >= 4
    assert envs.statistics().steps_by_word > 20


@pytest.mark.slow_but_first
@pytest.mark.parametrize("wait", ["spin", "block"])
@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
def test_rows_are_the_same_however_their_processes_wait(make: Any, kind: Any, wait: str) -> None:
    envs = make(kind, num_actors=4, wait=wait)
    step = envs.step if kind is BusVectorEnv else partial(send_and_receive, envs)
    envs.reset()
    if kind is ActorPool:
        envs.recv(NUM_ENVS)
    for number in range(1, 200):
        found = step(np.full(NUM_ENVS, float(number % 90)))
        observations = found[0] if kind is BusVectorEnv else found.observations
        assert observations[:, 1:].tolist() == counts(number, number % 90)
    assert envs.statistics().steps_by_word > 400


@pytest.mark.slow_but_first
@pytest.mark.parametrize("num_actors", [1, 2])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_are_those_of_sync_vector_env(num_actors: int, mode: str) -> None:
    envs = BusVectorEnv(lengths(), num_actors=num_actors, autoreset_mode=mode)
    model = gymnasium.vector.SyncVectorEnv(lengths(), autoreset_mode=envs.autoreset_mode)
    try:
        envs.reset(), model.reset()
        for number in range(300):
            actions = np.full(NUM_ENVS, float(number % 90))
            step = envs.step if number % 2 else partial(asked_and_waited_for, envs)
            found, expected = step(actions)[4], model.step(actions)[4]
            if "final_info" in expected:  # observations begin with the number of a life
                ends = [
                    [None if one is None else one[1:].tolist() for one in infos.pop("final_obs")]
                    for infos in (found, expected)
                ]
                assert ends[0] == ends[1]
            assert_same_infos(found, expected)
        assert envs.statistics().steps_by_word > 100 * num_actors
    finally:
        envs.close()


class SingleInfosEnv(BusVectorEnv):
    """Does not merge infos, as the adapter for Stable-Baselines3."""

    _merges_infos = False


@pytest.mark.slow_but_first
@pytest.mark.parametrize("local_links", [True, False])
def test_infos_that_are_not_merged_are_those_of_the_envs(local_links: bool) -> None:
    models = [make_env() for make_env in lengths()]
    envs = SingleInfosEnv(
        lengths(), num_actors=2, autoreset_mode="SameStep", local_links=local_links
    )
    try:
        found = envs.reset()[1]  # in the order in which actors have answered
        assert_same_infos(
            dict(sorted(found.items())), {i: model.reset()[1] for i, model in enumerate(models)}
        )
        for number in range(200):
            action = float(number % 90)
            step = envs.step if number % 2 else partial(asked_and_waited_for, envs)
            found, expected = step(np.full(NUM_ENVS, action))[4], {}
            for env_id, model in enumerate(models):
                observation, _, terminated, truncated, info = model.step(action)
                if terminated or truncated:
                    final = {"final_obs": observation, "final_info": info}
                    info = {**final, **model.reset()[1]}
                    ends = [one.pop("final_obs") for one in (found[env_id], info)]
                    assert ends[0][1:].tolist() == ends[1][1:].tolist()
                if info:
                    expected[env_id] = info
            assert_same_infos(dict(sorted(found.items())), expected)
        assert (envs.statistics().steps_by_word > 100) == local_links
    finally:
        envs.close()


def test_infos_of_a_pool_are_those_of_its_envs() -> None:
    model = [make_env() for make_env in lengths()]
    with ActorPool(lengths(), num_actors=2, autoreset_mode="Disabled") as pool:
        pool.reset()
        pool.recv(NUM_ENVS)
        for env in model:
            env.reset()
        merger = gymnasium.vector.VectorEnv[Any, Any, Any]()
        merger.num_envs = NUM_ENVS
        for number in range(8):
            pool.send(np.full(NUM_ENVS, float(number)))
            batch = pool.recv(NUM_ENVS)
            expected: dict[str, Any] = {}
            told = [env.step(float(number))[4] for env in model]
            for row, env_id in enumerate(batch.env_ids):
                expected = merger._add_info(expected, told[env_id], row)
            assert_same_infos(batch.infos, expected)
        assert pool.statistics().steps_by_word > 10


def test_a_hook_that_closes_them_takes_no_step_away() -> None:
    hooks = Hooks(on_fault=lambda _: envs.close())
    env_fns = [partial(TellingEnv, 9), partial(MoodyEnv, 9)]
    with closing(BusVectorEnv(env_fns, num_actors=2, restart=True, hooks=hooks)) as envs:
        envs.reset()
        # Those of env 0 are of a form that actors are told of.
        *_, truncations, infos = envs.step(np.array([0.0, DIE]))
        assert envs.closed
        assert truncations.tolist() == infos["_fault"].tolist() == [False, True]
        assert infos["count"].tolist() == [1, 0]


@pytest.mark.slow
def test_a_new_life_is_told_where_infos_go(make: Any) -> None:
    env = partial(TellingEnv, 10**6)
    envs = make(BusVectorEnv, env, restart=True)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for life in range(3):
        for _ in range(20):
            infos = envs.step(actions)[4]
        os.kill(envs.actor_pids()[life % 2], signal.SIGKILL)
        while not envs.step(actions)[3].any():
            pass
        before = envs.statistics().steps_by_word
        for _ in range(40):
            observations, *_, infos = envs.step(actions)
            told = observations[:, 2] % 5 != 0
            if told.any():
                counts = np.where(told, observations[:, 2], 0)
                reset = observations[:, 2] == 0
                assert infos["count"].tolist() == np.where(reset, 0, counts).tolist()
        assert envs.statistics().steps_by_word > before + 20


class Lives:
    """Makes one env after the other."""

    def __init__(self, *lives: Callable[[], Any]) -> None:
        self._lives = iter(lives)

    def __call__(self) -> Any:
        return next(self._lives)()


def test_words_are_used_again_when_all_work_though_not_all_came_back_at_once() -> None:
    fails, works = partial(FailingEnv, after=3), partial(CountingEnv, 10**6)
    lives = [Lives(fails, partial(FailingEnv, "reset"), works), Lives(fails, works)]
    with BusVectorEnv(lives, num_actors=1, restart=True) as envs:
        envs.reset()
        actions = np.zeros(2, np.int64)
        wait_until(
            lambda: envs.step(actions) and envs.statistics().env_restarts == 3,
            "all of their lives",
        )
        before = envs.statistics().steps_by_word
        wait_until(
            lambda: envs.step(actions) and envs.statistics().steps_by_word > before, "a word"
        )


def test_results_are_the_callers_own(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    rows = [envs.step(np.full(NUM_ENVS, float(number))) for number in range(10)]
    for number, row in enumerate(rows):
        assert row[0][:, 1:].tolist() == counts(number + 1, number)


@pytest.mark.parametrize("kill", [0, 1])
def test_a_kill_costs_the_episodes_of_that_actor_only(make: Any, kill: int) -> None:
    envs = make(BusVectorEnv, restart=True)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for _ in range(10):
        envs.step(actions)
    os.kill(envs.actor_pids()[kill], signal.SIGKILL)
    lost = slice(2 * kill, 2 * kill + 2)
    found = envs.step(actions)
    if not found[3].any():  # it had stepped before it died
        found = envs.step(actions)
    expected = np.zeros(NUM_ENVS, bool)
    expected[lost] = True
    assert found[3].tolist() == expected.tolist()
    assert found[4]["_fault"].tolist() == expected.tolist()
    first = envs.step(actions)
    assert (first[0][lost, 2] == 0).all()
    before = envs.statistics().steps_by_word
    for number in range(1, 10):
        assert (envs.step(actions)[0][lost, 2] == number).all()
    assert envs.statistics().steps_by_word > before


def test_one_that_dies_in_its_step_is_started_again(make: Any) -> None:
    envs = make(BusVectorEnv, partial(MoodyEnv, 10**6), restart=True)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    found = envs.step(np.array([0.0, 0.0, 0.0, DIE]))
    assert found[3].tolist() == [False, False, True, True]
    assert found[0][:2, 2].tolist() == [6, 6]
    assert (envs.step(np.zeros(NUM_ENVS))[0][:, 2] == [7, 7, 0, 0]).all()


def test_one_that_hangs_passes_its_deadline(make: Any) -> None:
    envs = make(
        BusVectorEnv,
        partial(MoodyEnv, 10**6),
        restart=True,
        timeouts=Timeouts(step=1.0),
    )
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    found = envs.step(np.array([HANG, 0.0, 0.0, 0.0]))
    assert found[3].tolist() == [True, True, False, False]
    assert found[4]["fault"]["cause"][0] == "timeout"


def test_without_restart_a_hang_is_a_time_out_and_rows_are_not_shifted(make: Any) -> None:
    envs = make(BusVectorEnv, partial(MoodyEnv, 10**6), timeouts=Timeouts(step=1.5))
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    with pytest.raises(StepTimeoutError, match="actor-0"):
        envs.step(np.array([HANG, 0.0, 0.0, 0.0]))


def test_one_that_is_stopped_for_a_while_is_waited_for(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for _ in range(5):
        envs.step(actions)
    pid = envs.actor_pids()[1]
    os.kill(pid, signal.SIGSTOP)
    envs.step_async(actions)
    with pytest.raises(StepTimeoutError):
        envs.step_wait(timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    steps = []
    for _ in range(20):
        steps.append(envs.step(actions)[0][:, 2].tolist())
    first = steps[0]
    assert steps == [[count + number for count in first] for number in range(20)]
    assert first == [7, 7, 7, 7]


def test_a_step_is_asked_once_and_waited_for_once(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    for number in range(1, 40):
        envs.step_async(np.full(NUM_ENVS, float(number)))
        for call in (partial(envs.step_async, np.zeros(NUM_ENVS)), envs.reset, envs.render):
            with pytest.raises(AlreadyPendingCallError):
                call()
        found = envs.step_wait(timeout=None if number % 5 else 60.0)
        assert found[0][:, 1:].tolist() == counts(number, number)
        with pytest.raises(NoAsyncCallError):
            envs.step_wait()
    assert envs.statistics().steps_by_word > 40


def test_one_that_is_killed_between_asking_and_waiting_is_started_again(make: Any) -> None:
    envs = make(BusVectorEnv, restart=True)
    envs.reset()
    actions = np.zeros(NUM_ENVS)
    for _ in range(10):
        asked_and_waited_for(envs, actions)
    envs.step_async(actions)
    os.kill(envs.actor_pids()[0], signal.SIGKILL)
    found = envs.step_wait()
    if not found[3].any():  # it had stepped before it died
        found = asked_and_waited_for(envs, actions)
    assert found[3].tolist() == [True, True, False, False]
    assert (asked_and_waited_for(envs, actions)[0][:2, 2] == 0).all()
    before = envs.statistics().steps_by_word
    for number in range(1, 10):
        assert (asked_and_waited_for(envs, actions)[0][:2, 2] == number).all()
    assert envs.statistics().steps_by_word > before


def test_one_that_hangs_after_it_was_asked_passes_its_deadline(make: Any) -> None:
    envs = make(BusVectorEnv, partial(MoodyEnv, 10**6), restart=True, timeouts=Timeouts(step=1.0))
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    found = asked_and_waited_for(envs, np.array([HANG, 0.0, 0.0, 0.0]))
    assert found[3].tolist() == [True, True, False, False]
    assert found[4]["fault"]["cause"][0] == "timeout"


def test_a_step_that_nobody_waits_for_is_ended_by_close(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    envs.step_async(np.zeros(NUM_ENVS))
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.step_wait()


def test_an_env_that_raises_is_told_by_its_own_type(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    with pytest.raises(ValueError, match="raised on purpose"):
        envs.step(np.array([0.0, 99.0, 0.0, 0.0]))
    found = envs.step_wait()
    assert found[0][:, 2].tolist() == [6, 5, 6, 6]


def test_a_step_that_was_asked_is_ended_by_close(make: Any) -> None:
    envs = make(BusVectorEnv, partial(MoodyEnv, 10**6))
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.step(np.array([HANG, 0.0, 0.0, 0.0]))
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close(timeout=0.5)
    timer.join()
    assert envs.closed


def test_a_pool_that_drops_what_was_asked_gets_the_rows_of_the_reset(make: Any) -> None:
    pool = make(ActorPool)
    for _ in range(30):
        pool.reset()
        assert sorted(pool.recv(NUM_ENVS).env_ids.tolist()) == [0, 1, 2, 3]
        pool.send(np.zeros(NUM_ENVS))
        assert (pool.recv(NUM_ENVS).observations[:, 2] == 1).all()
        pool.send(np.zeros(NUM_ENVS))
        pool.reset()
        assert (pool.recv(NUM_ENVS).observations[:, 2] == 0).all()


def test_calls_of_a_pool_wait_for_the_step_that_is_under_way(make: Any) -> None:
    pool = make(ActorPool)
    pool.reset()
    pool.recv(NUM_ENVS)
    env = pool.get_sub_environments()[3]
    for number in range(1, 30):
        pool.send(np.zeros(NUM_ENVS))
        assert env.get_attr("count") == number
        assert (pool.recv(NUM_ENVS).observations[:, 2] == number).all()


@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
def test_a_forked_copy_asks_nobody(make: Any, kind: Any) -> None:
    envs = make(kind)
    actions = np.zeros(NUM_ENVS)
    step = envs.step if kind is BusVectorEnv else partial(send_and_receive, envs)
    envs.reset()
    if kind is ActorPool:
        envs.recv(NUM_ENVS)
    for _ in range(5):
        step(actions)
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            step(actions)
        except BaseException as exc:
            os._exit(0 if "clos" in str(exc) or "stopped" in str(exc) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = step(actions)
    observations = found[0] if kind is BusVectorEnv else found.observations
    assert (observations[:, 2] == 6).all()


def test_a_forked_copy_waits_for_no_step_of_its_owner(make: Any) -> None:
    envs = make(BusVectorEnv)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(NUM_ENVS))
    envs.step_async(np.zeros(NUM_ENVS))
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            envs.step_wait()
        except BaseException as exc:
            os._exit(0 if "clos" in str(exc) or "stopped" in str(exc) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (envs.step_wait()[0][:, 2] == 6).all()


def test_a_forked_copy_gets_no_rows_of_a_step_under_way(make: Any) -> None:
    pool = make(ActorPool)
    pool.reset()
    pool.recv(NUM_ENVS)
    for _ in range(3):
        send_and_receive(pool, np.zeros(NUM_ENVS))
    pool.send(np.zeros(NUM_ENVS))
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            pool.recv(NUM_ENVS)
        except ClosedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (pool.recv(NUM_ENVS).observations[:, 2] == 4).all()


def send_and_receive(pool: ActorPool, actions: Any) -> Any:
    pool.send(actions)
    return pool.recv(NUM_ENVS)


def test_a_descriptor_tells_of_steps(make: Any) -> None:
    pool = make(ActorPool)
    pool.reset()
    pool.recv(NUM_ENVS)
    pool.send(np.zeros(NUM_ENVS))
    received = 0
    while received < NUM_ENVS:
        assert select.select([pool.fileno()], [], [], 10.0)[0]
        received += len(pool.recv(timeout=0.0).env_ids)
