"""Takes apart the infos that a `gymnasium.vector.VectorEnv` merged.

Pure. The way back, merging, is `VectorEnv._add_info` in the runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["split_infos"]


def split_infos(infos: Mapping[Any, Any], num_envs: int) -> list[dict[Any, Any]]:
    """Return one info dict per env, so that merging them again gives `infos`.

    An entry `key` belongs to the envs that the mask `_key` names; without a mask, to those that
    its parent belongs to. Arrays, lists and tuples with one item per env are dealt out, dicts
    are taken apart, anything else goes to each env as it is.
    """
    split: list[dict[Any, Any]] = [{} for _ in range(num_envs)]
    _deal(infos, split, np.ones(num_envs, np.bool_))
    return split


def _deal(
    infos: Mapping[Any, Any], split: list[dict[Any, Any]], parents: npt.NDArray[np.bool_]
) -> None:
    for key, value in infos.items():
        if _is_mask_of_another(key, infos, len(split)):
            continue
        mask = parents
        if isinstance(key, str) and _is_mask(infos.get(f"_{key}"), len(split)):
            mask = infos[f"_{key}"]
        owners = np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            parts: list[dict[Any, Any]] = [{} for _ in split]
            _deal(value, parts, mask)
            for env in owners:
                split[env][key] = parts[env]
        else:
            for env in owners:
                split[env][key] = _item(value, env, len(split))


def _is_mask_of_another(key: object, infos: Mapping[Any, Any], num_envs: int) -> bool:
    return (
        isinstance(key, str)
        and key.startswith("_")
        and key[1:] in infos
        and _is_mask(infos[key], num_envs)
    )


def _is_mask(value: object, num_envs: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (num_envs,)


def _item(value: object, env: int, num_envs: int) -> object:
    if isinstance(value, np.ndarray):
        if not value.ndim or len(value) != num_envs:
            return value.copy()
        item = value[env]
        # Merging makes an array of bools from `bool`, but one of objects from `np.bool_`.
        if isinstance(item, np.bool_):
            return bool(item)
        return item.copy() if isinstance(item, np.ndarray) else item
    if isinstance(value, list | tuple) and len(value) == num_envs:
        return value[env]
    return value
