from __future__ import annotations

import pytest

from envbus.bus.errors import ConfigError
from envbus.bus.process.threads import (
    GRANT_VARIABLE,
    THREAD_VARIABLES,
    ThreadsPerProcess,
    check_threads,
    granted_threads,
    parse_threads,
    thread_variables,
)


def given(threads: int) -> dict[str, str]:
    return dict.fromkeys((*THREAD_VARIABLES, GRANT_VARIABLE), str(threads))


@pytest.mark.parametrize(
    ("requested", "cores", "processes", "threads"),
    [
        ("auto", 64, 2, 32),
        ("auto", 64, 3, 21),
        ("auto", 2, 8, 1),
        ("auto", 4, 0, 4),
        (1, 64, 2, 1),
        (7, 2, 4, 7),
    ],
)
def test_auto_is_cores_over_processes_and_a_number_is_taken_as_it_is(
    requested: ThreadsPerProcess, cores: int, processes: int, threads: int
) -> None:
    environ = {"HOME": "/root", "OMP_NUM_THREADS": ""}
    found = thread_variables(requested, environ, cores=cores, processes=processes)
    assert found == given(threads)


@pytest.mark.parametrize("name", THREAD_VARIABLES)
@pytest.mark.parametrize("requested", ["auto", 1])
def test_one_variable_that_the_user_has_set_leaves_all_alone(
    name: str, requested: ThreadsPerProcess
) -> None:
    assert thread_variables(requested, {name: "4"}, cores=64, processes=2) == {}


def test_none_leaves_all_alone() -> None:
    assert thread_variables(None, {}, cores=64, processes=2) == {}
    assert thread_variables(None, given(8), cores=64, processes=2) == {}


def test_processes_of_a_process_share_what_it_was_given() -> None:
    assert thread_variables("auto", given(32), cores=64, processes=4) == given(8)
    assert thread_variables("auto", given(32), cores=2, processes=2) == given(1)
    assert thread_variables(3, given(32), cores=64, processes=4) == given(3)


def test_what_a_user_changes_in_a_process_that_was_given_threads_is_the_users() -> None:
    changed = {**given(32), "OMP_NUM_THREADS": "1"}
    assert thread_variables("auto", changed, cores=64, processes=2) == {}
    assert granted_threads(changed) is None


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "\u0662", "9" * 5000])
def test_a_grant_that_is_no_number_is_none(text: str) -> None:
    environ = {GRANT_VARIABLE: text}
    assert granted_threads(environ) is None
    assert thread_variables("auto", environ, cores=4, processes=2) == given(2)


def test_a_grant_is_read_back() -> None:
    assert granted_threads(given(32)) == 32
    assert granted_threads({}) is None


@pytest.mark.parametrize("requested", [0, -1, True, 1.0, "2", "Auto", "none", [1]])
def test_what_is_no_number_of_threads_is_refused(requested: object) -> None:
    with pytest.raises(ConfigError, match="threads_per_process must be 'auto', a positive integer"):
        check_threads(requested)


@pytest.mark.parametrize("requested", ["auto", None, 1, 64])
def test_what_is_a_number_of_threads_is_taken(requested: object) -> None:
    check_threads(requested)


@pytest.mark.parametrize(("text", "meant"), [("auto", "auto"), ("none", None), ("4", 4)])
def test_an_option_says_auto_none_or_a_number(text: str, meant: ThreadsPerProcess) -> None:
    assert parse_threads(text) == meant


@pytest.mark.parametrize("text", ["", "0", "-1", "None", "1.5", "many"])
def test_an_option_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="threads_per_process must be"):
        parse_threads(text)
