"""The screen of `envbus top`, driven by keys, without a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.text import Text
from textual.coordinate import Coordinate
from textual.pilot import Pilot
from textual.widgets import Static

import envbus
from envbus.bus.errors import EnvbusError
from envbus.runner.cli.top_app import Confirmation, ProcessTable, TextScreen, TopApp
from envbus.runner.monitoring.figures import RunFigures, fault_figures
from envbus.runner.monitoring.observer import Observer
from envbus.runner.monitoring.overview import OverviewRow
from envbus.runner.monitoring.runs import RunAddress, find_runs
from tests.runner.monitoring_scenes import actor, figures, hanging_envs
from tests.waiting import PATIENCE

NOTHING = np.zeros(2, int)


#: Below the rows of its run and its part.
FIRST_PROCESS = Coordinate(2, 0)


class Runs:
    """What an observer finds: runs made by hand, whose clock goes a second with each look."""

    def __init__(self, *runs: RunFigures) -> None:
        self.runs = {run.pid: run for run in runs}
        self.looks = 0

    def observer(self) -> Observer:
        def ask(address: RunAddress) -> RunFigures | None:
            self.looks += 1
            run = self.runs.get(address.pid)
            return run and msgspec.structs.replace(run, at=float(self.looks))

        return Observer(find=lambda: [RunAddress(pid, "") for pid in self.runs], ask=ask)

    def app(self, **settings: Any) -> TopApp:
        usual = {
            "every": 0.05,
            "stacks": lambda pid: f"of {pid}",
            "log": lambda pid: f"log of {pid}",
        }
        return TopApp(self.observer(), **{**usual, **settings})


def drive(
    app: TopApp,
    steps: Callable[[Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (140, 40),
) -> None:
    """Run an app, and what a user does with it."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await steps(pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    """Wait until something is to be seen."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, what
        await pilot.pause(0.01)


def text(app: TopApp, of: str) -> str:
    """Return what a widget of text shows."""
    shown = app.screen_stack[0].query_one(of, Static).content
    assert isinstance(shown, Text)
    return shown.plain


def table_of(app: TopApp) -> ProcessTable:
    return app.screen_stack[0].query_one(ProcessTable)


def rows(app: TopApp) -> list[list[Text]]:
    """Return what the table shows."""
    table = table_of(app)
    return [table.get_row_at(place) for place in range(table.row_count)]


def names(app: TopApp) -> list[str]:
    return [row[0].plain.strip() for row in rows(app)]


def chosen(app: TopApp) -> OverviewRow:
    row = table_of(app).chosen
    assert row is not None
    return row


async def choose(pilot: Pilot[None], app: TopApp, name: str) -> None:
    """Move the cursor to a process."""
    await until(pilot, lambda: name in names(app), f"{name} is shown")
    table_of(app).move_cursor(row=names(app).index(name))
    await until(pilot, lambda: chosen(app).name == name, f"{name} is chosen")


@pytest.fixture
def envs() -> Iterator[envbus.BusVectorEnv]:
    """Two actors; the second one hangs."""
    with hanging_envs() as envs:
        yield envs


@pytest.mark.slow
def test_a_process_that_hangs_is_red_with_its_line_and_comes_first(
    envs: envbus.BusVectorEnv,
) -> None:
    app = TopApp(Observer(os.getpid()), every=0.1)

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "(1 hung)" in text(app, "#headline"), "it is seen")
        first, second = rows(app)[2:4]
        assert first[0].plain.strip() == "actor-1"
        assert first[1].plain.startswith("hung at tests/envs.py:")
        assert first[0].style == first[1].style == "bold red"
        assert (second[0].plain.strip(), second[1].plain) == ("actor-0", "ready")

    drive(app, steps)


@pytest.mark.slow
def test_s_shows_the_stacks_of_the_chosen_process(envs: envbus.BusVectorEnv) -> None:
    app = TopApp(Observer(os.getpid()), every=0.1)

    async def steps(pilot: Pilot[None]) -> None:
        await choose(pilot, app, "actor-1")
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.screen, TextScreen), "stacks are shown")
        shown = app.screen.query_one("#reading-text", Static).content
        assert "in _go_wrong" in str(shown)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, TextScreen), "they are not")

    drive(app, steps)


@pytest.mark.slow
def test_l_shows_the_end_of_what_the_chosen_process_wrote() -> None:
    def log(pid: int) -> str:
        if pid == 1001:
            raise EnvbusError("no actor [1001]")
        return "\n".join(f"[line {number}]" for number in range(500))

    app = Runs(figures(actor(0), actor(1))).app(log=log)

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "actor-0" in names(app), "it is shown")
        for name, last in (("actor-0", "[line 499]"), ("actor-1", "no actor [1001]")):
            await choose(pilot, app, name)
            await pilot.press("l")
            await until(pilot, lambda: isinstance(app.screen, TextScreen), "the log is shown")
            assert str(app.screen.query_one("#reading-text", Static).content).endswith(last)
            panel = app.screen.query_one("#reading")
            await until(pilot, lambda panel=panel: panel.is_vertical_scroll_end, "its end is seen")
            assert panel.scroll_offset.y > 400 or name == "actor-1"
            assert f"log of {name}" in str(panel.border_title)
            await pilot.press("l")
            await until(pilot, lambda: not isinstance(app.screen, TextScreen), "it is not")

    drive(app, steps)


@pytest.mark.slow
def test_r_restarts_the_chosen_process_once_that_is_confirmed(envs: envbus.BusVectorEnv) -> None:
    app = TopApp(Observer(os.getpid()), every=0.1)
    before = envs.actor_pids()[1]

    async def steps(pilot: Pilot[None]) -> None:
        await choose(pilot, app, "actor-1")
        for key in ("n", "y"):
            assert envs.actor_pids()[1] == before
            await pilot.press("r")
            await until(pilot, lambda: isinstance(app.screen, Confirmation), "it asks")
            await pilot.press(key)
            await until(pilot, lambda: not isinstance(app.screen, Confirmation), "it has asked")
        await until(pilot, lambda: f"(pid {before}) was killed" in text(app, "#told"), "it is told")
        waiting = threading.Thread(target=envs.step_wait)
        waiting.start()
        await until(pilot, lambda: not waiting.is_alive(), "the step is over")
        await until(pilot, lambda: chosen(app).restarts == 1, "its new life is seen")
        assert "crash" in text(app, "#faults-text")
        assert chosen(app).name == "actor-1"

    drive(app, steps)
    assert before not in envs.actor_pids()


def test_a_kill_shows_within_two_looks() -> None:
    with envbus.make_vec("CartPole-v1", 2, num_actors=2, restart=True) as envs:
        envs.reset(seed=0)
        looks = []

        def find() -> list[RunAddress]:
            looks.append(time.monotonic())
            return find_runs()

        app = TopApp(Observer(os.getpid(), find=find), every=0.5)

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: "actor-0" in names(app), "it is seen")
            os.kill(envs.actor_pids()[0], signal.SIGKILL)
            while not envs.statistics().restarts:
                envs.step(NOTHING)
            before = len(looks)
            await until(pilot, lambda: "faults 1" in text(app, "#headline"), "it is shown")
            assert len(looks) <= before + 2
            assert "ended" in text(app, "#faults-text")

        drive(app, steps)


@pytest.mark.slow
def test_what_cannot_be_restarted_says_why() -> None:
    def refuse(run: int, part: str, process: str, pid: int) -> None:
        raise EnvbusError(f"{run} {part} {process}: pass [restart=True]")

    app = Runs(figures(actor(0))).app(restart=refuse)

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "actor-0" in names(app), "it is shown")
        await pilot.press("r")
        assert "choose a process" in text(app, "#told")
        await choose(pilot, app, "actor-0")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, Confirmation), "it asks")
        await pilot.press("y")
        told = "7 ActorPool-1 actor-0: pass [restart=True]"
        await until(pilot, lambda: text(app, "#told") == told, "it is told")

    drive(app, steps)


@pytest.mark.slow
def test_a_thousand_actors_scroll_and_the_chosen_one_stays_chosen() -> None:
    runs = Runs(figures(*map(actor, range(1000))))
    app = runs.app(every=0.2)

    async def steps(pilot: Pilot[None]) -> None:
        table = table_of(app)
        await until(pilot, lambda: table.row_count == 1002, "all are shown")
        for key in ("end", "pageup", "up", "up"):
            await pilot.press(key)
        await until(pilot, lambda: table.scroll_offset.y > 900, "it has scrolled")
        before = chosen(app)
        assert before.key.process.startswith("actor-9")
        # One of them hangs: rows move, and the cursor moves with its own.
        runs.runs = {7: figures(*(actor(i, env_steps=i, busy=i == 500) for i in range(1000)))}
        await until(
            pilot,
            lambda: "actor-500" in table.get_cell_at(FIRST_PROCESS).plain,
            "who hangs is first",
        )
        await until(pilot, lambda: chosen(app).key == before.key, "the cursor is where it was")
        runs.runs = {7: figures(actor(3), actor(4))}
        await until(pilot, lambda: table.row_count == 4, "few are left")
        await pilot.press("down")
        assert table.cursor_row < 4
        await pilot.press("home")
        assert chosen(app).name == "python train.py"

    drive(app, steps)


@pytest.mark.slow
def test_a_slash_filters_and_escape_shows_all_again() -> None:
    app = Runs(figures(*map(actor, range(20)))).app()

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(names(app)) == 22, "all are shown")
        await pilot.press("slash", *"tor-13")
        await until(pilot, lambda: names(app)[2:] == ["actor-13"], "one is left")
        await pilot.press("enter")
        assert "filter: tor-13" in text(app, "#headline")
        await choose(pilot, app, "actor-13")
        await pilot.press("escape")
        await until(pilot, lambda: len(names(app)) == 22, "all are shown")
        assert chosen(app).name == "actor-13"

    drive(app, steps)


def test_p_stands_still_until_the_next_p() -> None:
    runs = Runs(figures(actor(0)))
    app = runs.app()

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: runs.looks > 2, "it looks")
        await pilot.press("p")
        await until(pilot, lambda: "paused" in text(app, "#headline"), "it is told")
        runs.runs = {7: figures(actor(0), actor(1))}
        looks = runs.looks
        await pilot.pause(0.3)
        assert runs.looks <= looks + 1
        assert "actor-1" not in names(app)
        await pilot.press("p")
        await until(pilot, lambda: "actor-1" in names(app), "it goes on")

    drive(app, steps)


def test_where_nothing_runs_it_says_so_until_something_does() -> None:
    runs = Runs()
    app = runs.app(empty="nothing here; start something")

    async def steps(pilot: Pilot[None]) -> None:
        empty = app.screen_stack[0].query_one("#empty", Static)
        await until(pilot, lambda: empty.display, "it is said")
        assert "start something" in text(app, "#empty")
        await pilot.press("s")
        assert "choose a row" in text(app, "#told")
        runs.runs = {7: figures(actor(0))}
        await until(pilot, lambda: not empty.display, "something runs")
        assert names(app)[2:] == ["actor-0"]

    drive(app, steps)


def test_a_system_on_which_nobody_can_look_is_told() -> None:
    def find() -> list[RunAddress]:
        raise EnvbusError("this needs Linux")

    app = TopApp(Observer(find=find))

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: text(app, "#told") == "this needs Linux", "it is told")

    drive(app, steps)


@pytest.mark.slow
def test_markup_in_names_and_messages_is_shown_as_it_is() -> None:
    fault = fault_figures(0.0, "error", "actor-0", "[bold]no[/bold] [/]")
    run = msgspec.structs.replace(figures(actor(0), faults=[fault]), command="[red]train[/red]")
    app = Runs(run).app()

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "[red]train[/red]" in names(app), "it is shown")
        assert "[bold]no[/bold] [/]" in text(app, "#faults-text")
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.screen, TextScreen), "stacks are shown")

    drive(app, steps)


def test_q_ends_it() -> None:
    app = Runs(figures(actor(0))).app()

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "it has ended")

    drive(app, steps)
