from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from envbus.actors.arrays.blocks import BlockLayout
from envbus.actors.arrays.info_columns import RECORD_BYTES, InfoLayout, InfoReader, records_of
from envbus.actors.env.actor import EnvActor
from envbus.actors.protocol import (
    Build,
    Call,
    CloseEnvs,
    Exec,
    Finish,
    MapBlocks,
    MapInfos,
    Rebuild,
    Reset,
    SetAttr,
    Step,
    StepResult,
)
from envbus.actors.spaces.spaces import to_plain
from envbus.actors.testing import CountingEnv
from envbus.bus.memory.arena import Arena
from envbus.bus.transport.words import BYTES_PER_DOER, Asker, Doer
from envbus.bus.wire.messages import Tree
from tests.actors.driver import Anything, ask, build, mapped_actor
from tests.descriptors import open_descriptors
from tests.envs import FailingEnv, SpaceEnv


class TellingEnv(CountingEnv):
    """Has the number of the step in its infos."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"reward": reward}


PAIR = {
    "observation_space": Tree(to_plain(CountingEnv.observation_space)),
    "action_space": Tree(to_plain(CountingEnv.action_space)),
}


def call(actor: EnvActor, name: str, *args: Any, slots: list[int] | None = None) -> Anything:
    return ask(actor, Call(name=name, args=Tree(args), kwargs=Tree({}), slots=slots))


def test_each_request_has_a_handler() -> None:
    assert set(EnvActor().handlers) == {
        Build,
        MapBlocks,
        MapInfos,
        Rebuild,
        Reset,
        Step,
        Call,
        SetAttr,
        Exec,
        CloseEnvs,
        Finish,
    }


def test_without_shared_memory_results_travel_in_the_reply() -> None:
    actor = mapped_actor([CountingEnv] * 3)
    result = ask(actor, Reset(seeds=Tree([4, 5, 6])))
    assert result.observation_arrays[0][:, 3].tolist() == [4.0, 5.0, 6.0]
    assert result.rewards is None
    assert result.infos.value == [{"episode": 1}] * 3
    result = ask(actor, Step(slots=[2, 0], action_arrays=[np.array([7, 8])]))
    assert result.observation_arrays[0][:, 2].tolist() == [7.0, 8.0]
    assert result.observation_arrays[0][:, 3].tolist() == [6.0, 4.0]
    assert result.rewards.tolist() == [11.0, 11.0]
    assert result.terminations.tolist() == [False, False]
    assert result.infos is None
    assert result.errors == []


def test_what_was_returned_does_not_change_later() -> None:
    actor = mapped_actor([CountingEnv])
    first = actor.reset(Reset())
    second = actor.step(Step(actions=Tree([5])))
    actor.step(Step(actions=Tree([6])))
    assert first.observation_arrays is not None
    assert second.observation_arrays is not None
    assert first.observation_arrays[0].tolist() == [[1.0, 0.0, 0.0, -1.0]]
    assert second.observation_arrays[0].tolist() == [[1.0, 1.0, 5.0, -1.0]]
    assert second.rewards is not None
    assert second.rewards.tolist() == [11.0]


def test_in_shared_memory_only_the_actors_rows_are_written() -> None:
    layout = BlockLayout.of(CountingEnv.observation_space, CountingEnv.action_space, 5)
    with Arena.create(layout.size) as arena:
        blocks = layout.views(arena.buffer)
        actor = EnvActor(lambda number: os.dup(arena.fd) if number == 4 else -1)
        build(actor, [CountingEnv] * 2)
        ask(actor, MapBlocks(**PAIR, num_envs=5, first_row=2, passed=4))
        ask(actor, Reset())
        assert blocks.actions is not None
        assert blocks.observations is not None
        blocks.actions[0][2:4] = [7, 8]
        result = ask(actor, Step())
        assert result.observation_arrays is None
        assert result.rewards is None
        assert blocks.observations[0][:, 2].tolist() == [0.0, 0.0, 7.0, 8.0, 0.0]
        assert blocks.rewards.tolist() == [0.0, 0.0, 11.0, 11.0, 0.0]
        blocks.actions[0][2:4] = [9, 10]
        ask(actor, Step(slots=[1]))
        assert blocks.observations[0][:, 2].tolist() == [0.0, 0.0, 7.0, 10.0, 0.0]
        ask(actor, Step(slots=[0], action_arrays=[np.array([11])]))
        assert blocks.observations[0][2, 2] == 11.0
        actor.close()
        del blocks


def test_infos_of_a_step_by_a_word_are_left_in_records_and_told_to_who_asks_all_the_same() -> None:
    layout = BlockLayout.of(CountingEnv.observation_space, CountingEnv.action_space, 2)
    infos = layout.size + BYTES_PER_DOER
    with Arena.create(infos + 2 * RECORD_BYTES) as arena:
        reader = InfoReader(records_of(arena.buffer[infos : infos + 2 * RECORD_BYTES], 2))
        asker = Asker(arena.buffer[layout.size : infos], 1)
        actor = EnvActor(lambda _: os.dup(arena.fd), words=Doer())
        build(actor, [TellingEnv] * 2)
        where = {"words": layout.size, "infos": infos}
        ask(actor, MapBlocks(**PAIR, num_envs=2, first_row=0, passed=1, **where))
        ask(actor, Reset())
        found = ask(actor, Step()).infos
        assert found is not None
        forms = InfoLayout().with_form_of(found.value[0])
        assert forms is not None
        reader.learn(forms)
        ask(actor, MapInfos(layout=Tree(forms.to_plain())))
        for _ in range(2):
            number = asker.begin()
            asker.ask()
            actor.step_by_word()
            assert not asker.has_more(0, number)
            left = reader.infos([0, 1])
            told = ask(actor, Finish(number=number)).infos
            assert told is not None
            assert dict(enumerate(told.value)) == left
        actor.close()
        del reader, asker


def test_closing_lets_go_of_the_arena() -> None:
    layout = BlockLayout.of(CountingEnv.observation_space, CountingEnv.action_space, 1)
    with Arena.create(layout.size) as arena:
        actor = EnvActor(lambda _: os.dup(arena.fd))
        build(actor, [CountingEnv])
        before = open_descriptors()
        ask(actor, MapBlocks(**PAIR, num_envs=1, first_row=0, passed=1))
        ask(actor, MapBlocks(**PAIR, num_envs=1, first_row=0, passed=1))
        actor.close()
        assert open_descriptors() <= before


def test_envs_are_built_once() -> None:
    actor = mapped_actor([CountingEnv])
    with pytest.raises(RuntimeError, match="has its envs already"):
        build(actor, [CountingEnv])


def test_a_failed_build_may_be_tried_again() -> None:
    actor = EnvActor()
    assert len(build(actor, [partial(FailingEnv, "init")]).errors) == 1
    assert build(actor, [CountingEnv]).errors == []


def test_errors_name_the_pools_env_and_the_actors_slot() -> None:
    actor = mapped_actor(
        [CountingEnv, lambda: SpaceEnv(spaces.Box(0, 1, (9,), np.float64), spaces.Discrete(100))],
        first_env_id=40,
    )
    (error,) = ask(actor, Reset()).errors
    assert error.slot == 1
    assert "env 41: observation is a ndarray of shape (9,)" in error.message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Reset(slots=[3]), "slot 3 is not among this actor's 3"),
        (Reset(slots=[0, 0]), "twice"),
        (Reset(seeds=Tree([1, 2])), "2 seeds for 3 slots"),
        (Step(), "a step without actions"),
        (Step(slots=[-1], actions=Tree([1])), "slot -1"),
        (Step(actions=Tree([1, 2])), "2 actions for 3 slots"),
        (Step(action_arrays=[]), "0 action arrays, but the action space has 1"),
        (Step(action_arrays=[np.zeros(2)]), r"shape \(2,\) for 3 slots"),
        (Step(action_arrays=[np.array(1)]), r"shape \(\) for 3 slots"),
        (SetAttr(name="length", values=Tree([1])), "1 values for 3 slots"),
        (Call(name="length", args=Tree(()), kwargs=Tree({}), slots=[9]), "slot 9"),
    ],
)
def test_requests_that_make_no_sense_touch_no_env(request_: Anything, message: str) -> None:
    actor = mapped_actor([CountingEnv] * 3)
    ask(actor, Reset())
    with pytest.raises(ValueError, match=message):
        ask(actor, request_)
    assert call(actor, "count").values.value == [0, 0, 0]
    assert call(actor, "episode").values.value == [1, 1, 1]


@pytest.mark.parametrize("request_", [Reset(), Step(), CloseEnvs()])
def test_an_actor_without_envs_says_so(request_: Anything) -> None:
    actor = EnvActor()
    if isinstance(request_, CloseEnvs):
        assert ask(actor, request_).values.value == []
        return
    with pytest.raises(RuntimeError, match="no envs"):
        ask(actor, request_)


@pytest.mark.parametrize("request_", [Reset(), Step(actions=Tree([1]))])
def test_blocks_come_before_reset_and_step(request_: Anything) -> None:
    actor = EnvActor()
    build(actor, [CountingEnv])
    with pytest.raises(RuntimeError, match="MapBlocks first"):
        ask(actor, request_)


@pytest.mark.parametrize(("first_row", "num_envs"), [(-1, 5), (3, 4), (0, 1)])
def test_rows_outside_the_pool_are_refused(first_row: int, num_envs: int) -> None:
    actor = EnvActor()
    build(actor, [CountingEnv] * 2)
    with pytest.raises(ValueError, match="not in a pool"):
        ask(actor, MapBlocks(**PAIR, num_envs=num_envs, first_row=first_row))


def test_a_passed_descriptor_needs_a_pipe() -> None:
    actor = EnvActor()
    build(actor, [CountingEnv])
    with pytest.raises(ValueError, match="shares no memory"):
        ask(actor, MapBlocks(**PAIR, num_envs=1, first_row=0, passed=1))


def test_calls_and_attributes_before_any_blocks() -> None:
    actor = EnvActor()
    build(actor, [CountingEnv] * 2)
    assert len(set(call(actor, "np_random_seed").values.value)) == 2
    assert ask(actor, SetAttr(name="length", values=Tree([7, 8]))).errors == []
    assert call(actor, "length").values.value == [7, 8]
    assert call(actor, "length", slots=[1]).values.value == [8]


def test_any_object_comes_back_from_a_call() -> None:
    actor = mapped_actor([CountingEnv])
    (generator,) = call(actor, "np_random").values.value
    assert isinstance(generator, np.random.Generator)


def test_each_env_gets_its_own_arguments() -> None:
    actor = mapped_actor([CountingEnv] * 2)

    def keep(env: CountingEnv, given: list[int]) -> int:
        given.append(1)
        return len(given)

    result = ask(actor, Exec(function=Tree(keep), args=Tree(([],)), kwargs=Tree({})))
    assert result.errors == []
    assert result.values.value == [1, 1]


def test_failed_calls_stand_beside_good_ones() -> None:
    actor = mapped_actor([CountingEnv, FailingEnv])
    result = call(actor, "where")
    assert result.values.value == [None, "step"]
    assert [(error.slot, error.phase) for error in result.errors] == [(0, "call")]


def test_closing_reports_errors() -> None:
    actor = mapped_actor([CountingEnv, partial(FailingEnv, "close")])
    result = ask(actor, CloseEnvs())
    assert result.values.value == [None, None]
    assert [(error.slot, error.phase) for error in result.errors] == [(1, "close")]
    assert actor.close() == []
    with pytest.raises(RuntimeError, match="closed"):
        ask(actor, Reset())


def mixed_actor() -> EnvActor:
    """Slot 0: an env; 1 and 2: a vector env; 3 and 4: envs."""
    vector_env = partial(SyncVectorEnv, [CountingEnv, partial(CountingEnv, 1)])
    return mapped_actor([CountingEnv, vector_env, partial(CountingEnv, 1), CountingEnv])


def test_envs_and_vector_envs_are_stepped_together() -> None:
    actor = mixed_actor()
    result = ask(actor, Reset(seeds=Tree([10, 11, 12, 13, 14])))
    assert result.errors == []
    assert result.observation_arrays[0][:, 3].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]
    result = ask(actor, Step(action_arrays=[np.arange(5)]))
    assert result.errors == []
    assert result.observation_arrays[0][:, 2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert result.terminations.tolist() == [False, False, True, True, False]
    result = ask(actor, Step(actions=Tree([5, 6, 7, 8, 9])))
    assert result.observation_arrays[0][:, 2].tolist() == [5.0, 6.0, 0.0, 0.0, 9.0]
    assert result.infos.value == [{}, {}, {"episode": 2}, {"episode": 2}, {}]


def test_some_slots_of_a_mixed_actor_are_stepped_in_the_asked_order() -> None:
    actor = mixed_actor()
    ask(actor, Reset())
    result = ask(actor, Step(slots=[4, 1, 2, 0], actions=Tree([40, 10, 20, 0])))
    assert result.errors == []
    assert result.observation_arrays[0][:, 2].tolist() == [40.0, 10.0, 20.0, 0.0]


def test_part_of_a_vector_env_is_refused_before_anything_is_stepped() -> None:
    actor = mixed_actor()
    ask(actor, Reset())
    with pytest.raises(ValueError, match="stepped together"):
        ask(actor, Step(slots=[0, 1], actions=Tree([1, 2])))
    assert call(actor, "count").values.value == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "source", [CountingEnv, partial(SyncVectorEnv, [CountingEnv, CountingEnv])]
)
def test_no_slots_at_all_are_answered_with_nothing(source: Anything) -> None:
    actor = mapped_actor([source])
    for request in (Reset(slots=[]), Step(slots=[], actions=Tree([]))):
        result = ask(actor, request)
        assert (result.errors, result.infos) == ([], None)
        assert len(result.observation_arrays[0]) == 0
    assert call(actor, "length", slots=[]).values.value == []


def test_calls_reach_all_groups() -> None:
    actor = mixed_actor()
    assert call(actor, "length").values.value == [3, 3, 1, 1, 3]
    assert call(actor, "length", slots=[3, 2]).values.value == [1, 1]
    assert ask(actor, SetAttr(name="length", values=Tree([1, 2, 3, 4, 5]))).errors == []
    assert call(actor, "length").values.value == [1, 2, 3, 4, 5]


def test_observations_without_a_fixed_size_travel_as_a_list() -> None:
    actor = mapped_actor([lambda: SpaceEnv(spaces.Text(4), spaces.Text(3))] * 2)
    result = ask(actor, Reset(seeds=Tree([1, 2])))
    assert result.observation_arrays is None
    assert [type(observation) for observation in result.observations.value] == [str, str]
    result = ask(actor, Step(slots=[1], actions=Tree(["ab"])))
    assert len(result.observations.value) == 1
    assert result.rewards.tolist() == [1.0]
    with pytest.raises(ValueError, match="a step without actions"):
        ask(actor, Step())
    with pytest.raises(ValueError, match="no fixed size"):
        ask(actor, Step(action_arrays=[np.zeros(2)]))


# --- rebuild --------------------------------------------------------------------------------


def test_one_env_is_made_anew_from_its_source_and_the_others_go_on() -> None:
    actor = mapped_actor(
        [partial(CountingEnv, 5), partial(CountingEnv, 6), partial(CountingEnv, 7)]
    )
    ask(actor, Reset(seeds=Tree([1, 2, 3])))
    ask(actor, Step(actions=Tree([1, 1, 1])))
    assert ask(actor, Rebuild(slots=[1])) == StepResult()
    assert call(actor, "length").values.value == [5, 6, 7]
    assert [error.slot for error in ask(actor, Step(actions=Tree([1, 1, 1]))).errors] == [1]
    result = ask(actor, Reset(slots=[1], seeds=Tree([9])))
    assert result.observation_arrays[0].tolist() == [[1, 0, 0, 9]]
    result = ask(actor, Step(actions=Tree([2, 2, 2])))
    assert result.observation_arrays[0][:, 1].tolist() == [3, 1, 3]


def test_a_vector_env_between_envs_is_made_anew_whole() -> None:
    vector = partial(SyncVectorEnv, [partial(CountingEnv, 5)] * 2)
    actor = mapped_actor([CountingEnv, vector, CountingEnv])
    ask(actor, Reset(seeds=Tree([1, 2, 3, 4])))
    ask(actor, Step(actions=Tree([1, 1, 1, 1])))
    assert ask(actor, Rebuild(slots=[1, 2])) == StepResult()
    assert [error.slot for error in ask(actor, Reset(slots=[0, 1])).errors] == [1]
    result = ask(actor, Reset(slots=[1, 2], seeds=Tree([8, 9])))
    assert result.observation_arrays[0].tolist() == [[1, 0, 0, 8], [1, 0, 0, 9]]
    result = ask(actor, Step(actions=Tree([1, 1, 1, 1])))
    assert result.observation_arrays[0][:, 1].tolist() == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="together"):
        ask(actor, Rebuild(slots=[0, 1]))


def test_a_refused_rebuild_touches_no_env() -> None:
    actor = mapped_actor([CountingEnv] * 2)
    ask(actor, Reset())
    with pytest.raises(ValueError, match="slot 2"):
        ask(actor, Rebuild(slots=[0, 2]))
    assert call(actor, "closed").values.value == [False, False]
    with pytest.raises(RuntimeError, match="no envs"):
        EnvActor().rebuild(Rebuild())


def test_several_envs_made_anew_fail_each_for_itself() -> None:
    made: list[int] = []

    def make() -> CountingEnv:
        made.append(1)
        if len(made) in (4, 5):
            raise OSError(f"no display {len(made)}")
        return CountingEnv()

    actor = mapped_actor([make] * 3)
    ask(actor, Reset())
    result = ask(actor, Rebuild())
    assert [(error.slot, error.message) for error in result.errors] == [
        (0, "no display 4"),
        (1, "no display 5"),
    ]
    assert ask(actor, Reset(slots=[2])).errors == []
    assert ask(actor, Rebuild(slots=[0, 1])).errors == []
