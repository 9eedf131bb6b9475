"""Brings actions into the bounds of their space, on their way to an env. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from envbus.actors.spaces.agent_spaces import AgentSpaces
from envbus.actors.spaces.spaces import Element, Space

__all__ = ["Clip", "agent_clip", "clip_of", "remembered"]

#: Brings actions, one or a batch, into the bounds of their space.
Clip = Callable[[Element], Element]
C = TypeVar("C")


def clip_of(space: Space | None) -> Clip | None:
    """Return what brings actions into the finite bounds of a space's Boxes; None: it has none.

    All else stays as it is, also what is no action of the space: whoever sends it says so.
    """
    if isinstance(space, spaces.Dict):
        return _clip_of_parts(space.spaces, Mapping)
    if isinstance(space, spaces.Tuple):
        parts = dict(enumerate(space.spaces))
        return _clip_of_parts(parts, tuple)
    if not isinstance(space, spaces.Box):
        return None
    low, high, shape = space.low, space.high, space.shape
    if not (np.isfinite(low).any() or np.isfinite(high).any()):
        return None

    def clip_leaf(leaf: Element) -> Element:
        array = np.asarray(leaf)
        if array.dtype.kind not in "iuf" or array.shape[array.ndim - len(shape) :] != shape:
            return leaf
        return np.clip(array, low, high)

    return clip_leaf


def agent_clip(
    space: Space | None,
) -> Callable[[Mapping[Any, Element]], Mapping[Any, Element]] | None:
    """Return `clip_of` for actions by agent; None: nothing is to be clipped.

    Args:
        space: An `AgentSpaces`, or that of the only agent, whatever its name is.
    """
    if not isinstance(space, AgentSpaces):
        only = clip_of(space)
        if only is None:
            return None
        return lambda actions: {agent: only(action) for agent, action in actions.items()}
    by_agent = {agent: clip for agent, part in space.spaces.items() if (clip := clip_of(part))}
    if not by_agent:
        return None
    return lambda actions: {
        agent: by_agent[agent](action) if agent in by_agent else action
        for agent, action in actions.items()
    }


def remembered(make: Callable[[Space | None], C]) -> Callable[[Space | None], C]:
    """Return `make`, asked anew only for another space than the last one.

    For spaces that are known late, and may be told anew.
    """
    last: tuple[Space | None, C] | None = None

    def made(space: Space | None) -> C:
        nonlocal last
        if last is None or last[0] is not space:
            last = space, make(space)
        return last[1]

    return made


def _clip_of_parts(parts: Mapping[Any, Space], kind: type) -> Clip | None:
    by_key = {key: one for key, part in parts.items() if (one := clip_of(part))}
    if not by_key:
        return None

    def clip_parts(batch: Element) -> Element:
        if kind is Mapping and isinstance(batch, Mapping):
            return {key: clip(key, item) for key, item in batch.items()}
        if kind is tuple and isinstance(batch, tuple):
            return tuple(clip(index, item) for index, item in enumerate(batch))
        return batch

    def clip(key: Any, item: Element) -> Element:
        return by_key[key](item) if key in by_key else item

    return clip_parts
