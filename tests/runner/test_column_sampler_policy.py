from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.column_sampler import ColumnPolicy
from envbus.runner.connectors import ClipActions
from envbus.runner.env_runner import EnvRunner
from envbus.runner.mlp import MlpPolicy
from envbus.runner.nested import map_tree
from envbus.runner.policies import FunctionPolicy, Policy, PolicyOutput
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig, Sample

Make = Callable[..., EnvRunner]


class Elsewhere(Policy):
    """Answers when it is asked to; keeps the observations and notes what happened in which order.

    Its state counts the steps of the episode, and the action follows from it.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.told: list[Any] = []
        self.open: dict[int, Any] = {}
        self.before_collect: Callable[[], None] = lambda: None

    def initial_state(self) -> Any:
        return np.zeros(1, np.int64)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        raise AssertionError("it has two steps")

    def submit_actions(
        self, observations: Any, states: Any, *, explore: bool = True, env_ids: Any = None
    ) -> Any:
        ticket = len(self.log)
        self.told.append(None if env_ids is None else env_ids.tolist())
        self.open[ticket] = (observations.copy(), states + 1)
        self.log.append(("submit", ticket))
        return ticket

    def collect_actions(self, ticket: Any) -> PolicyOutput:
        observations, states = self.open.pop(ticket)
        self.before_collect()
        self.log.append(("collect", ticket))
        actions = states[:, 0] // 3 % 2
        versions = np.full(len(actions), 7)
        return PolicyOutput(actions, states, {"seen": observations[:, 0]}, versions)

    def discard_actions(self, ticket: Any) -> None:
        self.log.append(("discard", ticket))
        self.open.pop(ticket, None)


class Here(Elsewhere):
    """The same without two steps."""

    submit_actions = None  # type: ignore[assignment]
    collect_actions = None  # type: ignore[assignment]

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        actions = (states + 1)[:, 0] // 3 % 2
        versions = np.full(len(actions), 7)
        return PolicyOutput(actions, states + 1, {"seen": observations[:, 0]}, versions)


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(
        envs: Any, policy: Any = None, mode: str = "NextStep", actors: int = 2, **config: Any
    ) -> EnvRunner:
        pool = ActorPool(envs, num_actors=actors, autoreset_mode=mode)
        pools.append(pool)
        if policy is None:
            policy = MlpPolicy(pool.single_observation_space, pool.single_action_space, seed=3)
        return EnvRunner(pool, policy, RunnerConfig(seed=1, explore=False, **config))

    return _make


def cart_poles(num_envs: int) -> list[Any]:
    return [functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=13)] * num_envs


def samples(runner: EnvRunner) -> list[Sample]:
    taken = [runner.sample(), runner.sample(num_env_steps=33), runner.sample(num_episodes=7)]
    return [*taken, runner.sample(), runner.sample(num_env_steps=2)]


def assert_equal_rows(ones: list[Sample], others: list[Sample]) -> None:
    """Exactly, but for numbers that a network gives: batches of other sizes round otherwise."""
    for one, other in zip(ones, others, strict=True):
        columns, expected = one.single().columns, other.single().columns
        assert columns.keys() == expected.keys()
        for name, column in columns.items():
            if name in ("action_logp", "vf_preds"):
                np.testing.assert_allclose(column, expected[name], rtol=1e-4)
            else:
                np.testing.assert_array_equal(column, expected[name])
        assert sorted(e.eps_id for e in one.episodes) == sorted(e.eps_id for e in other.episodes)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_pipelined_sampling_gives_each_env_the_same_rows(
    make: Make, mode: str, batch_mode: str
) -> None:
    settings = {"rollout_fragment_length": 17, "batch_mode": batch_mode}
    for num_envs, actors in ((5, 2), (2, 1)):
        without = samples(make(cart_poles(num_envs), None, mode, actors, **settings))
        runner = make(cart_poles(num_envs), None, mode, actors, pipelined=True, **settings)
        assert_equal_rows(samples(runner), without)


def test_pipelined_fragments_have_exactly_the_asked_length(make: Make) -> None:
    runner = make([functools.partial(CountingEnv, 10)] * 3, Here(), pipelined=True)
    for number in (1, 15, 200, 0, 2):
        assert len(runner.sample(num_env_steps=number)) == number
    batches = [runner.sample(num_env_steps=21).single() for _ in range(3)]
    for env_id in range(3):
        t = np.concatenate([batch["t"][batch["env_id"] == env_id] for batch in batches])
        assert ((t[1:] - t[:-1]) % 10 == 1).all()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_one_group_steps_while_the_policy_chooses_the_actions_of_the_other(
    make: Make, mode: str
) -> None:
    policy = Elsewhere()
    settings = {"rollout_fragment_length": 17, "pipelined": True}
    taken = samples(make(cart_poles(6), policy, mode, **settings))
    assert_equal_rows(taken, samples(make(cart_poles(6), Here(), mode, **settings)))
    assert taken[0].single()["policy_version"].tolist() == [7] * 102
    assert not policy.open
    # The second group is submitted before the first is collected, and so on.
    assert policy.log[:6] == [
        ("submit", 0),
        ("submit", 1),
        ("collect", 0),
        ("submit", 3),
        ("collect", 1),
        ("submit", 5),
    ]
    # Three envs are in each actor: two of one and one of the other are a group.
    assert policy.told[:4] == [[0, 1, 5], [2, 3, 4], [0, 1, 5], [2, 3, 4]]


def test_without_pipelining_a_policy_that_works_elsewhere_answers_at_once(make: Make) -> None:
    policy = Elsewhere()
    taken = samples(make(cart_poles(4), policy, min_envs=4))
    assert_equal_rows(taken, samples(make(cart_poles(4), Here(), min_envs=4)))
    assert policy.log[::2] == [("submit", number) for number in range(0, len(policy.log), 2)]
    assert policy.log[1::2] == [("collect", number) for number in range(0, len(policy.log), 2)]


def test_a_policy_that_works_elsewhere_is_not_told_of_envs_whose_observations_were_changed(
    make: Make,
) -> None:
    policy = Elsewhere()
    changed = make(cart_poles(2), policy, observation_connector=Doubled())
    changed.sample(num_env_steps=4)
    assert policy.told == [None] * len(policy.told)


class Doubled(ClipActions):
    def __init__(self) -> None:
        super().__init__(gymnasium.spaces.Discrete(2))

    def __call__(self, batch: Any, keys: Any) -> Any:
        return map_tree(lambda leaf: leaf * 2, batch)


def test_a_reset_forgets_what_was_submitted(make: Make) -> None:
    policy = Elsewhere()
    runner = make(cart_poles(2), policy, pipelined=True)
    policy.before_collect = _raise
    with pytest.raises(RuntimeError, match="no answer"):
        runner.sample(num_env_steps=8)
    policy.before_collect = lambda: None
    assert runner.sample(num_env_steps=8).single()["t"].tolist() == [0, 1, 2, 3] * 2
    assert not policy.open
    assert "discard" in dict(policy.log)


def _raise() -> None:
    raise RuntimeError("no answer")


def test_pipelining_takes_columns_and_two_envs(make: Make) -> None:
    with pytest.raises(ConfigError, match="at least two envs"):
        make(cart_poles(1), actors=1, pipelined=True)
    with pytest.raises(ConfigError, match="pipelined=True: infos are kept"):
        make(cart_poles(2), mode="Disabled", infos=True, pipelined=True)
    with pytest.raises(ConfigError, match="vectorized=False"):
        make(cart_poles(2), mode="Disabled", vectorized=False, pipelined=True)


def test_some_rows_of_an_answer_and_their_states() -> None:
    policy = ColumnPolicy(Here(), 4, unchanged=True)
    ids = np.array([1, 3])
    answer = policy.answer(policy.ask(ids, np.array([[5], [6]]), explore=True))
    kept = answer.select(np.array([False, True]))
    assert kept.rows == 1
    assert kept.versions is not None
    assert kept.versions.tolist() == [7]
    assert kept.columns()["seen"].tolist() == [6]
    assert kept.columns()["state_in"].tolist() == [[0]]
    policy.keep_states(ids[1:], kept.states)
    asked = policy.ask(np.arange(4), np.zeros((4, 1)), explore=True)
    assert asked.states[:, 0].tolist() == [0, 0, 0, 1]
    policy.begin(np.array([3]))
    assert policy.ask(ids, np.zeros((2, 1)), explore=True).states[:, 0].tolist() == [0, 0]


def test_one_version_holds_for_all_rows() -> None:
    here = FunctionPolicy(lambda seen: seen)
    here.policy_version = 3
    policy = ColumnPolicy(here, 2, unchanged=True)
    answer = policy.answer(policy.ask(np.arange(2), np.arange(2), explore=True))
    assert (answer.version, answer.versions) == (3, None)
    assert answer.select(np.array([True, False])).versions is None
