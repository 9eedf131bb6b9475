from __future__ import annotations

import itertools

import numpy as np
import pytest
from gymnasium import spaces

from envbus.actors.arrays.blocks import BlockLayout, Blocks
from envbus.actors.spaces.spaces import Space, is_fixed_size
from tests.envs import all_spaces

SPACES = all_spaces()


def arrays(blocks: Blocks) -> list[np.ndarray]:
    return [
        *(blocks.observations or []),
        *(blocks.actions or []),
        blocks.rewards,
        blocks.terminations,
        blocks.truncations,
    ]


@pytest.mark.parametrize("name", SPACES)
def test_views_fill_the_buffer_without_overlap(name: str) -> None:
    layout = BlockLayout.of(SPACES[name], spaces.Discrete(2), 3)
    views = arrays(layout.views(bytearray(layout.size)))
    for number, view in enumerate(views):
        view[...] = np.array(number).astype(view.dtype)
    for number, view in enumerate(views):
        assert np.array_equal(view, np.full_like(view, np.array(number).astype(view.dtype)))


def test_rows_and_dtypes_are_those_of_the_spaces() -> None:
    observation_space = spaces.Dict(a=spaces.Box(0, 9, (2, 3), np.int16), b=spaces.Discrete(3))
    layout = BlockLayout.of(observation_space, spaces.Box(0.0, 1.0, (4,)), 5)
    blocks = layout.views(bytearray(layout.size))
    assert blocks.observations is not None
    assert blocks.actions is not None
    assert [(a.shape, a.dtype.str) for a in blocks.observations] == [
        ((5, 2, 3), "<i2"),
        ((5,), "<i8"),
    ]
    assert [(a.shape, a.dtype.str) for a in blocks.actions] == [((5, 4), "<f4")]
    assert (blocks.rewards.shape, blocks.rewards.dtype) == ((5,), np.float64)
    assert (blocks.terminations.shape, blocks.terminations.dtype) == ((5,), np.bool_)


def test_each_block_starts_on_a_cache_line() -> None:
    layout = BlockLayout.of(spaces.Box(0, 1, (3,), np.uint8), spaces.Discrete(2), 3)
    assert layout.offsets == (0, 64, 128, 192, 256)
    assert layout.size == 320


def test_spaces_without_a_fixed_size_have_no_block() -> None:
    layout = BlockLayout.of(spaces.Text(3), spaces.Graph(spaces.Discrete(2), None), 2)
    blocks = layout.views(bytearray(layout.size))
    assert blocks.observations is None
    assert blocks.actions is None
    assert blocks.rewards.shape == (2,)


def test_a_part_is_a_view_of_its_rows() -> None:
    layout = BlockLayout.of(spaces.Discrete(2), spaces.Discrete(2), 4)
    whole = layout.views(bytearray(layout.size))
    part = whole.part(slice(1, 3))
    part.rewards[...] = 5.0
    assert part.observations is not None
    assert whole.observations is not None
    part.observations[0][...] = 1
    assert whole.rewards.tolist() == [0.0, 5.0, 5.0, 0.0]
    assert whole.observations[0].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("observation_space", "action_space"),
    [
        (one, other)
        for one, other in itertools.product(list(SPACES.values())[::5], repeat=2)
        if is_fixed_size(one) and is_fixed_size(other)
    ],
)
def test_equal_spaces_give_equal_layouts(observation_space: Space, action_space: Space) -> None:
    layout = BlockLayout.of(observation_space, action_space, 7)
    assert layout == BlockLayout.of(observation_space, action_space, 7)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs=0"):
        BlockLayout.of(spaces.Discrete(2), spaces.Discrete(2), 0)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout = BlockLayout.of(spaces.Discrete(2), spaces.Discrete(2), 4)
    with pytest.raises(TypeError, match="small"):
        layout.views(bytearray(layout.size - 64))
