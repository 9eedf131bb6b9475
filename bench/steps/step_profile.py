"""Where the microseconds of one vector step by messages go, along the actor that answers last.

The pieces follow one another without a gap, so that they add up to the whole; each is the median
over many steps. The same is measured without any probe, to show what the probes cost.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from envbus.bench.adapters.workloads import action_ring, env_fns, make_env
from envbus.bench.harness.record import Record, Schedule, new_record
from envbus.bench.steps.cases import Case
from envbus.bench.steps.step_probes import (
    ActorStep,
    DriverStep,
    driver_probes,
    install_probes,
    take_steps,
)
from envbus.runner import BusVectorEnv

__all__ = ["PIECES", "PROFILE_CASES", "measure_profile", "pieces_of"]

PROFILE_CASES = (
    Case("null", 1),
    Case("null", 8),
    Case("null", 64),
    Case("cartpole", 64),
    Case("pixels", 64),
)
#: In the order in which they happen.
PIECES = (
    "actions: check, write to shared memory",
    "ask: pending request, header",
    "send",
    "wake-up of the actor",
    "decode the request",
    "step the envs, write results",
    "encode the reply",
    "reply: send",
    "wake-up of the driver",
    "settle: match, decode the reply",
    "gather: copy the batch, infos",
)
WHOLE = "whole step, with probes"
WITHOUT_PROBES = "whole step, without probes"
ENVS_ALONE = "of which the envs alone, in a plain loop"
#: Steps per profile that are kept: enough for a steady median.
STEPS = 2000


def measure_profile(
    schedule: Schedule,
    cases: Sequence[Case] = PROFILE_CASES,
    say: Callable[[str], None] = print,
) -> Record:
    """Profile all cases; return the record with one row per case and piece."""
    record = new_record("profile", schedule, {})
    for case in cases:
        pieces = _profile(case, schedule)
        for piece, microseconds in pieces.items():
            record["rows"].append(
                {
                    "workload": case.workload,
                    "num_envs": case.num_envs,
                    "piece": piece,
                    "status": "ok",
                    "us": round(microseconds, 2),
                }
            )
            say(f"{case.name:12} {piece:42} {microseconds:9.1f} us")
    return record


def pieces_of(
    begun: int, driver: DriverStep, actors: dict[bytes, ActorStep], ended: int
) -> dict[str, float]:
    """Return the pieces of one step in microseconds.

    Args:
        begun: When the caller called `step`, in nanoseconds like all stamps.
        driver: The driver's stamps.
        actors: Each actor's, by routing id.
        ended: When `step` returned.
    """
    last = max(driver.received, key=driver.received.__getitem__)
    actor = actors[last]
    sends = [
        driver.sent[peer] - driver.send_begun[peer]
        for peer in driver.sent
        if driver.sent[peer] <= driver.sent[last]
    ]
    stamps = (
        driver.begun - begun,
        driver.sent[last] - driver.begun - sum(sends),
        sum(sends),
        actor.received - driver.sent[last],
        actor.decoded - actor.received,
        actor.stepped - actor.decoded,
        actor.encoded - actor.stepped,
        actor.sent - actor.encoded,
        driver.received[last] - actor.sent,
        driver.collected - driver.received[last],
        ended - driver.collected,
    )
    return {piece: stamp / 1e3 for piece, stamp in zip(PIECES, stamps, strict=True)}


def _profile(case: Case, schedule: Schedule) -> dict[str, float]:
    ring = action_ring(case.workload, case.num_envs)
    envs = BusVectorEnv(env_fns(case.workload, case.num_envs))
    try:
        envs.reset(seed=0)
        _timed_steps(envs, ring, schedule.warm_up)
        plain = _timed_steps(envs, ring, schedule.seconds)
        envs.exec_func(install_probes, _first_envs(envs))
        _timed_steps(envs, ring, schedule.warm_up)
        envs.exec_func(take_steps, _first_envs(envs))
        with driver_probes() as driver_steps:
            spans = _timed_steps(envs, ring, schedule.seconds)
        taken = [found for found in envs.exec_func(take_steps, _first_envs(envs)) if found]
    finally:
        envs.close()
    actors = {identity: [ActorStep(*stamps) for stamps in steps] for identity, steps in taken}
    every = [
        pieces_of(begun, driver, {peer: actors[peer][index] for peer in actors}, ended)
        for index, ((begun, ended), driver) in enumerate(zip(spans, driver_steps, strict=True))
    ]
    profile = {piece: statistics.median(each[piece] for each in every) for piece in PIECES}
    profile[WHOLE] = _median_us(spans)
    profile[WITHOUT_PROBES] = _median_us(plain)
    profile[ENVS_ALONE] = _envs_alone(case, ring, len(actors))
    return profile


def _first_envs(envs: BusVectorEnv) -> list[int]:
    """Return the number of each actor's first env."""
    pids = envs.exec_func(_process_id)
    return [index for index, pid in enumerate(pids) if pid not in pids[:index]]


def _process_id(_: object) -> int:

    return os.getpid()


def _timed_steps(envs: BusVectorEnv, ring: Sequence[Any], seconds: float) -> list[tuple[int, int]]:
    """Step for some time, or `STEPS` times; return begin and end of each in nanoseconds."""
    clock = time.perf_counter_ns
    spans: list[tuple[int, int]] = []
    deadline = clock() + int(seconds * 1e9)
    while len(spans) < STEPS:
        begun = clock()
        # Not `step`, which takes no message where only rows come of it.
        envs.step_async(ring[len(spans) % len(ring)])
        envs.step_wait()
        ended = clock()
        spans.append((begun, ended))
        if ended > deadline:
            break
    return spans


def _envs_alone(case: Case, ring: Sequence[Any], num_actors: int) -> float:
    """Return microseconds in which one actor's share of the envs steps with nothing around it."""
    share = -(-case.num_envs // num_actors)
    envs = [make_env(case.workload, index) for index in range(share)]
    for index, env in enumerate(envs):
        env.reset(seed=index)
    spans: list[tuple[int, int]] = []
    for turn in range(STEPS // 10):
        actions = list(ring[turn % len(ring)][:share])
        begun = time.perf_counter_ns()
        for env, action in zip(envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        spans.append((begun, time.perf_counter_ns()))
    for env in envs:
        env.close()
    return _median_us(spans)


def _median_us(spans: Sequence[tuple[int, int]]) -> float:
    return statistics.median(ended - begun for begun, ended in spans) / 1e3
