"""The examples in docstrings do what they say.

A test of its own instead of `--doctest-modules`, which makes every worker of a run import and search all modules.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("runtime/", "torch_engine/", "megatron/", "huggingface/", "torchtitan.py")
"""Where examples need ranks or other packages; the tests of those rooms run them."""
WITH_EXAMPLES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "octopipe").rglob("*.py"))
    if not str(path.relative_to(ROOT / "octopipe")).startswith(TORCH) and ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_give_what_they_show(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert failed == 0 and tried > 0
