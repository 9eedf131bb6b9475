"""What one client may fill of a bridge."""

from __future__ import annotations

import itertools
from typing import Any

from envbus.actors.env.agents import ALL
from envbus.bus.wire.messages import FailureCode
from envbus.runner.bridge.vocabulary import (
    Act,
    Admit,
    Chosen,
    ClientFragment,
    ClientLost,
    Effect,
    End,
    Join,
    LogReward,
    LogStep,
    Observe,
    Refuse,
    SendReply,
    StartCall,
    Tick,
)
from tests.runner.bridge.scenes import A, Scene, refusal

B = b"b"
AGENT = "agent0"


def reward(scene: Scene, peer: bytes, episode: str, size: int, value: float = 1.0) -> Any:
    info = {AGENT: {"k": "v"}}
    number = scene.number(peer)
    return scene.do(LogReward(peer, number, episode, {AGENT: value}, info, {}, {}, size=size))


def step(scene: Scene, peer: bytes, episode: str, size: int) -> Any:
    return scene.do(LogStep(peer, scene.number(peer), episode, {AGENT: 0}, {AGENT: 0}, size=size))


def start(scene: Scene, peer: bytes, episode: str) -> Any:
    return scene.do(StartCall(peer, scene.number(peer), episode))


def end(scene: Scene, peer: bytes, episode: str, size: int) -> Any:
    flags = {AGENT: True, "__all__": True}, {AGENT: False, "__all__": False}
    return scene.do(End(peer, scene.number(peer), episode, {AGENT: 0}, *flags, size=size))


def over_budget(effect: Any) -> str:
    """Return the message of a refusal that may be tried again."""
    assert isinstance(effect, Refuse)
    assert effect.failed.code is FailureCode.OVERLOADED
    return effect.failed.message


def test_infos_do_not_add_up_without_end() -> None:
    scene = Scene(B, max_client_bytes=1_000_000)
    start(scene, A, "a")
    start(scene, B, "b")
    assert isinstance(step(scene, A, "a", 1000), SendReply)
    for _ in range(7):
        assert isinstance(reward(scene, A, "a", 100_000), SendReply)
    assert "EpisodeLimits.max_client_bytes=1000000" in over_budget(reward(scene, A, "a", 100_000))
    assert isinstance(reward(scene, B, "b", 100_000), SendReply), "another one has room"
    counts = scene.episodes.statistics()
    assert counts.queued_bytes_now == 1024 + 700_000 + 100_000
    assert counts.most_queued_bytes_now == 1024 + 700_000
    assert counts.over_budget == 1
    end(scene, A, "a", 10)
    while scene.episodes.collect()[0]:
        pass
    assert scene.episodes.statistics().queued_bytes_now == 100_000


def test_beyond_half_of_its_budget_a_client_waits_until_the_runner_has_taken_some() -> None:
    scene = Scene(max_client_bytes=100_000)
    start(scene, A, "a")
    assert isinstance(step(scene, A, "a", 40_000), SendReply)
    assert step(scene, A, "a", 20_000) is None
    _, effects = scene.episodes.collect()
    assert effects == []
    _, effects = scene.episodes.collect()
    assert [type(effect) for effect in effects] == [SendReply]
    assert isinstance(step(scene, A, "a", 20_000), SendReply)


def test_the_shortest_messages_count_for_what_is_kept_of_them() -> None:
    scene = Scene(max_client_bytes=100 * 1024)
    start(scene, A, "a")
    answers = [reward(scene, A, "a", 30) for _ in range(76)]
    assert all(isinstance(answer, SendReply) for answer in answers[:75])
    over_budget(answers[75])


def test_rewards_that_wait_for_observations_leave_room_for_these() -> None:
    scene = Scene(max_client_bytes=100_000)
    for episode in "abc":
        start(scene, A, episode)
        step(scene, A, episode, 1000)
    while scene.episodes.collect()[0]:
        pass
    rewards = [reward(scene, A, episode, 5000) for _ in range(7) for episode in "abc"]
    over_budget(rewards[-1])
    while scene.episodes.collect()[0]:
        pass
    over_budget(reward(scene, A, "a", 5000))
    assert not isinstance(step(scene, A, "a", 10_000), Refuse)
    while scene.episodes.collect()[0]:
        pass
    assert isinstance(reward(scene, A, "a", 5000), SendReply)


def test_ended_episodes_that_the_runner_was_not_shown_count_as_well() -> None:
    scene = Scene(max_client_bytes=10_000)
    for number in range(99):
        if isinstance(begun := start(scene, A, f"e{number}"), Refuse):
            break
        step(scene, A, f"e{number}", 1000)
        assert isinstance(end(scene, A, f"e{number}", 1000), SendReply)
    over_budget(begun)
    assert number < 10
    while scene.episodes.collect()[0]:
        pass
    assert scene.episodes.statistics().queued_bytes_now == 0
    assert isinstance(start(scene, A, "again"), SendReply)


def pipelined(scene: Scene, number: int, value: int) -> Any:
    """Log a step by a request of this id, as a client that does not wait for answers."""
    content = {AGENT: value}, {AGENT: 0}
    return scene.do(LogStep(A, number, "e", *content, digest=value, timeout=1e6))


def fill(scene: Scene) -> int:
    """Log steps until one is refused, and return its id; values are ids."""
    scene.start("e")
    return next(n for n in itertools.count(100) if isinstance(pipelined(scene, n, n), Refuse))


def rows(scene: Scene) -> list[tuple[int, bool]]:
    """Return each observation that the runner gets, and whether there is a gap before it."""
    taken = []
    while records := scene.episodes.collect()[0]:
        (record,) = records
        taken.append((record.content["observations"][AGENT], record.unacted))
    return taken


def test_what_is_taken_in_place_of_a_refused_step_is_behind_a_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    over_budget(pipelined(scene, first + 1, first + 1))
    late = LogReward(A, first + 2, "e", {AGENT: 1.0}, {}, {}, {}, digest=1)
    over_budget(scene.do(late))  # of a step that is missing
    assert rows(scene) == [(n, False) for n in range(100, first)]
    pipelined(scene, first + 3, first + 3)
    assert isinstance(refused := pipelined(scene, first, first), Refuse)  # out of order
    assert "comes too late" in refused.failed.message
    pipelined(scene, first + 4, first + 4)
    assert rows(scene) == [(first + 3, True), (first + 4, False)]


def test_an_end_in_place_of_a_refused_step_is_behind_a_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    scene.all(End(A, first + 1, "e", {AGENT: 7}, {ALL: True}, {ALL: False}))
    assert rows(scene)[-1] == (7, True)


def test_each_refused_step_that_is_skipped_leaves_a_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    for number in range(first + 1, first + 6):
        over_budget(pipelined(scene, number, number))
    assert len(rows(scene)) == first - 100
    pipelined(scene, first + 1, first + 1)  # without the first
    pipelined(scene, first + 2, first + 2)
    pipelined(scene, first + 6, first + 4)  # without the third, by a new id
    pipelined(scene, first + 7, first + 7)  # without the fifth
    pipelined(scene, first + 8, first + 8)
    assert rows(scene) == [
        (first + 1, True),
        (first + 2, False),
        (first + 4, True),
        (first + 7, True),
        (first + 8, False),
    ]


def test_refused_steps_that_come_again_in_their_order_leave_no_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    over_budget(pipelined(scene, first + 1, first + 1))
    over_budget(pipelined(scene, first, first))  # too early
    assert rows(scene) == [(n, False) for n in range(100, first)]
    for number in (first, first + 1, first + 2):
        assert isinstance(pipelined(scene, number, number), SendReply) or number > first + 1
    assert rows(scene) == [(n, False) for n in range(first, first + 3)]


def earned(scene: Scene, number: int, value: float) -> Any:
    """Log a reward as `pipelined` does a step."""
    logged = LogReward(A, number, "e", {AGENT: value}, {}, {}, {}, digest=-int(value))
    return scene.do(logged)


def test_equal_requests_that_were_refused_and_come_again_leave_no_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    for number in (first + 1, first + 2):
        over_budget(pipelined(scene, number, first))
    over_budget(earned(scene, first + 3, 2.0))
    over_budget(pipelined(scene, first + 4, first))
    rows(scene)
    for number in (first, first + 1, first + 2):
        assert isinstance(pipelined(scene, number, first), SendReply | None)
    assert isinstance(earned(scene, first + 3, 2.0), SendReply)
    pipelined(scene, first + 4, first)
    assert rows(scene) == [(first, False)] * 4


def test_an_equal_request_that_is_taken_for_a_refused_one_is_not_followed_by_that_one() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    over_budget(earned(scene, first + 1, 2.0))
    rows(scene)
    pipelined(scene, first + 2, first)  # there is room for it meanwhile
    for refused in (pipelined(scene, first, first), earned(scene, first + 1, 2.0)):
        assert isinstance(refused, Refuse)
        assert "comes too late" in refused.failed.message
    earned(scene, first + 3, 2.0)  # equal to the one that is lost, which is told
    pipelined(scene, first + 4, 1)
    assert rows(scene) == [(first, False), (1, True)]


def test_a_refused_request_may_be_tried_often_and_under_new_ids() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    for number in range(first + 1, first + 1000):
        over_budget(pipelined(scene, number, first))
    rows(scene)
    pipelined(scene, first + 1000, first)
    pipelined(scene, first + 1001, 1)
    assert rows(scene) == [(first, False), (1, False)]


def test_requests_that_were_refused_before_ids_began_anew_leave_one_gap() -> None:
    scene = Scene(max_queued=2)
    first = fill(scene)
    scene.lose()
    rows(scene)
    scene.join(B, scene.sessions[A], number=1)
    for number in (2, 3, 4):
        content = {AGENT: number}, {AGENT: 0}
        scene.do(LogStep(B, number, "e", *content, digest=number, timeout=1e6))
    assert rows(scene) == [(2, True), (3, False), (4, False)]
    assert first > 4


def test_a_call_that_is_refused_does_not_hurt_the_one_that_waits() -> None:
    scene = Scene(max_client_bytes=100_000)
    scene.start("e")
    waits = scene.ask("e", 7)
    scene.episodes.collect()
    over_budget(reward(scene, A, "e", 100_001))
    over_budget(step(scene, A, "e", 100_001))
    over_budget(scene.do(Observe(A, scene.number(A), "e", {AGENT: 0}, size=100_001)))
    first = ClientFragment(A, scene.number(A), "e", "default_policy", 3, [])
    assert isinstance(refused := scene.do(first), Refuse)
    assert refused.failed.remote_type == "EpisodeError"
    acted = scene.do(Chosen("e", {AGENT: 1}))
    assert isinstance(acted, Act)
    assert acted.request_id == waits
    assert scene.episodes.statistics().superseded == 0


def test_what_nothing_is_kept_of_does_not_count() -> None:
    scene = Scene(max_client_bytes=10_000)
    start(scene, A, "a")
    for _ in range(20):  # the runner is away, and each request for an action ends by its time
        number = scene.number(A)
        assert scene.do(Observe(A, number, "a", {AGENT: 0}, timeout=1.0, size=4000)) is None
        scene.now += 1.0
        assert isinstance(scene.do(Tick()), Refuse)
    for number in range(20):
        start(scene, A, f"e{number}")
        reward(scene, A, f"e{number}", 4000)
        assert isinstance(end(scene, A, f"e{number}", 10), SendReply), "without a single step"
    assert scene.episodes.statistics().queued_bytes_now == 4000, "the first observation"
    scene.episodes.collect()
    assert scene.episodes.statistics().queued_bytes_now == 0


def test_one_client_does_not_hold_all_episodes() -> None:
    scene = Scene(B, max_client_episodes=3, max_episodes=5)
    for name in "xyz":
        assert isinstance(start(scene, A, name), SendReply)
    assert "EpisodeLimits.max_client_episodes=3" in over_budget(start(scene, A, "more"))
    assert isinstance(start(scene, B, "b"), SendReply)
    end(scene, A, "x", 10)
    assert isinstance(start(scene, A, "more"), SendReply)


def test_clients_that_left_nothing_make_room_for_new_ones() -> None:
    scene = Scene(B, max_sessions=3)
    start(scene, A, "a")
    scene.do(ClientLost(A, "gone"))
    scene.do(ClientLost(B, "gone"))
    for number in range(5):
        peer = f"new-{number}".encode()
        scene.join(peer)
        assert scene.sessions.get(peer) or scene.episodes.statistics().clients_now == 1
        scene.do(ClientLost(peer, "gone"))
    assert scene.join(b"again", resume=scene.sessions[A]) == scene.sessions[A]


def test_what_a_client_logged_before_it_joined_anew_is_no_longer_in_its_budget() -> None:
    scene = Scene(max_client_bytes=1_000_000)
    for life in range(20):
        start(scene, A, f"e{life}")  # no observation follows: the runner knows nothing of it
        assert isinstance(reward(scene, A, f"e{life}", 100_000), SendReply)
        scene.lose()
        scene.join(A)
    assert scene.episodes.statistics().queued_bytes_now == 0


def test_a_connection_that_joins_anew_gives_up_the_session_that_it_had_left() -> None:
    scene = Scene(B, max_sessions=3)
    start(scene, B, "honest")
    scene.do(ClientLost(B, "gone"))
    for number in range(10):
        start(scene, A, f"e{number}")
        step(scene, A, f"e{number}", 10)
        queued = scene.episodes.statistics().queued_bytes_now
        assert queued == 1024 * (number + 1), "what it left counts against the same budget"
        scene.do(ClientLost(A, "gone"))
        scene.join(A)
    statistics = scene.episodes.statistics()
    assert (statistics.clients_now, statistics.lost_clients_now) == (1, 1)
    assert (statistics.episodes_now, statistics.faulty) == (1, 10)
    assert "joined anew" in refusal(end(scene, A, "e9", 10))
    faults = [record.fault for _ in range(2) for record in scene.take().values()]
    told = [fault.message for fault in faults if fault is not None]
    assert told == [f"episode e{number}: its client a has joined anew" for number in range(10)]
    assert scene.join(b"back", resume=scene.sessions[B]) == scene.sessions[B]


def test_connections_that_take_each_others_sessions_over_have_one_each() -> None:
    scene = Scene(B, max_sessions=3)
    secret = scene.sessions[B]
    for number in range(10):
        start(scene, B, f"e{number}")
        if number % 2:
            scene.do(ClientLost(A, "gone"))
        assert scene.join(A, resume=secret) == secret
        secret = scene.join(B)
    statistics = scene.episodes.statistics()
    assert (statistics.clients_now, statistics.lost_clients_now) == (2, 0)
    assert (statistics.episodes_now, statistics.faulty) == (1, 9)


def test_one_key_does_not_take_all_sessions() -> None:
    scene = Scene(max_sessions=6, max_key_sessions=3)

    def join(peer: bytes, user: str, resume: str = "") -> Effect | None:
        scene.numbers[peer] = itertools.count(1)
        return scene.do(Join(peer, scene.number(peer), "sim", resume, user))

    for peer in (b"1", b"2", b"3"):
        assert isinstance(join(peer, "k"), Admit)
        start(scene, peer, peer.decode())
        scene.do(ClientLost(peer, "gone"))
    assert "EpisodeLimits.max_key_sessions=3" in over_budget(join(b"4", "k"))
    assert isinstance(join(b"5", "other"), Admit)
    assert isinstance(join(b"6", ""), Admit)
    back = join(b"4", "k", scene.table.open["1"].session)
    assert isinstance(back, Admit)
    assert back.episodes == ["1"]
    end(scene, b"4", "1", 10)
    assert "max_key_sessions" in over_budget(join(b"7", "k"))
    scene.do(ClientLost(b"4", "gone"))
    assert isinstance(join(b"7", "k"), Admit)
    assert "EpisodeLimits.max_sessions" in over_budget(join(b"8", "new"))


def test_rewards_do_not_add_up_to_infinity() -> None:
    scene = Scene()
    start(scene, A, "a")
    step(scene, A, "a", 10)
    assert isinstance(reward(scene, A, "a", 10, 3e38), SendReply)
    assert "rewards add up to more" in refusal(reward(scene, A, "a", 10, 3e38))
    assert isinstance(reward(scene, A, "a", 10, -3e38), SendReply)


def test_an_id_has_no_control_characters() -> None:
    scene = Scene()
    for name in ("a\nb", "\x1b[2J", "\x00", "\u202e"):
        assert "control character" in refusal(start(scene, A, name))
    assert isinstance(start(scene, A, "Ä ok"), SendReply)


def asked(scene: Scene, peer: bytes, episode: str) -> Any:
    return scene.do(Observe(peer, scene.number(peer), episode, {AGENT: 0}))


def test_who_asks_too_often_is_told_when_to_come_again_and_is_nobody_elses_trouble() -> None:
    scene = Scene(B, max_rate=4.0)
    for peer, episodes in ((A, "abcdefg"), (B, "z")):
        for episode in episodes:
            start(scene, peer, episode)
    assert [asked(scene, A, episode) for episode in "abcd"] == [None] * 4
    told = over_budget(asked(scene, A, "e"))
    assert "more than 4 actions per second" in told
    assert "ask again in 0.250 s" in told
    assert asked(scene, B, "z") is None
    scene.now += 0.25
    assert asked(scene, A, "e") is None
    over_budget(asked(scene, A, "f"))
    assert scene.episodes.statistics().over_rate == 2
    records = scene.take()
    assert records.keys() == set("abcdez")
    assert not any(record.missed for record in records.values())


def test_a_request_that_was_refused_for_the_rate_leaves_no_gap_when_it_comes_again() -> None:
    scene = Scene(max_rate=1.0)
    start(scene, A, "a")
    assert asked(scene, A, "a") is None
    scene.take()
    scene.choose("a", 1)
    over_budget(asked(scene, A, "a"))
    scene.now += 1.0
    assert asked(scene, A, "a") is None
    record = scene.take()["a"]
    assert (record.missed, record.unacted) == (False, False)


def test_all_clients_of_one_token_or_key_are_one() -> None:
    scene = Scene(max_rate=1.0)
    for peer in (b"x", b"y"):
        scene.numbers[peer] = itertools.count(1)
        scene.do(Join(peer, scene.number(peer), "sim", user="alice"))
        start(scene, peer, peer.decode())
    assert asked(scene, b"x", "x") is None
    over_budget(asked(scene, b"y", "y"))
