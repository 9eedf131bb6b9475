"""What the owner of policy workers lets all know who ask them: who is up, and why others are not.

A small file in the workers' folder, replaced as a whole. When the folder is gone, so is the owner.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["Board", "BoardEntry", "board_exists", "door_of", "read_board", "write_board"]

_NAME: Final = "board.json"


class BoardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    name: str
    incarnation: int
    #: "starting", "up", "down" (it will be started again) or "lost" (it will not).
    state: str
    #: How its last life ended; empty: it is in its first.
    reason: str = ""


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """All workers."""

    workers: list[BoardEntry]

    def is_hopeless(self) -> bool:
        """Return whether no worker is or will be there."""
        return all(worker.state == "lost" for worker in self.workers)

    def describe(self) -> str:
        """Return who is not up, and why, for people."""
        return "; ".join(
            f"{worker.name}: {worker.reason or worker.state}"
            for worker in self.workers
            if worker.state != "up"
        )


def door_of(directory: Path, name: str, incarnation: int) -> Path:
    """Return where a worker listens, in one of its lives."""
    return directory / f"{name}.{incarnation}"


def board_exists(directory: Path) -> bool:
    """Return whether there is a board in the folder."""
    return (directory / _NAME).exists()


def write_board(directory: Path, board: Board) -> None:
    """Replace the file."""
    fresh = directory / f"{_NAME}.new"
    fresh.write_bytes(msgspec.json.encode(board))
    os.replace(fresh, directory / _NAME)


def read_board(directory: Path) -> Board | None:
    """Return what is on the board; None: the folder is gone."""
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=Board)
    except FileNotFoundError:
        return None
