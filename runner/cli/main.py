"""The `envbus` command: reads options, hands over to the parts, prints what comes back.

Heavy imports happen in the commands, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Literal, TextIO, TypeVar

import typer
from rich.console import Console

from envbus.bus.errors import ConfigError, EnvbusError, TransportError
from envbus.runner.cli import bridge as cli_bridge
from envbus.runner.cli import bus as cli_bus
from envbus.runner.cli import dashboard as cli_dashboard
from envbus.runner.cli import serve as cli_serve
from envbus.runner.cli import top as cli_top
from envbus.runner.cli.console import (
    AskedFormat,
    LogFormat,
    Metrics,
    announce,
    find_modules_here,
    log_to,
    open_console,
    refuse,
    serving_metrics,
)

if TYPE_CHECKING:
    from envbus.runner.cli.job import JobResult
    from envbus.runner.cli.report import ProgressLine
    from envbus.runner.cli.tuning import TuneResult

__all__ = ["app", "main"]

#: What shells report of a program that ended by Ctrl-C: 128 and the signal's number.
INTERRUPTED = 130
#: The same of one that wrote into a pipe whose reader has gone: SIGPIPE.
CLOSED_PIPE = 141
#: More are a slip of the pen; a list of them alone may fill the memory.
MOST_ENVS = 100_000
#: Length of a job that was given no end.
DEFAULT_SECONDS = 10.0

_Result = TypeVar("_Result", "JobResult", "TuneResult")

#: Options that several commands share.
_Env = Annotated[
    str,
    typer.Argument(
        metavar="ENV_ID",
        help="A Gymnasium id (CartPole-v1), with the module that registers it "
        "(ale_py:ALE/Pong-v5), or a function that returns an env (module:function).",
    ),
]
_NumEnvs = Annotated[int, typer.Option(min=1, max=MOST_ENVS, help="How many envs.")]
_Threads = Annotated[
    str,
    typer.Option(
        "--threads-per-process",
        metavar="INTEGER|auto|none",
        help="Threads of NumPy, PyTorch and their like in each actor. auto: its part of the "
        "cores; none: as they choose.",
    ),
]
_Policy = Annotated[
    str,
    typer.Option(
        help="random, zero, or module:function, called with the batched observations and "
        "action space; returns batched actions."
    ),
]
_Seed = Annotated[
    int | None, typer.Option(min=0, help="Env i gets SEED + i.", show_default="a fresh one")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of the table.")
]

#: Click's class for mistakes in a call; recent versions of typer carry their own copy of it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="envbus",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; None: those of this process.

    Returns:
        0; 1 where a part of the work failed; 2 for a call that cannot work; 130 after Ctrl-C; 141
        where nobody reads the output any more.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        code = app(arguments, prog_name="envbus", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _UsageError as exc:
        format_message = getattr(exc, "format_message", exc.__str__)
        command = getattr(getattr(exc, "ctx", None), "command_path", "envbus")
        return refuse(f"{format_message().rstrip('.')}; see `{command} --help`")
    except ConfigError as exc:
        return refuse(str(exc))
    except TransportError as exc:  # an address in use, for example
        return refuse(str(exc), code=1)
    except BrokenPipeError:  # `envbus ... | head`: nobody reads any more
        # Whatever is still to be flushed at the exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return CLOSED_PIPE
    except Exception as exc:
        return _report(exc)
    return code if isinstance(code, int) else 0


def _report(exc: Exception) -> int:
    """Say what a command failed of that is nobody's mistake in the call; return the exit code.

    Of an env only what it raised, once; of envbus' other errors their text; of all else the
    traceback, without the frames of whatever reads options.
    """
    import traceback

    from envbus.runner.errors import env_errors

    errors = env_errors(exc)
    if errors:
        first = errors[0]
        others = "" if len(errors) == 1 else f"; so did {len(errors) - 1} other env(s)"
        text = (
            f"{first.summary}{others}\n\n"
            f"In the env's process:\n{first.remote_traceback.rstrip()}\n\n"
            "This comes from the env's own code. To look at it with a debugger: "
            "ActorPool([...], num_actors=0); to have envs that fail made anew: "
            "restart=True, see docs/reliability.md."
        )
    elif isinstance(exc, EnvbusError):
        text = str(exc)
    elif isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # What could not be printed is not tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        text = f"nothing more can be written: {exc}"
    else:
        frames = exc.__traceback__
        while frames is not None and _reads_options(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(exc), exc, frames))
    sys.stderr.write(f"envbus: error: {text.rstrip()}\n")
    return 1


def _reads_options(file: str) -> bool:
    return file == __file__ or bool({"typer", "click"} & set(os.path.dirname(file).split(os.sep)))


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"envbus {version('envbus')}\n")
        raise typer.Exit


@app.callback()
def _envbus(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Reinforcement-learning environments as supervised actor processes on a ZeroMQ bus."""


@app.command()
def run(
    env_id: _Env,
    num_envs: _NumEnvs = 8,
    actors: Annotated[
        int | None,
        typer.Option(
            *("--num-actors", "--actors"),
            min=1,
            help="Processes that host them.",
            show_default="one per core",
        ),
    ] = None,
    threads: _Threads = "auto",
    steps: Annotated[
        int | None, typer.Option(min=1, help="End after so many env steps, over all envs.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="End after so many seconds.",
            show_default=f"{DEFAULT_SECONDS:g}, without --steps",
        ),
    ] = None,
    policy: _Policy = "random",
    seed: _Seed = None,
    kill_one: Annotated[
        bool, typer.Option("--kill-one", help="Kill one actor half way, to see it come back.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Then step the same envs in Gymnasium's vector envs as long."
        ),
    ] = False,
    metrics: Metrics = None,
    as_json: _AsJson = False,
    log_format: AskedFormat = LogFormat.TEXT,
) -> None:
    """Step ENV_ID in actor processes and measure it."""
    from envbus.bus.process.threads import parse_threads
    from envbus.runner.cli.job import JobConfig, run_job
    from envbus.runner.cli.report import print_result

    if steps is None and seconds is None:
        seconds = DEFAULT_SECONDS
    num_actors: int | Literal["auto"] = "auto" if actors is None else actors
    config = JobConfig(
        env=env_id,
        num_envs=num_envs,
        num_actors=num_actors,
        threads_per_process=parse_threads(threads),
        steps=steps,
        seconds=seconds,
        policy=policy,
        seed=seed,
        kill_one=kill_one,
        compare=compare,
    )

    def show(console: Console, result: JobResult) -> None:
        if result.measured:
            print_result(console, result)
        elif result.interrupted:
            open_console(stderr=True).print("interrupted before the first step")

    with serving_metrics(metrics) as place:
        if place:
            announce(f"metrics at {place}", log_format)
        _measure(lambda line: run_job(config, line), show, as_json=as_json, log_format=log_format)


@app.command()
def tune(
    env_id: _Env,
    num_envs: _NumEnvs = 8,
    seconds: Annotated[
        float, typer.Option(help="How long to step the env alone, and each number of actors.")
    ] = 2.0,
    threads: _Threads = "auto",
    policy: _Policy = "random",
    seed: _Seed = None,
    as_json: _AsJson = False,
    log_format: AskedFormat = LogFormat.TEXT,
) -> None:
    """Measure ENV_ID, try numbers of actors, and say which line to write."""
    from envbus.bus.process.threads import parse_threads
    from envbus.runner.cli.report import print_tuning
    from envbus.runner.cli.tuning import TuneConfig, run_tuning

    config = TuneConfig(
        env=env_id,
        num_envs=num_envs,
        seconds=seconds,
        policy=policy,
        seed=seed,
        threads_per_process=parse_threads(threads),
    )
    _measure(
        lambda line: run_tuning(config, line),
        print_tuning,
        as_json=as_json,
        log_format=log_format,
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure envbus beside other libraries; `envbus bench --help` lists the options."""
    from envbus.bench.__main__ import main as bench_main

    raise typer.Exit(bench_main(context.args) or 0)


cli_bus.add_commands(app)
cli_bridge.add_commands(app)
cli_serve.add_commands(app)
cli_top.add_commands(app)
cli_dashboard.add_commands(app)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def chaos(context: typer.Context) -> None:
    """Break everything and audit what came; `envbus chaos --help` lists the options."""
    from envbus.runner.chaos.__main__ import main as chaos_main

    raise typer.Exit(chaos_main(context.args))


def _measure(
    run: Callable[[ProgressLine], _Result],
    show: Callable[[Console, _Result], None],
    *,
    as_json: bool,
    log_format: LogFormat,
) -> None:
    """Have something measured, with its progress on standard error, and show what came of it."""
    import msgspec

    from envbus.runner.cli.report import ProgressLine

    find_modules_here()
    with _result_stream(exclusive=as_json) as out:
        console = open_console(stderr=True)
        log_to(console, log_format)
        # Among objects no other lines.
        is_quiet = log_format is LogFormat.JSON
        with ProgressLine(Console(quiet=True) if is_quiet else console) as line:
            result = run(line)
        if as_json:
            out.write(msgspec.json.encode(result).decode() + "\n")
        else:
            show(open_console(out), result)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _result_stream(*, exclusive: bool) -> Iterator[TextIO]:
    """Give the stream for the result.

    Args:
        exclusive: Nothing else may appear there: what envs print, in this process and in all
            that it starts, goes to standard error.
    """
    out = sys.stdout
    if not exclusive:
        yield out
        return
    out.flush()
    try:
        is_descriptor_1 = out.fileno() == 1
    except (OSError, ValueError):  # no file at all, in a test for example
        is_descriptor_1 = False
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        if is_descriptor_1:
            saved = os.dup(1)
            out = stack.enter_context(os.fdopen(saved, "w", encoding="utf-8"))
            stack.callback(os.dup2, saved, 1)
            os.dup2(2, 1)
        yield out
        out.flush()


if __name__ == "__main__":
    sys.exit(main())
