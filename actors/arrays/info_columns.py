"""Infos as rows of fixed columns, in memory that runner and actors share.

What an env's infos hold is stable as a rule: the same keys, with values of the same types. Such a
*form* is learnt from the first info that has it, and gets columns; each env has a record of a
fixed size, which begins with the number of its info's form. Forms and columns are only ever added,
so that who knows fewer of them than others misreads nothing. An info without a known form travels
in a message. Merged they are equal to what Gymnasium's `VectorEnv._add_info` makes of them. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["RECORD_BYTES", "InfoColumn", "InfoLayout", "InfoReader", "InfoWriter", "records_of"]

Info: TypeAlias = dict[str, Any]

#: Bytes of one env's record: infos whose columns take more travel in messages.
RECORD_BYTES: Final = 512
#: Forms of infos; further ones travel in messages.
_MAX_FORMS: Final = 8
#: Dicts within dicts; an info that contains itself has no end of them.
_MAX_DEPTH: Final = 32
_HEAD: Final = np.dtype(np.int64)
#: Python's types of which Gymnasium makes arrays of numbers.
_PLAIN: Final = {int: np.dtype(int), float: np.dtype(float), bool: np.dtype(bool)}
#: How `struct` calls numbers of a dtype.
_CODES: Final = {
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "b1": "?",
}  # fmt: skip
#: The last observation of an episode, which Gymnasium merges into an array of objects.
_FINAL_OBS: Final = "final_obs"
#: Stands as the last key of a dict without keys.
_NO_KEY: Final = ""


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """One value of an info, by its keys from the outside in."""

    path: tuple[str, ...]
    #: Name of the very type that a value has: only such values fit. "final_obs": an array; "empty":
    #: there is no value, but a dict without keys.
    kind: str
    dtype: np.dtype[Any]
    #: Empty for a number.
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of one value."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


#: Columns of one form, in the order of its keys; numbers are those of the layout's columns.
Form: TypeAlias = tuple[int, ...]


class InfoLayout:
    """Which forms there are, and where the columns of each lie in a record. Not changed.

    Args:
        columns: Of all forms.
        forms: The columns of each.
    """

    def __init__(self, columns: Sequence[InfoColumn] = (), forms: Sequence[Form] = ()) -> None:
        self.columns = tuple(columns)
        self.forms = tuple(forms)
        offsets, end = [], _HEAD.itemsize
        for column in self.columns:
            align = min(column.dtype.alignment, 16)
            end = -(-end // align) * align
            offsets.append(end)
            end += column.size
        self.offsets = tuple(offsets)
        self.size = end

    def with_form_of(self, info: Info) -> InfoLayout | None:
        """Return a layout that has the form of this info, too; None: it cannot have columns."""
        found = _columns_of(info, ())
        if not found or len(self.forms) >= _MAX_FORMS:
            return None
        columns = list(self.columns)
        known = {column.path: number for number, column in enumerate(columns)}
        form = []
        for column in found:
            number = known.get(column.path)
            if number is None:
                if any(_clash(column.path, path) for path in known):
                    return None
                number = len(columns)
                columns.append(column)
            elif columns[number] != column:
                return None  # the first env's type would be that of the others' values, too
            form.append(number)
        grown = InfoLayout(columns, (*self.forms, tuple(form)))
        return grown if grown.size <= RECORD_BYTES and tuple(form) not in self.forms else None

    def to_plain(self) -> dict[str, Any]:
        """Return it as dicts, lists, texts and numbers."""
        return {
            "columns": [[list(c.path), c.kind, c.dtype.str, list(c.shape)] for c in self.columns],
            "forms": [list(form) for form in self.forms],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> InfoLayout:
        """Return what `to_plain` has told."""
        return cls(
            [
                InfoColumn(tuple(path), kind, np.dtype(dtype), tuple(shape))
                for path, kind, dtype, shape in plain["columns"]
            ],
            [tuple(form) for form in plain["forms"]],
        )

    def views(self, records: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Return one array `(len(records), *shape)` per column over `(n, RECORD_BYTES)` bytes."""
        views = []
        for column, offset in zip(self.columns, self.offsets, strict=True):
            field: Any = {
                "names": ["value"],
                "formats": [(column.dtype, column.shape)],
                "offsets": [offset],
                "itemsize": RECORD_BYTES,
            }
            views.append(records.view(np.dtype(field))["value"][:, 0])
        return views


class InfoWriter:
    """Writes the infos of an actor's envs into their records.

    Args:
        records: `(num_envs, RECORD_BYTES)`, of these envs only.
    """

    def __init__(self, records: npt.NDArray[np.uint8]) -> None:
        self._records = records
        self._heads = records.view(_HEAD)[:, 0]
        self._heads[...] = 0
        self._is_clear = True
        self._memory = records.data.cast("B")
        self._forms: list[_Writing] = []
        #: By keys and types of an info of numbers: its form, and what writes all of it in one go.
        self._packings: dict[tuple[Any, ...], tuple[int, Callable[..., None]]] = {}

    def learn(self, layout: InfoLayout) -> None:
        """Write infos of these forms from now on."""
        views = layout.views(self._records)
        self._forms = [_writing(layout, form, views) for form in layout.forms]
        self._packings = {
            what: (number, into)
            for number, form in enumerate(layout.forms, 1)
            for what, into in _packing(layout, form)
        }

    def write(self, infos: Sequence[Info] | None) -> bool:
        """Write one info per env; None: all are empty. Return whether all fit; else none counts."""
        if not self._is_clear:
            self._heads[...] = 0
            self._is_clear = True
        if infos is None:
            return True
        self._is_clear = False
        packings, memory = self._packings, self._memory
        for slot, info in enumerate(infos):
            if not info:
                continue
            packing = packings and packings.get((*info, *map(type, info.values())))
            if packing:
                number, pack_into = packing
                try:
                    pack_into(memory, slot * RECORD_BYTES, number, *info.values())
                    continue
                except struct.error:  # an integer of more than 64 bits
                    pass
            for number, form in enumerate(self._forms, 1):
                if _write(form, slot, info):
                    self._heads[slot] = number
                    break
            else:
                self._heads[...] = 0
                return False
        return True


class InfoReader:
    """Reads the infos of all envs.

    Args:
        records: `(num_envs, RECORD_BYTES)`.
    """

    def __init__(self, records: npt.NDArray[np.uint8]) -> None:
        self._records = records
        self._heads = records.view(_HEAD)[:, 0]
        self.layout = InfoLayout()
        self._forms: list[list[tuple[InfoColumn, npt.NDArray[Any]]]] = []
        #: Of each form without dicts in it and last observations: keys, their masks' keys, columns.
        self._flat: list[list[tuple[str, str, npt.NDArray[Any]]]] = []

    def learn(self, layout: InfoLayout) -> None:
        """Read infos of these forms from now on."""
        views = layout.views(self._records)
        self._forms = [[(layout.columns[i], views[i]) for i in form] for form in layout.forms]
        self._flat = [
            [(column.path[0], f"_{column.path[0]}", view) for column, view in form]
            if all(len(c.path) == 1 and c.kind not in ("empty", _FINAL_OBS) for c, _ in form)
            else []
            for form in self._forms
        ]
        self.layout = layout

    def merged(self, rows: npt.NDArray[np.int64] | None = None) -> Info:
        """Return the infos as a vector env of these envs merges them.

        Args:
            rows: Which envs; None: all.
        """
        merged: Info = {}
        if not self._forms:
            return merged
        heads = self._heads if rows is None else self._heads[rows]
        numbers = dict.fromkeys(heads.tolist())
        whole = len(numbers) == 1
        for number in numbers:
            if not number:
                continue
            mask = heads == number
            if whole and rows is None and (flat := self._flat[number - 1]):
                for key, mask_key, view in flat:
                    merged[key] = view.copy()
                    merged[mask_key] = mask.copy()
                continue
            for column, view in self._forms[number - 1]:
                values = view if rows is None else view[rows]
                _merge(merged, column, values, mask, whole=whole)
        return merged

    def infos(self, env_ids: Sequence[int] | None = None) -> dict[int, Info]:
        """Return infos one by one, as the envs returned them, without those that are empty.

        Args:
            env_ids: Whose; None: of all envs.
        """
        found: dict[int, Info] = {}
        if not self._forms:
            return found
        heads: Any = self._heads.tolist() if env_ids is None else self._heads
        for env_id in range(len(heads)) if env_ids is None else env_ids:
            number = int(heads[env_id])
            if not 0 < number <= len(self._forms):
                continue
            info: Info = {}
            found[env_id] = info
            for column, view in self._forms[number - 1]:
                value = view[env_id]
                inner = info
                for key in column.path[:-1]:
                    inner = inner.setdefault(key, {})
                if column.kind == "empty":
                    continue
                if column.kind in ("ndarray", _FINAL_OBS):
                    value = np.array(value)
                elif column.kind in ("int", "float", "bool"):
                    value = value.item()
                inner[column.path[-1]] = value
        return found


def _merge(
    merged: Info,
    column: InfoColumn,
    values: npt.NDArray[Any],
    mask: npt.NDArray[np.bool_],
    *,
    whole: bool,
) -> None:
    for key in column.path[:-1]:
        inner = merged.setdefault(key, {})
        seen = merged.get(f"_{key}")
        merged[f"_{key}"] = mask.copy() if seen is None else seen | mask
        merged = inner
    key = column.path[-1]
    if column.kind == "empty":
        return
    if column.kind == _FINAL_OBS:
        if key not in merged:
            merged[key], merged[f"_{key}"] = np.full(len(mask), None), np.zeros(len(mask), np.bool_)
        copies = values[mask]
        # Each row of the copy is one env's own; of a single number, an array of no dimension.
        rows = copies if copies.ndim > 1 else [copies[at, ...] for at in range(len(copies))]
        merged[key][mask] = np.fromiter(rows, object, len(copies))
        merged[f"_{key}"] |= mask
        return
    if whole:
        merged[key], merged[f"_{key}"] = values.copy(), mask.copy()
        return
    if key not in merged:
        merged[key] = np.zeros((len(mask), *column.shape), column.dtype)
        merged[f"_{key}"] = np.zeros(len(mask), np.bool_)
    merged[key][mask] = values[mask]
    merged[f"_{key}"] |= mask


#: By key: what writes its value, and the types that it must have; or what is within it.
_Writing: TypeAlias = dict[str, Any]


def _writing(layout: InfoLayout, form: Form, views: Sequence[npt.NDArray[Any]]) -> _Writing:
    tree: _Writing = {}
    for number in form:
        column = layout.columns[number]
        inner = tree
        for key in column.path[:-1]:
            inner = inner.setdefault(key, {})
        if column.kind != "empty":
            inner[column.path[-1]] = (_type_of(column), column.dtype, column.shape, views[number])
    return tree


def _packing(
    layout: InfoLayout, form: Form
) -> Iterator[tuple[tuple[Any, ...], Callable[..., None]]]:
    """Give the keys and types of a form of numbers, and what writes form and numbers in one go."""
    columns = [layout.columns[number] for number in form]
    code, end = "=q", _HEAD.itemsize
    for column, number in zip(columns, form, strict=True):
        gap, number_code = layout.offsets[number] - end, _CODES.get(column.dtype.str[1:])
        # Arrays are of one type, whatever their dtype and shape.
        is_number = len(column.path) == 1 and column.kind not in ("ndarray", _FINAL_OBS)
        if not is_number or number_code is None or gap < 0:
            return
        code += f"{gap}x{number_code}"
        end += gap + column.size
    keys = (column.path[0] for column in columns)
    yield (*keys, *map(_type_of, columns)), struct.Struct(code).pack_into


def _write(form: _Writing, slot: int, info: Info) -> bool:
    """Write an info of a form; False if it has another one."""
    if len(form) != len(info):
        return False
    for key, wanted in form.items():
        value: Any = info.get(key)
        if type(wanted) is dict:
            if type(value) is not dict or not _write(wanted, slot, value):
                return False
            continue
        kind, dtype, shape, view = wanted
        if type(value) is not kind:
            return False
        if kind is np.ndarray and (value.dtype != dtype or value.shape != shape):
            return False
        try:
            view[slot] = value
        except OverflowError:  # an integer of more than 64 bits
            return False
    return True


def _columns_of(info: Info, path: tuple[str, ...]) -> list[InfoColumn] | None:
    """Return the columns of an info; None if it cannot have any."""
    if len(path) > _MAX_DEPTH:
        return None
    columns = []
    for key, value in info.items():
        if type(key) is not str or key == _NO_KEY or key.startswith("_"):
            return None  # the last of these are the names of masks
        kind = type(value)
        here = (*path, key)
        if key == _FINAL_OBS:
            if path or kind is not np.ndarray or value.dtype.kind not in "biufc":
                return None
            columns.append(InfoColumn(here, _FINAL_OBS, value.dtype, value.shape))
        elif kind is dict:
            inner = _columns_of(value, here)
            if inner is None:
                return None
            columns += inner or [InfoColumn((*here, _NO_KEY), "empty", np.dtype(np.uint8), (0,))]
        elif kind in _PLAIN:
            columns.append(InfoColumn(here, kind.__name__, _PLAIN[kind], ()))
        elif kind is np.ndarray and value.dtype.kind in "biufc":
            columns.append(InfoColumn(here, "ndarray", value.dtype, value.shape))
        elif issubclass(kind, np.number) and np.dtype(kind).type is kind:
            columns.append(InfoColumn(here, "number", np.dtype(kind), ()))
        else:
            return None
    return columns


def _type_of(column: InfoColumn) -> type:
    if column.kind in ("ndarray", _FINAL_OBS):
        return np.ndarray
    if column.kind == "number":
        return column.dtype.type
    return next(kind for kind in _PLAIN if kind.__name__ == column.kind)


def _clash(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether a value of one would stand where the other has a dict."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter] and len(one) != len(other)


def records_of(memory: memoryview, num_envs: int) -> npt.NDArray[np.uint8]:
    """Return `(num_envs, RECORD_BYTES)` over memory of that size."""
    return np.frombuffer(memory, np.uint8).reshape(num_envs, RECORD_BYTES)
