from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envbus.runner.batches.episode import EpisodeRecorder, Fragment
from envbus.runner.sampling.config import EnvQuotas, Phase
from envbus.runner.sampling.quotas import BridgeQuotaHolder, Slot

GO_ON, END = {"__all__": False}, {"__all__": True}


def record(eps_id: int, steps: int, *, agents: int = 1, ends: bool = True) -> EpisodeRecorder:
    recorder = EpisodeRecorder(eps_id, 0)
    seen: dict[Any, Any] = dict.fromkeys(range(agents), np.zeros(1))
    ready = recorder.reset(seen)
    for t in range(steps):
        for agent in ready:
            recorder.act(agent, 0)
        ready = recorder.step(seen, {}, END if ends and t == steps - 1 else GO_ON, GO_ON)
    return recorder


def episode(holder: BridgeQuotaHolder, eps_id: int, steps: int, *, agents: int = 1) -> None:
    holder.collect(record(eps_id, steps, agents=agents).cut(), faulty=False)


def run(holder: BridgeQuotaHolder, env_id: int, steps: int, **slot: Any) -> EpisodeRecorder:
    """Have an episode run, that waits for an action."""
    holder.slots[env_id] = running = Slot(env_id, **slot)
    running.phase = Phase.WAITING
    running.episode = record(100 + env_id, steps, ends=False)
    return running.episode


def steps_of(fragments: list[Fragment]) -> list[tuple[int, int, int]]:
    """Return of each its episode, begin and env steps."""
    return [(int(f.parts[0][1]["eps_id"][0]), f.begin, f.env_steps) for f in fragments]


def take(
    holder: BridgeQuotaHolder, quota: int, unit: Any = "env_steps", *, complete: bool = False
) -> list[tuple[int, int, int]] | None:
    """Return what it contributes, or None if it has not enough."""
    quotas = EnvQuotas(np.array([quota]), unit, complete)
    holder.begin(quota)
    if complete:
        holder.forget_parts()
    return steps_of(holder.take(quotas)) if holder.met(quotas) else None


def take_fragments(holder: BridgeQuotaHolder, quota: int) -> list[Fragment]:
    holder.begin(quota)
    return holder.take(EnvQuotas(np.array([quota]), "env_steps", False))


def test_exactly_as_much_is_taken_what_is_over_first_and_the_rest_stays() -> None:
    holder = BridgeQuotaHolder(0)
    run(holder, 7, 10)
    episode(holder, 1, 5)
    assert take(holder, 16) is None
    assert take(holder, 3) == [(1, 0, 3)]
    assert take(holder, 8) == [(1, 3, 2), (107, 0, 6)]
    assert take(holder, 4) == [(107, 6, 4)]
    assert take(holder, 1) is None
    assert take(holder, 0) == []


def test_whole_episodes_are_packed_and_what_has_left_in_part_is_dropped() -> None:
    holder = BridgeQuotaHolder(0)
    episode(holder, 1, 5)
    assert take(holder, 2) == [(1, 0, 2)]
    for eps_id in (2, 3, 4):
        episode(holder, eps_id, 25)
    assert take(holder, 76, complete=True) is None
    assert take(holder, 40, complete=True) == [(2, 0, 25), (3, 0, 25)]
    assert take(holder, 1, "episodes", complete=True) == [(4, 0, 25)]


def test_agent_steps_are_cut_between_env_steps() -> None:
    holder = BridgeQuotaHolder(0)
    episode(holder, 1, 5, agents=2)
    assert take(holder, 3, "agent_steps") == [(1, 0, 2)]
    assert take(holder, 6, "agent_steps") == [(1, 2, 3)]


@pytest.mark.parametrize("slot", [{"training_enabled": False}, {}])
def test_rows_that_may_not_leave_count_for_nothing(slot: Any) -> None:
    holder = BridgeQuotaHolder(0)
    run(holder, 7, 10, **slot)
    holder.slots[7].is_rest = not slot
    assert take(holder, 1) is None
    assert holder.shrink(0) == 0


def test_what_is_left_over_of_a_running_episode_is_still_its_own() -> None:
    holder = BridgeQuotaHolder(0)
    running, _ = run(holder, 7, 10), run(holder, 8, 10)
    assert take(holder, 3) == [(107, 0, 3)]
    running.unact()
    running.reset({0: np.zeros(1)})
    running.act(0, 0)
    running.step({0: np.zeros(1)}, {}, GO_ON, GO_ON)
    fragments = take_fragments(holder, 9)
    assert steps_of(fragments) == [(107, 3, 8), (108, 0, 1)]
    rows = [(batch["t"].tolist(), batch["truncateds"].tolist()) for _, batch in fragments[0].parts]
    assert rows == [([*range(3, 10)], [False] * 6 + [True]), ([10], [False])]


def test_what_waits_of_a_faulty_episode_is_dropped() -> None:
    holder = BridgeQuotaHolder(0)
    running = run(holder, 7, 10)
    episode(holder, 1, 5)
    assert take(holder, 8) == [(1, 0, 5), (107, 0, 3)]
    assert running.fault() == 7
    assert take(holder, 1) is None
    holder.slots.clear()
    holder.collect(record(2, 4).cut(), faulty=True)  # kept up to the fault
    assert take(holder, 1, "episodes", complete=True) is None
    assert take(holder, 4, complete=True) == [(2, 0, 4)]


def test_the_oldest_are_dropped_where_there_are_too_many() -> None:
    holder = BridgeQuotaHolder(0)
    for eps_id in (1, 2, 3):
        episode(holder, eps_id, 5)
    running = run(holder, 7, 10)
    assert holder.shrink(21) == 5
    assert holder.shrink(20) == 0
    assert holder.shrink(4) == 20
    assert running.num_fragments == 1
    assert take(holder, 1) is None
