from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from envbus.runner.cli.main import CLOSED_PIPE, main
from tests.waiting import wait_until

COMMAND = [sys.executable, "-W", "error", "-m", "envbus.runner.cli.main"]

LOUD_ENV = """
import os

import gymnasium
import numpy as np

print("imported")


class LoudEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        print("reset")
        os.write(1, b"descriptor")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


class StuckEnv(LoudEnv):
    def step(self, action):
        while True:
            pass


class BrokenEnv(LoudEnv):
    def step(self, action):
        raise RuntimeError("step is broken")


class OnceBrokenEnv(LoudEnv):
    def step(self, action):
        try:  # once, of all of them
            os.close(os.open("broken", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().step(action)
        raise RuntimeError("step is broken")


def ones(observations, action_space):
    assert observations.shape == (3, 2)
    return np.ones(3, np.int64)


def wrong(observations, action_space):
    return np.ones(2, np.int64)
"""


def envbus(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module of somebody's own."""
    (tmp_path / "mine.py").write_text(LOUD_ENV, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command; see `envbus --help`"),
        (["fly"], "No such command 'fly'; see"),
        (["run"], "Missing argument 'ENV_ID'; see `envbus run --help`"),
        (["run", "CartPole-v1", "--nope"], "No such option: --nope"),
        (["run", "CartPole-v1", "--num-envs", "0"], "'--num-envs'"),
        (["run", "CartPole-v1", "--num-envs", "many"], "'--num-envs'"),
        (["run", "CartPole-v1", "--num-envs", "1000000000"], "'--num-envs'"),
        (["run", "CartPole-v1", "--steps", "0"], "'--steps'"),
        (["run", "CartPole-v1", "--seconds", "0"], "seconds must be over 0 and finite"),
        (["run", "CartPole-v1", "--seed", "-1"], "'--seed'"),
        (["run", "CartPole-v1", "--num-actors", "9"], "from 1 to the number of envs, 8; got 9"),
        (["run", "CartPole-v1", "--actors", "9"], "from 1 to the number of envs, 8; got 9"),
        (["run", "CartPole-v1", "--threads-per-process", "0"], "--threads-per-process must be"),
        (["run", "CartPole-v1", "--policy", "best"], "random, zero or module:function"),
        (["run", "CartPole-v1", "--policy", "math:pi"], "not a function but a float"),
        (["run", "Nope-v0"], "cannot make 'Nope-v0': Environment `Nope` doesn't exist"),
        (["run", "CartPole-v7"], "cannot make 'CartPole-v7'"),
        (["run", "no_such_module:Env-v0"], "No module named 'no_such_module'"),
        (["run", "math:no_such_env"], "module 'math' has no attribute 'no_such_env'"),
        (["run", ":Env-v0"], "neither a Gymnasium id"),
        (["tune"], "Missing argument 'ENV_ID'; see `envbus tune --help`"),
        (["tune", "CartPole-v1", "--num-envs", "0"], "'--num-envs'"),
        (["tune", "CartPole-v1", "--seconds", "0"], "seconds must be over 0 and finite"),
        (["tune", "CartPole-v1", "--threads-per-process", "0"], "--threads-per-process must be"),
        (["tune", "Nope-v0"], "cannot make 'Nope-v0': Environment `Nope` doesn't exist"),
        (["broker"], "Missing option '--bind'; see `envbus broker --help`"),
        (["broker", "--bind", "nowhere"], "nowhere"),
        (["broker", "--bind", "tcp://0.0.0.0:0"], "pass --keys and --allow, bind to 127.0.0.1"),
        (["broker", "--bind", "tcp://0.0.0.0:0"], "or say --insecure"),
        (["broker", "--bind", "tcp://127.0.0.1:0", "--keys", "none"], "the public keys of its"),
        (["serve", "--ws", "0.0.0.0:0"], "--token-file of 16 characters or more and --tls-cert"),
    ],
)
def test_a_mistake_in_the_call_gets_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("envbus: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"envbus {version('envbus')}\n"


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["run"], ["broker"], ["keys", "new"]])
def test_help_comes_with_exit_code_0(
    command: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, word]) == 0
    assert "Usage: envbus" in capsys.readouterr().out


def test_a_run_ends_in_a_table_and_tells_its_progress_apart_from_it() -> None:
    done = envbus("run", "CartPole-v1", "--num-envs", "4", "--seconds", "1.3", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CartPole-v1: 4 envs, ")
    assert "env steps per second" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    told = re.findall(r"^envbus: (\d+\.\d) s .*\n", done.stderr, re.MULTILINE)
    assert len(told) == done.stderr.count("\n") >= 1
    # One per second; on a busy machine the run is longer than it was to be.
    assert all(float(seconds) >= number for number, seconds in enumerate(told, 1))


@pytest.mark.slow
def test_json_has_standard_output_for_itself_whatever_envs_print(folder: Path) -> None:
    done = envbus(
        *("run", "mine:LoudEnv", "--num-envs", "3", "--actors", "2", "--steps", "30"),
        *("--policy", "mine:ones", "--json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert "descriptor" in done.stderr
    assert (result["env"], result["num_envs"], result["actors"]) == ("mine:LoudEnv", 3, 2)
    assert result["measured"][0]["env_steps"] == 30
    assert result["measured"][0]["mean_return"] is None


@pytest.mark.slow
def test_a_log_of_json_tells_who_died_and_why() -> None:
    done = envbus(
        *("run", "CartPole-v1", "--num-envs", "4", "--actors", "2", "--seconds", "2"),
        *("--kill-one", "--json", "--log-format", "json"),
    )
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["cause"]) == ("WARNING", "crash")
    assert line["message"].startswith(line["actor"])


@pytest.mark.slow
def test_a_log_of_json_tells_which_env_raised_where_and_what(folder: Path) -> None:
    done = envbus(
        *("run", "mine:OnceBrokenEnv", "--num-envs", "4", "--actors", "2", "--seconds", "2"),
        "--kill-one",  # for which its envs are started again
        *("--metrics", "127.0.0.1:0", "--log-format", "json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    place, *lines = map(json.loads, done.stderr.splitlines())
    assert place["level"] == "INFO"
    assert re.fullmatch(r"metrics at http://127\.0\.0\.1:\d+/metrics", place["message"])
    (line,) = (line for line in lines if "env" in line)
    assert (line["level"], line["cause"]) == ("WARNING", "error")
    assert line["env"] in ((0, 1) if line["actor"] == "actor-0" else (2, 3))
    assert line["actor"] in ("actor-0", "actor-1")
    assert "step is broken" in line["message"]
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert [line["cause"] for line in lines if "env" not in line] == ["crash"]


@pytest.mark.slow
def test_a_run_tells_prometheus_its_steps_meanwhile() -> None:
    steps = re.compile(r"^envbus_env_steps_total\{.*\} (\S+)$", re.MULTILINE)
    with subprocess.Popen(
        [
            *(*COMMAND, "run", "CartPole-v1", "--num-envs", "4", "--actors", "2"),
            *("--seconds", "100", "--metrics", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stderr is not None
            place = job.stderr.readline()
            port = place.removeprefix("metrics at http://127.0.0.1:").removesuffix("/metrics\n")
            assert port.isdecimal(), place
            seen: set[float] = set()

            def steps_go_on() -> bool:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
                    seen.update(map(float, steps.findall(page.read().decode())))
                return len(seen - {0.0}) >= 2

            wait_until(steps_go_on, "its env steps are told, and grow")
            job.send_signal(signal.SIGINT)
            _, err = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 130, err


@pytest.mark.slow
def test_tuning_ends_in_a_table_and_the_line_to_write() -> None:
    done = envbus("tune", "CartPole-v1", "--num-envs", "4", "--seconds", "0.2", "--seed", "1")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("CartPole-v1: 4 envs, ")
    assert re.match(r"one env: step [\d.]+ ms, of which it waits \d+%; reset ", lines[1])
    assert "observations of 16 bytes; an actor with it has " in lines[1]
    assert any(line.startswith("1 actor of 4 envs ") for line in lines)
    (wanted,) = (line for line in lines if line.startswith("write: "))
    assert re.fullmatch(r'write: make_vec\("CartPole-v1", 4, num_actors=[1-4]\)', wanted)


def test_an_env_that_fails_is_a_failure_with_its_traceback(folder: Path) -> None:
    done = envbus("run", "mine:BrokenEnv", "--num-envs", "1", "--steps", "5", cwd=folder)
    assert done.returncode == 1
    assert "mine.py" in done.stderr
    assert done.stderr.count("RuntimeError: step is broken") == 2  # the first line, the traceback
    assert "num_actors=0" in done.stderr
    assert not {"typer", "click", "cli.py", "slots.py"} & set(re.findall(r"[\w.]+", done.stderr))
    assert len(done.stderr.splitlines()) < 15


@pytest.mark.slow
def test_a_policy_that_fails_is_told_without_the_frames_of_the_command_line(folder: Path) -> None:
    done = envbus(
        *("run", "mine:LoudEnv", "--num-envs", "3", "--actors", "1", "--steps", "9"),
        *("--policy", "mine:wrong"),
        cwd=folder,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "typer" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["run", "mine:LoudEnv", "--num-envs", "1", "--steps", "5"], ["keys", "new"]]
)
def test_a_reader_that_goes_is_no_traceback(folder: Path, arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=folder, stdout=writes, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writes)
    assert done.returncode in (1, CLOSED_PIPE)  # Rich ends programs by itself, with 1
    assert not done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "mine:StuckEnv"])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_once_and_leaves_no_process(
    folder: Path, env: str, kind: signal.Signals
) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", env, "--num-envs", "4", "--actors", "2", "--seconds", "100"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            actors = wait_for_steps(job)
            job.send_signal(kind)
            # Less than `Timeouts.close`, which envs have elsewhere to end by themselves.
            out, err = job.communicate(timeout=8.0)
        finally:
            job.kill()
    if kind is signal.SIGINT:
        assert job.returncode == 130, err
        assert "Traceback" not in err
        if env == "CartPole-v1":
            assert "(interrupted)" in out
            assert "env steps per second" in out
    else:
        assert job.returncode == -kind
    _, alive = psutil.wait_procs(actors, timeout=30.0)
    assert not alive


def wait_for_steps(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below `job`, two of which (its actors) have burned time after their start."""
    process = psutil.Process(job.pid)
    burned: dict[psutil.Process, float] = {}
    while sum(seconds > 0.3 for seconds in burned.values()) < 2:
        assert job.poll() is None, job.communicate()
        for child in process.children(recursive=True):
            # Some processes of a start live for a moment only.
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                burned[child] = times.user + times.system
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0.02)
    return list(burned)


@pytest.mark.slow
def test_a_broker_says_where_it_listens_and_ends_by_ctrl_c() -> None:
    with subprocess.Popen(
        [*COMMAND, "broker", "--bind", "tcp://127.0.0.1:*"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as served:
        assert served.stdout is not None
        where = served.stdout.readline()
        assert where.startswith("listening on tcp://127.0.0.1:")
        port = where.strip().rpartition("/")[2]
        second = envbus("broker", "--bind", f"tcp://{port}")
        assert second.returncode == 1
        assert second.stderr.startswith("envbus: error: ")
        assert second.stderr.count("\n") == 1
        served.send_signal(signal.SIGINT)
        _, err = served.communicate(timeout=10)
    assert (served.returncode, err) == (0, "")


@pytest.mark.parametrize("arguments", [["bench", "-h"], ["chaos", "-h"], ["bench", "bus", "-h"]])
def test_commands_with_commands_of_their_own_take_the_short_option_for_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert "Usage: envbus" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_the_output_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "doctor", "127.0.0.1:9"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "nothing more can be written: [Errno 28]" in done.stderr
    assert done.stderr.count("\n") == 1
