"""How a server looks to people: a live table on a terminal, plain lines elsewhere.

Drawn when the server's loop says so, by no thread of its own. Leaves out where counts come from.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.serving.server import Snapshot

__all__ = ["ServerTable", "rows_of"]

#: Seconds between two pictures: on a terminal, and of lines elsewhere.
_DRAW_EVERY = 0.5
_LINE_EVERY = 5.0


class ServerTable:
    """Shows counts, what happened since the last picture beside what happened since the start.

    Args:
        console: Log lines that are to stand above the table go to the same one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._before: Snapshot | None = None
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self.every = _LINE_EVERY if self._live is None else _DRAW_EVERY
        self._due = 0.0

    def __enter__(self) -> ServerTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, line: str) -> None:
        """Write a line. One that finds no room on a full disk is no reason to end the server."""
        file = self._console.file  # not by the console, which keeps all that was not written
        try:
            file.write(f"{line}\n")
            file.flush()
        except BrokenPipeError:  # nobody reads any more
            raise
        except OSError:  # what is still in the file's own buffer comes when there is room
            pass

    def is_due(self, seconds: float) -> bool:
        """Return whether it is time for a picture, `seconds` after the server's start."""
        return seconds >= self._due

    def show(self, now: Snapshot, note: str = "") -> None:
        """Draw a picture; a note says what else there is to say, "draining" for example."""
        self._due = now.seconds + self.every
        before, self._before = self._before, now
        if self._live is not None:
            table = Table(box=SIMPLE_HEAD, title=note or None)
            table.add_column("")
            table.add_column("now", justify="right")
            table.add_column("since the start", justify="right")
            for row in rows_of(now, before):
                table.add_row(*row)
            self._live.update(table, refresh=True)
        else:
            line = "  ".join(_words(now, before))
            self.tell(f"{now.seconds:7.1f} s  {line}{f'  ({note})' if note else ''}")

    def summarize(self, last: Snapshot) -> None:
        """Say what it all came to."""
        table = Table("", box=SIMPLE_HEAD, show_header=False)
        table.add_column("", justify="right")
        table.add_row("seconds", f"{last.seconds:.1f}")
        for name, _, total in rows_of(last, None):
            if total:
                table.add_row(name, total)
        self._console.print(table)


def rows_of(now: Snapshot, before: Snapshot | None) -> list[tuple[str, str, str]]:
    """Return name, what is now, or was since `before`, and what was since the start; "": nothing.

    Pure.
    """
    bridge = now.bridge
    lost = f" + {bridge.lost_clients_now} gone" if bridge.lost_clients_now else ""
    rows = [
        ("clients", f"{bridge.clients_now}{lost}", ""),
        ("episodes", f"{bridge.episodes_now:,}", f"{bridge.ended:,} ended"),
        ("actions", "", f"{bridge.actions:,}"),
        ("actions/s", _rate(now, before), _rate(now, None)),
        ("latency p50 (ms)", _latency(now, before, 0.5), _latency(now, None, 0.5)),
        ("latency p99 (ms)", _latency(now, before, 0.99), _latency(now, None, 0.99)),
        ("rows per call", _rows_per_call(now, before), _rows_per_call(now, None)),
        ("largest call", "", f"{now.largest_batch:,}"),
    ]
    for name, model in now.models.items():
        rows.append((f"model {name}", f"version {model.version}", f"{model.answers:,} answers"))
    if bridge.logged_actions:
        rows.append(("actions of clients", "", f"{bridge.logged_actions:,}"))
    if now.recorded:
        rows.append(("recorded", "", f"{now.recorded:,} episodes, {now.recorded_rows:,} rows"))
    if bridge.over_rate:
        rows.append(("refused for --max-rate", "", f"{bridge.over_rate:,}"))
    if bridge.faulty:
        rows.append(("episodes of lost clients", "", f"{bridge.faulty:,}"))
    for kind, count in now.errors.items():
        new = count - (before.errors.get(kind, 0) if before is not None else 0)
        rows.append((f"errors: {kind}", f"{new:,}" if before is not None else "", f"{count:,}"))
    return rows


def _words(now: Snapshot, before: Snapshot | None) -> list[str]:
    errors = sum(now.errors.values())
    return [
        f"{now.bridge.clients_now} clients",
        f"{now.bridge.episodes_now:,} episodes ({now.bridge.ended:,} ended)",
        f"{_rate(now, before)} actions/s",
        f"p50 {_latency(now, before, 0.5)} ms",
        f"p99 {_latency(now, before, 0.99)} ms",
        f"{_rows_per_call(now, before)} rows/call",
        f"{errors:,} errors",
    ]


def _rate(now: Snapshot, before: Snapshot | None) -> str:
    seconds = now.seconds - (before.seconds if before is not None else 0.0)
    actions = now.bridge.actions - (before.bridge.actions if before is not None else 0)
    return f"{actions / seconds:,.0f}" if seconds > 0 else "-"


def _latency(now: Snapshot, before: Snapshot | None, fraction: float) -> str:
    histogram = LatencyHistogram()
    earlier = before.latency if before is not None else {}
    histogram.add_counts(
        {bucket: count - earlier.get(bucket, 0) for bucket, count in now.latency.items()}
    )
    seconds = histogram.quantile(fraction)
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _rows_per_call(now: Snapshot, before: Snapshot | None) -> str:
    batches = now.batches - (before.batches if before is not None else 0)
    rows = now.rows - (before.rows if before is not None else 0)
    return f"{rows / batches:,.1f}" if batches else "-"
