"""End to end, with this interpreter in the place of isolated environments."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from envbus.bench.__main__ import main
from envbus.bench.harness.child import ChildError
from envbus.bench.harness.environments import Environments
from envbus.bench.harness.record import Schedule, load, save
from envbus.bench.steps.adapter_process import AdapterProcess
from envbus.bench.steps.cases import Case
from envbus.bench.steps.recovery import Kills, measure_recovery
from envbus.bench.steps.scaling import measure_actors
from envbus.bench.steps.startup import StartCase, measure_startup
from envbus.bench.steps.variants import VARIANTS
from envbus.bench.steps.vector import measure_cases
from tests.waiting import wait_until

SHORT = Schedule(rounds=2, seconds=0.05, warm_up=0.01, starts=1)


@pytest.fixture
def here() -> Environments:
    return Environments(shared_python=sys.executable)


def quiet(_: str) -> None:
    """Say nothing."""


@pytest.mark.slow
def test_variants_are_measured_side_by_side(here: Environments, tmp_path: Path) -> None:
    variants = [VARIANTS[name] for name in ("gym_sync", "gym_async_shm", "envbus_shm")]
    record = measure_cases("vector", [Case("null", 2)], variants, SHORT, here, quiet)
    assert [row["variant"] for row in record["rows"]] == [v.name for v in variants]
    for row in record["rows"]:
        assert row["status"] == "ok"
        assert len(row["rounds"]) == SHORT.rounds
        assert row["env_steps_per_second"]["median"] > 0
        assert row["latency_p50_us"]["median"] <= row["latency_p99_us"]["median"]
    assert "gymnasium" in record["versions"]["gymnasium"]
    save(record, tmp_path / "vector.json")
    assert load(tmp_path / "vector.json") == record


@pytest.mark.slow
def test_a_library_that_fails_is_reported_and_the_others_go_on(here: Environments) -> None:
    variants = [VARIANTS["ray_actors"], VARIANTS["gym_sync"]]
    record = measure_cases("vector", [Case("null", 1)], variants, SHORT, here, quiet)
    failed, measured = record["rows"]
    assert failed["status"] == "failed"
    assert "No module named 'ray'" in failed["reason"]
    assert measured["status"] == "ok"


@pytest.mark.slow
def test_recovery_is_measured_and_what_takes_no_part_is_told(here: Environments) -> None:
    names = ("envbus_pool", "envbus_shm", "gym_sync")
    record = measure_recovery(Kills(ours=2, others=1), SHORT, here, names, quiet)
    pool, vector, sync = record["rows"]
    assert (pool["status"], pool["outcome"], pool["seconds"]["n"]) == ("ok", "recovered", 2)
    rates = pool["others_env_steps_per_second"]
    assert set(rates) == {"before", "during", "not_asked", "core_lost"}
    assert rates["before"] > 0
    assert (vector["outcome"], vector["others_env_steps_per_second"]) == ("recovered", {})
    assert (sync["status"], sync["reason"]) == (
        "failed",
        "TypeError: this library is not part of that comparison",
    )


@pytest.mark.slow
def test_start_and_memory_are_measured(here: Environments) -> None:
    variants = [VARIANTS["gym_async_shm"]]
    record = measure_startup([StartCase(2, 2)], variants, SHORT, here, quiet)
    (row,) = record["rows"]
    assert row["processes"] == 3
    assert 0 < row["uss_mb"]["median"] <= row["pss_mb"]["median"] <= row["rss_mb"]["median"]


@pytest.mark.slow
def test_what_an_actor_costs_is_measured(here: Environments) -> None:
    record = measure_actors([2], SHORT, here, quiet)
    (row,) = record["rows"]
    assert (row["status"], row["num_actors"]) == ("ok", 2)
    # Both are rounded to five digits.
    assert row["step_us_per_actor"]["median"] == pytest.approx(
        row["step_us"]["median"] / 2, rel=1e-4
    )
    for key in ("seconds", "pss_mb_per_actor", "descriptors_per_actor"):
        assert row[key]["median"] > 0
    assert "envbus" in record["versions"]


def test_a_paused_library_stands_still_and_then_goes_on(here: Environments) -> None:
    adapter = AdapterProcess(VARIANTS["gym_async_shm"], here)
    try:
        adapter.wait_started()
        adapter.open("null", 2, VARIANTS["gym_async_shm"].options, 30.0)
        adapter.pause()
        assert len(adapter._stopped) == 3

        def is_stopped() -> bool:
            return {process.status() for process in adapter._stopped} == {psutil.STATUS_STOPPED}

        wait_until(is_stopped, "the stop of all its processes")
        adapter.resume()
        assert adapter.run(0.02, 0.0)["env_steps"] > 0
    finally:
        tree = adapter._tree()
        adapter.close()
    assert not [process for process in tree if process.is_running()]


def test_an_adapter_says_what_went_wrong(here: Environments) -> None:
    adapter = AdapterProcess(VARIANTS["gym_sync"], here)
    try:
        adapter.wait_started()
        with pytest.raises(ChildError, match="KeyError: 'nothing'"):
            adapter.open("nothing", 2, VARIANTS["gym_sync"].options, 30.0)
    finally:
        adapter.close()


def test_a_wrong_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vector", "--variant", "nothing"]) == 2
    assert "there is no variant 'nothing'" in capsys.readouterr().err
    assert main(["vector", "--case", "null"]) == 2
    assert main(["check", "nowhere.json"]) == 2


@pytest.mark.slow
def test_report_and_check_read_what_was_measured(
    here: Environments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [VARIANTS["gym_async_shm"]]
    record = measure_cases("vector", [Case("null", 2)], variants, SHORT, here, quiet)
    save(record, tmp_path / "vector.json")
    assert main(["report", str(tmp_path)]) == 0
    assert "null env (4 floats), 2" in (tmp_path / "table.md").read_text("utf-8")
    assert "## Targets" in (tmp_path / "details.md").read_text("utf-8")
    capsys.readouterr()
    assert main(["check", str(tmp_path / "vector.json")]) == 0
    assert "not measured" in capsys.readouterr().out
