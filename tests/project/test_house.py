"""The house: modules import only from rooms above their own, in no circle, and torch stays in its rooms.

The rooms and their order are read from the table in docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "octopipe"
LONGEST_MODULE, LONGEST_FUNCTION = 450, 80
TORCH_ROOMS = {"runtime", "huggingface", "torch_engine", "torchtitan", "megatron"}
MODULES = {
    ".".join(("octopipe", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def rooms_of_the_page(page: str) -> dict[str, int]:
    """Every room that the first column of the page's table names, with the number of its row."""
    lines = page.split("| package | contents |\n|---|---|\n", 1)[1].split("\n\n", 1)[0].split("\n")
    rooms = {}
    for row, line in enumerate(lines):
        for name in re.findall(r"`([\w/.]+)`", line.split("|")[1]):
            rooms[name.removesuffix(".py").removesuffix("/")] = row
    return rooms


ROOMS = rooms_of_the_page((PACKAGE.parent / "docs" / "architecture.md").read_text())


def room(module: str) -> str | None:
    """The innermost room of the page that a module is in."""
    parts = module.split(".")[1:] or ["__init__"]
    inner = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return "cli" if inner[-1] == "__main__" else next((name for name in inner if name in ROOMS), None)


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a module but what only a type checker reads."""
    left = list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            left += node.orelse
            continue
        yield node
        left += ast.iter_child_nodes(node)


@cache
def text_and_tree(path: Path) -> tuple[str, ast.Module]:
    """A module as it is written and as it is parsed: parsing all of them takes seconds."""
    text = path.read_text()
    return text, ast.parse(text)


def imports_of(path: Path) -> set[str]:
    """Modules of ours and other packages that a module imports, at its top or inside functions."""
    found = set()
    for node in _runtime_nodes(text_and_tree(path)[1]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in MODULES else node.module for full in inner.values()}
    return found


@cache
def needs_of_all() -> dict[str, set[str]]:
    """What every module imports. Read when a test asks: every worker collects this file, and one of them runs it."""
    return {name: imports_of(path) - {name} for name, path in MODULES.items()}


def circles(needs: dict[str, set[str]]) -> list[str]:
    """What is left when every module that needs none of the others is taken away, again and again, from both ends."""
    left = {name: set(names) & set(needs) for name, names in needs.items()}
    while True:
        wanted = set().union(*left.values())
        free = [name for name, names in left.items() if not names & set(left) or name not in wanted]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]
        left = {name: names & set(left) for name, names in left.items()}


def test_every_module_has_a_room_on_the_page() -> None:
    assert [name for name in MODULES if room(name) is None] == []
    assert [name for name in ROOMS if not (PACKAGE / name).exists() and not (PACKAGE / f"{name}.py").exists()] == []


def test_modules_import_only_from_rooms_above() -> None:
    wrong = [
        f"{name} imports {other}, a row below"
        for name, needs in needs_of_all().items()
        for other in needs & set(MODULES) - {"octopipe"}
        if ROOMS[str(room(other))] > ROOMS[str(room(name))]
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(needs_of_all()) == []


def test_a_circle_inside_functions_is_one(tmp_path: Path) -> None:
    """What the tests above would see of two modules that need each other when they run, or only for their types."""
    (tmp_path / "late.py").write_text("def f():\n    from octopipe.plans.plan import Plan\n    return Plan\n")
    (tmp_path / "typed.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octopipe.plans.plan import Plan\n"
    )
    assert imports_of(tmp_path / "late.py") == {"octopipe.plans.plan"}
    assert imports_of(tmp_path / "typed.py") == {"typing"}
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b"]


def test_the_top_level_stays_small() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len(entries - {"__init__.py", "__main__.py", "api.py", "cli"}) <= 12


def test_no_module_and_no_function_is_too_long_to_read_at_once() -> None:
    long = []
    for name, path in MODULES.items():
        text, tree = text_and_tree(path)
        if (lines := text.count("\n")) > LONGEST_MODULE:
            long.append(f"{name} has {lines} lines")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and (size := 1 + (node.end_lineno or 0) - node.lineno) > LONGEST_FUNCTION
            ):
                long.append(f"{name}.{node.name} has {size} lines")
    assert long == []


def test_torch_is_imported_only_where_training_happens() -> None:
    wrong = [
        str(path.relative_to(PACKAGE))
        for name, path in MODULES.items()
        if name.split(".")[-1 if name == "octopipe" else 1] not in TORCH_ROOMS
        and any(n.split(".")[0] == "torch" for n in needs_of_all()[name])
    ]
    assert wrong == []


def test_every_module_says_what_it_knows() -> None:
    silent = [str(p.relative_to(PACKAGE)) for p in MODULES.values() if not ast.get_docstring(text_and_tree(p)[1])]
    assert silent == []
