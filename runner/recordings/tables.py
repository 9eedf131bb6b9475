"""Batches <-> Arrow tables. Pure: no file is touched here.

One row per transition, as in `SampleBatch`, and one column per array: parts of Dict and Tuple
spaces are columns `obs['image']`, `obs[0]`. Rows of more than one number are Arrow's fixed-shape
tensors, which programs that do not know them read as lists. What has no fixed size (infos, texts
of a Text space, graphs) is kept as MessagePack, like on the bus, and never pickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from envbus.bus.errors import ConfigError, EncodeError
from envbus.bus.wire.codec import decode, encode
from envbus.bus.wire.messages import Payload
from envbus.bus.wire.messages import Tree as AnyTree
from envbus.runner.batches.batch import SampleBatch
from envbus.runner.batches.nested import Tree, as_rows

__all__ = ["from_table", "policies_of", "to_table", "with_policies"]

#: The key in the schema's metadata under which the structure of the batch stands.
_KEY = b"envbus.columns"
#: Likewise: all policies that the episodes have rows of.
_POLICIES = b"envbus.policies"
#: Kinds of dtype that Arrow has numbers of.
_NUMBERS = frozenset("iuf")


class RecordedValue(Payload, frozen=True, kw_only=True):
    """A value without a fixed size in a file."""

    value: AnyTree


def to_table(batch: SampleBatch) -> pa.Table:
    """Return the rows as a table, in the same order.

    Raises:
        ConfigError: A column has keys, numbers or text that no file has.
    """
    names: list[str] = []
    arrays: list[pa.Array] = []

    def add(tree: Tree, path: str) -> dict[str, Any]:
        if isinstance(tree, dict):
            for key in tree:
                if type(key) not in (str, int):
                    raise ConfigError(f"{path}[{key!r}]: keys must be strings or integers")
            parts = [[key, add(part, f"{path}[{key!r}]")] for key, part in tree.items()]
            return {"dict": parts}
        if isinstance(tree, tuple):
            return {"tuple": [add(part, f"{path}[{i}]") for i, part in enumerate(tree)]}
        if tree.dtype.kind == "V" or tree.dtype == np.longdouble != np.double:
            raise ConfigError(f"{path}: values of {tree.dtype} cannot be recorded")
        try:
            path.encode()
            array, note = _to_arrow(tree)
        except UnicodeEncodeError as exc:  # "\udc80", as Python reads bytes that are no UTF-8
            raise ConfigError(f"{path!a}: text that UTF-8 does not have: {exc}") from None
        except EncodeError as exc:  # its advice is about sockets
            why = str(exc).partition(";")[0]
            raise ConfigError(f"{path}: values that cannot be recorded: {why}") from None
        names.append(path)
        arrays.append(array)
        return {"array": path, **note}

    structure = {name: add(column, name) for name, column in batch.columns.items()}
    table = pa.table(arrays, names=names)
    return table.replace_schema_metadata({_KEY: json.dumps(structure)})


def from_table(table: pa.Table) -> SampleBatch:
    """Return the rows of a table that `to_table` made; the arrays are read-only.

    Raises:
        ConfigError: The table is from somewhere else.
    """
    metadata = table.schema.metadata or {}
    if _KEY not in metadata:
        raise ConfigError(
            f"these columns were not recorded by envbus: {table.schema.names}; map them to obs, "
            "actions, rewards, ... and make a SampleBatch"
        )

    def build(part: dict[str, Any]) -> Tree:
        if "dict" in part:
            return {key: build(inner) for key, inner in part["dict"]}
        if "tuple" in part:
            return tuple(build(inner) for inner in part["tuple"])
        return _from_arrow(table.column(part["array"]), part)

    structure = json.loads(metadata[_KEY])
    return SampleBatch({name: build(part) for name, part in structure.items()})


def with_policies(table: pa.Table, policy_ids: Sequence[str]) -> pa.Table:
    """Return a table that says which policies its episodes have rows of; none: it does not."""
    if not policy_ids:
        return table
    told = {_POLICIES: json.dumps(list(policy_ids))}
    return table.replace_schema_metadata({**table.schema.metadata, **told})


def policies_of(schema: pa.Schema) -> frozenset[str]:
    """Return which policies the episodes of a table have rows of; none: nobody has said."""
    return frozenset(json.loads((schema.metadata or {}).get(_POLICIES, b"[]")))


def _to_arrow(array: npt.NDArray[Any]) -> tuple[pa.Array, dict[str, Any]]:
    """Return an array, and what is to be known to read it back."""
    kind = array.dtype.kind
    if kind == "b" and array.ndim == 1:
        return pa.array(array), {}
    if kind == "U" and array.ndim == 1:
        return pa.array(array.tolist(), pa.string()), {"text": True}
    if kind not in _NUMBERS and kind != "b":
        frames = [encode(RecordedValue(value=AnyTree(value))) for value in array]
        values = [list(map(bytes, of_one)) for of_one in frames]
        return pa.array(values, pa.list_(pa.binary())), {"packed": array.dtype.str}
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.ndim == 1:
        return pa.array(native), {}
    if not array.size:  # Arrow's tensors have at least one number
        return pa.nulls(len(array)), {"shape": array.shape[1:], "dtype": native.dtype.str}
    if kind == "b":
        tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.ascontiguousarray(native.view(np.uint8))
        )
        return tensor, {"bools": True}
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(native)), {}


def _from_arrow(column: pa.ChunkedArray, note: dict[str, Any]) -> npt.NDArray[Any]:
    if "packed" in note:
        values = [decode(RecordedValue, frames).value.value for frames in column.to_pylist()]
        if note["packed"] != "|O":
            return np.array(values, note["packed"])
        return as_rows(values)
    if "text" in note:
        return np.array(column.to_pylist(), np.str_)
    if "shape" in note:
        return np.zeros((len(column), *note["shape"]), note["dtype"])
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # no chunk at all, or too many rows for one
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    if not isinstance(whole, pa.FixedShapeTensorArray):
        flat: npt.NDArray[Any] = whole.to_numpy(zero_copy_only=False)
        return flat
    if not len(whole):
        return np.zeros((0, *whole.type.shape), whole.type.value_type.to_pandas_dtype())
    tensor: npt.NDArray[Any] = whole.to_numpy_ndarray()
    return tensor.view(np.bool_) if "bools" in note else tensor
