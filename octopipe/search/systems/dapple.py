"""DAPPLE: a planner that counts transfers as stages, and early backward with a choice of warm-up.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021.
Rule: minimise block*(m-1) + total + transfers + unhidden gradient reduction, block the slowest of all stages
and transfers; then 1F1B with K_i = min(p-i, D) micro-batches in flight on rank i (policy PA) or
min(2(p-i)-1, D) (policy PB, for high communication), D what fits in memory.
Made for equal devices: on unequal ranks it assumes equal speed and the smallest memory of all.
Simplified: one device per stage (replicated stages need the cluster: `planner/published/dapple.py`); the reduction of
stage i hides behind min(i, m-1) blocks of the smallest possible size, so that the programme is exact; the
policy is the faster of the two by simulation. `latency_ms` is the paper's formula L (as generally known).
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from octopipe.base.errors import OctoPipeError
from octopipe.plans.plan import Plan
from octopipe.search.systems.frontier import Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import LayerRanges, layer_ranges, one_f_one_b_plan, within_memory
from octopipe.search.systems.registry import Setting, system
from octopipe.simulation.simulator import simulate

POLICIES = ("PA", "PB")


@system(
    name="dapple",
    title="DAPPLE",
    paper="Fan et al., PPoPP 2021",
    year=2021,
    tunes=("partitioning",),
)
def dapple(setting: Setting) -> Plan:
    """Option `policy`: PA or PB; by default the one that is faster by simulation and fits."""
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches
    wanted = setting.option("policy", None)
    if wanted is not None and wanted not in POLICIES:
        raise OctoPipeError(f"dapple: policy is {wanted}; one of PA and PB")

    def solve(reserve: Floats) -> Plan | None:
        # Use the largest cap on the micro-batches in flight that memory allows.
        for cap in range(min(p, m), 0, -1):
            held = [min(p - s, cap, m) for s in range(p)]
            ranges = layer_ranges(costs, p, m, in_flight=held, reserve_bytes=reserve, equal_ranks=True)
            sizes = dapple_partition(ranges, m)
            if sizes is not None:
                break
        else:
            return None
        plans = []
        for policy in (wanted,) if wanted else POLICIES:
            held = in_flight(ranges, sizes, m, policy)
            plans.append(one_f_one_b_plan(costs, p, m, sizes, in_flight=held))
        timelines = [simulate(plan, costs, check=False) for plan in plans]
        best = min(range(len(plans)), key=lambda k: (not timelines[k].fits, timelines[k].makespan_ms))
        return plans[best]

    return within_memory("dapple", costs, p, solve)


def in_flight(ranges: LayerRanges, sizes: Sequence[int], num_micro_batches: int, policy: str) -> list[int]:
    """Return K_i of every rank. It is not larger than that of the previous rank, which could not supply more."""
    p = len(sizes)
    free = ranges.capacity_bytes - ranges.read(ranges.fixed_bytes, sizes)
    each = ranges.read(ranges.activation_bytes, sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(each > 0, np.floor(free / each), np.inf)
    wish = [p - i if policy == "PA" else 2 * (p - i) - 1 for i in range(p)]
    held = (min(wish[i], most[i], num_micro_batches) for i in range(p))
    return [max(int(k), 1) for k in accumulate(held, min)]


def dapple_objective(
    ranges: LayerRanges, num_micro_batches: int, sizes: Sequence[int], smallest_block_ms: float
) -> float:
    """The value by which the planner ranks partitions; infinite if a stage does not fit."""
    if not ranges.read(ranges.fits, sizes).all():
        return float("inf")
    t, hops = ranges.read(ranges.forward_ms + ranges.backward_ms, sizes), ranges.transfers(sizes)
    hidden = np.minimum(np.arange(len(sizes)), num_micro_batches - 1) * smallest_block_ms
    late = max(0.0, float((ranges.read(ranges.reduce_ms, sizes) - hidden).max()))
    return float(max(t.max(), hops.max()) * (num_micro_batches - 1) + t.sum() + hops.sum() + late)


def smallest_block(ranges: LayerRanges) -> float | None:
    """The smallest possible time of the slowest stage or transfer; None if nothing fits."""
    stage_ms = ranges.forward_ms + ranges.backward_ms

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        slowest = np.maximum(stage_ms[s, first, stop], ranges.transfer_ms[s, stop])
        return np.maximum(labels, slowest[:, None])

    best = best_partition(ranges.fits, np.zeros(1), extend, lambda labels: labels[:, 0])
    return None if best is None else best.value


def dapple_partition(ranges: LayerRanges, num_micro_batches: int) -> tuple[int, ...] | None:
    """Layers per stage with the smallest objective, or None if nothing fits."""
    block = smallest_block(ranges)
    if block is None:
        return None
    stage_ms = ranges.forward_ms + ranges.backward_ms

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t, hop = stage_ms[s, first, stop], ranges.transfer_ms[s, stop]
        late = ranges.reduce_ms[s, first, stop] - min(s, num_micro_batches - 1) * block
        return np.column_stack(
            (labels[:, 0] + t + hop, np.maximum(labels[:, 1], np.maximum(t, hop)), np.maximum(labels[:, 2], late))
        )

    def value(labels: Floats) -> Floats:
        return labels[:, 0] + (num_micro_batches - 1) * labels[:, 1] + labels[:, 2]

    best = best_partition(ranges.fits, np.zeros(3), extend, value)
    return None if best is None else best.sizes


def latency_ms(
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    num_micro_batches: int,
    transfer_ms: Sequence[float] = (),
    reduce_ms: Sequence[float] = (),
) -> float:
    """Return the paper's L = Tw + Ts + Te; the transfer after each stage but the last counts as a stage of its own.

    The pivot Q is found from the last stage down: stage s replaces Q if its steady phase takes longer than that of Q
    plus the work between the two.

    >>> latency_ms([1, 1], [2, 2], 4)  # (4 - 1) * 3 + 2 + 4
    15.0
    """
    f, b, reduce = [float(forward_ms[0])], [float(backward_ms[0])], [float((*reduce_ms, 0.0)[0])]
    for s in range(1, len(forward_ms)):
        if transfer_ms:
            f.append(float(transfer_ms[s - 1]))
            b.append(float(transfer_ms[s - 1]))
            reduce.append(0.0)
        f.append(float(forward_ms[s]))
        b.append(float(backward_ms[s]))
        reduce.append(float(reduce_ms[s]) if reduce_ms else 0.0)
    steady = [(num_micro_batches - 1) * (x + y) for x, y in zip(f, b)]
    pivot = len(f) - 1
    for s in range(len(f) - 2, -1, -1):
        if steady[s] > steady[pivot] + sum(f[a] + b[a] for a in range(s + 1, pivot)):
            pivot = s
    ending = max(
        reduce[s] + sum(b[s : pivot + 1]) if s <= pivot else reduce[s] - sum(b[pivot : s + 1]) for s in range(len(f))
    )
    return sum(f[: pivot + 1]) + steady[pivot] + ending
