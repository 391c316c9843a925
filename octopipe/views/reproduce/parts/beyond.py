"""Beyond the paper: another split of the GPUs, ranks that slow down, jitter, micro-batches of unequal length."""

from __future__ import annotations

import numpy as np

from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.part import Part
from octopipe.views.reproduce.row import Result, Row, baseline

MODEL, RANKS, MICRO_BATCHES = "nemotron-h-8b", 4, 8
SIGMA, SLOW = 0.05, 1.2
BIG, BATCH = "nemotron-h-56b", 16
SPLITS = ((8, 8, 1), (8, 4, 2), (4, 8, 2), (4, 4, 4), (4, 2, 8), (2, 8, 4))
"""TP, PP, DP of 64 GPUs, starting with the paper's split; each of them fits the memory of an H800."""


def run(bench: Bench) -> Result:
    rows = [_split(bench), _published_split(bench), _adapted(bench), _jitter(bench), _lengths(bench)]
    return Result(rows=tuple(rows), costs=bench.costs_in_words)


def _split(bench: Bench) -> Row:
    """Compare splits with analytic costs, since published times exist for TP 8 only; all include gradient reduction."""
    steps = {}
    for tp, pp, dp in SPLITS:
        costs = bench.costs(BIG, pp, BATCH // dp, tp=tp, dp=dp, authors=False)
        steps[tp, pp, dp] = bench.step(bench.plan("search", costs, pp, BATCH // dp), costs).step_ms
    best = min(steps, key=lambda split: steps[split])
    theirs = steps[SPLITS[0]]
    text = f"TP {best[0]} × PP {best[1]} × DP {best[2]}: {_change(theirs, steps[best])}"
    claim = (
        f"Nemotron-H 56B on 64 GPUs, {BATCH} micro-batches: the paper's TP 8 × PP 8 → the best of {len(SPLITS)} splits "
        "(our search, analytic costs)"
    )
    return Row.shown("beyond.split", claim, baseline(text))


def _published_split(bench: Bench) -> Row:
    """Compare splits of the same 64 GPUs and 16 micro-batches; TP stays 8, for which there are published times."""
    eight = bench.cell("nemotron-h-47b", 8, 16, "published").steps["search"]
    four = bench.cell("nemotron-h-47b", 4, 8, "published", dp=2).steps["search"]
    claim = "Nemotron-H 47B on 64 GPUs: TP 8 × PP 8 → TP 8 × PP 4 × DP 2 (our search, published layer times)"
    return Row.shown("beyond.published-split", claim, baseline(_change(eight, four)))


def _adapted(bench: Bench) -> Row:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    slow = costs.replace(rank_slowdown=(1.0, SLOW, 1.0, 1.0))
    before = bench.plan("search", costs, RANKS, MICRO_BATCHES)
    after = bench.plan("search", slow, RANKS, MICRO_BATCHES)
    ms = [simulate(p, slow, check=False).step_ms for p in (before, after)]
    claim = f"Nemotron-H 8B, PP 4, one rank {100 * (SLOW - 1):.0f} % slower: the plan as it was → a plan tuned for it"
    return Row.shown("beyond.adapt", claim, baseline(_change(*ms)))


def _jitter(bench: Bench) -> Row:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    plain = bench.plan("search", costs, RANKS, MICRO_BATCHES)
    steady = bench.searched(costs, RANKS, MICRO_BATCHES, robust=True)
    one = bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)
    means = [
        float(np.mean(jitter_ms(lower(p, costs), costs, sigma=SIGMA, runs=300, seed=bench.options.seed)))
        for p in (one, plain, steady)
    ]
    text = f"1F1B {means[0]:.0f} ms, our search {means[1]:.0f} ms, with --robust {means[2]:.0f} ms"
    claim = f"Nemotron-H 8B, PP 4: mean step time with {100 * SIGMA:g} % of jitter on every op"
    return Row.shown("beyond.jitter", claim, baseline(text))


def _lengths(bench: Bench) -> Row:
    """Compare plans on micro-batches of 1/2 to 3/2 of the length, each length in turn."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    factor = np.array([0.5, 1.5, 0.75, 1.25, 1.0, 1.0, 1.25, 0.75])
    uneven = costs.replace(micro_batch_factor=factor)
    blind = simulate(bench.plan("search", costs, RANKS, MICRO_BATCHES), uneven, check=False).step_ms
    aware = simulate(bench.plan("search", uneven, RANKS, MICRO_BATCHES), uneven, check=False).step_ms
    claim = (
        "Nemotron-H 8B, PP 4, micro-batches of 0.5 to 1.5 times the length: a plan made for equal lengths → one made "
        "for these"
    )
    return Row.shown("beyond.lengths", claim, baseline(_change(blind, aware)))


def _change(before_ms: float, after_ms: float) -> str:
    return f"{before_ms:.0f} → {after_ms:.0f} ms ({before_ms / after_ms:.2f} ×)"


PART = Part(name="beyond", title="Beyond the paper", labels=(), run=run)
