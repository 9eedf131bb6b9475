"""`Callbacks`: what a user's code is told while the runner samples, in RLlib's order.

Leaves out who calls them (`dict_sampler.py`, `column_sampler.py`, `env_runner.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from envbus.bus.errors import EnvbusError
from envbus.runner.data.episode import EpisodeRecorder
from envbus.runner.workers.faults import Fault

if TYPE_CHECKING:
    from envbus.runner.sampling.config import Sample

__all__ = ["CallbackError", "Callbacks"]

_PER_EPISODE = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class CallbackError(EnvbusError):
    """A callback failed; the message names it, the cause is what it raised.

    The running episodes are given up: the next `sample` begins new ones.
    """


class Callbacks:
    """Derive from it and write the methods that you need.

    Per episode: created, start, step, ..., step, end. An episode may be written to:
    `custom_metrics` (numbers, which `get_metrics` averages) and `user_data`.
    """

    def on_sub_environment_created(self, *, env_id: int, incarnation: int) -> None:
        """An env exists: called for each before the first sample, and again for each new life."""

    def on_episode_created(self, *, episode: EpisodeRecorder) -> None:
        """An episode is about to begin: its env is not reset yet, or is being reset."""

    def on_episode_start(self, *, episode: EpisodeRecorder) -> None:
        """The first observations are there."""

    def on_episode_step(self, *, episode: EpisodeRecorder) -> None:
        """An env step was taken; not called for the reset."""

    def on_episode_end(self, *, episode: EpisodeRecorder, fault: Fault | None = None) -> None:
        """The episode is over, by the env's word, or by `fault`; not if it was given up."""

    def on_fault(self, *, fault: Fault) -> None:
        """An env failed; after `on_episode_end` of its episode, if one was running."""

    def on_sample_end(self, *, sample: Sample) -> None:
        """What `sample` returns; called once each time."""


@contextmanager
def naming(callback: str) -> Iterator[None]:
    """Turn what a callback raises into a `CallbackError` that names it."""
    try:
        yield
    except Exception as exc:
        raise CallbackError(f"callback {callback} raised {type(exc).__name__}: {exc}") from exc


def wants_episodes(callbacks: Callbacks) -> bool:
    """Return whether any callback is told of single episodes."""
    return any(
        getattr(type(callbacks), name, None) is not getattr(Callbacks, name)
        or name in vars(callbacks)
        for name in _PER_EPISODE
    )
