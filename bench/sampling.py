"""Env steps per second that collectors sample with a policy, interleaved as `vector.py` does it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from envbus.bench.cases import Case, Schedule
from envbus.bench.environments import ONE_THREAD, Environments
from envbus.bench.record import Record
from envbus.bench.variants import Variant
from envbus.bench.vector import Keep, Say, forget, measure_cases

__all__ = ["measure_sampling"]


def measure_sampling(
    cases: Sequence[Case],
    variants: Sequence[Variant],
    schedule: Schedule,
    environments: Environments,
    say: Say = print,
    keep: Keep = forget,
) -> Record:
    """Measure all cases; return the record with one row per case and variant.

    Every library computes on one thread, which is faster for all of them with such a network.
    """
    os.environ.update(ONE_THREAD)
    return measure_cases("sample", cases, variants, schedule, environments, say, keep)
