"""Plans that hold layers twice: improved without breaking them, and chosen only where they win and fit."""

from __future__ import annotations

import numpy as np
import pytest

from octopipe.bounds import work_bound_ms
from octopipe.cost import CostTable
from octopipe.simulator import simulate
from octopipe.systems import build_plan
from octopipe.tuner import tune
from octopipe.tuner.copies import Copies, improvable
from octopipe.tuner.kernels import make_problem

GIB = float(1 << 30)


def heavy_head(seed: int = 0, layers: int = 14, head: float = 8.0) -> CostTable:
    """A head so heavy that the rank which holds it alone bounds the step."""
    lot = np.random.default_rng(seed)
    weight = np.where(np.arange(layers) == layers - 1, head, 1.0)
    return CostTable.uniform(num_layers=layers, p2p_ms=0.1).replace(
        forward_ms=lot.uniform(0.8, 1.2, layers) * weight,
        input_ms=lot.uniform(0.8, 1.6, layers) * weight,
        weight_ms=lot.uniform(0.3, 0.8, layers),
        activation_bytes=np.full(layers, GIB),
        stash_bytes=np.full(layers, 0.5 * GIB),
    )


def test_only_plans_with_copies_and_a_split_backward_are_improved() -> None:
    costs = heavy_head()
    assert improvable(build_plan("chimera", costs, 4, 8, split_backward=True))
    assert not improvable(build_plan("chimera", costs, 4, 8, split_backward=False))
    assert not improvable(build_plan("1f1b", costs, 4, 8, split_backward=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cap", [1.0, 1.3])
def test_the_walk_times_plans_as_the_simulator_does_and_keeps_them_sound(seed: int, cap: float) -> None:
    free = heavy_head(seed, head=float(1 + 2 * seed))
    plan = build_plan("chimera", free, 4, 8, split_backward=True)
    before = simulate(plan, free)
    costs = free.replace(rank_memory_bytes=(cap * float(before.peak_bytes.max()),))
    walk = Copies(plan, make_problem(costs, 4, 8), seed)
    assert walk.best_ms == pytest.approx(before.step_ms, rel=1e-12)
    for heat in (2e-3, 5e-4, 5e-5):
        walk.run(4000, heat)
    better = walk.best_plan()
    better.check()
    after = simulate(better, costs)
    assert after.step_ms == pytest.approx(walk.best_ms, rel=1e-12)
    assert after.fits
    # At exactly the memory of the published plan there may be no way to begin with.
    assert after.step_ms < before.step_ms if cap > 1 else after.step_ms <= before.step_ms
    assert better.replicas().keys() == plan.replicas().keys()


def test_the_tuner_is_faster_than_chimera_where_copies_pay() -> None:
    costs = heavy_head(3)
    chimera = simulate(build_plan("chimera", costs, 4, 8, split_backward=True), costs).step_ms
    found = tune(costs, 4, 8, iterations=3000, workers=1)
    assert found.step_ms < chimera
    assert found.plan.replicas()
    assert found.bound_name == "work"
    assert found.lower_bound_ms == pytest.approx(work_bound_ms(costs, 4, 8))
    assert "hold a copy" in found.explanation


def test_copies_can_be_forbidden_and_must_fit() -> None:
    costs = heavy_head(3)
    assert not tune(costs, 4, 8, iterations=300, workers=1, copies=False).plan.replicas()
    weights = costs.replace(static_bytes=np.full(14, 10 * GIB), rank_memory_bytes=(60 * GIB,))
    assert not tune(weights, 4, 8, iterations=300, workers=1).plan.replicas()
