"""Result files to Markdown. Pure: records in, text out.

The summary shows the rows where envbus loses like all others; the details show every variant,
with spread and latency, and why a variant is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envbus.bench.harness.record import Record
from envbus.bench.report.targets import best_peer, check, render_verdicts, rows_by
from envbus.bench.steps.sample_variants import OURS_TORCH, SAMPLE_VARIANTS
from envbus.bench.steps.variants import BASELINE, FLOOR, OURS, SPINNING, SYNC, VARIANTS, Role

__all__ = ["conditions", "render_details", "render_summary"]

Row = dict[str, Any]

_TITLES = {
    "null": "null env (4 floats)",
    "cartpole": "CartPole-v1",
    "pixels": "pixels (4 x 84 x 84 uint8)",
    "dict": "Dict (image, 17 floats, Discrete)",
    "infos": "null env, 5 small values per info",
    "short": "null env, episodes of 4 steps, SAME_STEP",
    "frame": "frame (3 x 512 x 512 uint8)",
    "halfcheetah": "HalfCheetah-v5",
    "pong": "ALE/Pong-v5",
    "burn": "burns 200 us of CPU",
    "blas": "multiplies 300 x 300 matrices",
    "jitter": "waits, mean 2 ms, p99 20 ms",
    "team": "4 agents, steps are free",
}
#: What runs where, by kind of record.
_APART = {
    "bus": "the other end in a process of its own",
    "policy": "each way's worker in a process of its own",
    "bridge": "each server and each way's clients in processes of their own",
}
#: Kinds of records that are told here, in this order, and their titles.
_REQUEST_KINDS = {
    "bus": "The bus alone",
    "policy": "Policy workers",
    "bridge": "Simulators that ask for actions",
}
#: Title of the cases, and of the rate, if there is one.
_REQUEST_TITLES = {
    "bus": ("bus: payload", "messages/s"),
    "policy": ("actions of an MLP: observations", ""),
    "bridge": ("get_action: observation", "actions/s, 1,000 episodes"),
}
_STAND_IN = "(stand-in for RLlib's PolicyServerInput)"
#: Until 2026-11-23, `http` opened a connection for each request, and neither used Unix sockets.
_NAMES = {
    "http": f"HTTP and pickle {_STAND_IN}",
    "grpc": "gRPC",
    "http, Unix socket": f"HTTP and pickle, Unix socket {_STAND_IN}",
    "grpc, Unix socket": "gRPC, Unix socket",
}


def render_summary(records: Mapping[str, Record]) -> str:
    """Return the short tables, from the records at hand by kind."""
    parts = []
    if "vector" in records:
        record = records["vector"]
        parts += [conditions(record), _vector_summary(record), _first_come_table(record)]
    if "sample" in records:
        parts += [conditions(records["sample"]), _sampling_table(records["sample"])]
    if "startup" in records:
        parts.append(_startup_table(records["startup"]))
    if "actors" in records:
        parts += [conditions(records["actors"]), _actors_table(records["actors"])]
    if "recovery" in records:
        parts.append(_recovery_table(records["recovery"]))
    for kind in _REQUEST_KINDS:
        if kind in records:
            parts += [conditions(records[kind]), _requests_table(records[kind])]
    if "profile" in records:
        parts += [conditions(records["profile"])]
        parts += [_profile_table(records["profile"], way) for way in ("words", "messages")]
    if "training" in records:
        parts += [conditions(records["training"]), _training_table(records["training"])]
    return "\n".join(part for part in parts if part)


def render_details(records: Mapping[str, Record]) -> str:
    """Return every row with its spread, the targets, and the versions."""
    parts = ["# Benchmark details\n"]
    if "vector" in records:
        record = records["vector"]
        parts.append(conditions(record))
        workloads = dict.fromkeys(row["workload"] for row in record["rows"])
        parts += [_vector_details(record, workload) for workload in workloads]
    if "sample" in records:
        record = records["sample"]
        parts += ["# Sampling\n", conditions(record)]
        workloads = dict.fromkeys(row["workload"] for row in record["rows"])
        parts += [_vector_details(record, workload, "one fragment") for workload in workloads]
    for kind, title in _REQUEST_KINDS.items():
        if kind in records:
            record = records[kind]
            parts += [f"# {title}\n", conditions(record), _requests_table(record, spread=True)]
    verdicts = [verdict for record in records.values() for verdict in check(record)]
    if verdicts:
        parts.append("## Targets\n\n" + render_verdicts(verdicts))
    versions = {
        library: found
        for record in records.values()
        for library, found in record["versions"].items()
    }
    parts.append("## Versions\n\n" + _table(["environment", "versions"], _versions(versions)))
    return "\n".join(parts)


def _training_table(record: Record) -> str:
    cases: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in record["rows"]:
        case = row["label"], row["env"], row["num_envs"], row["steps"]
        cases.setdefault(case, {})[row["way"]] = row
    body = []
    for (label, env, num_envs, steps), ways in cases.items():
        cells = [f"{label}: {env}, {num_envs} envs, {steps:,} steps"]
        cells += [_trained(ways.get(way)) for way in ("envbus", "subprocesses", "one process")]
        body.append(cells)
    return _table(
        ["seconds of training (mean of the last returns)", "envbus", "subprocesses", "one process"],
        body,
    )


def _trained(row: Row | None) -> str:
    if row is None:
        return "-"
    if "seconds" not in row:
        return f"failed: {row['failure']}"
    found = row["seconds"]
    returns = row["returns"]
    mean = sum(returns) / len(returns)
    return (
        f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f}); "
        f"{mean:.0f} ({min(returns):.0f} to {max(returns):.0f})"
    )


def _vector_summary(record: Record) -> str:
    rows = rows_by(record, "workload", "num_envs", "variant")
    body = []
    for workload, num_envs in dict.fromkeys(
        (row["workload"], row["num_envs"]) for row in record["rows"]
    ):
        ours, baseline, spinning, in_process, floor = (
            rows.get((workload, num_envs, name)) for name in (OURS, BASELINE, SPINNING, SYNC, FLOOR)
        )
        peer = best_peer(record, workload, num_envs)
        body.append(
            [
                f"{_TITLES.get(workload, workload)}, {num_envs}",
                f"**{_rate(ours)}**{_cores(ours)}",
                _latency(ours),
                _with_ratio(baseline, ours),
                _with_ratio(peer, ours, label=True),
                _with_ratio(spinning, ours),
                _with_ratio(in_process, ours),
                _with_ratio(floor, ours),
            ]
        )
    head = [
        "env steps/s: workload, envs",
        "envbus",
        "its step p50 / p99",
        "AsyncVectorEnv",
        "best other library that blocks",
        "PufferLib, 1 worker, spins",
        "SyncVectorEnv, one process",
        "floor, not a library",
    ]
    note = (
        "Behind the comma: cores used. In brackets: how many times as fast envbus is; below 1 it "
        "is slower.\n"
    )
    return _table(head, body) + "\n" + note


def _first_come_table(record: Record) -> str:
    body = [
        [
            f"{_TITLES.get(row['workload'], row['workload'])}, {row['num_envs']}",
            _label(row["variant"]),
            _rate(row) + _cores(row),
            _latency(row),
        ]
        for row in record["rows"]
        if row["role"] == Role.FIRST_COME.value and row["status"] == "ok"
    ]
    if not body:
        return ""
    head = [
        "first come, first served: workload, envs",
        "",
        "env steps/s, cores used",
        "one batch p50 / p99",
    ]
    return _table(head, body)


def _sampling_table(record: Record) -> str:
    """Return all rows of a case, the fastest first, and how many times as fast envbus is."""
    rows = rows_by(record, "workload", "num_envs", "variant")
    body = []
    for workload, num_envs in dict.fromkeys((workload, number) for workload, number, _ in rows):
        case = [row for key, row in rows.items() if key[:2] == (workload, num_envs)]
        ours = rows.get((workload, num_envs, OURS_TORCH))
        title = f"{_TITLES.get(workload, workload)}, {num_envs}"
        for row in sorted(case, key=lambda row: -row["env_steps_per_second"]["median"]):
            rate = row["env_steps_per_second"]
            ratio = "" if ours is None else _times(ours, row)
            name = _label(row["variant"])
            if row["role"] == Role.OURS.value:
                name, ratio = f"**{name}**", ""
            spread = f"{_short(rate['q1'])} to {_short(rate['q3'])}"
            body.append([title, name, _short(rate["median"]) + _cores(row), spread, ratio])
            title = ""
    head = [
        "sampling with a policy: workload, envs",
        "",
        "env steps/s, cores used",
        "quartiles",
        "envbus, torch",
    ]
    note = (
        "envbus, torch: how many times as fast it is with a torch policy, which the others have.\n"
    )
    return _table(head, body) + "\n" + note


def _vector_details(record: Record, workload: str, step: str = "one vector step") -> str:
    numbers = list(
        dict.fromkeys(row["num_envs"] for row in record["rows"] if row["workload"] == workload)
    )
    by_variant: dict[str, dict[int, Row]] = {}
    for row in record["rows"]:
        if row["workload"] == workload:
            by_variant.setdefault(row["variant"], {})[row["num_envs"]] = row
    rates, latencies, missing = [], [], []
    for name, by_number in by_variant.items():
        label = _label(name)
        rates.append([label, *(_rate_with_spread(by_number.get(n)) for n in numbers)])
        latencies.append([label, *(_latency(by_number.get(n)) for n in numbers)])
        missing += [
            f"- {label}, {_envs(n)}: {row['reason']}"
            for n, row in by_number.items()
            if row["status"] != "ok"
        ]
    columns = [_envs(n) for n in numbers]
    text = (
        f"## {_TITLES.get(workload, workload)}\n\n"
        + _table(["env steps/s: median (quartiles), cores busy", *columns], rates)
        + "\n"
        + _table([f"{step}, us: p50 / p99", *columns], latencies)
    )
    return text + ("\nLeft out:\n\n" + "\n".join(missing) + "\n" if missing else "")


def _startup_table(record: Record) -> str:
    body = []
    for row in sorted(record["rows"], key=lambda row: (-row["num_envs"], row["status"] != "ok")):
        actors = row["options"].get("num_actors")
        name = _label(row["variant"]) + (f", {actors} actors" if actors else "")
        if row["status"] != "ok":
            body.append([str(row["num_envs"]), name, f"- ({row['reason']})", "", "", "", ""])
            continue
        body.append(
            [
                str(row["num_envs"]),
                name,
                f"{row['seconds']['median']:.2f}",
                *(f"{row[key]['median']:,.0f}" for key in ("pss_mb", "uss_mb", "rss_mb")),
                str(row["processes"]),
            ]
        )
    head = ["CartPole envs", "", "s to first reset", "PSS MB", "USS MB", "RSS MB", "processes"]
    return _table(head, body)


def _actors_table(record: Record) -> str:
    keys = (
        ("step_us", ",.0f"),
        ("step_us_per_actor", ".1f"),
        ("cores", ".1f"),
        ("pss_mb_per_actor", ".1f"),
        ("descriptors_per_actor", ".1f"),
        ("seconds", ".2f"),
    )
    body = []
    for row in record["rows"]:
        cells = [""] * len(keys)
        if row["status"] != "ok":
            cells[0] = f"- ({row['reason']})"
        else:
            cells = [format(row[key]["median"], form) for key, form in keys]
        body.append([str(row["num_actors"]), *cells])
    head = [
        "actors of one null env each",
        "one vector step, us",
        "per actor",
        "cores used",
        "PSS MB per actor",
        "descriptors per actor",
        "s to first reset",
    ]
    return _table(head, body)


def _recovery_table(record: Record) -> str:
    body = []
    for row in record["rows"]:
        name = _label(row["variant"])
        if row["status"] != "ok":
            body.append([name, f"- ({row['reason']})", "", ""])
        elif row["outcome"] == "recovered":
            median, p99 = row["seconds"]["median"] * 1e3, row["seconds_p99"] * 1e3
            body.append([name, "comes back by itself", f"{median:.0f} / {p99:.0f}", _others(row)])
        else:
            body.append([name, _broken(row), f"{row['by_hand']['median'] * 1e3:,.0f} by hand", "-"])
    head = [
        "kill -9 of a worker; CartPole, 16 envs",
        "what happens",
        "until its envs step again: ms, p50 / p99",
        "the others, env steps/s: before, during; these envs not asked, and a core lost besides",
    ]
    return _table(head, body)


def _others(row: Row) -> str:
    rates = row["others_env_steps_per_second"]
    if not rates:
        return "wait (lockstep)"
    before, during, not_asked, core_lost = (
        _short(rates[phase]) for phase in ("before", "during", "not_asked", "core_lost")
    )
    return f"{before}, {during}; {not_asked}, {core_lost}"


def _broken(row: Row) -> str:
    """Return what a library that does not survive the kill does."""
    errors = list(row["raised"])
    if errors == ["hangs"]:
        text = f"`step` hangs (over {row['surfaced']['median']:.0f} s)"
    else:
        text = f"{' or '.join(errors)} after {row['surfaced']['median'] * 1e3:.0f} ms"
    text += f", {row['left']} workers left"
    if "hangs" in row["close_error"]:
        text += ", `close` hangs"
    return text


def _profile_table(record: Record, way: str) -> str:
    rows = [row for row in record["rows"] if row["way"] == way]
    cases = list(dict.fromkeys((row["workload"], row["num_envs"]) for row in rows))
    values = {(row["piece"], row["workload"], row["num_envs"]): row["us"] for row in rows}
    body = [
        [piece, *(_microseconds(values.get((piece, *case))) for case in cases)]
        for piece in dict.fromkeys(row["piece"] for row in rows)
    ]
    head = [f"one vector step by {way}, us", *(f"{workload}, {_envs(n)}" for workload, n in cases)]
    return _table(head, body)


def _requests_table(record: Record, *, spread: bool = False) -> str:
    """Return all rows of a record of `_REQUEST_KINDS`.

    Args:
        record: With rows by case and way.
        spread: With the quartiles of each figure.
    """
    title, rate = _REQUEST_TITLES[record["kind"]]
    columns = [("p50_us", "p50 us", ".1f"), ("p99_us", "p99 us", ".1f")]
    if rate:
        columns.append(("per_second", rate, ",.0f"))
    body, missing = [], []
    for row in record["rows"]:
        name = _NAMES.get(row["way"], row["way"])
        body.append(
            [row["case"], name, *(_cell(row, key, form, spread) for key, _, form in columns)]
        )
        if row["status"] != "ok":
            missing.append(f"- {name}, {row['case']}: {row['reason']}")
    text = _table([title, "", *(head for _, head, _ in columns)], body)
    return text + ("\nLeft out:\n\n" + "\n".join(missing) + "\n" if missing else "")


def _cell(row: dict[str, Any], key: str, form: str, spread: bool) -> str:
    if key not in row:
        return "-"
    found = row[key]
    median = format(found["median"], form)
    return f"{median} ({found['q1']:{form}} to {found['q3']:{form}})" if spread else median


def _envs(number: int) -> str:
    return f"{number} env" if number == 1 else f"{number} envs"


def _label(variant: str) -> str:
    known = VARIANTS | SAMPLE_VARIANTS
    return known[variant].label if variant in known else variant


def _rate(row: Row | None) -> str:
    if row is None:
        return "-"
    return _short(row["env_steps_per_second"]["median"])


def _cores(row: Row | None) -> str:
    return "" if row is None else f", {row['cores']['median']:.1f}"


def _rate_with_spread(row: Row | None) -> str:
    if row is None or row["status"] != "ok":
        return "-"
    rate = row["env_steps_per_second"]
    return (
        f"{_short(rate['median'])} ({_short(rate['q1'])}-{_short(rate['q3'])}), "
        f"{row['cores']['median']:.1f}"
    )


def _latency(row: Row | None) -> str:
    if row is None or row["status"] != "ok":
        return "-"
    p50, p99 = row["latency_p50_us"]["median"], row["latency_p99_us"]["median"]
    return f"{_microseconds(p50)} / {_microseconds(p99)}"


def _with_ratio(row: Row | None, ours: Row | None, *, label: bool = False) -> str:
    if row is None:
        return "-"
    text = _rate(row) + _cores(row)
    if ours is not None:
        text += f" ({_times(ours, row)})"
    return f"{text} {row['variant']}" if label else text


def _times(one: Row, other: Row) -> str:
    ratio = one["env_steps_per_second"]["median"] / other["env_steps_per_second"]["median"]
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"


def _versions(versions: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    return [
        [library, ", ".join(f"{name} {version}" for name, version in found.items())]
        for library, found in versions.items()
    ]


def conditions(record: Record) -> str:
    """Return where, when, on which code and how a record was measured."""
    machine, schedule = record["machine"], record["schedule"]
    apart = _APART.get(record["kind"], "every library in its own process and environment")
    rounds, unit = (
        (schedule["starts"], "starts")
        if record["kind"] == "actors"
        else (schedule["rounds"], "interleaved rounds")
    )
    longer = "".join(
        f", of {workload} {times * schedule['seconds']:g} s"
        for workload, times in schedule.get("times_as_long", {}).items()
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}; commit {record['commit']}, "
        f"{record['date']}. Medians of {rounds} {unit} of "
        f"{schedule['seconds']:g} s each{longer}; {apart}.\n"
    )


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table; all columns but the first are of numbers."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---" if index == 0 else "---:" for index in range(len(head))) + "|",
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]
    return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    """Return three significant digits: `9.87k`, `1.23M`."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def _microseconds(value: float | None) -> str:
    """Return a time as it stands in a cell."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
