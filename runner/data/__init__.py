"""Transitions as columns: batches, trajectories, episodes, advantages, metrics. Pure.

All that samples, records or serves may import it.
"""

from envbus.runner.data.advantages import (
    add_gae,
    bootstrap_rows,
    discounted_returns,
    gae,
    n_step_returns,
)
from envbus.runner.data.batch import Chunks, MultiAgentBatch, SampleBatch
from envbus.runner.data.episode import EpisodeRecorder
from envbus.runner.data.metrics import EpisodeResult

__all__ = [
    "Chunks",
    "EpisodeRecorder",
    "EpisodeResult",
    "MultiAgentBatch",
    "SampleBatch",
    "add_gae",
    "bootstrap_rows",
    "discounted_returns",
    "gae",
    "n_step_returns",
]
