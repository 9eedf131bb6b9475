from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.env_runner import EnvRunner
from envbus.runner.policies import FunctionPolicy, RandomPolicy
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from tests.actors.agent_envs import CountingParallelEnv, DictEnv, RoundRobinEnv

Make = Callable[..., EnvRunner]


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[ActorPool] = []

    def _make(envs: Any, policies: Any, **config: Any) -> EnvRunner:
        pools.append(ActorPool(envs, num_actors=1, autoreset_mode="Disabled"))
        return EnvRunner(pools[-1], policies, RunnerConfig(**config))

    yield _make
    for pool in pools:
        pool.close(terminate=True)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def agents(count: int, until: int = 25) -> Callable[[], CountingParallelEnv]:
    return functools.partial(CountingParallelEnv, dict.fromkeys(range(count), until))


def by_parity(agent_id: Any, episode: Any) -> str:
    return f"p{agent_id % 2}"


def test_five_agents_and_two_policies_give_exactly_as_many_rows(make: Make) -> None:
    runner = make([agents(5)], {"p0": zeros, "p1": zeros}, policy_mapping_fn=by_parity)
    sample = runner.sample(num_env_steps=50)
    assert (sample.env_steps, sample.agent_steps) == (50, 250)
    assert {name: len(batch) for name, batch in sample.policy_batches.items()} == {
        "p0": 150,
        "p1": 100,
    }
    assert sample["p0"]["t"].tolist() == [*range(25)] * 6
    assert set(sample["p1"]["agent_id"]) == {1, 3}


def test_agents_in_turn_give_complete_transitions_with_summed_rewards(make: Make) -> None:
    runner = make([RoundRobinEnv], zeros)
    batch = runner.sample(num_env_steps=50).single()
    complete = batch[batch["next_obs_valid"]]
    # RLlib has these 42; the other 8 ended without another observation.
    assert (len(complete), len(batch)) == (42, 50)
    first = complete[(complete["agent_id"] == 0) & (complete["eps_id"] == complete["eps_id"][0])]
    assert first["t"].tolist() == [4, 9, 14, 19, 24]
    assert first["rewards"].tolist() == [50.0] * 5
    assert runner.get_metrics()["episode_return_mean"] == 25 * 50


def test_agent_steps_are_counted_where_asked(make: Make) -> None:
    runner = make([agents(4, 10)], zeros, count_steps_by="agent_steps", rollout_fragment_length=301)
    for _ in range(3):
        sample = runner.sample()
        assert 301 <= sample.agent_steps < 305
        assert sample.env_steps < 301


def test_an_unknown_policy_is_named_with_agent_and_known_ones(make: Make) -> None:
    runner = make([agents(2)], {"a": zeros, "b": zeros}, policy_mapping_fn=lambda *_: "c")
    with pytest.raises(ConfigError, match=r"agent 0: .* says 'c'; there are \['a', 'b'\]"):
        runner.sample(num_env_steps=1)
    runner = make([agents(2)], {"a": zeros, "b": zeros})
    with pytest.raises(ConfigError, match="agent 0: a policy_mapping_fn must say"):
        runner.sample(num_env_steps=1)


def test_the_policy_of_an_agent_is_asked_for_once_and_fixed_per_episode(make: Make) -> None:
    asked: list[Any] = []

    def mapping(agent_id: Any, episode: Any) -> str:
        asked.append((agent_id, episode.eps_id))
        return "a"

    runner = make([agents(2, 4)], {"a": zeros}, policy_mapping_fn=mapping)
    runner.sample(num_env_steps=6)
    assert asked == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_policies_come_and_go_between_episodes(make: Make) -> None:
    runner = make([agents(1, 4)], {"a": zeros}, policy_mapping_fn=lambda *_: "a")
    runner.sample(num_env_steps=2)
    runner.add_policy("b", lambda seen: np.ones(len(seen), np.int64), lambda *_: "b")
    runner.remove_policy("a")
    sample = runner.sample(num_env_steps=4)
    # The running episode keeps its own to the end.
    assert {name: batch["actions"].tolist() for name, batch in sample.policy_batches.items()} == {
        "a": [0, 0],
        "b": [1, 1],
    }
    with pytest.raises(ConfigError, match="no policy 'a'"):
        runner.remove_policy("a")
    with pytest.raises(ConfigError, match="last one"):
        runner.remove_policy("b")


def test_observations_go_to_policies_by_policy_and_form(make: Make) -> None:
    shapes: list[Any] = []

    def note(observations: Any) -> Any:
        shapes.append((observations.shape, observations.dtype))
        return zeros(observations)

    policies = {"a": FunctionPolicy(note), "b": FunctionPolicy(note)}
    first = {"a": np.zeros(1), "b": 2}
    going, more = {"__all__": False}, ({"a": 0.0}, {})
    script = [(first, more[0], going, going, {})]
    runner = make(
        [functools.partial(_WithArrays, script)] * 3,
        policies,
        policy_mapping_fn=lambda agent_id, _: agent_id,
        min_envs=3,
    )
    sample = runner.sample(num_env_steps=6)
    assert {shape for shape, _ in shapes} == {(3, 1), (3,)}
    assert sample["a"]["obs"].shape == (6, 1)
    assert sample["b"]["obs"].tolist() == [2] * 6
    # One policy for both: rows that cannot stand in one batch are told, never stacked.
    runner = make([functools.partial(_WithArrays, script)], {"a": FunctionPolicy(note)})
    with pytest.raises(ValueError, match="policy 'a': rows of obs have shape"):
        runner.sample(num_env_steps=2)


class _WithArrays(DictEnv):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return self.script[0][0], {}


def test_without_an_acting_agent_the_env_is_stepped_all_the_same(make: Make) -> None:
    going, over = {"__all__": False}, {"__all__": True}
    script = [
        ({}, {"a": 1.0}, going, going, {}),
        ({}, {"a": 2.0}, going, going, {}),
        ({"a": np.zeros(1)}, {"a": 4.0}, over, going, {}),
    ]
    runner = make([functools.partial(_First, script)], zeros)
    sample = runner.sample(num_episodes=2)
    batch = sample.single()
    assert sample.env_steps == 6
    assert batch["rewards"].tolist() == [7.0, 7.0]
    assert batch["t"].tolist() == [2, 2]


class _First(DictEnv):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return {"a": np.zeros(1)}, {}


def test_an_episode_in_which_nobody_acts_is_counted_and_gives_no_rows(make: Make) -> None:
    over = {"__all__": True}
    runner = make([functools.partial(DictEnv, [({}, {}, over, over, {})], ())], zeros)
    sample = runner.sample(num_episodes=2)
    assert (sample.agent_steps, len(sample.episodes)) == (0, 2)
    assert runner.get_metrics()["num_episodes_without_actions"] == 2


@pytest.mark.slow
def test_an_env_of_pettingzoo_with_agents_that_leave() -> None:
    env = "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env"
    with ActorPool([env] * 2, autoreset_mode="Disabled") as pool:
        policies = RandomPolicy(pool.get_action_space("archer_0"), 0)
        with EnvRunner(pool, policies, RunnerConfig(seed=0, rollout_fragment_length=60)) as runner:
            sample = runner.sample()
            batch = sample.single()
            assert sample.env_steps == 120
            space = runner.get_spaces()["archer_0"][0]
            assert isinstance(space, spaces.Box)
            assert batch["obs"].shape == (len(batch), *space.shape)
            for rows in batch.split_by_trajectory():
                assert np.array_equal(rows["obs"][1:], rows["next_obs"][:-1])
