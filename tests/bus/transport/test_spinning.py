from __future__ import annotations

from envbus.bus.transport.spinning import SpinBudget

LIMIT = 100e-6


def after(*waits: float, limit: float = LIMIT) -> SpinBudget:
    budget = SpinBudget(limit)
    for waited in waits:
        budget.observe(waited)
    return budget


def test_nobody_spins_before_short_waits_were_seen() -> None:
    assert after().seconds() == 0.0


def test_short_waits_are_spun_for_a_bounded_time() -> None:
    assert after(*[10e-6] * 30).seconds() == LIMIT


def test_long_waits_are_slept() -> None:
    assert after(*[1.0] * 30).seconds() == 0.0


def test_one_long_pause_is_forgotten_after_a_few_short_waits() -> None:
    budget = after(*[10e-6] * 30, 60.0)
    for _ in range(10):
        budget.observe(10e-6)
    assert budget.seconds() == LIMIT


def test_a_few_long_waits_end_the_spinning() -> None:
    assert after(*[10e-6] * 30, *[5e-3] * 5).seconds() == 0.0


def test_without_a_core_to_spare_nobody_spins() -> None:
    assert after(*[10e-6] * 30, limit=0.0).seconds() == 0.0
