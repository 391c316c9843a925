"""Compiled list scheduling over paths that fork and join: turns a structure and its keys into orders.

Knows: costs of a structure, the edges of its paths, and how a rank decides what to run next. Does not know: plans,
layers, or how structures are varied.

Timing equals that of the simulator under directed channels. Orders are built in time order: the rank that is free first
decides next, so it is known exactly what has arrived. A rank runs the ready F or I with the smallest key, and may wait
briefly (`LOOK`) for a better one that is in flight. A stage keeps at most `flight` micro-batches between F and I. An F
needs memory for what it holds and for a share (`RESERVE`) of what its micro-batch will still hold on the rank. W fills
the gaps, and runs earlier if it frees the memory that the best F lacks.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit

A_F, A_I, C_I, LOOK, OVER, RESERVE, NUM_NUMBERS = range(7)
"""Places in `numbers`: by how much an F's and an I's key rise from one micro-batch to the next, what is added to every
I's key, how long a rank waits for a better op (ms), by how much a W may run into a known arrival (ms), and the share
of later stages' bytes that is kept free."""
OP_F, OP_I, OP_W = 0, 2, 3
"""As plan.KINDS."""


@njit
def schedule(  # type: ignore[no-untyped-def]
    ms, held, stash, nbytes, rank, before, after, share, path, latency, per_byte, room, later, key_f, key_i, flight,
    numbers, turns, counts, cutoff, out, lengths,
):  # fmt: skip
    """Makespan of the orders that the keys give; infinite where they block or exceed `cutoff`.

    `ms[F, I, W]`, `held`, `stash` and `nbytes` are [stage, micro-batch]; `before` and `after` [path, stage, k] name the
    neighbours (-1: none), `share[path, stage]` over how many ranks its output spreads; `turns[stage]` lists the
    micro-batches that pass it, `counts` how many. `out[rank]` gets the ops packed, `lengths` how many.
    """
    size, micro_batches, ranks, inf = rank.size, path.size, room.size, np.inf
    arrived = np.zeros((2, size, micro_batches))
    missing = np.zeros((2, size, micro_batches), np.int64)
    done = np.zeros((3, size), np.int64)
    clock, free, used, work = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    left = np.zeros(ranks, np.int64)
    idle = np.zeros(ranks, np.int64)
    channel = np.zeros((ranks, ranks))
    mine = np.zeros((ranks, size), np.int64)
    holds = np.zeros(ranks, np.int64)
    for s in range(size):
        r = rank[s]
        mine[r, holds[r]] = s
        holds[r] += 1
        left[r] += 3 * counts[s]
        for j in range(counts[s]):
            m = turns[s, j]
            p = path[m]
            for k in range(before.shape[2]):
                if before[p, s, k] >= 0:
                    missing[0, s, m] += 1
            missing[1, s, m] = 1
            for k in range(after.shape[2]):
                if after[p, s, k] >= 0:
                    missing[1, s, m] += 1
            for kind in range(3):
                work[r] += ms[kind, s, m]
    for r in range(ranks):
        lengths[r] = 0
    end = 0.0
    while True:
        r = -1
        unfinished = False
        for k in range(ranks):
            if left[k] > 0:
                unfinished = True
                if clock[k] < inf and (r < 0 or clock[k] < clock[r]):
                    r = k
        if not unfinished:
            return end
        if r < 0:
            return inf
        now = clock[r]
        if now + work[r] > cutoff:
            return inf
        ready, kind, low = -1, OP_F, inf
        soon_low, soon_at, next_at = inf, inf, inf
        blocked = inf
        for place in range(holds[r]):
            s = mine[r, place]
            j = done[0, s]
            if j < counts[s] and j - done[1, s] < flight[s]:
                m = turns[s, j]
                if missing[0, s, m] == 0:
                    at = arrived[0, s, m]
                    key = numbers[A_F] * j + key_f[s]
                    if used[r] + held[s, m] + numbers[RESERVE] * later[s] > room[r]:
                        if at <= now and key < blocked:
                            blocked = key
                    elif at <= now:
                        if key < low:
                            low, ready, kind = key, s, OP_F
                    else:
                        next_at = min(next_at, at)
                        if at <= now + numbers[LOOK] and key < soon_low:
                            soon_low, soon_at = key, at
            j = done[1, s]
            if j < done[0, s]:
                m = turns[s, j]
                if missing[1, s, m] == 0:
                    at = arrived[1, s, m]
                    key = numbers[C_I] + numbers[A_I] * j + key_i[s]
                    if at <= now:
                        if key < low:
                            low, ready, kind = key, s, OP_I
                    else:
                        next_at = min(next_at, at)
                        if at <= now + numbers[LOOK] and key < soon_low:
                            soon_low, soon_at = key, at
        if soon_low < low:
            ready = -1
            next_at = soon_at
        gap = next_at - now if ready < 0 else -1.0
        if ready < 0 or blocked < low:
            best = -inf
            for place in range(holds[r]):
                s = mine[r, place]
                if done[2, s] < done[1, s]:
                    m = turns[s, done[2, s]]
                    took = ms[2, s, m]
                    if gap < 0.0:
                        score = stash[s, m]
                    elif gap == inf:
                        score = -np.float64(done[2, s])
                    elif took <= gap + 1e-9:
                        score = took
                    elif took <= gap + numbers[OVER]:
                        score = gap - took
                    else:
                        continue
                    if score > best:
                        best, ready, kind = score, s, OP_W
        if ready < 0:
            clock[r] = next_at
            idle[r] = 1
            free[r] = now
            continue
        s = ready
        if kind == OP_F:
            j = done[0, s]
            m = turns[s, j]
            over = now + ms[0, s, m]
            work[r] -= ms[0, s, m]
            done[0, s] += 1
            used[r] += held[s, m]
            p = path[m]
            arrived[1, s, m] = max(arrived[1, s, m], over)
            missing[1, s, m] -= 1
            for k in range(after.shape[2]):
                t = after[p, s, k]
                if t >= 0:
                    q = rank[t]
                    at = over
                    if q != r:
                        hop = latency[r, q] + nbytes[s, m] * share[p, s] * per_byte[r, q]
                        at = max(over, channel[r, q]) + hop
                        channel[r, q] = at
                    arrived[0, t, m] = max(arrived[0, t, m], at)
                    missing[0, t, m] -= 1
                    if missing[0, t, m] == 0 and idle[q] == 1:
                        clock[q] = min(clock[q], max(arrived[0, t, m], free[q]))
        elif kind == OP_I:
            j = done[1, s]
            m = turns[s, j]
            over = now + ms[1, s, m]
            work[r] -= ms[1, s, m]
            done[1, s] += 1
            used[r] -= held[s, m] - stash[s, m]
            p = path[m]
            for k in range(before.shape[2]):
                t = before[p, s, k]
                if t >= 0:
                    q = rank[t]
                    at = over
                    if q != r:
                        hop = latency[r, q] + nbytes[t, m] * share[p, t] * per_byte[r, q]
                        at = max(over, channel[r, q]) + hop
                        channel[r, q] = at
                    arrived[1, t, m] = max(arrived[1, t, m], at)
                    missing[1, t, m] -= 1
                    if missing[1, t, m] == 0 and idle[q] == 1:
                        clock[q] = min(clock[q], max(arrived[1, t, m], free[q]))
        else:
            m = turns[s, done[2, s]]
            over = now + ms[2, s, m]
            work[r] -= ms[2, s, m]
            done[2, s] += 1
            used[r] -= stash[s, m]
        out[r, lengths[r]] = (kind * size + s) * micro_batches + m
        lengths[r] += 1
        left[r] -= 1
        clock[r] = over
        idle[r] = 0
        end = max(end, over)
