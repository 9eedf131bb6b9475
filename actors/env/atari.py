"""Atari games as DQN plays them: an env with Gymnasium's preprocessing and stacked frames.

Needs ale-py and OpenCV (`pip install -e '.[atari]'`), which are imported when an env is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

__all__ = ["make_atari"]


def make_atari(
    game: str,
    *,
    noop_max: int = 30,
    frame_skip: int = 4,
    screen_size: int | tuple[int, int] = 84,
    terminal_on_life_loss: bool = True,
    grayscale_obs: bool = True,
    grayscale_newaxis: bool = False,
    scale_obs: bool = False,
    frame_stack: int = 4,
    clip_rewards: bool = True,
    repeat_action_probability: float = 0.0,
    **env_kwargs: Any,
) -> gymnasium.Env[Any, Any]:
    """Return an Atari env, by default as DQN plays it: observations `(4, 84, 84)` uint8.

        envs = envbus.make_vec(make_atari, 8, game="Pong")

    All of it runs where the env does, in its actor. Arguments up to `scale_obs` are those of
    `gymnasium.wrappers.AtariPreprocessing`, which explains them.

    Args:
        game: `"Pong"`, which is `"ALE/Pong-v5"`, or an id.
        noop_max: Most steps without an action that an episode begins with.
        frame_skip: Frames per step; an observation has the maximum of the last two.
        screen_size: Pixels, of both sides or of each.
        terminal_on_life_loss: An episode ends with a life; the next one begins a new game.
        grayscale_obs: One channel, without an axis.
        grayscale_newaxis: With one.
        scale_obs: float32 from 0 to 1.
        frame_stack: Observations that are stacked along a new first axis; 1: none, no axis. Those
            before an episode's first are that one.
        clip_rewards: To -1, 0 or 1.
        repeat_action_probability: Of the last action, frame by frame; DQN's games had none,
            `"ALE/Pong-v5"` by itself has 0.25.
        **env_kwargs: Further ones of `gymnasium.make`: `full_action_space`, `max_episode_steps`.

    Raises:
        ModuleNotFoundError: ale-py or OpenCV is not installed.
        ValueError: An argument cannot be used.
        gymnasium.error.Error: There is no such game.
    """
    try:
        gymnasium.register_envs(import_module("ale_py"))
        import_module("cv2")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            f"make_atari needs more ({exc}): pip install ale-py opencv-python-headless "
            "(or pip install -e '.[atari]' in a clone of envbus)",
            name=exc.name,
        ) from None
    env: gymnasium.Env[Any, Any] = gymnasium.make(
        game if "-v" in game else f"ALE/{game}-v5",
        frameskip=1,
        repeat_action_probability=repeat_action_probability,
        **env_kwargs,
    )
    env = AtariPreprocessing(
        env,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        terminal_on_life_loss=terminal_on_life_loss,
        grayscale_obs=grayscale_obs,
        grayscale_newaxis=grayscale_newaxis,
        scale_obs=scale_obs,
    )
    if frame_stack > 1:
        env = FrameStackObservation(env, frame_stack)
    return ClipReward(env, -1.0, 1.0) if clip_rewards else env
