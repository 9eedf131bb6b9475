"""The envs of an `EnvRunner`: a pool, bridges, or both, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gymnasium import Space

from envbus.actors.agent_spaces import AgentSpaces
from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.policies import Policy
from envbus.runner.pool import ActorPool
from envbus.runner.sub_environments import SubEnvironment
from envbus.runner.trajectory import AgentID

__all__ = ["EnvSet", "Envs"]

Envs: TypeAlias = "ActorPool | ExternalEnvBridge | Sequence[ActorPool | ExternalEnvBridge]"


class EnvSet:
    """At most one pool, and any number of bridges.

    Attributes:
        pool: Its envs have the ids from 0.
        bridges: Their episodes have higher ones.

    Raises:
        ConfigError: There is neither, or more than one pool; or an agent of one has other spaces
            than in another.
    """

    def __init__(self, envs: Envs) -> None:
        given = list(envs) if isinstance(envs, Sequence) else [envs]
        pools = [one for one in given if isinstance(one, ActorPool)]
        self.bridges = [one for one in given if isinstance(one, ExternalEnvBridge)]
        if not given or len(pools) > 1 or len(pools) + len(self.bridges) < len(given):
            raise ConfigError(
                "envs must be an ActorPool, an ExternalEnvBridge, or several bridges and at most "
                f"one pool, not {envs!r:.200}"
            )
        self.pool = pools[0] if pools else None
        self._check_spaces()

    @property
    def num_envs(self) -> int:
        """Envs of the pool."""
        return 0 if self.pool is None else self.pool.num_envs

    @property
    def closed(self) -> bool:
        """Whether any of them was closed."""
        return any(one.closed for one in self._all())

    def close(self, *, terminate: bool = False) -> None:
        """Close all. Idempotent; `terminate` does not wait for envs of the pool."""
        for bridge in self.bridges:
            bridge.stop()
        if self.pool is not None:
            self.pool.close(terminate=terminate)

    def spaces(self) -> dict[AgentID, tuple[Space[Any], Space[Any]]]:
        """Return observation and action space by agent, as far as they are known."""
        return {agent_id: both for one in reversed(self._all()) for agent_id, both in _spaces(one)}

    def get_sub_environments(self) -> list[SubEnvironment]:
        """Return proxies of the pool's envs."""
        return [] if self.pool is None else self.pool.get_sub_environments()

    def tell_policies(self, policies: Mapping[str, Policy], *, publish: bool) -> None:
        """Have clients told who may act; if they may do so themselves, have them given models."""
        for bridge in self.bridges:
            bridge.policy_ids = list(policies)
            bridge.retain_models(policies if publish else ())
            for policy_id, policy in policies.items() if publish else ():
                weights, version = policy.get_weights(), policy.policy_version
                model = weights.get("model")
                if isinstance(model, bytes) and len(weights) == 1:
                    bridge.publish(policy_id, onnx=model, version=version)
                else:
                    bridge.publish(policy_id, weights=weights, version=version)

    def _all(self) -> list[ActorPool | ExternalEnvBridge]:
        return [*([] if self.pool is None else [self.pool]), *self.bridges]

    def _check_spaces(self) -> None:
        known: dict[AgentID, tuple[Space[Any], Space[Any]]] = {}
        for one in self._all():
            for agent_id, both in _spaces(one):
                if known.setdefault(agent_id, both) != both:
                    raise ConfigError(
                        f"agent {agent_id!r} has the observation and action space "
                        f"{known[agent_id]} in one, and {both} in {one!r}: a policy has one form "
                        "of row; bring them together, or sample them by two runners"
                    )


def _spaces(
    one: ActorPool | ExternalEnvBridge,
) -> Iterator[tuple[AgentID, tuple[Space[Any], Space[Any]]]]:
    if isinstance(one, ActorPool):
        for agent_id in one.get_agent_ids():
            yield agent_id, (one.get_observation_space(agent_id), one.get_action_space(agent_id))
        return
    observation, action = one.observation_space, one.action_space
    if isinstance(observation, AgentSpaces) and isinstance(action, AgentSpaces):
        for agent_id, space in observation.spaces.items():
            yield agent_id, (space, action[agent_id])
    elif observation is not None and action is not None:
        yield DUMMY_AGENT, (observation, action)
