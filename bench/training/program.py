"""What each program of a library does beside its training: options in, one line of JSON out."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Trained", "Training", "run"]


class Training(NamedTuple):
    """What to train."""

    env: str
    num_envs: int
    steps: int
    #: As in `TrainingCase.ways`.
    way: str
    seed: int


class Trained(NamedTuple):
    """What came of it."""

    #: Of training alone: without imports, and without the start of the envs.
    seconds: float
    #: Mean of the last episodes.
    episode_return: float


def run(train: Callable[[Training], Trained]) -> None:
    """Train as the command line says, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", required=True)
    for name in ("--num-envs", "--steps", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--way", required=True)
    training = Training(**vars(parser.parse_args()))
    print(json.dumps(train(training)._asdict()), flush=True)


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
