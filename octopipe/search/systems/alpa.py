"""Alpa: stages of least total plus bottleneck time.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022.
Rule: minimise T = sum_s t_s + (m-1) max_s t_s with t_s the forward and backward of a stage, over all cuts of the
layer list whose in-flight micro-batches fit under 1F1B. Transfers are ignored; the order is 1F1B.
Made for equal devices: on unequal ranks it assumes equal speed and the smallest memory of all.
Simplified: one device (or tensor-parallel group) per stage; `planner/published/alpa.py` has it with submeshes of a
whole cluster. Alpa runs one programme per candidate of max t; we keep the Pareto frontier of
(sum, max) instead: same optimum.
"""

from collections.abc import Sequence

import numpy as np

from octopipe.plans.plan import Plan
from octopipe.search.systems.frontier import Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import LayerRanges, layer_ranges, one_f_one_b_plan, within_memory
from octopipe.search.systems.registry import Setting, system


@system(
    name="alpa",
    title="Alpa",
    paper="Zheng et al., OSDI 2022",
    year=2022,
    tunes=("partitioning",),
)
def alpa(setting: Setting) -> Plan:
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches

    def solve(reserve: Floats) -> Plan | None:
        sizes = alpa_partition(layer_ranges(costs, p, m, reserve_bytes=reserve, equal_ranks=True), m)
        return None if sizes is None else one_f_one_b_plan(costs, p, m, sizes)

    return within_memory("alpa", costs, p, solve)


def alpa_objective(ranges: LayerRanges, num_micro_batches: int, sizes: Sequence[int]) -> float:
    """T of a partition; infinite if a stage does not fit."""
    if not ranges.read(ranges.fits, sizes).all():
        return float("inf")
    t = ranges.read(ranges.forward_ms + ranges.backward_ms, sizes)
    return float(t.sum() + (num_micro_batches - 1) * t.max())


def alpa_partition(ranges: LayerRanges, num_micro_batches: int) -> tuple[int, ...] | None:
    """Layers per stage with the smallest T, or None if nothing fits."""
    stage_ms = ranges.forward_ms + ranges.backward_ms

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t = stage_ms[s, first, stop]
        return np.column_stack((labels[:, 0] + t, np.maximum(labels[:, 1], t)))

    def value(labels: Floats) -> Floats:
        return labels[:, 0] + (num_micro_batches - 1) * labels[:, 1]

    best = best_partition(ranges.fits, np.zeros(2), extend, value)
    return None if best is None else best.sizes
