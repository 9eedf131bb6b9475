"""`ActorPool` with restart: what a fault of one env costs, and what its caller is told."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.env_results import Batch
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import Fault
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import Hooks, Timeouts
from envbus.runner.workers.worker import ActorState
from tests.integration.faulty import (
    ASK,
    EXIT,
    HANG,
    KILL,
    NO_MEMORY,
    RAISE,
    RESTART,
    SEGFAULT,
    STOP,
    SYS_EXIT,
    FaultyEnv,
    faulty,
    held,
    plan,
)
from tests.integration.group_children import is_alive
from tests.runner.pool_envs import (
    PATIENCE,
    killed_at_the_end,
    receive_all,
    receive_for_ever,
    receive_until_back,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
Make = Callable[..., ActorPool]


@pytest.fixture
def make() -> Iterator[Make]:
    yield from killed_at_the_end(ActorPool, **RESTART)


def act(pool: ActorPool, *actions: int) -> list[Fault]:
    """Send an action to each env, and receive until each has answered; return the faults."""
    pool.send(np.array(actions))
    return collect(pool)[1]


def collect(pool: ActorPool) -> tuple[dict[int, Any], list[Fault]]:
    """Receive until each env is ready; return the last row of each, and the faults."""
    rows: dict[int, Any] = {}
    faults: list[Fault] = []
    while len(rows) < pool.num_envs:
        batch = pool.recv(timeout=PATIENCE)
        assert not batch.late
        faults += batch.faults
        for row, env_id in enumerate(batch.env_ids.tolist()):
            assert env_id not in rows, "two results for one action"
            rows[env_id] = (batch.observations[row], batch.rewards[row], batch.incarnations[row])
    return rows, faults


# --- one env raises ---------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(
    ("shared_memory", "action"), [(True, RAISE), (False, SYS_EXIT), (True, NO_MEMORY)]
)
def test_an_env_that_raises_is_made_anew_alone(
    make: Make, mode: AutoresetMode, shared_memory: bool, action: int
) -> None:
    pool = make(faulty(4), num_actors=2, autoreset_mode=mode, shared_memory=shared_memory)
    pool.reset(seed=10)
    receive_all(pool, range(4))
    pids = pool.actor_pids()
    for life in (1, 2):
        pool.send(np.array([1, action, 1, 1]))
        rows, (fault,) = collect(pool)
        assert (fault.env_id, fault.cause.value, fault.restarts) == (1, "error", life - 1)
        assert fault.error is not None
        assert fault.error.phase == "step"
        assert "Remote traceback" in str(fault.error)
        assert rows[1][0].tolist() == [1, 0, 0, restart_seed(11, 1, life)]
        assert [rows[1][1], rows[1][2]] == [0.0, life]
        assert [rows[i][0][1] for i in (0, 2, 3)] == [life] * 3
        assert [rows[i][2] for i in (0, 2, 3)] == [0] * 3
    assert pool.actor_pids() == pids
    told = pool.statistics()
    assert (told.env_restarts, told.restarts, told.faults) == (2, 0, {"error": 2})


def test_results_beside_a_fault_are_delivered(make: Make) -> None:
    pool = make(faulty(4), num_actors=1)
    pool.reset(seed=0)
    receive_all(pool, range(4))
    pool.send(np.array([RAISE, 1, RAISE, ASK]))
    rows, faults = collect(pool)
    assert sorted(fault.env_id for fault in faults) == [0, 2, 3]
    assert {fault.env_id: fault.cause.value for fault in faults}[3] == "request"
    assert [int(rows[i][0][1]) for i in range(4)] == [0, 1, 0, 0]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_env_that_raises_in_its_automatic_reset(make: Make, mode: str, tmp_path: Path) -> None:
    pool = make([partial(FaultyEnv, tmp_path, 1)], autoreset_mode=mode)
    pool.reset(seed=0)
    receive_all(pool, [0])
    plan(tmp_path, "reset", RAISE)
    if mode == "NextStep":
        assert act(pool, 1) == []
    (fault,) = act(pool, 1)
    assert fault.error is not None
    assert fault.error.phase == "autoreset"


def test_resets_and_constructors_that_raise_are_tried_again(make: Make, tmp_path: Path) -> None:
    pool = make([partial(FaultyEnv, tmp_path), CountingEnv], num_actors=1)
    plan(tmp_path, "reset", RAISE, times=2)
    pool.reset(seed=3)
    rows, faults = collect(pool)
    assert [fault.restarts for fault in faults] == [0, 1]
    assert rows[0][0].tolist() == [1, 0, 0, restart_seed(3, 0, 2)]
    plan(tmp_path, "init", RAISE, times=2)
    faults = act(pool, RAISE, 1)
    assert [fault.error.phase for fault in faults if fault.error] == ["step", "build", "build"]


def test_a_vector_env_in_an_actor_is_made_anew_whole(make: Make) -> None:
    pool = make([CountingEnv, partial(SyncVectorEnv, faulty(2))], num_actors=1)
    pool.reset(seed=0)
    receive_all(pool, range(3))
    pool.send(np.array([1, 1, RAISE]))
    rows, faults = collect(pool)
    assert [fault.env_id for fault in faults] == [1, 2]
    assert [rows[i][0].tolist() for i in (1, 2)] == [
        [1, 0, 0, restart_seed(i, i, 1)] for i in (1, 2)
    ]
    assert rows[0][0][1] == 1
    assert pool.statistics().env_restarts == 1


# --- processes that end or hang ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "cause", "words"),
    [
        (EXIT, "crash", "exit code 7"),
        (SEGFAULT, "crash", "SIGSEGV"),
        (KILL, "crash", "SIGKILL"),
        (HANG, "timeout", "did not answer"),
        (STOP, "timeout", "did not answer"),
    ],
)
def test_a_process_that_ends_or_hangs_takes_its_envs_only(
    make: Make, action: int, cause: str, words: str
) -> None:
    pool = make(faulty(4), num_actors=2, timeouts=Timeouts(step=1.0 if cause == "timeout" else 60))
    pool.reset(seed=0)
    receive_all(pool, range(4))
    pids = pool.actor_pids()
    pool.send(np.array([1, 1, action, 1]))
    rows, faults = collect(pool)
    assert sorted((fault.env_id, fault.cause.value) for fault in faults) == [(2, cause), (3, cause)]
    assert words in faults[0].message
    assert [int(rows[i][0][1]) for i in range(4)] == [1, 1, 0, 0]
    assert rows[2][0][3] == restart_seed(2, 2, 1)
    assert act(pool, 1, 1, 1, 1) == []
    assert not is_alive(pids[1])
    assert pool.actor_pids()[0] == pids[0]


def test_a_reset_or_constructor_that_hangs_is_a_fault(make: Make, tmp_path: Path) -> None:
    pool = make(
        [partial(FaultyEnv, tmp_path), CountingEnv],
        num_actors=2,
        timeouts=Timeouts(reset=1.3, start=3.0),
    )
    plan(tmp_path, "reset", HANG)
    pool.reset(seed=0)
    assert [fault.cause.value for fault in collect(pool)[1]] == ["timeout"]
    plan(tmp_path, "init", HANG)
    faults = act(pool, RAISE, 1)
    assert [fault.cause.value for fault in faults] == ["error", "timeout"]


def test_a_process_that_is_stopped_as_it_is_started_again_is_replaced(make: Make) -> None:
    pool = make([CountingEnv], num_actors=1, timeouts=Timeouts(start=2.0, reset=2.0))
    pool.reset(seed=0)
    receive_all(pool, range(1))
    dead = pool.actor_pids()
    os.kill(dead[0], signal.SIGKILL)
    pool.send(np.array([1]))
    while pool.actor_pids() == dead:
        pool.recv(timeout=0.01)
    os.kill(pool.actor_pids()[0], signal.SIGSTOP)
    rows, _ = collect(pool)
    assert rows[0][0][1] == 0
    assert pool.statistics().restarts >= 2


class Recipe:
    """Makes an env, and cannot be sent to an actor once it is lost."""

    def __init__(self) -> None:
        self.is_lost = False

    def __call__(self) -> CountingEnv:
        return CountingEnv()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_lost:
            raise RuntimeError("the recipe is lost")
        return Recipe, ()


def test_a_factory_that_cannot_be_sent_to_a_next_life_is_a_failure_of_that_life(make: Make) -> None:
    recipe = Recipe()
    pool = make([recipe, CountingEnv], num_actors=2, restart=RestartPolicy.always(backoff=0.01))
    pool.reset(seed=0)
    receive_all(pool, range(2))
    recipe.is_lost = True
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    pool.send(np.array([1, 1]))
    while pool.statistics().restarts < 3:
        assert 0 not in pool.recv(timeout=0.01).env_ids
    recipe.is_lost = False
    assert receive_until_back(pool, 0).observations[-1][1] == 0


def test_one_that_can_never_be_sent_again_is_given_up_and_said_why(make: Make) -> None:
    recipe = Recipe()
    once = RestartPolicy(max_restarts=1, backoff=0.01)
    pool = make([recipe, CountingEnv], num_actors=2, restart=once, all_or_nothing=True)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    recipe.is_lost = True
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    pool.send(np.array([1, 1]))
    with pytest.raises(RestartLimitError, match=r"env 0 cannot be sent.*the recipe is lost"):
        receive_for_ever(pool)


@pytest.mark.parametrize("verb", ["send", "reset"])
def test_what_is_sent_to_an_env_whose_episode_begins_by_itself_is_dropped(
    make: Make, verb: str, tmp_path: Path
) -> None:
    pool = make([partial(FaultyEnv, tmp_path), CountingEnv], num_actors=2)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    os.kill(pool.actor_pids()[0], signal.SIGKILL)
    with held(tmp_path, "reset"):
        pool.send(np.array([1, 1]))
        seen: list[int] = []
        while 1 not in seen or any(tmp_path.glob("reset-*[0-9]")):  # until its reset has begun
            seen += pool.recv(timeout=0.01).env_ids.tolist()
        assert 0 not in seen
        if verb == "send":
            pool.send(np.array([1, 1]))
        else:
            pool.reset(env_ids=[0, 1])
        while seen.count(1) < 2:
            seen += pool.recv(timeout=PATIENCE).env_ids.tolist()
        pool.send(np.array([1, 1]))
        with pytest.raises(AlreadyPendingCallError, match=r"envs \[1\]"):
            pool.send(np.array([1, 1]))
    batch = pool.recv(min_envs=2, timeout=PATIENCE)
    first = batch.observations[batch.env_ids.tolist().index(0)]
    assert first[1] == 0
    assert act(pool, 1, 1) == []


# --- the others go on -------------------------------------------------------------------------


@pytest.mark.parametrize("action", [RAISE, EXIT])
def test_a_constructor_that_takes_its_time_holds_nobody_up(
    make: Make, action: int, tmp_path: Path
) -> None:
    pool = make([partial(FaultyEnv, tmp_path), CountingEnv, CountingEnv], num_actors=3)
    pool.reset(seed=0)
    receive_all(pool, range(3))
    with held(tmp_path, "init"):
        pool.send(np.array([action, 1, 1]))
        receive_all(pool, [1, 2])
        for _ in range(100):
            pool.send(np.ones(2), [1, 2])
            receive_all(pool, [1, 2])
        while not (batch := pool.recv(timeout=0.01)).late:
            assert batch.faults  # the end of a process may be told later than all that
        assert batch.late == [0]
    receive_until_back(pool, 0)


def receive_until_made(pool: ActorPool, folder: Path) -> None:
    """Receive until a constructor that is `held` has begun."""
    while any(folder.glob("init-*[0-9]")):
        pool.recv(timeout=0.01)


def test_a_reset_of_all_while_an_env_is_made_anew(make: Make, tmp_path: Path) -> None:
    pool = make([partial(FaultyEnv, tmp_path), CountingEnv], num_actors=2)
    pool.reset(seed=0)
    receive_all(pool, range(2))
    for number in range(5):
        with held(tmp_path, "init"):
            pool.send(np.array([RAISE, 1]))
            receive_until_made(pool, tmp_path)
            pool.reset(seed=10 * number)
        rows, _ = collect(pool)
        assert rows[0][0][1:].tolist() == [0, 0, 10 * number]
        assert rows[1][0][1:].tolist() == [0, 0, 10 * number + 1]
    with held(tmp_path, "init", RAISE):
        pool.send(np.array([RAISE, 1]))
        receive_until_made(pool, tmp_path)
        pool.reset(seed=0)
    rows, faults = collect(pool)
    assert rows[0][0][:3].tolist() == [1, 0, 0]
    assert {fault.env_id for fault in faults} == {0}
    assert act(pool, 1, 1) == []


# --- giving up --------------------------------------------------------------------------------


def limited(**kwargs: Any) -> dict[str, Any]:
    return {"restart": RestartPolicy(max_restarts=2, window=1000.0, backoff=0.01), **kwargs}


def fail_for_ever(pool: ActorPool, env_id: int) -> None:
    while True:
        pool.send(np.array([RAISE]), [env_id])
        receive_until_back(pool, env_id)


@pytest.mark.parametrize("where", ["step", "reset", "init"])
def test_the_rest_goes_on_without_an_env_that_is_given_up(
    make: Make, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given_up: list[int] = []
    hooks = Hooks(on_give_up=lambda fault: given_up.append(fault.env_id))
    pool = make([CountingEnv, partial(FaultyEnv, tmp_path)], num_actors=1, **limited(hooks=hooks))
    pool.reset(seed=0)
    receive_all(pool, range(2))
    if where != "step":
        plan(tmp_path, where, RAISE, times=9)
    faults: list[Fault] = []
    pool.send(np.array([RAISE]), [1])
    while not any(fault.given_up for fault in faults):
        batch = pool.recv(timeout=PATIENCE)
        faults += batch.faults
        if 1 in batch.env_ids:
            pool.send(np.array([RAISE]), [1])
    assert [fault.restarts for fault in faults] == [0, 1, 2]
    assert "failed again after 2 restarts" in faults[-1].message
    assert "raised on purpose" in faults[-1].message
    assert given_up == [1]
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    with pytest.raises(RestartLimitError, match=r"env 1 .*failed in"):
        pool.send(np.array([1]), [1])
    for _ in range(3):
        pool.send(np.array([1]))
        assert pool.recv(timeout=PATIENCE).env_ids.tolist() == [0]
    pool.reset(seed=4)
    assert pool.recv(timeout=PATIENCE).env_ids.tolist() == [0]
    assert pool.statistics().envs_given_up == 1


def test_all_or_nothing_raises_when_an_env_is_given_up(make: Make) -> None:
    pool = make(faulty(2), num_actors=1, **limited(all_or_nothing=True))
    pool.reset(seed=0)
    receive_all(pool, range(2))
    with pytest.raises(RestartLimitError, match=r"after 2 restarts.*raised on purpose"):
        fail_for_ever(pool, 1)
    with pytest.raises(RestartLimitError):
        pool.send(np.ones(2))
    with pytest.raises(RestartLimitError):
        pool.reset()


def test_when_no_env_is_left_each_call_says_so(make: Make) -> None:
    pool = make(faulty(1), **limited())
    pool.reset(seed=0)
    receive_all(pool, [0])
    with pytest.raises(RestartLimitError, match="after 2 restarts"):
        fail_for_ever(pool, 0)
    for _ in range(3):
        with pytest.raises(RestartLimitError, match="after 2 restarts"):
            receive_for_ever(pool)
    with pytest.raises(RestartLimitError):
        pool.send(np.ones(1))


# --- hooks, log, repetition ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_hook_raises_takes_no_result_away(make: Make, error: BaseException) -> None:
    events: list[Any] = []

    def fail(fault: Fault) -> None:
        events.append(fault.env_id)
        raise error

    pool = make(
        faulty(2),
        num_actors=1,
        hooks=Hooks(on_fault=fail, on_restart=lambda *what: events.append(what)),
    )
    pool.reset(seed=0)
    receive_all(pool, range(2))
    pool.send(np.array([1, RAISE]))
    with pytest.raises(type(error)):
        pool.recv(timeout=PATIENCE)
    rows, (fault,) = collect(pool)
    assert fault.env_id == 1
    assert rows[0][0][1] == 1
    assert events == [1, (1, 1)]


def test_a_request_for_a_restart_is_logged_quietly(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envbus"):
        pool = make(faulty(1))
        pool.reset()
        receive_all(pool, [0])
        (fault,) = act(pool, ASK)
    assert fault.cause.value == "request"
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []
    assert "the simulator wants it" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "shared_memory"), [("NextStep", True), ("SameStep", False)])
def test_the_same_faults_give_the_same_trajectories(
    make: Make, mode: str, shared_memory: bool
) -> None:
    def run() -> list[list[bytes]]:
        random = [np.random.default_rng([5, env_id]) for env_id in range(4)]
        pool = make(faulty(4), num_actors=4, autoreset_mode=mode, shared_memory=shared_memory)
        seen: list[list[bytes]] = [[] for _ in range(4)]
        pool.reset(seed=3)
        left = set(range(4))
        while left:
            batch: Batch = pool.recv(timeout=PATIENCE)
            for fault in batch.faults:
                seen[fault.env_id].append(f"{fault.cause} {fault.restarts}".encode())
            for row, env_id in enumerate(batch.env_ids.tolist()):
                arrays = batch.observations, batch.rewards, batch.truncations, batch.incarnations
                seen[env_id] += [array[row].tobytes() for array in arrays]
                if len(seen[env_id]) < 150:
                    action = random[env_id].choice([1, 1, 1, 1, 1, RAISE, EXIT])
                    pool.send(np.array([action]), [env_id])
                else:
                    left.discard(env_id)
        return seen

    assert run() == run()


def test_a_reset_after_a_fault_begins_episodes_of_which_nothing_was_cut_off() -> None:
    policy = RestartPolicy(max_restarts=5, backoff=0.01)
    with ActorPool(
        [partial(CountingEnv, 100)] * 2,
        num_actors=2,
        autoreset_mode=AutoresetMode.SAME_STEP,
        restart=policy,
    ) as pool:
        pool.reset(seed=1)
        pool.recv(2)
        pool.send(np.zeros(2, np.int64), np.arange(2))
        pool.recv(2)
        victim = pool.actor_pids()[1]
        os.kill(victim, signal.SIGKILL)
        pool.send(np.zeros(1, np.int64), np.array([0]))
        faults = []
        while not faults:  # told with the row of the other env
            faults = pool.recv(1, max_envs=1).faults
            if not faults:
                pool.send(np.zeros(1, np.int64), np.array([0]))
        assert [fault.env_id for fault in faults] == [1]
        pool.reset(seed=2)
        batch = pool.recv(2)
        assert not batch.truncations.any()
        assert "final_obs" not in batch.infos


class _SlowAgain(CountingEnv):
    """The second one is not made before `go` is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1000)
        if (folder / "made").exists():
            wait_until((folder / "go").exists, "go")
        (folder / "made").touch()


def test_an_actor_that_is_coming_up_again_is_not_asked_for_what_its_last_life_was(
    tmp_path: Path,
) -> None:
    """Its end may have been seen, and its next process have said hello, before it was told."""
    with ActorPool([partial(_SlowAgain, tmp_path)], num_actors=1, restart=True) as pool:
        pool.reset(0)
        pool.recv(timeout=PATIENCE)
        fleet: Any = pool._fleet
        os.kill(pool.actor_pids()[0], signal.SIGKILL)

        def is_building() -> bool:
            fleet.poll(0.05)  # what it returns is not taken, and comes again
            return fleet.actors[0].state is ActorState.BUILDING

        wait_until(is_building, "the next process making its env")
        pool.send([0])
        (tmp_path / "go").touch()
        batches = [pool.recv(timeout=PATIENCE)]
        while not len(batches[-1].env_ids):
            batches.append(pool.recv(timeout=PATIENCE))
        assert [fault.env_id for batch in batches for fault in batch.faults] == [0]
        assert batches[-1].incarnations.tolist() == [1]
        assert batches[-1].rewards.tolist() == [0]
