"""The inner loops: timing of given orders, and derivation of orders from priorities.

Knows: arrays of ops, times and bytes. Does not know: plans, phases or moves.

`replay` times given orders under directed channels, as the simulator does, and tracks every rank's memory (without
transfer buffers). `arrange` is a list scheduler: among the F and I whose inputs have arrived, the one with the smallest
key runs; W fills time in which a rank would wait, and runs first if an F lacks memory. These are the paper's advance of
F and B, delay of W, and advance of W to avoid running out of memory.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.plans.plan import B, F, I, R, W

DEADLOCK = -1.0


@njit
def replay(  # type: ignore[no-untyped-def]
    offsets, ops, ms, before, after, route, rank, forward_ms, gradient_ms, kept, held, stash, work, static, capacity,
    start, last,
):  # fmt: skip
    """Fills `start` (per op) and `last` (end per rank); returns (makespan, the first op that exceeds memory or -1).

    The makespan is DEADLOCK where an op stands before what it needs.
    """
    ranks, stages, micro_batches = offsets.size - 1, rank.size, route.size
    forward_at = np.full((stages, micro_batches), -1.0)
    gradient_at = np.full((stages, micro_batches), -1.0)
    done = np.zeros((stages, micro_batches), np.int8)  # 1: F has run, 2: I has run
    again = np.zeros((stages, micro_batches), np.bool_)
    channel = np.zeros((ranks, ranks))
    used = static.copy()
    head = offsets[:-1].copy()
    left = ops.shape[0]
    over = -1
    for i in range(left):
        if ops[i, 1] == R:
            again[ops[i, 0], ops[i, 2]] = True
    last[:] = 0.0
    while left > 0:
        moved = False
        for r in range(ranks):
            while head[r] < offsets[r + 1]:
                i = head[r]
                s, k, m = ops[i, 0], ops[i, 1], ops[i, 2]
                ready = last[r]
                if k == F:
                    b = before[route[m], s]
                    if b >= 0:
                        if forward_at[b, m] < 0.0:
                            break
                        ready = max(ready, forward_at[b, m])
                    used[r] += kept[s, m] if again[s, m] else held[s, m]
                elif k == I or k == B:
                    if done[s, m] != 1 or again[s, m]:
                        return DEADLOCK, over
                    a = after[route[m], s]
                    if a >= 0:
                        if gradient_at[a, m] < 0.0:
                            break
                        ready = max(ready, gradient_at[a, m])
                elif k == W:
                    if done[s, m] != 2:
                        return DEADLOCK, over
                else:
                    if done[s, m] != 1:
                        return DEADLOCK, over
                    again[s, m] = False
                    used[r] += held[s, m] - kept[s, m]
                if over < 0 and used[r] + work[s] > capacity[r]:
                    over = i
                start[i] = ready
                now = ready + ms[k, s, m]
                last[r] = now
                if k == F:
                    done[s, m] = 1
                    a = after[route[m], s]
                    arrived = now
                    if a >= 0 and rank[a] != r:
                        arrived = max(now, channel[r, rank[a]]) + forward_ms[s, m]
                        channel[r, rank[a]] = arrived
                    forward_at[s, m] = arrived
                elif k == I or k == B:
                    done[s, m] = 2
                    used[r] -= held[s, m] - (stash[s, m] if k == I else 0.0)
                    b = before[route[m], s]
                    arrived = now
                    if b >= 0 and rank[b] != r:
                        arrived = max(now, channel[r, rank[b]]) + gradient_ms[s, m]
                        channel[r, rank[b]] = arrived
                    gradient_at[s, m] = arrived
                elif k == W:
                    used[r] -= stash[s, m]
                head[r] += 1
                left -= 1
                moved = True
        if not moved:
            return DEADLOCK, over
    return last.max(), over


@njit
def arrange(  # type: ignore[no-untyped-def]
    size, keys, flight, wait_ms, overrun, recomputes, ms, rank, forward_ms, gradient_ms, kept, held, stash, work,
    static, capacity, cutoff_ms, out,
):  # fmt: skip
    """Orders of a chain of stages by list scheduling, written to out[rank]; returns their lengths, or none at all: the
    first is -1 where it gets stuck, -2 where some rank cannot end before the cutoff any more. Micro-batches pass every
    stage in the order of their numbers.

    keys[0 or 1, stage, micro_batch]: of F and of I. `flight`: most micro-batches under way. `wait_ms`: how long a rank
    waits for an op of smaller key. `overrun`: share of a W that may stick out of the gap it fills.
    """
    ranks, stages, micro_batches = static.size, rank.size, held.shape[1]
    f_next, i_next = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    f_at, i_at = np.full((stages, micro_batches), np.inf), np.full((stages, micro_batches), np.inf)
    for m in range(micro_batches):
        f_at[0, m] = 0.0
    clock, used, room = np.zeros(ranks), static.copy(), np.zeros(ranks)
    channel = np.zeros((ranks, ranks))
    length = np.zeros(ranks, np.int64)
    w_stage, w_batch = np.zeros((ranks, size), np.int64), np.zeros((ranks, size), np.int64)
    w_head, w_tail = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for s in range(stages):
        if recomputes[s]:
            # What R brings back must always find its place.
            for m in range(micro_batches):
                room[rank[s]] = max(room[rank[s]], held[s, m] - kept[s, m])
    # The stages of every rank, one rank after the other.
    listed, begin_of = np.zeros(stages, np.int64), np.zeros(ranks + 1, np.int64)
    count = 0
    for r in range(ranks):
        for s in range(stages):
            if rank[s] == r:
                listed[count] = s
                count += 1
        begin_of[r + 1] = count
    # What every rank has left to do: with its clock, the earliest time at which it can end.
    undone = np.zeros(ranks)
    for s in range(stages):
        for m in range(micro_batches):
            undone[rank[s]] += ms[F, s, m] + ms[I, s, m] + ms[W, s, m]
    # What every rank would do next; decided again only where something it depends on has changed.
    next_at, next_stage, next_kind = np.full(ranks, np.inf), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    decided = np.zeros(ranks, np.bool_)
    left = 2 * stages * micro_batches
    while left > 0:
        # The rank whose next op starts first decides first: what others do later cannot arrive before.
        best_at, who, what, kind = np.inf, -1, -1, -1
        for r in range(ranks):
            if decided[r]:
                if next_at[r] < best_at:
                    best_at, who, what, kind = next_at[r], r, next_stage[r], next_kind[r]
                continue
            decided[r] = True
            key, at, s_of, k_of = np.inf, np.inf, -1, -1
            for turn in range(2):
                for place in range(begin_of[r], begin_of[r + 1]):
                    s = listed[place]
                    for k in range(2):
                        m = f_next[s] if k == 0 else i_next[s]
                        if m >= micro_batches:
                            continue
                        ready = f_at[s, m] if k == 0 else i_at[s, m]
                        if ready == np.inf or (k == 1 and f_next[s] <= m):
                            continue
                        if k == 0:
                            if s == 0 and m - i_next[0] >= flight:
                                continue
                            takes = kept[s, m] if recomputes[s] else held[s, m]
                            if used[r] + takes + work[s] + room[r] > capacity[r] and not (
                                w_head[r] < w_tail[r]
                                and used[r]
                                + takes
                                + work[s]
                                + room[r]
                                - _stashed(stash, w_stage[r], w_batch[r], w_head[r], w_tail[r])
                                <= capacity[r]
                            ):
                                continue
                        elif (
                            recomputes[s]
                            and used[r] + held[s, m] - kept[s, m] + work[s] > capacity[r]
                            and not (w_head[r] < w_tail[r])
                        ):
                            continue
                        ready = max(ready, clock[r])
                        if turn == 0:
                            at = min(at, ready)
                        elif ready <= at + wait_ms and keys[k, s, m] < key:
                            key, s_of, k_of = keys[k, s, m], s, k
                if at == np.inf:
                    break
            if s_of >= 0:
                begins = f_at[s_of, f_next[s_of]] if k_of == 0 else i_at[s_of, i_next[s_of]]
                begins = max(begins, clock[r])
            else:
                begins = np.inf
            if w_head[r] < w_tail[r]:
                took = ms[W, w_stage[r, w_head[r]], w_batch[r, w_head[r]]]
                if begins - clock[r] > 1e-9 and begins - clock[r] >= (1.0 - overrun) * took:
                    begins, s_of, k_of = clock[r], -1, 2
            next_at[r], next_stage[r], next_kind[r] = begins, s_of, k_of
            if begins < best_at:
                best_at, who, what, kind = begins, r, s_of, k_of
        if who < 0:
            length[0] = -1
            return length
        r = who
        decided[r] = False
        if kind == 2:
            undone[r] -= ms[W, w_stage[r, w_head[r]], w_batch[r, w_head[r]]]
            _weight(r, ms, stash, used, clock, w_stage, w_batch, w_head, out, length)
            continue
        s = what
        m = f_next[s] if kind == 0 else i_next[s]
        apart = (
            kind == 1
            and length[r] > 0
            and not (out[r, length[r] - 1, 0] == s and out[r, length[r] - 1, 1] == F and out[r, length[r] - 1, 2] == m)
        )
        if kind == 0:
            takes = kept[s, m] if recomputes[s] else held[s, m]
        else:
            takes = held[s, m] - kept[s, m] if recomputes[s] else 0.0
        reserve = room[r] if kind == 0 else 0.0
        while used[r] + takes + work[s] + reserve > capacity[r] and w_head[r] < w_tail[r] and takes > 0.0:
            undone[r] -= ms[W, w_stage[r, w_head[r]], w_batch[r, w_head[r]]]
            _weight(r, ms, stash, used, clock, w_stage, w_batch, w_head, out, length)
        if used[r] + takes + work[s] > capacity[r] and takes > 0.0:
            length[0] = -1
            return length
        if kind == 1 and recomputes[s] and apart:
            clock[r] += ms[R, s, m]  # while the gradient is under way
            out[r, length[r], 0], out[r, length[r], 1], out[r, length[r], 2] = s, R, m
            length[r] += 1
        used[r] += takes
        begins = max(clock[r], f_at[s, m] if kind == 0 else i_at[s, m])
        code = F if kind == 0 else I
        now = begins + ms[code, s, m]
        clock[r] = now
        undone[r] -= ms[code, s, m]
        if now + undone[r] > cutoff_ms:
            length[0] = -2
            return length
        out[r, length[r], 0], out[r, length[r], 1], out[r, length[r], 2] = s, code, m
        length[r] += 1
        left -= 1
        if kind == 0:
            f_next[s] += 1
            if s + 1 < stages:
                if rank[s + 1] != r:
                    now = max(now, channel[r, rank[s + 1]]) + forward_ms[s, m]
                    channel[r, rank[s + 1]] = now
                f_at[s + 1, m] = now
                decided[rank[s + 1]] = False
            else:
                i_at[s, m] = now
        else:
            i_next[s] += 1
            used[r] -= held[s, m] - stash[s, m]
            w_stage[r, w_tail[r]], w_batch[r, w_tail[r]] = s, m
            w_tail[r] += 1
            if s > 0:
                if rank[s - 1] != r:
                    now = max(now, channel[r, rank[s - 1]]) + gradient_ms[s, m]
                    channel[r, rank[s - 1]] = now
                i_at[s - 1, m] = now
                decided[rank[s - 1]] = False
    for r in range(ranks):
        while w_head[r] < w_tail[r]:
            _weight(r, ms, stash, used, clock, w_stage, w_batch, w_head, out, length)
    return length


@njit
def _stashed(stash, stage, batch, head, tail):  # type: ignore[no-untyped-def]
    """Bytes that the weight gradients of a rank that wait would free."""
    total = 0.0
    for k in range(head, tail):
        total += stash[stage[k], batch[k]]
    return total


@njit
def _weight(r, ms, stash, used, clock, w_stage, w_batch, w_head, out, length):  # type: ignore[no-untyped-def]
    """The W that waits longest on rank r runs now."""
    s, m = w_stage[r, w_head[r]], w_batch[r, w_head[r]]
    w_head[r] += 1
    clock[r] += ms[W, s, m]
    used[r] -= stash[s, m]
    out[r, length[r], 0], out[r, length[r], 1], out[r, length[r], 2] = s, W, m
    length[r] += 1
