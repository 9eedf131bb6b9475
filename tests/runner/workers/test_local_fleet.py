from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.bus.errors import ConfigError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.errors import EnvError, env_errors
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.workers.actions import STEP_ALL
from envbus.runner.workers.recycling import RecycleAfter
from tests.envs import FailingEnv, all_spaces
from tests.runner.pool_envs import PATIENCE, EchoEnv, PidEnv, receive_all
from tests.runner.sampling_scenes import counting

Make = Callable[..., ActorPool]


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[ActorPool] = []

    def _make(*args: Any, **kwargs: Any) -> ActorPool:
        pools.append(ActorPool(*args, num_actors=0, **kwargs))
        return pools[-1]

    yield _make
    for pool in pools:
        pool.close()


def test_envs_are_in_this_process_and_no_other_is_started(make: Make) -> None:
    pool = make([PidEnv] * 3)
    pool.reset()
    pool.recv(3)
    pool.send(np.zeros(3, np.int64))
    assert pool.recv(3).infos["pid"].tolist() == [os.getpid()] * 3
    assert pool.actor_pids() == []
    assert pool.statistics().actors == 0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "frames"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_envs_go_the_way_of_those_in_actors(
    make: Make, mode: AutoresetMode, shared_memory: bool
) -> None:
    sources = counting(3, length=4)
    ways = []
    with ActorPool(sources, num_actors=2, autoreset_mode=mode) as other:
        for pool in (other, make(sources, autoreset_mode=mode, shared_memory=shared_memory)):
            pool.reset(seed=5)
            way = [receive_all(pool, range(3))]
            for step in range(9):
                if mode is AutoresetMode.DISABLED and step in (4, 8):
                    pool.reset(env_ids=range(3))
                else:
                    pool.send(np.array([10, 20, 30]) + step)
                way.append(receive_all(pool, range(3)))
            ways.append(way)
    assert data_equivalence(ways[0], ways[1])


@pytest.mark.parametrize("name", sorted(all_spaces()))
def test_actions_and_observations_of_every_space(make: Make, name: str) -> None:
    space = all_spaces()[name]
    reference = SyncVectorEnv([partial(EchoEnv, space)] * 2)
    pool = make([partial(EchoEnv, space)] * 2)
    pool.reset(seed=0)
    pool.recv(2)
    reference.reset(seed=0)
    reference.action_space.seed(4)
    for _ in range(2):
        actions = reference.action_space.sample()
        pool.send(actions)
        batch = pool.recv(2)
        expected, _, _, _, infos = reference.step(actions)
        assert batch.infos["type"].tolist() == infos["type"].tolist()
        assert data_equivalence(
            list(iterate(reference.observation_space, expected)),
            list(iterate(reference.observation_space, batch.observations)),
        )
    reference.close()


def test_a_vector_env_is_stepped_as_a_whole(make: Make) -> None:
    pool = make([partial(gymnasium.make_vec, "CartPole-v1", num_envs=2), "CartPole-v1"])
    assert pool.num_envs == 3
    pool.reset(seed=0)
    receive_all(pool, range(3))
    with pytest.raises(ValueError, match="one vector env"):
        pool.send([0], [1])
    pool.send([1, 1], [0, 1])
    assert receive_all(pool, [0, 1])[1]["reward"] == 1.0


def test_infos_and_batches_are_the_callers_own(make: Make) -> None:
    pool = make([InfoEnv] * 2)
    pool.reset(seed=0)
    first = pool.recv(2)
    kept = first.observations.copy()
    pool.send(np.zeros(2, np.int64))
    pool.recv(2)
    assert np.array_equal(first.observations, kept)


class _OptionsEnv(CountingEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, _ = super().reset(seed=seed)
        assert options is not None
        return observation, {"goal": options["goal"].copy()}


def test_options_are_those_that_stood_there_when_a_reset_was_asked_for(make: Make) -> None:
    pool, goal = make([_OptionsEnv]), np.zeros(1)
    pool.reset(options={"goal": goal})
    goal[:] = 1.0
    assert pool.recv().infos["goal"].tolist() == [[0.0]]


def test_an_env_that_raises_is_told_of_and_the_others_are_kept(make: Make) -> None:
    pool = make([partial(FailingEnv, error=KeyError("k")), CountingEnv])
    pool.reset()
    receive_all(pool, range(2))
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(KeyError) as caught:
        pool.recv()
    (error,) = env_errors(caught.value)
    assert isinstance(error, EnvError)
    assert (error.env_id, error.actor) == (0, "this process")
    assert pool.recv().env_ids.tolist() == [1]


def test_with_restart_an_env_that_raises_is_made_anew(make: Make) -> None:
    pool = make(
        [FailingEnv, CountingEnv],
        restart=RestartPolicy(backoff=0.01),
    )
    pool.reset(seed=0)
    receive_all(pool, range(2))
    pool.send(np.zeros(2, np.int64))
    faults, again = [], []
    while not again:
        batch = pool.recv(timeout=PATIENCE)
        faults += batch.faults
        again = [i for i in batch.incarnations.tolist() if i]
    assert [fault.env_id for fault in faults] == [0]
    assert pool.statistics().env_restarts == 1


def test_a_constructor_that_raises_is_named(make: Make) -> None:
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        make([CountingEnv, partial(FailingEnv, "init")])
    assert "env 1 (this process" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "setting",
    [
        {"memory_limit_mb": 100.0},
        {"recycle_after": RecycleAfter(steps=5)},
        {"context": "spawn"},
        {"preload": ["json"]},
        {"remote_actors": 1, "bind": "tcp://127.0.0.1:*"},
    ],
    ids=lambda setting: min(setting),
)
def test_what_is_about_actors_is_refused(make: Make, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_actors=0"):
        make(counting(1), **setting)


def test_a_descriptor_tells_that_something_is_to_be_done(make: Make) -> None:
    pool = make(counting(2), autoreset_mode="Disabled")
    fd = pool.fileno()

    def is_readable() -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    pool.recv(2) if is_readable() else None
    assert not is_readable()
    pool.reset()
    assert is_readable()
    pool.recv(2)
    assert not is_readable()


def test_a_runner_samples_the_same_as_from_actors(make: Make) -> None:
    columns = []
    with ActorPool(["CartPole-v1"] * 4, num_actors=2) as other:
        for pool in (other, make(["CartPole-v1"] * 4)):
            policy = MlpPolicy(pool.single_observation_space, pool.single_action_space, seed=3)
            runner = EnvRunner(pool, policy, RunnerConfig(rollout_fragment_length=50, seed=1))
            # In columns each batch of rows draws its random numbers; greedy actions need none.
            columns.append(runner.sample(explore=False).single().columns)
    assert columns[0].keys() == columns[1].keys()
    for name, column in columns[0].items():
        if column.dtype.kind == "f":  # the network's sums depend on how many rows it is given
            np.testing.assert_allclose(column, columns[1][name], rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(column, columns[1][name], err_msg=name)


def test_rows_are_what_the_way_over_send_and_recv_brings(make: Make) -> None:
    pools = [make(["CartPole-v1"] * 3) for _ in range(2)]
    for pool in pools:
        pool.reset(seed=4)
        pool.recv(3)
    for step in range(40):
        actions = np.array([step % 2, 1, 0])
        pools[0].send(actions)
        batch, rows = pools[0].recv(3), pools[1].step_in_place(actions)
        assert rows is not None
        assert batch.env_ids.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(rows.observations, batch.observations)
        assert rows.rewards.tolist() == batch.rewards.tolist()
        assert rows.terminations.tolist() == batch.terminations.tolist()
        assert rows.truncations.tolist() == batch.truncations.tolist()


def test_envs_in_actors_or_without_shared_rows_are_stepped_by_send_and_recv(make: Make) -> None:
    assert make(["CartPole-v1"]).steps_in_place
    with ActorPool(["CartPole-v1"], num_actors=1) as in_actor:
        for pool in (in_actor, make(["CartPole-v1"], shared_memory=False)):
            assert not pool.steps_in_place
            pool.reset()
            pool.recv()
            assert pool.step_in_place(np.ones(1, np.int64)) is None
            assert pool.recv(timeout=PATIENCE).rewards.tolist() == [1.0]


def test_what_an_env_was_asked_before_comes_before_a_step_in_place(make: Make) -> None:
    pool = make(counting(1))
    pool.reset()
    pool.recv()
    pool._engine.ask_beside(pool._fleet.actors[0], STEP_ALL, None)
    assert pool.step_in_place(np.zeros(1, np.int64)) is None
    assert pool.recv().observations[0, 1] == 2.0  # steps


def test_what_does_not_fit_into_rows_comes_by_recv(make: Make) -> None:
    pool = make([CountingEnv] * 2)
    pool.reset()
    pool.recv(2)
    assert pool.step_in_place([1, 1]) is None  # no array of the space's kind
    assert pool.recv(2).env_ids.tolist() == [0, 1]


def test_an_env_that_raises_is_told_by_recv_and_the_others_are_kept(make: Make) -> None:
    pool = make([FailingEnv, CountingEnv])
    pool.reset()
    pool.recv(2)
    assert pool.step_in_place(np.zeros(2, np.int64)) is None
    assert select.select([pool.fileno()], [], [], 0)[0]  # there is something to be fetched
    with pytest.raises(RuntimeError, match="on purpose"):
        pool.recv()
    assert pool.recv().env_ids.tolist() == [1]


def test_infos_of_steps_in_place_are_dropped(make: Make) -> None:
    pool = make([InfoEnv])
    pool.reset()
    pool.recv()
    assert pool.step_in_place(np.zeros(1, np.int64)) is not None
    pool.send(np.zeros(1, np.int64))
    assert pool.recv().infos  # of its own step only


def test_envs_that_have_not_been_received_cannot_step(make: Make) -> None:
    pool = make([CountingEnv])
    pool.reset()
    with pytest.raises(AlreadyPendingCallError):
        pool.step_in_place(np.zeros(1, np.int64))
    pool.recv()
    pool.close()
    with pytest.raises(ClosedEnvironmentError):
        pool.step_in_place(np.zeros(1, np.int64))


def test_a_pool_that_its_env_closes_says_so(make: Make) -> None:
    pools: list[ActorPool] = []

    class Closing(CountingEnv):
        def step(self, action: np.int64) -> Any:
            pools[0].close()
            return super().step(action)

    pools.append(make([Closing]))
    pools[0].reset()
    pools[0].recv()
    with pytest.raises(Exception, match=r"[Cc]lose"):
        pools[0].step_in_place(np.zeros(1, np.int64))


CTRL_C = """
    import os, signal
    import gymnasium, numpy as np
    from envbus.actors.testing import CountingEnv
    from envbus.runner import ActorPool
    from envbus.runner.errors import EnvError

    class Interrupted(CountingEnv):
        def step(self, action):
            os.kill(os.getpid(), signal.SIGINT)
            return super().step(action)

    if __name__ == "__main__":
        pool = ActorPool([CountingEnv, Interrupted], num_actors=0)
        pool.reset()
        pool.recv(2)
        pool.send(np.zeros(2, np.int64))
        try:
            pool.recv(2)
        except KeyboardInterrupt:
            print("interrupted")
        try:
            pool.recv(2)
        except EnvError as error:
            print(error.env_id, error.remote_type)
        print(pool.recv().env_ids.tolist())
        pool.close()
        pool.close()
"""


@pytest.mark.slow
def test_ctrl_c_in_an_env_is_raised_and_the_others_results_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CTRL_C)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = ["interrupted", "1 builtins.KeyboardInterrupt", "[0]"]
    assert done.stdout.splitlines() == told, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
@pytest.mark.parametrize("verb", ["recv", "step_in_place"])
def test_ctrl_c_that_was_kept_until_then_leaves_what_was_asked(
    make: Make, error: type[BaseException], verb: str
) -> None:
    def handler(*_: object) -> None:
        raise error

    pool = make(counting(1), restart=True)
    pool.reset()
    pool.recv()
    arguments = [np.zeros(1, np.int64)]
    if verb == "recv":
        pool.send(arguments.pop())

    @uninterrupted_call
    def call_with_ctrl_c() -> None:
        signal.raise_signal(signal.SIGUSR1)
        getattr(pool, verb)(*arguments)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(error):
            call_with_ctrl_c()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert select.select([pool], [], [], 0.0)[0]
    batch = pool.recv()
    assert batch.observations[0, 1] == 1.0  # steps
    assert not batch.faults


class InterruptingInfo(dict[str, Any]):
    def __contains__(self, key: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        return super().__contains__(key)


class EnvWithInterruptingInfo(CountingEnv):
    """An action of 1 leads to Ctrl-C when all envs have stepped."""

    def step(self, action: Any) -> Any:
        *row, _ = super().step(action)
        return *row, InterruptingInfo(a=1) if action == 1 else {}


def test_ctrl_c_between_two_envs_is_a_failure_of_those_that_were_asked(make: Make) -> None:
    pool = make([EnvWithInterruptingInfo] * 2, restart=True)
    pool.reset()
    pool.recv(2)
    pool.send(np.ones(2, np.int64))
    with pytest.raises(KeyboardInterrupt):
        pool.recv(2)
    faults = list((batch := pool.recv(2)).faults)
    while len(batch.env_ids) < 2:
        faults += (batch := pool.recv(2)).faults
    assert [fault.env_id for fault in faults] == [0, 1]
    assert batch.incarnations.tolist() == [1, 1]
    assert batch.observations[:, 1].tolist() == [0.0, 0.0]  # steps


SLOW_CLOSE = """
    from envbus.actors.testing import CountingEnv
    from envbus.runner import ActorPool, Timeouts
    from tests.waiting import pass_time

    class SlowToClose(CountingEnv):
        def step(self, action):
            raise LookupError("on purpose")

        def close(self):
            pass_time(0.5)

    settings = {"restart": True, "timeouts": Timeouts(close=0.01)}
    with ActorPool([SlowToClose], num_actors=0, **settings) as pool:
        pool.reset()
        pool.recv()
        pool.send([0])
        faults = []
        while len((batch := pool.recv()).env_ids) == 0:
            faults += batch.faults
        print(len([*faults, *batch.faults]), batch.env_ids.tolist())
"""


@pytest.mark.slow
def test_an_env_that_is_slow_to_close_does_not_end_the_process_of_its_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SLOW_CLOSE)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("1 [0]\n", 0), done.stderr
