"""How a chaos run looks to people: a progress line, and a report at its end."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from envbus.runner.chaos.messages import ChaosProgress
from envbus.runner.chaos.result import GROWTHS, ChaosResult, KindSummary, Quantiles

__all__ = ["ChaosProgressLine", "print_chaos"]

#: Seconds between two lines where there is no terminal to rewrite one.
_LINE_EVERY = 10.0


class ChaosProgressLine:
    """One line that is rewritten on a terminal; off it, a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._label = ""

    def __call__(self, label: str, progress: ChaosProgress) -> None:
        """Show where the run is."""
        if label != self._label:
            self._label, self._next = label, 0.0
        text = (
            f"{label} {progress.seconds:4.0f} s  {progress.env_steps:,} env steps  "
            f"{progress.injections} injections  {progress.faults} faults  "
            f"{progress.recovering} envs recovering"
        )
        if self._console.is_terminal:
            self._console.print(text, end="\r", highlight=False, markup=False, soft_wrap=True)
        elif progress.seconds >= self._next:
            self._next = progress.seconds + _LINE_EVERY
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the line."""
        if self._console.is_terminal:
            self._console.print()


def print_chaos(console: Console, result: ChaosResult) -> None:
    """Print the report."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("what was broken", "times", "faults, by cause"):
        table.add_column(name, justify="right" if name == "times" else "left")
    for name in ("reported p50 / p99", "works p50 / p99"):
        table.add_column(name, justify="right")
    for kind in result.kinds:
        causes = ", ".join(f"{number} {cause}" for cause, number in kind.faults.items())
        table.add_row(
            kind.kind, _number(kind), causes or "-", _times(kind.told), _times(kind.recovered)
        )
    total = ", ".join(f"{number} {cause}" for cause, number in result.faults.items())
    table.add_section()
    table.add_row(
        "all", str(result.injections), total, _times(result.told), _times(result.recovered)
    )
    console.print(table)
    say(
        f"{result.env_steps:,} env steps; {result.actor_restarts} actors and "
        f"{result.env_restarts} single envs started again, {result.recycled} actors recycled"
    )
    calm = result.calm_env_steps_per_second
    share = f", {result.env_steps_per_second / calm:.0%} of it under chaos" if calm else ""
    say(f"env steps/s: {calm:,.0f} calm, {result.env_steps_per_second:,.0f}{share}")
    for field in GROWTHS:
        growth = result.growths.get(field)
        if growth is not None:
            say(
                f"{field.replace('_', ' ')}: {_growth(field, growth.first, growth.last)}"
                + (
                    ""
                    if growth.per_minute is None
                    else f", {_growth_rate(field, growth.per_minute)} per minute"
                )
            )
    start, end = result.at_start, result.at_end
    if start is not None and end is not None:
        say(
            f"processes: {start.processes} at the start, {end.processes} at the end; "
            f"memory files: {start.driver_memory_files}, {end.driver_memory_files}"
        )
    left = result.left
    shared = set(left.shared_files) & set(left.shared_by_us)
    say(
        f"left behind: {len(left.processes)} processes, {len(left.socket_files)} socket files, "
        f"{len(shared)} shared memory files"
    )
    for remark in result.remarks:
        say(f"remark: {remark}")
    for violation in result.violations:
        say(f"VIOLATION: {violation}")
    say(
        f"{len(result.violations)} violations"
        if result.violations
        else "no violation: each action was applied at most once, each applied step delivered "
        "exactly once or its episode reported as faulty, in order, nothing mixed"
    )


def _number(kind: KindSummary) -> str:
    return (
        f"{kind.injected} (+{kind.passed_over} not done)"
        if kind.passed_over
        else str(kind.injected)
    )


def _times(quantiles: Quantiles) -> str:
    if quantiles.p50 is None or quantiles.p99 is None:
        return "-"
    return f"{quantiles.p50 * 1e3:,.0f} / {quantiles.p99 * 1e3:,.0f} ms"


def _growth(field: str, first: float, last: float) -> str:
    if field.endswith("memory"):
        return f"{first / 1e6:.1f} MB to {last / 1e6:.1f} MB"
    return f"{first:.0f} to {last:.0f}"


def _growth_rate(field: str, per_minute: float) -> str:
    if field.endswith("memory"):
        return f"{per_minute / 1e6:+.3f} MB"
    return f"{per_minute:+.2f}"
