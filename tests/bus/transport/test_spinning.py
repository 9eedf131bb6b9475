from __future__ import annotations

from envbus.bus.transport.spinning import SpinBudget

LIMIT = 100e-6


def after(*waits: float, limit: float = LIMIT) -> SpinBudget:
    """A budget that has seen these waits, each of which was slept through if it was too long."""
    budget = SpinBudget(limit)
    for waited in waits:
        budget.observe(waited, slept=waited >= budget.seconds())
    return budget


def test_nobody_spins_before_short_waits_were_seen() -> None:
    assert after().seconds() == 0.0


def test_short_waits_are_spun_for_a_bounded_time() -> None:
    assert after(*[10e-6] * 30).seconds() == LIMIT


def test_long_waits_are_slept() -> None:
    assert after(*[1.0] * 30).seconds() == 0.0


def test_waits_that_are_short_but_for_the_wake_up_are_spun_for() -> None:
    """Asleep each takes as long as it takes, and the wake-up besides."""
    assert after(*[80e-6 + 50e-6] * 30).seconds() == LIMIT


def test_one_long_pause_is_forgotten_at_once() -> None:
    assert after(*[10e-6] * 30, 60.0).seconds() == LIMIT


def test_a_few_long_waits_end_the_spinning() -> None:
    assert after(*[10e-6] * 30, *[5e-3] * 5).seconds() == 0.0


def test_one_long_wait_among_three_short_ones_does_not_end_it() -> None:
    """As where episodes of four steps end."""
    budget = after(*[10e-6, 10e-6, 10e-6, 600e-6] * 30)
    for waited in [10e-6, 10e-6, 10e-6, 600e-6]:
        assert budget.seconds() == LIMIT
        budget.observe(waited, slept=waited > LIMIT)


def test_without_a_core_to_spare_nobody_spins() -> None:
    assert after(*[10e-6] * 30, limit=0.0).seconds() == 0.0
