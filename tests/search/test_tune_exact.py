"""The exact method against brute force; the default method against the exact one; its honest failure."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from effort import some

pytest.importorskip("ortools")

from brute_force import least_ms
from ranks import PATIENCE_S

from octopipe.base.errors import DoesNotFitError, NotApplicableError, OctoPipeError
from octopipe.costs.cluster.hardware import GIB, Link, Network
from octopipe.costs.table import CostTable
from octopipe.search.exact import solve
from octopipe.search.exact.solver import _serial_ms
from octopipe.search.systems import build_plan
from octopipe.search.tuner import tune
from octopipe.simulation.simulator import simulate


def instance(seed: int, layers: int, *, p2p_ms: float = 0.3, **more: object) -> CostTable:
    """Random layers whose gradients are too large to reduce: no plan that holds a layer twice is worth its while."""
    lot = np.random.default_rng(seed)
    link = Link(latency_ms=p2p_ms, ms_per_byte=1e-9)
    return CostTable(
        model=f"random {seed}",
        symbols="T" * layers,
        forward_ms=lot.integers(1, 6, layers) / 2,
        input_ms=lot.integers(1, 6, layers) / 2,
        weight_ms=lot.integers(0, 5, layers) / 2,
        gradient_bytes=np.full(layers, 1e12),
        network=Network(intra=link, inter=link),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("seed", "layers", "micro_batches", "slow"), [(0, 2, 2, ()), (1, 3, 2, ()), (2, 2, 2, (1.0, 1.5)), (3, 2, 3, ())]
)
def test_the_optimum_is_that_of_brute_force(
    seed: int, layers: int, micro_batches: int, slow: tuple[float, ...]
) -> None:
    costs = instance(seed, layers, rank_slowdown=slow)
    solved = solve(costs, 2, micro_batches, budget_s=PATIENCE_S, workers=2)
    assert solved.optimal
    assert solved.found.timeline.step_ms == pytest.approx(least_ms(costs, 2, micro_batches), rel=1e-4)
    assert solved.lower_bound_ms <= solved.found.timeline.step_ms


def test_the_horizon_has_room_for_transfers_of_the_largest_micro_batch() -> None:
    """Almost all of this step is the transfers of a micro-batch of 50 times the size: where memory asks for two ranks,
    the problem had no time for them, and nothing seemed to fit."""
    link = Link(ms_per_byte=1.0)
    costs = instance(0, 2).replace(
        forward_ms=np.full(2, 1e-3), input_ms=np.full(2, 1e-3), weight_ms=np.zeros(2), gradient_bytes=np.zeros(2),
        boundary_bytes=np.ones(2), micro_batch_factor=np.array([1.0, 50.0]), network=Network(intra=link, inter=link),
    )  # fmt: skip
    took = simulate(build_plan("1f1b", costs, 2, 2), costs).step_ms
    assert 100.0 < took <= _serial_ms(costs, 2, 2, again=False)


LONG_WAITS = pytest.mark.xfail(
    strict=True, reason="the optimum waits 0.15 of a micro-batch's work for a better op; the list scheduler waits less"
)


@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 4, 5, 6)),
        *(pytest.param(s, marks=[LONG_WAITS, pytest.mark.slow]) for s in (2, 3)),
    ],
)
def test_the_default_method_is_within_two_percent_of_the_optimum(seed: int) -> None:
    costs = instance(seed, 4, p2p_ms=0.1)
    exact = tune(costs, 2, 3, method="exact", budget_s=PATIENCE_S, workers=2)
    assert exact.optimal
    found = tune(costs, 2, 3, budget_s=PATIENCE_S, iterations=4000, workers=1)
    assert exact.step_ms * (1 - 1e-4) <= found.step_ms <= 1.02 * exact.step_ms


def test_plans_of_the_exact_method_run_and_fit() -> None:
    activation = np.full(4, GIB)
    costs = instance(5, 4, activation_bytes=activation, stash_bytes=0.5 * activation, rank_memory_bytes=(5 * GIB,))
    result = tune(costs, 2, 4, method="exact", budget_s=PATIENCE_S, workers=2, iterations=50)
    result.plan.check()
    assert simulate(result.plan, costs).fits
    assert result.lower_bound_ms <= result.step_ms


def test_memory_that_no_plan_has_is_an_error() -> None:
    costs = instance(5, 4, static_bytes=np.full(4, 4 * GIB), rank_memory_bytes=(5 * GIB,))
    with pytest.raises(DoesNotFitError, match="what would help"):
        tune(costs, 2, 2, method="exact", budget_s=PATIENCE_S, workers=2)


def test_a_case_too_large_says_what_was_reached() -> None:
    costs = instance(6, 150)
    with pytest.raises(OctoPipeError, match=r"found no plan .* in 0.5 s \(.*\).*small cases"):
        solve(costs, 4, 8, budget_s=0.5, workers=2)


def test_a_case_too_large_returns_the_given_start() -> None:
    costs = instance(6, 150)
    start = build_plan("1f1b", costs, 4, 8, split_backward=True)
    solved = solve(costs, 4, 8, budget_s=0.5, workers=2, start=start)
    assert solved.found.timeline.step_ms <= simulate(start, costs).step_ms and not solved.optimal


def test_without_ortools_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotApplicableError, match=r"octopipe\[exact\]"):
        solve(instance(0, 2), 2, 2, budget_s=1)


@pytest.mark.parametrize("seed", some([1, 7, 10, 4], quick=3))
@pytest.mark.parametrize("recompute", [False, True])
def test_under_a_memory_limit_the_optimum_is_that_of_brute_force(seed: int, recompute: bool) -> None:
    lot = np.random.default_rng(seed)
    costs = instance(
        seed,
        2,
        activation_bytes=lot.integers(2, 7, 2) * GIB,
        stash_bytes=lot.integers(0, 3, 2) * GIB,
        static_bytes=lot.integers(0, 4, 2) * GIB,
        rank_memory_bytes=(float(lot.integers(7, 12)) * GIB,),
    )
    least = least_ms(costs, 2, 2, recompute=recompute)
    if least == float("inf"):
        with pytest.raises(DoesNotFitError):
            solve(costs, 2, 2, budget_s=PATIENCE_S, workers=2, recompute=recompute)
        return
    solved = solve(costs, 2, 2, budget_s=PATIENCE_S, workers=2, recompute=recompute)
    assert solved.optimal and solved.found.timeline.fits
    assert solved.found.timeline.step_ms == pytest.approx(least, rel=1e-4)


def test_recomputation_that_pays_is_found_and_an_optimum_names_its_class() -> None:
    costs = instance(0, 2, p2p_ms=0.0, activation_bytes=np.full(2, 4 * GIB), rank_memory_bytes=(5 * GIB,)).replace(
        forward_ms=np.array([1.0, 6.0]), input_ms=np.array([6.0, 6.0]), weight_ms=np.array([0.0, 0.0])
    )
    kept = tune(costs, 2, 3, method="exact", budget_s=PATIENCE_S, workers=2, recompute=False)
    free = tune(costs, 2, 3, method="exact", budget_s=PATIENCE_S, workers=2)
    assert kept.optimal and free.optimal and free.step_ms < kept.step_ms - 0.5
    assert any(s.recompute for s in free.plan.stages) and not any(s.recompute for s in kept.plan.stages)
    assert kept.plans.words.endswith("recompute nothing") and free.plans.words.endswith("may recompute")
    assert simulate(free.plan, costs).fits


def test_a_plan_that_must_recompute_everything_is_within_the_horizon() -> None:
    """One op at a time, with all layers recomputed, takes longer than without."""
    costs = CostTable.uniform(num_layers=4).replace(
        activation_bytes=np.ones(4), stash_bytes=np.full(4, 0.5), boundary_bytes=np.full(4, 0.1),
        rank_memory_bytes=(2.5,),
    )  # fmt: skip
    found = tune(costs, 1, 1, method="exact", recompute=True, budget_s=PATIENCE_S)
    assert found.step_ms > float(costs.layer_ms.sum()) and simulate(found.plan, costs).fits
