"""When a dead child is started again, and when its supervisor gives up.

```
STARTING ──ready──▶ READY
    │                 │ exit
    └──────exit───────┤
                      ├─ not worth a restart ─▶ STOPPED
                      ├─ budget spent ────────▶ GIVEN_UP
                      └─▶ BACKING_OFF ──delay over──▶ STARTING, incarnation + 1
READY ──renewed──▶ STARTING, incarnation + 1
```

Pure: no socket, clock, thread or process in this file; randomness is handed in. A child may be
a process, or an env inside of one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envbus.bus.errors import ConfigError
from envbus.bus.settings import check_number

__all__ = ["ChildState", "Exit", "Restart", "RestartPolicy", "SupervisedLife"]


class Restart(enum.Enum):
    """Which exits are followed by a restart (Erlang/OTP's words)."""

    PERMANENT = "permanent"  # all
    TRANSIENT = "transient"  # all but normal ones
    TEMPORARY = "temporary"  # none


class Exit(enum.Enum):
    """Why a child is gone."""

    NORMAL = "normal"
    CRASH = "crash"
    HANG = "hang"
    MEMORY_LIMIT = "memory_limit"


class ChildState(enum.Enum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` in a row, with growing pauses; a life that worked clears the count.

    Made for runs of days: what works and is killed at times comes back at once and for ever, what
    fails at each start is given up. See docs/recovery.md for numbers.

    Raises:
        ConfigError: A value is unusable.

    Source:
        After intensity and period of Erlang/OTP's supervisor,
        https://www.erlang.org/doc/system/sup_princ.html, but counted by how long lives work
        instead of by the clock: whoever takes a minute to start, in vain, is given up as well.
    """

    restart: Restart = Restart.TRANSIENT
    #: Restarts in a row, none of whose lives has worked for `window` seconds, before it is given
    #: up. 0: never restarted. None: no limit, also for what fails at each start. Ten, as who dies
    #: by chance once a minute does not do so within `window` eleven times in a row, not in weeks.
    max_restarts: int | None = 10
    #: Seconds of work, from when it was ready until it failed, after which nothing is held against
    #: it any more.
    window: float = 10.0
    #: Seconds before the second restart in a row, after a first one at once; doubles with each
    #: further one.
    backoff: float = 0.1
    #: Seconds; the most that `backoff` grows to. A life that has worked for as long is followed by
    #: the next one at once, whatever `window` is: a pause protects from those that fail at once.
    #: Two, so that ten restarts in vain take 11 s.
    max_backoff: float = 2.0
    #: Each pause is made longer by up to this fraction of it, at random, so that children that
    #: died together do not start together.
    jitter: float = 0.1

    @classmethod
    def always(cls, **settings: Any) -> RestartPolicy:
        """Return a policy that never gives up; `settings` are the other fields."""
        return cls(max_restarts=None, **settings)

    def __post_init__(self) -> None:
        most = self.max_restarts
        if most is not None and (type(most) is not int or most < 0):
            raise ConfigError(
                f"max_restarts must be a number from 0 on, or None for no limit, not {most!r}"
            )
        for name in ("window", "backoff", "max_backoff"):
            check_number(name, getattr(self, name))
        if not 0.0 < self.window < math.inf:
            raise ConfigError(
                f"window must be finite and over 0 s, is {self.window}; to restart without end "
                "write RestartPolicy.always()"
            )
        if not 0.0 <= self.backoff <= self.max_backoff < math.inf:
            raise ConfigError(
                f"0 <= backoff <= max_backoff < infinity must hold; they are {self.backoff} "
                f"and {self.max_backoff}: set both"
            )
        check_number("jitter", self.jitter, least=0.0, most=1.0)

    @classmethod
    def chosen(cls, restart: bool | RestartPolicy) -> RestartPolicy | None:
        """Return the policy that a setting `restart=` means.

        Args:
            restart: True: one with all defaults. False: none, nothing is started again.

        Raises:
            ConfigError: `restart` is neither a bool nor a `RestartPolicy`.
        """
        if isinstance(restart, RestartPolicy):
            return restart
        if not isinstance(restart, bool):
            raise ConfigError(f"restart must be True, False or a RestartPolicy, not {restart!r}")
        return cls() if restart else None

    def delay(self, recent: int) -> float:
        """Return seconds to wait after `recent` restarts of short lives, without jitter."""
        if recent == 0:
            return 0.0  # most failures are the only one for long
        # 2.0**1024 overflows; long before, the maximum is reached.
        return min(self.backoff * 2.0 ** min(recent - 1, 64), self.max_backoff)

    def exhausted(self, restarts: int) -> str:
        """Return for people what it means that there were `restarts` in a row, and what to do."""
        return (
            f"failed again after {restarts} restarts in a row, none of which worked for "
            f"{self.window:g} s (to go on longer, raise max_restarts={self.max_restarts} of "
            "RestartPolicy, or use RestartPolicy.always())"
        )


class SupervisedLife:
    """Life of one supervised process or env. Clock and process are the caller's.

    Args:
        policy: When it is restarted.
        random: Returns a number from [0, 1), for the jitter; None: none.
    """

    def __init__(self, policy: RestartPolicy, random: Callable[[], float] | None = None) -> None:
        self.policy = policy
        self.state = ChildState.STARTING
        #: Which life this is, from 0.
        self.incarnation = 0
        #: Restarts decided so far, over its whole life.
        self.restarts = 0
        self._random = random
        #: When it became ready, if it is.
        self._ready_at = math.inf
        #: Restarts since a life has worked for `window` seconds.
        self.in_a_row = 0
        #: Restarts since a life has worked for `max_backoff` seconds.
        self._in_haste = 0

    def __repr__(self) -> str:
        return f"<SupervisedLife {self.state.value} incarnation={self.incarnation}>"

    def on_ready(self, now: float) -> None:
        """The process said hello."""
        self._expect(ChildState.STARTING)
        self.state = ChildState.READY
        self._ready_at = now

    def on_started_again(self) -> None:
        """The pause is over and a new process runs."""
        self._expect(ChildState.BACKING_OFF)
        self._begin_life()

    def on_renewed(self, now: float) -> None:
        """It works and was exchanged for a fresh one, which says nothing against it."""
        self._expect(ChildState.READY)
        self._count_work(now - self._ready_at)
        self._begin_life()

    def on_exit(self, reason: Exit, now: float, idle: float = 0.0) -> float | None:
        """Decide what follows an exit at time `now`, in seconds of the caller's clock.

        Returns:
            Seconds until it is to be started again; None: it is not, as it is STOPPED or GIVEN_UP.

        Args:
            reason: Why it ended.
            now: When.
            idle: Seconds before that in which it did not work, but hang.
        """
        self._expect(ChildState.STARTING, ChildState.READY)
        policy = self.policy
        if not _wants_restart(policy.restart, reason):
            self.state = ChildState.STOPPED
            return None
        self._count_work(now - self._ready_at - idle)
        if policy.max_restarts is not None and self.in_a_row >= policy.max_restarts:
            self.state = ChildState.GIVEN_UP
            return None
        delay = policy.delay(self._in_haste)
        self.in_a_row += 1
        self._in_haste += 1
        self.restarts += 1
        self.state = ChildState.BACKING_OFF
        stretch = 1.0 if self._random is None else 1.0 + policy.jitter * self._random()
        return delay * stretch

    def _begin_life(self) -> None:
        self.state = ChildState.STARTING
        self.incarnation += 1
        self._ready_at = math.inf

    def _count_work(self, worked: float) -> None:
        """A life is over that has worked for so long; less than nothing, if it never did."""
        if worked >= self.policy.window:
            self.in_a_row = self._in_haste = 0
        elif worked >= self.policy.max_backoff:
            self._in_haste = 0

    def _expect(self, *allowed: ChildState) -> None:
        assert self.state in allowed, f"event not legal in state {self.state.value}"


def _wants_restart(restart: Restart, reason: Exit) -> bool:
    match restart:
        case Restart.PERMANENT:
            return True
        case Restart.TRANSIENT:
            return reason is not Exit.NORMAL
        case Restart.TEMPORARY:
            return False
