"""What a newcomer does wrong is refused at once, in words that say what to write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envbus.actors import ExternalEnvClient
from envbus.bus.errors import ConfigError
from envbus.runner import (
    ActorPool,
    BusVectorEnv,
    EnvRunner,
    EnvRunnerGroup,
    ExternalEnvBridge,
    MlpPolicy,
    PolicyWorkers,
    RandomPolicy,
)

#: What nobody checks by types: these are the mistakes.
wrong: Any = {
    "text": "CartPole-v1",
    "number": 5,
    "dict": {"rollout_fragment_length": 5},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ActorPool]:
    with ActorPool(["CartPole-v1"], num_actors=0) as pool:
        yield pool


def random(pool: ActorPool) -> RandomPolicy:
    return RandomPolicy(pool.single_action_space, None)


@pytest.mark.parametrize("kind", [BusVectorEnv, ActorPool])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"env_fns": wrong["text"]}, r'env_fns is a sequence, \["CartPole-v1"\] \* 8 for example'),
        ({"env_fns": wrong["number"]}, "env_fns is a sequence"),
        ({"timeouts": wrong["number"]}, r"timeouts must be Timeouts, Timeouts\(step=5\)"),
        ({"hooks": print}, r"hooks must be Hooks, Hooks\(on_fault=print\)"),
        ({"preload": "numpy"}, r"preload is a sequence, \[\"numpy\"\]"),
        ({"bind": 5555}, "bind is a sequence"),
        ({"memory_limit_mb": "2000"}, "memory_limit_mb must be int or float"),
        ({"recycle_after": 5}, r"recycle_after must be RecycleAfter, RecycleAfter\(episodes=500\)"),
        ({"restart_policy": 5}, "restart_policy must be a RestartPolicy"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_before_anything_starts(
    kind: Any, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        kind(**{"env_fns": ["CartPole-v1"], **arguments})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: EnvRunner(wrong["text"], wrong["number"]), "envs must be an ActorPool"),
        (lambda _: EnvRunner(None, wrong["number"]), "envs must be an ActorPool"),  # type: ignore[arg-type]  # is the mistake
        (lambda pool: EnvRunner(pool, MlpPolicy), "is the class MlpPolicy; give an object"),
        (lambda pool: EnvRunner(pool, random(pool), wrong["dict"]), "config must be RunnerConfig"),
        (lambda pool: EnvRunnerGroup(wrong["text"], [], random(pool)), "num_runners must be"),
        (lambda pool: EnvRunnerGroup(1, wrong["text"], random(pool)), "envs is a sequence"),
        (lambda pool: EnvRunnerGroup(1, [], random(pool), wrong["dict"]), "config must be Runner"),
        (lambda _: PolicyWorkers(wrong["number"], 1), "a function that makes one, or 'module:f"),
        (lambda _: ExternalEnvBridge(bind=wrong["number"]), "bind is a sequence"),
    ],
)
def test_what_samples_and_serves_says_what_it_wants(
    pool: ActorPool, make: Callable[[ActorPool], object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make(pool)


def test_env_ids_are_a_sequence(pool: ActorPool) -> None:
    for mistake in (wrong["number"], wrong["text"]):
        with pytest.raises(TypeError, match=r"env_ids is a sequence of ids, \[0, 3\]"):
            pool.send(np.array([0]), mistake)


def test_what_belongs_to_a_process_says_so_where_it_is_pickled_or_copied(pool: ActorPool) -> None:
    with ExternalEnvBridge() as bridge:
        for thing in (pool, EnvRunner(pool, random(pool)), bridge):
            for action in (pickle.dumps, copy.copy, copy.deepcopy):
                name = type(thing).__name__
                with pytest.raises(TypeError, match=f"^a {name} belongs to the process"):
                    action(thing)
    for kind in (BusVectorEnv, EnvRunnerGroup, PolicyWorkers, ExternalEnvClient):
        with pytest.raises(TypeError, match="send a function that makes one"):
            pickle.dumps(kind.__new__(kind))
