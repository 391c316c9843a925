"""The robust choice: the best mean over jittered times among plans that are nearly equally fast."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.cost import CostTable
from octopipe.simulate import simulate
from octopipe.systems import build_plan
from octopipe.tune import tune
from octopipe.tune.robust import mean_jittered_ms, most_robust


def uneven(layers: int = 10) -> CostTable:
    rng = np.random.default_rng(3)
    return CostTable.uniform(num_layers=layers, p2p_ms=0.1).replace(
        forward_ms=rng.uniform(1, 4, layers), input_ms=rng.uniform(1, 4, layers), weight_ms=rng.uniform(0, 2, layers)
    )


def test_the_finalist_with_the_smallest_mean_wins() -> None:
    costs = uneven()
    plans = [build_plan(name, costs, 2, 4, split_backward=True) for name in ("gpipe", "zb-h1", "interleaved")]
    chosen, mean = most_robust(plans, costs, seed=5)
    assert mean == min(mean_jittered_ms(plan, costs, seed=5) for plan in plans)
    assert chosen in plans


def test_a_robust_search_reports_its_mean_and_never_strays_from_the_best() -> None:
    costs = uneven()
    nominal = tune(costs, 2, 4, iterations=300, workers=1)
    robust = tune(costs, 2, 4, iterations=300, workers=1, robust=True)
    assert nominal.mean_jittered_ms is None
    assert robust.mean_jittered_ms == pytest.approx(mean_jittered_ms(robust.plan, costs, seed=0))
    assert robust.mean_jittered_ms <= mean_jittered_ms(nominal.plan, costs, seed=0) + 1e-9
    assert robust.step_ms <= 1.03 * nominal.step_ms + 1e-9
    assert simulate(robust.plan, costs).step_ms == robust.step_ms
