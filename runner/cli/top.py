"""The command `top`: what runs on this host, live in a terminal, or once as a table or as JSON.

Leaves out where the figures come from (`envbus.runner.monitoring`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envbus.bus.brief import printable
from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import open_console, say

if TYPE_CHECKING:
    from envbus.runner.monitoring.figures import FaultFigures
    from envbus.runner.monitoring.observer import ObservedRun, Observer
    from envbus.runner.monitoring.overview import OverviewRow

__all__ = ["add_commands", "fault_line", "style_of"]

#: Seconds between the two looks of which a table is made: a process hangs after one.
_BETWEEN: Final = 1.2
#: Faults below a table, the latest.
_FAULTS: Final = 10
_NOTHING: Final = (
    "Nothing of envbus is to be seen here. Start something in another terminal, for example "
    "`envbus run CartPole-v1 --seconds 60`. Seen is what the same user runs on this host, and by "
    "root what all run, unless it runs with ENVBUS_MONITORING=0."
)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to the program."""
    app.command()(top)


def top(
    run: Annotated[
        int | None,
        typer.Argument(
            metavar="[RUN]",
            min=1,
            help="Process id of a run: only that one, and those that it has started.",
            show_default="all of this user",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table and end; takes a second.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and end; takes a second.")
    ] = False,
) -> None:
    """Show what runs on this host: actors with state and steps per second, and where they hang.

    Keys: q ends, s shows the stacks of the chosen process, l the end of its stderr, r restarts it,
    / filters, p pauses.
    """
    from envbus.runner.monitoring.observer import Observer
    from envbus.runner.monitoring.overview import as_data
    from envbus.runner.monitoring.runs import find_runs

    pids = [address.pid for address in find_runs()]
    if run is not None and run not in pids:
        known = ", ".join(map(str, pids)) or "none"
        raise ConfigError(
            f"process {run} is no run of envbus that is to be seen; there are: {known}"
        )
    observer = Observer(run)
    if as_json:
        import msgspec

        runs, lines = _look_twice(observer)
        told = {"at": time.time(), "runs": as_data(runs, lines)}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    elif once:
        _print_table(open_console(), *_look_twice(observer))
    else:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError("this is no terminal; --once prints a table, --json an object")
        try:
            from envbus.runner.cli.top_app import TopApp
        except ImportError as exc:
            raise ConfigError(f"{exc}; --once prints a table without it") from exc
        TopApp(observer, empty=_NOTHING).run()


def style_of(row: OverviewRow) -> str:
    """Return how a row looks: what hangs is red, what is not as it should be yellow."""
    if row.is_hung:
        return "bold red"
    if not row.is_well:
        return "yellow"
    return "" if row.key.process else "bold"


def fault_line(pid: int, part: str, fault: FaultFigures) -> Text:
    """Return a fault in one line: when, why, whose, and what it says."""
    at = datetime.fromtimestamp(fault.at).strftime("%H:%M:%S")
    where = fault.process if fault.env < 0 else f"{fault.process} env {fault.env}"
    text = Text(f"{at}  ").append(printable(f"{fault.cause:<8}"), "red")
    return text.append(printable(f"{pid} {part} {where}: {fault.message}"))


def _look_twice(observer: Observer) -> tuple[Sequence[ObservedRun], Mapping[int, str]]:
    """Look, and look again: rates, and who hangs, are seen between two looks."""
    from envbus.runner.monitoring.hung import HungLines

    if not observer.look():
        return [], {}
    time.sleep(_BETWEEN)
    runs = observer.look()
    return runs, HungLines().look(runs)


def _print_table(console: Console, runs: Sequence[ObservedRun], lines: Mapping[int, str]) -> None:
    from envbus.runner.monitoring.overview import COLUMNS, overview_of

    if not runs:
        say(console, _NOTHING)
        return
    seen = overview_of(runs, lines)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title, is_number in COLUMNS:
        table.add_column(title, justify="right" if is_number else "left")
    for row in seen.rows:
        table.add_row(*map(Text, row.cells()), style=style_of(row))
    say(console, seen.headline())
    console.print(table)
    for fault in seen.latest[:_FAULTS]:
        console.print(fault_line(*fault), soft_wrap=True)
