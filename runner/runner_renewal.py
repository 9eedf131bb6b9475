"""Beginning anew: an `EnvRunner` with fresh envs, fresh policies, or the state of another one.

A part of the runner, which samples with them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from envbus.bus.errors import ConfigError
from envbus.runner.column_sampler import ColumnSampler
from envbus.runner.dict_sampler import DictSampler
from envbus.runner.env_set import Envs, EnvSet
from envbus.runner.metrics import SampleMetrics
from envbus.runner.policy_map import Policies, check_state, checked_ids
from envbus.runner.runner_policies import RunnerPolicies

__all__ = ["Factories", "RunnerRenewal"]

#: What makes envs, and what makes the policies for them.
Factories: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Policies]]


class RunnerRenewal(RunnerPolicies, ABC):
    """What `EnvRunner` offers about beginning anew."""

    # The runner's.
    envs: Envs
    metrics: SampleMetrics
    _factories: Factories | None
    _begun: bool
    _num_samples: int
    _renewals: int

    def make_env(self) -> None:
        """Close the envs, whatever became of them, and make them anew; new episodes begin.

        Policies, connectors, metrics and the numbers of episodes go on; seeds are derived from
        the config's, so that no episode comes a second time.

        Raises:
            ConfigError: It does not know how: use `from_factories`.
            Exception: What the factory raised; the runner is stopped then, and can try again.
        """
        make_env, _ = self._known_factories("make_env")
        self.stop()
        self.envs = make_env()
        self._envs = EnvSet(self.envs)
        try:
            self._renew()
        except BaseException:
            self._envs.close(terminate=True)
            raise

    def make_module(self) -> None:
        """Make the policies anew, with fresh weights of the next version; new episodes begin.

        Raises:
            ConfigError: It does not know how: use `from_factories`.
            Exception: What the factory raised, or policies that do not fit; nothing has changed.
        """
        _, make_module = self._known_factories("make_module")
        self._assert_open()
        before = self._policies.by_id
        self._policies.replace(make_module(self.envs))
        try:
            self._renew()
        except BaseException:
            self._policies.by_id = before
            raise

    def get_state(self) -> dict[str, Any]:
        """Return weights, their versions, connectors' states and the counts of a lifetime.

        Running episodes are no part of it: neither the envs' own state, nor their rows that have
        not left, nor what policies and connectors keep of them. Who takes it over begins new
        ones, under ids that were not used yet.
        """
        next_eps_id, num_samples = self.ids_reached()
        return {
            "policies": self._policies.get_state(),
            "connectors": {name: one.get_state() for name, one in self.config.connectors().items()},
            "metrics": self.metrics.get_state(),
            "num_samples": num_samples,
            "next_eps_id": next_eps_id,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned, of this runner or another; episodes go on.

        All of it is taken over, or nothing. Episodes that run here keep their ids, which the other
        runner may have used: where that matters, sample with `force_reset=True` next.

        Raises:
            ConfigError: It is no state, has a policy that is not here, or lacks a connector.
            Exception: What a policy or a connector raises that does not take its part.
        """
        check_state(state, "policies", "connectors", "metrics", "num_samples", "next_eps_id")
        connectors = self.config.connectors()
        missing = sorted(connectors.keys() - state["connectors"].keys())
        if missing:
            raise ConfigError(f"the state has nothing of the connectors {missing}")
        ids = checked_ids(state)
        with contextlib.ExitStack() as undo:
            policies = {name: self._policies[name] for name in state["policies"]}
            before = {
                name: (policy.get_weights(), policy.policy_version)
                for name, policy in policies.items()
            }
            self._policies.set_state(state["policies"])
            undo.callback(self._policies.set_state, before)
            for name, connector in connectors.items():
                undo.callback(connector.set_state, connector.get_state())
                connector.set_state(state["connectors"][name])
            self.metrics.set_state(state["metrics"])
            undo.pop_all()  # all is well
        self._tell_policies()
        self.go_on_from(*ids)

    def ids_reached(self) -> tuple[int, int]:
        """Return what no number of an episode, and of a sample, has reached yet here."""
        return self._sampler.ids.following, self._num_samples

    def go_on_from(self, next_eps_id: int, num_samples: int) -> None:
        """Have later episodes and samples be numbered from these on, if they are not already."""
        self._num_samples = max(self._num_samples, num_samples)
        if self._sampler.ids.following < next_eps_id:
            self._sampler.ids.go_on_from(next_eps_id)

    # --- private -----------------------------------------------------------------------------

    def _renew(self) -> None:
        """Begin anew with other envs or policies, and go on counting."""
        old = self._sampler
        if isinstance(old, DictSampler):
            old.abandon()
        self._sampler = self._make_sampler()
        self._sampler.ids.go_on_from(old.ids.following)
        if isinstance(old, DictSampler):
            self.policy_mapping_fn = old.policy_mapping_fn
        self._begun = False
        self._renewals += 1

    def _known_factories(self, verb: str) -> Factories:
        if self._factories is None:
            raise ConfigError(
                f"{verb}: this runner was given its envs and policies ready-made; make it by "
                "EnvRunner.from_factories(make_env, make_module)"
            )
        return self._factories

    @abstractmethod
    def stop(self) -> None:
        """Close the envs."""

    @abstractmethod
    def _assert_open(self) -> None:
        """Raise if it was stopped, or is in use."""

    @abstractmethod
    def _make_sampler(self) -> ColumnSampler | DictSampler:
        """Return a sampler of the present envs with the present policies."""
