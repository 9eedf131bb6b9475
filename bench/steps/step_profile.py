"""Where the microseconds of one vector step go, along the actor that answers last.

Steps go by words in shared memory where they can, and by messages else; both ways are profiled.
The pieces follow one another without a gap, so that they add up to the whole; each is the median
over many steps. The same is measured without any probe, to show what the probes cost.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envbus.bench.adapters.workloads import action_ring, autoreset_mode, env_fns, make_env
from envbus.bench.harness.record import Record, Schedule, new_record
from envbus.bench.steps.cases import Case
from envbus.bench.steps.step_probes import (
    ActorStep,
    DriverStep,
    DriverWordStep,
    driver_probes,
    install_probes,
    take_steps,
    take_word_steps,
    word_probes,
)
from envbus.runner import BusVectorEnv

__all__ = ["PIECES", "WORD_PIECES", "measure_profile", "pieces_of", "word_pieces_of"]

#: Profiled as they go by words, which is how they go: among them those that miss a target.
WORD_CASES = (
    Case("null", 1),
    Case("null", 8),
    Case("null", 64),
    Case("cartpole", 1),
    Case("cartpole", 8),
    Case("cartpole", 64),
    Case("pixels", 8),
    Case("pixels", 64),
    Case("infos", 64),
    Case("short", 64),
    Case("halfcheetah", 8),
)
#: Profiled as they would go by messages.
MESSAGE_CASES = (
    Case("null", 1),
    Case("null", 8),
    Case("null", 64),
    Case("cartpole", 64),
    Case("pixels", 64),
)
_CHECK = "actions: check, write to shared memory"
_STEP = "step the envs, write results"
_GATHER = "gather: copy the batch, infos"
#: Of a step by words, in the order in which they happen.
WORD_PIECES = (
    _CHECK,
    "ask: a word for each actor",
    "until the last actor sees it",
    _STEP,
    "until the driver sees the last answer",
    _GATHER,
)
#: Of a step by messages.
PIECES = (
    _CHECK,
    "ask: pending request, header",
    "send",
    "wake-up of the actor",
    "decode the request",
    _STEP,
    "encode the reply",
    "reply: send",
    "wake-up of the driver",
    "settle: match, decode the reply",
    _GATHER,
)
WHOLE = "whole step, with probes"
WITHOUT_PROBES = "whole step, without probes"
ENVS_ALONE = "of which the envs alone, in a plain loop"
#: Steps per profile that are kept: enough for a steady median.
STEPS = 2000


def measure_profile(
    schedule: Schedule,
    word_cases: Sequence[Case] = WORD_CASES,
    message_cases: Sequence[Case] = MESSAGE_CASES,
    say: Callable[[str], None] = print,
) -> Record:
    """Profile all cases; return the record with one row per way, case and piece."""
    record = new_record("profile", schedule, {})
    ways: tuple[tuple[str, Sequence[Case], Callable[..., dict[str, float]]], ...] = (
        ("words", word_cases, _profile_words),
        ("messages", message_cases, _profile_messages),
    )
    for way, cases, profiled in ways:
        for case in cases:
            envs = BusVectorEnv(
                env_fns(case.workload, case.num_envs), autoreset_mode=autoreset_mode(case.workload)
            )
            try:
                pieces = profiled(envs, case, schedule)
            finally:
                envs.close()
            for piece, microseconds in pieces.items():
                record["rows"].append(
                    {
                        "way": way,
                        "workload": case.workload,
                        "num_envs": case.num_envs,
                        "piece": piece,
                        "status": "ok",
                        "us": round(microseconds, 2),
                    }
                )
                say(f"{way:8} {case.name:14} {piece:42} {microseconds:9.1f} us")
    return record


def word_pieces_of(
    begun: int, driver: DriverWordStep, actors: Sequence[tuple[int, int]], ended: int
) -> dict[str, float]:
    """Return the pieces of one step by words in microseconds.

    Args:
        begun: When the caller called `step`, in nanoseconds like all stamps.
        driver: The driver's stamps.
        actors: When each took and answered it.
        ended: When `step` returned.
    """
    taken, answered = max(actors, key=lambda stamps: stamps[1])
    # A process on another core sees a word before the one that wrote it goes on and stamps that.
    asked = min(driver.asked, taken)
    answered = min(answered, driver.answered)
    stamps = (
        driver.asking - begun,
        asked - driver.asking,
        taken - asked,
        answered - taken,
        driver.answered - answered,
        ended - driver.answered,
    )
    return {piece: stamp / 1e3 for piece, stamp in zip(WORD_PIECES, stamps, strict=True)}


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
    # A message may be there before its sender goes on and stamps that.
    sent = min(driver.sent[last], actor.received)
    replied = min(actor.sent, driver.received[last])
    sends = [
        min(driver.sent[peer], sent) - begun_then
        for peer, begun_then in driver.send_begun.items()
        if begun_then < sent
    ]
    stamps = (
        driver.begun - begun,
        sent - driver.begun - sum(sends),
        sum(sends),
        actor.received - sent,
        actor.decoded - actor.received,
        actor.stepped - actor.decoded,
        actor.encoded - actor.stepped,
        replied - actor.encoded,
        driver.received[last] - replied,
        driver.collected - driver.received[last],
        ended - driver.collected,
    )
    return {piece: stamp / 1e3 for piece, stamp in zip(PIECES, stamps, strict=True)}


def _profile_words(envs: BusVectorEnv, case: Case, schedule: Schedule) -> dict[str, float]:
    """Return the pieces; nothing where no step goes by words (`WORDS_EXIST`)."""
    ring = action_ring(case.workload, case.num_envs)
    step: Callable[[Any], object] = envs.step
    envs.reset(seed=0)
    _timed_steps(step, ring, schedule.warm_up)
    plain = _timed_steps(step, ring, schedule.seconds)
    envs.exec_func(install_probes, _first_envs(envs))
    with word_probes() as driver_steps:
        _timed_steps(step, ring, schedule.warm_up)
        envs.exec_func(take_word_steps, _first_envs(envs))
        driver_steps.clear()
        spans = _timed_steps(step, ring, schedule.seconds)
    actors = [found for found in envs.exec_func(take_word_steps, _first_envs(envs)) if found]
    # Some of the steps went by messages, or ended so.
    by_words = [driver for driver in driver_steps if driver.answered]
    every = [
        word_pieces_of(begun, driver, [actor[driver.number] for actor in actors], ended)
        for driver, (begun, ended) in _matched(by_words, spans)
    ]
    if not every:
        return {}
    return _medians(WORD_PIECES, every, spans, plain, _envs_alone(case, ring, len(actors)))


def _matched(
    steps: Sequence[DriverWordStep], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[DriverWordStep, tuple[int, int]]]:
    """Return steps with the calls in which they were; a call has one at most."""
    left = iter(spans)
    for step in steps:
        yield step, next(span for span in left if span[1] >= step.asking)


def _profile_messages(envs: BusVectorEnv, case: Case, schedule: Schedule) -> dict[str, float]:
    def step(actions: Any) -> None:
        # Not `step`, nor `step_async`, which take no message where only rows come of it.
        envs.step_send(actions)
        envs.step_fetch()

    ring = action_ring(case.workload, case.num_envs)
    envs.reset(seed=0)
    _timed_steps(step, ring, schedule.warm_up)
    plain = _timed_steps(step, ring, schedule.seconds)
    envs.exec_func(install_probes, _first_envs(envs))
    _timed_steps(step, ring, schedule.warm_up)
    envs.exec_func(take_steps, _first_envs(envs))
    with driver_probes() as driver_steps:
        spans = _timed_steps(step, ring, schedule.seconds)
    taken = [found for found in envs.exec_func(take_steps, _first_envs(envs)) if found]
    actors = {identity: [ActorStep(*stamps) for stamps in steps] for identity, steps in taken}
    every = [
        pieces_of(begun, driver, {peer: actors[peer][index] for peer in actors}, ended)
        for index, ((begun, ended), driver) in enumerate(zip(spans, driver_steps, strict=True))
    ]
    return _medians(PIECES, every, spans, plain, _envs_alone(case, ring, len(actors)))


def _medians(
    pieces: Sequence[str],
    every: Sequence[dict[str, float]],
    spans: Sequence[tuple[int, int]],
    plain: Sequence[tuple[int, int]],
    envs_alone: float,
) -> dict[str, float]:
    """Return the median of each piece, of the whole with and without probes, and of the envs."""
    profile = {piece: statistics.median(each[piece] for each in every) for piece in pieces}
    profile[WHOLE] = _median_us(spans)
    profile[WITHOUT_PROBES] = _median_us(plain)
    profile[ENVS_ALONE] = envs_alone
    return profile


def _first_envs(envs: BusVectorEnv) -> list[int]:
    """Return the number of each actor's first env."""
    pids = envs.exec_func(_process_id)
    return [index for index, pid in enumerate(pids) if pid not in pids[:index]]


def _process_id(_: object) -> int:
    return os.getpid()


def _timed_steps(
    step: Callable[[Any], object], ring: Sequence[Any], seconds: float
) -> list[tuple[int, int]]:
    """Step for some time, or `STEPS` times; return begin and end of each in nanoseconds."""
    clock = time.perf_counter_ns
    spans: list[tuple[int, int]] = []
    deadline = clock() + int(seconds * 1e9)
    while len(spans) < STEPS:
        begun = clock()
        step(ring[len(spans) % len(ring)])
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
