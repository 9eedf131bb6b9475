"""What runs beside the simulators: env actors, and clients of a bridge.

Users import from here clients, their errors, and base classes of simulators that a bridge starts.
"""

if __name__ != "envbus.actors":
    raise ImportError("import envbus.actors, not actors: two copies would keep two registries")

from envbus.actors.external.aio import AsyncExternalEnvClient
from envbus.actors.external.client import ExternalEnvClient
from envbus.actors.external.errors import (
    ActionTimeoutError,
    EpisodeAlreadyStartedError,
    EpisodeBusyError,
    EpisodeError,
    EpisodeFinishedError,
    EpisodeLostError,
    EpisodeNotFoundError,
    RefusedError,
    SessionLostError,
    SimulatorError,
    SpaceMismatchError,
)
from envbus.actors.external.external_env import ExternalEnv, ExternalMultiAgentEnv
from envbus.actors.external.local_policy import LocalSettings
from envbus.actors.external.verbs import ClientTimeouts

__all__ = [
    "ActionTimeoutError",
    "AsyncExternalEnvClient",
    "ClientTimeouts",
    "EpisodeAlreadyStartedError",
    "EpisodeBusyError",
    "EpisodeError",
    "EpisodeFinishedError",
    "EpisodeLostError",
    "EpisodeNotFoundError",
    "ExternalEnv",
    "ExternalEnvClient",
    "ExternalMultiAgentEnv",
    "LocalSettings",
    "RefusedError",
    "SessionLostError",
    "SimulatorError",
    "SpaceMismatchError",
]
