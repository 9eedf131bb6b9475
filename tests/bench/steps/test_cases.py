from __future__ import annotations

import numpy as np
import pytest

from envbus.bench.adapters.workloads import (
    JitterEnv,
    ShortEnv,
    action_ring,
    autoreset_mode,
    make_env,
)
from envbus.bench.report.targets import POOL_CASE, RATIOS, SPINNING_RATIOS, SYNC_RATIOS
from envbus.bench.steps.cases import ALL_CASES, Case, parse_case
from envbus.bench.steps.variants import (
    BASELINE,
    BLOCKING_FLOOR,
    FLOOR,
    OURS,
    OURS_BLOCKING,
    SPINNING,
    SYNC,
    VARIANTS,
    variants_named,
)


def test_a_case_is_written_as_workload_and_number() -> None:
    assert parse_case("null:64") == Case("null", 64)
    assert parse_case(Case("dict", 16).name) == Case("dict", 16)


@pytest.mark.parametrize("text", ["null", "null:", "null:0", "nothing:8", "null:-1"])
def test_other_words_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_case(text)


def test_every_ratio_that_is_a_target_is_measured() -> None:
    keys = {*RATIOS, *SPINNING_RATIOS, *SYNC_RATIOS, POOL_CASE}
    assert {Case(*key) for key in keys} <= set(ALL_CASES)
    names = {BASELINE, OURS, OURS_BLOCKING, SPINNING, SYNC, FLOOR, BLOCKING_FLOOR}
    assert names <= {variant.name for variant in variants_named(None)}


def test_envs_that_wait_get_an_actor_each() -> None:
    assert Case("jitter", 16).options(VARIANTS[OURS])["num_actors"] == "num_envs"
    assert Case("null", 16).options(VARIANTS[OURS])["num_actors"] == "auto"


def test_too_many_envs_for_a_library_have_a_reason() -> None:
    assert VARIANTS["ray_actors"].left_out("null", 64) is None
    assert "Ray" in (VARIANTS["ray_actors"].left_out("null", 256) or "")


@pytest.mark.parametrize("workload", ["dict", "infos", "short", "jitter"])
def test_what_the_floor_cannot_do_has_a_reason(workload: str) -> None:
    assert VARIANTS[FLOOR].left_out(workload, 8)
    assert VARIANTS[FLOOR].left_out("null", 8) is None


def test_bounds_of_steps_take_no_part_in_the_comparison_of_starts() -> None:
    names = {variant.name for variant in variants_named(None, startup=True)}
    assert not names & {FLOOR, BLOCKING_FLOOR, OURS_BLOCKING}
    assert "sb3_subproc_default" in names


def test_short_episodes_end_every_fourth_step_and_begin_anew_in_it() -> None:
    env = ShortEnv()
    env.reset(seed=0)
    assert [env.step(0)[2] for _ in range(8)] == 2 * [False, False, False, True]
    assert autoreset_mode("short").name == "SAME_STEP"
    assert autoreset_mode("null").name == "NEXT_STEP"


def test_infos_have_five_values_also_those_of_a_reset() -> None:
    env = make_env("infos")
    _, first = env.reset(seed=0)
    second = env.step(0)[4]
    assert len(first) == 5
    assert {key: type(value) for key, value in first.items()} == {
        key: type(value) for key, value in second.items()
    }


def test_actions_are_the_same_for_everybody() -> None:
    first, second = action_ring("cartpole", 4), action_ring("cartpole", 4)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in second]
    assert first[0].shape == (4,)


@pytest.mark.parametrize(
    "workload", ["null", "pixels", "dict", "infos", "short", "frame", "burn", "blas", "cartpole"]
)
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
