from __future__ import annotations

from pathlib import Path

from envbus.bench.environments import Environments, Library, without_paths


def test_paths_do_not_get_into_results() -> None:
    text = "FileNotFoundError: '/some/where/file.txt' and /usr/lib/x.so, see http://a/b/c"
    assert without_paths(text) == "FileNotFoundError: 'file.txt' and x.so, see http://a/b/c"


def test_a_library_that_cannot_be_installed_keeps_its_reason(tmp_path: Path) -> None:
    environments = Environments(tmp_path / "envs")
    library = Library("broken", steps=(), probe="raise RuntimeError('no luck here')")
    assert environments.status("broken") is None
    outcome = environments.install(library)
    assert outcome.failure == "RuntimeError: no luck here"
    assert environments.status("broken") == outcome


def test_peers_see_the_benchmark_and_nothing_else_of_envbus(tmp_path: Path) -> None:
    variables = Environments(tmp_path).variables("sb3")
    (folder,) = Path(variables["PYTHONPATH"]).iterdir()
    assert folder.name == "envbus"
    assert [path.name for path in folder.iterdir()] == ["bench"]
