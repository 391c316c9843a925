"""Scripts, benchmarks and examples use only what the package has: no test runs them all, and functions move.

The package is read, not imported, so that this needs no torch and is quick.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("scripts", "benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


def file_of(module: str) -> Path | None:
    """Where a module of the package is; None where there is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is loaded, inside its conditions too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                yield from statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


@cache
def names_of(module: str) -> frozenset[str]:
    """What can be taken from a module: what it defines or imports, and its own modules. A module that loads names on
    first use has a table of them."""
    path = file_of(module)
    assert path is not None
    found = set[str]()
    body = list(statements(ast.parse(path.read_text()).body))
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body)
    for node in body:
        if lazy and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    if path.name == "__init__.py":
        found |= {p.stem for p in path.parent.glob("*.py")} | {p.parent.name for p in path.parent.glob("*/__init__.py")}
    return frozenset(found)


def missing(source: str) -> list[str]:
    """Modules and names of the package that a script uses and the package has not, each with its line."""
    tree, out = ast.parse(source), list[str]()
    modules = {"octopipe": "octopipe"} if "import octopipe" in source else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "octopipe":
            module = str(node.module)
            if file_of(module) is None:
                out.append(f"line {node.lineno}: {module}")
                continue
            for alias in node.names:
                if alias.name not in names_of(module):
                    out.append(f"line {node.lineno}: {module}.{alias.name}")
                elif file_of(f"{module}.{alias.name}") is not None:
                    modules[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "octopipe":
                    if file_of(alias.name) is None:
                        out.append(f"line {node.lineno}: {alias.name}")
                    elif alias.asname:
                        modules[alias.asname] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = module_of(node.value, modules)
            if module and not node.attr.startswith("__") and node.attr not in names_of(module):
                out.append(f"line {node.lineno}: {module}.{node.attr}")
    return out


def module_of(node: ast.expr, modules: dict[str, str]) -> str:
    """The module that an expression names (`octopipe.plans.file`); empty where it names none."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        outer = module_of(node.value, modules)
        return f"{outer}.{node.attr}" if outer and file_of(f"{outer}.{node.attr}") else ""
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_uses_of_the_package_is_there(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_what_moved_is_noticed() -> None:
    """In every form that scripts use: a module or name that is gone, wherever it stands, and one that is there."""
    source = """
import octopipe
import octopipe.nowhere
from octopipe import megatron, nothing
from octopipe.plans import file
from octopipe.plans.file import load_plan, lost_plan
def late():
    from octopipe.runtime.training.job import TrainJob, Gone
    octopipe.tune, octopipe.tuned, megatron.profile, megatron.profiled, file.save_plan, file.saved_plan
    octopipe.plans.plan.Plan, octopipe.plans.plan.Nope, load_plan.anything
"""
    gone = {line.split(": ")[1] for line in missing(source)}
    assert gone == {
        "octopipe.nowhere", "octopipe.nothing", "octopipe.plans.file.lost_plan", "octopipe.runtime.training.job.Gone",
        "octopipe.tuned", "octopipe.megatron.profiled", "octopipe.plans.file.saved_plan", "octopipe.plans.plan.Nope",
    }  # fmt: skip


SLOW_TO_IMPORT = ("megatron", "torch._dynamo", "torch._inductor", "tensorboard", "datasets", "wandb")


def imported_at_once(path: Path) -> Iterator[str]:
    """What a file imports when it is loaded, `pytest.importorskip` included."""
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute) and call.func.attr == "importorskip":
                yield from (str(arg.value) for arg in call.args if isinstance(arg, ast.Constant))


def test_collecting_the_tests_imports_nothing_that_takes_seconds(tmp_path: Path) -> None:
    """Every worker collects all tests: one such line took half of the time of that."""
    slow = [
        f"{path.relative_to(ROOT)} imports {name} when it is loaded; import it inside its tests"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in imported_at_once(path)
        if any(name == slow or name.startswith(f"{slow}.") for slow in SLOW_TO_IMPORT)
    ]
    assert slow == []
    seen = tmp_path / "test_x.py"
    seen.write_text('import pytest\nx = pytest.importorskip("megatron.core")\nif x:\n    import datasets\n')
    assert list(imported_at_once(seen)) == ["pytest", "megatron.core", "datasets"]


def from_the_root(source: str) -> list[str]:
    """Imports, wherever they stand, of a folder of the repository as if it were a package."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"octopipe"}
    names = "|".join(map(re.escape, folders))
    if not re.search(rf"^\s*(import|from)\b.*\b({names})\b", source, re.MULTILINE):
        return []  # nearly all files: parsing them takes seconds
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
    return [name for name in found if name.split(".")[0] in folders]


def test_no_test_needs_the_repository_on_the_path() -> None:
    """Where somebody has put it there, or starts pytest as a module, such an import works; in `make test` it fails."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}; helpers are modules of their own: from ranks import Ranks"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in from_the_root(path.read_text())
    ]
    assert wrong == []
    assert from_the_root("import os\nfrom tests.helpers.ranks import Ranks\ndef f():\n    import benchmarks.x") == [
        "tests.helpers.ranks",
        "benchmarks.x",
    ]
