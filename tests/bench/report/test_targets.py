from __future__ import annotations

import pytest

from envbus.bench.report.targets import (
    TargetVerdict,
    best_peer,
    check,
    lost_by_others,
    render_verdicts,
)
from tests.bench.results import (
    actors_row,
    bridge_row,
    bus_row,
    failed_row,
    policy_row,
    record,
    recovered_row,
    start_row,
    vector_row,
)


def by_target(verdicts: list[TargetVerdict], start: str) -> list[TargetVerdict]:
    return [verdict for verdict in verdicts if verdict.target.startswith(start)]


def test_ratios_are_taken_within_one_result() -> None:
    result = record(
        "vector",
        [vector_row("null", 8, "envbus_shm", 170.0), vector_row("null", 8, "gym_async_shm", 10.0)],
    )
    (ratio,) = by_target(check(result), "null:8: times AsyncVectorEnv")
    assert (ratio.measured, ratio.met) == (17.0, True)
    (other,) = by_target(check(result), "null:64: times AsyncVectorEnv")
    assert (other.measured, other.met) == (None, None)


def test_the_floor_a_worker_that_spins_and_one_process_are_beside_us_too() -> None:
    rows = [
        vector_row("null", 8, "envbus_shm", 80.0),
        vector_row("null", 8, "floor", 100.0),
        vector_row("null", 8, "puffer_w1", 100.0),
        vector_row("null", 8, "envbus_pool_cores", 60.0),
        failed_row("infos", 8, "floor", "has no infos"),
        vector_row("infos", 8, "envbus_shm", 80.0),
        vector_row("frame", 16, "envbus_shm", 30.0),
        vector_row("frame", 16, "gym_sync", 20.0),
    ]
    verdicts = check(record("vector", rows))
    (floor,) = [one for one in verdicts if "floor" in one.target]
    assert (floor.target, floor.measured, floor.met) == ("null:8: times the floor", 0.8, False)
    (spinning,) = by_target(verdicts, "null:8: times PufferLib")
    assert (spinning.measured, spinning.limit, spinning.met) == (0.8, 0.9, False)
    (pool,) = by_target(verdicts, "null:8: ActorPool")
    assert (pool.measured, pool.met) == (0.75, False)
    (frame,) = by_target(verdicts, "frame:16: times SyncVectorEnv")
    assert (frame.measured, frame.met) == (1.5, True)
    assert {one.met for one in by_target(verdicts, "halfcheetah:8: times Sync")} == {None}


def test_who_blocks_is_compared_by_what_a_core_brings() -> None:
    ours, floor = (
        vector_row("null", 8, "envbus_block", 80.0),
        vector_row("null", 8, "floor_block", 100.0),
    )
    ours["cores"], floor["cores"] = {"median": 1.0}, {"median": 2.0}
    (verdict,) = by_target(check(record("vector", [ours, floor])), "null:8: wait='block'")
    assert (verdict.measured, verdict.met) == (1.6, True)


def test_actors_cost_the_same_each_however_many_there_are() -> None:
    rows = [
        actors_row(2, step_us=10.0, descriptors=8.0),
        actors_row(16, step_us=64.0, descriptors=2.5),
        actors_row(1000, step_us=8000.0, descriptors=1.9),
    ]
    descriptors, growth = check(record("actors", rows))
    assert (descriptors.measured, descriptors.met) == (1.9, True)
    assert (growth.measured, growth.met) == (2.0, False)


def test_the_best_peer_neither_spins_nor_stays_in_one_process() -> None:
    rows = [
        vector_row("null", 8, "puffer_w1", 900.0),
        vector_row("null", 8, "gym_sync", 800.0),
        vector_row("null", 8, "sb3_subproc", 20.0),
        vector_row("null", 8, "gym_async_shm", 10.0),
        failed_row("null", 8, "tianshou_shmem", "broken"),
        vector_row("null", 8, "envbus_shm", 15.0),
    ]
    result = record("vector", rows)
    peer = best_peer(result, "null", 8)
    assert peer is not None
    assert peer["variant"] == "sb3_subproc"
    (ahead,) = by_target(check(result), "null:8: times the fastest")
    assert (ahead.measured, ahead.met) == (0.75, False)


def test_with_one_env_being_ahead_of_all_is_not_asked() -> None:
    result = record("vector", [vector_row("null", 1, "envbus_shm", 1.0)])
    assert by_target(check(result), "null:1: times the fastest") == []


def test_memory_and_start_have_upper_limits() -> None:
    result = record(
        "startup",
        [
            start_row(64, "envbus_shm", 2, 1.0, 100.0),
            start_row(16, "envbus_shm", 16, 3.0, 100.0),
            start_row(64, "gym_async_shm", 0, 2.0, 400.0),
        ],
    )
    memory, _, quick, slow = check(result)
    assert (memory.measured, memory.met) == (0.25, False)
    assert (quick.measured, quick.met) == (1.0, True)
    assert (slow.measured, slow.met) == (3.0, False)


def test_recovery_has_limits_on_its_length_and_on_what_others_lose() -> None:
    rates = {"before": 100.0, "during": 60.0, "not_asked": 150.0, "core_lost": 75.0}
    result = record("recovery", [recovered_row("envbus_pool", 0.2, **rates)])
    slow, missing, lost = check(result)
    assert (slow.measured, slow.met) == (0.2, False)
    assert missing.met is None
    assert lost.measured == pytest.approx(0.15)
    assert lost.met is False


def test_what_others_gain_without_the_envs_is_not_held_against_a_recovery() -> None:
    rates = {"before": 100.0, "during": 95.0, "not_asked": 190.0, "core_lost": 120.0}
    assert lost_by_others(recovered_row("envbus_pool", 0.2, **rates)) == pytest.approx(0.05)


def test_the_bus_is_compared_with_bare_pyzmq() -> None:
    result = record("bus", [bus_row("signal", "envbus", 60.0), bus_row("signal", "pyzmq", 50.0)])
    (verdict,) = check(result)
    assert (verdict.measured, verdict.met) == (1.2, True)


def test_a_policy_worker_is_compared_with_the_bus_without_the_policy_s_own_time() -> None:
    ways = {"policy alone": 40.0, "bus alone": 100.0, "policy worker": 180.0}
    verdicts = check(record("policy", [policy_row("1 row", way, us) for way, us in ways.items()]))
    assert [(verdict.measured, verdict.met) for verdict in verdicts] == [(1.4, True), (None, None)]


def test_a_table_says_what_was_missed_and_what_was_not_measured() -> None:
    table = render_verdicts(
        [
            TargetVerdict("speed", 3.456, 4.0, at_least=True),
            TargetVerdict("memory", 0.1, 0.2, at_least=False),
            TargetVerdict("other", None, 1.0, at_least=True),
        ]
    )
    assert table.splitlines()[2:] == [
        "| speed | 3.46 | at least 4 | **missed** |",
        "| memory | 0.10 | at most 0.2 | met |",
        "| other | - | at least 1 | not measured |",
    ]


def test_the_bridge_is_compared_with_bare_pyzmq_and_http() -> None:
    pixels, network = "84 x 84 x 4 bytes", "4 floats, MLP"
    rows = [
        bridge_row("4 floats", "pyzmq", p50_us=80.0, p99_us=100.0),
        bridge_row("4 floats", "envbus", p50_us=100.0, p99_us=600.0),
        bridge_row(pixels, "pyzmq", per_second=1000.0),
        bridge_row(pixels, "envbus", per_second=800.0),
        bridge_row(network, "pyzmq", per_second=1000.0),
        bridge_row(pixels, "envbus, ZeroMQ", per_second=500.0),
        bridge_row(network, "envbus", per_second=600.0),
        bridge_row(network, "envbus, ZeroMQ", per_second=400.0),
        bridge_row(network, "http, Unix socket", per_second=20.0),
    ]
    verdicts = [(one.measured, one.met) for one in check(record("bridge", rows))]
    assert verdicts == [
        (1.25, True),
        (6.0, False),
        *[(0.6, True), (30.0, True), (1.25, True)],
        *[(0.4, False), (20.0, True), (2.0, False)],
    ]
    assert {one.met for one in check(record("bridge", []))} == {None}
