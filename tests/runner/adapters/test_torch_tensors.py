from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from envbus.runner.adapters.torch_tensors import to_tensor
from envbus.runner.batches import MultiAgentBatch, SampleBatch

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

Pair = namedtuple("Pair", ["left", "right"])


def test_a_batch_becomes_a_dict_of_tensors_by_column() -> None:
    infos = np.array([{}, {"x": 1}])
    batch = SampleBatch(
        {
            "obs": {"image": np.zeros((2, 3), np.uint8), "speed": np.ones(2, np.float32)},
            "rewards": np.ones(2, np.float32),
            "agent_id": np.array(["a", "b"]),
            "infos": infos,
        }
    )
    columns = to_tensor(batch)
    assert columns["obs"]["image"].dtype == torch.uint8
    assert columns["obs"]["speed"].tolist() == [1.0, 1.0]
    assert columns["agent_id"] is batch["agent_id"]
    assert columns["infos"] is infos
    by_policy = to_tensor(MultiAgentBatch({"a": batch, "b": batch}, 2))
    assert by_policy["b"]["rewards"].shape == (2,)


def test_a_nested_value_keeps_its_structure_shapes_and_dtypes() -> None:
    known = torch.ones(2)
    value = Pair((np.float64(1.5), [True, 3]), {"none": None, "text": "a", "tensor": known})
    made = to_tensor(value)
    assert isinstance(made, Pair)
    assert made.left[0].dtype == torch.float64
    assert [part.dtype for part in made.left[1]] == [torch.bool, torch.int64]
    assert made.right == {"none": None, "text": "a", "tensor": known}


def test_memory_is_shared_on_the_cpu_and_read_only_arrays_are_copied() -> None:
    array = np.zeros(3)
    to_tensor(array)[0] = 5.0
    assert array[0] == 5.0
    array.setflags(write=False)
    to_tensor(array)[0] = 7.0
    assert array[0] == 5.0
    assert to_tensor(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert to_tensor(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]


def test_tensors_are_made_on_the_device_that_is_asked_for() -> None:
    made = to_tensor((np.zeros((2, 3)), torch.ones(1)), "meta")
    assert [one.device.type for one in made] == ["meta", "meta"]
    with pytest.raises(RuntimeError):
        to_tensor(np.zeros(1), "moon")


def test_memory_is_pinned_where_there_is_something_to_pin_it_for() -> None:
    value = {"a": np.ones(3, np.float32)}
    if torch.accelerator.is_available():
        assert to_tensor(value, pin_memory=True)["a"].is_pinned()
    else:
        with pytest.raises(RuntimeError):
            to_tensor(value, pin_memory=True)
