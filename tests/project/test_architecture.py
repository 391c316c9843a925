"""The tables of files in docs/architecture.md name every module, and no module that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "octopipe"
BY_FOLDER = (
    "cli", "costs/measured", "search/algorithm1", "search/exact", "search/planner/published", "search/systems",
    "simulation/bounds", "views/export", "views/reproduce",
)  # fmt: skip
"""Folders that the page describes as a whole."""


def listed(page: str) -> list[str]:
    """Every file in the first column of the page's tables, relative to the package.

    A heading or a group in bold names the folder of the tables below it; in a row, a name with a folder passes this
    folder on to the names after it.
    """
    folder, found = "", []
    for line in page.partition("## The files of each package\n")[2].splitlines():
        if title := re.match(r"### (.*)|\*\*.*?\(`([\w/]+)`", line):
            names = re.findall(r"`([\w/]+)/`", title[1]) if title[1] else [title[2].removesuffix("/")]
            folder = names[0] if len(names) == 1 else ""
        if line.startswith("| `"):
            inner = ""
            for name in re.findall(r"`([\w/.]+)`", line.split("|")[1]):
                inner = name.rpartition("/")[0] or inner
                found.append("/".join(part for part in (folder, inner, name.rpartition("/")[2]) if part))
    return found


def test_the_page_names_every_module_once_and_no_other() -> None:
    names = [name for name in listed((ROOT / "docs" / "architecture.md").read_text()) if name.endswith(".py")]
    own = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")}
    expected = {
        name for name in own if "/readers/" not in name and not any(name.startswith(f"{f}/") for f in BY_FOLDER)
    } - {"api.py"}
    named = [name for name in names if not name.endswith("/__init__.py")]
    assert sorted(expected - set(named)) == [], "no row names them"
    assert sorted(set(named) - own) == [], "they do not exist"
    assert sorted({name for name in named if named.count(name) > 1}) == []


def test_a_row_passes_its_folder_on() -> None:
    page = (
        "## The files of each package\n### `runtime/`\n| `a.py`, `wire/b.py`, `c.py` | x |\n"
        "**A stage** (`runtime/stages/`):\n| `d.py` | `e.py` |\n"
        "### `megatron/`, `torch_engine/`\n| `megatron/f.py` | |\n"
    )
    assert listed(page) == [
        "runtime/a.py",
        "runtime/wire/b.py",
        "runtime/wire/c.py",
        "runtime/stages/d.py",
        "megatron/f.py",
    ]
