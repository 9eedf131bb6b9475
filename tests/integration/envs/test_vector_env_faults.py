"""`BusVectorEnv` with restart: what a fault of one env costs, and what its caller is told."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import ActorLostError, EnvError, Fault
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Hooks, Timeouts
from tests.integration.faulty import (
    ASK,
    EXIT,
    HANG,
    KILL,
    NO_MEMORY,
    OK,
    RAISE,
    RESTART,
    SEGFAULT,
    STOP,
    SYS_EXIT,
    FaultyEnv,
    faulty,
    hang,
    held,
    plan,
)
from tests.integration.group_children import is_alive
from tests.runner.pool_envs import killed_at_the_end
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(180)

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
Make = Callable[..., BusVectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    yield from killed_at_the_end(BusVectorEnv, **RESTART)


def act(envs: BusVectorEnv, *actions: int) -> tuple[Any, ...]:
    return envs.step(np.array(actions))


def act_for_ever(envs: BusVectorEnv, *actions: int) -> None:
    while True:
        act(envs, *actions)


def counts(observations: Any) -> list[list[int]]:
    """Return episode and step of each env."""
    return observations[:, :2].astype(int).tolist()


# --- one env raises ---------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(
    ("shared_memory", "action"), [(True, RAISE), (False, SYS_EXIT), (True, NO_MEMORY)]
)
def test_an_env_that_raises_is_made_anew_alone(
    make: Make, mode: AutoresetMode, shared_memory: bool, action: int
) -> None:
    envs = make(faulty(4), num_actors=2, autoreset_mode=mode, shared_memory=shared_memory)
    envs.reset(seed=10)
    pids = envs.actor_pids()
    act(envs, 1, 1, 1, 1)
    for life in (1, 2):
        before, *_ = act(envs, 1, 1, 1, 1)
        observations, rewards, terminations, truncations, infos = act(envs, 1, action, 1, 1)
        assert not terminations.any()
        assert truncations.tolist() == [False, True, False, False]
        assert rewards[1] == 0.0
        assert rewards[0] > 0.0
        assert infos["_fault"].tolist() == [False, True, False, False]
        assert infos["fault"]["cause"][1] == "error"
        assert infos["fault"]["restarts"][1] == life - 1
        assert "env 1 (actor-0, incarnation 0) failed in step" in infos["fault"]["error"][1]
        first = [1, 0, 0, restart_seed(11, 1, life)]
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][1].tolist() == before[1].tolist()
            assert infos["final_info"]["fault"]["cause"][1] == "error"
            assert observations[1].tolist() == first
            assert infos["episode"][1] == 1
        else:
            assert "final_obs" not in infos
            assert observations[1].tolist() == before[1].tolist()
            observations, rewards, _, truncations, infos = act(envs, 1, 1, 1, 1)
            assert observations[1].tolist() == first
            assert (rewards[1], truncations.any(), "fault" in infos) == (0.0, False, False)
        goes_on = [counts(before)[i][1] for i in (0, 2, 3)]
        now = act(envs, 1, 1, 1, 1)[0]
        assert counts(now)[1] == [1, 1]
        passed = 2 if mode is AutoresetMode.SAME_STEP else 3
        assert [counts(now)[i] for i in (0, 2, 3)] == [[1, n + passed] for n in goes_on]
    assert envs.actor_pids() == pids
    told = envs.statistics()
    assert (told.env_restarts, told.restarts, told.faults) == (2, 0, {"error": 2})


def test_with_disabled_autoreset_a_reset_may_take_the_place_of_the_next_step(make: Make) -> None:
    envs = make(faulty(2), num_actors=1, autoreset_mode="Disabled")
    envs.reset(seed=10)
    act(envs, 1, RAISE)
    mask = np.array([False, True])
    observations, _ = envs.reset(options={"reset_mask": mask})
    assert observations[1].tolist() == [1, 0, 0, restart_seed(11, 1, 1)]
    act(envs, EXIT, 1)
    observations, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert observations[0].tolist() == [1, 0, 0, restart_seed(10, 0, 1)]
    observations = act(envs, 1, 1)[0]
    assert observations[:, 3].tolist() == [restart_seed(10, 0, 1), restart_seed(11, 1, 2)]
    assert counts(observations) == [[1, 1], [1, 0]]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_a_reset_of_others_leaves_the_next_episode_to_the_next_step(make: Make, mode: str) -> None:
    envs = make(faulty(3), num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    over = act(envs, EXIT, 1, RAISE)[0]  # the last two share an actor
    observations, infos = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert "fault" not in infos
    assert observations[[0, 2]].tolist() == over[[0, 2]].tolist()
    assert counts(observations)[1] == [2, 0]
    observations, rewards, *_ = act(envs, 1, 1, 1)
    assert counts(observations) == [[1, 0], [2, 1], [1, 0]]
    assert rewards[[0, 2]].tolist() == [0.0, 0.0]
    assert counts(act(envs, 1, 1, 1)[0]) == [[1, 1], [2, 2], [1, 1]]


@pytest.mark.parametrize("action", [RAISE, EXIT], ids=["raise", "exit"])
@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_a_reset_of_some_envs_of_a_vector_env_that_is_made_anew_resets_it_whole(
    make: Make, mode: str, action: int
) -> None:
    vector = partial(SyncVectorEnv, faulty(2), autoreset_mode=mode)
    envs = make([vector, *faulty(1)], num_actors=1, autoreset_mode=mode)
    envs.reset(seed=0)
    act(envs, 1, action, 1)
    observations, infos = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert "fault" not in infos
    assert counts(observations)[:2] == [[1, 0], [1, 0]]
    assert counts(act(envs, 1, 1, 1)[0])[:2] == [[1, 1], [1, 1]]
    assert sum(envs.statistics().faults.values()) == (2 if action is RAISE else 3)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_env_that_raises_in_its_automatic_reset(make: Make, mode: str, tmp_path: Path) -> None:
    envs = make([partial(FaultyEnv, tmp_path, 2), CountingEnv], num_actors=1, autoreset_mode=mode)
    envs.reset(seed=0)
    act(envs, 1, 1)
    plan(tmp_path, "reset", RAISE)
    if mode == "NextStep":
        assert act(envs, 1, 1)[2][0]
    observations, rewards, terminations, truncations, infos = act(envs, 1, 1)
    row = (0.0, False, True) if mode == "NextStep" else (12.0, True, False)  # its own last step
    assert (rewards[0], terminations[0], truncations[0]) == row
    assert "failed in autoreset" in infos["fault"]["error"][0]
    if mode == "NextStep":
        observations, *_ = act(envs, 1, 1)
    assert observations[0].tolist() == [1, 0, 0, restart_seed(0, 0, 1)]
    assert ("final_obs" in infos) == (mode == "SameStep")
    if mode == "SameStep":
        assert counts(np.stack([infos["final_obs"][0]])) == [[1, 2]]


@MODES
def test_an_env_that_raises_in_a_reset_is_made_anew_within_it(
    make: Make, mode: AutoresetMode, tmp_path: Path
) -> None:
    envs = make([partial(FaultyEnv, tmp_path), CountingEnv], num_actors=1, autoreset_mode=mode)
    plan(tmp_path, "reset", RAISE, times=3)
    observations, infos = envs.reset(seed=5)
    assert observations[:, :3].tolist() == [[1, 0, 0]] * 2
    assert observations[:, 3].tolist() == [restart_seed(5, 0, 3), 6]
    assert infos["fault"]["restarts"][0] == 2
    assert infos["_fault"].tolist() == [True, False]
    _, rewards, _, truncations, infos = act(envs, 1, 1)
    assert not truncations.any()
    assert rewards.tolist() == [11.0, 11.0]
    assert "fault" not in infos


@MODES
def test_several_envs_may_raise_in_one_step(make: Make, mode: AutoresetMode) -> None:
    envs = make(faulty(6), num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    _, _, _, truncations, infos = act(envs, RAISE, 1, RAISE, 1, RAISE, RAISE)
    assert truncations.tolist() == [True, False, True, False, True, True]
    assert infos["_fault"].tolist() == truncations.tolist()
    if mode is not AutoresetMode.SAME_STEP:
        act(envs, *[1] * 6)
    assert [row[1] for row in counts(act(envs, *[1] * 6)[0])].count(1) == 4
    assert envs.statistics().env_restarts == 4


@MODES
def test_an_exception_and_the_death_of_another_actor_in_one_step(
    make: Make, mode: AutoresetMode
) -> None:
    envs = make(faulty(4), num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(3):
        _, _, _, truncations, infos = act(envs, RAISE, 1, 1, EXIT)
        assert truncations.tolist() == [True, False, True, True]
        assert infos["fault"]["cause"].tolist() == ["error", None, "crash", "crash"]
        if mode is not AutoresetMode.SAME_STEP:
            _, _, _, truncations, infos = act(envs, 1, 1, 1, 1)
            assert not truncations.any()
            assert "fault" not in infos
        assert act(envs, 1, 1, 1, 1)[0][[0, 2, 3], 1].tolist() == [1, 1, 1]


def test_an_exception_beside_a_death_in_the_same_actor(make: Make) -> None:
    envs = make(faulty(2), num_actors=1)
    envs.reset(seed=0)
    _, _, _, truncations, infos = act(envs, RAISE, EXIT)
    assert truncations.all()
    assert infos["fault"]["cause"].tolist() == ["crash", "crash"]
    act(envs, 1, 1)
    assert counts(act(envs, 1, 1)[0]) == [[1, 1]] * 2


def test_a_request_for_a_restart_is_a_fault_of_its_own_kind_and_logged_quietly(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envbus"):
        envs = make(faulty(1), num_actors=1, autoreset_mode="SameStep")
        envs.reset()
        infos = act(envs, ASK)[4]
    assert infos["fault"]["cause"][0] == "request"
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []
    assert "the simulator wants it" in caplog.text


class FaultFlagEnv(FaultyEnv):
    """Has something that it calls `fault` in its infos, as models of machines do."""

    def __init__(self) -> None:
        super().__init__(length=3)

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"fault": 3}


@pytest.mark.slow_but_first
@MODES
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_fault_is_told_beside_infos_of_that_name(
    make: Make, mode: AutoresetMode, failed: int
) -> None:
    envs = make([FaultFlagEnv] * 3, num_actors=3, autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(2):
        assert act(envs, OK, OK, OK)[4]["fault"].tolist() == [3, 3, 3]
    actions = [OK] * 3
    actions[failed] = EXIT
    _, _, terminations, truncations, infos = act(envs, *actions)
    assert np.flatnonzero(truncations).tolist() == [failed]
    assert np.flatnonzero(~terminations).tolist() == [failed]
    told = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
    assert np.flatnonzero(told["_fault"]).tolist() == [failed]
    assert told["fault"]["cause"][failed] == "crash"


class ForkingEnv(CountingEnv):
    """Forks a helper in each step and each reset but the first, and says how it has ended."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__(length=5)
        self.end = end

    def ended(self) -> int:
        helper = os.fork()
        if not helper:
            self.end()
        return os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**given)
        return observation, {**info, "ended": self.ended()} if self.episode > 1 else info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"ended": self.ended()}


def raise_unheard() -> None:
    sys.stderr.close()
    raise KeyError("nobody hears of it")


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (partial(sys.exit, 7), 7),
        (sys.exit, 0),
        (partial(os.execvp, "no-such-simulator", ["no-such-simulator"]), 1),
        (raise_unheard, 1),
    ],
    ids=["exits", "is done", "raises", "raises unheard"],
)
def test_what_an_env_forks_is_no_second_actor_when_it_ends(
    make: Make, mode: AutoresetMode, end: Callable[[], object], status: int
) -> None:
    fns = [partial(ForkingEnv, end), partial(CountingEnv, length=5)] * 2
    alone = SyncVectorEnv([partial(CountingEnv, length=5)] * 4, autoreset_mode=mode)
    envs = make(fns, num_actors=2, autoreset_mode=mode, timeouts=Timeouts(step=20.0, reset=20.0))
    assert envs.reset(seed=1)[0].tolist() == alone.reset(seed=1)[0].tolist()
    for number in range(25):
        done = envs.step(np.full(4, number)), alone.step(np.full(4, number))
        for ours, theirs in zip(done[0][:4], done[1][:4], strict=True):
            assert ours.tolist() == theirs.tolist()
        infos = done[0][4]
        assert "fault" not in infos
        assert infos["ended"].tolist() == [status, 0, status, 0]
        if mode is AutoresetMode.DISABLED and number % 5 == 4:
            whole = {"reset_mask": np.ones(4, np.bool_)}
            ours, theirs = envs.reset(options=whole)[0], alone.reset(options=whole)[0]
            assert ours.tolist() == theirs.tolist()


# --- processes that end or hang ----------------------------------------------------------------


class HoardingEnv(CountingEnv):
    """A `CountingEnv` that on `RAISE` leaves its process no memory to tell of a new info."""

    def step(self, action: Any) -> Any:
        *row, info = super().step(action)
        if action == RAISE:
            self.hoard: list[bytearray] = []
            info = {"long": "x" * 2**22}  # more than is left, for the copy that is sent
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            size = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**23, most))
            with suppress(MemoryError):
                while True:
                    self.hoard.append(bytearray(2**19))
        return *row, info


@pytest.mark.slow_but_first
@MODES
def test_a_process_without_memory_for_its_replies_is_started_again(
    make: Make, mode: AutoresetMode
) -> None:
    fns = [partial(HoardingEnv, 10)] * 2 + [partial(CountingEnv, 10)] * 2
    envs = make(fns, num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    pids = envs.actor_pids()
    _, rewards, _, truncations, infos = act(envs, RAISE, 1, 1, 1)
    told = mode is AutoresetMode.SAME_STEP
    assert truncations.tolist() == [True, True, False, False]
    assert (rewards[2:] > 0.0).all()
    assert infos["_fault"].tolist() == [True, True, False, False]
    assert infos["fault"]["cause"][:2].tolist() == ["memory", "memory"]
    assert "has no memory left" in infos["fault"]["error"][0]
    for _ in range(3):
        observations, _, _, truncations, infos = act(envs, 1, 1, 1, 1)
        assert (truncations.any(), "fault" in infos) == (False, False)
    assert counts(observations) == [[1, 2 + told]] * 2 + [[1, 4]] * 2
    assert [old == new for old, new in zip(pids, envs.actor_pids(), strict=True)] == [False, True]


class GreedyEnv(CountingEnv):
    """A `CountingEnv` that on `RAISE` takes all memory that is left, until it is closed."""

    def step(self, action: Any) -> Any:
        if action == RAISE:
            self.hoard: list[bytearray] = []
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            size = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, most))
            while True:
                self.hoard.append(bytearray(2**20))
        return super().step(action)

    def close(self) -> None:
        self.hoard = []


@pytest.mark.slow_but_first
@MODES
def test_an_env_that_leaves_no_memory_for_a_thread_is_made_anew(
    make: Make, mode: AutoresetMode
) -> None:
    """What it holds is given back where it is closed."""
    fns = [partial(GreedyEnv, 10), *[partial(CountingEnv, 10)] * 3]
    envs = make(fns, num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    pids = envs.actor_pids()
    _, _, _, truncations, infos = act(envs, RAISE, 1, 1, 1)
    assert truncations.tolist() == [True, False, False, False]
    assert infos["_fault"].tolist() == [True, False, False, False]
    assert "MemoryError" in infos["fault"]["error"][0]
    for _ in range(3):
        observations, _, _, truncations, infos = act(envs, 1, 1, 1, 1)
        assert (truncations.any(), "fault" in infos) == (False, False)
    assert counts(observations)[1:] == [[1, 4]] * 3
    assert envs.actor_pids() == pids


@pytest.mark.parametrize(
    ("action", "words"),
    [(EXIT, "exit code 7"), (SEGFAULT, "SIGSEGV"), (KILL, "SIGKILL")],
)
def test_a_process_that_ends_takes_its_envs_only(make: Make, action: int, words: str) -> None:
    envs = make(faulty(4), num_actors=2)
    envs.reset(seed=0)
    pids = envs.actor_pids()
    _, _, _, truncations, infos = act(envs, 1, 1, action, 1)
    assert truncations.tolist() == [False, False, True, True]
    assert infos["fault"]["cause"].tolist() == [None, None, "crash", "crash"]
    assert words in infos["fault"]["error"][3]
    act(envs, 1, 1, 1, 1)
    assert counts(act(envs, 1, 1, 1, 1)[0]) == [[1, 3], [1, 3], [1, 1], [1, 1]]
    now = envs.actor_pids()
    assert (now[0] == pids[0], now[1] == pids[1]) == (True, False)


@pytest.mark.slow_but_first
@MODES
@pytest.mark.parametrize("action", [HANG, STOP])
def test_a_step_that_hangs_is_a_fault_after_its_deadline(
    make: Make, mode: AutoresetMode, action: int
) -> None:
    envs = make(faulty(4), num_actors=2, autoreset_mode=mode, timeouts=Timeouts(step=1.0))
    envs.reset(seed=0)
    for _ in range(2):
        pids = envs.actor_pids()
        _, _, _, truncations, infos = act(envs, 1, 1, action, 1)
        assert truncations.tolist() == [False, False, True, True]
        assert infos["fault"]["cause"].tolist() == [None, None, "timeout", "timeout"]
        envs.get_attr("length", [0])  # a round that has nothing to do with it
        if mode is not AutoresetMode.SAME_STEP:
            _, _, _, truncations, infos = act(envs, 1, 1, 1, 1)
            assert not truncations.any(), "told twice"
        assert counts(act(envs, 1, 1, 1, 1)[0])[2:] == [[1, 1], [1, 1]]
        assert not is_alive(pids[1])
    assert envs.statistics().faults == {"timeout": 4}


class UncloseableEnv(FaultyEnv):
    """Hangs in `close`, and tells if it is closed in another thread than made it."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        hang()


@pytest.mark.slow
def test_an_env_whose_close_hangs_is_made_anew_with_its_process(make: Make) -> None:
    envs = make([UncloseableEnv, FaultyEnv], num_actors=1, timeouts=Timeouts(close=0.2))
    envs.reset(seed=0)
    (pid,) = envs.actor_pids()
    _, _, _, truncations, infos = act(envs, RAISE, 1)
    assert truncations.tolist() == [True, True]
    assert "env 0: closing it took over 0.2 s" in infos["fault"]["error"][1]
    assert not is_alive(pid)
    assert counts(act(envs, 1, 1)[0]) == [[1, 0], [1, 0]]


def test_a_reset_or_constructor_that_hangs_is_a_fault(make: Make, tmp_path: Path) -> None:
    envs = make(
        [partial(FaultyEnv, tmp_path), CountingEnv],
        num_actors=2,
        autoreset_mode="SameStep",
        timeouts=Timeouts(reset=1.5, start=3.0),
    )
    plan(tmp_path, "reset", HANG)
    observations, infos = envs.reset(seed=0)
    assert infos["fault"]["cause"].tolist() == ["timeout", None]
    assert observations[:, 3].tolist() == [0, 1]
    plan(tmp_path, "init", HANG)
    observations, _, _, truncations, infos = act(envs, RAISE, 1)
    assert truncations.tolist() == [True, False]
    assert counts(observations) == [[1, 0], [1, 1]]
    assert envs.statistics().faults == {"timeout": 2, "error": 1}


# --- giving up ---------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@MODES
@pytest.mark.parametrize("where", ["step", "reset", "init"])
def test_an_env_that_fails_too_often_is_named_with_count_and_last_cause(
    make: Make, mode: AutoresetMode, where: str, tmp_path: Path
) -> None:
    given_up: list[Fault] = []
    envs = make(
        [CountingEnv, partial(FaultyEnv, tmp_path)],
        num_actors=1,
        autoreset_mode=mode,
        restart=RestartPolicy(max_restarts=2, window=1000.0, backoff=0.001),
        hooks=Hooks(on_give_up=given_up.append),
    )
    envs.reset(seed=0)
    if where != "step":
        plan(tmp_path, where, RAISE, times=9)
    with pytest.raises(RestartLimitError, match="env 1 failed again after 2 restarts") as caught:
        act_for_ever(envs, 1, RAISE)
    assert "raised on purpose" in str(caught.value)
    assert "Remote traceback" in str(caught.value)
    assert isinstance(caught.value.__cause__, EnvError)
    assert [fault.env_id for fault in given_up] == [1]
    for again in (lambda: act(envs, 1, 1), lambda: envs.reset(seed=0)):
        with pytest.raises(RestartLimitError, match="env 1 failed again after 2 restarts"):
            again()
    assert envs.get_attr("length", [0]) == (3,)
    assert envs.statistics().envs_given_up == 1


def test_a_policy_alone_means_restart_and_one_of_no_restarts_says_so(make: Make) -> None:
    never = RestartPolicy(max_restarts=0)
    envs = make(faulty(1), restart=never)
    envs.reset()
    with pytest.raises(RestartLimitError, match=r"after 0 restarts.*max_restarts=0"):
        act(envs, RAISE)


def test_an_actor_that_is_given_up_gives_its_envs_up(make: Make) -> None:
    given_up: list[int] = []
    envs = make(
        faulty(3),
        num_actors=3,
        restart=RestartPolicy(max_restarts=1, window=1000.0),
        hooks=Hooks(on_give_up=lambda fault: given_up.append(fault.env_id)),
    )
    envs.reset(seed=0)
    with pytest.raises(RestartLimitError, match=r"actor-2.*failed again after 1 restarts"):
        act_for_ever(envs, 1, 1, EXIT)
    with pytest.raises(RestartLimitError, match="actor-2"):
        act(envs, 1, 1, 1)
    assert given_up == [2]
    assert envs.statistics().envs_given_up == 1


# --- hooks, calls, interruptions ---------------------------------------------------------------


def test_hooks_are_told_in_order(make: Make, tmp_path: Path) -> None:
    events: list[tuple[Any, ...]] = []
    envs = make(
        [CountingEnv, partial(FaultyEnv, tmp_path)],
        num_actors=2,
        hooks=Hooks(
            on_fault=lambda fault: events.append(("fault", fault.env_id, fault.cause.value)),
            on_restart=lambda env_id, life: events.append(("restart", env_id, life)),
        ),
    )
    envs.reset(seed=0)
    act(envs, 1, RAISE)
    assert events == [("fault", 1, "error"), ("restart", 1, 1)]
    act(envs, 1, 1)
    plan(tmp_path, "init", RAISE)
    act(envs, 1, RAISE)
    assert events[2:] == [("fault", 1, "error"), ("fault", 1, "error"), ("restart", 1, 3)]
    act(envs, 1, 1)
    act(envs, 1, EXIT)
    act(envs, 1, 1)
    assert events[5:] == [("fault", 1, "crash"), ("restart", 1, 4)]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_what_a_hook_raises_takes_no_result_away(make: Make, error: BaseException) -> None:
    def fail(_: Fault) -> None:
        raise error

    envs = make(faulty(2), num_actors=1, hooks=Hooks(on_fault=fail))
    envs.reset(seed=0)
    for fetch in (True, False):
        with pytest.raises(type(error)):
            act(envs, 1, RAISE)
        if fetch:
            _, rewards, _, truncations, infos = envs.step_wait()
            assert rewards[0] > 0
        else:  # the next step says so
            _, _, _, truncations, infos = act(envs, 1, 1)
        assert truncations.tolist() == [False, True]
        assert infos["fault"]["cause"][1] == "error"
        _, _, _, truncations, infos = act(envs, 1, 1)
        assert "fault" not in infos


def test_after_a_reset_that_a_hook_broke_off_a_step_is_one(make: Make, tmp_path: Path) -> None:
    def fail(_: Fault) -> None:
        raise ValueError("mine")

    envs = make(faulty(2, tmp_path), num_actors=1, hooks=Hooks(on_fault=fail))
    plan(tmp_path, "reset", RAISE)
    with pytest.raises(ValueError, match="mine"):
        envs.reset()
    observations, rewards, _, truncations, infos = act(envs, 1, 1)
    assert infos["fault"]["cause"].tolist() == ["error", None]
    assert counts(observations) == [[1, 0], [1, 1]]
    assert rewards[0] == 0.0
    assert not truncations.any()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_ctrl_c_while_an_env_is_made_anew_loses_nothing(
    make: Make, mode: str, tmp_path: Path
) -> None:
    makers = [partial(CountingEnv, 100), partial(FaultyEnv, tmp_path)]
    envs = make(makers, num_actors=1, autoreset_mode=mode)
    envs.reset(seed=0)
    for steps in (1, 3) if mode == "SameStep" else (1, 4):
        with held(tmp_path, "init"):
            timer = _interrupt_when(lambda: not (tmp_path / f"init-{OK}-0").exists())
            with pytest.raises(KeyboardInterrupt):
                act(envs, 1, RAISE)
            timer.join()
        with pytest.raises(AlreadyPendingCallError, match="`step_wait` takes it up"):
            act(envs, 1, 1)  # it would drop the other's row
        observations, _, _, truncations, infos = envs.step_wait()
        assert observations[0, 1] == steps
        assert truncations.tolist() == [False, True]
        assert infos["fault"]["cause"].tolist() == [None, "error"]
        if mode == "NextStep":
            assert act(envs, 1, 1)[0][1, :2].tolist() == [1, 0]
        _, _, _, truncations, infos = act(envs, 1, 1)
        assert not truncations[1]
        assert "fault" not in infos


def test_a_call_that_ctrl_c_broke_off_while_an_actor_is_started_again_was_asked_of_nobody(
    make: Make, tmp_path: Path
) -> None:
    def count(env: CountingEnv) -> int:
        env.actions.append(np.int64(0))
        return len(env.actions)

    envs = make([CountingEnv, partial(FaultyEnv, tmp_path)], num_actors=2)
    envs.reset(seed=0)
    assert envs.exec_func(count) == [1, 1]
    with held(tmp_path, "init"):
        act(envs, 1, EXIT)
        for _ in range(2):
            timer = _interrupt_when(lambda: not (tmp_path / f"init-{OK}-0").exists())
            with pytest.raises(KeyboardInterrupt):
                envs.exec_func(count)
            timer.join()
            with pytest.raises(NoAsyncCallError):
                envs.exec_func_fetch()
    assert envs.exec_func(count) == [3, 1]  # with the step


def _interrupt_when(condition: Callable[[], bool]) -> Any:
    def wait() -> None:
        while not condition():
            pass_time(0.01)
        pass_time(0.5)  # the caller may have been about to ask only
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_step_wait_keeps_its_time_out_while_an_env_is_made_anew(make: Make, tmp_path: Path) -> None:
    envs = make([CountingEnv, partial(FaultyEnv, tmp_path)], num_actors=2)
    envs.reset(seed=0)
    with held(tmp_path, "init"):
        envs.step_async(np.array([1, RAISE]))
        with pytest.raises(multiprocessing.TimeoutError, match=r"Not answered: actor-1"):
            envs.step_wait(timeout=1.2)
    _, _, _, truncations, infos = act(envs, 1, 1)
    assert truncations.tolist() == [False, True]
    assert infos["fault"]["cause"].tolist() == [None, "error"]


def test_a_call_whose_actor_dies_says_so_and_the_next_step_tells_the_fault(make: Make) -> None:
    envs = make(faulty(4), num_actors=2)
    envs.reset(seed=0)
    with pytest.raises(ActorLostError, match="its envs are started again"):
        envs.exec_func(lambda env: os._exit(1), indices=[2])
    assert envs.get_attr("length") == (10**6,) * 4
    _, _, _, truncations, infos = act(envs, 1, 1, 1, 1)
    assert truncations.tolist() == [False, False, True, True]
    assert infos["fault"]["cause"].tolist() == [None, None, "crash", "crash"]
    act(envs, 1, 1, 1, 1)
    assert counts(act(envs, 1, 1, 1, 1)[0])[2:] == [[1, 1]] * 2


def test_an_error_of_a_call_is_raised_and_nothing_is_made_anew(make: Make) -> None:
    envs = make(faulty(2), num_actors=1)
    envs.reset(seed=0)
    with pytest.raises(ZeroDivisionError):
        envs.exec_func(lambda env: 1 / 0, indices=[1])
    act(envs, 1, 1)
    assert envs.statistics().faults == {}


def test_what_was_set_in_an_env_is_lost_with_it(make: Make) -> None:
    envs = make(faulty(2), num_actors=1)
    envs.reset(seed=0)
    envs.set_attr("gravity", 9.8)
    act(envs, 1, RAISE)
    assert envs.exec_func(lambda env: hasattr(env, "gravity")) == [True, False]


# --- kinds of envs and transport ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_env_in_an_actor_is_made_anew_whole(make: Make, mode: str) -> None:
    vector = partial(SyncVectorEnv, faulty(2), autoreset_mode=mode)
    envs = make([CountingEnv, vector], num_actors=1, autoreset_mode=mode)
    envs.reset(seed=0)
    pids = envs.actor_pids()
    _, _, _, truncations, infos = act(envs, 1, 1, RAISE)
    assert truncations.tolist() == [False, True, True]
    assert infos["fault"]["cause"].tolist() == [None, "error", "error"]
    if mode != "SameStep":
        act(envs, 1, 1, 1)
    observations, *_ = act(envs, 1, 1, 1)
    assert counts(observations)[1:] == [[1, 1], [1, 1]]
    assert observations[1:, 3].tolist() == [restart_seed(i, i, 1) for i in (1, 2)]
    assert envs.actor_pids() == pids
    assert envs.statistics().env_restarts == 1


class RaggedEnv(gymnasium.Env[Any, Any]):
    """Its observation is a text: its number of steps."""

    observation_space = spaces.Text(8, min_length=0)
    action_space = spaces.Discrete(100)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if (self.folder / "fail").exists():
            raise ValueError("no reset")
        self.count = 0
        return "0", {}

    def step(self, action: Any) -> Any:
        if action == RAISE:
            raise ValueError("boom")
        if action == EXIT:
            os._exit(1)
        self.count += 1
        return str(self.count), 1.0, False, False, {}


@pytest.mark.slow_but_first
@MODES
def test_observations_without_a_fixed_size(make: Make, mode: AutoresetMode, tmp_path: Path) -> None:
    envs = make([partial(RaggedEnv, tmp_path)] * 3, num_actors=2, autoreset_mode=mode)
    envs.reset(seed=0)
    same = mode is AutoresetMode.SAME_STEP
    assert act(envs, 1, 1, 1)[0] == ("1", "1", "1")
    assert act(envs, 1, 1, RAISE)[0] == ("2", "2", "0" if same else "1")
    if not same:
        assert act(envs, 1, 1, 1)[0] == ("3", "3", "0")
    assert act(envs, 1, 1, EXIT)[0][0] in ("3", "4")
    (tmp_path / "fail").touch()
    if not same:  # the new life's reset fails: its observation is still the old one, never None
        observations, _, _, truncations, _ = act(envs, 1, 1, 1)
        assert truncations.tolist() == [False, True, True]
        assert None not in observations
    (tmp_path / "fail").unlink()
    assert act(envs, 1, 1, 1)[0][2] in ("0", "1")


@MODES
def test_views_are_views_after_a_fault_too(make: Make, mode: AutoresetMode) -> None:
    envs = make(faulty(2), num_actors=1, autoreset_mode=mode, copy=False)
    first, _ = envs.reset(seed=0)
    for action in (RAISE, EXIT):
        observations, *_ = act(envs, 1, action)
        assert observations is first
        act(envs, 1, 1)
        act(envs, 1, 1)
        assert first[1, 1] in (1, 2)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("mode", "shared_memory"), [("NextStep", True), ("SameStep", False), ("Disabled", True)]
)
def test_the_same_faults_give_the_same_trajectories(
    make: Make, mode: str, shared_memory: bool
) -> None:
    def run() -> list[bytes]:
        random = np.random.default_rng(5)
        envs = make(faulty(4), num_actors=2, autoreset_mode=mode, shared_memory=shared_memory)
        seen = [envs.reset(seed=3)[0].tobytes()]
        for turn in range(30):
            actions = random.choice([OK, OK, OK, OK, OK, RAISE, EXIT], 4)
            *arrays, infos = envs.step(actions)
            seen += [array.tobytes() for array in arrays]
            seen.append(repr(infos.get("_fault")).encode())
            if turn % 10 == 9:
                seen.append(
                    envs.reset(options={"reset_mask": np.array([1, 0, 1, 0], bool)})[0].tobytes()
                )
        return seen

    assert run() == run()
