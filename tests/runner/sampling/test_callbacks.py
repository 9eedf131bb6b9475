from __future__ import annotations

from typing import Any

import pytest

from envbus.runner.sampling.callbacks import CallbackError, Callbacks, naming, wants_episodes


class OfEpisodes(Callbacks):
    def on_episode_step(self, *, episode: Any) -> None:
        pass


class OfSamples(Callbacks):
    def on_sample_end(self, *, sample: Any) -> None:
        pass


def test_callbacks_of_single_episodes_are_found() -> None:
    assert wants_episodes(OfEpisodes())
    assert not wants_episodes(OfSamples())
    assert not wants_episodes(Callbacks())
    with_attribute: Any = Callbacks()
    with_attribute.on_episode_end = print
    assert wants_episodes(with_attribute)


def test_what_a_callback_raises_is_named_and_its_cause() -> None:
    with (
        pytest.raises(CallbackError, match="callback on_x raised KeyError: 'a'") as caught,
        naming("on_x"),
    ):
        raise KeyError("a")
    assert isinstance(caught.value.__cause__, KeyError)
