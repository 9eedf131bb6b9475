"""Games whose agents take turns, stepped by the action of the agent that is to move.

For PettingZoo's AECEnv where PettingZoo cannot make a ParallelEnv of it. Its two dicts and five
dicts are those of a ParallelEnv, which name only the agents whose turn it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from envbus.actors.arrays.agent_spaces import AgentID

__all__ = ["TurnEnv"]


class TurnEnv:
    """An AECEnv. Who is to move has an observation; at the end each agent has a last one.

    An agent's reward is what it got since its own last move, as `AECEnv.last` counts it.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, **kwargs: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Reset the game; return observation and info of the agent that begins."""
        self._env.reset(**kwargs)
        observations, _, _, _, infos = self._hand_out()
        return observations, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Make the move of the agent whose turn it is; return five dicts.

        Raises:
            ValueError: There is no action of that agent.
        """
        agent = self._env.agent_selection
        if agent not in actions:
            raise ValueError(
                f"it is the turn of {agent!r}, but there are actions of {list(actions)} only"
            )
        self._env.step(actions[agent])
        return self._hand_out()

    def observation_space(self, agent_id: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space."""
        space: gymnasium.Space[Any] = self._env.observation_space(agent_id)
        return space

    def action_space(self, agent_id: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space."""
        space: gymnasium.Space[Any] = self._env.action_space(agent_id)
        return space

    @property
    def unwrapped(self) -> Any:
        """The game itself."""
        return self._env.unwrapped

    def __getattr__(self, name: str) -> Any:
        if name == "_env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def _hand_out(self) -> tuple[dict[Any, Any], ...]:
        """Let agents that are done leave, each with its last observation, up to who is to move."""
        env = self._env
        observations: dict[Any, Any] = {}
        rewards: dict[Any, Any] = {}
        terminateds: dict[Any, Any] = {}
        truncateds: dict[Any, Any] = {}
        infos: dict[Any, Any] = {}
        while env.agents:
            agent = env.agent_selection
            observation, reward, terminated, truncated, info = env.last()
            observations[agent], rewards[agent], infos[agent] = observation, reward, info
            terminateds[agent], truncateds[agent] = terminated, truncated
            if not (terminated or truncated):
                break
            env.step(None)
        return observations, rewards, terminateds, truncateds, infos
