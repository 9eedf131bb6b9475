from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from envbus.bus.errors import NoPeerError, RequestTimeoutError
from envbus.bus.peer.client import Client
from envbus.bus.transport.curve_keys import load_keys
from envbus.bus.wire.messages import Reply, Request
from envbus.runner.cli.main import main

COMMAND = [sys.executable, "-W", "error", "-m", "envbus.runner.cli.main"]


class Something(Request[Reply], frozen=True, kw_only=True):
    """Asks nobody either."""


class Nothing(Request[Reply], frozen=True, kw_only=True):
    """Asks nobody."""


def test_keys_new_makes_two_files_and_says_which_is_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", str(tmp_path / "keys"), "--name", "server"]) == 0
    public, secret = tmp_path / "keys" / "server.key", tmp_path / "keys" / "server.key_secret"
    out, _ = capsys.readouterr()
    assert out == f"public key, to hand out: {public}\nsecret key, to keep: {secret}\n"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_keys(secret).secret.decode() not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["keys"], "Missing command; see `envbus keys --help`"),
        (["keys", "new", ".", "--name", "a/b"], "no name for a key"),
        (["broker", "--bind", "tcp://127.0.0.1:*", "--keys", "nowhere"], "(--allow)"),
        (
            ["broker", "--bind", "tcp://127.0.0.1:*", "--keys", "nowhere", "--allow", "."],
            "no key can be read from nowhere",
        ),
        (["actor", "tcp://127.0.0.1:9", "--server-key", "nowhere"], "a peer needs both"),
        (["actor", "127.0.0.1:9", "--server-key", "nowhere"], "a peer needs both"),
    ],
)
def test_a_mistake_with_keys_gets_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_broker_with_keys_serves_their_holders_and_logs_who_is_refused(tmp_path: Path) -> None:
    for folder, name in (("", "server"), ("clients", "one"), ("", "other")):
        assert main(["keys", "new", str(tmp_path / folder), "--name", name]) == 0
    keys = {"keys": tmp_path / "clients" / "one.key_secret", "server_key": tmp_path / "server.key"}
    arguments = ["--keys", "server.key_secret", "--allow", "clients", "--block", "Nothing"]
    with subprocess.Popen(
        [*COMMAND, "broker", "--bind", "tcp://127.0.0.1:*", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as served:
        assert served.stdout is not None
        endpoint = served.stdout.readline().split()[-1]
        with Client(endpoint, **keys) as client:
            with pytest.raises(NoPeerError):
                client.ask("nobody", Something(), timeout=5.0).result(10.0)
            with pytest.raises(Exception, match="Nothing is blocked"):
                client.ask("nobody", Nothing(), timeout=5.0).result(10.0)
        with pytest.raises(RequestTimeoutError, match="authentication"):
            Client(endpoint, timeout=1.5, **{**keys, "keys": tmp_path / "other.key_secret"})
        command_line = Path(f"/proc/{served.pid}/cmdline").read_bytes()
        served.send_signal(signal.SIGINT)
        _, err = served.communicate(timeout=10)
    assert served.returncode == 0
    assert err.split().count("allowed") == 1
    secret = load_keys(tmp_path / "server.key_secret").secret
    assert secret not in command_line
    assert secret.decode() not in err


@pytest.mark.slow
def test_an_actor_to_nobody_says_whom_it_waits_for_after_two_seconds() -> None:
    # Port 9 of this host: nobody listens there.
    done = subprocess.run(
        [*COMMAND, "actor", "tcp://127.0.0.1:9", "--name", "lonely", "--timeout", "2.9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "lonely: no broker has answered for 2 s, and is waited for until 2.9 s" in done.stderr
    assert "envbus: error: " in done.stderr
    assert "Traceback" not in done.stderr
