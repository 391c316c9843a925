"""The documentation site has every page and every public name (building it is `make docs`)."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import octopipe

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = {"command-line"}
COPIED = {"readme": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
"""Pages of the root of the repository, which the site has under these names."""


def _listed() -> set[str]:
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    return {line[:-1].partition(" <")[2] if line.endswith(">") else line for line in lines}


def test_every_page_and_notebook_is_listed_once() -> None:
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in DOCS.rglob("*.md") if "notebooks" not in p.parts}
    notebooks = {f"notebooks/{p.stem}" for p in (DOCS.parent / "examples").glob("*.ipynb")}
    assert _listed() == (pages - {"index"}) | notebooks | GENERATED | set(COPIED)


@pytest.mark.parametrize("name", COPIED)
def test_links_of_a_copied_page_lead_to_pages_of_the_site(name: str) -> None:
    (function,) = [n for n in ast.parse((DOCS / "conf.py").read_text()).body if getattr(n, "name", "") == "page_of"]
    scope: dict[str, Any] = {"re": re, "Path": Path}
    exec(compile(ast.Module([function], []), "conf.py", "exec"), scope)
    text = scope["page_of"](DOCS.parent / COPIED[name])
    targets = {target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target}
    assert targets and [t for t in targets if not (DOCS / t).exists() and Path(t).stem not in COPIED] == []


def test_the_start_page_links_to_no_page_outside_the_site() -> None:
    assert "http" not in (DOCS / "index.md").read_text()


def test_every_public_name_is_in_the_api_reference() -> None:
    named = set(re.findall(r"auto(?:function|class|exception):: (\w+)\s", (DOCS / "api.md").read_text()))
    assert named == {name for name in octopipe.__all__ if not name.startswith("__")}
