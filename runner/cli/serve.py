"""The command `serve`: a policy server for external simulators, without training.

Secrets are given as files, never as arguments, which every user of a machine can see.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import (
    Metrics,
    find_modules_here,
    log_to,
    open_console,
    read_token,
    serving_metrics,
    spaces_of,
)
from envbus.runner.extras import how_to_install

if TYPE_CHECKING:
    from envbus.bus.gateway import GatewayConfig
    from envbus.runner.cli.serve_table import ServerTable
    from envbus.runner.serving.server import PolicyServer

__all__ = ["add_commands"]

#: Longest wait until a signal, or the end of the time, is noticed.
_LOOK = 0.1


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to the program."""
    app.command()(serve)


def serve(
    policy: Annotated[
        str,
        typer.Option(
            help="random, zero, a file model.onnx, or module:factory: called with the action "
            "space (and the observation space), returns a policy or a function of batched "
            "observations."
        ),
    ] = "random",
    env: Annotated[
        str | None,
        typer.Option(
            help="Id of a Gymnasium env whose spaces are served.",
            show_default="the first client's spaces",
        ),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            help="ZeroMQ endpoint to listen at, tcp://127.0.0.1:5555 for example. Repeatable.",
            show_default="tcp://127.0.0.1:*",
        ),
    ] = None,
    tcp: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Listen there for plain TCP. Repeatable."),
    ] = None,
    ws: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Listen there for WebSocket. Repeatable."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Web pages that may connect besides this host's. Repeatable; * is all."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File of the token that clients over TCP and WebSocket have to show."),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Clients over TCP and WebSocket at one time.")
    ] = 256,
    max_message_bytes: Annotated[
        int, typer.Option(min=1, help="Longest message of a client over TCP and WebSocket.")
    ] = 4 * 2**20,
    tls_cert: Annotated[
        Path | None, typer.Option(help="TLS for TCP and WebSocket: the certificate (chain), PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="File of this server's secret key; then ZeroMQ needs keys."),
    ] = None,
    allow: Annotated[
        Path | None, typer.Option(help="Folder of the public keys (*.key) that may join, or one.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow addresses that other machines reach, without keys, token or TLS.",
        ),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write episodes there when they end, as Parquet. A client whose end_episode has "
            "returned finds its episode there, whatever becomes of the server.",
        ),
    ] = None,
    metrics: Metrics = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Sample actions, instead of taking the best ones.")
    ] = False,
    lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds that episodes of a client that is gone wait.")
    ] = 30.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds for running episodes to end after SIGTERM or Ctrl-C."),
    ] = 10.0,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="End, as after Ctrl-C, after so many.", show_default="never"),
    ] = None,
) -> None:
    """Answer external simulators with a policy, until SIGTERM or Ctrl-C.

    Then no episode begins any more, those that run are served until they end, and the server ends;
    at once after a second Ctrl-C.
    """
    from envbus.runner.bridge.bridge import ExternalEnvBridge
    from envbus.runner.bridge.vocabulary import EpisodeLimits
    from envbus.runner.cli.serve_table import ServerTable
    from envbus.runner.serving.loading import policy_maker
    from envbus.runner.serving.server import PolicyServer

    find_modules_here()
    make = policy_maker(policy)
    limits = {"max_connections": max_connections, "max_message_bytes": max_message_bytes}
    gateway = _gateway(tcp, ws, origin, token_file, tls_cert, tls_key, limits, insecure=insecure)
    console = open_console()
    log_to(console if console.is_terminal else open_console(stderr=True))
    logging.getLogger("envbus.runner").setLevel(logging.INFO)
    with ExitStack() as stack:
        metrics_at = stack.enter_context(serving_metrics(metrics))
        writer = None if record is None else stack.enter_context(_writer(record))
        bridge = stack.enter_context(
            ExternalEnvBridge(
                *(spaces_of(env) or ()),
                bind=bind or "tcp://127.0.0.1:*",
                keys=keys,
                allow=allow,
                insecure=insecure,
                gateway=gateway,
                confirm_ends=writer is not None,
                limits=EpisodeLimits(lease=lease),
            )
        )
        server = PolicyServer(bridge, make, writer=writer, explore=explore)
        table = ServerTable(console)
        for address in bridge.addresses:
            table.tell(f"serving at {address}")
        if metrics_at:
            table.tell(f"metrics at {metrics_at}")
        with _Signals() as signals, table:
            _run(server, table, signals, seconds, drain_timeout)
        table.summarize(server.snapshot())


class _Signals:
    """SIGTERM and the first Ctrl-C are remembered; the second Ctrl-C raises."""

    def __init__(self) -> None:
        self.came = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.came and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.came = signal.Signals(number).name


def _run(
    server: PolicyServer,
    table: ServerTable,
    signals: _Signals,
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
        token=read_token(token_file),
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
