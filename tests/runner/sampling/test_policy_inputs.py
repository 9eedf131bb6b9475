from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.batches.metrics import EpisodeResult, SampleMetrics
from envbus.runner.batches.nested import row_of
from envbus.runner.policies.connectors import ClipRewards, Connector, RescaleActions
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.columns import RunningEpisodes
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.sampling.policy_inputs import ActionForm, ColumnInputs
from envbus.runner.testing import assert_same
from tests.actors.agent_envs import CountingParallelEnv, RoundRobinEnv
from tests.envs import FailingEnv

Make = Callable[..., EnvRunner]
#: Mode of the pool, whether in columns, and how many actors: all must do the same.
WAYS = [
    ("NextStep", True, 2),
    ("Disabled", True, 2),
    ("Disabled", False, 2),
    ("NextStep", True, 0),
    ("Disabled", False, 0),
]
ALL_WAYS = pytest.mark.parametrize(("mode", "vectorized", "actors"), WAYS)
EVERYTHING = ("prev_actions", "prev_rewards", "t", "eps_id", "env_id", "timestep")


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


# --- in columns, without envs ----------------------------------------------------------------


def inputs(space: spaces.Space[Any], *names: str) -> ColumnInputs:
    metrics = SampleMetrics()
    metrics.add_steps(env_steps=12, agent_steps=12)
    episodes = RunningEpisodes(RunnerConfig(), "p", 3)
    episodes.begin(ints(0, 1, 2), ints(0, 0, 0), ints(0, 0, 0))
    episodes.step(ints(1), np.ones(1))
    return ColumnInputs(names, 3, space, None, episodes, metrics)


def test_an_episode_begins_with_the_zero_action_and_no_reward() -> None:
    given = inputs(spaces.Discrete(3, start=5), "prev_actions", "prev_rewards")
    given.act(ints(0, 2), ints(6, 7))
    given.reward(ints(0, 2), np.array([1.0, 2.0]))
    assert given.of(ints(0, 1, 2))["prev_actions"].tolist() == [6, 5, 7]
    assert given.of(ints(2, 1))["prev_rewards"].tolist() == [2.0, 0.0]
    given.begin(ints(2))
    found = given.of(ints(0, 2))
    assert found["prev_actions"].tolist() == [6, 5]
    assert found["prev_rewards"].tolist() == [1.0, 0.0]
    assert found["prev_rewards"].dtype == np.float32


def test_numbers_of_the_episode_and_of_samples_are_told_by_row() -> None:
    found = inputs(spaces.Discrete(2), "t", "eps_id", "env_id", "timestep").of(ints(1, 2))
    assert {name: values.tolist() for name, values in found.items()} == {
        "t": [1, 0],
        "eps_id": [1, 2],
        "env_id": [1, 2],
        "timestep": [12, 12],
    }
    assert {values.dtype for values in found.values()} == {np.dtype(np.int64)}


def test_what_is_told_does_not_change_with_the_next_step() -> None:
    space = spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Discrete(2))
    given = inputs(space, "prev_actions")
    before = given.of(ints(0, 1, 2))
    given.act(ints(0, 1, 2), {"a": np.ones((3, 2)), "b": ints(1, 1, 1)})
    assert before["prev_actions"]["a"].tolist() == [[0.0, 0.0]] * 3
    after = given.of(ints(0))["prev_actions"]
    assert (after["a"].dtype, after["a"].tolist(), after["b"].tolist()) == (
        np.float32,
        [[1.0, 1.0]],
        [1],
    )
    with pytest.raises(ValueError, match=r"actions of shape \(3,\)"):
        given.act(ints(0), {"a": np.ones((1, 3)), "b": ints(1)})


@pytest.mark.parametrize(
    "actions", [{"a": np.ones((1, 2))}, ints(1), {"a": np.ones((1, 2)), "b": ()}]
)
def test_actions_that_are_nested_otherwise_than_their_space_are_refused(actions: Any) -> None:
    space = spaces.Dict({"a": spaces.Box(0.0, 1.0, (2,)), "b": spaces.Tuple([spaces.Discrete(2)])})
    given = inputs(space, "prev_actions")
    with pytest.raises(ValueError, match="the policy's actions do not have the form of Dict"):
        given.act(ints(0), actions)
    with pytest.raises(ValueError, match="the policy's actions do not have the form of Dict"):
        ActionForm.of(space, None, "the env").cast(row_of(actions, 0))


def test_actions_have_the_form_of_what_goes_into_the_connector() -> None:
    box = spaces.Box(0.0, 8.0, (2,), np.float64)
    form = ActionForm.of(box, RescaleActions(box), "the env")
    assert form.zero.tolist() == [0.0, 0.0]
    assert form.cast([1, -1]).dtype == np.float32


class Odd(Connector):
    def __call__(self, batch: Any, keys: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("space", "connector", "reason"),
    [
        (None, None, "agent 'a' does not tell its action space"),
        (spaces.Text(5), None, "actions of agent 'a' have no fixed size"),
        (spaces.Discrete(2), Odd(), "the action connector Odd has no `space`"),
    ],
)
def test_actions_without_a_form_of_their_own_are_refused(
    space: Any, connector: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        ActionForm.of(space, connector, "agent 'a'")


# --- with a runner ---------------------------------------------------------------------------


class Told(Policy):
    """Acts by its last action and reward, and hands on all that it is told."""

    wanted_inputs: tuple[str, ...] = EVERYTHING

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, **told: Any
    ) -> Any:
        assert tuple(told) == self.wanted_inputs
        actions = (told["prev_actions"] + 1) % 90
        extras = {f"told_{name}": told[name] for name in EVERYTHING[2:]}
        return PolicyOutput(actions, states, extras)

    def on_episode_start(self, *, env_id: int, eps_id: int) -> None:
        self.heard.append(("start", env_id, eps_id))

    def on_episode_end(self, *, result: EpisodeResult) -> None:
        self.heard.append((f"end {result.length}", result.env_id, result.eps_id))


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(
        envs: Any, policies: Any, mode: str = "Disabled", actors: int = 2, **config: Any
    ) -> EnvRunner:
        num_actors = min(actors, len(envs))
        settings: dict[str, Any] = {"restart": True} if actors else {}
        pools.append(ActorPool(envs, num_actors=num_actors, autoreset_mode=mode, **settings))
        return EnvRunner(pools[-1], policies, RunnerConfig(**config))

    return _make


def samples(runner: EnvRunner) -> list[Sample]:
    return [runner.sample(), runner.sample(num_env_steps=9), runner.sample()]


@pytest.mark.slow_but_first
@ALL_WAYS
def test_rows_tell_what_was_done_and_earned_before_in_the_same_episode(
    make: Make, mode: str, vectorized: bool, actors: int
) -> None:
    policy = Told()
    envs = [functools.partial(CountingEnv, 5)] * 2
    settings: dict[str, Any] = {"rollout_fragment_length": 7, "min_envs": 2}
    runner = make(envs, policy, mode, actors, vectorized=vectorized, **settings)
    assert runner.is_vectorized is vectorized
    taken = samples(runner)
    sampled = 0
    for sample in taken:
        rows = sample.single()
        assert rows["told_t"].tolist() == rows["t"].tolist()
        assert rows["told_eps_id"].tolist() == rows["eps_id"].tolist()
        assert rows["told_env_id"].tolist() == rows["env_id"].tolist()
        assert set(rows["told_timestep"].tolist()) == {sampled}
        sampled += sample.env_steps
    for env_id in (0, 1):
        parts = [rows[rows["env_id"] == env_id] for rows in (s.single() for s in taken)]
        t, actions, rewards, prev_actions, prev_rewards = (
            np.concatenate([part[name] for part in parts])
            for name in ("t", "actions", "rewards", "prev_actions", "prev_rewards")
        )
        assert np.flatnonzero(t == 0).tolist() == [*range(0, len(t), 5)]
        assert prev_actions.tolist() == np.where(t == 0, 0, np.roll(actions, 1)).tolist()
        assert prev_rewards.tolist() == np.where(t == 0, 0, np.roll(rewards, 1)).tolist()
    assert prev_rewards.dtype == np.float32
    for env_id in (0, 1):
        own = [(what, eps_id) for what, number, eps_id in policy.heard if number == env_id]
        ids = [env_id + 2 * number for number in range(len(own))]
        expected = [(what, i) for i in ids for what in ("start", "end 5")]
        assert own == expected[: len(own)]
        assert len(own) >= 6


@pytest.mark.slow
def test_all_ways_tell_the_same(make: Make) -> None:
    def take(mode: str, vectorized: bool, actors: int) -> list[Sample]:
        envs = [functools.partial(CountingEnv, 5)] * 2
        settings: dict[str, Any] = {"rollout_fragment_length": 7, "min_envs": 2, "seed": 1}
        settings["reward_connector"] = ClipRewards(12.0)
        return samples(make(envs, Told(), mode, actors, vectorized=vectorized, **settings))

    first, *others = [take(*way) for way in WAYS]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert_same(one.single().columns, two.single().columns)
    rows = first[1].single()
    assert set(rows["rewards"].tolist()) <= {11.0, 12.0}
    assert set(rows["prev_rewards"].tolist()) <= {0.0, 11.0, 12.0}


def by_parity(agent_id: Any, episode: Any) -> str:
    return "told" if agent_id % 2 else "plain"


class JustActions(Told):
    wanted_inputs = ("prev_actions", "prev_rewards")

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, **told: Any
    ) -> Any:
        assert tuple(told) == self.wanted_inputs
        return PolicyOutput((told["prev_actions"] + 1) % 2, states)


def test_only_agents_whose_policy_wants_them_have_such_columns(make: Make) -> None:
    policies = {"told": JustActions(), "plain": lambda seen: np.zeros(len(seen), np.int64)}
    env = functools.partial(CountingParallelEnv, dict.fromkeys(range(3), 6))
    runner = make([env] * 2, policies, policy_mapping_fn=by_parity, rollout_fragment_length=4)
    for _ in range(3):
        sample = runner.sample()
        assert not {"prev_actions", "prev_rewards"} & sample["plain"].columns.keys()
        for rows in sample["told"].split_by_trajectory():
            if rows["t"][0] == 0:
                assert (rows["prev_actions"][0], rows["prev_rewards"][0]) == (0, 0.0)
            assert rows["prev_actions"][1:].tolist() == rows["actions"][:-1].tolist()
            assert rows["prev_rewards"][1:].tolist() == rows["rewards"][:-1].tolist()
            assert rows["actions"].tolist() == ((rows["prev_actions"] + 1) % 2).tolist()


def test_an_agent_that_waited_is_told_of_the_reward_of_its_row(make: Make) -> None:
    runner = make([RoundRobinEnv], JustActions(), rollout_fragment_length=13)
    rewards: dict[tuple[int, int], list[float]] = {}
    told: dict[tuple[int, int], list[float]] = {}
    for _ in range(4):
        batch = runner.sample().single()
        for row in range(len(batch)):
            key = int(batch["eps_id"][row]), int(batch["agent_id"][row])
            rewards.setdefault(key, []).append(float(batch["rewards"][row]))
            told.setdefault(key, []).append(float(batch["prev_rewards"][row]))
    assert len(rewards) > 5
    for key, values in told.items():
        assert values == [0.0, *rewards[key][:-1]]


@pytest.mark.parametrize("vectorized", [True, False])
def test_after_a_fault_the_next_episode_is_told_of_nothing_before(
    make: Make, vectorized: bool
) -> None:
    policy = Told()
    runner = make(
        [functools.partial(FailingEnv, after=4, length=50)],
        policy,
        actors=1,
        vectorized=vectorized,
        faulty_episodes="truncate",
    )
    rows = runner.sample(num_env_steps=9).single()
    assert rows["t"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rows["prev_actions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    heard = [what for what, *_ in policy.heard]
    assert heard[:4] == ["start", "end 4", "start", "end 4"]


def test_an_episode_that_is_given_up_has_a_start_and_no_end(make: Make) -> None:
    policy = Told()
    runner = make([functools.partial(CountingEnv, 5)], policy, actors=1)
    runner.sample(num_env_steps=3)
    rows = runner.sample(num_env_steps=2, force_reset=True).single()
    assert rows["prev_actions"].tolist() == [0, 1]
    assert [what for what, *_ in policy.heard] == ["start", "start"]


class Misspelt(Told):
    wanted_inputs = ("prev_action",)


def test_what_cannot_be_told_is_refused_by_name(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"wanted_inputs=\('prev_action',\), and they are"):
        make([functools.partial(CountingEnv, 5)], Misspelt())

    class Shadowing(Told):
        def compute_actions(self, observations: Any, states: Any, **told: Any) -> Any:
            actions = told["prev_actions"]
            return PolicyOutput(actions, states, {"prev_actions": actions})

    runner = make([functools.partial(CountingEnv, 5)], Shadowing())
    with pytest.raises(ValueError, match=r"named as other columns: \['prev_actions'\]"):
        runner.sample()
