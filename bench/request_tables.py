"""Tables of single requests and their answers: the bus, policy workers, the bridge. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbus.bench.markdown import table
from envbus.bench.record import Record

__all__ = ["REQUEST_KINDS", "requests_table"]

#: Kinds of records that are told here, in this order, and their titles.
REQUEST_KINDS = {
    "bus": "The bus alone",
    "policy": "Policy workers",
    "bridge": "Simulators that ask for actions",
}
_NAMES = {"http": "HTTP and pickle (stand-in for RLlib's PolicyServerInput)", "grpc": "gRPC"}


@dataclass(frozen=True)
class _Layout:
    """Key of what a row is named by, title of the cases, and columns: key, title, form."""

    name: str
    title: str
    columns: tuple[tuple[str, str, str], ...]


_LATENCY = (("p50_us", "p50 us", ".1f"), ("p99_us", "p99 us", ".1f"))
_LAYOUTS = {
    "bus": _Layout(
        "carrier",
        "bus: payload",
        (
            ("round_trip_p50_us", "round trip p50 us", ".1f"),
            ("round_trip_p99_us", "p99 us", ".1f"),
            ("messages_per_second", "messages/s", ",.0f"),
        ),
    ),
    "policy": _Layout("way", "actions of an MLP: observations", _LATENCY),
    "bridge": _Layout(
        "way",
        "get_action: observation",
        (*_LATENCY, ("per_second", "actions/s, 1,000 episodes", ",.0f")),
    ),
}


def requests_table(record: Record, *, spread: bool = False) -> str:
    """Return all rows of a record of `REQUEST_KINDS`.

    Args:
        record: With rows by case and way.
        spread: With the quartiles of each figure.
    """
    layout = _LAYOUTS[record["kind"]]
    head = [layout.title, "", *(title for _, title, _ in layout.columns)]
    body, missing = [], []
    for row in record["rows"]:
        name = _NAMES.get(row[layout.name], row[layout.name])
        cells = [_cell(row, key, form, spread) for key, _, form in layout.columns]
        body.append([row["case"], name, *cells])
        if row["status"] != "ok":
            missing.append(f"- {name}, {row['case']}: {row['reason']}")
    text = table(head, body)
    return text + ("\nLeft out:\n\n" + "\n".join(missing) + "\n" if missing else "")


def _cell(row: dict[str, Any], key: str, form: str, spread: bool) -> str:
    if key not in row:
        return "-"
    found = row[key]
    median = format(found["median"], form)
    return f"{median} ({found['q1']:{form}} to {found['q3']:{form}})" if spread else median
