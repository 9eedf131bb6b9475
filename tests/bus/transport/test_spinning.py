from __future__ import annotations

from envbus.bus.transport.spinning import SpinBudget

LIMIT = 100e-6


def after(*waits: float, limit: float = LIMIT, wake_up: float = 0.0) -> SpinBudget:
    """A budget that has seen these waits: longer ones than it spins for are slept through."""
    budget = SpinBudget(limit)
    for wait in waits:
        see(budget, wait, wake_up)
    return budget


def see(budget: SpinBudget, wait: float, wake_up: float) -> None:
    if wait < budget.seconds():
        budget.observe(wait, slept=False)
    else:
        budget.observe(wait + wake_up, slept=True)


def test_nobody_spins_before_short_waits_were_seen() -> None:
    assert after().seconds() == 0.0


def test_short_waits_are_spun_for_a_bounded_time() -> None:
    assert after(*[10e-6] * 30).seconds() == LIMIT


def test_long_waits_are_slept() -> None:
    assert after(*[1.0] * 30).seconds() == 0.0


def test_waits_that_are_short_but_for_the_wake_up_are_spun_for() -> None:
    """Asleep each takes as long as it takes, and the wake-up besides."""
    assert after(*[80e-6] * 30, wake_up=50e-6).seconds() == LIMIT


def test_waits_that_are_a_little_too_long_are_not_spun_for_each_time() -> None:
    """Asleep they look as if they were short but for the wake-up."""
    budget, spun = SpinBudget(LIMIT), 0
    for _ in range(1000):
        spun += budget.seconds() > 0.0
        see(budget, 120e-6, wake_up=30e-6)
    assert spun < 600


def test_one_long_pause_is_forgotten_at_once() -> None:
    assert after(*[10e-6] * 30, 60.0).seconds() == LIMIT


def test_a_few_long_waits_end_the_spinning() -> None:
    assert after(*[10e-6] * 30, *[5e-3] * 5).seconds() == 0.0


def test_one_long_wait_among_three_short_ones_does_not_end_it() -> None:
    """As where episodes of four steps end."""
    budget = after(*[10e-6, 10e-6, 10e-6, 600e-6] * 30)
    for waited in [10e-6, 10e-6, 10e-6, 600e-6]:
        assert budget.seconds() == LIMIT
        see(budget, waited, wake_up=50e-6)


def test_without_a_core_to_spare_nobody_spins() -> None:
    assert after(*[10e-6] * 30, limit=0.0).seconds() == 0.0


def test_who_spins_and_finds_the_core_taken_rests_longer_each_time() -> None:
    budget, rests = after(*[10e-6] * 30), []
    for _ in range(12):
        assert budget.seconds() == LIMIT
        budget.observe(4e-3, slept=False)
        assert budget.rests
        rest = 0
        while not budget.seconds():
            budget.observe(10e-6, slept=True)
            rest += 1
        rests.append(rest)
    assert rests[:3] == [16, 32, 64]
    assert rests[-2:] == [4096, 4096]


def test_a_core_that_was_taken_once_is_forgotten() -> None:
    budget = after(*[10e-6] * 30)
    for _ in range(3):
        budget.observe(4e-3, slept=False)
        for _ in range(100):
            see(budget, 10e-6, wake_up=50e-6)
    budget.observe(4e-3, slept=False)
    for _ in range(16):
        assert budget.seconds() == 0.0
        see(budget, 10e-6, wake_up=50e-6)
    assert budget.seconds() == LIMIT
