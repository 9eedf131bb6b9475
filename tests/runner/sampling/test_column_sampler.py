from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.batches.nested import map_tree
from envbus.runner.engine.env_results import Rows
from envbus.runner.policies.connectors import ClipActions
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.column_sampler import ColumnPolicy
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.testing import assert_same
from tests.envs import FailingEnv
from tests.runner.pool_envs import PATIENCE, GatedEnv, KeyEnv
from tests.waiting import pass_time

Make = Callable[..., EnvRunner]
MODES = pytest.mark.parametrize("mode", ["NextStep", "Disabled"])


class Counted(Policy):
    """Acts by the sign of what it sees; counts the rows, and calls a function after some."""

    def __init__(self) -> None:
        self.rows = 0
        self.then: dict[int, Callable[[], object]] = {}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        for _ in observations:
            self.rows += 1
            self.then.get(self.rows, lambda: None)()
        return PolicyOutput((observations.sum(axis=1) > 0).astype(np.int64), states)


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        pass_time(0.003)
        return super().step(action)


def cart_pole(*, slow: bool = False) -> Any:
    env = gymnasium.make("CartPole-v1", max_episode_steps=13)
    return Slow(env) if slow else env


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(
        envs: Any,
        policy: Any = None,
        mode: str = "NextStep",
        actors: int | None = None,
        **config: Any,
    ) -> EnvRunner:
        num_actors = len(envs) if actors is None else actors
        pool = ActorPool(envs, num_actors=num_actors, autoreset_mode=mode)
        pools.append(pool)
        if policy is None:
            policy = MlpPolicy(pool.single_observation_space, pool.single_action_space, seed=3)
        return EnvRunner(pool, policy, RunnerConfig(seed=1, explore=False, **config))

    return _make


# --- run_ahead; `test_columns.py` has the rules -----------------------------------------------


@pytest.mark.slow
@MODES
def test_samples_are_the_same_whether_envs_run_ahead_or_not(make: Make, mode: str) -> None:
    envs = [functools.partial(cart_pole, slow=index == 0) for index in range(3)]
    taken = []
    for run_ahead in (0, 30):
        policy = Counted()
        runner = make(envs, policy, mode, rollout_fragment_length=20, run_ahead=run_ahead)
        samples = [runner.sample(), runner.sample(num_env_steps=31)]
        samples += [runner.sample(num_env_steps=n) for n in (2, 0)]
        samples += [runner.sample() for _ in range(3)]
        taken.append(samples)
        delivered = sum(sample.env_steps for sample in samples)
        assert (policy.rows > delivered + 3) is (run_ahead > 0)
    for one, other in zip(*taken, strict=True):
        assert one.policy_batches.keys() == other.policy_batches.keys()
        for name, column in one.single().columns.items() if len(one) else ():
            np.testing.assert_array_equal(column, other.single()[name])
        by_id = [sorted(sample.episodes, key=lambda e: e.eps_id) for sample in (one, other)]
        assert by_id[0] == by_id[1]


@MODES
def test_envs_run_ahead_as_far_as_asked_and_the_version_of_each_row_is_kept(
    make: Make, mode: str, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    policy = Counted()
    envs = [functools.partial(GatedEnv, gate, 9), functools.partial(CountingEnv, 4)]
    runner = make(envs, policy, mode, rollout_fragment_length=4, run_ahead=3)
    policy.then[1 + 7] = gate.touch  # the gated one's first row, and all that the other may have
    first = runner.sample(timeout=PATIENCE)
    assert first.single()["env_id"].tolist() == [0] * 4 + [1] * 4
    asked = policy.rows
    assert asked == 4 + 7
    runner.set_weights(runner.get_weights(), version=5)
    batches = [first.single(), *(runner.sample(timeout=PATIENCE).single() for _ in range(2))]
    assert batches[1]["policy_version"].tolist() == [5] * 4 + [0] * 3 + [5]
    for env_id, length in ((0, 9), (1, 4)):
        t = np.concatenate([batch["t"][batch["env_id"] == env_id] for batch in batches])
        assert t.tolist() == [step % length for step in range(12)]
    results = runner.get_metrics()
    assert results["num_env_steps_sampled"] == 24


def test_a_time_out_names_the_late_and_what_is_ahead_waits(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    envs = [functools.partial(GatedEnv, gate, 9), functools.partial(CountingEnv, 4)]
    runner = make(envs, Counted(), rollout_fragment_length=2, run_ahead=5)
    # What the second one has of the other env is ahead when the first one is over.
    first, second = (runner.sample(timeout=seconds) for seconds in (1.3, 0.3))
    assert first.late == second.late == (0,)
    assert first.single()["t"].tolist() == [0, 1]
    assert second.single()["t"].tolist() == [2, 3]
    gate.touch()
    batch = runner.sample(timeout=PATIENCE).single()
    assert batch["t"].tolist() == [0, 1, 0, 1]


def test_a_forced_reset_and_an_exception_discard_what_is_ahead(make: Make) -> None:
    policy = Counted()
    envs = [functools.partial(cart_pole, slow=index == 0) for index in range(2)]
    runner = make(envs, policy, rollout_fragment_length=5, run_ahead=5)
    seen = set(runner.sample().single()["eps_id"].tolist())
    batch = runner.sample(force_reset=True).single()
    assert batch["t"].tolist()[:5] == batch["t"].tolist()[5:] == [*range(5)]
    assert not seen & set(batch["eps_id"].tolist())

    def fail() -> None:
        raise RuntimeError("no")

    policy.then[policy.rows + 1] = fail
    with pytest.raises(RuntimeError, match="no"):
        runner.sample(num_env_steps=40)
    again = runner.sample().single()
    assert again["t"].tolist() == [*range(5)] * 2


def test_what_cannot_run_ahead_is_refused(make: Make) -> None:
    envs = [functools.partial(CountingEnv, 4)] * 2
    for settings, reason in (
        ({"pipelined": True}, "run_ahead=3 with pipelined=True"),
        ({"enough_envs": 0.5}, r"run_ahead=3 with enough_envs=0\.5"),
        ({"batch_mode": "complete_episodes"}, "run_ahead=3 with batch_mode"),
    ):
        with pytest.raises(ConfigError, match=reason):
            RunnerConfig(run_ahead=3, **settings)
    with pytest.raises(ConfigError, match="run_ahead must be at least 0"):
        RunnerConfig(run_ahead=-1)
    with pytest.raises(ConfigError, match="with run_ahead=3: infos are kept"):
        make(envs, Counted(), "Disabled", run_ahead=3, infos=True)
    with pytest.raises(ConfigError, match="run_ahead=3 needs columns"):
        make(envs, Counted(), "Disabled", run_ahead=3, vectorized=False)
    with pytest.raises(ConfigError, match="num_episodes=2: with run_ahead=3"):
        make(envs, Counted(), run_ahead=3).sample(num_episodes=2)


@MODES
def test_infos_that_nobody_asked_for_are_not_merged(make: Make, mode: str) -> None:
    envs = [functools.partial(KeyEnv, value) for value in (5, {"in": 1})]
    runner = make(envs, Counted(), mode, rollout_fragment_length=4, min_envs=2)
    assert runner.is_vectorized
    for _ in range(2):
        assert runner.sample().env_steps == 8


# --- envs in the runner's process ------------------------------------------------------------


class Adding(Policy):
    """Acts by the sign of what it has seen in the episode so far."""

    def initial_state(self) -> Any:
        return {"sum": np.zeros((), np.float64)}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        del explore
        total = states["sum"] + observations.reshape(len(observations), -1).sum(axis=1)
        actions = (total > 0).astype(np.int64)
        return PolicyOutput(actions, {"sum": total}, {"total": total})


class CountedPool(ActorPool):
    """A pool that notes what `step_in_place` returns, and counts calls of `recv`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.stepped: list[Rows | None] = []
        self.asked = 0

    def step_in_place(self, actions: Any) -> Rows | None:
        self.stepped.append(super().step_in_place(actions))
        return self.stepped[-1]

    def recv(self, *args: Any, **settings: Any) -> Any:
        self.asked += 1
        return super().recv(*args, **settings)


MakePool = Callable[..., CountedPool]


@pytest.fixture
def make_pool(pools: list[ActorPool]) -> MakePool:
    def _make(envs: Any, num_actors: int = 0, **settings: Any) -> CountedPool:
        pools.append(CountedPool(envs, num_actors=num_actors, **settings))
        return pools[-1]

    return _make


def assert_equal(one: Sample, other: Sample) -> None:
    columns = [
        {name: batch.columns for name, batch in sample.policy_batches.items()}
        for sample in (one, other)
    ]
    assert_same(*columns)
    assert one.episodes == other.episodes
    assert (one.late, one.env_steps) == (other.late, other.env_steps)


@pytest.mark.slow_but_first
@MODES
@pytest.mark.parametrize("num_envs", [1, 3])
def test_samples_are_those_of_envs_in_an_actor(
    make_pool: MakePool, mode: str, num_envs: int
) -> None:
    taken, calls = [], []
    for num_actors in (0, 1):
        pool = make_pool([cart_pole] * num_envs, num_actors, autoreset_mode=mode)
        if not num_actors:
            calls = pool.stepped
        config = RunnerConfig(seed=1, rollout_fragment_length=20, min_envs=num_envs)
        runner = EnvRunner(pool, Adding(), config)
        samples = [runner.sample(), runner.sample(num_env_steps=31), runner.sample()]
        samples += [runner.sample(num_env_steps=n) for n in (1, 0)]
        samples += [runner.sample(num_episodes=4), runner.sample(), runner.sample()]
        taken.append((samples, runner.metrics.read()))
    for one, other in zip(taken[0][0], taken[1][0], strict=True):
        assert_equal(one, other)
    assert taken[0][1] == taken[1][1]
    assert calls
    assert None not in calls


@MODES
def test_a_runner_with_one_env_asks_its_pool_only_where_episodes_begin(
    make_pool: MakePool, mode: str
) -> None:
    pool = make_pool([functools.partial(CountingEnv, 10)], autoreset_mode=mode)
    runner = EnvRunner(pool, Adding(), RunnerConfig(rollout_fragment_length=25))
    runner.sample()
    assert (len(pool.stepped), pool.asked) == (25, 3)
    assert runner.get_metrics()["mean_env_wait_ms"] > 0
    assert runner.timers.iterations == 28


def test_an_env_that_fails_costs_its_own_episode_only(make_pool: MakePool) -> None:
    taken = []
    for num_actors in (0, 1):
        pool = make_pool(
            [functools.partial(FailingEnv, after=7, length=50), functools.partial(CountingEnv, 50)],
            num_actors,
            restart=RestartPolicy(backoff=0.01),
        )
        runner = EnvRunner(
            pool, Adding(), RunnerConfig(rollout_fragment_length=12, faulty_episodes="truncate")
        )
        sample = runner.sample(timeout=PATIENCE)
        batch = sample.single()
        assert [fault.env_id for fault in sample.faults] == [0]
        assert batch["truncateds"].nonzero()[0].tolist() == [6]
        assert batch["t"].tolist()[:12] == [*range(7), *range(5)]
        taken.append(batch["incarnation"].tolist())
    assert taken[0] == taken[1]


def test_a_time_out_cuts_a_fragment_and_loses_nothing(make_pool: MakePool) -> None:
    waits = iter([False] * 9 + [True])

    class Late(CountingEnv):
        def step(self, action: np.int64) -> Any:
            if next(waits, False):
                expired.append(True)
            return super().step(action)

    expired: list[bool] = []
    pool = make_pool([functools.partial(Late, 100)])
    runner = EnvRunner(pool, Adding(), RunnerConfig(rollout_fragment_length=30))
    sampler: Any = runner._sampler
    sampler._is_over_time = lambda: bool(expired)
    first = runner.sample(timeout=PATIENCE)
    assert first.late == (0,)
    assert first.single()["t"].tolist() == [*range(10)]
    expired.clear()
    second = runner.sample(timeout=PATIENCE)
    assert second.late == ()
    assert second.single()["t"].tolist() == [*range(10, 40)]


def test_after_an_exception_of_the_policy_episodes_begin_anew(make_pool: MakePool) -> None:
    class Failing(Adding):
        calls = 0

        def compute_actions(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 8:
                raise RuntimeError("the eighth")
            return super().compute_actions(*args, **kwargs)

    pool = make_pool([functools.partial(CountingEnv, 50)] * 2)
    runner = EnvRunner(pool, Failing(), RunnerConfig(rollout_fragment_length=9))
    with pytest.raises(RuntimeError, match="eighth"):
        runner.sample()
    assert runner.sample().single()["t"].tolist()[:9] == [*range(9)]


# --- policies that work elsewhere, and pipelining --------------------------------------------


class Here(Policy):
    """Its state counts the steps of the episode, and the action follows from it."""

    def initial_state(self) -> Any:
        return np.zeros(1, np.int64)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        actions = (states + 1)[:, 0] // 3 % 2
        versions = np.full(len(actions), 7)
        return PolicyOutput(actions, states + 1, {"seen": observations[:, 0]}, versions)


class Elsewhere(Here):
    """The same in two steps: answers when asked to, and notes what happened in which order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.told: list[Any] = []
        self.open: dict[int, Any] = {}
        self.before_collect: Callable[[], None] = lambda: None

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        raise AssertionError("it has two steps")

    def submit_actions(
        self, observations: Any, states: Any, *, explore: bool = True, env_ids: Any = None
    ) -> Any:
        ticket = len(self.log)
        self.told.append(None if env_ids is None else env_ids.tolist())
        self.open[ticket] = (observations.copy(), states.copy())
        self.log.append(("submit", ticket))
        return ticket

    def collect_actions(self, ticket: Any) -> PolicyOutput:
        question = self.open.pop(ticket)
        self.before_collect()
        self.log.append(("collect", ticket))
        output: PolicyOutput = super().compute_actions(*question)
        return output

    def discard_actions(self, ticket: Any) -> None:
        self.log.append(("discard", ticket))
        self.open.pop(ticket, None)


def cart_poles(num_envs: int) -> list[Any]:
    return [cart_pole] * num_envs


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
                np.testing.assert_allclose(column, expected[name], rtol=1e-4, atol=1e-6)
            else:
                np.testing.assert_array_equal(column, expected[name])
        assert sorted(e.eps_id for e in one.episodes) == sorted(e.eps_id for e in other.episodes)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@MODES
def test_pipelined_sampling_gives_each_env_the_same_rows(
    make: Make, mode: str, batch_mode: str
) -> None:
    settings = {"rollout_fragment_length": 17, "batch_mode": batch_mode}
    for num_envs, actors in ((5, 2), (2, 1)):
        without = samples(make(cart_poles(num_envs), None, mode, actors, **settings))
        runner = make(cart_poles(num_envs), None, mode, actors, pipelined=True, **settings)
        assert_equal_rows(samples(runner), without)


def test_pipelined_fragments_have_exactly_the_asked_length(make: Make) -> None:
    runner = make([functools.partial(CountingEnv, 10)] * 3, Here(), actors=2, pipelined=True)
    for number in (1, 15, 200, 0, 2):
        assert len(runner.sample(num_env_steps=number)) == number
    batches = [runner.sample(num_env_steps=21).single() for _ in range(3)]
    for env_id in range(3):
        t = np.concatenate([batch["t"][batch["env_id"] == env_id] for batch in batches])
        assert ((t[1:] - t[:-1]) % 10 == 1).all()


@pytest.mark.slow_but_first
@MODES
def test_one_group_steps_while_the_policy_chooses_the_actions_of_the_other(
    make: Make, mode: str
) -> None:
    policy = Elsewhere()
    settings = {"actors": 2, "rollout_fragment_length": 17, "pipelined": True}
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


@pytest.mark.slow
def test_without_pipelining_a_policy_that_works_elsewhere_answers_at_once(make: Make) -> None:
    policy = Elsewhere()
    taken = samples(make(cart_poles(4), policy, actors=2, min_envs=4))
    assert_equal_rows(taken, samples(make(cart_poles(4), Here(), actors=2, min_envs=4)))
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
