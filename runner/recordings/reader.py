"""Reads recorded episodes: completed shards and journals alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from envbus.bus.errors import ConfigError
from envbus.runner.batch import MultiAgentBatch, SampleBatch
from envbus.runner.recordings.tables import from_table

__all__ = ["JOURNAL", "SHARD", "read_episodes", "read_journal"]

#: Ends of file names: of shards that are written to, and of those that are complete.
JOURNAL = ".arrows"
SHARD = ".parquet"


def read_episodes(folder: str | os.PathLike[str]) -> Iterator[MultiAgentBatch]:
    """Yield each recorded episode, by policy and within it in the order of time.

    Episodes of several agents with several policies come once, with the rows of all policies.
    Journals are read, too: of a writer that works, what it has written; of a killed one, all but
    what it was about to write.

    Args:
        folder: What an `EpisodeWriter` wrote to.

    Raises:
        ConfigError: There is no such folder, nothing recorded in it, or a file is damaged.
    """
    root = Path(folder)
    policies = {unquote(path.name): path for path in sorted(root.glob("*/")) if path.is_dir()}
    shards = {name: _shards(path) for name, path in policies.items()}
    if not any(shards.values()):
        raise ConfigError(f"no episodes are recorded in {root}: no POLICY/*{SHARD} there")
    if len(policies) == 1:
        ((name, paths),) = shards.items()
        for path in paths:
            for episode in _episodes(path):
                yield MultiAgentBatch.of([(name, episode)], _env_steps([episode]))
        return
    # Where shards begin differs from policy to policy: episodes are found by writer and id.
    found: dict[tuple[str, int], list[tuple[str, SampleBatch]]] = {}
    for name, paths in shards.items():
        for path in paths:
            writer = path.stem.rpartition("-")[2]
            for episode in _episodes(path):
                key = (writer, int(episode["eps_id"][0]))
                found.setdefault(key, []).append((name, episode))
    for parts in found.values():
        yield MultiAgentBatch.of(parts, _env_steps([episode for _, episode in parts]))


def read_journal(path: Path) -> pa.Table | None:
    """Return what stands in a journal, up to where its writer was killed; None: not even a form."""
    batches: list[pa.RecordBatch] = []
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as stream:
            schema = stream.schema
            try:
                while True:
                    batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                pass  # the end, or a piece that was being written
    except (pa.ArrowInvalid, OSError):
        return None
    return pa.Table.from_batches(batches, schema)


def _shards(folder: Path) -> list[Path]:
    """Return the files in the order in which they were begun; of a pair only the complete one."""
    complete = {path.stem: path for path in folder.glob(f"*{JOURNAL}")}
    complete |= {
        path.stem: path for path in folder.glob(f"*{SHARD}") if not path.name.startswith(".")
    }
    return [complete[stem] for stem in sorted(complete)]


def _episodes(path: Path) -> Iterator[SampleBatch]:
    if path.suffix == JOURNAL:
        table = read_journal(path)
        if table is None:
            return
    else:
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as exc:
            raise ConfigError(f"{path} is damaged: {exc}") from exc
    if table.num_rows:
        yield from from_table(table).split_by_episode()


def _env_steps(parts: list[SampleBatch]) -> int:
    return max((int(part["t"].max()) + 1 for part in parts if "t" in part), default=0)
