"""The project's source files as the tests about its structure see them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ROOT", "imported_modules", "module_name", "parse", "source_files"]

ROOT = Path(__file__).parent.parent


def source_files(package: str) -> list[Path]:
    """Return the package's files, hidden folders (environments of the benchmarks) left out."""
    files = (ROOT / package).rglob("*.py")
    return sorted(f for f in files if not any(p.startswith(".") for p in f.relative_to(ROOT).parts))


def module_name(file: Path) -> str:
    """Return the name under which a file below a package's folder is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("envbus", *(part for part in parts if part != "__init__")))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file.relative_to(ROOT)))


@functools.cache
def imported_modules(file: Path) -> frozenset[str]:
    """Return every module that is imported anywhere in the file, functions included."""
    return frozenset(_imported_modules(parse(file)))


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer that is reached into"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
