from __future__ import annotations

import collections
import copy
import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from envbus.actors.protocol import StepResult
from envbus.actors.spaces.agent_spaces import RecordSpace
from envbus.runner.workers.elements import Elements
from tests.runner.workers.test_replies import error

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
SPACE = RecordSpace({"a": BOX, "b": BOX, 1: spaces.Discrete(3)})
ALL = "__all__"


def record(**changes: Any) -> dict[str, Any]:
    flags = {"a": False, ALL: False}
    return {
        "observations": {"a": np.zeros(2, np.float32), 1: np.int64(2)},
        "rewards": {"a": 1.0, "b": np.float32(2), 1: 3},  # also of who is not observed
        "terminateds": dict(flags),
        "truncateds": dict(flags),
        "infos": {"a": {"x": 1}, "__common__": {}},
        "agents": ["a", "b", 1],
        **changes,
    }


def reply(count: int, *, over: bool = False, **changes: Any) -> StepResult:
    return StepResult(
        rewards=np.zeros(count),
        terminations=np.full(count, over),
        truncations=np.zeros(count, np.bool_),
        **changes,
    )


def elements(
    mode: AutoresetMode = AutoresetMode.DISABLED, space: spaces.Space[Any] = SPACE
) -> Elements:
    return Elements(space, 4, mode)


def step(known: Elements, one: dict[str, Any], **changes: Any) -> str | None:
    return known.wrong([0], [one], reply(1, **changes), is_step=True)


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record(observations={}, rewards={}, infos={}, agents=[]),
        record(  # an agent that has come since
            observations={"c": np.zeros(2, np.float32)},
            rewards={"c": 1.0},
            terminateds={"c": True, ALL: False},
            infos={"c": collections.OrderedDict(x=1)},
        ),
        record(rewards={"a": np.array(1.5), "b": True}),
        record(truncateds={"a": np.bool_(True), "b": 0, 1: np.array([False]), ALL: False}),
        record(observations={np.int64(1): 0}),
    ],
)
def test_a_record_as_envs_give_it_is_taken(one: dict[str, Any]) -> None:
    assert step(elements(), one) is None
    assert elements().wrong([0, 1], [one, one], StepResult(), is_step=False) is None


ARRAY = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (5, "record that is 5"),
        (None, "record that is None"),
        ({}, r"record\['observations'\] that is None"),
        (record(rewards=None), r"record\['rewards'\] that is None"),
        (record(infos=[{}]), r"record\['infos'\] that is"),
        (record(agents=None), r"record\['agents'\] that are None"),
        (record(agents=[[1]]), r"record\['agents'\] that are \[\[1\]\]"),
        (record(observations={"a": np.zeros(3)}), r"\['observations'\]\['a'\] of shape \(3,\)"),
        (record(observations={"a": "x"}), r"\['observations'\]\['a'\] that is 'x'"),
        (record(observations={"a": None}), r"\['observations'\]\['a'\] that is None"),
        (record(observations={"c": [1] * 7}), r"\['c'\] of no form that the env has named"),
        (record(observations={1.0: 1}), r"\[1.0\], which is no agent's id"),
        (record(observations={True: 1}), r"\[True\], which is no agent's id"),
        (record(observations={ALL: ARRAY}), "no agent's id"),
        (record(rewards={"a": "1"}), r"\['rewards'\]\['a'\] that is '1'"),
        (record(rewards={"a": None}), r"\['rewards'\]\['a'\] that is None"),
        (record(rewards={"a": ARRAY}), r"\['rewards'\]\['a'\] that is"),
        (record(rewards={"a": 10**400}), r"\['rewards'\]\['a'\] that is"),
        (record(rewards={"a": np.timedelta64(1, "s")}), r"\['rewards'\]\['a'\] that is"),
        (record(rewards={ALL: 1.0}), "no agent's id"),
        (record(terminateds={"a": False}), r"\['terminateds'\] without '__all__'"),
        (record(truncateds={}), r"\['truncateds'\] without '__all__'"),
        (record(truncateds={"a": ARRAY, ALL: False}), r"\['truncateds'\]\['a'\] that is"),
        (record(terminateds={ALL: "yes"}), r"\['__all__'\] that is 'yes'"),
        (record(terminateds={ALL: None}), r"\['__all__'\] that is None"),
        (record(infos={"a": None}), r"\['infos'\]\['a'\] that is None"),
    ],
)
def test_a_record_that_would_raise_in_the_learner_is_named(one: Any, told: str) -> None:
    for mode in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        wrong = elements(mode).wrong([2, 0], [record(), one], reply(2), is_step=True)
        assert wrong is not None
        assert wrong.startswith("for env 4: record")
        assert re.search(told, wrong)


def test_where_the_env_has_named_nobody_only_the_kind_of_id_is_known() -> None:
    space = RecordSpace({})
    for agent in ("x", 7, ("x", 1)):
        assert step(elements(space=space), record(observations={agent: object()})) is None
    for agent in (1.5, None, True, 2**63, ALL):
        assert step(elements(space=space), record(observations={agent: 1})) is not None


def test_an_agent_called_as_the_flags_of_all_is_none() -> None:
    space = RecordSpace({ALL: BOX})
    wrong = step(elements(space=space), record(observations={ALL: ARRAY}))
    assert "no agent's id" in str(wrong)


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_a_record_and_the_flags_of_its_env_say_the_same(mode: AutoresetMode) -> None:
    ended = record(terminateds={ALL: True})
    assert step(elements(mode), ended, over=True) is None
    assert "that is True, and False for the env" in str(step(elements(mode), ended))
    assert "that is False, and True for the env" in str(step(elements(mode), record(), over=True))
    first = elements(mode).wrong([0], [ended], StepResult(), is_step=False)
    assert "that is True, and False for the env" in str(first)


def test_the_record_after_an_end_in_the_same_step_is_of_the_next_episode() -> None:
    mode = AutoresetMode.SAME_STEP
    assert step(elements(mode), record(), over=True) is None


def test_what_failed_owes_no_observation() -> None:
    known = elements(space=spaces.Dict(a=BOX))
    good = {"a": np.zeros(2, np.float32)}
    assert known.wrong([0, 1], [None, good], reply(2, errors=[error(0)]), is_step=True) is None
    told = known.wrong([0, 1], [None, good], reply(2, errors=[error(1)]), is_step=True)
    assert told is not None
    assert told.startswith("for env 4: observation that is None")


def test_an_episode_has_only_so_many_agents_that_the_env_has_not_named() -> None:
    known = elements()

    def of(agents: range) -> dict[str, Any]:
        rewards = {f"stranger {number}": 1.0 for number in agents}
        return record(rewards=rewards, infos={}, agents=["a"])

    assert known.wrong([0], [of(range(10_000))], reply(1), is_step=False) is None
    assert step(known, of(range(5000, 16_000))) is None
    wrong = step(known, of(range(16_000, 20_000)))
    assert wrong == "for env 4: over 16384 agents in one episode that it has not named"
    assert known.wrong([0], [of(range(10_000))], reply(1), is_step=False) is None


def test_an_agent_that_is_done_is_not_observed_again_but_as_done() -> None:
    known = elements()
    assert known.wrong([0], [record()], StepResult(), is_step=False) is None
    done = record(terminateds={"a": True, ALL: False})
    for _ in range(3):  # some envs go on telling that it is done
        assert step(known, done) is None
    assert step(known, record(observations={})) is None
    told = "record['observations']['a'] of an agent that is done"
    assert told in str(step(known, record()))
    assert known.wrong([0], [record()], StepResult(), is_step=False) is None  # another episode
    assert step(known, record()) is None


def test_a_flag_before_an_agents_first_observation_comes_with_that_one() -> None:
    known, unseen = elements(), record(observations={"b": ARRAY})
    flagged = record(observations={"b": ARRAY}, truncateds={"a": True, ALL: False})
    for first, is_step in ((unseen, False), (flagged, True), (record(), True)):
        assert known.wrong([0], [copy.deepcopy(first)], reply(1), is_step=is_step) is None
    assert "of an agent that is done" in str(step(known, record()))
    known.forget()  # replies between were given up: the episode may be another one
    assert step(known, record()) is None
