from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from envbus.actors.testing import CountingEnv
from envbus.bus.errors import ConfigError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.pool.pool import ActorPool
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.config import RunnerConfig
from envbus.runner.sampling.env_runner import EnvRunner
from envbus.runner.sampling.video import VideoConfig
from tests.runner.pool_envs import PATIENCE
from tests.runner.sampling_scenes import Log

Make = Callable[..., EnvRunner]
#: imageio leaves the pipes of the ffmpeg that it reads through open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class DrawnEnv(CountingEnv):
    """Draws its count in grey."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((32, 48, 3), min(20 * self.count, 255), np.uint8)


class TeamEnv:
    """Two agents, drawn."""

    metadata = {"render_fps": 5}  # noqa: RUF012
    render_mode = "rgb_array"
    possible_agents = ("a", "b")
    observation_space = CountingEnv.observation_space
    action_space = CountingEnv.action_space

    def reset(self, **_: Any) -> Any:
        self.time = 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self.time += 1
        over = {"__all__": self.time == 4}
        return self._seen(), dict.fromkeys(actions, 1.0), over, {"__all__": False}, {}

    def render(self) -> Any:
        return np.full((16, 16, 3), 50 * self.time, np.uint8)

    def _seen(self) -> Any:
        return {agent: np.zeros(4, np.float32) for agent in self.possible_agents}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    runners: list[EnvRunner] = []

    def _make(envs: Any, callbacks: Any = None, restart: bool = False, **video: Any) -> EnvRunner:
        pool = ActorPool(
            envs,
            num_actors=len(envs),
            autoreset_mode="Disabled",
            restart=RestartPolicy(backoff=0.01) if restart else False,
        )
        config = RunnerConfig(
            # GIFs need no process of ffmpeg.
            video=VideoConfig(folder=tmp_path / "films", **{"suffix": ".gif", **video}),
            callbacks=callbacks or Callbacks(),
        )
        try:
            runners.append(EnvRunner(pool, lambda seen: np.zeros(len(seen), np.int64), config))
        except BaseException:
            pool.close()
            raise
        return runners[-1]

    yield _make
    for runner in runners:
        runner.stop()


def films(folder: Path) -> dict[str, list[int]]:
    """The grey of each frame, by file."""
    return {
        file.name: [round(float(frame.mean())) for frame in imageio.mimread(file)]
        for file in sorted((folder / "films").iterdir())
    }


def drawn(length: int = 5) -> Any:
    return functools.partial(DrawnEnv, length)


def test_every_nth_episode_is_filmed_with_a_frame_per_step_and_one_of_the_reset(
    make: Make, tmp_path: Path
) -> None:
    runner = make([drawn()] * 2, episodes=2, suffix=".mp4")
    assert not runner.is_vectorized
    runner.sample(num_episodes=6)
    found = films(tmp_path)
    # Episodes 0 and 2 of env 0, whose ids are 0 and 2 * 2.
    assert list(found) == ["env-0-eps-0.mp4", "env-0-eps-4.mp4"]
    for greys in found.values():
        assert np.allclose(greys, [0, 20, 40, 60, 80, 100], atol=3)
    told = runner.get_metrics()["episode_media"]
    assert told == {"video": [str(tmp_path / "films" / name) for name in found]}
    reader = imageio.get_reader(tmp_path / "films" / "env-0-eps-0.mp4")
    assert reader.count_frames() == 6
    assert (reader.get_meta_data()["fps"], reader.get_meta_data()["size"]) == (12, (48, 32))
    reader.close()


def test_episodes_are_chosen_by_a_function_and_env(make: Make, tmp_path: Path) -> None:
    runner = make([drawn(3)] * 2, episodes=lambda number: number == 1, env_ids=[0, 1], fps=10)
    runner.sample(num_episodes=6)
    assert {name: len(greys) for name, greys in films(tmp_path).items()} == {
        "env-0-eps-2.gif": 4,
        "env-1-eps-3.gif": 4,
    }


def test_the_time_of_drawing_is_measured_and_counted_once(make: Make) -> None:
    runner = make([drawn()], episodes=1)
    runner.sample(num_episodes=1)
    metrics = runner.get_metrics()
    assert metrics["mean_env_render_ms"] > 0
    assert metrics["mean_raw_obs_processing_ms"] >= 0


def test_a_film_that_was_begun_goes_on_in_the_next_sample_and_ends_with_the_runner(
    make: Make, tmp_path: Path
) -> None:
    runner = make([drawn()], episodes=1)
    for _ in range(3):
        runner.sample(num_env_steps=1)
    assert not (tmp_path / "films" / "env-0-eps-0.gif").exists()
    runner.sample(num_env_steps=1, force_reset=True)
    runner.stop()
    assert {name: len(greys) for name, greys in films(tmp_path).items()} == {
        "env-0-eps-0.gif": 4,
        "env-0-eps-1.gif": 2,
    }


@pytest.mark.slow
def test_a_film_ends_with_a_fault_and_the_sample_goes_on(make: Make, tmp_path: Path) -> None:
    runner = make([drawn(50)] * 2, restart=True, episodes=1)
    runner.sample(num_env_steps=6)
    os.kill(runner.envs.actor_pids()[0], signal.SIGKILL)
    sample = runner.sample(num_env_steps=6, timeout=PATIENCE)
    assert [fault.env_id for fault in sample.faults] == [0]
    runner.stop()
    assert {name: len(greys) for name, greys in films(tmp_path).items()} == {
        "env-0-eps-0.gif": 4,
        "env-0-eps-2.gif": 4,
    }


@pytest.mark.slow
def test_a_film_that_cannot_be_written_is_given_up_and_the_sample_goes_on(
    make: Make, tmp_path: Path
) -> None:
    runner = make([drawn(3)] * 2, episodes=1, env_ids=[0, 1], suffix=".mp4")
    runner.sample(num_env_steps=4)
    shutil.rmtree(tmp_path / "films")
    assert len(runner.sample(num_env_steps=4).single()) == 4
    (tmp_path / "films").mkdir()
    runner.sample(num_env_steps=12)
    assert list((tmp_path / "films").glob("env-*"))
    shutil.rmtree(tmp_path / "films")
    runner.stop()
    assert runner.envs.closed


def test_a_film_whose_end_finds_no_room_is_given_up(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make([drawn(3)], episodes=1, suffix=".mp4")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        assert len(runner.sample(num_episodes=1).single()) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "env-0-eps-0.mp4 is given up: OSError: ffmpeg has ended with " in caplog.text
    assert not list((tmp_path / "films").glob("*eps-0.mp4"))
    runner.sample(num_episodes=1)
    assert len(films(tmp_path)["env-0-eps-1.mp4"]) == 4


class OddlyDrawnEnv(DrawnEnv):
    """Draws nothing in its second step."""

    def render(self) -> Any:
        return None if self.count == 2 else super().render()


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_film_with_a_frame_that_is_none_is_given_up_and_the_sample_goes_on(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    runner = make([functools.partial(OddlyDrawnEnv, 3)], episodes=2, suffix=suffix)
    assert len(runner.sample(num_env_steps=6).single()) == 6
    runner.stop()
    assert list((tmp_path / "films").iterdir()) == []
    assert f"env-0-eps-0{suffix} is given up: " in caplog.text


class UndrawnEnv(DrawnEnv):
    """Cannot be drawn in its second step."""

    def render(self) -> Any:
        if self.count == 2:
            raise RuntimeError("no light")
        return super().render()


def test_a_film_whose_env_cannot_draw_is_given_up_and_the_sample_goes_on(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make([functools.partial(UndrawnEnv, 3)], episodes=2, suffix=".gif")
    assert len(runner.sample(num_env_steps=6).single()) == 6
    runner.stop()
    assert list((tmp_path / "films").iterdir()) == []
    assert "env-0-eps-0.gif is given up: RuntimeError: no light" in caplog.text


def test_ctrl_c_at_the_end_of_a_film_leaves_no_env_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    runner = make([drawn()], episodes=1)
    runner.sample(num_env_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.stop()
    assert runner.envs.closed


def test_an_env_with_agents_is_filmed(make: Make, tmp_path: Path) -> None:
    runner = make([TeamEnv], episodes=1)
    runner.sample(num_episodes=1)
    (greys,) = films(tmp_path).values()
    assert np.allclose(greys, [0, 50, 100, 150, 200], atol=3)


def test_other_callbacks_are_called_as_without(make: Make) -> None:
    log = Log()
    make([drawn(2)], log).sample(num_episodes=1)
    told = [name for name, _ in log.calls]
    assert told == ["env", "created", "start", "step", "step", "end", "sample"]


def test_what_cannot_be_filmed_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match='env 0 cannot be filmed: make it with render_mode="rgb'):
        make([CountingEnv])
    with pytest.raises(ConfigError, match=r"envs \[2\] cannot be filmed: there are envs 0 to 0"):
        make([drawn()], env_ids=[2])
    with pytest.raises(ConfigError, match="episodes must be at least 1, not 0"):
        VideoConfig(folder=".", episodes=0)
