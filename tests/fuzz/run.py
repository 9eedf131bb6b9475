"""Coverage-guided fuzzing of `targets.py` by atheris: `make fuzz`, or `python -m tests.fuzz.run`.

Starts from the seeds and the kept corpus, and keeps what reached new code. Exit code 1 for an
input that breaks a target; it is printed as hex and stands in no corpus yet.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from envbus.runner.extras import how_to_install

__all__ = ["main"]

TARGETS = ("decode", "broker")
#: Longest input, in bytes: the rules do not change beyond, the time for each does.
MAX_INPUT = 4096
#: Longest input that is kept, so that the corpus stays small enough to be read.
MAX_KEPT = 700
#: Most inputs kept per target, the shortest first.
MAX_INPUTS = 250


def main(argv: list[str] | None = None) -> int:
    """Fuzz each target and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--keep", action="store_true", help="write what was found to the corpus")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("atheris") is None:
        print(
            f"fuzzing needs atheris, which is not installed: {how_to_install('fuzz')}; the tests "
            "replay the corpus without it",
            file=sys.stderr,
        )
        return 1
    return max(
        _fuzz(target, options.seconds, keep=options.keep) for target in options.target or TARGETS
    )


def _fuzz(target: str, seconds: int, *, keep: bool) -> int:
    from tests.fuzz import corpus
    from tests.fuzz.seeds import seeds

    with tempfile.TemporaryDirectory(prefix="envbus-fuzz-") as name:
        folder, crashes = Path(name, "corpus"), Path(name, "crashes")
        folder.mkdir()
        crashes.mkdir()
        for data in (*seeds(target), *corpus.load(target)):
            (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)
        done = _child(target, f"-max_total_time={seconds}", f"-artifact_prefix={crashes}/", folder)
        runs = re.findall(r"Done (\d+) runs", done.stderr)
        print(f"{target}: {runs[-1] if runs else 'an unknown number of'} inputs")
        for crash in crashes.iterdir():
            print(f"{target}: {crash.name.partition('-')[0]}: {crash.read_bytes().hex()}")
        if done.returncode:
            print(done.stdout[-5000:] + done.stderr[-5000:], file=sys.stderr)
            return 1
        if keep:
            begun = {hashlib.sha256(data).hexdigest() for data in seeds(target)}
            found = [path.read_bytes() for path in folder.iterdir() if path.name not in begun]
            short = sorted((data for data in found if len(data) <= MAX_KEPT), key=len)
            corpus.save(target, short[:MAX_INPUTS])
            print(f"{target}: kept {min(len(short), MAX_INPUTS)} of {len(found)} inputs")
    return 0


def _child(target: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run libFuzzer, which ends its process itself."""
    command = [sys.executable, "-m", "tests.fuzz.run", "child", target]
    limits = (f"-max_len={MAX_INPUT}", "-rss_limit_mb=1024", "-timeout=600")
    return subprocess.run(
        [*command, *limits, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def _be_child(target: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["envbus.bus"]):
        from tests.fuzz import targets

    targets.watch_for_unpickling()
    atheris.Setup([sys.argv[0], *arguments], targets.TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _be_child(sys.argv[2], sys.argv[3:])
    sys.exit(main())
