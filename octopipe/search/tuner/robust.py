"""Robust selection: among the final plans of a search, the one with the best mean over jittered layer times.

Knows: the finalists and how to apply the same jitter to all of them. Does not know: how they were found. A robust
search uses nominal times and then improves the best orders for their mean under a few samples of jitter (polish.py).
The finalists are these orders and other results close to the best; here they are evaluated on many new samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopipe.costs.table import CostTable
from octopipe.simulation.lowering import lower
from octopipe.plans.plan import Plan
from octopipe.simulation.simulator import jitter_ms, simulate
from octopipe.search.tuner.mechanics import JITTER_RUNS
from octopipe.search.tuner.settings import SETTINGS


def mean_jittered_ms(plan: Plan, costs: CostTable, *, seed: int) -> float:
    """The mean step time under random op and transfer times. The same seed gives a plan the same draws every time.
    Gradient reductions and the optimizer, which follow the pipeline, are not jittered."""
    program = lower(plan, costs)
    runs = jitter_ms(program, costs, sigma=SETTINGS.jitter, runs=JITTER_RUNS, seed=seed & 0x7FFFFFFF)
    timeline = simulate(program, costs)
    return float(runs.mean()) + timeline.step_ms - timeline.makespan_ms


def most_robust(plans: Sequence[Plan], costs: CostTable, *, seed: int) -> tuple[Plan, float]:
    """The finalist with the smallest mean step time under jitter, and that mean."""
    means = [mean_jittered_ms(plan, costs, seed=seed) for plan in plans]
    best = min(range(len(plans)), key=means.__getitem__)
    return plans[best], means[best]
