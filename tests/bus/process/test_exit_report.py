from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.process.exit_report import (
    ExitStatus,
    KillExplainer,
    innermost_line,
    is_complete,
    last_words,
    readable,
    tidy,
)

GIB = 2**30


# --- out of memory --------------------------------------------------------------------------


def explainer(*counts: int | None, limit: int | None = None) -> KillExplainer:
    return KillExplainer(iter(counts).__next__, lambda: limit)


def test_a_rise_of_the_counter_is_remembered_for_a_while() -> None:
    kills = explainer(2, 2, 3, 3, 3)
    assert not kills.explain(0, 10.0)
    assert kills.explain(0, 11.0)
    assert kills.explain(0, 13.5)
    assert not kills.explain(0, 14.5)


def test_the_counter_is_read_once_per_second_and_for_each_kill() -> None:
    kills = explainer(3, 3, 3, 4, 4, limit=4 * GIB)
    kills.look(10.0)
    kills.look(10.5)  # not again
    assert kills.explain(2 * GIB, 10.6) == ""
    for _ in range(2):  # two may be killed at once
        assert kills.explain(2 * GIB, 10.7) == (
            "out of memory, by the kernel's counter; its memory reached 2.0 GiB of 4.0 GiB"
        )


@pytest.mark.parametrize("counts", [[None, None], [None, 5], [5, None, 7], [5, 4]])
def test_a_counter_that_cannot_be_read_or_was_reset_tells_nothing(
    counts: list[int | None],
) -> None:
    kills = explainer(*counts)
    for now in range(1, len(counts)):
        assert not kills.explain(0, float(now))


@pytest.mark.parametrize(
    ("rose", "peak", "limit", "words"),
    [
        (False, 0, None, ""),
        (False, 3 * GIB, None, ""),
        (False, 3 * GIB, 4 * GIB, ""),
        (False, int(3.7 * GIB), 4 * GIB, "perhaps out of memory; its memory reached 3.7 GiB of 4"),
        (True, 300 * 2**20, 4 * GIB, "by the kernel's counter; its memory reached 300 MiB of 4.0"),
        (True, 3 * GIB, None, "by the kernel's counter; its memory reached 3.0 GiB"),
        (True, 0, 4 * GIB, "out of memory, by the kernel's counter"),
    ],
)
def test_a_kill_is_explained_by_counter_and_memory(
    rose: bool, peak: int, limit: int | None, words: str
) -> None:
    found = explainer(0, int(rose), limit=limit).explain(peak, 1.0)
    assert words in found
    assert bool(found) is bool(words)


# --- last words -----------------------------------------------------------------------------


def test_only_the_last_lines_are_shown() -> None:
    shown = last_words(b"".join(b"line %d\n" % number for number in range(1000)))
    assert shown.startswith("line 975\n")
    assert shown.endswith("\nline 999")


def test_what_a_terminal_would_not_show_is_left_out() -> None:
    assert last_words(b"\n\n\x1b[33mWARN\x1b[0m: a\n  1%\r 50%\r100%\n\xff\n\n") == (
        "WARN: a\n100%\n\N{REPLACEMENT CHARACTER}"
    )
    assert last_words(b"") == last_words(b"\n \n") == ""


def test_a_crash_is_shown_from_where_it_names_its_cause() -> None:
    frames = b"".join(b'  File "env.py", line %d in f\n' % number for number in range(100))
    tail = (
        b"a warning\nFatal Python error: Segmentation fault\n\n"
        b"Current thread 0x01 (most recent call first):\n" + frames + b"\nExtension modules: a, b\n"
    )
    shown = last_words(tail).splitlines()
    assert shown[:2] == ["a warning", "Fatal Python error: Segmentation fault"]
    assert shown[3] == '  File "env.py", line 0 in f'
    assert len(shown) == 25


@pytest.mark.parametrize("head", [b"", b"Fatal Python error: Aborted\n"])
def test_long_lines_are_cut(head: bytes) -> None:
    assert len(last_words(head + b"x" * 16_000)) < 4100


# --- stacks of threads -----------------------------------------------------------------------


WATCHDOG = """\
Thread 0x00007f01 (most recent call first):
  File "/site/envbus/bus/process/child.py", line 228 in _watch
  File "/lib/threading.py", line 982 in run
"""
OTHER = """\
Thread 0x00007f02 (most recent call first):
  File "/user/physics.py", line 7 in solve
"""
MAIN = """\
Current thread 0x00007f03 (most recent call first):
  File "/user/env.py", line 12 in step
  File "/site/envbus/actors/slots.py", line 100 in step
  File "/site/envbus/bus/process/child.py", line 171 in _run
  File "/site/envbus/bus/process/child.py", line 70 in become_child
"""


def test_the_main_thread_comes_first_without_what_is_not_of_the_child() -> None:
    assert tidy(f"{WATCHDOG}\n{OTHER}\n{MAIN}") == [
        *MAIN.splitlines()[:3],
        *OTHER.splitlines(),
    ]


def test_what_stands_before_the_threads_stays_there() -> None:
    head = "Fatal Python error: Aborted"
    assert tidy(f"{head}\n\n{OTHER}\n{MAIN}\nExtension modules: a, b (total: 2)\n") == [
        head,
        *MAIN.splitlines()[:3],
        *OTHER.splitlines(),
    ]
    assert tidy("") == []


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", False),
        (OTHER, False),
        (f"{OTHER}\nCurrent thread 0x00007f03 (most recent call first):\n", False),
        (f"{OTHER}\n{MAIN}"[:-1], False),
        (f"{OTHER}\n{MAIN}", True),
    ],
)
def test_the_main_thread_is_the_last_to_be_written(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        (["/user/sims/env.py", "/site/envbus/actors/env/slots.py"], "sims/env.py:1 in f0"),
        (["/usr/lib/python3.11/threading.py", "/user/sims/env.py"], "sims/env.py:2 in f1"),
        (
            ["/usr/lib/python3.11/site-packages/ale_py/env.py", "/user/env.py"],
            "ale_py/env.py:1 in f0",
        ),
        (
            ["/usr/lib/python3.11/threading.py", "/site/envbus/actors/env/slots.py"],
            "python3.11/threading.py:1 in f0",
        ),
        (["/site/envbus/bus/wire.py", "/user/env.py"], "bus/wire.py:1 in f0"),
        (["<frozen importlib>", "/user/env.py"], "user/env.py:2 in f1"),
        ([], ""),
    ],
)
def test_the_innermost_line_is_the_guests_own(frames: list[str], line: str) -> None:
    lines = [f'  File "{file}", line {i + 1} in f{i}' for i, file in enumerate(frames)]
    text = "\n".join([MAIN.splitlines()[0], *lines, *OTHER.splitlines()])
    assert innermost_line(text) == line


def test_a_text_without_stacks_has_no_innermost_line() -> None:
    assert innermost_line("") == innermost_line("no stack of process 3: it has ended") == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (ExitStatus(code=9), "exit code 9"),
        (ExitStatus(code=0), "exit code 0"),
        (ExitStatus(signal=9), "signal SIGKILL"),
        (ExitStatus(signal=11), "signal SIGSEGV"),
        (ExitStatus(signal=63), "signal 63"),
        (ExitStatus(signal=9, note="its server died"), "signal SIGKILL (its server died)"),
    ],
)
def test_an_exit_status_has_words(status: ExitStatus, words: str) -> None:
    assert status.describe() == words


# --- the end of a stream --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        (b"", ""),
        (b"one\n\n two\t2\n", "one\n two    2"),
        (b"10%\r50%\r100%\r\ndone\r\n", "100%\ndone"),
        (b"\x1b[1;31mred\x1b[0m \x1b[2Kgone", "red gone"),
        (
            b"\x1b]0;title\x07 \x9b31m \x00\x7f",
            "\\x1b]0;title\\x07 \N{REPLACEMENT CHARACTER}31m \\x00\\x7f",
        ),
        ("\u202egnp.exe \x9b31m \u2028 \xe9".encode(), "\\u202egnp.exe \\x9b31m \\u2028 \xe9"),
        (b"<b>\xff[red]", "<b>\N{REPLACEMENT CHARACTER}[red]"),
    ],
)
def test_a_stream_is_shown_without_what_a_terminal_would_obey(tail: bytes, shown: str) -> None:
    assert readable(tail, is_cut=False) == shown


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        (b"f a line\nwhole\n", "whole"),
        (b"one line without an end", "one line without an end"),
        (b"one line\n", "one line"),
        (b"\xa4\nwhole", "whole"),
    ],
)
def test_a_stream_that_is_cut_is_shown_from_a_lines_beginning(tail: bytes, shown: str) -> None:
    assert readable(tail, is_cut=True) == shown


@given(st.binary(), st.booleans())
def test_of_any_bytes_only_lines_that_can_be_printed_are_shown(tail: bytes, is_cut: bool) -> None:
    lines = readable(tail, is_cut=is_cut).split("\n")
    assert all(line.isprintable() for line in lines)
