from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.policies.distributions import ActionHead


def test_samples_of_logits_come_as_often_as_their_log_probability_says() -> None:
    head = ActionHead(spaces.Discrete(3, start=5), "it")
    assert (head.size, head.is_discrete) == (3, True)
    logits = np.tile(np.array([0.0, 1.0, -1.0], np.float32), (20000, 1))
    actions, logp = head.choose(logits, np.random.default_rng(0))
    assert (actions.dtype, logp.dtype) == (np.int64, np.float32)
    for action in (5, 6, 7):
        found = actions == action
        assert found.mean() == pytest.approx(math.exp(logp[found][0]), abs=0.015)
    best, _ = head.choose(logits, None)
    assert set(best) == {6}


class Zeros(np.random.Generator):
    """Gives noise of 0 where it is told to, as a generator of float32 does once in 2^24."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(np.random.PCG64(0))
        self.places = places

    def standard_exponential(self, size: Any, dtype: Any) -> Any:  # type: ignore[override]  # one of several forms
        noise = np.full(size, 1000.0, dtype)
        noise[:, self.places] = 0.0
        return noise


@pytest.mark.parametrize("mask", [-1e9, -np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("places", [[0], [2], [0, 2], [0, 1, 2, 3], []])
def test_a_masked_action_is_never_chosen_whatever_the_noise(mask: float, places: list[int]) -> None:
    head = ActionHead(spaces.Discrete(4), "it")
    logits = np.tile(np.array([mask, 0.5, mask, -3.0], np.float32), (5, 1))
    with np.errstate(all="raise", under="ignore"):
        actions, logp = head.choose(logits, Zeros(places))
    assert set(actions) <= {1, 3}
    assert np.isfinite(logp).all()
    only = np.tile(np.array([mask, mask, mask, -3.0], np.float32), (5, 1))
    assert set(head.choose(only, Zeros(places))[0]) == {3}


@pytest.mark.parametrize("row", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)])
def test_logits_by_which_nothing_can_be_chosen_are_refused_with_their_row(
    row: list[float], rng: np.random.Generator | None
) -> None:
    logits = np.array([[0.0, 1.0], row], np.float32)
    with pytest.raises(ValueError, match=r"logits that no action can be chosen by, in row 1: "):
        ActionHead(spaces.Discrete(2), "it").choose(logits, rng)


def test_means_that_are_no_numbers_are_refused() -> None:
    head = ActionHead(spaces.Box(-1.0, 1.0, (1,)), "it")
    log_std = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"means .* in row 1"):
        head.choose(np.array([[0.0], [np.nan]], np.float32), None, log_std)
    with pytest.raises(ValueError, match="log_std"):
        head.choose(np.zeros((2, 1), np.float32), None, log_std + np.inf)


def test_a_gaussian_has_the_log_probability_of_its_density_and_the_shape_of_the_space() -> None:
    head = ActionHead(spaces.Box(-2.0, 2.0, (2, 1), np.float64), "it")
    assert (head.size, head.is_discrete) == (2, False)
    means = np.ones((1000, 2), np.float32)
    log_std = np.array([0.5, -1.0], np.float32)
    actions, logp = head.choose(means, np.random.default_rng(0), log_std)
    assert (actions.shape, actions.dtype) == ((1000, 2, 1), np.float64)
    std = np.exp([0.5, -1.0])
    density = -0.5 * ((actions[..., 0] - 1) / std) ** 2 - np.log(std * math.sqrt(2 * math.pi))
    assert logp == pytest.approx(density.sum(axis=1), abs=1e-3)
    best, at_the_mean = head.choose(means, None, np.tile(log_std, (1000, 1)))
    assert best.tolist() == [[[1.0], [1.0]]] * 1000
    assert (at_the_mean >= logp).all()


def test_other_spaces_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="it gives Discrete or Box actions, not MultiBinary"):
        ActionHead(spaces.MultiBinary(2), "it")
    with pytest.raises(ConfigError):
        ActionHead(spaces.Box(0, 9, (2,), np.int64), "it")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("explore", [True, False])
def test_outputs_of_other_precision_have_float32_log_probabilities(
    dtype: type, explore: bool
) -> None:
    head = ActionHead(spaces.Discrete(3), "it")
    masked = np.finfo(dtype).min
    logits = np.tile(np.array([10, masked, 5], dtype), (500, 1))
    rng = np.random.default_rng(0) if explore else None
    actions, logp = head.choose(logits, rng)
    assert logp.dtype == np.float32
    assert 1 not in actions
    expected = np.where(actions == 0, 0.0, -5.0) - math.log1p(math.exp(-5.0))
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    box = ActionHead(spaces.Box(-1.0, 1.0, (2,)), "it")
    means, log_std = np.zeros((3, 2), dtype), np.zeros(2, dtype)
    assert box.choose(means, rng, log_std)[1].dtype == np.float32
