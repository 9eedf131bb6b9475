"""Replays what the fuzzer found worth keeping, and the attacks it began with."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import corpus
from tests.fuzz.run import main
from tests.fuzz.seeds import Canary, bombs, seeds
from tests.fuzz.targets import TARGETS
from tests.sources import ROOT

REPLAY = """
import sys
from tests.fuzz import corpus, seeds, targets
targets.watch_for_unpickling()
for data in (*seeds.seeds(sys.argv[1]), *corpus.load(sys.argv[1])):
    try:
        targets.TARGETS[sys.argv[1]](data)
    except BaseException:
        print(data.hex())
        raise
"""


@pytest.mark.slow_but_first
@pytest.mark.parametrize("target", TARGETS)
def test_no_kept_input_breaks_a_target_and_nothing_is_unpickled(target: str) -> None:
    """In a process of its own, as the hook that sees unpickling cannot be taken out again."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPLAY, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(corpus.load(target)) > 50


def test_the_canary_sings_when_it_is_unpickled(tmp_path: Path) -> None:
    song = tmp_path / "song"
    pickle.loads(pickle.dumps(Canary(song)))
    assert song.is_dir()
    os.rmdir(song)
    assert sum(str(song).encode() in bomb for bomb in bombs(song)) > 5


def test_the_hook_sees_what_is_unpickled() -> None:
    program = (
        "import pickle, sys; from tests.fuzz import targets, seeds; "
        "targets.watch_for_unpickling(); data = pickle.dumps(seeds.Canary('x'))\n"
        "try: pickle.loads(data)\n"
        "except OSError: pass\n"
        "print(targets._unpickled)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program.replace("'x'", "'/'")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "mkdir" in done.stdout


def test_a_kept_input_is_small_and_kept_once() -> None:
    for target in TARGETS:
        kept = corpus.load(target)
        assert len(set(kept)) == len(kept)
        assert not set(kept) & set(seeds(target))


def test_without_atheris_the_fuzzer_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--seconds", "1"]) == 1
    assert "pip install -e '.[fuzz]' in a clone" in capsys.readouterr().err
