"""What to install for the parts of envbus that need more than envbus itself does."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from envbus.bus.errors import ConfigError

__all__ = ["check_version", "how_to_install", "needed_for", "onnx_adapter"]


def how_to_install(extra: str) -> str:
    """Return, for people, how to get what an extra of envbus (`"parquet"`) brings.

    It names the packages, which are found in any case; envbus may be a clone, or a wheel that was
    handed on.
    """
    try:
        lines = requires("envbus") or []
    except PackageNotFoundError:  # run from its files
        lines = []
    wanted = (f"extra == '{extra}'", f'extra == "{extra}"')
    needs = [line.split(";")[0].strip() for line in lines if line.endswith(wanted)]
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
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        how = how_to_install(extra)
        raise ModuleNotFoundError(f"{what} needs more ({exc}): {how}", name=exc.name) from None


def check_version(
    what: str, extra: str, library: str, version: str, oldest: tuple[int, int]
) -> None:
    """See that a library is new enough.

    Args:
        what: What cannot be used without.
        extra: The extra of envbus that brings it.
        library: Its name.
        version: The one that is installed, `"2.9.0"`.
        oldest: The first that will do, major and minor.

    Raises:
        ImportError: It is too old.
    """
    major, minor = map(int, re.findall(r"\d+", f"{version}.0")[:2])
    if (major, minor) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(
            f"{what} needs {library} {wanted} or newer, not {version}: {how_to_install(extra)}"
        )


def onnx_adapter(verb: str) -> Any:
    """Return the module that has `OnnxPolicy`: whoever has no such model needs no onnxruntime.

    Raises:
        ConfigError: It is not installed, and is needed to "run", or "serve", a model.
    """
    try:
        return importlib.import_module("envbus.runner.adapters.onnx_policy")
    except ImportError as exc:
        raise ConfigError(f"to {verb} an ONNX model: {how_to_install('onnx')}") from exc
