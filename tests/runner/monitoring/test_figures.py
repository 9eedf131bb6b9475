"""What is told of a run."""

from __future__ import annotations

import msgspec

from envbus.runner.bridge.vocabulary import BridgeStatistics
from envbus.runner.engine.engine import Statistics
from envbus.runner.monitoring.figures import (
    PartFigures,
    RunFigures,
    fault_figures,
    figures_of,
    rates,
)


def run(at: float, began: float = 0.0, **parts: dict[str, float]) -> RunFigures:
    """Return the figures of a run with counts by part."""
    return RunFigures(
        pid=1,
        at=at,
        began=began,
        command="",
        version="",
        parts=[PartFigures(name=name, kind="", counts=counts) for name, counts in parts.items()],
    )


def test_what_grows_is_a_count_and_what_may_fall_is_a_level() -> None:
    counts, levels = figures_of(
        Statistics(
            actors=4,
            actors_ready=3,
            restarts=2,
            in_flight=1,
            env_restarts=0,
            envs_given_up=0,
            steps_by_word=7,
            faults={"crash": 2, "error": 1},
        )
    )
    assert levels == {"actors": 4, "actors_ready": 3, "in_flight": 1}
    assert counts["faults.crash"] == 2
    assert counts["faults.error"] == 1
    assert counts["restarts"] == 2


def test_each_number_of_a_bridge_is_a_count_or_a_level() -> None:
    statistics = BridgeStatistics(clients_now=3, episodes=5)
    counts, levels = figures_of(statistics)
    assert counts | levels == msgspec.structs.asdict(statistics)
    assert levels["clients_now"] == 3
    assert counts["episodes"] == 5


def test_rates_are_what_has_grown_per_second() -> None:
    before, now = run(10.0, a={"steps": 100.0}), run(12.0, a={"steps": 700.0})
    assert rates(before, now) == {("a", "steps"): 300.0}


def test_a_part_that_is_new_or_has_begun_anew_has_no_rate() -> None:
    before = run(10.0, a={"steps": 100.0})
    assert rates(before, run(11.0, b={"steps": 5.0})) == {}
    assert rates(before, run(11.0, a={"steps": 5.0})) == {}
    assert rates(before, run(11.0, a={"steps": 200.0}, began=10.5)) == {}
    assert rates(before, run(10.0, a={"steps": 200.0})) == {}


def test_a_fault_has_one_line() -> None:
    fault = fault_figures(5.0, "crash", "actor-1", "it ended\nwith much to say", env=3)
    assert (fault.message, fault.env) == ("it ended", 3)
    assert fault_figures(5.0, "crash", "a", "\x1b[31m \udcff\r").message == r"\x1b[31m \udcff\r"
