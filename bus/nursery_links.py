"""What connects a nursery with its server, and what it hands on to children.

Leaves out what is said (`channel.py`), and who says it (`nursery.py`, `forkserver.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence

from envbus.bus.channel import Channel, Message

__all__ = ["NurseryLinks", "standard_streams"]


class NurseryLinks:
    """A nursery's two sockets to its server.

    Commands and their answers have one, news has another: an end that is reported while an
    answer is waited for stays visible on the descriptor of the news, which a caller polls.
    """

    def __init__(self) -> None:
        self.control, self._far_control = _channel_pair()
        self.news, self._far_news = _channel_pair()
        #: Stands for the news socket, whichever that is: a caller's epoll would forget a socket
        #: that is replaced, also by one of the same number. None: there is no epoll here.
        self._watched = select.epoll() if hasattr(select, "epoll") else None
        self._watch()

    def fileno(self) -> int:
        """Return a descriptor, always the same, that is readable when there is news."""
        return self.news.fileno() if self._watched is None else self._watched.fileno()

    def renew(self, news: Sequence[Message]) -> None:
        """Replace both sockets.

        Args:
            news: What is to be read from the new socket first, as if the server had sent it.
        """
        self.control.close()
        self.drop_far_ends()
        self.control, self._far_control = _channel_pair()
        near, self._far_news = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if self._watched is not None:
            self._watched.unregister(self.news.fileno())
        self.news.replace(near)
        self._watch()
        Channel(self._far_news).queue(*news)

    def far_ends(self) -> tuple[int, int]:
        """Return the descriptors that are the server's to be."""
        return self._far_control.fileno(), self._far_news.fileno()

    def drop_far_ends(self) -> None:
        """Close this process' copies of the server's ends."""
        self._far_control.close()
        self._far_news.close()

    def close(self, *, hang_up: bool) -> None:
        """Close both sockets; `hang_up` as in `Channel.close`."""
        self.control.close(hang_up=hang_up)
        self.news.close(hang_up=hang_up)
        if self._watched is not None:
            self._watched.close()
        self.drop_far_ends()

    def _watch(self) -> None:
        if self._watched is not None:
            self._watched.register(self.news.fileno(), select.EPOLLIN)


def _channel_pair() -> tuple[Channel, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(near), far


@contextlib.contextmanager
def standard_streams() -> Iterator[list[int]]:
    """Yield what becomes of a child's stdout and stderr: the driver's, or the null device."""
    with open(os.devnull, "wb", buffering=0) as null:
        streams = []
        for fd in (1, 2):
            try:
                os.fstat(fd)
                streams.append(fd)
            except OSError:  # closed, as in a daemon
                streams.append(null.fileno())
        yield streams
