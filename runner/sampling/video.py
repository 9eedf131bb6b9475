"""Videos of chosen episodes: what the envs draw, written to files as it comes.

Needs imageio, and ffmpeg for anything but GIF (`pip install -e '.[video]'`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envbus.bus.errors import ConfigError, RequestTimeoutError
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.metrics import PerfTimers
from envbus.runner.engine.env_calls import SubEnvironment
from envbus.runner.errors import ActorLostError, Fault
from envbus.runner.extras import how_to_install
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.workers.config import check_kind, list_of

__all__ = ["VideoConfig", "VideoRecorder", "draw"]

logger = logging.getLogger("envbus.runner.sampling.video")

#: Frames per second of envs that do not say.
_DEFAULT_FPS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """Which episodes an `EnvRunner` films; their envs need `render_mode="rgb_array"`.

    A file has the frame after the reset and one per env step. It gets its name,
    `env-{env_id}-eps-{eps_id}{suffix}`, when the episode is over, also by a fault; one that was
    given up has what there was until then. A film that cannot be written, on a full disk, or where
    frames are None or of several sizes or `render` raises, is given up: the log says why, and the
    sample goes on.
    """

    #: Made if it is not there.
    folder: str | Path
    #: Every nth of an env, from its first on; or of an episode's number, counted per env from 0,
    #: whether to film it.
    episodes: int | Callable[[int], bool] = 100
    env_ids: Collection[int] = (0,)
    #: Format by imageio's names: ".mp4", ".gif", ...
    suffix: str = ".mp4"
    #: Frames per second; None: what the env's metadata say, else 30.
    fps: float | None = None

    def __post_init__(self) -> None:
        check_kind("VideoConfig.folder", self.folder, str, Path, example='"videos"')
        check_number("VideoConfig.fps", self.fps, over=0.0, optional=True)
        list_of("VideoConfig.env_ids", self.env_ids, "[0, 3]")
        if not callable(self.episodes):
            check_number("VideoConfig.episodes", self.episodes, whole=True, least=1)

    def chooses(self, number: int) -> bool:
        """Return whether an env's episode `number` is filmed."""
        if callable(self.episodes):
            return bool(self.episodes(number))
        return number % self.episodes == 0


@dataclass(slots=True)
class _Film:
    """A file that is being written, and the name that it will have."""

    writer: Any
    unfinished: Path
    path: Path
    #: Without any, there is no file.
    has_frames: bool = False


class VideoRecorder(Callbacks):
    """Films, and hands on to other callbacks, which come first.

    Raises:
        ConfigError: An env does not draw, or there is none of that number, or a library is
            missing.
    """

    def __init__(
        self,
        config: VideoConfig,
        callbacks: Callbacks,
        envs: Sequence[SubEnvironment],
        timers: PerfTimers,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        for name in ("on_sub_environment_created", "on_fault", "on_sample_end"):  # only for others
            setattr(self, name, getattr(callbacks, name))
        self._timers = timers
        self._imageio = _import_imageio(config.suffix)
        self._folder = Path(config.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        odd = [env_id for env_id in config.env_ids if not 0 <= env_id < len(envs)]
        if odd:
            raise ConfigError(f"envs {odd} cannot be filmed: there are envs 0 to {len(envs) - 1}")
        self._envs = {env_id: envs[env_id] for env_id in config.env_ids}
        self._fps = {env_id: self._fps_of(env) for env_id, env in self._envs.items()}
        #: By env: episodes that have begun.
        self._begun = dict.fromkeys(self._envs, 0)
        #: By env.
        self._open: dict[int, _Film] = {}

    def on_episode_created(self, *, episode: EpisodeRecorder) -> None:
        """Finish the film of the episode before, if that was given up."""
        self._finish(episode.env_id)
        self._callbacks.on_episode_created(episode=episode)

    def on_episode_start(self, *, episode: EpisodeRecorder) -> None:
        """Begin a film, if this episode is chosen."""
        self._callbacks.on_episode_start(episode=episode)
        env_id = episode.env_id
        if env_id not in self._envs:
            return
        number = self._begun[env_id]
        self._begun[env_id] += 1
        if self._config.chooses(number):
            self._begin(env_id, f"env-{env_id}-eps-{episode.eps_id}")
            if env_id in self._open:
                self._film(env_id)

    def on_episode_step(self, *, episode: EpisodeRecorder) -> None:
        """Add a frame."""
        self._callbacks.on_episode_step(episode=episode)
        if episode.env_id in self._open:
            self._film(episode.env_id)

    def on_episode_end(self, *, episode: EpisodeRecorder, fault: Fault | None = None) -> None:
        """Finish the film; the episode's media say where it is."""
        self._callbacks.on_episode_end(episode=episode, fault=fault)
        if (path := self._finish(episode.env_id)) is not None:
            episode.media["video"] = str(path)

    def close(self) -> None:
        """Finish all films. Idempotent."""
        with contextlib.ExitStack() as stack:  # Ctrl-C at the end of one leaves none open
            for env_id in self._open:
                stack.callback(self._finish, env_id)

    def _fps_of(self, env: SubEnvironment) -> float:
        mode = env.get_attr("render_mode")
        if mode != "rgb_array":
            raise ConfigError(
                f'env {env.env_id} cannot be filmed: make it with render_mode="rgb_array", not '
                f"{mode!r}"
            )
        if self._config.fps is not None:
            return self._config.fps
        return float(dict(env.get_attr("metadata")).get("render_fps", _DEFAULT_FPS))

    @uninterrupted_call  # or a file stays that nothing knows of, or half a film
    def _begin(self, env_id: int, name: str) -> None:
        path = self._folder / (name + self._config.suffix)
        unfinished = path.with_name("." + path.name)
        fps = self._fps[env_id]
        # Frames as they are drawn: without macro blocks, ffmpeg need not scale them.
        options: dict[str, Any] = {"fps": fps, "macro_block_size": 2}
        if self._config.suffix == ".gif":
            options = {"duration": 1000.0 / fps}
        try:
            writer = self._imageio.get_writer(unfinished, **options)
        except OSError as exc:
            logger.error("%s cannot be filmed: %s", path, exc)
            return
        self._open[env_id] = _Film(writer, unfinished, path)

    def _film(self, env_id: int) -> None:
        use, fail = (functools.partial(part, env_id) for part in (self._append, self._break_off))
        draw(self._envs[env_id], self._timers, use, fail)

    @uninterrupted_call
    def _append(self, env_id: int, frame: Any) -> None:
        film = self._open[env_id]
        try:
            film.writer.append_data(np.ascontiguousarray(frame))
            film.has_frames = True
        except Exception as exc:  # whatever imageio, and what it writes by, make of a frame
            self._break_off(env_id, exc)

    @uninterrupted_call
    def _break_off(self, env_id: int, exc: Exception) -> None:
        film = self._open.pop(env_id, None)
        if film is None:
            return  # the runner was stopped meanwhile
        with contextlib.suppress(Exception):
            film.writer.close()
        self._give_up(film, exc)

    @uninterrupted_call
    def _finish(self, env_id: int) -> Path | None:
        """Return the file of a film that is finished; None: there is none."""
        film = self._open.pop(env_id, None)
        if film is None:
            return None
        try:
            ffmpeg = _ffmpeg_of(film.writer)
            film.writer.close()
            if ffmpeg is not None and (code := ffmpeg.poll()):
                raise OSError(f"ffmpeg has ended with {code}: it could not write all of it")
            if not film.has_frames:
                return None
            film.unfinished.replace(film.path)
        except Exception as exc:  # as above
            self._give_up(film, exc)
            return None
        return film.path

    def _give_up(self, film: _Film, exc: Exception) -> None:
        logger.error("the film %s is given up: %s: %s", film.path, type(exc).__name__, exc)
        with contextlib.suppress(OSError):
            film.unfinished.unlink(missing_ok=True)


def draw(
    env: SubEnvironment,
    timers: PerfTimers,
    use: Callable[[Any], None],
    fail: Callable[[Exception], None],
) -> None:
    """Hand on what an env draws, or what it raises; the time that this takes counts as drawing.

    Nothing if its actor is gone, or late: that is told by the next poll.
    """
    begin = time.perf_counter()
    try:
        frame = env.render()
    except (ActorLostError, RequestTimeoutError) as exc:
        logger.warning("env %d was not drawn: %s", env.env_id, exc)
    except Exception as exc:  # whatever it raises: no row depends on it
        fail(exc)
    else:
        use(frame)
    finally:
        spent = time.perf_counter() - begin
        timers.add("env_render", spent)
        # The sampler counts all that callbacks do as a part of this.
        timers.add("raw_obs_processing", -spent)


def _ffmpeg_of(writer: Any) -> Any:
    """Return the process that writes a film; None: there is none.

    Short films are written when they end, and imageio does not say how its ffmpeg has ended. The
    process is known to its generator only.
    """
    frame = getattr(getattr(writer, "_write_gen", None), "gi_frame", None)
    return None if frame is None else frame.f_locals.get("p")


def _import_imageio(suffix: str) -> Any:
    try:
        import imageio.v2 as imageio

        if suffix != ".gif":
            import imageio_ffmpeg  # noqa: F401  # imageio's own complaint does not say which extra
    except ImportError as exc:
        raise ConfigError(f"videos need more ({exc}): {how_to_install('video')}") from None
    return imageio
