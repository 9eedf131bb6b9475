"""Figures for Prometheus, over HTTP: `/metrics`, and `/healthz` and `/readyz` beside it.

Needs the extra `monitoring`. Leaves out where the figures come from (`observer.py`).
"""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from envbus.bus.brief import brief
from envbus.bus.errors import ConfigError
from envbus.bus.forking import disown_in_forks
from envbus.bus.gateway.config import split_address
from envbus.runner.batches.latency import LatencyHistogram
from envbus.runner.extras import needed_for
from envbus.runner.monitoring.listener import read_until
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.monitoring.registry import VARIABLE

with needed_for("MetricsServer", "monitoring"):
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )

__all__ = ["MetricsServer", "metrics_of"]

logger = logging.getLogger("envbus.runner.monitoring")

#: Seconds that a client has for its request, and requests at one time; more wait.
_REQUEST_TIMEOUT: Final = 5.0
_MOST_REQUESTS: Final = 4
#: Bytes of a request, which ends with an empty line.
_LONGEST_REQUEST: Final = 16384
_END: Final = b"\r\n\r\n"
#: Seconds until whoever waits for room sees that the server ends.
_LOOK: Final = 0.1
#: Upper ends of the buckets of durations, in seconds.
_BUCKETS: Final = tuple(
    factor * 10.0**power for power in range(-5, 2) for factor in (1.0, 2.0, 5.0)
)
_STATES: Final = ("starting", "building", "built", "ready", "leaving", "down", "lost")
#: Header of what is no page of figures.
_PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")
#: Milliseconds, as names of levels say.
_MS: Final = re.compile(r"_ms$")


def metrics_of(runs: Iterable[ObservedRun]) -> list[Metric]:
    """Return figures as Prometheus has them: names begin with `envbus_` and end with a unit.

    Each has the labels `pid` and `part`, and `of` where a count is one of several by a name: a
    fault's cause, a policy's id.
    """
    families: dict[str, Any] = {}

    def family(make: Callable[..., Any], name: str, text: str, *labels: str) -> Any:
        if name not in families:
            families[name] = make(name, text, labels=("pid", "part", *labels))
        return families[name]

    for run in runs:
        pid = str(run.figures.pid)
        for part in run.figures.parts:
            own = [pid, part.name]
            for make, numbers in (
                (CounterMetricFamily, part.counts),
                (GaugeMetricFamily, part.levels),
            ):
                for key, number in numbers.items():
                    name, of = _name_of(key)
                    seconds = bool(_MS.search(name))
                    name = _MS.sub("_seconds", name)
                    value = number / 1e3 if seconds else number
                    family(make, name, f"{key} of a part of a run", "of").add_metric(
                        [*own, of], value
                    )
            for of, counts in part.latencies.items():
                latency = LatencyHistogram()
                latency.add_counts(counts)
                buckets, total = latency.cumulative(_BUCKETS)
                family(
                    HistogramMetricFamily, "envbus_latency_seconds", "Time until an answer", "of"
                ).add_metric([*own, of], buckets, total)
            for process in part.processes:
                labels = [*own, process.name]
                for state in _STATES:
                    family(
                        GaugeMetricFamily,
                        "envbus_process_state",
                        "1 for the state that a process is in",
                        "process",
                        "state",
                    ).add_metric([*labels, state], float(process.state == state))
                family(
                    CounterMetricFamily,
                    "envbus_process_env_steps",
                    "Env steps that a process was asked for",
                    "process",
                ).add_metric(labels, process.env_steps)
                family(
                    GaugeMetricFamily,
                    "envbus_process_incarnation",
                    "Which life of a process this is",
                    "process",
                ).add_metric(labels, process.incarnation)
                family(
                    GaugeMetricFamily,
                    "envbus_process_stalled_seconds",
                    "Seconds without a step while one is awaited",
                    "process",
                ).add_metric(labels, run.stalled.get((part.name, process.name), 0.0))
                if process.pid is not None and (usage := run.usage.get(process.pid)):
                    family(
                        GaugeMetricFamily,
                        "envbus_process_cpu_cores",
                        "Cores that a process uses",
                        "process",
                    ).add_metric(labels, usage.cpu)
                    family(
                        GaugeMetricFamily,
                        "envbus_process_memory_bytes",
                        "Memory of a process (PSS)",
                        "process",
                    ).add_metric(labels, usage.memory)
    return list(families.values())


class MetricsServer:
    """Serves the figures of this process, and of those that it has started, until `close`.

        with MetricsServer("127.0.0.1:9090"):
            train()

    `/healthz` answers while this process lives; `/readyz` says 503 while nothing has started in
    it yet, or a process of it is not ready. All is read when it is asked for, by threads of the
    server.

    Args:
        address: "HOST:PORT"; port 0 is any that is free.

    Attributes:
        address: Host and port at which it serves.

    Raises:
        ConfigError: The address is none, or is taken.
    """

    def __init__(self, address: str) -> None:
        try:
            host, port = split_address(address)
        except ConfigError as exc:
            raise ConfigError(f"metrics are served at HOST:PORT, 127.0.0.1:9090: {exc}") from exc
        registry = CollectorRegistry()
        self._observer = Observer(os.getpid())
        self._looking = threading.Lock()
        registry.register(self)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = _Server((host, port), _Handler)
        # Of a host's name that is none Python says TypeError or UnicodeError.
        except (OSError, TypeError, UnicodeError) as exc:
            raise ConfigError(
                f"metrics cannot be served at {brief(address)}: "
                f"{getattr(exc, 'strerror', None) or exc}; name another port, or 0 for any that "
                "is free"
            ) from exc
        self._server.set_app(self._serve)
        host, port = self._server.server_name, self._server.server_port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._is_copy = False
        disown_in_forks(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="envbus metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Serve no more. Idempotent."""
        if not self._is_copy:
            self._server.shutdown()
        self._server.server_close()

    def disown(self) -> None:
        """In a forked copy, which has no such thread: let go of the port."""
        self._is_copy = True
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def collect(self) -> list[Metric]:
        """Return all metrics; called by Prometheus' registry."""
        return metrics_of(self._look())

    def describe(self) -> list[Metric]:
        """Return nothing: which metrics there are is known when they are read."""
        return []

    def _look(self) -> list[ObservedRun]:
        with self._looking:
            return self._observer.look()

    def _serve(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        try:
            return self._answer(environ, start_response)
        except Exception:  # which the server would write to stderr, whatever the log looks like
            logger.exception("the figures of this process cannot be told")
        start_response("500 Internal Server Error", [_PLAIN])
        return [b"the figures cannot be told; the log of this process says why\n"]

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        status, text = "404 Not Found", "there are /metrics, /healthz and /readyz\n"
        if path == "/healthz":
            status, text = "200 OK", "ok\n"
        elif path == "/readyz":
            missing = list(_unready(self._look()))
            status = "503 Service Unavailable" if missing else "200 OK"
            text = "\n".join(missing or ["ready"]) + "\n"
        start_response(status, [_PLAIN])
        return [text.encode()]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request, of which there are few at one time."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._is_ending = False
        super().__init__(address, handler)

    def shutdown(self) -> None:
        """End the loop, also while it waits for room."""
        self._is_ending = True
        super().shutdown()

    def server_bind(self) -> None:
        """Bind, without asking a name server for this host's name."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; whoever comes while there are many waits."""
        while not self._room.acquire(timeout=_LOOK):
            if self._is_ending:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say it where it does not disturb: a client has left, or took too long."""
        del request, client_address
        logger.debug("a request for metrics failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    #: Of each wait for the client.
    timeout = _REQUEST_TIMEOUT

    def setup(self) -> None:
        """Read the request at once: byte by byte it would take a place for hours."""
        super().setup()
        data = read_until(self.connection, _END, _LONGEST_REQUEST, _REQUEST_TIMEOUT)
        self.connection.settimeout(_REQUEST_TIMEOUT)
        self.rfile = io.BytesIO(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say it where it does not disturb."""
        logger.debug(format, *args)


def _name_of(key: str) -> tuple[str, str]:
    """Return the name of a metric, and what it is of."""
    name, _, of = key.replace("/", ".", 1).partition(".")
    plain = re.sub(r"\W", "_", name)
    return f"envbus_{plain}", of


def _unready(runs: Sequence[ObservedRun]) -> Iterator[str]:
    if not any(run.figures.parts for run in runs):  # they are shown when they have started
        yield f"nothing works here yet, or {VARIABLE}=0 keeps it from being shown"
    for run in runs:
        if not run.answers:
            yield f"process {run.figures.pid} does not answer"
        for part in run.figures.parts:
            for process in part.processes:
                if process.state != "ready":
                    yield f"{part.name} {process.name} is {process.state}"
