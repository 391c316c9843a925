"""Compiled timing of given orders.

Knows: how to time given orders under directed channels by the simulator's rule (`simulation/timing.py`), and how to
track the memory of every rank (without transfer buffers). Does not know: plans, phases or moves.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.plans.op import B, F, I, R, W
from octopipe.simulation.timing import NEVER, begin_paths, note_run, pass_on, start_of

DEADLOCK = -1.0


@njit
def replay(prices, offsets, ops, capacity, start, last):  # type: ignore[no-untyped-def]
    """Fill `start` (start time of every op) and `last` (end time of every rank); return the makespan and the first op
    that exceeds memory, or -1.

    `ops` has one row (stage, kind, micro_batch) per op, rank after rank. The makespan is DEADLOCK if the ops wait for
    each other.
    """
    p = prices
    ranks = offsets.size - 1
    arrived = np.empty((2, p.rank.size, p.route.size))
    begin_paths(arrived, p.before, p.route)
    channel = np.zeros((ranks, ranks))
    used = p.static.copy()
    head = offsets[:-1].copy()
    left = ops.shape[0]
    over = -1
    drops = np.zeros((p.rank.size, p.route.size), np.bool_)
    for i in range(left):
        if ops[i, 1] == R:
            drops[ops[i, 0], ops[i, 2]] = True
    last[:] = 0.0
    while left > 0:
        moved = False
        for r in range(ranks):
            while head[r] < offsets[r + 1]:
                i = head[r]
                s, k, m = ops[i, 0], ops[i, 1], ops[i, 2]
                at = start_of(arrived, k, s, m, last[r])
                if at == NEVER:
                    return DEADLOCK, over
                if at == np.inf:
                    break
                used[r] += _taken(p, k, s, m, drops[s, m])
                if over < 0 and used[r] + p.work[s] > capacity[r]:
                    over = i
                used[r] -= _freed(p, k, s, m)
                start[i] = at
                now = at + p.ms[k, s, m]
                last[r] = now
                note_run(arrived, k, s, m, drops[s, m])
                pass_on(arrived, k, s, m, p.before, p.after, p.route, p.rank, channel, now, p.forward_ms, p.gradient_ms)
                head[r] += 1
                left -= 1
                moved = True
        if not moved:
            return DEADLOCK, over
    return last.max(), over


@njit
def _taken(p, kind, s, m, drops):  # type: ignore[no-untyped-def]
    """Return the bytes that an op allocates at its start."""
    if kind == F:
        return p.kept[s, m] if drops else p.held[s, m]
    return p.held[s, m] - p.kept[s, m] if kind == R else 0.0


@njit
def _freed(p, kind, s, m):  # type: ignore[no-untyped-def]
    """Return the bytes that an op releases at its end."""
    if kind == I:
        return p.held[s, m] - p.stash[s, m]
    if kind == B:
        return p.held[s, m]
    return p.stash[s, m] if kind == W else 0.0
