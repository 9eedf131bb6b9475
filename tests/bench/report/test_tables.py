from __future__ import annotations

from envbus.bench.report.tables import render_details, render_summary
from tests.bench.results import (
    actors_row,
    bridge_row,
    broken_row,
    bus_row,
    failed_row,
    policy_row,
    profile_row,
    record,
    recovered_row,
    start_row,
    vector_row,
)

VECTOR = record(
    "vector",
    [
        vector_row("null", 8, "envbus_shm", 50_000.0),
        vector_row("null", 8, "gym_async_shm", 10_000.0),
        vector_row("null", 8, "puffer_w1", 1_000_000.0),
        failed_row("null", 8, "ray_actors", "not installed"),
    ],
)


def test_the_summary_shows_wins_and_losses_as_ratios() -> None:
    text = render_summary({"vector": VECTOR})
    (row,) = [line for line in text.splitlines() if line.startswith("| null")]
    assert "**50k**, 1.5 |" in row
    assert "10k, 1.5 (5x)" in row
    assert "1M, 1.5 (0.05x)" in row
    assert "12.5 / 2,500" in row


def test_the_summary_says_where_and_how_it_was_measured() -> None:
    text = render_summary({"vector": VECTOR})
    assert "A CPU, 2 cores" in text
    assert "7 interleaved rounds of 1 s" in text


def test_a_case_without_envbus_has_no_ratio() -> None:
    text = render_summary({"vector": record("vector", VECTOR["rows"][1:2])})
    assert "| **-** | - | 10k, 1.5 | 10k, 1.5 gym_async_shm | - | - | - |" in text


def test_details_name_what_is_missing_and_why() -> None:
    text = render_details({"vector": VECTOR})
    assert "- Ray actors, as RLlib's RemoteVectorEnv, 8 envs: not installed" in text
    assert "| Gymnasium AsyncVectorEnv | 10k (10k-10k), 1.5 |" in text
    assert "| gymnasium | gymnasium 1.4.0 |" in text
    assert "at least 16 | **missed** |" in text


def test_other_kinds_have_tables_of_their_own() -> None:
    text = render_summary(
        {
            "startup": record("startup", [start_row(64, "envbus_shm", 2, 0.5, 150.0)]),
            "bus": record("bus", [bus_row("signal", "pyzmq", 40.0)]),
            "policy": record("policy", [policy_row("1 row", "policy worker", 120.0)]),
            "profile": record(
                "profile", [profile_row("ask", 2.0), profile_row("send", 12.0, way="messages")]
            ),
        }
    )
    assert "| 64 | envbus BusVectorEnv, 2 actors | 0.50 | 150 | 150 | 300 | 3 |" in text
    assert "| 1 row | policy worker | 120.0 | 240.0 |" in text
    assert "| signal | pyzmq | 40.0 | 80.0 | 25,000 |" in text
    assert "| one vector step by words, us | null, 8 envs |\n|---|---:|\n| ask | 2.0 |\n" in text
    assert "| send | 12.0 |" in text


def test_first_come_batches_have_a_table_of_their_own() -> None:
    rows = [vector_row("jitter", 16, "envbus_pool", 7_000.0)]
    assert "| envbus ActorPool, min_envs=1 | 7k, 1.5 |" in render_summary(
        {"vector": record("vector", rows)}
    )
    assert "first come" not in render_summary({"vector": VECTOR})


def test_actors_are_told_by_what_each_costs() -> None:
    failed = {"num_actors": 1000, "status": "failed", "reason": "no memory"}
    text = render_summary({"actors": record("actors", [actors_row(16, 64.0, 2.5), failed])})
    assert "Medians of 3 starts of 1 s each" in text
    assert "| 16 | 64 | 4.0 | 1.5 | 7.0 | 2.5 | 0.50 |" in text
    assert "| 1000 | - (no memory) |" in text


def test_recovery_tells_what_happens_how_long_it_takes_and_what_it_costs_others() -> None:
    rows = [
        recovered_row(
            "envbus_pool", 0.03, before=40e3, during=30e3, not_asked=70e3, core_lost=29e3
        ),
        recovered_row("envbus_shm", 0.026),
        broken_row("gym_async_shm", "BrokenPipeError", 0.01, "hangs"),
        broken_row("sb3_subproc", "hangs", 10.0, "EOFError"),
        failed_row("cartpole", 16, "ray_actors", "not installed"),
    ]
    lines = render_summary({"recovery": record("recovery", rows)}).splitlines()
    assert lines[2:] == [
        "| envbus ActorPool, min_envs=1 | comes back by itself | 30 / 60 | 40k, 30k; 70k, 29k |",
        "| envbus BusVectorEnv | comes back by itself | 26 / 52 | wait (lockstep) |",
        "| Gymnasium AsyncVectorEnv | BrokenPipeError after 10 ms, 15 workers left, `close` hangs"
        " | 250 by hand | - |",
        "| Stable-Baselines3 SubprocVecEnv | `step` hangs (over 10 s), 15 workers left"
        " | 250 by hand | - |",
        "| Ray actors, as RLlib's RemoteVectorEnv | - (not installed) |  |  |",
    ]


def test_requests_are_told_with_where_they_were_measured_and_their_spread() -> None:
    rows = [
        bridge_row("4 floats", "envbus", p50_us=80.0, p99_us=100.0),
        {"case": "4 floats", "way": "grpc", "status": "failed", "reason": "not installed"},
    ]
    records = {"bridge": record("bridge", rows)}
    summary, details = render_summary(records), render_details(records)
    assert "A CPU, 2 cores" in summary
    assert "each server and each way's clients in processes of their own" in summary
    assert "| 4 floats | envbus | 80.0 | 100.0 | - |" in summary
    assert "- gRPC, 4 floats: not installed" in summary
    assert "| 4 floats | envbus | 80.0 (80.0 to 80.0) | 100.0 (100.0 to 100.0) | - |" in details
