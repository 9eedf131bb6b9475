"""A client written from docs/wire-protocol.md alone: `socket` and `msgpack`, nothing of envbus."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.gateway import GatewayConfig
from envbus.runner import ExternalEnvBridge

#: Seconds; never expected to pass.
PATIENCE = 30.0
REQUEST, REPLY, FAILURE, NOTICE = range(4)
OBSERVATION = spaces.Dict(
    box=spaces.Box(-1.0, 1.0, (2,)),
    picture=spaces.Box(0, 255, (4, 3), np.uint8),
    digits=spaces.MultiDiscrete([3, 300]),
    flags=spaces.MultiBinary(3),
    pair=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Text(8)]),
    either=spaces.OneOf([spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))]),
    many=spaces.Sequence(spaces.Discrete(5)),
)
ACTION = spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([4, 4])])
SEEN = {
    "box": [0.5, -1],
    "picture": bytes(range(12)),
    "digits": [2, 299],
    "flags": [1, 0, 1],
    "pair": [-1, "text"],
    "either": [1, [0.25]],
    "many": [4, 0],
}


class PlainClient:
    """Sections 2 to 5, 10 and 11 of the document."""

    def __init__(self, address: str, token: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), PATIENCE)
        self._last_id = 0
        self._answers: dict[int, tuple[str, dict[str, Any]]] = {}
        self.limit = 2**32
        self._send([1, NOTICE, 0, "Token"], {"token": token})

    def begin(self, payload_type: str, to: str = "bridge", /, **fields: Any) -> int:
        """Send a request and return its id."""
        self._last_id += 1
        self._send([1, REQUEST, self._last_id, payload_type, PATIENCE, 0, to], fields)
        return self._last_id

    def end(self, request_id: int) -> tuple[str, dict[str, Any]]:
        """Return type and payload of an answer, in whatever order they come."""
        while request_id not in self._answers:
            (size,) = struct.unpack(">I", self._read(4))
            header, payload = map(msgpack.unpackb, msgpack.unpackb(self._read(size)))
            version, kind, answered, payload_type = header[:4]
            assert (version, kind in (REPLY, FAILURE)) == (1, True)
            self._answers[answered] = payload_type, payload
        return self._answers.pop(request_id)

    def ask(self, payload_type: str, to: str = "bridge", /, **fields: Any) -> dict[str, Any]:
        """Return the reply; a failure is a KeyError of its code and type."""
        answer_type, answer = self.end(self.begin(payload_type, to, **fields))
        if answer_type == "Failed":
            raise KeyError(answer["code"], answer["remote_type"], answer["peer"], answer["message"])
        return answer

    def close(self) -> None:
        self._send([1, NOTICE, 0, "Goodbye"], {})
        self._socket.close()

    def _send(self, header: list[Any], payload: dict[str, Any]) -> None:
        message = msgpack.packb([msgpack.packb(header), msgpack.packb(payload)])
        assert len(message) <= self.limit
        self._socket.sendall(struct.pack(">I", len(message)) + message)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            assert chunk, "the connection was closed"
            data += chunk
        return data


def code_of(client: PlainClient, payload_type: str, to: str = "bridge", /, **fields: Any) -> Any:
    with pytest.raises(KeyError) as caught:
        client.ask(payload_type, to, **fields)
    return caught.value.args[:3]


def play(address: str) -> dict[str, Any]:
    """Join, play an episode, do what is refused, and play a second one beside a third."""
    client = PlainClient(address, "secret")
    assert code_of(client, "JoinBridge", client="early") == ("not_joined", "", "")
    welcome = client.ask("Hello", "", name="plain-1", heartbeat=30.0)
    client.limit = welcome["max_message_bytes"]
    joined = client.ask("JoinBridge", client="plain", plain=True)
    assert joined["multi_agent"] is False
    assert dict(joined["observation_space"]["items"])["pair"]["space"] == "Tuple"

    episode = client.ask("StartEpisode")["episode_id"]
    chosen = client.ask("GetAction", episode_id=episode, observation=SEEN)
    client.ask("LogReturns", episode_id=episode, reward=1)
    client.ask("LogAction", episode_id=episode, observation=SEEN, action=[1, [3, 0]])
    client.ask("LogReturns", episode_id=episode, reward=0.5, info={"level": 2})
    wrong = {**SEEN, "picture": bytes(11)}
    mismatch = code_of(client, "GetAction", episode_id=episode, observation=wrong)
    assert mismatch[:2] == ("remote", "SpaceMismatch")
    assert code_of(client, "Dance") == ("protocol", "", "bridge")
    assert code_of(client, "GetModel", policy_id="p")[:2] == ("remote", "Refused")
    client.ask("EndEpisode", episode_id=episode, observation=SEEN, truncated=True)

    # Requests of several episodes may be under way at once, behind each other in one packet.
    others = [client.ask("StartEpisode", episode_id=name)["episode_id"] for name in ("a", "b")]
    asked = [client.begin("GetAction", episode_id=e, observation=SEEN) for e in others]
    assert [client.end(one)[0] for one in reversed(asked)] == ["ActionChosen"] * 2
    for name in others:
        client.ask("EndEpisode", episode_id=name, observation=SEEN)
    client.close()
    return {"episode": episode, "chosen": chosen["action"]}


@pytest.fixture
def bridge() -> Iterator[ExternalEnvBridge]:
    gateway = GatewayConfig(tcp=("127.0.0.1:0",), token="secret")
    with ExternalEnvBridge(OBSERVATION, ACTION, gateway=gateway) as made:
        yield made


def test_a_client_from_the_document_alone_plays_episodes(bridge: ExternalEnvBridge) -> None:
    assert bridge.gateway is not None
    address, done = bridge.gateway.tcp[0], {}
    thread = threading.Thread(target=lambda: done.update(play(address)), daemon=True)
    thread.start()
    came: list[Any] = []
    rewards = 0.0
    ended = set()
    while thread.is_alive():
        result = bridge.poll(0.05)
        came += [by["agent0"] for by in result.observations.values()]
        rewards += sum(sum(by.values()) for by in result.rewards.values())
        ended |= set(result.ended)
        waiting = [e for e in result.observations if e not in result.ended]
        waiting = [e for e in waiting if e not in result.off_policy_actions]
        action = (np.int64(1), np.array([2, 3]))
        bridge.send_actions({episode: {"agent0": action} for episode in waiting})
    assert done.get("chosen") == [1, [2, 3]]
    for observation in came:
        assert observation in OBSERVATION
        assert observation["picture"].tolist()[3] == [9, 10, 11]
        assert observation["pair"] == (-1, "text")
    assert (rewards, ended) == (1.5, {done["episode"], "a", "b"})
