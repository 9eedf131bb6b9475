"""Where a `DictSampler`'s envs come from: a pool, or anything that is polled like one."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from envbus.actors.agent_spaces import AgentSpaces
from envbus.actors.clipping import agent_clip
from envbus.actors.spaces import Space, is_fixed_size
from envbus.runner.agent_results import PollResult
from envbus.runner.bridge.results import ClientChoice
from envbus.runner.policy_output import check_shapes
from envbus.runner.pool import ActorPool
from envbus.runner.shares import EnvShare, OpenShare, Share
from envbus.runner.slot import Slot
from envbus.runner.trajectory import AgentID

__all__ = ["Polled", "PoolSource", "Source", "poll_any"]

#: Seconds after which sources look after their processes and clients, whatever comes meanwhile.
_LONGEST_WAIT = 0.05


class Polled(NamedTuple):
    """What a source has brought."""

    #: By env id.
    result: PollResult
    #: Episodes that have begun by themselves, and whose part they are; their first observations
    #: are in `result`.
    opened: Sequence[tuple[OpenShare, Slot]] = ()
    #: Those of such episodes that are over.
    closed: Sequence[Slot] = ()
    #: Envs that were sent no action, or too late, for the observations before.
    unacted: Collection[int] = ()
    #: By env: which policy of its own a simulator has acted with.
    choices: Mapping[int, ClientChoice] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return not self.result.observations and not self.result.faults


class Source(Protocol):
    """Envs, by env id, that are polled and sent actions."""

    @property
    def shares(self) -> Sequence[Share]:
        """Who contributes what it brings."""
        ...

    @property
    def is_ragged(self) -> bool:
        """Whether observations or actions have no fixed size."""
        ...

    def has(self, env_id: int) -> bool:
        """Return whether an env is one of its own."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` is worth a call."""
        ...

    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        """Wait for envs, as `ActorPool.poll`."""
        ...

    def send_actions(
        self, slots: Sequence[Slot], actions: Mapping[int, Mapping[AgentID, Any]]
    ) -> None:
        """Have envs step by `{env_id: {agent_id: action}}`, which names others, too."""
        ...

    def reset(self, env_ids: Sequence[int]) -> None:
        """Have envs that are between two episodes begin the next."""
        ...

    def reset_all(self, seed: int | None) -> None:
        """Have all envs begin anew that can be told so."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for an action that none comes, and why."""
        ...

    def confirm(self) -> None:
        """All that `poll` has returned was taken in, and callbacks were told of it."""
        ...


class PoolSource:
    """The envs of a pool, each a share of its own.

    Args:
        pool: It stays its owner's.
        clip_actions: Bring actions into the bounds of their space.
    """

    def __init__(self, pool: ActorPool, *, clip_actions: bool) -> None:
        self._pool = pool
        self._clip = agent_clip(pool.single_action_space) if clip_actions else None
        self.shares = [EnvShare(env_id, [Slot(env_id)]) for env_id in range(pool.num_envs)]
        spaces = (pool.single_observation_space, pool.single_action_space)
        self.is_ragged = not pool.is_multi_agent and not all(map(is_fixed_size, spaces))

    def has(self, env_id: int) -> bool:
        """Return whether there is such an env."""
        return env_id < len(self.shares)

    def fileno(self) -> int:
        """Return the pool's descriptor."""
        return self._pool.fileno()

    def poll(self, timeout: float | None, min_envs: int) -> Polled:
        """Wait for envs."""
        return Polled(self._pool.poll(timeout, min_envs=min_envs))

    def send_actions(
        self, slots: Sequence[Slot], actions: Mapping[int, Mapping[AgentID, Any]]
    ) -> None:
        """Have envs step.

        Raises:
            ValueError: An action has not the shape that its space has.
        """
        own = {slot.env_id: actions[slot.env_id] for slot in slots}
        for by_agent in own.values():
            for agent_id, action in by_agent.items():
                check_shapes(action, self._space_of(agent_id))
        if self._clip is not None:
            own = {env_id: self._clip(by_agent) for env_id, by_agent in own.items()}
        self._pool.send_actions(own)

    def _space_of(self, agent_id: AgentID) -> Space | None:
        space = self._pool.single_action_space
        return space.spaces.get(agent_id) if isinstance(space, AgentSpaces) else space

    def reset(self, env_ids: Sequence[int]) -> None:
        """Have envs begin their next episodes."""
        self._pool.reset(env_ids=env_ids)

    def reset_all(self, seed: int | None) -> None:
        """Have all envs begin anew."""
        self._pool.reset(seed)

    def fail(self, error: BaseException) -> None:
        """Do nothing: nobody waits. Envs of a pool are asked, and will be reset."""

    def confirm(self) -> None:
        """Do nothing: nobody waits."""


def poll_any(sources: Sequence[Source], deadline: float | None, min_envs: int, turn: int) -> Polled:
    """Wait for one of them, at most until the deadline (monotonic time); it does not spin.

    Args:
        sources: With envs that are awaited.
        deadline: None: as long as they do of themselves.
        min_envs: For how many to wait, where there is one source.
        turn: Who is looked at first; another one each time, so that all get their turn.

    Raises:
        Exception: What one of them raises; nothing that others have brought is lost by it.
    """
    if len(sources) == 1:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return sources[0].poll(left, min_envs)
    first = turn % len(sources)
    while True:
        late: list[int] = []
        for source in (*sources[first:], *sources[:first]):
            polled = source.poll(0.0, 1)
            if not polled.is_empty:
                polled.result.late.clear()  # they were not waited for
                return polled
            late += polled.result.late
        left = _LONGEST_WAIT if deadline is None else deadline - time.monotonic()
        if left <= 0.0:
            polled.result.late[:] = late
            return polled
        select.select([source.fileno() for source in sources], [], [], min(left, _LONGEST_WAIT))
