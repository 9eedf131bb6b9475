"""Steps of a vector env that go by words in shared memory, as long as only rows come of them.

Whatever is more becomes the round of messages that a step is otherwise, with `Finish` in the place
of `Step`: infos, errors, an actor that has died or takes long, Ctrl-C. From there all is as if it
had been asked so. Leaves out the words (`workers/step_words.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from envbus.runner.engine.engine import Engine
from envbus.runner.engine.env_results import Infos
from envbus.runner.vector.lockstep import Lockstep, PendingVerb
from envbus.runner.vector.lockstep_recycling import LockstepRecycling
from envbus.runner.workers.actions import ActionStore
from envbus.runner.workers.step_words import StepWords
from envbus.runner.workers.worker import ActorState

__all__ = ["QuickSteps"]

#: Seconds after which a step goes by message: processes and their memory are looked after then.
_LOOK_INTERVAL: Final = 0.1
#: Most steps that go by message because those before had more to tell.
_LONGEST_BREAK: Final = 64


class QuickSteps:
    """Steps all envs of a vector env where that takes no message.

    Args:
        words: By which actors are asked.
        engine: Goes on by messages.
        actions: Where the batch of actions goes.
        lockstep: What is pending.
        recycling: Exchanges actors, for which steps go by message; None: nobody does.
        read_infos: Returns what envs told besides, in the caller's form.

    Attributes:
        asked: Number of the step that is under way, and was not made a round of messages; 0: none.
        begun: Number of the last step.
        infos: What envs told besides in the last step of which all stood in the rows.
    """

    def __init__(
        self,
        words: StepWords,
        engine: Engine,
        actions: ActionStore,
        lockstep: Lockstep,
        recycling: LockstepRecycling | None,
        read_infos: Callable[[], dict[Any, Any]],
    ) -> None:
        self._words = words
        self._fleet = engine.fleet
        self._engine = engine
        self._states = engine.states
        self._results = engine.results
        self._faults = engine.faults
        self._actions = actions
        self._lockstep = lockstep
        self._recycling = recycling
        self._read_infos = read_infos
        self._everyone = list(range(engine.fleet.num_envs))
        self.asked = 0
        self.begun = 0
        self.infos: dict[Any, Any] = {}
        self._asked_at = self._look_at = 0.0
        #: Steps that go by message from now on, and as many as after the next with more to tell.
        self._break = 0
        self._next_break = 1
        lockstep.on_collect = self.finish_by_message
        lockstep.on_stepped = self.on_stepped

    def on_stepped(self, infos: Infos) -> None:
        """A step by messages has ended: see whether the next one can do without.

        Args:
            infos: Of this one, by env.
        """
        if self._fleet.closed:  # by a hook: the caller gets this step all the same
            return
        if self._words.learn(infos):
            self._break, self._next_break = 0, 1
        if self._break > 0:
            self._break -= 1
            return
        if (
            self._faults.is_settled()
            and self._states.are_all_idle()
            and all(
                actor.state is ActorState.READY and actor.reads_blocks
                for actor in self._fleet.actors
            )
        ):
            self._lockstep.is_quiet = True
            self._look_at = time.monotonic() + _LOOK_INTERVAL

    def ask(self, actions: Any) -> bool:
        """Ask all envs to step; False: nobody was asked.

        Raises:
            ValueError, TypeError: As `BusVectorEnv.step_async`. Nothing was asked.
        """
        lockstep, words = self._lockstep, self._words
        self._asked_at = now = time.monotonic()
        if lockstep.pending is not PendingVerb.NOTHING or now >= self._look_at:
            return False
        if self._fleet.closed:  # also in a forked copy
            return False
        if self._recycling is not None and not self._recycling.is_idle():
            return False
        if self._actions.store(actions) is not None:
            return False
        if self._results.cut is not None:
            self._results.cut.on_send(self._everyone)
        self.asked = self.begun = words.begin()
        lockstep.pending = PendingVerb.STEP
        words.ask()
        return True

    def wait(self) -> bool:
        """Wait for the step that was asked; return whether all that came of it stands in the rows.

        If not, it is pending, and becomes a round of messages when it is fetched.
        """
        words = self._words
        if words.wait():
            self._next_break = 1
            self.infos = self._read_infos()
            return True
        if words.is_more_told():
            self._break = self._next_break
            self._next_break = min(2 * self._next_break, _LONGEST_BREAK)
        return False

    def hand_out(self) -> None:
        """The caller gets what came of the step."""
        if self._recycling is not None:
            self._recycling.count_step()
        if self._results.cut is not None:
            self._results.cut.on_receive(self._results.everyone)
        self.asked = 0
        self._lockstep.pending = PendingVerb.NOTHING

    def take_back(self, before: int = 0) -> None:
        """The caller did not get it: it can be fetched. Nothing is done if none was begun.

        Args:
            before: Which was begun last before the call; 0: one was begun before it.
        """
        if self.begun != before:
            self.asked = self.begun
            self._lockstep.pending = PendingVerb.STEP

    def finish_by_message(self) -> None:
        """Make a step that is under way a round of messages; nothing is done if there is none."""
        number = self.asked
        if not number:
            return
        if self._fleet.closed:  # a forked copy: its rows are the owner's
            self._engine.take_events(0.0)
        timeout = self._fleet.config.timeouts.step
        if timeout is not None:
            # The first part of it is over; what was longer than a sleep is no fault of theirs.
            waited = min(time.monotonic() - self._asked_at, self._words.longest_sleep)
            timeout = max(timeout - waited, 0.01 * timeout)
        self._lockstep.on_all_asked()
        # Noted before: where an exception breaks the asking off, they are told as late.
        self._states.ask(self._everyone)
        self.asked = 0
        self._engine.finish_step(number, self._words.missing(), timeout)
