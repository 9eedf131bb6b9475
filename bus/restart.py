"""When a dead child is started again, and when its supervisor gives up.

```
STARTING ──ready──▶ READY
    │                 │ exit
    └──────exit───────┤
                      ├─ not worth a restart, or stopped ─▶ STOPPED
                      ├─ budget spent ────────────────────▶ GIVEN_UP
                      └─▶ BACKING_OFF ──delay over──▶ STARTING, incarnation + 1
READY ──renewed──▶ STARTING, incarnation + 1
```

Pure: no socket, clock, thread or process in this file; randomness is handed in. A child may be
a process, or an env inside of one.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from envbus.bus.errors import ConfigError

__all__ = ["Child", "ChildState", "Exit", "GiveUp", "Restart", "RestartPolicy", "StartAfter"]


class Restart(enum.Enum):
    """Which exits are followed by a restart (Erlang/OTP's words)."""

    PERMANENT = "permanent"  # all
    TRANSIENT = "transient"  # all but normal ones
    TEMPORARY = "temporary"  # none


class Exit(enum.Enum):
    """Why a child is gone."""

    NORMAL = "normal"
    CRASH = "crash"
    LEASE_EXPIRED = "lease_expired"
    HANG = "hang"
    MEMORY_LIMIT = "memory_limit"


class ChildState(enum.Enum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class StartAfter:
    """Effect: start the child after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: fail the child's requests and raise `RestartLimitError` to the owner."""

    #: Restarts within the window, which is the limit.
    restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` in any `window` seconds, with growing pauses.

    Raises:
        ConfigError: A value is unusable, or the pauses are so long that the limit is never met.

    Source:
        Intensity and period of Erlang/OTP's supervisor,
        https://www.erlang.org/doc/system/sup_princ.html.
    """

    restart: Restart = Restart.TRANSIENT
    #: 0: never restarted. Five, as envs that crash at times are to be survived, and one that
    #: crashes at each start is to be reported within seconds.
    max_restarts: int = 5
    #: Seconds. Long, as an env that crashes after 10 s of work each time makes no progress.
    window: float = 60.0
    #: Seconds before the second restart within the window, after a first one at once; doubles
    #: with each further one.
    backoff: float = 0.1
    #: Seconds; the most that `backoff` grows to.
    max_backoff: float = 5.0
    #: Each pause is made longer by up to this fraction of it, at random, so that children that
    #: died together do not start together.
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must not be negative, is {self.max_restarts}")
        if not 0.0 < self.window < math.inf:
            raise ConfigError(f"window must be finite and over 0 s, is {self.window}")
        if not 0.0 <= self.backoff <= self.max_backoff < math.inf:
            raise ConfigError(
                f"0 <= backoff <= max_backoff < infinity must hold; they are {self.backoff} "
                f"and {self.max_backoff}"
            )
        if not 0.0 <= self.jitter <= 1.0:
            raise ConfigError(f"jitter must be a fraction from 0 to 1, is {self.jitter}")
        if self._shortest_way_to_give_up() >= self.window:
            raise ConfigError(
                f"a child that dies at once would be restarted for ever: the pauses of "
                f"{self.max_restarts} restarts take longer than the window of {self.window} s"
            )

    def delay(self, recent: int) -> float:
        """Return seconds to wait after `recent` restarts in the window, without jitter."""
        if recent == 0:
            return 0.0  # most failures are the only one for long
        # 2.0**1024 overflows; long before, the maximum is reached.
        return min(self.backoff * 2.0 ** min(recent - 1, 64), self.max_backoff)

    def _shortest_way_to_give_up(self) -> float:
        total = 0.0
        for recent in range(self.max_restarts if self.backoff else 0):
            total += self.delay(recent) * (1.0 + self.jitter)
            if total >= self.window:
                break
        return total


class Child:
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
        self._recent: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<Child {self.state.value} incarnation={self.incarnation}>"

    def on_ready(self) -> None:
        """The process said hello."""
        self._expect(ChildState.STARTING)
        self.state = ChildState.READY

    def on_started_again(self) -> None:
        """The delay of `StartAfter` is over and a new process runs."""
        self._expect(ChildState.BACKING_OFF)
        self.state = ChildState.STARTING
        self.incarnation += 1

    def on_renewed(self) -> None:
        """It works and was exchanged for a fresh one, which says nothing against it."""
        self._expect(ChildState.READY)
        self.state = ChildState.STARTING
        self.incarnation += 1

    def on_stop(self) -> None:
        """The owner wants it no more; legal in each state."""
        self.state = ChildState.STOPPED

    def on_exit(self, reason: Exit, now: float) -> list[StartAfter | GiveUp]:
        """Decide what follows an exit at time `now`, in seconds of the caller's clock."""
        self._expect(ChildState.STARTING, ChildState.READY)
        policy = self.policy
        if not _wants_restart(policy.restart, reason):
            self.state = ChildState.STOPPED
            return []
        while self._recent and self._recent[0] <= now - policy.window:
            self._recent.popleft()
        recent = len(self._recent)
        if recent >= policy.max_restarts:
            self.state = ChildState.GIVEN_UP
            return [GiveUp(recent)]
        self._recent.append(now)
        self.restarts += 1
        self.state = ChildState.BACKING_OFF
        stretch = 1.0 if self._random is None else 1.0 + policy.jitter * self._random()
        return [StartAfter(policy.delay(recent) * stretch)]

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
