"""`octopipe tune --measure` on real ranks: what it refuses, and that what it keeps is what ran fastest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octopipe.cli import main
from octopipe.costs.profile_file import load_profile
from octopipe.plans.file import load_plan

TIMES = {"pattern": "ETTH", "forward_ms": [1] * 4, "backward_ms": [1] * 4, "weight_ms": [1] * 4}


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_only_a_profile_that_says_what_it_measured_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "octopipe profile llama3-8b" in complaint(capsys, "tune", "llama3-8b", "--pp", "2", "--measure")
    bare = tmp_path / "times.json"
    bare.write_text(json.dumps(TIMES))
    assert "which layers were measured" in complaint(capsys, "tune", str(bare), "--pp", "2", "--measure")
    made = tmp_path / "profile.json"
    about = {"recipe": {"model": "llama3-8b", "tokens": 8}, "ranks": 4}
    made.write_text(json.dumps({**TIMES, "format": "octopipe.profile/1", "about": about}))
    assert "give --pp 4" in complaint(capsys, "tune", str(made), "--pp", "2", "--measure")
    assert "leave --for out" in complaint(capsys, "tune", str(made), "--pp", "4", "--measure", "--for", "torch")
    assert "add --measure" in complaint(capsys, "tune", str(made), "--pp", "4", "--corrected", "x.json")


@pytest.mark.slow
def test_the_plan_that_ran_fastest_is_kept_and_corrections_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, plan, corrected = (str(tmp_path / name) for name in ("profile.json", "plan.json", "corrected.json"))
    model = ["llama3-8b", "--scale", "0.02", "--layers", "6", "--seq", "32"]
    assert main(["profile", *model, "--nproc", "2", "--repeats", "2", "-o", profile, "--json"]) == 0
    capsys.readouterr()
    flags = ["--pp", "2", "--micro-batches", "4", "--measure", "--measure-for", "1s", "--iterations", "50"]
    assert main(["tune", profile, *flags, "-o", plan, "--corrected", corrected, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured_ms"] == min(row["measured_ms"] for row in told["rows"])
    assert told["gain_over_published"] >= 1.0
    assert {row["round"] for row in told["rows"]} == {0, 1}
    assert [c["layer"] for c in told["corrections"]] == ["Embedding", "Attention + Mlp", "Head"]
    assert load_plan(plan).extra["measured"]["best"] == told["best"]
    assert load_profile(corrected).about["corrected_by_runs"] is True
    assert main(["check", plan]) == 0
