"""Backward splitting: same work and order, W where it costs nothing, never slower, never hungrier."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import draws, some
from plans import random_plan

from octopipe.costs.resolve import resolve_costs
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems import build_plan
from octopipe.search.systems.split import split_backward
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import Timeline

ZERO_BUBBLE_TABLE = [
    # p, m, (F, B, W, c) in ms, (hidden, heads) at 1024 tokens, published rates of 1F1B and ZB-H1
    (8, 24, (18.522, 18.086, 9.337, 0.601), (2304, 24), 0.2431, 0.1585),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (2304, 24), 0.1985, 0.1242),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (2304, 24), 0.1240, 0.0674),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (4096, 32), 0.2347, 0.1323),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (4096, 32), 0.1898, 0.1045),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (4096, 32), 0.1091, 0.0554),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (5120, 40), 0.2552, 0.1397),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (5120, 40), 0.2082, 0.1088),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (5120, 40), 0.1251, 0.0576),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (6144, 48), 0.2646, 0.1421),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (6144, 48), 0.2168, 0.1106),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (6144, 48), 0.1352, 0.0594),
]


def paired(plan: Plan) -> Plan:
    """The naive split: W right behind its I."""
    orders = [
        [
            o
            for op in order
            for o in (
                [op] if op.kind != "B" else [Op(op.stage, "I", op.micro_batch), Op(op.stage, "W", op.micro_batch)]
            )
        ]
        for order in plan.orders
    ]
    return replace(plan, orders=tuple(map(tuple, orders)))


def skeleton(plan: Plan) -> list[list[Op]]:
    """Everything but W, with B read as I."""
    return [
        [Op(o.stage, "I" if o.kind == "B" else o.kind, o.micro_batch) for o in x if o.kind != "W"] for x in plan.orders
    ]


def limits(fused: Timeline, plan: Plan, costs: CostTable) -> np.ndarray:
    limit = np.maximum(fused.peak_bytes, fused.peak_bytes.max())
    limit = limit + 2 * costs.boundary_bytes.max() * (
        1 if costs.micro_batch_factor is None else costs.micro_batch_factor.max()
    )
    return np.minimum(limit, fused.capacity_bytes) if fused.fits else limit


def holds(plan: Plan, costs: CostTable) -> Plan:
    """Split a plan and check everything that must hold of the result."""
    fused, split = simulate(plan, costs), split_backward(plan, costs).check()
    result = simulate(split, costs)
    assert not any(op.kind == "B" for order in split.orders for op in order)
    assert skeleton(split) == skeleton(plan)
    assert split.stages == plan.stages and split.routes == plan.routes
    assert split.route_of_micro_batch == plan.route_of_micro_batch and split.extra == plan.extra
    assert np.all(result.peak_bytes <= limits(fused, plan, costs) * (1 + 1e-9) + 1)
    assert result.fits >= fused.fits
    assert result.step_ms <= fused.step_ms * (1 + 1e-9)
    assert result.step_ms <= simulate(paired(plan), costs).step_ms * (1 + 1e-9)
    return split


@pytest.mark.parametrize("row", some(ZERO_BUBBLE_TABLE, 3))
def test_split_1f1b_is_zb_h1_to_four_digits(row: Any) -> None:
    p, m, times, size, plain, h1 = row
    f, b, w, c = times
    h, a = size
    costs = CostTable.uniform(
        num_layers=p,
        forward_ms=f,
        input_ms=b,
        weight_ms=w,
        p2p_ms=c,
        activation_bytes=1024.0 * (34 * h + 5 * a * 1024),
        stash_bytes=1024.0 * 32 * h,
    )
    fused = build_plan("1f1b", costs, p, m)
    before, after = simulate(fused, costs, check=False), simulate(split_backward(fused, costs), costs, check=False)
    assert round(before.span_bubble_ratio, 4) == plain
    assert round(after.span_bubble_ratio, 4) == h1
    assert after.peak_bytes.max() <= before.peak_bytes.max() + 1


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8), (8, 24)])
@pytest.mark.parametrize("w", [0.5, 1.0])
def test_uniform_span_bubble_is_zb_h1s(p: int, m: int, w: float) -> None:
    costs = CostTable.uniform(num_layers=p, weight_ms=w)
    timeline = simulate(holds(build_plan("1f1b", costs, p, m), costs), costs)
    assert timeline.span_ms == pytest.approx(m * (2 + w) + (p - 1) * (1 + 1 - w))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "chimera", "dynapipe"])
@pytest.mark.parametrize("case", some([("jamba-52b", 4, 4), ("nemotron-h-56b", 8, 16), ("llama3-8b", 4, 16)]))
def test_published_systems_split_within_the_rules(name: str, case: tuple[str, int, int]) -> None:
    model, pp, m = case
    costs = resolve_costs(model, pp=pp)
    plan = build_plan(name, costs, pp, m)
    if not any(op.kind == "B" for order in plan.orders for op in order):
        assert split_backward(plan, costs) is plan
        return
    split = holds(plan, costs)
    assert makespan_ms(split, costs) < makespan_ms(plan, costs)


@pytest.mark.parametrize("name", ["adapipe", "mist", "mario"])
def test_recomputation_survives(name: str) -> None:
    costs = resolve_costs("nemotron-h-56b", pp=8, memory_gib=42)
    plan = build_plan(name, costs, 8, 16)
    split = holds(plan, costs)
    assert sum(op.kind == "R" for order in split.orders for op in order) > 0


@pytest.mark.parametrize("seed", range(draws(60)))
def test_any_plan_splits_within_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=1 + seed % 2)
    values = np.random.default_rng(seed)
    layers = plan.num_layers
    activation = values.integers(1, 50, layers).astype(float)
    costs = CostTable(
        model="random",
        symbols="T" * layers,
        forward_ms=values.uniform(0.1, 3.0, layers),
        input_ms=values.uniform(0.1, 3.0, layers),
        weight_ms=values.uniform(0.0, 3.0, layers),
        activation_bytes=activation,
        stash_bytes=activation * values.uniform(0.0, 1.0, layers),
        static_bytes=values.uniform(0.0, 9.0, layers),
        micro_batch_factor=values.uniform(0.5, 2.0, plan.num_micro_batches) if seed % 3 == 0 else None,
    )
    holds(plan, costs)


def test_a_full_device_stays_within_its_capacity() -> None:
    costs = resolve_costs("llama3-8b", pp=4)
    plan = build_plan("1f1b", costs, 4, 16)
    peaks = simulate(plan, costs).peak_gib
    tight = costs.with_memory_gib(peaks)
    split = split_backward(plan, tight)
    assert simulate(split, tight).fits


def test_a_split_plan_comes_back_as_it_is() -> None:
    costs = CostTable.uniform(num_layers=4)
    plan = paired(build_plan("1f1b", costs, 4, 4))
    assert split_backward(plan, costs) is plan
