from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces

from envbus.bus.errors import ConfigError
from envbus.runner.distributions import ActionHead


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
