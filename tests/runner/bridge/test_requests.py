from __future__ import annotations

import sys
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.elements import to_wire
from envbus.actors.external.errors import EpisodeError, SpaceMismatchError
from envbus.actors.external.protocol import (
    EndEpisode,
    FragmentStep,
    GetAction,
    LogAction,
    LogFragment,
    LogReturns,
    StartEpisode,
)
from envbus.bus.brief import brief
from envbus.bus.broker.deadlines import NO_DEADLINE
from envbus.bus.errors import DecodeError
from envbus.bus.wire.codec import encode
from envbus.bus.wire.messages import PROTOCOL_VERSION, Header, Kind, Payload, Tree
from envbus.runner.bridge.requests import check_size, read
from envbus.runner.bridge.vocabulary import End, LogReward, LogStep, Observe, StartCall
from tests.bus.codec_samples import identical

INF, NAN = float("inf"), float("nan")
BOX, TWO = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2)
ONE = Agreement(BOX, TWO)
MANY = Agreement({"x": BOX, "y": BOX}, {"x": TWO, "y": TWO})


def event(payload: Payload, agreement: Agreement = ONE, ttl: float = 5.0) -> Any:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, type(payload).__name__, ttl)
    return read(header, encode(payload), b"p", agreement)


def test_verbs_of_one_agent_are_sorted_under_its_name() -> None:
    start = event(StartEpisode(episode_id="e", training_enabled=False))
    assert isinstance(start, StartCall)
    assert (start.peer, start.request_id) == (b"p", 7)
    assert (start.episode_id, start.training_enabled) == ("e", False)
    ask = event(GetAction(episode_id="e", observation=[0.5]))
    assert isinstance(ask, Observe)
    assert ask.timeout == 5.0
    np.testing.assert_equal(ask.observation, {"agent0": np.array([0.5], np.float32)})
    step = event(LogAction(episode_id="e", observation=[0], action=1))
    assert isinstance(step, LogStep)
    assert step.action == {"agent0": 1}
    assert step.timeout == 5.0
    reward = event(LogReturns(episode_id="e", reward=2, info=Tree({"a": (1, 2)})))
    info = {"agent0": {"a": (1, 2)}}
    assert isinstance(reward, LogReward)
    assert (reward.rewards, reward.infos) == ({"agent0": 2.0}, info)
    assert (reward.terminateds, reward.truncateds) == ({}, {})
    assert 20 < reward.size < 600
    assert event(LogReturns(episode_id="e", reward=np.float32(0.5))).rewards == {"agent0": 0.5}


@pytest.mark.parametrize("ttl", [1e12, 1e17, 1e308])
def test_a_time_limit_beyond_all_leaves_the_waits_of_others_to_be_measured(ttl: float) -> None:
    assert event(GetAction(episode_id="e", observation=[0.5]), ttl=ttl).timeout == NO_DEADLINE


def test_requests_with_one_id_are_told_apart_also_by_a_few_bytes_of_many() -> None:
    pixels = Agreement(spaces.Box(0, 255, (100, 100), np.uint8), TWO)
    picture = np.zeros((100, 100), np.uint8)
    seen = [event(GetAction(episode_id="e", observation=picture.copy()), pixels).digest]
    assert event(GetAction(episode_id="e", observation=picture), pixels, ttl=1.0).digest == seen[0]
    for row in (0, 55, 99):
        changed = picture.copy()
        changed[row, 50] = 1
        seen.append(event(GetAction(episode_id="e", observation=changed), pixels).digest)
    seen.append(event(GetAction(episode_id="f", observation=picture), pixels).digest)
    logged = LogAction(episode_id="e", observation=picture, action=0)
    seen.append(event(logged, pixels).digest)
    seen += [
        event(kind(episode_id="e", observation=[0.5])).digest for kind in (GetAction, EndEpisode)
    ]
    seen += [event(StartEpisode(episode_id=name)).digest for name in ("e", "f")]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("truncated", [False, True])
def test_an_end_is_one_or_the_other_for_all(truncated: bool) -> None:
    end = event(EndEpisode(episode_id="e", observation=[0], truncated=truncated))
    assert isinstance(end, End)
    assert end.timeout == 5.0
    assert (end.terminateds, end.truncateds) == (
        {"__all__": not truncated},
        {"__all__": truncated},
    )


def test_of_several_agents_each_has_its_own_end() -> None:
    end = event(
        EndEpisode(episode_id="e", observation={"x": [0], "y": [0]}, truncateds={"y": True}), MANY
    )
    assert end.terminateds == {"__all__": True}
    assert end.truncateds == {"y": True, "__all__": False}
    reward = event(
        LogReturns(episode_id="e", reward={"x": 1}, info={"y": {}}, terminateds={"x": True}), MANY
    )
    assert reward.rewards == {"x": 1.0}
    assert (reward.infos, reward.terminateds, reward.truncateds) == ({"y": {}}, {"x": True}, {})
    common = {"__common__": {"tick": 3}}
    assert event(LogReturns(episode_id="e", reward={}, info=common), MANY).infos == common


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (LogReturns(episode_id="e", reward=1.0), "rewards are a map by agent"),
        (LogReturns(episode_id="e", reward={"z": 1.0}), "rewards of z; the agents are x, y"),
        (LogReturns(episode_id="e", reward={"x": "1"}), "reward of agent 'x' is a number"),
        (LogReturns(episode_id="e", reward={}, info={"x": 1}), "an info is a map"),
        (LogReturns(episode_id="e", reward={}, info={"z": {}}), "infos of z; the agents are x, y"),
        (LogReturns(episode_id="e", reward={}, terminateds={"x": 1}), "flag of agent 'x'"),
        (LogReturns(episode_id="e", reward={}, truncateds=[1]), "flags are a map by agent"),
        (
            LogAction(episode_id="e", observation={"x": [0]}, action={"x": 1, "y": 1}),
            "actions of x, y, but observations of x",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_agents_is_refused_by_name(payload: Payload, text: str) -> None:
    with pytest.raises(EpisodeError, match=text):
        event(payload, MANY)


def test_what_cannot_be_read_is_told_apart_from_what_is_wrong() -> None:
    with pytest.raises(SpaceMismatchError, match="observation of episode e"):
        event(GetAction(episode_id="e", observation=[2.0]))
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "GetAction", 1.0)
    with pytest.raises(DecodeError):
        read(header, [b"\x80"], b"p", ONE)


def test_a_fragment_is_the_verbs_that_its_steps_stand_for() -> None:
    step = FragmentStep(reward=1, observation=[0], action=1, policy_version=3, extras={"v": 0.5})
    read_as = event(
        LogFragment(episode_id="e", policy_id="p", first=4, steps=[step, FragmentStep(reward=2.0)])
    )
    assert (read_as.policy_id, read_as.first) == ("p", 4)
    chosen, tail = read_as.parts
    assert chosen.reward.rewards == {"agent0": 1.0}
    assert chosen.step.action == {"agent0": 1}
    assert chosen.choice.extras == {"agent0": {"v": 0.5}}
    assert chosen.choice.policy_version == 3
    assert (tail.reward.rewards, tail.step, tail.choice) == ({"agent0": 2.0}, None, None)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (FragmentStep(observation=[9], action=1), "observation of episode e: expected Box"),
        (FragmentStep(observation=[0], action=2), "action of episode e: expected Discrete"),
        (FragmentStep(observation=[0]), "action of episode e: expected Discrete"),
        (FragmentStep(reward="1"), "reward is a number"),
        (
            FragmentStep(observation=[0], action=1, policy_version=0, extras=[1]),
            "extras of 'agent0' are a map",
        ),
        (
            FragmentStep(
                observation=[0],
                action=1,
                policy_version=0,
                extras=dict.fromkeys(map(str, range(65))),
            ),
            "at most 64 values",
        ),
    ],
)
def test_a_step_of_a_fragment_that_does_not_fit_is_refused_and_named(
    step: FragmentStep, text: str
) -> None:
    with pytest.raises(EpisodeError, match=text):
        event(LogFragment(episode_id="e", policy_id="p", first=0, steps=[step]))
    with pytest.raises(EpisodeError, match="first step is not -1"):
        event(LogFragment(episode_id="e", policy_id="p", first=-1, steps=[]))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "reward", [NAN, INF, -INF, 1e300, 2**1023, 10**400, np.float32("inf")], ids=brief
)
def test_a_reward_that_is_not_finite_in_float32_is_refused_by_name(reward: Any) -> None:
    with pytest.raises(EpisodeError, match="Episode e: a reward is a finite number"):
        event(LogReturns(episode_id="e", reward=Tree(reward)))
    with pytest.raises(EpisodeError, match="a reward of agent 'x' is a finite number"):
        event(LogReturns(episode_id="e", reward=Tree({"x": reward})), MANY)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (LogReturns(episode_id="e", reward={}, info={"x": deep(500)}), "an info is nested deeper"),
        (LogReturns(episode_id="e", reward={1.5: 1.0}), "rewards of 1.5, which is no agent"),
        (LogReturns(episode_id="e", reward={None: 1.0}), "rewards of None, which is no agent"),
        (LogReturns(episode_id="e", reward={}, info={NAN: {}}), "infos of nan"),
        (LogReturns(episode_id="e", reward={}, info={(1, 2): {}}), "infos of"),
        (GetAction(episode_id="e", observation={}), "an observation of nobody"),
        (LogAction(episode_id="e", observation={}, action={}), "an observation of nobody"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_maps_of_nobody_and_depths_without_reason_are_refused(payload: Payload, text: str) -> None:
    with pytest.raises(EpisodeError, match=text):
        event(payload, MANY)


@pytest.mark.parametrize("flags", [np.zeros(0), np.ones(2), {}, 0])
def test_flags_of_anybody_do_not_belong_to_an_episode_of_one_agent(flags: Any) -> None:
    with pytest.raises(EpisodeError, match="has one agent"):
        event(LogReturns(episode_id="e", reward=1.0, terminateds=flags))
    with pytest.raises(EpisodeError, match="has one agent"):
        event(EndEpisode(episode_id="e", observation=[0], truncateds=flags))


def test_a_version_fits_its_column() -> None:
    step = FragmentStep(observation=[0], action=1, policy_version=2**63)
    with pytest.raises(EpisodeError, match="no version"):
        event(LogFragment(episode_id="e", policy_id="p", first=0, steps=[step]))


@pytest.mark.parametrize(
    "value",
    [
        *(NAN, INF, 1e39, "x" * 20_000, ["x", "y" * 20_000], None, deep(500), [1, [2, "a"]]),
        *(Tree(10**400), np.array(["a"]), np.array([INF]), np.array([1e39])),
        np.array([INF], np.float16),
    ],
    ids=lambda value: brief(value)[:30],
)
def test_what_a_client_adds_to_a_row_consists_of_finite_numbers(value: Any) -> None:
    def step(extras: Any) -> LogFragment:
        acted = FragmentStep(observation=[0], action=1, policy_version=3, extras=extras)
        return LogFragment(episode_id="e", policy_id="p", first=0, steps=[acted])

    with pytest.raises(EpisodeError, match=r"extra 'v' of agent 'agent0'"):
        event(step({"v": value}))
    fine = {"h": [[0.5], [1, True]], "c": {"x": 3e38}}
    assert event(step({"v": fine})).parts[0].choice.extras == {"agent0": {"v": fine}}
    event(step({"v": [Tree((np.zeros(3), np.float64(3e38)))]}))


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        1 + 2j,
        np.complex64(1j),
        np.longdouble(1.5),
        np.datetime64("2020-01-01"),
        2**70,
        -(2**63) - 1,
        spaces.GraphInstance([0.5], None, None),
    ],
    ids=str,
)
def test_an_info_holds_what_was_given(value: Any) -> None:
    info = {"x": [value], "y": value}
    logged = event(LogReturns(episode_id="e", reward=0.0, info=to_wire(info)))
    assert identical(logged.infos["agent0"], info)


def test_a_request_has_a_largest_size_beside_its_arrays() -> None:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "LogReturns", 1.0)
    with pytest.raises(EpisodeError, match="at most 8388608 bytes"):
        check_size(header, [bytes(2**23 + 1)])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [list, lambda maps: Tree(list(maps))], ids=["plain", "tree"])
def test_a_request_has_a_largest_number_of_lists_and_maps(wrap: Any) -> None:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "LogReturns", 1.0)
    fine = LogReturns(episode_id="e", reward=1.0, info={"x": wrap([{}] * 400_000)})
    check_size(header, encode(fine))
    many = LogReturns(episode_id="e", reward=1.0, info={"x": wrap([{}] * 600_000)})
    with pytest.raises(EpisodeError, match="at most 524288 lists and maps"):
        check_size(header, encode(many))
    with pytest.raises(DecodeError):
        check_size(header, [b"\xc1" * 300_000])


@pytest.mark.parametrize("wrap", [list, lambda values: Tree(list(values))], ids=["plain", "tree"])
def test_a_request_has_a_largest_number_of_values(wrap: Any) -> None:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "GetAction", 1.0)
    check_size(header, encode(GetAction(episode_id="e", observation=wrap([[0] * 1000] * 1000))))
    many = GetAction(episode_id="e", observation=wrap([[0] * 1000] * 1100))
    with pytest.raises(EpisodeError, match="1048576 values"):
        check_size(header, encode(many))


def test_keys_that_were_made_to_have_one_hash_are_refused() -> None:
    header = Header(PROTOCOL_VERSION, Kind.REQUEST, 7, "LogReturns", 1.0)

    def check(keys: list[Any]) -> None:
        info = dict.fromkeys(keys, 0.5)
        check_size(header, encode(LogReturns(episode_id="e", reward=1.0, info=info)))

    modulus = sys.hash_info.modulus  # whose hash is that of 0
    alike = [tuple(modulus * (number >> bit & 1) for bit in range(11)) for number in range(2048)]
    assert len(set(map(hash, alike))) == 1
    with pytest.raises(DecodeError, match="have others' hashes"):
        check(alike)
    check([(number, number) for number in range(2048)])
    check(alike[:200])


def test_an_info_within_an_info_counts_and_is_as_deep_as_it_is() -> None:
    def size(value: Any) -> int:
        return int(event(LogReturns(episode_id="e", reward=1.0, info={"x": value})).size)

    many = [0.5 * number for number in range(10_000)]
    graph = spaces.GraphInstance(many, None, None)
    for value in (many, graph, set(many), OrderedDict.fromkeys(many), {"y": [graph]}):
        assert size(Tree(value)) - size(Tree([])) > 300_000
    deepest = LogReturns(episode_id="e", reward=1.0, info={"x": [deep(62), Tree(deep(62))]})
    with pytest.raises(EpisodeError, match="an info is nested deeper"):
        event(deepest)


def test_an_info_counts_as_what_it_takes_in_memory() -> None:
    logged = LogReturns(episode_id="e", reward=1.0, info={"x": [{} for _ in range(10_000)]})
    part = FragmentStep(reward=1.0, info=logged.info)
    fragment = LogFragment(episode_id="e", policy_id="p", first=0, steps=[part, part])
    tracemalloc.start()
    try:
        kept = event(logged)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept.size > 0.9 * taken > 500_000
    assert event(fragment).size > 2 * taken * 0.9


def test_a_fragment_has_a_largest_number_of_steps() -> None:
    steps = [FragmentStep()] * (2**14 + 1)
    event(LogFragment(episode_id="e", policy_id="p", first=0, steps=steps[1:]))
    with pytest.raises(EpisodeError, match="at most 16384 steps, not 16385"):
        event(LogFragment(episode_id="e", policy_id="p", first=0, steps=steps))


def test_fields_of_dtypes_count_among_what_an_info_takes() -> None:
    plain, fields = np.zeros(4, np.uint8), [(f"{number}", np.uint8) for number in range(1000)]
    inner = np.zeros(1, np.dtype([("a", np.dtype(fields))]))
    sizes = [
        event(LogReturns(episode_id="e", reward=0.0, info=Tree({"a": value}))).size
        for value in (plain, np.zeros(1, np.dtype(fields)), np.zeros((), inner.dtype)[()], inner)
    ]
    assert sizes[0] < 1000
    assert min(sizes[1:]) > 250_000


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Sequence(TWO), [1] * 5_000),
        (spaces.Sequence(BOX), [[1]] * 5_000),
        (spaces.Tuple([TWO] * 1000), [1] * 1000),
        (spaces.Dict({str(number): TWO for number in range(1000)}), None),
    ],
    ids=["numbers", "boxes", "tuple", "dict"],
)
@pytest.mark.parametrize("kind", [GetAction, LogAction, EndEpisode, LogFragment])
def test_elements_of_many_parts_count_as_what_they_take(
    kind: type[Payload], space: spaces.Space[Any], observation: Any
) -> None:
    agreement = Agreement(space, TWO)
    if observation is None:
        observation = {str(number): 1 for number in range(1000)}
    fields: dict[str, Any] = {"observation": observation}
    if kind is LogAction:
        fields["action"] = 1
    if kind is LogFragment:
        step = FragmentStep(observation=observation, action=1)
        fields = {"steps": [step], "policy_id": "p", "first": 0}
    payload = kind(episode_id="e", **fields)
    event(payload, agreement)  # what is remembered for all is made
    tracemalloc.start()
    try:
        made = event(payload, agreement)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert made.size > 0.7 * taken


def test_arrays_count_as_the_frames_that_they_are() -> None:
    agreement = Agreement(spaces.Box(0, 255, (100, 100), np.uint8), TWO)
    asked = event(GetAction(episode_id="e", observation=np.zeros((100, 100), np.uint8)), agreement)
    assert 10_000 < asked.size < 10_200
