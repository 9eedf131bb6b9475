"""What is broken, when, and for how long: a pure function of the seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

__all__ = ["COMMANDS", "HARMLESS", "WHOLE_ACTOR", "FaultKind", "Injection", "make_schedule"]

#: Shortest and longest pause between two injections, in seconds.
PAUSE = (0.2, 0.8)
#: Seconds at the end of a run without injections, so that all can come back.
QUIET_END = 3.0
#: How often in vain a constructor or reset is tried at most; far below what a pool gives up at.
MOST_FAILURES = 2


class FaultKind(enum.Enum):
    """What is done to an env, to its actor's process, to the driver, or to the bus."""

    #: `kill -9` of the actor's process.
    KILL = "kill -9 of an actor"
    #: The same while the driver does something else: answers and end are news at one time.
    KILL_UNSEEN = "kill -9, driver away"
    #: SIGSTOP of the actor's process: it hangs until its deadline.
    STOP = "SIGSTOP of an actor"
    #: SIGSTOP, and SIGCONT well before the deadline.
    PAUSE = "short SIGSTOP of an actor"
    RAISE_STEP = "exception in step"
    RAISE_RESET = "exceptions in reset"
    #: An exception in step, and then in the constructor that is to make the env anew.
    RAISE_INIT = "exceptions in constructor"
    #: A step past its deadline.
    SLOW = "step past its deadline"
    #: A step just below its deadline.
    NEARLY_SLOW = "step below its deadline"
    #: Memory, descriptors and a child process that are never given back.
    LEAK = "leak in an env"
    #: `os._exit` or a deadly signal in a step.
    EXIT = "os._exit in step"
    #: Strangers at the bus' socket.
    GARBAGE = "garbage on the socket"
    #: SIGSTOP of the driver, broker included, and SIGCONT seconds later.
    FREEZE = "driver stopped"
    #: The driver does something else for seconds while steps are in flight.
    AWAY = "driver away"


#: What an env is told to do by the action that it gets. The numbers are what actions carry.
COMMANDS = {
    FaultKind.RAISE_STEP: 1,
    FaultKind.RAISE_RESET: 2,
    FaultKind.RAISE_INIT: 3,
    FaultKind.SLOW: 4,
    FaultKind.NEARLY_SLOW: 5,
    FaultKind.LEAK: 6,
    FaultKind.EXIT: 7,
}
#: After these no episode may end.
HARMLESS = frozenset(
    {
        FaultKind.PAUSE,
        FaultKind.NEARLY_SLOW,
        FaultKind.LEAK,
        FaultKind.GARBAGE,
        FaultKind.FREEZE,
        FaultKind.AWAY,
    }
)
#: These reach the other envs of the same actor, too.
WHOLE_ACTOR = frozenset(
    {
        FaultKind.KILL,
        FaultKind.KILL_UNSEEN,
        FaultKind.STOP,
        FaultKind.PAUSE,
        FaultKind.SLOW,
        FaultKind.NEARLY_SLOW,
        FaultKind.EXIT,
    }
)


@dataclass(frozen=True)
class Injection:
    """One thing that is broken."""

    #: Seconds since the start.
    at: float
    kind: FaultKind
    #: The env that it is done to, or whose actor; the next one that works, if this one does not.
    env_id: int
    #: Seconds that it lasts, where it lasts; how often it fails; which variant of it.
    amount: float


def make_schedule(
    seed: int, seconds: float, num_envs: int, *, step_timeout: float
) -> tuple[Injection, ...]:
    """Return what is broken in a run, in order of time.

    Each kind comes once in each round of all kinds, in an order that differs by round, so that
    also a short run sees each.

    Args:
        seed: Decides everything.
        seconds: Length of the run.
        num_envs: Env ids are from 0 to this.
        step_timeout: Deadline of a step, in seconds.
    """
    draw = random.Random(f"chaos {seed} {num_envs}")  # noqa: S311 - not for secrets
    schedule: list[Injection] = []
    at = 0.0
    while True:
        kinds = list(FaultKind)
        draw.shuffle(kinds)
        for kind in kinds:
            at += draw.uniform(*PAUSE)
            if at > seconds - QUIET_END:
                return tuple(schedule)
            env_id = draw.randrange(num_envs)
            schedule.append(Injection(at, kind, env_id, _amount(kind, draw, step_timeout)))


def _amount(kind: FaultKind, draw: random.Random, step_timeout: float) -> float:
    match kind:
        case FaultKind.PAUSE | FaultKind.NEARLY_SLOW:
            return draw.uniform(0.2, 0.6) * step_timeout
        case FaultKind.SLOW:
            return draw.uniform(1.5, 3.0) * step_timeout
        case FaultKind.RAISE_RESET | FaultKind.RAISE_INIT:
            return draw.randint(1, MOST_FAILURES)
        case FaultKind.LEAK:
            return draw.randint(5, 40)  # megabytes
        case FaultKind.FREEZE | FaultKind.AWAY:
            return draw.uniform(0.5, 2.5) * step_timeout
        case _:
            return draw.randrange(100)
