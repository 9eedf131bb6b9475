from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from envbus.runner.policies import PolicyOutput
from tests.runner.simulators import (
    PATIENCE,
    address,
    for_ever,
    make,
    obs,
    play_episode,
    simulators,
)


@pytest.mark.parametrize(("mode", "rows"), [("truncate", 40), ("complete", 50)])
def test_x_03_fragments_are_exact_and_whole_episodes_are_packed(mode: str, rows: int) -> None:
    runner = make(rollout_fragment_length=40, batch_mode=f"{mode}_episodes")
    with simulators(address(runner), for_ever(play_episode)), runner:
        batches = [runner.sample(timeout=PATIENCE).single() for _ in range(3)]
        assert [len(batch) for batch in batches] == [rows] * 3
        t = np.concatenate([batch["t"] for batch in batches])
        assert t.tolist() == [i % 25 for i in range(3 * rows)]
        assert [int(batch["unroll_id"][0]) for batch in batches] == [0, 1, 2]


def test_x_02_r_14_on_and_off_policy_steps_mix_and_the_batch_has_what_was_done() -> None:
    def policy(observations: Any) -> PolicyOutput:
        rows = len(observations)
        extras = {"action_logp": np.full(rows, -1.0), "vf_preds": observations[:, 0]}
        return PolicyOutput(np.full(rows, 7), None, extras)

    runner = make(policy)
    play = functools.partial(play_episode, length=6, log=lambda t: 42 if t in (0, 1, 5) else None)
    with simulators(address(runner), for_ever(play)), runner:
        batch = runner.sample(num_episodes=2, timeout=PATIENCE).single()
    off = [True, True, False, False, False, True] * 2
    assert batch["off_policy"].tolist() == off
    assert batch["actions"].tolist() == [42 if own else 7 for own in off]
    assert batch["policy_version"].tolist() == [-1 if own else 0 for own in off]
    assert np.isnan(batch["action_logp"]).tolist() == off
    assert batch["vf_preds"].tolist() == [*range(6)] * 2
    assert batch["rewards"].tolist() == [*range(6)] * 2


def test_x_06_episodes_that_are_not_to_be_trained_on_are_answered_and_counted_apart() -> None:
    def play(client: Any) -> None:
        assert play_episode(client, 5, training_enabled=False, episode_id=None) == [0] * 5
        play_episode(client, 4)

    runner = make(rollout_fragment_length=8)
    with simulators(address(runner), play, play), runner:
        sample = runner.sample(timeout=PATIENCE)
        assert sample.single()["t"].tolist() == [0, 1, 2, 3] * 2
        assert sorted(e.length for e in sample.episodes if not e.training_enabled) == [5, 5]
        metrics = runner.get_metrics()
    assert (metrics["num_untrained_episodes"], metrics["num_untrained_env_steps"]) == (2, 10)
    assert (metrics["num_env_steps_sampled"], metrics["episode_len_max"]) == (8, 4)


def test_x_09_an_episode_that_is_ended_at_once_disturbs_nobody() -> None:
    def play(client: Any) -> None:
        client.end_episode(client.start_episode(), obs(0))
        play_episode(client, 4)

    runner = make()
    with simulators(address(runner), for_ever(play)), runner:
        sample = runner.sample(num_episodes=2, timeout=PATIENCE)
        assert sample.single()["t"].tolist() == [0, 1, 2, 3] * 2
        assert [episode.length for episode in sample.episodes] == [4, 4]


def test_x_10_queued_steps_and_the_end_behind_them_all_arrive() -> None:
    play = functools.partial(play_episode, length=30, log=lambda t: t, truncated=True)
    runner = make()
    with simulators(address(runner), play), runner:
        batch = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert batch["actions"].tolist() == [*range(30)]
        assert batch["truncateds"].tolist() == [False] * 29 + [True]
        assert not batch["terminateds"].any()


def test_many_clients_with_many_episodes_each_give_whole_trajectories() -> None:
    def play(client: Any) -> None:
        episodes = {client.start_episode(): 0 for _ in range(5)}
        while episodes:
            for episode in list(episodes):
                t = episodes[episode]
                if t == 4:
                    client.end_episode(episode, obs(t))
                    del episodes[episode]
                else:
                    client.get_action(episode, obs(t))
                    client.log_returns(episode, 1.0)
                    episodes[episode] += 1

    runner = make()
    with simulators(address(runner), *[for_ever(play)] * 6), runner:
        samples = [runner.sample(num_env_steps=n, timeout=PATIENCE) for n in (33, 50, 17)]
        assert [len(sample.single()) for sample in samples] == [33, 50, 17]
        assert max(int(s.single()["env_id"].max()) for s in samples) < 30
    for sample in samples:
        for rows in sample.single().split_by_trajectory():
            assert (np.diff(rows["t"]) == 1).all()
            assert rows["obs"][:, 0].tolist() == rows["t"].tolist()
            assert np.array_equal(rows["obs"][1:], rows["next_obs"][:-1])


def test_a_time_out_gives_what_is_there_and_the_rest_comes_later() -> None:
    runner = make()
    with simulators(address(runner), functools.partial(play_episode, length=5)), runner:
        part = runner.sample(num_env_steps=100, timeout=2.0)
        assert part.single()["t"].tolist() == [0, 1, 2, 3, 4]
        assert len(runner.sample(num_env_steps=100, timeout=0.0)) == 0


def test_whole_episodes_are_not_had_of_one_that_has_left_in_part() -> None:
    runner = make()
    with simulators(address(runner), for_ever(play_episode)), runner:
        first = runner.sample(num_env_steps=10, timeout=PATIENCE).single()
        whole = runner.sample(num_episodes=1, timeout=PATIENCE).single()
        assert whole["t"].tolist() == [*range(25)]
        assert not set(first["eps_id"]) & set(whole["eps_id"])
        again = runner.sample(num_env_steps=10, force_reset=True, timeout=PATIENCE).single()
        assert again["t"].tolist() == [*range(10)]
        assert len({*first["eps_id"], *whole["eps_id"], *again["eps_id"]}) == 3
