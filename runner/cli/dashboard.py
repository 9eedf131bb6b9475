"""The command `dashboard`: what works on this host, live in a browser.

Secrets are given as files, never as arguments, which every user of a machine can see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import log_to, open_console, read_token, say
from envbus.runner.extras import needed_for

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    """Add the command of this module to the program."""
    app.command()(dashboard)


def dashboard(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve it; port 0: any that is free.")
    ] = "127.0.0.1:8765",
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of the token that a browser has to show first.",
            show_default="a new one each time",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="TLS: the certificate (chain), PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without TLS.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="End, as after Ctrl-C, after so many.", show_default="never"),
    ] = None,
) -> None:
    """Show in a browser what works on this host, until SIGTERM or Ctrl-C.

    Open the address that it prints. It shows all runs of this user; nothing can be changed there.
    """
    try:
        with needed_for("`envbus dashboard`", "dashboard"):
            from envbus.runner.dashboard.server import DashboardServer
    except ModuleNotFoundError as exc:
        raise ConfigError(str(exc)) from exc

    console = open_console()
    log_to(open_console(stderr=True))
    server = DashboardServer(
        bind,
        token=read_token(token_file),
        certificate=None if tls_cert is None else str(tls_cert),
        private_key=None if tls_key is None else str(tls_key),
        insecure=insecure,
    )
    url = server.url
    if token_file is not None:
        url = f"{url.partition('token=')[0]}token=... with the token of {token_file}"
    try:
        server.run(
            seconds,
            signals=True,
            on_start=lambda: say(console, f"the dashboard is at {url}"),
        )
    finally:
        server.close()
