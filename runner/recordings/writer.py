"""`EpisodeWriter`: appends whole episodes to a folder, so that a kill loses none of them.

A shard begins as a journal, an Arrow stream to which each call appends and which readers can read
as it is; what is written there is the kernel's, whatever becomes of the process. A full journal is
written anew as Parquet, in one piece, and removed. Journals that a killed writer has left are
taken over by the next writer of the folder. Rows whose writing has failed are cut off again, and
a journal is removed only when all that was confirmed in it was read back from the Parquet file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from envbus.bus.errors import ClosedError, ConfigError
from envbus.bus.forking import disown_in_forks
from envbus.bus.interrupts import uninterrupted_call
from envbus.bus.settings import check_number
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.batches.episode import DEFAULT_POLICY_ID
from envbus.runner.recordings.reader import JOURNAL, SHARD, read_journal
from envbus.runner.recordings.tables import to_table, with_policies
from envbus.runner.workers.config import check_kind

__all__ = ["EpisodeWriter"]

logger = logging.getLogger("envbus.runner.recordings")

#: Ids of episodes that are remembered.
_MAX_IDS = 100_000
#: Shards that stay open between two calls: there is one for each set of policies that an episode
#: may have rows of, and whoever plays with many agents decides which.
_MAX_OPEN = 64

#: Whose rows, and all policies that their episodes have rows of; none: no others.
_Key: TypeAlias = tuple[str, tuple[str, ...]]


class EpisodeWriter:
    """Writes batches of whole episodes as `FOLDER/POLICY/*.parquet`.

        with EpisodeWriter("episodes") as writer:
            writer.write(runner.sample(num_episodes=10))

    Several writers, also of several processes, may share a folder. Better one for each runner than
    one for all: a writer begins new files when ids of episodes come again.

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
        check_kind("folder", folder, str, os.PathLike, example='"episodes"')
        check_number("shard_rows", shard_rows, whole=True, least=1)
        check_number("shard_seconds", shard_seconds, over=0.0)
        self.folder = Path(folder)
        self._shard_rows, self._shard_seconds = shard_rows, shard_seconds
        self._durable = durable
        self._shards: dict[_Key, _Shard] = {}
        #: Full ones that could not be completed, the oldest first. They are closed: a disk that is
        #: full for days must not cost a descriptor per shard.
        self._incomplete: list[_Shard] = []
        #: Those that have rows at their end that were refused and could not be cut off. They are
        #: open: no other writer may take such rows for confirmed ones. Nothing is written
        #: meanwhile: the same rows, written again, would be there twice.
        self._uncut: list[_Shard] = []
        self._closed = False
        #: Episodes' ids are unique within what is written under one name; file names tell it.
        self._name = secrets.token_hex(4)
        self._ids: set[int] = set()
        #: Rows and episodes written so far.
        self.num_rows = 0
        self.num_episodes = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in sorted(self.folder.glob(f"*/*{JOURNAL}")):
                _take_over(left)
        except OSError as exc:
            raise ConfigError(f"cannot record in {self.folder}: {exc}") from exc
        disown_in_forks(self)

    @uninterrupted_call
    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Append whole episodes; a later kill of this process does not take them away.

        Ctrl-C that comes meanwhile is raised once they are written.

        Args:
            batch: All rows of each of its episodes, `runner.sample(num_episodes=...)` for example.

        Raises:
            ClosedError: After `close`, or in a forked copy of the process.
            ConfigError: It is no such batch, or lacks `eps_id`, by which episodes are read back.
            OSError: The disk is full, for example. What was written before is kept, nothing of
                this batch is, and the next call may succeed. Where rows of a call that failed
                cannot be cut off again, all calls raise until they can be.
        """
        if self._closed:
            raise ClosedError(
                f"the writer of {self.folder} was closed, or belongs to the process that this one "
                "was forked from"
            )
        example = "runner.sample(num_episodes=10)"
        check_kind("what is written", batch, SampleBatch, MultiAgentBatch, example=example)
        policies: Mapping[str, SampleBatch]
        policies = (
            {DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches
        )
        policies = {name: rows for name, rows in policies.items() if len(rows)}
        for name, rows in policies.items():
            if "eps_id" not in rows:
                raise ConfigError(
                    f"rows of {name!r} cannot be recorded without a column 'eps_id': which "
                    f"episode each is of; there are {sorted(rows.columns)}"
                )
        parts = _parts(policies)
        tables = {key: with_policies(to_table(rows), key[1]) for key, rows in parts.items()}
        episodes: set[int] = set()
        for rows in parts.values():
            episodes |= set(rows["eps_id"].tolist())
        if len(self._ids) >= _MAX_IDS or not self._ids.isdisjoint(episodes):
            self._rename()
        try:
            self._append(tables)
        except OSError as exc:
            full = [key for key in tables if key in self._shards]
            if exc.errno != errno.EFBIG or not full:
                raise
            for key in full:  # no file may be larger here: the rows go to another one
                self._retire(key)
            self._append(tables)
        self._ids |= episodes
        self.num_rows += sum(len(rows) for rows in parts.values())
        self.num_episodes += len(episodes)
        for key in parts:
            shard = self._shards[key] = self._shards.pop(
                key
            )  # behind all that others were added to
            if shard.num_rows >= self._shard_rows or shard.age >= self._shard_seconds:
                self._retire(key)
        for key in list(self._shards)[:-_MAX_OPEN]:
            self._retire(key)

    @uninterrupted_call
    def close(self) -> None:
        """Complete all shards. Idempotent.

        One that cannot be, on a full disk for example, stays a journal: it is read as it is, the
        log says why, and the next writer of the folder tries again. Ctrl-C is raised once all are
        complete; if it comes again after a second it breaks that off, and the rest stay journals.
        """
        self._closed = True
        shards = [*self._incomplete, *self._uncut, *self._shards.values()]
        self._incomplete, self._uncut, self._shards = [], [], {}
        with contextlib.ExitStack() as stack:
            for shard in shards:
                stack.callback(shard.close)
            for shard in shards:
                if shard.take_back():
                    shard.close()
                    shard.complete()

    def disown(self) -> None:
        """In a forked copy: be closed, or its descriptors would keep the journals locked."""
        self._closed = True
        for shard in [*self._uncut, *self._shards.values()]:
            shard.disown()
        self._incomplete, self._uncut, self._shards = [], [], {}

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, tables: Mapping[_Key, pa.Table]) -> None:
        """Append to all shards, or to none."""
        self._cut()
        for key, table in tables.items():
            shard = self._shards.get(key)
            if shard is not None and not shard.takes(table.schema):
                self._retire(key)  # observations of another form begin another shard
        written: list[_Key] = []
        try:
            for key, table in tables.items():
                if key not in self._shards:
                    # Any policy id is a folder's name: slashes and dots are escaped.
                    folder = self.folder / quote(key[0], safe="").replace(".", "%2E")
                    folder.mkdir(exist_ok=True)
                    self._shards[key] = _Shard(folder, self._name, table.schema)
                written.append(key)
            for key, table in tables.items():  # when readers can see which policies there are
                self._shards[key].append(table, durable=self._durable)
            for key in written:
                self._shards[key].confirm()
        except BaseException:
            for key in written:
                shard = self._shards[key]
                if not shard.take_back():  # it is tried again by the next call
                    self._uncut.append(self._shards.pop(key))
                elif not shard.num_rows:
                    self._shards.pop(key).close()
            raise

    def _retire(self, key: _Key) -> None:
        """Complete a shard, now or some time later; what follows goes to another one."""
        shard = self._shards[key]
        self._incomplete.append(shard)
        del self._shards[key]
        shard.close()
        while self._incomplete and self._incomplete[0].complete():
            del self._incomplete[0]

    def _rename(self) -> None:
        """Go on under another name: as another writer, whose episodes are others of these ids."""
        for key in list(self._shards):
            self._retire(key)
        self._name, self._ids = secrets.token_hex(4), set()

    def _cut(self) -> None:
        """Cut off what could not be cut off before, so that a kill does not leave it to readers.

        Raises:
            OSError: It still cannot be.
        """
        for shard in self._uncut[:]:
            if shard.take_back():
                shard.close()
                self._incomplete.append(shard)
                self._uncut.remove(shard)
        if self._uncut:
            raise OSError(
                errno.EIO,
                "nothing is written until the rows that were refused can be cut off from",
                str(self._uncut[0].path),
            )


def _parts(policies: Mapping[str, SampleBatch]) -> dict[_Key, SampleBatch]:
    """Return rows by policy, and by which policies their episodes have rows of."""
    if len(policies) < 2:
        return {(policy_id, ()): rows for policy_id, rows in policies.items()}
    of_episode: dict[int, tuple[str, ...]] = {}
    for policy_id, rows in sorted(policies.items()):
        for eps_id in np.unique(rows["eps_id"]).tolist():
            of_episode[eps_id] = (*of_episode.get(eps_id, ()), policy_id)
    parts: dict[_Key, SampleBatch] = {}
    for policy_id, rows in policies.items():
        places: dict[tuple[str, ...], list[int]] = {}
        for place, eps_id in enumerate(rows["eps_id"].tolist()):
            places.setdefault(of_episode[eps_id], []).append(place)
        for together, own in sorted(places.items()):
            key = policy_id, together if len(together) > 1 else ()
            parts[key] = rows if len(own) == len(rows) else rows[np.array(own)]
    return parts


class _Shard:
    """A journal that is written to, and locked meanwhile.

    Rows are appended, and then confirmed or taken back: what stands behind the last confirmed row
    is nobody's.
    """

    def __init__(self, folder: Path, writer: str, schema: pa.Schema) -> None:
        self.path, self._file = _new_journal(folder, writer)
        self._schema = schema
        self._written = _Written()
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._written, mode="w"), schema)
        self._begun = time.monotonic()
        #: Length and rows, of all that was confirmed, and with what was appended since.
        self._confirmed = self._appended = (0, 0)
        #: The log says that rows could not be taken back.
        self._uncut = False

    @property
    def num_rows(self) -> int:
        """Rows that were confirmed."""
        return self._confirmed[1]

    @property
    def age(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._begun

    def takes(self, schema: pa.Schema) -> bool:
        """Return whether rows of that form can be appended."""
        return bool(self._schema.equals(schema, check_metadata=True))

    def append(self, table: pa.Table, *, durable: bool) -> None:
        """Write rows; they are the kernel's when this returns, or the disk's.

        Raises:
            OSError: They are not, or only in part: `take_back`.
        """
        self._stream.write_table(table.combine_chunks())
        left = memoryview(self._written.take())
        length, rows = self._confirmed
        self._appended = (length + len(left), rows + table.num_rows)
        while left:  # a disk that is nearly full takes a part, and says so by the number only
            left = left[self._file.write(left) :]
        if durable:
            os.fsync(self._file.fileno())
            if not length:
                _sync(self.path.parent)

    def confirm(self) -> None:
        """What was appended is to stay."""
        self._confirmed = self._appended

    def take_back(self) -> bool:
        """Cut it back to what was confirmed; return whether it is. It can be tried again.

        One in which nothing was confirmed is removed.
        """
        length, rows = self._confirmed
        self._written.take()
        if self._appended == self._confirmed and rows:
            return True
        try:
            if rows:
                os.ftruncate(self._file.fileno(), length)
                self._file.seek(length)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as exc:
            if not self._uncut:
                logger.error("%s has rows at its end that were not confirmed: %s", self.path, exc)
            self._uncut = True
            return False
        self._appended = self._confirmed
        return True

    def complete(self) -> bool:
        """Make it a Parquet file, after `close`; return whether it is one. It can be tried again.

        Nothing but confirmed rows may be in it.
        """
        if not self.num_rows:
            return True
        try:
            return _take_over(self.path, self.num_rows)
        except OSError as exc:
            logger.warning("%s stays a journal, which can be read: %s", self.path, exc)
            return False

    def close(self) -> None:
        """Leave it to other writers. Never fails: what was written has been confirmed before."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):  # a process that was just forked may have it, too
            fcntl.flock(self._file, fcntl.LOCK_UN)
        try:
            self._file.close()
        except OSError as exc:  # it is closed all the same
            logger.warning("%s: %s", self.path, exc)

    def disown(self) -> None:
        """In a forked copy: let go of it; it stays locked by its writer."""
        with contextlib.suppress(OSError):
            self._file.close()


class _Written(io.BytesIO):
    """What Arrow has written, as a file: so that what fails is the writing of bytes only."""

    def take(self) -> bytes:
        """Return what was written since the last time."""
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data


def _new_journal(folder: Path, writer: str) -> tuple[Path, FileIO]:
    """Return a new, locked file."""
    while True:
        path = folder / f"{time.time_ns():019d}-{writer}{JOURNAL}"
        file = path.open("xb", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # another writer took it over before it was locked, and found it empty


def _take_over(path: Path, num_rows: int | None = None) -> bool:
    """Complete a journal that nobody writes to any more; return whether it is complete.

    `num_rows` must be in it; None: nobody knows.

    Raises:
        OSError: It cannot be opened or locked.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:  # another has just done so
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # somebody writes to it
        return not path.exists() or _to_parquet(path, num_rows)


def _to_parquet(path: Path, num_rows: int | None = None) -> bool:
    """Write a journal anew as Parquet, and remove it. A kill leaves one of the two, or both.

    `num_rows` must be in it; None: nobody knows.

    Returns:
        Whether that was done. If not, the journal is as it was, and the log says why.
    """
    shard = path.with_name(re.sub(f"{re.escape(JOURNAL)}$", SHARD, path.name))
    unfinished = shard.with_name(f".{shard.name}")
    try:
        journal = read_journal(path)
        if num_rows is not None and journal.num_rows != num_rows:
            raise OSError(f"{journal.num_rows} of {num_rows} rows can be read back")
        if journal.num_rows:
            assert journal.table is not None
            pq.write_table(journal.table, unfinished, compression="zstd", write_page_checksum=True)
            _read_back(unfinished, journal.table)
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.replace(shard)
            _sync(path.parent)
        if journal.is_damaged:
            kept = path.with_name(f"{path.name}.damaged")
            path.replace(kept)
            logger.error("%s is damaged behind row %d: see %s", shard, journal.num_rows, kept)
        else:
            path.unlink()
    except BaseException as exc:  # Ctrl-C, too: what is unfinished has no use
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if not isinstance(exc, OSError | pa.ArrowException | MemoryError):
            raise
        logger.warning("%s stays a journal, which can be read: %s", path, exc)
        return False
    return True


def _read_back(path: Path, table: pa.Table) -> None:
    """Raise OSError if a file does not hold the columns of a table."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for name in table.column_names:  # one by one: shards may be large
            found = file.read(columns=[name]).num_rows
            if found != table.num_rows:
                raise OSError(f"{path} has {found} rows of {name}, not {table.num_rows}")


def _sync(folder: Path) -> None:
    """Have the disk know the names of the files in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
