"""Prices of a plan's parts: which costs fit a plan, and sums over stages done by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from plans import random_costs, random_plan
from twin import hop_ms, op_ms

from octopipe.base.errors import OctoPipeError
from octopipe.costs.cluster.hardware import Link
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan, Stage, parse_orders
from octopipe.plans.price import (
    boundary_bytes,
    hop_times,
    match,
    stage_memory,
    stage_times,
    static_bytes,
    workspace_bytes,
)
from octopipe.search.systems import build_plan
from octopipe.simulation.after_pipeline import all_reduce_ms


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"rank_memory_bytes": (1e9,)}, True),
        ({"rank_memory_bytes": (1e9, 1e9)}, False),
        ({"rank_memory_bytes": (1e9,) * 3}, True),
        ({"rank_memory_bytes": (1e9,) * 4}, True),
        ({"rank_slowdown": (1.0, 1.0)}, False),
        ({"rank_slowdown": (1.0,) * 3}, True),
        ({"micro_batch_factor": np.ones((3, 6))}, False),
        ({"micro_batch_factor": np.ones((4, 6))}, True),
        ({"micro_batch_factor": np.ones((5, 6))}, True),
    ],
)
def test_costs_of_a_plan_name_every_rank_and_micro_batch(change: dict[str, Any], good: bool) -> None:
    costs = CostTable.uniform(num_layers=6)
    plan = build_plan("1f1b", costs, 3, 4)
    if good:
        match(plan, costs.replace(**change))
    else:
        with pytest.raises(OctoPipeError, match="give one"):
            match(plan, costs.replace(**change))


@pytest.mark.parametrize("seed", range(20))
def test_a_stage_takes_what_its_layers_take(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    costs = random_costs(rng, plan)
    times = stage_times(plan, costs)
    for s in range(len(plan.stages)):
        for m in range(plan.num_micro_batches):
            for code, kind in enumerate(KINDS):
                assert times[code, s, m] == pytest.approx(op_ms(plan, costs, Op(s, kind, m)), abs=1e-12)


@pytest.mark.parametrize(("nbytes", "members"), [(0.0, 4), (1e6, 1), (1e6, 2), (3e6, 4)])
def test_an_all_reduce_crosses_the_link_twice_less_one_share(nbytes: float, members: int) -> None:
    """Latency 2 ms up and down a tree of log2(n) levels, 3 ms per MB: 2 (n - 1) / n of the bytes."""
    link = Link(latency_ms=2.0, ms_per_byte=3e-6)
    levels = {1: 0, 2: 1, 4: 2}[members]
    want = 0.0 if members == 1 or nbytes == 0 else 2 * levels * 2.0 + 2 * (members - 1) / members * nbytes * 3e-6
    assert all_reduce_ms(nbytes, members, link) == pytest.approx(want)


def sized(costs: CostTable, values: np.ndarray, layers: list[int], m: int) -> float:
    factor = costs.micro_batch_factor
    return sum(float(values[k]) * (1.0 if factor is None else float(factor[m, k])) for k in layers)


@pytest.mark.parametrize("seed", range(24))
def test_what_stages_hand_on_and_hold_is_the_sum_over_their_layers(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=1 + seed % 2)
    costs = random_costs(rng, plan)
    out, gradient = boundary_bytes(plan, costs)
    memory, scratch = stage_memory(plan, costs), workspace_bytes(plan, costs)
    for s, stage in enumerate(plan.stages):
        layers = list(range(stage.first, stage.stop))
        again = set(stage.recomputed_layers)
        assert scratch[s] == max(float(costs.workspace_bytes[k]) for k in layers)
        for m in range(plan.num_micro_batches):
            assert out[s, m] == pytest.approx(sized(costs, costs.boundary_bytes, [stage.stop - 1], m))
            before = [stage.first - 1] if stage.first else []
            assert gradient[s, m] == pytest.approx(sized(costs, costs.boundary_bytes, before, m))
            full = sized(costs, costs.activation_bytes, layers, m)
            kept = sized(costs, costs.activation_bytes, [k for k in layers if k not in again], m)
            # Of every run of recomputed layers the input of its first; layer 0 has none.
            inputs = [k - 1 for k in layers if k in again and (k == stage.first or k - 1 not in again) and k]
            kept += sized(costs, costs.boundary_bytes, inputs, m)
            assert memory.activation[s, m] == pytest.approx(full)
            assert memory.stash[s, m] == pytest.approx(sized(costs, costs.stash_bytes, layers, m))
            assert memory.after_forward[s, m] == pytest.approx(min(kept, full) if again else full)


@pytest.mark.parametrize("seed", range(24))
def test_hops_between_ranks_take_latency_and_bytes_and_none_within_one(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, routes=1 + seed % 2)
    costs = random_costs(rng, plan)
    forward, gradient = hop_times(plan, costs)
    for m in range(plan.num_micro_batches):
        route = plan.routes[plan.route_of_micro_batch[m]]
        for s in range(len(plan.stages)):
            there = back = 0.0
            if s in route:
                at = route.index(s)
                if at + 1 < len(route):
                    there = hop_ms(plan, costs, Op(s, "F", m), Op(route[at + 1], "F", m))
                if at > 0:
                    back = hop_ms(plan, costs, Op(s, "B", m), Op(route[at - 1], "B", m))
            assert forward[s, m] == pytest.approx(there) and gradient[s, m] == pytest.approx(back)


def test_static_bytes_count_copies_and_what_is_tied_once_a_rank() -> None:
    stages = tuple(
        Stage(first=f, stop=e, rank=r) for f, e, r in ((0, 1, 0), (1, 3, 1), (0, 3, 2), (0, 2, 3), (2, 3, 3))
    )
    orders = parse_orders([["0F0", "0B0"], ["1F0", "1B0"], ["2F1", "2B1"], ["3F2", "4F2", "4B2", "3B2"]])
    plan = Plan(
        num_layers=3, num_ranks=4, num_micro_batches=3, stages=stages, orders=orders,
        routes=((0, 1), (2,), (3, 4)), route_of_micro_batch=(0, 1, 2),
    ).check()  # fmt: skip
    costs = CostTable.uniform(num_layers=3).replace(static_bytes=np.array([10.0, 3.0, 20.0]))
    assert static_bytes(plan, costs).tolist() == [10, 23, 33, 33]
    # Ranks 2 and 3 hold both ends; rank 0 holds the first, rank 1 the last.
    assert static_bytes(plan, costs.replace(tied_bytes=4.0)).tolist() == [10, 23, 29, 29]


@pytest.mark.parametrize("layers", [5, 7])
def test_costs_of_another_number_of_layers_are_refused(layers: int) -> None:
    plan = build_plan("1f1b", CostTable.uniform(num_layers=6), 3, 4)
    with pytest.raises(OctoPipeError, match=f"the plan has 6 layers, uniform has {layers}"):
        match(plan, CostTable.uniform(num_layers=layers))
