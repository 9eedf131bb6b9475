"""The commands around external simulators: `doctor`, `conformance` and `replay`.

Secrets are given as files, never as arguments, which every user of a machine can see.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from envbus.bus.errors import ConfigError
from envbus.runner.cli.console import open_console, read_token, spaces_of
from envbus.runner.extras import how_to_install

if TYPE_CHECKING:
    from envbus.runner.conformance.address import Address
    from envbus.runner.conformance.conformance import Finding
    from envbus.runner.conformance.doctor import Means

__all__ = ["add_commands"]

#: Options that all commands share which connect to a bridge.
_Place = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT",
        help="Where the bridge, or its gateway, listens. How messages are carried is found out, "
        "or said: tcp:// (ZeroMQ), stream:// (plain TCP), ws://; streams:// and wss:// with TLS.",
    ),
]
_TokenFile = Annotated[Path | None, typer.Option(help="File that holds the token of a gateway.")]
_Ca = Annotated[
    Path | None,
    typer.Option(help="Certificates of the authorities to trust, instead of this host's. PEM."),
]
_Keys = Annotated[Path | None, typer.Option(help="File of your secret key, for ZeroMQ with keys.")]
_ServerKey = Annotated[Path | None, typer.Option(help="File of the bridge's public key.")]
_Timeout = Annotated[float, typer.Option(min=0.01, help="Seconds to wait for one answer.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command()(doctor)
    app.command()(conformance)
    app.command()(replay)


def doctor(
    place: _Place,
    token_file: _TokenFile = None,
    ca: _Ca = None,
    keys: _Keys = None,
    server_key: _ServerKey = None,
    timeout: _Timeout = 5.0,
) -> None:
    """Say at which step a connection to a bridge stops, and what to do about it."""
    from envbus.runner.conformance.address import Address
    from envbus.runner.conformance.doctor import examine

    console = open_console()
    address = Address.parse(place)
    means = _means(token_file, ca, keys, server_key)
    well = True
    for step in examine(address, means, timeout):
        mark = Text("ok  ", "green") if step.ok else Text("STOP", "red")
        lines = [Text(step.found)] + [Text(step.advice, "bold")] * bool(step.advice)
        console.print(_row(Text.assemble(mark, f" {step.name}"), 16, lines))
        well = well and step.ok
    raise typer.Exit(0 if well else 1)


def conformance(
    place: _Place,
    token_file: _TokenFile = None,
    ca: _Ca = None,
    keys: _Keys = None,
    server_key: _ServerKey = None,
    timeout: _Timeout = 5.0,
    only: Annotated[str, typer.Option(help="Run only the checks whose names hold this text.")] = "",
    client: Annotated[
        bool,
        typer.Option(
            "--client",
            help="Check a client instead: listen at HOST:PORT, for ZeroMQ unless it says stream:// "
            "or ws://, and wait for it. It has to run episodes in a loop. --timeout is how long "
            "each thing may take it; 60 is reasonable.",
        ),
    ] = False,
    env: Annotated[
        str | None,
        typer.Option(
            help="With --client: id of an env whose spaces are served.",
            show_default="the client's spaces",
        ),
    ] = None,
) -> None:
    """Check a server of the external-env protocol, or a client; exit with 1 if it fails.

    Verb by verb, with time-outs, errors and lost connections. A server must be answering requests
    for actions, and what it learns from this is nonsense: keep a training that matters away.
    """
    from envbus.runner.conformance.address import Address

    address = Address.parse(place)
    console = open_console()
    if client:
        findings = _client_findings(console, address, env, token_file, timeout)
    else:
        from envbus.runner.conformance.conformance import check_server
        from envbus.runner.conformance.doctor import find

        means = _means(token_file, ca, keys, server_key)
        address = find(address, means, timeout)
        console.print(f"checking {address}")
        findings = check_server(address, means, timeout, only)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for finding in findings:
        counts[finding.outcome] += 1
        check = f"{finding.name} (section {finding.section})"
        lines = [Text(f"{check} {1e3 * finding.seconds:.0f} ms")]
        lines += [Text(finding.reason, "bold")] * bool(finding.reason)
        console.print(_row(Text(finding.outcome, colours[finding.outcome]), 8, lines))
    console.print(", ".join(f"{count} {name}" for name, count in counts.items()))
    raise typer.Exit(1 if counts["failed"] else 0)


def replay(
    episodes: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|MINARI-ID",
            help="A folder of recorded episodes (Parquet shards), or the id of a Minari dataset "
            "that is on this machine.",
        ),
    ],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Of the bridge, e.g. tcp://127.0.0.1:5556.")
    ],
    keys: _Keys = None,
    server_key: _ServerKey = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Keep the episodes out of training.")
    ] = False,
) -> None:
    """Send recorded episodes to a bridge, as a simulator would that has acted by itself."""
    try:
        from envbus.runner.recordings import minari_episodes, read_episodes
        from envbus.runner.recordings import replay as send
    except ImportError as exc:
        raise ConfigError(f"episodes in files need more: {how_to_install('parquet')}") from exc
    from envbus.actors import ExternalEnvClient

    console = open_console()
    count = 0
    found: Iterator[Any] = (
        read_episodes(episodes) if Path(episodes).is_dir() else minari_episodes(episodes)
    )
    try:
        first = next(found, None)
    except ConfigError as exc:
        if Path(episodes).is_dir():
            raise
        raise ConfigError(f"there is no folder {episodes}, and as a Minari id: {exc}") from exc
    if first is None:
        raise ConfigError(f"there are no episodes in {episodes}")
    client = ExternalEnvClient(address, keys=keys, server_key=server_key)
    with client, console.status("") as status:
        for episode in itertools.chain([first], found):
            status.update(f"{count} episodes replayed")
            count += send([episode], client, training_enabled=not untrained)
    console.print(f"{count} episodes replayed to {address}")


def _client_findings(
    console: Console, address: Address, env: str | None, token_file: Path | None, patience: float
) -> Iterator[Finding]:
    from envbus.runner.conformance.address import Address
    from envbus.runner.conformance.client_conformance import Server, check_client

    spaces = spaces_of(env)
    token = read_token(token_file)
    server = Server(address, spaces, token)
    # The port that was found is used again.
    address = Address.parse(server.address)
    console.print(f"start the client now; it connects to {address}")
    servers = [server]
    return check_client(
        lambda: servers.pop() if servers else Server(address, spaces, token), patience
    )


def _row(mark: Text, width: int, lines: list[Text]) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=width, no_wrap=True)
    row.add_column()
    row.add_row(mark, Group(*lines))
    return row


def _means(
    token_file: Path | None,
    ca: Path | None,
    keys: Path | None,
    server_key: Path | None,
) -> Means:
    from envbus.bus.transport.curve_keys import PeerKeys
    from envbus.runner.conformance.doctor import Means

    try:
        tls = None if ca is None else ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"no certificates can be read from {ca}: {exc}") from exc
    return Means(read_token(token_file), PeerKeys.load(keys, server_key), tls)
