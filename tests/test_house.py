"""The house: a module imports only from rooms above its own, and torch stays in its rooms."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "octopipe"

ROOMS = [
    ["base"],
    ["models"],
    ["costs"],
    ["plans"],
    ["simulation"],
    ["search"],
    ["runtime"],
    ["huggingface"],
    ["runtime/nn"],
    ["runtime/measure"],
    ["runtime/training"],
    ["views/export", "views/report"],
    ["search/planner"],
    ["torch_engine", "megatron"],
    ["torchtitan"],
    ["views", "views/reproduce"],
    ["api"],
    ["cli", "__main__", "__init__"],
]
FLOOR = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
TORCH_ROOMS = {"runtime", "huggingface", "torch_engine", "torchtitan", "megatron"}


def room_of(path: Path) -> str:
    return room(path.relative_to(PACKAGE).with_suffix("").parts)


def room(parts: tuple[str, ...]) -> str:
    """The innermost room with a floor of its own."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOOR else parts[0]


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "octopipe":
                found += [f"octopipe.{alias.name}" for alias in node.names]
            else:
                found.append(node.module)
    return found


def test_every_module_has_a_room() -> None:
    assert {room_of(p) for p in PACKAGE.rglob("*.py")} <= set(FLOOR)


def test_modules_import_only_from_rooms_above() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        here = room_of(path)
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "octopipe" or len(parts) < 2 or room(tuple(parts[1:])) not in FLOOR:
                continue
            there = room(tuple(parts[1:]))
            if here != there and FLOOR[there] > FLOOR[here]:
                wrong.append(f"{path.relative_to(PACKAGE)} ({here}) imports {name}")
    assert wrong == []


def _module_level_imports(path: Path) -> set[str]:
    """Modules of ours that are imported while this one is: not those a function or a type checker asks for."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "octopipe":
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "octopipe"}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("octopipe", *path.relative_to(PACKAGE).with_suffix("").parts))
        modules[name.removesuffix(".__init__")] = path
    needs = {name: (_module_level_imports(path) & set(modules)) - {name} for name, path in modules.items()}
    # A package's own __init__ may gather names of its modules; those name their siblings, not the package.
    for name in needs:
        needs[name] -= {name.rpartition(".")[0], "octopipe"}
    while free := [name for name, rest in needs.items() if not rest & set(needs)]:
        for name in free:
            del needs[name]
    assert sorted(needs) == []


def test_every_room_stands_in_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    missing = sorted(
        {room_of(p) for p in PACKAGE.rglob("*.py")}
        - {"__main__", "__init__"}
        - {room for room in FLOOR if f"`{room}.py`" in page or f"`{room.split('/')[-1]}/`" in page}
    )
    assert missing == []


def test_torch_is_imported_only_where_training_happens() -> None:
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if room_of(path).split("/")[0] not in TORCH_ROOMS and any(n.split(".")[0] == "torch" for n in imports_of(path))
    ]
    assert wrong == []


def test_every_module_says_what_it_knows() -> None:
    silent = [
        str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []
