"""Makes simulators that call us look like envs: episodes of any number of clients.

Users import from here what a bridge tells; samplers and servers import `bridge.py` and
`results.py`.
"""

from envbus.runner.bridge.bridge import ExternalEnvBridge
from envbus.runner.bridge.results import BridgeResult, EpisodeFault
from envbus.runner.bridge.vocabulary import BridgeStatistics, EpisodeLimits

__all__ = [
    "BridgeResult",
    "BridgeStatistics",
    "EpisodeFault",
    "EpisodeLimits",
    "ExternalEnvBridge",
]
