"""Actions of the runner as events of the rules: looked for, checked against their spaces. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from envbus.actors.external.agreement import Agreement
from envbus.actors.external.errors import RefusedError, SpaceMismatchError
from envbus.actors.external.protocol import BRIDGE
from envbus.bus.messages import Failed, FailureCode
from envbus.bus.serve import describe
from envbus.runner.bridge.vocabulary import Chosen, GiveUp

__all__ = ["checked", "told"]


def checked(
    actions: Mapping[str, Mapping[Any, Any]],
    awaited: Callable[[str], Sequence[Any] | None],
    agreement: Agreement | None,
    policy_version: int,
) -> tuple[list[Chosen | GiveUp], SpaceMismatchError | None]:
    """Return what to do with `actions`, in their order, and the last that was wrong with one.

    Args:
        actions: By episode and agent.
        awaited: Of an episode, the agents whose actions somebody waits for; None: nobody does.
        agreement: The spaces; None only if nobody waits for anything.
        policy_version: Who waits is told that.

    Raises:
        ValueError: The action of an agent is missing.
    """
    events: list[Chosen | GiveUp] = []
    error: SpaceMismatchError | None = None
    for episode_id, by_agent in actions.items():
        agents = awaited(episode_id)
        if agents is None:
            events.append(Chosen(episode_id, {}, policy_version))
            continue
        for agent in agents:
            if agent not in by_agent:
                missing = [str(agent) for agent in agents if agent not in by_agent]
                raise ValueError(f"episode {episode_id}: no action for {', '.join(missing)}")
        assert agreement is not None
        place = f"action for episode {episode_id}"
        try:
            if agreement.multi_agent:
                given = {agent: by_agent[agent] for agent in agents}
                action = agreement.take_action(given, place)
            else:
                (agent,) = agents
                action = {agent: agreement.take_action(by_agent[agent], place)}
        except SpaceMismatchError as mismatch:
            error = mismatch
            events.append(GiveUp(episode_id, told(mismatch)))
        else:
            events.append(Chosen(episode_id, action, policy_version))
    return events, error


def told(error: BaseException, *, traceback: bool = True) -> Failed:
    """Return what a client is told of an exception here: its type, text and, if so, traceback."""
    if isinstance(error, RefusedError):
        return error.failed()
    failed = describe(error)
    failed = msgspec.structs.replace(failed, code=FailureCode.REMOTE, peer=BRIDGE)
    return failed if traceback else msgspec.structs.replace(failed, remote_traceback="")
