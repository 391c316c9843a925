"""The documentation site has every page and every public name (building it is `make docs`)."""

from __future__ import annotations

import re
from pathlib import Path

import octopipe

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = {"command-line"}


def _listed() -> set[str]:
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    return {line for block in blocks for line in block.splitlines() if line and not line.startswith(":")}


def test_every_page_and_notebook_is_listed_once() -> None:
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in DOCS.rglob("*.md") if "notebooks" not in p.parts}
    notebooks = {f"notebooks/{p.stem}" for p in (DOCS.parent / "examples").glob("*.ipynb")}
    assert _listed() == (pages - {"index"}) | notebooks | GENERATED


def test_every_public_name_is_in_the_api_reference() -> None:
    named = set(re.findall(r"auto(?:function|class|exception):: (\w+)\s", (DOCS / "api.md").read_text()))
    assert named == {name for name in octopipe.__all__ if not name.startswith("__")}
