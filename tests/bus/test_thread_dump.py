from __future__ import annotations

import pytest

from envbus.bus.thread_dump import is_complete, tidy

WATCHDOG = """\
Thread 0x00007f01 (most recent call first):
  File "/site/envbus/bus/child.py", line 228 in _watch
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
  File "/site/envbus/bus/child.py", line 171 in _run
  File "/site/envbus/bus/child.py", line 70 in become_child
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
