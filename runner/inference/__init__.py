"""Policy workers: processes that choose actions for runners, their owner and their askers.

Users import `PolicyWorkers` from `envbus.runner`.
"""

from envbus.runner.inference.policy_workers import PolicyWorkers, PolicyWorkersStatistics
from envbus.runner.inference.remote_policy import PolicyHandle, RemotePolicy

__all__ = [
    "PolicyHandle",
    "PolicyWorkers",
    "PolicyWorkersStatistics",
    "RemotePolicy",
]
