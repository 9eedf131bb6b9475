from __future__ import annotations

import contextlib
import errno
import io
import socket
from pathlib import Path

import pytest

from envbus.runner.cli.main import main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "rando"], "random, zero or module:function"),
        (["--policy", "missing.onnx"], "there is no model"),
        (["--env", "NoSuchEnv-v0"], "--env NoSuchEnv-v0"),
        (["--bind", "tcp://0.0.0.0:0"], "insecure"),
        (["--bind", "nonsense"], "nonsense"),
        (["--ws", "0.0.0.0:0"], "token"),
        (["--tcp", "nonsense"], "nonsense"),
        (["--token-file", "token"], "neither"),
        (["--tcp", "127.0.0.1:0", "--token-file", "missing"], "the token cannot be read"),
        (["--tcp", "127.0.0.1:0", "--tls-cert", "cert.pem"], "TLS needs both files"),
        (["--keys", "missing.key_secret"], "--allow"),
        (["--policy", "envbus.runner.policies:MlpPolicy", "--env", "FrozenLake-v1"], "takes Box"),
        (["--seconds", "-1"], "--seconds"),
        (["--metrics", "9090"], "HOST:PORT"),
        (["--reload"], "--reload looks at the file of a model"),
        (["--max-rate", "0"], "--max-rate must be"),
        (["--max-rate", "inf"], "--max-rate must be"),
        (["--max-rate", "1e-320"], "--max-rate must be at least 1e-09"),
        (["--workers", "100000"], "--workers must be at most 1024"),
        (["--workers", "0"], "--workers"),
        (["--canary", "zero"], "model2.onnx=0.1"),
        (["--canary", "zero=2"], "the share of zero"),
        (["--canary", "missing.onnx=0.5"], "there is no model"),
        (["--tcp", "127.0.0.1:0", "--max-connections", "0"], "--max-connections"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_served(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--seconds", "0", *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.count("\n") == 1
    assert "serving at" not in captured.out


def test_a_port_for_figures_that_is_taken_is_told_and_nothing_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", "--seconds", "0", "--metrics", place]) == 2
        assert main(["run", "CartPole-v1", "--steps", "8", "--metrics", place]) == 2
    captured = capsys.readouterr()
    assert captured.err.count(f"metrics cannot be served at {place!r}") == 2
    assert captured.out == ""


def test_a_folder_that_cannot_be_written_to_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["serve", "--seconds", "0", "--record", str(tmp_path / "file")]) == 2
    assert "cannot record" in capsys.readouterr().err


def test_a_token_that_others_may_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("very-secret-token-0\n")
    token.chmod(0o644)
    place = ["--tcp", "127.0.0.1:0", "--token-file", str(token)]
    assert main(["serve", "--seconds", "0", *place]) == 2
    told = capsys.readouterr().err
    assert f"others may read the token {token} (mode 0644); chmod 600 it" in told
    assert "secret" not in told


class FullAtFirst(io.StringIO):
    """A disk that is full until something was to be written."""

    has_room = False

    def flush(self) -> None:
        if not self.has_room:
            self.has_room = True
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_server_starts_where_its_addresses_find_no_room() -> None:
    with contextlib.redirect_stdout(FullAtFirst()) as out:
        assert main(["serve", "--seconds", "0"]) == 0
    assert "episodes" in out.getvalue()


def test_all_addresses_are_told_and_no_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("very-secret-token-0\n")
    token.chmod(0o600)
    places = ["--tcp", "127.0.0.1:0", "--ws", "127.0.0.1:0", "--token-file", str(token)]
    places += ["--metrics", "127.0.0.1:0"]
    assert main(["serve", "--seconds", "0", "--env", "CartPole-v1", *places]) == 0
    captured = capsys.readouterr()
    schemes = [
        line.removeprefix("serving at ").partition(":")[0]
        for line in captured.out.splitlines()
        if line.startswith("serving at ")
    ]
    assert schemes == ["tcp", "stream", "ws"]
    assert "metrics at http://127.0.0.1:" in captured.out
    assert "secret" not in captured.out + captured.err
