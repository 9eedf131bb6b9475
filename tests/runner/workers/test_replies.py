from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from msgspec import structs

from envbus.actors.arrays.packing import pack_records
from envbus.actors.protocol import (
    Build,
    Call,
    CallResult,
    CloseEnvs,
    Finish,
    MapBlocks,
    Mapped,
    Rebuild,
    Reset,
    SlotError,
    Step,
    StepResult,
)
from envbus.actors.spaces.agent_spaces import RecordSpace
from envbus.bus.errors import DecodeError
from envbus.bus.wire.messages import Failed, FailureCode, Request, Tree
from envbus.runner.workers.elements import Elements
from envbus.runner.workers.replies import misfit

LEAVES = [np.zeros((6, 4), np.float32), np.zeros((6,), np.int64)]
CALL = Call(name="x", args=Tree(()), kwargs=Tree({}))


def rows(count: int) -> StepResult:
    return StepResult(
        observation_arrays=[np.zeros((count, 4), np.float32), np.zeros(count, np.int64)],
        rewards=np.zeros(count),
        terminations=np.zeros(count, np.bool_),
        truncations=np.zeros(count, np.bool_),
    )


def error(slot: int) -> SlotError:
    return SlotError(
        slot=slot, phase="step", type_module="m", type_name="T", message="", traceback=""
    )


RECORD = {
    "observations": {"a": 1},
    "rewards": {},
    "terminateds": {},
    "truncateds": {},
    "infos": {},
    "agents": ["a"],
}


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (Step(), rows(3)),
        (Step(), structs.replace(rows(3), infos=Tree([{}, {"a": 1}, {}]), errors=[error(2)])),
        (Step(slots=[0, 2]), structs.replace(rows(2), errors=[error(2)])),
        (Reset(), structs.replace(rows(3), rewards=None, terminations=None, truncations=None)),
        (CALL, CallResult(values=Tree([1, 2, 3]))),
        (structs.replace(CALL, slots=[1]), CallResult(values=Tree([None]), errors=[error(1)])),
        (CloseEnvs(), CallResult(values=Tree([]), errors=[error(7)])),
        (
            MapBlocks(observation_space=Tree(0), action_space=Tree(0), num_envs=1, first_row=0),
            Mapped(),
        ),
    ],
)
def test_what_fits_is_taken(request_: Request[Any], reply: Any) -> None:
    assert misfit(request_, reply, 3, LEAVES) is None


@pytest.mark.parametrize(
    ("request_", "change", "told"),
    [
        (Step(), {"rewards": np.zeros(1)}, r"rewards of shape \(1,\) for 3 envs"),
        (Step(), {"rewards": None}, "rewards of shape None"),
        (Step(), {"truncations": np.zeros((3, 1), np.bool_)}, r"truncations of shape \(3, 1\)"),
        (Step(slots=[1]), {}, "rewards of shape"),
        (Step(), {"errors": [error(3)]}, r"slots that were not asked, \[3\]"),
        (Step(), {"errors": [error(-1)]}, r"not asked, \[-1\]"),
        (Step(), {"observation_arrays": None}, "no arrays of observations, where 2 belong"),
        (Step(), {"observation_arrays": [np.zeros((3, 4), np.float32)]}, "1 arrays"),
        (Step(), {"observations": Tree([1, 2, 3])}, "one by one"),
        (Step(), {"infos": Tree([{}])}, "1 infos for 3 envs"),
        (Step(), {"infos": Tree({0: {}})}, "infos that are no list"),
        (Step(), {"infos": Tree([{}, 1, {}])}, "infos that are no dicts"),
    ],
)
def test_what_does_not_fit_is_named(
    request_: Request[Any], change: dict[str, Any], told: str
) -> None:
    wrong = misfit(request_, structs.replace(rows(3), **change), 3, LEAVES)
    assert wrong is not None
    assert re.search(told, wrong)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 4), np.float32),
        np.zeros((), np.float32),
        np.zeros((3, 5), np.float32),
        np.zeros((3, 4)),
        np.full((3, 4), "nan"),
    ],
)
def test_an_observation_of_another_form_does_not_fit(array: Any) -> None:
    reply = structs.replace(rows(3), observation_arrays=[array, np.zeros(3, np.int64)])
    wrong = misfit(Step(), reply, 3, LEAVES)
    assert wrong is not None
    assert "belong" in wrong


@pytest.mark.parametrize(
    ("observations", "told"),
    [
        ([1, 2, 3], None),
        (pack_records([RECORD] * 3), None),
        ([1], "1 observations for 3 envs"),
        (7, "observations that are no list"),
        (pack_records([RECORD]), "1 observations for 3 envs"),
        ({"observations": 1}, "cannot be unpacked"),
        (None, "no observations"),
    ],
)
def test_observations_without_a_fixed_size_are_counted(observations: Any, told: str | None) -> None:
    tree = None if observations is None else Tree(observations)
    reply = structs.replace(rows(3), observation_arrays=None, observations=tree)
    wrong = misfit(Step(), reply, 3, None)
    assert wrong is None if told is None else told in str(wrong)
    assert "no fixed size" in str(misfit(Step(), rows(3), 3, None))


def test_no_observation_is_owed_by_those_only_who_have_failed() -> None:
    reply = structs.replace(rows(2), observation_arrays=None, errors=[error(0)])
    assert misfit(Step(slots=[0, 1]), reply, 3, None) == "no observations"
    failed = structs.replace(reply, errors=[error(0), error(1)])
    assert misfit(Step(slots=[0, 1]), failed, 3, None) is None


def test_single_elements_are_checked_by_those_of_the_actor() -> None:
    space = spaces.Dict(a=spaces.Text(3), b=spaces.Discrete(2))
    elements = Elements(space, 10, AutoresetMode.NEXT_STEP)
    good, bad = {"a": "x", "b": 1}, {"a": "x"}
    for request in (Step(slots=[0, 2]), Reset(slots=[0, 2])):
        for second in (good, bad):
            reply = structs.replace(
                rows(2), observation_arrays=None, observations=Tree([good, second])
            )
            told = misfit(request, reply, 3, None, elements)
            if second is good:
                assert told is None
            else:
                assert (
                    told == "for env 12: observation with the keys ['a'], where ['a', 'b'] belong"
                )


def test_records_are_checked_as_they_were_packed() -> None:
    elements = Elements(RecordSpace({"a": spaces.Discrete(2)}), 0, AutoresetMode.NEXT_STEP)
    flags = {"terminateds": {"__all__": False}, "truncateds": {"__all__": False}}
    good = {**RECORD, **flags}
    for bad, told in (
        ({**good, "observations": {"a": "x"}}, "for env 1: record['observations']['a'] that is"),
        ({**good, "truncateds": {}}, "for env 1: record['truncateds'] without '__all__'"),
    ):
        for pack in (pack_records, list):
            reply = structs.replace(rows(2), observation_arrays=None)
            packed = structs.replace(reply, observations=Tree(pack([good, good])))
            assert misfit(Step(), packed, 2, None, elements) is None
            packed = structs.replace(reply, observations=Tree(pack([good, bad])))
            wrong = misfit(Step(), packed, 2, None, elements)
            assert wrong is not None
            assert wrong.startswith(told)


@pytest.mark.parametrize("leaves", [LEAVES, None])
def test_envs_that_are_made_anew_owe_no_observation(leaves: Any) -> None:
    assert misfit(Rebuild(), StepResult(), 3, leaves) is None
    told = misfit(Rebuild(slots=[1]), StepResult(errors=[error(2)]), 3, leaves)
    assert told == "errors of slots that were not asked, [2]"


def test_another_kind_of_reply_does_not_fit() -> None:
    assert misfit(Step(), Mapped(), 3, LEAVES) == "a Mapped to a Step"
    assert misfit(CALL, rows(3), 3, LEAVES) == "a StepResult to a Call"
    assert misfit(CALL, CallResult(values=Tree([1])), 3, LEAVES) == "1 values for 3 envs"
    assert misfit(CALL, CallResult(values=Tree("abc")), 3, LEAVES) == "values that are no list"


def test_a_request_that_is_always_of_all_slots_is_checked_likewise() -> None:
    request = Finish(number=1)
    assert misfit(request, structs.replace(rows(6), errors=[error(5)]), 6, LEAVES) is None
    told = misfit(request, structs.replace(rows(6), errors=[error(6)]), 6, LEAVES)
    assert told == "errors of slots that were not asked, [6]"


def test_what_cannot_be_read_does_not_fit_a_step_but_is_the_callers_where_it_is_of_a_call() -> None:
    error = DecodeError("no map")
    assert misfit(Step(), error, 3, LEAVES) == "what cannot be read (no map)"
    assert misfit(CALL, error, 3, LEAVES) is None


def test_a_failure_does_not_fit_a_step_but_may_be_the_end_of_a_call_or_a_build() -> None:
    failed = Failed(code=FailureCode.REMOTE, message="no", remote_type="E", remote_traceback="at\n")
    assert misfit(Step(), failed, 3, LEAVES) == "a failure (E: no\nat)"
    for request in (CALL, Build(sources=Tree([]), autoreset_mode="NextStep")):
        assert misfit(request, failed, 3, LEAVES) is None
