"""Gymnasium's vector wrappers around `BusVectorEnv`: what they give around `SyncVectorEnv`."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector

from envbus.actors.testing import CountingEnv, InfoEnv
from envbus.runner import BusVectorEnv
from envbus.runner.testing import assert_same
from tests.envs import SpaceEnv

Wrap = Callable[[Any], Any]

CARTPOLE = [partial(gymnasium.make, "CartPole-v1", max_episode_steps=9)] * 3
PENDULUM = [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5)] * 3
INFOS = [partial(InfoEnv, length) for length in (2, 3, 5)]
DICTS = [
    partial(
        SpaceEnv,
        spaces.Dict(place=spaces.Box(-1.0, 1.0, (2,)), speed=spaces.Box(0.0, 9.0, (1,))),
        spaces.Discrete(2),
    )
] * 3
PIXELS = [partial(SpaceEnv, spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(2))] * 3


def rollout(envs: VectorEnv[Any, Any, Any], steps: int = 40) -> list[Any]:
    envs.action_space.seed(3)
    results: list[Any] = [envs.reset(seed=7)]
    results += [envs.step(envs.action_space.sample()) for _ in range(steps)]
    return results


#: Each wrapper by the name that Gymnasium offers it by, and what there is to tell besides.
WRAPS: dict[str, tuple[list[Any], Wrap]] = {
    "ClipAction": (PENDULUM, vector.ClipAction),
    "ClipReward": (PENDULUM, lambda envs: vector.ClipReward(envs, -1.0, 0.0)),
    "DictInfoToList": (CARTPOLE, vector.DictInfoToList),
    "DictInfoToList with infos": (INFOS, vector.DictInfoToList),
    "DictInfoToList with statistics": (
        CARTPOLE,
        lambda envs: vector.DictInfoToList(vector.RecordEpisodeStatistics(envs)),
    ),
    "DtypeObservation": (CARTPOLE, lambda envs: vector.DtypeObservation(envs, np.float64)),
    "FilterObservation": (DICTS, lambda envs: vector.FilterObservation(envs, ["speed"])),
    "FlattenObservation": (CARTPOLE, vector.FlattenObservation),
    "FlattenObservation of dicts": (DICTS, vector.FlattenObservation),
    "GrayscaleObservation": (PIXELS, vector.GrayscaleObservation),
    "NormalizeObservation": (CARTPOLE, vector.NormalizeObservation),
    "NormalizeReward": (CARTPOLE, vector.NormalizeReward),
    "NormalizeReward and NormalizeObservation": (
        CARTPOLE,
        lambda envs: vector.NormalizeReward(vector.NormalizeObservation(envs)),
    ),
    "RecordEpisodeStatistics": (CARTPOLE, vector.RecordEpisodeStatistics),
    "RescaleAction": (PENDULUM, lambda envs: vector.RescaleAction(envs, -1.0, 1.0)),
    "RescaleObservation": (PENDULUM, lambda envs: vector.RescaleObservation(envs, -1.0, 1.0)),
    "ReshapeObservation": (CARTPOLE, lambda envs: vector.ReshapeObservation(envs, (2, 2))),
    "ResizeObservation": (PIXELS, lambda envs: vector.ResizeObservation(envs, (4, 4))),
    "TransformAction": (PENDULUM, lambda envs: vector.TransformAction(envs, lambda act: act / 2)),
    "TransformObservation": (
        CARTPOLE,
        lambda envs: vector.TransformObservation(envs, lambda obs: obs[:, :2]),
    ),
    "TransformReward": (CARTPOLE, lambda envs: vector.TransformReward(envs, lambda r: r * 2)),
    "VectorizeTransformAction": (
        PENDULUM,
        lambda envs: vector.VectorizeTransformAction(
            envs,
            gymnasium.wrappers.TransformAction,
            func=lambda action: action / 2,
            action_space=spaces.Box(-4.0, 4.0, (1,)),
        ),
    ),
    "VectorizeTransformObservation": (
        CARTPOLE,
        lambda envs: vector.VectorizeTransformObservation(
            envs,
            gymnasium.wrappers.TransformObservation,
            func=lambda observation: observation * 2,
            observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32),
        ),
    ),
    "VectorizeTransformReward": (
        CARTPOLE,
        lambda envs: vector.VectorizeTransformReward(
            envs, gymnasium.wrappers.TransformReward, func=lambda reward: reward * 2
        ),
    ),
}
if gymnasium.__version__ in ("1.2.0", "1.2.1"):
    del WRAPS["DictInfoToList with statistics"]  # KeyError, around SyncVectorEnv as well
#: These have tests of their own below, or need a library that there is no test with.
OTHERS = {
    *("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),
    *("HumanRendering", "RecordVideo"),
}


def test_each_wrapper_of_the_installed_gymnasium_is_tested_here() -> None:
    offered = set(vector.__all__)
    assert offered <= {name.split()[0] for name in WRAPS} | OTHERS


@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # by RescaleAction
@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapper_gives_what_it_gives_around_a_sync_vector_env(name: str) -> None:
    factories, wrap = WRAPS[name]
    sync, bus = wrap(SyncVectorEnv(factories)), wrap(BusVectorEnv(factories, num_actors=2))
    assert_same(_without_times(rollout(bus)), _without_times(rollout(sync)))
    assert bus.observation_space == sync.observation_space
    assert bus.action_space == sync.action_space
    assert bus.np_random_seed == sync.np_random_seed
    bus.close()
    assert bus.unwrapped.closed
    sync.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in ("RecordEpisodeStatistics", "NormalizeReward", "TransformReward")
        for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
        # SyncVectorEnv takes the mask out, so that the wrapper counts all envs anew.
        if (name, mode) != ("RecordEpisodeStatistics", AutoresetMode.DISABLED)
    ],
)
def test_a_wrapper_gives_it_in_each_autoreset_mode_that_it_takes(
    name: str, mode: AutoresetMode
) -> None:
    factories, wrap = WRAPS[name]
    results = []
    for envs in (
        wrap(SyncVectorEnv(factories, autoreset_mode=mode)),
        wrap(BusVectorEnv(factories, num_actors=2, autoreset_mode=mode)),
    ):
        envs.action_space.seed(5)
        rows: list[Any] = [envs.reset(seed=9)]
        for _ in range(40):
            rows.append(envs.step(envs.action_space.sample()))
            over = rows[-1][2] | rows[-1][3]
            if mode is AutoresetMode.DISABLED and over.any():
                rows.append(envs.reset(options={"reset_mask": over}))
        results.append(_without_times(rows))
        envs.close()
    assert_same(results[1], results[0])


@pytest.mark.slow
def test_tensors_are_those_of_a_sync_vector_env() -> None:
    torch = pytest.importorskip("torch")
    results = []
    for envs in (SyncVectorEnv(CARTPOLE), BusVectorEnv(CARTPOLE, num_actors=2)):
        wrapped = vector.NumpyToTorch(envs)
        rows: list[Any] = [wrapped.reset(seed=3)[0]]
        for _ in range(20):
            rows += wrapped.step(torch.tensor([0, 1, 0]))[:4]
        wrapped.close()
        results.append(rows)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class _DrawnEnv(CountingEnv):
    """Draws its count as a shade of grey."""

    def render(self) -> Any:
        return np.full((32, 32, 3), 20 * self.count, np.uint8)


def drawn(length: int) -> gymnasium.Env[Any, Any]:
    return _DrawnEnv(length, render_mode="rgb_array")


def pixels(video: Path) -> bytes:
    """Return the frames of a video, RGB."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(video), "-f", "rawvideo"]
    return subprocess.run(
        [*command, "-pix_fmt", "rgb24", "-"], capture_output=True, timeout=60, check=True
    ).stdout


def shades(video: Path) -> list[int]:
    """Return the shade of each frame: the counts of the env that was filmed."""
    frames = np.frombuffer(pixels(video), np.uint8).reshape(-1, 32 * 32 * 3)
    return (frames.mean(axis=1) / 20).round().astype(int).tolist()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(vector, "RecordVideo"), reason="came with Gymnasium 1.2.1")
def test_a_video_of_all_envs_is_that_of_a_sync_vector_env(tmp_path: Path) -> None:
    factories = [partial(drawn, length) for length in (3, 4)]
    films = {}
    for name, kind in {"sync": SyncVectorEnv, "bus": BusVectorEnv}.items():
        envs = vector.RecordVideo(
            kind(factories), str(tmp_path / name), episode_trigger=lambda episode: episode < 2
        )
        envs.reset()
        for _ in range(8):
            envs.step([0, 0])
        envs.close()
        files = sorted((tmp_path / name).iterdir())
        films[name] = [(file.name, pixels(file)) for file in files]
    assert [name for name, _ in films["bus"]] == [
        "rl-video-episode-0.mp4",
        "rl-video-episode-1.mp4",
    ]
    assert_same(films["bus"], films["sync"])


@pytest.mark.slow
def test_the_envs_are_shown_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    seen = []
    for kind in (SyncVectorEnv, BusVectorEnv):
        envs = vector.HumanRendering(kind([partial(drawn, 5)] * 3))
        envs.reset()
        envs.step([0, 0, 0])
        envs.step([0, 0, 0])
        seen.append(pygame.surfarray.array3d(envs.window))
        envs.close()
    assert seen[0].max() == 40
    assert_same(seen[1], seen[0])


def _filmed(folder: Path, index: int) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.RecordVideo(
        drawn(index + 2),
        str(folder / f"env-{index}-life-{time.time_ns()}"),
        name_prefix=f"env-{index}",
        episode_trigger=lambda episode: episode < 2,
    )


@pytest.mark.slow
def test_actors_film_each_env_in_files_of_its_own_also_in_a_new_life(tmp_path: Path) -> None:
    """As docs/how-to/wrappers.md says it."""
    factories = [partial(_filmed, tmp_path, index) for index in range(3)]
    with BusVectorEnv(factories, num_actors=2, restart=True) as envs:
        envs.reset()
        for _ in range(9):
            envs.step([0, 0, 0])
        os.kill(envs.actor_pids()[0], signal.SIGKILL)
        for _ in range(9):
            envs.step([0, 0, 0])
        assert envs.statistics().restarts == 1
    lives = collections.Counter()
    for folder in tmp_path.iterdir():
        index = int(folder.name.split("-")[1])
        lives[index] += 1
        names = [f"env-{index}-episode-{episode}.mp4" for episode in (0, 1)]
        assert sorted(file.name for file in folder.iterdir()) == names
        for name in names:
            assert shades(folder / name) == list(range(index + 3))
    assert lives == {0: 2, 1: 1, 2: 1}


def _without_times(results: list[Any]) -> list[Any]:
    """Leave the seconds that an episode took out of its statistics."""
    for result in results:
        for info in result[-1] if isinstance(result[-1], list) else [result[-1]]:
            if isinstance(info.get("episode"), dict):
                info["episode"].pop("t", None)
                info["episode"].pop("_t", None)
    return results


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2], ids=lambda mode: mode.value)
def test_episodes_are_recorded_with_their_returns_and_lengths(mode: AutoresetMode) -> None:
    factories = [partial(CountingEnv, length) for length in (2, 3)]
    envs = vector.RecordEpisodeStatistics(
        BusVectorEnv(factories, autoreset_mode=mode), stats_key="stats"
    )
    envs.reset()
    envs.step([0, 0])
    infos = envs.step([0, 0])[4]
    assert infos["_stats"].tolist() == [True, False]
    assert (infos["stats"]["r"][0], infos["stats"]["l"][0]) == (11 + 12, 2)
    envs.close()


def test_infos_come_as_a_list_of_dicts_too() -> None:
    factories = [partial(InfoEnv, length) for length in (1, 5)]
    envs = vector.DictInfoToList(BusVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))
    _, infos = envs.reset()
    assert infos == [{"episode": 1}, {"episode": 1}]
    infos = envs.step([0, 0])[4]
    assert infos[0]["final_obs"].tolist()[:2] == [1, 1]
    assert infos[0]["final_info"]["text"] == "step 1"
    assert infos[1]["text"] == "step 1"
    assert "final_obs" not in infos[1]
    envs.close()


def test_the_space_of_a_wrapped_vector_env_may_be_set() -> None:
    envs = gymnasium.vector.VectorWrapper(BusVectorEnv([CountingEnv] * 2))
    envs.observation_space = spaces.Box(0, 1, (2, 4))
    assert envs.unwrapped.observation_space != envs.observation_space
    assert envs.render_mode is None
    assert envs.spec is None
    assert "BusVectorEnv(num_envs=2)" in repr(envs)
    envs.close(terminate=True)


def test_wrappers_of_single_envs_run_in_the_actors() -> None:
    def factory() -> gymnasium.Env[Any, Any]:
        env = gymnasium.make("CartPole-v1")
        return gymnasium.wrappers.RecordEpisodeStatistics(
            gymnasium.wrappers.TimeAwareObservation(env)
        )

    sync, bus = SyncVectorEnv([factory] * 2), BusVectorEnv([factory] * 2)
    assert_same(_without_times(rollout(bus)), _without_times(rollout(sync)))
    bus.close()
    sync.close()
