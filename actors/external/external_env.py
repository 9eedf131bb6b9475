"""Base classes of simulators that have a loop of their own, to be run by a bridge.

Leaves out where they run: `hosting.py` has the process, `envbus.runner.bridge.hosting` the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from envbus.actors.arrays.spaces import Space
from envbus.actors.external.agreement import Agreement, SpaceLike
from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.verbs import EpisodeRequest, SimulatorVerbs
from envbus.bus.errors import ConfigError

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

    Raises:
        ConfigError: The spaces cannot be used.
    """

    def __init__(self, action_space: SpaceLike, observation_space: SpaceLike) -> None:
        Agreement(observation_space, action_space)  # raises
        self.observation_space = observation_space
        self.action_space = action_space
        self._client: ExternalEnvClient | None = None

    @abstractmethod
    def run(self) -> None:
        """Simulate, for as long as there is something to do.

        What it raises, and that it returns, is told by the bridge's `poll`.
        """

    def bind(self, client: ExternalEnvClient) -> None:
        """Let the verbs go through `client`; called before `run`."""
        self._client = client

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
        return self.client._perform(request, timeout)


class ExternalMultiAgentEnv(ExternalEnv):
    """An `ExternalEnv` with several agents: all values are dicts by agent.

    The dicts may name different agents each time; an action comes for each agent observed that is
    not done.

    Args:
        action_space: By agent.
        observation_space: By agent, the same ones.

    Raises:
        ConfigError: The spaces are not of the same agents, or cannot be used.
    """

    def __init__(
        self, action_space: Mapping[Any, Space], observation_space: Mapping[Any, Space]
    ) -> None:
        if not Agreement(observation_space, action_space).multi_agent:
            raise ConfigError("the spaces of several agents are dicts by agent")
        super().__init__(action_space, observation_space)
