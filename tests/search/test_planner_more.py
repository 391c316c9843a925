"""Shared experts, copies of state, adapters and the memory of hosts in the planner: choices, lines, refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import ModelSpec
from octopipe.models.zoo import preset
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.megatron_line import megatron_line
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import Split, splits

DENSE, EXPERTS = preset("llama3-8b"), preset("qwen3-30b-a3b")
PARSER = Path(__file__).resolve().parents[1] / "helpers" / "megatron_parser.py"


def base(**more: Any) -> Setup:
    return Setup(gpu=gpu("h100"), seq=4096, **more)


def found(spec: Any, cluster: Setup, batch: int = 64, **sizes: int) -> Candidate:
    usual = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 8, "vp": 1, "micro_batch_size": 1, "zero": 1}
    return Pricer(spec, cluster, batch).simulated(Split(**usual | sizes), "auto")


def test_every_split_of_experts_is_tried_whole_and_shared() -> None:
    every = list(splits(EXPERTS, base(), gpus=16, global_batch=16, fixed={"tp": 4, "ep": 2}))
    assert {s.etp for s in every} == {1, 4}
    assert {s.etp for s in splits(DENSE, base(), gpus=16, global_batch=16)} == {1}
    chosen = {"tp": 4, "ep": 2, "etp": 2}
    assert {s.etp for s in splits(EXPERTS, base(), gpus=16, global_batch=16, fixed=chosen)} == {2}
    titan = splits(EXPERTS, base(), gpus=16, global_batch=16, runtime=RUNTIMES["torchtitan"])
    assert {s.etp for s in titan} == {1}


def test_copies_of_the_state_fill_whole_nodes() -> None:
    every = [s for s in splits(DENSE, base(), gpus=64, global_batch=64, fixed={"zero": 3, "cp": 1}) if s.tp == 2]
    assert {s.hsdp for s in every} == {1, 2, 4, 8}  # 4, 8, 16 and 32 replicas of two GPUs: one, two, four, eight nodes
    assert {s.hsdp for s in splits(DENSE, base(), gpus=64, global_batch=64, fixed={"zero": 1})} == {1}
    given = splits(DENSE, base(), gpus=64, global_batch=64, fixed={"zero": 1, "hsdp": 4})
    assert {s.hsdp for s in given} == {4}


CASES: tuple[tuple[Any, Setup, dict[str, int], str], ...] = (
    (EXPERTS, base(), {"tp": 2, "dp": 8, "ep": 4, "etp": 2}, "--expert-tensor-parallel-size 2"),
    (EXPERTS, base(), {"tp": 2, "dp": 8, "etp": 2}, "--moe-token-dispatcher-type allgather"),
    (EXPERTS, base(nodes_per_token=1), {"dp": 16, "ep": 16}, "--moe-router-num-groups 2 --moe-router-group-topk 1"),
    (DENSE, base(), {"dp": 16, "zero": 3, "hsdp": 2}, "--num-distributed-optimizer-instances 2"),
    (DENSE, base(), {"dp": 16, "hsdp": 2}, "--num-distributed-optimizer-instances 2"),
    (DENSE, base(offload_optimizer=0.5), {"dp": 8}, "--optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"),
    (DENSE, base(offload_layers=8), {"dp": 8}, "--cpu-offloading-num-layers 8"),
)


@pytest.mark.parametrize(("spec", "cluster", "sizes", "said"), CASES)
def test_megatrons_line_says_what_was_priced(spec: Any, cluster: Setup, sizes: dict[str, int], said: str) -> None:
    assert said in megatron_line(found(spec, cluster, **sizes), spec).flags


@pytest.mark.skipif("OCTOPIPE_MEGATRON_LM" not in os.environ, reason="OCTOPIPE_MEGATRON_LM names no checkout")
def test_megatrons_own_parser_takes_these_lines() -> None:
    lines = []
    for spec, cluster, sizes, _ in CASES:
        one = found(spec, cluster, **sizes)
        line = megatron_line(one, spec)
        lines.append((one.setup.num_gpus, line.environment, shlex.split(line.flags), one.split.dp))
    done = subprocess.run([sys.executable, str(PARSER)], input=json.dumps(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_runtime_has_a_command_or_a_reason() -> None:
    def lines(one: Candidate) -> dict[str, str]:
        return command_lines(one, spec=DENSE, model="llama3-8b", plan_file="plan.json", runtime="any")

    adapters = lines(found(DENSE, base(lora=16), zero=3))
    assert "has no adapters" in adapters["megatron"] and "has no adapters" in adapters["octopipe"]
    assert "LoRAConverter of rank 16" in adapters["torchtitan"] and "adapters of rank 16" in adapters["torch"]
    frozen = lines(found(DENSE, base(frozen="0-16")))
    assert "layers 0-16 frozen" in frozen["torch"] and "freezes single layers" in frozen["torchtitan"]
    copies = lines(found(DENSE, base(), dp=16, zero=3, hsdp=2))
    assert "data_parallel_replicate_degree 2" in copies["torchtitan"] and "plan with --hsdp 1" in copies["deepspeed"]
    assert "data_parallel_shard_degree 8" in copies["torchtitan"]
    host = lines(found(DENSE, base(offload_optimizer=1.0)))
    assert '"offload_optimizer": {"device": "cpu"}' in host["deepspeed"] and "keeps no share" in host["torchtitan"]
    saved = lines(found(DENSE, base(offload_layers=4), zero=3))
    assert "save_on_cpu" in saved["torch"] and "activations" in saved["torchtitan"]


def test_a_users_config_with_the_name_of_a_known_model_and_other_sizes_is_the_users_own() -> None:
    """torchtitan's own config of that name would train another model."""
    smaller = replace(DENSE, layers=(*DENSE.layers[:17], DENSE.layers[-1]))

    def line(spec: ModelSpec) -> str:
        one = found(spec, base(), zero=3)
        return command_lines(one, spec=spec, model="llama3-8b", plan_file="plan.json", runtime="torchtitan")[
            "torchtitan"
        ]

    assert "--module llama3 --config llama3_8b" in line(DENSE) and "torchtitan's own config" in line(DENSE)
    assert "--module ${MODULE} --config ${CONFIG}" in line(smaller) and "your config" in line(smaller)


def test_deepspeeds_stages_are_those_of_the_plan() -> None:
    """PipelineModule divides by parameters unless it is told otherwise: a large embedding takes a stage's blocks."""
    lines = command_lines(
        found(DENSE, base(), pp=4, dp=2), spec=DENSE, model="llama3-8b", plan_file="plan.json", runtime="deepspeed"
    )
    line = lines["deepspeed"]
    assert "num_stages=4, partition_method='type:'" in line and "with 9, 8, 8, 9 layers per stage" in line


def test_a_runtime_that_cannot_is_told_before_any_search() -> None:
    with pytest.raises(OctoPipeError, match=r"has no adapters .* leave --for out"):
        search(DENSE, base(lora=8), gpus=8, global_batch=16, runtime=RUNTIMES["megatron"], budget_s=5.0)


def test_adapters_fit_where_all_weights_do_not() -> None:
    spec = preset("llama3-70b")
    with pytest.raises(DoesNotFitError):
        search(spec, base(), gpus=8, global_batch=16, budget_s=3.0)
    answer = search(spec, base(lora=16), gpus=8, global_batch=16, budget_s=3.0)
    assert answer.best.fits and answer.best.setup.lora == 16


def test_where_nothing_fits_the_hosts_memory_is_named_if_it_helps() -> None:
    spec = preset("llama3-70b")
    with pytest.raises(DoesNotFitError, match="--offload-optimizer 1 fits tp"):
        search(spec, base(), gpus=10, global_batch=20, budget_s=3.0)
    answer = search(spec, base(offload_optimizer=1.0), gpus=10, global_batch=20, budget_s=3.0)
    assert answer.best.fits and answer.best.split.zero < 2
    with pytest.raises(DoesNotFitError) as caught:
        search(preset("llama3.1-405b"), base(), gpus=8, global_batch=16, budget_s=3.0)
    assert "offload" not in str(caught.value)


def test_offloaded_activations_mean_no_pipeline_and_no_recomputation() -> None:
    answer = search(DENSE, base(offload_layers=16), gpus=8, global_batch=32, budget_s=2.0)
    assert {c.split.pp for c in answer.ranked} == {1} and {c.recompute for c in answer.ranked} == {"none"}
    with pytest.raises(OctoPipeError, match="leave --recompute full out"):
        search(DENSE, base(offload_layers=16), gpus=8, global_batch=32, budget_s=2.0, recompute="full")


def test_a_size_that_the_runtime_does_not_run_is_named() -> None:
    """It is the runtime that refuses the size: another batch or other GPUs would not help."""
    with pytest.raises(OctoPipeError, match="`octopipe train` does not run tp 2, ep 4; leave --for out"):
        fixed = {"tp": 2, "ep": 4}
        search(EXPERTS, base(), gpus=8, global_batch=64, fixed=fixed, runtime=RUNTIMES["octopipe"], budget_s=1.0)
