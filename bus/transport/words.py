"""Words in shared memory by which one process asks others to do the same thing once more.

What is asked, and what came of it, lies beside the words; all else goes by message. The asker
writes a number into a word of each doer, which writes it into another one when it is done. Both
look at their word for a while and then sleep on the socket between them, which is written to only
for those that sleep. Leaves out the socket (`local_link.py`, `local_router.py`).

Who is to sleep says so and looks once more; who has written a word looks whether the other sleeps.
Each of these is a write followed by a read of what the other one writes, which processors and
memory may exchange unless a fence stands between them; then both may miss the other: the one
sleeps, the other does not ring. Hence a fence on both sides. It is a lock that is taken and given
back: an atomic instruction, which on x86-64 is a full fence, in some 60 ns. Should it be lost for
once, sleeps have an end. On x86-64 writes become visible in their order, so that what lies beside
the words is there before them; elsewhere this is not used (`WORDS_EXIST`).

Source: Dekker's algorithm; "futexes are tricky" (Drepper) for the order of looks.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES_PER_DOER", "RING", "WORDS_EXIST", "Asker", "Doer"]

#: Whether writes of this processor are seen in their order, and a lock is a fence.
WORDS_EXIST: Final = platform.machine().lower() in ("x86_64", "amd64")
#: Packet that only wakes; a stray one is dropped.
RING: Final = b"!"

#: A cache line for what the asker writes, and one for what the doer writes, so that neither takes
#: the other's away by looking at its own: words of 8 bytes.
_PER_DOER: Final = 16
BYTES_PER_DOER: Final = _PER_DOER * 8
_ASKED, _ASKER_SLEEPS, _DONE, _DOER_SLEEPS = 0, 1, 8, 9
#: Looks between two at the clock; after each of these, others get the core.
_LOOKS: Final = 16
#: How often a doer does so between two looks at its socket, which take as long as thirty.
_ROUNDS: Final = 4
#: Doers up to which a loop is faster than NumPy.
_FEW: Final = 6


class _Fence:
    """Has all writes be seen before what is read after it. Call it; one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if not self._lock.acquire(False):  # a signal's handler raised between these two lines
            self._lock = threading.Lock()
            self._lock.acquire()
        self._lock.release()


class Asker:
    """The side that asks all doers at once. One thread.

    Args:
        memory: `BYTES_PER_DOER` for each doer.
        count: Doers.
    """

    def __init__(self, memory: memoryview, count: int) -> None:
        words: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64).reshape(count, _PER_DOER)
        self._words: Any = memory.cast("B").cast("q")
        self._count = count
        self._asked, self._done = words[:, _ASKED], words[:, _DONE]
        self._doer_sleeps = words[:, _DOER_SLEEPS]
        self._fence: Callable[[], None] = _Fence()
        #: Number of the present question.
        self.number = 0

    def begin(self) -> int:
        """Return the number of a new question; none is used twice."""
        self.number += 1
        return self.number

    def ask(self) -> Sequence[int]:
        """Ask it of all; return who sleeps, and has to be rung."""
        number, words = self.number, self._words
        if self._count <= _FEW:
            for at in range(_ASKED, self._count * _PER_DOER, _PER_DOER):
                words[at] = number
            self._fence()
            sleeping = []
            for at in range(_DOER_SLEEPS, self._count * _PER_DOER, _PER_DOER):
                if words[at]:
                    sleeping.append(at // _PER_DOER)
            return sleeping
        self._asked[...] = number
        self._fence()
        found: list[int] = self._doer_sleeps.nonzero()[0].tolist()
        return found

    def ask_one(self, index: int, number: int) -> bool:
        """Ask one doer only; return whether it sleeps, and has to be rung."""
        words, at = self._words, index * _PER_DOER
        words[at + _ASKED] = number
        self._fence()
        return bool(words[at + _DOER_SLEEPS])

    def answered(self, index: int, number: int) -> bool:
        """Return whether a doer has done what it was asked under that number."""
        return bool(self._words[index * _PER_DOER + _DONE] >= 2 * number)

    def undone(self, begin: int = 0) -> int:
        """Return who has not done what was asked last, or has more to tell: the first; -1: nobody.

        Args:
            begin: Those before it are known to be done.
        """
        wanted = 2 * self.number
        if self._count <= _FEW:
            words = self._words
            for index in range(begin, self._count):
                if words[index * _PER_DOER + _DONE] != wanted:
                    return index
            return -1
        behind = self._done != wanted
        first = int(behind.argmax())
        return first if behind[first] else -1

    def spin(self, first: int, give_up: float) -> int:
        """Look again and again until nobody is `undone`, or has more to tell; return as `undone`.

        Args:
            first: Who was `undone` at the last look.
            give_up: When to stop, by `time.perf_counter`.
        """
        clock, wanted, words = time.perf_counter, 2 * self.number, self._words
        while first >= 0:
            at = first * _PER_DOER + _DONE
            for _ in range(_LOOKS):
                if words[at] == wanted:
                    first = self.undone(first + 1)
                    break
            else:
                if words[at] > wanted or clock() > give_up:
                    break
                os.sched_yield()
        return first

    def spin_for_one(self, asked: Mapping[int, int], give_up: float) -> dict[int, bool]:
        """Look until anybody has answered; return all who have, and whether there is more to tell.

        Args:
            asked: By index, the number of the question.
            give_up: When to stop, by `time.perf_counter`.
        """
        clock, words = time.perf_counter, self._words
        while True:
            for index, number in asked.items():
                if words[index * _PER_DOER + _DONE] >= 2 * number:
                    return {
                        index: words[index * _PER_DOER + _DONE] > 2 * number
                        for index, number in asked.items()
                        if words[index * _PER_DOER + _DONE] >= 2 * number
                    }
            if clock() > give_up:
                return {}
            os.sched_yield()

    def all_undone(self) -> list[int]:
        """Return who has not done what was asked last, or has more to tell."""
        found: list[int] = (self._done != 2 * self.number).nonzero()[0].tolist()
        return found

    def has_more(self, index: int, number: int) -> bool:
        """Return whether a doer has done what it was asked, and has more to tell."""
        return bool(self._words[index * _PER_DOER + _DONE] == 2 * number + 1)

    def fall_asleep(self, index: int) -> None:
        """Say that this side waits for a doer's ring. It must look once more before it sleeps."""
        self._words[index * _PER_DOER + _ASKER_SLEEPS] = 1
        self._fence()

    def wake_up(self, index: int) -> None:
        """Say that it does not any more."""
        self._words[index * _PER_DOER + _ASKER_SLEEPS] = 0


class Doer:
    """The side that does what it is asked; of no use until `attach`. One thread."""

    def __init__(self) -> None:
        self._words: Any = [0] * _PER_DOER
        #: What was asked last and is done, or is being done.
        self._seen = 0
        self._fence: Callable[[], None] = _Fence()

    def attach(self, memory: memoryview) -> None:
        """Be asked by these `BYTES_PER_DOER` from now on; what they ask now is none of ours."""
        self._words = memory.cast("B").cast("q")
        self._seen = self._words[_ASKED]
        self._words[_DOER_SLEEPS] = 0

    def detach(self) -> None:
        """Let go of the memory. Idempotent."""
        words, self._words = self._words, [0] * _PER_DOER
        self._seen = 0
        if isinstance(words, memoryview):
            words.release()

    def is_asked(self) -> bool:
        """Return whether something is asked that was not taken."""
        return bool(self._words[_ASKED] != self._seen)

    def look(self) -> bool:
        """Look for some microseconds; return whether something is asked that was not taken."""
        words, seen = self._words, self._seen
        if type(words) is list:  # nobody can ask
            return False
        if words[_ASKED] != seen:
            return True
        for _ in range(_ROUNDS):
            os.sched_yield()  # whoever it has answered may wait for this core
            for _ in range(_LOOKS):
                if words[_ASKED] != seen:
                    return True
        return False

    def take(self) -> int:
        """Take what is asked; return its number."""
        self._seen = number = int(self._words[_ASKED])
        return number

    def answer(self, number: int, *, has_more: bool) -> bool:
        """Say that it is done; return whether the asker sleeps, and has to be rung.

        Args:
            number: What was taken.
            has_more: Whether there is more to tell, which the asker has to ask for by message.
        """
        words = self._words
        words[_DONE] = 2 * number + has_more
        self._fence()
        return bool(words[_ASKER_SLEEPS])

    def fall_asleep(self) -> bool:
        """Say that this side has to be rung from now on; False if something is asked already."""
        words = self._words
        words[_DOER_SLEEPS] = 1
        self._fence()
        return bool(words[_ASKED] == self._seen)

    def wake_up(self) -> None:
        """Say that it need not be rung."""
        self._words[_DOER_SLEEPS] = 0
