"""Every example runs as its first line says, and does what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from effort import some
from torchrun import torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _run(name: str, logs: Path) -> str:
    """The command of the example's first line, with this Python."""
    text = (EXAMPLES / name).read_text()
    found = re.search(r"`(torchrun --nproc-per-node \d+|python) examples/" + name, text)
    assert found, f"{name}: its first lines do not say how to run it"
    words = found[1].split()
    if words[0] == "torchrun":
        return torchrun([*words[1:], f"examples/{name}"], EXAMPLES.parent, logs)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    tested = {"train_script.py", "data_parallel.py", "plan_and_look.py", "megatron_train.py", "torchtitan_train.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


# The quick tier trains with the other one under torchrun (tests/runtime/test_train.py).
@pytest.mark.parametrize("name", some(["data_parallel.py", "train_script.py"]))
def test_training_examples_learn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", _run(name, tmp_path))]
    assert len(losses) >= 8 and losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_the_megatron_example_learns_under_a_tuned_plan(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", _run("megatron_train.py", tmp_path))]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_the_torchtitan_example_learns_under_a_tuned_plan(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", _run("torchtitan_train.py", tmp_path))]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name, results", [("planning", 4), ("own_costs", 3)])
def test_every_cell_of_a_notebook_runs_and_its_results_show_themselves(
    name: str, results: int, tmp_path: Path, monkeypatch
) -> None:
    """As a notebook does it: the last line of a cell, where it is a value, is asked for its picture."""
    import ast
    import json

    monkeypatch.chdir(tmp_path)
    book = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    names: dict[str, object] = {}
    pictures = []
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]).replace("budget_s=3", "budget_s=0.5"))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        shown = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if hasattr(shown, "_repr_html_"):
            pictures.append(shown._repr_html_())
    assert len(pictures) == results and all("<svg" in p or "<table" in p or "<img" in p for p in pictures)


def test_the_planning_example_prints_the_systems_best_first(tmp_path: Path) -> None:
    said = _run("plan_and_look.py", tmp_path)
    times = [float(value) for value in re.findall(r"([\d.]+) ms, +[\d.]+ % bubble\n", said)]
    assert len(times) == 3 and times == sorted(times)
