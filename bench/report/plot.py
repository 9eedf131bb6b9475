"""The figures for the README: env steps per second over the number of envs, and of collectors.

Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envbus.bench.harness.record import Record
from envbus.bench.report.targets import rows_by
from envbus.bench.steps.sample_variants import SAMPLE_VARIANTS
from envbus.bench.steps.variants import VARIANTS, Role

__all__ = ["plot_sampling", "plot_vector"]

#: Variants in the figure, each with its colour (Okabe and Ito's, for colour-blind readers).
_COLOURS = {
    "envbus_shm": "#D55E00",
    "gym_async_shm": "#0072B2",
    "sb3_subproc": "#009E73",
    "tianshou_shmem": "#CC79A7",
    "ray_actors": "#E69F00",
    "puffer_w1": "#56B4E9",
    "gym_sync": "#777777",
}
#: Of bars, by role; peers have another one.
_BARS = {Role.OURS.value: "#D55E00", Role.BOUND.value: "#777777"}
_COLUMNS = 3
#: Inches of one panel.
_PANEL = (3.6, 2.9)


def plot_vector(record: Record, folder: Path) -> list[Path]:
    """Draw a vector record; return the files written, PNG and SVG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = _pyplot()
    rows = rows_by(record, "workload", "variant", "num_envs")
    counts: dict[str, set[int]] = {}
    for workload, _, num_envs in rows:
        counts.setdefault(workload, set()).add(num_envs)
    # A line needs three points; the other workloads are in the tables.
    panels = [workload for workload, numbers in counts.items() if len(numbers) > 2] or list(counts)
    height = -(-len(panels) // _COLUMNS)
    figure, axes = plt.subplots(
        height,
        min(_COLUMNS, len(panels)),
        squeeze=False,
        figsize=(_PANEL[0] * min(_COLUMNS, len(panels)), _PANEL[1] * height + 0.7),
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, workload in zip(axes.flat, panels, strict=False):
        _draw(axis, workload, rows)
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=2, frameon=False, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.7 / (_PANEL[1] * height + 0.7), 1, 1))
    return _save(plt, figure, folder / "vector")


def plot_sampling(record: Record, folder: Path) -> list[Path]:
    """Draw a record of collectors, a bar each; return the files written, PNG and SVG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = _pyplot()
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (workload, num_envs, _), row in rows_by(record, "workload", "num_envs", "variant").items():
        cases.setdefault((workload, num_envs), []).append(row)
    heights = [len(rows) for rows in cases.values()]
    figure, axes = plt.subplots(
        len(cases),
        1,
        squeeze=False,
        figsize=(7.5, 0.27 * sum(heights) + 0.7 * len(cases)),
        gridspec_kw={"height_ratios": heights},
    )
    for axis, ((workload, num_envs), rows) in zip(axes.flat, cases.items(), strict=True):
        rows.sort(key=lambda row: row["env_steps_per_second"]["median"])
        medians, spread = _spread([row["env_steps_per_second"] for row in rows])
        labels = [SAMPLE_VARIANTS[row["variant"]].label for row in rows]
        colours = [_BARS.get(row["role"], "#0072B2") for row in rows]
        axis.barh(labels, medians, xerr=spread, color=colours, height=0.7)
        axis.set_title(f"{workload}, {num_envs} envs: env steps/s", fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    return _save(plt, figure, folder / "sample")


def _pyplot() -> Any:
    import matplotlib as mpl  # an extra: everything but this works without it

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "envbus"  # the same result gives the same file
    from matplotlib import pyplot as plt

    return plt


def _save(plt: Any, figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; return both."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.savefig(files[0], dpi=150, bbox_inches="tight")
    figure.savefig(files[1], metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return files


def _spread(rates: Sequence[dict[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Return medians, and how far the quartiles are below and above."""
    medians = [rate["median"] for rate in rates]
    below = [rate["median"] - rate["q1"] for rate in rates]
    return medians, [below, [rate["q3"] - rate["median"] for rate in rates]]


def _draw(axis: Any, workload: str, rows: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    for name, colour in _COLOURS.items():
        points = sorted(
            (num_envs, row["env_steps_per_second"])
            for (of, variant, num_envs), row in rows.items()
            if (of, variant) == (workload, name)
        )
        if not points:
            continue
        medians, spread = _spread([rate for _, rate in points])
        ours = VARIANTS[name].role is Role.OURS
        parallel = ours or VARIANTS[name].role is Role.PEER
        axis.errorbar(
            [num_envs for num_envs, _ in points],
            medians,
            yerr=spread,
            color=colour,
            label=VARIANTS[name].label,
            marker="o",
            markersize=5 if ours else 3.5,
            linewidth=2.4 if ours else 1.3,
            linestyle="-" if parallel else "--",
            zorder=3 if ours else 2,
        )
    numbers = sorted({num_envs for of, _, num_envs in rows if of == workload})
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, [str(number) for number in numbers])
    axis.set_yscale("log")
    axis.set_title(workload, fontsize=10)
    axis.set_xlabel("envs", fontsize=8)
    axis.set_ylabel("env steps/s", fontsize=8)
    axis.tick_params(which="both", labelsize=8)
    axis.grid(alpha=0.3)
