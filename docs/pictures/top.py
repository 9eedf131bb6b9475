"""Draws `top.svg`, the screen of `envbus top` with a run made by hand.

Call it by `python docs/pictures/top.py`. Needs the extra `top`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from envbus.runner.cli.top_app import TopApp
from envbus.runner.monitoring.figures import (
    PartFigures,
    ProcessFigures,
    RunFigures,
    fault_figures,
)
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.monitoring.runs import Usage

PART = "ActorPool-1"
ACTORS = 8
HUNG = 5
LINES: Mapping[int, str] = MappingProxyType({4712 + HUNG: "sims/walker.py:88 in step"})


def run() -> ObservedRun:
    """Return a look at a pool of which one actor hangs and another one has just died."""
    processes = [
        ProcessFigures(
            name=f"actor-{i}",
            pid=4712 + i if i != 2 else None,
            state="ready" if i != 2 else "down",
            incarnation=int(i == HUNG),
            envs=(4 * i, 4 * i + 4),
            busy=i == HUNG,
        )
        for i in range(ACTORS)
    ]
    faults = [
        fault_figures(52_320.0, "error", "actor-4", "ValueError: no contact found", env=17),
        fault_figures(52_391.0, "timeout", "actor-5", "a step took longer than 60 s"),
        fault_figures(52_402.0, "crash", "actor-2", "actor-2 ended: killed by SIGSEGV"),
    ]
    part = PartFigures(
        name=PART,
        kind="ActorPool",
        levels={"envs": 4.0 * ACTORS},
        processes=processes,
        faults=faults,
        restarts=True,
    )
    figures = RunFigures(pid=4711, at=0.0, began=0.0, command="train.py", version="", parts=[part])
    rates = {
        (PART, f"actor-{i}"): 1480.0 - 20.0 * (i % 3) for i in range(ACTORS) if i not in (2, HUNG)
    }
    return ObservedRun(
        figures,
        4711,
        process_rates={**rates, (PART, f"actor-{HUNG}"): 0.0},
        stalled={(PART, f"actor-{HUNG}"): 14.2},
        usage={
            4711: Usage(0.34, 412 * 2**20),
            **{4712 + i: Usage(0.97, (180 + 3 * i) * 2**20) for i in range(ACTORS)},
        },
    )


async def screenshot() -> str:
    """Return the picture; it asks no other host for its letters."""
    app = TopApp(Observer(find=list), every=3600.0)
    async with app.run_test(size=(118, 24)) as pilot:
        await app.workers.wait_for_complete()
        app.post_message(app.Seen([run()], LINES))
        await pilot.pause(1.0)
        svg = app.export_screenshot(title="envbus top", simplify=True)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "top", svg)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(asyncio.run(screenshot()), "utf-8")
