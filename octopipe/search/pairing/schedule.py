"""Compiled list scheduling with pairs: turns a structure and its keys into orders in which ops run together.

Knows: costs of a structure, and how a rank decides what to run next. Does not know: plans, or moves on structures.

A free rank considers the next F and the next I of each of its stages (micro-batches are equal, so first in, first out
is no restriction) and selects the best of each by key. If both have arrived, they run as a pair, together with the W of
the I if that is cheaper than W alone. If one is missing, the rank waits for it for a while (`patience`); otherwise it
runs the other with a W beside it, or alone. But a stage with `flight` micro-batches in flight runs no F alone: it keeps
that F for a pair. Two F may run together if no gradient is near. If neither has arrived, the rank runs a W. A forward
needs memory for what it holds and for a share of what its micro-batch will hold on the same rank later, so that the
backward is never blocked.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit

PATIENCE, FIT, FUSE, RESERVE, ALONE_W, TWO_F, NUM_NUMBERS = range(7)
"""Places in `numbers`: how long a rank waits for a partner (ms), by what share a W may overrun an arrival, which share
of W's own time a fused W may cost, the reserved share of later stages' bytes, which share of its own time a W may cost
beside a single op, and up to which share of their own times two F run together."""
OP_F, OP_I, OP_W, OP_B = 0, 2, 3, 4
"""As plan.KINDS."""


@njit
def schedule(  # type: ignore[no-untyped-def]
    own, together, hop_f, hop_i, rank, room, key_f, key_i, flight, numbers, ranks, micro_batches, out, lengths
):
    """Makespan of the orders that the keys give, infinite where they block; `out[rank, slot]` gets each slot as two
    packed ops (the second -1 where there is none), `lengths` the ranks' numbers of slots."""
    size = rank.size
    inf = np.inf
    arrived = np.full((2, size, micro_batches), inf)
    done = np.zeros((3, size), np.int64)
    clock = np.zeros(ranks)
    asleep = np.zeros(ranks, np.bool_)
    used = np.zeros(ranks)
    left = np.zeros(ranks, np.int64)
    channel = np.zeros((ranks, ranks))
    later = np.zeros(size)
    held = np.zeros((ranks, size), np.int64)
    holds = np.zeros(ranks, np.int64)
    for s in range(size):
        held[rank[s], holds[rank[s]]] = s
        holds[rank[s]] += 1
        left[rank[s]] += 3 * micro_batches
        for t in range(s + 1, size):
            if rank[t] == rank[s]:
                later[s] += own[3, t]
    for r in range(ranks):
        lengths[r] = 0
    for m in range(micro_batches):
        arrived[0, 0, m] = 0.0
    end = 0.0
    while True:
        r = -1
        unfinished = False
        for k in range(ranks):
            if left[k] > 0:
                unfinished = True
                if not asleep[k] and (r < 0 or clock[k] < clock[r]):
                    r = k
        if not unfinished:
            return end
        if r < 0:
            return inf
        now = clock[r]
        best_f = -1
        best_i = -1
        best_w = -1
        soon_f = inf
        soon_i = inf
        low_f = inf
        low_i = inf
        low_w = 0.0
        only_f = -1
        low_only = inf
        for place in range(holds[r]):
            s = held[r, place]
            m = done[0, s]
            if m < micro_batches and used[r] + own[3, s] + numbers[3] * later[s] <= room[r]:
                at = arrived[0, s, m]
                free = m - done[1, s] < flight[s]
                if at <= now:
                    if m + key_f[s] < low_f:
                        low_f = m + key_f[s]
                        best_f = s
                    if free and m + key_f[s] < low_only:
                        low_only = m + key_f[s]
                        only_f = s
                elif at < soon_f:
                    soon_f = at
            m = done[1, s]
            if m < done[0, s]:
                at = arrived[1, s, m]
                if at <= now:
                    if m + key_i[s] < low_i:
                        low_i = m + key_i[s]
                        best_i = s
                elif at < soon_i:
                    soon_i = at
            waiting = done[1, s] - done[2, s]
            if waiting > 0 and own[4, s] * waiting + 1e-9 * waiting > low_w:
                low_w = own[4, s] * waiting + 1e-9 * waiting
                best_w = s
        if best_i < 0:
            best_f = only_f
        f, i, w, b = -1, -1, -1, -1
        f2 = -1
        took = 0.0
        if best_f >= 0 and best_i >= 0:
            pair = together[0, best_f, best_i]
            f, i = best_f, best_i
            took = pair
            extra = together[1, best_f, best_i] - pair
            # First in, first out of W as well: a fused W must be the next one of its stage.
            if done[2, i] == done[1, i] and extra <= numbers[2] * own[2, i]:
                b = i
                took = together[1, best_f, best_i]
        elif best_i >= 0 or best_f >= 0:
            partner = soon_f if best_i >= 0 else soon_i
            if partner <= now + numbers[0]:
                clock[r] = partner
                continue
            if best_i >= 0:
                i = best_i
                took = own[1, i]
                if best_w >= 0:
                    both = together[3, i, best_w]
                    if both - own[1, i] <= numbers[4] * own[2, best_w]:
                        w = best_w
                        took = both
            else:
                f = best_f
                took = own[0, f]
                low = inf
                for place in range(holds[r]):
                    s = held[r, place]
                    m = done[0, s] + (1 if s == f else 0)
                    if m < micro_batches and m - done[1, s] < flight[s] and arrived[0, s, m] <= now:
                        needed = used[r] + own[3, f] + own[3, s] + numbers[3] * max(later[s], later[f])
                        pays = together[4, f, s] <= numbers[5] * (own[0, f] + own[0, s])
                        if pays and needed <= room[r] and m + key_f[s] < low:
                            low = m + key_f[s]
                            f2 = s
                if f2 >= 0:
                    took = together[4, f, f2]
                elif best_w >= 0:
                    both = together[2, f, best_w]
                    if both - own[0, f] <= numbers[4] * own[2, best_w]:
                        w = best_w
                        took = both
        else:
            soon = min(soon_f, soon_i)
            if best_w >= 0 and (soon == inf or now + numbers[1] * own[2, best_w] <= soon):
                w = best_w
                took = own[2, w]
            elif soon < inf:
                clock[r] = soon
                continue
            else:
                asleep[r] = True
                continue
        over = now + took
        take(
            r, over, f, f2, i, b, w, own, hop_f, hop_i, rank, micro_batches, arrived, done, clock, asleep, used, left,
            channel, out, lengths,
        )  # fmt: skip
        if over > end:
            end = over


@njit
def take(  # type: ignore[no-untyped-def]
    r, over, f, f2, i, b, w, own, hop_f, hop_i, rank, micro_batches, arrived, done, clock, asleep, used, left, channel,
    out, lengths,
):  # fmt: skip
    """Write a slot that rank r runs until `over`, and hand on what it makes; stages of ops that it lacks are -1."""
    size = rank.size
    slot = lengths[r]
    lengths[r] += 1
    out[r, slot, 0] = -1
    out[r, slot, 1] = -1
    place = 0
    for turn in range(2):
        s = f if turn == 0 else f2
        if s >= 0:
            m = done[0, s]
            out[r, slot, place] = (OP_F * size + s) * micro_batches + m
            place += 1
            done[0, s] += 1
            used[r] += own[3, s]
            left[r] -= 1
            if s + 1 < size:
                to = rank[s + 1]
                at = over
                if to != r:
                    at = max(over, channel[r, to]) + hop_f[s]
                    channel[r, to] = at
                arrived[0, s + 1, m] = at
                if asleep[to]:
                    asleep[to] = False
                    clock[to] = max(clock[to], at)
            else:
                arrived[1, s, m] = over
    if i >= 0:
        m = done[1, i]
        out[r, slot, place] = ((OP_B if b >= 0 else OP_I) * size + i) * micro_batches + m
        place += 1
        done[1, i] += 1
        used[r] -= own[3, i] - own[4, i]
        left[r] -= 1
        if b >= 0:
            done[2, i] += 1
            used[r] -= own[4, i]
            left[r] -= 1
        if i > 0:
            to = rank[i - 1]
            at = over
            if to != r:
                at = max(over, channel[r, to]) + hop_i[i]
                channel[r, to] = at
            arrived[1, i - 1, m] = at
            if asleep[to]:
                asleep[to] = False
                clock[to] = max(clock[to], at)
    if w >= 0:
        out[r, slot, place] = (OP_W * size + w) * micro_batches + done[2, w]
        done[2, w] += 1
        used[r] -= own[4, w]
        left[r] -= 1
    clock[r] = over
