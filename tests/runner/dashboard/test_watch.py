"""One look for all browsers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from envbus.runner.dashboard.watch import MOST_BROWSERS, Browser, Watch
from envbus.runner.monitoring.observer import ObservedRun
from tests.runner.dashboard.looks import observed, part_of
from tests.waiting import PATIENCE

QUICK = 0.01


class Looks:
    """Counts how often it is looked; the second time it cannot be."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self) -> Sequence[ObservedRun]:
        assert self._lock.acquire(blocking=False), "two look at one time"
        try:
            self.count += 1
            if self.count == 2:
                raise OSError("no descriptor is left")
            return [observed(part_of(1))]
        finally:
            self._lock.release()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, for so long at most."""

    async def limited() -> None:
        await asyncio.wait_for(work, PATIENCE)

    asyncio.run(limited())


def test_all_browsers_share_one_look_and_nobody_looks_without_any() -> None:
    async def work() -> None:
        looks = Looks()
        watch = Watch(looks, interval=QUICK)
        assert looks.count == 0
        joined = [watch.join() for _ in range(3)]
        browsers = [found[0] for found in joined if found is not None]
        for _ in range(3):
            events = [await browser.next() for browser in browsers]
            assert events[0] is not None
            assert events[0].startswith(b"event: frame\ndata: {")
            assert len(set(events)) == 1
        for browser in browsers:
            watch.leave(browser)
        while watch.is_looking:
            await asyncio.sleep(0)
        before = looks.count
        assert watch.runs[0].figures.pid == 7
        again = watch.join()
        assert again is not None
        event, first = again
        points = json.loads(first.partition(b"data: ")[2])
        assert len(points) == before - 1  # all looks but the one that has failed
        await event.next()

    run(work())


def test_who_comes_gets_the_last_frame_at_once() -> None:
    async def work() -> None:
        watch = Watch(Looks(), interval=60.0)
        first = watch.join()
        assert first is not None
        event = await first[0].next()
        second = watch.join()
        assert second is not None
        assert await second[0].next() == event

    run(work())


def test_a_slow_browser_misses_frames() -> None:
    async def work() -> None:
        browser = Browser()
        for number in range(100):
            browser.put(b"%d" % number)
        assert await browser.next() == b"99"
        browser.put(b"100")
        assert await browser.next() == b"100"
        browser.close()
        assert await browser.next() is None

    run(work())


def test_no_more_browsers_look_than_may_and_none_at_the_end() -> None:
    async def work() -> None:
        watch = Watch(Looks(), interval=QUICK)
        joined = [watch.join() for _ in range(MOST_BROWSERS)]
        assert all(joined)
        assert watch.join() is None
        assert joined[0] is not None
        watch.leave(joined[0][0])
        taken = watch.join()
        assert taken is not None
        watch.close()
        assert await taken[0].next() is None
        assert watch.join() is None

    run(work())
