"""The rules of ARCHITECTURE.md that can be read from the imports."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.sources import ROOT, imported_modules, module_name, parse, source_files

#: Which packages of the project each package may import.
LAYERS = {
    "bus": {"bus"},
    "actors": {"bus", "actors"},
    "runner": {"bus", "actors", "runner"},
    "bench": {"bus", "actors", "runner", "bench"},
}
#: `envbus bench` and `envbus chaos` hand over to it, the one import against the direction.
EXCEPTIONS = {("envbus.runner.cli", "bench")}

#: Parts of the broker's core that are tested through `broker_core.py`.
COMPOSED = {
    "bus/admission.py",
    "bus/broker_vocabulary.py",
    "bus/control.py",
    "bus/dispatch.py",
}
CORE = COMPOSED | {
    "bus/broker_core.py",
    "bus/peers.py",
    "bus/pending.py",
    "bus/restart.py",
    "bus/routing.py",
    "bus/supervision.py",
}


def pure_files() -> list[str]:
    """Return what ARCHITECTURE.md says decides: `folder/file.py`, then `others.py` beside it."""
    lines = (ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines()
    first = lines.index("| decides (pure) | acts (shell) |") + 2
    found = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[first:]):
        folder = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            path, slash, file = name.rpartition("/")
            folder = path if slash else folder
            found.append(f"{folder}/{file}")
    return found


PURE = pure_files()
NOT_IN_CORE = {
    "asyncio",
    "multiprocessing",
    "os",
    "socket",
    "subprocess",
    "threading",
    "time",
    "zmq",
}
#: What a core file may use of the bus besides other core files.
VOCABULARY = {"bus/errors.py", "bus/invariants.py", "bus/messages.py", "bus/transport.py"}
NOT_IN_UNIT_TESTS = {"multiprocessing", "time", "zmq"}

SOURCES = [file for package in LAYERS for file in source_files(package)]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def roots(modules: Iterable[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def own_files(tree: ast.AST) -> set[str]:
    """Return the project's files that are imported, as `bus/errors.py`."""
    files = set()
    for module in imported_modules(tree):
        parts = module.split(".")
        if parts[0] == "envbus" and len(parts) > 2:
            file = ROOT.joinpath(*parts[1:]).with_suffix(".py")
            if file.is_file():
                files.add(relative(file))
    return files


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_imports_go_from_runner_to_actors_to_bus_only(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    reached = {
        module.split(".")[1]
        for module in imported_modules(parse(file))
        if module.startswith("envbus.")
    }
    reached -= {other for module, other in EXCEPTIONS if module == module_name(file)}
    assert reached <= LAYERS[package]


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_an_adapter_is_imported_by_nobody_else(file: Path) -> None:
    # The benchmark's own adapters use them as users do.
    if relative(file).startswith(("runner/adapters/", "bench/adapters/")):
        return
    modules = imported_modules(parse(file))
    assert not [module for module in modules if module.startswith("envbus.runner.adapters")]


def test_the_pure_files_are_those_of_the_architectures_table() -> None:
    assert len(PURE) == len(set(PURE)) > 50
    assert set(PURE) >= CORE
    assert [file for file in PURE if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_a_pure_file_reaches_no_socket_clock_thread_or_process(file: Path) -> None:
    tree = parse(file)
    calls_itself_pure = re.search(r"\bPure\b", ast.get_docstring(tree) or "")
    if calls_itself_pure or relative(file) in PURE:
        assert not roots(imported_modules(tree)) & NOT_IN_CORE


@pytest.mark.parametrize("file", sorted(CORE))
def test_a_core_file_imports_core_and_vocabulary_only(file: str) -> None:
    assert own_files(parse(ROOT / file)) <= CORE | VOCABULARY


@pytest.mark.parametrize("file", PURE)
def test_the_unit_tests_of_a_pure_file_wait_for_nothing(file: str) -> None:
    source = Path(file)
    tests = sorted((ROOT / "tests" / source.parent).glob(f"test_{source.stem}*.py"))
    assert tests or file in COMPOSED, f"{file} has no tests"
    for test in tests:
        assert not roots(imported_modules(parse(test))) & NOT_IN_UNIT_TESTS, test.name


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_every_module_says_what_it_is_for_and_what_it_offers(file: Path) -> None:
    tree = parse(file)
    assert ast.get_docstring(tree), "no docstring"
    if file.name == "__main__.py" or (file.name == "__init__.py" and not own_files(tree)):
        return
    offered = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert "__all__" in offered, "no __all__"


def test_router_sockets_are_made_in_one_place() -> None:
    # Which refuses what HTTP requests could pass for.
    makers = {
        relative(file)
        for file in SOURCES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "zmq.ROUTER"
    }
    assert makers == {"bus/zmq_sockets.py"}


def test_no_test_sleeps() -> None:
    sleeping = [
        relative(file)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}
    ]
    assert not sleeping


@pytest.mark.slow
def test_importing_the_runner_loads_no_library_of_an_extra() -> None:
    script = (
        "import sys, envbus.runner, envbus.runner.cli\n"
        "heavy = {'torch', 'ray', 'stable_baselines3', 'matplotlib', 'mujoco', 'ale_py',"
        " 'minigrid', 'pettingzoo', 'pygame'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("package", ["bus", "actors", "runner"])
def test_the_folders_cannot_be_imported_under_their_bare_names(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"ImportError: import envbus.{package}, not {package}" in done.stderr
