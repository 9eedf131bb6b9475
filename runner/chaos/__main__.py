"""The command `envbus chaos`: break everything for some minutes, and prove that nothing is lost."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from envbus.bus.interrupts import exit_on_termination
from envbus.runner.chaos.report import ChaosProgressLine, print_chaos
from envbus.runner.chaos.run import ChaosConfig, run_chaos

__all__ = ["app", "main"]

#: Columns of the report where there is no terminal.
_WIDTH = 120

app = typer.Typer(
    name="chaos",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def chaos(
    seconds: Annotated[float, typer.Option(min=5.0, help="How long things are broken.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is broken, and when.")] = 0,
    envs: Annotated[int, typer.Option(min=1, help="How many envs.")] = 16,
    actors: Annotated[int, typer.Option(min=1, help="Processes that host them.")] = 4,
    calm_seconds: Annotated[
        float, typer.Option(min=1.0, help="How long the same pool runs unbroken before.")
    ] = 10.0,
    local_links: Annotated[
        bool, typer.Option(help="Socketpairs for the messages of actors; else ROUTER and DEALER.")
    ] = True,
    shared_memory: Annotated[
        bool, typer.Option(help="Arrays in shared memory; else in messages.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the report.")
    ] = False,
) -> None:
    """Kill, stop, freeze and confuse a pool of env actors, and audit what its caller got.

    Ends with 1 if a step was lost, doubled, mixed up or invented, or anything leaks.
    """
    if actors > envs:
        raise typer.BadParameter(f"{actors} actors are more than {envs} envs")
    config = ChaosConfig(
        seconds=seconds,
        calm_seconds=calm_seconds,
        seed=seed,
        num_envs=envs,
        num_actors=actors,
        local_links=local_links,
        shared_memory=shared_memory,
    )
    progress = ChaosProgressLine(Console(stderr=True))
    result = run_chaos(config, progress)
    progress.close()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    else:
        console = Console()
        print_chaos(console if console.is_terminal else Console(width=_WIDTH), result)
    if result.violations:
        raise typer.Exit(1)


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (None: the process's arguments); return its exit code."""
    try:
        with exit_on_termination():  # there are folders to remove, and processes to end
            app(args=argv, prog_name="envbus chaos")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
