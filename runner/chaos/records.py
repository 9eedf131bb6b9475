"""Rows of whole numbers in files: what envs applied, and what the driver saw.

A row is written by one `write` at the end of the file, so that what was written before a
`kill -9` is complete. Leaves out what the rows prove (`audit.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from envbus.runner.chaos.audit import Delivered, EnvRecord, Event, Faulty, Sent

__all__ = ["DriverJournal", "Ledger", "read_journal", "read_ledger"]

Rows = npt.NDArray[np.int64]

_SENT, _DELIVERED, _FAULTY = 0, 1, 2
#: Columns of a journal's rows: kind, env, and what `Delivered` and `Faulty` have.
_COLUMNS = 10
#: Rows that are kept before they are written.
_BUFFERED = 4096


class Ledger:
    """What one env applied, over all its lives: `(life, count, nonce)` each."""

    def __init__(self, folder: str, env_id: int) -> None:
        path = _ledger_file(Path(folder), env_id)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, life: int, count: int, nonce: int) -> None:
        """Add a row; it outlives this process."""
        os.write(self._fd, np.array([life, count, nonce], np.int64).tobytes())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class DriverJournal:
    """What the driver saw of all envs, in its order."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "journal").open("wb", buffering=0)
        self._rows = np.zeros((_BUFFERED, _COLUMNS), np.int64)
        self._used = 0

    def sent(self, env_ids: Rows, nonces: Rows) -> None:
        """Actions were handed to the pool."""
        rows = self._take(len(env_ids))
        rows[:, 0] = _SENT
        rows[:, 1] = env_ids
        rows[:, 2] = nonces

    def delivered(
        self,
        env_ids: Rows,
        observations: Rows,
        incarnations: Rows,
        rewards: npt.NDArray[np.float64],
        over: npt.NDArray[np.bool_],
        noted: Rows,
    ) -> None:
        """The pool handed out rows; `observations` is `(n, 5)`, `noted` what their infos say."""
        rows = self._take(len(env_ids))
        rows[:, 0] = _DELIVERED
        rows[:, 1] = env_ids
        rows[:, 2:6] = observations[:, :4]
        rows[:, 6] = incarnations
        rows[:, 7] = rewards
        rows[:, 8] = over
        rows[:, 9] = noted

    def faulty(self, env_id: int, restarts: int) -> None:
        """The pool reported a fault."""
        rows = self._take(1)
        rows[:, :3] = (_FAULTY, env_id, restarts)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write()
        self._file.close()

    def _take(self, count: int) -> Rows:
        if self._used + count > _BUFFERED:
            self._write()
        self._used += count
        return self._rows[self._used - count : self._used]

    def _write(self) -> None:
        self._file.write(self._rows[: self._used].tobytes())
        self._used = 0


def read_ledger(folder: Path, env_id: int) -> list[EnvRecord]:
    """Return what an env applied, in its order."""
    path = _ledger_file(folder, env_id)
    if not path.exists():
        return []
    rows = np.fromfile(path, np.int64).reshape(-1, 3)
    return [EnvRecord(*row) for row in rows.tolist()]


def read_journal(folder: Path, num_envs: int) -> list[list[Event]]:
    """Return what the driver saw of each env, in its order."""
    rows = np.fromfile(folder / "journal", np.int64).reshape(-1, _COLUMNS)
    return [[_event(row) for row in rows[rows[:, 1] == i].tolist()] for i in range(num_envs)]


def _event(row: list[int]) -> Event:
    match row[0]:
        case 0:
            return Sent(row[2])
        case 1:
            _, _, env_id, life, count, nonce, incarnation, reward, over, noted = row
            return Delivered(env_id, life, count, nonce, incarnation, reward, bool(over), noted)
        case _:
            return Faulty(row[2])


def _ledger_file(folder: Path, env_id: int) -> Path:
    return folder / f"applied-{env_id}"
