"""Bridges with several agents, connectors and callbacks; beside a pool; between samples."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import SimulatorError
from envbus.actors.external.external_env import ExternalEnv
from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError, EnvbusError
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.policies.connectors import ClipRewards, FrameStack, Normalize, RescaleActions
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling import dict_sampler
from envbus.runner.sampling.callbacks import CallbackError
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.pool_envs import GatedEnv
from tests.runner.sampling_scenes import Log, zeros
from tests.runner.simulators import (
    ACTIONS,
    COUNTS,
    PATIENCE,
    for_ever,
    obs,
    play_episode,
    simulators,
)
from tests.waiting import wait_until


def ones(observations: Any) -> Any:
    return np.ones(len(observations), np.int64)


def test_connectors_stand_between_simulators_and_policies_also_of_logged_actions() -> None:
    box = spaces.Box(0.0, 10.0, (1,), np.float32)
    bridge = ExternalEnvBridge(COUNTS, box)
    stack = FrameStack(COUNTS, 2)
    seen: list[Any] = []

    def policy(observations: Any) -> Any:
        seen.append(observations.shape[1:])
        return np.full((len(observations), 1), 0.5, np.float32)

    got: list[float] = []

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(4):
            if t == 2:
                client.log_action(episode, obs(t), np.array([1.0], np.float32))
            else:
                got.append(float(client.get_action(episode, obs(t))[0]))
        client.end_episode(episode, obs(4))

    config = RunnerConfig(observation_connector=stack, action_connector=RescaleActions(box))
    with simulators(bridge.address, play), EnvRunner(bridge, policy, config) as runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
    assert set(seen) == {batch["obs"].shape[1:]}
    assert got == [7.5] * 3
    # What the policy would have given, to have the simulator do what it has done.
    assert np.allclose(batch["actions"][:, 0], [0.5, 0.5, -0.8, 0.5])
    assert batch["off_policy"].tolist() == [False, False, True, False]


def test_callbacks_come_in_order_for_episodes_that_come_and_go() -> None:
    def play(client: ExternalEnvClient) -> None:
        for name in ("one", "two"):
            play_episode(client, 2, episode_id=name)

    log = Log()
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    config = RunnerConfig(callbacks=log)
    with simulators(bridge.address, play), EnvRunner(bridge, zeros, config) as runner:
        sample = runner.sample(num_episodes=2, timeout=PATIENCE)
    told = ["created", "start", "step", "step", "end"]
    episodes = [(name, episode) for episode in ("one", "two") for name in told]
    assert log.calls == [("env", 0), *episodes, ("sample", 4)]
    assert [result.episode_id for result in sample.episodes] == ["one", "two"]
    assert set(sample.single()["env_id"]) == {0}


AGENTS = {"cat": COUNTS, "dog": COUNTS}


def play_agents(client: ExternalEnvClient, **start: Any) -> None:
    """Cat acts in each of four steps, dog in every second one; dog is done before the end."""
    episode = client.start_episode(**start)
    for t in range(4):
        seen = {"cat": obs(t), "dog": obs(t)} if t % 2 == 0 else {"cat": obs(t)}
        actions = client.get_action(episode, seen)
        assert actions.keys() == seen.keys()
        rewards = {"cat": 1.0, "dog": 10.0}
        client.log_returns(episode, rewards, terminateds={"dog": True} if t == 3 else None)
    client.end_episode(episode, {"cat": obs(4), "dog": obs(4)}, truncated=True)


@pytest.mark.parametrize("trained", [True, False])
def test_several_agents_and_policies_over_a_bridge(trained: bool) -> None:
    bridge = ExternalEnvBridge(AGENTS, dict.fromkeys(AGENTS, ACTIONS))
    mapping = {"policy_mapping_fn": lambda agent_id, _: f"of {agent_id}"}
    config = RunnerConfig(**mapping)  # type: ignore[arg-type]
    policies = {"of cat": zeros, "of dog": ones}

    def play(client: ExternalEnvClient) -> None:
        assert client.policy_ids == ["of cat", "of dog"]
        play_agents(client, training_enabled=trained)
        play_agents(client)

    with simulators(bridge.address, play), EnvRunner(bridge, policies, config) as runner:
        sample = runner.sample(num_episodes=1 + trained, timeout=PATIENCE)
        assert set(runner.get_spaces()) == {"cat", "dog"}
    number = len(sample["of cat"].split_by_trajectory())
    assert (number, len(sample.episodes)) == (1 + trained, 2)
    assert sample.env_steps == 4 * number
    assert sample["of cat"]["t"].tolist() == [0, 1, 2, 3] * number
    assert sample["of cat"]["truncateds"].tolist() == [False, False, False, True] * number
    assert sample["of dog"]["actions"].tolist() == [1, 1] * number
    assert sample["of dog"]["rewards"].tolist() == [20, 20] * number
    assert sample["of dog"]["terminateds"].tolist() == [False, True] * number


def test_agents_that_did_not_act_in_a_logged_step_have_no_row() -> None:
    bridge = ExternalEnvBridge(AGENTS, dict.fromkeys(AGENTS, ACTIONS))

    def play(client: ExternalEnvClient) -> None:
        episode = client.start_episode()
        for t in range(3):
            client.log_action(episode, {"cat": obs(t), "dog": obs(t)}, {"cat": 5})
        client.end_episode(episode, {"cat": obs(3), "dog": obs(3)})

    with simulators(bridge.address, play), EnvRunner(bridge, zeros) as runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
    assert batch["agent_id"].tolist() == ["cat"] * 3
    assert batch["actions"].tolist() == [5] * 3


def make_pool(num_envs: int, length: int = 1000) -> ActorPool:
    envs = [functools.partial(CountingEnv, length)] * num_envs
    return ActorPool(envs, num_actors=1, autoreset_mode="Disabled")


def play_five_steps(client: ExternalEnvClient) -> None:
    space = client.observation_space
    episode = client.start_episode()
    for _ in range(5):
        client.get_action(episode, space.sample())
    client.end_episode(episode, space.sample())


@pytest.mark.parametrize("per_bridge", [1, 3])
def test_a_bridge_and_a_pool_feed_one_runner(per_bridge: int) -> None:
    pool = make_pool(3)
    bridge = ExternalEnvBridge(pool.single_observation_space, pool.single_action_space)

    config = RunnerConfig(rollout_fragment_length=10, envs_per_bridge=per_bridge)
    with (
        simulators(bridge.address, for_ever(play_five_steps)),
        EnvRunner([bridge, pool], zeros, config) as runner,
    ):
        for _ in range(3):
            batch = runner.sample(timeout=PATIENCE).single()
            assert np.bincount(batch["env_id"]).tolist() == [10, 10, 10, 10 * per_bridge]
            assert not batch["off_policy"].any()
        total = runner.sample(num_env_steps=4 * (3 + per_bridge), timeout=PATIENCE)
        assert np.bincount(total.single()["env_id"]).tolist() == [4, 4, 4, 4 * per_bridge]
        whole = runner.sample(num_env_steps=0, timeout=PATIENCE)
        assert len(whole) == 0
        runner.assert_healthy()
        assert set(runner.get_spaces()) == {"agent0"}
        ids = [set(batch["eps_id"][batch["env_id"] == env_id]) for env_id in range(4)]
        assert sum(map(len, ids)) == len(set.union(*ids))
    assert bridge.closed
    assert pool.closed
    with pytest.raises(ClosedEnvironmentError):
        runner.serve(0.1)


class Crashing(ExternalEnv):
    def run(self) -> None:
        raise ZeroDivisionError("worn out")


def test_episodes_of_a_pool_go_on_where_a_simulator_beside_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(1)
    bridge = ExternalEnvBridge(pool.single_observation_space, pool.single_action_space)

    times: list[int] = []
    with (
        simulators(bridge.address, for_ever(play_five_steps)),
        EnvRunner([bridge, pool], zeros, RunnerConfig(rollout_fragment_length=8)) as runner,
    ):

        def sample() -> None:
            batch = runner.sample(timeout=PATIENCE).single()
            times.extend(batch["t"][batch["env_id"] == 0].tolist())

        sample()
        bridge.host(Crashing(pool.single_action_space, pool.single_observation_space))
        with pytest.raises(SimulatorError, match="worn out"):
            collections.deque(iter(sample, "never"))
        sample()
    assert times == list(range(len(times)))
    assert "somebody else" not in caplog.text


class Counter(Policy):
    """Its state counts what it has seen of an episode."""

    def initial_state(self) -> Any:
        return np.zeros(1, np.int64)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        return PolicyOutput(states[:, 0] + 1, states + 1)


def test_states_of_policies_go_on_over_logged_actions_and_begin_anew_with_each_episode() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    play = functools.partial(play_episode, length=4, log=lambda t: 9 if t == 1 else None)
    with simulators(bridge.address, for_ever(play)), EnvRunner(bridge, Counter()) as runner:
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    assert batch["actions"].tolist() == [1, 9, 3, 4] * 2
    assert batch["state_in"][:, 0].tolist() == [0, 1, 2, 3] * 2


class Repeating(Policy):
    wanted_inputs = ("prev_actions", "t", "eps_id")

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True, **told: Any
    ) -> Any:
        return PolicyOutput(told["prev_actions"] + 1, states, {"told": told["t"]})


def test_a_policy_is_told_of_logged_actions_as_of_its_own() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    play = functools.partial(play_episode, length=4, log=lambda t: 9 if t == 1 else None)
    with simulators(bridge.address, for_ever(play)), EnvRunner(bridge, Repeating()) as runner:
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    assert batch["actions"].tolist() == [1, 9, 10, 11] * 2
    assert batch["prev_actions"].tolist() == [0, 1, 9, 10] * 2
    assert batch["told"].tolist() == [0, 1, 2, 3] * 2


def test_rewards_of_simulators_are_connected() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    play = functools.partial(play_episode, length=4)
    config = RunnerConfig(reward_connector={"default_policy": ClipRewards()})
    with simulators(bridge.address, for_ever(play)), EnvRunner(bridge, zeros, config) as runner:
        sample = runner.sample(num_episodes=2, timeout=PATIENCE)
    assert sample.single()["rewards"].tolist() == [0.0, 1.0, 1.0, 1.0] * 2
    assert [result.episode_return for result in sample.episodes] == [6.0] * 2


def test_simulators_are_answered_between_samples_and_the_rows_come_with_the_next() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 10)
        play_episode(client, 10)
        ended.set()
        for_ever(play_episode)(client)

    with simulators(bridge.address, play), EnvRunner(bridge, zeros) as runner:
        while not ended.is_set():
            runner.serve(0.1)
        first = runner.sample(num_env_steps=7, timeout=PATIENCE)
        rest = runner.sample(num_env_steps=13, timeout=PATIENCE)
        assert first.single()["t"].tolist() == [*range(7)]
        assert rest.single()["t"].tolist() == [7, 8, 9, *range(10)]
        assert len(first.episodes) >= 2


def test_connectors_learn_nothing_from_what_is_served_without_exploring() -> None:
    bridge, normalize = ExternalEnvBridge(COUNTS, ACTIONS), Normalize(COUNTS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 3)
        ended.set()

    config = RunnerConfig(observation_connector=normalize)
    before = repr(normalize.get_state())
    with simulators(bridge.address, play), EnvRunner(bridge, zeros, config) as runner:
        while not ended.is_set():
            runner.serve(0.1, explore=False)
    assert repr(normalize.get_state()) == before


def test_simulators_are_answered_by_a_thread_while_the_caller_does_something_else() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 10)
        play_episode(client, 10)
        ended.set()
        with pytest.raises(ZeroDivisionError):
            for_ever(play_episode)(client)

    with simulators(bridge.address, play), EnvRunner(bridge, zeros) as runner:
        with runner.serving():
            assert ended.wait(PATIENCE)
            with pytest.raises(AlreadyPendingCallError):
                runner.sample()
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
        assert batch["t"].tolist() == [*range(10)] * 2

        def fail(observations: Any) -> Any:
            raise ZeroDivisionError("no")

        runner.add_policy("default_policy", fail)
        with pytest.raises(ZeroDivisionError), runner.serving():
            wait_until(lambda: "envbus serving" not in names_of_threads(), "its end")


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


class InTwoParts(Policy):
    """Its weights are two equal numbers, which are changed one after the other."""

    def __init__(self) -> None:
        self.one = self.other = 0

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        first = self.one
        os.sched_yield()
        parts = np.full((len(observations), 2), [first, self.other])
        return PolicyOutput(np.zeros(len(observations), np.int64), None, {"parts": parts})

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        self.one = weights["number"]
        os.sched_yield()
        self.other = weights["number"]
        super().set_weights(weights, version)


def test_while_a_thread_answers_each_call_has_the_weights_of_one_version() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        for _ in range(20):
            play_episode(client, 20)
        ended.set()

    with simulators(bridge.address, play), EnvRunner(bridge, InTwoParts()) as runner:
        number = 0
        with runner.serving():
            while not ended.is_set():
                number += 1
                runner.set_weights({"default_policy": {"number": number}})
        batch = runner.sample(num_env_steps=400, timeout=PATIENCE).single()
    assert (batch["parts"][:, 0] == batch["parts"][:, 1]).all()
    assert (batch["parts"][:, 0] == batch["policy_version"]).all()
    assert len(set(batch["policy_version"].tolist())) > 2


def test_what_serving_collects_is_bounded() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        for _ in range(5):
            play_episode(client, 10)
        ended.set()

    config = RunnerConfig(max_waiting_steps=25)
    with simulators(bridge.address, play), EnvRunner(bridge, zeros, config) as runner:
        while not ended.is_set():
            runner.serve(0.1)
        batch = runner.sample(num_env_steps=100, timeout=0.2).single()
        assert batch["t"].tolist() == [*range(10)] * 2
        assert runner.get_metrics()["num_dropped_rows"] == 30


def test_of_many_episodes_that_have_ended_the_latest_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envbus.runner.batches.metrics.MOST_RESULTS", 3)
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    ended = threading.Event()

    def play(client: ExternalEnvClient) -> None:
        for length in range(1, 6):
            play_episode(client, length, training_enabled=False)
        ended.set()

    with simulators(bridge.address, play), EnvRunner(bridge, zeros) as runner:
        while not ended.is_set():
            runner.serve(0.1)
        sample = runner.sample(timeout=0.2)
        assert [one.length for one in sample.episodes] == [3, 4, 5]
        assert runner.sample(timeout=0.0).episodes == ()


def test_an_episode_without_end_is_given_up_where_whole_ones_are_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dict_sampler, "_LONGEST_EPISODE", 50)
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)

    def play(client: ExternalEnvClient) -> None:
        play_episode(client, 120)
        play_episode(client, 10)

    config = RunnerConfig(max_waiting_steps=25)
    with simulators(bridge.address, play), EnvRunner(bridge, zeros, config) as runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert batch["t"].tolist() == [*range(10)]
        assert runner.get_metrics()["num_dropped_rows"] == 51
    assert caplog.text.count("goes on after 51 env steps") == 1


def test_what_does_not_fit_together_is_refused() -> None:
    with make_pool(1) as pool, ExternalEnvBridge(COUNTS, ACTIONS) as bridge:
        with pytest.raises(ConfigError, match="at most one pool"):
            EnvRunner([pool, pool], zeros)
        with pytest.raises(ConfigError, match=r"agent 'agent0' has .* in one, and .*Bridge"):
            EnvRunner([pool, bridge], zeros)
        with pytest.raises(ConfigError, match="envs must be"):
            EnvRunner([], zeros)
        with pytest.raises(ConfigError, match="vectorized=True: episodes of a bridge come and go"):
            EnvRunner(bridge, zeros, RunnerConfig(vectorized=True))
        with pytest.raises(ConfigError, match="batch_wait is for the envs of a pool"):
            EnvRunner(bridge, zeros, RunnerConfig(batch_wait=0.1))
        with pytest.raises(ConfigError, match="render_env=0: there are 0 envs of a pool"):
            EnvRunner(bridge, zeros, RunnerConfig(render_env=0))
        with pytest.raises(ConfigError, match="no bridge"):
            EnvRunner(pool, zeros).serve(0.1)


def test_a_pool_begins_anew_after_an_exception_though_simulators_were_served_since() -> None:
    pool = ActorPool([functools.partial(CountingEnv, 9)] * 2, autoreset_mode="Disabled")
    bridge = ExternalEnvBridge(pool.single_observation_space, pool.single_action_space)
    log = Log()
    config = RunnerConfig(callbacks=log)
    with EnvRunner([pool, bridge], zeros, config) as runner:
        runner.sample(num_env_steps=6, timeout=0.5)  # nobody plays
        log.failing = "step"  # of one env, whose step is taken in half
        with pytest.raises(CallbackError):
            runner.sample(num_env_steps=6, timeout=PATIENCE)
        log.failing = ""
        runner.serve(0.1)
        batch = runner.sample(num_env_steps=6, timeout=2.4).single()
    assert (batch["env_id"].tolist(), batch["t"].tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])


def test_clients_are_told_spaces_policies_and_weights_are_set_while_they_play() -> None:
    policy = MlpPolicy(COUNTS, spaces.Discrete(2), seed=0)
    bridge = ExternalEnvBridge(COUNTS, spaces.Discrete(2))
    versions = []
    with simulators(bridge.address, for_ever(play_episode)), EnvRunner(bridge, policy) as runner:
        for version in (0, 3):
            runner.set_weights(runner.get_weights(), version=version)
            versions += (
                runner.sample(num_env_steps=30, timeout=PATIENCE)
                .single()["policy_version"]
                .tolist()
            )
    assert sorted(set(versions)) == [0, 3]
    assert versions == sorted(versions)


def test_the_late_of_both_are_named_and_waiting_for_both_does_not_spin(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    pool = ActorPool(
        [functools.partial(CountingEnv, 9), functools.partial(GatedEnv, gate, 9)],
        num_actors=2,
        autoreset_mode="Disabled",
    )
    bridge = ExternalEnvBridge(pool.single_observation_space, pool.single_action_space)
    acted, silent = threading.Event(), threading.Event()

    def play(client: ExternalEnvClient) -> None:
        seen = client.observation_space.sample()
        episode = client.start_episode()
        client.get_action(episode, seen)
        acted.set()
        assert silent.wait(PATIENCE)
        for _ in range(3):
            client.get_action(episode, seen)

    polls = []
    poll = bridge.poll
    bridge.poll = lambda *a, **k: polls.append(1) or poll(*a, **k)  # type: ignore[method-assign]
    config = RunnerConfig(rollout_fragment_length=3)
    with (
        simulators(bridge.address, play),
        EnvRunner([pool, bridge], zeros, config) as runner,
    ):
        while not acted.is_set():
            runner.serve(0.05)
        polls.clear()
        sample = runner.sample(timeout=2.0)
        assert sample.single()["env_id"].tolist() == [0] * 3
        assert sample.late == (1, 2)
        assert len(polls) < 200
        gate.touch()
        silent.set()
        batch = runner.sample(timeout=PATIENCE).single()
        assert batch["env_id"].tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_spaces_that_the_first_client_announces_are_sampled_as_they_are() -> None:
    text = spaces.Text(5)
    bridge = ExternalEnvBridge()

    def play() -> None:
        address = bridge.address
        with ExternalEnvClient(address, observation_space=text, action_space=text) as client:
            episode = client.start_episode()
            for word in ("a", "bcd"):
                assert client.get_action(episode, word) == "ab"
            client.end_episode(episode, "x")

    def policy(seen: Any) -> Any:
        return ["ab"] * len(seen)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with EnvRunner(bridge, policy) as runner:
        assert runner.get_spaces() == {}
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert runner.get_spaces() == {"agent0": (text, text)}
    thread.join(PATIENCE)
    assert batch["obs"].tolist() == ["a", "bcd"]
    assert batch["obs"].dtype == object


def test_policies_that_are_made_anew_take_over_simulators_in_the_middle_of_an_episode() -> None:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS)
    acted: list[int] = []

    def play(client: ExternalEnvClient) -> None:
        for episode in ("old", "new"):
            client.start_episode(episode)
            for t in range(6):
                with contextlib.suppress(EnvbusError):
                    acted.append(int(client.get_action(episode, obs(t))))
            client.end_episode(episode, obs(6))

    policies = iter([zeros, ones])
    log = Log()
    runner = EnvRunner.from_factories(
        lambda: bridge, lambda _: next(policies), RunnerConfig(callbacks=log)
    )
    with simulators(bridge.address, play), runner:
        assert runner.sample(num_env_steps=3, timeout=PATIENCE).single()["t"].tolist() == [0, 1, 2]
        runner.make_module()
        sample = runner.sample(num_episodes=1, timeout=PATIENCE)
    assert [episode.episode_id for episode in sample.episodes] == ["new"]
    assert sample.single()["actions"].tolist() == [1] * 6
    assert acted == [0] * 3 + [1] * 8  # one observation was not acted upon
    created = [episode for name, episode in log.calls if name == "created"]
    assert created == ["old", "new"]
