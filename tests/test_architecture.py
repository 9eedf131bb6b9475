"""The rules of ARCHITECTURE.md that can be read from the imports."""

from __future__ import annotations

import ast
import collections
import graphlib
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
#: `envbus bench` hands over to it, the one import against the direction.
EXCEPTIONS = {("envbus.runner.cli.main", "bench")}

#: Parts of the broker's core that are tested through `broker_core.py`.
COMPOSED = {
    "bus/broker/events.py",
    "bus/broker/control.py",
    "bus/broker/requests.py",
}
CORE = COMPOSED | {
    "bus/broker/core.py",
    "bus/broker/peers.py",
    "bus/broker/deadlines.py",
    "bus/supervision/restart.py",
    "bus/supervision/supervision.py",
}


def pure_files() -> list[str]:
    """Return the files of `pure_modules.txt`: they decide, and others act."""
    lines = Path(__file__).with_name("pure_modules.txt").read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


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
    "bus/wire/messages.py",
    "bus/wire/frames.py",
    "bus/transport/interface.py",
}
NOT_IN_UNIT_TESTS = {"multiprocessing", "time", "zmq"}

TESTS = sorted((ROOT / "tests").rglob("*.py"))
A_MINUTE = 60.0
#: Where the ways to wait are, and examples of what is not allowed.
MAY_SLEEP = {
    "tests/integration/group_children.py",
    "tests/test_architecture.py",
    "tests/waiting.py",
}
#: Programs in strings, which cannot import `tests.waiting`, and how often they sleep.
SLEEPING_PROGRAMS = {
    "tests/bus/process/test_forkserver.py": 1,
    "tests/integration/processes/test_no_process_left.py": 2,
}
#: What tests replace, and why nothing can be handed in. Limits (names in capitals) are left out,
#: and what `monkeypatch` has methods for: environment, working directory, `sys.path`, items.
PATCHED = {
    ("tests/bus/gateway/test_gateway.py", "ProcessGroup.start"): "Ctrl-C comes at that place",
    (
        "tests/bus/gateway/test_gateway.py",
        "Pipe.send_bytes",
    ): "passed descriptors are noted on their way",
    (
        "tests/bus/memory/test_arena.py",
        "envbus.bus.memory.arena.memory_left",
    ): "a container with little memory",
    ("tests/bus/memory/test_arena.py", "os.memfd_create"): "an older system",
    ("tests/bus/test_folders.py", "tempfile.tempdir"): "what `tempfile` remembers of TMPDIR",
    (
        "tests/bus/process/test_server_process.py",
        "envbus.bus.process.server_process.os.fstat",
    ): "another thread comes at that place",
    (
        "tests/bus/process/test_server_process.py",
        "sys.path",
    ): "the interpreter's state is the subject",
    (
        "tests/bus/wire/test_dynamic_values.py",
        "msgpack_numpy.pickle.loads",
    ): "it must not be called",
    ("tests/bus/wire/test_dynamic_values.py", "pickle.dumps"): "it must not be called",
    ("tests/conftest.py", "module.ProcessGroup"): "what all test modules import is imported once",
    ("tests/fuzz/test_corpus.py", "importlib.util.find_spec"): "atheris is not installed",
    (
        "tests/integration/processes/test_interrupts.py",
        "HostedThread.start",
    ): "Ctrl-C comes at that place",
    (
        "tests/integration/processes/test_interrupts.py",
        "PolicyConnections.close",
    ): "Ctrl-C comes at that place",
    (
        "tests/integration/processes/test_interrupts.py",
        "sys.unraisablehook",
    ): "what is swallowed is noted",
    (
        "tests/integration/bus/test_local_first.py",
        "local_listener.StreamEnd.is_of_this_user",
    ): "another user",
    (
        "tests/integration/processes/test_process_group_processes.py",
        "process_group_module._socket_pairs",
    ): "sockets that hold little",
    (
        "tests/integration/processes/test_process_group_processes.py",
        "process_group_module.last_words",
    ): "a machine without memory",
    (
        "tests/integration/processes/test_process_group_processes.py",
        "sys.argv",
    ): "the interpreter's state is the subject",
    (
        "tests/integration/sampling/test_policy_runners.py",
        "PolicyConnections.ask",
    ): "calls are noted on their way",
    (
        "tests/integration/envs/test_vector_env_deaths.py",
        "tempfile.tempdir",
    ): "as in `test_folders.py`",
    (
        "tests/integration/sampling/test_policy_worker_faults.py",
        "LocalLinkEnd.write",
    ): "a program without descriptors",
    (
        "tests/integration/sampling/test_policy_worker_faults.py",
        "ProcessGroup.start",
    ): "a machine without memory",
    ("tests/runner/bridge/test_hosting.py", "hosting.run_env"): "there is no bridge",
    ("tests/runner/group/test_env_runner_group.py", "Rounds.ready"): "all are started again",
    (
        "tests/runner/group/test_env_runner_group.py",
        "Rounds.take_events",
    ): "Ctrl-C comes at that place",
    ("tests/runner/group/test_sample_memory.py", "Arena.create"): "a machine without memory",
    (
        "tests/runner/pool/test_polling.py",
        "ObservationStore.single",
    ): "a machine without memory",
    ("tests/runner/recordings/test_writer.py", "pq.write_table"): "Ctrl-C comes at that place",
    (
        "tests/runner/vector/test_vector_env.py",
        "ObservationStore.batch",
    ): "a machine without memory",
    (
        "tests/runner/vector/test_vector_env.py",
        "gymnasium.vector.AsyncVectorEnv",
    ): "users do the same",
}

SOURCES = [file for package in LAYERS for file in source_files(package)]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def roots(modules: Iterable[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def own_files(file: Path) -> set[str]:
    """Return the project's files that the file imports, as `bus/errors.py`."""
    files = set()
    for module in imported_modules(file):
        parts = module.split(".")
        if parts[0] == "envbus" and len(parts) > 2:
            imported = ROOT.joinpath(*parts[1:]).with_suffix(".py")
            if imported.is_file():
                files.add(relative(imported))
    return files


def test_imports_go_from_runner_to_actors_to_bus_only() -> None:
    against = {
        (module_name(file), reached)
        for file in SOURCES
        for reached in {
            module.split(".")[1]
            for module in imported_modules(file)
            if module.startswith("envbus.")
        }
        - LAYERS[file.relative_to(ROOT).parts[0]]
    }
    assert against == EXCEPTIONS


def test_imports_between_folders_go_one_way() -> None:
    folders: dict[str, set[str]] = collections.defaultdict(set)
    for file in SOURCES:
        if file.name != "__init__.py":
            reached = {other.rpartition("/")[0] for other in own_files(file)}
            folders[relative(file.parent)] |= reached - {relative(file.parent)}
    folders["runner/cli"] -= {other for _, other in EXCEPTIONS}
    order = list(graphlib.TopologicalSorter(folders).static_order())  # its error names a cycle
    assert order.index("bus/wire") < order.index("actors/env") < order.index("runner/vector")


def test_a_folder_holds_few_files_and_says_what_it_is_and_who_imports_it() -> None:
    for folder, files in collections.Counter(file.parent for file in SOURCES).items():
        assert files <= 16, relative(folder)
        says = ast.get_docstring(parse(folder / "__init__.py")) or ""
        assert len(re.findall(r"\.(?=\s|$)", says)) >= 2, f"{relative(folder)}: what, and for whom"


def test_an_adapter_is_imported_by_nobody_else() -> None:
    for file in SOURCES:
        # The benchmark's own adapters and programs use them as users do.
        users = "runner/adapters/", "bench/adapters/", "bench/training/"
        if not relative(file).startswith(users):
            modules = imported_modules(file)
            adapters = [m for m in modules if m.startswith("envbus.runner.adapters")]
            assert not adapters, relative(file)


def test_the_pure_modules_that_are_listed_exist() -> None:
    assert len(PURE) == len(set(PURE)) > 50
    assert set(PURE) >= CORE
    assert [file for file in PURE if not (ROOT / file).is_file()] == []


def test_a_pure_file_reaches_no_socket_clock_thread_or_process() -> None:
    for file in SOURCES:
        calls_itself_pure = re.search(r"\bPure\b", ast.get_docstring(parse(file)) or "")
        if calls_itself_pure or relative(file) in PURE:
            assert not roots(imported_modules(file)) & NOT_IN_CORE, relative(file)


def test_a_core_file_imports_core_and_vocabulary_only() -> None:
    for file in CORE:
        assert own_files(ROOT / file) <= CORE | VOCABULARY, file


def test_the_unit_tests_of_a_pure_file_wait_for_nothing() -> None:
    for file in PURE:
        source = Path(file)
        tests = sorted((ROOT / "tests" / source.parent).glob(f"test_{source.stem}*.py"))
        assert tests or file in COMPOSED, f"{file} has no tests"
        for test in tests:
            assert not roots(imported_modules(test)) & NOT_IN_UNIT_TESTS, test.name


def test_every_module_says_what_it_is_for_and_what_it_offers() -> None:
    for file in SOURCES:
        tree = parse(file)
        assert ast.get_docstring(tree), f"{relative(file)}: no docstring"
        if file.name == "__main__.py" or (file.name == "__init__.py" and not own_files(file)):
            continue
        offered = [
            target.id
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in offered, f"{relative(file)}: no __all__"


def test_router_sockets_are_made_in_one_place() -> None:
    # Which refuses what HTTP requests could pass for.
    makers = {
        relative(file)
        for file in SOURCES
        if "ROUTER" in file.read_text("utf-8")
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "zmq.ROUTER"
    }
    assert makers == {"bus/transport/zmq_sockets.py"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_is_patched_but_settings_limits_and_what_is_listed() -> None:
    patched = {
        (relative(file), target)
        for file in TESTS
        for target in patches(parse(file))
        if not target.rpartition(".")[2].lstrip("_").isupper()
    }
    assert sorted(patched) == sorted(PATCHED)
    for file in TESTS:
        assert not {m for m in imported_modules(file) if "mock" in m}, relative(file)


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
        "import sys, envbus.runner, envbus.runner.cli.main\n"
        "heavy = {'torch', 'ray', 'stable_baselines3', 'matplotlib', 'mujoco', 'ale_py',"
        " 'minigrid', 'pettingzoo', 'pygame', 'textual', 'tianshou', 'torchrl', 'tensordict',"
        " 'starlette', 'uvicorn', 'prometheus_client', 'onnxruntime', 'pyarrow', 'minari',"
        " 'imageio', 'cv2'}\n"
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


def test_the_name_of_a_class_stands_once_in_the_project() -> None:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for file in SOURCES:
        for name in re.findall(r"^class (\w+)", file.read_text("utf-8"), re.MULTILINE):
            found[name].append(relative(file))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
