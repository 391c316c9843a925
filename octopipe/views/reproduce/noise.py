"""What a prediction leaves out and a measurement has: noise on every op, and transfers of a rank that wait for each
other.

Knows: the paper's own noise (§VIII-C) and how step times change under it. Does not know: which rows this explains.
"""

from __future__ import annotations

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import jitter_ms
from octopipe.views.reproduce.bench import Bench
from octopipe.views.reproduce.reading import BASELINES, Head, baseline_plan

NOISE, DRAWS = 0.064, 50
"""Two equal layers differ by this share (§VIII-C: 3.73 ± 0.239 ms)."""
NOISE_AND_QUEUE = "noise, one queue"
"""The change, as rows name it: noise on every op of every system, and OctoPipe's transfers in one queue per rank as the
baselines' are."""


def noisy_ms(bench: Bench, plan: Plan, costs: CostTable) -> float:
    """The mean step of a plan under noise, its transfers in one queue per rank."""
    program = lower(plan, costs, channel="single")
    return float(np.mean(jitter_ms(program, costs, sigma=NOISE, runs=DRAWS, seed=bench.options.seed)))


def noisy_steps(
    bench: Bench, model: str, ranks: int, micro_batches: int, *, head: Head = "published", recompute: bool = False
) -> dict[str, float]:
    """Of the four baselines and Algorithm 1's plan; made once for a bench."""
    key = f"{model} {ranks} {micro_batches} {head} {recompute}"
    if key not in bench.noisy:
        costs = bench.costs(model, ranks, micro_batches, head=head, recompute=recompute)
        plans = {n: baseline_plan(n, costs, ranks, micro_batches, bench.reading) for n in BASELINES}
        plans["algorithm1"] = bench.plan("algorithm1", costs, ranks, micro_batches)
        bench.noisy[key] = {name: noisy_ms(bench, plan, costs) for name, plan in plans.items()}
    return bench.noisy[key]


def noisy_gain(bench: Bench, model: str, ranks: int, micro_batches: int, over: str = "1f1b", **more: bool) -> float:
    """Algorithm 1's speed-up over a baseline under noise."""
    steps = noisy_steps(bench, model, ranks, micro_batches, **more)  # type: ignore[arg-type]
    return steps[over] / steps["algorithm1"]
