"""Mist: layers per stage and checkpointed layers per stage, chosen together under the memory limit.

Zhu et al., "Mist: Efficient Distributed Training of Large Language Models via Memory-Parallelism
Co-Optimization", EuroSys 2025.
Rule: minimise (m-1) max_i t_i + sum_i t_i + max_i(d_i - sum_{j<i} t_j). t is the steady time of a micro-batch
(including recomputation), d the time that the first or last micro-batch adds (gradient reduction, optimizer). A
stage recomputes the smallest number of layers with which its in-flight micro-batches fit. The order is 1F1B.
Made for equal devices: on unequal ranks it assumes equal speed and the smallest memory of all.
Simplified: no offloading and no sharding choices (those need the cluster: `planner/published/mist.py`), so (t,
d) of a range has one Pareto point. Stages are indexed by layer range and not limited to L/p +- 2 layers.
Instead of a MILP: with X = sum t + max(d - sum of t before) a stage makes X' = t + max(X, d), so a programme
over the Pareto frontier of (X, max t) has the MILP's optimum exactly. A stage recomputes its first layers.
"""

from collections.abc import Sequence

import numpy as np

from octopipe.plans.plan import Plan
from octopipe.search.systems.frontier import Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import LayerRanges, layer_ranges, one_f_one_b_plan, within_memory
from octopipe.search.systems.registry import Setting, system


@system(
    name="mist",
    title="Mist",
    paper="Zhu et al., EuroSys 2025",
    year=2025,
    tunes=("partitioning",),
)
def mist(setting: Setting) -> Plan:
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches

    def solve(reserve: Floats) -> Plan | None:
        ranges = layer_ranges(costs, p, m, reserve_bytes=reserve, equal_ranks=True)
        sizes = mist_partition(ranges, m)
        if sizes is None:
            return None
        return one_f_one_b_plan(costs, p, m, sizes, recompute=recomputed_layers(ranges, sizes))

    return within_memory("mist", costs, p, solve)


def checkpointed(ranges: LayerRanges) -> Floats:
    """[stage, first, stop]: the smallest number of first layers to recompute so that the stage fits; infinite if none
    suffices."""
    layers = ranges.num_layers
    total = np.concatenate(([0.0], np.cumsum(ranges.layer_bytes)))
    enters = np.append(ranges.entering_bytes, 0.0)
    out = np.empty(ranges.activation_bytes.shape)
    first = np.arange(layers + 1)[:, None]
    stop = np.arange(layers + 1)[None, :]
    for s, held in enumerate(ranges.in_flight):
        # held * kept + (activations - kept) of the one that is recomputed + the fixed part <= capacity
        once = ranges.capacity_bytes[s] - ranges.fixed_bytes[s] - ranges.activation_bytes[s]
        if held == 1:
            out[s] = np.where(once >= 0, 0.0, np.inf)
            continue
        keep = once / (held - 1)
        needed = np.searchsorted(total, total[stop] - (keep - enters[first]) - 1e-6, side="left") - first
        least = np.where(keep >= ranges.activation_bytes[s], 0.0, np.maximum(needed, 1))
        out[s] = np.where((least <= stop - first) & (keep >= 0), least, np.inf)
    return out


def recomputed_layers(ranges: LayerRanges, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the layers that each stage of a partition recomputes."""
    counts = ranges.read(checkpointed(ranges), sizes)
    firsts = np.cumsum(sizes) - np.asarray(sizes)
    return [tuple(range(a, a + int(n))) for a, n in zip(firsts.tolist(), counts)]


def steady_ms(ranges: LayerRanges) -> Floats:
    """[stage, first, stop]: forward, backward and recomputation of a micro-batch; infinite if it cannot fit."""
    counts = checkpointed(ranges)
    stop = np.where(np.isfinite(counts), counts, 0.0).astype(np.int64) + np.arange(ranges.num_layers + 1)[:, None]
    again = np.take_along_axis(ranges.forward_ms, np.minimum(stop, ranges.num_layers), axis=2)
    return np.where(np.isfinite(counts), ranges.forward_ms + ranges.backward_ms + again, np.inf)


def mist_objective(ranges: LayerRanges, num_micro_batches: int, sizes: Sequence[int]) -> float:
    """The objective of a partition; infinite if a stage cannot fit."""
    t = ranges.read(steady_ms(ranges), sizes)
    if not np.isfinite(t).all():
        return float("inf")
    extra = ranges.read(ranges.reduce_ms + ranges.optimizer_ms, sizes)
    before = np.cumsum(t) - t
    return float((num_micro_batches - 1) * t.max() + t.sum() + (extra - before).max())


def mist_partition(ranges: LayerRanges, num_micro_batches: int) -> tuple[int, ...] | None:
    """Layers per stage with the smallest objective, or None if nothing fits."""
    stage_ms = steady_ms(ranges)
    extra_ms = ranges.reduce_ms + ranges.optimizer_ms

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t, d = stage_ms[s, first, stop], extra_ms[s, first, stop]
        return np.column_stack((t + np.maximum(labels[:, 0], d), np.maximum(labels[:, 1], t)))

    def value(labels: Floats) -> Floats:
        return labels[:, 0] + (num_micro_batches - 1) * labels[:, 1]

    best = best_partition(np.isfinite(stage_ms), np.zeros(2), extend, value)
    return None if best is None else best.sizes
