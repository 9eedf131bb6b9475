from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.metrics import PerfTimers
from envbus.runner.engine.env_calls import SubEnvironment
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.sampling.screen import Screen
from tests.runner.sampling_scenes import Log, zeros

Make = Callable[..., EnvRunner]
pygame = pytest.importorskip("pygame")


@pytest.fixture(autouse=True)
def _no_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # keeps what would be seen in memory
    yield
    pygame.quit()


@pytest.fixture
def make(pools: list[ActorPool]) -> Make:
    def _make(modes: list[str | None], actors: int = 2, **config: Any) -> EnvRunner:
        envs = [functools.partial(Coloured, 5, render_mode=mode) for mode in modes]
        pools.append(ActorPool(envs, num_actors=actors, autoreset_mode="Disabled"))
        return EnvRunner(pools[-1], zeros, RunnerConfig(**config))

    return _make


class Coloured(CountingEnv):
    """Draws its count, as red; counts its drawings."""

    drawn = 0

    def render(self) -> Any:
        self.drawn += 1
        frame = np.zeros((4, 6, 3), np.uint8)
        frame[..., 0] = 10 * self.count
        return frame


def red() -> int:
    window = pygame.display.get_surface()
    assert window.get_size() == (6, 4)
    return int(window.get_at((0, 0)).r)


@pytest.mark.parametrize("actors", [0, 2])
def test_a_window_has_each_frame_of_one_env(make: Make, actors: int) -> None:
    seen: list[tuple[int, int]] = []

    class Looking(Callbacks):
        def on_episode_step(self, *, episode: EpisodeRecorder) -> None:
            if episode.env_id == 1 and pygame.display.get_init():  # of the step before
                seen.append((episode.length - 1, red()))

    runner = make(["rgb_array"] * 2, actors, render_env=1, callbacks=Looking())
    assert not runner.is_vectorized
    runner.sample(num_env_steps=12)
    assert seen == [(t, 10 * t) for t in (0, 1, 2, 3, 4, 0)]
    drawn = [env.get_attr("drawn") for env in runner.envs.get_sub_environments()]
    assert drawn == [0, 8]  # six steps, and two episodes' first observations
    assert runner.get_metrics()["mean_env_render_ms"] > 0
    assert pygame.display.get_init()
    runner.stop()
    assert not pygame.display.get_init()


def test_an_env_with_a_window_of_its_own_is_left_to_it(make: Make) -> None:
    runner = make(["rgb_array", "human"], render_env=1)
    assert runner.is_vectorized
    runner.sample(num_env_steps=4)
    assert [env.get_attr("drawn") for env in runner.envs.get_sub_environments()] == [0, 0]
    assert not pygame.display.get_init()


def test_what_cannot_be_seen_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r'render_env=0: make that env with render_mode="human"'):
        make([None, "human"], render_env=0)
    with pytest.raises(ConfigError, match="render_env=2: there are 2 envs of a pool, from 0 on"):
        make(["human"] * 2, render_env=2)
    with pytest.raises(ConfigError, match="render_env must be at least 0"):
        RunnerConfig(render_env=-1)
    with pytest.raises(ConfigError, match="vectorized=True: episodes are filmed, or seen"):
        make(["rgb_array"] * 2, render_env=0, vectorized=True)


def screen(frame: Any, callbacks: Callbacks) -> tuple[Screen, EpisodeRecorder]:
    env = SubEnvironment(lambda env_id, make: frame, 3)
    return Screen(env, callbacks, PerfTimers()), EpisodeRecorder(7, 3)


@pytest.mark.parametrize("frame", [None, np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), "ansi"])
def test_what_is_no_picture_ends_the_looking_and_nothing_else(
    caplog: pytest.LogCaptureFixture, frame: Any
) -> None:
    log = Log()
    shown, episode = screen(frame, log)
    shown.on_episode_start(episode=episode)
    shown.on_episode_step(episode=episode)
    assert log.calls == [("start", 3), ("step", 3)]
    assert caplog.text.count("env 3 is not shown any more: a frame of") == 1


class Undrawn(Coloured):
    def render(self) -> Any:
        raise RuntimeError("no light")


def test_an_env_that_cannot_draw_ends_the_looking_and_nothing_else(
    pools: list[ActorPool], caplog: pytest.LogCaptureFixture
) -> None:
    envs = [functools.partial(Undrawn, 5, render_mode="rgb_array")]
    pools.append(ActorPool(envs, num_actors=0, autoreset_mode="Disabled"))
    runner = EnvRunner(pools[-1], zeros, RunnerConfig(render_env=0))
    assert len(runner.sample(num_env_steps=3)) == 3
    assert caplog.text.count("env 0 is not shown any more: no light") == 1


def test_a_window_that_is_closed_stays_closed(caplog: pytest.LogCaptureFixture) -> None:
    shown, episode = screen(np.zeros((4, 6, 3), np.uint8), Callbacks())
    shown.on_episode_start(episode=episode)
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    for _ in range(3):
        shown.on_episode_step(episode=episode)
    assert not pygame.display.get_init()
    assert caplog.text.count("env 3 is not shown any more: its window was closed") == 1


def test_a_window_that_an_env_has_ended_is_opened_again() -> None:
    shown, episode = screen(np.full((4, 6, 3), 50, np.uint8), Callbacks())
    shown.on_episode_start(episode=episode)
    pygame.display.quit()  # as envs of Gymnasium do when they are closed
    shown.on_episode_step(episode=episode)
    assert red() == 50
    shown.close()
    shown.close()
