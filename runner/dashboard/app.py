"""The page's routes, and who may use them.

Leaves out the sockets (`server.py`), the looking (`watch.py`) and what is told (`frames.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envbus.bus.errors import EnvbusError
from envbus.runner.dashboard.access import HEADERS, Access
from envbus.runner.dashboard.frames import details_of, find_process
from envbus.runner.dashboard.watch import Browser, Watch
from envbus.runner.monitoring.figures import EpisodeFigures, PartFigures, ProcessFigures
from envbus.runner.monitoring.observer import ObservedRun
from envbus.runner.monitoring.runs import (
    RunAddress,
    ask_episodes,
    ask_picture,
    find_runs,
    log_of,
    stacks_of,
)

__all__ = ["make_app"]

logger = logging.getLogger("envbus.runner.dashboard")

#: Seconds in which a browser has to take a frame; else it is let go.
_PATIENCE: Final = 30.0
_PAGE: Final = Path(__file__).with_name("page")
_FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uPlot.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
}
_LOCKED: Final = (
    "This page needs the address that `envbus dashboard` has printed, with its token.\n"
)


def make_app(access: Access, watch: Watch, *, tls: bool = False) -> ASGIApp:
    """Return the dashboard as an ASGI application.

    Args:
        access: Who may use it.
        watch: What it shows.
        tls: Whether the browser reaches it by TLS.
    """
    routes = _Routes(watch)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/static/{name}", routes.file),
            Route("/events", routes.events),
            Route("/details", routes.details),
            Route("/stacks", routes.stacks, methods=["POST"]),
            Route("/log", routes.log),
            Route("/picture", routes.picture),
            Route("/episodes", routes.episodes),
        ]
    )
    app.router.redirect_slashes = False  # by what `Host` says
    return _Guard(app, access, tls=tls)


class _Guard:
    """Refuses who may not, and puts what protects the page into each answer."""

    def __init__(self, app: ASGIApp, access: Access, *, tls: bool) -> None:
        self._app = app
        self._access = access
        self._tls = tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; there is nothing but HTTP."""
        if scope["type"] != "http":
            return
        request, access = Request(scope), self._access
        cookie = ""
        refusal: Response | None = None
        if not access.is_meant(request.headers.get("host", "")):
            text = "This dashboard is not reached by that host name; use its IP address.\n"
            refusal = PlainTextResponse(text, 421)
        elif scope["path"] == "/" and access.has_token(request.query_params.get("token", "")):
            cookie = access.set_cookie(tls=self._tls)
        elif not (
            access.has_ticket(request.headers.get("cookie", ""))
            and access.is_asked_here(request.headers.get("sec-fetch-site", ""))
        ):
            refusal = PlainTextResponse(_LOCKED, 403)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if cookie:
                    headers["Set-Cookie"] = cookie
            await send(message)

        try:
            await (refusal or self._app)(scope, receive, send_guarded)
        except Exception:  # of which the browser was told
            logger.exception("the dashboard cannot answer %s", scope["path"])


class _Routes:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def page(self, request: Request) -> Response:
        del request
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        del request
        joined = self._watch.join()
        if joined is None:
            raise HTTPException(503, "as many browsers look as may; close one of them")
        browser, first = joined
        return _EventStream(browser, first, lambda: self._watch.leave(browser))

    async def details(self, request: Request) -> Response:
        return _json(details_of(*self._found(request)))

    async def stacks(self, request: Request) -> Response:
        return await self._ask_of_process(request, stacks_of)

    async def log(self, request: Request) -> Response:
        return await self._ask_of_process(request, log_of)

    async def picture(self, request: Request) -> Response:
        run, part, _ = self._found(request)
        with contextlib.suppress(ValueError):
            env = int(request.query_params.get("env", ""))
            png = await run_in_threadpool(_ask_picture, run.figures.pid, part.name, env)
            if png:
                return Response(png, media_type="image/png")
        raise HTTPException(404, "there is no such env, or its observation is no picture")

    async def episodes(self, request: Request) -> Response:
        run, part, _ = self._found(request)
        found = await run_in_threadpool(_ask_episodes, run.figures.pid, part.name)
        return _json([list(msgspec.structs.astuple(episode)) for episode in found])

    async def _ask_of_process(self, request: Request, ask: Callable[[int], str]) -> Response:
        *_, process = self._found(request)
        if process is None or process.pid is None:
            raise HTTPException(404, "it is no process of its own here")
        try:
            return PlainTextResponse(await run_in_threadpool(ask, process.pid))
        except EnvbusError as exc:
            raise HTTPException(404, str(exc)) from exc

    def _found(self, request: Request) -> tuple[ObservedRun, PartFigures, ProcessFigures | None]:
        query = request.query_params
        with contextlib.suppress(ValueError):
            pid = int(query.get("run", ""))
            found = find_process(
                self._watch.runs, pid, query.get("part", ""), query.get("process", "")
            )
            if found is not None:
                return found
        raise HTTPException(404, "there is no such part or process any more")


class _EventStream(Response):
    """Server-sent events, as fast as the browser takes them."""

    def __init__(self, browser: Browser, first: bytes, leave: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._browser = browser
        self._first = first
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the browser has gone, takes nothing any more, or the dashboard ends."""
        del scope
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            event: bytes | None = self._first
            while event is not None and not gone.done():
                body = {"type": "http.response.body", "body": event, "more_body": True}
                await asyncio.wait_for(send(body), _PATIENCE)
                coming = asyncio.ensure_future(self._browser.next())
                await asyncio.wait({gone, coming}, return_when=asyncio.FIRST_COMPLETED)
                event = coming.result() if coming.done() else None
                coming.cancel()
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), _PATIENCE)
        except asyncio.TimeoutError:
            logger.info("a browser that takes nothing is let go")
        finally:
            self._leave()
            gone.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _ask_picture(pid: int, part: str, env: int) -> bytes:
    address = _address_of(pid)
    return b"" if address is None else ask_picture(address, part, env)


def _ask_episodes(pid: int, part: str) -> list[EpisodeFigures]:
    address = _address_of(pid)
    return [] if address is None else ask_episodes(address, part)


def _address_of(pid: int) -> RunAddress | None:
    return next((address for address in find_runs() if address.pid == pid), None)


def _file(name: str) -> Response:
    kind = _FILES.get(name)
    if kind is None:
        raise HTTPException(404, "there is no such file")
    return Response((_PAGE / name).read_bytes(), media_type=kind)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
