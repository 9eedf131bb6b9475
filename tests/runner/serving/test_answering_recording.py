from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.env.agents import ALL
from envbus.runner.batches.batch import MultiAgentBatch
from envbus.runner.bridge.results import BridgeResult
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.serving import answering
from envbus.runner.serving.answering import AnsweredBatch, ObservingAgent, Recording
from envbus.runner.serving.loading import ServedPolicies

PAIR = (spaces.Box(-9.0, 9.0, (1,), np.float32), spaces.Discrete(100))
ONE = ServedPolicies({}, {DUMMY_AGENT: "p"}, {DUMMY_AGENT: PAIR})
TWO = ServedPolicies({}, {"x": "p", "y": "q"}, {"x": PAIR, "y": PAIR})


def result(
    observations: dict[Any, float],
    reward: float = 0.0,
    *,
    ends: str = "",
    off_policy: Any = None,
    unacted: bool = False,
    missed: bool = False,
    untrained: bool = False,
) -> BridgeResult:
    """What a poll returns of one episode `e`."""
    made = BridgeResult.of([])
    seen = {agent: np.array([number], np.float32) for agent, number in observations.items()}
    made.observations["e"] = seen
    made.rewards["e"] = dict.fromkeys(seen, reward)
    made.terminateds["e"] = {ALL: ends == "terminated"}
    made.truncateds["e"] = {ALL: ends == "truncated"}
    made.infos["e"] = {}
    if off_policy is not None:
        made.off_policy_actions["e"] = off_policy
    if ends:
        made.ended.append("e")
    if unacted:
        made.unacted.add("e")
    if missed:
        made.missed.add("e")
    if untrained:
        made.untrained.add("e")
    return made


NO_STEP = result({DUMMY_AGENT: 1}, ends="terminated")


def act(recording: Recording, *actions: int, agents: Any = (DUMMY_AGENT,)) -> None:
    rows = [ObservingAgent("e", agent, None) for agent in agents]
    recording.acted(
        AnsweredBatch("p", rows, np.array(actions), np.zeros(len(rows)), 3, None, False), ()
    )


def only(ended: dict[str, Any]) -> MultiAgentBatch:
    batch = ended["e"]
    assert isinstance(batch, MultiAgentBatch)
    return batch


def test_an_episode_comes_whole_at_its_end_with_its_own_name() -> None:
    recording = Recording(ONE)
    assert recording.take(result({DUMMY_AGENT: 1})) == {}
    act(recording, 5)
    assert recording.take(result({DUMMY_AGENT: 2}, 1.5)) == {}
    act(recording, 6)
    rows = only(recording.take(result({DUMMY_AGENT: 3}, 2.5, ends="terminated"))).policy_batches
    batch = rows["p"]
    assert batch["obs"][:, 0].tolist() == [1, 2]
    assert batch["next_obs"][:, 0].tolist() == [2, 3]
    assert batch["actions"].tolist() == [5, 6]
    assert batch["rewards"].tolist() == [1.5, 2.5]
    assert batch["terminateds"].tolist() == [False, True]
    assert batch["episode_id"].tolist() == ["e", "e"]
    assert batch["policy_version"].tolist() == [3, 3]
    assert batch["training_enabled"].tolist() == [True, True]
    assert recording.take(NO_STEP) == {"e": None}  # nothing of it is left


def test_actions_of_the_simulator_are_marked_and_so_are_untrained_episodes() -> None:
    recording = Recording(ONE)
    recording.take(result({DUMMY_AGENT: 1}, off_policy={DUMMY_AGENT: np.int64(9)}, untrained=True))
    recording.take(result({DUMMY_AGENT: 2}))
    act(recording, 6)
    batch = only(recording.take(result({DUMMY_AGENT: 3}, ends="truncated"))).policy_batches["p"]
    assert batch["off_policy"].tolist() == [True, False]
    assert batch["actions"].tolist() == [9, 6]
    assert batch["policy_version"].tolist() == [-1, 3]
    assert np.isnan(batch["action_logp"]).tolist() == [True, False]
    assert batch["training_enabled"].tolist() == [False, False]
    assert batch["truncateds"].tolist() == [False, True]


def test_an_action_that_reached_nobody_is_no_row() -> None:
    recording = Recording(ONE)
    recording.take(result({DUMMY_AGENT: 1}))
    act(recording, 5)
    recording.take(result({DUMMY_AGENT: 2}))
    act(recording, 6)
    recording.take(result({DUMMY_AGENT: 3}, unacted=True))
    act(recording, 7)
    batch = only(recording.take(result({DUMMY_AGENT: 4}, ends="truncated"))).policy_batches["p"]
    assert batch["actions"].tolist() == [5, 7]


def test_no_row_of_any_agent_leads_over_an_observation_that_never_came() -> None:
    recording = Recording(TWO)
    for number, agent in enumerate("xyxy"):
        recording.take(result({agent: number}, unacted=number == 3, missed=number == 3))
        act(recording, number, agents=(agent,))
    ended = only(recording.take(result({"x": 8, "y": 9}, ends="truncated"))).policy_batches
    assert {name: rows["actions"].tolist() for name, rows in ended.items()} == {"p": [0], "q": [3]}


def test_rewards_behind_a_first_observation_that_never_came_are_in_no_row() -> None:
    recording = Recording(ONE)
    recording.take(result({DUMMY_AGENT: 1}, 5.0, missed=True))
    act(recording, 7)
    ended = recording.take(result({DUMMY_AGENT: 2}, 1.0, ends="truncated"))
    assert only(ended).policy_batches["p"]["rewards"].tolist() == [1.0]


def test_a_policy_that_failed_leaves_a_gap_and_no_error() -> None:
    recording = Recording(ONE)
    recording.take(result({DUMMY_AGENT: 1}))  # nobody acts
    recording.take(result({DUMMY_AGENT: 2}, unacted=True))
    act(recording, 7)
    batch = only(recording.take(result({DUMMY_AGENT: 4}, ends="truncated"))).policy_batches["p"]
    assert batch["actions"].tolist() == [7]


def test_several_agents_stand_under_their_policies() -> None:
    recording = Recording(TWO)
    recording.take(result({"x": 1, "y": 2}))
    act(recording, 5, 6, agents=("x", "y"))
    ended = only(recording.take(result({"x": 3, "y": 4}, 1.0, ends="terminated")))
    assert {name: rows["actions"].tolist() for name, rows in ended.policy_batches.items()} == {
        "p": [5],
        "q": [6],
    }


def test_observations_without_a_fixed_size_are_objects_of_their_agent_only() -> None:
    pair = (spaces.Sequence(spaces.Discrete(9)), spaces.Discrete(100))
    recording = Recording(ServedPolicies({}, {"x": "p", "y": "q"}, {"x": pair, "y": PAIR}))
    for step, ends in enumerate(("", "", "terminated")):
        came = result({"x": 0, "y": step}, ends=ends)
        came.observations["e"]["x"] = (7,) * (3 - step)
        ended = recording.take(came)
        if not ends:
            act(recording, 4, 5, agents=["x", "y"])
    rows = only(ended).policy_batches
    assert rows["p"]["obs"].tolist() == [(7, 7, 7), (7, 7)]
    assert rows["p"]["actions"].tolist() == [4, 4]
    assert rows["q"]["obs"].tolist() == [[0], [1]]


def test_an_episode_without_a_step_has_no_rows() -> None:
    assert Recording(ONE).take(NO_STEP) == {"e": None}


def test_an_episode_of_a_lost_client_is_dropped() -> None:
    recording = Recording(ONE)
    recording.take(result({DUMMY_AGENT: 1}))
    act(recording, 5)
    recording.take(result({DUMMY_AGENT: 2}))
    lost = BridgeResult.of([])
    lost.ended.append("e")
    assert recording.take(lost) == {}
    assert recording.take(NO_STEP) == {"e": None}  # nothing of it is left


def test_an_agent_that_comes_back_after_its_end_breaks_its_own_episode_only() -> None:
    recording = Recording(TWO)
    recording.take(result({"x": 1, "y": 2}))
    act(recording, 5, 6, agents=("x", "y"))
    done = result({"x": 3, "y": 4})
    done.terminateds["e"]["x"] = True
    recording.take(done)
    act(recording, 6, agents=("y",))
    recording.take(result({"x": 5, "y": 6}))
    act(recording, 1, 1, agents=("x", "y"))
    ended = recording.take(result({"x": 7, "y": 8}, ends="terminated"))
    assert isinstance(ended["e"], ValueError)


def test_an_episode_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_LONGEST_EPISODE", 3)
    recording = Recording(ONE)
    for number in range(6):
        recording.take(result({DUMMY_AGENT: number}, off_policy={DUMMY_AGENT: 1}))
    assert not recording._running
    ended = recording.take(NO_STEP)["e"]
    assert isinstance(ended, ValueError)
    assert "more than 3 env steps" in str(ended)
    for number in range(3):
        recording.take(result({DUMMY_AGENT: number}, off_policy={DUMMY_AGENT: 1}))
    assert len(only(recording.take(NO_STEP))["p"]) == 3


def test_agents_of_any_number_are_recorded() -> None:
    pairs = {2**63: PAIR, 5: PAIR}
    recording = Recording(ServedPolicies({}, dict.fromkeys(pairs, "p"), pairs))
    recording.take(result({2**63: 1, 5: 1}, off_policy={2**63: 1, 5: 2}))
    batch = only(recording.take(result({2**63: 1, 5: 1}, ends="terminated")))
    assert sorted(batch["p"]["agent_id"].astype(str).tolist()) == ["5", str(2**63)]
