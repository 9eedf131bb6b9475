"""What holds for all tests."""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from envbus.bus.process.process_group import ProcessGroup
from envbus.runner.bridge import hosting
from envbus.runner.inference import policy_processes
from envbus.runner.workers import connections
from tests.alone import pytest_runtest_protocol
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

if TYPE_CHECKING:
    from envbus.runner.pool.pool import ActorPool

__all__ = [
    "common_imports",
    "pools",
    "pytest_collection",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "short_tmp_path",
]

# So that a failed `assert` of the contract tells the values.
pytest.register_assert_rewrite("envbus.runner.testing")

# A machine that is busy with other things draws examples slowly. Each run draws others; `make fuzz`
# draws for as long as is wanted.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    max_examples=50,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
)
hypothesis.settings.load_profile("patient")

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C, which
# tests send to programs that they start, would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Some ten thousand tests are looked through again at each garbage collection, of which tests of
# what is forgotten ask for many: a tenth of all time.
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `slow_but_first`, mark all but the first one `slow`."""
    quick: set[str] = set()
    for item in items:
        if item.get_closest_marker("slow_but_first") is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if test in quick:
            item.add_marker(pytest.mark.slow)
        quick.add(test)


#: What most test modules import. Many have envs, policies or simulators, for which each process
#: that has one imports the module.
COMMON_IMPORTS = (
    "pytest",
    "envbus.runner.group.env_runner_group",
    "envbus.runner.vector.vector_env",
)


@pytest.fixture(scope="session", autouse=True)
def common_imports() -> Iterator[None]:
    """Have fork servers import that once, not each of their children: it takes half a second."""

    def with_common_imports(preload: Sequence[str], *rest: Any, **settings: Any) -> ProcessGroup:
        return ProcessGroup((*preload, *COMMON_IMPORTS), *rest, **settings)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (connections, hosting, policy_processes):
            monkeypatch.setattr(module, "ProcessGroup", with_common_imports)
        yield


@pytest.fixture
def pools() -> Iterator[list[ActorPool]]:
    """Return a list for pools, which are killed at the end of the test."""
    made: list[ActorPool] = []
    yield made
    for pool in made:
        pool.close(terminate=True)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """As `tmp_path`, by a name that leaves room for a socket's, wherever pytest has its own."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)
