from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.episode_stats import EpisodeStats, FinishedEpisodes

NO = np.zeros(2, np.bool_)


def mask(*envs: int) -> npt.NDArray[np.bool_]:
    out = np.zeros(2, np.bool_)
    out[list(envs)] = True
    return out


def rewards(*values: float) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)


def plain(finished: FinishedEpisodes | None) -> list[tuple[int, float, int]]:
    if finished is None:
        return []
    return list(
        zip(
            finished.env_ids.tolist(),
            finished.returns.tolist(),
            finished.lengths.tolist(),
            strict=True,
        )
    )


def test_an_episode_ends_with_the_sum_of_its_rewards_and_its_length() -> None:
    stats = EpisodeStats(2, AutoresetMode.SAME_STEP)
    assert plain(stats.update(rewards(1, 2), NO, NO)) == []
    assert plain(stats.update(rewards(3, 4), mask(1), NO)) == [(1, 6.0, 2)]
    assert plain(stats.update(rewards(5, 6), NO, mask(0, 1))) == [(0, 9.0, 3), (1, 6.0, 1)]
    assert stats.summary().mean_return == pytest.approx(7.0)
    assert stats.env_steps == 6


def test_the_step_that_resets_belongs_to_no_episode() -> None:
    stats = EpisodeStats(2, AutoresetMode.NEXT_STEP)
    stats.update(rewards(1, 1), mask(0), NO)
    assert plain(stats.update(rewards(100, 1), NO, NO)) == []
    assert stats.env_steps == 3
    assert plain(stats.update(rewards(2, 1), mask(0), mask(1))) == [(0, 2.0, 1), (1, 3.0, 3)]


def test_an_actor_that_dies_during_a_reset_loses_no_episode_twice() -> None:
    stats = EpisodeStats(2, AutoresetMode.NEXT_STEP)
    stats.update(rewards(1, 1), mask(0), NO)
    stats.update(rewards(0, 0), NO, mask(0, 1), lost=mask(0, 1))
    assert (stats.summary().episodes, stats.summary().lost) == (1, 1)
    stats.update(rewards(9, 9), NO, NO)  # resets both
    assert plain(stats.update(rewards(1, 2), mask(0, 1), NO)) == [(0, 1.0, 1), (1, 2.0, 1)]


def test_without_autoreset_an_ended_env_counts_for_nothing_until_it_is_reset() -> None:
    stats = EpisodeStats(2, AutoresetMode.DISABLED)
    stats.update(rewards(1, 1), mask(0), NO)
    assert plain(stats.update(rewards(7, 1), mask(0), NO)) == []
    stats.reset(mask(0))
    assert plain(stats.update(rewards(2, 1), mask(0), mask(1))) == [(0, 2.0, 1), (1, 3.0, 3)]
    assert stats.env_steps == 5


def test_a_lost_episode_counts_as_lost_only() -> None:
    stats = EpisodeStats(2, AutoresetMode.SAME_STEP)
    stats.update(rewards(5, 5), NO, NO)
    assert plain(stats.update(rewards(0, 1), mask(1), mask(0), lost=mask(0))) == [(1, 6.0, 2)]
    summary = stats.summary()
    assert (summary.episodes, summary.lost, summary.mean_return) == (1, 1, 6.0)


def test_a_reset_drops_unfinished_episodes() -> None:
    stats = EpisodeStats(2, AutoresetMode.NEXT_STEP)
    stats.update(rewards(1, 1), mask(0), NO)
    stats.reset()
    assert plain(stats.update(rewards(2, 3), mask(0, 1), NO)) == [(0, 2.0, 1), (1, 3.0, 1)]


def test_no_episode_has_no_mean() -> None:
    assert EpisodeStats(2, AutoresetMode.NEXT_STEP).summary().mean_return is None


def test_the_arrays_handed_in_are_neither_kept_nor_changed() -> None:
    stats = EpisodeStats(2, AutoresetMode.NEXT_STEP)
    ended = mask(0)
    stats.update(rewards(1, 1), ended, NO)
    assert ended.tolist() == [True, False]
    ended[:] = False
    stats.update(rewards(50, 1), ended, NO)
    assert stats.env_steps == 3


@given(
    mode=st.sampled_from(list(AutoresetMode)),
    steps=st.lists(
        st.tuples(*[st.tuples(st.integers(-9, 9), st.booleans(), st.booleans())] * 3), max_size=40
    ),
)
def test_it_agrees_with_a_loop_over_single_envs(mode: AutoresetMode, steps: list[Any]) -> None:
    stats = EpisodeStats(3, mode)
    expected: list[tuple[int, float, int]] = []
    found: list[tuple[int, float, int]] = []
    returns, lengths, idle = [0.0] * 3, [0] * 3, [False] * 3
    for step in steps:
        for env, (reward, terminated, truncated) in enumerate(step):
            if not idle[env]:
                returns[env] += reward
                lengths[env] += 1
                if terminated or truncated:
                    expected.append((env, returns[env], lengths[env]))
                    returns[env], lengths[env] = 0.0, 0
            if mode is AutoresetMode.NEXT_STEP:
                idle[env] = terminated or truncated
            elif mode is AutoresetMode.DISABLED:
                idle[env] |= terminated or truncated
        columns = [np.array(column) for column in zip(*step, strict=True)]
        found += plain(stats.update(*columns))
    assert found == expected


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_it_agrees_with_the_statistics_that_gymnasium_records(mode: AutoresetMode) -> None:
    def factory() -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    envs = SyncVectorEnv([factory] * 4, autoreset_mode=mode)
    envs.action_space.seed(3)
    envs.reset(seed=3)
    stats = EpisodeStats(4, mode)
    found: list[tuple[float, int]] = []
    expected: list[tuple[float, int]] = []
    for _ in range(200):
        _, reward, terminated, truncated, infos = envs.step(envs.action_space.sample())
        finished = stats.update(reward, terminated, truncated)
        found += [(r, n) for _, r, n in plain(finished)]
        ended = infos.get("final_info", infos) if mode is AutoresetMode.SAME_STEP else infos
        if "episode" in ended:
            for env in np.flatnonzero(ended["_episode"]):
                expected.append((ended["episode"]["r"][env], int(ended["episode"]["l"][env])))
    envs.close()
    assert len(found) > 10
    assert found == expected
