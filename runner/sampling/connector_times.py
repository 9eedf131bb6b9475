"""What a runner's connectors cost, one by one, and what they have measured themselves.

Leaves out what they do (`policies/connectors.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from envbus.runner.batches.nested import Tree
from envbus.runner.policies.connectors import Connector, Keys, Pipeline
from envbus.runner.sampling.config import CONNECTED, RunnerConfig

__all__ = ["ConnectorTimes", "mean_over_runners"]


class _Spent:
    """By one connector."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0


class _TimedPipeline(Pipeline):
    """Does what another connector does, and notes how long each part takes."""

    def __init__(self, timed: Connector, times: ConnectorTimes) -> None:
        parts = timed if type(timed) is Pipeline else Pipeline([timed])
        self._spent = {id(part): times.of(part) for part in parts.connectors.values()}
        self.connectors = {}
        for name, part in parts.connectors.items():
            if type(part) is Pipeline:
                spent, part = self._spent[id(part)], _TimedPipeline(part, times)
                self._spent[id(part)] = spent
            self.connectors[name] = part

    def apply(self, connector: Connector, batch: Tree, keys: Keys) -> Tree:
        begin = time.perf_counter()
        batch = connector(batch, keys)
        spent = self._spent[id(connector)]
        spent.seconds += time.perf_counter() - begin
        spent.calls += 1
        return batch


class ConnectorTimes:
    """Times of connectors, over their whole lives."""

    def __init__(self) -> None:
        self._spent: dict[int, _Spent] = {}

    def of(self, connector: Connector) -> _Spent:
        """Return what is noted of a connector."""
        return self._spent.setdefault(id(connector), _Spent())

    def timing(self, config: RunnerConfig) -> RunnerConfig:
        """Return the same settings, with connectors that are timed."""
        timed: dict[str, Any] = {}
        for kind in CONNECTED:
            name = f"{kind}_connector"
            given = getattr(config, name)
            if isinstance(given, Mapping):
                timed[name] = {key: _TimedPipeline(one, self) for key, one in given.items()}
            elif given is not None:
                timed[name] = _TimedPipeline(given, self)
        return dataclasses.replace(config, **timed) if timed else config

    def read(self, connectors: Mapping[str, Connector]) -> dict[str, dict[str, Any]]:
        """Return two parts of a runner's metrics, by names of connectors.

        `mean_connector_ms`: milliseconds per call. `connector_metrics`: what they have measured
        themselves, of those that have measured something.
        """
        spent = {name: self.of(one) for name, one in connectors.items()}
        measured = {name: one.get_metrics() for name, one in connectors.items()}
        return {
            "mean_connector_ms": {
                name: 1e3 * one.seconds / max(one.calls, 1) for name, one in spent.items()
            },
            "connector_metrics": {name: found for name, found in measured.items() if found},
        }


def mean_over_runners(read: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of what several runners have read, of each number over those that have it.

    Numbers are within dicts of dicts.
    """
    gathered: dict[str, list[Any]] = {}
    for one in read:
        for name, value in one.items():
            gathered.setdefault(name, []).append(value)
    return {
        name: mean_over_runners(values)
        if isinstance(values[0], Mapping)
        else sum(values) / len(values)
        for name, values in gathered.items()
    }
