from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.runner.policies.policy import Policy, PolicyOutput
from envbus.runner.pool.agent_results import DUMMY_AGENT
from envbus.runner.serving.answering import ObservingAgent
from envbus.runner.serving.canary import Split
from envbus.runner.serving.loading import ServedPolicies
from envbus.runner.serving.models import ServedModels

PAIR = (spaces.Box(-9.0, 9.0, (1,), np.float32), spaces.Discrete(1000))


class Constant(Policy):
    """Its action is its number; the state, if it has one, counts calls in tens."""

    def __init__(self, number: int, *, recurrent: bool = False) -> None:
        self.number = number
        self.recurrent = recurrent

    def initial_state(self) -> Any:
        return np.int64(0) if self.recurrent else None

    def compute_actions(
        self, observations: Any, states: Any, *, explore: bool = True
    ) -> PolicyOutput:
        if self.number < 0:
            raise ArithmeticError("as told")
        actions = np.full(len(observations), self.number)
        if not self.recurrent:
            return PolicyOutput(actions)
        return PolicyOutput(actions + 10 * states, states + 1)


def loaded(number: int, **options: Any) -> ServedPolicies:
    policy = Constant(number, **options)
    return ServedPolicies({"p": policy}, {DUMMY_AGENT: "p"}, {DUMMY_AGENT: PAIR})


def answers(models: ServedModels, *episodes: str) -> dict[str, tuple[int, int, str]]:
    """Return action, version and name of the model for each episode."""
    asked = [ObservingAgent(i, DUMMY_AGENT, np.zeros(1, np.float32)) for i in episodes]
    return {
        one.episode_id: (int(batch.action(index)), batch.version, batch.model)
        for batch in models.choose(asked)
        for index, one in enumerate(batch.rows)
    }


def test_the_next_answer_is_that_of_the_model_that_was_loaded_last_and_versions_rise() -> None:
    models = ServedModels(Split("m"), explore=False)
    models.install({"m": loaded(1)})
    assert answers(models, "e") == {"e": (1, 0, "m")}
    models.install({"m": loaded(2)})
    assert answers(models, "e", "f") == {"e": (2, 1, "m"), "f": (2, 1, "m")}
    models.failed("m")
    (counts,) = models.counts().values()
    assert (counts.version, counts.answers, counts.loads, counts.failed_loads) == (1, 3, 2, 1)


def test_the_versions_of_the_first_model_are_its_policys_own_and_the_next_ones_above() -> None:
    models = ServedModels(Split("m"), explore=False)
    first, second = loaded(1), loaded(2)
    first.by_id["p"].policy_version = 5
    models.install({"m": first})
    assert answers(models, "e")["e"][1] == 5
    first.by_id["p"].policy_version = 7
    second.by_id["p"].policy_version = 5
    models.install({"m": second})
    assert answers(models, "e")["e"][1] == 8


def test_an_episode_with_a_state_keeps_its_model_until_it_ends() -> None:
    models = ServedModels(Split("m"), explore=False)
    models.install({"m": loaded(1, recurrent=True)})
    assert answers(models, "old")["old"][0] == 1
    models.install({"m": loaded(2, recurrent=True)})
    assert answers(models, "old", "new") == {"old": (11, 0, "m"), "new": (2, 1, "m")}
    models.forget("old")
    assert answers(models, "old")["old"] == (2, 1, "m")


def test_a_share_of_the_episodes_is_answered_by_another_model() -> None:
    models = ServedModels(Split("m", {"c": 0.3}), explore=False)
    models.install({"m": loaded(1), "c": loaded(2)})
    assert models.is_complete
    found = answers(models, *(f"e{i}" for i in range(1000)))
    canaries = [one for one in found.values() if one == (2, 1, "c")]
    assert 250 < len(canaries) < 350
    assert set(found.values()) == {(1, 0, "m"), (2, 1, "c")}
    assert {name: one.answers for name, one in models.counts().items()} == {
        "m": 1000 - len(canaries),
        "c": len(canaries),
    }


def test_a_model_that_raises_is_none_of_the_others_trouble() -> None:
    models = ServedModels(Split("m", {"c": 0.5}), explore=False)
    models.install({"m": loaded(1), "c": loaded(-1)})
    asked = [ObservingAgent(f"e{i}", DUMMY_AGENT, np.zeros(1, np.float32)) for i in range(50)]
    failed = [batch for batch in models.choose(asked) if batch.error is not None]
    assert failed
    assert {batch.model for batch in failed} == {"c"}
    assert models.counts()["c"].answers == 0
    assert models.counts()["m"].answers == 50 - len(failed)


def test_what_is_not_loaded_yet_has_no_version() -> None:
    models = ServedModels(Split("m"), explore=False)
    assert not models.is_complete
    assert models.counts()["m"].version == -1
    with pytest.raises(KeyError):
        answers(models, "e")
