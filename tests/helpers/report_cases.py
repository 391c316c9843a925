"""Timelines for the report's tests and benchmark: a noisy one of 100,000 ops, as a long measurement would be."""

from __future__ import annotations

import numpy as np

from octopipe.base.graph import topological_order
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import Plan
from octopipe.search.systems import build_plan
from octopipe.simulation.engine import longest_path
from octopipe.simulation.lowering import lower
from octopipe.simulation.simulator import memory_curves
from octopipe.simulation.timeline import Spans, Timeline, Transfers


def costs_of(layers: int = 32, ranks: int = 8) -> CostTable:
    rng = np.random.default_rng(7)
    return CostTable.uniform(num_layers=layers, p2p_ms=0.15, activation_bytes=3e8, stash_bytes=1e8).replace(
        symbols="".join("EM-*L"[i % 5] for i in range(layers)),
        forward_ms=rng.uniform(0.5, 2, layers),
        input_ms=rng.uniform(0.5, 2, layers),
        weight_ms=rng.uniform(0.2, 1, layers),
        static_bytes=np.full(layers, 1e9),
        boundary_bytes=np.full(layers, 3e7),
        rank_memory_bytes=(60e9,),
    )


def noisy(plan: Plan, costs: CostTable, *, sigma: float = 0.05, label: str = "measured") -> Timeline:
    """What a measurement of the plan might look like: every op and transfer a little longer or shorter."""
    program = lower(plan, costs)
    rng = np.random.default_rng(1)
    duration = np.concatenate((op_durations(plan, costs), program.transfer_ms))
    duration *= np.exp(rng.normal(0, sigma, duration.size))
    start, end, _ = longest_path(topological_order(program.preds), program.preds, duration)
    t, n = plan.table(), plan.table().stage.size
    spans = Spans(t.rank, t.stage, t.kind.astype(np.int32), t.micro_batch, start[:n], end[:n])
    source, target = program.source, program.target
    moved = Transfers(source, target, t.rank[source], t.rank[target], start[n:], end[n:], program.nbytes)
    return Timeline(
        num_ranks=plan.num_ranks,
        spans=spans,
        transfers=moved,
        memory=memory_curves(program, costs, spans, moved),
        capacity_bytes=tuple(costs.capacity_bytes(r) for r in range(plan.num_ranks)),
        measured=True,
        label=label,
        model="uniform",
    )


def hundred_thousand() -> tuple[Plan, CostTable]:
    """A plan of 100,800 ops: 8 ranks, 4,200 micro-batches, split backward."""
    costs = costs_of()
    return build_plan("zb-h1", costs, 8, 4200), costs
