"""Breadth-first looped pipeline: every micro-batch passes a chunk before the next chunk begins.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
Rule: stage s on rank s mod p; a rank runs all micro-batches of its first chunk, then of its second, and so on;
the backward goes through the chunks in reverse. Bubble (p-1)(F+b)/v, peak m*v chunks of activations.
Simplified: its sharded data parallelism and the overlap of that with compute are left out.
"""

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.closed_forms import ClosedForm, looped_forms
from octopipe.search.systems.interleaved import with_chunks
from octopipe.search.systems.registry import Setting, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes


@system(
    name="breadth-first",
    title="Breadth-first looped",
    paper="Lamy-Poirier, MLSys 2023",
    year=2023,
    tunes=("placement",),
    constraint="at least 2 layers a rank",
)
def breadth_first(setting: Setting) -> Plan:
    """Option `chunks`: stages per rank; by default the fastest of 2..8 that fits (the fastest of all if none fits)."""
    return with_chunks(setting, "breadth-first", breadth_first_plan)


def breadth_first_plan(costs: CostTable, p: int, m: int, v: int) -> Plan:
    """Return the plan with v stages per rank."""
    orders = []
    for rank in range(p):
        mine = range(rank, p * v, p)
        forward = [Op(s, "F", k) for s in mine for k in range(m)]
        orders.append(forward + [Op(s, "B", k) for s in reversed(mine) for k in range(m)])
    stages = stages_from_sizes(even_sizes(costs, p * v), loop(p * v, p))
    return make_plan(costs, p, m, stages, orders)


def closed_forms() -> list[ClosedForm]:
    return looped_forms("breadth-first", "mv", lambda p, m, v: m * v)
