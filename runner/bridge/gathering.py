"""Records of episodes as what `ExternalEnvBridge.poll` returns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from envbus.runner.bridge.results import BridgeResult
from envbus.runner.bridge.vocabulary import Record

__all__ = ["gathered"]


def gathered(records: Sequence[Record]) -> BridgeResult:
    """Return what the runner is shown of `records`."""
    result = BridgeResult.empty()
    observations, rewards, terminateds, truncateds, infos, off_policy_actions = result
    for record in records:
        episode_id, content = record.episode_id, record.content
        if record.fault is not None:
            result.faults.append(record.fault)
        else:
            observations[episode_id] = content["observations"]
            rewards[episode_id] = content["rewards"]
            terminateds[episode_id] = content["terminateds"]
            truncateds[episode_id] = content["truncateds"]
            infos[episode_id] = content["infos"]
            if record.off_policy is not None:
                off_policy_actions[episode_id] = record.off_policy
                if record.choice is not None:
                    result.choices[episode_id] = record.choice
            if record.first:
                result.started.append(episode_id)
        if record.last:
            result.ended.append(episode_id)
        if not record.training_enabled:
            result.untrained.add(episode_id)
        if record.unacted:
            result.unacted.add(episode_id)
    return result
