"""Envs of PettingZoo and its relatives, stepped in actors and here: all must be the same."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from envbus.actors.env.agents import AgentsEnv
from envbus.actors.env.source import make, parse_source
from envbus.bus.wire.codec import Placeholder
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.policies.policy import RandomPolicy
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.actors.agent_envs import DictEnv
from tests.integration.envs.test_remote_actors import free_port, with_remote_actor

SOURCES = {
    "pettingzoo.butterfly.pistonball_v6:parallel_env": {"n_pistons": 4, "max_cycles": 12},
    "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env": {"max_cycles": 12},
    "pettingzoo.sisl.multiwalker_v9:parallel_env": {"max_cycles": 12},
    "mpe2.simple_spread_v3:parallel_env": {"max_cycles": 12},
    "mpe2.simple_spread_v3:env": {"max_cycles": 12},  # AEC, converted
    "pettingzoo.classic.tictactoe_v3:env": {},  # AEC, in turns
    "pettingzoo.classic.connect_four_v3:env": {},
    "pettingzoo.test.example_envs.generated_agents_parallel_v0:parallel_env": {},
}
#: Steps, unless the episode ends before.
STEPS = 45


def choose(env: AgentsEnv, record: dict[str, Any], random: np.random.Generator) -> dict[Any, Any]:
    """An action for each agent that is to act."""
    actions = {}
    for agent, observation in record["observations"].items():
        if not (record["terminateds"][agent] or record["truncateds"][agent]):
            space: Any = env.unwrapped.action_space(agent)
            space.seed(int(random.integers(2**31)))
            masked = isinstance(observation, dict) and "action_mask" in observation
            actions[agent] = space.sample(observation["action_mask"] if masked else None)
    return actions


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_in_an_actor_an_env_does_what_it_does_here(source: str) -> None:
    parsed = parse_source(source, SOURCES[source])
    local = make(parsed)
    assert isinstance(local, AgentsEnv)
    random = np.random.default_rng(0)
    names = ("observations", "rewards", "terminateds", "truncateds", "infos")
    with ActorPool([parsed] * 2, autoreset_mode="Disabled", num_actors=1) as pool:
        here, _ = local.reset(seed=3)
        pool.try_reset(0, seed=1)
        pool.try_reset(1, seed=3)
        there = pool.poll(min_envs=2)
        for step in range(STEPS):
            for name, found in zip(names, there, strict=False):
                assert data_equivalence(found[1], here[name]), (step, name)
            if here["terminateds"]["__all__"] or here["truncateds"]["__all__"]:
                break
            actions = choose(local, here, random)
            pool.send_actions({1: actions})
            there = pool.poll()
            here, *_ = local.step(actions)
        assert step >= 4
        assert step < STEPS - 1 or "generated" in source
    local.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("source", [name for name in SOURCES if "parallel_env" in name][:4])
def test_a_recorded_run_is_what_the_env_does_that_is_stepped_by_hand(source: str) -> None:
    """Each transition of each agent, also of those that leave, over several episodes."""
    module, _, function = source.partition(":")
    by_hand = getattr(importlib.import_module(module), function)(**SOURCES[source])
    with ActorPool([parse_source(source, SOURCES[source])] * 2, autoreset_mode="Disabled") as pool:
        policy = RandomPolicy(pool.get_action_space(by_hand.possible_agents[0]), 5)
        config = RunnerConfig(seed=7, rollout_fragment_length=11)
        runner = EnvRunner(pool, policy, config)
        rows = SampleBatch.concatenate(runner.sample().single() for _ in range(3))
    mine = rows[rows["env_id"] == 1]
    seen, _ = by_hand.reset(seed=7 + 1)
    steps, episodes = 0, dict.fromkeys(mine["eps_id"].tolist())
    for eps_id in episodes:
        episode = mine[mine["eps_id"] == eps_id]
        for t in range(int(episode["t"].max()) + 1):
            now = episode[episode["t"] == t]
            agents = now["agent_id"].tolist()
            assert set(agents) == set(by_hand.agents)
            for row, agent in enumerate(agents):
                assert np.array_equal(now["obs"][row], seen[agent])
            actions = {agent: now["actions"][row] for row, agent in enumerate(agents)}
            seen, rewards, terminateds, truncateds, _ = by_hand.step(actions)
            for row, agent in enumerate(agents):
                assert now["rewards"][row] == np.float32(rewards[agent])
                assert now["terminateds"][row] == terminateds[agent]
                assert now["truncateds"][row] == truncateds[agent]
                assert now["next_obs_valid"][row] == (agent in seen)
                assert agent not in seen or np.array_equal(now["next_obs"][row], seen[agent])
            steps += 1
        if not by_hand.agents:
            seen, _ = by_hand.reset()
    assert steps == 33
    assert len(episodes) >= 3
    by_hand.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("game", ["tictactoe_v3", "connect_four_v3"])
def test_a_recorded_board_game_is_what_players_do_that_move_by_hand(game: str) -> None:
    """In turns: a row ends with its player's next turn, or with the game."""
    source = f"pettingzoo.classic.{game}:env"
    with ActorPool([source], autoreset_mode="Disabled") as pool:
        policy = RandomPolicy(pool.get_action_space("player_1"), 3)
        sample = EnvRunner(pool, policy, RunnerConfig(seed=1)).sample(num_episodes=4)
    by_hand = importlib.import_module(f"pettingzoo.classic.{game}").env()
    rewarded = 0.0
    for rows in sample.single().split_by_episode():
        by_hand.reset(seed=1)
        left = {agent: rows[rows["agent_id"] == agent] for agent in by_hand.possible_agents}
        turn = dict.fromkeys(left, 0)
        totals = dict.fromkeys(left, 0.0)
        for agent in by_hand.agent_iter():
            seen, _, terminated, truncated, _ = by_hand.last()
            if terminated or truncated:
                by_hand.step(None)
                continue
            mine, row = left[agent], turn[agent]
            for key, array in seen.items():
                assert np.array_equal(mine["obs"][key][row], array)
            turn[agent] += 1
            by_hand.step(int(mine["actions"][row]))
            for player, reward in by_hand.rewards.items():
                totals[player] += reward
        assert {agent: len(mine) for agent, mine in left.items()} == turn
        for agent, mine in left.items():
            assert mine["rewards"].sum() == totals[agent]
            assert mine["terminateds"].tolist() == [False] * (len(mine) - 1) + [True]
            rewarded += abs(totals[agent])
    assert rewarded > 0


class ObjectEnv(DictEnv):
    """Its infos hold something that no socket carries."""

    observation_spaces = dict.fromkeys("ab", spaces.Discrete(5))

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"a": {"env": self}}


@pytest.mark.slow
def test_infos_of_agents_that_cannot_cross_are_placeholders() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = f"{__name__}:ObjectEnv"
    with (
        with_remote_actor(endpoint, "--allow", "tests"),
        ActorPool(
            [source], autoreset_mode="Disabled", num_actors=1, remote_actors=1, bind=endpoint
        ) as pool,
    ):
        result = pool.poll()
        assert result.observations == {0: {"a": 1, "b": 1}}
        assert isinstance(result.infos[0]["a"]["env"], Placeholder)


@pytest.mark.slow
def test_an_env_with_agents_may_live_in_a_remote_actor() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = parse_source("mpe2.simple_spread_v3:parallel_env", {"max_cycles": 3})
    allowed = ("--allow", "mpe2", "--allow", "pettingzoo")  # which wraps its parallel_env
    with with_remote_actor(endpoint, *allowed) as process:
        with ActorPool(
            [source] * 2, autoreset_mode="Disabled", num_actors=2, remote_actors=1, bind=endpoint
        ) as pool:
            pool.reset([7, 7])
            result = pool.poll(min_envs=2)
            for _ in range(3):
                for mine, theirs in zip(result[0][0].items(), result[0][1].items(), strict=True):
                    assert data_equivalence(mine, theirs)
                    assert theirs[1].flags.writeable
                pool.send_actions({i: dict.fromkeys(pool.get_agent_ids(), 2) for i in (0, 1)})
                result = pool.poll(min_envs=2)
            assert [flags["__all__"] for flags in result.truncateds.values()] == [True, True]
            remote = pool.get_sub_environments()[1]
            assert len(remote.call("agent_spaces", "agent_0")) == 2
        assert process.wait(30) == 0
