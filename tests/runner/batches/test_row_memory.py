from __future__ import annotations

import numpy as np

from envbus.runner.batches.row_memory import RowMemory


def test_memory_of_a_large_batch_is_used_again_once_nobody_refers_to_it() -> None:
    memory = RowMemory()
    shape, dtype = (32, 4, 84, 84), np.dtype(np.uint8)
    first = memory.empty(shape, dtype)
    place = first.ctypes.data
    part = first[3]
    other = memory.empty(shape, dtype)
    assert not np.shares_memory(first, other)
    del first
    assert not np.shares_memory(memory.empty(shape, dtype), part)
    del part
    assert memory.empty((8, 4, 84, 84), np.dtype(np.float32)).ctypes.data == place
    assert memory.empty((2,), dtype).flags.owndata
