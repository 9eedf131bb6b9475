from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from envbus.bus.supervision.restart import ChildState, Exit, RestartPolicy
from envbus.bus.supervision.supervision import ChildGivenUp, StartChild, Supervision

POLICY = RestartPolicy(max_restarts=2, window=10.0, backoff=1.0)


def supervision_of(*names: str) -> Supervision:
    supervision = Supervision()
    for name in names:
        assert supervision.add(name, POLICY) == [StartChild(name, 0)]
        supervision.on_ready(name, 0, 0.0)
    return supervision


def test_one_child_is_restarted_and_the_others_go_on() -> None:
    supervision = supervision_of("a", "b")
    assert supervision.on_exit("a", 0, Exit.CRASH, 5.0, "exit code 9") == [StartChild("a", 1)]
    assert supervision.wake_at() is None
    supervision.on_ready("a", 1, 5.1)
    assert (supervision.state("a"), supervision.incarnation("a")) == (ChildState.READY, 1)
    assert (supervision.state("b"), supervision.incarnation("b")) == (ChildState.READY, 0)
    assert (supervision.restarts("a"), supervision.restarts("b")) == (1, 0)


def test_a_second_restart_waits() -> None:
    supervision = supervision_of("a")
    supervision.on_exit("a", 0, Exit.CRASH, 4.0)
    assert supervision.on_exit("a", 1, Exit.CRASH, 5.0) == []
    assert supervision.state("a") is ChildState.BACKING_OFF
    assert supervision.wake_at() == 6.0
    assert supervision.due(5.9) == []
    assert supervision.due(6.0) == [StartChild("a", 2)]
    assert supervision.wake_at() is None


def test_giving_up_names_child_count_and_last_cause() -> None:
    supervision = supervision_of("a")
    for incarnation in range(2):
        supervision.on_exit("a", incarnation, Exit.CRASH, incarnation, "exit code 9")
        supervision.due(incarnation + 5.0)
    given_up = ChildGivenUp("a", POLICY.exhausted(2), "signal SIGKILL")
    assert supervision.on_exit("a", 2, Exit.CRASH, 6.0, "signal SIGKILL") == [given_up]
    assert supervision.due(1e9) == []
    assert supervision.state("a") is ChildState.GIVEN_UP


def test_an_exit_of_a_former_life_is_dropped() -> None:
    supervision = supervision_of("a")
    supervision.on_exit("a", 0, Exit.CRASH, 0.0)
    supervision.due(1.0)
    assert supervision.on_exit("a", 0, Exit.CRASH, 1.1) == []
    assert supervision.state("a") is ChildState.STARTING
    supervision.on_ready("a", 0, 1.2)
    assert supervision.state("a") is ChildState.STARTING


def test_without_a_pause_the_start_is_immediate() -> None:
    supervision = Supervision()
    supervision.add("a", RestartPolicy(backoff=0.0))
    assert supervision.on_exit("a", 0, Exit.CRASH, 3.0) == [StartChild("a", 1)]


def test_what_could_not_be_started_is_not_tried_again_at_once() -> None:
    supervision = Supervision()
    supervision.add("a", RestartPolicy.always(backoff=0.0, max_backoff=0.0))
    assert supervision.on_exit("a", 0, Exit.CRASH, 3.0) == [StartChild("a", 1)]
    assert supervision.on_exit("a", 1, Exit.CRASH, 3.0, began=False) == []
    wake_at = supervision.wake_at()
    assert wake_at is not None
    assert wake_at > 3.0
    assert supervision.due(wake_at) == [StartChild("a", 2)]


def test_a_start_that_found_no_process_starts_no_other_child_either() -> None:
    supervision = Supervision()
    for name in ("a", "b"):
        supervision.add(name, RestartPolicy.always())
    assert supervision.on_exit("a", 0, Exit.CRASH, 1.0, began=False) == []
    assert supervision.on_exit("b", 0, Exit.CRASH, 9.0, began=False) == []
    assert supervision.due(9.0) == [StartChild("a", 1)]


def test_a_removed_child_is_forgotten_but_its_restarts_stay_counted() -> None:
    supervision = supervision_of("a")
    supervision.on_exit("a", 0, Exit.CRASH, 0.0)
    supervision.remove("a")
    assert "a" not in supervision
    assert supervision.on_exit("a", 0, Exit.CRASH, 0.0) == []
    assert supervision.wake_at() is None
    assert supervision.all_restarts() == 1


def test_children_are_listed_in_the_order_of_their_start() -> None:
    supervision = supervision_of("b", "a")
    assert (len(supervision), list(supervision)) == (2, ["b", "a"])


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'a'"):
        supervision_of("a").add("a", POLICY)


class SupervisionMachine(RuleBasedStateMachine):
    """Random exits, hellos and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.supervision = Supervision(random=lambda: 0.5)
        self.now = 0.0
        self.started: list[tuple[str, int]] = []

    names = st.sampled_from(["a", "b", "c"])

    def note(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, StartChild):
                assert (effect.name, effect.incarnation) not in self.started
                self.started.append((effect.name, effect.incarnation))

    @rule(name=names)
    def add(self, name: str) -> None:
        if name not in self.supervision and not any(name == other for other, _ in self.started):
            self.note([*self.supervision.add(name, POLICY)])

    @rule(name=names, incarnation=st.integers(0, 4))
    def ready(self, name: str, incarnation: int) -> None:
        self.supervision.on_ready(name, incarnation, self.now)

    @rule(name=names, incarnation=st.integers(0, 4), reason=st.sampled_from(list(Exit)))
    def exit(self, name: str, incarnation: int, reason: Exit) -> None:
        self.note([*self.supervision.on_exit(name, incarnation, reason, self.now)])

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.note([*self.supervision.due(self.now)])
        wake_at = self.supervision.wake_at()
        assert wake_at is None or wake_at > self.now

    @invariant()
    def agrees(self) -> None:
        self.supervision.check_invariants()


TestSupervisionMachine = SupervisionMachine.TestCase


def test_a_renewed_child_lives_on_in_another_incarnation_and_is_not_counted() -> None:
    supervision = supervision_of("a")
    for incarnation in range(1, 50):
        assert supervision.renew("a", 0.0) == incarnation
        assert supervision.state("a") is ChildState.STARTING
        supervision.on_ready("a", incarnation, 0.0)
    assert supervision.on_exit("a", 48, Exit.CRASH, 1.0) == []
    assert supervision.restarts("a") == 0
    assert supervision.on_exit("a", 49, Exit.CRASH, 1.0) == [StartChild("a", 50)]
    supervision.check_invariants()
