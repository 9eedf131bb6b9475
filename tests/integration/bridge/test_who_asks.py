"""What the owner of a bridge hears of those who ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbus.actors import ExternalEnvClient
from envbus.actors.external.protocol import JoinBridge, StartEpisode
from envbus.bus.gateway import GatewayConfig
from envbus.bus.transport.curve_keys import load_public_key
from envbus.bus.wire.messages import Kind, Token
from envbus.runner import ExternalEnvBridge
from envbus.runner.bridge import EpisodeLimits
from envbus.runner.bridge.vocabulary import RequestNote
from tests.bus.gateway.bus import TcpClient, hello, message
from tests.integration.bridge.test_bridge_keys import Keys
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen

pytestmark = pytest.mark.timeout(60)


def test_tokens_and_keys_say_who_asks_and_nobody_can_call_itself_so(tmp_path: Path) -> None:
    keys, notes = Keys(tmp_path), list[RequestNote]()
    gateway = GatewayConfig(tcp=("127.0.0.1:0",), token={"alice": "secret"})
    own = {"keys": keys.secret, "allow": keys.allow, "gateway": gateway}
    with ExternalEnvBridge(OBSERVATION, ACTION, **own) as bridge:
        bridge.watch_requests(notes.append)
        assert bridge.gateway is not None
        runner, public = Runner(bridge), load_public_key(keys.allow / "friend.key").decode()

        def play() -> None:
            places = {"keys": keys.friend, "server_key": keys.public}
            with ExternalEnvClient(bridge.address, name="alice", **places) as client:
                client.start_episode("of friend")
                client.get_action("of friend", seen(1))

        with in_thread(play) as playing:
            runner.serve(playing.over)
        with TcpClient(bridge.gateway.tcp[0]) as client:
            client.send(message(Token(token="secret"), Kind.NOTICE), hello("sim"))
            client.send(message(JoinBridge(client="sim"), to="bridge"))
            client.send(message(StartEpisode(episode_id="of alice"), to="bridge"))
            runner.serve(lambda: len(notes) > 4)
            told = {(note.client, note.verb, note.episode_id) for note in notes}
            assert {(one.name, one.user, verb, i) for one, verb, i in told} == {
                ("alice", public, "JoinBridge", ""),
                ("alice", public, "StartEpisode", "of friend"),
                ("alice", public, "GetAction", "of friend"),
                ("sim", "alice", "JoinBridge", ""),
                ("sim", "alice", "StartEpisode", "of alice"),
            }
            place = "{}:{}".format(*client.socket.getsockname())
            assert {one.address for one, _, _ in told} == {"", place}
            holder = bridge.client_of("of alice")
            assert holder is not None
            assert holder.address == place
        assert bridge.client_of("nobody's") is None


def test_what_is_refused_is_told_with_the_kind_of_refusal_and_nothing_of_it() -> None:
    notes: list[RequestNote] = []
    with ExternalEnvBridge(OBSERVATION, ACTION, limits=EpisodeLimits(max_rate=0.001)) as bridge:
        bridge.watch_requests(notes.append)

        def play() -> None:
            with ExternalEnvClient(bridge.address) as client:
                client.start_episode("e")
                client.get_action("e", seen(1))
                for observation, why in ((seen(2), "ask again in"), ("nonsense", "observation")):
                    with pytest.raises(Exception, match=why):
                        client.get_action("e", observation)

        runner = Runner(bridge)
        with in_thread(play) as playing:
            runner.serve(playing.over)
    assert [note.error for note in notes] == ["", "", "", "overloaded", "SpaceMismatch"]
