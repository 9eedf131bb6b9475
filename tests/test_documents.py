"""What the documents print works as printed, and their links lead somewhere.

A Python snippet is run as a script of its own; those of a tutorial, one after the other, as one. A
snippet below `<!-- fragment -->` needs what the page does not show, and is compiled only.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.sources import ROOT

PAGES = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "examples/**/*.md", "*/README.md")
    for file in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^(<!-- fragment -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
#: Runs each script in one process, as programs that have it for themselves.
RUN_ALL = """
import runpy, sys
for name in sys.argv[1:]:
    runpy.run_path(name, run_name="__main__")
"""
#: Their snippets want a bridge, and are run by `tests/examples/test_external_simulators.py`.
RUN_ELSEWHERE = {"docs/external-simulators.md"}
#: What the snippets of a page need besides, and `make test` does not install.
NEEDS_MORE = {"docs/how-to/stable-baselines3.md": "stable_baselines3"}
#: Commands that have commands of their own.
GROUPS = ("bench", "keys")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str, *, fragments: bool = False) -> list[str]:
    found = BLOCK.findall(page.read_text("utf-8"))
    return [text for mark, kind, text in found if kind == language and bool(mark) == fragments]


def scripts(page: Path) -> list[str]:
    found = blocks(page, "python")
    return ["".join(found)] if found and page.parent.name == "tutorials" else found


def commands(program: str) -> list[list[str]]:
    """Return the arguments of each `$ program ...` that is printed."""
    text = "".join(text for page in PAGES for text in blocks(page, "console"))
    lines = re.findall(rf"^\$ {program} ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


TO_RUN = [page for page in PAGES if scripts(page) and name_of(page) not in RUN_ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("page", TO_RUN, ids=name_of)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if name_of(page) in NEEDS_MORE:
        pytest.importorskip(NEEDS_MORE[name_of(page)])
    files = []
    for number, script in enumerate(scripts(page), 1):
        files.append(f"snippet_{number}.py")
        (tmp_path / files[-1]).write_text(script, "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_fragments_of_a_page_are_python(page: Path) -> None:
    for fragment in blocks(page, "python", fragments=True):
        compile(textwrap.dedent(fragment), name_of(page), "exec")


#: By library of the page about trackers: what prints, behind its fragment, a number that it has.
LOGGED = {
    "tensorboard": """
writer.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("runs/cartpole").Reload()
print(events.Scalars(NAME)[-1].value, events.Scalars(NAME)[-1].step)
""",
    "wandb": """
from pathlib import Path
run.log({}, commit=True)
last = run.summary[NAME], run.step - 1
run.finish()
assert list(Path().glob("wandb/offline-run-*/*.wandb"))
print(*last)
""",
    "mlflow": """
run = mlflow.active_run().info.run_id
last = mlflow.MlflowClient().get_metric_history(run, NAME)[-1]
mlflow.end_run()
print(last.value, last.step)
""",
}
SAMPLE = """
pool = ActorPool(["CartPole-v1"] * 2, autoreset_mode="Disabled")
with EnvRunner(pool, RandomPolicy(pool.single_action_space), config) as runner:
    for _ in range(2):
        runner.sample(num_env_steps=50)
NAME = "num_env_steps_sampled_lifetime"
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", LOGGED)
def test_a_tracker_has_the_numbers_that_its_snippet_hands_it(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    if library == "tensorboard":
        pytest.importorskip("torch")
    page = ROOT / "docs/how-to/trackers.md"
    (snippet,) = (text for text in blocks(page, "python", fragments=True) if library in text)
    (tmp_path / "program.py").write_text(scripts(page)[0] + snippet + SAMPLE + LOGGED[library])
    offline = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value, step = done.stdout.split()[-2:]
    assert float(value) == int(step) == 100


class _Bare(ast.NodeTransformer):
    """Leaves out what a page is spared: annotations, docstrings, and imports."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        node.bases = bases
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def _without_docstring(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            del node.body[0]
        return self.generic_visit(node)


def bare_classes(source: str) -> dict[str, str]:
    found = [part for part in ast.parse(source).body if isinstance(part, ast.ClassDef)]
    return {part.name: ast.unparse(_Bare().visit(part)) for part in found}


def test_the_classes_of_the_page_about_sources_of_envs_are_those_that_are_tested() -> None:
    page = ROOT / "docs/how-to/sources-of-envs.md"
    printed = bare_classes("\n".join(blocks(page, "python", fragments=True)))
    tested = (ROOT / "tests/integration/envs/test_env_sources.py").read_text("utf-8")
    assert printed.keys() == {"DmEnv", "BraxEnv"}
    assert printed.items() <= bare_classes(tested).items()


COMMANDS = commands("envbus")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "command",
    sorted({tuple(words[: 2 if words[0] in GROUPS else 1]) for words in COMMANDS}),
    ids=" ".join,
)
def test_a_command_and_its_options_exist(command: tuple[str, ...]) -> None:
    words = [word for word in command if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-m", "envbus.bench.entry", *words, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    offered = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
    printed = [words for words in COMMANDS if tuple(words[: len(command)]) == command]
    used = {word for words in printed for word in words if word.startswith("--")}
    assert used <= offered


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    used = {word for words in commands("make") for word in words if "=" not in word}
    assert used <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """Return what links to headings of a page may name."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", text) for text in words}


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def hooks() -> ModuleType:
    return module("docs/hooks.py")


SOURCES_PAGE = ROOT / "docs/moving/sources.md"


def test_what_the_page_about_sources_names_is_there() -> None:
    text = SOURCES_PAGE.read_text("utf-8")
    table_rows = re.findall(r"^\| (?!source \|)(.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert len(table_rows) > 50
    for source, _, shown_by in table_rows:
        assert re.fullmatch(r"`[\w/]+\.py::\w+`", shown_by), f"{source}: which test shows it?"
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        defined = rf"^ *(async )?def {name}\("
        assert re.search(defined, (ROOT / file).read_text("utf-8"), re.MULTILINE), name
    for path, option in re.findall(r"`(envbus(?:\.\w+)+)(?:\((\w+)\))?`", text):
        named = pkgutil.resolve_name(path)
        assert not option or option in inspect.signature(named).parameters, f"{path}({option})"


def test_links_between_pages_and_files_become_links_of_the_site() -> None:
    turn = hooks().with_links_of_the_site
    assert turn("[a](recovery.md#x)", "errors.md") == "[a](recovery.md#x)"
    assert turn("[a](../ARCHITECTURE.md)", "errors.md") == "[a](project/ARCHITECTURE.md)"
    assert turn("[a](../bus/errors.py)", "errors.md") == "a"
    assert turn("[a](#here)", "errors.md") == "[a](#here)"
    assert turn("[a](docs/errors.md)", "project/ARCHITECTURE.md") == "[a](../errors.md)"
    assert turn("![a](../bench/results/vector.png)", "benchmarks.md") == (
        "![a](project/bench/results/vector.png)"
    )
    assert turn("[a](https://example.org/b.md)", "errors.md") == "[a](https://example.org/b.md)"


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r"[\w/.-]+\.md", text.split("\nnav:\n")[1]))
    pages = {file.relative_to(ROOT / "docs").as_posix() for file in ROOT.glob("docs/**/*.md")}
    outside = {f"project/{path}" for path in hooks().OUTSIDE if path.endswith(".md")}
    assert listed == pages | outside


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/pictures/*.txt")), ids=lambda p: p.stem)
def test_a_picture_is_drawn_from_the_text_beside_it(picture: Path) -> None:
    drawn = module("docs/pictures/draw.py").draw(picture.read_text("utf-8"))
    assert picture.with_suffix(".svg").read_text("utf-8") == drawn, "run docs/pictures/draw.py"


def test_the_index_of_decisions_names_each_record_and_its_status_once() -> None:
    text = (ROOT / "DECISIONS.md").read_text("utf-8")
    records = re.findall(r"^## (\d+)\. (.+)\n\n\*Status: (.+)\.\*$", text, re.MULTILINE)
    index = re.findall(r"^\| \[(\d+)\]\(.+?\) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert index == records
    assert re.findall(r"^## (\d+)\.", text, re.MULTILINE) == [number for number, *_ in records]
    assert [int(number) for number, *_ in records] == list(range(1, len(records) + 1))


def test_the_bars_of_a_step_are_those_of_the_results() -> None:
    results = (ROOT / "bench" / "results" / "table.md").read_text("utf-8")
    by_words = results[results.index("| one vector step by words") :]
    recorded = dict(rows(by_words[: by_words.index("\n\n")]))
    _, *bars = (ROOT / "docs/pictures/step-time.txt").read_text("utf-8").splitlines()
    for bar in bars:
        name, value = bar.split(" | ")
        assert value in recorded[name]


def rows(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the first cell and the set of all others of each row of a Markdown table."""
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        name, *cells = line.split(" | ")
        yield name, set(cells)


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_the_rates_of_vector_envs_are_those_of_the_results(page: str) -> None:
    results = (ROOT / "bench" / "results" / "table.md").read_text("utf-8")
    recorded = dict(list(rows(results))[::-1])
    head = "cores used: workload, envs" if page == "README.md" else "its step p50 / p99"
    table = (ROOT / page).read_text("utf-8").partition(head)[2].partition("\n\n")[0]
    shown = list(rows(table))
    assert len(shown) >= 5
    for name, cells in shown:
        assert cells <= recorded[name], name
    conditions, *_ = re.findall(r"commit \w+, [\d-]+", (ROOT / page).read_text("utf-8"))
    assert conditions in results.partition("\n\n| ")[0]


def test_the_seconds_of_trainings_are_those_of_the_results() -> None:
    head = "| seconds of training"
    shown, recorded = (
        dict(rows((ROOT / page).read_text("utf-8").partition(head)[2].partition("\n\n")[0]))
        for page in ("docs/benchmarks.md", "bench/results/table.md")
    )
    assert len(shown) == 6
    assert shown == recorded
    readme = (ROOT / "README.md").read_text("utf-8").partition("| seconds of PPO")[2]
    for name, cells in rows(readme.partition("\n\n")[0]):
        (case,) = [one for one in recorded if envs_of(one) == envs_of(name)]
        for cell in cells - {"-"}:
            assert any(one.startswith(f"{cell.strip('*')} (") for one in recorded[case]), name


def envs_of(row: str) -> tuple[str, str]:
    """Return which library, by its first letters, trains on what: what tells rows apart."""
    library, _, case = row.partition(":")
    return library.replace("A loop in ", "")[:3], " ".join(case.split()[:3]).rstrip(",")
