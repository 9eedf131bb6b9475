"""The envs of an `EnvRunner`: a pool, bridges, or both, as one; and which sampler they allow.

Leaves out both samplers (`column_sampler.py`, `dict_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from gymnasium import Space
from gymnasium.vector import AutoresetMode

from envbus.actors.agent_spaces import AgentSpaces
from envbus.actors.spaces import is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.runner.agent_results import DUMMY_AGENT
from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.callbacks import wants_episodes
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.columns import Make
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.env_calls import SubEnvironment
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import Policy
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig
from envbus.runner.sources import BridgeSource, EnvNumbers, PoolSource, Source
from envbus.runner.trajectory import AgentID

__all__ = ["EnvSet", "Envs", "make_sampler"]

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


def make_sampler(
    envs: EnvSet,
    config: RunnerConfig,
    policies: Callable[[], Mapping[str, Policy]],
    metrics: SampleMetrics,
    timers: PerfTimers,
    make: Make | None,
    asking: AbstractContextManager[Any],
) -> ColumnSampler | DictSampler:
    """Return the fast sampler where that is possible and not refused, else the general one.

    Args:
        envs: Whose.
        config: Of the runner.
        policies: By id, as they are at the time.
        metrics: Of the runner, as `timers`.
        timers: Likewise.
        make: Asked for the memory of columns; only by the fast one.
        asking: Held while a policy is asked; only by the general one, which answers simulators in
            another thread.

    Raises:
        ConfigError: Neither is possible.
    """
    pool = envs.pool
    reason = _why_not_columns(envs, config, policies())
    for setting in ("vectorized", "pipelined", "run_ahead"):
        value = getattr(config, setting)
        if value and reason:
            raise ConfigError(f"this cannot be sampled with {setting}={value}: {reason}")
        if value and config.vectorized is False:
            raise ConfigError(f"{setting}={value} needs columns, and vectorized=False refuses them")
    if pool is not None and pool.autoreset_mode is AutoresetMode.SAME_STEP:
        raise ConfigError('a runner takes a pool with autoreset_mode "NextStep" or "Disabled"')
    if pool is not None and reason is None and config.vectorized is not False:
        ((name, policy),) = policies().items()
        return ColumnSampler(pool, config, name, policy, metrics, timers, make)
    if pool is not None and pool.autoreset_mode is not AutoresetMode.DISABLED:
        raise ConfigError(
            'make the pool with autoreset_mode="Disabled": it cannot be sampled in columns, as '
            + (reason or "vectorized=False was asked for")
        )
    sources: list[Source] = (
        [] if pool is None else [PoolSource(pool, clip_actions=config.clip_actions)]
    )
    numbers, num_envs, width = EnvNumbers(envs.num_envs), envs.num_envs, config.envs_per_bridge
    sources += [
        BridgeSource(
            bridge,
            num_envs + index,
            width,
            numbers,
            config.min_envs,
            clip_actions=config.clip_actions,
        )
        for index, bridge in enumerate(envs.bridges)
    ]
    return DictSampler(sources, config, policies, metrics, timers, asking)


def _why_not_columns(
    envs: EnvSet, config: RunnerConfig, policies: Mapping[str, Policy]
) -> str | None:
    pool = envs.pool
    if envs.bridges or pool is None:
        return "episodes of a bridge come and go"
    if pool.is_multi_agent:
        return "the envs have several agents"
    if not all(map(is_fixed_size, (pool.single_observation_space, pool.single_action_space))):
        return "a space has no fixed size"
    if len(policies) > 1 or config.policy_mapping_fn is not None:
        return "there are several policies, or a policy_mapping_fn"
    if wants_episodes(config.callbacks):
        return "callbacks are told of single episodes"
    if config.infos:
        return "infos are kept"
    return None
