"""Reinforcement-learning environments as supervised actor processes on a ZeroMQ message bus.

The names below are what most programs need; `envbus.runner` and `envbus.actors` have the rest.
Importing this package takes no time: each name is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from envbus.actors import ExternalEnv, ExternalEnvClient
    from envbus.runner import (
        ActorPool,
        BusVectorEnv,
        EnvRunner,
        EnvRunnerGroup,
        ExternalEnvBridge,
        PolicyWorkers,
        make_vec,
        vector_entry_point,
    )

    __version__: str

__all__ = [
    "ActorPool",
    "BusVectorEnv",
    "EnvRunner",
    "EnvRunnerGroup",
    "ExternalEnv",
    "ExternalEnvBridge",
    "ExternalEnvClient",
    "PolicyWorkers",
    "__version__",
    "make_vec",
    "vector_entry_point",
]

_FROM_ACTORS: Final = frozenset({"ExternalEnv", "ExternalEnvClient"})


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version  # slow; Ctrl-C would show it

        value: Any = version("envbus")
    elif name in __all__:
        module = import_module("envbus.actors" if name in _FROM_ACTORS else "envbus.runner")
        value = getattr(module, name)
    elif name in ("actors", "runner"):  # as after `import envbus.runner`
        return import_module(f"envbus.{name}")
    else:
        raise AttributeError(f"module 'envbus' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__})
