"""The loops in CleanRL's manner, in both modes of autoreset, and while actors are killed."""

from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODES = pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])


@MODES
def test_ppo_learns_while_actors_are_killed(mode: str) -> None:
    found = run_example(
        "cleanrl_ppo.py", "--autoreset", mode, "--total-steps", "30000", "--kill-every", "1.5"
    )
    # At random: 22, with a standard deviation of 12 in single episodes.
    assert found["return"] >= 50
    assert found["restarts"] > 0
    assert found["faulty_episodes"] > 0


@MODES
def test_ppo_over_a_vector_env_of_gymnasium_is_the_same_loop(mode: str) -> None:
    found = run_example(
        "cleanrl_ppo.py", "--vector", "gymnasium", "--autoreset", mode, "--total-steps", "2048"
    )
    assert found["return"] > 0


@MODES
def test_sac_stores_transitions_only_while_actors_are_killed(mode: str) -> None:
    arguments = ["--total-steps", "2400", "--learning-starts", "400", "--hidden", "32"]
    found = run_example("cleanrl_sac.py", "--autoreset", mode, "--kill-every", "1.5", *arguments)
    assert found["restarts"] > 0
    assert found["critic_loss"] >= 0  # and no NaN
    # Episodes of Pendulum have 200 steps. A fault costs a row, an end under NEXT_STEP another one.
    ends = 0 if mode == "SAME_STEP" else 2400 // 200 + found["faulty_episodes"] + 4
    assert 2400 - found["faulty_episodes"] - ends <= found["transitions"] <= 2400
