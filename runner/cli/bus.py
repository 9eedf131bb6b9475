"""The commands of a bus that several programs or machines share: `keys`, `broker`, `actor`.

Secrets are given as files, never as arguments, which every user of a machine can see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from envbus.bus.errors import ProtocolError, RequestTimeoutError
from envbus.runner.cli.console import AskedFormat, LogFormat, log_to, open_console, refuse

__all__ = ["add_commands"]

keys_app = typer.Typer(help="Make keys for brokers, runners and actors that others can reach.")


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.add_typer(keys_app, name="keys")
    app.command()(broker)
    app.command()(actor)


@keys_app.callback()
def _keys() -> None:
    """Make keys for brokers, runners and actors that others can reach."""


@keys_app.command()
def new(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to put the files; made if missing.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="What the files are called.")] = "envbus",
) -> None:
    """Make a pair of keys: NAME.key, to hand out, and NAME.key_secret, to keep."""
    from envbus.bus.transport.curve_keys import new_keys

    public, secret = new_keys(folder, name)
    sys.stdout.write(f"public key, to hand out: {public}\nsecret key, to keep: {secret}\n")


def broker(
    bind: Annotated[
        list[str],
        typer.Option(help="Endpoint to listen on, tcp://127.0.0.1:5555 for example. Repeatable."),
    ],
    keys: Annotated[
        Path | None,
        typer.Option(help="File of the broker's secret key; then only clients with keys join."),
    ] = None,
    allow: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the public keys (*.key) that may join, or one file; looked at anew "
            "whenever a client comes."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow endpoints that other machines reach, without keys. Anybody who reaches "
            "them can join.",
        ),
    ] = False,
    block: Annotated[
        list[str] | None,
        typer.Option(help="Type of request or notice that is not passed on. Repeatable."),
    ] = None,
    max_message_bytes: Annotated[
        int, typer.Option(min=1, help="Largest message; a peer that sends more is cut off.")
    ] = 1 << 30,
    log_format: AskedFormat = LogFormat.TEXT,
) -> None:
    """Run a broker by itself until Ctrl-C: runners can share what is connected to it."""
    from envbus.bus.broker.events import BrokerConfig
    from envbus.bus.broker.standalone import serve_broker

    def say_where(endpoints: tuple[str, ...]) -> None:
        for endpoint in endpoints:
            sys.stdout.write(f"listening on {endpoint}\n")
        sys.stdout.flush()

    log_to(open_console(stderr=True), log_format)
    config = BrokerConfig(max_message_bytes=max_message_bytes, blocked=frozenset(block or ()))
    serve_broker(bind, keys=keys, allow=allow, insecure=insecure, config=config, on_ready=say_where)


def actor(
    endpoint: Annotated[
        str, typer.Argument(help="Where the runner listens, 10.0.0.5:5555 for example.")
    ],
    name: Annotated[
        str | None,
        typer.Option(help="For messages to people.", show_default="host name and process id"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the runner to answer.")
    ] = 60.0,
    keys: Annotated[
        Path | None, typer.Option(help="File of this actor's secret key, if the runner has keys.")
    ] = None,
    server_key: Annotated[
        Path | None, typer.Option(help="File of the runner's public key.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module of which the runner may have classes and functions called, with all "
            "below it: my_sims, for envs like my_sims.envs:Walker. Gymnasium ids that are "
            "registered here need none. Repeatable.",
        ),
    ] = None,
    log_format: AskedFormat = LogFormat.TEXT,
) -> None:
    """Host envs for a runner on another machine, until it says to stop.

    The runner was made with remote_actors=... and bind=... and gives this actor its envs.
    """
    from envbus.actors.external.verbs import endpoint_of
    from envbus.actors.process.remote import serve_remote

    log_to(open_console(stderr=True), log_format)
    try:
        told = serve_remote(
            endpoint_of(endpoint),
            name=name,
            timeout=timeout,
            keys=keys,
            server_key=server_key,
            allow=allow or (),
        )
    except (RequestTimeoutError, ProtocolError) as exc:
        raise typer.Exit(refuse(str(exc), code=1)) from exc
    if not told:
        raise typer.Exit(1)
