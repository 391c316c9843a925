"""Compiled costs of a structure with pairs: the time of every op alone and of every two ops of a rank together.

Knows: layers' segments as arrays, stages as bounds over layers. Does not know: orders. The rule is defined in
`plans/two_lanes.py`; here it is evaluated for all pairs of a structure at once, because a search needs thousands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.costs.segments import COMPUTE, EXCHANGE, beside_ms
from octopipe.costs.table import CostTable
from octopipe.plans.two_lanes import fill_pair_table

ALONE_F, ALONE_I, ALONE_W, ACTIVATION, STASH, STATIC, NUM_ROWS = range(7)
"""Rows of `Layers.own` and of a structure's `own`: per layer, and summed per stage."""
FI, FB, FW, IW, FF, NUM_PAIRS = range(6)
"""Planes of `together[plane, first stage, second stage]`. FI, FB: F of the first stage with I or B of the second. FW,
IW: F or I of the first with W of the second. FF: F of both."""


_beside_ms = njit(beside_ms)


class Layers(NamedTuple):
    """The model's layers as arrays."""

    own: Any
    """[NUM_ROWS, layers]"""
    ms: Any
    """[2, layers, parts]: the segments of F and of I, in ms; zero beyond the last."""
    lane: Any
    """[2, layers, parts]: their lanes."""
    slow: Any
    """[ranks]: compute-time factor."""
    slowing: Any
    """By what share compute and exchange take longer while they run beside each other."""


def layers_of(costs: CostTable, num_ranks: int) -> Layers:
    """The costs as arrays; micro-batches of different sizes are replaced by their mean."""
    assert costs.segments is not None
    size = 1.0 if costs.micro_batch_factor is None else costs.micro_batch_factor.mean(axis=0)
    times = {"F": costs.forward_ms * size, "I": costs.input_ms * size}
    rows = {k: [costs.segments.parts(k, layer) for layer in range(costs.num_layers)] for k in "FI"}
    width = max(len(row) for kind in rows.values() for row in kind)
    ms = np.zeros((2, costs.num_layers, width))
    lane = np.zeros((2, costs.num_layers, width), np.int64)
    for which, kind in enumerate("FI"):
        for layer, row in enumerate(rows[kind]):
            for k, (name, share) in enumerate(row):
                ms[which, layer, k] = share * times[kind][layer]
                lane[which, layer, k] = EXCHANGE if name == "exchange" else COMPUTE
    own = np.stack(
        (
            times["F"], times["I"], costs.weight_ms * size, costs.activation_bytes * size, costs.stash_bytes * size,
            costs.static_bytes,
        )
    )  # fmt: skip
    slow = np.array([costs.slowdown(r) for r in range(num_ranks)])
    slowing = np.array([costs.segments.slows_compute, costs.segments.slows_exchange])
    return Layers(np.ascontiguousarray(own), ms, lane, slow, slowing)


@njit
def price(layers, bounds, rank, size):  # type: ignore[no-untyped-def]
    """Compute own[row, stage] and together[plane, stage, stage] of a structure of `size` stages."""
    own = np.zeros((6, size))
    parts = layers.ms.shape[2]
    longest = 1
    for s in range(size):
        longest = max(longest, (bounds[s + 1] - bounds[s]) * parts)
        slow = layers.slow[rank[s]]
        for layer in range(bounds[s], bounds[s + 1]):
            for row in range(6):
                own[row, s] += layers.own[row, layer] * (slow if row < 3 else 1.0)
    ms = np.zeros((2, size, longest))
    first = np.zeros((2, size), np.int64)
    count = np.zeros((2, size), np.int64)
    for s in range(size):
        slow = layers.slow[rank[s]]
        for which in range(2):
            n = 0
            last = -1
            for at in range(bounds[s + 1] - bounds[s]):
                layer = bounds[s] + at if which == 0 else bounds[s + 1] - 1 - at
                for k in range(parts):
                    amount = layers.ms[which, layer, k] * slow
                    lane = layers.lane[which, layer, k]
                    if amount > 0.0:
                        if lane == last:
                            ms[which, s, n - 1] += amount
                        else:
                            if n == 0:
                                first[which, s] = lane
                            ms[which, s, n] = amount
                            n += 1
                            last = lane
            count[which, s] = n
    together = np.full((5, size, size), np.inf)
    took = np.zeros((longest + 1, longest + 1))
    bare = np.zeros((longest + 1, longest + 1))
    step = np.zeros((longest + 1, longest + 1), np.int32)
    for s in range(size):
        for which in range(2):
            # A W beside this op can hide all of the op's exchange: nothing else hides it.
            whole = 0.0
            exposed = 0.0
            for k in range(count[which, s]):
                whole += ms[which, s, k]
                if (first[which, s] + k) % 2 == 1:
                    exposed += ms[which, s, k]
            for t in range(size):
                if rank[t] == rank[s]:
                    w = own[2, t]
                    filled = whole - exposed + _beside_ms(w, exposed, layers.slowing[0], layers.slowing[1])
                    together[2 + which, s, t] = min(filled, own[which, s] + w)
        for t in range(size):
            if rank[t] == rank[s]:
                n, m = count[0, s], count[1, t]
                fill_pair_table(
                    first[0, s], ms[0, s], n, first[1, t], ms[1, t], m,
                    layers.slowing[0], layers.slowing[1], took, bare, step,
                )  # fmt: skip
                pair, exposed = took[n, m], bare[n, m]
                apart = own[0, s] + own[1, t]
                together[0, s, t] = min(pair, apart)
                w = own[2, t]
                filled = pair - exposed + _beside_ms(w, exposed, layers.slowing[0], layers.slowing[1])
                together[1, s, t] = min(filled, apart + w)
                m = count[0, t]
                fill_pair_table(
                    first[0, s], ms[0, s], n, first[0, t], ms[0, t], m,
                    layers.slowing[0], layers.slowing[1], took, bare, step,
                )  # fmt: skip
                together[4, s, t] = min(took[n, m], own[0, s] + own[0, t])
    return own, together
