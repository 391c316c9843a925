"""The search over whole-cluster splits: what is enumerated, how it is bounded, what it finds and says."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verbs import run

from octopipe.base.errors import OctoPipeError
from octopipe.cli.verbs.plan_answer import changes
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.models.zoo import preset
from octopipe.plans.file import load_plan
from octopipe.search.planner import search as planner_search
from octopipe.search.planner.commands import command_lines
from octopipe.search.planner.estimate import estimate, evenest_ms
from octopipe.search.planner.judging import judge
from octopipe.search.planner.pricing import Candidate, Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import Split, parse_split, splits
from octopipe.simulation.simulator import simulate

SMALL = {"gpus": 8, "global_batch": 16}
MODES = ("none", "selective", "full")


def base(kind: str = "h100", **more: Any) -> Setup:
    return Setup(gpu=gpu(kind), **more)


def test_splits_use_all_gpus_and_divide_everything() -> None:
    spec = preset("qwen3-30b-a3b")
    every = list(splits(spec, base(), gpus=16, global_batch=64))
    assert len(every) == len(set(every)) > 50
    for s in every:
        assert s.tp * s.cp * s.pp * s.dp == 16
        assert 64 % (s.dp * s.micro_batch_size) == 0
        assert (s.tp * s.cp * s.dp) % s.ep == 0 and 128 % s.ep == 0
        assert s.vp * s.pp <= 50 and (s.vp == 1 or 64 // (s.dp * s.micro_batch_size) % s.pp == 0)
    assert {s.ep for s in every} == {1, 2, 4, 8, 16}
    only = list(splits(spec, base(), gpus=16, global_batch=64, fixed={"tp": 2, "pp": 4, "zero": 1}))
    assert {(s.tp, s.pp, s.zero) for s in only} == {(2, 4, 1)}


def test_a_runtime_limits_the_splits() -> None:
    spec = preset("llama3-8b")
    ours = list(splits(spec, base(), runtime=RUNTIMES["octopipe"], **SMALL))
    assert {(s.tp, s.cp, s.ep, s.zero) for s in ours} == {(1, 1, 1, 0)}
    megatron = list(splits(spec, base(), runtime=RUNTIMES["megatron"], **SMALL))
    assert all(s.pp == 1 for s in megatron if s.zero == 3)


@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3-30b-a3b", {}), ("llama3-70b", {"lora": 16}), ("nemotron-h-8b", {"frozen": "0-9"})],
)
def test_the_bound_is_below_what_any_order_may_come_to(name: str, more: dict[str, Any]) -> None:
    """Experts whole and shared, sharded state in one copy and in several, frozen layers: 64 GPUs."""
    spec, cluster = preset(name), replace(base(), **more)
    every = list(splits(spec, cluster, gpus=64, global_batch=128))
    pricer = Pricer(spec, cluster, 128, pairs=True)
    dice = random.Random(5)
    for split in [*dice.sample(every, 25), *dice.sample([s for s in every if s.zero >= 2], 15)]:
        assert pricer.bound_ms(split) <= pricer.candidate(split, ("none",)).tuned_ms * (1 + 1e-9), split


def test_the_bound_is_below_every_estimate_and_every_simulation() -> None:
    pricer = Pricer(preset("llama3-8b"), base(), 16)
    every = list(splits(pricer.spec, pricer.base, **SMALL))
    for split in every[::7]:
        bound = pricer.bound_ms(split)
        assert bound <= pricer.candidate(split, ("none",)).step_ms * (1 + 1e-9), split
        assert bound <= pricer.simulated(split, "none").step_ms * (1 + 1e-9), split


def test_pruning_loses_nothing() -> None:
    pricer = Pricer(preset("llama3-8b"), base(), 16)
    every = list(splits(pricer.spec, pricer.base, **SMALL))
    kept, judged, _ = judge(pricer, every, MODES, lambda words: None)
    fitting = [c for c in (pricer.candidate(s, MODES) for s in every) if c.fits]
    assert judged < len(every)
    assert min(c.step_ms for c in kept) == min(c.step_ms for c in fitting)
    assert min(c.tuned_ms for c in kept) == min(c.tuned_ms for c in fitting)


def test_judging_that_ran_out_of_time_says_so() -> None:
    pricer = Pricer(preset("llama3-8b"), base(), 16)
    every = list(splits(pricer.spec, pricer.base, **SMALL))
    assert judge(pricer, every, MODES, lambda words: None)[2] is None
    kept, judged, left_ms = judge(pricer, every, MODES, lambda words: None, over=lambda: True)
    assert kept and judged < 10 and left_ms is not None


def test_without_a_runtime_nothing_is_left_out_that_some_runtime_runs() -> None:
    spec = preset("llama3-8b")
    every = set(splits(spec, base(), **SMALL))
    for name in ("torch", "megatron"):
        assert set(splits(spec, base(), runtime=RUNTIMES[name], **SMALL)) <= every, name


@pytest.mark.parametrize("seed", range(6))
def test_layers_are_dealt_nearly_as_evenly_as_they_can_be(seed: int) -> None:
    """Against every way of giving six layers to ranks; dealing the largest first takes at most 4/3 of it (Graham)."""
    lot = np.random.default_rng(seed)
    layers, ranks = lot.uniform(1.0, 5.0, 6), int(lot.integers(1, 4))
    slow = np.ones(ranks) if seed % 2 else lot.uniform(1.0, 2.0, ranks)
    best = min(
        max(sum(layers[i] * slow[r] for i in range(6) if way[i] == r) for r in range(ranks))
        for way in itertools.product(range(ranks), repeat=6)
    )
    found = evenest_ms(layers, slow)
    assert best * (1 - 1e-12) <= found <= best * (4 / 3 if seed % 2 else 2.0)


@pytest.mark.slow
def test_a_split_is_tuned_for_what_tuning_gives_it_not_for_what_it_is_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid cut evenly is worst in long pipelines, and gains most there."""
    tuned: list[Split] = []

    def noted(pricer: Pricer, candidate: Candidate, *_: object) -> tuple[None, str, bool]:
        tuned.append(candidate.split)
        return None, "", False

    monkeypatch.setattr(planner_search, "tune_candidate", noted)
    spec, cluster = preset("nemotron-h-56b"), base("h100", seq=8192)
    found = search(spec, cluster, gpus=64, global_batch=128, budget_s=20.0, clock=time.process_time)
    assert found.best.split.pp < 8, "the fastest as it is"
    pricer = Pricer(spec, cluster, 128)
    every = list(splits(spec, cluster, gpus=64, global_batch=128))
    kept, *_ = judge(pricer, every, MODES, lambda words: None)
    hoped = min((c for c in kept if c.split.pp > 1), key=lambda c: c.tuned_ms)
    assert hoped.tuned_ms < 0.97 * found.best.step_ms
    sizes = [(s.tp, s.cp, s.pp, s.dp) for s in (hoped.split, *tuned)]
    assert sizes[0] in sizes[1:], (tuned, hoped.split)


@pytest.mark.parametrize("vp", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_estimate_is_close_to_the_simulation(pp: int, vp: int) -> None:
    pricer = Pricer(preset("llama3-8b"), base(), 64)
    split = Split(tp=1, cp=1, ep=1, pp=pp, dp=8 // pp, vp=vp, micro_batch_size=1, zero=1)
    quick, exact = pricer.candidate(split, ("none",)), pricer.simulated(split, "none")
    assert quick.step_ms == pytest.approx(exact.step_ms, rel=0.05)
    assert quick.peak_gib == pytest.approx(exact.peak_gib, rel=0.06)


def test_the_estimate_of_one_rank_is_exact() -> None:
    pricer = Pricer(preset("llama3-8b"), base(), 64)
    split = Split(tp=1, cp=1, ep=1, pp=1, dp=8, vp=1, micro_batch_size=1, zero=1)
    found = estimate(lambda *how: pricer.costs(split, *how), 1, 1, 8, modes=("none",))
    assert found.step_ms == pytest.approx(pricer.simulated(split, "none").step_ms)


def test_the_winner_is_at_least_as_fast_as_today() -> None:
    found = search(preset("llama3-8b"), base(), today={"tp": 4, "pp": 2}, runtime=RUNTIMES["megatron"], **SMALL)
    assert found.best.fits and found.today is not None
    assert found.best.step_ms <= found.today.step_ms
    assert found.best.plan is not None and found.best.peak_gib <= found.best.limit_gib


def test_models_with_learned_positions_are_planned_at_the_length_that_they_are_simulated_at() -> None:
    from octopipe.cli import parser_of
    from octopipe.cli.verbs import plan as verb
    from octopipe.costs.resolve import resolve_costs

    for model, more in (("whisper-large-v3", ()), ("llama3-8b", ()), ("whisper-large-v3", ("--seq", "128"))):
        words = [model, "--gpus", "4", "--gpu", "h100", "--global-batch", "16", *more]
        setup = verb._base(parser_of("plan", verb).parse_args(words))[1]
        simulated = resolve_costs(model, pp=2, gpu="h100", **({"seq": 128} if more else {})).setup
        assert simulated is not None and setup.seq == simulated.seq


def test_sizes_that_are_fixed_hold_beside_a_faster_split_of_today() -> None:
    today = {"tp": 1, "pp": 1, "zero": 3}
    cpu = {"budget_s": 0.5, "clock": time.process_time}
    found = search(preset("llama3-8b"), base(), fixed={"tp": 4, "pp": 2}, today=today, **cpu, **SMALL)
    assert found.today is not None and found.today.fits and found.today.step_ms < found.best.step_ms
    assert (found.best.split.tp, found.best.split.pp) == (4, 2)
    assert any("% slower than today's tp 1, pp 1" in line for line in changes(found))


@pytest.mark.parametrize(
    ("model", "kind", "gpus", "batch"),
    [
        ("deepseek-v3", "h800", 2048, 15360),
        ("kimi-k2", "h800", 1024, 2048),
        ("gpt-oss-120b", "h100", 64, 512),
        ("qwen3-next-80b", "h100", 256, 1024),
        ("glm-4.5", "h100", 512, 1024),
        ("minimax-01", "h800", 1024, 1024),
    ],
)
def test_large_models_fit_the_clusters_they_are_trained_on(model: str, kind: str, gpus: int, batch: int) -> None:
    # Their tensor- and pipeline-parallel sizes as published or usual; the rest is searched, and simulated.
    spec = preset(model)
    pricer = Pricer(spec, base(kind), batch)
    pp = 16 if gpus >= 512 else 8 if gpus > 64 else 4
    fixed = {"pp": pp, "tp": 1, "cp": 1, "zero": 1, "vp": 1, "micro_batch_size": 1}
    every = list(splits(spec, pricer.base, gpus=gpus, global_batch=batch, fixed=fixed))
    kept, *_ = judge(pricer, every, MODES, lambda words: None)
    assert kept, model
    exact = pricer.simulated(kept[0].split)
    assert exact.fits and exact.peak_gib <= exact.limit_gib < gpu(kind).memory_gib
    assert exact.mfu is not None and 0.05 < exact.mfu < 0.7


def test_octopipes_own_runtime_recomputes_by_ops_and_holds_state_whole() -> None:
    """`octopipe train` has no switch for checkpointed layers: what must be recomputed is in the plan, and fits."""
    spec, cluster = preset("llama3-8b"), base("h100", seq=20480)
    fixed = {"micro_batch_size": 1}
    cpu: Any = {"budget_s": 2.0, "clock": time.process_time}
    found = search(spec, cluster, gpus=4, global_batch=16, runtime=RUNTIMES["octopipe"], fixed=fixed, **cpu)
    best = found.best
    assert best.plan is not None and best.costs is not None and best.fits
    assert best.setup.recompute == "none" and best.setup.zero == 0
    assert sum(op.kind == "R" for order in best.plan.orders for op in order) > 0
    assert simulate(best.plan, best.costs).fits
    line = command_lines(best, spec=preset("llama3-8b"), model="llama3-8b", plan_file="p.json", runtime="any")
    assert "train llama3-8b --plan p.json" in line["octopipe"] and line["torch"].startswith("none: the plan recomputes")
    with pytest.raises(OctoPipeError, match="whole layers only"):
        search(spec, cluster, gpus=4, global_batch=16, runtime=RUNTIMES["octopipe"], recompute="selective")


def test_a_command_line_is_given_only_where_it_runs_the_split() -> None:
    pricer = Pricer(preset("llama3-8b"), base("h100"), 16)

    def lines(recompute: str = "none", **sizes: int) -> dict[str, str]:
        usual = {"tp": 1, "cp": 1, "ep": 1, "pp": 2, "dp": 4, "vp": 1, "micro_batch_size": 1, "zero": 0}
        split = Split(**usual | sizes)
        return command_lines(
            pricer.simulated(split, recompute), spec=pricer.spec, model="m", plan_file="p.json", runtime="any"
        )

    assert "-m octopipe train" in lines()["octopipe"]
    assert "ZeRO-1; plan with --for octopipe" in lines(zero=1)["octopipe"]
    assert "divides no tensor" in lines(tp=2, dp=2)["octopipe"]
    assert "selective recomputation; plan with" in lines("selective")["octopipe"]
    assert "all checkpointed layers" in lines("full")["torch"] and "pp 2 x dp 4" in lines("full")["torch"]
    assert "--recompute-granularity selective" in lines("selective", zero=1)["megatron"]
    assert "optim_grads " in lines(zero=2, pp=1, dp=8)["megatron"] and "none" in lines(zero=2)["megatron"]


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=x", "fast=3"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OctoPipeError, match="tp=4,pp=8,vp=5"):
        parse_split(text)


# -- the verbs ------------------------------------------------------------------------------------------------------


PLAN = ("plan", "llama3-8b", "--gpus", "8", "--gpu", "h100", "--global-batch", "16", "--for", "megatron")


def test_plan_tells_the_winner_and_how_to_start_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, *PLAN, "--today", "tp=2,pp=2,vp=2", "-o", str(path), "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["fits"] and data["setup"]["gpus"] == 8 and data["speedup_over_today"] >= 1.0
    best = data["best"]
    assert best["step_ms"] == min(c["step_ms"] for c in data["candidates"] if c["fits"] and c["how"] != "estimated")
    words = data["commands"]["megatron"].split()
    sizes = {w: words[i + 1] for i, w in enumerate(words[:-1]) if w.startswith("--")}
    assert words[0] == "torchrun" and sizes["--global-batch-size"] == "16"
    assert sizes["--tensor-model-parallel-size"] == str(best["tp"])
    assert any("what changed" in line for line in data["changes"])
    plan = load_plan(path)
    assert plan.num_ranks == best["pp"] and plan.extra["setup"]["dp"] == best["dp"]
    code, out, _ = run(capsys, "simulate", "--plan", str(path), "--json")
    assert code == 0 and json.loads(out)["step_ms"] == pytest.approx(best["step_ms"])


def test_plan_shows_a_table_with_today(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, *PLAN, "--pp", "2", "--zero", "1", "--today", "tp=2,pp=2", "--rows", "3", "--budget", "2s"
    )
    assert code == 0 and "today" in out and "torchrun" in out and "tok/s" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "llama3-8b", "--gpu", "h100", "--global-batch", "8"), "number of GPUs is missing"),
        (("plan", "llama3-8b", "--gpus", "8"), "the number of sequences per step is missing"),
        ((*PLAN, "--pp", "3"), "no split of 8 GPUs"),
        ((*PLAN, "--today", "tp=3"), "today's split (tp 3) needs multiples of 3 GPUs, the cluster has"),
        ((*PLAN, "--today", "vp=4"), "today's split has vp 4 but no pipeline (pp 1)"),
        (("scale", "llama3-8b", "--pp", "2", "--tp", "1", "--gpus", "7"), "does not make 7 GPUs"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_model_too_large_for_its_gpus_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "llama3.1-405b", "--gpus", "8", "--gpu", "h100", "--global-batch", "8")
    assert code == 3 and "no split of 8 GPUs fits" in err


def test_scaling_weak_and_strong(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("scale", "llama3-8b", "--pp", "2", "--tp", "1", "--gpu", "h100", "--gpus", "8,...,32", "--global-batch")
    code, out, err = run(capsys, *words, "64", "--json")
    assert code == 0, err
    data = json.loads(out)
    weak, strong = data["weak"], data["strong"]
    assert [r["gpus"] for r in weak] == [8, 16, 32]
    assert [r["global_batch"] for r in weak] == [64, 128, 256]
    assert {r["global_batch"] for r in strong} == {64}
    # The slowest of more pipelines is slower; a smaller share of the batch fills the pipeline worse.
    assert weak[0]["step_ms"] < weak[1]["step_ms"] < weak[2]["step_ms"] < 1.1 * weak[0]["step_ms"]
    assert strong[0]["efficiency"] > strong[1]["efficiency"] > strong[2]["efficiency"]
    _, out, _ = run(capsys, *words, "64", "--jitter", "0", "--json")
    calm = json.loads(out)["weak"]
    assert calm[2]["step_ms"] == calm[2]["undisturbed_ms"] < weak[2]["step_ms"]


def test_scaling_meets_the_network_beyond_a_pod(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("scale", "llama3-8b", "--pp", "1", "--tp", "1", "--gpu", "h100", "--gpus", "64,512", "--jitter", "0")
    words = (*words, "--global-batch", "64", "--zero", "3", "--json")
    pods = ("--pod-nodes", "8", "--oversubscription", "4")
    found = [json.loads(run(capsys, *words, *more)[1]) for more in ((), pods, (*pods, "--flows", "2"))]
    flat, even, hashed = ([row["step_ms"] for row in answer["weak"]] for answer in found)
    assert flat[0] == even[0] == hashed[0], "eight nodes are one pod"
    assert flat[1] < even[1] < hashed[1]
    assert "flat network" in found[0]["network"] and "2 flows per connection" in found[2]["network"]
    code, _, err = run(capsys, *words, "--flows", "2")
    assert code == 2 and "give --pod-nodes too" in err


def test_megatron_is_priced_by_its_newest_fitted_stack() -> None:
    from octopipe.cli.verbs.plan import stack_for
    from octopipe.costs.cluster.hardware import gpu

    def named(*asked: Any) -> str | None:
        found = stack_for(*asked)
        return None if found is None else found.name

    assert named(None, "megatron", gpu("gb200"), "mxfp8") == "megatron-2026-06"
    assert named(None, "megatron", gpu("a100"), "bf16") == "megatron-2021"
    assert named("megatron-2024", "megatron", gpu("gb200"), "mxfp8") == "megatron-2024"
    assert named(None, "torchtitan", gpu("a100"), "bf16") == "torchtitan"
    assert named(None, "any", gpu("h100"), "bf16") is None
