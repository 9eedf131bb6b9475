"""A PettingZoo ParallelEnv whose env lives in an actor of its own.

Needs PettingZoo (`pip install -e '.[pettingzoo]'`). For many envs at a time use
`ActorPool.poll` and `send_actions`.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from envbus.actors.env.agents import ALL
from envbus.actors.env.source import parse_source
from envbus.actors.spaces.agent_spaces import AgentID
from envbus.bus.errors import ConfigError
from envbus.runner.extras import needed_for
from envbus.runner.pool.pool import ActorPool
from envbus.runner.workers.config import Timeouts

with needed_for("parallel_env", "pettingzoo"):
    from pettingzoo import ParallelEnv

__all__ = ["RemoteParallelEnv", "parallel_env"]


def parallel_env(
    source: Any, *, timeouts: Timeouts | None = None, **env_kwargs: Any
) -> RemoteParallelEnv:
    """Return a ParallelEnv whose env is made and stepped in another process.

        env = parallel_env("pettingzoo.butterfly.pistonball_v6:parallel_env", n_pistons=5)

    Args:
        source: An import path `"module:function"`, or any callable that returns an env with
            several agents: a ParallelEnv, an AECEnv, or one in RLlib's style.
        timeouts: Default deadline of each verb, in seconds.
        **env_kwargs: Arguments of the env's constructor.

    Raises:
        ConfigError: The env has one agent only.
        Exception: What the env's constructor raised.
    """
    pool = ActorPool(
        [parse_source(source, env_kwargs)], autoreset_mode="Disabled", timeouts=timeouts
    )
    if not pool.is_multi_agent:
        pool.close()
        raise ConfigError("this env has one agent; use make_vec or ActorPool")
    return RemoteParallelEnv(pool)


# PettingZoo is untyped.
class RemoteParallelEnv(ParallelEnv[Any, Any, Any]):  # type: ignore[misc]
    """The only env of `pool`, which it takes over. Errors are those of `ActorPool.recv`.

    Attributes:
        agents: Those that are alive, as the env has it; nobody when the episode is over.
        possible_agents: Only there if the env has it.
    """

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        (self._env,) = pool.get_sub_environments()
        self.metadata = self._env.get_attr("metadata")
        self.render_mode = self._env.get_attr("render_mode")
        self.agents: list[Any] = []
        #: Those that were done in this episode.
        self._done: set[Any] = set()
        possible = list(pool.single_action_space.spaces)  # type: ignore[attr-defined]
        if possible:
            self.possible_agents = possible

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode; return observations and infos by agent."""
        self._pool.reset([seed], options)
        record = self._receive()
        self._done.clear()
        return record["observations"], record["infos"]

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step by `{agent: action}`; return five dicts by agent."""
        alive = self.agents
        self._pool.send([actions], [0])
        record = self._receive()
        observations, rewards = record["observations"], record["rewards"]
        terminateds, truncateds = dict(record["terminateds"]), dict(record["truncateds"])
        of_all = terminateds.pop(ALL), truncateds.pop(ALL)
        # In RLlib's style an agent's flags may be missing, and `"__all__"` alone ends the episode.
        for agent in {**observations, **rewards, **dict.fromkeys(alive if any(of_all) else ())}:
            own = terminateds.get(agent, False), truncateds.get(agent, False)
            terminateds[agent], truncateds[agent] = own if any(own) else of_all
        self._done |= {a for flags in (terminateds, truncateds) for a in flags if flags[a]}
        alive = [] if any(of_all) else self.agents
        self.agents = [agent for agent in alive if agent not in self._done]
        return observations, rewards, terminateds, truncateds, record["infos"]

    def observation_space(self, agent: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space: the same object each time within an episode."""
        return self._pool.get_observation_space(agent)

    def action_space(self, agent: AgentID) -> gymnasium.Space[Any]:
        """Return an agent's space: the same object each time within an episode."""
        return self._pool.get_action_space(agent)

    def render(self) -> Any:
        """Return what the env draws."""
        return self._env.render()

    def state(self) -> Any:
        """Return the env's global state, if it has one."""
        return self._env.call("state")

    def close(self) -> None:
        """End the env's process. Idempotent."""
        self._pool.close()

    def __enter__(self) -> RemoteParallelEnv:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        record: dict[str, Any] = self._pool.recv().observations[0]
        self.agents = record["agents"]
        return record
