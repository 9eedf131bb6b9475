"""The page in a real browser."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import envbus
from envbus.actors import ExternalEnvClient
from envbus.runner import ExternalEnvBridge
from envbus.runner.dashboard.server import DashboardServer
from envbus.runner.monitoring.observer import ObservedRun
from tests.clients.browser import PROGRAMS, Page, find_browser
from tests.runner.dashboard.looks import crash, observed, part_of, serving
from tests.waiting import wait_until

BROWSER = find_browser()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"no browser ({', '.join(PROGRAMS)}): make system-packages, or apt install chromium",
    ),
]

NASTY = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def open_page(tmp_path: Path) -> Callable[[DashboardServer], Page]:
    """Opens the page of a dashboard, and waits for its first frame."""
    assert BROWSER is not None
    browser = BROWSER

    def opened(server: DashboardServer) -> Page:
        page = Page(browser, server.url, tmp_path)
        try:
            wait_until(lambda: page.holds("newest"), "the page gets a frame")
        except BaseException:
            page.close()
            raise
        return page

    return opened


def text_of(page: Page, selector: str) -> str:
    """Return the text of the first element that is found."""
    return str(page.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))


@contextmanager
def stepping() -> Iterator[envbus.BusVectorEnv]:
    """A vector env of two actors that another thread steps all the time."""
    with envbus.make_vec("CartPole-v1", 4, num_actors=2, restart=True) as envs:
        envs.reset(seed=0)
        over = threading.Event()

        def step() -> None:
            while not over.is_set():
                envs.step(np.zeros(4, np.int64))

        thread = threading.Thread(target=step)
        thread.start()
        try:
            yield envs
        finally:
            over.set()
            thread.join()


def test_numbers_move_and_a_kill_is_shown(open_page: Callable[[DashboardServer], Page]) -> None:
    with stepping() as envs, serving() as server, open_page(server) as page:
        seen = set()

        def moves() -> bool:
            seen.add(text_of(page, "#steps"))
            return len(seen - {"", "\u2013", "0"}) >= 3

        wait_until(moves, "the env steps per second move")
        killed = envs.actor_pids()[0]
        wait_until(lambda: str(killed) in text_of(page, "#processes"), "its actors are shown")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: "actor-0, crash" in text_of(page, "#fault"), "the kill is shown")
        wait_until(lambda: "SIGKILL" in text_of(page, "#fault"), "with its reason")
        wait_until(lambda: text_of(page, "#restarts") == "1", "and that it came back")
        wait_until(lambda: page.evaluate("points.length") >= 3, "plots have something to show")
        assert page.evaluate("document.querySelectorAll('canvas').length") == 4
        assert page.evaluate("location.search") == ""  # the token is not shown
        assert page.errors() == []


@pytest.mark.alone
def test_a_kill_is_shown_within_two_seconds(open_page: Callable[[DashboardServer], Page]) -> None:
    with stepping() as envs, serving() as server, open_page(server) as page:
        wait_until(lambda: text_of(page, "#up") == "2 of 2", "all are there")
        dots = "document.querySelectorAll('#line button').length"
        took = []
        for number in range(3):
            begin = time.monotonic()
            os.kill(envs.actor_pids()[0], signal.SIGKILL)
            wait_until(lambda shown=number + 1: page.evaluate(dots) == shown, "it is shown")
            took.append(time.monotonic() - begin)
            assert "actor-0, crash" in text_of(page, "#fault")
            wait_until(
                lambda back=str(number + 1): text_of(page, "#restarts") == back, "it is back"
            )
        assert max(took) < 2.0, took


def test_a_dot_of_the_time_line_that_is_clicked_tells_its_reason(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    now = time.time()
    faults = [crash(now - age, f"reason {age}") for age in (90, 60, 30)]
    part = part_of(1, faults=faults)
    with serving(lambda: [observed(part)]) as server, open_page(server) as page:
        dots = "document.querySelectorAll('#line button')"
        wait_until(lambda: page.evaluate(f"{dots}.length") == 3, "each is a dot")
        wait_until(lambda: "reason 30" in text_of(page, "#fault"), "the newest one is told")
        # Whoever clicks where one is seen clicks that one.
        page.evaluate(
            f"(() => {{ const dot = {dots}[1]; dot.scrollIntoView({{ block: 'center' }});"
            " const place = dot.getBoundingClientRect(); document"
            ".elementFromPoint(place.x + place.width / 2, place.y + place.height / 2).click() })()"
        )
        assert "actor-0, crash: reason 60" in text_of(page, "#fault")
        part.faults.append(crash(now, "reason 0"))
        wait_until(lambda: page.evaluate(f"{dots}.length") == 4, "there is another one")
        assert "reason 60" in text_of(page, "#fault"), "it is told until another one is clicked"
        page.evaluate(f"{dots}[3].click()")
        assert "reason 0" in text_of(page, "#fault")
        assert page.errors() == []


def test_an_actor_that_is_clicked_shows_its_figures_its_faults_and_its_stacks(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    with stepping() as envs, serving() as server, open_page(server) as page:
        pid = str(envs.actor_pids()[1])
        choose(page, int(pid))
        wait_until(lambda: pid in text_of(page, "#panel-body"), "its figures are shown")
        page.evaluate("document.querySelector('#panel-actions button').click()")
        wait_until(lambda: "Current thread" in text_of(page, "#panel-text"), "its stacks are shown")
        page.evaluate("document.querySelector('#panel-close').click()")
        page.evaluate("document.querySelector('#parts .row').click()")
        wait_until(lambda: "env_steps" in text_of(page, "#panel-body"), "the part's counts are")
        assert page.errors() == []


class Talkative(gymnasium.Env[Any, Any]):
    """Writes to stderr what it does, and what a page must not take for HTML."""

    observation_space = action_space = Discrete(2)

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        sys.stderr.write(f"{NASTY}\x1b[31m\x1b]0;title\x07 reset\n")
        return 0, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        sys.stderr.write(f"step {self.count}\n")
        return 0, 0.0, False, False, {}


def test_the_log_of_an_actor_is_shown_and_goes_on_while_it_is_open(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    with envbus.make_vec(Talkative, 2, num_actors=2, restart=True) as envs, serving() as server:
        envs.reset()
        with open_page(server) as page:
            choose(page, envs.actor_pids()[1])
            assert text_of(page, "#panel-log-text") == ""
            page.evaluate("document.querySelector('#panel-log summary').click()")
            wait_until(lambda: NASTY in text_of(page, "#panel-log-text"), "its log is shown")
            assert r"\x1b]0;title\x07 reset" in text_of(page, "#panel-log-text")
            assert "step" not in text_of(page, "#panel-log-text")
            for _ in range(100):
                envs.step(np.zeros(2, np.int64))
            wait_until(lambda: "step 100" in text_of(page, "#panel-log-text"), "and goes on")
            text = "element('panel-log-text')"
            at_end = f"{text}.scrollTop + {text}.clientHeight >= {text}.scrollHeight - 4"
            assert page.evaluate(f"{text}.scrollTop > 0 && {at_end}")
            page.evaluate(f"{text}.scrollTop = 0")
            envs.step(np.zeros(2, np.int64))
            wait_until(lambda: "step 101" in text_of(page, "#panel-log-text"), "and goes on")
            assert page.evaluate(f"{text}.scrollTop") == 0, "who has scrolled up may read"
            os.kill(envs.actor_pids()[1], signal.SIGKILL)
            for _ in range(2):
                envs.step(np.zeros(2, np.int64))
            wait_until(
                lambda: "step 1" not in text_of(page, "#panel-log-text"), "its new life is shown"
            )
            wait_until(lambda: "reset" in text_of(page, "#panel-log-text"), "with what it says")
            page.evaluate("document.querySelector('#parts .row').click()")
            assert page.evaluate("element('panel-log').hidden")
            assert page.evaluate("document.querySelectorAll('img[src=x], [onerror]').length") == 0
            assert page.evaluate("document.title") == "envbus"
            assert page.errors() == []


def choose(page: Page, pid: int) -> None:
    """Click a process."""
    wait_until(lambda: str(pid) in text_of(page, "#processes"), "its actors are shown")
    page.evaluate(
        "[...document.querySelectorAll('#processes .row')]"
        f".find(row => row.innerText.includes('{pid}')).click()"
    )


def test_an_episode_that_is_clicked_shows_its_verbs(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    spaces = Box(-1.0, 1.0, (2,), np.float32), Discrete(2)
    with ExternalEnvBridge(*spaces) as bridge, bridge_of(bridge), ExitStack() as stack:
        names = [f"episode-{number}" for number in range(500)]
        clients = [
            stack.enter_context(ExternalEnvClient(bridge.address, name=f"simulator-{number}"))
            for number in range(len(names))
        ]
        for name, simulator in zip(names, clients, strict=True):
            simulator.start_episode(name)
            simulator.log_returns(name, 1.0)
        client = clients[7]
        client.get_action(names[7], np.zeros(2, np.float32))
        with serving() as server, open_page(server) as page:
            wait_until(lambda: "ExternalEnvBridge" in text_of(page, "#parts"), "it is shown")
            page.evaluate(
                "[...document.querySelectorAll('#parts .row')]"
                ".find(row => row.innerText.includes('ExternalEnvBridge')).click()"
            )
            wait_until(lambda: names[7] in text_of(page, "#panel-episodes"), "episodes are shown")
            assert "simulator-7" in text_of(page, "#panel-episodes")
            page.evaluate(
                "[...document.querySelectorAll('#panel-episodes .row')]"
                f".find(row => row.innerText.includes('{names[7]}')).click()"
            )
            wait_until(lambda: "get_action: 1" in text_of(page, "#panel-text"), "and its verbs")
            assert "log_returns: 1" in text_of(page, "#panel-text")
            client.log_returns(names[7], 1.0)
            wait_until(lambda: "log_returns: 2" in text_of(page, "#panel-text"), "they move")
            page.evaluate("episodes.body.scrollTop = 1e6")
            wait_until(
                lambda: names[-1] in text_of(page, "#panel-episodes"), "the last one is seen"
            )
            assert page.evaluate("episodes.lines.length") < 100
            assert page.errors() == []


@contextmanager
def bridge_of(bridge: ExternalEnvBridge) -> Iterator[None]:
    """Have a thread answer the clients of a bridge."""
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            result = bridge.poll(0.05)
            asked = result.observations.items()
            bridge.send_actions({name: dict.fromkeys(seen, 0) for name, seen in asked})

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_last_observation_of_an_env_is_shown_and_again_as_long_as_it_is_open(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    with envbus.make_vec(Grey, 4, num_actors=2) as envs, serving() as server:
        envs.reset(seed=0)
        pid = envs.actor_pids()[1]
        with open_page(server) as page:
            choose(page, pid)
            page.evaluate("document.querySelectorAll('#panel-actions button')[1].click()")
            picture = "document.querySelector('#panel-picture')"
            wait_until(lambda: page.holds(f"{picture}.naturalWidth === 20"), "it is shown")
            assert not page.evaluate(f"{picture}.hidden")
            assert grey_of(page, picture) == 99
            for step in range(2):
                envs.step(np.zeros(4, np.int64))
                wait_until(
                    lambda grey=100 + step: grey_of(page, picture) == grey, "the next one is shown"
                )
            assert not page.evaluate(f"{picture}.hidden")
            page.evaluate("document.querySelector('#panel-actions button').click()")
            wait_until(lambda: "thread" in text_of(page, "#panel-text"), "stacks take its place")
            assert page.evaluate(f"{picture}.hidden")
            assert page.errors() == []


def grey_of(page: Page, picture: str) -> int:
    """Return how light the first pixel of a picture is."""
    return int(
        page.evaluate(
            "(() => { const context = document.createElement('canvas').getContext('2d');"
            f" context.drawImage({picture}, 0, 0);"
            " return context.getImageData(0, 0, 1, 1).data[0] })()"
        )
    )


class Grey(gymnasium.Env[Any, Any]):
    """Is observed to be grey, and lighter with each step."""

    observation_space = Box(0, 255, (10, 20), np.uint8)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.grey = 99

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.full((10, 20), self.grey, np.uint8), {}

    def step(self, action: Any) -> Any:
        self.grey += 1
        return np.full((10, 20), self.grey, np.uint8), 0.0, False, False, {}


def test_of_a_thousand_actors_only_those_that_are_seen_are_in_the_page(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    look = Growing(observed(part_of(1000)))
    with serving(look) as server, open_page(server) as page:
        wait_until(lambda: text_of(page, "#up") == "1000 of 1000", "all are shown")
        rows = "document.querySelectorAll('#processes .row').length"
        for place in (0, 5000, 13000, 25000, 10**6):
            page.evaluate(f"processes.body.scrollTop = {place}")
            wait_until(lambda: in_sight(page), "there is a row at each place")
            assert page.evaluate(rows) < 100
        wait_until(lambda: "actor-999" in text_of(page, "#processes"), "the last one is in sight")
        before = text_of(page, "#processes")
        wait_until(lambda: text_of(page, "#processes") != before, "numbers move also there")
        page.evaluate("element('filter').value = 'actor-77'")
        page.evaluate("element('filter').dispatchEvent(new Event('input'))")
        wait_until(lambda: page.evaluate("processes.shown.length") == 11, "the others are left out")
        page.evaluate("processes.sort(0)")
        wait_until(lambda: page.evaluate(rows) == 11, "all of those are shown")
        assert page.errors() == []


@pytest.mark.alone
def test_a_thousand_actors_scroll_smoothly(open_page: Callable[[DashboardServer], Page]) -> None:
    look = Growing(observed(part_of(1000)))
    with serving(look) as server, open_page(server) as page:
        wait_until(lambda: text_of(page, "#up") == "1000 of 1000", "all are shown")
        page.evaluate(  # from the first one to the last, while numbers move each second
            "(() => { window.gaps = []; let last = performance.now();"
            " const scroll = () => { const now = performance.now(); gaps.push(now - last);"
            " last = now; processes.body.scrollTop += 150;"
            " if (gaps.length < 180) requestAnimationFrame(scroll) };"
            " requestAnimationFrame(scroll) })()"
        )
        wait_until(lambda: page.evaluate("gaps.length") == 180, "it has scrolled")
        wait_until(lambda: "actor-999" in text_of(page, "#processes"), "to the last one")
        gaps = sorted(page.evaluate("gaps"))
        assert gaps[len(gaps) * 95 // 100] < 100.0, gaps  # milliseconds
        assert page.errors() == []


def test_plots_go_on_when_the_clock_was_put_back(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    with serving(lambda: [observed(part_of(1))]) as server, open_page(server) as page:
        page.evaluate(
            "(() => { const at = newest.at + 3600;"
            " take({...newest, at, point: [at, 0, 0, 0, null, null]}) })()"
        )
        wait_until(
            lambda: page.evaluate("points[points.length - 1][0] < Date.now() / 1e3 + 60"),
            "the hour that has not come yet is gone",
        )


def in_sight(page: Page) -> bool:
    """Return whether rows cover all of the table that is seen."""
    return bool(
        page.evaluate(
            "(() => { const seen = processes.body.getBoundingClientRect();"
            " const rows = [...document.querySelectorAll('#processes .row')]"
            ".map(row => row.getBoundingClientRect());"
            " return Math.min(...rows.map(row => row.top)) <= seen.top + 1"
            " && Math.max(...rows.map(row => row.bottom)) >= seen.bottom - 2 })()"
        )
    )


class Growing:
    """A run whose processes have stepped further at each look."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._count = 0

    def __call__(self) -> Sequence[ObservedRun]:
        self._count += 1
        self._run.process_rates = {
            (part.name, process.name): 100.0 * self._count
            for part in self._run.figures.parts
            for process in part.processes
        }
        return [self._run]


def test_texts_of_runs_stay_texts(open_page: Callable[[DashboardServer], Page]) -> None:
    part = part_of(1, name=f"Part-{NASTY}")
    process = msgspec.structs.replace(part.processes[0], name=f"actor-{NASTY}", state=NASTY)
    part = msgspec.structs.replace(
        part,
        processes=[process],
        faults=[crash(99.0, NASTY, process.name), crash(99.5, NASTY, process.name)],
        counts={NASTY: 1},
    )
    run = observed(part)
    run.figures = msgspec.structs.replace(run.figures, command=NASTY, version=NASTY)
    with serving(lambda: [run]) as server, open_page(server) as page:
        for selector in ("#parts", "#processes", "#fault"):
            wait_until(lambda chosen=selector: NASTY in text_of(page, chosen), "it is shown")
        page.evaluate("document.querySelector('#parts .row').click()")
        wait_until(lambda: text_of(page, "#panel-body").count(NASTY) >= 5, "and in the panel")
        assert page.evaluate("document.querySelectorAll('img[src=x], [onerror]').length") == 0
        assert page.evaluate("document.title") == "envbus"
        assert page.errors() == []


def test_a_page_whose_dashboard_has_ended_says_so(
    open_page: Callable[[DashboardServer], Page],
) -> None:
    with serving(lambda: []) as server:
        page = open_page(server)
    with page:
        wait_until(lambda: "no connection" in page.text(), "it is shown")


def test_dark_and_light_are_chosen_and_kept(open_page: Callable[[DashboardServer], Page]) -> None:
    def theme() -> Any:
        return page.evaluate("document.documentElement.dataset.theme")

    with serving(lambda: []) as server, open_page(server) as page:
        before = theme()
        page.evaluate("element('theme').click()")
        after = theme()
        assert {before, after} == {"dark", "light"}
        page.evaluate("window.isOld = true; location.reload()")
        wait_until(lambda: page.holds("!window.isOld && newest"), "it is loaded anew")
        assert theme() == after
        assert page.errors() == []
