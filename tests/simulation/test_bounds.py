"""Proven bounds: below every plan that was ever found, and strong where a closed form says how strong."""

from __future__ import annotations

import random

import numpy as np
import pytest
from brute_force import least_ms
from effort import some

from octopipe.base.errors import DoesNotFitError, OctoPipeError
from octopipe.costs.cluster.hardware import Link, Network
from octopipe.costs.table import CostTable
from octopipe.search.comparison import compare
from octopipe.search.systems import build_plan, systems
from octopipe.search.tuner import tune
from octopipe.simulation.bounds.bounds import (
    PlanClass,
    bounds,
    copied_bound,
    lower_bound,
    lower_bound_ms,
    ramp_bound_ms,
    work_bound_ms,
)
from octopipe.simulation.simulator import simulate

GIB = float(1 << 30)


def limited(seed: int) -> tuple[CostTable, int, int]:
    """Layers of very different times and memory, a limit somewhere near what 1F1B needs, perhaps a heavy head."""
    lot = np.random.default_rng(seed)
    layers, ranks = int(lot.integers(4, 12)), int(lot.integers(2, 5))
    micro_batches = int(lot.integers(1, 9))
    head = np.where(np.arange(layers) == layers - 1, lot.choice([1.0, 4.0]), 1.0)
    costs = CostTable.uniform(num_layers=layers, p2p_ms=float(lot.choice([0.0, 0.4]))).replace(
        forward_ms=lot.uniform(0.2, 3.0, layers) * head,
        input_ms=lot.uniform(0.2, 4.0, layers) * head,
        weight_ms=lot.uniform(0.0, 2.0, layers) * head,
        activation_bytes=lot.uniform(0.5, 2.0, layers) * GIB,
        stash_bytes=lot.uniform(0.1, 0.5, layers) * GIB,
        static_bytes=lot.uniform(0.0, 1.0, layers) * GIB,
    )
    need = float(simulate(build_plan("1f1b", costs, ranks, micro_batches), costs).peak_bytes.max())
    return costs.replace(rank_memory_bytes=(need * float(lot.uniform(0.7, 1.6)),)), ranks, micro_batches


@pytest.mark.parametrize("seed", some(range(8), 1))
@pytest.mark.parametrize("recompute", [False, True])
def test_no_plan_under_a_memory_limit_is_below_any_bound(seed: int, recompute: bool) -> None:
    costs, ranks, micro_batches = limited(seed)
    try:
        found = tune(
            costs, ranks, micro_batches, iterations=600, workers=1, recompute=recompute, copies=False, seed=seed
        )
    except DoesNotFitError:
        return
    for bound in bounds(costs, ranks, micro_batches, recompute):
        assert bound.ms <= found.step_ms * (1 + 1e-9), bound


@pytest.mark.parametrize("seed", some(range(12), 6))
def test_no_published_plan_with_single_copies_is_below_any_bound(seed: int) -> None:
    costs, ranks, micro_batches = limited(100 + seed)
    proven = bounds(costs, ranks, micro_batches)
    for name in systems():
        if name in ("tessel", "optpipe"):
            continue
        try:
            plan = build_plan(name, costs, ranks, micro_batches)
        except OctoPipeError:
            continue  # a system that does not apply here
        timeline = simulate(plan, costs)
        if timeline.fits and not plan.replicas():
            for bound in proven:
                assert bound.ms <= timeline.step_ms * (1 + 1e-9), (name, bound)


def test_memory_raises_the_bound_where_activations_of_the_start_up_do_not_fit() -> None:
    costs = CostTable.uniform(num_layers=32, activation_bytes=GIB).replace(stash_bytes=np.full(32, 0.6 * GIB))
    tight = costs.replace(rank_memory_bytes=(12 * GIB,))
    assert ramp_bound_ms(tight, 8, 16, recompute=False) > 1.02 * ramp_bound_ms(costs, 8, 16)
    assert ramp_bound_ms(tight, 8, 16, recompute=True) <= ramp_bound_ms(tight, 8, 16, recompute=False)


def test_one_micro_batch_takes_the_whole_chain() -> None:
    """Closed form: with one micro-batch F and I run one after another, hops between ranks beside them."""
    costs = CostTable.uniform(num_layers=4, p2p_ms=0.5)
    f, i = costs.forward_ms.sum(), costs.input_ms.sum()
    assert lower_bound_ms(costs, 4, 1) >= f + i - costs.input_ms[0] - 1e-9


def test_bounds_of_random_settings_are_ordered_and_positive() -> None:
    lot = random.Random(1)
    for _ in range(10):
        costs, ranks, micro_batches = limited(lot.randrange(1000))
        found = bounds(costs, ranks, micro_batches)
        assert [b.ms for b in found] == sorted((b.ms for b in found), reverse=True)
        assert found[-1].ms > 0
        assert compare(costs, ranks, micro_batches, names=["1f1b"]).lower_bound_ms == found[0].ms


def tiny(seed: int, layers: int, *, limit: bool) -> CostTable:
    """Small enough to try everything; half-milliseconds, gibibytes."""
    lot = np.random.default_rng(seed)
    costs = CostTable(
        model="tiny",
        symbols="T" * layers,
        forward_ms=lot.integers(1, 6, layers) / 2,
        input_ms=lot.integers(1, 6, layers) / 2,
        weight_ms=lot.integers(0, 5, layers) / 2,
        network=Network.constant(float(lot.choice([0.0, 0.3]))),
        activation_bytes=lot.integers(2, 7, layers) * GIB,
        stash_bytes=lot.integers(0, 3, layers) * GIB,
        static_bytes=lot.integers(0, 4, layers) * GIB,
    )
    return costs.replace(rank_memory_bytes=(float(lot.integers(7, 18)) * GIB,)) if limit else costs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("micro_batches", "limit", "plans"),
    [
        (2, False, PlanClass(recompute=False, copies=False)),
        (3, False, PlanClass(recompute=False, copies=True)),
        (2, True, PlanClass(recompute=False, copies=True)),
        (2, True, PlanClass(recompute=True, copies=False)),
        (2, True, PlanClass(recompute=True, copies=True)),
    ],
)
def test_no_plan_of_its_class_is_below_a_bound(seed: int, micro_batches: int, limit: bool, plans: PlanClass) -> None:
    """Against the least time over every placement, every order, every choice of copies and recomputation."""
    costs = tiny(seed, 2, limit=limit)
    least = least_ms(costs, 2, micro_batches, copies=plans.copies, recompute=plans.recompute)
    for bound in bounds(costs, 2, micro_batches, *plans):
        assert bound.ms <= least * (1 + 1e-9), bound


def test_a_wider_class_never_has_a_higher_bound() -> None:
    for seed in range(8):
        costs, ranks, micro_batches = limited(seed)
        once = {recompute: lower_bound(costs, ranks, micro_batches, recompute, False).ms for recompute in (False, True)}
        assert once[True] <= once[False] * (1 + 1e-9)
        for recompute, single in once.items():
            copied = lower_bound(costs, ranks, micro_batches, recompute, True).ms
            assert work_bound_ms(costs, ranks, micro_batches) <= copied <= single * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(range(12), 6))
def test_no_published_plan_with_copies_is_below_the_bound_with_copies(seed: int) -> None:
    costs, ranks, micro_batches = limited(200 + seed)
    costs = costs.replace(rank_memory_bytes=tuple(3 * b for b in costs.rank_memory_bytes))
    costs = costs.replace(gradient_bytes=np.full(costs.num_layers, 1e6))
    for name in ("chimera", "dualpipe"):
        try:
            plan = build_plan(name, costs, ranks - ranks % 2, 2 * micro_batches, split_backward=True)
        except OctoPipeError:
            continue
        timeline = simulate(plan, costs)
        if timeline.fits and plan.replicas():
            for bound in bounds(costs, plan.num_ranks, plan.num_micro_batches, False, True):
                assert bound.ms <= timeline.step_ms * (1 + 1e-9), (name, bound)


def test_a_heavy_layer_may_be_shared_where_it_may_be_copied() -> None:
    """Closed form: two ranks that hold everything do two of four micro-batches each."""
    heavy = CostTable(
        model="heavy",
        symbols="TL",
        forward_ms=np.array([1.0, 8.0]),
        input_ms=np.array([1.0, 8.0]),
        weight_ms=np.array([1.0, 5.0]),
    )
    each = float(heavy.layer_ms.sum()) * 2
    assert lower_bound(heavy, 2, 4, False, False).ms > each
    assert lower_bound(heavy, 2, 4, False, True).ms == pytest.approx(each)


def test_copies_that_cannot_be_reduced_in_time_or_held_do_not_weaken_the_bound() -> None:
    link = Link(latency_ms=0.1, ms_per_byte=1e-9)
    costs = CostTable.uniform(num_layers=6).replace(
        network=Network(intra=link, inter=link), gradient_bytes=np.full(6, 1e12)
    )
    assert copied_bound(costs, 3, 4).ms == lower_bound(costs, 3, 4).ms
    full = costs.replace(gradient_bytes=np.zeros(6), static_bytes=np.full(6, GIB), rank_memory_bytes=(2.1 * GIB,))
    assert copied_bound(full, 3, 4).ms > work_bound_ms(full, 3, 4)


def test_bounds_of_forwards_that_take_no_time_raise_no_warnings() -> None:
    costs = CostTable.uniform(num_layers=8, forward_ms=0.0, activation_bytes=10.0).replace(rank_memory_bytes=(30.0,))
    with np.errstate(all="raise", under="ignore"):
        assert lower_bound(costs, 4, 8).ms >= 4 * 8 * 2.0 / 2


def test_classes_speak_in_words() -> None:
    assert PlanClass(recompute=False, copies=False).words == "plans that hold each layer once and recompute nothing"
    assert PlanClass().words == "plans that hold each layer once and may recompute"
    assert "several ranks" in PlanClass(copies=True).words
