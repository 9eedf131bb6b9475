"""Whether a reply about envs is one to what was asked. Pure.

For actors that join from elsewhere, which may be anybody's program: NumPy would make many rows of
one. Leaves out what single elements hold (`elements.py`), which numbers they say, which is theirs
to say, and what follows (`worker_group.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envbus.actors.arrays.packing import unpack_records
from envbus.actors.protocol import CallResult, CloseEnvs, Finish, Rebuild, Step, StepResult
from envbus.bus.brief import brief
from envbus.bus.wire.messages import Failed, Payload, Request
from envbus.runner.workers.elements import Elements

__all__ = ["misfit"]

_COLUMNS: Final = ("rewards", "terminations", "truncations")


def misfit(
    request: Request[Any],
    reply: Payload | Exception,
    num_slots: int,
    leaves: Sequence[npt.NDArray[Any]] | None,
    elements: Elements | None = None,
) -> str | None:
    """Return what is wrong with a reply, for people; None: nothing is.

    Args:
        request: What was asked.
        reply: As it was decoded; or why it cannot be; or the failure that came instead.
        num_slots: Of the actor that was asked.
        leaves: Where observations of a fixed size go, one array per leaf, one row per env; None:
            they have no fixed size.
        elements: Knows those of the actor; None: it has no rows yet.
    """
    expected = request.reply_type
    if isinstance(reply, Exception):  # a call's result is between the caller and the env
        return None if expected is CallResult else f"what cannot be read ({reply})"
    if isinstance(reply, Failed):  # what an env raises stands in a reply, or is a call's
        told = f"{reply.remote_type or reply.code.value}: {reply.message}\n{reply.remote_traceback}"
        return f"a failure ({told.rstrip()})" if expected is StepResult else None
    if type(reply) is not expected:
        return f"a {type(reply).__name__} to a {type(request).__name__}"
    if isinstance(reply, StepResult | CallResult) and not isinstance(request, CloseEnvs):
        slots: list[int] | None = getattr(request, "slots", None)  # some are always of all
        asked = range(num_slots) if slots is None else slots
        strange = {error.slot for error in reply.errors}.difference(asked)
        if strange:
            return f"errors of slots that were not asked, {brief(sorted(strange))}"
        if isinstance(reply, CallResult):
            return _wrong_length("values", reply.values.value, len(asked))
        if not isinstance(request, Rebuild):  # its reply has no rows
            return _wrong_rows(request, reply, asked, leaves, elements)
    return None


def _wrong_rows(
    request: Request[Any],
    reply: StepResult,
    asked: Sequence[int],
    leaves: Sequence[npt.NDArray[Any]] | None,
    elements: Elements | None,
) -> str | None:
    num_rows, is_step = len(asked), isinstance(request, Step | Finish)
    for name in _COLUMNS if is_step else ():  # their dtypes are those of the message's fields
        column = getattr(reply, name)
        if column is None or column.shape != (num_rows,):
            shape = None if column is None else column.shape
            return f"{name} of shape {shape} for {num_rows} envs"
    if reply.infos is not None:
        infos = reply.infos.value
        if (wrong := _wrong_length("infos", infos, num_rows)) is not None:
            return wrong
        if not all(isinstance(info, dict) for info in infos):
            return "infos that are no dicts"
    singles: list[Any] | None = None
    if leaves is not None and reply.observations is not None:
        return "observations one by one, where arrays belong"
    if leaves is not None:
        if (wrong := _wrong_leaves(reply.observation_arrays, num_rows, leaves)) is not None:
            return wrong
    elif reply.observation_arrays is not None:
        return "arrays of observations, which have no fixed size"
    elif reply.observations is None:
        all_failed = len({error.slot for error in reply.errors}) == num_rows
        return None if all_failed else "no observations"
    else:
        try:
            singles = unpack_records(reply.observations.value)
        except Exception as exc:  # a different error for each kind of nonsense
            return f"observations that cannot be unpacked: {type(exc).__name__}: {brief(str(exc))}"
        if (wrong := _wrong_length("observations", singles, num_rows)) is not None:
            return wrong
    return None if elements is None else elements.wrong(asked, singles, reply, is_step=is_step)


def _wrong_leaves(
    arrays: Sequence[npt.NDArray[Any]] | None, num_rows: int, leaves: Sequence[npt.NDArray[Any]]
) -> str | None:
    if arrays is None or len(arrays) != len(leaves):
        count = "no" if arrays is None else len(arrays)
        return f"{count} arrays of observations, where {len(leaves)} belong"
    for array, leaf in zip(arrays, leaves, strict=True):
        shape = (num_rows, *leaf.shape[1:])
        if array.shape != shape or not np.can_cast(array.dtype, leaf.dtype, "equiv"):
            return (
                f"observations of shape {array.shape} and {array.dtype}, where {shape} and "
                f"{leaf.dtype} belong"
            )
    return None


def _wrong_length(name: str, values: object, expected: int) -> str | None:
    if not isinstance(values, list):
        return f"{name} that are no list"
    return None if len(values) == expected else f"{len(values)} {name} for {expected} envs"
