"""What to install for the parts of envbus that need more than envbus itself does."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from envbus.bus.errors import ConfigError

__all__ = ["how_to_install", "needed_for", "onnx_adapter"]


def how_to_install(extra: str) -> str:
    """Return, for people, how to get what an extra of envbus (`"parquet"`) brings.

    It names the packages, which are found in any case; envbus may be a clone, or a wheel that was
    handed on.
    """
    needs = _needs_of(extra)
    clone = f"pip install -e '.[{extra}]' in a clone of envbus"
    if not needs:
        return clone
    return f"pip install {' '.join(repr(need) for need in needs)} (or {clone})"


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Have imports that fail within say how to install what they need.

    Args:
        what: What cannot be used without.
        extra: The extra of envbus that brings it.

    Raises:
        ModuleNotFoundError: It is not installed.
        ImportError: It is installed, and older than the extra wants.
    """
    for need in _needs_of(extra):
        _check_version(what, extra, need)
    try:
        yield
    except ModuleNotFoundError as exc:
        how = how_to_install(extra)
        raise ModuleNotFoundError(f"{what} needs more ({exc}): {how}", name=exc.name) from None


def _needs_of(extra: str) -> list[str]:
    """Return the requirements of an extra: `["ray[rllib]>=2.55", "torch>=2.2"]`."""
    try:
        lines = metadata.requires("envbus") or []
    except metadata.PackageNotFoundError:  # run from its files
        return []
    wanted = (f"extra == '{extra}'", f'extra == "{extra}"')
    return [line.split(";")[0].strip() for line in lines if line.endswith(wanted)]


def _check_version(what: str, extra: str, need: str) -> None:
    found = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)", need)
    if found is None:
        return
    library, oldest = found.groups()
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:  # its import tells
        return
    if _release(version) < _release(oldest):
        raise ImportError(
            f"{what} needs {library} {oldest} or newer, not {version}: {how_to_install(extra)}"
        )


def _release(version: str) -> list[int]:
    """Return the numbers of a version, `"2.9.0a1+cpu"`, without zeros at their end."""
    leading = re.match(r"[\d.]*", version)
    numbers = [int(number) for number in re.findall(r"\d+", leading.group() if leading else "")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def onnx_adapter(verb: str) -> Any:
    """Return the module that has `OnnxPolicy`: whoever has no such model needs no onnxruntime.

    Raises:
        ConfigError: It is not installed, and is needed to "run", or "serve", a model.
    """
    try:
        return importlib.import_module("envbus.runner.adapters.onnx_policy")
    except ImportError as exc:
        raise ConfigError(f"to {verb} an ONNX model: {how_to_install('onnx')}") from exc
