from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.testing import CountingEnv
from envbus.bus.wire.messages import Tree
from envbus.runner.policies.connectors import Connector
from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.sampling.inference import fitted
from envbus.runner.testing import assert_same
from tests.actors.agent_envs import RoundRobinEnv

LIKE: dict[str, Any] = {
    "action_logp": np.float32(0.0),
    "state_out": {"h": np.zeros(2, np.float32), "c": (np.int64(0),)},
}


def test_columns_have_the_structure_and_dtype_that_the_runners_policy_gives() -> None:
    row, wrong = fitted(
        {"action_logp": -0.5, "state_out": Tree({"h": [1, 2], "c": [3]}), "more": 1}, LIKE
    )
    assert wrong == []
    assert row.keys() == LIKE.keys()
    assert (row["action_logp"], row["action_logp"].dtype) == (-0.5, np.float32)
    np.testing.assert_array_equal(row["state_out"]["h"], [1.0, 2.0])
    assert row["state_out"]["h"].dtype == np.float32
    assert row["state_out"]["c"] == (3,)


def test_what_is_missing_or_of_another_form_is_blank_and_named() -> None:
    row, wrong = fitted({"state_out": {"h": [1.0], "c": [0]}}, LIKE)
    assert np.isnan(row["action_logp"])
    assert np.isnan(row["state_out"]["h"]).all()
    assert row["state_out"]["c"] == (0,)
    assert wrong[0] == "action_logp is missing"
    assert wrong[1].startswith("state_out: expected float32 of shape (2,)")
    for value in ("text", [[1, 2]], None, {"a": 1}):
        assert fitted({"action_logp": value}, LIKE)[1][0].startswith("action_logp: ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1e30, np.float16(0.0)),
        ([0.0, -1e39], np.zeros(2, np.float32)),
        (1 + 2j, np.float32(0.0)),
        (3.5, np.int64(0)),
        (300, np.uint8(0)),
        (-1, np.uint8(0)),
        (1e300, np.int64(0)),
        (2, np.bool_(False)),
    ],
)
def test_numbers_that_the_dtype_does_not_have_are_blank_and_named(
    given: Any, expected: Any
) -> None:
    row, wrong = fitted({"x": given}, {"x": expected})
    assert wrong[0].startswith(f"x: expected {expected.dtype}")
    assert not np.isfinite(row["x"]).any() if expected.dtype.kind == "f" else row["x"] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.1, np.float16(0.0)),
        (0.1, np.float32(0.0)),
        (np.nan, np.float32(0.0)),
        (0.1 + 1j, np.complex64(0.0)),
        (2**53 + 1, np.float32(0.0)),
        (255, np.uint8(0)),
        (3.0, np.int64(0)),
        (True, np.bool_(False)),
        (1, np.bool_(False)),
    ],
)
def test_numbers_that_are_rounded_or_written_in_another_way_are_taken(
    given: Any, expected: Any
) -> None:
    row, wrong = fitted({"x": given}, {"x": expected})
    assert wrong == []
    np.testing.assert_array_equal(row["x"], np.asarray(given).astype(expected.dtype))


# --- policies that use arrays again, write to them, or return what fits nobody ----------------
# All ways of sampling give the rows that they give with a policy that does nothing of this.

WAYS = [("NextStep", True), ("Disabled", True), ("Disabled", False)]
BOTH = pytest.mark.parametrize(("mode", "vectorized"), WAYS, ids=["next-step", "columns", "dicts"])
#: Unequal, so that rows of a call are now all envs and now some.
ENVS = [functools.partial(CountingEnv, length) for length in (2, 3, 5)]


class Careful(Policy):
    """Its state counts on from a number that is its weights; actions and an extra follow."""

    def __init__(self) -> None:
        self.begin = np.zeros(2, np.float64)

    def initial_state(self) -> Any:
        return {"n": self.begin.copy()}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        after = states["n"] + 1
        return PolicyOutput(self.act(after), {"n": after}, {"seen": after[:, 0] * 2})

    def act(self, states: Any) -> Any:
        actions: Any = states[:, 0].astype(np.int64) % 2
        return actions

    def get_weights(self) -> Any:
        return {"begin": self.begin.copy()}

    def set_weights(self, weights: Any, version: int | None = None) -> None:
        self.begin = np.array(weights["begin"])
        super().set_weights(weights, version)


class UsesBuffersAgain(Careful):
    """Returns the same arrays each time."""

    def __init__(self) -> None:
        super().__init__()
        self.actions = np.zeros(64, np.int64)
        self.states = np.zeros((64, 2))
        self.seen = np.zeros(64)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        rows = len(states["n"])
        for buffer in (self.actions, self.states, self.seen):
            buffer[...] = 99
        np.add(states["n"], 1, out=self.states[:rows])
        self.actions[:rows] = self.act(self.states[:rows])
        self.seen[:rows] = self.states[:rows, 0] * 2
        return PolicyOutput(
            self.actions[:rows], {"n": self.states[:rows]}, {"seen": self.seen[:rows]}
        )


class WritesToItsStates(Careful):
    """Counts in the arrays that it was told, and hands out its own first state."""

    def initial_state(self) -> Any:
        return {"n": self.begin}

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        states["n"] += 1
        return PolicyOutput(self.act(states["n"]), states, {"seen": states["n"][:, 0] * 2})


class Seeing(CountingEnv):
    """One whose actions are arrays."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(0)


class UsesActionsAgain(Policy):
    """Acts by what it sees, in an array that it returns each time."""

    def __init__(self) -> None:
        self.actions = np.zeros((8, 2), np.float32)

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        self.actions[...] = 99
        acted = self.actions[: len(observations)]
        acted[...] = observations[:, :2]
        return PolicyOutput(acted, None)


@BOTH
def test_actions_in_an_array_that_is_used_again_are_each_rows_own(
    mode: str, vectorized: bool
) -> None:
    envs = [functools.partial(Seeing, length) for length in (2, 3, 5)]
    pool = ActorPool(envs, num_actors=0, autoreset_mode=mode)
    settings = RunnerConfig(seed=1, vectorized=vectorized, rollout_fragment_length=7)
    with EnvRunner(pool, UsesActionsAgain(), settings) as runner:
        batch = runner.sample().single()
    np.testing.assert_array_equal(batch["actions"], batch["obs"][:, :2])


class NarrowStates(Careful):
    """Returns states of a narrower dtype than its first one has."""

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        after = (states["n"] + 1).astype(np.float32)
        return PolicyOutput(self.act(after), {"n": after}, {"seen": after[:, 0] * np.float64(2)})


def sampled(policy: Policy, mode: str, vectorized: bool, **config: Any) -> list[Any]:
    """Return the columns of some samples; weights are set between them."""
    # Without processes: who is ready when is the same each time.
    pool = ActorPool(ENVS, num_actors=0, autoreset_mode=mode)
    settings = RunnerConfig(seed=1, vectorized=vectorized, rollout_fragment_length=7, **config)
    with EnvRunner(pool, policy, settings) as runner:
        batches = [runner.sample().single()]
        for begin in (3.0, 10.0):
            runner.set_weights({"default_policy": {"begin": np.full(2, begin)}})
            batches += [runner.sample().single(), runner.sample(num_env_steps=5).single()]
        batches.append(runner.sample(num_episodes=4).single())
    return [batch.columns for batch in batches]


@functools.cache
def expected() -> list[Any]:
    return sampled(Careful(), "NextStep", True)


@BOTH
@pytest.mark.parametrize("make", [Careful, UsesBuffersAgain, WritesToItsStates, NarrowStates])
def test_rows_are_those_of_a_policy_that_keeps_nothing_and_writes_to_nothing(
    make: type[Policy], mode: str, vectorized: bool
) -> None:
    found = sampled(make(), mode, vectorized)
    for one, other in zip(found, expected(), strict=True):
        assert_same(one, other)
    # An episode begins with the first state of the weights at its first action.
    columns = found[2]
    begun = columns["t"] == 0
    assert begun.any()
    assert set(columns["state_in"]["n"][begun, 0]) <= {0.0, 3.0}
    assert (columns["state_out"]["n"] == columns["state_in"]["n"] + 1).all()


@pytest.mark.parametrize("make", [UsesBuffersAgain, WritesToItsStates, NarrowStates])
def test_so_are_the_rows_of_several_agents(make: type[Policy]) -> None:
    def rows(policy: Policy) -> Any:
        pool = ActorPool([RoundRobinEnv] * 3, num_actors=0, autoreset_mode="Disabled")
        with EnvRunner(pool, policy, RunnerConfig(seed=1)) as runner:
            return [runner.sample(num_env_steps=20).single().columns for _ in range(3)]

    for one, other in zip(rows(make()), rows(Careful()), strict=True):
        assert_same(one, other)


class Wrong(Policy):
    """Returns what it was given."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def initial_state(self) -> Any:
        return self.parts.get("first")

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        given = {name: part for name, part in self.parts.items() if name != "first"}
        return PolicyOutput(**{"actions": np.zeros(3, np.int64), **given})


@BOTH
@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"actions": np.zeros(1, np.int64)}, r"actions of shape \(1,\) for 3 rows"),
        ({"extras": {"rewards": np.zeros(3)}}, "named as other columns"),
        ({"first": np.zeros(2)}, "returned no states"),
    ],
    ids=str,
)
def test_what_fits_nobody_is_refused_alike(
    parts: Any, told: str, mode: str, vectorized: bool
) -> None:
    pool = ActorPool(ENVS, num_actors=0, autoreset_mode=mode)
    config = RunnerConfig(vectorized=vectorized, min_envs=3)
    with EnvRunner(pool, Wrong(**parts), config) as runner, pytest.raises(ValueError, match=told):
        runner.sample()


@BOTH
def test_actions_of_another_shape_than_the_env_s_are_refused_alike(
    mode: str, vectorized: bool
) -> None:
    pool = ActorPool(ENVS, num_actors=0, autoreset_mode=mode)
    config = RunnerConfig(vectorized=vectorized, min_envs=3)
    wrong = Wrong(actions=np.zeros((3, 1), np.int64))
    told = r"actions of shape \(1,\) for each env, where its action space has \(\): Discrete"
    with EnvRunner(pool, wrong, config) as runner, pytest.raises(ValueError, match=told):
        runner.sample()


class TurnsAround(Connector):
    """Writes to what it is given."""

    def __call__(self, batch: Any, keys: Any) -> Any:
        np.subtract(1, batch, out=batch)
        return batch


@BOTH
def test_a_connector_that_writes_to_the_actions_leaves_the_batch_as_it_is(
    mode: str, vectorized: bool
) -> None:
    rows, turned = (
        sampled(Careful(), mode, vectorized, action_connector=connector)
        for connector in (None, TurnsAround())
    )
    for one, other in zip(rows, turned, strict=True):
        np.testing.assert_array_equal(other["actions"], one["actions"])


class FailsOnce(Careful):
    """Raises at its fourth call."""

    calls = 0

    def compute_actions(self, observations: Any, states: Any, *, explore: bool = True) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("on purpose")
        return super().compute_actions(observations, states, explore=explore)


@BOTH
def test_after_a_policy_has_raised_only_episodes_are_told_whose_rows_are_there(
    mode: str, vectorized: bool
) -> None:
    pool = ActorPool(ENVS, num_actors=0, autoreset_mode=mode)
    config = RunnerConfig(vectorized=vectorized, min_envs=3)
    with EnvRunner(pool, FailsOnce(), config) as runner:
        with pytest.raises(RuntimeError, match="on purpose"):
            runner.sample()  # the envs of two and three steps have ended
        sample = runner.sample(num_episodes=3)
    assert {one.eps_id for one in sample.episodes} == set(sample.single()["eps_id"].tolist())
    assert len(sample.episodes) == 3
