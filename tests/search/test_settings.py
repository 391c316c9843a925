"""The numbers of the default search: few, described in whole sentences, all of them used, each with its worth."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from octopipe.search import tuner
from octopipe.search.tuner import mechanics, settings
from octopipe.search.tuner.settings import ORDER_MOVES, STRUCTURE_MOVES, KeyRanges, Settings

ROOM = Path(tuner.__file__).parent
REPOSITORY = ROOM.parents[2]
RESULTS = "benchmarks/results/settings-2026-11-18.jsonl"
MOST = 60


def described(file: str | None) -> dict[str, str]:
    """Every field or constant of a module, and the text that stands behind it."""
    found: dict[str, str] = {}
    tree = ast.parse(Path(str(file)).read_text())
    for body in [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node, after in zip(body, [*body[1:], None], strict=True):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = text
            elif isinstance(node, ast.Assign):
                names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
                found |= {name.id: text for name in names if isinstance(name, ast.Name)}
    return found


def test_there_are_few() -> None:
    assert len(fields(Settings)) - 1 + len(fields(KeyRanges)) <= MOST
    # Moves have names and phases. How likely they are is said by settings, which are counted above.
    assert all(isinstance(word, str) for move in STRUCTURE_MOVES + ORDER_MOVES for word in move)


@pytest.mark.parametrize("module", [settings, mechanics], ids=lambda m: m.__name__.split(".")[-1])
def test_each_has_whole_sentences(module: object) -> None:
    texts = described(getattr(module, "__file__", None))
    texts.pop("SETTINGS", None)
    assert len(texts) > 30
    odd = [name for name, text in texts.items() if not re.fullmatch(r"[A-Z].*\.", text, re.S)]
    assert not odd, odd


def test_each_is_used() -> None:
    text = "\n".join(p.read_text() for p in ROOM.rglob("*.py") if p.name not in ("settings.py", "mechanics.py"))
    names = {f"SETTINGS.{f.name}" for f in fields(Settings) if f.name != "keys"} | set(described(mechanics.__file__))
    missing = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)}
    missing |= {f.name for f in fields(KeyRanges) if not re.search(rf"\bK\.{f.name}\b", text)}
    assert not missing, missing


def test_the_page_is_what_the_runs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    path = REPOSITORY / "benchmarks" / "bench_settings.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = spec_from_file_location("bench_settings", path)
    assert spec is not None and spec.loader is not None
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)
    made = bench.page(settings, bench.read(REPOSITORY / RESULTS), RESULTS)
    assert (REPOSITORY / "docs" / "settings.md").read_text().splitlines() == made.splitlines()
    worth = {row.split("|")[1].strip(" `"): row.split("|")[4].strip() for row in made.splitlines() if row[:3] == "| `"}
    assert {name for name, said in worth.items() if said == "not measured"} == set(bench.SPECIAL)
    assert len(worth) == len(fields(Settings)) - 1 + len(fields(KeyRanges))
