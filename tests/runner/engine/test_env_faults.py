from __future__ import annotations

from typing import Any

import pytest

from envbus.bus.errors import RestartLimitError
from envbus.bus.supervision.restart import RestartPolicy
from envbus.runner.engine.env_faults import EnvFaults, FaultLog
from envbus.runner.engine.env_states import EnvState, EnvStates
from envbus.runner.errors import ActorLostError, FaultCause
from envbus.runner.workers.env_placement import EnvPlacement
from envbus.runner.workers.worker import ActorState, Gone, share_out


class Results:
    """Notes whose infos were dropped."""

    cut = None

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take_info(self, env_id: int) -> dict[str, Any]:
        self.taken.append(env_id)
        return {}


class Scene:
    """Two actors with two envs each."""

    def __init__(self, policy: RestartPolicy | None, *, all_or_nothing: bool = False) -> None:
        self.actors = share_out(list("abcd"), 2, remote=0, shared=True)
        for actor in self.actors:
            actor.counts = [1, 1]
        self.states = EnvStates(4)
        self.results: Any = Results()
        self.faults = EnvFaults(
            EnvPlacement(self.actors),
            self.states,
            self.results,
            FaultLog(None),
            policy,
            all_or_nothing=all_or_nothing,
        )

    def die(self, state: ActorState) -> None:
        self.actors[0].state = state
        self.faults.on_gone(Gone(self.actors[0], "it died", FaultCause.CRASH, 0))


def test_without_restart_the_loss_is_raised_once_and_is_no_fault() -> None:
    scene = Scene(None)
    scene.die(ActorState.LOST)
    assert scene.states.those(EnvState.LOST) == [0, 1]
    assert scene.faults.take() == []
    with pytest.raises(ActorLostError, match=r"it died.*restart=True") as told:
        scene.faults.raise_next()
    scene.faults.was_raised(told.value)
    scene.faults.raise_next()
    assert not scene.faults.any()
    with pytest.raises(ActorLostError):
        scene.faults.check_some_left()


def test_with_restart_each_env_has_one_fault_and_another_life() -> None:
    scene = Scene(RestartPolicy())
    scene.states.ask([1])
    scene.die(ActorState.DOWN)
    assert [fault.env_id for fault in scene.faults.untold] == [0]  # of 1, its request will tell
    scene.states.settle([1])
    scene.faults.end_incarnations([1], "it died")
    scene.die(ActorState.DOWN)  # told again: nobody dies twice
    assert [(f.env_id, f.given_up) for f in scene.faults.take()] == [(0, False), (1, False)]
    assert scene.states.those(EnvState.RECOVERING) == [0, 1]
    assert scene.faults.incarnations.numbers.tolist() == [1, 1, 0, 0]
    assert scene.results.taken == [0, 1]
    scene.faults.raise_next()


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_who_is_given_up_is_raised_if_all_are_wanted(all_or_nothing: bool) -> None:
    scene = Scene(RestartPolicy(), all_or_nothing=all_or_nothing)
    scene.die(ActorState.DOWN)
    scene.faults.take()
    scene.die(ActorState.LOST)
    assert [(f.env_id, f.given_up) for f in scene.faults.take()] == [(0, True), (1, True)]
    assert scene.faults.any() == all_or_nothing
    if all_or_nothing:
        with pytest.raises(RestartLimitError, match="it died"):
            scene.faults.raise_next()
    else:
        scene.faults.check_some_left()


def test_what_is_dropped_with_its_round_is_not_raised() -> None:
    scene = Scene(None)
    scene.faults.add_error(ValueError("of this round"))
    scene.faults.drop_errors()
    scene.faults.raise_next()


def test_an_error_in_whose_place_ctrl_c_was_raised_is_raised_again() -> None:
    scene = Scene(None)
    scene.faults.add_error(ValueError("first"))
    scene.faults.add_error(ValueError("second"))
    scene.die(ActorState.LOST)
    told = []
    for _ in range(3):
        for raised in (KeyboardInterrupt(), None):
            with pytest.raises((ValueError, ActorLostError)) as found:
                scene.faults.raise_next()
            scene.faults.was_raised(raised or found.value)
            told.append(str(found.value)[:6])
    assert told[:4] == ["first", "first", "second", "second"]
    assert told[4] == told[5]
    assert not scene.faults.any()
