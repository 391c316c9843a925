"""Effects that a measurement has and a prediction lacks: noise on every op, and transfers of a rank that wait for each
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
"""Times of equal layers vary by this share (§VIII-C: 3.73 ± 0.239 ms); number of random draws."""
NOISE_AND_QUEUE = "noise, one queue"
"""The change, as rows name it: noise on every op of every system, and OctoPipe's transfers in one queue per rank, as
the reading has it for the baselines."""


def noisy_ms(bench: Bench, plan: Plan, costs: CostTable) -> float:
    """Return the mean step time of a plan under noise, with its transfers in one queue per rank."""
    program = lower(plan, costs, channel="single")
    return float(np.mean(jitter_ms(program, costs, sigma=NOISE, runs=DRAWS, seed=bench.options.seed)))


def noisy_steps(
    bench: Bench, model: str, ranks: int, micro_batches: int, *, head: Head = "published", recompute: bool = False
) -> dict[str, float]:
    """Return the step times under noise of the four baselines and of Algorithm 1's plan; computed once per bench."""
    key = f"{model} {ranks} {micro_batches} {head} {recompute}"
    if key not in bench.noisy:
        costs = bench.costs(model, ranks, micro_batches, head=head, recompute=recompute)
        plans = {n: baseline_plan(n, costs, ranks, micro_batches, bench.reading) for n in BASELINES}
        plans["algorithm1"] = bench.plan("algorithm1", costs, ranks, micro_batches)
        bench.noisy[key] = {name: noisy_ms(bench, plan, costs) for name, plan in plans.items()}
    return bench.noisy[key]


def noisy_gain(bench: Bench, model: str, ranks: int, micro_batches: int, over: str = "1f1b", **more: bool) -> float:
    """Return Algorithm 1's speed-up over a baseline under noise."""
    steps = noisy_steps(bench, model, ranks, micro_batches, **more)  # type: ignore[arg-type]
    return steps[over] / steps["algorithm1"]
