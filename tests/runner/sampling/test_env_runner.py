from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.batches.advantages import add_gae, bootstrap_rows
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.policies.connectors import (
    ClipActions,
    ClipRewards,
    Connector,
    ConnectorError,
    FrameStack,
    Normalize,
    Pipeline,
)
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import CallbackError, Callbacks
from envbus.runner.sampling.config import RunnerConfig, Sample
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.testing import assert_same
from tests.envs import SpaceEnv
from tests.runner.pool_envs import PATIENCE, EchoEnv, GatedEnv
from tests.runner.sampling_scenes import Log, counting, zeros
from tests.waiting import pass_time

Make = Callable[..., EnvRunner]
#: Mode of the pool, and whether in columns: all must do the same.
WAYS = [("NextStep", True), ("Disabled", True), ("Disabled", False)]
BOTH = pytest.mark.parametrize(("mode", "vectorized"), WAYS, ids=["next-step", "columns", "dicts"])


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(
        envs: Any, policies: Any = None, mode: str = "Disabled", actors: int = 2, **config: Any
    ) -> EnvRunner:
        pool = ActorPool(envs, num_actors=min(actors, len(envs)), autoreset_mode=mode)
        pools.append(pool)
        if isinstance(policies, type):
            policies = policies(pool.single_observation_space, pool.single_action_space, seed=3)
        return EnvRunner(pool, policies or zeros, RunnerConfig(**config))

    return _make


class Recurrent(Policy):
    """Its state counts the steps of the episode; the action is the state."""

    def initial_state(self) -> Any:
        return {"count": np.zeros(1, np.int64)}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        count = states["count"] + 1
        return PolicyOutput(
            count[:, 0] % 100, {"count": count}, {"explored": count[:, 0] * explore}
        )


def stack_and_normalize(pool: Any) -> Any:
    stack = FrameStack(pool.single_observation_space, 2)
    return Pipeline([stack, Normalize(stack.space)])


@pytest.mark.slow
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "recurrent", "connected"])
def test_all_ways_give_equal_batches(env: str, batch_mode: str) -> None:
    def run(
        mode: str, vectorized: bool, num_actors: int = 2
    ) -> tuple[list[Sample], dict[str, Any]]:
        name = "Pendulum-v1" if env in ("Pendulum-v1", "connected") else "CartPole-v1"
        short = functools.partial(gymnasium.make, name, max_episode_steps=13)
        pool = ActorPool([short] * 5, num_actors=num_actors, autoreset_mode=mode)
        more: dict[str, Any] = {}
        space = pool.single_observation_space
        if env == "connected":
            more["observation_connector"] = stack_and_normalize(pool)
            more["action_connector"] = ClipActions(pool.single_action_space)
            space = more["observation_connector"].connectors["1:Normalize"].space
        policy: Any = MlpPolicy(space, pool.single_action_space, seed=3)
        if env == "recurrent":
            policy = Recurrent()
            more["action_connector"] = Modulo(pool.single_action_space)
        config = RunnerConfig(
            rollout_fragment_length=17,
            batch_mode=batch_mode,
            min_envs=5,
            seed=1,
            vectorized=vectorized,
            **more,
        )
        with EnvRunner(pool, policy, config) as runner:
            assert runner.is_vectorized is vectorized
            samples = [runner.sample(), runner.sample(num_env_steps=33)]
            samples += [runner.sample(num_episodes=7), runner.sample(explore=False)]
            metrics = runner.get_metrics()
            return samples, {n: v for n, v in metrics.items() if not n.endswith("_ms")}

    first, *others = [run(mode, vectorized) for mode, vectorized in WAYS]
    others += [run(mode, True, num_actors=0) for mode in ("NextStep", "Disabled")]
    for other in others:
        for one, two in zip(first[0], other[0], strict=True):
            assert_same(one.single().columns, two.single().columns)
            assert one.env_steps == two.env_steps
            by_id = [sorted(sample.episodes, key=lambda e: e.eps_id) for sample in (one, two)]
            assert by_id[0] == by_id[1]
        assert first[1] == other[1]


class Modulo(ClipActions):
    """Brings counts into Discrete(2)."""

    def __call__(self, batch: Any, keys: Any) -> Any:
        return batch % 2


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "InvertedPendulum-v5"])
def test_a_recorded_run_is_what_envs_do_that_are_stepped_by_hand(
    make: Make, env: str, mode: str, vectorized: bool
) -> None:
    runner = make([env] * 3, MlpPolicy, mode, seed=7, vectorized=vectorized)
    parts = [runner.sample(num_env_steps=300).single() for _ in range(3)]
    ends = 0
    for env_id in range(3):
        by_hand = gymnasium.make(env)
        seen, _ = by_hand.reset(seed=7 + env_id)
        for part in parts:
            rows = part[part["env_id"] == env_id]
            for row in range(len(rows)):
                assert np.array_equal(rows["obs"][row], seen)
                action = rows["actions"][row]
                seen, reward, terminated, truncated, _ = by_hand.step(action)
                assert np.array_equal(rows["next_obs"][row], seen)
                assert rows["rewards"][row] == np.float32(reward)
                assert rows["terminateds"][row] == terminated
                assert rows["truncateds"][row] == truncated
                if terminated or truncated:
                    ends += 1
                    seen, _ = by_hand.reset()
    assert ends >= 3


@pytest.mark.slow_but_first
@BOTH
def test_fragments_have_exactly_the_asked_length_and_join_without_a_gap(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make(counting(3, 10), None, mode, rollout_fragment_length=7, vectorized=vectorized)
    samples = [runner.sample().single() for _ in range(5)]
    assert [len(sample) for sample in samples] == [21] * 5
    for env_id in range(3):
        t = np.concatenate([s["t"][s["env_id"] == env_id] for s in samples])
        assert t.tolist() == [i % 10 for i in range(35)]
        ids = np.concatenate([s["eps_id"][s["env_id"] == env_id] for s in samples])
        assert [len(set(ids[i : i + 10])) for i in (0, 10, 20)] == [1, 1, 1]
    assert len({int(s["unroll_id"][0]) for s in samples}) == 5
    assert [len(runner.sample(num_env_steps=n)) for n in (1, 15, 200, 0)] == [1, 15, 200, 0]


@BOTH
def test_whole_episodes_are_packed(make: Make, mode: str, vectorized: bool) -> None:
    settings = {"batch_mode": "complete_episodes", "vectorized": vectorized}
    for length, rows in ((5, 10), (15, 20)):
        runner = make(counting(1, 10), None, mode, rollout_fragment_length=length, **settings)
        batch = runner.sample().single()
        assert batch["t"].tolist() == [*range(10)] * (rows // 10)


@BOTH
def test_an_episode_over_many_fragments_counts_once_and_whole(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make(counting(8, 20), None, mode, rollout_fragment_length=2, vectorized=vectorized)
    assert [len(runner.sample()) for _ in range(8)] == [16] * 8
    assert runner.get_metrics()["num_episodes"] == 0
    samples = [runner.sample() for _ in range(8)]
    assert [result.length for sample in samples for result in sample.episodes] == [20] * 8
    metrics = runner.get_metrics()
    assert (metrics["num_episodes"], metrics["episode_len_mean"]) == (8, 20)
    assert metrics["num_env_steps_sampled_lifetime"] == 256


@BOTH
def test_exactly_as_many_episodes_as_asked_all_done(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make(counting(3, 4), None, mode, vectorized=vectorized)
    runner.sample(num_env_steps=5)
    sample = runner.sample(num_episodes=5)
    batch = sample.single()
    ends = batch["terminateds"] | batch["truncateds"]
    assert (len(batch), ends.sum(), len(sample.episodes)) == (20, 5, 5)
    assert batch["t"].tolist() == [*range(4)] * 5
    assert len(runner.sample(num_episodes=0)) == 0
    with pytest.raises(ValueError, match="not both"):
        runner.sample(1, 1)


@BOTH
def test_a_forced_reset_begins_all_episodes_anew(make: Make, mode: str, vectorized: bool) -> None:
    runner = make(counting(2, 10), None, mode, rollout_fragment_length=3, vectorized=vectorized)
    first, second = runner.sample().single(), runner.sample(force_reset=True).single()
    assert second["t"].tolist() == [0, 1, 2] * 2
    assert not set(first["eps_id"]) & set(second["eps_id"])


@pytest.mark.slow_but_first
@BOTH
def test_a_time_out_gives_what_is_there_and_names_the_late(
    make: Make, mode: str, vectorized: bool, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    envs = [functools.partial(CountingEnv, 9), functools.partial(GatedEnv, gate, 9)]
    runner = make(envs, None, mode, rollout_fragment_length=2, vectorized=vectorized)
    sample = runner.sample(timeout=1.5)  # far longer than the first env takes
    assert sample.late == (1,)
    assert sample.single()["env_id"].tolist() == [0] * 2
    gate.touch()
    batch = runner.sample(timeout=PATIENCE).single()
    assert batch["env_id"].tolist() == [0] * 2 + [1] * 2
    assert batch["t"].tolist() == [2, 3, 0, 1]


@pytest.mark.slow_but_first
@BOTH
def test_a_time_out_also_ends_a_sample_in_which_some_env_is_always_ready(
    make: Make, mode: str, vectorized: bool
) -> None:
    def slow(observations: Any) -> Any:
        pass_time(0.01)  # the other env has stepped when this is over
        return zeros(observations)

    runner = make(counting(2, 1000), slow, mode, rollout_fragment_length=500, vectorized=vectorized)
    sample = runner.sample(timeout=1.2)  # some steps come within it
    assert 0 < sample.env_steps < 1000
    assert sample.late == (0, 1)
    rest = runner.sample(num_env_steps=10).single()
    assert rest["t"][0] == np.count_nonzero(sample.single()["env_id"] == 0)


@pytest.mark.slow_but_first
@BOTH
def test_with_enough_envs_stragglers_are_not_waited_for_and_lose_nothing(
    make: Make, mode: str, vectorized: bool, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    envs = [functools.partial(CountingEnv, 9)] * 3 + [functools.partial(GatedEnv, gate, 9)]
    runner = make(
        envs,
        None,
        mode,
        actors=4,
        rollout_fragment_length=4,
        enough_envs=0.75,
        min_envs=4,
        vectorized=vectorized,
    )
    first = runner.sample()  # without a time-out
    assert first.late == (3,)
    assert first.single()["env_id"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    columns, valid = first.single().padded(by="env")
    assert columns["obs"].shape[:2] == valid.shape == (4, 3)
    gate.touch()
    rows = [runner.sample().single() for _ in range(3)]
    joined = [part["t"][part["env_id"] == 3] for part in rows]
    t = np.concatenate(joined)
    assert t.tolist() == [step % 9 for step in range(len(t))]


@BOTH
def test_rows_say_which_weights_chose_them(make: Make, mode: str, vectorized: bool) -> None:
    runner = make(
        ["CartPole-v1"] * 2, MlpPolicy, mode, rollout_fragment_length=3, vectorized=vectorized
    )
    versions = []
    for _ in range(2):
        versions += runner.sample().single()["policy_version"].tolist()
        runner.set_weights(runner.get_weights(), version=4)
    assert versions == [0] * 6 + [4] * 6
    with pytest.raises(ConfigError, match=r"no policy 'x'; there are \['default_policy'\]"):
        runner.set_weights({"x": {}})


class Negated(Connector):
    def __init__(self, space: Any) -> None:
        self.space = space

    def __call__(self, batch: Any, keys: Any) -> Any:
        return -batch


@BOTH
def test_the_batch_has_what_the_policy_saw_and_gave_and_the_env_gets_the_converted_action(
    make: Make, mode: str, vectorized: bool
) -> None:
    seen: list[Any] = []

    def sevens(observations: Any) -> Any:
        seen.append(observations.copy())
        return np.full(len(observations), 7)

    runner = make(
        counting(2, 10),
        sevens,
        mode,
        min_envs=2,
        rollout_fragment_length=4,
        vectorized=vectorized,
        observation_connector=Negated(CountingEnv.observation_space),
        action_connector=Modulo(CountingEnv.action_space),
    )
    batch = runner.sample().single()
    assert batch["actions"].tolist() == [7] * 8
    # The env tells its step and what action it got, here 7 % 2; the policy sees these negated.
    assert batch["next_obs"][:, 1:3].tolist() == [[-step, -1] for step in (1, 2, 3, 4)] * 2
    assert batch["obs"].tolist() == [rows[env].tolist() for env in (0, 1) for rows in seen]


class Reusing(Negated):
    """Writes to one array each time."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.rows = np.zeros((2, *space.shape), space.dtype)

    def __call__(self, batch: Any, keys: Any) -> Any:
        self.rows[:] = -1
        self.rows[: len(batch)] = batch
        return self.rows[: len(batch)]


@BOTH
def test_a_connector_may_use_its_array_again(make: Make, mode: str, vectorized: bool) -> None:
    runner = make(
        counting(2, 10),
        lambda observations: observations[:, 3].astype(np.int64),
        mode,
        seed=3,
        vectorized=vectorized,
        observation_connector=Reusing(CountingEnv.observation_space),
    )
    for _ in range(3):  # one env waits while the other goes on
        batch = runner.sample(num_env_steps=5).single()
        assert batch["actions"].tolist() == batch["obs"][:, 3].tolist()


class Failing(Negated):
    def __call__(self, batch: Any, keys: Any) -> Any:
        raise ArithmeticError("too much")


@BOTH
@pytest.mark.parametrize("kind", ["observation_connector", "action_connector"])
def test_a_connector_that_fails_is_named_also_outside_a_pipeline(
    make: Make, mode: str, vectorized: bool, kind: str
) -> None:
    connector: Any = {kind: Failing(CountingEnv.observation_space)}
    runner = make(counting(1, 9), zeros, mode, vectorized=vectorized, **connector)
    with pytest.raises(ConnectorError, match="0:Failing failed: ArithmeticError: too much"):
        runner.sample(num_env_steps=1)


def test_callbacks_come_in_order_and_as_often_as_things_happen(make: Make) -> None:
    log = Log()
    runner = make(counting(2, 2), callbacks=log, rollout_fragment_length=3)
    assert not runner.is_vectorized
    runner.sample()
    episode = ["created", "start", "step", "step", "end"]
    for env_id in (0, 1):
        own = [name for name, number in log.calls if number == env_id and name != "sample"]
        assert own == ["env", *episode, "created", "start", "step"]
    assert log.calls[-1] == ("sample", 6)
    assert runner.get_metrics()["custom_metrics"]["steps_mean"] == 2


@pytest.mark.parametrize("name", ["created", "start", "step", "end"])
def test_a_callback_that_raises_is_named_and_nothing_half_recorded_stays(
    make: Make, name: str
) -> None:
    log = Log(failing=name)
    runner = make(counting(2, 3), callbacks=log, rollout_fragment_length=6)
    with pytest.raises(CallbackError, match=f"callback on_episode_{name} raised RuntimeError: no"):
        runner.sample()
    log.failing = ""
    batch = runner.sample().single()
    assert batch["t"].tolist() == [0, 1, 2] * 4


def test_a_metric_that_is_no_number_is_named_and_does_not_stay(make: Make) -> None:
    class Goals(Callbacks):
        goal: Any = "left"

        def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
            episode.custom_metrics["goal"] = self.goal

    goals = Goals()
    runner = make(counting(1, 3), callbacks=goals, rollout_fragment_length=3)
    with pytest.raises(CallbackError, match=r"on_episode_end .*\['goal'\] is 'left'; they are num"):
        runner.sample()
    goals.goal = np.float32(2.0)
    runner.sample()
    assert runner.get_metrics()["custom_metrics"]["goal_mean"] == 2.0


@BOTH
def test_state_goes_over_into_another_runner(make: Make, mode: str, vectorized: bool) -> None:
    one, other = (
        make(["CartPole-v1"], MlpPolicy, mode, vectorized=vectorized, rollout_fragment_length=2)
        for _ in range(2)
    )
    one.set_weights({"default_policy": one.policies["default_policy"].get_weights()}, version=3)
    one.sample()
    other.set_state(one.get_state())
    batch = other.sample().single()
    assert batch["policy_version"].tolist() == [3, 3]
    assert batch["unroll_id"].tolist() == [1, 1]
    assert other.get_metrics()["num_env_steps_sampled_lifetime"] == 4


def test_metrics_and_timers_can_be_read_before_the_first_sample(make: Make) -> None:
    metrics = make(counting(1, 3)).get_metrics()
    assert metrics["num_env_steps_sampled"] == metrics["mean_env_wait_ms"] == 0


def test_spaces_by_agent_and_the_end_of_use(make: Make) -> None:
    runner = make(counting(1, 3))
    assert runner.get_spaces() == {
        "agent0": (CountingEnv.observation_space, gymnasium.spaces.Discrete(100))
    }
    runner.assert_healthy()
    runner.stop()
    runner.stop()
    for use in (runner.sample, runner.assert_healthy):
        with pytest.raises(ClosedEnvironmentError):
            use()


def test_infos_and_spaces_without_a_fixed_size_go_the_general_way(make: Make) -> None:
    runner = make(counting(1, 3), infos=True)
    infos = runner.sample(num_env_steps=4).single()["infos"]
    assert [type(info) for info in infos] == [dict] * 4
    text = gymnasium.spaces.Text(5)
    runner = make([functools.partial(SpaceEnv, text, text)], lambda seen: ["ab"] * len(seen))
    batch = runner.sample(num_env_steps=3).single()
    assert batch["obs"].dtype == object
    assert batch["actions"].tolist() == ["ab"] * 3


def test_what_does_not_fit_together_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r'"Disabled": it cannot be .* infos are kept'):
        make(counting(1, 3), mode="NextStep", infos=True)
    with pytest.raises(ConfigError, match="with vectorized=True: callbacks are told"):
        make(counting(1, 3), vectorized=True, callbacks=Log())
    with pytest.raises(ConfigError, match='"NextStep" or "Disabled"'):
        make(counting(1, 3), mode="SameStep")
    with pytest.raises(ConfigError, match="policy 'default_policy' must have compute_actions"):
        make(counting(1, 3), 5)
    with pytest.raises(ConfigError, match="vectorized=False"):
        make(counting(1, 3)).add_policy("b", zeros)
    twins = functools.partial(gymnasium.make_vec, "CartPole-v1", num_envs=2)
    with pytest.raises(ConfigError, match="envs 1 to 2 are one vector env"):
        make(["CartPole-v1", twins], mode="NextStep")


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("clips", [True, False])
def test_actions_reach_the_env_inside_their_box_and_the_batch_has_the_policys(
    make: Make, mode: str, vectorized: bool, clips: bool
) -> None:
    box = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    runner = make(
        [functools.partial(EchoEnv, box)] * 2,
        lambda observations: np.full((len(observations), 2), [5.0, -5.0], np.float32),
        mode=mode,
        actors=1,
        vectorized=vectorized,
        clip_actions=clips,
    )
    batch = runner.sample(num_env_steps=4, timeout=PATIENCE).single()
    assert batch["actions"].tolist() == [[5.0, -5.0]] * 4
    assert batch["next_obs"].tolist() == [[1.0, -1.0] if clips else [5.0, -5.0]] * 4


@BOTH
def test_a_runner_whose_pool_somebody_else_has_used_begins_new_episodes(
    make: Make, caplog: pytest.LogCaptureFixture, mode: str, vectorized: bool
) -> None:
    runner = make(counting(2), mode=mode, vectorized=vectorized, seed=0)
    pool = runner.envs
    other = EnvRunner(pool, lambda rows: np.ones(len(rows), np.int64), RunnerConfig())
    uses = [
        lambda: other.sample(num_env_steps=10),
        lambda: pool.reset(5),
        lambda: pool.try_reset(1) if mode == "Disabled" else pool.reset(env_ids=[1]),
    ]
    seen = [runner.sample(num_env_steps=10)]
    seen.append(runner.sample(num_env_steps=10))
    assert not caplog.text
    for use in uses:
        use()
        seen += [runner.sample(num_env_steps=10), runner.sample(num_env_steps=10)]
    for sample in seen:
        rows = sample.single()
        (episodes, steps, *_), (*same, actions, _) = rows["obs"].T, rows["next_obs"].T
        assert same[0].tolist() == episodes.tolist()
        assert same[1].tolist() == (steps + 1).tolist() == (rows["t"] + 1).tolist()
        assert actions.tolist() == rows["actions"].tolist() == [0] * 10
    assert caplog.text.count("was used by somebody else") == 1
    pool.get_sub_environments()[0].get_attr("length")
    assert runner.sample(num_env_steps=2).single()["t"].tolist() == [10, 10]


def test_a_connector_of_a_policy_that_is_not_there_is_told_of(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    space = CountingEnv.observation_space
    runner = make(counting(1), observation_connector={"default": Normalize(space)})
    for _ in range(2):
        runner.sample(num_env_steps=2)
    assert caplog.text.count("observation_connector has the policies ['default']") == 1
    assert "there are ['default_policy']" in caplog.text


# --- how long to wait for more envs ----------------------------------------------------------


class Sizes(Policy):
    """Notes how many rows it is asked about, and calls a function before some question."""

    def __init__(self, before: int = -1, then: Callable[[], object] = bool) -> None:
        self.sizes: list[int] = []
        self.before, self.then = before, then

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        if len(self.sizes) == self.before:
            self.then()
        self.sizes.append(len(observations))
        return PolicyOutput(zeros(observations), states)


@BOTH
def test_a_slow_env_holds_the_others_up_for_the_batch_wait_only(
    make: Make, mode: str, vectorized: bool, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    policy = Sizes(3, gate.touch)  # by `min_envs` alone, only the first question would come
    envs = [functools.partial(CountingEnv, 9), functools.partial(GatedEnv, gate, 9)]
    settings: dict[str, Any] = {"min_envs": 2, "batch_wait": 0.02}
    runner = make(envs, policy, mode, rollout_fragment_length=5, vectorized=vectorized, **settings)
    batch = runner.sample(timeout=PATIENCE).single()
    assert batch["t"].tolist() == [0, 1, 2, 3, 4] * 2


@BOTH
def test_with_a_batch_wait_all_envs_are_waited_for(make: Make, mode: str, vectorized: bool) -> None:
    policy = Sizes()
    settings: dict[str, Any] = {"batch_wait": PATIENCE, "vectorized": vectorized}
    runner = make(counting(3, 9), policy, mode, rollout_fragment_length=5, **settings)
    runner.sample()
    assert policy.sizes == [3] * 5
    without = make(counting(3, 9), Sizes(), mode, actors=0, rollout_fragment_length=5, **settings)
    assert len(without.sample()) == 15


# --- rewards that are learnt from ------------------------------------------------------------


@BOTH
def test_the_batch_has_connected_rewards_and_the_metrics_those_of_the_env(
    make: Make, mode: str, vectorized: bool
) -> None:
    for actors in (2, 0):
        runner = make(
            counting(2, 4),
            None,
            mode,
            actors=actors,
            rollout_fragment_length=6,
            vectorized=vectorized,
            reward_connector=ClipRewards(12.0),
        )
        sample = runner.sample()
        rewards = sample.single()["rewards"]
        assert rewards.dtype == np.float32
        assert rewards.tolist() == [11, 12, 12, 12, 12, 12] * 2
        assert [result.episode_return for result in sample.episodes] == [11 + 12 + 13 + 14] * 2
        assert runner.get_metrics()["episode_return_mean"] == 50.0


class Discounted(Connector):
    """What rewards of the running episode add up to: has something of its own per env."""

    space = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float64)

    def __init__(self) -> None:
        self.sums: dict[Any, float] = {}

    def __call__(self, batch: Any, keys: Any) -> Any:
        for key, reward in zip(keys, batch.tolist(), strict=True):
            self.sums[key] = 0.5 * self.sums.get(key, 0.0) + reward
        return np.array([self.sums[key] for key in keys])

    def reset(self, env_ids: Any) -> None:
        for env_id in env_ids:
            self.sums.pop((env_id, "agent0"), None)


@BOTH
def test_a_reward_connector_knows_whose_reward_it_is_and_when_episodes_begin(
    make: Make, mode: str, vectorized: bool
) -> None:
    connectors = {"default_policy": Discounted()}
    settings: dict[str, Any] = {"vectorized": vectorized, "reward_connector": connectors}
    runner = make(counting(2, 2), None, mode, rollout_fragment_length=4, **settings)
    rewards = runner.sample().single()["rewards"].tolist()
    assert rewards == [11.0, 17.5, 21.0, 32.5] * 2


class OneForAll(Discounted):
    def __call__(self, batch: Any, keys: Any) -> Any:
        return batch.sum()


@BOTH
def test_a_reward_connector_returns_a_number_per_row(
    make: Make, mode: str, vectorized: bool
) -> None:
    runner = make(counting(2), None, mode, vectorized=vectorized, reward_connector=OneForAll())
    with pytest.raises(ConnectorError, match=r"made float64 of shape \(\) of [12] rewards"):
        runner.sample()


# --- what becomes of rows before they leave --------------------------------------------------


def with_advantages(rows: SampleBatch, policy: Any) -> SampleBatch:
    ends = rows["terminateds"], rows["truncateds"]
    valid = rows["next_obs_valid"]
    (last,) = bootstrap_rows(*ends, starts=rows.trajectory_starts(), next_obs_valid=valid)
    values = np.zeros(0)
    if len(last):
        answer = policy.compute_actions(rows["next_obs"][last], None, explore=False)
        values = answer.extras["vf_preds"]
    return add_gae(rows, values, gamma=0.9, gae_lambda=0.8)


@BOTH
def test_rows_are_postprocessed_where_they_are_made_by_policy_or_by_trajectory(
    make: Make, mode: str, vectorized: bool
) -> None:
    lengths: list[int] = []

    def one_by_one(rows: SampleBatch, policy: Any) -> SampleBatch:
        def one(trajectory: SampleBatch) -> SampleBatch:
            lengths.append(len(trajectory))
            return with_advantages(trajectory, policy)

        return rows.map_trajectories(one)

    found = []
    for function in (with_advantages, one_by_one):
        runner = make(
            counting(2, 4),
            MlpPolicy,
            mode,
            seed=0,
            min_envs=2,
            rollout_fragment_length=6,
            vectorized=vectorized,
            explore=False,
            postprocess=function,
        )
        found.append(runner.sample().single())
        assert runner.get_metrics()["num_agent_steps_sampled"] == 12
    assert lengths == [4, 2] * 2
    whole, split = found
    assert {"advantages", "value_targets", "loss_mask"} <= whole.columns.keys()
    np.testing.assert_allclose(whole["advantages"], split["advantages"], rtol=1e-4)
    assert whole["t"].tolist() == split["t"].tolist()


def test_what_postprocesses_may_leave_rows_out_and_has_to_return_some(make: Make) -> None:
    runner = make(counting(2, 4), postprocess=lambda rows, _: rows[rows["env_id"] == 1])
    sample = runner.sample(num_env_steps=8)
    assert (sample.env_steps, sample.agent_steps) == (8, 4)
    wrong = make(counting(1, 4), postprocess=lambda rows, _: None)
    with pytest.raises(CallbackError, match="postprocess raised TypeError: it returned None, and"):
        wrong.sample()
    with pytest.raises(ConfigError, match="postprocess must be a function of rows and policy"):
        make(counting(1, 4), postprocess=5)


# --- callbacks that know their runner, and iteration -----------------------------------------


class Knowing(Callbacks):
    """Notes what there is when it is called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_sample_end(self, *, sample: Sample) -> None:
        self.seen.append((self.runner, self.runner.policies))


@BOTH
def test_callbacks_know_the_runner_that_calls_and_its_policies(
    make: Make, mode: str, vectorized: bool
) -> None:
    callbacks = Knowing()
    with pytest.raises(RuntimeError, match="no runner"):
        _ = callbacks.runner
    policy = MlpPolicy(CountingEnv.observation_space, CountingEnv.action_space)
    settings: dict[str, Any] = {"vectorized": vectorized, "rollout_fragment_length": 2}
    runners = [make(counting(1), policy, mode, callbacks=callbacks, **settings) for _ in range(2)]
    for index in (0, 1, 0):  # both have the same callbacks
        runners[index].sample()
        assert callbacks.seen[-1] == (runners[index], {"default_policy": policy})
    callbacks.seen.clear()
    copied = pickle.loads(pickle.dumps(runners[0].config)).callbacks
    with pytest.raises(RuntimeError, match="no runner"):
        _ = copied.runner


def test_callbacks_of_single_episodes_may_use_the_runner(make: Make) -> None:
    class Annealing(Callbacks):
        def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
            self.runner.set_weights(self.runner.get_weights(), version=episode.eps_id + 10)

    runner = make(counting(1, 2), callbacks=Annealing(), rollout_fragment_length=5)
    assert runner.sample().single()["policy_version"].tolist() == [0, 0, 10, 10, 11]


@BOTH
def test_a_runner_is_iterated_over_sample_by_sample_until_it_is_stopped(
    make: Make, mode: str, vectorized: bool
) -> None:
    for actors in (2, 0):
        runner = make(
            counting(2, 9), None, mode, actors, rollout_fragment_length=3, vectorized=vectorized
        )
        taken = []
        for sample in runner:
            taken.append(sample.single()["t"].tolist())
            if len(taken) == 3:
                runner.stop()
        assert taken == [[0, 1, 2] * 2, [3, 4, 5] * 2, [6, 7, 8] * 2]
        assert list(runner) == []


# --- what callbacks keep of episodes ---------------------------------------------------------


@pytest.mark.parametrize("actors", [2, 0])
def test_lists_and_media_of_episodes_stand_in_the_metrics(make: Make, actors: int) -> None:
    class Keeping(Callbacks):
        def on_episode_step(self, *, episode: Any) -> None:
            episode.hist_data.setdefault("t", []).append(np.int64(episode.length))

        def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
            episode.media["last"] = np.full(2, episode.eps_id)

    runner = make(counting(1, 3), callbacks=Keeping(), actors=actors, rollout_fragment_length=6)
    sample = runner.sample()
    assert [result.hist_data for result in sample.episodes] == [{"t": [1.0, 2.0, 3.0]}] * 2
    metrics = runner.get_metrics()
    assert metrics["hist_data"] == {"t": [1.0, 2.0, 3.0] * 2}
    assert [item.tolist() for item in metrics["episode_media"]["last"]] == [[0, 0], [1, 1]]
    runner.sample(num_env_steps=1)
    metrics = runner.get_metrics()
    assert (metrics["hist_data"], metrics["episode_media"]) == ({}, {})


def test_a_list_that_holds_no_number_is_named(make: Make) -> None:
    class Words(Callbacks):
        def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
            episode.hist_data["goals"] = ["left"]

    runner = make(counting(1, 3), callbacks=Words(), rollout_fragment_length=3)
    with pytest.raises(CallbackError, match=r"hist_data\['goals'\] is \['left'\]; they are lists"):
        runner.sample()


class OneLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An episode is two steps of a game, which goes on behind it; as wrappers of Atari have it."""

    is_over = True

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        if self.is_over:
            self.is_over = False
            return super().reset(**kwargs)
        return self.env.unwrapped._observe(0), {}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        self.is_over = terminated or truncated
        return observation, reward, self.is_over or self.steps == 2, False, info


def game_of_lives() -> Any:
    return OneLife(gymnasium.wrappers.RecordEpisodeStatistics(CountingEnv(5)))


def test_whole_games_are_counted_where_each_life_is_an_episode(make: Make) -> None:
    class Games(Callbacks):
        def on_episode_end(self, *, episode: Any, fault: Any = None) -> None:
            game = episode.last_infos["agent0"].get("episode")
            if game is not None:
                episode.hist_data["game_length"] = [game["l"]]
                episode.hist_data["game_return"] = [game["r"]]

    runner = make([game_of_lives], callbacks=Games())
    runner.sample(num_episodes=6)
    metrics = runner.get_metrics()
    assert metrics["num_episodes"] == 6
    assert metrics["hist_data"] == {
        "game_length": [5.0, 5.0],
        "game_return": [11 + 12 + 13 + 14 + 15, 21 + 22 + 23 + 24 + 25],
    }
