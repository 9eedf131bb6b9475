"""The options of `envbus serve`: how they look on the command line, in groups.

Secrets are given as files, never as arguments, which every user of a machine can see. Leaves out
what comes of them (`serve.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envbus.runner.cli.console import Metrics

__all__ = [
    "Allow",
    "Audit",
    "Bind",
    "Canary",
    "CanarySeed",
    "DrainTimeout",
    "Explore",
    "Insecure",
    "Keys",
    "Lease",
    "MaxConnections",
    "MaxMessageBytes",
    "MaxRate",
    "Metrics",
    "Origin",
    "Record",
    "Reload",
    "Seconds",
    "Served",
    "SpacesOf",
    "Tcp",
    "TlsCert",
    "TlsKey",
    "TokenFile",
    "WebSocket",
    "Workers",
]

Served = Annotated[
    str,
    typer.Option(
        help="random, zero, a file model.onnx, or module:factory: called with the action "
        "space (and the observation space), returns a policy or a function of batched "
        "observations."
    ),
]
Canary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="POLICY=SHARE",
        help="Have another policy answer a share of the episodes, model2.onnx=0.1. Repeatable.",
    ),
]
CanarySeed = Annotated[
    int, typer.Option(help="Which episodes are among the share: another seed has others.")
]
Reload = Annotated[
    bool,
    typer.Option(
        "--reload", help="Load models anew when their files were changed; SIGHUP does so always."
    ),
]
SpacesOf = Annotated[
    str | None,
    typer.Option(
        help="Id of a Gymnasium env whose spaces are served.",
        show_default="the first client's spaces",
    ),
]
Bind = Annotated[
    list[str] | None,
    typer.Option(
        help="ZeroMQ endpoint to listen at, tcp://127.0.0.1:5555 for example. Repeatable.",
        show_default="tcp://127.0.0.1:*",
    ),
]
Tcp = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="Listen there for plain TCP. Repeatable."),
]
WebSocket = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="Listen there for WebSocket. Repeatable."),
]
Origin = Annotated[
    list[str] | None,
    typer.Option(help="Web pages that may connect besides this host's. Repeatable; * is all."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File of the token that clients over TCP and WebSocket have to show; or of several, "
        "name:token in each line. Read again when it was changed."
    ),
]
MaxConnections = Annotated[
    int, typer.Option(min=1, help="Clients over TCP and WebSocket at one time.")
]
MaxMessageBytes = Annotated[
    int, typer.Option(min=1, help="Longest message of a client over TCP and WebSocket.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="TLS for TCP and WebSocket: the certificate (chain), PEM. Read again when it was "
        "changed."
    ),
]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key, PEM.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="File of this server's secret key; then ZeroMQ needs keys."),
]
Allow = Annotated[
    Path | None, typer.Option(help="Folder of the public keys (*.key) that may join, or one.")
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Allow addresses that other machines reach, without keys, token or TLS.",
    ),
]
MaxRate = Annotated[
    float | None,
    typer.Option(
        help="Actions per second for each client; one that asks for more is refused, and told when "
        "to ask again.",
        show_default="any number",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write episodes there when they end, as Parquet. A client whose end_episode has "
        "returned finds its episode there, whatever becomes of the server.",
    ),
]
Audit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append there who asks what, as JSON in lines, without observations and actions. "
        "Opened anew after SIGHUP.",
    ),
]
Explore = Annotated[
    bool, typer.Option("--explore", help="Sample actions, instead of taking the best ones.")
]
Lease = Annotated[
    float, typer.Option(min=0.1, help="Seconds that episodes of a client that is gone wait.")
]
DrainTimeout = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds for running episodes to end after SIGTERM or Ctrl-C."),
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.0, help="End, as after Ctrl-C, after so many.", show_default="never"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Choose actions in so many processes, which share what waits; each has the policy.",
        show_default="in this process",
    ),
]
