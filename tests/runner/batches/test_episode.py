from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.episode import DEFAULT_POLICY_ID, EpisodeRecorder, Fragment
from envbus.runner.pool.agent_results import DUMMY_AGENT, HeldBack

GO_ON = {"__all__": False}
END = {"__all__": True}


def obs(value: float) -> Any:
    return np.array([value], np.float32)


def act_all(recorder: EpisodeRecorder, agents: list[Any], action: int = 0) -> None:
    for agent in agents:
        recorder.act(agent, action)


def rows(recorder: EpisodeRecorder, agent: object = None) -> SampleBatch:
    """Cut, and return the rows of one agent, or of all."""
    parts = [batch for _, batch in recorder.cut().parts]
    if agent is None:
        return SampleBatch.concatenate(parts)
    return next(batch for batch in parts if batch["agent_id"][0] == agent)


def drive(recorder: EpisodeRecorder, steps: list[Any]) -> None:
    """Play `[(observations, rewards, terminateds, truncateds)]`; whoever is ready acts."""
    ready = recorder.reset(steps[0])
    for step in steps[1:]:
        act_all(recorder, ready)
        ready = recorder.step(*step)


class Countdown:
    """Observes 1, 2, 3, ...; every step rewards with 100; terminates after `length` steps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.t = 0

    def step(self) -> tuple[Any, float, bool]:
        self.t += 1
        return obs(self.t), 100.0, self.t >= self.length


class RoundRobin:
    """Agents in turn: one observation, and its reward, per env step, as RLlib's test env."""

    def __init__(self, num_agents: int, length: int) -> None:
        self.agents = [Countdown(length) for _ in range(num_agents)]
        self.last: list[Any] = [(obs(0), 0.0, False)] * num_agents
        self.finished: set[int] = set()
        self.turn = 0

    def reset(self) -> dict[int, Any]:
        return {self._next(): obs(0)}

    def step(self, actions: dict[int, Any]) -> tuple[Any, Any, Any, Any]:
        for agent in actions:
            self.last[agent] = self.agents[agent].step()
        agent = self._next()
        observation, reward, terminated = self.last[agent]
        if terminated:
            reward = 0.0
            self.finished.add(agent)
        ended = len(self.finished) == len(self.agents)
        return (
            {agent: observation},
            {agent: reward},
            {agent: terminated, "__all__": ended},
            {"__all__": False},
        )

    def _next(self) -> int:
        turn = self.turn
        self.turn = (turn + 1) % len(self.agents)
        return turn


def sample_env_steps(make_env: Any, count: int, **options: Any) -> MultiAgentBatch:
    """Take `count` env steps, episode after episode, as a runner with one env does."""
    parts: list[tuple[str, SampleBatch]] = []
    eps_id, left = 0, count
    while left:
        env = make_env()
        recorder = EpisodeRecorder(eps_id, 0, **options)
        ready = recorder.reset(env.reset())
        while left and not recorder.done:
            act_all(recorder, ready)
            ready = recorder.step(*env.step(dict.fromkeys(ready, 0)))
            left -= 1
        parts += recorder.cut().parts
        eps_id += 1
    return MultiAgentBatch.of(parts, count)


def test_round_robin_completes_42_transitions_in_50_env_steps() -> None:
    batch = sample_env_steps(lambda: RoundRobin(5, 5), 50).single()
    assert len(batch) == 42
    assert batch["rewards"][:25].tolist() == [100, 100, 100, 100, 0] * 5
    assert batch["t"][:10].tolist() == [4, 9, 14, 19, 24, 5, 10, 15, 20, 25]
    assert batch["obs"][:10, 0].tolist() == [0, 1, 2, 3, 4] * 2
    assert batch["next_obs"][:10, 0].tolist() == [1, 2, 3, 4, 5] * 2
    assert batch["terminateds"][:5].tolist() == [False] * 4 + [True]


def test_a_single_agents_transitions_have_the_stated_columns() -> None:
    recorder = EpisodeRecorder(7, 3, incarnation=2, infos=True)
    ready = recorder.reset({DUMMY_AGENT: obs(0)}, {DUMMY_AGENT: {"first": 1}})
    assert ready == [DUMMY_AGENT]
    for t in range(3):
        extras = {"action_logp": np.float32(-t), "state_in": {"h": np.full(2, t, np.float32)}}
        recorder.act(DUMMY_AGENT, np.int64(t), policy_version=10 + t, extras=extras)
        end = t == 2
        ready = recorder.step(
            {DUMMY_AGENT: obs(t + 1)},
            {DUMMY_AGENT: 0.5},
            {DUMMY_AGENT: end, "__all__": end},
            GO_ON,
            {DUMMY_AGENT: {"t": t}},
        )
    assert ready == []
    assert recorder.done
    batch = rows(recorder)
    assert {name: batch[name].dtype.str for name in batch.columns if name != "state_in"} == {
        "obs": "<f4",
        "actions": "<i8",
        "rewards": "<f4",
        "terminateds": "|b1",
        "truncateds": "|b1",
        "next_obs": "<f4",
        "next_obs_valid": "|b1",
        "agent_id": "<U6",
        "t": "<i8",
        "policy_version": "<i8",
        "eps_id": "<i8",
        "env_id": "<i8",
        "incarnation": "<i8",
        "infos": "|O",
        "action_logp": "<f4",
    }
    assert batch["state_in"]["h"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["policy_version"].tolist() == [10, 11, 12]
    assert batch["infos"].tolist() == [{"t": 0}, {"t": 1}, {"t": 2}]
    assert batch["terminateds"].tolist() == [False, False, True]
    assert (batch["eps_id"][0], batch["env_id"][0], batch["incarnation"][0]) == (7, 3, 2)


def test_fragments_join_without_a_gap() -> None:
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({"a": obs(0)})
    cuts = []
    for t in range(7):
        act_all(recorder, ready, action=t)
        if t in (2, 3):  # with an open row
            cuts.append(recorder.cut().parts)
        ready = recorder.step({"a": obs(t + 1)}, {"a": 1.0}, GO_ON, GO_ON)
        if t == 5:  # without one
            cuts.append(recorder.cut().parts)
    cuts.append(recorder.cut().parts)
    batches = [batch for parts in cuts for _, batch in parts]
    assert [len(batch) for batch in batches] == [2, 1, 3, 1]
    joined = SampleBatch.concatenate(batches)
    assert joined["t"].tolist() == joined["actions"].tolist() == list(range(7))
    assert joined["obs"][1:].tolist() == joined["next_obs"][:-1].tolist()
    assert set(joined["eps_id"].tolist()) == {1}
    assert not joined["terminateds"].any()


def test_only_agents_with_an_observation_are_asked() -> None:
    recorder = EpisodeRecorder(1, 0)
    assert recorder.reset({"a": obs(0)}) == ["a"]
    act_all(recorder, ["a"])
    assert recorder.step({"b": obs(0)}, {"a": 1.0}, GO_ON, GO_ON, {"c": {}}) == ["b"]
    with pytest.raises(ValueError, match="agent 'a', step 1 of episode 1 was not asked"):
        recorder.act("a", 0)
    with pytest.raises(ValueError, match="agent 'c'"):
        recorder.act("c", 0)


def test_rewards_without_an_observation_add_up_to_the_next_one() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(0), "b": obs(0)},
            ({"b": obs(1)}, {"a": 1.0, "b": 1.0}, GO_ON, GO_ON),
            ({"b": obs(2)}, {"a": 2.0}, {"a": True, "__all__": False}, GO_ON),
            ({"a": obs(3), "b": obs(3)}, {"a": 4.0}, GO_ON, GO_ON),
        ],
    )
    batch = rows(recorder, "a")
    assert batch["rewards"].tolist() == [7.0]
    assert batch["terminateds"].tolist() == [True]  # said a step before the observation came
    assert batch["t"].tolist() == [2]
    assert recorder.result().agent_returns == {"a": 7.0, "b": 1.0}


def test_a_reward_before_the_first_action_is_in_the_first_row() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(0)},
            ({"a": obs(1)}, {"b": 5.0}, GO_ON, GO_ON),
            ({"a": obs(2), "b": obs(0)}, {}, GO_ON, GO_ON),
            ({"a": obs(3), "b": obs(1)}, {"b": 1.0}, GO_ON, GO_ON),
        ],
    )
    assert rows(recorder, "b")["rewards"].tolist() == [6.0]


def test_a_reward_after_an_agents_end_is_added_to_its_last_row() -> None:
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({"a": obs(0), "b": obs(0)})
    act_all(recorder, ready)
    ready = recorder.step(
        {"a": obs(1), "b": obs(1)}, {"a": 1.0}, {"a": True, "__all__": False}, GO_ON
    )
    assert ready == ["b"]
    act_all(recorder, ready)
    recorder.step({"b": obs(2)}, {"a": 10.0}, GO_ON, GO_ON)
    assert rows(recorder, "a")["rewards"].tolist() == [11.0]
    act_all(recorder, ["b"])
    recorder.step({"b": obs(3)}, {"a": 100.0}, GO_ON, END)
    result = recorder.result()
    assert (result.agent_returns["a"], result.unrecorded_reward) == (111.0, 100.0)


@pytest.mark.parametrize(
    ("terminateds", "truncateds"), [({}, GO_ON), (GO_ON, {}), ({"a": False}, {"a": False})]
)
def test_all_is_required_in_both_flags(terminateds: Any, truncateds: Any) -> None:
    recorder = EpisodeRecorder(1, 4)
    recorder.reset({"a": obs(0)})
    with pytest.raises(ValueError, match="env 4: terminateds and truncateds must each hold"):
        recorder.step({"a": obs(1)}, {}, terminateds, truncateds)


def test_all_is_no_agent_id() -> None:
    recorder = EpisodeRecorder(1, 4)
    with pytest.raises(ValueError, match="env 4: '__all__' belongs to flags"):
        recorder.reset({"__all__": obs(0)})
    recorder.reset({"a": obs(0)})
    with pytest.raises(ValueError, match="no agent id"):
        recorder.step({}, {"__all__": 1.0}, GO_ON, GO_ON)


def test_rewards_of_one_row_do_not_add_up_to_infinity() -> None:
    recorder = EpisodeRecorder(1, 0)
    recorder.reset({"a": obs(0)}, rewards={"a": 3e38})
    for number, reward in enumerate([3e38, math.inf], 1):
        recorder.act("a", 1)
        recorder.step({"a": obs(number)}, {"a": reward}, GO_ON, GO_ON)
    assert rows(recorder, "a")["rewards"].tolist() == [np.float32(3e38), math.inf]
    assert recorder.result().unrecorded_reward == 3e38


def test_a_reward_after_an_agents_end_does_not_add_up_to_infinity() -> None:
    recorder = EpisodeRecorder(1, 0)
    done = {"a": True, "__all__": False}
    drive(recorder, [{"a": obs(0), "b": obs(0)}, ({"a": obs(1)}, {"a": 3e38}, done, GO_ON)])
    recorder.step({}, {"a": 2e38}, GO_ON, GO_ON)
    recorder.step({}, {"a": -1.0}, GO_ON, GO_ON)
    assert rows(recorder, "a")["rewards"].tolist() == [np.float32(3e38)]
    assert recorder.result().unrecorded_reward == 2e38


def test_an_agent_both_terminated_and_truncated_ends_once() -> None:
    recorder = EpisodeRecorder(1, 0)
    both = {"a": True, "__all__": False}
    drive(recorder, [{"a": obs(0), "b": obs(0)}, ({"a": obs(1)}, {}, both, both)])
    batch = rows(recorder, "a")
    assert (batch["terminateds"].tolist(), batch["truncateds"].tolist()) == ([True], [True])
    assert recorder.result().agent_steps["a"] == 1


def test_infos_without_an_observation_are_carried_and_common_ones_kept() -> None:
    recorder = EpisodeRecorder(1, 0, infos=True)
    ready = recorder.reset({"a": obs(0)})
    act_all(recorder, ready)
    recorder.step({}, {}, GO_ON, GO_ON, {"a": {"x": 1, "y": 1}, "__common__": {"score": 3}})
    recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON, {"a": {"x": 2}})
    assert recorder.last_infos == {"a": {"x": 2}, "__common__": {"score": 3}}
    assert rows(recorder)["infos"].tolist() == [{"x": 2, "y": 1}]


def test_an_agent_first_seen_done_is_left_out() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(0)},
            (
                {"a": obs(1), "late": obs(9)},
                {"late": 3.0},
                {"late": True, "__all__": False},
                GO_ON,
            ),
            ({"a": obs(2), "later": obs(9)}, {}, GO_ON, END),
        ],
    )
    assert [agent for agent in recorder.cut().parts[0][1]["agent_id"]] == ["a", "a"]
    assert recorder.result().agent_policies == {"a": "default_policy"}
    assert recorder.result().episode_return == 3.0


@pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
def test_a_missing_last_observation_stays_missing(terminated: bool, truncated: bool) -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(5), "b": obs(5)},
            ({"b": obs(6)}, {"a": 1.0}, GO_ON, GO_ON),
            ({"b": obs(7)}, {"a": 2.0}, {"__all__": terminated}, {"__all__": truncated}),
        ],
    )
    batch = rows(recorder)
    assert batch["agent_id"].tolist() == ["a", "b", "b"]
    assert batch["rewards"].tolist() == [3.0, 0.0, 0.0]
    assert batch["next_obs_valid"].tolist() == [False, True, True]
    assert batch["next_obs"][0].tolist() == [0.0]
    assert batch["terminateds"].tolist() == [terminated, False, terminated]
    assert batch["truncateds"].tolist() == [truncated, False, truncated]


def test_an_agents_own_flags_go_before_those_of_all() -> None:
    recorder = EpisodeRecorder(1, 0)
    flags = {"a": True, "__all__": False}
    drive(recorder, [{"a": obs(0), "b": obs(0)}, ({}, {}, flags, END)])
    batch = rows(recorder)
    assert batch["terminateds"].tolist() == [True, False]
    assert batch["truncateds"].tolist() == [False, True]


def test_a_step_in_which_nobody_acts_counts_as_env_step() -> None:
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({})
    assert ready == []
    assert recorder.step({}, {}, GO_ON, GO_ON) == []
    assert recorder.step({"a": obs(0)}, {}, GO_ON, GO_ON) == ["a"]
    act_all(recorder, ["a"])
    recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON)
    assert (recorder.env_steps, recorder.agent_steps) == (3, 1)
    fragment = recorder.cut()
    assert (fragment.env_steps, fragment.agent_steps) == (3, 1)
    assert fragment.parts[0][1]["t"].tolist() == [2]
    assert (recorder.env_steps, recorder.agent_steps) == (0, 0)


def test_an_episode_in_which_nobody_acts_has_no_rows_and_says_so() -> None:
    recorder = EpisodeRecorder(1, 0)
    recorder.reset({})
    recorder.step({}, {}, END, GO_ON)
    assert recorder.result().agent_steps == {}
    assert recorder.cut().parts == []
    assert recorder.result().length == 1


def test_an_agent_may_pause_and_come_back() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(0)},
            ({"b": obs(0)}, {}, GO_ON, GO_ON),
            ({"a": obs(1)}, {}, GO_ON, GO_ON),
            ({"a": obs(2), "b": obs(1)}, {}, GO_ON, GO_ON),
        ],
    )
    batch = rows(recorder)
    assert batch["agent_id"].tolist() == ["a", "a", "b"]
    assert batch["t"].tolist() == [1, 2, 2]


def test_an_agent_that_was_done_does_not_come_back() -> None:
    recorder = EpisodeRecorder(1, 0)
    done = {"a": True, "__all__": False}
    drive(recorder, [{"a": obs(0), "b": obs(0)}, ({"a": obs(1)}, {}, done, GO_ON)])
    assert recorder.step({"a": obs(1)}, {}, done, GO_ON) == []  # still told to be done
    with pytest.raises(ValueError, match="agent 'a', step 2 of episode 1 was done"):
        recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON)


def test_an_observation_that_nobody_answered_is_told() -> None:
    recorder = EpisodeRecorder(1, 0)
    recorder.reset({"a": obs(0)})
    with pytest.raises(ValueError, match="observes, and has not acted on the last one"):
        recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON)


def test_a_change_of_form_names_env_agent_and_column() -> None:
    recorder = EpisodeRecorder(1, 3)
    recorder.reset({"a": obs(0)})
    recorder.act("a", 0, extras={"action_logp": 0.0})
    with pytest.raises(ValueError, match=r"env 3, agent 'a'.*: observation has shape \(2,\)"):
        recorder.step({"a": np.zeros(2, np.float32)}, {}, GO_ON, GO_ON)
    recorder = EpisodeRecorder(1, 3)
    ready = recorder.reset({"a": obs(0)})
    recorder.act("a", 0, extras={"action_logp": 0.0})
    ready = recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON)
    with pytest.raises(ValueError, match=r"extra columns are \[\], earlier ones \['action_logp'\]"):
        act_all(recorder, ready)


def test_a_reward_that_is_no_number_is_named() -> None:
    recorder = EpisodeRecorder(1, 3)
    recorder.reset({"a": obs(0)})
    with pytest.raises(ValueError, match=r"env 3, agent 'a'.*: reward None is no number"):
        recorder.step({}, {"a": None}, GO_ON, GO_ON)  # type: ignore[dict-item]


def test_ragged_observations_are_kept_as_they_are() -> None:
    recorder = EpisodeRecorder(1, 0, is_ragged=lambda _: True)
    drive(
        recorder,
        [{"a": (1,)}, ({"a": (1, 2)}, {}, GO_ON, GO_ON), ({"a": ()}, {}, GO_ON, END)],
    )
    batch = rows(recorder)
    assert batch["obs"].tolist() == [(1,), (1, 2)]
    assert batch["next_obs"].tolist() == [(1, 2), ()]


def test_the_policy_is_asked_for_once_per_agent_and_episode() -> None:
    asked: list[tuple[Any, int]] = []

    def mapping(agent: object, episode: EpisodeRecorder) -> str:
        asked.append((agent, episode.eps_id))
        return f"policy of {agent}"

    recorder = EpisodeRecorder(1, 0, policy_mapping_fn=mapping)
    with pytest.raises(KeyError, match="has not observed"):
        recorder.policy_for("a")
    drive(recorder, [{"a": obs(0)}] + [({"a": obs(1)}, {}, GO_ON, GO_ON)] * 3)
    assert recorder.policy_for("a") == "policy of a"
    assert asked == [("a", 1)]


def test_rows_of_a_faulty_episode_never_leave() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(recorder, [{"a": obs(0)}] + [({"a": obs(1)}, {"a": 1.0}, GO_ON, GO_ON)] * 3)
    assert recorder.fault() == 3
    assert recorder.done
    assert (recorder.env_steps, recorder.result().agent_steps) == (0, {"a": 0})
    fragment = recorder.cut()
    assert (fragment.parts, fragment.env_steps) == ([], 0)
    assert recorder.result().faulty
    assert recorder.result().fragments == 0


def test_a_faulty_episode_tells_that_fragments_have_left() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(recorder, [{"a": obs(0)}, ({"a": obs(1)}, {}, GO_ON, GO_ON)])
    recorder.cut()
    recorder.fault()
    assert (recorder.result().eps_id, recorder.result().fragments) == (1, 1)


def test_a_faulty_episode_can_be_kept_up_to_the_fault_as_truncated() -> None:
    recorder = EpisodeRecorder(1, 0)
    drive(
        recorder,
        [
            {"a": obs(0), "b": obs(0)},
            ({"a": obs(1), "b": obs(1)}, {"a": 1.0, "b": 1.0}, GO_ON, GO_ON),
            ({"a": obs(2)}, {"a": 1.0, "b": 50.0}, GO_ON, GO_ON),
        ],
    )
    recorder.act("a", 0)  # its outcome never came
    assert recorder.fault(keep=True) == 0
    batch = rows(recorder)
    assert batch["agent_id"].tolist() == ["a", "a", "b"]
    assert batch["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert batch["truncateds"].tolist() == [False, True, True]
    assert not batch["terminateds"].any()
    assert batch["next_obs_valid"].all()
    assert batch["next_obs"][1].tolist() == [2.0]


def test_what_is_handed_in_may_be_written_again() -> None:
    memory = obs(0)
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({"a": memory})
    for t in range(3):
        act_all(recorder, ready)
        memory[:] = t + 1
        ready = recorder.step({"a": memory}, {}, GO_ON, GO_ON)
    assert rows(recorder)["obs"].tolist() == [[0], [1], [2]]


_AGENTS = ("a", "b", "c")


@st.composite
def _scripts(draw: st.DrawFn) -> list[tuple[set[str], dict[str, float], set[str], bool, bool]]:
    """Env steps: who observes, rewards, who is flagged, does it end, is it cut."""
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        seen = draw(st.sets(st.sampled_from(_AGENTS)))
        rewards = draw(
            st.dictionaries(st.sampled_from(_AGENTS), st.integers(-3, 3).map(float), max_size=3)
        )
        flagged = draw(st.sets(st.sampled_from(_AGENTS), max_size=1))
        steps.append(
            (
                seen,
                rewards,
                flagged,
                draw(st.booleans()) and draw(st.booleans()),
                draw(st.booleans()),
            )
        )
    return steps


def play(
    recorder: EpisodeRecorder,
    script: Any,
    first: set[str],
    *,
    cuts: bool,
    held_back: HeldBack | None = None,
) -> list[SampleBatch]:
    """Play a script to its end; return the agents' rows."""
    ready = recorder.reset({agent: obs(0) for agent in sorted(first)})
    parts: list[SampleBatch] = []
    done: set[str] = set()
    flagged_once: set[str] = set()
    for t, (seen, rewards, flagged, ends, cut) in enumerate(script):
        ended = ends or t == len(script) - 1
        act_all(recorder, ready)
        flagged_once |= flagged
        record: dict[str, Any] = {
            "observations": {agent: obs(t + 1) for agent in sorted(seen - done)},
            "rewards": dict(rewards),
            "terminateds": {**dict.fromkeys(flagged, True), "__all__": ended},
            "truncateds": {"__all__": False},
        }
        ready = recorder.step(**(held_back.settle(record) if held_back else record))
        done |= flagged_once & seen
        if cut and cuts:
            parts += [batch for _, batch in recorder.cut().parts]
        if ended:
            break
    return parts + [batch for _, batch in recorder.cut().parts]


@pytest.mark.slow
@given(_scripts(), st.sets(st.sampled_from(_AGENTS), min_size=1))
def test_rewards_held_back_by_the_pool_give_the_same_rows(script: Any, first: set[str]) -> None:
    plain, settled = EpisodeRecorder(1, 0), EpisodeRecorder(1, 0)
    one = play(plain, script, first, cuts=False)
    two = play(settled, script, first, cuts=False, held_back=HeldBack())
    rows_by_agent = [
        {batch["agent_id"][0]: {k: v.tolist() for k, v in batch.columns.items()} for batch in parts}
        for parts in (one, two)
    ]
    assert rows_by_agent[0] == rows_by_agent[1]
    assert plain.result().episode_return == settled.result().episode_return


@given(_scripts(), st.sets(st.sampled_from(_AGENTS), min_size=1))
def test_rows_hold_all_rewards_and_join_however_the_episode_is_cut(
    script: Any, first: set[str]
) -> None:
    recorder = EpisodeRecorder(1, 0)
    parts = play(recorder, script, first, cuts=True)
    result = recorder.result()
    total = sum(float(batch["rewards"].sum()) for batch in parts)
    assert total + result.unrecorded_reward == result.episode_return
    for agent in _AGENTS:
        mine = [batch for batch in parts if batch["agent_id"][0] == agent]
        assert sum(len(batch) for batch in mine) == result.agent_steps.get(agent, 0)
        if mine:
            joined = SampleBatch.concatenate(mine)
            assert joined["obs"][1:].tolist() == joined["next_obs"][:-1].tolist()
            assert (np.diff(joined["t"]) > 0).all()
            assert joined["next_obs_valid"][:-1].all()
            ends_at = joined["terminateds"] | joined["truncateds"]
            assert ends_at.tolist() == [False] * (len(joined) - 1) + [True]


def test_an_action_that_did_not_happen_has_no_row_and_cuts_its_trajectory() -> None:
    recorder = EpisodeRecorder(1, 0)
    ready = recorder.reset({"a": obs(0)})
    for t in range(5):
        if t == 3:
            recorder.act("a", t)
            recorder.unact()
        else:
            act_all(recorder, ready, action=t)
        ready = recorder.step({"a": obs(t + 1)}, {"a": 2.0**t}, END if t == 4 else GO_ON, GO_ON)
    batch = rows(recorder)
    assert batch["actions"].tolist() == [0, 1, 2, 4]
    assert batch["obs"][:, 0].tolist() == [0, 1, 2, 4]
    assert batch["next_obs"][:, 0].tolist() == [1, 2, 3, 5]
    assert batch["rewards"].tolist() == [1, 2, 4, 16]
    assert batch["t"].tolist() == [0, 1, 2, 4]
    assert batch["truncateds"].tolist() == [False, False, True, False]
    assert [len(part) for part in batch.split_by_trajectory()] == [3, 1]
    result = recorder.result()
    assert (result.episode_return, result.unrecorded_reward, result.length) == (31, 8, 5)


@pytest.mark.parametrize("acted", [True, False])
def test_a_first_action_that_did_not_happen_leaves_nothing(acted: bool) -> None:
    recorder = EpisodeRecorder(1, 0)
    asked = recorder.reset({"a": obs(0), "b": obs(0)})
    if acted:
        act_all(recorder, asked)
    recorder.unact()
    assert recorder.step({"b": obs(1)}, {"b": 4.0}, GO_ON, GO_ON) == ["b"]
    act_all(recorder, ["b"])
    recorder.step({"b": obs(2)}, {"b": 1.0}, END, GO_ON)
    assert rows(recorder)["rewards"].tolist() == [1]
    assert recorder.result().unrecorded_reward == 4


@pytest.mark.parametrize("at_first", [True, False])
def test_rewards_of_an_agent_whose_first_observation_may_have_been_lost_are_in_no_row(
    at_first: bool,
) -> None:
    recorder = EpisodeRecorder(1, 0)
    act_all(recorder, recorder.reset({"a": obs(0)}, rewards={"a": 1.0}, void=at_first))
    if not at_first:
        recorder.unact(everybody=True)
    act_all(recorder, recorder.step({"a": obs(1), "b": obs(1)}, {"b": 10.0}, GO_ON, GO_ON))
    recorder.step({"a": obs(2), "b": obs(2)}, {"a": 100.0, "b": 100.0}, END, GO_ON)
    assert rows(recorder)["rewards"].tolist() == ([0.0, 100.0, 100.0] if at_first else [100.0] * 2)
    assert recorder.result().unrecorded_reward == 11.0


def test_what_was_broken_off_is_dropped_with_a_faulty_episode() -> None:
    recorder = EpisodeRecorder(1, 0)
    act_all(recorder, recorder.reset({"a": obs(0)}))
    recorder.step({"a": obs(1)}, {}, GO_ON, GO_ON)
    recorder.unact()
    assert recorder.fault() == 1
    assert (recorder.cut().parts, recorder.result().agent_steps) == ([], {"a": 0})


def test_an_episode_that_ends_before_anybody_acts_has_no_step() -> None:
    recorder = EpisodeRecorder(1, 0)
    recorder.reset({"a": obs(0)})
    recorder.close(terminated=False, truncated=True)
    assert (recorder.done, recorder.cut().parts, recorder.result().length) == (True, [], 0)


def fragment_of(steps: int, agents: int = 1, cut_at: int = 0) -> Fragment:
    """Agent i acts in every (i + 1)th step."""
    recorder = EpisodeRecorder(1, 0)
    seen: dict[Any, Any] = {agent: np.zeros(1) for agent in range(agents)}
    ready = recorder.reset(seen)
    for t in range(1, steps + 1):
        for agent in ready:
            recorder.act(agent, 0)
        if t - 1 == cut_at:
            recorder.cut()
        seen = {agent: np.full(1, t) for agent in range(agents) if t % (agent + 1) == 0}
        ready = recorder.step(seen, {}, GO_ON, GO_ON)
    return recorder.cut()


def test_a_fragment_is_split_between_two_env_steps() -> None:
    fragment = fragment_of(10, agents=2)
    first, rest = fragment.split(5)
    assert [part.env_steps for part in (first, rest)] == [5, 5]
    assert [batch["t"].tolist() for _, batch in first.parts] == [[0, 1, 2, 3, 4], [1, 3]]
    assert [batch["t"].tolist() for _, batch in rest.parts] == [[5, 6, 7, 8, 9], [5, 7, 9]]
    first, rest = rest.split(1)
    assert [batch["t"].tolist() for _, batch in first.parts] == [[5], [5]]
    assert rest.begin == 6


def test_who_has_no_row_in_a_part_is_not_in_it() -> None:
    first, rest = fragment_of(4, agents=2).split(1)
    assert [len(batch) for _, batch in first.parts] == [1]
    assert [len(batch) for _, batch in rest.parts] == [3, 2]


def test_env_steps_are_found_that_have_as_many_rows() -> None:
    fragment = fragment_of(10, agents=2, cut_at=4)
    assert fragment.begin == 4
    assert [batch["t"].tolist() for _, batch in fragment.parts] == [[*range(4, 10)], [5, 7, 9]]
    assert [fragment.env_steps_with(rows) for rows in (1, 2, 3, 4, 9, 10)] == [1, 2, 2, 3, 6, 6]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4, 5, 9])
def test_an_episode_gives_a_part_of_its_rows_and_goes_on(steps: int, ragged: bool) -> None:
    def play(cuts: list[int]) -> list[tuple[str, SampleBatch]]:
        recorder = EpisodeRecorder(1, 0, infos=True, is_ragged=lambda _: ragged)
        seen: dict[Any, Any] = {agent: {"x": np.zeros(1)} for agent in range(2)}
        ready, parts = recorder.reset(seen), []
        for t in range(1, 12):
            if t == 10:  # an open row is there, and what has left is not asked for again
                assert recorder.env_steps_with(4) == 3
                for count in cuts:
                    parts += recorder.cut(count).parts
                assert (recorder.env_steps, recorder.length) == (9 - sum(cuts), 9)
            for agent in ready:
                recorder.act(agent, t, policy_version=t, extras={"vf_preds": np.array(t)})
            seen = {agent: {"x": np.full(1, t)} for agent in range(2) if t % (agent + 1) == 0}
            rewards = dict.fromkeys(range(2), float(t))
            ready = recorder.step(seen, rewards, GO_ON, GO_ON, {0: {"t": t}})
            if t == 5:
                recorder.unact([0])
                ready.remove(0)
        recorder.fault(keep=True)
        return parts + recorder.cut().parts

    def by_agent(parts: list[tuple[str, SampleBatch]]) -> list[SampleBatch]:
        own: list[list[SampleBatch]] = [[], []]
        for _, batch in parts:
            own[int(batch["agent_id"][0])].append(batch)
        return [SampleBatch.concatenate(batches) for batches in own]

    whole = by_agent(play([]))
    for one, other in zip(by_agent(play([steps, 0])), whole, strict=True):
        assert one.columns.keys() == other.columns.keys()
        for name in other.columns:
            np.testing.assert_equal(one[name], other[name])
    assert [batch["truncateds"].sum() for batch in whole] == [2, 1]


def test_rows_may_have_other_rewards_than_the_episode() -> None:
    asked: list[tuple[Any, str, float]] = []

    def connect(agent_id: Any, policy_id: str, reward: float) -> float:
        asked.append((agent_id, policy_id, reward))
        return min(reward, 10.0)

    recorder = EpisodeRecorder(1, 0, connect_reward=connect)
    ready = recorder.reset({"a": obs(0)}, None, {"a": 7.0})
    for reward in (5.0, 2.0):
        act_all(recorder, ready)
        ready = recorder.step({"a": obs(1)}, {"a": reward, "b": 9.0}, GO_ON, GO_ON)
    assert recorder.last_reward("a") == 2.0
    assert (recorder.last_reward("b"), recorder.last_reward("c")) == (None, None)
    act_all(recorder, ready)
    recorder.step({"a": obs(2)}, {"a": 6.0}, {"a": True, "__all__": False}, GO_ON)
    recorder.step({"b": obs(0)}, {"a": 3.0}, GO_ON, GO_ON)
    recorder.step({}, {"a": 4.0}, END, GO_ON)
    # What comes before the first row is in it; what comes after the end is in the last one.
    assert rows(recorder, "a")["rewards"].tolist() == [10.0, 2.0, 10.0]
    sums = [12.0, 2.0, 6.0, 9.0, 13.0]
    assert asked == [("a", DEFAULT_POLICY_ID, reward) for reward in sums]
    result = recorder.result()
    assert (result.agent_returns, result.unrecorded_reward) == ({"a": 27.0, "b": 18.0}, 18.0)


def test_whether_anybody_has_acted_is_known_at_the_end() -> None:
    recorder = EpisodeRecorder(1, 0)
    recorder.reset({})
    recorder.step({}, {}, GO_ON, GO_ON)
    assert not recorder.has_acted
    recorder.step({"a": obs(0)}, {}, GO_ON, GO_ON)
    act_all(recorder, ["a"])
    recorder.step({}, {}, END, GO_ON)
    assert recorder.has_acted


def test_what_callbacks_note_is_part_of_the_result_as_it_is_then() -> None:
    recorder = EpisodeRecorder(1, 0)
    noted: Any = recorder.hist_data
    noted["speed"] = [1, np.float32(0.5)]
    recorder.media["picture"] = b"..."
    recorder.check_metrics()
    result = recorder.result()
    assert (result.hist_data, result.media) == ({"speed": [1.0, 0.5]}, {"picture": b"..."})
    recorder.media.clear()
    assert result.media == {"picture": b"..."}
    noted["speed"] = 5.0
    with pytest.raises(TypeError, match=r"hist_data\['speed'\] is 5\.0; they are lists of numbers"):
        recorder.check_metrics()
