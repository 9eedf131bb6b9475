"""Records as the benchmark would write them, with numbers that are easy to check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbus.bench.harness.record import Record
from envbus.bench.steps.variants import VARIANTS


def spread(value: float) -> dict[str, float]:
    return {"min": value, "q1": value, "median": value, "q3": value, "max": value, "n": 3}


def vector_row(
    workload: str, num_envs: int, variant: str, rate: float, variants: Mapping[str, Any] = VARIANTS
) -> dict[str, Any]:
    return {
        "workload": workload,
        "num_envs": num_envs,
        "variant": variant,
        "role": variants[variant].role.value,
        "options": variants[variant].options,
        "status": "ok",
        "env_steps_per_second": spread(rate),
        "latency_p50_us": spread(12.5),
        "latency_p99_us": spread(2500.0),
        "cores": spread(1.5),
        "rounds": [rate],
    }


def failed_row(workload: str, num_envs: int, variant: str, reason: str) -> dict[str, Any]:
    return {
        "workload": workload,
        "num_envs": num_envs,
        "variant": variant,
        "role": VARIANTS[variant].role.value,
        "options": {},
        "status": "failed",
        "reason": reason,
    }


def start_row(
    num_envs: int, variant: str, num_actors: int, seconds: float, mb: float
) -> dict[str, Any]:
    return {
        "workload": "cartpole",
        "num_envs": num_envs,
        "variant": variant,
        "role": VARIANTS[variant].role.value,
        "options": {"num_actors": num_actors},
        "status": "ok",
        "seconds": spread(seconds),
        "pss_mb": spread(mb),
        "uss_mb": spread(mb),
        "rss_mb": spread(2 * mb),
        "processes": 3,
    }


def actors_row(num_actors: int, step_us: float, descriptors: float) -> dict[str, Any]:
    return {
        "workload": "null",
        "num_actors": num_actors,
        "variant": "envbus_shm",
        "status": "ok",
        "seconds": spread(0.5),
        "step_us": spread(step_us),
        "step_us_per_actor": spread(step_us / num_actors),
        "pss_mb_per_actor": spread(7.0),
        "descriptors_per_actor": spread(descriptors),
        "cores": spread(1.5),
    }


def bus_row(case: str, carrier: str, p50: float) -> dict[str, Any]:
    return {
        "case": case,
        "way": carrier,
        "status": "ok",
        "p50_us": spread(p50),
        "p99_us": spread(2 * p50),
        "per_second": spread(1e6 / p50),
    }


def bridge_row(case: str, way: str, **values: float) -> dict[str, Any]:
    """One way of the bridge's benchmark: medians of `p50_us`, `p99_us`, `per_second`."""
    spreads = {key: spread(value) for key, value in values.items()}
    return {"case": case, "way": way, "status": "ok", **spreads}


def policy_row(case: str, way: str, p50: float) -> dict[str, Any]:
    return {
        "case": case,
        "way": way,
        "status": "ok",
        "p50_us": spread(p50),
        "p99_us": spread(2 * p50),
    }


def recovered_row(variant: str, seconds: float, **others: float) -> dict[str, Any]:
    return {
        "workload": "cartpole",
        "num_envs": 16,
        "variant": variant,
        "role": "ours",
        "options": {},
        "status": "ok",
        "outcome": "recovered",
        "seconds": spread(seconds),
        "seconds_p99": 2 * seconds,
        "others_env_steps_per_second": others,
    }


def broken_row(variant: str, raised: str, surfaced: float, close_error: str) -> dict[str, Any]:
    return {
        "workload": "cartpole",
        "num_envs": 16,
        "variant": variant,
        "role": "peer",
        "options": {},
        "status": "ok",
        "outcome": "broken",
        "raised": {raised: 5},
        "close_error": {close_error: 5},
        "surfaced": spread(surfaced),
        "by_hand": spread(0.25),
        "left": 15,
    }


def profile_row(piece: str, us: float, way: str = "words") -> dict[str, Any]:
    return {
        "way": way,
        "workload": "null",
        "num_envs": 8,
        "piece": piece,
        "status": "ok",
        "us": us,
    }


def record(kind: str, rows: list[dict[str, Any]]) -> Record:
    return {
        "kind": kind,
        "date": "2026-11-21",
        "commit": "0123456789ab",
        "machine": {
            "cpu": "A CPU",
            "cores": 2,
            "memory_gib": 24,
            "system": "Linux 6",
            "python": "3.11.7",
        },
        "schedule": {"rounds": 7, "seconds": 1.0, "starts": 3},
        "versions": {"gymnasium": {"gymnasium": "1.4.0"}},
        "rows": rows,
    }
