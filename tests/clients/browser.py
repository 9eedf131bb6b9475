"""A headless Chromium that is asked and told by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.waiting import PATIENCE, pass_time

__all__ = ["PROGRAMS", "Page", "find_browser"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS: dict[str, Any] = {"max_size": None, "proxy": None, "open_timeout": PATIENCE}


def find_browser() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One page, in a browser of its own."""

    def __init__(self, browser: str, url: str, folder: Path) -> None:
        # Root in a container has no user namespaces to make a sandbox of.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._log = folder / "browser.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    *(browser, *options, "--no-first-run", "--disable-background-networking"),
                    *(f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0", url),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._number = 0
        #: What the page has told unasked.
        self._events: list[dict[str, Any]] = []
        self._socket: ClientConnection | None = None
        try:
            self._context = connect(self._find_page(), **_OPTIONS)
            self._socket = self._context.__enter__()
        except BaseException:
            self.close()
            raise

    def evaluate(self, script: str) -> Any:
        """Return what a script in the page evaluates to."""
        result = self._command("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def holds(self, script: str) -> bool:
        """Whether a script in the page evaluates to something true; it does not while it loads."""
        answer = self._ask("Runtime.evaluate", expression=f"Boolean({script})", returnByValue=True)
        return answer.get("result", {}).get("result", {}).get("value") is True

    def text(self) -> str:
        """Return what the page shows."""
        return str(self.evaluate("document.body?.innerText ?? ''"))

    def errors(self) -> list[str]:
        """Return what went wrong in the page since it was opened: exceptions, and what it logs."""
        for domain in ("Runtime", "Log"):  # which tell what was before
            self._command(f"{domain}.enable")
        self.evaluate("0")  # behind all that
        return [
            json.dumps(event["params"])
            for event in self._events
            if event["method"] == "Runtime.exceptionThrown"
            or event["params"].get("type") == "error"
            or event["params"].get("entry", {}).get("level") == "error"
        ]

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of this size."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def picture(self) -> bytes:
        """Return a PNG of what the window shows."""
        return base64.b64decode(self._command("Page.captureScreenshot", format="png")["data"])

    def press(self, key: str) -> None:
        """Hold a key down."""
        self._command("Input.dispatchKeyEvent", type="keyDown", key=key)

    def release(self, key: str) -> None:
        """Let a key go."""
        self._command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self) -> None:
        if self._socket is not None:
            self._context.__exit__(None, None, None)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find_page(self) -> str:
        """Return where the page's DevTools are."""
        deadline = time.monotonic() + PATIENCE
        while True:
            text = self._log.read_text(errors="replace")
            assert time.monotonic() < deadline, text
            assert self._process.poll() is None, text
            found = re.search(r"DevTools listening on (ws://[\d.:]+)/", text)
            if found is None:
                pass_time(0.02)
                continue
            with connect(self._browser_address(text), **_OPTIONS) as socket:
                socket.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(socket.recv(PATIENCE))["result"]["targetInfos"]
            pages = [target["targetId"] for target in targets if target["type"] == "page"]
            if pages:
                return f"{found[1]}/devtools/page/{pages[0]}"

    def _browser_address(self, text: str) -> str:
        found = re.search(r"DevTools listening on (\S+)", text)
        assert found is not None
        return found[1]

    def _command(self, method: str, **parameters: Any) -> Any:
        answer = self._ask(method, **parameters)
        assert "result" in answer, answer
        return answer["result"]

    def _ask(self, method: str, **parameters: Any) -> Any:
        assert self._socket is not None
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(command))
        while True:
            answer = json.loads(self._socket.recv(PATIENCE))
            if answer.get("id") == self._number:
                return answer
            if "method" in answer:
                self._events.append(answer)
