"""Interleaved 1F1B: every rank holds several chunks of the model and visits them in turn.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
Rule: stage s on rank s mod p; forwards (and backwards, in reverse chunk order) go in groups of p micro-batches
per chunk; rank i warms up with 2(p-1-i) + (v-1)p forwards, then pairs F and B. Needs p | m.
Bubble (p-1)(F+b)/v; device-0 peak 2(p-1)+(v-1)p+1 chunks, capped at mv.
"""

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.registry import Setting, require, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes
from octopipe.simulation.simulator import simulate

MOST_CHUNKS = 8


@system(
    name="interleaved",
    title="Interleaved 1F1B",
    paper="Narayanan et al., SC 2021",
    year=2021,
    tunes=("placement",),
    constraint="micro-batches a multiple of pp; at least 2 layers a rank",
)
def interleaved(setting: Setting) -> Plan:
    """Option `chunks`: stages per rank; left out, the fastest of 2..8 that fits (or the leanest)."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    require(m % p == 0, "interleaved", f"{m} micro-batches are not a multiple of pp {p}")
    chunks = setting.option("chunks", None)
    if chunks is not None:
        if not isinstance(chunks, int) or chunks < 1:
            raise OctoPipeError(f"interleaved: chunks is {chunks}; give a whole number of stages per rank")
        return interleaved_plan(costs, p, m, chunks)
    most = min(MOST_CHUNKS, costs.num_layers // p)
    require(most >= 2, "interleaved", f"{costs.num_layers} layers give pp {p} no second stage per rank")
    plans = [interleaved_plan(costs, p, m, v) for v in range(2, most + 1)]
    timelines = [simulate(plan, costs) for plan in plans]
    best = min(range(len(plans)), key=lambda k: (not timelines[k].fits, timelines[k].step_ms))
    return plans[best]


def interleaved_plan(costs: CostTable, p: int, m: int, v: int) -> Plan:
    """v stages per rank."""

    def chunk_of(k: int, backward: bool) -> int:
        chunk = (k % (p * v)) // p
        return v - 1 - chunk if backward else chunk

    def micro_batch_of(k: int) -> int:
        return (k // (p * v)) * p + k % p

    orders = []
    for i in range(p):

        def op(k: int, kind: str, rank: int = i) -> Op:
            return Op(chunk_of(k, kind == "B") * p + rank, kind, micro_batch_of(k))

        warmup = min(2 * (p - 1 - i) + (v - 1) * p, m * v)
        order = [op(k, "F") for k in range(warmup)]
        for k in range(m * v):
            if warmup + k < m * v:
                order.append(op(warmup + k, "F"))
            order.append(op(k, "B"))
        orders.append(order)
    stages = stages_from_sizes(even_sizes(costs, p * v), loop(p * v, p))
    return make_plan(costs, p, m, stages, orders)
