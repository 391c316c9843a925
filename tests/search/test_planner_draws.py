"""Random set-ups, and every command that is printed for them: models, GPUs, counts that fill no nodes, batches,
precisions, what is trained and kept on the host, for every runtime.

A command is read back into the set-up that it says, which must be the one that was priced: world size, batch, sharding,
precision, recomputation. OCTOPIPE_DRAWS sets how many set-ups are drawn per runtime. OCTOPIPE_MEGATRON_LM,
OCTOPIPE_TORCHTITAN and OCTOPIPE_DEEPSPEED name checkouts whose own parsers then read the commands as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_planner_lines import keeps_the_rules, values

from octopipe.costs.cluster.file import nodes_from_object
from octopipe.costs.cluster.hardware import GPUS, gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec, Moe
from octopipe.models.zoo import PRESETS, preset
from octopipe.plans.file import plan_to_json
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.launch import launch_of
from octopipe.search.planner.megatron_line import megatron_line
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.splits import splits
from octopipe.search.recompute import checkpointed_per_stage
from octopipe.views.export.torchtitan import titan_module

DRAWS = int(os.environ.get("OCTOPIPE_DRAWS", "8"))
FOR = ("megatron", "torchtitan", "torch", "deepspeed", "octopipe")
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
MIXED = nodes_from_object({"nodes": [{"gpu": "h100", "count": 1}, {"gpu": "a100", "count": 2, "gpus_per_node": 4}]})


def has_experts(spec: ModelSpec) -> bool:
    return any(isinstance(part, Moe) for layer in spec for part in layer.parts)


def options(dice: random.Random, runtime: str, kind: Any, experts: bool) -> dict[str, Any]:
    """Some of what a user may ask for, of what the runtime has."""
    known = RUNTIMES[runtime]
    out: dict[str, Any] = {"seq": dice.choice([1024, 4096, 8192])}
    precisions = ["bf16", *(["fp8"] if kind.fp8_tflops else []), *(["nvfp4"] if kind.fp4_tflops else [])]
    out["precision"] = dice.choice(precisions)
    out["precision"] = out["precision"] if out["precision"] in known.precisions else "bf16"
    if dice.random() < 0.3 or len(known.gradients) == 1:
        out["gradients"] = dice.choice(known.gradients)
    if dice.random() < 0.3:
        out["states"] = dice.choice(known.states)
    more = [{"lora": 16}] if "lora" in known.trains else []
    more += [{"frozen": "0-3"}] if "frozen" in known.trains else []
    more += [{"offload_optimizer": dice.choice([0.5, 1.0])}] if "optimizer" in known.offloads else []
    more += [{"nodes_per_token": 2}] if runtime == "megatron" and experts else []
    return out | (dice.choice(more) if more and dice.random() < 0.4 else {})


@cache
def drawn(runtime: str, seed: int = 28) -> list[tuple[str, Candidate]]:
    """Splits of random set-ups that the runtime runs, simulated with as much recomputation as they need."""
    dice, out = random.Random(f"{runtime} {seed}"), []
    known = RUNTIMES[runtime]
    while len(out) < DRAWS:
        name, kind = dice.choice(sorted(PRESETS)), gpu(dice.choice(sorted(GPUS)))
        gpus = dice.choice([1, 2, 6, 8, 12, 16, 20, 24, 32, 48, 64, 72, 96, 128])
        mixed = dice.random() < 0.1
        batch = gpus * dice.choice([1, 2, 4])
        fields = options(dice, runtime, kind, has_experts(preset(name)))
        if mixed:
            kind, gpus, batch = gpu("h100"), 16, 32
            fields = {"seq": 4096, "nodes": MIXED}
        base, spec = Setup(gpu=kind, zero=min(known.zero), **fields), preset(name)
        every = [
            s
            for s in splits(spec, base, gpus=gpus, global_batch=batch, runtime=known.of_model(spec))
            if batch // (s.dp * s.micro_batch_size) * s.pp * s.vp <= 1000
        ]
        if not every:
            continue
        pricer = Pricer(
            spec,
            base,
            batch,
            recompute_ops=known.recomputes_by_ops,
            overlaps=known.overlaps,
            checkpoints=known.checkpoints,
        )
        # Half of the draws are among those that may fit, where recomputation is partial.
        fitting = [s for s in every if pricer.may_fit(s)] or every
        out.append((name, pricer.simulated(dice.choice(fitting if dice.random() < 0.8 else every), "auto")))
    return out


def line_of(name: str, found: Candidate, runtime: str) -> str:
    return command_lines(found, spec=preset(name), model=name, plan_file="plan.json", runtime=runtime)[runtime]


def world_of(line: str, found: Candidate) -> int:
    """How many processes the launcher starts."""
    nodes = re.search(r"--nnodes (\d+)", line)
    each = re.search(r"--nproc-per-node (\w+)", line)
    assert each is not None, line
    if each[1] == "gpu":
        sizes = [size for _, count, size in found.setup.nodes for _ in range(count)]
        return sum(sizes[: int(nodes[1]) if nodes else 1])
    return int(each[1]) * (int(nodes[1]) if nodes else 1)


@pytest.mark.parametrize("runtime", FOR)
def test_every_command_starts_as_many_processes_as_were_priced(runtime: str) -> None:
    made = 0
    for name, found in drawn(runtime):
        lines = {runtime: line_of(name, found, runtime)}
        launch = launch_of(found, lines, title=f"{name} & 'more'", words=[], skipped=[])
        if lines[runtime].startswith("none: "):
            assert len(lines[runtime]) > 20 and not launch.runtime, "a reason, and no script"
            continue
        made += 1
        assert world_of(lines[runtime], found) == found.setup.num_gpus, lines[runtime]
        if found.setup.nodes:
            assert "$NODE_RANK" in lines[runtime], "stages were placed by the order of the nodes"
        for text in (launch.files["train.sh"], launch.files["job.sbatch"]):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr + text
        job = launch.files["job.sbatch"]
        nodes = int(re.findall(r"#SBATCH --nodes=(\d+)", job)[0])
        each = re.findall(r"#SBATCH --gpus-per-node=(\d+)", job)
        if each:
            assert nodes * int(each[0]) == found.setup.num_gpus
            tp = found.split.tp
            assert tp % int(each[0]) == 0 or int(each[0]) % tp == 0, "a tensor-parallel group is torn between nodes"
    assert made


def read_back(flags: dict[str, list[str]]) -> dict[str, Any]:
    """A Megatron-LM command as fields of a set-up."""

    def number(flag: str, default: int = 1) -> int:
        return int(flags[flag][0]) if flag in flags else default

    sharding = flags.get("--data-parallel-sharding-strategy", [""])[0]
    zero = {"optim_grads_params": 3, "optim_grads": 2}.get(sharding, int("--use-distributed-optimizer" in flags))
    tp = number("--tensor-model-parallel-size")
    return {
        "tp": tp,
        "pp": number("--pipeline-model-parallel-size"),
        "cp": number("--context-parallel-size"),
        "ep": number("--expert-model-parallel-size"),
        "zero": zero,
        "hsdp": number("--num-distributed-optimizer-instances"),
        "micro_batch_size": number("--micro-batch-size"),
        "global_batch": number("--global-batch-size"),
        "seq": number("--seq-length"),
        "gradient_bytes": 2.0 if "--grad-reduce-in-bf16" in flags else 4.0,
        "offload_optimizer": float(flags.get("--optimizer-offload-fraction", ["0"])[0]),
        "precision": precision_of(flags),
        "states": states_of(flags),
        "recompute": flags.get("--recompute-granularity", ["none"])[0],
    }


def precision_of(flags: dict[str, list[str]]) -> str:
    if "--fp4-format" in flags:
        return flags["--fp4-recipe"][0]
    return {"tensorwise": "fp8", "mxfp8": "mxfp8"}[flags["--fp8-recipe"][0]] if "--fp8-format" in flags else "bf16"


def states_of(flags: dict[str, list[str]]) -> str:
    moments = {flags.get(f"--exp-avg{which}-dtype", ["fp32"])[0] for which in ("", "-sq")}
    if moments == {"fp32"}:
        return "fp32"
    assert moments == {"bf16"} and "--use-precision-aware-optimizer" in flags
    return "bf16" if flags.get("--megatron-fsdp-main-params-dtype") == ["auto"] else "bf16-moments"


def test_megatrons_commands_say_the_set_up_that_was_priced() -> None:
    read = 0
    for name, found in drawn("megatron"):
        if line_of(name, found, "megatron").startswith("none: "):
            continue
        read += 1
        spec, setup = preset(name), found.setup
        line = megatron_line(found, spec)
        keeps_the_rules(found, line, has_experts(spec))
        flags = values(line)
        for field, said in read_back(flags).items():
            assert said == getattr(setup, field), (name, field, line.flags)
        if setup.zero >= 2:
            gradients = "bf16" if setup.gradient_bytes == 2 else "fp32"
            assert flags["--megatron-fsdp-main-grads-dtype"] == [gradients], "its FSDP has a flag of its own"
        if setup.tp > 1:
            assert ("--sequence-parallel" in flags) == (setup.sequence_parallel or has_experts(spec))
        if setup.recompute == "full" and setup.recompute_layers is not None:
            assert found.plan is not None and flags["--recompute-method"] == ["block"]
            each, again = checkpointed_per_stage(found.plan, setup.recompute_layers)
            assert int(flags["--recompute-num-layers"][0]) == each and again == setup.recompute_layers
    assert read


def test_torchtitans_commands_divide_the_gpus_and_the_batch() -> None:
    for name, found in drawn("torchtitan"):
        line = line_of(name, found, "torchtitan")
        if line.startswith("none: "):
            continue
        sizes = {k: int(v) for k, v in re.findall(r"--parallelism\.(\w+)_degree (\d+)", line)}
        tokens = {k: int(v) for k, v in re.findall(r"--training\.num_tokens_per_(\w+) (\d+)", line)}
        shard, copies = sizes["data_parallel_shard"], sizes.get("data_parallel_replicate", 1)
        others = [sizes.get(f"{name}_parallel", 1) for name in ("tensor", "pipeline", "context")]
        assert shard * copies * others[0] * others[1] * others[2] == found.setup.num_gpus
        share = tokens["microbatch_per_dp_rank"] * shard * copies
        assert tokens["train_step"] == (found.setup.global_batch or 0) * (found.setup.seq or 0)
        assert tokens["train_step"] == share * (found.setup.micro_batches or 0)
        assert found.setup.recompute_layers is None, "it checkpoints all blocks or none"
        assert found.setup.gradient_bytes == 4, "it reduces gradients in fp32 alone"
        assert f" activation_checkpoint:{found.setup.recompute}  # " in line, "a config has a policy of its own"
        assert ("--training.disable_cuda_graphs" in line) == (found.split.pp * found.split.ep > 1)
        assert ("dtype bfloat16" in line) == (found.setup.states == "bf16")
        assert ("converters in the config" in line) == (found.setup.precision != "bf16")


def test_deepspeeds_settings_are_json_with_the_batch_that_was_priced() -> None:
    for name, found in drawn("deepspeed"):
        line = line_of(name, found, "deepspeed")
        if line.startswith("none: "):
            continue
        settings = json.loads(line.split("ds.json: ", 1)[1])
        split, setup = found.split, found.setup
        assert settings["train_batch_size"] == setup.global_batch
        assert settings["train_batch_size"] % (settings["train_micro_batch_size_per_gpu"] * split.dp) == 0
        assert settings["zero_optimization"]["stage"] == setup.zero
        assert ("offload_optimizer" in settings["zero_optimization"]) == bool(setup.offload_optimizer)
        gradients = {4.0: "fp32", 2.0: "bf16"}[setup.gradient_bytes]
        assert settings["data_types"] == {"grad_accum_dtype": gradients}, "with ZeRO its default is bf16"
        assert ("matrix products in" in line) == (setup.precision != "bf16")
        assert ("recomputation" in line or "checkpointed layers" in line) == (setup.recompute != "none")


def parsed_by(parser: str, given: list[Any]) -> None:
    done = subprocess.run(
        [sys.executable, str(HELPERS / parser)], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert f"{len(given)} lines taken" in done.stdout


def titan_given(line: str, found: Candidate) -> tuple[int, list[str], dict[str, str]]:
    """A torchtitan command as its parser takes it: world size, flags, and what `octopipe export` writes before."""
    words, files = shlex.split(line.partition("  # ")[0].replace("$", "\\$")), {}
    if "--base" in words:
        assert found.plan is not None
        base = words[words.index("--base") + 1]
        text, settings = titan_module(found.plan, base, csv_name="planned.csv", plan_name="plan.json")
        files = {"planned.py": text, "plan.json": plan_to_json(found.plan).decode()}
        files |= {"planned.csv": settings.csv} if settings is not None else {}
    return found.setup.num_gpus, words[words.index("torchtitan.train") + 1 :], files


@pytest.mark.skipif("OCTOPIPE_MEGATRON_LM" not in os.environ, reason="OCTOPIPE_MEGATRON_LM names no checkout")
def test_megatron_lms_own_parser_takes_every_command() -> None:
    given = []
    for name, found in drawn("megatron"):
        if not line_of(name, found, "megatron").startswith("none: "):
            line = megatron_line(found, preset(name))
            given.append((found.setup.num_gpus, line.environment, shlex.split(line.flags), found.split.dp))
    parsed_by("megatron_parser.py", given)


@pytest.mark.skipif("OCTOPIPE_TORCHTITAN" not in os.environ, reason="OCTOPIPE_TORCHTITAN names no checkout")
def test_torchtitans_own_config_classes_take_every_command() -> None:
    pytest.importorskip("grain")
    given = [
        titan_given(line, found)
        for name, found in drawn("torchtitan")
        if not (line := line_of(name, found, "torchtitan")).startswith("none: ") and "${MODULE}" not in line
    ]
    parsed_by("torchtitan_parser.py", given)


@pytest.mark.skipif("OCTOPIPE_DEEPSPEED" not in os.environ, reason="OCTOPIPE_DEEPSPEED names no checkout")
def test_deepspeeds_own_reader_takes_every_settings_file() -> None:
    pytest.importorskip("hjson")
    given = [
        (found.split.dp, found.setup.micro_batches, json.loads(line.split("ds.json: ", 1)[1]))
        for name, found in drawn("deepspeed")
        if not (line := line_of(name, found, "deepspeed")).startswith("none: ")
    ]
    parsed_by("deepspeed_parser.py", given)
