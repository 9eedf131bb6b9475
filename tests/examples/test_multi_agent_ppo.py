from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_agents_that_share_a_policy_learn_to_spread() -> None:
    options = ["--num-steps", "25", "--learning-rate", "2e-3", "--total-steps", "30000"]
    found = run_example("multi_agent_ppo.py", "--target", "-70", *options)
    # At random: -81. The mean of 100 episodes has a standard deviation of 2.4.
    assert found["untrained"] < -72
    assert found["solved"]
    assert found["policies"] == 1


def test_agents_with_different_spaces_learn_a_policy_each() -> None:
    env = "mpe2.simple_speaker_listener_v4:parallel_env"
    found = run_example(
        "multi_agent_ppo.py", "--env", env, "--target", "-55", "--total-steps", "30000"
    )
    assert found["solved"]
    assert found["policies"] == 2
