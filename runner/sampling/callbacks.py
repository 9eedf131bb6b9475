"""`Callbacks`: what a user's code is told while the runner samples, in RLlib's order.

Leaves out who calls them (`dict_sampler.py`, `column_sampler.py`, `env_runner.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from envbus.bus.errors import EnvbusError
from envbus.runner.batches.episode import EpisodeRecorder
from envbus.runner.errors import Fault

if TYPE_CHECKING:
    from envbus.runner.sampling.config import Sample
    from envbus.runner.sampling.env_runner import EnvRunner

__all__ = ["CallbackError", "Callbacks"]

_PER_EPISODE = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class CallbackError(EnvbusError):
    """A callback failed; the message names it, the cause is what it raised.

    The running episodes are given up: the next `sample` begins new ones.
    """


class _Caller:
    """Who calls; a copy, also a pickled one, has nobody."""

    def __init__(self, runner: EnvRunner | None = None) -> None:
        self._runner = None if runner is None else weakref.ref(runner)

    def find(self) -> EnvRunner | None:
        """Return it, if there is one."""
        return None if self._runner is None else self._runner()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Caller, ()


class Callbacks:
    """Derive from it and write the methods that you need.

    Per episode: created, start, step, ..., step, end. An episode may be written to:
    `custom_metrics` (numbers, which `get_metrics` averages), `hist_data` (lists of numbers, which
    it joins), `media` (anything; in a group what can be pickled) and `user_data`.
    """

    _caller = _Caller()

    @property
    def runner(self) -> EnvRunner:
        """The runner that calls; its policies are `self.runner.policies`.

        Raises:
            RuntimeError: None samples with these callbacks.
        """
        runner = self._caller.find()
        if runner is None:
            raise RuntimeError(
                "these callbacks have no runner; they have one from its first sample"
            )
        return runner

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


def let_know(callbacks: Callbacks, runner: EnvRunner) -> None:
    """Say who calls from now on: several runners may have the same callbacks."""
    vars(callbacks)["_caller"] = _Caller(runner)


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
