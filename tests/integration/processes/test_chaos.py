"""The short form of `envbus chaos`: everything is broken for real, and the audit finds nothing."""

from __future__ import annotations

import msgspec
import pytest

from envbus.runner.chaos.messages import ChaosProgress
from envbus.runner.chaos.result import ChaosResult
from envbus.runner.chaos.run import ChaosConfig, run_chaos
from envbus.runner.chaos.schedule import FaultKind


def quiet(label: str, progress: ChaosProgress) -> None:
    """Say nothing."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_step_is_lost_doubled_or_mixed_up_whatever_breaks() -> None:
    config = ChaosConfig(seconds=13.0, calm_seconds=1.0, seed=3, num_envs=12, num_actors=3)
    result = run_chaos(config, quiet)
    assert result.violations == []
    assert {kind.kind for kind in result.kinds if kind.injected} == {
        kind.value for kind in FaultKind
    }
    assert {"crash", "timeout", "error"} <= set(result.faults)
    assert result.recovered.n > 10
    assert msgspec.json.decode(msgspec.json.encode(result), type=ChaosResult) == result


@pytest.mark.slow
def test_a_driver_that_fails_is_a_violation_with_its_last_words() -> None:
    config = ChaosConfig(seconds=5.0, calm_seconds=1.0, num_envs=1, num_actors=2)
    result = run_chaos(config, quiet)
    assert "num_actors=2 is more than the 1 env(s)" in result.violations[0]
