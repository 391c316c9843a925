"""Positions of transfers in a blocking program, in which a rank does not compute while it sends or receives.

Knows: two ways to position every transfer: with the least loss inside its window, or where the two ranks would meet if
each served transfers whenever it is idle. Does not know: programs; `lowering` builds one of each and keeps the faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit

CANDIDATES = 16
"""The most positions of a transfer that are compared on each of its two ranks."""


@njit
def cheapest_positions(  # type: ignore[no-untyped-def]
    rank, offsets, source, target, ready, need, took, start, end, limit
):
    """Return, for a blocking program, the key in each transfer's window at which the two ranks lose the least time.

    Candidates are the op ends of either rank inside [ready, need]. The transfer starts when the later rank has arrived.
    It costs each rank the part that extends beyond the start of its next op (idle time before that op is overlap at no
    cost).
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


class Standing(NamedTuple):
    """The state of every rank while `meetings` builds programs, and the instructions so far."""

    clock: Any
    waiting: Any
    head: Any
    """The op that each rank runs next."""
    running: Any
    """The op that each rank is running, or -1."""
    pending: Any
    """[rank, k]: transfers whose tensor is finished and in which the rank takes part, oldest first."""
    count: Any
    """The number of pending transfers of each rank."""
    kinds: Any
    ids: Any
    fill: Any
    """[rank]: the position at which its next instruction is written."""


@njit
def meetings(  # type: ignore[no-untyped-def]
    rank, offsets, data, transfer_of, source, target, duration, took, ranks
):
    """Build blocking programs by simulation: a transfer happens when both its ranks are idle.

    A rank between two ops first serves a finished tensor whose other end is waiting; otherwise it runs its next op;
    otherwise it waits. Every transfer and op is placed at the moment it happens, so the order is feasible.
    """
    computes, transfers = rank.size, source.size
    first_out = np.full(computes, -1, np.int32)
    next_out = np.full(transfers, -1, np.int32)
    for i in range(transfers):
        next_out[i] = first_out[source[i]]
        first_out[source[i]] = i
    moved = np.zeros(transfers, np.bool_)
    done = np.zeros(computes, np.bool_)
    sizes = np.zeros(ranks + 1, np.int32)
    _count(rank, source, target, sizes)
    at = Standing(
        clock=np.zeros(ranks),
        waiting=np.zeros(ranks, np.bool_),
        head=offsets[:-1].copy(),
        running=np.full(ranks, -1, np.int32),
        pending=np.empty((ranks, transfers + 1), np.int32),
        count=np.zeros(ranks, np.int32),
        kinds=np.empty(sizes[ranks], np.int32),
        ids=np.empty(sizes[ranks], np.int32),
        fill=sizes[:-1].copy(),
    )
    while True:
        r = -1
        for k in range(ranks):
            active = at.running[k] >= 0 or at.head[k] < offsets[k + 1] or at.count[k] > 0
            if active and not at.waiting[k] and (r < 0 or at.clock[k] < at.clock[r]):
                r = k
        if r < 0:
            break
        if at.running[r] >= 0:
            done[at.running[r]] = True
            i = first_out[at.running[r]]
            while i >= 0:
                for one in (rank[source[i]], rank[target[i]]):
                    at.pending[one, at.count[one]] = i
                    at.count[one] += 1
                i = next_out[i]
            at.running[r] = -1
        served = _next_served(at, r, rank, source, target, offsets)
        if served >= 0:
            _serve(at, served, rank[source[served]], rank[target[served]], at.clock[r] + took[served])
            moved[served] = True
            continue
        c = at.head[r]
        ready = c < offsets[r + 1]
        if ready:
            for k in range(data.shape[1]):
                if data[c, k] >= 0:
                    i = transfer_of[c, k]
                    if (i >= 0 and not moved[i]) or (i < 0 and not done[data[c, k]]):
                        ready = False
        if ready:
            _write(at, r, 0, c)
            at.running[r] = c
            at.head[r] += 1
            at.clock[r] += duration[c]
        else:
            at.waiting[r] = True
    return at.kinds, at.ids, sizes


@njit
def _count(rank, source, target, sizes):  # type: ignore[no-untyped-def]
    """Compute where every rank's instructions begin. An op is one instruction, and a transfer one of each of its two
    ranks."""
    for c in range(rank.size):
        sizes[rank[c] + 1] += 1
    for i in range(source.size):
        sizes[rank[source[i]] + 1] += 1
        sizes[rank[target[i]] + 1] += 1
    for r in range(sizes.size - 1):
        sizes[r + 1] += sizes[r]


@njit
def _next_served(at, r, rank, source, target, offsets):  # type: ignore[no-untyped-def]
    """Return the oldest finished tensor whose other rank is waiting, or has nothing left to run; -1 if there is
    none."""
    for k in range(at.count[r]):
        i = at.pending[r, k]
        peer = rank[source[i]] if rank[target[i]] == r else rank[target[i]]
        idle = at.running[peer] < 0 and at.head[peer] == offsets[peer + 1] and at.clock[peer] <= at.clock[r]
        if at.waiting[peer] or idle:
            return i
    return -1


@njit
def _serve(at, served, sender, receiver, end):  # type: ignore[no-untyped-def]
    """Write a transfer into both of its ranks' programs and keep both ranks busy until `end`."""
    for one in (sender, receiver):
        k = 0
        while at.pending[one, k] != served:
            k += 1
        for j in range(k, at.count[one] - 1):
            at.pending[one, j] = at.pending[one, j + 1]
        at.count[one] -= 1
        _write(at, one, 1 if sender == one else 2, served)
        at.clock[one] = end
        at.waiting[one] = False


@njit
def _write(at, r, kind, number):  # type: ignore[no-untyped-def]
    """Write the next instruction of a rank: an op (0), a send (1) or a receive (2)."""
    at.kinds[at.fill[r]] = kind
    at.ids[at.fill[r]] = number
    at.fill[r] += 1
