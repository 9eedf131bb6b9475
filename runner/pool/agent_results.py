"""What envs with agents returned, by env and agent. Pure.

Envs with one agent appear as if it had a name, `DUMMY_AGENT`. The six dicts, the names and the
sentinel are those of RLlib's BaseEnv, so that what was written for one can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from envbus.actors.env.agents import ALL
from envbus.runner.errors import Fault

__all__ = ["ASYNC_RESET", "DUMMY_AGENT", "HeldBack", "PollResult", "single_record"]

#: The agent of an env that has only one.
DUMMY_AGENT: Final = "agent0"
#: Stands for observations and infos that a later `poll` will return.
ASYNC_RESET: Final = "async_reset_return"

_ONLY_ALL = frozenset({ALL})


class _ByEnv(NamedTuple):
    #: By env and agent. An env that returned nothing else than flags is there too, with `{}`.
    observations: dict[int, dict[Any, Any]]
    rewards: dict[int, dict[Any, Any]]
    #: By env and agent, and `"__all__"` for the env as a whole, as in `truncateds`.
    terminateds: dict[int, dict[Any, bool]]
    truncateds: dict[int, dict[Any, bool]]
    #: As the envs gave them: also of agents without an observation, and e.g. `"__common__"`.
    infos: dict[int, dict[Any, Any]]
    #: Actions that were chosen elsewhere; empty for envs that are stepped by `send_actions`.
    off_policy_actions: dict[int, dict[Any, Any]]


class PollResult(_ByEnv):
    """What `ActorPool.poll` returns: a tuple of six dicts, each `{env_id: {agent_id: value}}`.

    The dicts of an env may name different agents; those in `observations` are the ones that can
    act, unless they are done.

    Attributes:
        faults: Envs that failed since the last call: their episodes are over without a last row.
            The first observations of their next episodes come by themselves.
        late: Envs that were asked and have not answered, if the time-out ended this `poll`.
        incarnations: Which life each env that returned something is in, from 0.
    """

    faults: list[Fault]
    late: list[int]
    incarnations: dict[int, int]

    @classmethod
    def of(
        cls,
        records: Mapping[int, Mapping[str, Any]],
        *,
        faults: list[Fault],
        late: list[int],
        incarnations: dict[int, int],
    ) -> PollResult:
        """Return the result for the records of `AgentsEnv` by env."""
        result = cls(
            {env_id: record["observations"] for env_id, record in records.items()},
            {env_id: record["rewards"] for env_id, record in records.items()},
            {env_id: record["terminateds"] for env_id, record in records.items()},
            {env_id: record["truncateds"] for env_id, record in records.items()},
            {env_id: record["infos"] for env_id, record in records.items()},
            {},
        )
        result.faults, result.late, result.incarnations = faults, late, incarnations
        return result


def single_record(
    observation: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
) -> dict[str, Any]:
    """Return what an env with one agent returned, as a record of `AgentsEnv`."""
    return {
        "observations": {DUMMY_AGENT: observation},
        "rewards": {DUMMY_AGENT: reward},
        "terminateds": {DUMMY_AGENT: terminated, ALL: terminated},
        "truncateds": {DUMMY_AGENT: truncated, ALL: truncated},
        "infos": {DUMMY_AGENT: info},
    }


class HeldBack:
    """Rewards and flags that agents got in one episode of an env while they had no observation.

    They come with the agent's next observation, or with the end of the episode: rewards added up,
    a flag set if it was ever set. So nothing of what an agent's action led to is lost.
    """

    def __init__(self) -> None:
        self._rewards: dict[Any, Any] = {}
        #: By "terminateds" and "truncateds".
        self._flags: dict[str, set[Any]] = {"terminateds": set(), "truncateds": set()}

    @property
    def rewards(self) -> Mapping[Any, Any]:
        """What is held back, by agent."""
        return self._rewards

    def settle(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the next record with what is due now; may change `record`'s dicts."""
        observations = record["observations"]
        if self._leaves_as_is(record, observations):
            return record
        if record["terminateds"][ALL] or record["truncateds"][ALL]:
            due: Any = {*observations, *record["rewards"], *self._rewards}
            due |= {agent for name in self._flags for agent in record[name]}
            due |= {agent for flags in self._flags.values() for agent in flags}
        else:
            due = observations
        rewards = record["rewards"]
        for agent in [agent for agent in rewards if agent not in due]:
            reward = rewards.pop(agent)
            # Not +=: an array may be the env's own.
            held = self._rewards
            held[agent] = held[agent] + reward if agent in held else reward
        for agent in [agent for agent in self._rewards if agent in due]:
            held_reward = self._rewards.pop(agent)
            rewards[agent] = held_reward + rewards[agent] if agent in rewards else held_reward
        for name, held_flags in self._flags.items():
            flags = record[name]
            for agent in [a for a in flags if a not in due and a != ALL]:
                if flags.pop(agent):
                    held_flags.add(agent)
            for agent in [agent for agent in held_flags if agent in due]:
                held_flags.discard(agent)
                flags[agent] = True
        return record

    def _leaves_as_is(self, record: Mapping[str, Any], observations: Mapping[Any, Any]) -> bool:
        """Return whether nothing is held, and all who got something have an observation."""
        if self._rewards or not record["rewards"].keys() <= observations.keys():
            return False
        return not any(self._flags.values()) and all(
            record[name].keys() - observations.keys() <= _ONLY_ALL for name in self._flags
        )
