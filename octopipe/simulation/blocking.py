"""Positions of transfers in a blocking program, in which a rank does not compute while it sends or receives.

Knows: two ways to position every transfer: with the least loss inside its window, or where the two ranks would meet if
each served transfers whenever it is idle. Does not know: programs; `lowering` builds one of each and keeps the faster.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit

CANDIDATES = 16
"""The most positions of a transfer that are compared on either rank."""


@njit
def cheapest_positions(  # type: ignore[no-untyped-def]
    rank, offsets, source, target, ready, need, took, start, end, limit
):
    """For blocking programs: the key in each transfer's window at which the two ranks lose least.

    Candidates are the op ends of either rank inside [ready, need]. The transfer starts when the later rank has
    arrived. It costs each rank the part that extends beyond the start of its next op (idle time before that op
    is overlap at no cost).
    """
    out = ready.copy()
    for i in range(source.size):
        a, b = rank[source[i]], rank[target[i]]
        best = np.inf
        for side in range(2):
            r = a if side == 0 else b
            lo, hi = offsets[r], offsets[r + 1]
            at = lo + np.searchsorted(end[lo:hi], ready[i], side="left")
            tried = 0
            while at < hi and end[at] <= need[i] and tried < limit:
                key = end[at]
                meet = 0.0
                for one in (a, b):
                    k = offsets[one] + np.searchsorted(end[offsets[one] : offsets[one + 1]], key, side="right") - 1
                    if k >= offsets[one]:
                        meet = max(meet, end[k])
                lost = 0.0
                for one in (a, b):
                    k = offsets[one] + np.searchsorted(end[offsets[one] : offsets[one + 1]], key, side="right")
                    if k < offsets[one + 1]:
                        lost += max(0.0, meet + took[i] - start[k])
                if lost < best - 1e-12:
                    best = lost
                    out[i] = key
                at += 1
                tried += 1
    return out


@njit
def meetings(  # type: ignore[no-untyped-def]
    rank, offsets, data, transfer_of, source, target, duration, took, ranks
):
    """Blocking programs by simulation: a transfer happens when both its ranks are idle.

    A rank between two ops first serves a finished tensor whose other end is waiting; otherwise it runs its next
    op; otherwise it waits. Every transfer and op is placed at the moment it happens, so the order is feasible.
    """
    computes, transfers = rank.size, source.size
    first_out = np.full(computes, -1, np.int32)
    next_out = np.full(transfers, -1, np.int32)
    for i in range(transfers):
        next_out[i] = first_out[source[i]]
        first_out[source[i]] = i
    moved = np.zeros(transfers, np.bool_)
    done = np.zeros(computes, np.bool_)
    clock = np.zeros(ranks)
    waiting = np.zeros(ranks, np.bool_)
    head = offsets[:-1].copy()
    running = np.full(ranks, -1, np.int32)
    room = transfers + 1
    pending = np.empty((ranks, room), np.int32)
    count = np.zeros(ranks, np.int32)
    sizes = np.zeros(ranks + 1, np.int32)
    for c in range(computes):
        sizes[rank[c] + 1] += 1
    for i in range(transfers):
        sizes[rank[source[i]] + 1] += 1
        sizes[rank[target[i]] + 1] += 1
    for r in range(ranks):
        sizes[r + 1] += sizes[r]
    kinds = np.empty(sizes[ranks], np.int32)
    ids = np.empty(sizes[ranks], np.int32)
    fill = sizes[:-1].copy()
    while True:
        r = -1
        for k in range(ranks):
            active = running[k] >= 0 or head[k] < offsets[k + 1] or count[k] > 0
            if active and not waiting[k] and (r < 0 or clock[k] < clock[r]):
                r = k
        if r < 0:
            break
        now = clock[r]
        if running[r] >= 0:
            done[running[r]] = True
            i = first_out[running[r]]
            while i >= 0:
                for one in (rank[source[i]], rank[target[i]]):
                    pending[one, count[one]] = i
                    count[one] += 1
                i = next_out[i]
            running[r] = -1
        # The oldest finished tensor whose other end stands waiting, or has nothing left to run.
        served = -1
        for k in range(count[r]):
            i = pending[r, k]
            peer = rank[source[i]] if rank[target[i]] == r else rank[target[i]]
            if waiting[peer] or (running[peer] < 0 and head[peer] == offsets[peer + 1] and clock[peer] <= now):
                served = i
                break
        if served >= 0:
            for one in (rank[source[served]], rank[target[served]]):
                k = 0
                while pending[one, k] != served:
                    k += 1
                for j in range(k, count[one] - 1):
                    pending[one, j] = pending[one, j + 1]
                count[one] -= 1
                kinds[fill[one]] = 1 if rank[source[served]] == one else 2
                ids[fill[one]] = served
                fill[one] += 1
                clock[one] = now + took[served]
                waiting[one] = False
            moved[served] = True
            continue
        c = head[r]
        ready = c < offsets[r + 1]
        if ready:
            for k in range(data.shape[1]):
                if data[c, k] >= 0:
                    i = transfer_of[c, k]
                    if (i >= 0 and not moved[i]) or (i < 0 and not done[data[c, k]]):
                        ready = False
        if ready:
            kinds[fill[r]] = 0
            ids[fill[r]] = c
            fill[r] += 1
            running[r] = c
            head[r] += 1
            clock[r] = now + duration[c]
        else:
            waiting[r] = True
    return kinds, ids, sizes
