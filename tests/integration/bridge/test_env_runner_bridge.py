"""What is sampled from simulators in processes of their own, while some are killed."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envbus.actors.external.protocol import (
    EndEpisode,
    GetAction,
    JoinBridge,
    LogReturns,
    StartEpisode,
)
from envbus.runner import EnvRunner, ExternalEnvBridge, PolicyWorkers, RunnerConfig
from envbus.runner.bridge.vocabulary import EpisodeLimits
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.talk import Talk, open_link
from envbus.runner.policies import MlpPolicy, RandomPolicy
from tests.integration.simulators import in_thread
from tests.sources import ROOT

PATIENCE = 90.0

#: Arguments: address, first seed, and in which of its episodes it is killed, or -1.
SIMULATOR = """
import itertools, os, signal, sys
import gymnasium
from envbus.actors import ExternalEnvClient

env = gymnasium.make("CartPole-v1")
with ExternalEnvClient(sys.argv[1], heartbeat=0.5) as client:
    for number in itertools.count():
        seed = int(sys.argv[2]) + number
        observation, _ = env.reset(seed=seed)
        episode = client.start_episode(f"{sys.argv[2]}.{seed}")
        over = False
        for t in itertools.count():
            if over:
                break
            if number == int(sys.argv[3]) and t == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            action = client.get_action(episode, observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            client.log_returns(episode, float(reward))
            over = terminated or truncated
        client.end_episode(episode, observation, truncated=not terminated)
"""


@contextmanager
def processes(address: str, *killed_in: int) -> Iterator[None]:
    """Simulators, and in which of their episodes they are killed; number i plays seeds from 1000 i.

    Killed by themselves: from outside it may be between two episodes, when that costs none.
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SIMULATOR, address, str(1000 * number), str(episode)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number, episode in enumerate(killed_in, start=1)
    ]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait(PATIENCE)


def assert_as_played_by_hand(batch: Any, seed: int) -> None:
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=seed)
    for row in range(len(batch)):
        assert np.array_equal(batch["obs"][row], seen)
        seen, reward, terminated, truncated, _ = env.step(batch["actions"][row])
        assert np.array_equal(batch["next_obs"][row], seen)
        assert batch["rewards"][row] == reward
        assert (batch["terminateds"][row], batch["truncateds"][row]) == (terminated, truncated)
    assert terminated or truncated


@pytest.mark.slow
def test_what_is_sampled_is_what_happened_though_simulators_are_killed() -> None:
    space = gymnasium.make("CartPole-v1")
    limits = EpisodeLimits(lease=1.0)
    bridge = ExternalEnvBridge(space.observation_space, space.action_space, limits=limits)
    config = RunnerConfig(batch_mode="complete_episodes", rollout_fragment_length=100)
    faulty: set[str] = set()
    seeds: dict[int, int] = {}
    with (
        processes(bridge.address, 2, 4, 6, -1),
        EnvRunner(bridge, RandomPolicy(space.action_space, 0), config) as runner,
    ):
        rounds = 0
        while len(faulty) < 3 or rounds < 8:
            sample = runner.sample(timeout=PATIENCE)
            rounds += 1
            assert sample.env_steps >= 100
            # Rows that were more than asked for come with a later sample than their episode's end.
            seeds |= {e.eps_id: int(e.episode_id.split(".")[1]) for e in sample.episodes}
            faulty |= {e.episode_id for e in sample.episodes if e.faulty}
            for rows in sample.single().split_by_episode():
                assert_as_played_by_hand(rows, seeds[int(rows["eps_id"][0])])
        metrics = runner.get_metrics()
    assert faulty == {"1000.1002", "2000.2004", "3000.3006"}
    assert metrics["num_faulty_episodes"] == 3
    assert metrics["num_episodes"] > 8


def test_of_agents_in_turns_no_row_leads_over_an_observation_that_never_came() -> None:
    spaces = Box(-100, 100, (1,), np.float32), Discrete(3)
    bridge = ExternalEnvBridge(*({"a": space, "b": space} for space in spaces))
    config = RunnerConfig(batch_mode="complete_episodes", rollout_fragment_length=1)

    def play() -> None:
        talk = Talk(open_link(Address.parse(bridge.address)), PATIENCE)
        talk.say_hello("turns")
        talk.ask(JoinBridge(client="turns", plain=True))
        talk.ask(StartEpisode(episode_id="e"))
        for number in range(8):
            # Before the fifth one a call of the client's was lost: it may have been of either.
            lost = talk.next_id() if number == 4 else None
            seen = {"ab"[number % 2]: [number]}
            talk.ask(GetAction(episode_id="e", observation=seen, given_up=lost))
        talk.ask(EndEpisode(episode_id="e", observation={"a": [8], "b": [9]}))
        talk.close()

    with EnvRunner(bridge, RandomPolicy(spaces[1], 0), config) as runner, in_thread(play):
        rows = runner.sample(timeout=PATIENCE).single()
    pairs = np.column_stack([rows["obs"], rows["next_obs"]]).tolist()
    assert sorted(pairs) == [[0, 2], [1, 3], [4, 6], [5, 7], [6, 8], [7, 9]]


def test_an_agent_that_is_done_when_the_first_observation_arrives_has_no_row() -> None:
    """Nobody is told an action for it."""
    spaces = Box(-100, 100, (1,), np.float32), Discrete(3)
    bridge = ExternalEnvBridge(*({"a": space, "b": space} for space in spaces))
    config = RunnerConfig(batch_mode="complete_episodes", rollout_fragment_length=1)

    def play() -> None:
        talk = Talk(open_link(Address.parse(bridge.address)), PATIENCE)
        talk.say_hello("done")
        talk.ask(JoinBridge(client="done", plain=True))
        talk.ask(StartEpisode(episode_id="e"))
        lost = talk.next_id()  # that of the first observation
        rewards = {"a": 1.0, "b": 4.0}
        flags = {"b": True}
        talk.ask(LogReturns(episode_id="e", reward=rewards, terminateds=flags, given_up=lost))
        talk.ask(GetAction(episode_id="e", observation={"a": [0], "b": [1]}))
        talk.ask(LogReturns(episode_id="e", reward={"a": 2.0}))
        talk.ask(EndEpisode(episode_id="e", observation={"a": [2]}))
        talk.close()

    with EnvRunner(bridge, RandomPolicy(spaces[1], 0), config) as runner, in_thread(play):
        sample = runner.sample(timeout=PATIENCE)
    rows = sample.single()
    assert (rows["obs"].tolist(), rows["rewards"].tolist()) == ([[0]], [2.0])
    (episode,) = sample.episodes
    assert (episode.episode_return, episode.unrecorded_reward) == (7.0, 5.0)


def test_rewards_behind_a_first_observation_that_never_came_are_in_no_row() -> None:
    bridge = ExternalEnvBridge(Box(-100, 100, (1,), np.float32), Discrete(3))
    config = RunnerConfig(batch_mode="complete_episodes", rollout_fragment_length=1)

    def play() -> None:
        talk = Talk(open_link(Address.parse(bridge.address)), PATIENCE)
        talk.say_hello("lost")
        talk.ask(JoinBridge(client="lost", plain=True))
        talk.ask(StartEpisode(episode_id="e"))
        lost = talk.next_id()
        talk.ask(LogReturns(episode_id="e", reward=5.0, given_up=lost))
        for number in range(2):
            talk.ask(GetAction(episode_id="e", observation=[number], given_up=lost))
            talk.ask(LogReturns(episode_id="e", reward=1.0))
        talk.ask(EndEpisode(episode_id="e", observation=[2]))
        talk.close()

    policy = RandomPolicy(Discrete(3), 0)
    with EnvRunner(bridge, policy, config) as runner, in_thread(play):
        sample = runner.sample(timeout=PATIENCE)
    assert sample.single()["rewards"].tolist() == [1.0, 1.0]
    (episode,) = sample.episodes
    assert (episode.episode_return, episode.unrecorded_reward) == (7.0, 5.0)


@pytest.mark.slow
def test_policy_workers_that_are_killed_cost_simulators_no_episode() -> None:
    spaces = gymnasium.make("CartPole-v1")
    bridge = ExternalEnvBridge(spaces.observation_space, spaces.action_space)
    config = RunnerConfig(batch_mode="complete_episodes", rollout_fragment_length=100)
    seeds: dict[int, int] = {}
    with (
        PolicyWorkers(functools.partial(RandomPolicy, spaces.action_space, 0), n=2) as workers,
        processes(bridge.address, -1, -1, -1, -1),
        EnvRunner(bridge, workers.policy(), config) as runner,
    ):
        victims = workers.pids()
        for rounds in range(8):
            if rounds in (1, 4):  # while all four wait for actions, or are about to
                os.kill(victims.pop(), signal.SIGKILL)
            sample = runner.sample(timeout=PATIENCE)
            assert sample.faults == ()
            assert sample.late == ()
            seeds |= {e.eps_id: int(e.episode_id.split(".")[1]) for e in sample.episodes}
            for rows in sample.single().split_by_episode():
                assert_as_played_by_hand(rows, seeds[int(rows["eps_id"][0])])
        metrics = runner.get_metrics()
    assert metrics["num_faulty_episodes"] == metrics["num_dropped_rows"] == 0
    assert metrics["num_episodes"] > 8


@pytest.mark.slow
def test_a_killed_client_that_chooses_itself_loses_no_episode_that_it_has_ended() -> None:
    program = SIMULATOR.replace(
        "heartbeat=0.5",
        'heartbeat=0.5, inference="client", policy=policy_from_weights, '
        "local=LocalSettings(fragment_length=5)",
    ).replace(
        "import ExternalEnvClient",
        "import ExternalEnvClient, LocalSettings\n"
        "from envbus.runner.policies import policy_from_weights",
    )
    program += "        print(episode, flush=True)\n"
    spaces = gymnasium.make("CartPole-v1")
    bridge = ExternalEnvBridge(
        spaces.observation_space, spaces.action_space, limits=EpisodeLimits(lease=1.0)
    )
    policy = MlpPolicy(spaces.observation_space, spaces.action_space, seed=1)
    lengths: dict[str, int] = {}
    faulty: list[str] = []
    with EnvRunner(bridge, policy, RunnerConfig(publish=True)) as runner:
        child = subprocess.Popen(
            [sys.executable, "-c", program, bridge.address, "1000", "-1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            while not faulty:
                sample = runner.sample(100, timeout=0.5)
                for episode in sample.episodes:
                    if episode.faulty:
                        faulty.append(episode.episode_id)
                    else:
                        lengths[episode.episode_id] = episode.length
                if len(lengths) >= 5:
                    child.kill()
                clients = bridge.statistics()
                if child.poll() is not None and not clients.clients_now + clients.lost_clients_now:
                    break  # it was killed between two episodes
        finally:
            child.kill()
            told, _ = child.communicate(timeout=PATIENCE)
    ended = told.split()
    assert len(ended) >= 4
    assert set(ended) <= lengths.keys()
    assert len(lengths) <= len(ended) + 1  # ended, and killed before it heard so
