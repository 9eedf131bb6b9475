"""The command `serve`: a policy server for external simulators, without training.

Leaves out how its options look (`serve_options.py`) and what it shows (`serve_table.py`).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from envbus.bus.errors import ConfigError
from envbus.bus.watched_files import FileWatch
from envbus.runner.cli import serve_options as options
from envbus.runner.cli.console import (
    AskedFormat,
    LogFormat,
    find_modules_here,
    log_to,
    open_console,
    read_tokens,
    serving_metrics,
    spaces_of,
)
from envbus.runner.extras import how_to_install

if TYPE_CHECKING:
    from envbus.bus.gateway import Gateway, GatewayConfig
    from envbus.runner.cli.serve_table import ServerTable
    from envbus.runner.serving.server import PolicyServer
    from envbus.runner.serving.upkeep import Upkeep

__all__ = ["add_commands"]

#: Longest wait until a signal, or the end of the time, is noticed.
_LOOK = 0.1


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to the program."""
    app.command()(serve)


def serve(
    policy: options.Served = "random",
    canary: options.Canary = None,
    canary_seed: options.CanarySeed = 0,
    reload: options.Reload = False,
    workers: options.Workers = None,
    env: options.SpacesOf = None,
    bind: options.Bind = None,
    tcp: options.Tcp = None,
    ws: options.WebSocket = None,
    origin: options.Origin = None,
    token_file: options.TokenFile = None,
    max_connections: options.MaxConnections = 256,
    max_message_bytes: options.MaxMessageBytes = 4 * 2**20,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    keys: options.Keys = None,
    allow: options.Allow = None,
    insecure: options.Insecure = False,
    max_rate: options.MaxRate = None,
    record: options.Record = None,
    audit: options.Audit = None,
    metrics: options.Metrics = None,
    explore: options.Explore = False,
    lease: options.Lease = 30.0,
    drain_timeout: options.DrainTimeout = 10.0,
    seconds: options.Seconds = None,
    log_format: AskedFormat = LogFormat.TEXT,
) -> None:
    """Answer external simulators with a policy, until SIGTERM or Ctrl-C.

    Then no episode begins any more, those that run are served until they end, and the server ends;
    at once after a second Ctrl-C. SIGHUP has models loaded anew, and files read again.
    """
    from envbus.runner.bridge.bridge import ExternalEnvBridge
    from envbus.runner.bridge.vocabulary import EpisodeLimits
    from envbus.runner.cli.serve_table import ServerTable
    from envbus.runner.serving.audit import AuditLog
    from envbus.runner.serving.canary import Split, parse_canaries
    from envbus.runner.serving.loading import policy_maker
    from envbus.runner.serving.server import PolicyServer
    from envbus.runner.serving.upkeep import Upkeep

    find_modules_here()
    split = Split(policy, parse_canaries(canary or []), seed=canary_seed)
    if workers is None:
        makers = {name: policy_maker(name) for name in split.names}
    else:
        from envbus.runner.serving.workers import in_workers

        makers = {name: in_workers(name, workers) for name in split.names}
    models = _model_files(split.names) if reload else {}
    tokens = FileWatch([token_file] if token_file else [])
    certificate = FileWatch([file for file in (tls_cert, tls_key) if file])
    limits = {"max_connections": max_connections, "max_message_bytes": max_message_bytes}
    gateway = _gateway(tcp, ws, origin, token_file, tls_cert, tls_key, limits, insecure=insecure)
    signals = _Signals()
    console = open_console()
    log_to(console if console.is_terminal else open_console(stderr=True), log_format)
    logging.getLogger("envbus.runner").setLevel(logging.INFO)
    with signals.taking(signal.SIGHUP), ExitStack() as stack:
        metrics_at = stack.enter_context(serving_metrics(metrics))
        writer = None if record is None else stack.enter_context(_writer(record))
        log = None if audit is None else stack.enter_context(AuditLog(audit))
        bridge = stack.enter_context(
            ExternalEnvBridge(
                *(spaces_of(env) or ()),
                bind=bind or "tcp://127.0.0.1:*",
                keys=keys,
                allow=allow,
                insecure=insecure,
                gateway=gateway,
                confirm_ends=writer is not None,
                limits=EpisodeLimits(lease=lease, max_rate=max_rate),
            )
        )
        server = PolicyServer(
            bridge, makers, split=split, writer=writer, audit=log, explore=explore
        )
        upkeep = Upkeep()
        if log is not None:
            upkeep.add("audit log", log.reopen)
        for name in split.names:
            upkeep.add(name, functools.partial(server.reload, name), models.get(name))
        if bridge.gateway is not None and token_file:
            upkeep.add("tokens", _tokens_reader(bridge.gateway, token_file), tokens)
        if bridge.gateway is not None and tls_cert:
            upkeep.add("certificate", bridge.gateway.reload_certificate, certificate)
        table = ServerTable(console)
        with signals.taking(signal.SIGTERM, signal.SIGINT):
            for address in bridge.addresses:
                table.tell(f"serving at {address}")
            if metrics_at:
                table.tell(f"metrics at {metrics_at}")
            with table:
                _run(server, table, signals, upkeep, seconds, drain_timeout)
        table.summarize(server.snapshot())


class _Signals:
    """SIGTERM and the first Ctrl-C are remembered; the second Ctrl-C raises.

    SIGHUP is the operator's demand, or the end of the terminal that the server was started at. It
    is taken from the start to the end: by itself it would kill a server that is not ready yet.
    """

    def __init__(self) -> None:
        self.came = ""
        self._demanded = False
        self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]

    def take_demand(self) -> bool:
        """Return whether the operator has demanded something since the last call."""
        demanded, self._demanded = self._demanded, False
        return demanded

    @contextmanager
    def taking(self, *numbers: signal.Signals) -> Iterator[None]:
        """Take these meanwhile."""
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP and all(map(os.isatty, self._terminals)):
            self._demanded = True
            return
        if self.came and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.came = signal.Signals(number).name


def _run(
    server: PolicyServer,
    table: ServerTable,
    signals: _Signals,
    upkeep: Upkeep,
    seconds: float | None,
    drain_timeout: float,
) -> None:
    """Serve until the end, and let what runs then come to its own."""
    logger = logging.getLogger("envbus.runner.serving")
    begin = time.monotonic()
    ends_at, note = None, ""
    while True:
        server.serve(_LOOK)
        now = time.monotonic()
        upkeep.look(now, demanded=signals.take_demand())
        if table.is_due(now - begin):
            table.show(server.snapshot(), note)
        if ends_at is None:
            over = seconds is not None and now - begin >= seconds
            if not signals.came and not over:
                continue
            server.drain()
            ends_at, note = now + drain_timeout, "draining: no new episodes"
            logger.info("%s: no new episodes", signals.came or "the time is over")
        if server.is_drained:
            return
        if now >= ends_at:
            left = server.snapshot().bridge.episodes_now
            logger.warning("%d episodes have not ended within %g s", left, drain_timeout)
            return


def _model_files(names: Sequence[str]) -> dict[str, FileWatch]:
    """Return what looks at the files of models, by name."""
    files = {name: FileWatch([Path(name)]) for name in names if name.endswith(".onnx")}
    if not files:
        raise ConfigError(
            "--reload looks at the file of a model, and none is a file model.onnx; a factory is "
            "called again after SIGHUP"
        )
    return files


def _tokens_reader(gateway: Gateway, file: Path) -> Callable[[], object]:
    def read() -> None:
        if not file.is_file():  # a pipe, whose end would be waited for
            raise ConfigError(f"the token cannot be read: there is no file {file}")
        tokens = read_tokens(file)
        assert tokens is not None
        gateway.set_token(tokens)

    return read


def _gateway(
    tcp: list[str] | None,
    ws: list[str] | None,
    origin: list[str] | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    limits: Mapping[str, int],
    *,
    insecure: bool,
) -> GatewayConfig | None:
    from envbus.bus.gateway import GatewayConfig

    if not tcp and not ws:
        for name, given in (
            ("--token-file", token_file),
            ("--tls-cert", tls_cert),
            ("--tls-key", tls_key),
            ("--origin", origin),
        ):
            if given:
                raise ConfigError(
                    f"{name} is for --tcp and --ws, and there is neither; ZeroMQ has --keys"
                )
        return None
    return GatewayConfig(
        tcp=tuple(tcp or ()),
        websocket=tuple(ws or ()),
        origins=tuple(origin or ()),
        token=read_tokens(token_file),
        certificate=None if tls_cert is None else str(tls_cert),
        private_key=None if tls_key is None else str(tls_key),
        insecure=insecure,
        **limits,
    )


@contextmanager
def _writer(folder: Path) -> Iterator[Any]:
    try:
        from envbus.runner.recordings import EpisodeWriter
    except ImportError as exc:
        raise ConfigError(f"--record: {how_to_install('parquet')}") from exc
    with EpisodeWriter(folder) as writer:
        yield writer
