"""Every command in the guides for PyTorch, torchtitan and Megatron runs as it stands there."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest

from octopipe.cli import VERBS, main
from octopipe.costs.table import CostTable
from octopipe.search.systems import build_plan
from octopipe.views.export.pytorch import pytorch_csv

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
NAMES = ("plain-torch.md", "torchtitan.md", "megatron.md")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_commands_run_one_after_another(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    # What the reader has already: the CSV of the schedule they run.
    costs = CostTable.uniform(num_layers=34)
    Path("schedule.csv").write_text(pytorch_csv(build_plan("interleaved", costs, 4, 8, chunks=2)))
    lines = [line for block in blocks(name, "console") for line in block.splitlines()]
    assert lines
    for line in lines:
        assert line.startswith("$ octopipe "), line
        words = shlex.split(line.removeprefix("$ octopipe "))
        assert words[0] in VERBS
        code = main(words)
        assert code == 0 or (words[0] == "simulate" and code == 3), line  # 3: the plan does not fit
    assert len(os.listdir(tmp_path)) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_python_in_the_guides_is_python_and_names_what_exists(name: str) -> None:
    pytest.importorskip("torch")
    import octopipe.megatron
    import octopipe.torch_engine
    import octopipe.torchtitan

    known = {"megatron": octopipe.megatron, "torch_engine": octopipe.torch_engine, "torchtitan": octopipe.torchtitan}
    for block in blocks(name, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                if owner in known:
                    assert node.attr in dir(known[owner]), f"octopipe.{owner}.{node.attr}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_need_gpus_say_so(name: str) -> None:
    for block in blocks(name, "bash"):
        assert block.startswith("# needs GPUs\n")
        shlex.split(block, comments=True)
