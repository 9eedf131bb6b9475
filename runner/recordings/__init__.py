"""Episodes in files: Parquet shards that survive a kill, readers of these; from and to Minari.

Needs the extra `parquet` (pyarrow). Leaves out how episodes come about (`envbus.runner`).
"""

from envbus.runner.extras import needed_for

with needed_for("envbus.runner.recordings", "parquet"):
    from envbus.runner.recordings.reader import read_episodes
    from envbus.runner.recordings.replay import minari_episodes, replay, to_minari
    from envbus.runner.recordings.writer import EpisodeWriter

__all__ = ["EpisodeWriter", "minari_episodes", "read_episodes", "replay", "to_minari"]
