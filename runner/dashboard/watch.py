"""One look a second for all browsers, and only while there are any.

Each browser has room for one frame: one that is slow misses frames, and nobody waits for it. Leaves
out what is in a frame (`frames.py`) and how it gets to the browser (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from envbus.runner.dashboard.frames import Frames
from envbus.runner.monitoring.observer import ObservedRun

__all__ = ["MOST_BROWSERS", "Browser", "Watch"]

logger = logging.getLogger("envbus.runner.dashboard")

MOST_BROWSERS: Final = 16
#: Seconds from one look to the next; and how old the last one may be for who comes meanwhile.
_INTERVAL: Final = 1.0
_FRESH: Final = 2.0


class Browser:
    """Whoever looks: the newest event that it was not sent yet."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._came = asyncio.Event()
        self._closed = False

    def put(self, event: bytes) -> None:
        """Replace what it was not sent yet."""
        self._newest = event
        self._came.set()

    def close(self) -> None:
        """There will be no more."""
        self._closed = True
        self._came.set()

    async def next(self) -> bytes | None:
        """Wait for an event, and return it; None: there will be no more."""
        await self._came.wait()
        self._came.clear()
        event, self._newest = self._newest, None
        return None if self._closed else event


class Watch:
    """Looks, and tells all browsers. Used in one event loop.

    Args:
        look: Returns the runs; called in a thread, never twice at one time.
        interval: Seconds from one look to the next.

    Attributes:
        runs: What the last look has brought.
    """

    def __init__(
        self, look: Callable[[], Sequence[ObservedRun]], *, interval: float = _INTERVAL
    ) -> None:
        self.runs: Sequence[ObservedRun] = ()
        self._look = look
        self._interval = interval
        self._frames = Frames()
        self._browsers: set[Browser] = set()
        self._task: asyncio.Task[None] | None = None
        #: The last frame, and when it was made.
        self._last: tuple[float, bytes] | None = None
        self._closed = False
        #: Whether it could not look; that is told once.
        self._fails = False

    def join(self) -> tuple[Browser, bytes] | None:
        """Return a new browser and its first event, what plots show; None: there is no room."""
        if self._closed or len(self._browsers) >= MOST_BROWSERS:
            return None
        browser = Browser()
        self._browsers.add(browser)
        if self._last is not None and time.monotonic() - self._last[0] < _FRESH:
            browser.put(self._last[1])
        if not self.is_looking:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return browser, _event("points", list(self._frames.points))

    @property
    def is_looking(self) -> bool:
        """Whether it goes on looking, for somebody or to its end."""
        return self._task is not None and not self._task.done()

    def leave(self, browser: Browser) -> None:
        """Tell it no more. Idempotent."""
        self._browsers.discard(browser)

    def close(self) -> None:
        """Tell all that there will be no more."""
        self._closed = True
        for browser in self._browsers:
            browser.close()

    async def _run(self) -> None:
        while self._browsers and not self._closed:
            begin = time.monotonic()
            try:
                self.runs = await asyncio.to_thread(self._look)
                event = _event("frame", self._frames.make(self.runs, time.time()))
            except Exception:
                if not self._fails:
                    logger.exception("the runs of this host cannot be looked at; it is tried again")
                self._fails = True
            else:
                self._fails = False
                self._last = time.monotonic(), event
                for browser in self._browsers:
                    browser.put(event)
            took = time.monotonic() - begin
            await asyncio.sleep(max(self._interval - took, took))  # half of a core at most


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
