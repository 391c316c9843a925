"""AdaPipe: adaptive recomputation inside a stage, adaptive partitioning around it.

Sun et al., "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning", ASPLOS 2024
(known here from its abstract; the algorithm as generally understood).
Rule, inner: for every range of layers on stage s, choose the saved layers such that recomputation takes least
time and in-flight * saved + one restored micro-batch + static bytes fit. Outer: from the last stage back,
W_s = F_s + max(W_{s+1} + b_{s+1}, (k_s - 1) F_s), E_s = b_s + max(E_{s+1} + F_{s+1}, (k_s - 1) b_s),
S_s = max(S_{s+1}, F_s + b_s), k_s = min(p - s, m) in flight; minimise T = W_0 + E_0 + max(m - p, 0) S_0.
Simplified: the unit of recomputation is a layer. The knapsack counts memory as the simulator does (a run of
recomputed layers keeps its first input); it is exact where all sizes share a unit of at least 1/2^15 of the
room, else sizes are rounded up to 1/2^13 of it. For m near p the published T ignores that late stages run
m times, and its minimum would put nearly all layers there; we apply T to every suffix of the pipeline,
Z_s = max(W_s + E_s + max(m - (p - s), 0) S_s, F_s + b_s + Z_{s+1}), and minimise Z_0: like T a lower bound on
1F1B's time, and equal to it for m >> p. The outer programme keeps the Pareto frontier of
(W + b, E + F, S, Z) and is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.plans.plan import Plan
from octopipe.search.systems.frontier import Floats, Ints, best_partition
from octopipe.search.systems.layer_ranges import LayerRanges, layer_ranges, one_f_one_b_plan, within_memory
from octopipe.search.systems.registry import Setting, system

FINE, COARSE = 1 << 15, 1 << 13
"""Largest number of cells of the knapsack: if all sizes share a unit, and if they are rounded up."""


@system(
    name="adapipe",
    title="AdaPipe",
    paper="Sun et al., ASPLOS 2024",
    year=2024,
    tunes=("partitioning",),
)
def adapipe(setting: Setting) -> Plan:
    costs, p, m = setting.costs, setting.num_ranks, setting.num_micro_batches

    def solve(reserve: Floats) -> Plan | None:
        ranges = layer_ranges(costs, p, m, reserve_bytes=reserve)
        sizes = adapipe_partition(ranges, m)
        if sizes is None:
            return None
        return one_f_one_b_plan(costs, p, m, sizes, recompute=recomputed_layers(ranges, sizes))

    return within_memory("adapipe", costs, p, solve)


# -- inner: which layers a stage saves ----------------------------------------------------------------------


class Knapsack:
    """Layer sizes in units of memory on a grid."""

    def __init__(self, ranges: LayerRanges):
        layers = ranges.num_layers
        saved, enters = ranges.layer_bytes, ranges.entering_bytes
        self.room = _room(ranges)
        most = min(float(self.room.max(initial=0.0)), float(saved.sum() + enters.sum()))
        whole = np.concatenate((np.rint(saved), np.rint(enters))).astype(np.int64)
        unit = float(gcd(*whole.tolist())) if np.all(whole == np.concatenate((saved, enters))) else 0.0
        if unit <= 0.0 or most / unit > FINE:
            unit = max(most / COARSE, 1e-300)
        self.unit = unit
        self.cells = int(most / unit + 1e-9) + 1
        self.saved = np.ceil(saved / unit - 1e-9).astype(np.int64)
        self.enters = np.ceil(enters / unit - 1e-9).astype(np.int64)
        self.times = ranges.forward_ms[0][np.arange(layers), np.arange(layers) + 1] / ranges.costs.slowdown(
            ranges.ranks[0]
        )

    def cell(self, room: Floats) -> NDArray[np.int64]:
        """Return the grid cell of an amount of memory; -1 if the amount is negative."""
        with np.errstate(over="ignore"):  # if nothing is kept, units are tiny
            held = np.where(room < 0, -1.0, np.minimum(room / self.unit + 1e-9, self.cells - 1))
        return np.floor(held).astype(np.int64)


def _room(ranges: LayerRanges) -> Floats:
    """[stage, first, stop]: the bytes that a micro-batch may keep while it waits; negative if no recomputation
    suffices."""
    held = np.array(ranges.in_flight, float)[:, None, None]
    once = ranges.capacity_bytes[:, None, None] - ranges.fixed_bytes - ranges.activation_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(once < 0, -1.0, np.where(held > 1, once / (held - 1), np.inf))


def recompute_ms(ranges: LayerRanges) -> Floats:
    """[stage, first, stop]: the smallest recomputation time with which the stage fits; infinite if it never does."""
    fits = ranges.fits
    layers = ranges.num_layers
    inside = np.triu(np.ones((layers + 1, layers + 1), bool), 1)
    if fits[:, inside].all():
        return np.zeros(fits.shape)
    knapsack = Knapsack(ranges)
    cells = knapsack.cell(knapsack.room)
    least = _least_recompute(knapsack.saved, knapsack.enters, knapsack.times, cells, knapsack.cells)
    slow = np.array([ranges.costs.slowdown(r) for r in ranges.ranks])[:, None, None]
    return np.where(fits, 0.0, slow * least)


def recomputed_layers(ranges: LayerRanges, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the layers that each stage of a partition recomputes."""
    fits = ranges.read(ranges.fits, sizes)
    if fits.all():
        return [() for _ in sizes]
    knapsack = Knapsack(ranges)
    cells = ranges.read(knapsack.cell(knapsack.room), sizes)
    stops = np.cumsum(sizes)
    return [
        () if fits[s] else _chosen(knapsack, int(stops[s] - sizes[s]), int(stops[s]), int(cells[s]))
        for s in range(len(sizes))
    ]


@njit
def _least_recompute(saved, enters, times, cells, grid):  # type: ignore[no-untyped-def]
    """The smallest recomputation time per (stage, first, stop), by extending the tables of each first layer stop by
    stop.

    keep[c], drop[c]: the smallest time with at most c units held and the last layer saved or recomputed.
    """
    stages = cells.shape[0]
    layers = saved.size
    out = np.full(cells.shape, np.inf)
    keep, drop = np.empty(grid), np.empty(grid)
    for first in range(layers):
        for c in range(grid):
            keep[c] = 0.0 if c >= saved[first] else np.inf
            drop[c] = times[first] if c >= enters[first] else np.inf
        for stop in range(first + 1, layers + 1):
            if stop > first + 1:
                u = stop - 1
                for c in range(grid - 1, -1, -1):
                    a = c - saved[u]
                    b = c - enters[u]
                    fresh = keep[b] if b >= 0 else np.inf
                    dropped = min(drop[c], fresh) + times[u]
                    keep[c] = min(keep[a], drop[a]) if a >= 0 else np.inf
                    drop[c] = dropped
            useful = False
            for s in range(stages):
                c = cells[s, first, stop]
                if c >= 0:
                    useful = True
                    out[s, first, stop] = min(keep[c], drop[c])
            if not useful:
                break  # longer ranges need more room and have less
    return out


def _chosen(knapsack: Knapsack, first: int, stop: int, cell: int) -> tuple[int, ...]:
    """The recomputed layers that lead to one entry of `_least_recompute`."""
    grid = np.arange(knapsack.cells)
    tables = []
    keep = np.where(grid >= knapsack.saved[first], 0.0, np.inf)
    drop = np.where(grid >= knapsack.enters[first], knapsack.times[first], np.inf)
    tables.append((keep, drop))
    for u in range(first + 1, stop):
        either = np.minimum(keep, drop)
        fresh = _shifted(keep, int(knapsack.enters[u]))
        keep, drop = _shifted(either, int(knapsack.saved[u])), np.minimum(drop, fresh) + knapsack.times[u]
        tables.append((keep, drop))
    again, c = [], cell
    dropped = tables[-1][1][c] < tables[-1][0][c]
    for u in range(stop - 1, first - 1, -1):
        if not dropped:
            c -= int(knapsack.saved[u])
            if u > first:
                before = tables[u - first - 1]
                dropped = before[1][c] < before[0][c]
            continue
        again.append(u)
        if u > first:
            before = tables[u - first - 1]
            b = c - int(knapsack.enters[u])
            dropped = b < 0 or before[1][c] <= before[0][b]
            c = c if dropped else b
    return tuple(reversed(again))


def _shifted(values: Floats, by: int) -> Floats:
    out = np.full(values.size, np.inf)
    if by < values.size:
        out[by:] = values[: values.size - by]
    return out


# -- outer: the partition -----------------------------------------------------------------------------------


def adapipe_objective(ranges: LayerRanges, num_micro_batches: int, sizes: Sequence[int]) -> float:
    """Z_0 of a partition; infinite if a stage cannot fit."""
    f = ranges.read(ranges.forward_ms, sizes)
    b = ranges.read(ranges.backward_ms + recompute_ms(ranges), sizes)
    return pipeline_ms(f, b, ranges.in_flight, num_micro_batches) if np.isfinite(b).all() else float("inf")


def pipeline_ms(
    forward_ms: Sequence[float] | Floats,
    backward_ms: Sequence[float] | Floats,
    in_flight: Sequence[int],
    num_micro_batches: int,
) -> float:
    """The paper's recursion, taken over every suffix: Z_0.

    >>> pipeline_ms([1, 1], [2, 2], [2, 1], 4)  # (1 + 3) + (2 + 3) + 2 * 3
    15.0
    """
    p = len(forward_ms)
    warm, end, steady = float(forward_ms[-1]), float(backward_ms[-1]), float(forward_ms[-1] + backward_ms[-1])
    total = num_micro_batches * steady
    for s in range(p - 2, -1, -1):
        f, b, ahead = float(forward_ms[s]), float(backward_ms[s]), in_flight[s] - 1
        warm = f + max(warm + float(backward_ms[s + 1]), ahead * f)
        end = b + max(end + float(forward_ms[s + 1]), ahead * b)
        steady = max(steady, f + b)
        total = max(warm + end + max(num_micro_batches - (p - s), 0) * steady, f + b + total)
    return total


def adapipe_partition(ranges: LayerRanges, num_micro_batches: int) -> tuple[int, ...] | None:
    """Layers per stage with the smallest objective, or None if nothing fits."""
    p = ranges.num_stages
    forward = ranges.forward_ms
    backward = ranges.backward_ms + recompute_ms(ranges)
    allowed = np.isfinite(backward)
    repeats = max(num_micro_batches - p, 0)

    def coarse(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        t = forward[s, first, stop] + backward[s, first, stop]
        return np.column_stack((labels[:, 0] + t, np.maximum(labels[:, 1], t)))

    rough = best_partition(allowed, np.zeros(2), coarse, lambda x: x[:, 0] + (num_micro_batches - 1) * x[:, 1])
    if rough is None:
        return None
    known = pipeline_ms(
        ranges.read(forward, rough.sizes), ranges.read(backward, rough.sizes), ranges.in_flight, num_micro_batches
    )

    def extend(labels: Floats, s: int, first: Ints, stop: Ints) -> Floats:
        f, b, ahead = forward[s, first, stop], backward[s, first, stop], ranges.in_flight[s] - 1
        warm, end = f + np.maximum(labels[:, 0], ahead * f), b + np.maximum(labels[:, 1], ahead * b)
        steady = np.maximum(labels[:, 2], f + b)
        alone = warm + end + max(num_micro_batches - (p - s), 0) * steady
        # The recursion of the previous stage uses W + b and E + F of this one.
        return np.column_stack((warm + b, end + f, steady, np.maximum(alone, f + b + labels[:, 3])))

    def value(labels: Floats) -> Floats:
        return labels[:, 3]

    fastest = (ranges.forward_ms + ranges.backward_ms).min(axis=0)[0]  # layers 0 .. x, on the fastest rank

    def bound(labels: Floats, stages: int, layers: int) -> Floats:
        left = ranges.num_layers - layers
        if stages == p:
            return value(labels)
        share = fastest[left] / (p - stages)
        whole = labels[:, 0] + labels[:, 1] + fastest[left] + repeats * np.maximum(labels[:, 2], share)
        return np.maximum(np.maximum(whole, fastest[left] + labels[:, 3]), num_micro_batches * share)

    best = best_partition(allowed, np.zeros(4), extend, value, bound=bound, incumbent=known, from_last=True)
    return rough.sizes if best is None or best.value >= known else best.sizes
