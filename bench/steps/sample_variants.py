"""What the sampling benchmark compares: collectors, each in the ways that its users run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from envbus.bench.harness.record import Schedule
from envbus.bench.steps.cases import Case
from envbus.bench.steps.variants import Role, Variant

__all__ = [
    "GROUP_ASYNC",
    "GROUP_ASYNC_TORCH",
    "GROUP_NUMPY",
    "GROUP_OF_ALL",
    "GROUP_TORCH",
    "OURS_NUMPY",
    "OURS_TORCH",
    "PIPELINING",
    "RUN_AHEAD",
    "RUN_AHEAD_TORCH",
    "SAMPLE_CASES",
    "SAMPLE_QUICK",
    "SAMPLE_SCHEDULE",
    "SAMPLE_VARIANTS",
]

#: Rows that are meant by "envbus", with the two policies.
OURS_NUMPY, OURS_TORCH = "envbus_numpy", "envbus_torch"
#: Several runners, each with its envs in its own process: of two, and one per env.
GROUP_NUMPY, GROUP_TORCH = "envbus_group_numpy", "envbus_group_torch"
GROUP_OF_ALL = "envbus_group_of_all"
#: Of one per env, none of which waits for another.
GROUP_ASYNC, GROUP_ASYNC_TORCH = "envbus_group_async", "envbus_group_async_torch"
#: Envs that go on while slow ones are awaited: each contributes as much as without.
RUN_AHEAD, RUN_AHEAD_TORCH = "envbus_run_ahead", "envbus_run_ahead_torch"
#: Steps of a fragment that is of one env: a quarter of what those of 16 envs have together.
_OF_ONE_ENV = 512
_COLLECTORS = ("cartpole", "pixels", "jitter")
_COMPUTING = ("cartpole", "pixels")
#: Of these rows each is compared with the one that does the same without pipelining.
PIPELINING = {"pipelined_1": "lockstep_1", "pipelined_2": "lockstep_2"}


def _ours(name: str, label: str, *workloads: str, **options: Any) -> Variant:
    options = {"policy": "numpy", "num_actors": "auto", **options}
    adapter = "sampling.envbus"
    return Variant(
        name, f"envbus {label}", Role.OURS, "envbus", adapter, options, workloads=workloads
    )


def _peer(name: str, label: str, library: str, *workloads: str, **options: Any) -> Variant:
    adapter = f"sampling.{library}"
    return Variant(name, label, Role.PEER, library, adapter, options, workloads=workloads)


def _burning(name: str, label: str, num_actors: int, **config: Any) -> Variant:
    options = {"policy": "burn", "num_actors": num_actors, "config": config}
    return replace(_ours(name, "", "burn", **options), label=label)


SAMPLE_VARIANTS = {
    variant.name: variant
    for variant in (
        _ours(OURS_NUMPY, "EnvRunner, NumPy policy", *_COLLECTORS, "team"),
        _ours(OURS_TORCH, "EnvRunner, torch policy", *_COLLECTORS, "team", policy="torch"),
        _ours(
            GROUP_NUMPY,
            "EnvRunnerGroup, 2 runners, envs in the runners, NumPy policy",
            *_COMPUTING,
            "team",
            runners=2,
        ),
        _ours(
            GROUP_TORCH,
            "EnvRunnerGroup, 2 runners, envs in the runners, torch policy",
            *_COMPUTING,
            "team",
            policy="torch",
            runners=2,
        ),
        _ours(
            GROUP_OF_ALL,
            "EnvRunnerGroup, a runner per env, NumPy policy",
            "jitter",
            runners="num_envs",
        ),
        _ours(
            GROUP_ASYNC,
            "EnvRunnerGroup, a runner per env, asynchronous, NumPy policy",
            "jitter",
            runners="num_envs",
            asynchronous=True,
            fragment=_OF_ONE_ENV,
        ),
        _ours(
            GROUP_ASYNC_TORCH,
            "EnvRunnerGroup, a runner per env, asynchronous, torch policy",
            "jitter",
            policy="torch",
            runners="num_envs",
            asynchronous=True,
            fragment=_OF_ONE_ENV,
        ),
        _ours(
            "envbus_enough",
            "EnvRunner, NumPy policy, the first env ends a fragment",
            "jitter",
            config={"enough_envs": 1e-6},
        ),
        _ours(
            RUN_AHEAD,
            "EnvRunner, NumPy policy, envs run ahead",
            "jitter",
            config={"run_ahead": 256},
        ),
        _ours(
            RUN_AHEAD_TORCH,
            "EnvRunner, torch policy, envs run ahead",
            "jitter",
            policy="torch",
            config={"run_ahead": 256},
        ),
        _peer(
            "sb3_rollouts_dummy",
            "SB3 collect_rollouts, DummyVecEnv",
            "sb3",
            *_COMPUTING,
            envs="dummy",
        ),
        _peer(
            "sb3_rollouts_subproc",
            "SB3 collect_rollouts, SubprocVecEnv",
            "sb3",
            *_COLLECTORS,
            envs="subproc",
        ),
        _peer(
            "tianshou_collect_dummy",
            "Tianshou Collector, DummyVectorEnv",
            "tianshou",
            *_COMPUTING,
            envs="dummy",
        ),
        _peer(
            "tianshou_collect_shmem",
            "Tianshou Collector, ShmemVectorEnv",
            "tianshou",
            *_COLLECTORS,
            envs="shmem",
        ),
        _peer(
            "tianshou_collect_async",
            "Tianshou AsyncCollector, ShmemVectorEnv",
            "tianshou",
            "jitter",
            envs="async",
        ),
        _peer("rllib_sync", "RLlib EnvRunner, sync", "rllib", *_COMPUTING, "team", envs="sync"),
        _peer("rllib_async", "RLlib EnvRunner, async", "rllib", "jitter", envs="async"),
        _peer(
            "torchrl_vector",
            "TorchRL Collector, Gymnasium's SyncVectorEnv",
            "torchrl",
            *_COMPUTING,
            collector="vector",
        ),
        _peer(
            "torchrl_multi",
            "TorchRL MultiSyncCollector, 2 processes",
            "torchrl",
            *_COMPUTING,
            collector="multi",
        ),
        _peer(
            "torchrl_parallel",
            "TorchRL Collector, ParallelEnv",
            "torchrl",
            "jitter",
            collector="parallel",
        ),
        Variant(
            "independent",
            "a process per env, plain loops, no policy",
            Role.BOUND,
            "gymnasium",
            "in_process",
            {"processes": "num_envs"},
            workloads=("jitter",),
        ),
        _burning("lockstep_1", "1 actor, not pipelined", 1),
        _burning("pipelined_1", "1 actor, pipelined", 1, pipelined=True),
        _burning("lockstep_2", "2 actors, all envs together", 2, min_envs=16),
        _burning("pipelined_2", "2 actors, pipelined", 2, pipelined=True),
        _burning("default_2", "2 actors, whoever is ready (the default)", 2),
    )
}

SAMPLE_CASES = (
    Case("cartpole", 64),
    Case("pixels", 32),
    Case("jitter", 16),
    Case("team", 16),
    Case("burn", 16),
)
#: A run is of whole fragments, of up to half a second each. Equal parts of envs that are slow by
#: chance come as fast as those of the one that was slowest so far, which evens out in seconds.
_LONGER = {"jitter": 3.0}
SAMPLE_SCHEDULE = Schedule(rounds=5, seconds=1.0, warm_up=0.3, starts=0, times_as_long=_LONGER)
SAMPLE_QUICK = Schedule(rounds=3, seconds=0.5, warm_up=0.1, starts=0, times_as_long=_LONGER)
