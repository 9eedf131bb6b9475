"""The first moments of the `envbus` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Ctrl-C comes while a module is loaded that catches whatever comes.
INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass

sys.meta_path.insert(0, Interrupts())
"""
BEGIN = """
import sys
from envbus.bench.entry import main
sys.argv = ["envbus", "--version"]
code = main()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ctrl_c_while_modules_load_ends_the_command_without_a_word() -> None:
    done = run(INTERRUPTED + BEGIN)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_slow_is_loaded_before_ctrl_c_is_quiet() -> None:
    done = run("import sys; import envbus.bench.entry; print(*sys.modules)")
    assert not {"importlib.metadata", "numpy", "typer"} & set(done.stdout.split()), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_the_command_itself_finds_the_handler_of_ctrl_c_that_was_there(handler: str) -> None:
    before = f"import signal; signal.signal(signal.SIGINT, signal.{handler})\n"
    after = f"assert code == 0 and signal.getsignal(signal.SIGINT) == signal.{handler}\n"
    done = run(before + BEGIN + after)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_that_is_ignored_is_ignored_while_modules_load() -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = run(ignored + INTERRUPTED + BEGIN + "sys.exit(code)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_streams_that_were_closed_are_opened_to_nowhere(closed: list[int]) -> None:
    report = (
        "import os\n"
        "where = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        f"assert all(where[number] == os.devnull for number in {closed}), where\n"
        "assert None not in (sys.stdin, sys.stdout, sys.stderr)\n"
        "os._exit(40 + code)\n"
    )
    close = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -W error -c "$1" {close}', sys.executable, BEGIN + report],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 40, done.stderr
