from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envbus.runner.cli.main import main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--bind", "nonsense"], "not understood"),
        (["--bind", "0.0.0.0:0"], "--tls-cert"),
        (["--bind", "127.0.0.1:0", "--token-file", "missing"], "the token cannot be read"),
        (["--bind", "127.0.0.1:0", "--tls-cert", "cert.pem"], "TLS needs both files"),
        (["--seconds", "-1"], "--seconds"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_served(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--seconds", "0", *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_its_address_is_told_with_a_token_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--bind", "127.0.0.1:0", "--seconds", "0"]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"the dashboard is at http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", told)


def test_without_an_address_only_this_host_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dashboard", "--seconds", "0"])
    captured = capsys.readouterr()
    # Or it is taken there.
    assert re.match(
        r"the dashboard is at http://127\.0\.0\.1:8765/\?token="
        r"|envbus: error: the dashboard cannot be served at 127\.0\.0\.1:8765: ",
        captured.out or captured.err,
    )


def test_the_token_of_a_file_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("very-secret-token-0\n")
    token.chmod(0o600)
    command = ["dashboard", "--bind", "127.0.0.1:0", "--seconds", "0", "--token-file", str(token)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "secret" not in captured.out + captured.err
    assert f"?token=... with the token of {token}" in captured.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_soon_as_its_address_is_told(number: signal.Signals) -> None:
    program = [sys.executable, "-u", "-m", "envbus.bench.entry", "dashboard"]
    with subprocess.Popen(
        [*program, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("the dashboard is at ")
        process.send_signal(number)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_without_its_libraries_it_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from envbus.runner.cli.main import main\n"
        "sys.exit(main(['dashboard', '--seconds', '0']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "`envbus dashboard` needs more" in done.stderr
    assert "uvicorn" in done.stderr
    assert "pip install -e '.[dashboard]' in a clone" in done.stderr
