"""The policies of an `EnvRunner`, by id. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number
from envbus.runner.batches.episode import DEFAULT_POLICY_ID
from envbus.runner.policies.policy import (
    FunctionPolicy,
    Policy,
    VersionedWeights,
    Weights,
    check_is_no_module,
    inputs_of,
    versioned_weights,
)
from envbus.runner.workers.config import check_kind

__all__ = [
    "Policies",
    "PolicyMap",
    "check_are_here",
    "check_known",
    "check_state",
    "check_version",
    "check_weights",
    "checked_ids",
    "checked_versions",
    "chosen_ids",
    "set_elsewhere",
]

#: One, or by policy id; functions `observations -> actions` are policies, too.
Policies: TypeAlias = "Policy | Callable[[Any], Any] | Mapping[str, Policy | Callable[[Any], Any]]"

#: Parts of a state that are numbers.
_NUMBERS: Final = ("num_samples", "next_eps_id")
#: What a policy has besides `compute_actions`.
_PARTS: Final = ("initial_state", "get_weights", "set_weights", "policy_version")
#: Versions stand in a column of int64, and the next one is one more.
_LAST_VERSION: Final = 2**62
#: Numbers of episodes are int64, and there have to be more.
_MOST_IDS: Final = 2**62


class PolicyMap:
    """Policies that come and go.

    Raises:
        ConfigError: There is none, or one is neither a policy nor a function.

    Attributes:
        by_id: Another dict after each change: who keeps it keeps those that there were.
    """

    def __init__(self, given: Policies) -> None:
        self.by_id: Mapping[str, Policy] = _by_id(given)

    def __getitem__(self, policy_id: str) -> Policy:
        if policy_id not in self.by_id:
            check_known([policy_id], self.by_id)
        return self.by_id[policy_id]

    def put(self, policy_id: str, policy: Policy | Callable[[Any], Any]) -> None:
        """Add one, or put it in the place of one."""
        fresh = _as_policy(policy_id, policy)
        self.by_id = {**self.by_id, policy_id: fresh}

    def remove(self, policy_id: str) -> None:
        """Remove one.

        Raises:
            ConfigError: There is no such policy, or no other.
        """
        _ = self[policy_id]
        if len(self.by_id) == 1:
            raise ConfigError(f"policy {policy_id!r} is the last one")
        self.by_id = {name: one for name, one in self.by_id.items() if name != policy_id}

    def replace(self, given: Policies) -> None:
        """Put others in the place of all; their weights are of the version after the old ones'."""
        fresh = _by_id(given)
        for name in fresh.keys() & self.by_id.keys():
            fresh[name].policy_version = self.by_id[name].policy_version + 1
        self.by_id = fresh

    def get_weights(self, policy_ids: Iterable[str] | None = None) -> dict[str, Weights]:
        """Return weights by policy id, of all or of some.

        Raises:
            ConfigError: `policy_ids` are no ids, or there is no such policy.
        """
        names = chosen_ids(policy_ids, self.by_id)
        return {name: self[name].get_weights() for name in names}

    def set_weights(self, weights: Mapping[str, Weights], version: int | None = None) -> None:
        """Set weights by policy id, one policy after the other.

        Raises:
            ConfigError: There is no such policy, or another process sets its weights. Nothing was
                set.
            Exception: What a policy raises that does not take its weights; those before it have
                theirs. `set_state` sets all or nothing.
        """
        check_weights(weights, version)
        check_known(weights, self.by_id)
        check_are_here(weights, set_elsewhere(self.by_id))
        found = [(self[name], values) for name, values in weights.items()]
        for policy, values in found:
            policy.set_weights(values, version)

    def get_state(self) -> dict[str, tuple[Weights, int]]:
        """Return weights and their version by policy id; not of those that are set elsewhere."""
        elsewhere = set_elsewhere(self.by_id)
        return {
            name: versioned_weights(policy)
            for name, policy in self.by_id.items()
            if name not in elsewhere
        }

    def set_state(self, state: Mapping[str, Any]) -> dict[str, tuple[Weights, int]]:
        """Take over what `get_state` returned, all of it or nothing; return the state before.

        Raises:
            ConfigError: There is no such policy, or another process sets its weights; or these are
                no weights with a version.
            Exception: What a policy raises that does not take its weights.
        """
        check_are_here(state, set_elsewhere(self.by_id))
        found = {name: self[name] for name in state}
        for name, pair in state.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(
                    f"the state of policy {name!r} is its weights and their version, as "
                    f"`get_state` returned them; not {brief(pair)}"
                )
            check_kind(f"weights of {name!r}", pair[0], Mapping, example="policy.get_weights()")
            check_version(f"the version of {name!r}", pair[1])
        before: dict[str, tuple[Weights, int]] = {}
        try:
            for name, policy in found.items():
                before[name] = versioned_weights(policy)
                weights, version = state[name]
                policy.set_weights(weights, version)
        except BaseException:
            for name, had in before.items():
                found[name].set_weights(*had)
            raise
        return before


def check_known(policy_ids: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` if one of the ids, or of those that weights are given by, is none."""
    ids = list(known)
    for policy_id in policy_ids:
        if policy_id not in ids:
            hint = ""
            if isinstance(policy_ids, Mapping):
                hint = f"; weights are by policy id, as {{{ids[0]!r}: policy.get_weights()}}"
            raise ConfigError(f"there is no policy {policy_id!r}; there are {ids}{hint}")


def set_elsewhere(policies: Mapping[str, Policy]) -> list[str]:
    """Return the ids of policies whose weights only another process can set."""
    return [
        name
        for name, policy in policies.items()
        if isinstance(policy, VersionedWeights) and not policy.can_set_weights
    ]


def check_are_here(policy_ids: Iterable[str], elsewhere: Iterable[str]) -> None:
    """Raise `ConfigError` if one of the policies is among those that are set elsewhere."""
    if found := sorted(set(policy_ids) & set(elsewhere)):
        raise ConfigError(
            f"weights of {found[0]!r} are in policy workers: PolicyWorkers.set_weights changes "
            "them for all runners"
        )


def chosen_ids(policy_ids: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return ids of policies as a list; None: all that are known.

    Raises:
        ConfigError: They are something else.
    """
    if isinstance(policy_ids, str) or not isinstance(policy_ids, Iterable | None):
        raise ConfigError(
            f"policy_ids are a list of policies' ids, or None for all, not {brief(policy_ids)}"
        )
    return list(known if policy_ids is None else policy_ids)


def check_weights(weights: object, version: object) -> None:
    """Raise `ConfigError` unless weights are by policy id, and their version a number or None."""
    check_version("version", version, optional=True)
    check_kind("weights", weights, Mapping, example='{"default_policy": policy.get_weights()}')


def check_version(name: str, version: object, *, optional: bool = False) -> None:
    """Raise `ConfigError` unless it is a number that a version of weights can be."""
    most = _LAST_VERSION
    check_number(name, version, whole=True, least=-most, most=most, optional=optional)


def check_state(state: object, *parts: str) -> None:
    """Raise `ConfigError` unless a state has the parts that `get_state` gives it.

    Parts are mappings by name, but for the numbers of `checked_ids`.
    """
    if not isinstance(state, Mapping) or not state.keys() >= set(parts):
        raise ConfigError(
            f"a state is what `get_state` returned, with {', '.join(parts)}; not {brief(state)}"
        )
    for part in parts:
        if part not in _NUMBERS and not isinstance(state[part], Mapping):
            raise ConfigError(
                f"the state's {part!r} are by name, as `get_state` returned them; "
                f"not {brief(state[part])}"
            )


def checked_ids(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return from where the numbers of episodes and samples go on.

    Raises:
        ConfigError: Those of a state are no such numbers.
    """
    ids = state["next_eps_id"], state["num_samples"]
    if not all(isinstance(one, int | np.integer) and 0 <= one < _MOST_IDS for one in ids):
        raise ConfigError(f"next_eps_id and num_samples of a state are whole numbers, not {ids}")
    return int(ids[0]), int(ids[1])


def _check_parts(name: str, policy: Any) -> None:
    """Raise `ConfigError` unless what has `compute_actions` has a policy's other parts, too."""
    missing = [part for part in _PARTS if not hasattr(policy, part)]
    if missing:
        raise ConfigError(
            f"policy {name!r} has no {', '.join(missing)}; derive it from "
            "envbus.runner.policies.Policy, which has them"
        )


def checked_versions(versions: Mapping[str, Any], policy_ids: Iterable[str]) -> dict[str, int]:
    """Return the versions of these policies' weights in a state.

    Raises:
        ConfigError: It lacks some, or one is no whole number.
    """
    if missing := sorted(set(policy_ids) - versions.keys()):
        raise ConfigError(f"the state has no policy_versions of {missing}")
    for policy_id in policy_ids:
        check_version(f"policy_versions[{policy_id!r}]", versions[policy_id])
    return {policy_id: int(versions[policy_id]) for policy_id in policy_ids}


def _by_id(given: Policies) -> dict[str, Policy]:
    named = given if isinstance(given, Mapping) else {DEFAULT_POLICY_ID: given}
    if not named:
        raise ConfigError("there must be at least one policy")
    return {name: _as_policy(name, policy) for name, policy in named.items()}


def _as_policy(name: str, policy: Any) -> Policy:
    check_kind("the id of a policy", name, str, example='"default_policy"')
    if isinstance(policy, type):
        raise ConfigError(f"policy {name!r} is the class {policy.__name__}; give an object of it")
    if hasattr(policy, "compute_actions"):
        _check_parts(name, policy)
        inputs_of(name, policy)
        found: Policy = policy
        return found
    check_is_no_module(policy, f"policy {name!r}")
    if callable(policy):
        return FunctionPolicy(policy)
    raise ConfigError(
        f"policy {name!r} must have compute_actions, or be a function, not {policy!r:.80}"
    )
