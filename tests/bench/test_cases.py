from __future__ import annotations

import numpy as np
import pytest

from envbus.bench.cases import ALL_CASES, Case, parse_case
from envbus.bench.targets import RATIOS
from envbus.bench.variants import BASELINE, OURS, VARIANTS
from envbus.bench.workloads import JitterEnv, action_ring, make_env


def test_a_case_is_written_as_workload_and_number() -> None:
    assert parse_case("null:64") == Case("null", 64)
    assert parse_case(Case("dict", 16).name) == Case("dict", 16)


@pytest.mark.parametrize("text", ["null", "null:", "null:0", "nothing:8", "null:-1"])
def test_other_words_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_case(text)


def test_every_ratio_that_is_a_target_is_measured() -> None:
    assert {Case(*key) for key in RATIOS} <= set(ALL_CASES)
    assert {BASELINE, OURS} <= VARIANTS.keys()


def test_envs_that_wait_get_an_actor_each() -> None:
    assert Case("jitter", 16).options(VARIANTS[OURS])["num_actors"] == "num_envs"
    assert Case("null", 16).options(VARIANTS[OURS])["num_actors"] == "auto"


def test_too_many_envs_for_a_library_have_a_reason() -> None:
    assert VARIANTS["ray_actors"].left_out(64) is None
    assert "Ray" in (VARIANTS["ray_actors"].left_out(256) or "")


def test_actions_are_the_same_for_everybody() -> None:
    first, second = action_ring("cartpole", 4), action_ring("cartpole", 4)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in second]
    assert first[0].shape == (4,)


@pytest.mark.parametrize("workload", ["null", "pixels", "dict", "burn", "blas", "cartpole"])
def test_workloads_stay_in_their_spaces(workload: str) -> None:
    env = make_env(workload)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space
    env.close()


def test_jitter_has_the_mean_and_the_tail_that_it_says() -> None:
    durations = np.concatenate([JitterEnv(index)._durations for index in range(200)])
    assert np.mean(durations) == pytest.approx(2e-3, rel=0.1)
    assert np.percentile(durations, 99) == pytest.approx(20e-3, rel=0.1)
