"""What fails in an actor reaches the caller whole: real envs, real processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import StartError
from envbus.bus.wire.ext import Placeholder
from envbus.runner import ActorLostError, ActorPool, BusVectorEnv, EnvError, Timeouts, env_errors
from tests.integration.group_children import Driver, is_alive, wait_until

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*Worker-.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Traceback.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Raising the last exception.*:UserWarning"),
]


class TwoArgumentsError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class KeywordError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


def raise_chained() -> None:
    try:
        try:
            raise KeyError("the root")
        except KeyError as error:
            raise ValueError("between") from error
    except ValueError:
        raise RuntimeError("on top")  # noqa: B904 - a context, not a cause


def raise_group() -> None:
    inner = eval("ExceptionGroup('inner', [KeyError('deep')])")  # noqa: S307
    raise eval("BaseExceptionGroup")("outer", [inner, KeyboardInterrupt("stop")])  # noqa: S307


def raise_stranger() -> None:
    raise type("StrangerError", (Exception,), {"__module__": "no.such.module"})("strange")


def throw(error: BaseException) -> None:
    raise error


class Raise:
    """What an env raises, and what the caller gets: a type, and words in the traceback."""

    def __init__(self, act: Callable[[], object], expected: type[Exception], *words: str) -> None:
        self.act, self.expected, self.words = act, expected, words


KINDS = {
    "plain": Raise(lambda: throw(ValueError("no")), ValueError, "ValueError: no"),
    "no-args": Raise(lambda: throw(RuntimeError()), RuntimeError, "RuntimeError"),
    "two-args": Raise(lambda: throw(TwoArgumentsError(1, 2)), EnvError, "1 and 2"),
    "keyword": Raise(lambda: throw(KeywordError(code=3)), EnvError, "code 3"),
    "mute": Raise(lambda: throw(MuteError("x")), EnvError, "MuteError"),
    "file": Raise(lambda: os.open("/no/such", os.O_RDONLY), FileNotFoundError, "'/no/such'"),
    "unpicklable": Raise(lambda: throw(ValueError(threading.Lock())), ValueError, "lock"),
    "stranger": Raise(raise_stranger, EnvError, "no.such.module.StrangerError: strange"),
    "exit": Raise(lambda: sys.exit(4), EnvError, "SystemExit: 4"),
    "interrupt": Raise(lambda: throw(KeyboardInterrupt()), EnvError, "KeyboardInterrupt"),
    "generator": Raise(lambda: throw(GeneratorExit()), EnvError, "GeneratorExit"),
    "chain": Raise(raise_chained, RuntimeError, "'the root'", "between", "on top"),
}
if sys.version_info >= (3, 11):
    KINDS["group"] = Raise(raise_group, EnvError, "inner", "'deep'", "stop")
PHASES = ["build", "reset", "step", "render", "call"]


class RaisingEnv(CountingEnv):
    """Raises `kind` in `phase`, until told otherwise."""

    def __init__(self, kind: str = "", phase: str = "") -> None:
        self.kind, self.phase = kind, phase
        self.maybe("build")
        super().__init__(10**6)

    def maybe(self, phase: str) -> None:
        if phase == self.phase:
            KINDS[self.kind].act()

    def reset(self, **kwargs: Any) -> Any:
        self.maybe("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.maybe("step")
        return super().step(action)

    def render(self) -> Any:
        self.maybe("render")

    def sample(self) -> Any:
        self.maybe("call")
        return self.action_space.sample()


def tell(env: gymnasium.Env[Any, Any], kind: str, phase: str, envs: list[int]) -> None:
    raw = env.unwrapped
    assert isinstance(raw, RaisingEnv)
    chosen = raw.env_number in envs if hasattr(raw, "env_number") else True
    raw.kind, raw.phase = (kind, phase) if chosen else ("", "")


@pytest.fixture(scope="module")
def envs() -> Iterator[BusVectorEnv]:
    with_numbers = BusVectorEnv([RaisingEnv] * 4, num_actors=2)
    with_numbers.set_attr("env_number", [0, 1, 2, 3])
    yield with_numbers
    with_numbers.close()


def use(envs: BusVectorEnv, phase: str) -> Any:
    uses: dict[str, Callable[[], object]] = {
        "reset": envs.reset,
        "step": lambda: envs.step(np.ones(4)),
        "render": envs.render,
        "call": lambda: envs.call("sample"),
    }
    return uses[phase]()


def failing(envs: BusVectorEnv, kind: str, phase: str, which: list[int]) -> BaseException:
    """Return what the caller gets when envs raise `kind` in `phase`."""
    if phase == "build":
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any, to look at
            BusVectorEnv(
                [
                    partial(RaisingEnv, kind, "build") if i in which else RaisingEnv
                    for i in range(4)
                ],
                num_actors=2,
            )
        return caught.value
    envs.exec_func(tell, None, "", "", [])
    envs.reset()
    envs.exec_func(tell, None, kind, phase, which)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        use(envs, phase)
    envs.exec_func(tell, None, "", "", [])
    return caught.value


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_raised_arrives_whole(envs: BusVectorEnv, kind: str, phase: str) -> None:
    error = failing(envs, kind, phase, [2])
    assert type(error) is KINDS[kind].expected
    (found,) = env_errors(error)
    assert (found.env_id, found.actor, found.incarnation) == (2, "actor-1", 0)
    assert found.phase == ("call" if phase == "render" else phase)
    assert "test_errors.py" in found.remote_traceback
    printed = "".join(traceback.format_exception(error))
    for text in (found.remote_type, "env 2 (actor-1, incarnation 0)", *KINDS[kind].words):
        assert text in printed
    if phase != "build":  # nothing is in the way of what comes next
        use(envs, phase)
        envs.step(np.ones(4))


class UnbuildableSpace(gymnasium.Space[Any]):
    def __reduce__(self) -> Any:
        raise ValueError("no copy of this space")


class SpacedEnv(CountingEnv):
    def __init__(self, space: Any) -> None:
        super().__init__()
        self.observation_space = space


@pytest.mark.parametrize("space", [UnbuildableSpace(), 5, None], ids=["custom", "number", "none"])
def test_a_space_that_is_none_names_its_env(space: Any) -> None:
    make = partial(make_with_space, type(space).__name__)
    with pytest.raises(Exception, match=r"space") as caught:
        BusVectorEnv([CountingEnv, CountingEnv, make, CountingEnv], num_actors=2)
    (found,) = env_errors(caught.value)
    assert (found.env_id, found.phase) == (2, "build")


def make_with_space(name: str) -> SpacedEnv:
    return SpacedEnv({"UnbuildableSpace": UnbuildableSpace(), "int": 5, "NoneType": None}[name])


# --- several ------------------------------------------------------------------------------------


def test_of_several_failures_all_are_told(envs: BusVectorEnv) -> None:
    error = failing(envs, "plain", "step", [0, 3])
    assert type(error) is ValueError
    told = [3] if sys.version_info < (3, 11) else [0, 3]
    assert [one.env_id for one in env_errors(error)] == told


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
def test_after_an_error_the_others_results_are_fetched_by_waiting_again(
    shared_memory: bool,
) -> None:
    envs = BusVectorEnv([RaisingEnv] * 4, num_actors=2, shared_memory=shared_memory)
    envs.set_attr("env_number", [0, 1, 2, 3])
    before, _ = envs.reset(seed=5)
    envs.exec_func(tell, None, "plain", "step", [1, 2])
    with pytest.raises(ValueError, match="no"):
        envs.step(np.full(4, 1))
    observations, rewards, terminations, truncations, infos = envs.step_wait()
    assert observations[:, 1].tolist() == [1, 0, 0, 1]  # steps of the episode
    assert (observations[1] == before[1]).all()
    assert (rewards[[0, 3]] > 0).all()
    assert rewards[[1, 2]].tolist() == [0.0, 0.0]
    assert not (terminations | truncations).any()
    assert infos["_fault"].tolist() == [False, True, True, False]
    assert "ValueError: no" in infos["fault"]["error"][1]
    with pytest.raises(gymnasium.error.NoAsyncCallError):  # once
        envs.step_wait()
    envs.exec_func(tell, None, "plain", "call", [1])
    with pytest.raises(ValueError, match="no"):
        envs.call("sample")
    values = envs.call_wait()
    assert [value is None for value in values] == [False, True, False, False]
    envs.exec_func(tell, None, "plain", "reset", [1])
    with pytest.raises(ValueError, match="no"):
        envs.reset(seed=9)
    observations, infos = envs.reset_wait()
    assert observations[:, 3].tolist() == [9, 5 + 1, 11, 12]  # their seeds
    assert infos["_fault"].tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match="no"):
        envs.reset()
    envs.exec_func(tell, None, "", "", [])
    with pytest.raises(gymnasium.error.NoAsyncCallError):  # another call was begun
        envs.reset_wait()
    envs.close()


class StrangeInfoEnv(CountingEnv):
    """Action 2 gives it an info of which nobody else has the class."""

    def step(self, action: Any) -> Any:
        *row, info = super().step(action)
        if action == 2:
            module = types.ModuleType("no_such_module")
            cls: Any = type("Stranger", (), {"__module__": module.__name__})
            sys.modules[module.__name__] = module
            vars(module)["Stranger"] = cls
            info = {"stranger": cls()}
        return *row, info


@pytest.mark.slow_but_first
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
@pytest.mark.parametrize("restart", [True, False], ids=["restart", "raise"])
def test_an_info_that_cannot_be_rebuilt_here_costs_no_row(
    shared_memory: bool, restart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    envs = BusVectorEnv(
        [StrangeInfoEnv] * 3,
        num_actors=2,
        shared_memory=shared_memory,
        restart=restart,
    )
    envs.reset()
    observations, *_, infos = envs.step([1, 1, 2])
    assert observations[:, 1].tolist() == [1, 1, 1]
    assert isinstance(infos["stranger"][2], Placeholder)
    assert "no_such_module" in infos["stranger"][2].text
    assert caplog.text.count("no_such_module") == 1
    assert envs.step([1, 1, 1])[0][:, 1].tolist() == [2, 2, 2]
    envs.close()


# --- ends of processes --------------------------------------------------------------------------


class DyingEnv(CountingEnv):
    """Ends its process in the way that its action says, or in its constructor."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__(10**6)
        if at_once:
            self.die()

    def step(self, action: Any) -> Any:
        if action == 2:
            sys.stderr.write("a simulator's last words\n")
            self.crash()
        if action == 3:
            self.die()
        if action == 4:
            self.hang()
        if action == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(action)

    def die(self) -> None:
        for number in range(20_000):
            os.write(2, b"line %d\n" % number)
        os._exit(3)

    def crash(self) -> None:
        ctypes.string_at(0)

    def hang(self) -> None:
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock, too


@pytest.mark.slow_but_first
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_crash_is_told_with_its_signal_and_where_it_was(
    context: str, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = BusVectorEnv([DyingEnv] * 2, num_actors=2, context=context)
    envs.reset()
    with pytest.raises(ActorLostError) as caught:
        envs.step([1, 2])
    envs.close()
    text = str(caught.value)
    for words in (
        "actor-1",
        "signal SIGSEGV; close this",
        "a simulator's last words",
        "Fatal Python error: Segmentation fault",
        "in crash\n",
    ):
        assert words in text
    assert "_watch" not in text
    shown = capfd.readouterr().err
    assert "a simulator's last words" in shown
    assert "Fatal Python error: Segmentation fault" in shown


def test_a_flood_on_stderr_blocks_nobody_and_is_passed_on_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    envs = BusVectorEnv([DyingEnv] * 2, num_actors=2)
    envs.reset()
    with pytest.raises(ActorLostError, match="exit code 3") as caught:
        envs.step([1, 3])
    envs.close()
    assert str(caught.value).endswith("| line 19998\n  | line 19999")
    assert len(str(caught.value)) < 2000
    assert capfd.readouterr().err == "".join(f"line {number}\n" for number in range(20_000))


def test_a_process_that_ends_in_a_constructor_is_told_with_its_last_words() -> None:
    with pytest.raises(StartError, match=r"(?s)while starting, actor-1 .*exit code 3.*line 19999"):
        BusVectorEnv([DyingEnv, partial(DyingEnv, True)], num_actors=2)


@pytest.mark.parametrize("restart", [False, True])
def test_an_end_between_two_steps_is_told_with_its_exit(restart: bool) -> None:
    """The next request finds a socket that has hung up, before the exit was told."""
    envs = BusVectorEnv([DyingEnv] * 2, num_actors=2, restart=restart)
    envs.reset()
    pid = envs.actor_pids()[1]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "its end")
    if restart:
        *_, infos = envs.step([1, 1])
        text = infos["fault"]["error"][1]
    else:
        with pytest.raises(ActorLostError) as caught:
            envs.step([1, 1])
        text = str(caught.value)
    envs.close()
    assert f"actor-1 (pid {pid}, incarnation 0, env 1) ended: signal SIGKILL" in text


# --- hangs --------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_what_hangs_is_told_with_its_stack(context: str) -> None:
    envs = BusVectorEnv([DyingEnv] * 2, num_actors=2, context=context, timeouts=Timeouts(step=1.5))
    envs.reset()
    with pytest.raises(multiprocessing.TimeoutError, match="actor-1") as caught:
        envs.step([1, 4])
    text = str(caught.value)
    assert "Stack of actor-1" in text
    assert text.index("in hang\n") < text.index("in step\n")
    assert "actor-0" not in text
    envs.close(terminate=True)


def test_a_wait_that_is_given_up_tells_the_stack_too_and_why_there_is_none() -> None:
    envs = BusVectorEnv([DyingEnv] * 3, num_actors=3)
    envs.reset()
    envs.step_async([4, 5, 1])
    with pytest.raises(Exception, match=r"(?s)Stack of actor-0.*in hang.*was stopped \(SIGSTOP\)"):
        envs.step_wait(timeout=1.0)
    envs.close(terminate=True)


@pytest.mark.slow
def test_an_actor_that_is_killed_for_a_hang_leaves_its_stack_in_the_fault() -> None:
    envs = BusVectorEnv(
        [DyingEnv] * 2,
        num_actors=2,
        timeouts=Timeouts(step=1.5),
        restart=True,
    )
    envs.reset()
    *_, infos = envs.step([1, 4])
    assert infos["fault"]["cause"][1] == "timeout"
    assert "in hang\n" in infos["fault"]["error"][1]
    envs.close()
    with ActorPool([DyingEnv], timeouts=Timeouts(step=1.5), restart=True) as pool:
        pool.reset()
        pool.recv()
        pool.send([4])
        (fault,) = pool.recv().faults
        assert "in hang\n" in fault.message
        pool.close(terminate=True)


def test_an_error_beside_a_time_out_is_told_as_its_cause() -> None:
    envs = BusVectorEnv(
        [DyingEnv, partial(RaisingEnv, "plain", "step")],
        num_actors=2,
        timeouts=Timeouts(step=1.5),
    )
    envs.reset()
    with pytest.raises(Exception, match="Stack of actor-0") as caught:
        envs.step([4, 1])
    assert [one.env_id for one in env_errors(caught.value)] == [1]
    envs.close(terminate=True)


# --- programs -----------------------------------------------------------------------------------

PROGRAM = """
import gymnasium, numpy as np
from envbus.runner import BusVectorEnv

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return self.physics({"angle": 3})["speed"]
    def physics(self, state):
        return {key: state["mass"] for key in state}

envs = BusVectorEnv([Broken, Broken], num_actors=2)
envs.reset()
envs.step([0, 0])
"""


@pytest.mark.slow
def test_an_uncaught_error_prints_every_remote_traceback(tmp_path: Any) -> None:
    with Driver(PROGRAM, tmp_path) as driver:
        code, _, err = driver.finish()
    assert code == 1
    for env_id in range(2) if sys.version_info >= (3, 11) else (1,):
        assert f"env {env_id} (actor-{env_id}, incarnation 0) failed in step" in err
    assert 'return {key: state["mass"] for key in state}' in err
    assert err.rstrip().endswith("KeyError: 'mass'")
