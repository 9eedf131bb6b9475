"""Ctrl-C at every line of envbus that a call runs takes no result away and leaves nothing hanging.

The signal is raised by a trace function, so that what handles signals decides what becomes of it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces import Box
from psutil import Process

from envbus.actors import ExternalEnv, ExternalEnvClient
from envbus.actors.external.errors import SimulatorError
from envbus.actors.testing import CountingEnv
from envbus.bus import interrupts
from envbus.bus.errors import PeerLostError, RemoteError
from envbus.bus.gateway import GatewayConfig
from envbus.bus.peer.client import Client
from envbus.bus.process.pipe import Pipe
from envbus.bus.process.process_group import ProcessGroup
from envbus.bus.supervision.restart import RestartPolicy
from envbus.bus.transport import words
from envbus.bus.transport.local_link import LOCAL_LINKS_EXIST
from envbus.runner import (
    ActorPool,
    BusVectorEnv,
    EnvRunner,
    EnvRunnerGroup,
    ExternalEnvBridge,
    RunnerConfig,
    Timeouts,
)
from envbus.runner.batches.metrics import PerfTimers
from envbus.runner.bridge.hosting import HostedThread
from envbus.runner.engine import engine
from envbus.runner.errors import EnvError
from envbus.runner.inference.policy_connections import PolicyConnections
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.policies import MlpPolicy, policy_from_weights
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.testing import assert_same
from envbus.runner.vector import quick_steps
from envbus.runner.workers import step_words
from tests.descriptors import open_descriptors
from tests.integration.group_children import is_alive, wait_until
from tests.integration.policies_under_test import hold, make_probe, rows
from tests.integration.row_model import RAISE, LifeEnv
from tests.runner.group.test_env_runner_group import Steps
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(240)
local_links = pytest.mark.skipif(not LOCAL_LINKS_EXIST, reason="no SOCK_SEQPACKET or epoll here")

FOLDERS = tuple(
    str(Path(interrupts.__file__).parents[1] / name) for name in ("bus", "actors", "runner")
)
NUM_ENVS = 4
LENGTH = 3
ENV = partial(CountingEnv, LENGTH)
#: A call that hangs ends with this, and fails its test.
PATIENCE = Timeouts(step=20, reset=20, call=20)
Row = tuple[Any, ...]


class CtrlC:
    """Ctrl-C, or another signal, at the n-th line of envbus that is run in the context.

    A line counts when it is run for the first time, and for the second: loops need no more.
    `within`: whose lines, by how their paths begin.
    """

    def __init__(
        self, line: int, number: int = signal.SIGINT, within: tuple[str, ...] = FOLDERS
    ) -> None:
        #: The file and the line before which it came.
        self.place: tuple[str, int] | None = None
        self._left = line
        self._number = number
        self._within = within
        self._before: Any = None
        self._seen: Counter[tuple[object, int]] = Counter()

    @property
    def came(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> CtrlC:
        gc.disable()  # what `__del__` of an earlier test's object raises, Python can only print
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(self._within) else None

    def _on_line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line" and not self.came:
            self._seen[frame.f_code, frame.f_lineno] += 1
            if self._seen[frame.f_code, frame.f_lineno] > 2:
                return self._on_line
            self._left -= 1
            if self.came:
                self.place = frame.f_code.co_filename, frame.f_lineno
                signal.raise_signal(self._number)
        return self._on_line


class TimeIsUp(Exception):
    """What the handler of a time limit raises."""


@pytest.fixture
def limit() -> Iterator[int]:
    """The signal of a time limit, as of `signal.setitimer`; SIGALRM is pytest-timeout's own."""
    yield from raises(signal.SIGVTALRM)


@pytest.fixture
def profiler() -> Iterator[int]:
    """A signal that is not kept."""
    yield from raises(signal.SIGPROF)


def raises(number: signal.Signals) -> Iterator[int]:
    def raise_it(_number: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(number, raise_it)
    yield number
    assert signal.getsignal(number) is raise_it
    signal.signal(number, before)


def at_every_line(
    call: Callable[[], Any],
    after: Callable[[Any], object],
    every: int = 1,
    number: int = signal.SIGINT,
    places: list[Any] | None = None,
) -> int:
    """Break a call off at each of its lines, one after the other.

    Args:
        call: What is broken off.
        after: Called each time, with what it returned, or None if it was broken off.
        every: 1: at all of them, which takes minutes for some calls; 2: at every second one.
        number: The signal that breaks it off.
        places: Gets each time where it came, before `after` is called.

    Returns:
        How many lines there are, at least.
    """
    line = 1 - every
    while True:
        line += every
        result = None
        try:
            with CtrlC(line, number) as ctrl_c:
                result = call()
        except (KeyboardInterrupt, TimeIsUp):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if places is not None:
            places.append(ctrl_c.place)
        after(result)
        if not ctrl_c.came:
            return line


def actions(number: int) -> np.ndarray[Any, Any]:
    return (np.arange(NUM_ENVS) + number) % 100


@pytest.fixture(params=[True, False], ids=["local_links", "sockets"])
def vector(request: pytest.FixtureRequest) -> Iterator[BusVectorEnv]:
    envs = BusVectorEnv(
        [ENV] * NUM_ENVS, num_actors=2, local_links=request.param, timeouts=PATIENCE
    )
    yield envs
    envs.close()


def assert_same_row(found: Row, expected: Row) -> None:
    assert_same(tuple(found[:-1]), tuple(expected[:-1]))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", ["step_wait", "step"])
def test_a_step_goes_on_where_ctrl_c_broke_it_off(vector: BusVectorEnv, first: str) -> None:
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    vector.reset(seed=1), model.reset(seed=1)
    number = 0

    def after(result: Any) -> None:
        nonlocal number
        if result is None and first == "step":
            try:
                result = vector.step(actions(number))
            except AlreadyPendingCallError:
                for begin in (vector.reset, partial(vector.call, "get_wrapper_attr", "length")):
                    with pytest.raises(AlreadyPendingCallError, match="`step_wait` takes it up"):
                        begin()
                result = vector.step_wait()
        elif result is None:
            try:
                result = vector.step_wait()
            except NoAsyncCallError:
                result = vector.step(actions(number))
        assert_same_row(result, model.step(actions(number)))
        number += 1

    assert at_every_line(lambda: vector.step(actions(number)), after) > 30


@pytest.mark.slow_but_first
@pytest.mark.parametrize("asked", ["at once", "apart"])
@pytest.mark.parametrize("first", ["step_wait", "step"])
def test_a_step_without_messages_goes_on_where_ctrl_c_broke_it_off(first: str, asked: str) -> None:
    envs = BusVectorEnv([partial(LifeEnv, 10**6)] * 2, num_actors=2, timeouts=PATIENCE)
    envs.reset(seed=1)
    number = by_word = 0

    def step() -> Any:
        actions = np.full(2, number % 90, np.float64)
        if asked == "at once":
            return envs.step(actions)
        envs.step_async(actions)
        return envs.step_wait()

    def after(result: Any) -> None:
        nonlocal number, by_word
        action = number % 90
        if result is None and first == "step":
            try:
                result, action = envs.step(np.full(2, 95.0)), 95
            except AlreadyPendingCallError:
                result = envs.step_wait()
        elif result is None:
            try:
                result = envs.step_wait()
            except NoAsyncCallError:  # it was not asked yet
                result = step()
        number += 1
        assert result[0][:, 2:].tolist() == [[number, action]] * 2
        assert not result[3].any()
        assert result[4] == {}
        by_word += envs.statistics().steps_by_word > by_word

    after(step())
    lines = at_every_line(step, after)
    assert lines > 30
    assert by_word > lines / 2
    envs.close()


@pytest.mark.parametrize("line", [8, 30])
def test_ctrl_c_while_a_descriptor_is_asked_for_loses_no_step_that_words_asked(line: int) -> None:
    with ActorPool([partial(LifeEnv, 10**6)] * 2, num_actors=2, timeouts=PATIENCE) as pool:
        pool.reset()
        pool.recv(2)
        pool.send(np.zeros(2))
        pool.recv(2)
        pool.send(np.zeros(2))
        with pytest.raises(KeyboardInterrupt), CtrlC(line):
            pool.fileno()
        assert pool.recv(2, timeout=20.0).observations[:, 2].tolist() == [2, 2]


def test_a_step_that_was_broken_off_while_a_word_asked_for_it_is_waited_for_no_longer_than_others(
    profiler: int,
) -> None:
    within = (step_words.__file__, words.__file__)
    with ActorPool([partial(LifeEnv, 10**6)] * 2, num_actors=1, timeouts=PATIENCE) as pool:
        pool.reset()
        pool.recv(2)
        pool.send(np.zeros(2))
        steps = 1
        assert pool.recv(2).observations[:, 2].tolist() == [steps] * 2
        for line in itertools.count(1):
            with contextlib.suppress(TimeIsUp), CtrlC(line, profiler, within) as broken_off:
                pool.send(np.zeros(2))
            with contextlib.suppress(NoAsyncCallError):  # it was not asked yet
                batch = pool.recv(2, timeout=40.0)  # of a step: 20
                steps += 1
                assert batch.observations[:, 2].tolist() == [steps] * 2
            if not broken_off.came:
                break
    assert line > 5


@pytest.mark.slow
def test_no_row_of_another_step_comes_after_one_that_was_broken_off_in_the_engine(
    profiler: int,
) -> None:
    within = (engine.__file__,)
    envs = BusVectorEnv(
        [partial(LifeEnv, 10**6)] * 2, num_actors=2, local_links=False, timeouts=PATIENCE
    )
    envs.reset(seed=1)
    rows = 0
    for line in itertools.count(1):
        with contextlib.suppress(TimeIsUp), CtrlC(line, profiler, within) as broken_off:
            envs.step(np.full(2, line % 30, np.float64))
        for action in (31, 32, 33):
            try:
                observations = envs.step(np.full(2, action, np.float64))[0]
            except AlreadyPendingCallError:
                with contextlib.suppress(multiprocessing.TimeoutError):  # its answer was taken away
                    envs.step_wait()
            else:
                assert observations[:, 3].tolist() == [action] * 2, broken_off.place
                rows += 1
        if not broken_off.came:
            break
    assert rows > 2 * line > 40
    envs.close()


@pytest.mark.slow
def test_an_env_whose_step_was_broken_off_is_made_anew_also_in_a_later_life(
    profiler: int,
) -> None:
    """The actor is killed, whichever life it is in, and not waited for without being killed."""
    with ActorPool(
        [partial(LifeEnv, 10**6)],
        num_actors=1,
        local_links=False,
        restart=RestartPolicy.always(backoff=0.0),
        timeouts=PATIENCE,
    ) as pool:
        pool.reset()
        pool.recv()
        for line in itertools.count(1):
            with contextlib.suppress(TimeIsUp), CtrlC(line, profiler, (engine.__file__,)) as broken:
                pool.send(np.zeros(1))
                pool.recv()
            with contextlib.suppress(NoAsyncCallError):  # it was not asked yet, or was received
                while not len(pool.recv(timeout=20.0).env_ids):
                    pass
            if not broken.came:
                break
        assert pool.statistics().restarts > 2
    assert line > 10


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "least"), [(60.0, 20), (None, 8)])
def test_no_row_of_another_step_comes_after_one_whose_end_was_not_asked_for(
    profiler: int, timeout: float | None, least: int
) -> None:
    envs = BusVectorEnv([partial(LifeEnv, 10**6)] * 2, num_actors=2, timeouts=PATIENCE)
    envs.reset(seed=1)
    ends = 0
    for line in itertools.count(1):
        envs.step(np.zeros(2))
        with contextlib.suppress(TimeIsUp), CtrlC(10, profiler, (step_words.__file__,)):
            envs.step(np.zeros(2))
        within = (quick_steps.__file__, engine.__file__)
        expected = TimeIsUp, NoAsyncCallError, multiprocessing.TimeoutError
        with contextlib.suppress(*expected), CtrlC(line, profiler, within) as broken_off:
            envs.step_wait(timeout)
            ends += 1
        for action in (31, 32):
            try:
                observations = envs.step(np.full(2, action, np.float64))[0]
            except AlreadyPendingCallError:
                with contextlib.suppress(multiprocessing.TimeoutError):
                    number = envs.step_wait()[0][:, 2]
                    assert number[0] == number[1], broken_off.place
            else:
                assert observations[:, 3].tolist() == [action] * 2, broken_off.place
        if not broken_off.came:
            break
    assert line > least
    assert ends
    envs.close()


@pytest.mark.slow_but_first
def test_a_step_goes_on_where_a_time_limit_broke_it_off(vector: BusVectorEnv, limit: int) -> None:
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    vector.reset(seed=1), model.reset(seed=1)
    number = broken_off = 0

    def after(result: Any) -> None:
        nonlocal number, broken_off
        if result is None:
            broken_off += 1
            try:
                result = vector.step_wait()
            except NoAsyncCallError:
                result = vector.step(actions(number))
        assert_same_row(result, model.step(actions(number)))
        number += 1

    lines = at_every_line(lambda: vector.step(actions(number)), after, every=3, number=limit)
    assert broken_off > lines / 3 - 3  # the limit is told of, wherever it came


@pytest.mark.slow_but_first
def test_a_reset_goes_on_where_ctrl_c_broke_it_off(vector: BusVectorEnv) -> None:
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    seed = 0

    def after(result: Any) -> None:
        nonlocal seed
        if result is None:
            try:
                result = vector.reset_wait()
            except NoAsyncCallError:
                result = vector.reset(seed=seed, options={"kind": ENV})
        assert_same_row(result, model.reset(seed=seed))
        seed += 1

    at_every_line(lambda: vector.reset(seed=seed, options={"kind": ENV}), after, every=7)


@pytest.mark.slow
def test_a_call_goes_on_where_ctrl_c_broke_it_off(vector: BusVectorEnv) -> None:
    vector.reset(seed=1)
    calls = 0

    def call() -> Any:
        return vector.exec_func(add_one)

    def after(result: Any) -> None:
        nonlocal calls
        if result is None:
            try:
                result = vector.exec_func_fetch()
            except NoAsyncCallError:
                result = call()
        calls += 1
        assert result == [calls] * NUM_ENVS

    at_every_line(call, after, every=9)


@pytest.mark.slow
def test_attributes_of_some_envs_are_kept_where_ctrl_c_broke_it_off(vector: BusVectorEnv) -> None:
    vector.exec_func(add_method)
    calls = 0

    def call() -> Any:
        return vector.get_attr("add_one", [1])

    def after(result: Any) -> None:
        nonlocal calls
        if result is None:
            try:
                result = [value for value in vector.call_wait() if value is not None]
            except NoAsyncCallError:
                result = call()
        calls += 1
        assert list(result) == [calls]

    at_every_line(call, after, every=3)


@pytest.mark.slow_but_first
@pytest.mark.timeout(240, method="thread")  # SIGALRM is this test's
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 takes signals between a result and its name"
)
@pytest.mark.parametrize("last", ["call_wait", "call_fetch"])
def test_what_a_time_limit_keeps_of_a_call_is_fetched_also_if_it_came_within_a_line(
    last: str,
) -> None:
    armed, calls = False, 0

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        if armed:
            raise TimeIsUp

    with closing(BusVectorEnv([ENV] * 2, num_actors=1, timeouts=PATIENCE)) as envs:
        envs.exec_func(add_method)
        fetch = getattr(envs, last)
        before = signal.signal(signal.SIGALRM, raise_it)
        gc.disable()  # what is raised in a callback of it, Python can only print
        try:
            for _ in range(100):
                envs.call_async("add_one")
                calls += 1
                for microseconds in range(1, 200, 4):  # until it comes later than the results
                    result = None
                    try:
                        armed = True
                        signal.setitimer(signal.ITIMER_REAL, 1e-6 * microseconds)
                        result = fetch()
                        armed = False
                        break
                    except TimeIsUp:
                        armed = False
                        if result is not None:
                            break
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                assert (fetch() if result is None else result) == (calls, calls)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()


def add_method(env: gymnasium.Env[Any, Any]) -> None:
    env.unwrapped.add_one = partial(add_one, env)  # type: ignore[attr-defined]


def add_one(env: gymnasium.Env[Any, Any]) -> int:
    """Count how often this was called."""
    env.unwrapped.calls = calls = getattr(env.unwrapped, "calls", 0) + 1  # type: ignore[attr-defined]
    return calls


@pytest.fixture(params=[True, False], ids=["local_links", "sockets"])
def make_pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., ActorPool]]:
    pools: list[ActorPool] = []

    def make(**arguments: Any) -> ActorPool:
        arguments = {
            "num_actors": 2,
            "local_links": request.param,
            "timeouts": PATIENCE,
        } | arguments
        pools.append(ActorPool([ENV] * NUM_ENVS, **arguments))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def receive_all(pool: ActorPool) -> Row:
    batch = pool.recv(NUM_ENVS)
    order = np.argsort(batch.env_ids)
    arrays = (batch.observations, batch.rewards, batch.terminations, batch.truncations)
    assert batch.env_ids[order].tolist() == list(range(NUM_ENVS))
    return (*(array[order] for array in arrays), {})


@pytest.mark.slow_but_first
def test_send_and_recv_go_on_where_ctrl_c_broke_them_off(make_pool: Any) -> None:
    pool = make_pool()
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    pool.reset(seed=1), model.reset(seed=1)
    pool.recv(NUM_ENVS)
    number = 0

    def step() -> Row:
        pool.send(actions(number), np.arange(NUM_ENVS))
        return receive_all(pool)

    def after(result: Any) -> None:
        nonlocal number
        if result is None:
            try:
                result = receive_all(pool)
            except NoAsyncCallError:
                result = step()
        assert_same_row(result, model.step(actions(number)))
        number += 1

    assert at_every_line(step, after, every=3) > 100


@pytest.mark.slow
def test_a_step_goes_on_where_many_ctrl_c_came_while_a_slow_fork_server_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import threading\nthreading.Event().wait(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(
        BusVectorEnv(
            [ENV] * 3,
            num_actors=3,
            timeouts=PATIENCE,
            preload=["slow_to_import"],
            restart=RestartPolicy(max_restarts=None, backoff=0.0, max_backoff=0.0),
        )
    ) as envs:
        envs.reset(seed=1)
        pids = envs.actor_pids()
        os.kill(Process(pids[0]).ppid(), signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)), "the end of the actors")
        main = threading.get_ident()

        def interrupt() -> None:
            for _ in range(4000):
                pass_time(0.0005)
                if sys._current_frames()[main].f_code.co_filename.startswith(FOLDERS):
                    signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        result, is_asked = None, False
        while result is None:
            try:
                result = envs.step_wait() if is_asked else envs.step(np.zeros(3, np.int64))
            except (KeyboardInterrupt, NoAsyncCallError) as exc:
                is_asked = isinstance(exc, KeyboardInterrupt)
        thread.join()
        assert result[4]["_fault"].tolist() == [True] * 3
        assert not envs.step(np.zeros(3, np.int64))[3].any()


@pytest.mark.slow
def test_envs_whose_result_ctrl_c_kept_back_wait_for_recv(make_pool: Any) -> None:
    pool = make_pool()
    pool.reset(seed=1)

    def receive() -> Any:
        return pool.recv(NUM_ENVS, copy=False)

    def after(batch: Any) -> None:
        if batch is None:
            for ask in (lambda: pool.reset(env_ids=[0]), lambda: pool.send(actions(1))):
                with pytest.raises(AlreadyPendingCallError):
                    ask()
            batch = receive()
        assert len(batch.env_ids) == NUM_ENVS
        pool.send(actions(1), batch.env_ids)

    at_every_line(receive, after, every=3)


@pytest.mark.slow
def test_an_error_in_whose_place_ctrl_c_came_is_raised_by_the_next_recv() -> None:
    with ActorPool([partial(LifeEnv, 10**6)], num_actors=1, timeouts=PATIENCE) as pool:
        interrupted = 0
        places: list[Any] = []
        missed = set()

        def begin() -> None:
            pool.reset()
            pool.recv()
            pool.send(np.array([RAISE]))

        def receive() -> bool:
            with pytest.raises(ValueError, match="on purpose"):
                pool.recv()
            return True

        def after(raised: Any) -> None:
            nonlocal interrupted
            if raised is None:
                interrupted += 1
                try:
                    receive()
                except NoAsyncCallError:  # it came when the error was on its way to the caller
                    missed.add(places[-1])
            begin()

        begin()
        at_every_line(receive, after, every=4, places=places)
        assert interrupted > 20
        assert len(missed) <= 1, missed  # the number of lines varies: it may be met twice


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["step", "call"])
def test_an_error_in_whose_place_ctrl_c_came_is_raised_by_the_next_wait(asked: str) -> None:
    with closing(BusVectorEnv([partial(LifeEnv, 10**6)], num_actors=1, timeouts=PATIENCE)) as envs:
        interrupted = 0
        places: list[Any] = []
        missed = set()
        calls = {
            "step": (lambda: envs.step(np.array([RAISE])), envs.step_wait),
            "call": (lambda: envs.exec_func(LifeEnv.step, None, RAISE), envs.call_wait),
        }
        ask, wait = calls[asked]

        def fail() -> bool:
            with pytest.raises(ValueError, match="on purpose"):
                ask()
            return True

        def after(raised: Any) -> None:
            nonlocal interrupted
            if raised is None:
                interrupted += 1
                try:
                    wait()
                except NoAsyncCallError:  # it was not asked yet
                    fail()
                except ValueError:
                    wait()  # of the others
                else:  # it came when the error was on its way to the caller
                    missed.add(places[-1])
            envs.reset()

        envs.reset()
        at_every_line(fail, after, every=4, places=places)
        assert interrupted > 20
        assert len(missed) <= 1, missed  # the number of lines varies: it may be met twice


@pytest.mark.slow
def test_a_new_step_takes_no_place_of_an_error_in_whose_place_ctrl_c_came() -> None:
    makers = [partial(LifeEnv, 10**6)] * 2
    with closing(BusVectorEnv(makers, num_actors=1, timeouts=PATIENCE)) as envs:
        steps = 0

        def fail() -> bool:
            with pytest.raises(ValueError, match="on purpose"):
                envs.step(np.array([1, RAISE]))
            return True

        def after(raised: Any) -> None:
            nonlocal steps
            steps += 1
            if raised is None:
                try:
                    fail()  # it was not asked yet
                except AlreadyPendingCallError:
                    with pytest.raises(ValueError, match="on purpose"):
                        envs.step_wait()
            found = envs.step_wait()[0][0, 2]  # of the other
            assert found - steps in (0, 1)  # 1: the error was on its way to the caller
            missed.append(found - steps)
            steps = int(found)

        missed: list[float] = []
        envs.reset()
        at_every_line(fail, after, every=4)
        assert sum(missed) <= 1


@pytest.mark.slow_but_first
def test_recv_goes_on_where_a_time_limit_broke_it_off(make_pool: Any, limit: int) -> None:
    pool = make_pool()
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    pool.reset(seed=1), model.reset(seed=1)
    pool.recv(NUM_ENVS)

    def step() -> Row:
        pool.send(actions(5), np.arange(NUM_ENVS))
        return receive_all(pool)

    def after(result: Any) -> None:
        if result is None:
            try:
                result = receive_all(pool)
            except NoAsyncCallError:
                result = step()
        assert_same_row(result, model.step(actions(5)))

    assert at_every_line(step, after, every=7, number=limit) > 100


@pytest.mark.slow
def test_a_reset_of_a_pool_is_done_again_after_ctrl_c(make_pool: Any) -> None:
    pool = make_pool()

    def after(result: Any) -> None:
        if result is None:
            pool.reset(seed=5)
            result = receive_all(pool)
        assert result[0][:, 1:].tolist() == [[0, 0, 5 + i] for i in range(NUM_ENVS)]

    def reset() -> Row:
        pool.reset(seed=5)
        return receive_all(pool)

    at_every_line(reset, after, every=5)


@pytest.mark.slow
def test_poll_goes_on_where_ctrl_c_broke_it_off(make_pool: Any) -> None:
    pool = make_pool(autoreset_mode="Disabled")
    pool.poll(min_envs=NUM_ENVS)
    number = 0

    def step() -> dict[int, int]:
        if number % LENGTH == LENGTH - 1:
            for env_id in range(NUM_ENVS):
                pool.try_reset(env_id)
        else:
            pool.send_actions({i: {"agent0": 0} for i in range(NUM_ENVS)})
        return take({})

    def take(found: dict[int, int]) -> dict[int, int]:
        while len(found) < NUM_ENVS:
            for env_id, seen in pool.poll(min_envs=NUM_ENVS - len(found)).observations.items():
                found[env_id] = int(seen["agent0"][1])
        return found

    def after(result: Any) -> None:
        nonlocal number
        if result is None:
            result = {}
            try:
                result = take(result)
            except NoAsyncCallError:
                for env_id in set(range(NUM_ENVS)) - result.keys():
                    if number % LENGTH == LENGTH - 1:
                        pool.try_reset(env_id)
                    else:
                        pool.send_actions({env_id: {"agent0": 0}})
                result = take(result)
        number += 1
        assert result == dict.fromkeys(range(NUM_ENVS), number % LENGTH)

    at_every_line(step, after, every=4)


@pytest.mark.slow
def test_ctrl_c_in_a_call_of_one_env_leaves_the_others_steps_alone(make_pool: Any) -> None:
    pool = make_pool()
    model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
    pool.reset(seed=1), model.reset(seed=1)
    pool.recv(NUM_ENVS)
    env = pool.get_sub_environments()[0]

    def call() -> Any:
        pool.send(actions(7))
        return env.call("add", 5)

    def after(result: Any) -> None:
        try:
            found = receive_all(pool)
        except NoAsyncCallError:
            pool.send(actions(7))
            found = receive_all(pool)
        assert_same_row(found, model.step(actions(7)))
        if result is not None:
            assert result in range(5, 5 + LENGTH + 1)

    at_every_line(call, after, every=9)


@pytest.mark.slow
def test_envs_in_this_process_go_on_or_say_that_they_were_broken_off() -> None:
    with ActorPool([ENV] * NUM_ENVS, num_actors=0) as pool:
        model = gymnasium.vector.SyncVectorEnv([ENV] * NUM_ENVS)
        told = 0

        def begin() -> None:
            pool.reset(seed=1)
            first = receive_all(pool)[0]
            model.reset(seed=1)
            for env, row in zip(model.envs, first, strict=True):
                env.unwrapped.episode = int(row[0])  # type: ignore[attr-defined]

        def step() -> Row:
            pool.send(actions(3))
            return receive_all(pool)

        def after(result: Any) -> None:
            nonlocal told
            try:
                if result is None:
                    try:
                        result = receive_all(pool)
                    except NoAsyncCallError:
                        result = step()
                assert_same_row(result, model.step(actions(3)))
            except (EnvError, RemoteError):
                told += 1
                begin()

        begin()
        lines = at_every_line(step, after)
        assert told < lines / 2


class Signalling(CountingEnv):
    """Is at work, and closed, when a signal comes."""

    def __init__(self, number: int) -> None:
        super().__init__(LENGTH)
        self.number = number

    def step(self, action: Any) -> Any:
        signal.raise_signal(self.number)
        return super().step(action)

    def close(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGVTALRM, TimeIsUp)]
)
@pytest.mark.parametrize("restart", [True, False])
def test_a_signal_that_comes_while_an_env_in_this_process_is_at_work_is_the_programs(
    number: int, error: type[BaseException], restart: bool, limit: int
) -> None:
    envs = [partial(Signalling, number), ENV]
    pool = ActorPool(envs, num_actors=0, restart=restart)
    pool.reset()
    pool.recv(2)
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(error):
        pool.recv(2)
    if restart:
        assert [fault.env_id for fault in pool.recv().faults] == [0]
    else:
        with pytest.raises((error, EnvError)):
            pool.recv()
    with pytest.raises(error):
        pool.close()
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ActorPool, BusVectorEnv])
def test_a_close_that_ctrl_c_broke_off_is_done_by_the_next_one(kind: Any) -> None:
    running: list[Any] = []

    def close() -> bool:
        running[-1].close()
        return True

    def begin(_: Any = None) -> None:
        if running:
            pids = running[-1].actor_pids()
            running.pop().close()
            wait_until(lambda: not any(map(is_alive, pids)), "their ends")
        running.append(kind([ENV], num_actors=1, timeouts=PATIENCE))

    begin()
    at_every_line(close, begin, every=41)
    running[0].close()


def simulate(address: str, local_links: bool, over: threading.Event) -> None:
    """Play episodes of three steps, each with a reward of 1, whose actions are checked."""
    with ExternalEnvClient(address, local_links=local_links) as client:
        count = 0.0
        while not over.is_set():
            episode = client.start_episode()
            for _ in range(LENGTH):
                count += 1.0
                action = client.get_action(episode, np.array([count]))
                assert action.tolist() == [count + 0.5]
                client.log_returns(episode, 1.0)
            client.end_episode(episode, np.array([0.0]))


@pytest.mark.slow
@pytest.mark.parametrize("local_links", [True, False], ids=["local_links", "sockets"])
def test_a_bridge_goes_on_where_ctrl_c_broke_it_off(local_links: bool) -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)
    over, rewards = threading.Event(), Counter[str]()
    with (
        ThreadPoolExecutor(1) as thread,
        ExternalEnvBridge(space, space, local_links=local_links) as bridge,
    ):
        simulator = thread.submit(simulate, bridge.address, local_links, over)
        asked: dict[str, Any] = {}

        def answer(timeout: float = 20.0) -> Any:
            bridge.send_actions(asked)
            return bridge.poll(timeout)

        def take(result: Any) -> None:
            asked.clear()
            for episode_id, agents in result.rewards.items():
                rewards[episode_id] += sum(agents.values())
            for episode_id, agents in result.observations.items():
                if episode_id in result.ended:
                    assert rewards[episode_id] == LENGTH
                else:
                    asked[episode_id] = {agent: seen + 0.5 for agent, seen in agents.items()}

        def after(result: Any) -> None:
            result = answer() if result is None else result
            assert result.observations, "the simulator waits for an answer that was lost"
            take(result)

        try:
            assert at_every_line(answer, after, every=3) > 100
        finally:
            over.set()
            while not simulator.done():
                take(answer(0.05))
        simulator.result()


def test_a_process_group_whose_beginning_ctrl_c_broke_off_keeps_no_lock_from_the_next_one() -> None:
    with ProcessGroup():  # has the fork server run, which all of them share

        def after(made: ProcessGroup | None) -> None:
            (ProcessGroup() if made is None else made).close(0.0)

        assert at_every_line(ProcessGroup, after) > 50


@pytest.mark.slow
def test_a_child_whose_start_ctrl_c_broke_off_leaves_no_descriptor() -> None:
    with ProcessGroup() as process_group:
        entry = "tests.integration.group_children:wait_for_the_driver"

        def after(_: object = None) -> None:
            children = process_group.children
            for child in children:
                process_group.kill(child)
            wait_until(
                lambda: not list(process_group.exits()) and not process_group.children,
                "the child's end",
            )
            for child in children:
                child.pipe.close()

        def descriptors() -> int:
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        process_group.start("child", entry)
        after()
        before = descriptors()
        assert at_every_line(lambda: process_group.start("child", entry), after, every=3) > 50
        assert descriptors() <= before  # what earlier tests have left may go meanwhile


def test_a_passed_descriptor_whose_way_ctrl_c_broke_off_leaves_no_descriptor() -> None:
    one, other = Pipe.pair()
    with one, other:
        before = open_descriptors()

        def after(_: object) -> None:
            assert open_descriptors() <= before  # what earlier tests have left may go meanwhile

        assert at_every_line(lambda: one.send(bytes(4096)), after) > 10


@pytest.mark.slow
@local_links
def test_ctrl_c_in_a_question_to_policy_workers_keeps_no_lock_from_other_threads() -> None:
    with PolicyWorkers(make_probe) as workers, ThreadPoolExecutor(1) as thread:

        def ask() -> object:
            return workers.pids(), workers.policy(), workers.statistics()

        def after(_: object) -> None:
            assert thread.submit(workers.pids).result(20.0) == workers.pids()

        at_every_line(ask, after, every=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExternalEnvClient, Client])
def test_a_client_whose_beginning_or_end_ctrl_c_broke_off_leaves_nothing(kind: Any) -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)
    over = threading.Event()

    def serve(bridge: ExternalEnvBridge) -> None:
        while not over.is_set():
            bridge.poll(0.05)

    with ThreadPoolExecutor(1) as thread, ExternalEnvBridge(space, space) as bridge:
        server = thread.submit(serve, bridge)
        threads = set(threading.enumerate())
        clients = [kind(bridge.address)]

        def make() -> Any:
            return kind(bridge.address)

        def close() -> bool:
            clients[0].close()
            return True

        def after(made: Any) -> None:
            clients[0].close()
            if made is not True and made is not None:
                made.close()
            gc.collect()  # libzmq would wait for ever for a socket that was left open
            wait_until(lambda: set(threading.enumerate()) <= threads, "the ends of its threads")
            clients[0] = make()

        try:
            at_every_line(close, after, every=7)
            clients[0].close()
            at_every_line(make, after, every=11)
        finally:
            clients[0].close()
            over.set()
        server.result()


@pytest.mark.parametrize("line", [40, 80, 120])
def test_a_bridge_whose_stop_ctrl_c_broke_off_listens_no_more(line: int) -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)
    bridge = ExternalEnvBridge(space, space, gateway=GatewayConfig(tcp=("127.0.0.1:0",)))
    with pytest.raises(KeyboardInterrupt), CtrlC(line):
        bridge.stop()
    bridge.stop()
    ExternalEnvBridge(space, space, bind=bridge.address).stop()


class Waiting(ExternalEnv):
    """A simulator that does nothing until its client is closed."""

    def run(self) -> None:
        while True:
            self.get_action(self.start_episode(), np.zeros(1))


def test_ctrl_c_while_a_simulator_is_started_leaves_no_thread_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []

    def start(thread: HostedThread) -> None:
        threading.Thread.start(thread)
        started.append(thread)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HostedThread, "start", start)
    space = Box(-1e9, 1e9, (1,), np.float64)
    with pytest.raises(KeyboardInterrupt), ExternalEnvBridge(space, space) as bridge:
        bridge.host(Waiting(space, space))
    started[0].join(20.0)
    assert not started[0].is_alive()


class Failing(ExternalEnv):
    """A simulator that raises."""

    def run(self) -> None:
        raise ValueError("on purpose")


@pytest.mark.slow
def test_the_end_of_a_simulator_in_whose_place_ctrl_c_came_is_raised_by_the_next_poll() -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)
    hosted, told = 0, set[int]()
    with ExternalEnvBridge(space, space) as bridge:

        def host() -> None:
            nonlocal hosted
            hosted += 1
            bridge.host(Failing(space, space), name=f"number {hosted}")

        def poll() -> bool:
            with pytest.raises(SimulatorError) as raised:
                bridge.poll(20.0)
            told.update(int(found) for found in re.findall(r"number (\d+)", str(raised.value))[:1])
            return True

        def after(raised: Any) -> None:
            host()
            if raised is None:
                while hosted not in told:
                    poll()
                host()

        host()
        at_every_line(poll, after, every=9)
        while len(told) < hosted - 1:  # one may have been on its way to the caller
            poll()
    assert hosted > 20


@pytest.mark.timeout(240, method="thread")  # SIGALRM is this test's
def test_ctrl_c_breaks_no_call_of_a_client_in_a_place_where_it_is_swallowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ's binding looks for signals while it frees a frame, and can only print what comes."""
    space = Box(-1e9, 1e9, (1,), np.float64)
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    over, raised, armed = threading.Event(), 0, False

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        if armed:
            raise TimeIsUp

    def serve(bridge: ExternalEnvBridge) -> None:
        while not over.is_set():
            seen = bridge.poll(0.05)
            open_ones = seen.observations.keys() - set(seen.ended)
            bridge.send_actions({episode: seen.observations[episode] for episode in open_ones})

    before = signal.signal(signal.SIGALRM, raise_it)
    gc.disable()  # what is raised while it frees an earlier test's object, Python can only print
    try:
        with ThreadPoolExecutor(1) as thread, ExternalEnvBridge(space, space) as bridge:
            server = thread.submit(serve, bridge)
            try:
                with ExternalEnvClient(bridge.address, local_links=False) as client:
                    episode = client.start_episode()
                    for number in range(1200):
                        try:
                            armed = True
                            signal.setitimer(signal.ITIMER_REAL, 2e-6 * (1 + number % 300))
                            client.get_action(episode, np.zeros(1))
                            armed = False
                        except TimeIsUp:
                            armed = False
                            raised += 1
            finally:
                over.set()
            server.result()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert raised
    assert not swallowed


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["server", "client"])
@pytest.mark.parametrize("local_links", [pytest.param(True, marks=local_links), False])
def test_no_row_is_of_an_action_that_ctrl_c_kept_from_its_simulator(
    local_links: bool, inference: Literal["server", "client"]
) -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)
    taken: list[int] = []
    asked: Iterator[int] = itertools.count()

    def ask() -> int:
        number = next(asked)
        client.get_action(episode, np.full(1, number, np.float64), timeout=20.0)
        return number

    def after(number: int | None) -> None:
        if number is not None:
            taken.append(number)
        taken.append(ask())

    def sample() -> Any:
        runner = EnvRunner(bridge, MlpPolicy(space, space), RunnerConfig(publish=True))
        return runner.sample(num_episodes=1, timeout=200.0).single()

    with ThreadPoolExecutor(1) as thread, ExternalEnvBridge(space, space) as bridge:
        sampling = thread.submit(sample)
        policy = policy_from_weights if inference == "client" else None
        settings: dict[str, Any] = {"inference": inference, "policy": policy}
        with ExternalEnvClient(bridge.address, local_links=local_links, **settings) as client:
            episode = client.start_episode()
            after(None)
            assert at_every_line(ask, after) > 50
            client.end_episode(episode, np.full(1, next(asked), np.float64))
        found = sampling.result()
    observed = found["obs"][:, 0].astype(int).tolist()
    assert set(observed) <= set(taken)
    followers = {number for number in taken if number + 1 in taken}
    assert followers <= set(observed)


def test_ctrl_c_in_the_wait_for_the_steps_of_an_episode_is_raised_as_such() -> None:
    space = Box(-1e9, 1e9, (1,), np.float64)

    def sample() -> int:
        runner = EnvRunner(bridge, MlpPolicy(space, space), RunnerConfig(publish=True))
        return len(runner.sample(num_episodes=1, timeout=60.0).single())

    def strike() -> Any:
        state = release()
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return state

    with ThreadPoolExecutor(1) as thread, ExternalEnvBridge(space, space) as bridge:
        sampling = thread.submit(sample)
        choosing: dict[str, Any] = {"inference": "client", "policy": policy_from_weights}
        with ExternalEnvClient(bridge.address, **choosing) as client:
            episode = client.start_episode()
            client.get_action(episode, np.zeros(1))
            assert client._inference is not None
            changed: Any = client._inference._changed
            release, changed._release_save = changed._release_save, strike
            with pytest.raises(KeyboardInterrupt):
                client.end_episode(episode, np.ones(1), timeout=20.0)
            changed._release_save = release
            client.end_episode(episode, np.ones(1), timeout=20.0)
        assert sampling.result() == 1


class Telling(CountingEnv):
    """Tells a process when it steps, and never comes to an end with it."""

    def __init__(self, pid: int) -> None:
        super().__init__(LENGTH)
        self.pid = pid

    def step(self, action: Any) -> Any:
        self.wait()

    def wait(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)
        while True:
            signal.pause()


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda do: signal.signal(signal.SIGUSR1, lambda _number, _frame: do()) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("local_links", [True, False], ids=["local_links", "sockets"])
@pytest.mark.parametrize("asked", ["step", "call", "recv"])
@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting")
def test_a_call_during_which_a_handler_closes_all_says_so(
    local_links: bool, asked: str, on_signal: Any
) -> None:
    kind: Any = ActorPool if asked == "recv" else BusVectorEnv
    envs = kind(
        [partial(Telling, os.getpid())], num_actors=1, local_links=local_links, timeouts=PATIENCE
    )
    pids = envs.actor_pids()
    on_signal(lambda: envs.close(terminate=True))
    envs.reset()
    if asked == "recv":
        envs.recv()
        envs.send(np.zeros(1, np.int64))
        calls = {"recv": envs.recv}
    else:
        calls = {
            "step": lambda: envs.step(np.zeros(1, np.int64)),
            "call": lambda: envs.call("wait"),
        }
    with pytest.raises(ClosedEnvironmentError):
        calls[asked]()
    wait_until(lambda: not any(map(is_alive, pids)), "their ends")


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting")
def test_a_close_that_ctrl_c_broke_off_while_a_step_is_pending_ends_all(on_signal: Any) -> None:
    on_signal(lambda: None)
    envs = BusVectorEnv([partial(Telling, os.getpid())], num_actors=1, timeouts=PATIENCE)
    envs.reset()
    pids = envs.actor_pids()
    envs.step_async(np.zeros(1, np.int64))
    with pytest.raises(KeyboardInterrupt), CtrlC(80):  # kept until it waits for that step
        envs.close()
    wait_until(lambda: not any(map(is_alive, pids)), "their ends")
    with pytest.raises(ClosedEnvironmentError):
        envs.step(np.zeros(1, np.int64))
    envs.close()


def choose(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def assert_whole(batch: Any) -> None:
    """See that each row is what the env made at that place of its episode."""
    observations = batch["obs"]
    assert observations[:, 1].tolist() == batch["t"].tolist()
    assert batch["next_obs"][:, 1].tolist() == (batch["t"] + 1).tolist()
    np.testing.assert_array_equal(batch["rewards"], 10 * observations[:, 0] + batch["t"] + 1)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("num_actors", [0, 2])
def test_a_sample_after_ctrl_c_has_whole_episodes_only(num_actors: int) -> None:
    pool = ActorPool([ENV] * NUM_ENVS, num_actors=num_actors, timeouts=PATIENCE)
    with EnvRunner(pool, choose, RunnerConfig(rollout_fragment_length=4)) as runner:
        runner.sample()

        def after(result: Any) -> None:
            while result is None:
                try:
                    result = runner.sample()
                except (EnvError, RemoteError):
                    assert num_actors == 0
            batch = result.single()
            assert len(batch) == 4 * NUM_ENVS
            assert_whole(batch)

        at_every_line(runner.sample, after, every=29)


@pytest.mark.slow
def test_ctrl_c_takes_no_row_from_a_group() -> None:
    with EnvRunnerGroup(
        2, [ENV] * NUM_ENVS, choose, RunnerConfig(rollout_fragment_length=2)
    ) as group:
        rows: dict[int, list[float]] = {env_id: [] for env_id in range(NUM_ENVS)}

        def after(result: Any) -> None:
            batch = (group.sample() if result is None else result).single()
            for env_id, seen in zip(batch["env_id"].tolist(), batch["obs"], strict=True):
                rows[env_id].append(LENGTH * (seen[0] - 1) + seen[1])

        at_every_line(group.sample, after, every=17)
        for counts in rows.values():
            assert counts == list(range(len(counts)))
            assert len(counts) > 20


class FailingPolicy:
    """Numbers what it raises."""

    count = 0

    def __call__(self, _: object) -> Any:
        self.count += 1
        raise ValueError(f"number {self.count}")


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["sample", "collect"])
def test_an_error_in_whose_place_ctrl_c_came_is_raised_by_the_next_sample(asked: str) -> None:
    told: list[str] = []

    def ask() -> object:
        if asked == "sample":
            return group.sample()
        group.sample_async()
        return group.collect()

    def sample(_: object = None) -> bool:
        with pytest.raises(RemoteError) as raised:
            ask()
        told.extend(re.findall(r"number \d+", str(raised.value))[:1])
        return True

    with EnvRunnerGroup(1, [ENV], FailingPolicy(), RunnerConfig()) as group:
        at_every_line(sample, sample, every=9)
    assert len(set(told)) == len(told) > 20
    assert int(told[-1].split()[1]) - len(told) <= 1  # one was on its way to the caller


@pytest.mark.slow
def test_ctrl_c_leaves_no_half_of_a_state_in_a_group() -> None:
    with EnvRunnerGroup(1, [ENV], Steps(), RunnerConfig()) as group:
        state = group.get_state()
        number = 0

        def set_next() -> None:
            nonlocal number
            number += 1
            weights = {name: {"number": np.array([number])} for name in state["weights"]}
            versions = dict.fromkeys(state["policy_versions"], number)
            given = {"weights": weights, "policy_versions": versions, "next_eps_id": number}
            group.set_state({**state, **given, "num_samples": number})

        def after(_result: object) -> None:
            found = group.get_state()
            (weights,), (version,) = found["weights"].values(), found["policy_versions"].values()
            now = {version, int(weights["number"][0]), found["next_eps_id"], found["num_samples"]}
            assert len(now) == 1, found

        set_next()
        assert at_every_line(set_next, after, every=3) > 20


@pytest.mark.slow
@local_links
def test_actions_of_policy_workers_are_collected_where_ctrl_c_broke_it_off() -> None:
    with PolicyWorkers(make_probe, 2, timeout=5.0) as workers:
        policy = workers.policy()
        numbers = iter(range(1, 10000))
        asked = [0, policy.submit_actions(rows(0.0), None)]

        def after(out: Any) -> None:
            out = out or policy.collect_actions(asked[1])
            assert out.actions.tolist() == [asked[0]]
            asked[0] = next(numbers)
            asked[1] = policy.submit_actions(hold(asked[0], 0.001), None)

        at_every_line(lambda: policy.collect_actions(asked[1]), after)


@local_links
def test_ctrl_c_while_a_policy_is_collected_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swallowed: list[Any] = []
    close = PolicyConnections.close

    def close_and_raise(self: PolicyConnections) -> None:
        close(self)
        signal.raise_signal(signal.SIGINT)

    with PolicyWorkers(make_probe) as workers:
        monkeypatch.setattr(PolicyConnections, "close", close_and_raise)
        policy = workers.handle().policy()
        policy.compute_actions(rows(0.0), None)
        monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
        del policy
        gc.collect()
        monkeypatch.undo()
    assert not swallowed


@pytest.mark.slow
@local_links
def test_weights_reach_all_policy_workers_also_after_ctrl_c() -> None:
    with PolicyWorkers(make_probe, 2) as workers:
        numbers = iter(range(1, 10000))

        def push() -> int:
            return workers.set_weights({"offset": float(next(numbers))})

        def after(_: object) -> None:
            expected = [push()] * 2
            wait_until(lambda: versions() == expected, "the weights in both workers")

        def versions() -> list[int]:
            return list(workers.statistics().policies["default_policy"].versions.values())

        at_every_line(push, after)


@pytest.mark.slow
def test_no_socket_is_closed_under_a_thread_whose_end_ctrl_c_kept_from_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)  # the second Ctrl-C is not kept
    space = Box(-1e9, 1e9, (1,), np.float64)
    over, asked, leaving, came = (threading.Event() for _ in range(4))
    closed: list[bool] = []

    def break_off(_number: int, _frame: FrameType | None) -> None:
        if not came.is_set():
            came.set()
            raise KeyboardInterrupt

    def policy(observations: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            while leaving.wait(20.0) and not came.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                pass_time(0.001)
            pass_time(0.2)  # of work, in which its owner closes the bridge, or waits
            closed.append(bridge.closed)
        return observations + 0.5

    def serve() -> None:
        with EnvRunner(bridge, policy) as runner, runner.serving():
            assert asked.wait(20.0)
            leaving.set()

    before = signal.signal(signal.SIGINT, break_off)
    bridge = ExternalEnvBridge(space, space)
    try:
        with ThreadPoolExecutor(1) as thread:
            simulator = thread.submit(simulate, bridge.address, True, over)
            with pytest.raises(KeyboardInterrupt):
                serve()
            assert isinstance(simulator.exception(), PeerLostError)
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed
    assert not any(closed)


@pytest.mark.slow
def test_episodes_are_written_where_ctrl_c_came_or_nothing_of_them_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from envbus.runner.recordings import EpisodeWriter, read_episodes
    from tests.runner.recordings.test_writer import episode

    with EpisodeWriter(tmp_path, shard_rows=20) as writer:
        writer.write(episode(0, 3))

        def after(_result: None) -> None:
            # Again, as who is not sure: other episodes of these ids, never one of twice the rows.
            writer.write(episode(1, 3))
            writer.write(episode(2, 3))

        at_every_line(lambda: writer.write(episode(1, 3)), after)
    found = [len(one.single()) for one in read_episodes(tmp_path)]
    assert set(found) == {3}
    assert len(found) == writer.num_episodes


class DrawnHere:
    """What a `VideoRecorder` asks of an env, without one."""

    env_id = 0

    def get_attr(self, name: str) -> Any:
        return {"render_mode": "rgb_array", "metadata": {}}[name]

    def render(self) -> Any:
        return np.zeros((16, 16, 3), np.uint8)


def test_ctrl_c_leaves_no_film_without_its_name(tmp_path: Path) -> None:
    pytest.importorskip("imageio")
    from envbus.runner.sampling.video import VideoConfig, VideoRecorder

    config = VideoConfig(folder=tmp_path, episodes=1, suffix=".gif")
    recorder = VideoRecorder(config, Callbacks(), [DrawnHere()], PerfTimers())
    films = 0

    def film() -> None:
        episode: Any = SimpleNamespace(env_id=0, eps_id=films, media={})
        recorder.on_episode_created(episode=episode)
        recorder.on_episode_start(episode=episode)
        recorder.on_episode_step(episode=episode)
        recorder.on_episode_end(episode=episode)

    def after(_result: Any) -> None:
        nonlocal films
        recorder.on_episode_created(episode=SimpleNamespace(env_id=0))
        assert not list(tmp_path.glob(".*"))
        films += 1

    assert at_every_line(film, after) > 30
    assert 20 < len(list(tmp_path.iterdir())) <= films
