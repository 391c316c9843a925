"""From the tuner's arrays to a Plan.

Knows: both forms. Does not know: which is better.
"""

from __future__ import annotations

from typing import Any

from octopipe.cost import CostTable
from octopipe.plan import KINDS, Op, Plan, Stage
from octopipe.tune.anneal import State
from octopipe.tune.follow import Orders
from octopipe.tune.kernels import Problem, Scratch


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
    max_stages, m = st.rank.size, problem.num_micro_batches
    entry = st.entry.tolist()
    rows = []
    for r in range(problem.num_ranks):
        row = []
        for code in orders.seq[r, : int(orders.length[r])].tolist():
            kind, rest = divmod(code, max_stages * m)
            stage, at = divmod(rest, m)
            row.append(Op(stage, KINDS[kind], entry[at]))
        rows.append(tuple(row))
    return Plan(
        model=costs.model,
        num_layers=problem.num_layers,
        num_ranks=problem.num_ranks,
        num_micro_batches=m,
        stages=stages,
        orders=tuple(rows),
        extra=extra or {},
    )
