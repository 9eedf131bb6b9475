"""Small envs with several agents in RLlib's and PettingZoo's style, for tests."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class DictEnv:
    """RLlib style: plays `script`, one tuple of five dicts per step; observations are counters.

    The last tuple is repeated. What was done is kept in `actions`.
    """

    possible_agents = ("a", "b")
    observation_spaces = {  # noqa: RUF012  # as users write it
        "a": spaces.Box(0.0, 100.0, (1,), np.float64),
        "b": spaces.Discrete(5),
    }
    action_spaces = {"a": spaces.Discrete(2), "b": spaces.Discrete(3)}  # noqa: RUF012

    def __init__(
        self, script: list[tuple[Any, ...]] | None = None, first: Any = ("a", "b")
    ) -> None:
        self.script = script or [({"a": 0}, {"a": 1.0}, {"__all__": False}, {"__all__": False}, {})]
        self.first = first
        self.actions: list[Any] = []
        self.resets = 0
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        self.seed = seed
        self.time = 0
        self.actions = []
        return {agent: self.resets for agent in self.first}, {"__common__": {"seed": seed}}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.actions.append(actions)
        result = self.script[min(self.time, len(self.script) - 1)]
        self.time += 1
        return result

    def ask(self, name: str) -> Any:
        return getattr(self, name)


class RoundRobinEnv:
    """RLlib style: `num_agents` agents act in turn, an episode is `length` env steps.

    Whoever acts gets 10 at once; the observation tells how often its agent was asked.
    """

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(2)

    def __init__(self, num_agents: int = 5, length: int = 25) -> None:
        self.num_agents = num_agents
        self.length = length
        self._agent_ids = set(range(num_agents))

    def reset(self, **_: Any) -> Any:
        self.time = 0
        return {0: 0}, {}

    def step(self, actions: dict[int, Any]) -> Any:
        expected = self.time % self.num_agents
        assert list(actions) == [expected], (actions, expected)
        self.time += 1
        over = {"__all__": self.time >= self.length}
        following = {self.time % self.num_agents: self.time}
        return following, dict.fromkeys(range(self.num_agents), 10), over, {"__all__": False}, {}


class CountingParallelEnv:
    """PettingZoo's form, not its class. Agents count; `until[agent]` is an agent's last step.

    `cut` truncates instead of terminating; `both` sets both flags.
    """

    metadata = {"name": "counting"}  # noqa: RUF012
    render_mode = None

    def __init__(self, until: dict[Any, int], *, cut: Any = (), both: Any = ()) -> None:
        self.until = until
        self.cut, self.both = cut, both
        self.possible_agents = list(until)

    def observation_space(self, agent: Any) -> gymnasium.Space[Any]:
        return spaces.Box(0, 100, (2,), np.int64)

    def action_space(self, agent: Any) -> gymnasium.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        self.time = 0
        return self._observe(), {agent: {"seed": seed} for agent in self.agents}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.time += 1
        done = {agent: self.time >= self.until[agent] for agent in self.agents}
        terminateds = {a: done[a] and (a not in self.cut or a in self.both) for a in self.agents}
        truncateds = {a: done[a] and (a in self.cut or a in self.both) for a in self.agents}
        results = (
            self._observe(),
            {agent: float(actions.get(agent, -1)) for agent in self.agents},
            terminateds,
            truncateds,
            {agent: {} for agent in self.agents},
        )
        self.agents = [agent for agent in self.agents if not done[agent]]
        return results

    def _observe(self) -> dict[Any, Any]:
        return {a: np.array([i, self.time]) for i, a in enumerate(self.agents)}

    def close(self) -> None:
        pass
