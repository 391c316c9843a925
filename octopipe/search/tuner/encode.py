"""Conversion between plans and the arrays of the search.

Knows: both forms. Does not know: how plans are searched.

Every plan with a split backward whose routes partition the layers equally can be represented exactly as a structure
with orders. A fused B becomes an I followed by a W, which is no slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Op, Plan, Stage
from octopipe.search.tuner.core.follow import Orders, make_orders
from octopipe.search.tuner.core.problem import (
    BOUNDS, ENTRY, KIND_BITS, KIND_I, KIND_W, LENGTH, MASK, RANK, REDO, ROUTES, SIZE, STAGE_BITS, Problem, Scratch,
    make_structure,
)  # fmt: skip


def orders_in(scratch: Scratch) -> Orders:
    """The orders that have just been built in this scratch. They are overwritten by the next schedule."""
    return Orders(scratch.seq, scratch.place[LENGTH])


def plan_of(problem: Problem, costs: CostTable, st: np.ndarray, orders: Orders) -> Plan:
    """The plan with this structure and these orders."""
    size, routes = int(st[SIZE, 0]), int(st[ROUTES, 0])
    stages = tuple(
        Stage(
            first=int(st[BOUNDS, s % size]),
            stop=int(st[BOUNDS, s % size + 1]),
            rank=int(st[RANK, s]),
            recompute=bool(st[REDO, s]),
        )
        for s in range(size * routes)
    )
    entry = st[ENTRY].tolist()
    rows, route_of = [], [0] * problem.micro_batches
    for r in range(problem.ranks):
        row = []
        for code in orders.seq[r, : int(orders.length[r])].tolist():
            stage, micro_batch = (code >> STAGE_BITS) & MASK, entry[code & MASK]
            route_of[micro_batch] = stage // size
            row.append(Op(stage, KINDS[code >> KIND_BITS], micro_batch))
        rows.append(tuple(row))
    several: dict[str, Any] = {}
    if routes > 1:
        several["routes"] = tuple(tuple(range(k * size, (k + 1) * size)) for k in range(routes))
        several["route_of_micro_batch"] = tuple(route_of)
    return Plan(
        model=costs.model,
        num_layers=problem.layers,
        num_ranks=problem.ranks,
        num_micro_batches=problem.micro_batches,
        stages=stages,
        orders=tuple(rows),
        **several,
    )


def writable(plan: Plan) -> bool:
    """Whether the search's arrays can represent this plan without change."""
    cuts = {tuple((plan.stages[s].first, plan.stages[s].stop) for s in route) for route in plan.routes}
    every = sorted(s for route in plan.routes for s in route)
    whole = all(isinstance(s.recompute, bool) for s in plan.stages)
    return len(cuts) == 1 and every == list(range(len(plan.stages))) and whole


def structure_of(problem: Problem, max_stages: int, plan: Plan) -> np.ndarray:
    """The partition, placement and recomputation of a plan, with stages numbered route by route."""
    st = make_structure(problem, max_stages)
    stages = [plan.stages[s] for route in plan.routes for s in route]
    size = len(plan.routes[0])
    st[SIZE, 0], st[ROUTES, 0] = size, len(plan.routes)
    st[BOUNDS, : size + 1] = [s.first for s in stages[:size]] + [plan.num_layers]
    st[RANK, : len(stages)] = [s.rank for s in stages]
    st[REDO, : len(stages)] = [bool(s.recompute) for s in stages]
    return st


def arrays_of(problem: Problem, max_stages: int, plan: Plan) -> tuple[np.ndarray, Orders]:
    """The structure and the orders of a plan that is `writable`."""
    orders = make_orders(problem, max_stages)
    number = {s: k for k, s in enumerate(s for route in plan.routes for s in route)}
    for r, order in enumerate(plan.orders):
        row: list[int] = []
        for op in order:
            for kind in (KIND_I, KIND_W) if op.kind == "B" else (KINDS.index(op.kind),):
                row.append(kind << KIND_BITS | number[op.stage] << STAGE_BITS | op.micro_batch)
        orders.seq[r, : len(row)] = np.array(row, np.int64)
        orders.length[r] = len(row)
    return structure_of(problem, max_stages, plan), orders
