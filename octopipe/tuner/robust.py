"""The robust choice: of the plans a search ends with, the one with the best mean over jittered layer times.

Knows: the finalists and how to jitter them alike. Does not know: how they were found. A robust search walks on nominal
times and then polishes the best orders for their mean under a few draws of jitter (`follow.mean_step`); finalists are
those, and what the walks found within CLOSE of the best. Here they meet many draws that no search has seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopipe.cost import CostTable
from octopipe.lowering import lower
from octopipe.plan import Plan
from octopipe.simulator import jitter_ms

SIGMA = 0.05
"""Width of the log-normal every op and transfer is scaled by: two equal layers differ by about 6 % in the paper."""
RUNS = 400
CLOSE = 0.03


def mean_jittered_ms(plan: Plan, costs: CostTable, *, seed: int) -> float:
    """Mean makespan over jittered times; the same seed gives every plan its own but repeatable draw."""
    return float(jitter_ms(lower(plan, costs), costs, sigma=SIGMA, runs=RUNS, seed=seed & 0x7FFFFFFF).mean())


def most_robust(plans: Sequence[Plan], costs: CostTable, *, seed: int) -> tuple[Plan, float]:
    """The finalist with the smallest mean, and that mean."""
    means = [mean_jittered_ms(plan, costs, seed=seed) for plan in plans]
    best = min(range(len(plans)), key=means.__getitem__)
    return plans[best], means[best]
