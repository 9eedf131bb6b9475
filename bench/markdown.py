"""What tables of results are made of: cells, tables, and where and how was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envbus.bench.record import Record

__all__ = ["conditions", "microseconds", "short", "table"]

#: What runs where, by kind of record.
_APART = {
    "bus": "the other end in a process of its own",
    "policy": "each way's worker in a process of its own",
    "bridge": "each server and each way's clients in processes of their own",
}


def conditions(record: Record) -> str:
    """Return where, when, on which code and how a record was measured."""
    machine, schedule = record["machine"], record["schedule"]
    apart = _APART.get(record["kind"], "every library in its own process and environment")
    rounds, unit = (
        (schedule["starts"], "starts")
        if record["kind"] == "actors"
        else (schedule["rounds"], "interleaved rounds")
    )
    longer = "".join(
        f", of {workload} {times * schedule['seconds']:g} s"
        for workload, times in schedule.get("times_as_long", {}).items()
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}; commit {record['commit']}, "
        f"{record['date']}. Medians of {rounds} {unit} of "
        f"{schedule['seconds']:g} s each{longer}; {apart}.\n"
    )


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table; all columns but the first are of numbers."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---" if index == 0 else "---:" for index in range(len(head))) + "|",
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]
    return "\n".join(lines) + "\n"


def short(number: float) -> str:
    """Return three significant digits: `9.87k`, `1.23M`."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def microseconds(value: float | None) -> str:
    """Return a time as it stands in a cell."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
