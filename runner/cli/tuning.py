"""How many actors fit an env: measures it, tries some numbers, and says which to take.

Leaves out the command line and the printing (`main.py`, `report.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from gymnasium.vector.utils import create_empty_array

from envbus.actors.env.cost import env_cost
from envbus.actors.spaces.spaces import is_fixed_size
from envbus.bus.memory.usage import tree_memory
from envbus.bus.transport.cores import usable_cores
from envbus.runner.batches.nested import leaves_of
from envbus.runner.cli.job import MeasureConfig, open_envs
from envbus.runner.cli.stepping import Limits, OnProgress, Stepping
from envbus.runner.policies.policy import PolicyFactory, parse_policy
from envbus.runner.vector.vector_env import BusVectorEnv
from envbus.runner.workers.config import Timeouts
from envbus.runner.workers.waiting_note import cpu_seconds

__all__ = ["Cost", "Trial", "TuneConfig", "TuneResult", "best_of", "numbers_to_try", "run_tuning"]

#: Each takes some MB and some ms to start; whoever needs more knows.
_MOST_ACTORS = 128
#: An env that waits for this share of its step gains by more actors than there are cores.
_WAITS = 0.25
#: A vector step and reset that would take more seconds are not tried, save with most actors.
_MOST_TURN = 10.0
#: Fewer actors are better if they are this close to the best: rates differ by as much by chance.
_CLOSE = 0.95
_MB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig(MeasureConfig):
    """What to try, and for how long."""

    #: For the env alone, and for each number of actors.
    seconds: float = 2.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one env alone takes. Means, in milliseconds."""

    reset_ms: float
    reset_cpu_ms: float
    step_ms: float
    step_cpu_ms: float
    #: Of one observation; None where that differs.
    observation_bytes: int | None
    #: Resident, of one actor with one env.
    memory_mb: float

    @property
    def waits(self) -> float:
        """The part of a step, from 0 to 1, in which it does not compute."""
        return max(0.0, 1.0 - self.step_cpu_ms / self.step_ms) if self.step_ms else 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a vector env with one number of actors did."""

    num_actors: int
    #: Of the actor that has most.
    envs_per_actor: int
    env_steps_per_second: float
    #: Milliseconds of one `step` of the vector env.
    latency_p50_ms: float | None
    #: CPU time over wall time, of actors and this process; None: too short to tell.
    cores_used: float | None
    #: Resident, of all actors. What they share is counted in each.
    memory_mb: float


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of `run_tuning`."""

    env: str
    num_envs: int
    #: Usable ones.
    cores: int
    #: None if Ctrl-C came before.
    cost: Cost | None
    trials: list[Trial]
    #: That fits; None if nothing was tried to its end.
    num_actors: int | None
    #: The line to write.
    line: str | None
    #: Ctrl-C ended it before its time.
    interrupted: bool


def run_tuning(config: TuneConfig, on_progress: OnProgress = lambda _: None) -> TuneResult:
    """Measure the env and try numbers of actors, to the end or to Ctrl-C.

    Args:
        config: What to try.
        on_progress: Called some times per second, between two steps.

    Raises:
        ConfigError: There is no such env, or the policy cannot be used.
        Exception: What making or stepping the envs raises. No process is left.
    """
    make_policy = parse_policy(config.policy)
    cores, cost, interrupted = usable_cores(), None, False
    trials: list[Trial] = []
    try:
        cost = _measure_env(config)
        for num_actors in numbers_to_try(config.num_envs, cores, cost):
            trials.append(_try(config, num_actors, make_policy, on_progress))
    except KeyboardInterrupt:
        interrupted = True
    best = best_of(trials)
    line = f'make_vec("{config.env}", {config.num_envs}, num_actors={best})'
    return TuneResult(
        env=config.env,
        num_envs=config.num_envs,
        cores=cores,
        cost=cost,
        trials=trials,
        num_actors=best,
        line=None if best is None else line,
        interrupted=interrupted,
    )


def numbers_to_try(num_envs: int, cores: int, cost: Cost) -> list[int]:
    """Return numbers of actors, rising: around that of cores, and up to all if the env waits."""
    most = min(num_envs, _MOST_ACTORS)
    numbers = {1, max(cores // 2, 1), cores, 2 * cores}
    if cost.waits >= _WAITS:
        numbers |= {cores << doublings for doublings in range(most.bit_length() + 1)}
    fit = sorted({min(number, most) for number in numbers})
    turn = (cost.step_ms + cost.reset_ms) / 1e3
    return [n for n in fit if n == fit[-1] or -(-num_envs // n) * turn <= _MOST_TURN]


def best_of(trials: Sequence[Trial]) -> int | None:
    """Return the least number of actors whose rate is as good as any; None without trials."""
    most = max((trial.env_steps_per_second for trial in trials), default=0.0)
    close = [t.num_actors for t in trials if t.env_steps_per_second >= _CLOSE * most]
    return min(close, default=None)


def timeouts_of_cost(seconds: float) -> Timeouts:
    """Return those with which `env_cost`, which is one call, has the time that it takes."""
    usual = Timeouts()
    assert usual.reset is not None
    assert usual.step is not None
    # The last step may begin at the end, and have a reset behind it.
    return Timeouts(call=seconds + 2 * usual.reset + usual.step)


def _measure_env(config: TuneConfig) -> Cost:
    with open_envs(
        config.env,
        1,
        num_actors=1,
        threads_per_process=config.threads_per_process,
        timeouts=timeouts_of_cost(config.seconds),
    ) as envs:
        times = envs.exec_func(env_cost, [0], config.seconds, config.seed)[0]
        reset, reset_cpu, step, step_cpu = (1e3 * seconds for seconds in times)
        space, size = envs.single_observation_space, None
        if is_fixed_size(space):
            size = sum(leaf.nbytes for _, leaf in leaves_of(create_empty_array(space, n=1)))
        return Cost(
            reset_ms=reset,
            reset_cpu_ms=reset_cpu,
            step_ms=step,
            step_cpu_ms=step_cpu,
            observation_bytes=size,
            memory_mb=_memory_mb(envs),
        )


def _try(
    config: TuneConfig, num_actors: int, make_policy: PolicyFactory, on_progress: OnProgress
) -> Trial:
    with open_envs(
        config.env,
        config.num_envs,
        num_actors=num_actors,
        threads_per_process=config.threads_per_process,
    ) as envs:
        began, cpu_began = time.perf_counter(), 0.0

        def begin_counting() -> None:
            # Half way: starts and first resets are over.
            nonlocal began, cpu_began
            began, cpu_began = time.perf_counter(), _cpu_seconds(envs)

        stepping = Stepping(
            "1 actor" if num_actors == 1 else f"{num_actors} actors",
            make_policy,
            on_progress,
            at_half_time=begin_counting,
        )
        stepping.run(envs, Limits(seconds=config.seconds), seed=config.seed)
        cpu, seconds = _cpu_seconds(envs) - cpu_began, time.perf_counter() - began
        measured = stepping.measured()
        return Trial(
            num_actors=num_actors,
            envs_per_actor=-(-config.num_envs // num_actors),
            env_steps_per_second=measured.env_steps_per_second,
            latency_p50_ms=measured.latency_p50_ms,
            # The system counts in hundredths of a second.
            cores_used=cpu / seconds if seconds >= 0.1 else None,
            memory_mb=_memory_mb(envs),
        )


def _memory_mb(envs: BusVectorEnv) -> float:
    return sum(tree_memory(envs.actor_pids()).values()) / _MB


def _cpu_seconds(envs: BusVectorEnv) -> float:
    """Return the CPU time of this process, and of the actors and all that they started."""
    return time.process_time() + cpu_seconds(envs.actor_pids())
