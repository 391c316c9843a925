"""From the tuner's arrays to a Plan.

Knows: both forms. Does not know: which is better.
"""

from __future__ import annotations

from typing import Any

from octopipe.cost import CostTable
from octopipe.plan import KINDS, Op, Plan, Stage
from octopipe.tuner.anneal import State
from octopipe.tuner.follow import Orders
from octopipe.tuner.kernels import KIND_BITS, MASK, STAGE_BITS, Problem, Scratch


def plan_of(
    problem: Problem, costs: CostTable, st: State, orders: Scratch | Orders, extra: dict[str, Any] | None = None
) -> Plan:
    """The plan of a state with these orders: those `schedule` has just written to a scratch, or others."""
    n = int(st.size[0])
    stages = tuple(
        Stage(
            first=int(st.bounds[s]), stop=int(st.bounds[s + 1]), rank=int(st.rank[s]), recompute=bool(st.recompute[s])
        )
        for s in range(n)
    )
    entry = st.entry.tolist()
    rows = []
    for r in range(problem.num_ranks):
        row = []
        for code in orders.seq[r, : int(orders.length[r])].tolist():
            row.append(Op((code >> STAGE_BITS) & MASK, KINDS[code >> KIND_BITS], entry[code & MASK]))
        rows.append(tuple(row))
    return Plan(
        model=costs.model,
        num_layers=problem.num_layers,
        num_ranks=problem.num_ranks,
        num_micro_batches=problem.num_micro_batches,
        stages=stages,
        orders=tuple(rows),
        extra=extra or {},
    )
