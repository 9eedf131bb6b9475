"""Which of the two ways of sampling envs, policies and config allow. Leaves out both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from gymnasium.vector import AutoresetMode

from envbus.actors.spaces import is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.runner.bridge_source import BridgeSource, EnvNumbers
from envbus.runner.callbacks import wants_episodes
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.columns import Make
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.env_set import EnvSet
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import Policy
from envbus.runner.sampling import RunnerConfig
from envbus.runner.sources import PoolSource, Source

__all__ = ["make_sampler"]


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
