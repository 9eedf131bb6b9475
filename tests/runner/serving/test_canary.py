from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.errors import ConfigError
from envbus.runner.serving.canary import Split, parse_canaries


@given(st.text(), st.integers(-(2**63), 2**63))
def test_an_episode_stays_with_its_model(episode_id: str, seed: int) -> None:
    chosen = Split("m", {"a": 0.2, "b": 0.5}, seed=seed).choose(episode_id)
    assert chosen in ("m", "a", "b")
    assert Split("m", {"a": 0.2, "b": 0.5}, seed=seed).choose(episode_id) == chosen


def test_each_gets_its_share_and_another_seed_has_others_among_it() -> None:
    ids = [f"episode-{i}" for i in range(10_000)]
    split = Split("m", {"a": 0.1, "b": 0.3})
    chosen = [split.choose(i) for i in ids]
    assert chosen.count("a") == pytest.approx(1000, abs=150)
    assert chosen.count("b") == pytest.approx(3000, abs=200)
    other = Split("m", {"a": 0.1, "b": 0.3}, seed=1)
    assert [other.choose(i) for i in ids] != chosen


def test_without_shares_all_episodes_are_the_main_models() -> None:
    assert {Split("m").choose(f"{i}") for i in range(100)} == {"m"}


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({"a": 0.0}, "over 0"),
        ({"a": 1.0}, "below 1"),
        ({"a": float("nan")}, "over 0"),
        ({"a": 0.5, "b": 0.5}, "together"),
        ({"m": 0.5}, "served anyway"),
    ],
)
def test_shares_that_leave_nothing_are_refused(shares: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Split("m", shares)


def test_a_seed_that_is_far_too_large_is_refused() -> None:
    for seed in (2**127, -(2**127) - 1):
        with pytest.raises(ConfigError, match=f"the seed .* {seed}"):
            Split("m", seed=seed)


def test_a_canary_is_a_policy_and_its_share() -> None:
    assert parse_canaries(["a=b.onnx=0.1", "m:f=0.25"]) == {"a=b.onnx": 0.1, "m:f": 0.25}
    for text in ("model.onnx", "model.onnx=", "=0.1", "model.onnx=many"):
        with pytest.raises(ConfigError, match=r"model2.onnx=0\.1"):
            parse_canaries([text])
    with pytest.raises(ConfigError, match="twice"):
        parse_canaries(["a=0.1", "a=0.2"])
