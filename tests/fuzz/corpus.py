"""The inputs that a fuzzer found worth keeping: one file per target, one input per line, as hex."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER", "load", "save"]

FOLDER = Path(__file__).with_name("corpus")


def load(target: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    file = _file(target)
    lines = file.read_text("ascii").splitlines() if file.exists() else []
    return [bytes.fromhex(line) for line in lines]


def save(target: str, inputs: list[bytes]) -> None:
    """Keep these inputs of a target instead."""
    lines = sorted({data.hex() for data in inputs}, key=lambda line: (len(line), line))
    FOLDER.mkdir(exist_ok=True)
    _file(target).write_text("".join(f"{line}\n" for line in lines), "ascii")


def _file(target: str) -> Path:
    return FOLDER / f"{target}.hex"
