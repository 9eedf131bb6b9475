from __future__ import annotations

from gymnasium import spaces

from envbus.runner.episode import EpisodeRecorder
from envbus.runner.policies import RandomPolicy
from envbus.runner.sampling import Phase
from envbus.runner.slot import Slot


def test_an_answer_of_the_env_is_awaited_while_it_resets_or_steps_only() -> None:
    slot = Slot(3)
    awaited = {}
    for phase in Phase:
        slot.phase = phase
        awaited[phase] = slot.is_awaited
    assert {phase for phase, is_awaited in awaited.items() if is_awaited} == {
        Phase.RESETTING,
        Phase.STEPPING,
    }


def test_rows_of_a_rest_and_those_that_are_not_to_be_trained_on_are_not_kept() -> None:
    rest = Slot(0)
    rest.is_rest = True
    assert (Slot(0).is_kept, rest.is_kept, Slot(0, training_enabled=False).is_kept) == (
        True,
        False,
        False,
    )


def test_an_episode_begins_without_what_was_of_the_last_one() -> None:
    slot, policies = Slot(0), {"shared": RandomPolicy(spaces.Discrete(2), seed=0)}
    first, second = EpisodeRecorder(1, 0), EpisodeRecorder(2, 0)
    slot.begin_episode(first, policies, None)
    slot.take(["a"], {"a": 5, "b": 6})
    assert (slot.phase, slot.seen) == (Phase.WAITING, {"a": 5})
    slot.policy_ids, slot.states, slot.off_policy = {"a": "shared"}, {"a": 1}, {"a": 0}
    slot.end_episode()
    assert (slot.phase, slot.episode) == (Phase.ENDED, None)
    slot.begin_episode(second, policies, None)
    assert (slot.phase, slot.episode) == (Phase.RESETTING, second)
    assert (slot.policy_ids, slot.states, slot.off_policy, slot.seen) == ({}, {}, {}, {})
