"""One env on the screen, while it is sampled.

Leaves out films (`video.py`). Needs pygame, which draws Gymnasium's classic envs, too
(`pip install -e '.[classic-control]'`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from envbus.bus.errors import ConfigError
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.metrics import PerfTimers
from envbus.runner.engine.env_calls import SubEnvironment
from envbus.runner.extras import how_to_install
from envbus.runner.sampling.callbacks import Callbacks
from envbus.runner.sampling.video import draw

__all__ = ["Screen", "draws_itself"]

logger = logging.getLogger(__name__)


def draws_itself(env_id: int, envs: Sequence[SubEnvironment]) -> bool:
    """Return whether an env that is to be seen has a window of its own.

    Raises:
        ConfigError: It has none, and draws no frames; or there is no env of that number.
    """
    if not 0 <= env_id < len(envs):
        raise ConfigError(f"render_env={env_id}: there are {len(envs)} envs of a pool, from 0 on")
    mode = envs[env_id].get_attr("render_mode")
    if mode not in ("human", "rgb_array"):
        raise ConfigError(
            f'render_env={env_id}: make that env with render_mode="human", or "rgb_array", not '
            f"{mode!r}"
        )
    return bool(mode == "human")


class Screen(Callbacks):
    """Shows an env's frames in a window, and hands on to other callbacks, which come first.

    Where there is no screen, its window is closed or `render` raises, the log says so and sampling
    goes on.

    Args:
        env: Draws RGB arrays.
        callbacks: The others.
        timers: Where the time is counted.

    Raises:
        ConfigError: pygame is not installed.
    """

    def __init__(self, env: SubEnvironment, callbacks: Callbacks, timers: PerfTimers) -> None:
        try:
            import pygame
        except ImportError as exc:
            how = how_to_install("classic-control")
            raise ConfigError(f"a window needs more ({exc}): {how}") from None
        self._pygame: Any = pygame
        self._env, self._callbacks, self._timers = env, callbacks, timers
        for name in (  # only for others
            "on_sub_environment_created",
            "on_episode_created",
            "on_episode_end",
            "on_fault",
            "on_sample_end",
        ):
            setattr(self, name, getattr(callbacks, name))
        self._is_on = True
        self._has_window = False

    def on_episode_start(self, *, episode: EpisodeRecorder) -> None:
        """Show what the env begins with."""
        self._callbacks.on_episode_start(episode=episode)
        self._look(episode)

    def on_episode_step(self, *, episode: EpisodeRecorder) -> None:
        """Show what the step has brought."""
        self._callbacks.on_episode_step(episode=episode)
        self._look(episode)

    def close(self) -> None:
        """Close the window. Idempotent."""
        self._is_on = False
        if self._has_window:
            self._has_window = False
            self._pygame.display.quit()

    def _look(self, episode: EpisodeRecorder) -> None:
        if self._is_on and episode.env_id == self._env.env_id:
            draw(self._env, self._timers, self._show, self._give_up)

    def _show(self, frame: Any) -> None:
        pygame = self._pygame
        try:
            image = np.ascontiguousarray(frame)
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(f"a frame of {image.dtype}, shape {image.shape}")
            size = image.shape[1], image.shape[0]
            window = pygame.display.get_surface() if pygame.display.get_init() else None
            if window is None or window.get_size() != size:  # an env beside it may have ended it
                pygame.display.init()
                window = pygame.display.set_mode(size)
                pygame.display.set_caption(f"env {self._env.env_id}")
                self._has_window = True
            window.blit(pygame.image.frombuffer(image, size, "RGB"), (0, 0))
            pygame.display.flip()
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                raise RuntimeError("its window was closed")
        except Exception as exc:  # whatever pygame, or an env, make of it: nothing depends on it
            self._give_up(exc)

    def _give_up(self, exc: Exception) -> None:
        logger.warning("env %d is not shown any more: %s", self._env.env_id, exc)
        self.close()
