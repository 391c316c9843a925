"""Compiled balancing of partitions for pairs: distributes work evenly over the ranks, within their memory.

Knows: what each layer adds to a rank's time when its ops run as pairs, how many micro-batches each stage has in flight,
and memory. Does not know: orders; a few thousand partitions are evaluated in the time of one schedule, so that a search
starts from a good one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit

STEEP = 12.0
"""Exponent of the power mean over ranks (and stages) that stands in for their maximum. Unlike the maximum, it also
falls if one of several equally busy ranks gets less work."""
EVEN = 0.15
"""Weight of the longest stage, relative to the busiest rank: in a rhythm, ranks wait for each other's slots."""
OVER = 3.0
"""Weight of the largest excess over a rank's memory limit, as a share of that limit."""
HOT, COLD = 2e-2, 2e-4
"""Temperature at the start and at the end, as a share of the cost."""


class Weights(NamedTuple):
    """Prefix sums over layers."""

    time: Any
    activation: Any
    static: Any


@njit
def unbalance(weights, bounds, rank, flight, slow, room):  # type: ignore[no-untyped-def]
    """The cost of a partition: its busiest rank, its longest stage, and memory beyond `room`."""
    ranks = slow.size
    load = np.zeros(ranks)
    held = np.zeros(ranks)
    most = np.zeros(ranks)
    size = rank.size
    stages = 0.0
    whole = weights.time[weights.time.size - 1] / size
    for s in range(size):
        lo, hi = bounds[s], bounds[s + 1]
        took = (weights.time[hi] - weights.time[lo]) * slow[rank[s]]
        act = weights.activation[hi] - weights.activation[lo]
        load[rank[s]] += took
        stages += (took / whole) ** STEEP
        held[rank[s]] += weights.static[hi] - weights.static[lo] + flight[s] * act
        most[rank[s]] = max(most[rank[s]], act)
    mean = weights.time[weights.time.size - 1] / ranks
    ranked = 0.0
    over = 0.0
    for r in range(ranks):
        ranked += (load[r] / mean) ** STEEP
        if room[r] < np.inf:
            over = max(over, (held[r] + most[r] - room[r]) / room[r])
    busiest = (ranked / ranks) ** (1.0 / STEEP)
    longest = (stages / size) ** (1.0 / STEEP)
    return busiest + EVEN * longest + OVER * over


@njit
def balance(weights, bounds, rank, flight, slow, room, draws):  # type: ignore[no-untyped-def]
    """The best partition found by annealing, which starts from `bounds` and moves runs of boundaries by one layer.

    `draws[move]` holds four random numbers between 0 and 1.
    """
    size = rank.size
    now = bounds.copy()
    best = bounds.copy()
    cost = unbalance(weights, now, rank, flight, slow, room)
    least = cost
    moves = draws.shape[0]
    for k in range(moves):
        a = 1 + int(draws[k, 0] * (size - 1))
        reach = 1 + int(draws[k, 1] * draws[k, 1] * (size - a))
        b = min(a + reach, size)
        step = 1 if draws[k, 2] < 0.5 else -1
        allowed = True
        if step > 0:
            allowed = now[b] - now[b - 1] > 1
        else:
            allowed = now[a] - now[a - 1] > 1
        if not allowed:
            continue
        for j in range(a, b):
            now[j] += step
        tried = unbalance(weights, now, rank, flight, slow, room)
        heat = HOT * (COLD / HOT) ** (k / moves)
        if tried <= cost or draws[k, 3] < np.exp((cost - tried) / heat):
            cost = tried
            if cost < least:
                least = cost
                for j in range(size + 1):
                    best[j] = now[j]
        else:
            for j in range(a, b):
                now[j] -= step
    return best
