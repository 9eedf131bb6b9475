"""Starts CartPoles in Node.js, C++, C#, a browser and Python's real time, all at one bridge.

    python examples/simulators/everybody.py [ADDRESS ...]

Without addresses, at those where `examples/ppo_external.py` listens. Who lacks a tool (node, g++,
mono, chromium) is left out, and the output says so. Ends with Ctrl-C, or when all others have.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = HERE.parent / "clients"
DEFAULTS = ["tcp://127.0.0.1:5556", "stream://127.0.0.1:7000", "ws://127.0.0.1:7001"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Seconds for a compiler.
BUILD_TIMEOUT = 300.0
#: No end.
EPISODES = "1000000000"


class Files(SimpleHTTPRequestHandler):
    """The folder of the page; says nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    handler = functools.partial(Files, directory=str(CLIENTS / "javascript"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def compiled(*command: str | Path) -> None:
    # Fixed arguments and no shell.
    subprocess.run([str(part) for part in command], check=True, timeout=BUILD_TIMEOUT)  # noqa: S603


def commands(args: argparse.Namespace, folder: Path, pages: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the party and the command of each process."""
    by_scheme = {address.partition("://")[0]: address for address in args.addresses}
    stream = by_scheme["stream"]
    endless = [EPISODES, "", str(args.games)]
    here = [*stream.removeprefix("stream://").rsplit(":", 1), *endless]
    if shutil.which("node"):
        script = str(CLIENTS / "javascript" / "cartpole_node.mjs")
        for _ in range(args.processes):
            yield "node", ["node", script, stream, *endless]
    else:
        print("left out: node is not installed", flush=True)
    if shutil.which("g++"):
        program = str(folder / "cartpole")
        source = CLIENTS / "cpp" / "cartpole.cpp"
        compiled("g++", "-std=c++17", "-O2", "-pthread", source, "-o", program)
        for _ in range(args.processes):
            yield "cpp", [program, *here]
    else:
        print("left out: g++ is not installed", flush=True)
    if shutil.which("mcs") and shutil.which("mono"):
        program = str(folder / "cartpole.exe")
        sources = (CLIENTS / "csharp" / name for name in ("CartPole.cs", "Envbus.cs"))
        compiled("mcs", f"-out:{program}", *sources)
        for _ in range(args.processes):
            # Its shared area would outlive it in /dev/shm if it is killed.
            yield "csharp", ["env", "MONO_DISABLE_SHARED_AREA=1", "mono", program, *here]
    else:
        print("left out: mono is not installed", flush=True)
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser:
        # Root in a container has no user namespaces to make a sandbox of.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", "--disable-background-networking"]
        options += ["--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}"]
        page = f"{pages}/cartpole.html?bridge={by_scheme['ws']}&fast&games={args.games}"
        yield "browser", [browser, *options, page]
    else:
        print("left out: no browser is installed", flush=True)
    script = str(HERE / "realtime_cartpoles.py")
    for _ in range(args.processes):
        yield "realtime", [sys.executable, script, by_scheme["tcp"], "--poles", str(args.games)]


def relay(process: subprocess.Popen[str]) -> None:
    """Print the lines of a process; of a browser those that its page has logged."""
    assert process.stdout is not None
    for line in process.stdout:
        if logged := re.search(r'CONSOLE.*?"(.*)", source:', line):
            print(logged[1], flush=True)
        elif not re.match(r"\[\d+:\d+:|$|DevTools listening", line):
            print(line, end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulators of all kinds, at one bridge.")
    parser.add_argument("addresses", nargs="*", default=DEFAULTS, help="tcp://, stream://, ws://")
    parser.add_argument("--processes", type=int, default=2, help="of each kind, and one browser")
    parser.add_argument("--games", type=int, default=8, help="that each process plays at once")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, web_server() as pages:
        try:
            for party, command in commands(args, Path(folder), pages):
                process = subprocess.Popen(  # noqa: S603
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                processes.append(process)
                print(f"{party}: process {process.pid}", flush=True)
                threading.Thread(target=relay, args=(process,), daemon=True).start()
            while any(process.poll() is None for process in processes):
                time.sleep(0.2)
        except KeyboardInterrupt:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # who is impatient leaves none behind
                signal.signal(number, signal.SIG_IGN)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    # A browser is many processes.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    main()
