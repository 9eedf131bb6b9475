from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from envbus.runner.engine.env_faults import EnvFaults, FaultLog
from envbus.runner.engine.env_results import Batch
from envbus.runner.engine.env_states import EnvStates
from envbus.runner.pool.agent_results import PollResult
from envbus.runner.pool.pool_core import PoolCore
from envbus.runner.workers.env_placement import EnvPlacement
from envbus.runner.workers.worker import share_out


class Scene:
    """Three envs with an actor each, and an engine of whose waits the n-th brings `events[n]`."""

    cut = None  # as results

    def __init__(self) -> None:
        actors = share_out(list("abc"), 3, remote=0, shared=True)
        for actor in actors:
            actor.counts = [1]
        self.states = EnvStates(3)
        self.waits: list[float] = []
        self.events: list[Callable[[], object]] = []
        self.reset_ids: list[list[int]] = []
        self.unasked: set[int] = set()
        this: Any = self
        placement = EnvPlacement(actors)
        self.placement, self.results = placement, this
        self.faults = EnvFaults(
            placement, self.states, this, FaultLog(None), None, all_or_nothing=False
        )
        self.core = PoolCore(this)

    def take_events(self, timeout: float) -> None:
        self.waits.append(timeout)
        if self.events:
            self.events.pop(0)()

    def reset(self, env_ids: list[int], seeds: list[int | None], options: object) -> None:
        self.reset_ids.append(env_ids)

    def drop_everything(self) -> None:
        self.states.drop()


def test_a_wait_without_a_limit_looks_once_per_event() -> None:
    scene = Scene()
    scene.states.ask([0, 1, 2])
    scene.events = [lambda: None, lambda: scene.states.offer([1])]
    assert scene.core.wait_for("poll", 1, None) == []
    assert scene.waits == [math.inf, math.inf]
    assert scene.states.receive(1) == [1]


def test_after_the_time_out_a_last_look_is_taken_and_who_is_late_is_told() -> None:
    scene = Scene()
    scene.states.ask([0, 1, 2])
    scene.events = [lambda: scene.states.offer([1])]
    assert scene.core.wait_for("recv", 2, 0.0) == [0, 2]
    assert scene.waits == [0.0]


def test_once_one_is_ready_the_others_have_a_while_of_their_own() -> None:
    scene = Scene()
    scene.states.ask([0, 1, 2])
    scene.events = [lambda: scene.states.offer([1])]
    assert scene.core.wait_for("poll", 3, None, 0.0) == []
    assert scene.waits == [math.inf]  # nobody is late: it was not the time-out


def test_waiting_for_nothing_is_refused() -> None:
    scene = Scene()
    for verb, hint in (("recv", "`reset` or `send`"), ("poll", "`try_reset` or `send_actions`")):
        with pytest.raises(NoAsyncCallError, match=hint):
            scene.core.wait_for(verb, 1, None)


def test_each_reset_begins_another_episode() -> None:
    scene = Scene()
    assert scene.core.episode(1) == (0, 0)
    scene.core.reset(env_ids=[1])
    scene.core.reset()
    assert [scene.core.episode(i) for i in range(3)] == [(1, 0), (2, 0), (1, 0)]
    scene.core.faults.incarnations.begin([1])
    assert scene.core.episode(1) == (2, 1)
    assert scene.reset_ids == [[1], [0, 1, 2]]


def test_envs_whose_result_was_kept_cannot_be_asked_until_all_are_reset() -> None:
    scene = Scene()
    none = np.zeros(1)
    scene.core.kept.append(
        Batch(
            env_ids=np.array([0]),
            observations=none,
            rewards=none,
            terminations=none > 0,
            truncations=none > 0,
            infos={},
            incarnations=np.zeros(1, np.int64),
            faults=[],
            late=[],
        )
    )
    with pytest.raises(AlreadyPendingCallError, match=r"\[0\].*call `recv` first"):
        scene.core.check_env_ids([0, 1])
    scene.core.kept.clear()
    result = PollResult({2: {}}, {}, {}, {}, {}, {})
    result.faults = []
    scene.core.unpolled.append(result)
    with pytest.raises(AlreadyPendingCallError, match=r"\[2\].*call `poll` first"):
        scene.core.check_env_ids([2])
    assert scene.core.check_env_ids([0, 1]) == [0, 1]
    scene.core.reset()
    assert scene.core.check_env_ids([2]) == [2]


def test_what_is_sent_to_an_env_that_was_not_asked_for_its_row_is_no_error() -> None:
    scene = Scene()
    scene.states.ask([0, 1, 2])
    scene.states.offer([1])
    scene.unasked = {1, 2}
    assert scene.core.check_env_ids([1, 2]) == [1, 2]
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[0\]"):
        scene.core.check_env_ids([0, 1, 2])
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[1\]"):
        scene.core.check_env_ids([1], is_restart=True)
