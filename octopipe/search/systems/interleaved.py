"""Interleaved 1F1B: every rank holds several chunks of the model and visits them in turn.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
Rule: stage s on rank s mod p; forwards (and backwards, in reverse chunk order) go in groups of p micro-batches
per chunk; rank i warms up with 2(p-1-i) + (v-1)p forwards, then pairs F and B. Needs p | m.
Bubble (p-1)(F+b)/v; device-0 peak 2(p-1)+(v-1)p+1 chunks, capped at mv.

`interleaved-overlap`: Megatron-LM's `--overlap-moe-expert-parallel-comm` with `--delay-wgrad-compute` (2025). Every
rank warms up with one more forward, so that the F and the B of a steady step are independent, and runs the two as one
pair: the exchange of one overlaps with the computation of the other, and weight gradients fill what stays exposed.
Simplified: if the costs have no exchange, there is nothing to hide, and F runs before B.
"""

from collections.abc import Callable
from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.costs.table import CostTable
from octopipe.plans.plan import Op, Plan
from octopipe.search.systems.registry import Setting, require, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, stages_from_sizes
from octopipe.simulation.simulator import simulate

MOST_CHUNKS = 8


def with_chunks(setting: Setting, name: str, make: Callable[[CostTable, int, int, int], Plan]) -> Plan:
    """Return the plan of `make(costs, ranks, micro_batches, chunks)` with the stages per rank of the option `chunks`;
    by default the fastest of 2..8 that fits (or, if none fits, simply the fastest)."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    chunks = setting.option("chunks", None)
    if chunks is not None:
        if not isinstance(chunks, int) or chunks < 1:
            raise OctoPipeError(f"{name}: chunks is {chunks}; give a whole number of stages per rank")
        return make(costs, p, m, chunks)
    most = min(MOST_CHUNKS, costs.num_layers // p)
    require(most >= 2, name, f"{costs.num_layers} layers are too few for two stages on each of {p} ranks")
    return _best_of([make(costs, p, m, v) for v in range(2, most + 1)], costs)


@system(
    name="interleaved",
    title="Interleaved 1F1B",
    paper="Narayanan et al., SC 2021",
    year=2021,
    tunes=("placement",),
    constraint="micro-batches a multiple of pp; at least 2 layers a rank",
)
def interleaved(setting: Setting) -> Plan:
    """Option `chunks`: stages per rank; by default the fastest of 2..8 that fits (the fastest of all if none fits)."""
    p, m = setting.num_ranks, setting.num_micro_batches
    require(m % p == 0, "interleaved", f"{m} micro-batches are not a multiple of pp {p}")
    return with_chunks(setting, "interleaved", interleaved_plan)


@system(
    name="interleaved-overlap",
    title="Interleaved 1F1B, experts' exchange overlapped",
    paper="Megatron-LM, 2025",
    year=2025,
    tunes=("placement",),
    constraint="micro-batches a multiple of pp; at least 2 layers a rank",
)
def interleaved_overlap(setting: Setting) -> Plan:
    """Option `chunks` as in `interleaved`."""
    p, m, costs = setting.num_ranks, setting.num_micro_batches, setting.costs
    name = "interleaved-overlap"
    require(m % p == 0, name, f"{m} micro-batches are not a multiple of pp {p}")
    chunks = setting.option("chunks", None)
    most = min(MOST_CHUNKS, costs.num_layers // p)
    require(most >= 2, name, f"{costs.num_layers} layers are too few for two stages on each of {p} ranks")
    if chunks is not None:
        if not isinstance(chunks, int) or not 2 <= chunks <= costs.num_layers // p:
            raise OctoPipeError(f"{name}: chunks is {chunks}; give 2 to {costs.num_layers // p} stages per rank")
        return interleaved_plan(costs, p, m, chunks, overlap=True)
    return _best_of([interleaved_plan(costs, p, m, v, overlap=True) for v in range(2, most + 1)], costs)


def _best_of(plans: list[Plan], costs: CostTable) -> Plan:
    """Return the fastest plan that fits; the fastest of all if none fits."""
    timelines = [simulate(plan, costs) for plan in plans]
    return plans[min(range(len(plans)), key=lambda k: (not timelines[k].fits, timelines[k].step_ms))]


def interleaved_plan(costs: CostTable, p: int, m: int, v: int, *, overlap: bool = False) -> Plan:
    """Return the plan with v stages per rank. `overlap`: warm up with one more forward and run F and B of a steady step
    as a pair."""

    def chunk_of(k: int, backward: bool) -> int:
        chunk = (k % (p * v)) // p
        return v - 1 - chunk if backward else chunk

    def micro_batch_of(k: int) -> int:
        return (k // (p * v)) * p + k % p

    orders, pairs = [], set()
    for i in range(p):

        def op(k: int, kind: str, rank: int = i) -> Op:
            return Op(chunk_of(k, kind == "B") * p + rank, kind, micro_batch_of(k))

        warmup = min(2 * (p - 1 - i) + (v - 1) * p + overlap, m * v)
        order = [op(k, "F") for k in range(warmup)]
        for k in range(m * v):
            if warmup + k < m * v:
                order.append(op(warmup + k, "F"))
                if overlap and costs.exchanges:
                    pairs.add((order[-1], op(k, "B")))
            order.append(op(k, "B"))
        orders.append(order)
    stages = stages_from_sizes(even_sizes(costs, p * v), loop(p * v, p))
    return replace(make_plan(costs, p, m, stages, orders), pairs=frozenset(pairs))
