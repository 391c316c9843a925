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


def run(bench: Bench) -> Result:
    rows = [_split(bench), _adapted(bench), _jitter(bench), _lengths(bench)]
    return Result(rows=tuple(rows), costs=bench.costs_in_words)


def _split(bench: Bench) -> Row:
    """The same 64 GPUs and 16 micro-batches in all; TP stays 8, of which the layer times are."""
    four = bench.cell("nemotron-h-47b", 4, 8, "published", dp=2)
    eight = bench.cell("nemotron-h-47b", 8, 16, "published")
    before, after = eight.steps["search"], four.steps["search"]
    text = f"{before:.0f} → {after:.0f} ms ({before / after:.2f} ×)"
    claim = "47B on 64 GPUs, 16 micro-batches: PP 8 × TP 8 of the paper → PP 4 × TP 8 × DP 2, our search"
    return Row.shown("beyond.split", claim, baseline(text))


def _adapted(bench: Bench) -> Row:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    slow = costs.replace(rank_slowdown=(1.0, SLOW, 1.0, 1.0))
    before = bench.plan("search", costs, RANKS, MICRO_BATCHES)
    after = bench.plan("search", slow, RANKS, MICRO_BATCHES)
    ms = [simulate(p, slow, check=False).step_ms for p in (before, after)]
    text = f"{ms[0]:.0f} → {ms[1]:.0f} ms ({ms[0] / ms[1]:.2f} ×)"
    claim = f"8B, PP 4: a rank {100 * (SLOW - 1):.0f} % slower; the plan as it was → tuned again for it"
    return Row.shown("beyond.adapt", claim, baseline(text))


def _jitter(bench: Bench) -> Row:
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    plain = bench.plan("search", costs, RANKS, MICRO_BATCHES)
    steady = bench.searched(costs, RANKS, MICRO_BATCHES, robust=True)
    one = bench.one_f_one_b(costs, RANKS, MICRO_BATCHES)
    means = [
        float(np.mean(jitter_ms(lower(p, costs), costs, sigma=SIGMA, runs=300, seed=bench.options.seed)))
        for p in (one, plain, steady)
    ]
    text = f"1F1B {means[0]:.0f}, our search {means[1]:.0f}, robust {means[2]:.0f} ms"
    return Row.shown("beyond.jitter", f"8B, PP 4: mean step under {100 * SIGMA:g} % of jitter", baseline(text))


def _lengths(bench: Bench) -> Row:
    """Micro-batches of 1/2 to 3/2 of the length, one of each kind in turn."""
    costs = bench.costs(MODEL, RANKS, MICRO_BATCHES)
    factor = np.array([0.5, 1.5, 0.75, 1.25, 1.0, 1.0, 1.25, 0.75])
    uneven = costs.replace(micro_batch_factor=factor)
    blind = simulate(bench.plan("search", costs, RANKS, MICRO_BATCHES), uneven, check=False).step_ms
    aware = simulate(bench.plan("search", uneven, RANKS, MICRO_BATCHES), uneven, check=False).step_ms
    text = f"{blind:.0f} → {aware:.0f} ms ({blind / aware:.2f} ×)"
    claim = "8B, PP 4, micro-batches of 0.5 to 1.5 of the length: a plan that knows no lengths → one that does"
    return Row.shown("beyond.lengths", claim, baseline(text))


PART = Part(name="beyond", title="Beyond the paper", labels=(), run=run)
