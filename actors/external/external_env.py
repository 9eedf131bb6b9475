"""Base classes of simulators that have a loop of their own, to be run by a bridge.

Leaves out where they run: `hosting.py` has the process, `envbus.runner.bridge.hosting` the rest.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from envbus.actors.external.agreement import Agreement, SpaceLike
from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.protocol import StartEpisode
from envbus.actors.external.verbs import EpisodeRequest, SimulatorVerbs
from envbus.actors.spaces.spaces import Space
from envbus.bus.errors import ConfigError, OverloadedError
from envbus.bus.settings import check_number

__all__ = ["ExternalEnv", "ExternalMultiAgentEnv"]


class ExternalEnv(SimulatorVerbs):
    """An environment that asks for actions instead of being stepped.

        class Robot(ExternalEnv):
            def run(self):
                while True:
                    episode = self.start_episode()
                    observation = reset_robot()
                    while not fallen(observation):
                        action = self.get_action(episode, observation)
                        observation, reward = move_robot(action)
                        self.log_returns(episode, reward)
                    self.end_episode(episode, observation)

        bridge.host(Robot(action_space, observation_space))

    `run` may start threads, and have several episodes open. Its verbs are those of
    `ExternalEnvClient`; they can be called as soon as `run` is.

    The spaces are in RLlib's order; clients and bridges take that of observations first.

    Args:
        action_space: What it does.
        observation_space: What it observes.
        max_concurrent: Episodes that may be open at one time: `start_episode` raises an
            `OverloadedError` where one more would be. None: as many as the bridge allows
            (`EpisodeLimits.max_client_episodes`).

    Attributes:
        action_space: As given.
        observation_space: As given.
        max_concurrent: As given.

    Raises:
        ConfigError: The spaces, or the limit, cannot be used.
    """

    def __init__(
        self,
        action_space: SpaceLike,
        observation_space: SpaceLike,
        max_concurrent: int | None = None,
    ) -> None:
        Agreement(observation_space, action_space)  # raises
        check_number("max_concurrent", max_concurrent, whole=True, least=1, optional=True)
        self.observation_space = observation_space
        self.action_space = action_space
        self.max_concurrent = max_concurrent
        self._client: ExternalEnvClient | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def run(self) -> None:
        """Simulate, for as long as there is something to do.

        What it raises, and that it returns, is told by the bridge's `poll`.
        """

    def bind(self, client: ExternalEnvClient) -> None:
        """Let the verbs go through `client`; called before `run`."""
        self._client = client
        #: Held by who starts an episode, where these are counted; made here, as it is not pickled.
        self._starting = threading.Lock()

    def run_in(self, thread: threading.Thread) -> None:
        """Note the thread that will call `run`."""
        self._thread = thread

    def is_alive(self) -> bool:
        """Return whether a thread of this process runs it: from `bridge.host` to the end of `run`.

        Of one that runs in a process the bridge's `poll` tells.
        """
        return self._thread is not None and self._thread.is_alive()

    @property
    def client(self) -> ExternalEnvClient:
        """What the verbs go through.

        Raises:
            ConfigError: It is not being run by a bridge.
        """
        if self._client is None:
            raise ConfigError(f"{type(self).__qualname__} is not being run: use bridge.host()")
        return self._client

    def _perform(self, request: EpisodeRequest, timeout: float | None) -> Any:
        client = self.client
        if self.max_concurrent is None or not isinstance(request, StartEpisode):
            return client._perform(request, timeout)
        with self._starting:
            if client.num_open >= self.max_concurrent:
                raise OverloadedError(
                    f"{client.num_open} episodes of {type(self).__qualname__} are open, which is "
                    f"its limit (max_concurrent={self.max_concurrent}); end one first",
                    request_id=0,
                    peer="bridge",
                )
            return client._perform(request, timeout)


class ExternalMultiAgentEnv(ExternalEnv):
    """An `ExternalEnv` with several agents: all values are dicts by agent.

    The dicts may name different agents each time; an action comes for each agent observed that is
    not done.

    Args:
        action_space: By agent.
        observation_space: By agent, the same ones.
        max_concurrent: As of an `ExternalEnv`.

    Raises:
        ConfigError: The spaces are not of the same agents, or cannot be used.
    """

    def __init__(
        self,
        action_space: Mapping[Any, Space],
        observation_space: Mapping[Any, Space],
        max_concurrent: int | None = None,
    ) -> None:
        if not Agreement(observation_space, action_space).multi_agent:
            raise ConfigError("the spaces of several agents are dicts by agent")
        super().__init__(action_space, observation_space, max_concurrent)
