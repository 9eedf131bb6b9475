"""The rules of ARCHITECTURE.md that can be read from the imports."""

from __future__ import annotations

import ast
import collections
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
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
    "bus/broker_vocabulary.py",
    "bus/control.py",
    "bus/dispatch.py",
}
CORE = COMPOSED | {
    "bus/broker_core.py",
    "bus/peers.py",
    "bus/pending.py",
    "bus/restart.py",
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
VOCABULARY = {
    "bus/brief.py",
    "bus/settings.py",
    "bus/errors.py",
    "bus/invariants.py",
    "bus/messages.py",
    "bus/transport.py",
}
NOT_IN_UNIT_TESTS = {"multiprocessing", "time", "zmq"}

TESTS = sorted((ROOT / "tests").rglob("*.py"))
A_MINUTE = 60.0
#: Where the ways to wait are, and examples of what is not allowed.
MAY_SLEEP = {
    "tests/integration/nursery_children.py",
    "tests/test_architecture.py",
    "tests/waiting.py",
}
#: Programs in strings, which cannot import `tests.waiting`, and how often they sleep.
SLEEPING_PROGRAMS = {
    "tests/bus/test_forkserver.py": 1,
    "tests/integration/test_no_process_left.py": 1,
}
#: What tests replace, and why nothing can be handed in. Limits (names in capitals) are left out,
#: and what `monkeypatch` has methods for: environment, working directory, `sys.path`, items.
PATCHED = {
    ("tests/actors/test_testing.py", "gymnasium.logger.min_level"): "Gymnasium's own setting",
    ("tests/bus/gateway/test_gateway.py", "Nursery.start"): "Ctrl-C comes at that place",
    ("tests/bus/gateway/test_gateway.py", "Pipe.send_bytes"): "parcels are noted on their way",
    ("tests/bus/test_arena.py", "envbus.bus.arena.memory_left"): "a container with little memory",
    ("tests/bus/test_arena.py", "os.memfd_create"): "an older system",
    ("tests/bus/test_folders.py", "tempfile.tempdir"): "what `tempfile` remembers of TMPDIR",
    ("tests/bus/test_server_process.py", "sys.path"): "the interpreter's state is the subject",
    ("tests/bus/test_tree.py", "msgpack_numpy.pickle.loads"): "it must not be called",
    ("tests/bus/test_tree.py", "pickle.dumps"): "it must not be called",
    ("tests/fuzz/test_corpus.py", "importlib.util.find_spec"): "atheris is not installed",
    ("tests/integration/test_interrupts.py", "HostedThread.start"): "Ctrl-C comes at that place",
    ("tests/integration/test_interrupts.py", "PolicyLanes.close"): "Ctrl-C comes at that place",
    ("tests/integration/test_interrupts.py", "sys.unraisablehook"): "what is swallowed is noted",
    (
        "tests/integration/test_near_peer.py",
        "lane_listener.StreamEnd.is_of_this_user",
    ): "another user",
    ("tests/integration/test_nursery.py", "sys.argv"): "the interpreter's state is the subject",
    ("tests/integration/test_policy_runners.py", "PolicyLanes.ask"): "calls are noted on their way",
    ("tests/integration/test_vector_env_deaths.py", "tempfile.tempdir"): "as in `test_folders.py`",
    ("tests/runner/group/test_sample_memory_joint.py", "Arena.create"): "a machine without memory",
    ("tests/runner/group/test_sample_memory.py", "Arena.create"): "a machine without memory",
    ("tests/runner/test_vector_env.py", "gymnasium.vector.AsyncVectorEnv"): "users do the same",
}

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


def test_nobody_sleeps_but_by_name() -> None:
    slept = [
        f"{relative(file)}:{line}"
        for file in TESTS
        if relative(file) not in MAY_SLEEP
        for line in sleeps(parse(file))
    ]
    by_file = collections.Counter(place.partition(":")[0] for place in slept)
    assert by_file == SLEEPING_PROGRAMS, slept


def sleeps(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that spend less than a minute; what sleeps longer stands for what hangs."""
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Call) and node.args:
            if re.search(r"\bsleep$|\bEvent\(\)\.wait$", ast.unparse(node.func)):
                text = f"sleep({ast.unparse(node.args[0])})"
        elif isinstance(node, ast.List):
            text = re.sub(r"^\['sleep', '([^']+)'\]$", r"sleep(\1)", ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        for seconds in re.findall(r"\bsleep\(([^)]*)(?:\)|$)", text):
            is_number = re.fullmatch(r"[\d.]+", seconds)
            if not is_number or 0 < float(seconds) < A_MINUTE:
                yield node.lineno


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("time.sleep(1)", True),
        ("sleep(seconds)", True),
        ("asyncio.sleep(0.2)", True),
        ("asyncio.sleep(0)", False),
        ("threading.Event().wait(1.5)", True),
        ("threading.Event().wait()", False),
        ("subprocess.run(['sleep', '0.6'])", True),
        ("subprocess.Popen(['sleep', '600'])", False),
        ("run('import time; time.sleep(2)')", True),
        ("run(f'time.sleep({delay})')", True),
        ("pass_time(0.2)", False),
    ],
)
def test_every_way_to_sleep_is_found(source: str, found: bool) -> None:
    assert bool(list(sleeps(ast.parse(source)))) == found


def test_nothing_is_patched_but_settings_limits_and_what_is_listed() -> None:
    patched = {
        (relative(file), target)
        for file in TESTS
        for target in patches(parse(file))
        if not target.rpartition(".")[2].lstrip("_").isupper()
    }
    assert sorted(patched) == sorted(PATCHED)
    for file in TESTS:
        assert not {m for m in imported_modules(parse(file)) if "mock" in m}, relative(file)


def patches(tree: ast.AST) -> Iterator[str]:
    """Yield what of a module or an object is replaced; environment, folder and path are not."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func) in {"monkeypatch.setattr", "monkeypatch.delattr"}:
            first, second = ast.unparse(node.args[0]).strip("'\""), node.args[1:2]
            is_name = second and isinstance(second[0], ast.Constant)
            if first[0].islower() and "." in first and isinstance(node.args[0], ast.Constant):
                yield first
            else:
                yield f"{first}.{second[0].value}" if is_name else first  # type: ignore[union-attr]


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
