"""Where a `DictSampler`'s envs come from: what it asks of a pool, or of anything like one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from envbus.runner.agent_results import PollResult
from envbus.runner.pool import ActorPool
from envbus.runner.shares import Share
from envbus.runner.slot import Slot
from envbus.runner.trajectory import AgentID

__all__ = ["PoolSource", "Source"]


class Source(Protocol):
    """Envs, by env id, that are polled and sent actions.

    Attributes:
        shares: Who contributes what it brings.
    """

    shares: Sequence[Share]

    def poll(self, timeout: float | None, min_envs: int) -> PollResult:
        """Wait for envs, as `ActorPool.poll`."""
        ...

    def send_actions(self, actions: Mapping[int, Mapping[AgentID, Any]]) -> None:
        """Have its envs step by `{env_id: {agent_id: action}}`."""
        ...

    def reset(self, env_ids: Sequence[int]) -> None:
        """Have envs that are between two episodes begin the next."""
        ...


class PoolSource:
    """The envs of a pool, each a share of its own."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool
        self.shares = [Share(env_id, [Slot(env_id)]) for env_id in range(pool.num_envs)]

    def poll(self, timeout: float | None, min_envs: int) -> PollResult:
        """Wait for envs."""
        return self.pool.poll(timeout, min_envs=min_envs)

    def send_actions(self, actions: Mapping[int, Mapping[AgentID, Any]]) -> None:
        """Have envs step."""
        self.pool.send_actions(actions)

    def reset(self, env_ids: Sequence[int]) -> None:
        """Have envs begin their next episodes."""
        self.pool.reset(env_ids=env_ids)
