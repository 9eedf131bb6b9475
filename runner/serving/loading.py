"""Which policies a server has: made of what a command names, for the spaces of a bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from envbus.actors.external.agreement import Agreement
from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.bus.errors import ConfigError
from envbus.runner.batches.episode import DEFAULT_POLICY_ID
from envbus.runner.extras import onnx_adapter
from envbus.runner.policies.policy import (
    Policy,
    check_has_no_inputs,
    import_function,
    parameters_of,
    parse_policy,
)
from envbus.runner.policies.policy_map import PolicyMap
from envbus.runner.pool.agent_results import DUMMY_AGENT

__all__ = ["ServedPolicies", "load_policies", "onnx_policy", "policy_maker", "read_model"]

#: `(observation space, action space) -> policy`, of one agent.
Maker = Callable[[Space[Any], Space[Any]], Policy]


@dataclass(frozen=True)
class ServedPolicies:
    """Who acts for whom."""

    by_id: Mapping[str, Policy]
    #: Id of each agent's policy.
    policy_of: Mapping[Any, str]
    #: Observation and action space of each agent; a single one is `DUMMY_AGENT`.
    spaces: Mapping[Any, tuple[Space[Any], Space[Any]]]


def load_policies(
    make: Maker, observation_space: Space[Any], action_space: Space[Any]
) -> ServedPolicies:
    """Make one policy for all agents of equal spaces.

    A policy is called as its first agent is, where there are several policies.

    Raises:
        ConfigError: As `make`.
    """
    if isinstance(observation_space, AgentSpaces) and isinstance(action_space, AgentSpaces):
        by_agent = {
            agent: (space, action_space.spaces[agent])
            for agent, space in observation_space.spaces.items()
        }
    else:
        by_agent = {DUMMY_AGENT: (observation_space, action_space)}
    # Compared with each other, the spaces of 1000 agents would take minutes; so would their texts.
    firsts: dict[Any, Any] = {}
    like = {
        agent: firsts.setdefault(_key_of(Agreement(*pair).described), agent)
        for agent, pair in by_agent.items()
    }
    sole = len(firsts) == 1
    names: dict[Any, str] = {}
    for first in firsts.values():
        name = DEFAULT_POLICY_ID if sole else str(first)
        while name in names.values():  # the agents 1 and "1"
            name += "'"
        names[first] = name
    return ServedPolicies(
        {names[first]: make(*by_agent[first]) for first in firsts.values()},
        {agent: names[first] for agent, first in like.items()},
        by_agent,
    )


def policy_maker(text: str) -> Maker:
    """Return what makes the policy that `text` names: random, zero, module:factory or a file.

    A factory is called with what it has parameters for, by these names: `observation_space`,
    `action_space`; one that has neither name with the action space, and the observation space if
    it takes two. It returns a policy, or a function `observations -> actions`.

    Raises:
        ConfigError: There is no such module, function or file; later: it does not fit the spaces.
    """
    if text in ("random", "zero"):
        factory = parse_policy(text)
        return lambda _, action_space: factory(action_space, None)
    if text.endswith(".onnx"):
        return _onnx_maker(text)
    function = import_function(text)

    def make(observation_space: Space[Any], action_space: Space[Any]) -> Policy:
        try:
            made = _call(function, observation_space, action_space)
        except ConfigError:
            raise
        except Exception as exc:
            raise ConfigError(
                f"the policy's factory {text} raised {type(exc).__name__}: {exc}; it is called "
                "with the action space, and the observation space if it takes two"
            ) from exc
        policy = PolicyMap({text: made})[text]
        check_has_no_inputs(text, policy, "a server")
        return policy

    return make


def read_model(text: str) -> bytes:
    """Return what the file of a model holds now.

    Raises:
        ConfigError: There is no such file, or it cannot be read.
    """
    path = Path(text)
    if not path.is_file():  # what took its place may be a pipe, whose end would be waited for
        raise ConfigError(f"there is no model {text}")
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"the model {text} cannot be read: {exc}") from exc


def onnx_policy(
    text: str, model: bytes, observation_space: Space[Any], action_space: Space[Any]
) -> Policy:
    """Return the policy of a model that was read from the file `text`.

    Raises:
        ConfigError: It is none, or does not fit the spaces.
    """
    adapter = onnx_adapter("serve")
    try:
        policy: Policy = adapter.OnnxPolicy(model, action_space)
        adapter.check_fit(policy, observation_space, action_space)
    except ConfigError as exc:
        raise ConfigError(f"{text}: {exc}") from exc
    return policy


def clipped(actions: Any, space: Space[Any]) -> Any:
    """Return a batch of actions inside the Boxes of floats of a space; all else as it is."""
    if isinstance(space, spaces.Dict) and isinstance(actions, Mapping):
        parts = space.spaces
        return {key: clipped(a, parts[key]) if key in parts else a for key, a in actions.items()}
    if isinstance(space, spaces.Tuple) and isinstance(actions, tuple):
        return tuple(map(clipped, actions, space.spaces)) if len(actions) == len(space) else actions
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return np.clip(np.asarray(actions), space.low, space.high).astype(space.dtype, copy=False)
    return actions


def _key_of(described: Any) -> Any:
    """Return what is equal, and has one hash, where spaces are described alike."""
    if isinstance(described, Mapping):
        return tuple([(key, _key_of(value)) for key, value in described.items()])
    if isinstance(described, list | tuple):
        return tuple(map(_key_of, described))
    if isinstance(described, np.ndarray):
        return described.dtype.str, described.shape, described.tobytes()
    return described


def _call(function: Callable[..., Any], observation_space: Any, action_space: Any) -> Any:
    given = {"observation_space": observation_space, "action_space": action_space}
    named, needed = parameters_of(function)
    if named & given.keys():
        return function(**{name: given[name] for name in given.keys() & named})
    return function(*(action_space, observation_space)[: 2 if needed > 1 else 1])


def _onnx_maker(text: str) -> Maker:
    if not Path(text).is_file():
        raise ConfigError(f"there is no model {text}")
    onnx_adapter("serve")

    def make(observation_space: Space[Any], action_space: Space[Any]) -> Policy:
        return onnx_policy(text, read_model(text), observation_space, action_space)

    return make
