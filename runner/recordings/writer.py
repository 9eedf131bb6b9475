"""`EpisodeWriter`: appends whole episodes to a folder, so that a kill loses none of them.

A shard begins as a journal, an Arrow stream to which each call appends and which readers can read
as it is; what is written there is the kernel's, whatever becomes of the process. A full journal is
written anew as Parquet, in one piece, and removed. Journals that a killed writer has left are
taken over by the next writer of the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from envbus.bus.errors import ClosedError, ConfigError
from envbus.runner.batch import MultiAgentBatch, SampleBatch
from envbus.runner.recordings.reader import JOURNAL, SHARD, read_journal
from envbus.runner.recordings.tables import to_table

__all__ = ["EpisodeWriter"]


class EpisodeWriter:
    """Writes batches of whole episodes as `FOLDER/POLICY/*.parquet`.

        with EpisodeWriter("episodes") as writer:
            writer.write(runner.sample(num_episodes=10))

    Several writers, also of several processes, may share a folder.

    Args:
        folder: Made if missing.
        shard_rows: A shard is completed when it has as many rows,
        shard_seconds: or is as old, at the next call.
        durable: Whether a call returns only when the disk has it, so that not even a power cut
            takes it away: a few milliseconds each.

    Raises:
        ConfigError: The folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        shard_rows: int = 100_000,
        shard_seconds: float = 300.0,
        durable: bool = False,
    ) -> None:
        if shard_rows < 1 or shard_seconds <= 0:
            raise ConfigError(
                f"shard_rows must be at least 1 and shard_seconds over 0, not {shard_rows} and "
                f"{shard_seconds}"
            )
        self.folder = Path(folder)
        self._shard_rows, self._shard_seconds = shard_rows, shard_seconds
        self._durable = durable
        #: By policy.
        self._shards: dict[str, _Shard] = {}
        self._closed = False
        #: Episodes' ids are unique within what one writer writes, and file names say which.
        self._name = secrets.token_hex(4)
        #: Rows and episodes written so far.
        self.num_rows = 0
        self.num_episodes = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in sorted(self.folder.glob(f"*/*{JOURNAL}")):
                _take_over(left)
        except OSError as exc:
            raise ConfigError(f"cannot record in {self.folder}: {exc}") from exc

    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Append whole episodes; a later kill of this process does not take them away.

        Args:
            batch: All rows of each of its episodes, `runner.sample(num_episodes=...)` for example.

        Raises:
            ClosedError: After `close`.
            OSError: The disk is full, for example. What was written before is kept.
        """
        if self._closed:
            raise ClosedError(f"the writer of {self.folder} was closed")
        policies: Mapping[str, SampleBatch]
        policies = {"default": batch} if isinstance(batch, SampleBatch) else batch.policy_batches
        episodes: set[int] = set()
        for policy_id, rows in policies.items():
            if not len(rows):
                continue
            self._append(policy_id, to_table(rows))
            self.num_rows += len(rows)
            if "eps_id" in rows:
                episodes |= set(rows["eps_id"].tolist())
        self.num_episodes += len(episodes)

    def close(self) -> None:
        """Complete all shards. Idempotent."""
        self._closed = True
        shards, self._shards = list(self._shards.values()), {}
        for shard in shards:
            shard.complete()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, policy_id: str, table: pa.Table) -> None:
        shard = self._shards.get(policy_id)
        if shard is not None and not shard.takes(table.schema):
            shard.complete()  # observations of another form begin another shard
            shard = None
        if shard is None:
            # Any policy id is a folder's name: slashes and dots are escaped.
            folder = self.folder / quote(policy_id, safe="").replace(".", "%2E")
            folder.mkdir(exist_ok=True)
            shard = self._shards[policy_id] = _Shard(folder, self._name, table.schema)
        shard.append(table, durable=self._durable)
        if shard.num_rows >= self._shard_rows or shard.age >= self._shard_seconds:
            del self._shards[policy_id]
            shard.complete()


class _Shard:
    """A journal that is written to, and locked meanwhile."""

    def __init__(self, folder: Path, writer: str, schema: pa.Schema) -> None:
        self._path = folder / f"{time.time_ns():019d}-{writer}{JOURNAL}"
        self._file: BinaryIO = self._path.open("xb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._schema = schema
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), schema)
        self._begun = time.monotonic()
        self.num_rows = 0

    @property
    def age(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._begun

    def takes(self, schema: pa.Schema) -> bool:
        """Return whether rows of that form can be appended."""
        return bool(self._schema.equals(schema, check_metadata=True))

    def append(self, table: pa.Table, *, durable: bool) -> None:
        """Write rows; they are the kernel's when this returns, or the disk's."""
        self._stream.write_table(table.combine_chunks())
        if durable:
            os.fsync(self._file.fileno())
        self.num_rows += table.num_rows

    def complete(self) -> None:
        """Make it a Parquet file."""
        try:
            self._stream.close()
            _to_parquet(self._path)
        finally:
            self._file.close()


def _take_over(journal: Path) -> None:
    """Complete a journal whose writer is gone."""
    try:
        file = journal.open("r+b")
    except FileNotFoundError:  # another has just done so
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # somebody writes to it
        if journal.exists():
            _to_parquet(journal)


def _to_parquet(journal: Path) -> None:
    """Write a journal anew as Parquet, and remove it. A kill leaves one of the two, or both."""
    table = read_journal(journal)
    if table is not None and table.num_rows:
        shard = journal.with_name(re.sub(f"{re.escape(JOURNAL)}$", SHARD, journal.name))
        unfinished = shard.with_name(f".{shard.name}")
        pq.write_table(table, unfinished, compression="zstd")
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(shard)
    journal.unlink()
