"""The numbers of the default search: few, described in whole sentences, and all of them used."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from octopipe.search import tuner
from octopipe.search.tuner import mechanics, settings
from octopipe.search.tuner.settings import KeyRanges, Settings

ROOM = Path(tuner.__file__).parent
MOST = 110
"""May only fall; `benchmarks/bench_settings.py` says which of them make no difference."""


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


@pytest.mark.parametrize("module", [settings, mechanics], ids=lambda m: m.__name__.split(".")[-1])
def test_each_has_whole_sentences(module: object) -> None:
    texts = described(getattr(module, "__file__", None))
    texts = {name: text for name, text in texts.items() if name not in ("SETTINGS", "STRUCTURE_MOVES", "ORDER_MOVES")}
    assert len(texts) > 30
    odd = [name for name, text in texts.items() if not re.fullmatch(r"[A-Z].*\.", text, re.S)]
    assert not odd, odd


def test_each_is_used() -> None:
    text = "\n".join(p.read_text() for p in ROOM.rglob("*.py") if p.name not in ("settings.py", "mechanics.py"))
    names = {f"SETTINGS.{f.name}" for f in fields(Settings) if f.name != "keys"} | set(described(mechanics.__file__))
    missing = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)}
    missing |= {f.name for f in fields(KeyRanges) if not re.search(rf"\bK\.{f.name}\b", text)}
    assert not missing, missing
