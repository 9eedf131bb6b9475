"""Which of the two ways of sampling envs, policies and config allow. Leaves out both."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gymnasium.vector import AutoresetMode

from envbus.actors.spaces import is_fixed_size
from envbus.bus.errors import ConfigError
from envbus.runner.callbacks import wants_episodes
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.metrics import PerfTimers, SampleMetrics
from envbus.runner.policies import Policy
from envbus.runner.pool import ActorPool
from envbus.runner.sampling import RunnerConfig

__all__ = ["make_sampler"]


def make_sampler(
    envs: ActorPool,
    config: RunnerConfig,
    policies: Callable[[], Mapping[str, Policy]],
    metrics: SampleMetrics,
    timers: PerfTimers,
) -> ColumnSampler | DictSampler:
    """Return the fast sampler where that is possible and not refused, else the general one.

    Raises:
        ConfigError: Neither is possible.
    """
    fixed = all(map(is_fixed_size, (envs.single_observation_space, envs.single_action_space)))
    reason = _why_not_columns(envs, config, policies(), fixed=fixed)
    for setting in ("vectorized", "pipelined"):
        if getattr(config, setting) and reason:
            raise ConfigError(f"this cannot be sampled with {setting}=True: {reason}")
    if config.pipelined and config.vectorized is False:
        raise ConfigError("pipelined=True needs columns, and vectorized=False refuses them")
    if envs.autoreset_mode is AutoresetMode.SAME_STEP:
        raise ConfigError('a runner takes a pool with autoreset_mode "NextStep" or "Disabled"')
    if reason is None and config.vectorized is not False:
        ((name, policy),) = policies().items()
        return ColumnSampler(envs, config, name, policy, metrics, timers)
    if envs.autoreset_mode is not AutoresetMode.DISABLED:
        raise ConfigError(
            'make the pool with autoreset_mode="Disabled": it cannot be sampled in columns, as '
            + (reason or "vectorized=False was asked for")
        )
    ragged = not fixed and not envs.is_multi_agent
    return DictSampler(envs, config, policies, metrics, timers, ragged=ragged)


def _why_not_columns(
    envs: ActorPool, config: RunnerConfig, policies: Mapping[str, Policy], *, fixed: bool
) -> str | None:
    if envs.is_multi_agent:
        return "the envs have several agents"
    if not fixed:
        return "a space has no fixed size"
    if len(policies) > 1 or config.policy_mapping_fn is not None:
        return "there are several policies, or a policy_mapping_fn"
    if wants_episodes(config.callbacks):
        return "callbacks are told of single episodes"
    if config.infos:
        return "infos are kept"
    return None
