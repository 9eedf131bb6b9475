"""Counts lost wake-ups of words in shared memory: `make soak`, or `python -m tests.soak.words`.

Two processes hand a question to and fro; each looks for its word a random number of times, says
that it sleeps, looks once more, and sleeps on the socket. A wake-up is lost if the word stands
there while its reader sleeps and no ring has come. Exit code 1 if any was lost.

`--without-fences` leaves out the fences, so that one sees what they are for.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass

from envbus.bus.transport.local_link import LocalLinkEnd
from envbus.bus.transport.words import BYTES_PER_DOER, RING, WORDS_EXIST, Asker, Doer

__all__ = ["Counts", "hand_over"]

#: Most looks before a side says that it sleeps.
LOOKS = 60
#: Who sleeps for that long looks whether its word is there all the same, in milliseconds. Long, as
#: on a busy machine the other side may get no core for a while between its word and its ring.
LONGEST_SLEEP = 10_000
#: Between two lines of progress, in seconds.
BETWEEN_LINES = 2.0


@dataclass(slots=True)
class Counts:
    """What the asker's side saw."""

    hand_overs: int = 0
    slept: int = 0
    rung: int = 0
    #: Wake-ups lost by the asker; the doer's are seen as an answer that comes too late.
    lost: int = 0


def no_fence() -> None:
    """Stand in for a fence where there is to be none."""


def serve(memory: mmap.mmap, end: LocalLinkEnd, seed: int, *, fences: bool) -> int:
    """Answer what is asked until the other side hangs up; return how many wake-ups were lost."""
    doer, rng, lost = Doer(), random.Random(seed), 0
    if not fences:
        doer._fence = no_fence
    doer.attach(memoryview(memory))
    poller = select.poll()
    poller.register(end.fileno(), select.POLLIN)
    end.write(RING)  # attached
    while True:
        for _ in range(rng.randrange(LOOKS)):
            if doer.is_asked():
                break
        if doer.fall_asleep():
            if poller.poll(LONGEST_SLEEP):
                if not end.take_ring():
                    return lost
            elif doer.is_asked():
                lost += 1
        doer.wake_up()
        if doer.is_asked() and doer.answer(doer.take(), has_more=False):
            end.ring()


def hand_over(times: int, *, seed: int = 1, fences: bool = True, progress: bool = False) -> Counts:
    """Hand a question to another process and its answer back, that often.

    Args:
        times: Hand-overs.
        seed: Of the random numbers of looks.
        fences: Whether fences stand where they belong.
        progress: Print a line every other second.

    Returns:
        Counts of both sides together.
    """
    memory = mmap.mmap(-1, BYTES_PER_DOER)
    ours, theirs = LocalLinkEnd.pair()
    fd = os.dup(theirs.fileno())
    child = os.fork()
    if not child:
        lost = 255
        try:  # local links close themselves in forked copies
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            lost = serve(memory, LocalLinkEnd.from_fd(fd), seed, fences=fences)
        finally:
            os._exit(min(lost, 255))
    theirs.close()
    os.close(fd)
    poller = select.poll()
    poller.register(ours.fileno(), select.POLLIN)
    counts, asker, rng = Counts(), Asker(memoryview(memory), 1), random.Random(seed + 1)
    if not fences:
        asker._fence = no_fence
    line = time.monotonic() + BETWEEN_LINES
    try:
        poller.poll()
        ours.take_ring()
        for counts.hand_overs in range(1, times + 1):
            number = asker.begin()
            for _ in asker.ask():
                counts.rung += 1
                ours.ring()
            for _ in range(rng.randrange(LOOKS)):
                if asker.undone() < 0:
                    break
            while asker.undone() == 0:
                asker.fall_asleep(0)
                if not asker.answered(0, number):
                    counts.slept += 1
                    if poller.poll(LONGEST_SLEEP):
                        ours.take_ring()
                    elif asker.answered(0, number):
                        counts.lost += 1
                asker.wake_up(0)
            if progress and not counts.hand_overs % 1000 and time.monotonic() > line:
                print(f"{counts.hand_overs:,} of {times:,}: {counts}", file=sys.stderr)
                line += BETWEEN_LINES
    finally:
        ours.close()
        counts.lost += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return counts


def main(argv: list[str] | None = None) -> int:
    """Count, print what was counted, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.words",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hand-overs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-fences", action="store_true")
    options = parser.parse_args(argv)
    if not WORDS_EXIST:
        print("words are for x86-64 only: nothing to count", file=sys.stderr)
        return 1
    counts = hand_over(
        options.hand_overs, seed=options.seed, fences=not options.without_fences, progress=True
    )
    print(counts)
    return bool(counts.lost)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
