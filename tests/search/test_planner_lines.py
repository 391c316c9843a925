"""Command lines that start: every flag is one that was priced, and Megatron-LM's own parser takes every line.

The parser is Megatron-LM's `arguments.py`. It is not on PyPI: with OCTOPIPE_MEGATRON_LM naming a checkout the lines go
through its `parse_args`, `validate_args` and `TransformerConfig`; without one they are held against rules read there.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from typing import Any

import pytest
from effort import some

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.spec import Moe
from octopipe.models.zoo import preset
from octopipe.search.planner.budget import Budget
from octopipe.search.planner.choice import complexity, simplest
from octopipe.search.planner.commands import command_lines, runs_on
from octopipe.search.planner.megatron_line import MegatronLine, megatron_line
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import Split, splits
from octopipe.search.planner.tuning import schedules

MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3", "nemotron-h-8b", "glm-4.5-air", "kimi-k2")


def base(kind: str = "h100", **more: Any) -> Setup:
    return Setup(gpu=gpu(kind), **more)


def drawn(name: str, seed: int, count: int = 4) -> list[tuple[Candidate, MegatronLine]]:
    """Some splits for Megatron-LM, simulated, with their lines."""
    dice, spec, out = random.Random(seed), preset(name), []
    for kind, gpus, precision in (("h100", 64, "bf16"), ("b200", 128, "fp8")):
        cluster = base(kind, seq=4096, precision=precision)
        every = [
            s
            for s in splits(spec, cluster, gpus=gpus, global_batch=gpus, runtime=RUNTIMES["megatron"])
            if gpus // (s.dp * s.micro_batch_size) * s.pp * s.vp <= 2000
        ]
        for split in dice.sample(every, min(count, len(every))):
            found = Pricer(spec, cluster, gpus).simulated(split, dice.choice(["none", "selective", "full"]))
            out.append((found, megatron_line(found, spec)))
    return out


def values(line: MegatronLine) -> dict[str, list[str]]:
    """Flag -> its values."""
    out: dict[str, list[str]] = {}
    for word in shlex.split(line.flags):
        if word.startswith("--"):
            assert word not in out, f"{word} twice"
            last = out.setdefault(word, [])
        else:
            last.append(word)
    return out


def keeps_the_rules(found: Candidate, line: MegatronLine, experts: bool) -> None:
    """What `validate_args` asks of the line, and what was priced is what it says."""
    flags, split = values(line), found.split
    get = {k: int(v[0]) for k, v in flags.items() if v and v[0].lstrip("-").isdigit()}
    world = found.setup.num_gpus
    tp, pp = get["--tensor-model-parallel-size"], get["--pipeline-model-parallel-size"]
    cp, ep = get.get("--context-parallel-size", 1), get.get("--expert-model-parallel-size", 1)
    etp = get.get("--expert-tensor-parallel-size", tp)
    assert world % (tp * pp * cp) == 0 and world // (tp * pp * cp) == split.dp
    assert world % (etp * ep * pp) == 0
    assert get["--global-batch-size"] % (get["--micro-batch-size"] * split.dp) == 0
    fsdp = "--use-megatron-fsdp" in flags
    if fsdp:
        assert pp == 1 and flags["--ckpt-format"] == ["fsdp_dtensor"]
        assert line.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
    elif tp > 1 or cp > 1:
        many = "--overlap-moe-expert-parallel-comm" in flags
        assert line.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == ("32" if many else "1")
    assert ("--grad-reduce-in-bf16" in flags) == (found.setup.gradient_bytes == 2)
    if experts and tp > 1:
        assert "--sequence-parallel" in flags and "--expert-tensor-parallel-size" in flags
    if found.setup.recompute == "selective":
        assert "core_attn" not in flags["--recompute-modules"], "that is Megatron-LM's default, and was not priced"
        assert ("mla_up_proj" in flags["--recompute-modules"]) == ("--multi-latent-attention" in flags)
        assert ("moe_act" in flags["--recompute-modules"]) == experts
    layout = flags.get("--pipeline-model-parallel-layout", [""])[0]
    if pp > 1 and layout:
        from octopipe.plans.readers.megatron_text import read_layout

        stages = read_layout(layout).stages
        assert len(stages) == pp * split.vp
        assert sum(stage.count("t") for stage in stages) == get["--num-layers"]


@pytest.mark.parametrize("name", some(MODELS, 3))
def test_megatron_lines_keep_the_rules_of_its_arguments(name: str) -> None:
    experts = any(isinstance(part, Moe) for layer in preset(name) for part in layer.parts)
    for found, line in drawn(name, 7):
        keeps_the_rules(found, line, experts)


@pytest.mark.skipif("OCTOPIPE_MEGATRON_LM" not in os.environ, reason="OCTOPIPE_MEGATRON_LM names no checkout")
@pytest.mark.parametrize("name", MODELS)
def test_megatron_lms_own_parser_takes_every_line(name: str) -> None:
    lines = [
        (found.setup.num_gpus, line.environment, shlex.split(line.flags), found.split.dp)
        for found, line in drawn(name, 11)
    ]
    done = subprocess.run(
        [sys.executable, os.path.join(os.path.dirname(os.path.dirname(__file__)), "helpers", "megatron_parser.py")],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{len(lines)} lines taken" in done.stdout


def test_no_runtime_divides_weights_or_gradients_under_a_pipeline() -> None:
    for runtime in RUNTIMES.values():
        every = splits(preset("llama3-8b"), base(), gpus=16, global_batch=32, runtime=runtime)
        assert all(s.zero < 2 for s in every if s.pp > 1), runtime.name


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_every_split_without_a_named_runtime_runs_on_at_least_one(name: str) -> None:
    spec, cluster = preset(name), base()
    every = list(splits(spec, cluster, gpus=8, global_batch=16))
    for split in random.Random(3).sample(every, 12):
        found = Pricer(spec, cluster, 16).simulated(split, "none")
        assert runs_on(found, spec), split


def test_lines_that_need_the_plans_file_are_given_only_where_it_was_written() -> None:
    spec = preset("llama3-8b")
    found = Pricer(spec, base(), 16).simulated(
        Split(tp=1, cp=1, ep=1, pp=4, dp=2, vp=1, micro_batch_size=1, zero=1), "none"
    )
    without = command_lines(found, spec=spec, model="llama3-8b", plan_file=None, runtime="any")
    assert "none: " in without["torch"] and "-o plan.json" in without["torch"] and "--plan" not in without["octopipe"]
    beside = command_lines(found, spec=spec, model="llama3-8b", plan_file="my plan.json", runtime="any")
    assert "'my plan.json'" in beside["torch"]


def test_stages_may_hold_the_embedding_or_the_head_alone() -> None:
    """Llama 3 405B ran with tp 8, pp 16 and 8 stages a rank: 126 blocks, embedding and head in 128 stages."""
    spec, cluster = preset("llama3.1-405b"), base("h100", seq=8192)
    sizes = {"tp": 8, "pp": 16, "vp": 8, "micro_batch_size": 1}
    assert list(splits(spec, cluster, gpus=1024, global_batch=1024, fixed=sizes))


def test_ties_go_to_the_simpler_split_with_memory_to_spare() -> None:
    spec, cluster = preset("llama3-8b"), base()
    pricer = Pricer(spec, cluster, 64)

    def of(**sizes: int) -> Candidate:
        usual = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 8, "vp": 1, "micro_batch_size": 1, "zero": 2}
        return pricer.simulated(Split(**usual | sizes), "auto")

    plain, deep = of(), of(pp=2, dp=4, vp=16, zero=1)
    assert complexity(plain) < complexity(deep)
    fast, slow = sorted((plain, deep), key=lambda c: c.step_ms)
    gap = slow.step_ms / fast.step_ms - 1.0
    assert simplest([plain, deep], gap + 1e-9) is plain
    assert simplest([plain, deep], 0.0) is fast


def test_what_flags_cannot_say_is_refused_with_the_reason() -> None:
    spec = preset("gemma-3-27b")
    found = Pricer(spec, base(), 16).simulated(
        Split(tp=1, cp=1, ep=1, pp=4, dp=2, vp=1, micro_batch_size=1, zero=1), "full"
    )
    with pytest.raises(OctoPipeError, match="geglu"):
        megatron_line(found, spec)


def test_numbers_that_a_runtime_does_not_have_are_refused_with_what_it_has() -> None:
    titan, deepspeed, ours = (RUNTIMES[name] for name in ("torchtitan", "deepspeed", "octopipe"))
    fp8 = base(precision="fp8")
    assert fp8.gradient_bytes == 2 and "give --gradients fp32" in titan.refuses(fp8)
    assert titan.settled(fp8).gradient_bytes == 4 and titan.refuses(titan.settled(fp8)) == ""
    assert titan.settled(base(gradients="bf16")).gradient_bytes == 2, "what was asked for stays, and is refused"
    assert RUNTIMES["megatron"].settled(fp8) is fp8 and RUNTIMES["any"].settled(fp8) is fp8
    assert "give --states fp32" in deepspeed.refuses(base(states="bf16"))
    assert "give --precision bf16" in ours.refuses(base(precision="fp8", gradients="fp32"))


def test_megatron_keeps_a_main_weight_unless_its_fsdp_does_not() -> None:
    spec = preset("llama3-8b")
    sizes = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 8, "vp": 1, "micro_batch_size": 1}
    for zero, states, said in ((1, "bf16-moments", True), (1, "bf16", False), (3, "bf16", True)):
        found = Pricer(spec, base(states=states), 8).simulated(Split(**sizes, zero=zero), "none")
        if not said:
            with pytest.raises(OctoPipeError, match="give --states bf16-moments"):
                megatron_line(found, spec)
            continue
        flags = values(megatron_line(found, spec))
        assert flags["--exp-avg-dtype"] == flags["--exp-avg-sq-dtype"] == ["bf16"]
        assert ("--megatron-fsdp-main-params-dtype" in flags) == (states == "bf16")


def test_overlapped_exchanges_get_many_connections() -> None:
    """With one of them kernels run one after the other, and nothing is hidden."""
    spec = preset("qwen3-30b-a3b")
    sizes = {"tp": 2, "cp": 1, "ep": 8, "pp": 2, "dp": 8, "vp": 4, "micro_batch_size": 1, "zero": 1}
    pricer = Pricer(spec, base(seq=4096, memory_gib=(500.0,)), 64, overlaps=("interleaved-overlap",))
    found = pricer.simulated(Split(**sizes), "none")
    assert found.how == "interleaved-overlap"
    assert megatron_line(found, spec).environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_pairs_are_promised_only_where_both_ops_run_at_once() -> None:
    spec = preset("qwen3-30b-a3b")
    sizes = {"tp": 1, "cp": 1, "ep": 8, "pp": 4, "dp": 8, "vp": 1, "micro_batch_size": 1, "zero": 1}
    pricer = Pricer(spec, base(seq=4096, memory_gib=(500.0,)), 128)
    found = pricer.scheduled(Split(**sizes), "dualpipev")
    assert found is not None and found.plan is not None and found.plan.pairs
    lines = command_lines(found, spec=spec, model=spec.name, plan_file="plan.json", runtime="any")
    assert "one after the other" in lines["torchtitan"] and "OVERLAP_F_B" in lines["torch"]
    assert "dualpipev" not in RUNTIMES["torchtitan"].overlaps
    budget = Budget(seconds=1e6)
    found_for = {pairs: schedules(pricer, found, budget, pairs=pairs) for pairs in (True, False)}
    assert "dualpipev" in {c.how for c in found_for[True]} and not any(
        c.plan is not None and c.plan.pairs for c in found_for[False]
    )


def test_sharded_weights_in_a_pipeline_are_refused_by_name() -> None:
    with pytest.raises(OctoPipeError, match="zero 3 and pp 3 exclude each other"):
        search(preset("llama3-70b"), base(), gpus=24, global_batch=96, fixed={"tp": 2, "pp": 3, "zero": 3}, budget_s=1)


def test_torchtitan_plans_multi_token_prediction_without_a_pipeline() -> None:
    spec, titan = preset("glm-4.5-air"), RUNTIMES["torchtitan"]
    found = list(splits(spec, base(), gpus=64, global_batch=64, runtime=titan.of_model(spec)))
    assert found and {(s.pp, s.cp) for s in found} == {(1, 1)}
    plain = preset("llama3-8b")
    assert titan.of_model(plain) is titan


def test_all_to_alls_divide_the_heads_of_keys_and_values_too() -> None:
    """Transformer Engine stops at a model of 8 key-value heads over tp 2 and cp 8; no parser does."""
    spec, cluster = preset("llama3-8b"), base(seq=32768, cp_kind="ulysses")
    found = list(splits(spec, cluster, gpus=32, global_batch=8, runtime=RUNTIMES["megatron"]))
    assert found and all(8 % (s.tp * s.cp) == 0 for s in found if s.cp > 1) and any(s.cp > 1 for s in found)
    sizes = {"tp": 2, "cp": 8, "ep": 1, "pp": 1, "dp": 2, "vp": 1, "micro_batch_size": 1, "zero": 1}
    split = Split(**sizes)
    with pytest.raises(OctoPipeError, match="8 of them do not divide over tp 2 x 8"):
        megatron_line(Pricer(spec, cluster, 8).simulated(split, "none"), spec)
    near = Pricer(spec, base(seq=32768, cp_kind="hierarchical"), 8).simulated(split, "none")
    assert "--hierarchical-context-parallel-sizes 4 2" in megatron_line(near, spec).flags
