"""The floor leaves out what costs, but what it does must be the work that the others do."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest

from envbus.bench.adapters.base import Opening
from envbus.bench.adapters.floor import FloorStepper, open_stepper
from envbus.bench.adapters.workloads import action_ring, env_fns
from envbus.bench.steps.variants import BLOCKING_FLOOR, FLOOR, VARIANTS

#: As many as make CartPole's first episodes end under actions by chance.
STEPS = 100

pytestmark = [
    # The children only step envs and end: they take no lock that a thread of pytest's may hold.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the floor's flags need x86-64"
    ),
]


@pytest.fixture(params=[FLOOR, BLOCKING_FLOOR])
def floor(request: pytest.FixtureRequest) -> Iterator[FloorStepper]:
    stepper = open_stepper(Opening("cartpole", 3, VARIANTS[request.param].options))
    assert isinstance(stepper, FloorStepper)
    yield stepper
    stepper.close()
    assert [child.exitcode for child in stepper._children] == [0, 0]


def test_the_floor_makes_the_steps_of_sync_vector_env(floor: FloorStepper) -> None:
    envs = gym.vector.SyncVectorEnv(env_fns("cartpole", 3))
    observations, _ = envs.reset(seed=0)
    rows, ring, ends = floor._rows, action_ring("cartpole", 3), 0
    assert np.array_equal(rows.observations, observations)
    for step in range(STEPS):
        actions = ring[step % len(ring)]
        assert floor.step(actions) == 3
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        assert np.array_equal(rows.observations, observations)
        assert np.array_equal(rows.rewards, rewards)
        assert np.array_equal(rows.terminated, terminated)
        assert np.array_equal(rows.truncated, truncated)
        ends += int(np.count_nonzero(terminated | truncated))
    envs.close()
    assert ends > 0


def test_one_env_has_one_process() -> None:
    stepper = open_stepper(Opening("null", 1, VARIANTS[FLOOR].options))
    assert isinstance(stepper, FloorStepper)
    try:
        assert len(stepper._children) == 1
        assert stepper.step(action_ring("null", 1)[0]) == 1
    finally:
        stepper.close()
