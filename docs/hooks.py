"""Hooks of MkDocs (`mkdocs.yml`): pages from outside docs/, the reference, and the links of both.

In the repository all links lead from file to file. On the site, pages from outside docs/ are below
`project/`, and a link to a file that is not on the site becomes its text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Pages of the site that stand outside docs/.
OUTSIDE = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "SECURITY.md",
    "bench/README.md",
    "bench/results/sample.png",
    "bench/results/vector.png",
    "examples/clients/README.md",
    "examples/clients/cpp/README.md",
    "examples/clients/csharp/README.md",
    "examples/clients/javascript/README.md",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of the reference into the navigation."""
    for section in config.nav or []:
        for entry in section.get("Reference", []) if isinstance(section, dict) else []:
            if entry == "reference/index.md":
                section["Reference"] += [{name: reference_page(name)} for name in public_names()]
                return


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from outside docs/ and those of the reference."""
    from mkdocs.structure.files import File

    for path in OUTSIDE:
        files.append(File.generated(config, f"project/{path}", abs_src_path=str(ROOT / path)))
    for module, names in public_names().items():
        text = reference_text(module, names)
        files.append(File.generated(config, reference_page(module), content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    if page.file.src_uri == "reference/index.md":
        lines = [f"| [`{name}`]({name}.md) | {first_line(name)} |" for name in public_names()]
        markdown += "\n".join(["\n| module | what it is |", "|---|---|", *lines, ""])
    return with_links_of_the_site(markdown, page.file.src_uri)


def public_names() -> dict[str, list[str]]:
    """Return what users may import, by module."""
    lines = (ROOT / "tests" / "public_names.txt").read_text("utf-8").splitlines()
    found = (line.partition(":") for line in lines if line[:1] not in ("", "#"))
    return {module: names.split() for module, _, names in found}


def first_line(module: str) -> str:
    """Return what a module's docstring says first."""
    path = ROOT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def reference_page(module: str) -> str:
    """Return where the site has the names of a module."""
    return f"reference/{module}.md"


def reference_text(module: str, names: list[str]) -> str:
    """Return a page of mkdocstrings; `envbus` itself only points to where its names come from."""
    if module != "envbus":
        return "\n".join([f"# {module}\n", *(f"::: {module}.{name}\n" for name in names)])
    others = [(home, those) for home, those in public_names().items() if home != module]
    homes = {name: home for home, those in others for name in those}
    lines = [f"- [`envbus.{n}`]({homes[n]}.md#{homes[n]}.{n})" for n in names if n[0] != "_"]
    return "\n".join([f"# {module}\n", "The names that most programs need:\n", *lines, ""])


def with_links_of_the_site(markdown: str, src_uri: str) -> str:
    """Return the page with links as MkDocs wants them.

    Args:
        markdown: The page as it stands in the repository.
        src_uri: Where it is on the site: `sampling.md`, `project/bench/README.md`.
    """
    is_outside = src_uri.startswith("project/")
    origin = src_uri.removeprefix("project/") if is_outside else f"docs/{src_uri}"

    def replace(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        if not target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in OUTSIDE:
            place = f"project/{path}"
        else:
            return text
        place = posixpath.relpath(place, posixpath.dirname(src_uri) or ".")
        return f"{image}[{text}]({place}{anchor})"

    return LINK.sub(replace, markdown)
