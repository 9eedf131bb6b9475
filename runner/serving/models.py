"""The models of a server: which one answers an episode, and how it is told from the others. Pure.

A *model* is what the policies of one load are together. Leaves out the loading (`loading.py`,
`reloading.py`), and what a model answers (`answering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from envbus.runner.serving.answering import AnsweredBatch, Chooser, ObservingAgent
from envbus.runner.serving.canary import Split
from envbus.runner.serving.loading import ServedPolicies

__all__ = ["ModelCounts", "ServedModels"]

#: Of a version before the first one.
_NONE: Final = -1


class ModelCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a model by its name, over all that were loaded by it."""

    #: Of the one that answers new episodes; -1: none is loaded yet.
    version: int
    #: Actions that were chosen.
    answers: int
    #: How often one was loaded, the first included; and how often that failed.
    loads: int
    failed_loads: int


class _Model:
    """One load."""

    def __init__(self, name: str, policies: ServedPolicies, offset: int, *, explore: bool) -> None:
        self.name = name
        self.chooser = Chooser(policies, explore=explore)
        self._policies = policies
        #: Added to its policies' own versions, which begin anew with each load.
        self._offset = offset - min(_versions(policies))

    @property
    def version(self) -> int:
        return max(_versions(self._policies)) + self._offset

    def choose(self, asked: Sequence[ObservingAgent]) -> Iterator[AnsweredBatch]:
        for batch in self.chooser.choose(asked):
            yield batch._replace(version=batch.version + self._offset, model=self.name)


class ServedModels:
    """What answers now, by name; and former models as long as an episode needs them.

    An episode whose policy has a state keeps its model until it ends: states of one model mean
    nothing to another. All other episodes get what was loaded last, with their next observation.

    Args:
        split: Which name an episode has.
        explore: Whether actions are sampled.
    """

    def __init__(self, split: Split, *, explore: bool) -> None:
        self._split = split
        self._explore = explore
        self._now: dict[str, _Model] = {}
        #: By episode with a state.
        self._kept: dict[str, _Model] = {}
        self._counts = {name: {"answers": 0, "loads": 0, "failed_loads": 0} for name in split.names}
        self._highest = _NONE

    @property
    def names(self) -> Sequence[str]:
        """All names; the first is that of most episodes."""
        return self._split.names

    @property
    def is_complete(self) -> bool:
        """Whether a model of each name is there."""
        return len(self._now) == len(self._split.names)

    @property
    def policy_ids(self) -> list[str]:
        """Ids of the policies of each model: which there are follows from the spaces."""
        return self._now[self.names[0]].chooser.policy_ids

    def install(self, policies: Mapping[str, ServedPolicies]) -> None:
        """Let models answer from now on, by name; their versions are above all before.

        The very first keeps the versions that its policies have.
        """
        for name, loaded in policies.items():
            self._note_versions()
            offset = min(_versions(loaded)) if self._highest == _NONE else self._highest + 1
            self._now[name] = _Model(name, loaded, offset, explore=self._explore)
            self._counts[name]["loads"] += 1
        self._note_versions()

    def failed(self, name: str) -> None:
        """One could not be loaded; the one before goes on."""
        self._counts[name]["failed_loads"] += 1

    def has_state(self, episode_id: str) -> bool:
        """Whether an episode is to be shown to its model though somebody else has acted."""
        return self._of(episode_id).chooser.has_states

    def choose(self, asked: Sequence[ObservingAgent]) -> Iterator[AnsweredBatch]:
        """Yield actions for all; each policy of each model is called once."""
        groups: dict[int, tuple[_Model, list[ObservingAgent]]] = {}
        for one in asked:
            model = self._of(one.episode_id)
            groups.setdefault(id(model), (model, []))[1].append(one)
        for model, rows in groups.values():
            for batch in model.choose(rows):
                if batch.error is None:
                    self._counts[model.name]["answers"] += len(batch.rows)
                yield batch

    def forget(self, episode_id: str) -> None:
        """An episode is over."""
        model = self._kept.pop(episode_id, None)
        if model is not None:
            model.chooser.forget(episode_id)

    def counts(self) -> dict[str, ModelCounts]:
        """Return counts by name."""
        return {
            name: ModelCounts(
                version=self._now[name].version if name in self._now else _NONE, **counts
            )
            for name, counts in self._counts.items()
        }

    def _of(self, episode_id: str) -> _Model:
        kept = self._kept.get(episode_id)
        if kept is not None:
            return kept
        model = self._now[self._split.choose(episode_id)]
        if model.chooser.has_states:
            self._kept[episode_id] = model
        return model

    def _note_versions(self) -> None:
        """Policies may have got weights meanwhile, and later versions."""
        versions = [model.version for model in (*self._now.values(), *self._kept.values())]
        self._highest = max([self._highest, *versions])


def _versions(policies: ServedPolicies) -> list[int]:
    found: list[Any] = [getattr(one, "policy_version", 0) for one in policies.by_id.values()]
    return [int(version) for version in found]
