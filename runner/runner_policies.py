"""The policies of an `EnvRunner`: which there are, who has which, and their weights.

A part of the runner, which samples with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from envbus.bus.errors import ConfigError
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.env_set import EnvSet
from envbus.runner.policies import Policy, Weights
from envbus.runner.policy_map import PolicyMap
from envbus.runner.sampling import PolicyMapping, RunnerConfig

__all__ = ["RunnerPolicies"]


class RunnerPolicies:
    """What `EnvRunner` offers about policies."""

    # The runner's.
    config: RunnerConfig
    _envs: EnvSet
    _policies: PolicyMap
    #: Held while a policy is asked, or its weights change.
    _asking: AbstractContextManager[Any]
    _sampler: ColumnSampler | DictSampler

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policies by id."""
        return self._policies.by_id

    @property
    def policy_mapping_fn(self) -> PolicyMapping | None:
        """Who says which policy is an agent's; if set, of episodes that begin from now on.

        Raises:
            ConfigError: The runner keeps columns; make it with `vectorized=False`.
        """
        return self._general("policy_mapping_fn").policy_mapping_fn

    @policy_mapping_fn.setter
    def policy_mapping_fn(self, policy_mapping_fn: PolicyMapping | None) -> None:
        self._general("policy_mapping_fn").policy_mapping_fn = policy_mapping_fn

    def add_policy(
        self,
        policy_id: str,
        policy: Policy | Callable[[Any], Any],
        policy_mapping_fn: PolicyMapping | None = None,
    ) -> None:
        """Add a policy, or put another in the place of one, for episodes that begin from now on.

        Args:
            policy_id: Its id.
            policy: Itself.
            policy_mapping_fn: Takes the place of the one that there is.

        Raises:
            ConfigError: The runner keeps columns; make it with `vectorized=False`.
        """
        sampler = self._general("add_policy")
        self._policies.put(policy_id, policy)
        self._tell_policies()
        if policy_mapping_fn is not None:
            sampler.policy_mapping_fn = policy_mapping_fn

    def remove_policy(
        self,
        policy_id: str,
        policy_mapping_fn: PolicyMapping | None = None,
    ) -> None:
        """Remove a policy; episodes that run with it keep it to their end.

        Raises:
            ConfigError: There is no such policy, or no other, or the runner keeps columns.
        """
        sampler = self._general("remove_policy")
        self._policies.remove(policy_id)
        self._tell_policies()
        if policy_mapping_fn is not None:
            sampler.policy_mapping_fn = policy_mapping_fn

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id, of all policies or of some."""
        return self._policies.get_weights(policy_ids)

    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Set weights by policy id; actions from now on are theirs, and say so.

        In a block of `serving` it waits until the policy has answered what it was just asked.

        Raises:
            ConfigError: There is no such policy. Nothing was set.
        """
        with self._asking:
            self._policies.set_weights(weights, version)
        self._tell_policies()

    # --- private -----------------------------------------------------------------------------

    def _tell_policies(self) -> None:
        self._envs.tell_policies(self._policies.by_id, publish=self.config.publish)

    def _general(self, verb: str) -> DictSampler:
        if isinstance(self._sampler, ColumnSampler):
            raise ConfigError(
                f"{verb}: rows are kept in columns for one policy; make the runner with "
                'RunnerConfig(vectorized=False) and the pool with autoreset_mode="Disabled"'
            )
        return self._sampler
