"""The command `envbus bench`: install the peers, measure, report, check against the targets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from envbus.bench.harness.environments import HOME, LIBRARIES, Environments, Library
from envbus.bench.harness.record import (
    FULL,
    QUICK,
    REQUESTS,
    REQUESTS_QUICK,
    Record,
    Schedule,
    load,
    save,
)
from envbus.bench.report.tables import render_details, render_summary
from envbus.bench.report.targets import check, render_verdicts
from envbus.bench.requests.cases import WAYS
from envbus.bench.requests.comparison import measure_requests
from envbus.bench.steps.cases import ALL_CASES, QUICK_CASES, Case, parse_case
from envbus.bench.steps.recovery import FULL_KILLS, QUICK_KILLS, VARIANTS_KILLED, measure_recovery
from envbus.bench.steps.sample_variants import (
    SAMPLE_CASES,
    SAMPLE_QUICK,
    SAMPLE_SCHEDULE,
    SAMPLE_VARIANTS,
)
from envbus.bench.steps.scaling import FULL_ACTORS, QUICK_ACTORS, measure_actors
from envbus.bench.steps.startup import FULL_STARTS, QUICK_STARTS, measure_startup
from envbus.bench.steps.variants import OURS, VARIANTS, Variant, variants_named
from envbus.bench.steps.vector import measure_cases
from envbus.bench.training.cases import CASES as TRAINING_CASES
from envbus.bench.training.measure import QUICK_SEEDS, SEEDS, measure_training
from envbus.bus.interrupts import exit_on_termination
from envbus.runner.extras import how_to_install

__all__ = ["app", "main"]

RESULTS = HOME / "results"
KINDS = (
    "vector",
    "sample",
    "startup",
    "actors",
    "recovery",
    "bus",
    "policy",
    "bridge",
    "profile",
    "training",
)

app = typer.Typer(
    name="bench",
    help="Measure envbus side by side with the libraries a user would pick instead.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,  # errors on plain lines
)

Quick = Annotated[bool, typer.Option(help="Few cases and short rounds: a look, not a result.")]
Out = Annotated[Path, typer.Option(help="Folder of the result files.", file_okay=False)]
Here = Annotated[
    bool,
    typer.Option(help="Use this interpreter for every library instead of isolated environments."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Install what is missing without asking.")]
Names = Annotated[
    list[str] | None, typer.Option("--variant", help="Only these variants; repeat the option.")
]

T = TypeVar("T")


@app.command()
def install(
    libraries: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(LIBRARIES)}; none: all.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Make each library's virtual environment with pip, whether or not it is there.

    They are below bench/.envs in a clone, else below envbus-bench/.envs in the working directory.
    """
    chosen = _each(libraries or list(LIBRARIES), LIBRARIES.__getitem__, "library", LIBRARIES)
    _install(Environments(), chosen, yes=yes)


@app.command()
def vector(
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help="WORKLOAD:NUM_ENVS, e.g. null:64; repeat the option."),
    ] = None,
    variants: Names = None,
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """Env steps per second and step latency."""
    chosen: Sequence[Case] = QUICK_CASES if quick else ALL_CASES
    if cases:
        chosen = [_parsed(case) for case in cases]
    taking_part = _variants(variants, startup=False)
    environments = _environments(taking_part, here=here, yes=yes)
    _compare("vector", chosen, taking_part, _schedule(quick), environments, out)


@app.command()
def sample(
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help="WORKLOAD:NUM_ENVS, e.g. cartpole:64; repeat the option."),
    ] = None,
    variants: Names = None,
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """Env steps per second of collectors with a policy."""
    chosen = [_parsed(case) for case in cases] if cases else SAMPLE_CASES
    _each(variants or [], SAMPLE_VARIANTS.__getitem__, "variant", SAMPLE_VARIANTS)
    taking_part = [SAMPLE_VARIANTS[name] for name in variants or SAMPLE_VARIANTS]
    environments = _environments(taking_part, here=here, yes=yes)
    schedule = SAMPLE_QUICK if quick else SAMPLE_SCHEDULE
    # One thread is faster for all of them with such a network.
    _compare("sample", chosen, taking_part, schedule, environments.on_one_thread(), out)


@app.command()
def startup(
    variants: Names = None,
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """Seconds to the first reset, and memory."""
    taking_part = _variants(variants, startup=True)
    environments = _environments(taking_part, here=here, yes=yes)
    starts = QUICK_STARTS if quick else FULL_STARTS
    record = measure_startup(starts, taking_part, _schedule(quick), environments, _say)
    _save(record, out)


@app.command()
def actors(
    numbers: Annotated[
        list[int] | None,
        typer.Option("--actors", min=1, help="How many actors; repeat the option."),
    ] = None,
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """What one more actor costs: step time, memory, descriptors, start."""
    chosen = numbers or (QUICK_ACTORS if quick else FULL_ACTORS)
    environments = _environments([VARIANTS[OURS]], here=here, yes=yes)
    _save(measure_actors(chosen, _schedule(quick), environments, _say), out)


@app.command()
def recovery(
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """From kill -9 of a worker until its envs step again, and what others do."""
    environments = _environments([VARIANTS[name] for name in VARIANTS_KILLED], here=here, yes=yes)
    kills = QUICK_KILLS if quick else FULL_KILLS
    _save(measure_recovery(kills, _schedule(quick), environments, say=_say), out)


@app.command()
def bus(quick: Quick = False, out: Out = RESULTS) -> None:
    """The bus alone, beside bare pyzmq and multiprocessing's Pipe."""
    _requests("bus", Environments(shared_python=sys.executable), quick, out)


@app.command()
def policy(quick: Quick = False, out: Out = RESULTS) -> None:
    """A policy worker's round trip, beside the bus and the policy alone."""
    _requests("policy", Environments(shared_python=sys.executable), quick, out)


@app.command()
def bridge(
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """Simulators that ask for actions, beside bare pyzmq, HTTP and gRPC."""
    libraries = dict.fromkeys(way.library for way in WAYS["bridge"])
    _requests("bridge", _with(libraries, here=here, yes=yes), quick, out)


@app.command()
def profile(quick: Quick = False, out: Out = RESULTS) -> None:
    """Where the microseconds of one vector step go."""
    from envbus.bench.steps.step_profile import measure_profile  # the rest works without the runner

    _save(measure_profile(_schedule(quick), say=_say), out)


@app.command()
def training(
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help=f"Of {', '.join(TRAINING_CASES)}; repeat the option."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each way.")] = SEEDS,
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """How long training takes with a library's own vector envs, and with envbus."""
    _each(cases or [], TRAINING_CASES.__getitem__, "case", TRAINING_CASES)
    chosen = [TRAINING_CASES[name] for name in cases or TRAINING_CASES]
    libraries = dict.fromkeys(case.environment for case in chosen)
    environments = _with(libraries, here=here, yes=yes).on_one_thread()
    path = out / "training.json"
    keep = functools.partial(save, path=path)
    measure_training(
        chosen, QUICK_SEEDS if quick else seeds, _schedule(quick), environments, _say, keep
    )
    _said(path)


@app.command(name="all")
def everything(
    quick: Quick = False,
    here: Here = False,
    yes: Yes = False,
    out: Out = RESULTS,
) -> None:
    """Install what is missing, measure everything, report."""
    vector(quick=quick, here=here, yes=yes, out=out)
    sample(quick=quick, here=here, yes=yes, out=out)
    startup(quick=quick, here=here, yes=yes, out=out)
    actors(quick=quick, here=here, yes=yes, out=out)
    recovery(quick=quick, here=here, yes=yes, out=out)
    bus(quick=quick, out=out)
    policy(quick=quick, out=out)
    bridge(quick=quick, here=here, yes=yes, out=out)
    profile(quick=quick, out=out)
    training(quick=quick, here=here, yes=yes, out=out)
    report(out)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the result files.")] = RESULTS,
) -> None:
    """Write table.md, details.md and the figure from the results in a folder."""
    records = {kind: _load(folder / f"{kind}.json") for kind in KINDS if _exists(folder, kind)}
    if not records:
        raise typer.BadParameter(f"no result in {folder}; run `envbus bench vector` first")
    written = [folder / "table.md", folder / "details.md"]
    written[0].write_text(render_summary(records), "utf-8")
    written[1].write_text(render_details(records), "utf-8")
    drawn = [kind for kind in ("vector", "sample") if kind in records]
    try:
        from envbus.bench.report.plot import plot_sampling, plot_vector  # needs an extra

        for kind in drawn:
            plot = plot_vector if kind == "vector" else plot_sampling
            written += plot(records[kind], folder)
    except ModuleNotFoundError as exc:
        print(f"no figure: {exc}; {how_to_install('plot')}")
    for path in written:
        _said(path)


@app.command(name="check")
def check_result(
    results: Annotated[list[Path], typer.Argument(help="Result files of any kind.")],
) -> None:
    """Print each target, what was measured, and whether it is met."""
    verdicts = [verdict for path in results for verdict in check(_load(path))]
    print(render_verdicts(verdicts), end="")


def main(argv: list[str] | None = None) -> int:
    """Run the command with `argv` (None: the process's arguments); return its exit code."""
    try:
        with exit_on_termination():  # there are folders to remove, and processes to end
            app(args=argv, prog_name="envbus bench")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


def _schedule(quick: bool) -> Schedule:
    return QUICK if quick else FULL


def _compare(
    kind: str,
    cases: Sequence[Case],
    variants: Sequence[Variant],
    schedule: Schedule,
    environments: Environments,
    out: Path,
) -> None:
    path = out / f"{kind}.json"
    keep = functools.partial(save, path=path)
    measure_cases(kind, cases, variants, schedule, environments, _say, keep)
    _said(path)


def _requests(kind: str, environments: Environments, quick: bool, out: Path) -> None:
    schedule = REQUESTS_QUICK if quick else REQUESTS
    path = out / f"{kind}.json"
    keep = functools.partial(save, path=path)
    measure_requests(kind, schedule, environments, _say, keep)
    _said(path)


def _variants(names: list[str] | None, *, startup: bool) -> list[Variant]:
    _each(names or [], VARIANTS.__getitem__, "variant", VARIANTS)
    return variants_named(names, startup=startup)


def _environments(variants: Sequence[Variant], *, here: bool, yes: bool) -> Environments:
    return _with(dict.fromkeys(variant.library for variant in variants), here=here, yes=yes)


def _with(libraries: Iterable[str], *, here: bool, yes: bool) -> Environments:
    """Return the environments, with those made that were never tried."""
    if here:
        return Environments(shared_python=sys.executable)
    environments = Environments()
    missing = environments.missing(libraries)
    if missing:
        _install(environments, [LIBRARIES[name] for name in missing], yes=yes)
    return environments


def _install(environments: Environments, libraries: Sequence[Library], *, yes: bool) -> None:
    """Make environments, if whoever calls agrees.

    Raises:
        typer.BadParameter: There is nobody to ask.
        typer.Abort: They do not agree.
    """
    what = environments.describe([library.name for library in libraries])
    if yes:
        _say(what)
    elif sys.stdin.isatty():
        typer.confirm(f"{what}. Go on?", abort=True)
    else:
        raise typer.BadParameter(
            f"{what}. Say --yes, or --here to measure what this interpreter has, or choose by "
            "--variant"
        )
    for library in libraries:
        _say(f"{library.name}: installing")
        outcome = environments.install(library)
        _say(f"{library.name}: {outcome.failure or 'installed'}")


def _each(
    names: list[str], get: Callable[[str], T], what: str, known: Sequence[str] | dict[str, T]
) -> list[T]:
    found = []
    for name in names:
        try:
            found.append(get(name))
        except KeyError as exc:
            raise typer.BadParameter(
                f"there is no {what} {name!r}; there are {', '.join(known)}"
            ) from exc
    return found


def _parsed(text: str) -> Case:
    try:
        return parse_case(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def _load(path: Path) -> Record:
    try:
        return load(path)
    except (FileNotFoundError, ValueError) as exc:
        raise typer.BadParameter(str(exc)) from exc


def _exists(folder: Path, kind: str) -> bool:
    return (folder / f"{kind}.json").is_file()


def _save(record: Record, folder: Path) -> None:
    path = folder / f"{record['kind']}.json"
    save(record, path)
    _said(path)


def _say(line: str) -> None:
    print(line, flush=True)


def _said(path: Path) -> None:
    print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
