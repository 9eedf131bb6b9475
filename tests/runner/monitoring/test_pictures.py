"""Observations as pictures, and pictures as PNGs."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from envbus.runner.monitoring.pictures import picture_of, to_png

RANDOM = np.random.default_rng(0)


def pixels(*shape: int) -> npt.NDArray[np.uint8]:
    """Return any picture."""
    return RANDOM.integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(10, 20), (84, 84, 3)])
def test_a_png_has_the_pixels_of_its_picture(shape: tuple[int, ...]) -> None:
    picture = pixels(*shape)
    read = cv2.imdecode(np.frombuffer(to_png(picture), np.uint8), cv2.IMREAD_UNCHANGED)
    assert read is not None
    if len(shape) == 3:
        read = cv2.cvtColor(read, cv2.COLOR_BGR2RGB)
    np.testing.assert_array_equal(read, picture)


def test_pictures_are_found_in_the_forms_that_envs_have() -> None:
    def shown(leaf: npt.NDArray[Any]) -> Any:
        return picture_of([np.zeros(4), leaf, pixels(9, 9)])

    for leaf, picture in (
        (flat := pixels(84, 84), flat),
        (colours := pixels(210, 160, 3), colours),
        (first := pixels(3, 64, 48), np.moveaxis(first, 0, -1)),
        (stack := pixels(4, 84, 84), stack[3]),
        (deep := pixels(8, 84, 84), deep[7]),
        (grey := pixels(84, 84, 1), grey[..., 0]),
    ):
        np.testing.assert_array_equal(shown(leaf), picture)


def test_numbers_that_are_no_bytes_are_scaled() -> None:
    floats = np.linspace(-1.0, 1.0, 100, dtype=np.float32).reshape(10, 10)
    picture = picture_of([floats])
    assert picture is not None
    assert (picture.min(), picture.max()) == (0, 255)
    floats[0, 0] = np.nan
    assert picture_of([floats]) is not None
    assert not np.any(picture_of([np.full((10, 10), 7.0)]))


def test_other_arrays_are_no_pictures() -> None:
    others = (
        *(np.zeros(100), np.zeros((7, 100)), np.zeros((4, 4, 3)), np.zeros((2, 3, 4, 5))),
        *(np.zeros((100, 20, 30)), np.zeros((3000, 10)), np.zeros((10, 10), np.complex64)),
        np.array(["a"]),
    )
    assert [picture_of([other]) for other in others] == [None] * len(others)
    assert picture_of([]) is None
