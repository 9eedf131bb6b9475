"""Policies of servers under test, and a program of simulators."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from envbus.actors import ClientTimeouts, ExternalEnvClient
from envbus.bus.errors import EnvbusError
from envbus.runner import PolicyWorkers
from envbus.runner.policies import FunctionPolicy
from tests.waiting import pass_time

#: What each simulator tells: whoever is first at a server.
SPACES: dict[str, Any] = {
    "observation_space": spaces.Box(-1000.0, 1000.0, (2,)),
    "action_space": spaces.Discrete(1000),
}
#: First number of an observation for which the policy fails.
FAILURE = 99.0


def echo(action_space: Any) -> Callable[[Any], Any]:
    """Its action is the first number of the observation."""

    def policy(observations: Any) -> Any:
        if (observations[:, 0] == FAILURE).any():
            raise ArithmeticError("the policy fails, as told")
        return observations[:, 0].astype(action_space.dtype)

    return policy


def demanded_early(action_space: Any) -> Callable[[Any], Any]:
    """`echo`, of whose server something is demanded once, while the policy is made."""
    if not _demanded:
        _demanded.append(True)
        os.kill(os.getpid(), signal.SIGHUP)
    return echo(action_space)


_demanded: list[bool] = []


def picky(action_space: Any) -> Callable[[Any], Any]:
    """`echo`, for discrete actions."""
    if not isinstance(action_space, spaces.Discrete):
        raise ValueError("Discrete actions only")
    return echo(action_space)


def whose(action_space: Any) -> Callable[[Any], Any]:
    """Its actions are the first number of the observation, and the process that has chosen."""
    assert action_space.shape == (2,)

    def policy(observations: Any) -> Any:
        return np.stack([observations[:, 0], np.full(len(observations), os.getpid())], axis=1)

    return policy


def from_file(action_space: Any) -> Callable[[Any], Any]:
    """Its action stands in a file, which is read when it is made."""
    number = int(Path(os.environ[MODEL]).read_text("utf-8"))

    def policy(observations: Any) -> Any:
        return np.full(len(observations), number, action_space.dtype)

    return policy


#: The variable of the environment that names that file.
MODEL = "ENVBUS_TEST_MODEL"


class InWorker(FunctionPolicy):
    """`echo` in a policy worker, whose process id is the name of a file."""

    def __init__(self) -> None:
        super().__init__(echo(SPACES["action_space"]))
        (Path(os.environ[WORKERS]) / str(os.getpid())).touch()


#: The variable of the environment that names the folder of those files.
WORKERS = "ENVBUS_TEST_WORKERS"
_workers: list[PolicyWorkers] = []


def noted(action_space: Any) -> Callable[[Any], Any]:
    """`from_file`; its process' id is the name of a file."""
    (Path(os.environ[WORKERS]) / str(os.getpid())).touch()
    return from_file(action_space)


def echo_in_workers(action_space: Any) -> Any:
    """`echo`, chosen by two processes of their own; they end with this one."""
    del action_space
    _workers.append(PolicyWorkers(InWorker, n=2))
    return _workers[-1].policy()


def play(address: str, name: str, episodes: int, steps: int) -> None:
    """Play episodes in pairs, and say of each that it has ended as soon as that was answered."""
    options: dict[str, Any] = {"heartbeat": 0.2, "timeouts": ClientTimeouts(patience=20.0)}
    with ExternalEnvClient(address, name=name, **options, **SPACES) as client:
        number = 0
        while number < episodes:
            try:
                pair = [client.start_episode(f"{name}-{number + i}") for i in (0, 1)]
                for step in range(steps):
                    for episode in pair:
                        seen = np.array([step, 0.0], np.float32)
                        assert client.get_action(episode, seen) == step
                        client.log_returns(episode, 1.0)
                for episode in pair:
                    client.end_episode(episode, np.array([steps, 0.0], np.float32))
                    sys.stdout.write(f"{episode}\n")
                    sys.stdout.flush()
            except (EnvbusError, RuntimeError, ValueError) as exc:
                sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
                pass_time(0.05)
            number += 2


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
