"""A bridge and its clients over real sockets, in real processes: group X of the behaviours."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors import (
    ActionTimeoutError,
    AsyncExternalEnvClient,
    ClientTimeouts,
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    ExternalEnvClient,
    SpaceMismatchError,
)
from envbus.actors.external.protocol import (
    BRIDGE,
    ActionChosen,
    BridgeJoined,
    EndEpisode,
    GetAction,
    JoinBridge,
    LogAction,
    LogReturns,
    StartEpisode,
)
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    PeerLostError,
    RequestTimeoutError,
)
from envbus.bus.wire.codec import decode, decode_header, encode_header
from envbus.bus.wire.messages import (
    PROTOCOL_VERSION,
    Failed,
    FailureCode,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Welcome,
)
from envbus.runner import DUMMY_AGENT, ExternalEnvBridge
from envbus.runner.bridge import BridgeResult, EpisodeLimits
from envbus.runner.errors import FaultCause
from envbus.runner.policies.mlp import MlpPolicy, policy_from_weights
from tests.integration.bus_programs import RawPeer, frames_of, free_port, hello_frames
from tests.integration.group_children import PATIENCE, refused_in_a_fork
from tests.integration.relay import Relay
from tests.integration.simulators import (
    ACTION,
    OBSERVATION,
    Program,
    Runner,
    in_thread,
    seen,
)
from tests.waiting import pass_time

pytestmark = pytest.mark.timeout(120)

QUICK = EpisodeLimits(lease=1.0)


@pytest.fixture(params=[True, False], ids=["local link", "zmq"])
def bridge(request: pytest.FixtureRequest) -> Iterator[ExternalEnvBridge]:
    with ExternalEnvBridge(OBSERVATION, ACTION, local_links=request.param) as made:
        yield made


# --- steps ----------------------------------------------------------------------------------


def test_an_episode_arrives_as_it_was_played(bridge: ExternalEnvBridge) -> None:
    def play() -> tuple[str, int]:
        with ExternalEnvClient(bridge.address) as client:
            assert client.observation_space == OBSERVATION
            assert client.policy_ids == ["default_policy"]
            episode = client.start_episode()
            action = client.get_action(episode, seen(7))
            client.log_returns(episode, 1.0)
            client.log_returns(episode, 0.5, {"hit": np.float32(2)})
            client.log_action(episode, seen(8), 42)
            client.log_returns(episode, 2.0)
            client.end_episode(episode, seen(9), truncated=True)
            return episode, action

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: sim.over() and runner.ended)
    episode, action = sim.result
    assert (action, type(action)) == (7, np.int64)
    assert runner.rows(episode) == [(7.0, 0.0), (8.0, 1.5), (9.0, 2.0)]
    first, second, last = runner.results
    assert first.started == [episode]
    assert second.off_policy_actions == {episode: {DUMMY_AGENT: 42}}
    assert second.infos == {episode: {DUMMY_AGENT: {"hit": 2.0}}}
    assert last.truncateds == {episode: {DUMMY_AGENT: True, "__all__": True}}
    assert last.terminateds == {episode: {DUMMY_AGENT: False, "__all__": False}}
    assert last.ended == [episode]
    assert first.observations[episode][DUMMY_AGENT].dtype == np.float32
    first.observations[episode][DUMMY_AGENT][0] = 0  # the caller's own


def test_untrained_episodes_are_told_apart(bridge: ExternalEnvBridge) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            for name, enabled in (("yes", True), ("no", False)):
                client.start_episode(name, training_enabled=enabled)
                assert client.get_action(name, seen(1)) == 1
                client.end_episode(name, seen(2))

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: sim.over() and len(runner.ended) == 2)
    for result in runner.results:
        assert result.untrained == {"no"} & result.observations.keys()


def test_several_agents_come_and_go() -> None:
    observation_spaces: dict[str, spaces.Space[Any]] = {"x": OBSERVATION, "y": OBSERVATION}
    action_spaces: dict[str, spaces.Space[Any]] = {"x": ACTION, "y": spaces.Discrete(500)}

    def play() -> None:
        with ExternalEnvClient(
            bridge.address, observation_space=observation_spaces, action_space=action_spaces
        ) as client:
            client.start_episode("e")
            assert client.get_action("e", {"x": seen(1), "y": seen(2)}) == {"x": 1, "y": 2}
            client.log_returns("e", {"x": 1.0, "y": 5.0}, {"x": {"k": 1}})
            client.log_returns("e", {"x": 1.0}, terminateds={"x": True})
            assert client.get_action("e", {"x": seen(3), "y": seen(4)}) == {"y": 4}
            client.end_episode("e", {"y": seen(5)}, truncateds={"y": True})

    with ExternalEnvBridge(observation_spaces, action_spaces) as bridge:
        runner = Runner(bridge)
        with in_thread(play) as sim:
            runner.serve(lambda: sim.over() and runner.ended)
    _, middle, last = runner.results
    assert middle.rewards == {"e": {"x": 2.0, "y": 5.0}}
    assert middle.terminateds == {"e": {"x": True, "y": False, "__all__": False}}
    assert middle.infos == {"e": {"x": {"k": 1}, "y": {}}}
    assert last.truncateds["e"]["y"] is True
    assert last.terminateds["e"]["__all__"] is True


@pytest.mark.slow
def test_a_client_may_tell_the_space_of_large_images() -> None:
    image = spaces.Box(0, 255, (480, 640, 3), np.uint8)

    def play() -> None:
        with ExternalEnvClient(
            bridge.address, observation_space=image, action_space=ACTION
        ) as client:
            client.start_episode("e")

    with ExternalEnvBridge(image, ACTION) as bridge, in_thread(play) as sim:
        Runner(bridge).serve(sim.over)


def test_spaces_of_different_agents_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="those of"):
        ExternalEnvBridge({"a": OBSERVATION}, {"b": ACTION})


@pytest.mark.parametrize("space", [spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(9)])
def test_observations_of_any_size_arrive_whole(space: spaces.Space[Any]) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            client.get_action("e", observation)

    observation = space.sample()
    with ExternalEnvBridge(space, ACTION) as bridge, in_thread(play):
        result = bridge.poll(PATIENCE)
        np.testing.assert_array_equal(result.observations["e"][DUMMY_AGENT], observation)
        bridge.send_actions({"e": {DUMMY_AGENT: 1}})


# --- refusals -------------------------------------------------------------------------------


def test_wrong_calls_raise_in_the_client(bridge: ExternalEnvBridge) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            with pytest.raises(EpisodeAlreadyStartedError, match="Episode e is already started"):
                client.start_episode("e")
            with pytest.raises(EpisodeNotFoundError, match=r"Episode no not found\."):
                client.log_returns("no", 1.0)
            client.end_episode("e", seen(0))
            with pytest.raises(EpisodeFinishedError, match=r"Episode e has already completed\."):
                client.get_action("e", seen(0))
            with pytest.raises(ValueError, match="completed"):
                client.start_episode("e")

    with in_thread(play) as sim:
        Runner(bridge).serve(sim.over)


def test_what_is_outside_its_space_is_refused_and_the_episode_goes_on(
    bridge: ExternalEnvBridge,
) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            for wrong in (seen(2000), np.zeros(3), "x", [[1.0, 2.0]]):
                with pytest.raises(SpaceMismatchError, match="observation of episode e: expected"):
                    client.get_action("e", wrong)
            with pytest.raises(SpaceMismatchError, match="action of episode e: expected Discrete"):
                client.log_action("e", seen(0), 1000)
            with pytest.raises(ValueError, match="a reward is a number"):
                client.log_returns("e", "much")
            assert client.get_action("e", [5, 0]) == 5

    with in_thread(play) as sim:
        Runner(bridge).serve(sim.over)


def test_a_client_of_other_spaces_is_refused_with_both_printed(
    bridge: ExternalEnvBridge,
) -> None:
    def play() -> None:
        with pytest.raises(SpaceMismatchError, match=r"Discrete\(1000\).*Discrete\(2\)"):
            ExternalEnvClient(
                bridge.address, observation_space=OBSERVATION, action_space=spaces.Discrete(2)
            )

    with in_thread(play) as sim:
        Runner(bridge).serve(sim.over)


def test_the_first_client_may_bring_the_spaces() -> None:
    def play() -> None:
        with pytest.raises(SpaceMismatchError, match="tell yours"):
            ExternalEnvClient(bridge.address)
        own = {"observation_space": OBSERVATION, "action_space": ACTION}
        with ExternalEnvClient(bridge.address, **own), ExternalEnvClient(bridge.address) as second:
            assert second.action_space == ACTION

    with ExternalEnvBridge() as bridge:
        assert bridge.observation_space is None
        with in_thread(play) as sim:
            Runner(bridge).serve(sim.over)
        assert bridge.action_space == ACTION


# --- many -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_open_episodes_of_many_clients_are_stepped_at_random(
    bridge: ExternalEnvBridge,
) -> None:
    runner = Runner(bridge)
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(bridge.address, "episodes", f"p{i}", 5, 12))
            for i in range(4)
        ]
        runner.serve(lambda: all(program.over() for program in programs))
        runner.serve(lambda: len(runner.ended) == 20)
        assert [program.line() for program in programs] == ["done"] * 4
    for i in range(4):
        for k in range(5):
            rows = runner.rows(f"p{i}-{k}")
            assert rows == [(float(n), float(max(n - 1, 0))) for n in range(13)]


def test_ending_one_while_another_waits_disturbs_neither(bridge: ExternalEnvBridge) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            for name in ("a", "b"):
                client.start_episode(name)
                client.log_action(name, seen(0), 0)
            with in_thread(lambda: client.get_action("a", seen(3))) as waits:
                client.end_episode("b", seen(1))
            assert waits.result == 3
            client.end_episode("a", seen(1))

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: sim.over() and len(runner.ended) == 2)


def test_threads_share_a_client(bridge: ExternalEnvBridge) -> None:
    def play(client: ExternalEnvClient, name: str) -> None:
        client.start_episode(name)
        for number in range(60):
            assert client.get_action(name, seen(number)) == number
            client.log_returns(name, 1.0)
        client.end_episode(name, seen(0))

    def play_all() -> None:
        with ExternalEnvClient(bridge.address) as client, ExitStack() as stack:
            for i in range(6):
                name = f"e{i}"
                stack.enter_context(in_thread(lambda name=name: play(client, name)))  # type: ignore[misc]

    runner = Runner(bridge)
    with in_thread(play_all) as sim:
        runner.serve(lambda: sim.over() and len(runner.ended) == 6)
    for i in range(6):
        assert sum(reward for _, reward in runner.rows(f"e{i}")) == 60.0


def test_two_calls_of_one_episode_at_once_are_an_error(bridge: ExternalEnvBridge) -> None:
    started, errors = threading.Event(), []

    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")

            def first() -> None:
                with pytest.raises(EpisodeBusyError, match="one after another") as info:
                    client.get_action("e", seen(1))
                errors.append(info.value)

            with in_thread(first):
                started.wait(PATIENCE)
                assert client.get_action("e", seen(2)) == 2

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: runner.results, act=False)
        started.set()
        runner.serve(sim.over)
    assert len(errors) == 1


def test_a_bridge_without_clients_waits_and_returns_nothing(
    bridge: ExternalEnvBridge,
) -> None:
    result = bridge.poll(0.05)
    assert not result.observations
    assert not result.faults
    assert bridge.statistics().clients_now == 0


@pytest.mark.parametrize("min_envs", [2, 9])
def test_poll_waits_for_as_many_as_are_asked_for_but_not_for_more_than_are_open(
    bridge: ExternalEnvBridge, min_envs: int
) -> None:
    def play(name: str) -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode(name)
            both.wait(PATIENCE)
            client.get_action(name, seen(1))

    both = threading.Event()
    with in_thread(lambda: play("a")), in_thread(lambda: play("b")):
        Runner(bridge).serve(lambda: bridge.statistics().episodes_now == 2)
        both.set()
        assert bridge.poll(PATIENCE, min_envs=min_envs).observations.keys() == {"a", "b"}
        bridge.send_actions({name: {DUMMY_AGENT: 1} for name in "ab"})


def test_poll_returns_what_so_many_episodes_have_and_then_the_others(
    bridge: ExternalEnvBridge,
) -> None:
    def play(name: str) -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode(name)
            both.wait(PATIENCE)
            client.get_action(name, seen(1))

    both = threading.Event()
    with in_thread(lambda: play("a")), in_thread(lambda: play("b")):
        Runner(bridge).serve(lambda: bridge.statistics().episodes_now == 2)
        both.set()
        first = bridge.poll(PATIENCE, min_envs=2, max_envs=1).observations
        second = bridge.poll(PATIENCE, max_envs=1).observations
        bridge.send_actions({name: {DUMMY_AGENT: 1} for name in "ab"})
    assert sorted([*first, *second]) == ["a", "b"]
    with pytest.raises(ValueError, match="max_envs must be at least 1"):
        bridge.poll(0.0, max_envs=0)


# --- time-outs and errors -------------------------------------------------------------------


def test_no_action_in_time_is_a_time_out_that_names_the_episode(
    bridge: ExternalEnvBridge,
) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            with pytest.raises(
                ActionTimeoutError, match=r"episode e: no action within 1\.3 s"
            ) as it:
                client.get_action("e", seen(1), timeout=1.3)
            assert isinstance(it.value, TimeoutError)
            assert it.value.episode_id == "e"
            timed_out.set()
            too_late.wait(PATIENCE)
            assert client.get_action("e", seen(2)) == 2

    timed_out, too_late = threading.Event(), threading.Event()
    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(timed_out.is_set, act=False)
        bridge.send_actions({"e": {DUMMY_AGENT: 1}})
        too_late.set()
        runner.serve(sim.over)
    assert bridge.statistics().dropped_actions == 1
    assert runner.unacted == ["e"]


def test_a_runner_that_does_not_poll_at_all_lets_it_time_out_too(
    bridge: ExternalEnvBridge,
) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            ready.set()
            go.wait(PATIENCE)
            with pytest.raises(ActionTimeoutError, match="episode e"):
                client.get_action("e", seen(1), timeout=0.1)
            over.set()
            assert client.get_action("e", seen(2)) == 2

    ready, go, over = threading.Event(), threading.Event(), threading.Event()
    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(ready.is_set)
        go.set()
        assert over.wait(PATIENCE)
        runner.serve(sim.over)
    assert [row[0] for row in runner.rows("e")] in ([2.0], [1.0, 2.0])


class OddError(Exception):
    """Of a policy."""


@pytest.mark.parametrize("kind", [ValueError, OddError])
def test_what_the_policy_raises_reaches_the_client_as_itself(
    bridge: ExternalEnvBridge, kind: type[Exception]
) -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode("e")
            with pytest.raises(kind, match="bad weights") as info:
                client.get_action("e", seen(1))
            assert "Remote traceback" in str(info.value.__cause__)
            assert client.get_action("e", seen(2)) == 2

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: runner.results, act=False)
        try:
            raise kind("bad weights")
        except kind as error:
            bridge.fail(["e"], error)
        runner.serve(sim.over)


def test_a_bad_action_is_an_error_of_the_runner_and_of_its_client_only(
    bridge: ExternalEnvBridge,
) -> None:
    def play(name: str) -> None:
        with ExternalEnvClient(bridge.address) as client:
            client.start_episode(name)
            if name == "bad":
                with pytest.raises(SpaceMismatchError, match="action for episode bad"):
                    client.get_action(name, seen(1))
            else:
                assert client.get_action(name, seen(1)) == 3

    with in_thread(lambda: play("bad")), in_thread(lambda: play("good")):
        shown: set[str] = set()
        while len(shown) < 2:
            shown |= bridge.poll(PATIENCE).observations.keys()
        with pytest.raises(ValueError, match="no action for agent0"):
            bridge.send_actions({"good": {}})
        with pytest.raises(SpaceMismatchError, match="expected Discrete"):
            bridge.send_actions({"bad": {DUMMY_AGENT: 1000}, "good": {DUMMY_AGENT: 3}})


# --- ends and beginnings --------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_client_costs_its_own_episodes_only() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=QUICK) as bridge:
        runner = Runner(bridge)
        with (
            Program(bridge.address, "endless", "dies") as dies,
            Program(bridge.address, "endless", "lives") as lives,
        ):
            runner.serve(lambda: len(runner.rows("dies")) > 5 and len(runner.rows("lives")) > 5)
            os.kill(dies.pid, signal.SIGKILL)
            runner.serve(lambda: runner.faults)
            (fault,) = runner.faults
            assert (fault.episode_id, fault.cause) == ("dies", FaultCause.LOST)
            assert runner.ended == ["dies"]
            before = len(runner.rows("lives"))
            runner.serve(lambda: len(runner.rows("lives")) > before + 20)
            assert lives.process.poll() is None
        assert bridge.statistics().faulty == 1


@pytest.mark.slow
def test_a_client_that_was_away_within_its_lease_goes_on(bridge: ExternalEnvBridge) -> None:
    runner = Runner(bridge)
    with Program(bridge.address, "endless", "e") as program:
        runner.serve(lambda: len(runner.rows("e")) > 5)
        os.kill(program.pid, signal.SIGSTOP)
        try:
            runner.serve(lambda: bridge.statistics().lost_clients_now == 1)
        finally:
            os.kill(program.pid, signal.SIGCONT)
        before = len(runner.rows("e"))
        runner.serve(lambda: len(runner.rows("e")) > before + 20)
        assert bridge.statistics().resumed == 1
        assert not runner.faults
        rows = runner.rows("e")
        assert [row[0] for row in rows] == [float(i % 900) for i in range(len(rows))]
        assert {row[1] for row in rows[1:]} == {1.0}


def test_an_answer_that_was_lost_with_its_connection_comes_over_the_next_one() -> None:
    def play() -> int:
        with ExternalEnvClient(relay.endpoint, timeouts=ClientTimeouts(action=PATIENCE)) as client:
            client.start_episode("e")
            return int(client.get_action("e", seen(7)))

    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge, Relay(bridge.address) as relay:
        runner = Runner(bridge)
        with in_thread(play) as playing:
            runner.serve(lambda: runner.results, act=False)
            relay.cut()  # libzmq connects again within 0.1 s, and tells nobody who does not ask
            bridge.send_actions({"e": {DUMMY_AGENT: 7}})
            runner.serve(lambda: not playing.thread.is_alive())
        assert playing.result == 7
        assert bridge.statistics().actions == 1


def test_a_lost_answer_comes_also_while_other_threads_of_the_client_are_answered() -> None:
    def play() -> int:
        with ExternalEnvClient(relay.endpoint, timeouts=ClientTimeouts(action=PATIENCE)) as client:
            client.start_episode("e")
            client.start_episode("busy")
            with in_thread(lambda: busily(client)) as other:
                action = int(client.get_action("e", seen(7)))
                over.set()
            assert other.error is None
            return action

    def busily(client: ExternalEnvClient) -> None:
        back.wait(PATIENCE)
        while not over.is_set():
            client.log_returns("busy", 0.0)

    back, over = threading.Event(), threading.Event()
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge, Relay(bridge.address) as relay:
        runner = Runner(bridge)
        with in_thread(play) as playing:
            runner.serve(lambda: runner.results, act=False)
            before = relay.accepted
            relay.cut()
            bridge.send_actions({"e": {DUMMY_AGENT: 7}})
            runner.serve(lambda: relay.accepted > before)
            back.set()
            try:
                runner.serve(lambda: not playing.thread.is_alive())
            finally:
                over.set()
        assert playing.result == 7


@pytest.mark.slow
def test_one_that_was_away_for_too_long_is_told_so() -> None:
    def play() -> None:
        with ExternalEnvClient(address, heartbeat=0.2) as client:
            client.start_episode("e")
            client.log_action("e", seen(1), 1)
            client._link._heartbeats.stop()  # as if the process were stopped
            silent.set()
            forgotten.wait(PATIENCE)
            with pytest.raises((PeerLostError, EpisodeLostError)):
                client.log_returns("e", 1.0)
            with pytest.raises(EpisodeLostError, match="Episode e"):
                client.get_action("e", seen(1))
            client.start_episode("e2")
            assert client.get_action("e2", seen(5)) == 5

    silent, forgotten = threading.Event(), threading.Event()
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=QUICK) as bridge:
        address = bridge.address
        runner = Runner(bridge)
        with in_thread(play) as sim:
            runner.serve(lambda: silent.is_set() and runner.faults)
            forgotten.set()
            runner.serve(sim.over)


def test_a_client_waits_for_a_bridge_that_is_not_there_yet() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    def play() -> None:
        with ExternalEnvClient(address) as client:
            client.start_episode("e")
            assert client.get_action("e", seen(4)) == 4

    with in_thread(play) as sim:
        pass_time(0.3)  # it has tried in vain
        with ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as bridge:
            Runner(bridge).serve(sim.over)


def test_a_bridge_that_never_comes_is_a_clear_error() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(
        RequestTimeoutError, match=rf"no bridge was joined at {address} within 0.3 s"
    ):
        ExternalEnvClient(address, timeouts=ClientTimeouts(connect=0.3))


@pytest.mark.slow
def test_after_a_restart_of_the_bridge_clients_come_back_by_themselves() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    def play() -> None:
        with ExternalEnvClient(address, timeouts=ClientTimeouts(patience=20.0)) as client:
            client.start_episode("e")
            waits.set()
            with pytest.raises(PeerLostError, match=r"stopped|started again"):
                client.get_action("e", seen(1))
            client.start_episode("e2")
            with pytest.raises(EpisodeLostError, match="Episode e "):
                client.get_action("e", seen(1))
            assert client.get_action("e2", seen(6)) == 6

    waits = threading.Event()
    with in_thread(play) as sim:
        with ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as bridge:
            Runner(bridge).serve(lambda: bridge.statistics().waiting_now, act=False)
        with ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as bridge:
            Runner(bridge).serve(sim.over)


@pytest.mark.slow
def test_a_request_under_way_fails_when_the_bridge_stays_away() -> None:
    def play() -> None:
        with ExternalEnvClient(address, timeouts=ClientTimeouts(patience=1.0)) as client:
            client.start_episode("e")
            with pytest.raises(PeerLostError):
                client.get_action("e", seen(1))
            with pytest.raises(PeerLostError, match="out of reach"):
                client.start_episode("e2")

    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        in_thread(play),
        ExternalEnvBridge(OBSERVATION, ACTION, bind=address) as bridge,
    ):
        Runner(bridge).serve(lambda: bridge.statistics().waiting_now, act=False)


def test_a_bridge_that_stops_tells_all_threads_of_a_client_at_once() -> None:
    def play() -> None:
        with ExternalEnvClient(bridge.address) as client:
            for name in "abc":
                client.start_episode(name)

            def wait(name: str) -> None:
                with pytest.raises(PeerLostError, match="stopped"):
                    client.get_action(name, seen(1))

            def talk() -> None:  # nobody takes these any more
                ready.wait(PATIENCE)
                with pytest.raises(PeerLostError, match="stopped"):
                    client.log_returns("c", 1.0)

            def begin() -> None:
                ready.wait(PATIENCE)
                with pytest.raises(PeerLostError, match="stopped"):
                    client.start_episode("d")

            with (
                in_thread(lambda: wait("a")),
                in_thread(lambda: wait("b")),
                in_thread(talk),
                in_thread(begin),
            ):
                pass
            with pytest.raises(PeerLostError, match="stopped"):
                client.get_action("c", seen(1))

    ready = threading.Event()
    bridge = ExternalEnvBridge(OBSERVATION, ACTION)
    with in_thread(play) as sim:
        Runner(bridge).serve(lambda: bridge.statistics().waiting_now == 2, act=False)
        ready.set()
        pass_time(0.2)  # for both to be under way
        bridge.stop()
        sim.thread.join(ClientTimeouts().patience / 2)
        assert sim.over(), "a thread was not told"


def test_closing_a_client_ends_the_waits_of_its_threads(bridge: ExternalEnvBridge) -> None:
    def play() -> None:
        client = ExternalEnvClient(bridge.address)
        for name in "ab":
            client.start_episode(name)

        def wait(name: str) -> None:
            with pytest.raises(ClosedError):
                client.get_action(name, seen(1))

        with in_thread(lambda: wait("a")), in_thread(lambda: wait("b")):
            both.wait(PATIENCE)
            client.close()
        with pytest.raises(ClosedError):
            client.start_episode()

    both = threading.Event()
    with in_thread(play) as sim:
        runner = Runner(bridge)
        runner.serve(lambda: bridge.statistics().waiting_now == 2, act=False)
        both.set()
        runner.serve(sim.over)


def test_a_client_that_is_closed_says_goodbye(
    bridge: ExternalEnvBridge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "envbus.runner.bridge")

    def play() -> None:
        with ExternalEnvClient(bridge.address, name="sim") as client:
            client.start_episode("left")

    runner = Runner(bridge)
    with in_thread(play) as sim:
        runner.serve(lambda: sim.over() and not bridge.statistics().clients_now)
    assert "client sim is gone: it said goodbye" in caplog.messages
    assert bridge.statistics().episodes_now == 1  # for its lease


def test_a_bridge_that_was_stopped_says_so_and_leaves_nothing() -> None:
    bridge = ExternalEnvBridge(OBSERVATION, ACTION)
    folder = Path(bridge.private_endpoint.removeprefix("ipc://")).parent
    assert folder.is_dir()
    bridge.stop()
    bridge.stop()
    assert not folder.exists()
    with pytest.raises(ClosedError):
        bridge.poll(0)
    assert "stopped" in repr(bridge)


def test_a_bridge_binds_wider_than_this_host_only_where_that_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="without a key"):
        ExternalEnvBridge(OBSERVATION, ACTION, bind="tcp://*:*")
    with ExternalEnvBridge(OBSERVATION, ACTION, bind="tcp://*:*", insecure=True):
        pass


# --- other clients --------------------------------------------------------------------------


class Raw:
    """A client in no language in particular, which numbers its requests as it likes."""

    def __init__(self, bridge: ExternalEnvBridge, peer: RawPeer) -> None:
        self.bridge = bridge
        self.peer = peer

    def say(self, number: int, payload: Payload, ttl: float = 10.0) -> None:
        self.peer.send(*frames_of(Kind.REQUEST, payload, number, ttl=ttl, to=BRIDGE))

    def hear(self) -> tuple[int, Any]:
        """Serve the bridge until an answer is there, and return its number and payload."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.bridge.poll(0.0)
            if self.peer.socket.poll(10):
                header_frame, *frames = self.peer.receive()
                header = decode_header(header_frame)
                return header.request_id, decode(Payload.registry[header.payload_type], frames)
        raise AssertionError("no answer came")

    def ask(self, number: int, payload: Payload) -> Any:
        self.say(number, payload)
        came, answer = self.hear()
        assert came == number
        return answer


@pytest.fixture
def raw(bridge: ExternalEnvBridge) -> Iterator[Raw]:
    with RawPeer(bridge.address) as peer:
        made = Raw(bridge, peer)
        peer.send(*hello_frames("raw", heartbeat=60.0))
        assert isinstance(made.hear()[1], Welcome)
        yield made


def test_a_request_that_is_sent_again_is_answered_again_and_recorded_once(
    bridge: ExternalEnvBridge, raw: Raw
) -> None:
    joined = raw.ask(2, JoinBridge(client="raw"))
    assert isinstance(joined, BridgeJoined)
    assert raw.ask(3, StartEpisode(episode_id="e")) == raw.ask(3, StartEpisode(episode_id="e"))
    raw.say(4, GetAction(episode_id="e", observation=[1.0, 0.0]))
    raw.say(4, GetAction(episode_id="e", observation=[1.0, 0.0]))
    runner = Runner(bridge)
    runner.serve(lambda: runner.results)
    raw.say(4, GetAction(episode_id="e", observation=[1.0, 0.0]))
    raw.say(5, StartEpisode(episode_id="f"))
    answers = [raw.hear()]
    while answers[-1][0] == 4:
        answers.append(raw.hear())
    # The second one is not answered if it came before the first one was.
    assert answers[:-1] in ([(4, ActionChosen(action=1))] * n for n in (2, 3))
    assert len(runner.rows("e")) == 1
    other = raw.ask(4, GetAction(episode_id="e", observation=[2.0, 0.0]))
    assert other.remote_type == "RequestIdUsed"
    assert raw.ask(4, LogReturns(episode_id="e", reward=1)).remote_type == "RequestIdUsed"


@pytest.mark.slow
def test_who_gave_up_while_the_runner_was_away_gets_no_action(
    bridge: ExternalEnvBridge, raw: Raw
) -> None:
    """However many they are: what each says next is behind what all of them asked for."""
    raw.ask(2, JoinBridge(client="raw"))
    episodes = [f"e{number}" for number in range(100)]
    for number, episode in enumerate(episodes, 1000):
        raw.ask(number, StartEpisode(episode_id=episode))
    for number, episode in enumerate(episodes, 2000):
        raw.say(number, GetAction(episode_id=episode, observation=[1.0, 0.0]))
    for number, episode in enumerate(episodes, 3000):
        raw.say(number, LogReturns(episode_id=episode, reward=1.0))
    pass_time(2.0)  # all that was said is there by then, on a busy machine too
    seen = bridge.poll(0.0)
    bridge.send_actions({episode: {DUMMY_AGENT: 1} for episode in seen.observations})
    assert bridge.statistics().actions == 0
    assert bridge.statistics().superseded == len(episodes)


@pytest.mark.slow_but_first
def test_who_gave_up_long_ago_gets_no_action(bridge: ExternalEnvBridge, raw: Raw) -> None:
    """However many signs of life lie between what was asked and what is said next.

    Of three peers, since ZeroMQ takes in no more than a thousand messages of one.
    """
    raw.ask(2, JoinBridge(client="raw"))
    raw.ask(3, StartEpisode(episode_id="e"))
    with RawPeer(bridge.address, b"2") as second, RawPeer(bridge.address, b"3") as third:
        for name, peer in (("second", second), ("third", third)):
            peer.send(*hello_frames(name, heartbeat=60.0))
            assert isinstance(Raw(bridge, peer).hear()[1], Welcome)
        raw.say(4, GetAction(episode_id="e", observation=[1.0, 0.0]))
        for _ in range(900):
            for peer in (raw.peer, second, third):
                peer.send(*frames_of(Kind.NOTICE, Heartbeat(), 0))
        raw.say(5, LogReturns(episode_id="e", reward=1.0))
        pass_time(2.5)
        seen = bridge.poll(0.0)
    bridge.send_actions({episode: {DUMMY_AGENT: 1} for episode in seen.observations})
    assert bridge.statistics().actions == 0
    assert bridge.statistics().superseded == 1


def test_its_descriptor_need_not_tell_of_what_came_before(
    bridge: ExternalEnvBridge, raw: Raw
) -> None:
    """However many messages came at one go: `poll` takes those that bring nothing, too."""
    raw.ask(2, JoinBridge(client="raw"))
    raw.ask(3, StartEpisode(episode_id="e"))
    raw.say(4, LogAction(episode_id="e", observation=[1.0, 0.0], action=0))
    for number in range(1000, 1300):
        raw.say(number, LogReturns(episode_id="e", reward=1.0))
    raw.say(5, GetAction(episode_id="e", observation=[2.0, 0.0]))
    poller = select.poll()
    poller.register(bridge, select.POLLIN)
    shown: list[BridgeResult] = []
    while len(shown) < 2:
        result = bridge.poll(0.0)
        if result.observations:
            shown.append(result)
        else:
            assert poller.poll(10_000), "nothing tells of what is there"
    assert shown[1].rewards["e"] == {DUMMY_AGENT: 300.0}


@pytest.mark.slow
def test_its_descriptor_tells_of_what_comes_while_others_are_answered() -> None:
    """ZeroMQ uses up what its descriptor has to tell where it sends."""

    async def play(client: AsyncExternalEnvClient) -> None:
        episode = await client.start_episode()
        for _ in range(20):
            await client.get_action(episode, [1.0, 0.0])
            await asyncio.gather(*(client.log_returns(episode, 1.0) for _ in range(100)))
        await client.end_episode(episode, [0.0, 1.0])

    async def play_all(address: str) -> None:
        async with AsyncExternalEnvClient(address, local_links=False) as client:
            await asyncio.gather(*(play(client) for _ in range(8)))

    poller, ended = select.poll(), 0
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        poller.register(bridge, select.POLLIN)
        with in_thread(lambda: asyncio.run(play_all(bridge.address))):
            while ended < 8:
                result = bridge.poll(0.0)
                ended += len(result.ended)
                going_on = result.observations.keys() - set(result.ended)
                bridge.send_actions({episode: {DUMMY_AGENT: 1} for episode in going_on})
                if not result.observations:
                    assert poller.poll(10_000), "nothing tells of what is there"


def test_what_a_client_says_before_it_joins_or_that_nobody_knows_is_refused(
    raw: Raw,
) -> None:
    early = raw.ask(2, StartEpisode())
    assert early.code is FailureCode.NOT_JOINED
    assert "JoinBridge" in early.message
    raw.ask(3, JoinBridge(client="raw"))
    unknown = raw.ask(4, Hello(name="x"))
    assert unknown.code is FailureCode.PROTOCOL
    nonsense = Header(PROTOCOL_VERSION, Kind.REQUEST, 5, "GetAction", 1.0, to=BRIDGE)
    raw.peer.send(encode_header(nonsense), b"\xc1")
    assert raw.hear()[1].code is FailureCode.PROTOCOL
    raw.say(6, GetAction(episode_id="e", observation=[0, 0]), ttl=0.0)
    assert "ttl" in raw.hear()[1].message


def test_an_end_that_nobody_confirms_is_told_when_its_time_is_over() -> None:
    with (
        ExternalEnvBridge(OBSERVATION, ACTION, confirm_ends=True) as bridge,
        RawPeer(bridge.address) as peer,
    ):
        raw = Raw(bridge, peer)
        peer.send(*hello_frames("raw", heartbeat=60.0))
        assert isinstance(raw.hear()[1], Welcome)
        raw.ask(2, JoinBridge(client="raw"))
        raw.ask(3, StartEpisode(episode_id="e"))
        raw.ask(4, LogAction(episode_id="e", observation=[1, 0], action=1))
        raw.say(5, EndEpisode(episode_id="e", observation=[2, 0]), ttl=0.2)
        number, failed = raw.hear()
        assert (number, failed.code, failed.peer) == (5, FailureCode.TIMEOUT, BRIDGE)
        bridge.confirm(["e"])
        again = raw.ask(6, EndEpisode(episode_id="e", observation=[2, 0]))
        assert again.remote_type == "EpisodeFinished"


def test_a_client_that_joins_again_is_logged_once(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "envbus.runner.bridge")
    for number in (2, 3, 4):
        raw.ask(number, JoinBridge(client="raw"))
    assert [text for text in caplog.messages if "joined" in text] == ["client raw has joined"]


def test_a_plain_client_sees_no_ext_types(raw: Raw) -> None:
    raw.ask(2, JoinBridge(client="raw", plain=True))
    raw.ask(3, StartEpisode(episode_id="e"))
    raw.say(4, GetAction(episode_id="e", observation=[1, 2]))
    runner = Runner(raw.bridge)
    runner.serve(lambda: runner.results)
    _, *frames = raw.peer.receive()
    assert msgpack.unpackb(frames[0]) == {"action": 1, "policy_version": 0}


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (LogReturns(episode_id="e", reward=None), "a reward is a number"),
        (LogReturns(episode_id="e", reward=True), "a reward is a number"),
        (LogReturns(episode_id="e", reward=1.0, info=3), "an info is a map"),
        (LogReturns(episode_id="e", reward=1.0, terminateds={}), "has one agent"),
        (EndEpisode(episode_id="e", observation=[0, 0], truncateds={"x": True}), "has one agent"),
    ],
    ids=repr,
)
def test_values_of_the_wrong_kind_are_refused_by_name(
    raw: Raw, payload: Payload, text: str
) -> None:
    raw.ask(2, JoinBridge(client="raw"))
    raw.ask(3, StartEpisode(episode_id="e"))
    failed = raw.ask(4, payload)
    assert isinstance(failed, Failed)
    assert text in failed.message
    assert "Episode e" in failed.message


def test_the_private_endpoint_is_a_second_door(bridge: ExternalEnvBridge) -> None:
    endpoint = bridge.private_endpoint
    assert endpoint == bridge.private_endpoint
    assert endpoint not in bridge.endpoints

    def play() -> None:
        with ExternalEnvClient(endpoint) as client:
            client.start_episode("e")
            assert client.get_action("e", seen(4)) == 4

    with in_thread(play) as sim:
        Runner(bridge).serve(sim.over)


def test_a_bridge_that_is_dropped_keeps_no_garbage_collection_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    ExternalEnvBridge(OBSERVATION, ACTION, bind=f"ipc://{tmp_path}/bridge", local_links=False)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# --- forked copies --------------------------------------------------------------------------


def test_a_forked_copy_of_a_bridge_refuses_and_harms_nobody() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        refused_in_a_fork(
            ClosedError,
            lambda: bridge.poll(0.0),
            bridge.fileno,
            lambda: bridge.send_actions({}),
            bridge.drain,
            lambda: bridge.private_endpoint,  # libzmq would try to bind it for ever
        )

        def simulate() -> None:
            with ExternalEnvClient(bridge.address) as client:
                client.end_episode(client.start_episode(), seen(1))

        with in_thread(simulate) as simulator:
            Runner(bridge).serve(simulator.over)


@pytest.mark.slow
def test_a_forked_copy_of_a_client_that_chooses_refuses_and_harms_nobody() -> None:
    with ExternalEnvBridge(OBSERVATION, ACTION) as bridge:
        weights = MlpPolicy(OBSERVATION, ACTION).get_weights()
        bridge.publish("default_policy", weights=weights, version=1)
        runner = Runner(bridge)

        def simulate() -> None:
            with ExternalEnvClient(
                bridge.address, inference="client", policy=policy_from_weights
            ) as client:
                episode = client.start_episode()
                client.get_action(episode, seen(3))
                refused_in_a_fork(
                    ClosedError,
                    lambda: client.get_action(episode, seen(4)),
                    lambda: client.log_returns(episode, 1.0),
                    lambda: client.end_episode(episode, seen(5)),
                )
                client.get_action(episode, seen(6))
                client.end_episode(episode, seen(7))

        with in_thread(simulate) as simulator:
            runner.serve(simulator.over)
