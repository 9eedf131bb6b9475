from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import (
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
)
from envbus.actors.external.local_episodes import Choose, LocalEpisodes, SendRequest, Wait, Work
from envbus.actors.external.local_policy import LocalSettings
from envbus.actors.external.protocol import (
    BridgeJoined,
    EndEpisode,
    EpisodeStarted,
    FragmentLogged,
    GetAction,
    GetModel,
    LogAction,
    LogFragment,
    LogReturns,
    Model,
    StartEpisode,
)
from envbus.actors.external.verbs import ClientState, EpisodeRequest
from envbus.bus.errors import (
    ClosedError,
    ConfigError,
    OverloadedError,
    PeerLostError,
    RequestTimeoutError,
)

BOX, MANY = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(100)
OBSERVATION = np.zeros(1, np.float32)
END = EndEpisode(episode_id="e", observation=[0.0], truncated=False)
GONE = PeerLostError("out of reach", request_id=1, peer="bridge")


class Constant:
    """Acts by its weight, which must not be negative."""

    def set_weights(self, weights: Any, version: int) -> None:
        if weights["w"] < 0:
            raise ValueError("negative")
        self.weight = weights["w"]

    def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
        return SimpleNamespace(actions=np.array([self.weight]), states=None, extras={})


class Job:
    """Work, and what it wants now."""

    def __init__(self, work: Work[Any]) -> None:
        self._work = work
        self.error: Exception | None = None
        self.wants: SendRequest | Choose | Wait | None = None
        self.returned: Any = None
        self.resume(lambda: work.send(None))

    def resume(self, step: Any) -> None:
        try:
            self.wants = step()
        except StopIteration as stop:
            self.wants, self.returned = None, stop.value
        except Exception as exc:
            self.wants, self.error = None, exc

    def go_on(self, outcome: Any = None) -> None:
        self.resume(lambda: self._work.send(outcome))

    def fail(self, error: Exception) -> None:
        self.resume(lambda: self._work.throw(error))

    @property
    def asks(self) -> Any:
        assert isinstance(self.wants, SendRequest), self.wants
        return self.wants.payload

    @property
    def waits(self) -> float:
        assert isinstance(self.wants, Wait), self.wants
        return self.wants.seconds


class Client:
    """Episodes whose first weights, of version 3, have come; "e" has begun."""

    def __init__(self, length: int = 2, space: spaces.Box = BOX) -> None:
        self.now = 0.0
        self.space = space
        self.changes = 0
        self.state = ClientState(None, None, "sim")
        self.join("e")
        settings = LocalSettings(fragment_length=length, max_unsent=100)
        self.episodes = LocalEpisodes(self.state, Constant(), settings, 10.0, 5.0, lambda: self.now)
        self.episodes.changed = self.change
        self.starting = Job(self.episodes.start())
        self.starting.go_on(model(3, 7))
        self.begin("e")

    def change(self) -> None:
        self.changes += 1

    def join(self, *episodes: str) -> None:
        observation_space, action_space = Agreement(self.space, MANY).wire
        joined = BridgeJoined(
            observation_space=observation_space,
            action_space=action_space,
            multi_agent=False,
            policy_ids=["p"],
            lease=1.0,
            session="s",
            inference=["client"],
            episodes=list(episodes),
        )
        self.state.on_joined(joined)

    def begin(self, episode_id: str) -> None:
        start = Job(self.episodes.perform(StartEpisode(episode_id=episode_id), 5.0))
        assert start.asks.episode_id == episode_id
        start.go_on(episode_id)

    def act(self, episode_id: str = "e") -> int:
        request = GetAction(episode_id=episode_id, observation=OBSERVATION)
        verb = Job(self.episodes.perform(self.state.prepared(request), 5.0))
        if verb.error is not None:
            raise verb.error
        assert isinstance(verb.wants, Choose)
        verb.go_on(self.episodes.choose(verb.wants))
        return int(verb.returned)

    def perform(self, request: EpisodeRequest) -> None:
        verb = Job(self.episodes.perform(request, 5.0))
        assert (verb.wants, verb.error) == (None, None)

    def run(self) -> Job:
        return Job(self.episodes.run())

    def end(self, timeout: float = 5.0) -> Job:
        return Job(self.episodes.perform(END, timeout))


def model(version: int, weight: int) -> Model:
    return Model(policy_id="p", version=version, weights={"w": weight})


def test_the_first_weights_choose() -> None:
    client = Client()
    assert client.starting.wants is None
    assert client.starting.error is None
    assert (client.act(), client.episodes.policy_version) == (7, 3)


@pytest.mark.parametrize(
    "error",
    [RequestTimeoutError("late", request_id=1, peer="bridge"), GONE, KeyboardInterrupt()],
    ids=["late", "lost", "Ctrl-C"],
)
def test_an_episode_whose_start_was_not_answered_goes_on_if_it_has_begun(
    error: BaseException,
) -> None:
    client = Client()
    work = client.episodes.perform(StartEpisode(episode_id="new"), 5.0)
    next(work)
    with pytest.raises(type(error)):
        work.throw(error)
    again = Job(client.episodes.perform(StartEpisode(episode_id="new"), 5.0))
    again.fail(EpisodeAlreadyStartedError("Episode new is already started."))
    assert isinstance(again.error, EpisodeAlreadyStartedError)
    assert client.act("new") == 7


def test_an_episode_whose_start_was_refused_is_not_there() -> None:
    client = Client()
    for error in (OverloadedError("full", request_id=1, peer="bridge"), RefusedError("no")):
        Job(client.episodes.perform(StartEpisode(episode_id="new"), 5.0)).fail(error)
        with pytest.raises(EpisodeNotFoundError):
            client.act("new")


def test_a_simulator_may_write_in_its_arrays_while_steps_wait() -> None:
    client = Client(length=1, space=spaces.Box(-1.0, 1.0, (100,)))
    seen, told = np.zeros(100, np.float32), {"picture": np.zeros(100)}
    client.perform(LogAction(episode_id="e", observation=seen, action=1))
    client.perform(LogReturns(episode_id="e", reward=0.0, info=told))
    client.perform(LogAction(episode_id="e", observation=seen, action=1))
    seen[:] = told["picture"][:] = 1.0
    run = client.run()
    (first,) = run.asks.steps
    run.go_on(FragmentLogged())
    (second,) = run.asks.steps
    assert not any(array.any() for array in (first.observation, second.info["picture"]))


def test_a_bridge_without_models_refuses_the_client() -> None:
    client = Client()
    starting = Job(client.episodes.start())
    assert starting.asks == GetModel(policy_id="p", have_version=3)
    starting.fail(RefusedError("no models"))
    assert isinstance(starting.error, ConfigError)
    assert "no models; the bridge's owner publishes" in str(starting.error)


def test_a_fragment_is_sent_when_it_is_long_enough_and_counts_when_it_is_confirmed() -> None:
    client = Client(length=2)
    run = client.run()
    assert run.waits == 10.0
    client.act()
    run.go_on()
    assert run.waits == 10.0
    client.act()
    run.go_on()
    assert isinstance(run.asks, LogFragment)
    assert client.episodes.num_unsent == len(run.asks.steps) == 2
    run.go_on(FragmentLogged())
    assert client.episodes.num_unsent == 0
    assert run.waits == 10.0


def test_an_end_is_told_when_all_steps_have_arrived() -> None:
    client = Client(length=2)
    for _ in range(3):
        client.act()
    run, end = client.run(), client.end()
    for steps in (2, 1):
        end.go_on()
        assert end.waits == 1.0
        assert len(run.asks.steps) == steps
        run.go_on(FragmentLogged())
    client.now = 2.0
    end.go_on()
    assert end.wants == SendRequest(END, 3.0)
    end.go_on()
    assert (end.wants, end.error) == (None, None)
    with pytest.raises(EpisodeNotFoundError):
        client.act()


def test_an_end_that_comes_too_late_may_be_told_again() -> None:
    client = Client()
    client.act()
    end = client.end(timeout=0.5)
    assert end.waits == 0.5
    client.now = 0.5
    end.go_on()
    assert isinstance(end.error, RequestTimeoutError)
    assert "1 steps wait to be sent" in str(end.error)
    assert client.end().waits == 1.0


def test_who_waits_for_steps_that_the_bridge_has_no_room_for_is_told_what_it_says() -> None:
    client = Client()
    client.act()
    end, run = client.end(timeout=0.5), client.run()
    run.fail(OverloadedError("the limit is 4 bytes", request_id=1, peer="bridge"))
    client.now = 0.5
    end.go_on()
    assert "the limit is 4 bytes" in str(end.error)
    run.go_on()
    run.go_on(FragmentLogged())
    assert client.episodes.num_unsent == 0
    client.act()
    again = client.end(timeout=0.5)
    client.now = 1.0
    again.go_on()
    assert "the limit is 4 bytes" not in str(again.error)


def test_steps_for_which_memory_ran_out_are_sent_when_there_is_some() -> None:
    client = Client()
    client.act()
    end, run = client.end(timeout=0.5), client.run()
    fragment = run.asks
    run.fail(MemoryError())
    client.now = 0.5
    end.go_on()
    assert "MemoryError" in str(end.error)
    run.go_on()
    assert run.asks == fragment


def test_an_end_whose_answer_was_lost_is_no_error_the_second_time() -> None:
    client = Client()
    client.end().fail(GONE)
    again = client.end()
    again.fail(EpisodeFinishedError("over"))
    assert (again.wants, again.error) == (None, None)
    other = Client().end()
    other.fail(EpisodeFinishedError("over"))
    assert isinstance(other.error, EpisodeFinishedError)


def test_what_a_lost_bridge_did_not_get_is_sent_again_and_who_ends_is_told() -> None:
    client = Client(length=1)
    client.act()
    run, end = client.run(), client.end()
    sent = run.asks
    run.fail(GONE)
    assert 0.0 < run.waits < 1.0
    end.go_on()
    assert end.error is GONE
    run.go_on()  # something else has changed: it is too early
    assert run.waits > 0.0
    client.now = 1.0
    run.go_on()
    assert run.asks == sent
    run.go_on(FragmentLogged())
    assert client.end().asks == END


def test_who_ends_an_episode_is_not_told_of_a_bridge_that_was_away_before() -> None:
    client = Client()
    run = client.run()
    client.now = 10.0
    run.go_on()
    assert isinstance(run.asks, GetModel)
    run.fail(GONE)
    client.act()
    end = client.end()
    assert (end.error, end.waits) == (None, 1.0)
    run.go_on()
    client.now = 11.0
    run.go_on()
    run.go_on(FragmentLogged())
    end.go_on()
    assert end.asks == END


def test_what_the_bridge_refuses_is_given_up_and_the_others_go_on() -> None:
    client = Client(length=1)
    client.begin("f")
    client.act("e")
    client.act("f")
    run = client.run()
    assert run.asks.episode_id == "e"
    run.fail(EpisodeError("no"))
    assert run.asks.episode_id == "f"
    with pytest.raises(EpisodeError, match="no"):
        client.act("e")
    assert isinstance(client.end().error, EpisodeError)
    with pytest.raises(EpisodeNotFoundError):
        client.act("e")
    assert client.act("f") == 7


def test_nothing_is_sent_of_an_episode_that_the_bridge_has_lost() -> None:
    client = Client(length=1)
    client.act()
    client.join()
    assert client.run().waits == 10.0
    with pytest.raises(EpisodeLostError):
        client.act()


def test_steps_of_episodes_that_are_lost_and_never_ended_take_no_room() -> None:
    client = Client(length=64)
    for number in range(30):
        lost = f"lost-{number}"
        client.join("e", lost)
        client.begin(lost)
        for _ in range(20):
            client.act(lost)
        client.join("e")
    assert client.act("e") == 7
    assert client.episodes.num_unsent == 1


def test_an_id_that_is_lost_may_be_begun_again_at_a_bridge_that_does_not_know_it() -> None:
    client = Client()
    client.act()
    client.join()
    with pytest.raises(EpisodeLostError):
        client.act()
    start = StartEpisode(episode_id="e")
    client.state.result(start, EpisodeStarted(episode_id="e"), 1)
    client.begin("e")
    assert client.act() == 7
    assert client.episodes.num_unsent == 1


def test_a_newer_model_is_pulled_in_time_and_chooses_from_the_next_step_on() -> None:
    client = Client()
    run = client.run()
    client.now = 10.0
    run.go_on()
    assert run.asks == GetModel(policy_id="p", have_version=3)
    run.go_on(model(4, 8))
    assert run.waits == 10.0
    assert client.episodes.policy_version == 3
    assert (client.act(), client.episodes.policy_version) == (8, 4)
    client.now = 20.0
    run.go_on()
    assert run.asks.have_version == 4
    run.go_on(Model(policy_id="p", version=4))
    assert client.act() == 8


def test_a_model_that_cannot_be_taken_over_changes_nothing() -> None:
    client = Client()
    run = client.run()
    client.now = 10.0
    run.go_on()
    run.go_on(model(4, -1))
    assert (client.act(), client.episodes.policy_version) == (7, 3)


def test_steps_that_were_too_old_are_counted_and_a_newer_model_is_pulled_at_once() -> None:
    client = Client(length=1)
    client.act()
    run = client.run()
    run.go_on(FragmentLogged(dropped=1))
    assert client.episodes.num_dropped == 1
    assert isinstance(run.asks, GetModel)


def test_who_waits_is_told_of_each_change() -> None:
    client = Client(length=1)
    client.act()
    assert client.changes == 1
    client.run().go_on(FragmentLogged())
    assert client.changes == 2


def test_a_stop_ends_all_work() -> None:
    client = Client()
    client.act()
    run, end = client.run(), client.end()
    client.episodes.stop()
    run.go_on()
    end.go_on()
    assert (run.wants, run.error) == (None, None)
    assert isinstance(end.error, ClosedError)


def test_a_connection_that_was_closed_is_the_end() -> None:
    client = Client(length=1)
    client.act()
    run = client.run()
    run.fail(ClosedError("closed"))
    assert (run.wants, run.error) == (None, None)
    assert client.episodes.stopped


def test_a_policy_that_asks_its_own_client_is_told_so() -> None:
    class Asking(Constant):
        def compute_actions(self, observations: Any, states: Any, *, explore: bool) -> Any:
            with pytest.raises(EpisodeBusyError, match="the policy asks its own client"):
                client.act()
            return super().compute_actions(observations, states, explore=explore)

    client = Client()
    client.episodes = LocalEpisodes(client.state, Asking(), None, 10.0, 5.0, lambda: 0.0)
    Job(client.episodes.start()).go_on(model(3, 7))
    client.begin("e")
    assert [client.act(), client.act()] == [7, 7]
