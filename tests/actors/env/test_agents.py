from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.env.agents import AgentsEnv, in_agents_env
from envbus.actors.env.source import make
from envbus.actors.spaces.agent_spaces import AgentSpaces, RecordSpace
from envbus.actors.spaces.spaces import from_plain
from envbus.actors.testing import CountingEnv
from tests.actors.agent_envs import CountingParallelEnv, DictEnv, RoundRobinEnv

NOT_OVER = {"__all__": False}


def wrap(env: object) -> AgentsEnv:
    wrapped = in_agents_env(env)
    assert isinstance(wrapped, AgentsEnv)
    return wrapped


def test_a_single_env_stays_as_it_is() -> None:
    env = CountingEnv(3)
    env.agents = ["an attribute of its own"]  # type: ignore[attr-defined]
    assert in_agents_env(env) is env


def test_a_class_or_a_thing_without_agents_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="return an instance, not the class"):
        make(lambda: DictEnv)  # type: ignore[arg-type,return-value]

    class Nothing:
        def step(self) -> None: ...

        def reset(self) -> None: ...

    with pytest.raises(TypeError, match="needs `possible_agents` or `observation_spaces`"):
        make(Nothing)  # type: ignore[arg-type]


def test_a_gymnasium_env_called_multi_agent_env_has_several_agents() -> None:
    class MultiAgentEnv(gymnasium.Env[Any, Any]):
        """As RLlib's, which derives from Gymnasium's Env."""

        observation_space = spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Discrete(3)})
        action_space = spaces.Dict({"x": spaces.Discrete(4), "y": spaces.Discrete(5)})

    class Mine(MultiAgentEnv):
        pass

    env = wrap(Mine())
    assert env.action_space.spaces == {"x": spaces.Discrete(4), "y": spaces.Discrete(5)}


def test_a_record_holds_what_each_agent_got() -> None:
    env = wrap(DictEnv())
    record, info = env.reset(seed=4)
    assert info == {}
    assert record == {
        "observations": {"a": 1, "b": 1},
        "rewards": {"a": 0.0, "b": 0.0},
        "terminateds": {"a": False, "b": False, "__all__": False},
        "truncateds": {"a": False, "b": False, "__all__": False},
        "infos": {"__common__": {"seed": 4}},
        "agents": ["a", "b"],
    }
    assert env.step({"a": 1}) == (
        {
            "observations": {"a": 0},
            "rewards": {"a": 1.0},
            "terminateds": NOT_OVER,
            "truncateds": NOT_OVER,
            "infos": {},
            "agents": ["a"],
        },
        1.0,
        False,
        False,
        {},
    )


@pytest.mark.parametrize("missing", ["terminateds", "truncateds"])
def test_all_is_required_and_its_lack_is_named(missing: str) -> None:
    flags = {"terminateds": NOT_OVER, "truncateds": NOT_OVER, missing: {"a": False}}
    env = wrap(DictEnv([({"a": 0}, {}, flags["terminateds"], flags["truncateds"], {})]))
    env.reset()
    with pytest.raises(ValueError, match=f"env DictEnv: .* {missing} without '__all__'.* has 'a'"):
        env.step({})


@pytest.mark.parametrize("place", [0, 1])
def test_all_is_no_agent(place: int) -> None:
    step: list[Any] = [{"a": 0}, {"a": 0.0}, NOT_OVER, NOT_OVER, {}]
    step[place] = {"__all__": 1}
    env = wrap(DictEnv([tuple(step)]))
    env.reset()
    with pytest.raises(ValueError, match="have an agent called '__all__'"):
        env.step({})


def test_the_episode_is_over_when_the_last_agent_left() -> None:
    env = wrap(CountingParallelEnv({"x": 1, "y": 2}))
    env.reset()
    record, _, terminated, truncated, _ = env.step({"x": 1, "y": 2})
    assert (terminated, truncated) == (False, False)
    assert record["terminateds"] == {"x": True, "y": False, "__all__": False}
    assert record["agents"] == ["y"]
    record, _, terminated, truncated, _ = env.step({"y": 2})
    assert (terminated, truncated) == (True, False)
    assert record["terminateds"] == {"y": True, "__all__": True}
    assert record["truncateds"] == {"y": False, "__all__": False}


def test_an_agent_both_terminated_and_truncated_counts_once() -> None:
    env = wrap(CountingParallelEnv({"x": 1, "y": 2}, both=["x"]))
    env.reset()
    _, _, terminated, truncated, _ = env.step({})
    assert (terminated, truncated) == (False, False)
    _, _, terminated, truncated, _ = env.step({})
    assert (terminated, truncated) == (True, False)


def test_an_episode_that_is_cut_is_truncated_not_terminated() -> None:
    env = wrap(CountingParallelEnv({"x": 1, "y": 1}, cut=["y"]))
    env.reset()
    record, _, terminated, truncated, _ = env.step({})
    assert (terminated, truncated) == (False, True)
    assert record["terminateds"]["x"]
    assert record["truncateds"]["y"]


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (({}, {}, {}), TypeError, "must return observations, rewards.*got 3 values"),
        (({}, {}, 1, {}), TypeError, "terminateds of step must be a dict"),
        (({}, {}, {"a": True}, {}), ValueError, "terminateds without '__all__'"),
        (None, TypeError, "got a builtins.NoneType"),
        ((1, {}, NOT_OVER, NOT_OVER, {}), TypeError, "observations of step must be a dict"),
    ],
)
def test_what_a_step_returned_wrongly_is_named(result: Any, error: Any, text: str) -> None:
    env = wrap(DictEnv([result]))
    env.reset()
    with pytest.raises(error, match=text):
        env.step({})


class OldDictEnv:
    """Of the old API: plays a script of four dicts per step; its `reset` takes no seed."""

    possible_agents = DictEnv.possible_agents
    observation_spaces = DictEnv.observation_spaces
    action_spaces = DictEnv.action_spaces

    def __init__(self, script: list[tuple[Any, ...]]) -> None:
        self.script = script
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> Any:
        return {"a": 0, "b": 0}

    def step(self, actions: Any) -> Any:
        return self.script.pop(0)


def test_several_agents_may_have_the_old_api_too() -> None:
    limit = {"TimeLimit.truncated": True}
    steps: list[tuple[Any, ...]] = [
        ({"a": 0, "b": 0}, {"a": 1.0}, {"a": False, "__all__": False}, {}),
        ({"a": 0, "b": 0}, {"a": 1.0}, {"a": True, "b": True, "__all__": True}, {"b": limit}),
    ]
    inner = OldDictEnv(steps)
    env = wrap(inner)
    record, _ = env.reset(seed=3, options={})  # as a mask alone comes
    assert record["infos"] == {"a": {}, "b": {}}
    record, *_ = env.step({})
    assert record["terminateds"] == {"a": False, "__all__": False}
    record, _, terminated, truncated, _ = env.step({})
    assert (terminated, truncated) == (False, True)
    assert record["terminateds"] == {"a": True, "b": False, "__all__": False}
    assert record["truncateds"] == {"a": False, "b": True, "__all__": True}
    assert inner.seeds == [3]


def test_flags_are_booleans_whatever_an_env_makes_of_them() -> None:
    class Loose(DictEnv):
        def step(self, actions: Any) -> Any:
            observations, rewards, *_, infos = super().step(actions)
            none = {"a": None, "b": np.bool_(True), "__all__": 0.0}
            return observations, rewards, none, {"a": np.array([1]), "__all__": None}, infos

    env = wrap(Loose())
    env.reset()
    record, _, terminated, truncated, _ = env.step({})
    assert (terminated, truncated) == (False, False)
    assert record["terminateds"] == {"a": False, "b": True, "__all__": False}
    assert record["truncateds"] == {"a": True, "__all__": False}
    flags = [*record["terminateds"].values(), *record["truncateds"].values()]
    assert {type(flag) for flag in flags} == {bool}


def test_rewards_of_several_goals_have_one_shape_in_an_episode() -> None:
    steps = [({"a": 0}, {"b": np.ones(size)}, NOT_OVER, NOT_OVER, {}) for size in (2, 2, 3)]
    env = wrap(DictEnv(steps))
    env.reset()
    env.step({})
    env.step({})
    with pytest.raises(ValueError, match=r"of shape \(3,\) for agent 'b'; earlier ones had \(2,\)"):
        env.step({})


@pytest.mark.parametrize("reward", [None, "1", [1.0], {}])
def test_a_reward_that_cannot_be_added_fails_its_own_step_and_is_named(reward: Any) -> None:
    env = wrap(DictEnv([({"a": 0}, {"a": 1, "b": reward}, NOT_OVER, NOT_OVER, {})]))
    env.reset()
    with pytest.raises(TypeError, match=r"the reward .* for agent 'b'; rewards are numbers"):
        env.step({})


def test_rewards_that_are_vectors_pass_and_are_not_summed() -> None:
    vector = np.array([1.0, 2.0])
    env = wrap(DictEnv([({"a": 0}, {"a": vector}, NOT_OVER, NOT_OVER, {})]))
    env.reset()
    record, reward, *_ = env.step({})
    assert record["rewards"]["a"] is vector
    assert reward == 0.0


def test_attributes_are_the_env_s() -> None:
    inner = DictEnv()
    env = wrap(inner)
    assert env.get_wrapper_attr("resets") == 0
    env.set_wrapper_attr("resets", 7)
    assert inner.resets == 7
    assert not env.set_wrapper_attr("nothing", 7, force=False)
    assert env.unwrapped is inner
    env.close()  # it has none


def test_spaces_are_found_however_they_are_told() -> None:
    shared = wrap(RoundRobinEnv(3))
    assert list(shared.action_space.spaces) == [0, 1, 2]
    told = [from_plain(plain) for plain in shared.agent_spaces(2)]
    assert told == [RoundRobinEnv.observation_space, RoundRobinEnv.action_space]
    by_agent = wrap(DictEnv())
    assert by_agent.observation_space["b"] == spaces.Discrete(5)
    asked = wrap(CountingParallelEnv({"x": 1}))
    assert from_plain(asked.agent_spaces("x")[1]) == spaces.Discrete(3)

    class Unclear(DictEnv):
        action_spaces = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="Unclear has no action space for agent 'a'"):
        in_agents_env(Unclear())


def test_records_are_elements_of_the_record_space() -> None:
    env = wrap(CountingParallelEnv({"x": 1, "y": 2}))
    record, _ = env.reset()
    assert record in env.observation_space
    assert env.observation_space.sample() in env.observation_space
    assert env.action_space.sample() in env.action_space
    record["observations"]["x"] = np.zeros(3, np.int64)
    assert record not in env.observation_space


def test_agent_spaces_are_equal_by_agent_and_seeded_alike() -> None:
    one = AgentSpaces({"a": spaces.Discrete(1000), ("b", 1): spaces.Discrete(1000)})
    two = AgentSpaces({"a": spaces.Discrete(1000), ("b", 1): spaces.Discrete(1000)})
    assert one == two
    assert one != RecordSpace(two.spaces)
    one.seed(3)
    two.seed(3)
    assert one.sample() == two.sample()
    mask = np.zeros(1000, np.int8)
    mask[17] = 1
    assert one.sample(mask={"a": mask})["a"] == 17
