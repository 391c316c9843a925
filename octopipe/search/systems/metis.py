"""Metis: load balance over GPUs of unequal speed and memory.

Um et al., "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs", ATC 2024.
Rule: minimise (m-1) max t + sum t + transfers + slowest gradient reduction + slowest optimizer update, over
the order in which device types stand in the pipeline and the layers each device gets; the order is 1F1B.
Simplified: one rank per stage, so there are no group sizes and data shares (`planner/published/metis.py` has
them). Metis fills stages by shares of a layer, rounds and repairs; we search the same space (type order, layer
split, memory limits) with an exact programme over the Pareto frontier of (sum, slowest stage, slowest
reduction, slowest update): never a worse cost.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from octopipe.costs.table import CostTable
from octopipe.plans.plan import Plan
from octopipe.search.systems.frontier import Best, Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import LayerRanges, layer_ranges, one_f_one_b_plan, within_memory
from octopipe.search.systems.registry import Setting, system

MOST_TYPES = 4


@system(
    name="metis",
    title="Metis",
    paper="Um et al., ATC 2024",
    year=2024,
    tunes=("partitioning",),
)
def metis(setting: Setting) -> Plan:
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches

    def solve(reserve: Floats) -> Plan | None:
        best: tuple[float, Plan] | None = None
        for ranks in rank_orders(costs, p):
            ranges = layer_ranges(costs, p, m, ranks=ranks, reserve_bytes=reserve)
            found = metis_partition(ranges, m)
            if found is not None and (best is None or found.value < best[0] - 1e-12):
                best = (found.value, one_f_one_b_plan(costs, p, m, found.sizes, ranks=ranks))
        return None if best is None else best[1]

    return within_memory("metis", costs, p, solve)


def rank_orders(costs: CostTable, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranks in their own order, then in every order of their types (with more than four types, only fastest
    first and slowest first)."""
    yield tuple(range(num_ranks))
    types: dict[tuple[float, float], list[int]] = {}
    for rank in range(num_ranks):
        types.setdefault((costs.slowdown(rank), -costs.capacity_bytes(rank)), []).append(rank)
    if len(types) == 1:
        return
    orders = permutations(types) if len(types) <= MOST_TYPES else (sorted(types), sorted(types, reverse=True))
    for order in orders:
        ranks = tuple(rank for kind in order for rank in types[kind])
        if ranks != tuple(range(num_ranks)):
            yield ranks


def metis_objective(ranges: LayerRanges, num_micro_batches: int, sizes: Sequence[int]) -> float:
    """The cost of a partition in the ranges' order of ranks; infinite if a stage does not fit."""
    if not ranges.read(ranges.fits, sizes).all():
        return float("inf")
    t = ranges.read(ranges.forward_ms + ranges.backward_ms, sizes)
    after = ranges.read(ranges.reduce_ms, sizes).max() + ranges.read(ranges.optimizer_ms, sizes).max()
    return float((num_micro_batches - 1) * t.max() + t.sum() + ranges.transfers(sizes).sum() + after)


def metis_partition(ranges: LayerRanges, num_micro_batches: int) -> Best | None:
    """Layers per stage with the smallest cost, or None if nothing fits."""
    stage_ms = ranges.forward_ms + ranges.backward_ms

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t = stage_ms[s, first, stop]
        return np.column_stack(
            (
                labels[:, 0] + t + ranges.transfer_ms[s, stop],
                np.maximum(labels[:, 1], t),
                np.maximum(labels[:, 2], ranges.reduce_ms[s, first, stop]),
                np.maximum(labels[:, 3], ranges.optimizer_ms[s, first, stop]),
            )
        )

    def value(labels: Floats) -> Floats:
        return labels[:, 0] + (num_micro_batches - 1) * labels[:, 1] + labels[:, 2] + labels[:, 3]

    # A first, coarser programme gives the value that prunes the exact one.
    def coarse(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t = stage_ms[s, first, stop]
        return np.column_stack((labels[:, 0] + t + ranges.transfer_ms[s, stop], np.maximum(labels[:, 1], t)))

    rough = best_partition(
        ranges.fits, np.zeros(2), coarse, lambda labels: labels[:, 0] + (num_micro_batches - 1) * labels[:, 1]
    )
    if rough is None:
        return None
    fastest = np.min(stage_ms[:, :, -1], axis=0)  # the layers still to place, on the fastest rank

    def bound(labels: Floats, stages: int, layers: int) -> Floats:
        return value(labels) + fastest[layers]

    known = metis_objective(ranges, num_micro_batches, rough.sizes)
    best = best_partition(ranges.fits, np.zeros(4), extend, value, bound=bound, incumbent=known)
    return best if best is not None and best.value <= known else Best(rough.sizes, known)
