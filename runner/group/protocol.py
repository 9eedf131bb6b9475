"""What a group and the processes of its runners say to each other. Vocabulary only.

Large columns travel through shared memory (`sample_memory.py`); what only Python can express, such
as functions, policies and results of episodes, by cloudpickle over the pipe that a process has
inherited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from envbus.bus.wire.messages import Failed, Reply, Request, Tree
from envbus.runner.batches.metrics import EpisodeResult, MetricsDelta
from envbus.runner.errors import Fault
from envbus.runner.group.sample_memory import ArrayLocation, SharedSlot
from envbus.runner.policies.policy_map import Policies
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.base_runner import BaseEnvRunner
from envbus.runner.sampling.config import RunnerConfig

__all__ = [
    "AnyEnvs",
    "Applied",
    "Apply",
    "EnvsMade",
    "Here",
    "MakeEnvs",
    "MakePolicies",
    "MakeRunner",
    "MakeRunnerOfOwn",
    "PushWeights",
    "Pushed",
    "Report",
    "RollCall",
    "RunnerMade",
    "RunnerSpec",
    "TakeSample",
    "Taken",
]

#: `(index of the runner) -> pool`, or one factory, id or import path per env.
AnyEnvs: TypeAlias = "Callable[[int], ActorPool] | Sequence[Any]"
#: `(pool, worker index) -> policies`.
MakePolicies: TypeAlias = "Callable[[ActorPool, int], Policies]"
#: `(config) -> runner`, or, with `envs`, of what `EnvRunner` takes.
MakeRunnerOfOwn: TypeAlias = "Callable[..., BaseEnvRunner]"
_Told = TypeVar("_Told", EpisodeResult, Fault)


@dataclass(frozen=True)
class RunnerSpec:
    """What one runner is made of."""

    #: None: the runner makes its own.
    envs: AnyEnvs | None
    #: Settings of the pool, where `envs` is a sequence.
    pool_settings: Mapping[str, Any]
    policies: Policies | None
    make_policies: MakePolicies | None
    config: RunnerConfig
    #: None: it is an `EnvRunner`.
    make_runner: MakeRunnerOfOwn | None = None
    #: Of a runner that makes its own.
    num_envs: int = 0


@dataclass(frozen=True)
class Report:
    """What a runner tells with a sample besides its rows; one object, pickled at once."""

    late: tuple[int, ...]
    faults: tuple[Fault, ...]
    #: All since the last report; those of the sample are the last `num_episodes` results.
    metrics: MetricsDelta
    num_episodes: int
    #: Means in ms, and of how many iterations.
    timers: dict[str, float]
    iterations: int
    #: What its connectors have learnt since the last report, by name.
    connectors: dict[str, Any]
    #: As `ConnectorTimes.read`.
    connector_metrics: dict[str, dict[str, Any]]

    def shifted(self, first_env: int) -> Report:
        """Return it with env ids that count from `first_env`."""
        if not first_env:
            return self
        results = [_shifted(result, first_env) for result in self.metrics.results]
        return dataclasses.replace(
            self,
            late=tuple(env_id + first_env for env_id in self.late),
            faults=tuple(_shifted(fault, first_env) for fault in self.faults),
            metrics=msgspec.structs.replace(self.metrics, results=results),
        )


def _shifted(told: _Told, first_env: int) -> _Told:
    return msgspec.structs.replace(told, env_id=told.env_id + first_env)


class EnvsMade(Reply, frozen=True, kw_only=True):
    """A runner's envs are there."""

    num_envs: int


class MakeEnvs(Request[EnvsMade], frozen=True, kw_only=True):
    """Make the envs of a runner."""

    index: int
    #: `RunnerSpec`.
    parts: Tree


class RunnerMade(Reply, frozen=True, kw_only=True):
    """A runner can sample."""

    #: By agent id: observation and action space, as plain data.
    spaces: Tree
    #: By policy id.
    policy_versions: dict[str, int]
    #: Policies whose weights are not the runner's to set.
    elsewhere: list[str]


class MakeRunner(Request[RunnerMade], frozen=True, kw_only=True):
    """Make a runner of the envs that were made before."""

    seed: int | None
    worker_index: int


class Pushed(Reply, frozen=True, kw_only=True):
    """The weights hold from the next fragment on, but for policies that refused theirs."""

    #: What these raised, by policy id.
    refused: dict[str, Failed]
    #: Policies that the runner does not have.
    absent: list[str]


class PushWeights(Request[Pushed], frozen=True, kw_only=True):
    """Set weights."""

    #: `{policy id: (weights, version)}`.
    weights: Tree


class Taken(Reply, frozen=True, kw_only=True):
    """What a runner has sampled."""

    #: `{policy id: {column: arrays}}`; numbers in it stand for arrays in shared memory.
    rows: Tree
    locations: list[ArrayLocation]
    #: As in `Placed`.
    passed: int
    size: int
    env_steps: int
    #: `Report`.
    report: Tree
    policy_versions: dict[str, int]
    #: `EnvRunner.ids_reached`.
    ids: tuple[int, int]


class TakeSample(Request[Taken], frozen=True, kw_only=True):
    """Sample; the fields are those of `EnvRunner.sample`."""

    num_env_steps: int | None = None
    num_episodes: int | None = None
    timeout: float | None = None
    force_reset: bool = False
    explore: bool | None = None
    #: `{name: state}` of connectors, merged over all runners; None: nothing new.
    connectors: Tree | None = None
    #: Whether each of them is to learn.
    updates: dict[str, bool]
    #: Where large columns are to be made; None: anywhere.
    slot: SharedSlot | None = None
    #: Number of the last passed descriptor with the runner's own memory that was taken; 0: none
    #: was.
    held: int = 0
    #: For `EnvRunner.go_on_from`: what was reached in a state that the group took over.
    ids: tuple[int, int] = (0, 0)


class Applied(Reply, frozen=True, kw_only=True):
    """What the function has returned."""

    value: Tree
    policy_versions: dict[str, int]


class Apply(Request[Applied], frozen=True, kw_only=True):
    """Call `function(runner, *args, **kwargs)`."""

    function: Tree
    args: Tree
    kwargs: Tree


class Here(Reply, frozen=True, kw_only=True):
    """A runner answers."""


class RollCall(Request[Here], frozen=True, kw_only=True):
    """Answer, if you can."""
