"""Freezes what users may import: `public_names.txt`, one line per module."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).with_name("public_names.txt")
#: Modules that need what `make test` does not install.
NEEDS_MORE = {
    "envbus.runner.adapters.rllib": "ray",
    "envbus.runner.adapters.rllib_bridge": "ray",
    "envbus.runner.adapters.sb3": "stable_baselines3",
    "envbus.runner.adapters.tianshou": "tianshou",
    "envbus.runner.adapters.torchrl": "torchrl",
}


def frozen_names() -> dict[str, list[str]]:
    lines = [line for line in FILE.read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


def load(module: str) -> ModuleType:
    if module in NEEDS_MORE:
        pytest.importorskip(NEEDS_MORE[module])
    return importlib.import_module(module)


MODULES = pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] if module in NEEDS_MORE else [])
        for module in frozen_names()
    ],
)


@MODULES
def test_a_module_offers_its_frozen_names_and_no_others(module: str) -> None:
    loaded = load(module)
    assert sorted(loaded.__all__) == frozen_names()[module]
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@MODULES
def test_every_public_name_has_a_docstring_of_its_own(module: str) -> None:
    loaded = load(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if isinstance(value, type) or callable(value):
            own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
            assert own, f"{module}.{name}"
