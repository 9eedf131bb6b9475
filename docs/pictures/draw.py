"""Draws the pictures: `python docs/pictures/draw.py` makes an SVG of each text beside it.

A *walk* has columns and, from top to bottom, what goes from one to another:

    walk
    column caller | your loop
    caller > pool: send(actions)
    pool: a note on one column

*Bars* are numbers side by side:

    bars | CartPole, 64 envs: us
    step the envs, write results | 196

A *map* has boxes in a grid (column, row, columns wide) and lines between them:

    map
    box pool 0 1 2 | ActorPool | a second line
    caller > pool: send
    pool = actors: shared memory
    waits ~ acts: both ways
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
LETTER, LINE, PAD = 6.4, 17, 12
LABEL, COLUMN = 23, 165
BOX_WIDTH, BOX_HEIGHT, GAP, ROW_GAP = 150, 46, 26, 58
STYLE = (
    "text{font:12px Helvetica,Arial,sans-serif;fill:#1f2933}.b{font-weight:bold}"
    ".n{fill:#52606d}rect{fill:#e3edf7;stroke:#52708f}.k{fill:#fff;stroke:none}"
    ".w{fill:#fff8e1;stroke:#d0b86a}path{stroke:#52708f;stroke-width:1.3;fill:none}"
    ".l{stroke:#b7c4d1;stroke-dasharray:4 4}.d{stroke-width:4}"
)
HEAD = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" style="fill:#52708f;stroke:none"/>'
    "</marker></defs>"
)


@dataclass(frozen=True)
class Arrow:
    """What goes from one box or column to another, or a note if it stays."""

    start: str
    kind: str
    end: str
    text: str


def draw(text: str) -> str:
    """Return the SVG of a picture's text."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kind = lines[0].partition(" ")[0]
    return draw_bars(lines) if kind == "bars" else KINDS[kind](lines[1:])


def arrows(lines: list[str]) -> Iterator[Arrow]:
    """Yield `a > b: text`, with `=` or `~` likewise, and the note `a: text` as one to itself."""
    for line in lines:
        matched = re.fullmatch(r"(\w+)(?: ([>=~]) (\w+))?(?:: ?(.*))?", line)
        if not matched:
            raise ValueError(f"not an arrow: {line}")
        start, kind, end, label = matched.groups()
        yield Arrow(start, kind or "", end or start, label or "")


def draw_walk(lines: list[str]) -> str:
    """Return a sequence diagram."""
    names = {}
    rest = []
    for line in lines:
        if line.startswith("column "):
            name, _, title = line.removeprefix("column ").partition(" | ")
            names[name] = [part.strip() for part in title.split("|")]
        else:
            rest.append(line)
    steps = [(arrow, textwrap.wrap(arrow.text, LABEL)) for arrow in arrows(rest)]
    order = list(names)
    places, x = {}, 70.0
    for name in order:
        places[name] = x
        x += COLUMN
    top = 20 + LINE * max(len(title) for title in names.values()) + PAD
    parts, y = [], float(top)
    for arrow, label in steps:
        start, end = places[arrow.start], places[arrow.end]
        tall = 15 * len(label)
        if start == end:
            wide = max(width(line) for line in label) + 12
            parts.append(rect(start - wide / 2, y + 8, wide, tall + 6, "w"))
            parts += centred(label, start, y + 21)
            y += tall + 18
            continue
        x, wide = (start + end) / 2, max(width(line) for line in label) + 4
        parts.append(rect(x - wide / 2, y + 6, wide, tall, "k"))
        parts += centred(label, x, y + 18)
        y += tall + 10
        parts.append(f'<path d="M{start:.0f} {y:.0f}H{end:.0f}" marker-end="url(#a)"/>')
    heads = []
    for name, title in names.items():
        wide = 1.08 * max(width(part) for part in title) + PAD
        heads.append(f'<path class="l" d="M{places[name]:.0f} 20V{y + 12:.0f}"/>')
        heads.append(rect(places[name] - wide / 2, 10, wide, LINE * len(title) + PAD))
        heads += words(title, places[name], 10 + PAD / 2)
    return page(places[order[-1]] + 70, y + 20, heads + parts)


def centred(lines: list[str], x: float, y: float) -> list[str]:
    """Return lines of plain text, centred at x."""
    return [
        f'<text x="{x:.0f}" y="{y + 15 * n:.0f}" text-anchor="middle">{escape(line)}</text>'
        for n, line in enumerate(lines)
    ]


def draw_map(lines: list[str]) -> str:
    """Return boxes in a grid, and lines between them."""
    boxes: dict[str, tuple[float, float, float, list[str]]] = {}
    rest = []
    for line in lines:
        if line.startswith("box "):
            head, *title = [part.strip() for part in line.removeprefix("box ").split("|")]
            name, column, row, *span = head.split()
            wide = float(span[0]) if span else 1.0
            x = 10 + float(column) * (BOX_WIDTH + GAP)
            y = 10 + float(row) * (BOX_HEIGHT + ROW_GAP)
            boxes[name] = (x, y, wide * BOX_WIDTH + (wide - 1) * GAP, title)
        else:
            rest.append(line)
    parts, labels = [], []
    for arrow in arrows(rest):
        x1, y1, x2, y2 = between(boxes[arrow.start], boxes[arrow.end])
        tip = "" if arrow.kind == "=" else ' marker-end="url(#a)"'
        tip += ' marker-start="url(#a)"' if arrow.kind == "~" else ""
        style = ' class="d"' if arrow.kind == "=" else ""
        parts.append(f'<path{style} d="M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"{tip}/>')
        if arrow.text:
            x, y, wide = (x1 + x2) / 2, (y1 + y2) / 2, width(arrow.text)
            labels.append(rect(x - wide / 2 - 3, y - 9, wide + 6, 17, "k"))
            labels.append(
                f'<text class="n" x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">'
                f"{escape(arrow.text)}</text>"
            )
    parts += labels
    for x, y, wide, title in boxes.values():
        parts.append(rect(x, y, wide, BOX_HEIGHT))
        parts += words(title, x + wide / 2, y + (BOX_HEIGHT - LINE * len(title)) / 2)
    right = max(x + wide for x, _, wide, _ in boxes.values())
    bottom = max(y for _, y, _, _ in boxes.values()) + BOX_HEIGHT
    return page(right + 10, bottom + 10, parts)


def draw_bars(lines: list[str]) -> str:
    """Return a bar for each line but the first, which is the title."""
    rows = [[part.strip() for part in line.split("|")] for line in lines]
    (_, title), *bars = rows
    left = max(width(name) for name, _ in bars) + 20
    scale = 320 / max(float(value) for _, value in bars)
    parts = [f'<text class="b" x="10" y="24">{escape(title)}</text>']
    for number, (name, value) in enumerate(bars):
        y = 40 + 24 * number
        parts.append(f'<text x="10" y="{y + 13}">{escape(name)}</text>')
        parts.append(rect(left, y, max(1.0, scale * float(value)), 18))
        end = left + scale * float(value) + 6
        parts.append(f'<text class="n" x="{end:.0f}" y="{y + 13}">{escape(value)}</text>')
    return page(left + 320 + 60, 50 + 24 * len(bars), parts)


def between(
    one: tuple[float, float, float, list[str]], other: tuple[float, float, float, list[str]]
) -> tuple[float, float, float, float]:
    """Return the line from the edge of one box to the edge of the other."""
    (x1, y1, w1, _), (x2, y2, w2, _) = one, other
    left, right = max(x1, x2), min(x1 + w1, x2 + w2)
    if left < right:  # One above the other: a vertical line.
        x = (left + right) / 2
        return (x, y1 + BOX_HEIGHT, x, y2) if y1 < y2 else (x, y1, x, y2 + BOX_HEIGHT)
    if y1 == y2:
        y = y1 + BOX_HEIGHT / 2
        return (x1 + w1, y, x2, y) if x1 < x2 else (x1, y, x2 + w2, y)
    a, b = x1 + w1 / 2, x2 + w2 / 2
    return (a, y1 + BOX_HEIGHT, b, y2) if y1 < y2 else (a, y1, b, y2 + BOX_HEIGHT)


def width(text: str) -> float:
    """Return about how wide a text is."""
    return len(text) * LETTER


def rect(x: float, y: float, wide: float, tall: float, style: str = "") -> str:
    """Return a rectangle with round corners."""
    kind = f' class="{style}"' if style else ""
    return f'<rect{kind} x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{tall:.0f}" rx="4"/>'


def words(title: list[str], x: float, y: float) -> list[str]:
    """Return lines of text, centred at x; the first one is bold."""
    return [
        f'<text class="{"n" if n else "b"}" x="{x:.0f}" y="{y + 13 + LINE * n:.0f}" '
        f'text-anchor="middle">{escape(line)}</text>'
        for n, line in enumerate(title)
    ]


def page(wide: float, tall: float, parts: list[str]) -> str:
    """Return the whole SVG."""
    size = f"{wide:.0f} {tall:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{wide:.0f}">'
    ground = f'<rect class="k" width="{wide:.0f}" height="{tall:.0f}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", HEAD, ground, *parts, "</svg>", ""])


KINDS = {"walk": draw_walk, "map": draw_map}

if __name__ == "__main__":
    for source in sorted(HERE.glob("*.txt")):
        source.with_suffix(".svg").write_text(draw(source.read_text("utf-8")), "utf-8")
