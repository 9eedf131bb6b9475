"""Transitions as columns: batches, trajectories, episodes, advantages, metrics. Pure.

All that samples, records or serves may import it.
"""

from envbus.runner.batches.advantages import (
    add_gae,
    bootstrap_rows,
    discounted_returns,
    gae,
    n_step_returns,
)
from envbus.runner.batches.batch import Chunks, MultiAgentBatch, SampleBatch
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.batches.metrics import EpisodeResult

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
