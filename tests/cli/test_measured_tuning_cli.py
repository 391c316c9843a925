"""`octopipe tune --measure` and `octopipe train --tune --measure` as a user runs them, on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
TINY = ("--scale", "0.02", "--layers", "6")


def octopipe(*words: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octopipe", *words], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_tune_measure_keeps_the_plan_that_was_measured_fastest(tmp_path: Path) -> None:
    where = ("--nproc", "2", "--seq", "32", "--device", "cpu")
    octopipe("profile", "llama3-8b", *TINY, *where, "-o", "p.json", cwd=tmp_path)
    words = (
        "tune",
        "p.json",
        "--pp",
        "2",
        "--micro-batches",
        "4",
        "--measure",
        "--measure-for",
        "20s",
        "--budget",
        "1s",
    )
    told = json.loads(
        octopipe(
            *words,
            "--measure-for",
            "20s",
            "--no-copies",
            "-o",
            "plan.json",
            "--corrected",
            "c.json",
            "--json",
            cwd=tmp_path,
        )
    )
    names = [row["name"] for row in told["rows"]]
    assert {"1f1b", "interleaved", "zb-v"} <= set(names) and any(name.startswith("tuned") for name in names)
    assert told["measured_ms"] == min(row["measured_ms"] for row in told["rows"])
    assert told["best"] in names and told["gain_over_published"] >= 1.0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["measured"]["best"] == told["best"]
    # What was corrected is a profile that other verbs take; the plan runs.
    octopipe("simulate", "c.json", "--plan", "plan.json", cwd=tmp_path)
    octopipe("validate", "plan.json", "--profile", "c.json", "--steps", "1", cwd=tmp_path)


@pytest.mark.slow
def test_train_tunes_by_running_before_it_trains(tmp_path: Path) -> None:
    where = ("--nproc", "2", "--seq", "32", "--device", "cpu", "--micro-batches", "4")
    out = octopipe("train", "llama3-8b", *TINY, *where, "--tune", "1s", "--measure", "--steps", "2", cwd=tmp_path)
    assert "loss" in out


def test_a_profile_of_megatrons_chunks_names_the_function_that_runs_them(tmp_path: Path) -> None:
    from octopipe.costs.profile_file import Profile
    from octopipe.costs.table import CostTable

    costs = CostTable.uniform(num_layers=6)
    Profile(costs=costs, about={"model_code": "Megatron-Core chunks"}).save(tmp_path / "m.json")
    told = octopipe("tune", "m.json", "--pp", "2", "--micro-batches", "4", "--measure", cwd=tmp_path, code=2)
    assert "octopipe.megatron.tune_measured" in told and "Traceback" not in told
