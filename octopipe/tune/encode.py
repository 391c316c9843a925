"""From the tuner's arrays to a Plan.

Knows: both forms. Does not know: which is better.
"""

from __future__ import annotations

from typing import Any

from octopipe.cost import CostTable
from octopipe.plan import KINDS, Op, Plan, Stage
from octopipe.tune.anneal import State
from octopipe.tune.kernels import Problem, Scratch


def plan_of(problem: Problem, costs: CostTable, st: State, sc: Scratch, extra: dict[str, Any] | None = None) -> Plan:
    """The plan whose orders `schedule` has just written to the scratch."""
    n = int(st.size[0])
    stages = tuple(
        Stage(
            first=int(st.bounds[s]), stop=int(st.bounds[s + 1]), rank=int(st.rank[s]), recompute=bool(st.recompute[s])
        )
        for s in range(n)
    )
    max_stages, m = sc.f_ms.shape[0], problem.num_micro_batches
    entry = st.entry.tolist()
    orders = []
    for r in range(problem.num_ranks):
        row = []
        for code in sc.seq[r, : int(sc.length[r])].tolist():
            kind, rest = divmod(code, max_stages * m)
            stage, at = divmod(rest, m)
            row.append(Op(stage, KINDS[kind], entry[at]))
        orders.append(tuple(row))
    return Plan(
        model=costs.model,
        num_layers=problem.num_layers,
        num_ranks=problem.num_ranks,
        num_micro_batches=m,
        stages=stages,
        orders=tuple(orders),
        extra=extra or {},
    )
