from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envbus.runner.cli.main import main
from tests.runner.conformance import serving


def test_doctor_says_where_it_stops_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "127.0.0.1:1"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "STOP connection 127.0.0.1:1 refuses connections" in told
    assert "is the bridge running" in told


def test_doctor_and_conformance_are_content_with_our_bridge(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving.bridge() as bridge:
        assert main(["doctor", bridge.address]) == 0
        assert "round trip" in capsys.readouterr().out
        assert main(["conformance", bridge.address.removeprefix("tcp://")]) == 0
        assert "0 failed" in capsys.readouterr().out
        assert main(["conformance", "--only", "hello", bridge.address]) == 0
        assert "2 passed" in capsys.readouterr().out


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nowhere"]) == 2
    assert "needs host and port" in capsys.readouterr().err
    assert main(["doctor", "--token-file", str(tmp_path / "none"), "ws://127.0.0.1:1"]) == 2
    assert "the token cannot be read" in capsys.readouterr().err
    assert main(["conformance", "127.0.0.1:1"]) == 2
    assert "nothing listens there" in capsys.readouterr().err
    assert main(["conformance", "--client", "--env", "NoSuchEnv-v0", "127.0.0.1:0"]) == 2
    assert "--env NoSuchEnv-v0" in capsys.readouterr().err
    assert main(["conformance", "--client", "--env", "nomodule:X-v0", "127.0.0.1:0"]) == 2
    assert capsys.readouterr().err.startswith("envbus: error: --env nomodule:X-v0: ")


CLIENT = """
import sys
from envbus.actors import ExternalEnvClient
from envbus.actors.external.client import ClientTimeouts
from envbus.bus.errors import EnvbusError
with ExternalEnvClient(sys.argv[1], timeouts=ClientTimeouts(action=0.5)) as client:
    while True:
        try:
            episode_id = client.start_episode()
            for _ in range(5):
                client.get_action(episode_id, 0)
                client.log_returns(episode_id, 1.0)
            client.end_episode(episode_id, 1)
        except (EnvbusError, RuntimeError):
            pass
"""


@pytest.mark.slow
def test_a_program_of_its_own_is_checked_as_a_client() -> None:
    command = [sys.executable, "-m", "envbus.runner.cli.main", "conformance", "--client"]
    env = ["--env", "FrozenLake-v1", "--timeout", "20", "127.0.0.1:0"]
    with subprocess.Popen([*command, *env], stdout=subprocess.PIPE, text=True) as checker:
        assert checker.stdout is not None
        address = checker.stdout.readline().split()[-1]
        with subprocess.Popen([sys.executable, "-c", CLIENT, address]) as client:
            told = checker.stdout.read()
            client.kill()
    assert checker.returncode == 0, told
    assert "0 failed" in told


def test_replay_of_a_folder_that_is_not_there_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = tmp_path / "epsiodes"
    assert main(["replay", str(nowhere), "tcp://127.0.0.1:9"]) == 2
    assert f"there is no folder {nowhere}" in capsys.readouterr().err
