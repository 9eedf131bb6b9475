"""Learning curves of the other examples: printed while they grow, kept as JSON lines, drawn.

    python examples/ppo.py --seed 1 --save cartpole.jsonl
    python examples/ppo.py --seed 2 --save cartpole.jsonl
    python examples/curves.py --plot cartpole.svg cartpole.jsonl

Drawn is one panel per file, with a line per run. A run is a line of the file, an object: some of
the options, `solved`, `env_steps`, `seconds`, what the example found out besides, and the curve,
`steps` (of the env) and `returns` (mean of the last 100 episodes).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EPISODES = 100
#: Most points of a curve that are kept.
POINTS = 150
OPTIONS = ("env", "seed", "num_envs", "target")


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", type=Path, help="add the curve to this file, a line of JSON")
    parser.add_argument("--plot", type=Path, help="draw the curve to this file; needs matplotlib")


class Curve:
    """Mean return over env steps of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._last: deque[float] = deque(maxlen=EPISODES)
        self._steps: list[int] = []
        self._returns: list[float] = []
        self._begin = time.perf_counter()

    def add(self, steps: int, returns: Iterable[float]) -> None:
        """Take up the returns of the episodes that ended since the last time."""
        self._last.extend(returns)
        if not self._last:
            return
        self._steps.append(steps)
        self._returns.append(float(np.mean(self._last)))
        print(
            f"{steps:>8} steps  {self._seconds():6.1f} s  return {self._returns[-1]:7.1f}",
            flush=True,
        )

    @property
    def solved(self) -> bool:
        """Whether the mean of 100 episodes has reached the target."""
        target = self._args.target
        return target is not None and len(self._last) == EPISODES and self._returns[-1] >= target

    def end(self, curves: Mapping[str, Any] | None = None, **found: Any) -> None:
        """Print what was found; save and draw as the options say.

        `curves` are others of the same run, `{name: {"steps": ..., "returns": ...}}`.
        """
        kept = np.unique(np.linspace(0, len(self._steps) - 1, POINTS).round().astype(int))
        run = {
            **{name: getattr(self._args, name) for name in OPTIONS},
            "solved": self.solved,
            "env_steps": self._steps[-1],
            "seconds": self._seconds(),
            **found,
        }
        run = {name: round(v, 1) if isinstance(v, float) else v for name, v in run.items()}
        print(json.dumps(run))
        run["steps"] = [self._steps[i] for i in kept]
        run["returns"] = [round(self._returns[i], 1) for i in kept]
        run["curves"] = dict(curves or {})
        if self._args.save is not None:
            with self._args.save.open("a", encoding="utf-8") as file:
                print(json.dumps(run), file=file)
        if self._args.plot is not None:
            draw({self._args.env: [run]}, self._args.plot)

    def _seconds(self) -> float:
        return time.perf_counter() - self._begin


def draw(panels: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Draw runs, by the titles of their panels, to a PNG, SVG or PDF."""
    import matplotlib as mpl

    mpl.use("Agg")
    # The same runs give the same file, and text stays text.
    mpl.rcParams.update({"svg.hashsalt": "envbus", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(4.5 * columns, 3 * rows))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, runs) in zip(axes.flat, panels.items(), strict=False):
        for run in runs:
            thousands = np.asarray(run["steps"]) / 1000
            axis.plot(thousands, run["returns"], linewidth=1.2, label=f"seed {run['seed']}")
            for name, curve in run.get("curves", {}).items():
                thousands = np.asarray(curve["steps"]) / 1000
                axis.plot(thousands, curve["returns"], linewidth=0.8, label=name)
        if runs[0]["target"] is not None:
            axis.axhline(runs[0]["target"], color="#777777", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("thousand env steps", fontsize=8)
        axis.set_ylabel(f"mean return of {EPISODES} episodes", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws learning curves.")
    parser.add_argument("files", nargs="+", type=Path, help="what --save has written")
    parser.add_argument("--plot", type=Path, required=True, help="PNG, SVG or PDF")
    args = parser.parse_args()
    panels = {
        file.stem: [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for file in args.files
    }
    draw(panels, args.plot)


if __name__ == "__main__":
    main()
