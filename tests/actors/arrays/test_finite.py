"""What is found to be not finite, where, and what follows."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

from envbus.actors.arrays.blocks import BlockLayout
from envbus.actors.arrays.finite import FiniteCheck, in_words
from envbus.actors.env.actor import EnvActor
from envbus.actors.protocol import Build, MapBlocks, Rebuild, Reset, Step
from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Tree
from envbus.runner.pool.pool import ActorPool
from tests.actors.driver import ask

SPACE = spaces.Dict({"pos": spaces.Box(-np.inf, np.inf, (2,)), "n": spaces.Discrete(9)})


class SayingEnv(gymnasium.Env[Any, Any]):
    """Its action says what it returns."""

    observation_space = SPACE
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"pos": np.zeros(2, np.float32), "n": 0}, {}

    def step(self, action: Any) -> Any:
        observation = {"pos": np.array([0.0, action[0]], np.float32), "n": 1}
        return observation, action[1], bool(action[0] == 99), False, {}


def mapped(check: str, mode: str = "NextStep", env: Any = SayingEnv) -> EnvActor:
    actor = EnvActor()
    sources = Tree([env] * 2)
    built = ask(actor, Build(sources=sources, autoreset_mode=mode))
    assert built.errors == []
    observation_space, action_space = built.spaces.value[0]
    ask(
        actor,
        MapBlocks(
            observation_space=Tree(observation_space),
            action_space=Tree(action_space),
            num_envs=7,
            first_row=5,
            check_finite=check,
        ),
    )
    ask(actor, Reset())
    return actor


def step(actor: EnvActor, action: list[float]) -> Any:
    return ask(actor, Step(action_arrays=[np.array([[1.0, 1.0], action])]))


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ([np.nan, 1.0], r"observation\['pos'\] is nan"),
        ([1.0, np.nan], "reward is nan"),
        ([1.0, -np.inf], "reward is -inf"),
        ([1.0, 1e39], r"reward is 1e\+39"),
    ],
)
def test_what_is_not_finite_is_a_fault_that_names_env_field_and_step(
    action: list[float], field: str
) -> None:
    actor = mapped("fault")
    assert step(actor, [1.0, 1.0]).errors == []
    result = step(actor, action)
    (error,) = result.errors
    assert (error.slot, error.phase) == (1, "step")
    with pytest.raises(ValueError, match=f"env 6: {field}, in step 2"):
        raise ValueError(error.message)
    assert np.isfinite(result.observation_arrays[1]).all()
    assert result.rewards.tolist() == [1.0, 0.0]
    assert step(actor, [1.0, 1.0]).errors == []


def test_an_infinite_observation_is_one_of_a_box_without_bounds() -> None:
    result = step(mapped("fault"), [np.inf, 1.0])
    assert result.errors == []
    assert np.inf in result.observation_arrays[1]


def test_a_warning_comes_once_per_env_and_field(caplog: pytest.LogCaptureFixture) -> None:
    actor = mapped("warn")
    with caplog.at_level(logging.WARNING, "envbus.actors"):
        for action in ([np.nan, 1.0], [np.nan, 1.0], [1.0, np.nan], [1.0, np.inf]):
            assert step(actor, action).errors == []
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "env 6: observation['pos'] is nan",
        "env 6: reward is nan",
    ]


def test_switched_off_nobody_looks(caplog: pytest.LogCaptureFixture) -> None:
    assert np.isnan(step(mapped("off"), [np.nan, np.nan]).rewards[1])
    assert caplog.records == []


def test_a_last_observation_is_looked_at_too() -> None:
    class Ending(SayingEnv):
        def step(self, action: Any) -> Any:
            return {"pos": np.full(2, np.nan, np.float32), "n": 1}, 0.0, True, False, {}

    actor = EnvActor()
    built = ask(actor, Build(sources=Tree([Ending]), autoreset_mode="SameStep"))
    observation_space, action_space = map(Tree, built.spaces.value[0])
    spaces_of = {"observation_space": observation_space, "action_space": action_space}
    ask(actor, MapBlocks(**spaces_of, num_envs=1, first_row=0, check_finite="fault"))
    ask(actor, Reset())
    result = ask(actor, Step(action_arrays=[np.zeros((1, 2))]))
    assert "final_obs is nan" in result.errors[0].message
    assert result.terminations.tolist() == [False]


ACT = spaces.Box(-np.inf, np.inf, (2,), np.float64)
FINE = [np.ones((2, 2), np.float32), np.array(1.0), np.ones(3, np.int8), np.ones(0)]


@pytest.mark.parametrize(
    ("last", "is_fine"),
    [
        (np.ones(2, np.float16), True),
        (np.array([np.inf, -np.inf]), True),
        (np.full(5000, 1e30, np.float32), True),
        ((1.0, {"a": np.ones(2)}), True),
        (np.array(np.nan), False),
        (np.array([1.0, np.nan], np.float16), False),
        (np.array([1j, complex(0.0, np.nan)]), False),
        (np.full(5000, np.nan, np.float32), False),
        ((1.0, {"a": np.array([np.nan])}), False),
        (float("nan"), False),
    ],
)
def test_last_observations_of_all_envs_are_looked_at_together(last: Any, is_fine: bool) -> None:
    layout = BlockLayout.of(ACT, ACT, 5)
    check = FiniteCheck(ACT, layout.views(bytearray(layout.size)))
    infos = [{"final_obs": one} for one in FINE]
    assert check.is_fine([*infos, {}])
    assert check.is_fine([*infos, {"final_obs": last}]) is is_fine


class RaggedEnv(gymnasium.Env[Any, Any]):
    observation_space = spaces.Sequence(spaces.Box(-np.inf, np.inf, (1,)))
    action_space = ACT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return (), {}

    def step(self, action: Any) -> Any:
        zero = np.zeros(1, np.float32)
        return (zero, zero + np.float32(action[0])), action[1], False, False, {"noise": np.nan}


class TwoAgents:
    possible_agents = ("left", "right")
    metadata: ClassVar[dict[str, Any]] = {}

    def observation_space(self, _agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (1,))

    def action_space(self, _agent: str) -> Any:
        return ACT

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        observations = {agent: act[:1].astype(np.float32) for agent, act in actions.items()}
        rewards = {agent: act[1] for agent, act in actions.items()}
        flags = dict.fromkeys(actions, False)
        return observations, rewards, flags, flags, {"left": {"noise": np.nan}}

    @property
    def agents(self) -> list[str]:
        return list(self.possible_agents)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ([np.nan, 0.0], "observation of agent 'right' is nan"),
        ([0.0, np.nan], "reward of agent 'right' is nan"),
        ([0.0, 1e39], r"reward of agent 'right' is 1e\+39"),
    ],
)
def test_each_agent_of_an_env_is_looked_at(action: list[float], told: str) -> None:
    with ActorPool([TwoAgents], num_actors=0, autoreset_mode="Disabled", check_finite=True) as pool:
        pool.try_reset(0)
        assert set(pool.poll().observations) == {0}
        fine = np.zeros(2)
        pool.send_actions({0: {"left": fine, "right": fine}})
        assert set(pool.poll().observations) == {0}
        pool.send_actions({0: {"left": fine, "right": np.array(action)}})
        with pytest.raises(ValueError, match=f"env 0: {told}, in step"):
            pool.poll()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_observations_without_a_fixed_size_are_looked_at(mode: str) -> None:
    actor = mapped("fault", mode, env=RaggedEnv)
    assert step(actor, [1.0, 1.0]).errors == []
    result = step(actor, [np.nan, 1.0])
    (error,) = result.errors
    assert "env 6: observation is nan, in step 2" in error.message
    assert np.isfinite(result.observations.value[1]).all()
    assert type(result.observations.value[1]) is tuple
    # Made anew: what it showed before is not its own.
    assert ask(actor, Rebuild(slots=[1])).errors == []
    (error,) = step(actor, [1.0, 1.0]).errors
    assert "was made anew; reset it first" in error.message
    assert ask(actor, Reset(slots=[1])).errors == []
    assert step(actor, [1.0, 1.0]).errors == []


class LargeEnv(SayingEnv):
    """Its observations have squares beyond their precision, the last one is NaN."""

    def __init__(self, dtype: type[np.floating[Any]] = np.float32, value: float = 1e30) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), dtype)
        self.value = value

    def seen(self, value: float) -> npt.NDArray[Any]:
        return np.full(3, value, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.seen(self.value), {}

    def step(self, action: Any) -> Any:
        last = bool(action[0] == 99)
        return self.seen(np.nan if last else self.value), 0.0, last, False, {}


LARGE = [(np.float16, 6e4), (np.float32, 1e30), (np.float64, 1e200)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", LARGE)
def test_large_numbers_are_no_reason_to_warn(kind: tuple[type[np.floating[Any]], float]) -> None:
    for mode in ("SameStep", "NextStep"):
        actor = mapped("fault", mode, partial(LargeEnv, *kind))
        assert step(actor, [0.0, 0.0]).errors == []
        (error,) = step(actor, [99.0, 0.0]).errors
        assert error.slot == 1


@pytest.mark.slow
def test_a_program_that_warns_by_default_is_not_told_of_large_numbers_either() -> None:
    program = (
        "import numpy as np, gymnasium as gym\n"
        "from envbus.runner import BusVectorEnv\n"
        "from tests.actors.arrays.test_finite import LargeEnv\n"
        "for num_actors in 0, 1:\n"
        "    with BusVectorEnv([LargeEnv] * 2, num_actors=num_actors) as envs:\n"
        "        envs.reset()\n"
        "        envs.step(np.zeros((2, 2), np.float32))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_setting_is_one_of_three() -> None:
    assert [in_words(True), in_words("warn"), in_words(False)] == ["fault", "warn", "off"]
    for wrong in ("yes", 2, None):
        with pytest.raises(ConfigError, match="check_finite"):
            in_words(wrong)  # type: ignore[arg-type]  # what somebody may pass
