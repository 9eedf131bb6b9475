"""What a vector env is asked for, checked: spaces of the batch, reset masks. Pure.

The texts are Gymnasium's where a user of AsyncVectorEnv may rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import msgspec
import numpy as np
import numpy.typing as npt
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_shared_memory

from envbus.runner.workers.config import check_options

__all__ = [
    "VectorSpaces",
    "check_equal_spaces",
    "check_reset_mask",
    "choose_spaces",
]


class VectorSpaces(msgspec.Struct, frozen=True):
    """The spaces of one env and of the whole batch."""

    single_observation_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]


def choose_spaces(
    env_spaces: Sequence[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]],
    observation_mode: str | tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
    *,
    shared_memory: bool,
) -> VectorSpaces:
    """Return the spaces of a batch of envs.

    Args:
        env_spaces: Each env's observation and action space.
        observation_mode: "same", "different", or (batched space, single space).
        shared_memory: Whether observations shall go through shared memory.

    Raises:
        RuntimeError: The envs' spaces do not go together; names which env and which space.
        ValueError: An unknown mode, or a custom space with shared memory.
        TypeError: The pair is not one of spaces.
        ValueError, TypeError: Observations of "different" spaces cannot be batched.
    """
    num_envs = len(env_spaces)
    single, single_action = env_spaces[0]
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        if not all(isinstance(space, gymnasium.Space) for space in observation_mode):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, got "
                f"{type(observation_mode[0])} and {type(observation_mode[1])}"
            )
        batched, single = observation_mode
    elif observation_mode == "same":
        batched = batch_space(single, num_envs)
    elif observation_mode == "different":
        batched = _batch_differing([observation for observation, _ in env_spaces])
    else:
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and "
            f"batch observation space, actual got {observation_mode}"
        )
    for env_id, (observation, action) in enumerate(env_spaces):
        if observation_mode == "same" and observation != single:
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments "
                "observation spaces are not equivalent. If this is intentional, use "
                f"`observation_mode='different'` instead. Env {env_id} has {observation}, "
                f"env 0 has {single}."
            )
        if observation_mode != "same" and not is_space_dtype_shape_equiv(single, observation):
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='different' or custom space) however the "
                "sub-environment's observation spaces do not share a common shape and dtype. "
                f"Env {env_id} has {observation}, expected one like {single}."
            )
        if action != single_action:
            raise RuntimeError(
                f"Some environments have an action space different from `{single_action}`. "
                "In order to batch actions, the action spaces from all environments must be "
                f"equal. Env {env_id} has {action}."
            )
    if shared_memory and _is_custom(single):
        raise ValueError(
            "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this "
            f"feature with `shared_memory=False` however this is slower. {single} is, or holds, a "
            "custom space, which has no layout in memory."
        )
    return VectorSpaces(single, batched, single_action, batch_space(single_action, num_envs))


def check_equal_spaces(
    env_spaces: Sequence[tuple[gymnasium.Space[Any], gymnasium.Space[Any]]],
) -> None:
    """See that all envs of a pool have the spaces of its first one.

    Raises:
        RuntimeError: They have not; names which env and which space.
    """
    first = env_spaces[0]
    for env_id, spaces in enumerate(env_spaces):
        for what, own, expected in zip(("observation", "action"), spaces, first, strict=True):
            if own != expected:
                raise RuntimeError(
                    "the envs of an ActorPool must have equal spaces, so that their rows can be "
                    f"batched; make a pool for each kind. Env {env_id} has {own} as {what} space, "
                    f"env 0 has {expected}."
                )


def check_reset_mask(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Any] | None]:
    """Return the mask of a reset, if there is one, and the options without it.

    The dict is left as it is.

    Raises:
        ConfigError: The options are no dict.
        TypeError, ValueError: The mask is not a bool array `(num_envs,)` with a True in it.
    """
    check_options(options)
    if options is None or "reset_mask" not in options:
        return None, options
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(
            f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}"
        )
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            "`options['reset_mask']` must contain a boolean array with at least one True value, "
            f"got reset_mask={mask}"
        )
    return mask, {key: value for key, value in options.items() if key != "reset_mask"}


def _batch_differing(singles: list[gymnasium.Space[Any]]) -> gymnasium.Space[Any]:
    try:
        return batch_differing_spaces(singles)
    except (AssertionError, TypeError, ValueError) as exc:
        kind = type(exc)
        if kind is AssertionError:  # so said Gymnasium before 1.4
            kind = TypeError if len(set(map(type, singles))) > 1 else ValueError
        for env_id, single in enumerate(singles):
            if not is_space_dtype_shape_equiv(singles[0], single):
                named = f"{exc}. Env {env_id} has {single}, env 0 has {singles[0]}."
                raise kind(named) from exc
        raise kind(str(exc)) from exc


#: What Gymnasium uses for a class that it knows nothing of: it raises.
_FOR_UNKNOWN = create_shared_memory.dispatch(gymnasium.Space)


def _is_custom(space: gymnasium.Space[Any]) -> bool:
    """Whether Gymnasium has no shared memory for the space, or for one inside it."""
    if isinstance(space, gymnasium.spaces.Dict):
        return any(_is_custom(subspace) for subspace in space.spaces.values())
    if isinstance(space, gymnasium.spaces.Tuple | gymnasium.spaces.OneOf):
        return any(_is_custom(subspace) for subspace in space.spaces)
    return create_shared_memory.dispatch(type(space)) is _FOR_UNKNOWN
