"""Learning curves: printed while they grow, kept as JSON lines, drawn.

    python examples/curves.py --plot curves.svg run.jsonl another.jsonl

draws one panel per file, with a line per run. Each run is one line, an object: the options
(`env`, `seed`, ...), `steps` and `returns` (the curve: env steps, mean return of the last 100
episodes), `seconds`, `solved` and what the run found out besides.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Points of a curve that are kept.
POINTS = 150


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, help="draw the curve to this file (matplotlib)")
    parser.add_argument("--save", type=Path, help="add the curve to this file, as a line of JSON")


class Curve:
    """Mean return over env steps of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._steps: list[int] = []
        self._returns: list[float] = []
        self._begin = time.perf_counter()

    def add(self, steps: int, returns: Iterable[float]) -> None:
        """Take up the returns of the last episodes; nothing is printed or kept of none."""
        if not (last := list(returns)):
            return
        self._steps.append(steps)
        self._returns.append(float(np.mean(last)))
        seconds = time.perf_counter() - self._begin
        print(f"{steps:>8} steps  {seconds:6.1f} s  return {self._returns[-1]:7.1f}", flush=True)

    def end(self, **found: Any) -> None:
        """Print what was found, and save and draw as the options say."""
        kept = np.unique(np.linspace(0, len(self._steps) - 1, POINTS).round().astype(int))
        target = self._args.target
        run = {
            **{name: getattr(self._args, name) for name in ("env", "seed", "num_envs", "target")},
            "solved": self._returns[-1] >= target,
            "seconds": round(time.perf_counter() - self._begin, 1),
            **{n: round(v, 1) if isinstance(v, float) else v for n, v in found.items()},
            "steps": [self._steps[i] for i in kept],
            "returns": [round(self._returns[i], 1) for i in kept],
        }
        head = {name: value for name, value in run.items() if name not in ("steps", "returns")}
        print(json.dumps({**head, "env_steps": self._steps[-1]}))
        if self._args.save is not None:
            with self._args.save.open("a", encoding="utf-8") as file:
                print(json.dumps(run), file=file)
        if self._args.plot is not None:
            draw({self._args.env: [run]}, self._args.plot)


def draw(panels: dict[str, Sequence[dict[str, Any]]], file: Path) -> None:
    """Draw the runs of each panel, by its title, to a PNG, SVG or PDF."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "envbus"  # the same runs give the same file
    from matplotlib import pyplot as plt

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(5 * columns, 3 * rows))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, runs) in zip(axes.flat, panels.items(), strict=False):
        for run in runs:
            axis.plot(run["steps"], run["returns"], linewidth=1.2, label=f"seed {run['seed']}")
        axis.axhline(runs[0]["target"], color="#777777", linestyle="--", linewidth=1)
        if "random" in runs[0]:
            axis.axhline(runs[0]["random"], color="#777777", linestyle=":", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("env steps", fontsize=8)
        axis.set_ylabel("mean return of 100 episodes", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws learning curves.")
    parser.add_argument("files", nargs="+", type=Path, help="what --save has written")
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    panels = {
        file.stem: [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for file in args.files
    }
    draw(panels, args.plot)


if __name__ == "__main__":
    main()
