from __future__ import annotations

import io

from rich.console import Console

from envbus.runner.cli.job import JobResult
from envbus.runner.cli.report import ProgressLine, print_result, print_tuning
from envbus.runner.cli.stepping import Measured, Progress
from envbus.runner.cli.tuning import Cost, Trial, TuneResult

MEASURED = Measured(
    backend="envbus",
    start_seconds=0.25,
    seconds=2.0,
    vector_steps=1000,
    env_steps=64000,
    env_steps_per_second=32000.0,
    episodes=1234,
    lost_episodes=2,
    mean_return=22.125,
    mean_length=22.1,
    latency_p50_ms=0.4321,
    latency_p99_ms=None,
    restarts=1,
)
RESULT = JobResult(
    env="CartPole-v1",
    num_envs=64,
    actors=1,
    policy="random",
    seed=None,
    killed=None,
    interrupted=True,
    measured=[MEASURED],
    not_measured={"AsyncVectorEnv": "no [room]"},
)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80, color_system=None), out


def report(seconds: float, *, restarts: int = 0, killed: int | None = None) -> Progress:
    return Progress(
        backend="envbus",
        fraction=seconds / 4,
        seconds=seconds,
        env_steps=int(1000 * seconds),
        episodes=3,
        restarts=restarts,
        killed=killed,
    )


def test_the_table_has_a_row_for_each_figure() -> None:
    to, out = console(terminal=False)
    print_result(to, RESULT)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[0] == "CartPole-v1: 64 envs, 1 actor, policy random (interrupted)"
    for row in (
        "env steps per second 32,000",
        "episodes 1,234",
        "mean return 22.12",
        "step latency p50 (ms) 0.432",
        "step latency p99 (ms) -",
        "restarts 1",
        "AsyncVectorEnv: not measured: no [room]",
    ):
        assert row in lines


def test_off_a_terminal_there_is_at_most_one_line_per_second() -> None:
    to, out = console(terminal=False)
    with ProgressLine(to) as line:
        for tenth in range(25):
            line(report(tenth / 10))
    assert len(out.getvalue().splitlines()) == 2
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_one_line_is_rewritten() -> None:
    to, out = console(terminal=True)
    with ProgressLine(to) as line:
        line(report(1.0))
        line(report(2.0))
    assert "2,000 env steps" in out.getvalue()
    assert out.getvalue().count("\n") <= 1


def test_a_kill_and_a_restart_are_told_when_they_happen() -> None:
    to, out = console(terminal=False)
    with ProgressLine(to) as line:
        line(report(0.1, killed=4711))
        line(report(0.2, restarts=1))
        line(report(0.3, restarts=1))
    assert out.getvalue().splitlines() == [
        "envbus: killed actor process 4711",
        "envbus: it was started again; all other envs went on",
    ]


def test_the_table_of_tuning_has_a_row_for_each_number_of_actors() -> None:
    to, out = console(terminal=False)
    cost = Cost(
        reset_ms=3.0,
        reset_cpu_ms=1.0,
        step_ms=10.0,
        step_cpu_ms=1.0,
        observation_bytes=None,
        memory_mb=41.6,
    )
    trial = Trial(
        num_actors=4,
        envs_per_actor=2,
        env_steps_per_second=1234.5,
        latency_p50_ms=20.5,
        cores_used=None,
        memory_mb=99.9,
    )
    result = TuneResult(
        env="a:b",
        num_envs=8,
        cores=2,
        cost=cost,
        trials=[trial],
        num_actors=4,
        line='make_vec("a:b", 8, num_actors=4)',
        interrupted=True,
    )
    print_tuning(to, result)
    text = " ".join(out.getvalue().split())
    assert text.startswith("a:b: 8 envs, 2 cores (interrupted) one env: step 10.000 ms, of which")
    assert "it waits 90%; reset 3.000 ms, CPU time 1.000 ms; observations of no fixed size" in text
    assert "4 actors of 2 envs 1,234 20.500 - 100" in text
    assert text.endswith('write: make_vec("a:b", 8, num_actors=4)')
