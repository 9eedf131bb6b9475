from __future__ import annotations

import itertools

import pytest
from gymnasium import spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.protocol import (
    ActionChosen,
    BridgeJoined,
    EpisodeEnded,
    EpisodeStarted,
    Logged,
)
from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Header, Payload, Welcome
from envbus.runner.conformance.address import Address
from envbus.runner.conformance.conformance import Finding, check_server
from envbus.runner.conformance.doctor import Means
from tests.runner.conformance import serving

BOX, CHOICE = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)


def findings(place: str, timeout: float = 5.0, only: str = "") -> dict[str, Finding]:
    found = check_server(Address.parse(place), Means(), timeout, only)
    return {finding.name: finding for finding in found}


@pytest.mark.parametrize("transport", ["tcp", "stream", "ws"])
def test_our_own_bridge_passes_every_check_over_every_transport(transport: str) -> None:
    with serving.bridge() as bridge:
        if transport == "tcp":
            found = findings(bridge.address)
        else:
            addresses = {"tcp": ("127.0.0.1:0",), "websocket": ("127.0.0.1:0",)}
            with serving.gateway(bridge, **addresses) as gateway:
                port = (gateway.tcp if transport == "stream" else gateway.websocket)[0]
                found = findings(f"{transport}://{port}")
    assert [one for one in found.values() if one.outcome != "passed"] == []
    assert len(found) >= 24


def test_a_bridge_with_several_agents_passes_every_check() -> None:
    agents = ("left", "right")
    with serving.bridge(dict.fromkeys(agents, BOX), dict.fromkeys(agents, CHOICE)) as bridge:
        found = findings(bridge.address)
    assert [one for one in found.values() if one.outcome != "passed"] == []


def agreeable(action: object = 0) -> serving.Answer:
    """A server that says yes to all that it is asked."""
    observation_space, action_space = Agreement(BOX, CHOICE).wire
    numbers = itertools.count()

    def answer(header: Header, payload: Payload | None) -> Payload:
        match type(payload).__name__:
            case "Hello":
                return Welcome(lease=10.0, max_message_bytes=1 << 20)
            case "JoinBridge":
                return BridgeJoined(
                    observation_space=observation_space,
                    action_space=action_space,
                    multi_agent=False,
                    policy_ids=["default_policy"],
                    lease=5.0,
                    session="s",
                    inference=["server"],
                    episodes=[],
                )
            case "StartEpisode":
                return EpisodeStarted(episode_id=f"e{next(numbers)}")
            case "GetAction":
                return ActionChosen(action=action)
            case "EndEpisode":
                return EpisodeEnded()
        return Logged()

    return answer


def test_a_server_that_says_yes_to_all_fails_by_name() -> None:
    with serving.liar(agreeable()) as place:
        found = findings(place, timeout=1.0)
    wrong = {
        "hello comes first": "expected a FAILURE, got BridgeJoined",
        "another version is named": "not answered",
        "other spaces are refused": "expected a FAILURE, got BridgeJoined",
        "an id may be chosen and is used once": "was started as 'e",
        "unknown episodes are named": "expected a FAILURE, got int",
        "finished episodes take no call": "expected a FAILURE, got int",
        "clients do not touch each other": "expected a FAILURE, got ActionChosen",
        "observations outside the space are refused": "expected a FAILURE",
        "actions outside the space are refused": "expected a FAILURE, got Logged",
        "who is cut off resumes": "the bridge tells of []",
        "an unknown session cannot be resumed": "expected a FAILURE, got BridgeJoined",
    }
    for name, reason in wrong.items():
        assert found[name].outcome == "failed", name
        assert reason in found[name].reason
    assert found["ids of episodes are unique"].outcome == "passed"


@pytest.mark.parametrize(
    ("action", "check", "reason"),
    [
        (7, "actions are inside the space", "outside the declared space"),
        (b"0", "plain clients get plain actions", "holds a bytes"),
    ],
)
def test_wrong_actions_are_found(action: object, check: str, reason: str) -> None:
    with serving.liar(agreeable(action)) as place:
        finding = findings(place, only=check)[check]
    assert (finding.outcome, reason in finding.reason) == ("failed", True)


def test_two_answers_to_one_request_are_found() -> None:
    actions = itertools.cycle([0, 1])
    yes = agreeable()

    def answer(header: Header, payload: Payload | None) -> Payload | None:
        if type(payload).__name__ == "GetAction":
            return ActionChosen(action=next(actions))
        return yes(header, payload)

    with serving.liar(answer) as place:
        (finding,) = findings(place, only="sent again").values()
    assert "answered by two actions" in finding.reason


def test_a_server_that_does_not_answer_is_given_up_after_the_timeout() -> None:
    yes = agreeable()

    def answer(header: Header, payload: Payload | None) -> Payload | None:
        return None if type(payload).__name__ == "StartEpisode" else yes(header, payload)

    with serving.liar(answer) as place:
        (finding,) = findings(place, timeout=1.0, only="ids of episodes").values()
    assert "StartEpisode was not answered" in finding.reason


def test_checks_are_chosen_by_name_and_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no check is called 'nonsense'.*hello comes first"):
        findings("127.0.0.1:1", only="nonsense")
    with pytest.raises(ConfigError, match="envbus doctor"):
        findings("tcp://127.0.0.1:1", timeout=0.2)
