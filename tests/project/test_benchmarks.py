"""Benchmarks can be found, started and read: no test runs them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
STARTED = [path for path in SCRIPTS if "__main__" in path.read_text()]
HELPERS = ROOT / "tests" / "helpers"


def test_the_page_lists_every_benchmark_and_no_other() -> None:
    section = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Every benchmark")[2].partition("\n## ")[0]
    listed = [row.split("|")[1].strip(" `") for row in section.splitlines() if row.startswith("| `") and ".py" in row]
    assert sorted(listed) == [path.name for path in STARTED]


@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.name)
def test_what_keeps_a_benchmark_from_running_is_one_line(path: Path) -> None:
    assert path.read_text().endswith('if __name__ == "__main__":\n    start(main)\n')


def strangers(path: Path) -> list[str]:
    """What a script imports, wherever, and would not find: neither installed, nor beside it, nor in a folder that it
    puts on the path."""
    source = path.read_text()
    folders = [path.parent, HELPERS] if '"tests" / "helpers"' in source else [path.parent]
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    found = {name for name in found if not any((folder / f"{name}.py").is_file() for folder in folders)}
    return sorted(found - sys.stdlib_module_names - declared() - {name for name in found if installed(name)})


def declared() -> set[str]:
    """What `pyproject.toml` names: not every machine has all of it (Megatron-Core only where Python is older)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {re.split(r"[^a-z0-9]", text.lower(), maxsplit=1)[0] for text in wanted}


def installed(name: str) -> bool:
    """Whether a package has it. Tests have their own helpers on the path, which scripts have not."""
    spec = find_spec(name)
    return spec is not None and not (spec.origin and Path(spec.origin).is_relative_to(ROOT / "tests"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_benchmark_finds_its_modules(path: Path) -> None:
    """One that is imported inside a function is missed when somebody needs it, and tests move."""
    assert strangers(path) == []


def test_a_lost_module_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text("import numpy, ast\ndef late():\n    from test_lost import plans\n    import ranks\n")
    assert strangers(script) == ["ranks", "test_lost"]
    script.write_text(script.read_text() + 'import sys\nsys.path.insert(0, "tests" / "helpers")\n')
    assert strangers(script) == ["test_lost"]
