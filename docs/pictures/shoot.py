"""Takes the pictures of the dashboard: `PYTHONPATH=. python docs/pictures/shoot.py`.

Needs the extra `dashboard` and Chromium. Steps envs some of which fail, and answers simulators at a
bridge, for some minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import envbus
from envbus.actors import ExternalEnvClient
from envbus.runner import ExternalEnvBridge
from envbus.runner.dashboard.server import DashboardServer
from envbus.runner.monitoring.observer import Observer
from tests.clients.browser import Page, find_browser

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1100, 860
SECONDS = 120.0
STEP = 0.002
SPACE = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)
NOTHING = np.zeros(4, np.float32)


class Walker(gymnasium.Env[Any, Any]):
    """Takes some milliseconds for a step, and one of them fails after a while."""

    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, number: int) -> None:
        self._left = 4000 if number == 11 else -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        del seed, options
        return NOTHING, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on, or fall."""
        del action
        time.sleep(STEP * (1.0 + 0.5 * np.sin(time.time() / 9.0)))
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("the walker has left the terrain at x = 512.0")
        return NOTHING, 0.0, False, False, {}


def step(over: threading.Event) -> None:
    """Step walkers, and kill one of their actors now and then."""
    makers = [partial(Walker, number) for number in range(24)]
    with envbus.BusVectorEnv(makers, num_actors=12, restart=True) as envs:
        envs.reset(seed=0)
        kill_at = time.monotonic() + 20.0
        while not over.is_set():
            envs.step(np.zeros(24, np.int64))
            if time.monotonic() > kill_at:
                kill_at += 35.0
                os.kill(envs.actor_pids()[3], signal.SIGKILL)


def answer(bridge: ExternalEnvBridge, over: threading.Event) -> None:
    """Choose actions for simulators."""
    while not over.is_set():
        result = bridge.poll(0.1)
        bridge.send_actions({e: dict.fromkeys(seen, 0) for e, seen in result.observations.items()})


def simulate(address: str, over: threading.Event) -> None:
    """Ask for actions as a simulator does."""
    with ExternalEnvClient(address, observation_space=SPACE, action_space=ACTIONS) as client:
        episode = client.start_episode()
        while not over.is_set():
            client.get_action(episode, NOTHING)
            time.sleep(0.02)
        client.end_episode(episode, NOTHING)


def main() -> None:
    """Take both pictures."""
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium is installed")
    over, none_asks = threading.Event(), threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bridge = stack.enter_context(ExternalEnvBridge(SPACE, ACTIONS))
        server = DashboardServer("127.0.0.1:0", look=Observer(os.getpid()).look)
        threads = [
            threading.Thread(target=step, args=(over,)),
            threading.Thread(target=answer, args=(bridge, none_asks)),
            *(threading.Thread(target=simulate, args=(bridge.address, over)) for _ in range(3)),
            threading.Thread(target=server.run),
        ]
        for thread in threads:
            thread.start()
        stack.callback(server.close)
        stack.callback(threads[-1].join)
        stack.callback(server.stop)
        stack.callback(threads[1].join)
        stack.callback(none_asks.set)
        for thread in (threads[0], *threads[2:-1]):
            stack.callback(thread.join)
        stack.callback(over.set)
        page = stack.enter_context(Page(browser, server.url, folder))
        while not page.holds("newest"):
            time.sleep(0.1)
        page.resize(WIDTH, HEIGHT)
        time.sleep(SECONDS)
        for theme in ("dark", "light"):
            page.evaluate(f"localStorage.setItem('theme', '{theme}'); theme()")
            if theme == "light":
                page.evaluate("open(newest.parts[1][0], 'BusVectorEnv-1', 'actor-3')")
            time.sleep(2.0)
            (HERE / f"dashboard-{theme}.png").write_bytes(page.picture())


if __name__ == "__main__":
    main()
