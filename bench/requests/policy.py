"""Ways to get a policy's actions: from a policy worker, beside the bus alone and the policy alone.

The bus alone is the bus as env actors use it, with a worker that answers at once what a policy
worker would have answered. It runs as `python -m envbus.bench.requests.policy DESCRIPTOR CASE`.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envbus.actors.arrays.blocks import BlockLayout
from envbus.actors.protocol import MapBlocks
from envbus.actors.spaces import spaces as plain_spaces
from envbus.bench.requests.cases import RequestCase
from envbus.bus.broker.core import BrokerCore
from envbus.bus.broker.events import BrokerConfig, Complete, PeerReady
from envbus.bus.broker.loop import Broker
from envbus.bus.memory.arena import Arena
from envbus.bus.peer.worker import Worker
from envbus.bus.transport.cores import usable_cores
from envbus.bus.transport.local_link import LocalLinkEnd, LocalLinkPeer
from envbus.bus.transport.local_router import LocalRouter
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Hello, Tree
from envbus.runner.inference.policy_protocol import ActionsChosen, ChooseActions
from envbus.runner.inference.policy_workers import PolicyWorkers
from envbus.runner.inference.remote_policy import RemotePolicy
from envbus.runner.policies.mlp import MlpPolicy
from envbus.runner.policies.policy import FunctionPolicy, Policy

__all__ = ["ASKS"]

#: Seconds for a process to come up, and for one answer; far more than either ever takes.
TIMEOUT = 30.0
IDENTITY = b"worker"
#: Asks, and waits for the answer.
Ask = Callable[[], object]


def policy_alone(case: RequestCase, address: str) -> Ask:
    """The policy in this process."""
    del address
    policy, observations = _policy_of(case), _observations(case)
    return lambda: policy.compute_actions(observations, None)


def bus_alone(case: RequestCase, address: str) -> Ask:
    """The same messages to a process that answers at once; each encoded and decoded."""
    del address
    observations = _observations(case)
    router = LocalRouter(spin=usable_cores() > 1)
    broker = Broker(router, BrokerCore(BrokerConfig()))
    broker.expect(IDENTITY, "worker", 0)
    ours, theirs = LocalLinkEnd.pair()
    router.add_local_link(IDENTITY, ours)
    fd = str(theirs.fileno())
    subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "envbus.bench.requests.policy", fd, case.to_json()],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    if not any(isinstance(outcome, PeerReady) for outcome in broker.poll(TIMEOUT)):
        raise TimeoutError("the worker of the bus alone did not come up")

    def ask() -> None:
        request = ChooseActions(
            policy_id="default_policy",
            num_rows=case.rows,
            explore=True,
            observations=Tree(observations),
            states=Tree(None),
        )
        broker.ask(IDENTITY, "ChooseActions", encode(request), timeout=TIMEOUT)
        while not (outcomes := broker.poll(TIMEOUT)):
            pass
        (outcome,) = outcomes
        if not isinstance(outcome, Complete):
            raise TimeoutError(f"no answer: {outcome}")
        decode(ActionsChosen, outcome.frames, writable=True)

    return ask


def policy_worker(case: RequestCase, address: str) -> Ask:
    """A policy worker; observations travel in the request."""
    del address
    observations = _observations(case)
    policy = _policy_of_worker(case)
    return lambda: policy.compute_actions(observations, None)


def shared_rows(case: RequestCase, address: str) -> Ask:
    """A policy worker that may read observations in a pool's shared memory."""
    del address
    observations, env_ids = _observations(case), np.arange(case.rows)
    policy = _policy_of_worker(case)
    policy.share_rows(_PoolOfRows(case))
    return lambda: policy.collect_actions(
        policy.submit_actions(observations, None, env_ids=env_ids)
    )


class _PoolOfRows:
    """What a policy needs to know of a pool to read its rows."""

    closed = False

    def __init__(self, case: RequestCase) -> None:
        actions = spaces.Discrete(2)
        self._arena = Arena.create(BlockLayout.of(_space(case), actions, case.rows).size)
        self._layout = MapBlocks(
            observation_space=Tree(plain_spaces.to_plain(_space(case))),
            action_space=Tree(plain_spaces.to_plain(actions)),
            num_envs=case.rows,
            first_row=0,
        )

    def shared_rows(self) -> tuple[int, int, MapBlocks]:
        """As `ActorPool.shared_rows`."""
        return self._arena.fd, self._arena.size, self._layout


ASKS = {
    "policy alone": policy_alone,
    "bus alone": bus_alone,
    "policy worker": policy_worker,
    "policy worker, shared rows": shared_rows,
}


def _space(case: RequestCase) -> spaces.Box:
    return spaces.Box(0, 255, case.shape, np.dtype(case.dtype).type)


def _observations(case: RequestCase) -> npt.NDArray[Any]:
    return np.zeros((case.rows, *case.shape), case.dtype)


def _policy_of(case: RequestCase) -> Policy:
    """Return a small one: of images it looks at one corner, so that their way is what is timed."""
    if len(case.shape) > 1:
        return FunctionPolicy(lambda images: images[:, 0, 0, 0] > 0)
    return MlpPolicy(_space(case), spaces.Discrete(2), seed=0)


def _policy_of_worker(case: RequestCase) -> RemotePolicy:
    workers = PolicyWorkers(lambda: _policy_of(case))
    atexit.register(workers.close)
    return workers.policy()


def _answer(fd: int, case: RequestCase) -> None:
    """Answer for the bus alone, until killed."""
    out = _policy_of(case).compute_actions(_observations(case), None)
    reply = ActionsChosen(
        actions=Tree(out.actions),
        states=Tree(None),
        extras=Tree(dict(out.extras)),
        version=0,
        push=0,
    )
    worker = Worker(
        LocalLinkPeer(LocalLinkEnd.from_fd(fd), IDENTITY, spin=usable_cores() > 1),
        Hello(name="worker", services=["bench"], capacity=1000, pid=os.getpid()),
        {ChooseActions: lambda _: reply},
    )
    worker.join(TIMEOUT)
    worker.run()


if __name__ == "__main__":
    _answer(int(sys.argv[1]), RequestCase.of(sys.argv[2]))
