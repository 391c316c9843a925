"""One budget: kept, spent on every length of pipeline, and never on an answer behind what runs today."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from effort import WHOLE

from octopipe.base.clock import process_began
from octopipe.costs.analytic.pricing import Pricing
from octopipe.costs.cluster.hardware import gpu
from octopipe.costs.cluster.setup import Setup
from octopipe.costs.measured import PUBLISHED_RUNS
from octopipe.models.zoo import PRESETS, preset
from octopipe.search.planner.budget import Budget
from octopipe.search.planner.choice import simplest
from octopipe.search.planner.commands import runs_on
from octopipe.search.planner.judging import climbed, judge, modes_of, published_splits
from octopipe.search.planner.pricing import Pricer
from octopipe.search.planner.runtimes import RUNTIMES
from octopipe.search.planner.search import search
from octopipe.search.planner.splits import Split, splits
from octopipe.search.planner.tuning import target_of

SIZES = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 1, "vp": 1, "micro_batch_size": 1, "zero": 1}


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_counts_from_its_beginning_and_leaves_time_for_the_answer() -> None:
    clock = Clock()
    budget = Budget(seconds=10.0, clock=clock, began=98.0)
    assert budget.used() == 2.0 and budget.left() == 7.0, "two seconds to start tell of a slow machine: one is kept"
    assert not budget.over(0.5) and budget.over(0.1)
    clock.now = 108.0
    assert budget.over() and budget.left() <= 0
    quick = Budget(seconds=10.0, clock=clock, began=107.9)
    assert quick.left() == pytest.approx(10.0 - 0.1 - 0.3)


def test_no_piece_is_begun_that_would_end_too_late() -> None:
    clock = Clock()
    budget = Budget(seconds=10.0, clock=clock)
    before = budget.simulating_s(100_000)
    for _ in range(8):
        budget.simulated(10_000, 1.0)  # a slow machine: 100 us an op
    assert budget.simulating_s(100_000) > before and budget.simulating_s(100_000) == pytest.approx(10.0, rel=0.02)
    assert budget.left(50_000) < budget.left() - 4.0


def test_somebody_who_ends_the_search_is_heard() -> None:
    assert Budget(seconds=100.0, stop=lambda: True).over()


def test_a_process_began_before_its_first_line() -> None:
    code = (
        "import time; t = time.monotonic(); from octopipe.base.clock import process_began; print(t - process_began())"
    )
    before = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.0 <= before < 60.0
    assert process_began() <= time.monotonic()


def test_splits_that_published_runs_used_are_always_tried() -> None:
    with PUBLISHED_RUNS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in PRESETS and row["system"] in ("h100", "gb200")]
    tried = 0
    for row in rows[:: 3 if WHOLE else 6]:
        tp, cp, ep, pp, vp, size = (int(row.get(name) or 1) for name in ("tp", "cp", "ep", "pp", "vp", "mbs"))
        gpus, batch = int(row["gpus"]), int(row["gbs"])
        spec = preset(row["model"])
        pricer = Pricer(spec, Setup(gpu=gpu(row["system"]), seq=int(row["seq"]), precision="bf16"), batch)
        every = list(splits(spec, pricer.base, gpus=gpus, global_batch=batch))
        found = published_splits(pricer, every, gpus, RUNTIMES["any"])
        own = (tp, cp, ep, pp, vp if pp > 1 else 1, size)
        m = batch // (gpus // (tp * cp * pp) * size)
        if (vp == 1 or m % pp == 0) and any((s.tp, s.cp, s.pp) == (tp, cp, pp) for s in every):
            tried += 1
            assert own in [(s.tp, s.cp, s.ep, s.pp, s.vp, s.micro_batch_size) for s in found], row
    assert tried >= 3


def test_judging_that_has_no_time_sees_every_length_of_pipeline() -> None:
    pricer = Pricer(preset("qwen3-30b-a3b"), Setup(gpu=gpu("h100"), seq=4096), 64)
    every = list(splits(pricer.spec, pricer.base, gpus=32, global_batch=64))
    calls = 0

    def over() -> bool:
        nonlocal calls
        calls += 1
        return calls > 16

    modes = modes_of("auto", RUNTIMES["any"])
    kept, judged, left_ms = judge(pricer, every, modes, lambda words: None, over=over, bounding=lambda: False)
    assert left_ms and judged <= 24
    assert len({c.split.pp for c in kept}) >= 4
    # Not even the bounds are finished: some splits are judged all the same, and nothing is said about the others.
    kept, judged, left_ms = judge(pricer, every, modes, lambda words: None, over=lambda: True)
    assert kept and judged >= 1 and left_ms == 0.0


def test_a_model_that_hardly_fits_is_found_however_short_the_time_is() -> None:
    """Most of the splits do not fit: having looked at some of them, a search may not say that none does."""
    pricer = Pricer(preset("llama3-70b"), Setup(gpu=gpu("h100"), seq=4096, zero=1), 64)
    every = list(splits(pricer.spec, pricer.base, gpus=32, global_batch=64))
    kept, _, _ = judge(pricer, every, ("none", "selective", "full"), lambda words: None, over=lambda: True)
    assert kept and all(c.fits for c in kept)


def test_tuning_returns_only_what_some_runtime_runs() -> None:
    """Copies and R ops run in `octopipe train` alone, which divides no tensor and no state."""
    alone, divided = Split(**SIZES | {"pp": 4}), Split(**SIZES | {"pp": 4, "tp": 2})
    assert target_of(alone, RUNTIMES["any"]) == "octopipe" and target_of(divided, RUNTIMES["any"]) == "torch"
    assert target_of(Split(**SIZES | {"pp": 4, "dp": 2}), RUNTIMES["any"]) == "torch"
    assert target_of(divided, RUNTIMES["megatron"]) == "megatron"
    spec, base = preset("llama3.1-405b"), Setup(gpu=gpu("gb200"), seq=8192, precision="fp8")
    sizes = {"tp": 4, "pp": 16}
    found = search(spec, base, gpus=256, global_batch=128, fixed=sizes, budget_s=2.0, clock=time.process_time)
    for candidate in (found.best, *(c for c in found.ranked if c.how == "tuned")):
        assert runs_on(candidate, spec), candidate.split


def test_the_answer_is_never_slower_than_what_runs_today() -> None:
    pricer = Pricer(preset("llama3-8b"), Setup(gpu=gpu("h100"), seq=4096), 64)

    def of(**sizes: int) -> Any:
        return pricer.simulated(Split(**SIZES | sizes), "auto")

    rivals = [of(dp=8, zero=2), of(pp=2, dp=4, vp=16), of(pp=4, dp=2, vp=4)]
    for today in rivals:
        for margin in (0.0, 0.05, 0.5):
            assert simplest(rivals, margin, today).step_ms <= today.step_ms


def test_the_bound_lets_pairs_hide_the_exchange_and_stays_below_every_estimate() -> None:
    spec, base = preset("qwen3-30b-a3b"), Setup(gpu=gpu("h100"), seq=4096)
    serial, paired = (Pricer(spec, base, 64, pairs=pairs) for pairs in (False, True))
    every = [s for s in splits(spec, base, gpus=32, global_batch=64) if s.ep > 1]
    lower = 0
    for split in every[:: max(1, len(every) // 12)]:
        assert paired.bound_ms(split) <= serial.bound_ms(split)
        lower += paired.bound_ms(split) < serial.bound_ms(split)
        assert paired.bound_ms(split) <= paired.candidate(split, ("none",)).tuned_ms * (1 + 1e-9), split
        assert serial.bound_ms(split) <= serial.candidate(split, ("none",)).step_ms * (1 + 1e-9), split
    assert lower
    setup = replace(every[0].setup(base, 64), zero=0)
    assert Pricing.of(setup).exchange.slows_compute > 0


def test_on_unequal_nodes_fast_ranks_hold_more_layers() -> None:
    """Half of the ranks are A100s: an even layout waits for them, one by speed does not."""
    from octopipe.costs.cluster.file import nodes_from_object

    nodes = nodes_from_object({"nodes": [{"gpu": "h100", "count": 2}, {"gpu": "a100", "count": 2}]})
    base = Setup(gpu=gpu("h100"), seq=4096, nodes=nodes)
    split = Split(**SIZES | {"tp": 2, "pp": 4, "dp": 4, "vp": 2})
    by_speed, even = (
        Pricer(preset("llama3-8b"), base, 64, layouts=layouts).simulated(split) for layouts in (True, False)
    )
    assert by_speed.how == "layout" and even.how == "interleaved"
    assert by_speed.step_ms < 0.92 * even.step_ms
    held = [0] * 4
    for stage in by_speed.plan.stages:  # type: ignore[union-attr]
        held[stage.rank] += stage.num_layers
    assert min(held[:2]) > max(held[2:])
    pricer = Pricer(preset("llama3-8b"), base, 64)
    for other in splits(pricer.spec, base, gpus=32, global_batch=64, fixed={"tp": 2, "micro_batch_size": 1}):
        assert pricer.bound_ms(other) <= pricer.candidate(other, ("none",)).step_ms * (1 + 1e-9), other
    # MFU is of the mix's own peak, not of the fastest card's.
    peak = (gpu("h100").bf16_tflops + gpu("a100").bf16_tflops) / 2
    per_gpu = by_speed.tokens_per_gpu_per_second * by_speed.costs.model_flops / by_speed.costs.tokens_per_micro_batch  # type: ignore[union-attr,operator]
    assert by_speed.mfu == pytest.approx(per_gpu / (peak * 1e12), rel=1e-6)


def test_steps_from_a_poor_split_lead_to_the_best_of_all() -> None:
    """Every split judged, against steps of one size at a time from a single one."""
    spec = preset("qwen3-30b-a3b")
    cluster = Setup(gpu=gpu("h100"), seq=4096)
    every = list(splits(spec, cluster, gpus=8, global_batch=16))
    pricer, modes = Pricer(spec, cluster, 16), ("none", "selective", "full")
    judged = [c for c in (pricer.candidate(s, modes) for s in every if pricer.may_fit(s)) if c.fits]
    best, worst = min(c.step_ms for c in judged), max(judged, key=lambda c: c.step_ms)
    found, more = climbed(pricer, [worst], every, modes)
    assert found[0].step_ms <= 1.02 * best < 0.5 * worst.step_ms
    assert 0 < more < len(every) and {c.split for c in found} <= set(every)
    assert climbed(pricer, [worst], every, modes, over=lambda: True) == ([worst], 0)
