"""How many threads NumPy, PyTorch and their like may start in each of several processes: the rule.

Each of these libraries starts a thread per core, in each process, unless a variable of the
environment says otherwise; together they then hold each other up. Pure: no environment is read or
written here. Leaves out how a process gets the variables (`process_group.py`), and what becomes of
libraries that it has loaded before (`child.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from envbus.bus.settings import positive_int

__all__ = [
    "GRANT_VARIABLE",
    "THREAD_VARIABLES",
    "ThreadsPerProcess",
    "check_threads",
    "granted_threads",
    "parse_threads",
    "thread_variables",
]

#: A number as it is; "auto": cores over processes, at least one; None: nothing is set.
ThreadsPerProcess: TypeAlias = int | Literal["auto"] | None

#: What the libraries read when they are loaded.
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
#: Tells a process the number that it was given: which of the variables above are not its user's,
#: and how many cores it may share out among processes of its own.
GRANT_VARIABLE: Final = "ENVBUS_THREADS"
#: Digits of the largest number that is read.
_MOST_DIGITS: Final = 6


def check_threads(requested: object) -> None:
    """See that `requested` is a `ThreadsPerProcess`.

    Raises:
        ConfigError: It is not.
    """
    if requested is None or requested == "auto":
        return
    wanted = "'auto', a positive integer, or None (as the libraries choose)"
    positive_int("threads_per_process", requested, wanted=wanted)


def parse_threads(text: str) -> ThreadsPerProcess:
    """Return what a command's option means: "auto", "none", or a number.

    Raises:
        ConfigError: None of these.
    """
    if text in ("auto", "none"):
        return "auto" if text == "auto" else None
    threads = int(text) if _is_number(text) else 0
    check_threads(threads or text)
    return threads


def thread_variables(
    requested: ThreadsPerProcess, environ: Mapping[str, str], *, cores: int, processes: int
) -> dict[str, str]:
    """Return the variables that each process gets besides; none: all is left as it is.

    Args:
        requested: By whoever starts the processes.
        environ: Theirs. One of `THREAD_VARIABLES` that the user has set leaves all as it is.
        cores: That the starting process may use. Of those it may have been granted fewer.
        processes: How many share them.
    """
    if requested is None or _are_users(environ):
        return {}
    if requested == "auto":
        granted = granted_threads(environ)
        requested = max((cores if granted is None else min(granted, cores)) // max(processes, 1), 1)
    return dict.fromkeys((*THREAD_VARIABLES, GRANT_VARIABLE), str(requested))


def granted_threads(environ: Mapping[str, str]) -> int | None:
    """Return how many threads a process was given by `thread_variables`; None: it was not."""
    text = environ.get(GRANT_VARIABLE, "")
    if not _is_number(text) or _are_users(environ):
        return None
    return int(text) or None


def _are_users(environ: Mapping[str, str]) -> bool:
    """Whether a user has set one of the variables; empty ones say nothing."""
    ours = environ.get(GRANT_VARIABLE, "")
    return any(environ.get(name, "") not in ("", ours) for name in THREAD_VARIABLES)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
