"""Which pushes of weights a worker is sent: not more at a time than it looks at.

Pure. A worker that computes for long would else have a queue of weights that are old already.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pushes"]

#: Pushes under way to one worker. Few, as each may be large; more than one, as a worker must
#: know weights by the time that a request comes which was made after they were pushed.
MAX_UNDER_WAY: Final = 8


class Pushes:
    """What is under way to one life of one worker."""

    def __init__(self) -> None:
        self._under_way = 0
        #: Policies whose latest weights are still to be sent, in the order in which they changed.
        self._held: dict[str, None] = {}

    def offer(self, policy_id: str) -> bool:
        """Return whether new weights of a policy are to be sent now; else `taken` tells when."""
        if self._under_way >= MAX_UNDER_WAY:
            self._held[policy_id] = None
            return False
        self._under_way += 1
        return True

    def taken(self) -> list[str]:
        """The worker has looked at one; return the policies whose latest weights it is to get."""
        self._under_way -= 1
        if not self._held:
            return []
        policy_id = next(iter(self._held))
        del self._held[policy_id]
        self._under_way += 1
        return [policy_id]
