"""Short forms of what docs/learning.md shows: returns that no policy at random comes near."""

from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: At random: a mean return of 22, with a standard deviation of 12 in single episodes.
CARTPOLE = ["--target", "80", "--total-steps", "40000"]


def test_cartpole_is_learnt() -> None:
    found = run_example("ppo.py", *CARTPOLE)
    assert found["solved"]
    assert found["best_actions"] >= 80


def test_cartpole_is_learnt_while_actors_are_killed() -> None:
    found = run_example(
        "ppo.py", "--target", "500", "--total-steps", "20000", "--kill-every", "1.5"
    )
    # Returns while actors are killed are those of short episodes; these are not.
    assert found["best_actions"] >= 80
    assert found["restarts"] > 0
    assert found["faulty_episodes"] > 0


def test_cartpole_is_learnt_with_policy_workers() -> None:
    assert run_example("ppo.py", *CARTPOLE, "--policy-workers", "2")["solved"]


def test_continuous_actions_are_learnt() -> None:
    # At random the pole of InvertedPendulum-v5 is lost after 6 steps.
    found = run_example(
        "ppo.py", "--env", "InvertedPendulum-v5", "--target", "40", "--total-steps", "20000"
    )
    assert found["solved"]
