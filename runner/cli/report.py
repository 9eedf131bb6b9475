"""How a job looks to people: a progress line while it runs, a table at its end.

Progress goes to standard error, so that standard output holds the result only.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from envbus.runner.cli.console import say
from envbus.runner.cli.job import JobResult
from envbus.runner.cli.stepping import Measured
from envbus.runner.cli.stepping import Progress as StepProgress
from envbus.runner.cli.tuning import Cost, TuneResult

__all__ = ["ProgressLine", "print_result", "print_tuning"]

#: Seconds between two lines where there is no terminal to rewrite one.
_LINE_EVERY = 1.0


class ProgressLine:
    """Shows where the job is: one line that is rewritten, or plain lines off a terminal.

    Redrawn only when the job reports, by no thread of its own: it would take processor time
    from what is being measured.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._backend = ""
        self._restarts = 0
        self._last_line = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<14}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                console=console,
                transient=True,
                auto_refresh=False,
            )

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: StepProgress) -> None:
        """Show one report."""
        if progress.backend != self._backend:
            self._begin(progress.backend)
        if progress.killed is not None:
            self._say(f"{progress.backend}: killed actor process {progress.killed}")
        elif progress.restarts is not None and progress.restarts > self._restarts:
            self._restarts = progress.restarts
            self._say(f"{progress.backend}: it was started again; all other envs went on")
        rate = progress.env_steps / progress.seconds if progress.seconds else 0.0
        text = (
            f"{progress.seconds:5.1f} s  {progress.env_steps:>11,} env steps  "
            f"{rate:>9,.0f}/s  {progress.episodes:>7,} episodes"
        )
        if self._bar is not None:
            task = self._bar.task_ids[-1]
            self._bar.update(task, completed=progress.fraction, text=text)
            self._bar.refresh()
        elif progress.seconds - self._last_line >= _LINE_EVERY:
            self._last_line = progress.seconds
            self._say(f"{progress.backend}: {text.strip()}")

    def _begin(self, backend: str) -> None:
        self._backend = backend
        self._last_line = 0.0
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(backend, total=1.0, text="")

    def _say(self, text: str) -> None:
        say(self._console, text)


def print_result(console: Console, result: JobResult) -> None:
    """Print what was stepped, a table with one column per vector env, and what is missing."""
    heading = (
        f"{result.env}: {_count(result.num_envs, 'env')}, {_count(result.actors, 'actor')}, "
        f"policy {result.policy}"
    )
    if result.interrupted:
        heading += " (interrupted)"
    table = Table("", box=SIMPLE_HEAD)
    for measured in result.measured:
        table.add_column(measured.backend, justify="right", no_wrap=True)
    for row in zip(*(_cells(measured) for measured in result.measured), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    say(console, heading)
    console.print(table)
    for backend, reason in result.not_measured.items():
        say(console, f"{backend}: not measured: {reason}")


def print_tuning(console: Console, result: TuneResult) -> None:
    """Print what the env costs, a row per number of actors, and the line to write."""
    heading = f"{result.env}: {_count(result.num_envs, 'env')}, {_count(result.cores, 'core')}"
    if result.interrupted:
        heading += " (interrupted)"
    say(console, heading)
    if result.cost is not None:
        say(console, _cost_text(result.cost))
    if not result.trials:
        return
    table = Table("", box=SIMPLE_HEAD)
    for name in ("env steps/s", "step p50 (ms)", "cores used", "memory (MiB)"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in result.trials:
        table.add_row(
            f"{_count(trial.num_actors, 'actor')} of {_count(trial.envs_per_actor, 'env')}",
            f"{trial.env_steps_per_second:,.0f}",
            _number(trial.latency_p50_ms, ".3f"),
            _number(trial.cores_used, ".1f"),
            f"{trial.memory_mb:,.0f}",
        )
    console.print(table)
    say(console, f"write: {result.line}")


def _cost_text(cost: Cost) -> str:
    size = "of no fixed size"
    if cost.observation_bytes is not None:
        size = f"of {_count(cost.observation_bytes, 'byte')}"
    return (
        f"one env: step {cost.step_ms:.3f} ms, of which it waits {cost.waits:.0%}; "
        f"reset {cost.reset_ms:.3f} ms, CPU time {cost.reset_cpu_ms:.3f} ms; "
        f"observations {size}; an actor with it has {cost.memory_mb:.0f} MiB"
    )


def _cells(measured: Measured) -> list[tuple[str, str]]:
    return [
        ("env steps per second", f"{measured.env_steps_per_second:,.0f}"),
        ("env steps", f"{measured.env_steps:,}"),
        ("seconds", f"{measured.seconds:.1f}"),
        ("episodes", f"{measured.episodes:,}"),
        ("mean return", _number(measured.mean_return, ".2f")),
        ("mean episode length", _number(measured.mean_length, ".1f")),
        ("step latency p50 (ms)", _number(measured.latency_p50_ms, ".3f")),
        ("step latency p99 (ms)", _number(measured.latency_p99_ms, ".3f")),
        ("start-up (s)", f"{measured.start_seconds:.2f}"),
        ("restarts", "-" if measured.restarts is None else str(measured.restarts)),
        ("episodes lost", str(measured.lost_episodes)),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:,{form}}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
