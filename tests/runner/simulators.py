"""Simulators in threads, for tests of what is sampled from a bridge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import EpisodeError
from envbus.actors.external.verbs import ClientTimeouts
from envbus.bus.errors import ClosedError, PeerLostError, RequestTimeoutError
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.vocabulary import EpisodeLimits
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from tests.runner.sampling_scenes import zeros
from tests.waiting import PATIENCE

#: Observations count the steps of an episode.
COUNTS = spaces.Box(0.0, 1000.0, (1,), np.float32)
ACTIONS = spaces.Discrete(100)

Play = Callable[[ExternalEnvClient], None]


def make(policies: Any = zeros, lease: float = 30.0, **config: Any) -> EnvRunner:
    bridge = ExternalEnvBridge(COUNTS, ACTIONS, limits=EpisodeLimits(lease=lease))
    return EnvRunner(bridge, policies, RunnerConfig(**config))


def address(runner: EnvRunner) -> str:
    assert isinstance(runner.envs, ExternalEnvBridge)
    return runner.envs.address


def obs(t: int) -> Any:
    return np.array([t], np.float32)


def play_episode(
    client: ExternalEnvClient,
    length: int = 25,
    *,
    log: Callable[[int], int | None] = lambda t: None,
    truncated: bool = False,
    **start: Any,
) -> list[int]:
    """Play one episode whose rewards count, too; return the actions.

    `log(t)` is the action of step t if the simulator chooses it, else None.
    """
    episode = client.start_episode(**start)
    actions = []
    for t in range(length):
        own = log(t)
        if own is None:
            actions.append(int(client.get_action(episode, obs(t))))
        else:
            client.log_action(episode, obs(t), own)
            actions.append(own)
        client.log_returns(episode, float(t))
    client.end_episode(episode, obs(length), truncated)
    return actions


@contextmanager
def simulators(address: str, *plays: Play, **settings: Any) -> Iterator[list[threading.Thread]]:
    """Have each `play(client)` run in a thread, until it returns or the bridge is stopped.

    The caller stops the bridge in the block, and who raised anything else is told of. `settings`
    are those of the clients.
    """
    errors: list[BaseException] = []

    def run(play: Play) -> None:
        timeouts = ClientTimeouts(connect=PATIENCE, action=PATIENCE, other=PATIENCE, patience=1.0)
        try:
            with ExternalEnvClient(address, timeouts=timeouts, heartbeat=0.2, **settings) as client:
                play(client)
        except (ClosedError, PeerLostError, RequestTimeoutError, EpisodeError):
            pass  # the bridge was stopped
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(play,), daemon=True) for play in plays]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(PATIENCE)
    assert not errors, errors


def for_ever(play: Play) -> Play:
    """Return what plays again and again."""

    def again(client: ExternalEnvClient) -> None:
        while True:
            play(client)

    return again
