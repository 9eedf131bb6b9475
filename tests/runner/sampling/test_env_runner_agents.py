from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.errors import env_errors
from envbus.runner.policies.connectors import ClipRewards
from envbus.runner.policies.policy import FunctionPolicy, Policy, PolicyOutput, RandomPolicy
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.actors.agent_envs import CountingParallelEnv, DictEnv, RoundRobinEnv
from tests.runner.sampling_scenes import zeros

Make = Callable[..., EnvRunner]


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(envs: Any, policies: Any, **config: Any) -> EnvRunner:
        pools.append(ActorPool(envs, num_actors=1, autoreset_mode="Disabled"))
        return EnvRunner(pools[-1], policies, RunnerConfig(**config))

    return _make


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


def test_spaces_are_told_by_policy_too(make: Make) -> None:
    runner = make([agents(5)], {"p0": zeros, "p1": zeros}, policy_mapping_fn=by_parity)
    by_agent = runner.get_spaces()
    assert runner.get_policy_spaces() == {"p0": by_agent[0], "p1": by_agent[1]}
    runner.policy_mapping_fn = None
    with pytest.raises(ConfigError, match="a policy_mapping_fn must say"):
        runner.get_policy_spaces()
    both = {"a": zeros, "b": zeros}
    runner = make([DictEnv], both, policy_mapping_fn=lambda agent_id, episode: "a")
    with pytest.raises(ConfigError, match="have policy 'a' and different spaces"):
        runner.get_policy_spaces()


def test_agent_steps_are_counted_where_asked(make: Make) -> None:
    runner = make([agents(4, 10)], zeros, count_steps_by="agent_steps", rollout_fragment_length=301)
    for _ in range(3):
        sample = runner.sample()
        assert 301 <= sample.agent_steps < 305
        assert sample.env_steps < 301


class MixedTeam:
    """One agent sees a sequence that grows, the other an array."""

    possible_agents = ("scout", "driver")
    observation_spaces: ClassVar[dict[str, Any]] = {
        "scout": spaces.Sequence(spaces.Box(0.0, 99.0, (), np.float64)),
        "driver": spaces.Box(0.0, 99.0, (2,), np.float64),
    }
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        over = {"__all__": self.time == 4}
        return self._seen(), dict.fromkeys(actions, 1.0), over, {"__all__": False}, {}

    def _seen(self) -> Any:
        driver = np.full(2, self.time, np.float64)
        return {"scout": tuple(map(float, range(self.time))), "driver": driver}


def test_agents_without_a_fixed_size_have_rows_of_objects_and_others_arrays(make: Make) -> None:
    seen: dict[str, list[Any]] = {"scout": [], "driver": []}

    def watching(name: str) -> Any:
        def choose(observations: Any) -> Any:
            seen[name].append((observations.dtype.kind, len(observations)))
            return np.zeros(len(observations), np.int64)

        return choose

    policies = {name: watching(name) for name in seen}
    runner = make([MixedTeam] * 2, policies, policy_mapping_fn=lambda agent, _: agent)
    sample = runner.sample(num_episodes=2)
    for eps_id in set(sample["scout"]["eps_id"]):
        rows = sample["scout"]["obs"][sample["scout"]["eps_id"] == eps_id]
        assert [len(row) for row in rows] == [0, 1, 2, 3]
        last = sample["driver"]["next_obs"][sample["driver"]["eps_id"] == eps_id]
        assert last.tolist() == [[n, n] for n in (1.0, 2.0, 3.0, 4.0)]
    assert {kind for kind, _ in seen["scout"]} == {"O"}
    assert {kind for kind, _ in seen["driver"]} == {"f"}
    assert max(count for _, count in seen["scout"]) <= 2


class Talker(gymnasium.Env[str, Any]):
    """Sees text, and takes two numbers; the observation says which ones."""

    observation_space = spaces.Text(40, charset="[](), 0123456789")
    action_space = spaces.Tuple([spaces.Discrete(100), spaces.MultiDiscrete([100, 100])])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "0", {}

    def step(self, action: Any) -> Any:
        number, pair = action
        return str((int(number), pair.tolist())), 0.0, False, False, {}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_actions_of_a_fixed_size_are_a_batch_also_where_observations_have_none(
    make: Make, count: int
) -> None:
    def choose(observations: Any) -> Any:
        numbers = np.arange(len(observations))
        return numbers, np.stack([numbers + 10, numbers + 20], axis=1)

    runner = make([Talker] * count, choose, min_envs=count)
    batch = runner.sample(num_env_steps=count).single()
    assert batch["next_obs"].tolist() == [f"({i}, [{i + 10}, {i + 20}])" for i in range(count)]
    assert [int(action[0]) for action in batch["actions"]] == [*range(count)]


class Spawner:
    """Names no agent beforehand: one is there from the reset on, the other gets a reward first."""

    agents: tuple[str, ...] = ()
    sees, acts = spaces.Sequence(spaces.Discrete(9)), spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.taken: list[float] = []

    def get_agent_ids(self) -> set[str]:
        return set()

    def get_observation_space(self, agent_id: str) -> spaces.Sequence:
        return self.sees

    def get_action_space(self, agent_id: str) -> spaces.Box:
        return self.acts

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return {"first": ()}, {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        self.taken += [float(action[0]) for action in actions.values()]
        seen = {"first": tuple(range(self.time))}
        if self.time > 1:
            seen["late"] = tuple(range(2 * self.time))
        over = {"__all__": self.time == 4}
        return seen, {"first": 1.0, "late": 1.0}, over, {"__all__": False}, {}


def test_agents_that_no_env_has_named_have_spaces_all_the_same(
    make: Make, pools: list[ActorPool]
) -> None:
    policy = FunctionPolicy(lambda rows: np.full((len(rows), 1), 7.0, np.float32))
    rows = make([Spawner], policy).sample(num_episodes=1).single()
    lengths = {
        agent: [len(one) for one in rows["obs"][rows["agent_id"] == agent]]
        for agent in ("first", "late")
    }
    assert lengths == {"first": [0, 1, 2, 3], "late": [4, 6]}
    taken = pools[-1].get_sub_environments()[0].get_attr("taken")
    assert taken == [1.0] * 6
    wrong = make([Spawner], FunctionPolicy(lambda rows: np.zeros((len(rows), 1, 1), np.float32)))
    with pytest.raises(ValueError, match=r"actions of shape \(1, 1\)"):
        wrong.sample(num_env_steps=2)


class Nameless(Spawner):
    def get_observation_space(self, agent_id: str) -> spaces.Sequence:
        raise KeyError(agent_id)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"first": np.zeros(2)}, {}

    def step(self, actions: Any) -> Any:
        return {"first": np.zeros(2)}, {"first": 1.0}, {"__all__": True}, {"__all__": False}, {}


def test_an_env_that_does_not_tell_spaces_of_agents_it_shows_is_told_of(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make([Nameless] * 2, zeros).sample(num_episodes=4).single()
    assert rows["obs"].shape == (4, 2)
    assert caplog.text.count("does not tell the spaces of its agent 'first'") == 1


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


@pytest.mark.slow
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


def test_an_episode_is_not_whole_whose_steps_have_left_without_a_row(make: Make) -> None:
    runner = make([functools.partial(RoundRobinEnv, 5, 10)], zeros)
    assert runner.sample(num_env_steps=3).agent_steps == 0
    sample = runner.sample(num_episodes=1)
    assert (sample.env_steps, len(sample.episodes)) == (10, 1)


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
    env = functools.partial(DictEnv, [({}, {}, over, over, {})], ())
    runner = make([env], zeros, episodes_without_actions="count")
    sample = runner.sample(num_episodes=2)
    assert (sample.agent_steps, len(sample.episodes)) == (0, 2)
    assert runner.get_metrics()["num_episodes_without_actions"] == 2


def test_an_episode_in_which_nobody_acts_is_an_error_that_names_the_env(make: Make) -> None:
    over, going = {"__all__": True}, {"__all__": False}
    script = [({}, {"a": 1.0}, going, going, {}), ({}, {"a": 1.0}, over, going, {})]
    runner = make([DictEnv, functools.partial(DictEnv, script, ())], zeros)
    with pytest.raises(ValueError, match=r"env 1: its episode 1 is over after 2 env steps, and no"):
        runner.sample(num_env_steps=8)
    assert runner.get_metrics()["num_episodes_without_actions"] == 1
    odd: Any = "warn"
    with pytest.raises(ConfigError, match="episodes_without_actions must be one of"):
        RunnerConfig(episodes_without_actions=odd)


def test_steps_in_which_nobody_acts_are_told_of_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    going = {"__all__": False}
    idle = functools.partial(DictEnv, [({}, {}, going, going, {})], ())
    runner = make([DictEnv, idle], zeros, rollout_fragment_length=6)
    for _ in range(2):
        sample = runner.sample()
        assert (sample.env_steps, sample.agent_steps) == (12, 6)
    told = [record.getMessage() for record in caplog.records if "rows" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["env 1"]
    assert "6 env steps of a sample, and no agent has acted in them" in told[0]


def test_rewards_go_through_the_connector_of_their_agents_policy(make: Make) -> None:
    def twos(observations: Any) -> Any:  # what an agent does is what it gets
        return np.full(len(observations), 2, np.int64)

    runner = make(
        [agents(2, 4)] * 2,
        {"p0": twos, "p1": twos},
        policy_mapping_fn=by_parity,
        reward_connector={"p1": ClipRewards(0.25)},
        rollout_fragment_length=6,
    )
    sample = runner.sample()
    assert set(sample["p0"]["rewards"].tolist()) == {2.0}
    assert set(sample["p1"]["rewards"].tolist()) == {0.25}
    assert [result.agent_returns for result in sample.episodes] == [{0: 8.0, 1: 8.0}] * 2


def test_a_reward_of_several_steps_is_connected_as_one(make: Make) -> None:
    runner = make([RoundRobinEnv], zeros, reward_connector=ClipRewards(35.0))
    batch = runner.sample(num_env_steps=25).single()
    assert max(batch["rewards"].tolist()) == 35.0
    (result,) = runner.sample(num_episodes=1).episodes
    assert result.episode_return == 25 * 5 * 10


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


def test_rewards_between_two_observations_are_one_row_s(make: Make) -> None:
    runner = make([RoundRobinEnv], zeros)
    batch = runner.sample(num_env_steps=50).single()
    complete = batch[batch["next_obs_valid"]]
    # 42 with another observation; the other 8 ended without one.
    assert (len(complete), len(batch)) == (42, 50)
    first = complete[(complete["agent_id"] == 0) & (complete["eps_id"] == complete["eps_id"][0])]
    assert first["t"].tolist() == [4, 9, 14, 19, 24]
    assert first["rewards"].tolist() == [50.0] * 5
    assert runner.get_metrics()["episode_return_mean"] == 25 * 50


GOING, OVER = {"__all__": False}, {"__all__": True}


def test_an_env_without_all_is_named_by_the_sample(make: Make) -> None:
    broken = ({"a": np.zeros(1)}, {}, {"a": True}, GOING, {})
    runner = make([functools.partial(_First, [broken])], zeros)
    with pytest.raises(ValueError, match=r"env _First: .* without '__all__'") as caught:
        runner.sample(num_env_steps=1)
    assert [error.env_id for error in env_errors(caught.value)] == [0]


def test_a_mapping_may_be_replaced_and_holds_for_episodes_that_begin_later(
    make: Make,
) -> None:
    policies = {"a": zeros, "b": lambda seen: np.ones(len(seen), np.int64)}
    runner = make([agents(2, 4)], policies, policy_mapping_fn=lambda *_: "a")
    runner.sample(num_env_steps=2)
    runner.policy_mapping_fn = lambda agent_id, _: "ab"[agent_id]
    rest = runner.sample(num_env_steps=2)
    assert {name: len(batch) for name, batch in rest.policy_batches.items()} == {"a": 4}
    later = runner.sample(num_env_steps=4)
    assert {name: batch["agent_id"].tolist() for name, batch in later.policy_batches.items()} == {
        "a": [0] * 4,
        "b": [1] * 4,
    }


def test_an_agent_that_comes_late_gets_a_policy_of_when_its_episode_began(make: Make) -> None:
    script = [
        ({"a": np.zeros(1)}, {}, GOING, GOING, {}),
        ({"a": np.zeros(1), "b": 1}, {}, GOING, GOING, {}),
        ({"a": np.zeros(1), "b": 1}, {}, OVER, GOING, {}),
    ]
    runner = make(
        [functools.partial(_First, script)],
        {"old": zeros, "other": zeros},
        policy_mapping_fn=lambda agent_id, _: "old" if agent_id == "a" else "other",
    )
    runner.sample(num_env_steps=1)
    runner.add_policy("new", zeros, lambda agent_id, _: "new" if agent_id == "a" else "old")
    sample = runner.sample(num_env_steps=2)
    assert {name: set(batch["agent_id"]) for name, batch in sample.policy_batches.items()} == {
        "old": {"a"},
        "other": {"b"},
    }
    sample = runner.sample(num_episodes=1)
    assert sample.policy_batches.keys() == {"new", "old"}


def test_returns_are_told_per_agent_and_policy(make: Make) -> None:
    policies = {"p0": zeros, "p1": lambda seen: np.ones(len(seen), np.int64)}
    runner = make([agents(3, 5)], policies, policy_mapping_fn=by_parity)
    runner.sample(num_env_steps=12)
    metrics = runner.get_metrics()
    assert metrics["agent_episode_returns_mean"] == {0: 0.0, 1: 5.0, 2: 0.0}
    assert metrics["module_episode_returns_mean"] == {"p0": 0.0, "p1": 5.0}
    assert (metrics["num_episodes"], metrics["num_agent_steps_sampled"]) == (2, 36)
    assert metrics["num_module_steps_sampled"] == {"p0": 24, "p1": 12}
    assert metrics["episode_len_max"] == 5


def test_off_policy_actions_are_in_the_batch_and_not_sent(make: Make) -> None:
    runner = make([agents(2, 6)], lambda seen: np.ones(len(seen), np.int64))
    poll = runner.envs.poll

    def poll_with_actions(*args: Any, **kwargs: Any) -> Any:
        """As a source does that has its own actions for some agents."""
        result = poll(*args, **kwargs)
        for env_id, seen in result.observations.items():
            if 1 in seen:
                result.off_policy_actions[env_id] = {1: np.int64(2)}
        return result

    runner.envs.poll = poll_with_actions  # type: ignore[method-assign]
    batch = runner.sample(num_episodes=1).single()
    assert batch["actions"].tolist() == [1] * 6 + [2] * 6
    assert batch["rewards"].tolist() == [1.0] * 12  # what an agent's action was, as its env has it


def test_policies_are_not_mixed_and_what_is_sent_is_a_copy(make: Make) -> None:
    kept: list[Any] = []

    def remember(seen: Any) -> Any:
        kept.append(np.ones(len(seen), np.int64))
        return kept[-1]

    policies = {"p0": zeros, "p1": remember}
    runner = make([agents(4, 3)], policies, policy_mapping_fn=by_parity)
    poll = runner.envs.poll

    def spoil(*args: Any, **kwargs: Any) -> Any:
        for actions in kept:
            actions[:] = 2  # after it was sent and recorded
        return poll(*args, **kwargs)

    runner.envs.poll = spoil  # type: ignore[method-assign]
    sample = runner.sample(num_env_steps=6)
    assert {name: set(batch["agent_id"]) for name, batch in sample.policy_batches.items()} == {
        "p0": {0, 2},
        "p1": {1, 3},
    }
    assert sample["p1"]["actions"].tolist() == [1] * 12
    assert sample["p1"]["rewards"].tolist() == [1.0] * 12


class Counts(Policy):
    """Its state, of any form, counts the steps of an agent's episode."""

    def initial_state(self) -> Any:
        return {"count": np.zeros((), np.int64), "pair": (np.zeros(2), np.ones((1, 1)))}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        after = {**states, "count": states["count"] + 1}
        return PolicyOutput(zeros(observations), after)


def test_states_are_per_env_and_agent_and_begin_anew_with_each_episode(make: Make) -> None:
    runner = make([agents(3, 4), agents(3, 4)], Counts())
    parts = [runner.sample(num_env_steps=6).single() for _ in range(3)]
    for batch in parts:
        assert batch["state_in"]["count"].tolist() == batch["t"].tolist()
        assert batch["state_out"]["count"].tolist() == (batch["t"] + 1).tolist()
        assert batch["state_in"]["pair"][1].shape == (len(batch), 1, 1)
