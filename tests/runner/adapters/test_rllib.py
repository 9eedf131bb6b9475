"""RLlib over envs in actors. Ray wants gymnasium 1.2.2: `make test-rllib` runs these tests."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner import (
    ActorPool,
    BusVectorEnv,
    EnvRunner,
    RestartPolicy,
    RunnerConfig,
    make_vec,
)
from envbus.runner.batches import MultiAgentBatch, SampleBatch
from envbus.runner.policies import RandomPolicy
from tests.integration.group_children import is_alive
from tests.waiting import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own imports
    pytest.importorskip("ray")
    pytest.importorskip("torch")
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.vector.sync_vector_multi_agent_env import SyncVectorMultiAgentEnv
    from ray.rllib.policy import sample_batch as rllib_batches
    from ray.tune.registry import register_env

    from envbus.runner.adapters.rllib import (
        BusMultiAgentEnvRunner,
        BusSingleAgentEnvRunner,
        BusVectorMultiAgentEnv,
        to_rllib,
    )

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

Run = Callable[..., Any]


class Told(CountingEnv):
    """Tells what RLlib gave it. A reset raises once if there is `context["file"]`.

    The second one kills its process in the step `context["dies_at"]` of its first life.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context.get("length", 5))
        self.action_space = gymnasium.spaces.Discrete(3)
        self.context = context

    def reset(self, **given: Any) -> Any:
        if self.context.get("file") and os.path.exists(self.context["file"]):
            os.unlink(self.context["file"])
            raise ValueError("failed in a reset")
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        dies_at = self.context.get("dies_at")
        if self.context.vector_index == 1 and self.count == dies_at:
            with suppress(FileExistsError):
                os.mkdir(self.context["mark"])
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def told(self) -> list[Any]:
        context = self.context
        return [type(context).__name__, context.worker_index, context.vector_index, dict(context)]


class Pair(MultiAgentEnv):
    """Two agents: "x" plays `length` steps; "y" comes in the second and is done in the fourth."""

    def __init__(self, context: Any = None) -> None:
        super().__init__()
        self.length = (context or {}).get("length", 7)
        self.possible_agents = ["x", "y"]
        box = gymnasium.spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.observation_spaces = dict.fromkeys(self.possible_agents, box)
        self.action_spaces = dict.fromkeys(self.possible_agents, gymnasium.spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.agents = 0, ["x"]
        return self._see("x"), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        seen = ["x", "y"] if 2 <= self.time <= 4 else ["x"]
        self.agents = [agent for agent in seen if agent == "x" or self.time < 4]
        rewards = {agent: float(actions.get(agent, 0)) + 1.0 for agent in seen}
        over = self.time >= self.length
        terminateds = {"__all__": over, **({"y": True} if self.time == 4 else {})}
        infos = {agent: {"time": self.time} for agent in seen}
        return self._see(*seen), rewards, terminateds, {"__all__": False}, infos

    def _see(self, *agents: str) -> dict[str, Any]:
        return {a: np.array([self.time, self.length], np.float32) for a in agents}


class Match(MultiAgentEnv):
    """Two agents see a digit each, 0 or 1, and get 1 for the action that is the same; 16 steps."""

    def __init__(self, context: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["x", "y"]
        box = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.observation_spaces = dict.fromkeys(self.agents, box)
        self.action_spaces = dict.fromkeys(self.agents, gymnasium.spaces.Discrete(2))
        self.random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.time = 0
        return self._see(), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        rewards = {agent: float(digit == actions[agent]) for agent, digit in self.digits.items()}
        return self._see(), rewards, {"__all__": self.time >= 16}, {"__all__": False}, {}

    def _see(self) -> dict[str, Any]:
        self.digits = {agent: int(self.random.integers(2)) for agent in self.agents}
        return {agent: np.eye(2, dtype=np.float32)[digit] for agent, digit in self.digits.items()}


class Counted(ConnectorV2):
    """Counts its calls, and changes nothing."""

    calls = 0

    def __call__(self, *, batch: Any, **_: Any) -> Any:
        self.calls += 1
        return batch


#: Our runners, RLlib's own, and an env of each.
BOTH = [
    pytest.param(BusSingleAgentEnvRunner, SingleAgentEnvRunner, "CartPole-v1", id="one agent"),
    pytest.param(BusMultiAgentEnvRunner, MultiAgentEnvRunner, Pair, id="several agents"),
]


@pytest.fixture
def run() -> Iterator[Run]:
    """Make an env runner of a class, for an env and its config."""
    runners = []

    def make(
        cls: Any,
        env: Any,
        env_config: dict[str, Any] | None = None,
        *,
        num_envs: int = 2,
        vectorize_mode: str = "sync",
        connectors: Sequence[ConnectorV2] = (),
        **more: Any,
    ) -> Any:
        config = (
            PPOConfig()
            .environment(env, env_config=env_config or {})
            .env_runners(
                env_runner_cls=cls,
                num_env_runners=0,
                num_envs_per_env_runner=num_envs,
                gym_env_vectorize_mode=vectorize_mode,
            )
            .debugging(seed=1)
            .fault_tolerance(**more)
        )
        if connectors:
            before, after = connectors
            config.env_runners(
                env_to_module_connector=lambda env, spaces, device: before,
                module_to_env_connector=lambda env, spaces: after,
            )
        if issubclass(cls, MultiAgentEnvRunner):
            config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *_, **__: "p")
        runners.append(cls(config=config, worker_index=3))
        return runners[-1]

    yield make
    for runner in runners:
        runner.stop()


def kill_first_actor(runner: Any) -> None:
    os.kill(runner.env.unwrapped.actor_pids()[0], signal.SIGKILL)


def counts(runner: Any) -> dict[str, float]:
    """Return what `get_metrics` tells of faults."""
    metrics = runner.get_metrics()
    return {n: metrics[n].peek() for n in metrics if n.endswith(("_faults", "_restarts"))}


# --- RLlib's own runner -----------------------------------------------------------------------


def _cart_poles(context: Any) -> BusVectorEnv:
    return make_vec("CartPole-v1", context["num_envs"], num_actors=2, restart=True)


@pytest.mark.parametrize(
    ("env", "env_config"),
    [
        (
            "envbus.runner:envbus/VectorEnv-v0",
            {"env": "CartPole-v1", "num_actors": 2, "restart": True},
        ),
        ("cart_poles", {}),
        (_cart_poles, {}),
    ],
)
def test_rllibs_own_runner_uses_a_vector_entry_point(
    run: Run, env: Any, env_config: dict[str, Any]
) -> None:
    register_env("cart_poles", _cart_poles)
    runner = run(SingleAgentEnvRunner, env, env_config, vectorize_mode="vector_entry_point")
    assert isinstance(runner.env.unwrapped, BusVectorEnv)
    runner.sample(num_timesteps=10)
    kill_first_actor(runner)
    cut = [e for e in runner.sample(num_timesteps=10) if e.is_truncated]
    assert [e.get_infos(-1)["fault"]["cause"] for e in cut] == ["crash"]


# --- one agent --------------------------------------------------------------------------------


def test_gymnasiums_envs_are_made_by_id_with_the_env_config(run: Run) -> None:
    runner = run(BusSingleAgentEnvRunner, "Pendulum-v1", {"g": 9.5})
    assert runner.env.unwrapped.get_attr("g") == (9.5, 9.5)


def test_a_class_gets_an_env_context_that_says_which_env_it_is(run: Run) -> None:
    runner = run(BusSingleAgentEnvRunner.with_settings(num_actors=2), Told, {"length": 3})
    said = ["EnvContext", 3, 0, {"length": 3}], ["EnvContext", 3, 1, {"length": 3}]
    assert runner.env.unwrapped.call("told") == said


def test_a_creator_of_tunes_registry_is_called(run: Run) -> None:
    register_env("told", lambda context: Told(context))
    runner = run(BusSingleAgentEnvRunner, "told", {"length": 3}, num_envs=1)
    assert runner.env.unwrapped.get_attr("length") == (3,)


def test_episodes_are_those_of_rllibs_own_runner(run: Run) -> None:
    told = []
    for cls in (BusSingleAgentEnvRunner, SingleAgentEnvRunner):
        episodes = run(cls, "CartPole-v1").sample(num_timesteps=100, explore=False)
        told.append(
            [(str(e.get_observations()), e.is_terminated, e.get_return()) for e in episodes]
        )
    assert told[0] == told[1]


def test_what_a_module_says_of_each_row_is_that_of_rllibs_own_runner(run: Run) -> None:
    told = []
    for cls in (BusSingleAgentEnvRunner, SingleAgentEnvRunner):
        runner = run(cls, "CartPole-v1")
        runner.set_state({"rl_module": runner.module.get_state(), "weights_seq_no": 7})
        told.append(runner.sample(num_timesteps=100))
    names = {"action_dist_inputs", "action_logp", "weights_seq_no"}
    for mine, other in zip(*told, strict=True):
        assert set(mine.extra_model_outputs) == set(other.extra_model_outputs) == names
        for name in names:
            ours, theirs = (one.get_extra_model_outputs(name) for one in (mine, other))
            assert len(ours) == len(mine)
            assert str(ours.tolist()) == str(theirs.tolist())
        assert set(mine.get_extra_model_outputs("weights_seq_no")) == {7}


@pytest.mark.parametrize(("ours", "theirs", "env"), BOTH)
def test_metrics_are_those_of_rllibs_own_runner_and_counts_of_faults(
    run: Run, ours: Any, theirs: Any, env: Any
) -> None:
    found = []
    for cls in (ours, theirs):
        runner = run(cls, env)
        for _ in range(2):
            runner.sample(num_timesteps=100)
        found.append(runner.get_metrics())
    mine, other = found
    faults = ("num_env_faults", "num_env_restarts", "num_actor_restarts")
    added = {f"{name}{end}" for name in faults for end in ("", "_lifetime")}
    assert mine.keys() - other.keys() == added
    assert other.keys() - mine.keys() == set()
    for name in other.keys() & {
        "episode_len_max",
        "episode_len_mean",
        "episode_return_mean",
        "num_env_steps_sampled",
        "num_env_steps_sampled_lifetime",
        "num_episodes",
    }:
        assert mine[name].peek() == other[name].peek()
    assert mine["num_episodes"].peek() > 0


@pytest.mark.parametrize(("ours", "theirs", "env"), BOTH)
def test_spaces_are_those_of_rllibs_own_runner(run: Run, ours: Any, theirs: Any, env: Any) -> None:
    assert run(ours, env).get_spaces() == run(theirs, env).get_spaces()


@pytest.mark.parametrize(("ours", "theirs", "env"), BOTH)
def test_connectors_are_called_as_often_as_by_rllibs_own_runner(
    run: Run, ours: Any, theirs: Any, env: Any
) -> None:
    calls = []
    for cls in (ours, theirs):
        connectors = Counted(), Counted()
        run(cls, env, connectors=connectors).sample(num_timesteps=100)
        calls.append([connector.calls for connector in connectors])
    assert calls[0] == calls[1]
    assert min(calls[0]) >= 50  # two envs step at once


def test_an_actor_that_is_killed_truncates_its_episodes_with_what_was_seen_last(run: Run) -> None:
    runner = run(BusSingleAgentEnvRunner.with_settings(num_actors=2), Told, {"length": 1000})
    runner.sample(num_timesteps=20)
    assert set(counts(runner).values()) == {0}
    kill_first_actor(runner)
    cut = [e for e in runner.sample(num_timesteps=40) if e.is_done]
    assert [e.is_truncated for e in cut] == [True]
    (episode,) = cut
    np.testing.assert_array_equal(episode.get_observations(-1), episode.get_observations(-2))
    assert episode.get_rewards(-1) == 0.0
    assert episode.get_infos(-1)["fault"]["cause"] == "crash"
    assert counts(runner) == {"num_env_faults": 1, "num_env_restarts": 0, "num_actor_restarts": 1}
    assert set(counts(runner).values()) == {0}
    metrics = runner.get_metrics()
    assert "num_env_faults_lifetime" in metrics


def test_what_a_process_wrote_before_it_died_is_not_taken_for_an_observation(
    run: Run, tmp_path: Any
) -> None:
    context = {"length": 1000, "dies_at": 4, "mark": str(tmp_path / "died")}
    runner = run(BusSingleAgentEnvRunner.with_settings(num_actors=1), Told, context)
    cut = [e for e in runner.sample(num_timesteps=20) if e.is_truncated]
    assert len(cut) == 2
    for episode in cut:
        assert [row[1] for row in episode.get_observations()] == [0, 1, 2, 3, 4, 4]


def test_a_reset_that_fails_begins_no_episode(run: Run, tmp_path: Any) -> None:
    broken = tmp_path / "broken"
    context = {"length": 3, "file": str(broken)}
    runner = run(BusSingleAgentEnvRunner, Told, context, num_envs=1)
    runner.sample(num_timesteps=3)
    broken.touch()
    episodes = [e for e in runner.sample(num_timesteps=12) if e.t_started == 0 and len(e)]
    assert len(episodes) >= 3
    for episode in episodes:
        assert [row[1] for row in episode.get_observations()] == [0, 1, 2, 3][: len(episode) + 1]
        assert "fault" not in episode.get_infos(0)
    assert not broken.exists()
    assert counts(runner)["num_env_restarts"] == 1


def test_what_envbus_gives_up_rllib_makes_anew(run: Run) -> None:
    cls = BusSingleAgentEnvRunner.with_settings(restart=RestartPolicy(max_restarts=0))
    runner = run(cls, Told, {"length": 1000}, restart_failed_sub_environments=True)
    runner.sample(num_timesteps=10)
    before = runner.env.unwrapped.actor_pids()
    kill_first_actor(runner)
    episodes = runner.sample(num_timesteps=10)
    assert sum(map(len, episodes)) >= 10
    assert not set(before) & set(runner.env.unwrapped.actor_pids())


def test_a_class_with_settings_can_be_pickled() -> None:
    cls = BusSingleAgentEnvRunner.with_settings(num_actors=1, check_finite=True)
    again = cloudpickle.loads(cloudpickle.dumps(cls))
    assert again.actor_settings == {"num_actors": 1, "check_finite": True}
    assert issubclass(again, BusSingleAgentEnvRunner)
    assert again.with_settings(num_actors=2).actor_settings["check_finite"] is True


def test_settings_are_checked_at_once() -> None:
    with pytest.raises(TypeError, match=r"did you mean 'num_actors'"):
        BusSingleAgentEnvRunner.with_settings(num_actor=2)
    with pytest.raises(ConfigError, match=r"wait must be one of"):
        BusMultiAgentEnvRunner.with_settings(wait="never")


# --- several agents ---------------------------------------------------------------------------


def test_results_are_those_of_rllibs_vector_env() -> None:
    envs = [partial(Pair, {"length": 5}), partial(Pair, {"length": 7})]
    ours, theirs = BusVectorMultiAgentEnv(envs, num_actors=1), SyncVectorMultiAgentEnv(envs)
    rng = np.random.default_rng(0)
    seen, infos = ours.reset(seed=4)
    assert str((seen, infos)) == str(theirs.reset(seed=4))
    for _ in range(25):
        actions = [{agent: int(rng.integers(2)) for agent in one} for one in seen]
        resets = theirs._autoreset_envs.copy()
        mine, other = ours.step(actions), theirs.step(actions)
        seen = mine[0]
        for index in range(2):
            parts = [0] if resets[index] else [0, 1, 2, 3, 4]
            for part in parts:
                assert str(mine[part][index]) == str(other[part][index])
    assert ours.single_observation_spaces == theirs.single_observation_spaces
    assert [env.possible_agents for env in ours.envs] == [["x", "y"]] * 2
    ours.close()
    theirs.close()


def test_an_actor_that_is_killed_truncates_all_agents_of_its_envs(run: Run) -> None:
    runner = run(BusMultiAgentEnvRunner.with_settings(num_actors=2), Pair, {"length": 1000})
    runner.sample(num_timesteps=6)
    kill_first_actor(runner)
    cut = [e for e in runner.sample(num_timesteps=40) if e.is_done]
    assert [(e.is_truncated, e.is_terminated) for e in cut] == [(True, False)]
    infos = cut[0].get_infos(-1)
    assert infos["x"]["fault"]["cause"] == "crash"
    agent = cut[0].agent_episodes["x"]
    assert (agent.is_truncated, agent.is_terminated) == (True, False)
    assert counts(runner)["num_env_faults"] == 1
    assert len(runner.sample(num_episodes=1, random_actions=True)) >= 1


def test_what_a_pool_gives_up_rllib_makes_anew(run: Run) -> None:
    cls = BusMultiAgentEnvRunner.with_settings(restart=RestartPolicy(max_restarts=0))
    runner = run(cls, Pair, restart_failed_sub_environments=True)
    runner.sample(num_timesteps=10)
    before = runner.env.unwrapped.actor_pids()
    kill_first_actor(runner)
    assert sum(map(len, runner.sample(num_timesteps=10))) >= 10
    assert not set(before) & set(runner.env.unwrapped.actor_pids())


def test_envs_with_one_agent_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use BusSingleAgentEnvRunner"):
        BusVectorMultiAgentEnv(["CartPole-v1"])


# --- trainings --------------------------------------------------------------------------------


@pytest.mark.timeout(1200)
def test_ppo_learns_cart_pole_while_its_actors_are_killed() -> None:
    cls = BusSingleAgentEnvRunner.with_settings(num_actors=2)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(env_runner_cls=cls, num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=128,
            num_epochs=10,
            lr=1e-3,
            lambda_=0.95,
            vf_loss_coeff=0.5,
            vf_clip_param=1e6,
            use_kl_loss=False,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False})
        .debugging(seed=3)
    )
    algo = config.build_algo()
    best, kills = 0.0, 0
    for iteration in range(40):
        if iteration % 2 == 1:
            kill_first_actor(algo.env_runner)
            kills += 1
        results = algo.train()["env_runners"]
        best = max(best, results["episode_return_mean"])
        if best >= 200.0:
            break
    faults = results["num_env_faults_lifetime"]
    algo.stop()
    assert best >= 200.0
    assert kills > 1
    assert faults >= 4 * (kills - 1)


def test_ppo_learns_with_several_agents_while_an_actor_is_killed() -> None:
    config = (
        PPOConfig()
        .environment(Match)
        .env_runners(
            env_runner_cls=BusMultiAgentEnvRunner.with_settings(num_actors=2),
            num_env_runners=0,
            num_envs_per_env_runner=4,
        )
        .multi_agent(policies={"p"}, policy_mapping_fn=lambda *_, **__: "p")
        .training(
            train_batch_size_per_learner=512,
            minibatch_size=128,
            num_epochs=10,
            lr=3e-3,
            gamma=0.0,  # an action brings what it brings at once
        )
        .debugging(seed=3)
    )
    algo = config.build_algo()
    returns = []
    for iteration in range(8):
        if iteration == 1:
            kill_first_actor(algo.env_runner)
        results = algo.train()["env_runners"]
        returns.append(results["episode_return_mean"])
    algo.stop()
    assert results["num_env_faults_lifetime"] == 2
    assert returns[0] < 22.0  # at random 16, of 32 at most
    assert returns[-1] > 26.0


@pytest.fixture
def cluster() -> Iterator[None]:
    """Let Ray have as many processors as a runner and an algorithm want."""
    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.timeout(600)
def test_a_remote_runner_that_is_killed_comes_back(cluster: None) -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            env_runner_cls=BusSingleAgentEnvRunner.with_settings(num_actors=2),
            num_env_runners=1,
            num_envs_per_env_runner=4,
        )
        .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
        .fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=0.0)
    )
    algo = config.build_algo()

    def processes() -> list[Any]:
        """Return the id of the runner's process, and those of its actors."""
        found: list[Any] = algo.env_runner_group.foreach_env_runner(
            lambda runner: (os.getpid(), runner.env.unwrapped.actor_pids()),
            local_env_runner=False,
        )
        return found

    algo.train()
    ((pid, actors),) = processes()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, actors)), "the ends of its actors")
    for _ in range(20):
        algo.train()
        if found := processes():
            break
    ((other, others),) = found
    assert other != pid
    assert len(others) == 2
    for _ in range(2):
        assert algo.train()["env_runners"]["num_env_steps_sampled"] >= 200
    algo.stop()
    wait_until(lambda: not any(map(is_alive, others)), "the ends of the other actors")


# --- batches ----------------------------------------------------------------------------------


def test_a_batch_has_rllibs_names() -> None:
    columns = {
        "obs": {"a": np.arange(5.0), "b": np.zeros((5, 2))},
        "next_obs": {"a": np.arange(1.0, 6.0), "b": np.zeros((5, 2))},
        "actions": np.arange(5),
        "rewards": np.ones(5, np.float32),
        "terminateds": np.array([False, True, False, False, False]),
        "truncateds": np.zeros(5, bool),
        "eps_id": np.array([1, 1, 2, 2, 2]),
        "t": np.array([0, 1, 0, 1, 2]),
        "unroll_id": np.array([3, 3, 4, 4, 4]),
        "agent_id": np.array(["left", "left", "right", "right", "right"]),
        "state_in": (np.arange(10.0).reshape(5, 2),),
        "policy_version": np.zeros(5, np.int64),
    }
    batch = SampleBatch(columns)
    theirs = to_rllib(batch)
    assert isinstance(theirs, rllib_batches.SampleBatch)
    assert len(theirs) == 5
    assert theirs["obs"]["a"] is columns["obs"]["a"]
    assert theirs["new_obs"]["a"].tolist() == [1, 2, 3, 4, 5]
    assert theirs["agent_index"].tolist() == [0, 0, 1, 1, 1]
    assert theirs["unroll_id"].tolist() == [3, 3, 4, 4, 4]
    assert theirs["seq_lens"].tolist() == [2, 3]
    assert theirs["state_in_0"].tolist() == [[0, 1], [4, 5]]
    assert theirs["policy_version"].tolist() == [0] * 5
    assert "prev_actions" not in theirs
    both = to_rllib(MultiAgentBatch({"p": batch, "q": batch[2:]}, env_steps=5))
    assert isinstance(both, rllib_batches.MultiAgentBatch)
    assert both.env_steps() == 5
    assert both["q"]["agent_index"].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"takes a SampleBatch or MultiAgentBatch"):
        to_rllib({"obs": 1})


def test_last_actions_and_rewards_are_added_where_an_episode_begins_in_the_batch() -> None:
    columns = {
        "actions": {"a": np.arange(1, 6), "b": np.ones((5, 2))},
        "rewards": np.arange(1, 6, dtype=np.float32),
        "eps_id": np.array([1, 1, 2, 2, 2]),
        "t": np.array([0, 1, 0, 1, 2]),
    }
    theirs = to_rllib(SampleBatch(columns), previous=True)
    assert theirs["prev_actions"]["a"].tolist() == [0, 1, 0, 3, 4]
    assert theirs["prev_actions"]["b"].sum(1).tolist() == [0, 2, 0, 2, 2]
    assert theirs["prev_rewards"].tolist() == [0, 1, 0, 3, 4]
    middle = SampleBatch(columns)[1:]
    with pytest.raises(ValueError, match=r"last actions of rows .*wanted_inputs"):
        to_rllib(middle, previous=True)
    recorded = middle.with_columns(prev_actions=np.arange(4), prev_rewards=np.ones(4))
    for previous in (False, True):
        assert to_rllib(recorded, previous=previous)["prev_actions"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("records", [False, True])
def test_last_actions_are_those_that_a_policy_is_told(records: bool) -> None:
    class Told(RandomPolicy):
        wanted_inputs = ("prev_actions", "prev_rewards") if records else ()

        def compute_actions(self, observations: Any, states: Any = None, **given: Any) -> Any:
            return super().compute_actions(observations, states, explore=given["explore"])

    space = gymnasium.make("CartPole-v1").action_space
    config = RunnerConfig(rollout_fragment_length=20, batch_mode="complete_episodes")
    with EnvRunner(ActorPool(["CartPole-v1"] * 2, num_actors=0), Told(space, seed=0), config) as r:
        batch = r.sample(num_env_steps=40).single()
    theirs = to_rllib(batch, previous=True)
    starts = np.flatnonzero(batch.trajectory_starts())
    assert (theirs["prev_actions"][starts] == 0).all()
    rest = np.setdiff1d(np.arange(len(batch)), starts)
    assert (theirs["prev_actions"][rest] == batch["actions"][rest - 1]).all()
    assert (theirs["prev_rewards"][rest] == batch["rewards"][rest - 1]).all()


def test_a_sample_of_an_env_runner_becomes_one() -> None:
    space = gymnasium.make("CartPole-v1").action_space
    config = RunnerConfig(rollout_fragment_length=20)
    pool = ActorPool(["CartPole-v1"] * 2, num_actors=0)
    with pool, EnvRunner(pool, RandomPolicy(space, seed=0), config) as runner:
        batch = runner.sample(num_env_steps=40).single()
    theirs = to_rllib(batch)
    assert len(theirs) == len(batch)
    assert int(theirs["seq_lens"].sum()) == len(batch)
    assert [len(part) for part in theirs.split_by_episode()] == [
        len(part) for part in batch.split_by_episode()
    ]
