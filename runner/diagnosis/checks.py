"""What a bridge has to do, one check each; run against any third party's server.

A check raises `FailedCheck` with what was expected and what came, or `SkippedCheck` with why it
cannot be decided. Section numbers are those of docs/wire-protocol.md.
"""

from __future__ import annotations

from envbus.runner.diagnosis.delivery_checks import DELIVERY
from envbus.runner.diagnosis.episode_checks import EPISODES
from envbus.runner.diagnosis.joining_checks import JOINING
from envbus.runner.diagnosis.misuse_checks import MISUSE

__all__ = ["CHECKS"]

CHECKS = [*JOINING, *EPISODES, *MISUSE, *DELIVERY]
