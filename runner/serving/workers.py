"""A server's policy in processes of its own: what waits is shared out to them.

Leaves out the processes (`envbus.runner.inference`), and what the policy is (`loading.py`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final

import numpy as np
from gymnasium import Space

from envbus.bus.errors import ConfigError, StartError
from envbus.bus.settings import positive_int
from envbus.runner.batches.nested import Tree, map_tree
from envbus.runner.inference.policy_workers import MOST_WORKERS, PolicyWorkers
from envbus.runner.policies.policy import Policy, PolicyOutput, Weights, count_rows
from envbus.runner.policies.policy_output import PolicyAnswer
from envbus.runner.serving.loading import Maker, onnx_policy, policy_maker, read_model

__all__ = ["WorkersPolicy", "in_workers"]

#: Rows from which on another worker gets some: fewer are chosen sooner than they are sent.
_LEAST_ROWS: Final = 8


def in_workers(text: str, n: int) -> Maker:
    """Return what makes the policy that `text` names, in `n` processes, as `policy_maker` does.

    Raises:
        ConfigError: As `policy_maker`, or `n` is too many; later: none of the processes could make
            it.
    """
    n = positive_int("--workers", n, most=MOST_WORKERS)
    policy_maker(text)  # raises here, and not in each process

    def make(observation_space: Space[Any], action_space: Space[Any]) -> Policy:
        # Read once: a worker that replaces a dead one has the model of the others.
        model = read_model(text) if text.endswith(".onnx") else None
        make_there = functools.partial(_make, text, model, observation_space, action_space)
        try:
            return WorkersPolicy(PolicyWorkers(make_there, n), n)
        except StartError as exc:
            raise ConfigError(f"{text} cannot be made in a process of its own: {exc}") from exc

    return make


class WorkersPolicy(Policy):
    """Chooses actions in all of some workers at once. They end when it is dropped.

    Args:
        workers: Of one policy.
        n: How many there are.
    """

    def __init__(self, workers: PolicyWorkers, n: int) -> None:
        self._workers = workers
        self._policy = workers.policy()
        self._n = n

    def compute_actions(
        self, observations: Tree, states: Tree, *, explore: bool = True
    ) -> PolicyOutput:
        """Return an action per row; raises as a `RemotePolicy` does."""
        out = self._compute(observations, states, explore=explore)
        self.policy_version = self._policy.policy_version
        return out

    def initial_state(self) -> Tree:
        """Return what the policy says."""
        return self._policy.initial_state()

    def get_weights(self) -> Weights:
        """Return copies of the weights of one worker."""
        return self._policy.get_weights()

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Send weights to all workers."""
        self.policy_version = self._workers.set_weights(weights, version)

    def _compute(self, observations: Tree, states: Tree, *, explore: bool) -> PolicyOutput:
        policy, rows = self._policy, count_rows(observations)
        parts = min(self._n, rows // _LEAST_ROWS)
        if parts < 2:
            return policy.compute_actions(observations, states, explore=explore)
        ends = np.linspace(0, rows, parts + 1).astype(int)
        slices = [slice(*pair) for pair in itertools.pairwise(ends)]
        told = [_some(states, part) for part in slices]
        tickets: list[object] = []
        try:
            for part, own in zip(slices, told, strict=True):
                some = _some(observations, part)
                tickets.append(policy.submit_actions(some, own, explore=explore))
            outs = [policy.collect_actions(ticket) for ticket in tickets]
        except BaseException:  # one was lost for good; or Ctrl-C
            for ticket in tickets:
                policy.discard_actions(ticket)
            raise
        answers = [
            PolicyAnswer.of(out, part.stop - part.start, 0, own, listed=None)
            for out, part, own in zip(outs, slices, told, strict=True)
        ]
        joined = PolicyAnswer.join(answers)
        return PolicyOutput(joined.actions, joined.states, joined.extras, joined.versions)


def _some(tree: Tree, rows: slice) -> Tree:
    return None if tree is None else map_tree(lambda leaf: leaf[rows], tree)


def _make(
    text: str, model: bytes | None, observation_space: Space[Any], action_space: Space[Any]
) -> Policy:
    if model is not None:
        return onnx_policy(text, model, observation_space, action_space)
    return policy_maker(text)(observation_space, action_space)
