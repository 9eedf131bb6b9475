"""RLlib's episodes from simulators at a bridge: `make test-rllib` runs these tests."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from envbus.actors import ActionTimeoutError, ClientTimeouts, ExternalEnvClient
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.runner.bridge import EpisodeLimits
from tests.integration.simulators import in_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own imports
    pytest.importorskip("ray")
    pytest.importorskip("torch")
    from ray.rllib.algorithms.ppo import PPOConfig

    from envbus.runner.adapters.rllib_bridge import BusExternalEnvRunner

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

COUNTS = gymnasium.spaces.Box(0.0, 1000.0, (2,), np.float32)
BUTTON = gymnasium.spaces.Discrete(3)


def config_of(cls: Any, observation_space: Any = COUNTS, action_space: Any = BUTTON) -> Any:
    return (
        PPOConfig()
        .environment(observation_space=observation_space, action_space=action_space)
        .env_runners(env_runner_cls=cls, num_env_runners=0)
        .debugging(seed=1)
    )


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    runners = []

    def make(cls: Any = BusExternalEnvRunner, **more: Any) -> Any:
        runners.append(cls(config=config_of(cls).env_runners(**more), worker_index=0))
        return runners[-1]

    yield make
    for runner in runners:
        runner.stop()


def bridge_of(runner: Any) -> Any:
    return runner.env.unwrapped.bridge


def seen(number: int, length: int) -> Any:
    return np.array([number, length], np.float32)


def count(client: ExternalEnvClient, length: int, **how: Any) -> list[Any]:
    """Play one episode, whose rewards tell the steps; return the actions."""
    episode = client.start_episode(**how)
    actions = []
    for number in range(length):
        actions.append(client.get_action(episode, seen(number, length)))
        client.log_returns(episode, float(number))
    client.end_episode(episode, seen(length, length), truncated=length % 2 == 1)
    return actions


def test_episodes_are_what_simulators_do(run: Any) -> None:
    runner = run()

    def simulate() -> Any:
        with ExternalEnvClient(bridge_of(runner).address) as client:
            return [count(client, length) for length in (3, 4, 5)]

    with in_thread(simulate) as simulator:
        chunks = runner.sample(num_timesteps=6) + runner.sample(num_timesteps=6)
    whole: dict[Any, list[Any]] = {}
    for chunk in chunks:
        whole.setdefault(chunk.id_, []).append(chunk)
    assert [sum(map(len, parts)) for parts in whole.values()] == [3, 4, 5]
    for parts, actions in zip(whole.values(), simulator.result, strict=True):
        length = len(actions)
        assert np.concatenate([part.get_rewards() for part in parts]).tolist() == [*range(length)]
        assert np.concatenate([part.get_actions() for part in parts]).tolist() == actions
        last = parts[-1]
        assert last.get_observations(-1).tolist() == [length, length]
        assert (last.is_terminated, last.is_truncated) == (length % 2 == 0, length % 2 == 1)
        assert "action_logp" in last.extra_model_outputs
    metrics = runner.get_metrics()
    assert metrics["episode_len_mean"].peek() == 4.0
    assert metrics["episode_return_mean"].peek() == (3 + 6 + 10) / 3
    assert metrics["num_env_faults"].peek() == 0


def test_a_simulator_that_vanishes_truncates_its_episode(run: Any) -> None:
    cls = BusExternalEnvRunner.with_settings(limits=EpisodeLimits(lease=1.0))
    runner = run(cls)

    def simulate() -> None:
        gone = ExternalEnvClient(bridge_of(runner).address)
        episode = gone.start_episode()
        for number in range(2):
            gone.get_action(episode, seen(number, 9))
            gone.log_returns(episode, 1.0)
        gone.close()
        with ExternalEnvClient(bridge_of(runner).address) as client:
            count(client, 4)

    with in_thread(simulate):
        episodes = runner.sample(num_episodes=2)
    by_length = sorted(episodes, key=len)
    assert [len(episode) for episode in by_length] == [1, 4]
    assert (by_length[0].is_terminated, by_length[0].is_truncated) == (False, True)
    assert by_length[0].get_observations(-1).tolist() == [1, 9]
    assert runner.get_metrics()["num_env_faults"].peek() == 1


def test_rows_of_other_actions_than_the_modules_are_left_out(run: Any) -> None:
    runner = run()

    def simulate() -> None:
        with ExternalEnvClient(bridge_of(runner).address) as client:
            count(client, 3, training_enabled=False)
            episode = client.start_episode()
            for number in range(6):
                if number == 3:
                    client.log_action(episode, seen(number, 6), 2)
                else:
                    client.get_action(episode, seen(number, 6))
                client.log_returns(episode, float(number))
            client.end_episode(episode, seen(6, 6))

    with in_thread(simulate):
        before, behind = runner.sample(num_timesteps=5)
    assert before.get_rewards().tolist() == [0, 1, 2]
    assert before.is_truncated
    assert behind.get_rewards().tolist() == [4, 5]
    assert behind.get_observations(0).tolist() == [4, 6]
    assert behind.is_terminated


def test_an_action_that_came_too_late_has_no_row(run: Any) -> None:
    runner = run()
    asked, goes_on = threading.Event(), threading.Event()

    def simulate() -> None:
        with ExternalEnvClient(bridge_of(runner).address) as client:
            episode = client.start_episode()
            for number in range(4):
                if number == 2:
                    asked.set()
                    with pytest.raises(ActionTimeoutError):
                        client.get_action(episode, seen(number, 4), timeout=0.2)
                    goes_on.set()
                else:
                    client.get_action(episode, seen(number, 4))
                client.log_returns(episode, float(number))
            client.end_episode(episode, seen(4, 4))

    with in_thread(simulate):
        first = runner.sample(num_timesteps=2)
        assert goes_on.wait(60.0)
        rest = runner.sample(num_timesteps=1)
    assert [reward for part in first for reward in part.get_rewards()] == [0, 1]
    assert [reward for part in rest for reward in part.get_rewards()] == [3]
    assert rest[-1].get_observations(0).tolist() == [3, 4]


def test_episodes_that_wait_at_one_time_are_answered_together(run: Any) -> None:
    runner = run()

    def simulate(length: int) -> None:
        with ExternalEnvClient(bridge_of(runner).address) as client:
            count(client, length)

    with ExitStack() as stack:
        for length in (5, 6, 7):
            stack.enter_context(in_thread(partial(simulate, length)))
        episodes = runner.sample(num_episodes=3)
    assert sorted(map(len, episodes)) == [5, 6, 7]
    for episode in episodes:
        assert episode.get_rewards().tolist() == [*range(len(episode))]
        assert episode.get_observations()[:, 0].tolist() == [*range(len(episode) + 1)]


def test_settings_are_those_of_a_bridge() -> None:
    with pytest.raises(TypeError, match=r"no settings binds; it has .*bind"):
        BusExternalEnvRunner.with_settings(binds="tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=r"observation_space must be one space, not None"):
        BusExternalEnvRunner(config=config_of(BusExternalEnvRunner, None), worker_index=0)
    names: list[int] = []

    def bind(worker_index: int) -> str:
        names.append(worker_index)
        return "tcp://127.0.0.1:*"

    cls = BusExternalEnvRunner.with_settings(bind=bind)
    cls(config=config_of(cls), worker_index=4).stop()
    assert names == [4]


def test_ppo_learns_from_simulators_that_drive_cart_pole() -> None:
    env = gymnasium.make("CartPole-v1")
    config = config_of(BusExternalEnvRunner, env.observation_space, env.action_space).training(
        train_batch_size_per_learner=1000,
        minibatch_size=128,
        num_epochs=8,
        lr=1e-3,
        vf_clip_param=1e6,
        use_kl_loss=False,
    )
    algo = config.build_algo()
    address = bridge_of(algo.env_runner).address
    played: list[int] = []

    def simulate(seed: int) -> None:
        cart_pole = gymnasium.make("CartPole-v1")
        with ExternalEnvClient(address, timeouts=ClientTimeouts(patience=0.5)) as client:
            observation, _ = cart_pole.reset(seed=seed)
            while True:
                episode, over, length = client.start_episode(), False, 0
                while not over:
                    action = client.get_action(episode, observation)
                    observation, reward, over, cut, _ = cart_pole.step(action)
                    client.log_returns(episode, reward)
                    over, length = over or cut, length + 1
                client.end_episode(episode, observation, truncated=cut)
                played.append(length)
                observation, _ = cart_pole.reset()

    def until_it_stops(seed: int) -> None:
        with pytest.raises(EnvbusError):
            simulate(seed)

    with in_thread(lambda: until_it_stops(0)), in_thread(lambda: until_it_stops(1)):
        best = 0.0
        for _ in range(20):
            results = algo.train()["env_runners"]
            best = max(best, results["episode_return_mean"])
            if best >= 100.0:
                break
        algo.stop()
    assert best >= 100.0
    assert results["num_env_steps_sampled"] >= 1000
    assert results["num_episodes_lifetime"] <= len(played)
