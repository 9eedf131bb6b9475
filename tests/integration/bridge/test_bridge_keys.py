"""Python clients of a bridge that has CURVE keys, at an address wider than this host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from envbus.actors import AsyncExternalEnvClient, ClientTimeouts, ExternalEnv, ExternalEnvClient
from envbus.actors.external.protocol import GetAction, StartEpisode
from envbus.bus.errors import RequestTimeoutError
from envbus.bus.gateway import GatewayConfig
from envbus.bus.transport.curve_keys import new_keys
from envbus.runner import ExternalEnvBridge
from envbus.runner.bridge import EpisodeLimits
from envbus.runner.bridge.hosting import Where
from tests.integration.bridge.test_gateway_hangs import joined
from tests.integration.simulators import ACTION, OBSERVATION, Runner, in_thread, seen

pytestmark = pytest.mark.timeout(60)


class Keys:
    """Of a bridge, and of one who may join it."""

    def __init__(self, folder: Path) -> None:
        self.allow = folder / "clients"
        _, self.friend = new_keys(self.allow, "friend")
        _, self.stranger = new_keys(folder, "stranger")
        self.public, self.secret = new_keys(folder, "server")


def play(client: ExternalEnvClient) -> None:
    client.start_episode("blocking")
    assert client.get_action("blocking", seen(7)) == 7
    client.end_episode("blocking", seen(9))


async def play_tasks(client: AsyncExternalEnvClient) -> None:
    await client.start_episode("asyncio")
    assert await client.get_action("asyncio", seen(7)) == 7
    await client.end_episode("asyncio", seen(9))


def test_both_python_clients_join_with_keys_and_without_them_nobody_does(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with ExternalEnvBridge(
        OBSERVATION, ACTION, bind="tcp://*:*", keys=keys.secret, allow=keys.allow
    ) as bridge:
        address = f"tcp://127.0.0.1:{bridge.address.rpartition(':')[2]}"

        def simulate() -> None:
            with ExternalEnvClient(address, keys=keys.friend, server_key=keys.public) as client:
                play(client)
            asyncio.run(in_tasks())
            soon = ClientTimeouts(connect=0.5)
            refused: list[dict[str, Any]]
            refused = [{}, {"keys": keys.stranger, "server_key": keys.public}]
            for own in refused:
                with pytest.raises(RequestTimeoutError):
                    ExternalEnvClient(address, timeouts=soon, **own)

        async def in_tasks() -> None:
            async with AsyncExternalEnvClient(
                address, keys=keys.friend, server_key=keys.public
            ) as client:
                await play_tasks(client)

        runner = Runner(bridge)
        with in_thread(simulate) as sim:
            runner.serve(sim.over)
        runner.serve(lambda: len(runner.ended) == 2)
        assert runner.ended == ["blocking", "asyncio"]


def test_the_gateway_of_a_bridge_with_keys_comes_in_without_them(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    config = GatewayConfig(tcp=("127.0.0.1:0",))
    with ExternalEnvBridge(
        OBSERVATION, ACTION, keys=keys.secret, allow=keys.allow, gateway=config
    ) as bridge:

        def simulate() -> None:
            talk, _ = joined(bridge.addresses[-1], "sim")
            talk.ask(StartEpisode(episode_id="e"))
            assert talk.ask(GetAction(episode_id="e", observation=[7, 0])).action == 7
            talk.close()

        with in_thread(simulate) as sim:
            Runner(bridge).serve(sim.over)


class Hosted(ExternalEnv):
    """Says where it has come in."""

    def __init__(self) -> None:
        super().__init__(ACTION, OBSERVATION)

    def run(self) -> None:
        episode = self.start_episode(self.client.address)
        while True:
            self.get_action(episode, seen(1))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("where", ["thread", "process"])
def test_simulators_that_a_bridge_with_keys_runs_come_in_by_tcp(
    where: Where, tmp_path: Path
) -> None:
    keys = Keys(tmp_path)
    with ExternalEnvBridge(
        OBSERVATION, ACTION, bind="tcp://*:*", keys=keys.secret, allow=keys.allow
    ) as bridge:
        bridge.host(Hosted, where=where)
        came_in = f"tcp://127.0.0.1:{bridge.address.rpartition(':')[2]}"
        runner = Runner(bridge)
        runner.serve(lambda: runner.rows(came_in))


@pytest.mark.slow
def test_one_key_has_its_part_of_the_sessions_and_is_told_so(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    _, other = new_keys(keys.allow, "other")
    limits = EpisodeLimits(max_key_sessions=1)
    with ExternalEnvBridge(
        OBSERVATION, ACTION, limits=limits, keys=keys.secret, allow=keys.allow
    ) as bridge:

        def simulate() -> None:
            def join(secret: Path, patience: float = 30.0) -> ExternalEnvClient:
                timeouts = ClientTimeouts(connect=patience)
                return ExternalEnvClient(
                    bridge.address, keys=secret, server_key=keys.public, timeouts=timeouts
                )

            with join(keys.friend) as first:
                with pytest.raises(RequestTimeoutError, match=r"EpisodeLimits\.max_key_sessions=1"):
                    join(keys.friend, patience=5.0)
                with join(other) as second:
                    second.start_episode("other")
                play(first)

        with in_thread(simulate) as sim:
            Runner(bridge).serve(sim.over)
