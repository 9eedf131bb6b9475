"""A game in a web page whose agent is driven by the policy, in a real browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.clients.browser import PROGRAMS, Page, find_browser
from tests.clients.serving import CLIENTS, PATIENCE, Serving

BROWSER = find_browser()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"no browser ({', '.join(PROGRAMS)}): make system-packages, or apt install chromium",
    ),
]

#: Whether something was drawn: not all pixels are alike.
DRAWN = """
  (() => { const stage = document.getElementById("stage")
    const pixels = stage.getContext("2d").getImageData(0, 0, stage.width, stage.height).data
    return new Set(new Uint32Array(pixels.buffer)).size > 2 })()
"""


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    """The folder of the client, as any web server would serve it."""
    handler = partial(_Files, directory=str(CLIENTS / "javascript"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def serve_until(serving: Serving, condition: Callable[[], object], page: Page) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, page.text()
        serving.serve()


def test_a_game_in_a_web_page_is_played_by_the_policy_and_by_hand(web: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    with Serving(token="secret") as serving:
        url = f"{web}/cartpole.html?bridge={serving.websocket}&token=secret&fast"
        with Page(BROWSER, url, tmp_path) as page:
            serve_until(serving, lambda: len(serving.ended) >= 2, page)
            assert min(serving.rewards[episode] for episode in serving.ended) > 100
            assert page.evaluate(DRAWN)
            assert f"connected to {serving.websocket}" in page.text()
            assert int(page.evaluate("document.getElementById('best').value")) > 100
            page.press("ArrowLeft")
            serve_until(serving, lambda: len(serving.off_policy) >= 2, page)
            page.release("ArrowLeft")
            by_hand = [action for actions in serving.off_policy.values() for action in actions]
            assert {"agent0": 0} in by_hand


def test_a_page_with_a_wrong_token_says_so(web: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    with Serving(token="secret") as serving:
        url = f"{web}/cartpole.html?bridge={serving.websocket}&token=guess"
        with Page(BROWSER, url, tmp_path) as page:
            serve_until(serving, lambda: "the token is wrong" in page.text(), page)
