"""The plain PPO loop of `examples/cleanrl_ppo.py`; only from a clone."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys

from envbus.bench.harness.environments import PACKAGE
from envbus.bench.training.cases import OURS
from envbus.bench.training.program import Trained, Training, run

__all__ = ["train"]

_LAST_LINE = re.compile(r"steps +([0-9.]+) s")


def train(training: Training) -> Trained:
    """Train, and return how long that took."""
    options = {
        "--env-id": training.env,
        "--num-envs": str(training.num_envs),
        "--total-steps": str(training.steps),
        "--seed": str(training.seed),
        "--vector": "envbus" if training.way == OURS else "gymnasium",
    }
    script = PACKAGE.parent / "examples" / "cleanrl_ppo.py"
    words = [word for pair in options.items() for word in pair]
    sys.argv = [str(script), *words]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(script), run_name="__main__")
    lines = told.getvalue().splitlines()
    return Trained(float(_LAST_LINE.findall(lines[-2])[0]), json.loads(lines[-1])["return"])


if __name__ == "__main__":
    run(train)
