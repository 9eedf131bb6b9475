"""`BusEnv` as TorchRL has its envs, and batches as TensorDicts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import EnvRunner, RunnerConfig
from envbus.runner.batches import SampleBatch
from envbus.runner.policies import RandomPolicy
from envbus.runner.pool.pool import ActorPool
from tests.envs import FailingEnv, SpaceEnv
from tests.integration.group_children import is_alive
from tests.waiting import wait_until

pytest.importorskip("torchrl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

torch: Any = pytest.importorskip("torch")
torchrl: Any = pytest.importorskip("envbus.runner.adapters.torchrl")
check_env_specs: Any = pytest.importorskip("torchrl.envs.utils").check_env_specs
TensorDict: Any = pytest.importorskip("tensordict").TensorDict
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def make_one(env_fns: Any, **settings: Any) -> Any:
        made.append(torchrl.BusEnv(env_fns, **{"num_actors": 2, **settings}))
        return made[-1]

    yield make_one
    for one in made:
        one.vector_env.close(terminate=True)


def step(env: Any, tensordict: Any, actions: Any = 0) -> Any:
    """Step with actions; return what stands under "next"."""
    tensordict["action"] = torch.as_tensor(actions).expand(env.batch_size).to(torch.int64)
    return env.step(tensordict)["next"]


def counts(tensordict: Any) -> list[int]:
    found: list[int] = tensordict["observation"][:, 1].to(torch.int64).tolist()
    return found


DICT = spaces.Dict(
    a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Discrete(3), c=spaces.Dict(d=spaces.MultiBinary(3))
)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (DICT, spaces.Discrete(2)),
        (spaces.Discrete(4), DICT),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([3, 4])),
        (spaces.MultiBinary(3), spaces.MultiBinary((2, 2))),
        (spaces.Box(0, 255, (4, 4), np.uint8), spaces.Box(-2.0, 2.0, (3,))),
        (spaces.Discrete(3, start=2), spaces.Discrete(3, start=-1)),
        (spaces.Box(-np.inf, np.inf, (4,)), spaces.Box(-1.0, 1.0, ())),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), spaces.Box(-1, 5, (2,), np.int64)),
    ],
)
def test_specs_are_those_of_what_comes(make: Make, observations: Any, actions: Any) -> None:
    env = make([partial(SpaceEnv, observations, actions)] * 3, num_actors=0)
    assert env.batch_size == (3,)
    check_env_specs(env, break_when_any_done="both")
    check_env_specs(env, seed=3)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Tuple([spaces.Discrete(2)]), "no spec of Tuple"),
        (spaces.Text(4), "no spec of Text"),
        (spaces.Dict(reward=spaces.Discrete(2)), r"keys \['reward'\]"),
    ],
)
def test_spaces_without_a_spec_are_refused(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torchrl.BusEnv([partial(SpaceEnv, space, spaces.Discrete(2))])


def test_the_next_observation_of_an_end_is_the_last_of_its_episode(make: Make) -> None:
    env = make([partial(CountingEnv, 3), partial(CountingEnv, 5)])
    present = env.set_seed(4) and env.reset()
    assert present["observation"][:, 3].tolist() == [4, 5]
    seen = []
    for _ in range(6):
        both, present = env.step_and_maybe_reset(env.rand_action(present))
        after = both["next"]
        seen.append((counts(after), after["done"][:, 0].tolist(), counts(present)))
    assert seen == [
        ([1, 1], [False, False], [1, 1]),
        ([2, 2], [False, False], [2, 2]),
        ([3, 3], [True, False], [0, 3]),
        ([1, 4], [False, False], [1, 4]),
        ([2, 5], [False, True], [2, 0]),
        ([3, 1], [True, False], [0, 1]),
    ]
    # Odd episodes end terminated, even ones truncated.
    assert after["truncated"][:, 0].tolist() == [True, False]
    assert after["terminated"][:, 0].tolist() == [False, False]
    assert after["reward"].dtype == torch.float32


def test_a_reset_of_some_begins_new_episodes_of_those_only(make: Make) -> None:
    env = make([partial(CountingEnv, 100)] * 4)
    present = env.reset()
    for _ in range(3):
        step(env, present)
    after = step(env, present)
    assert counts(after) == [4, 4, 4, 4]
    after["_reset"] = torch.tensor([[True], [False], [False], [True]])
    assert counts(env.reset(after)) == [0, 4, 4, 0]
    assert counts(step(env, present)) == [1, 5, 5, 1]


def test_a_seed_is_for_the_next_reset_of_all(make: Make) -> None:
    env = make([partial(CountingEnv, 100)] * 2)
    present = env.reset()
    after = step(env, present)
    env.set_seed(7)
    after["_reset"] = torch.tensor([[True], [False]])
    assert counts(env.reset(after)) == [0, 1]
    after = step(env, present)
    assert counts(after) == [1, 2]
    after["_reset"] = torch.tensor([[True], [True]])
    first = env.reset(after)
    assert counts(first) == [0, 0]
    assert first["observation"][:, 3].tolist() == [7, 8]


def test_a_reset_of_all_begins_anew_also_after_an_end(make: Make) -> None:
    env = make([partial(CountingEnv, 2)] * 2)
    present = env.reset()
    for _ in range(2):
        after = step(env, present)
    assert after["done"].all()
    first = env.reset()
    # CountingEnv numbers its episodes: the second has begun by itself.
    assert first["observation"][:, 0].tolist() == [3, 3]


def test_tensors_of_a_reset_are_not_those_of_the_next_one(make: Make) -> None:
    env = make([partial(CountingEnv, 1)] * 2)
    after = step(env, env.reset())
    after["_reset"] = torch.tensor([[True], [False]])
    first = env.reset(after.clone())
    first["observation"].fill_(-1)
    after["_reset"] = torch.tensor([[False], [True]])
    assert counts(env.reset(after))[1] == 0


def test_some_envs_are_not_stepped_alone(make: Make) -> None:
    env = make([CountingEnv] * 2, num_actors=0)
    present = env.rand_action(env.reset())
    present["_step"] = torch.tensor([True, False])
    with pytest.raises(NotImplementedError, match="steps all of its envs"):
        env.step(present)


def test_close_ends_all_processes(make: Make) -> None:
    env = make([CountingEnv] * 2)
    pids = env.vector_env.actor_pids()
    env.close()
    env.close()
    assert env.is_closed
    assert [pid for pid in pids if is_alive(pid)] == []


# --- faults -------------------------------------------------------------------------------------


def test_a_kill_truncates_the_episodes_of_that_actor_only(make: Make) -> None:
    env = make([partial(CountingEnv, 10**6)] * 4, restart=True)
    present = env.reset()
    for _ in range(5):
        _, present = env.step_and_maybe_reset(env.rand_action(present))
    pid = env.vector_env.actor_pids()[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "its end")
    both, present = env.step_and_maybe_reset(env.rand_action(present))
    after = both["next"]
    assert after["truncated"][:, 0].tolist() == [True, True, False, False]
    assert not after["terminated"].any()
    assert counts(after) == [5, 5, 6, 6]
    assert after["reward"][:2, 0].tolist() == [0.0, 0.0]
    assert counts(present) == [0, 0, 6, 6]
    assert counts(step(env, present)) == [1, 1, 7, 7]
    assert env.vector_env.statistics().restarts == 1


def test_without_restart_a_fault_is_raised(make: Make) -> None:
    env = make([partial(FailingEnv, after=1), CountingEnv])
    present = env.reset()
    step(env, present)
    with pytest.raises(RuntimeError, match="failing on purpose"):
        step(env, present)


def test_a_collector_goes_on_while_actors_are_killed() -> None:
    collectors: Any = pytest.importorskip("torchrl.collectors")
    collector_class = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    env = torchrl.BusEnv(["CartPole-v1"] * 4, num_actors=2, restart=True)
    collector = collector_class(env, None, frames_per_batch=200, total_frames=1600)
    cut = 0
    for number, rows in enumerate(collector):
        assert rows.shape == (4, 50)
        after = rows["next"]
        # At random no episode of CartPole reaches its time limit.
        cut += int(after["truncated"].sum())
        assert not (after["truncated"] & after["terminated"]).any()
        assert not after["reward"][after["truncated"]].any()
        # What follows within the rows of an env follows its row, but for first observations.
        goes_on = ~after["done"][:, :-1, 0]
        joined = after["observation"][:, :-1][goes_on] == rows["observation"][:, 1:][goes_on]
        assert joined.all()
        if number < 6:
            os.kill(env.vector_env.actor_pids()[number % 2], signal.SIGKILL)
    assert cut == 12
    collector.shutdown()
    assert env.is_closed


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning")
def test_ppo_learns_cart_pole() -> None:
    training: Any = pytest.importorskip("envbus.bench.training.torchrl")
    found = training.train(training.Training("CartPole-v1", 8, 30_720, training.OURS, seed=1))
    assert found.episode_return >= 100.0  # at random: 22


# --- batches ------------------------------------------------------------------------------------


def test_samples_go_into_a_replay_buffer() -> None:
    data: Any = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(200), batch_size=64)
    pool = ActorPool(["CartPole-v1"] * 2, num_actors=0)
    policy = RandomPolicy(pool.single_action_space, seed=1)
    batches = []
    with EnvRunner(pool, policy, RunnerConfig(rollout_fragment_length=20, seed=1)) as runner:
        for _ in range(3):
            batches.append(runner.sample().single())
            buffer.extend(torchrl.to_tensordict(batches[-1]))
    whole = SampleBatch.concatenate(batches)
    assert len(buffer) == len(whole)
    keys = zip(whole["eps_id"].tolist(), whole["t"].tolist(), strict=True)
    row_of = {key: row for row, key in enumerate(keys)}
    found = buffer.sample()
    assert found.batch_size == (64,)
    rows = [row_of[key] for key in zip(found["eps_id"].tolist(), found["t"].tolist(), strict=True)]
    assert len(set(rows)) > 20
    assert found["observation"].tolist() == whole["obs"][rows].tolist()
    assert found["action"].tolist() == whole["actions"][rows].tolist()
    assert found["next", "observation"].tolist() == whole["next_obs"][rows].tolist()
    assert found["next", "reward"][:, 0].tolist() == whole["rewards"][rows].tolist()
    assert found["next", "terminated"][:, 0].tolist() == whole["terminateds"][rows].tolist()


def test_a_sample_is_a_tensordict() -> None:
    pool = ActorPool([partial(SpaceEnv, DICT, spaces.Discrete(2))] * 2, num_actors=0)
    policy = RandomPolicy(pool.single_action_space)
    config = RunnerConfig(rollout_fragment_length=10, seed=1)
    with EnvRunner(pool, policy, config) as runner:
        batch = runner.sample().single()
    found = torchrl.to_tensordict(batch)
    assert found.batch_size == (len(batch),)
    assert found["c", "d"].tolist() == batch["obs"]["c"]["d"].tolist()
    assert found["next", "a"].tolist() == batch["next_obs"]["a"].tolist()
    assert found["action"].tolist() == batch["actions"].tolist()
    assert found["next", "reward"][:, 0].tolist() == batch["rewards"].tolist()
    ends = batch["terminateds"] | batch["truncateds"]
    assert found["next", "done"][:, 0].tolist() == ends.tolist()
    assert found["eps_id"].tolist() == batch["eps_id"].tolist()
    assert "next_obs" not in set(found.keys())


def test_what_has_no_tensor_is_left_out() -> None:
    rows = 3
    flags = np.zeros(rows, np.bool_)
    batch = SampleBatch(
        {
            "obs": np.zeros((rows, 2), np.float32),
            "next_obs": np.ones((rows, 2), np.float32),
            "actions": np.zeros(rows, np.int64),
            "rewards": np.zeros(rows, np.float32),
            "terminateds": flags,
            "truncateds": flags,
            "agent_id": np.array(["left", "right", "left"]),
        }
    )
    found = torchrl.to_tensordict(batch)
    assert set(found.keys()) == {"observation", "action", "next"}
    assert found["next", "observation"].tolist() == [[1.0, 1.0]] * rows
    with pytest.raises(ConfigError, match=r"keys \['done'\]"):
        torchrl.to_tensordict(batch.with_columns(obs={"done": np.zeros(rows)}))
