from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.batches.advantages import (
    add_gae,
    bootstrap_rows,
    discounted_returns,
    gae,
    n_step_returns,
    next_values,
)
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.episode import EpisodeRecorder

GAMMA, LAMBDA = 0.9, 0.8


@dataclass
class Data:
    """One env slot's rows, or `(T, N)` of them."""

    rewards: Any
    values: Any
    #: Of the observation after each row; NaN where there is none.
    after: Any
    terminateds: Any
    truncateds: Any
    valid: Any

    def column(self, n: int) -> Data:
        return Data(**{name: value[:, n] for name, value in vars(self).items()})


@st.composite
def _data(draw: st.DrawFn) -> Data:
    """`(T, N)` arrays in which `after` is the next row's value wherever the episode goes on."""
    steps, envs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (steps, envs)
    terminateds = rng.random(shape) < 0.15
    truncateds = rng.random(shape) < 0.15
    values = rng.normal(size=shape)
    after = rng.normal(size=shape)
    goes_on = ~(terminateds | truncateds)[:-1]
    after[:-1][goes_on] = values[1:][goes_on]
    # A last observation can only be missing where an episode ends.
    valid = ~((terminateds | truncateds) & (rng.random(shape) < 0.4))
    after[~valid | terminateds] = np.nan
    return Data(rng.normal(size=shape), values, after, terminateds, truncateds, valid)


def reference_gae(data: Data) -> tuple[list[float], list[bool]]:
    """One trajectory after the other, by the definition: the sum of discounted deltas."""
    total = len(data.rewards)
    advantages, mask = [0.0] * total, [True] * total
    for start in range(total):
        factor = 1.0
        for t in range(start, total):
            if not data.valid[t] and not data.terminateds[t]:
                if t == start:
                    mask[start] = False
                break
            value = 0.0 if data.terminateds[t] else data.after[t]
            delta = data.rewards[t] + GAMMA * value - data.values[t]
            advantages[start] += factor * delta
            if data.terminateds[t] or data.truncateds[t]:
                break
            factor *= GAMMA * LAMBDA
    return advantages, mask


def reference_n_step(data: Data, n: int) -> list[float]:
    """For each row: rewards until n of them, or an end, or a row that is not to be used."""
    total = len(data.rewards)
    out = [0.0] * total
    for start in range(total):
        for k in range(n):
            t = start + k
            if not data.valid[t] and not data.terminateds[t]:
                if k:  # what the row before had reached
                    out[start] += GAMMA**k * data.after[t - 1]
                break
            out[start] += GAMMA**k * data.rewards[t]
            if data.terminateds[t]:
                break
            if data.truncateds[t] or k == n - 1 or t == total - 1:
                out[start] += GAMMA ** (k + 1) * data.after[t]
                break
    return out


def as_columns(data: Data) -> tuple[Data, Any]:
    """The columns of `(T, N)` behind each other, and where each begins."""
    steps, envs = data.rewards.shape
    starts = np.zeros(steps * envs, np.bool_)
    starts[::steps] = True
    return Data(**{name: value.T.reshape(-1) for name, value in vars(data).items()}), starts


def run_gae(data: Data, starts: Any = None) -> Any:
    return gae(
        data.rewards,
        data.values,
        data.after,
        data.terminateds,
        data.truncateds,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        starts=starts,
        next_obs_valid=data.valid,
    )


@given(_data())
def test_gae_is_what_its_definition_says(data: Data) -> None:
    found = run_gae(data)
    for n in range(data.rewards.shape[1]):
        advantages, mask = reference_gae(data.column(n))
        assert found.advantages[:, n] == pytest.approx(advantages)
        assert found.mask[:, n].tolist() == mask
    assert found.value_targets == pytest.approx(found.advantages + data.values)


@given(_data(), st.integers(1, 15))
def test_n_step_returns_are_what_their_definition_says(data: Data, n: int) -> None:
    found = n_step_returns(
        data.rewards,
        data.after,
        data.terminateds,
        data.truncateds,
        gamma=GAMMA,
        n=n,
        next_obs_valid=data.valid,
    )
    for env in range(data.rewards.shape[1]):
        assert found.returns[:, env] == pytest.approx(reference_n_step(data.column(env), n))
    assert found.mask.tolist() == (data.valid | data.terminateds).tolist()


@given(_data())
def test_discounted_returns_are_n_step_returns_without_a_limit(data: Data) -> None:
    found = discounted_returns(
        data.rewards,
        data.terminateds,
        data.truncateds,
        gamma=GAMMA,
        next_values=data.after,
        next_obs_valid=data.valid,
    )
    for env in range(data.rewards.shape[1]):
        column = data.column(env)
        assert found.returns[:, env] == pytest.approx(reference_n_step(column, len(data.rewards)))


@pytest.mark.slow
@given(_data())
def test_columns_give_the_same_as_time_major_arrays(data: Data) -> None:
    columns, starts = as_columns(data)
    assert run_gae(columns, starts).advantages == pytest.approx(
        run_gae(data).advantages.T.reshape(-1)
    )
    more: Any = {"gamma": GAMMA, "next_obs_valid": columns.valid, "starts": starts}
    ends = columns.terminateds, columns.truncateds
    for env in range(data.rewards.shape[1]):
        one = data.column(env)
        part = slice(env * len(one.rewards), (env + 1) * len(one.rewards))
        found = discounted_returns(columns.rewards, *ends, next_values=columns.after, **more)
        assert found.returns[part] == pytest.approx(reference_n_step(one, len(one.rewards)))
        found = n_step_returns(columns.rewards, columns.after, *ends, n=3, **more)
        assert found.returns[part] == pytest.approx(reference_n_step(one, 3))


@given(_data())
def test_gae_is_stable_baselines_recursion_with_truncation_in_the_rewards(data: Data) -> None:
    data.valid[:] = True
    data.after = np.where(data.terminateds, 0.0, np.nan_to_num(data.after))
    # Stable-Baselines3: only `dones`; the final observation's value is added to the reward.
    dones = data.terminateds | data.truncateds
    only_truncated = data.truncateds & ~data.terminateds
    rewards = data.rewards + GAMMA * np.where(only_truncated, data.after, 0.0)
    expected = np.zeros_like(rewards)
    last = np.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        following = data.after[step] if step == len(rewards) - 1 else data.values[step + 1]
        non_terminal = 1.0 - dones[step]
        delta = rewards[step] + GAMMA * following * non_terminal - data.values[step]
        last = delta + GAMMA * LAMBDA * non_terminal * last
        expected[step] = last
    assert run_gae(data).advantages == pytest.approx(expected)


@given(_data())
def test_next_values_need_only_the_observations_that_no_row_begins_with(data: Data) -> None:
    for given_data, starts in ((data, None), as_columns(data)):
        rows = bootstrap_rows(
            given_data.terminateds,
            given_data.truncateds,
            starts=starts,
            next_obs_valid=given_data.valid,
        )
        found = next_values(given_data.values, rows, given_data.after[rows])
        readable = given_data.valid & ~given_data.terminateds
        assert found[readable].tolist() == given_data.after[readable].tolist()
    with pytest.raises(ValueError, match="rows want a value"):
        next_values(data.values, bootstrap_rows(data.terminateds, data.truncateds), [0.0] * 99)


@given(_data())
def test_plain_returns_take_no_values(data: Data) -> None:
    found = discounted_returns(data.rewards, data.terminateds, data.truncateds, gamma=1.0)
    ends = data.terminateds | data.truncateds
    for n in range(data.rewards.shape[1]):
        total, expected = 0.0, []
        for t in reversed(range(len(ends))):
            total = data.rewards[t, n] + (0.0 if ends[t, n] else total)
            expected.append(total)
        assert found.returns[:, n] == pytest.approx(expected[::-1])
    assert found.mask.all()


def one_row(terminated: bool, truncated: bool, valid: bool) -> Any:
    flags: Any = np.array([terminated]), np.array([truncated])
    ones = np.ones(1, np.float32)
    return gae(
        ones, ones, 10 * ones, *flags, gamma=0.5, gae_lambda=1.0, next_obs_valid=np.array([valid])
    )


@pytest.mark.parametrize(
    ("terminated", "truncated", "valid", "advantage", "mask"),
    [
        (True, False, True, 0.0, True),  # 1 - 1
        (True, True, True, 0.0, True),  # a terminal state has no value, whatever else
        (False, True, True, 5.0, True),  # 1 + 0.5 * 10 - 1
        (False, False, True, 5.0, True),  # the fragment's end
        (True, False, False, 0.0, True),  # nothing is missing that would be needed
        (False, True, False, 0.0, False),
    ],
)
def test_each_way_to_end_bootstraps_as_it_must(
    terminated: bool, truncated: bool, valid: bool, advantage: float, mask: bool
) -> None:
    found = one_row(terminated, truncated, valid)
    assert (found.advantages.tolist(), found.mask.tolist()) == ([advantage], [mask])
    assert found.value_targets.tolist() == [advantage + 1.0]
    assert found.advantages.dtype == np.float32


def test_a_recorded_batch_of_two_agents_gets_its_advantages() -> None:
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({"a": 0.0, "b": 0.0})
    for t in range(3):
        for agent in ready:
            recorder.act(agent, 0, extras={"vf_preds": np.float32(2.0)})
        last = t == 2
        ready = recorder.step(
            {"a": 1.0 + t} if last else {"a": 1.0 + t, "b": 1.0 + t},
            {"a": 1.0, "b": 1.0},
            {"__all__": False},
            {"__all__": last},
        )
    batch = SampleBatch.concatenate([part for _, part in recorder.cut().parts])
    (rows,) = bootstrap_rows(
        batch["terminateds"],
        batch["truncateds"],
        starts=batch.trajectory_starts(),
        next_obs_valid=batch["next_obs_valid"],
    )
    assert rows.tolist() == [2]  # b's last observation is missing
    done = add_gae(batch, np.array([2.0]), gamma=1.0, gae_lambda=1.0)
    assert done["advantages"].tolist() == [3.0, 2.0, 1.0, 2.0, 1.0, 0.0]
    assert done["loss_mask"].tolist() == [True] * 5 + [False]
    assert done["advantages"].dtype == np.float32
    asked: list[Any] = []

    def value_fn(observations: Any) -> Any:
        asked.append(observations.tolist())
        return np.full(len(observations), 2.0, np.float32)

    by_function = add_gae(batch, value_fn, gamma=1.0, gae_lambda=1.0)
    assert by_function["advantages"].tolist() == done["advantages"].tolist()
    assert asked == [[3.0]]


def test_a_function_tells_all_values_where_none_were_recorded() -> None:
    flags = np.zeros(3, np.bool_)
    batch = SampleBatch(
        {
            "obs": np.arange(3.0),
            "next_obs": np.arange(1.0, 4.0),
            "rewards": np.ones(3, np.float32),
            "terminateds": flags,
            "truncateds": flags,
            "next_obs_valid": ~flags,
            "eps_id": np.zeros(3, np.int64),
            "unroll_id": np.zeros(3, np.int64),
        }
    )
    done = add_gae(batch, lambda obs: 10.0 * obs, gamma=1.0, gae_lambda=0.0)
    assert done["vf_preds"].tolist() == [0.0, 10.0, 20.0]
    assert done["advantages"].tolist() == [11.0, 11.0, 11.0]
    over = batch.with_columns(terminateds=np.array([False, False, True]))
    assert add_gae(over, len_of, gamma=1.0, gae_lambda=0.0)["vf_preds"].tolist() == [3.0] * 3
    with pytest.raises(ValueError, match=r"returned \(3, 1\) for 3 observations"):
        add_gae(batch, lambda obs: obs[:, None], gamma=1.0, gae_lambda=0.0)


def test_values_that_are_whole_numbers_do_not_cut_the_one_that_is_put_in() -> None:
    values, flags = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    rows = bootstrap_rows(flags, flags)
    assert next_values(values, rows, [0.5]).tolist() == [0.0, 0.5]
    assert next_values(values.astype(np.float32), rows, [0.5]).dtype == np.float32
    assert next_values(values, rows, [3]).dtype == np.int64


def test_a_function_whose_values_are_no_numbers_is_refused() -> None:
    flags = np.zeros(1, np.bool_)
    batch = SampleBatch(
        {
            "obs": np.zeros(1),
            "next_obs": np.zeros(1),
            "rewards": np.ones(1, np.float32),
            "terminateds": flags,
            "truncateds": flags,
            "next_obs_valid": ~flags,
            "eps_id": np.zeros(1, np.int64),
        }
    )
    with pytest.raises(ValueError, match="returned object; values are numbers"):
        add_gae(batch, lambda _: [None], gamma=1.0, gae_lambda=1.0)


def len_of(observations: Any) -> Any:
    assert len(observations)  # nobody is asked for the values of nothing
    return np.full(len(observations), float(len(observations)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma must be from 0 to 1"),
        ({"gae_lambda": -0.1}, "gae_lambda must be from 0 to 1"),
        ({"values": np.zeros(3)}, r"values is \(3,\), rewards are \(2,\)"),
        ({"truncateds": np.zeros(1, np.bool_)}, "truncateds is"),
        ({"rewards": np.zeros((1, 1, 1))}, r"must be \(rows,\) or \(T, N\)"),
        ({"rewards": np.zeros((2, 1)), "starts": np.zeros(2, np.bool_)}, "starts are for columns"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "rewards": np.zeros(2),
        "values": np.zeros(2),
        "next_values": np.zeros(2),
        "terminateds": np.zeros(2, np.bool_),
        "truncateds": np.zeros(2, np.bool_),
        "gamma": 0.9,
        "gae_lambda": 0.9,
    }
    with pytest.raises(ValueError, match=message):
        gae(**{**arguments, **changes})


def test_an_empty_batch_has_empty_results() -> None:
    empty, flags = np.zeros(0, np.float32), np.zeros(0, np.bool_)
    found = gae(empty, empty, empty, flags, flags, gamma=0.9, gae_lambda=0.9)
    assert found.advantages.shape == (0,)
    with pytest.raises(ValueError, match="n must be at least 1"):
        n_step_returns(empty, empty, flags, flags, gamma=0.9, n=0)
