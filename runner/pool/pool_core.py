"""What may be asked of the envs of an `ActorPool` now, and what its caller has not got yet.

For both of its sides: batches (`pool.py`), and dicts by env and agent (`polling.py`). Leaves out
how envs are asked (`engine/engine.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from envbus.actors.arrays.copies import own
from envbus.bus.interrupts import uninterrupted_call
from envbus.runner.engine.engine import Engine
from envbus.runner.engine.env_results import Batch
from envbus.runner.engine.env_states import EnvState
from envbus.runner.engine.seeding import spread_seeds
from envbus.runner.pool.agent_results import PollResult
from envbus.runner.workers.config import check_options

__all__ = ["PoolCore"]


class PoolCore:
    """The envs of a pool, and the checks of what is asked of them.

    Args:
        engine: Asks them.

    Attributes:
        kept: What Ctrl-C, or infos that cannot be merged, kept from the caller of `recv`.
        unpolled: What Ctrl-C kept from the caller of `poll`, or of `try_reset`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.placement = engine.placement
        self.states = engine.states
        self.results = engine.results
        self.faults = engine.faults
        self.kept: list[Batch] = []
        self.unpolled: list[PollResult] = []
        #: By env: how often the caller had it reset.
        self._resets = Counter[int]()

    @uninterrupted_call
    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Do what `ActorPool.reset` promises."""
        check_options(options)
        num_envs = len(self.states)
        if env_ids is None:
            seeds = spread_seeds(seed, num_envs)
            self.faults.check_some_left()
            self.engine.drop_everything()
            untold = [batch.faults for batch in self.kept]  # the caller did not get them
            untold += [result.faults for result in self.unpolled]
            self.faults.untold[:0] = itertools.chain.from_iterable(untold)
            self.kept.clear()
            self.unpolled.clear()
            named: Sequence[int] = range(num_envs)
        else:
            named = self.check_env_ids(env_ids)
            seeds = spread_seeds(seed, num_envs, named)
        for env_id in named:
            self.faults.incarnations.remember(env_id, seeds[env_id])
        if self.results.cut is not None:
            self.results.cut.on_reset(named)
        self._resets.update(named)
        # FRESH: the reset that was to begin its life came too late, and nothing follows by itself.
        can_be_reset = (EnvState.IDLE, EnvState.FRESH)
        idle = [env_id for env_id in named if self.states[env_id] in can_be_reset]
        self.engine.reset(idle, seeds, own(options))

    def episode(self, env_id: int) -> tuple[int, int]:
        """Return which episode of its caller's an env is in; (0, 0): it was never reset."""
        return self._resets[env_id], int(self.faults.incarnations.numbers[env_id])

    def wait_for(
        self, verb: str, wanted: int, timeout: float | None, batch_wait: float | None = None
    ) -> list[int]:
        """Wait until `wanted` envs are ready, or no more will be, and raise what they failed of.

        Returns:
            Who has not answered, if the time-out has ended it.
        """
        states, late = self.states, False
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        batch_ends_at = math.inf
        waits = self._must_wait(wanted)
        if not waits:
            self.engine.take_events(0.0)  # an actor may have ended that was asked nothing
            self._check_awaited(verb)
            waits = self._must_wait(wanted)
        while waits and not late:
            now = time.monotonic()
            if batch_wait is not None and states.ready:
                batch_ends_at = min(batch_ends_at, now + batch_wait)
            if now >= batch_ends_at:
                break
            self.engine.take_events(max(min(deadline, batch_ends_at) - now, 0.0))
            waits = len(states.ready) < wanted and self._must_wait(wanted)
            late = waits and now >= deadline
        self.faults.raise_next()
        return states.late() if late else []

    def _must_wait(self, wanted: int) -> bool:
        """Return whether there are fewer results than wanted, and more will come."""
        states = self.states
        return len(states.ready) < wanted and states.awaited() and not self.faults.any()

    def _check_awaited(self, verb: str) -> None:
        """See that waiting for results will come to an end."""
        states, lost = self.states, self.faults.lost
        if states.ready or states.awaited() or self.faults.any():
            return
        if len(lost) == len(states):
            raise self.faults.loss(min(lost))
        if EnvState.HELD not in states:
            send = "`try_reset` or `send_actions`" if verb == "poll" else "`reset` or `send`"
            raise NoAsyncCallError(f"Nothing to receive: call {send} first.", verb)
        self.engine.stop_holding()  # the caller waits for those who wait for others

    def check_env_ids(
        self,
        env_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        is_restart: bool = False,
    ) -> list[int]:
        """Return env ids as ints, of envs that can be asked, or whose next episodes come unasked.

        Args:
            env_ids: Which.
            is_restart: Envs are to be made anew, which cannot be skipped where one is at work.
        """
        chosen = self.placement.check_ids(env_ids)
        if self.kept or self.unpolled:
            self._check_handed_out(chosen)
        if self.states.idle(chosen) is chosen:  # the usual case
            return chosen
        states, unasked = self.states, self.engine.unasked
        busy = [i for i in chosen if states[i] in (EnvState.PENDING, EnvState.READY)]
        if busy := [i for i in busy if i not in unasked or is_restart]:
            raise AlreadyPendingCallError(
                f"envs {busy} have a result that was not received yet; call `recv` first", "recv"
            )
        for env_id in chosen:
            if states[env_id] is EnvState.LOST:
                raise self.faults.loss(env_id)
        return chosen

    def _check_handed_out(self, env_ids: list[int]) -> None:
        """Look that none of these envs has a result that was kept from the caller."""
        kept = {i for batch in self.kept for i in batch.env_ids.tolist()}
        kept.update(i for result in self.unpolled for i in result.observations)
        if busy := sorted(kept.intersection(env_ids)):
            verb = "recv" if self.kept else "poll"
            raise AlreadyPendingCallError(
                f"envs {busy} have a result that was kept from you by an error or an interrupt; "
                f"call `{verb}` first",
                verb,
            )
