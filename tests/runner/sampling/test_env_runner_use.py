"""`EnvRunner` from its making to its end: factories, state, stopping."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError

from envbus.bus.errors import ConfigError, RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.seeding import restart_seed
from envbus.runner.errors import Fault
from envbus.runner.policies.connectors import Normalize, Pipeline
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import CallbackError, Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.envs import FailingEnv
from tests.runner.pool_envs import GatedEnv
from tests.runner.sampling_scenes import counting, zeros

Make = Callable[..., EnvRunner]
BOTH = pytest.mark.parametrize("vectorized", [True, False], ids=["columns", "dicts"])


@pytest.fixture
def make() -> Iterator[Make]:
    runners: list[EnvRunner] = []

    def _make(envs: Any, make_module: Any = lambda envs: zeros, **config: Any) -> EnvRunner:
        runners.append(
            EnvRunner.from_factories(
                lambda: ActorPool(envs, num_actors=len(envs), autoreset_mode="Disabled"),
                make_module,
                RunnerConfig(**config),
            )
        )
        return runners[-1]

    yield _make
    for runner in runners:
        runner.envs.close(terminate=True)


def mlp(envs: ActorPool) -> MlpPolicy:
    return MlpPolicy(envs.single_observation_space, envs.single_action_space, seed=1)


@BOTH
def test_make_env_begins_with_new_envs_whatever_became_of_the_old(
    make: Make, vectorized: bool
) -> None:
    runner = make(["CartPole-v1"] * 2, mlp, seed=3, vectorized=vectorized)
    first = runner.sample(num_env_steps=20)
    pids = runner.envs.actor_pids()
    os.kill(pids[0], signal.SIGKILL)
    runner.make_env()
    runner.assert_healthy()
    assert not set(pids) & set(runner.envs.actor_pids())
    second = runner.sample(num_env_steps=20)
    # Neither an id nor an episode comes a second time, and counting goes on.
    assert not set(first.single()["eps_id"]) & set(second.single()["eps_id"])
    assert not np.array_equal(first.single()["obs"][0], second.single()["obs"][0])
    assert runner.get_metrics()["num_env_steps_sampled_lifetime"] == 40
    runner.stop()
    runner.make_env()
    assert len(runner.sample(num_env_steps=3)) == 3


def test_make_env_with_a_seed_repeats(make: Make) -> None:
    batches = []
    for _ in range(2):
        runner = make(["CartPole-v1"] * 2, mlp, seed=3, min_envs=2)
        runner.make_env()
        batches.append(runner.sample(num_env_steps=10).single()["obs"])
    assert np.array_equal(*batches)


@BOTH
def test_envs_made_anew_repeat_no_episode_of_an_env_that_was_restarted(
    make: Make, vectorized: bool
) -> None:
    runner = make(counting(1), seed=3, vectorized=vectorized)
    runner.make_env()
    (seed,) = runner.sample(num_env_steps=1).single()["obs"][:, 3].tolist()
    assert seed not in (3, restart_seed(3, 0, 1))


@BOTH
def test_make_module_makes_policies_of_the_next_version(make: Make, vectorized: bool) -> None:
    made: list[MlpPolicy] = []

    def factory(envs: ActorPool) -> MlpPolicy:
        made.append(mlp(envs))
        return made[-1]

    runner = make(["CartPole-v1"], factory, vectorized=vectorized)
    runner.set_weights(runner.get_weights(), version=4)
    first = runner.sample(num_env_steps=2).single()
    runner.make_module()
    second = runner.sample(num_env_steps=2).single()
    assert (first["policy_version"][0], second["policy_version"][0]) == (4, 5)
    assert list(runner.policies.values()) == [made[1]]
    assert not set(first["eps_id"]) & set(second["eps_id"])
    assert second["t"].tolist() == [0, 1]


@dataclass(frozen=True, kw_only=True)
class LongConfig(RunnerConfig):
    """Settings, and one of the envs' own."""

    length: int = 3


def test_factories_are_given_the_config_which_may_be_replaced() -> None:
    seen: list[tuple[Any, ...]] = []

    def make_env(config: LongConfig) -> ActorPool:
        return ActorPool(counting(1, config.length), num_actors=0)

    def make_module(envs: Any, config: LongConfig) -> Any:
        seen.append((envs, config))
        return zeros

    config = LongConfig(length=2)
    with EnvRunner.from_factories(make_env, make_module, config, with_config=True) as runner:
        assert [one.length for one in runner.sample(num_episodes=1).episodes] == [2]
        runner.config = LongConfig(length=5)
        runner.make_env()
        assert [one.length for one in runner.sample(num_episodes=1).episodes] == [5]
        runner.make_module()
        assert [given.length for _, given in seen] == [2, 5]
        assert seen[-1][0] is runner.envs


def failing_pool() -> ActorPool:
    """Return a pool whose envs 0 and 1, of one actor, die in their third step, for good."""
    envs = [functools.partial(FailingEnv, after=2, error=SystemExit(3))] * 2 + counting(2)
    restart = RestartPolicy(max_restarts=0)
    return ActorPool(envs, num_actors=2, restart=restart, autoreset_mode="Disabled")


@BOTH
def test_envs_that_were_given_up_stay_so_for_other_policies(vectorized: bool) -> None:
    runner = EnvRunner.from_factories(
        failing_pool, lambda _: zeros, RunnerConfig(min_envs=4, vectorized=vectorized)
    )
    with runner:
        runner.sample(num_env_steps=16)
        runner.make_module()
        batch = runner.sample(num_env_steps=16).single()
    assert np.bincount(batch["env_id"]).tolist() == [0, 0, 8, 8]


@BOTH
def test_envs_that_were_given_up_are_known_though_a_callback_raised(vectorized: bool) -> None:
    class Once(Callbacks):
        raises = True

        def on_fault(self, *, fault: Fault) -> None:
            if self.raises:
                self.raises = False
                raise RuntimeError("no")

    config = RunnerConfig(min_envs=4, vectorized=vectorized, callbacks=Once())
    with EnvRunner(failing_pool(), zeros, config) as runner:
        with pytest.raises(CallbackError, match="on_fault"):
            runner.sample(num_env_steps=16)
        with pytest.raises(RestartLimitError, match=r"envs \[0, 1\] of 4"):
            runner.assert_healthy()
        batch = runner.sample(num_env_steps=16).single()
    assert np.bincount(batch["env_id"]).tolist() == [0, 0, 8, 8]


def test_policies_that_do_not_fit_change_nothing(make: Make) -> None:
    made: list[Any] = [zeros, {"a": zeros, "b": zeros}]
    runner = make(counting(1, 3), lambda envs: made.pop(0), vectorized=True)
    runner.sample(num_env_steps=1)
    with pytest.raises(ConfigError, match="there are several policies"):
        runner.make_module()
    assert list(runner.policies) == ["default_policy"]
    assert runner.sample(num_env_steps=2).single()["t"].tolist() == [1, 2]


def test_envs_that_do_not_fit_are_closed(make: Make) -> None:
    modes = ["Disabled", "SameStep"]
    pools: list[ActorPool] = []

    def make_env() -> ActorPool:
        pools.append(ActorPool(counting(1, 3), autoreset_mode=modes.pop(0)))
        return pools[-1]

    runner = EnvRunner.from_factories(make_env, lambda envs: zeros)
    with pytest.raises(ConfigError, match='"NextStep" or "Disabled"'):
        runner.make_env()
    assert [pool.closed for pool in pools] == [True, True]
    with pytest.raises(ClosedEnvironmentError):
        runner.sample()


def test_a_mapping_that_was_replaced_outlives_the_envs(make: Make) -> None:
    policies = {"a": zeros, "b": zeros}
    runner = make(counting(1, 3), lambda envs: policies, policy_mapping_fn=lambda *_: "a")
    runner.policy_mapping_fn = lambda *_: "b"
    runner.make_env()
    assert runner.sample(num_env_steps=3).policy_batches.keys() == {"b"}


def test_a_mapping_outlives_all_policies_but_one(make: Make) -> None:
    made: list[Any] = [{"a": zeros, "b": zeros}, {"a": lambda obs: np.ones(len(obs), np.int64)}]
    runner = make(["CartPole-v1"], lambda envs: made.pop(0))
    runner.policy_mapping_fn = lambda *_: "a"
    runner.sample(num_env_steps=1)
    runner.make_module()
    assert list(runner.policies) == ["a"]
    assert runner.sample(num_env_steps=2).single()["actions"].tolist() == [1, 1]
    assert not runner.is_vectorized  # another policy may be added, as before
    runner.add_policy("b", zeros, lambda *_: "b")
    runner.sample(force_reset=True, num_env_steps=1)
    runner.remove_policy("b", lambda *_: "a")
    runner.make_env()
    assert runner.sample(num_env_steps=1).policy_batches.keys() == {"a"}


def test_a_policy_with_other_columns_in_the_place_of_one_needs_new_episodes(make: Make) -> None:
    runner = make(counting(1, 9), vectorized=False)
    runner.sample(num_env_steps=1)

    def wider(observations: Any) -> PolicyOutput:
        count = len(observations)
        return PolicyOutput(np.zeros(count, np.int64), extras={"tag": np.ones(count)})

    runner.add_policy("default_policy", wider)
    with pytest.raises(ValueError, match=r"'tag'.* sample with force_reset=True next"):
        runner.sample(num_env_steps=20)
    runner.add_policy("default_policy", zeros)
    assert "tag" not in runner.sample(num_env_steps=20, force_reset=True).single()


def test_without_factories_nothing_can_be_made_anew() -> None:
    with ActorPool(counting(1, 3), autoreset_mode="Disabled") as pool:
        runner = EnvRunner(pool, zeros)
        for verb in (runner.make_env, runner.make_module):
            with pytest.raises(ConfigError, match=r"EnvRunner\.from_factories"):
                verb()
        with pytest.raises(ConfigError, match="policy_mapping_fn: rows are kept in columns"):
            runner.policy_mapping_fn = lambda *_: "a"
        assert len(runner.sample(num_env_steps=2)) == 2


def test_what_a_factory_raises_closes_the_envs() -> None:
    pools: list[ActorPool] = []

    def make_env() -> ActorPool:
        pools.append(ActorPool(counting(1, 3)))
        return pools[-1]

    with pytest.raises(ConfigError, match="at least one policy"):
        EnvRunner.from_factories(make_env, lambda envs: {})
    assert pools[0].closed


def test_envs_that_are_no_runners_are_closed() -> None:
    pools: list[ActorPool] = []

    def make_pool() -> ActorPool:
        pools.append(ActorPool(counting(1, 3)))
        return pools[-1]

    makes: list[Callable[[], Any]] = [make_pool, lambda: [make_pool(), make_pool()]]
    runner = EnvRunner.from_factories(lambda: makes.pop(0)(), lambda envs: zeros)
    with pytest.raises(ConfigError, match="at most one pool"):
        runner.make_env()
    with pytest.raises(ConfigError, match="at most one pool"):
        EnvRunner.from_factories(lambda: [make_pool(), make_pool()], lambda envs: zeros)
    assert [pool.closed for pool in pools] == [True] * 5


def build_normalized(vectorized: bool) -> EnvRunner:
    pool = ActorPool(["CartPole-v1"], autoreset_mode="Disabled")
    connector = Pipeline([Normalize(pool.single_observation_space)])
    config = RunnerConfig(
        observation_connector=connector, rollout_fragment_length=30, vectorized=vectorized
    )
    return EnvRunner(pool, mlp(pool), config)


@pytest.mark.slow_but_first
@BOTH
def test_state_has_weights_versions_connectors_counts_and_ids(vectorized: bool) -> None:
    """And no running episodes: who takes it over begins new ones."""

    with build_normalized(vectorized) as one, build_normalized(vectorized) as other:
        one.set_weights(one.get_weights(), version=3)
        ids = {eps_id for _ in range(3) for eps_id in one.sample().single()["eps_id"].tolist()}
        state = one.get_state()
        other.set_state(state)
        batch = other.sample().single()
        assert not ids & set(batch["eps_id"])
        assert batch["t"][0] == 0
        assert batch["unroll_id"][0] == 3
        assert set(batch["policy_version"]) == {3}
        count = state["connectors"]["observation/0:Normalize"]["count"]
        assert other.get_state()["connectors"]["observation/0:Normalize"]["count"] > count > 90
        assert other.get_metrics()["num_env_steps_sampled_lifetime"] == 120


@BOTH
def test_episodes_that_run_keep_their_ids_when_a_state_is_set(make: Make, vectorized: bool) -> None:
    runner = make(counting(2, 4), rollout_fragment_length=2, vectorized=vectorized)
    first = runner.sample().single()["eps_id"].tolist()
    runner.set_state({**runner.get_state(), "next_eps_id": 100})
    assert runner.sample().single()["eps_id"].tolist() == first
    assert runner.sample().single()["eps_id"].tolist() == [100, 100, 101, 101]


def test_a_state_of_other_policies_is_refused_and_changes_nothing(make: Make) -> None:
    runner = make(counting(1, 3), lambda envs: {"a": zeros})
    state = make(counting(1, 3), lambda envs: {"b": zeros}).get_state()
    with pytest.raises(ConfigError, match="no policy 'b'"):
        runner.set_state(state)
    with (
        build_normalized(False) as other,
        pytest.raises(
            ConfigError, match=r"nothing of the connectors \[.observation/0:Normalize.\]"
        ),
    ):
        other.set_state(state)


@BOTH
def test_a_state_of_which_a_part_is_refused_changes_nothing(vectorized: bool) -> None:
    with build_normalized(vectorized) as runner:
        runner.sample()
        before = runner.get_state()
        weights, version = before["policies"]["default_policy"]
        changed = {name: values + 1 for name, values in weights.items()}
        others = {"policies": {"default_policy": (changed, version + 1)}, "next_eps_id": 1000}
        good = before["connectors"]["observation/0:Normalize"]
        for refused in (
            {"connectors": {"observation/0:Normalize": {"count": 3, "means": ["no"], "m2s": []}}},
            {
                "connectors": {"observation/0:Normalize": {**good, "count": 3}},
                "metrics": dict.fromkeys(before["metrics"], "no"),
            },
        ):
            with pytest.raises(ValueError, match=r"could not convert|invalid literal"):
                runner.set_state({**before, **others, **refused})
        after = runner.get_state()
        assert after["policies"]["default_policy"][1] == version
        for name, values in after["policies"]["default_policy"][0].items():
            assert np.array_equal(values, weights[name])
        both = [one["connectors"]["observation/0:Normalize"] for one in (before, after)]
        assert both[0]["count"] == both[1]["count"]
        assert np.array_equal(both[0]["means"][0], both[1]["means"][0])
        assert after["next_eps_id"] == before["next_eps_id"]
        for wrong in (-1, 2**63, 0.5, None):
            with pytest.raises(ConfigError, match="whole numbers"):
                runner.set_state({**before, "next_eps_id": wrong})


class InterruptedPolicy(MlpPolicy):
    is_interrupted = False

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        super().set_weights(weights, version)
        if self.is_interrupted:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_state_is_set_comes_when_all_of_it_is_set() -> None:
    pool = ActorPool(["CartPole-v1"], autoreset_mode="Disabled")
    spaces = pool.single_observation_space, pool.single_action_space
    policy = InterruptedPolicy(*spaces, seed=1)
    with EnvRunner(pool, policy, RunnerConfig()) as runner:
        state = {**runner.get_state(), "next_eps_id": 500, "num_samples": 50}
        policy.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            runner.set_state(state)
        assert runner.ids_reached() == (500, 50)


@BOTH
def test_evaluation_teaches_connectors_nothing(vectorized: bool) -> None:
    with build_normalized(vectorized) as runner:
        runner.sample()
        counts = []
        for explore in (True, False, False, True):
            runner.sample(explore=explore)
            counts.append(runner.get_state()["connectors"]["observation/0:Normalize"]["count"])
        assert counts[0] == counts[1] == counts[2] < counts[3]


class FailsAtTheEnd(Callbacks):
    fails = True

    def on_sample_end(self, *, sample: Any) -> None:
        if self.fails:
            raise RuntimeError("no")


@BOTH
def test_after_a_callback_failed_at_the_end_of_a_sample_new_episodes_begin(
    make: Make, vectorized: bool
) -> None:
    callbacks = FailsAtTheEnd()
    runner = make(
        counting(2, 9), callbacks=callbacks, rollout_fragment_length=5, vectorized=vectorized
    )
    with pytest.raises(CallbackError, match="on_sample_end raised RuntimeError: no"):
        runner.sample()
    callbacks.fails = False
    first, second = runner.sample().single(), runner.sample().single()
    assert first["t"].tolist() == [0, 1, 2, 3, 4] * 2
    assert second["t"].tolist() == [5, 6, 7, 8, 0] * 2


class Stops(Callbacks):
    runner: Any = None

    def on_episode_step(self, *, episode: Any) -> None:
        if episode.length == 3:
            self.runner.stop()


def test_a_callback_may_stop_the_runner_during_a_sample(make: Make) -> None:
    callbacks = Stops()
    runner = make(counting(2, 50), callbacks=callbacks)
    callbacks.runner = runner
    with pytest.raises(ClosedEnvironmentError, match="stopped during a sample"):
        runner.sample(num_env_steps=1000)
    runner.stop()
    with pytest.raises(ClosedEnvironmentError, match=r"after `stop\(\)`"):
        runner.sample()


@pytest.mark.slow_but_first
@BOTH
@pytest.mark.parametrize("stops", [True, False], ids=["stop", "exception"])
def test_a_signal_ends_a_sample_that_waits_for_an_env(
    make: Make, vectorized: bool, stops: bool, tmp_path: Path
) -> None:
    """By a handler that stops the runner, or one that raises, as Ctrl-C does."""
    gate = tmp_path / "open"
    runner = make([functools.partial(GatedEnv, gate)] * 2, vectorized=vectorized)

    def handle(*_: Any) -> None:
        if not stops:
            raise KeyboardInterrupt
        runner.envs.close(terminate=True)

    old = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(ClosedEnvironmentError if stops else KeyboardInterrupt):
            runner.sample(num_env_steps=4)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)
    if not stops:  # the next one begins new episodes
        gate.touch()
        assert runner.sample(num_env_steps=4).single()["t"].tolist() == [0, 1, 0, 1]
