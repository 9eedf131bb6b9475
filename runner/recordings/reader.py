"""Reads recorded episodes: completed shards and journals alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.runner.batches.batch import MultiAgentBatch, SampleBatch
from envbus.runner.recordings.tables import from_table, policies_of

__all__ = ["JOURNAL", "SHARD", "Journal", "read_episodes", "read_journal"]

#: Ends of file names: of shards that are written to, and of those that are complete.
JOURNAL = ".arrows"
SHARD = ".parquet"


def read_episodes(folder: str | os.PathLike[str]) -> Iterator[MultiAgentBatch]:
    """Yield each recorded episode, by policy and within it in the order of time.

    Episodes of several agents with several policies come once, with the rows of all policies.
    Journals are read, too: of a writer that works, what it has written; of a killed one, all but
    what it was about to write. An episode of several policies comes with all its rows or not.

    Args:
        folder: What an `EpisodeWriter` wrote to.

    Raises:
        ConfigError: There is no such folder, nothing recorded in it, or a file is damaged.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"read_episodes takes the path of a folder, not {brief(folder)}")
    root = Path(folder)
    policies = {unquote(path.name): path for path in sorted(root.glob("*/")) if path.is_dir()}
    shards = {name: _shards(path) for name, path in policies.items()}
    if not any(shards.values()):
        raise ConfigError(f"no episodes are recorded in {root}: no POLICY/*{SHARD} there")
    for name, paths in shards.items():
        partners: dict[tuple[str, str, frozenset[str]], _Partner] = {}
        last = {_writer_of(path): path for path in paths}
        for path in paths:
            writer = _writer_of(path)
            for episode, together in _episodes(path, partial(_is_first, name, policies)):
                parts = {name: episode}
                for other in sorted(together & policies.keys() - {name}):
                    key = other, writer, together
                    if key not in partners:
                        partners[key] = _Partner(shards[other], writer, together)
                    if (rows := partners[key].take(int(episode["eps_id"][0]))) is not None:
                        parts[other] = rows
                # What is being written, or was when a writer was killed, has rows of some only.
                if together & policies.keys() <= parts.keys():
                    yield MultiAgentBatch.of(list(parts.items()), _env_steps(list(parts.values())))
            if path == last[writer]:
                partners = {key: one for key, one in partners.items() if key[1] != writer}


def _is_first(name: str, policies: Collection[str], together: frozenset[str]) -> bool:
    """Return whether episodes of these policies come in this one's turn."""
    return name == min({name, *together.intersection(policies)})


class _Partner:
    """Another policy's rows of episodes, in the order in which these are asked for.

    Where shards begin differs from policy to policy, the order of one writer's episodes does not.
    """

    def __init__(self, paths: list[Path], writer: str, together: frozenset[str]) -> None:
        self._left = (
            episode
            for path in paths
            if _writer_of(path) == writer
            for episode, _ in _episodes(path, lambda found: found == together)
        )
        self._passed: dict[int, SampleBatch] = {}

    def take(self, eps_id: int) -> SampleBatch | None:
        """Return the rows of that episode; None: there are none, or not yet."""
        if (found := self._passed.pop(eps_id, None)) is not None:
            return found
        for episode in self._left:
            if (passed := int(episode["eps_id"][0])) == eps_id:
                return episode
            self._passed[passed] = episode
        return None


@dataclass(frozen=True)
class Journal:
    """What stands in a journal, up to where it can be read."""

    #: None: there are no rows.
    table: pa.Table | None
    #: There is more that cannot be read, and it is not just a piece whose end is missing, as it is
    #: when a writer was killed.
    is_damaged: bool

    @property
    def num_rows(self) -> int:
        """Rows that can be read."""
        return 0 if self.table is None else self.table.num_rows


def read_journal(path: Path) -> Journal:
    """Return what stands in a journal, up to where its writer was killed.

    Raises:
        OSError: It cannot be opened, or the disk fails to read it.
    """
    with path.open("rb") as file:
        seen = _Seen(file)
        batches: list[pa.RecordBatch] = []
        try:
            with pa.ipc.open_stream(pa.PythonFile(seen, mode="r")) as stream:
                while True:
                    batches.append(stream.read_next_batch())
        except (StopIteration, pa.ArrowInvalid, OSError):
            if seen.failure is not None:  # there may be more: this is not the end
                raise seen.failure from None
            # Else the end, or a piece that was being written.
        table = pa.Table.from_batches(batches) if batches else None
        size = os.fstat(file.fileno()).st_size
        return Journal(table, seen.place < size)


class _Seen:
    """A file, and how much of it was asked for, which is as long as its pieces should be."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.place = 0
        #: Why the disk has not read it.
        self.failure: OSError | None = None

    def read(self, size: int) -> bytes:
        self.place += size
        try:
            return self._file.read(size)
        except OSError as exc:
            self.failure = exc
            raise

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _shards(folder: Path) -> list[Path]:
    """Return the files in the order in which they were begun; of a pair only the complete one."""
    complete = {path.stem: path for path in folder.glob(f"*{JOURNAL}")}
    complete |= {
        path.stem: path for path in folder.glob(f"*{SHARD}") if not path.name.startswith(".")
    }
    return [complete[stem] for stem in sorted(complete)]


def _writer_of(path: Path) -> str:
    """Return which writer's shard a file is: ids of episodes are its own."""
    return path.stem.rpartition("-")[2]


def _episodes(
    path: Path, is_wanted: Callable[[frozenset[str]], bool]
) -> Iterator[tuple[SampleBatch, frozenset[str]]]:
    """Yield episodes, and which policies they have rows of; none: only this one, or unknown.

    Args:
        path: A shard: of all its episodes this is the same.
        is_wanted: Called with it before they are read.
    """
    table: pa.Table | None = None
    if path.suffix == JOURNAL:
        try:
            table = read_journal(path).table
        except FileNotFoundError:  # it was completed since, or was empty
            path = path.with_suffix(SHARD)
            if not path.exists():
                return
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if path.suffix == SHARD:
        try:
            table = pq.read_table(path) if is_wanted(policies_of(pq.read_schema(path))) else None
        except (pa.ArrowInvalid, OSError) as exc:
            raise ConfigError(f"{path} is damaged: {exc}") from exc
    if table is not None and table.num_rows:
        together = policies_of(table.schema)
        if not is_wanted(together):
            return
        for episode in from_table(table).split_by_episode():
            yield episode, together


def _env_steps(parts: list[SampleBatch]) -> int:
    return max((int(part["t"].max()) + 1 for part in parts if "t" in part), default=0)
