"""What each env is doing, as the engine sees it: one table, and all its transitions. Pure.

Leaves out what is asked of envs and what they answered (`engine.py`).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["EnvState", "EnvStates"]


class EnvState(enum.Enum):
    """Between asking an env and its caller's taking the result."""

    IDLE = "idle"  # its last result was received: it may be sent an action
    PENDING = "pending"  # a step or reset is under way
    READY = "ready"  # its result waits to be received
    RECOVERING = "recovering"  # it failed, or its actor left; a new episode will come by itself
    FRESH = "fresh"  # it was made anew, and not reset yet
    HELD = "held"  # its episode is over, and its actor leaves once those of the others are
    LOST = "lost"  # it failed and is not made anew, or its actor is not started again


class EnvStates:
    """The states of all envs of one pool, from IDLE.

    ========= =============== ============================================
    method    from -> to      because
    ========= =============== ============================================
    `ask`     -> PENDING      a request was sent
    `settle`  -> IDLE         that request has ended
    `offer`   IDLE -> READY   it has brought a result
    `bring`   PENDING -> READY that request has ended with a result
    `receive` READY -> IDLE   the caller took the oldest results
    `take`    READY -> IDLE   the caller took the result of this env
    `hold`    IDLE -> HELD    its actor is to leave
    `recover` -> RECOVERING   its life is over, and another one follows
    `freshen` -> FRESH        it, or its actor, was made anew
    `lose`    -> LOST         its life is over, and no other follows
    `drop`    -> IDLE         the caller wants no result any more; envs that
                              are made anew, or LOST, are not changed
    ========= =============== ============================================

    Whatever a signal's handler breaks off, who is READY stands in `ready`: else nobody takes it.

    Attributes:
        ready: READY envs, the oldest first; others only look.
    """

    def __init__(self, num_envs: int) -> None:
        self._states = [EnvState.IDLE] * num_envs
        self.ready: deque[int] = deque()

    def __getitem__(self, env_id: int) -> EnvState:
        return self._states[env_id]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[EnvState]:
        return iter(self._states)

    def of(self, env_ids: Sequence[int]) -> list[EnvState]:
        """Return the states of some envs."""
        states = self._states
        return [states[env_id] for env_id in env_ids]

    def idle(self, env_ids: list[int]) -> list[int]:
        """Return those of some envs that are IDLE; the very list if all are."""
        found = self.of(env_ids)
        if found.count(EnvState.IDLE) == len(found):  # the usual case, without a loop
            return env_ids
        return [i for i, state in zip(env_ids, found, strict=True) if state is EnvState.IDLE]

    def are_all_idle(self) -> bool:
        """Return whether every env is IDLE."""
        return self._states.count(EnvState.IDLE) == len(self._states)

    @property
    def num_pending(self) -> int:
        """How many envs' requests have not ended.

        Counted each time: a number that is kept differs for ever, once an exception, e.g. of a
        signal's handler, has come between a state and it.
        """
        return self._states.count(EnvState.PENDING)

    @property
    def num_ready(self) -> int:
        """How many results wait to be received."""
        return len(self.ready)

    def awaited(self) -> bool:
        """Return whether any result will come."""
        return EnvState.PENDING in self._states or EnvState.RECOVERING in self._states

    def late(self) -> list[int]:
        """Return the envs whose results will come."""
        awaited = (EnvState.PENDING, EnvState.RECOVERING)
        return [i for i, state in enumerate(self._states) if state in awaited]

    def those(self, state: EnvState) -> list[int]:
        """Return the envs in a state."""
        return [i for i, found in enumerate(self._states) if found is state]

    # --- transitions -------------------------------------------------------------------------

    def ask(self, env_ids: list[int]) -> None:
        """A request to these envs was sent."""
        self._set(env_ids, EnvState.PENDING)

    def settle(self, env_ids: list[int]) -> None:
        """The request to these envs has ended; what follows, if anything, is told next."""
        self._set(env_ids, EnvState.IDLE)

    def offer(self, env_ids: Sequence[int]) -> None:
        """The envs' requests ended with a result, which the caller may take.

        In this order, so that no result is lost where it is broken off.
        """
        self.ready.extend(env_ids)
        self._set(env_ids, EnvState.READY)

    def offer_again(self) -> None:
        """Finish an `offer` that was broken off, e.g. by an exception of a signal's handler."""
        self._set([i for i in self.those(EnvState.PENDING) if i in self.ready], EnvState.READY)

    def receive(self, count: int) -> list[int]:
        """Take the `count` oldest results."""
        ready = self.ready
        env_ids = list(ready) if count == len(ready) else list(itertools.islice(ready, count))
        self._set(env_ids, EnvState.IDLE)
        if count == len(ready):
            ready.clear()
        else:
            for _ in env_ids:
                ready.popleft()
        return env_ids

    def put_back(self, env_ids: list[int]) -> None:
        """What was received last was not taken, after all."""
        self.ready.extendleft(reversed(env_ids))
        self._set(env_ids, EnvState.READY)

    def take(self, env_id: int) -> None:
        """Take the result of one READY env, out of turn."""
        self._states[env_id] = EnvState.IDLE
        self.ready.remove(env_id)

    def hold(self, env_ids: Iterable[int]) -> None:
        """These envs wait for those of their actor that are not between two episodes yet."""
        for env_id in env_ids:
            self._states[env_id] = EnvState.HELD

    def recover(self, env_id: int) -> None:
        """The env's life is over and another one follows; its result, if any, is dropped."""
        self._leave(env_id, EnvState.RECOVERING)

    def lose(self, env_id: int) -> None:
        """The env's life is over and was its last; its result, if any, is dropped."""
        self._leave(env_id, EnvState.LOST)

    def freshen(self, env_ids: Sequence[int]) -> None:
        """These envs were made anew, and may be reset."""
        self._set(env_ids, EnvState.FRESH)

    def drop(self) -> None:
        """Forget what was asked and answered; it is not settled later."""
        for env_id, state in enumerate(self._states):
            if state in (EnvState.PENDING, EnvState.READY, EnvState.HELD):
                self._states[env_id] = EnvState.IDLE
        self.ready.clear()

    def _leave(self, env_id: int, state: EnvState) -> None:
        self._states[env_id] = state
        with contextlib.suppress(ValueError):
            self.ready.remove(env_id)

    # --- private -----------------------------------------------------------------------------

    def _set(self, env_ids: Sequence[int], state: EnvState) -> None:
        states = self._states
        for env_id in env_ids:
            states[env_id] = state
