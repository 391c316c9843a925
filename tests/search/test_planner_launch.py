"""A folder one can launch: plan, script, Slurm file and page, each read by what will read it."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_planner_draws import titan_given

from octopipe.cli import main
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.launch import launch_of
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.splits import Split, splits

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
FOR = ("megatron", "torchtitan", "torch", "deepspeed", "octopipe")
SIZES = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 1, "vp": 1, "micro_batch_size": 1, "zero": 1}


def parses(text: str) -> None:
    """Bash takes it."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + text


def drawn(name: str, runtime: str, seed: int, count: int = 4) -> list[Candidate]:
    """Some splits of a model for a runtime, simulated."""
    dice, spec = random.Random(seed), preset(name)
    cluster = Setup(gpu=gpu("h100"), seq=4096)
    every = [
        s
        for s in splits(spec, cluster, gpus=32, global_batch=64, runtime=RUNTIMES[runtime])
        if 64 // (s.dp * s.micro_batch_size) * s.pp * s.vp <= 1000
    ]
    pricer = Pricer(spec, cluster, 64, recompute_ops=RUNTIMES[runtime].recomputes_by_ops)
    return [pricer.simulated(split, "none") for split in dice.sample(every, min(count, len(every)))]


def lines_of(candidate: Candidate, name: str, runtime: str) -> dict[str, str]:
    return command_lines(candidate, spec=preset(name), model=name, plan_file="plan.json", runtime=runtime)


@pytest.mark.parametrize("runtime", FOR)
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_scripts_are_bash_and_hold_the_whole_command(name: str, runtime: str) -> None:
    made = 0
    for candidate in drawn(name, runtime, 5):
        lines = lines_of(candidate, name, runtime)
        launch = launch_of(candidate, lines, title=f"{name} on 32", words=["best: this"], skipped=["nothing"])
        page = launch.files["README.md"]
        assert candidate.split.words() in page and f"{candidate.peak_gib:.1f} of" in page and "best: this" in page
        if not launch.runtime:
            assert "no command, because" in page
            continue
        made += 1
        script, job = launch.files["train.sh"], launch.files["job.sbatch"]
        parses(script)
        parses(job)
        command = lines[runtime].partition("  # ")[0]
        flags = [word for word in shlex.split(command) if word.startswith("--")]
        said = script.replace("\\\n", " ")
        assert all(flag in said for flag in flags)
        nodes, per_node = (int(re.findall(rf"#SBATCH --{n}=(\d+)", job)[0]) for n in ("nodes", "gpus-per-node"))
        assert nodes * per_node == 32
        assert f"--nproc-per-node {per_node}" in said
    assert made, "no split of these had a command"


@pytest.mark.skipif("OCTOPIPE_TORCHTITAN" not in os.environ, reason="OCTOPIPE_TORCHTITAN names no checkout")
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_torchtitans_own_config_classes_take_every_line(name: str) -> None:
    pytest.importorskip("grain")
    given = []
    for candidate in drawn(name, "torchtitan", 9, 6):
        line = lines_of(candidate, name, "torchtitan")["torchtitan"]
        if not line.startswith("none: "):
            given.append(titan_given(line, candidate))
    assert given
    done = subprocess.run(
        [sys.executable, str(HELPERS / "torchtitan_parser.py")], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{len(given)} lines taken" in done.stdout


def test_the_verb_writes_a_folder_whose_script_starts_what_was_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama3-8b", "--gpus", "16", "--gpu", "h100", "--global-batch", "32", "--budget", "2s"]
    words += ["--for", "megatron", "--pp", "4", "--tp", "2", "--json"]
    folder = tmp_path / "run"
    assert main([*words, "-o", f"{folder}/"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "job.sbatch", "plan.json", "train.sh"]
    plan = load_plan(folder / "plan.json")
    assert plan.num_ranks == 4 and plan.extra["setup"]["tp"] == 2
    script = (folder / "train.sh").read_text()
    parses(script)
    assert os.access(folder / "train.sh", os.X_OK)
    # Run with a torchrun that tells what it was given: the script hands on every flag.
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    told = bin_folder / "torchrun"
    told.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    told.chmod(0o755)
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "MEGATRON_LM": "/checkout", "HEAD": "first"}
    done = subprocess.run(
        ["bash", str(folder / "train.sh"), "--lr", "1e-3"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert "/checkout/pretrain_gpt.py" in said and "first:29500" in said
    assert said[said.index("--tensor-model-parallel-size") + 1] == "2"
    assert said[said.index("--global-batch-size") + 1] == "32" and said[-3:-1] == ["--lr", "1e-3"]
    assert f"{best['tokens_per_gpu_per_second']:.0f} tokens/GPU/s" in (folder / "README.md").read_text()
    missing = subprocess.run(
        ["bash", str(folder / "train.sh")], env={"PATH": environment["PATH"]}, capture_output=True, text=True
    )
    assert missing.returncode != 0 and "set MEGATRON_LM" in missing.stderr


def test_a_split_without_a_command_gets_the_reasons() -> None:
    spec: Any = preset("gemma-3-27b")
    found = Pricer(spec, Setup(gpu=gpu("h100"), seq=4096), 16).simulated(Split(**SIZES | {"pp": 4, "dp": 2}), "full")
    lines = lines_of(found, "gemma-3-27b", "megatron")
    launch = launch_of(found, lines, title="gemma", words=[], skipped=[])
    assert list(launch.files) == ["README.md"] and "geglu" in launch.files["README.md"]
