"""The second door of a bridge: for processes of the same user and host, without keys.

It is made when somebody needs it, and goes however its owner ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envbus.bus.folders import name_folder
from envbus.bus.nursery import Nursery

__all__ = ["PrivateDoor"]


class PrivateDoor:
    """A socket in a folder that only this user can enter.

    Args:
        bind: Binds an endpoint at the bridge's broker.
    """

    def __init__(self, bind: Callable[[str], object]) -> None:
        self._bind = bind
        self._endpoint = ""
        self._keeper: Nursery | None = None

    def open(self, preload: Sequence[str] = ()) -> str:
        """Return where it is; the first call makes it.

        Args:
            preload: What the fork server imports that removes the folder should this process be
                killed: that of the children who come through this door, so that one serves both.

        Raises:
            TransportError: It cannot be bound.
            StartError: There is no fork server.
        """
        if not self._endpoint:
            folder = name_folder()
            endpoint = f"ipc://{folder}/bridge"
            try:
                self._keeper = Nursery(preload, folder)
                self._bind(endpoint)
            except BaseException:
                self.close()
                raise
            self._endpoint = endpoint
        return self._endpoint

    def close(self) -> None:
        """Remove it; the broker is closed before. Idempotent."""
        if self._keeper is not None:
            self._keeper.close()
