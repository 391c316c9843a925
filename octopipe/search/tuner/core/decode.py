"""List scheduling: from a structure with keys to an order per rank and its step time.

Knows: a structure, a vector of priorities ("keys") and the rules below. Does not know: searches or plans.

Timing equals that of the simulator under directed channels: a rank runs one op at a time, and a tensor for another rank
waits for the queue of its direction and then takes its transfer time. Orders are built in time order, so at every
decision it is known exactly what has arrived and what is in flight.

- In each stage, micro-batches are processed first in, first out (in the searched `entry` order if sizes differ).
- A rank runs the ready F or I with the smallest key; it may wait briefly (LOOK) for a better one in flight.
- A stage keeps at most `flight` micro-batches between their F and their I.
- F starts only if its activation fits in addition to a reserve for the later stages of its rank, so that the oldest
  micro-batch can always drain; a remaining cyclic wait is reported as an infinite step time.
- W, and R of stages that recompute, fill the remaining time.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.problem import (
    AT_SLOT, BOUNDARY, BOUNDS, CLOCK, ENTRY, F_MS, FIRST, FLIGHT, FORWARD, FREE, FULL, HAS_BUFFERS, HAS_EXTRAS, HOLD,
    HOP_F, HOP_I, I_MS, INPUT, KIND_F, KIND_I, KIND_R, KIND_W, LAYERS, LEFT, LENGTH, LIMIT, MICRO_BATCHES, OWED, RANK,
    RANKS, REDO, SIZE, SLOT, TAIL, UNIT, USED, VARIANTS, W_MS, WAY, extras_end, pack, price, work_bound,
)  # fmt: skip
from octopipe.search.tuner.settings import SETTINGS

A_F, B_F, A_I, B_I, C_I, LOOK, RHO, W_OVER, BANK, RULE, RULE_SLACK, RULE_MORE, NUM_KEYS = range(13)
"""Keys. Of F: A_F * m + B_F * (share of the forward chain before the stage). Of I: C_I + A_I * m + B_I * (share of the
backward chain before it). LOOK: how long to wait for a better op; W_OVER: how far a W may run into a known arrival
(both in units of a rank's mean work per micro-batch). RHO: share of the later stages' activations of one micro-batch
kept free; BANK: the same for every micro-batch on its way through the rank. RULE and its two numbers: micro-batches in
flight, see keys.py."""

LAPS = SETTINGS.laps
NONE = -1
"""No slot."""

(
    ROW_AT_F, ROW_KEY_F, ROW_F_MS, ROW_HOLD, ROW_RESERVE, ROW_AT_I, ROW_KEY_I, ROW_I_MS, ROW_FREED, ROW_W_MS, ROW_TAIL,
    ROW_LATER,
) = range(12)  # fmt: skip
"""Columns of `Scratch.row`: when the next F can start (infinite: not yet), its key, time and memory, what must stay
free beside it; the same of the next I and W; what the rank's later stages hold of one micro-batch."""
NUM_STAGE, NEXT_F, NEXT_I, NEXT_W, NEXT_R, NUM_FLIGHT, BEFORE, AFTER, RANK_BEFORE, RANK_AFTER = range(10)
"""Columns of `Scratch.num` for slots: the stage, the micro-batch that is next, the neighbours' slots and ranks."""
SLOTS_FROM, DONE, PENDING, IDLE = range(4)
"""Columns of `Scratch.num` for ranks, behind all slots: its first slot, ops so far, W that could run, does it wait?"""


@njit
def decode(p, st, keys, cutoff, pace_limit, sc):  # type: ignore[no-untyped-def]
    """Build orders and return their step time; infinite on deadlock or as soon as it must exceed `cutoff`.

    `pace_limit`: give up as well where the pace after a lap is beyond this (infinite: never). What a decision reads
    stands together in one row per stage and is renewed only when something about that stage has changed.
    """
    inf = np.inf
    if work_bound(p, st, sc) > cutoff or not price(p, st, sc):
        return inf
    set_up(p, st, keys, sc)
    row, num, mine, cost, seq, ends, arrive = sc.row, sc.num, sc.mine, sc.price, sc.seq, sc.end, sc.arrive
    ranks, M, stages = p.count[RANKS], p.count[MICRO_BATCHES], st[SIZE, 0]
    at_rank = num.shape[0] - ranks - 1
    vary, buffers = p.count[VARIANTS] > 1, p.count[HAS_BUFFERS] > 0
    slope_f, slope_i, bank = keys[A_F], keys[A_I], keys[BANK]
    look, over = keys[LOOK] * p.number[UNIT], keys[W_OVER] * p.number[UNIT]
    total = 3 * st[SIZE, 0] * p.count[MICRO_BATCHES]
    remaining = total
    lap = 0
    sc.pace[:] = inf
    check = total - total // LAPS
    v = 0
    while remaining > 0:
        r = 0
        t = mine[0, CLOCK]
        for q in range(1, ranks):
            if mine[q, CLOCK] < t:
                t = mine[q, CLOCK]
                r = q
        if t == inf or t + max(mine[r, LEFT], mine[r, WAY]) > cutoff:
            return inf
        if remaining == check:
            # -- has it kept pace with the walker so far?
            projected = 0.0
            for q in range(ranks):
                projected += max(mine[q, FREE], t) + mine[q, LEFT]
            sc.pace[lap] = projected
            if projected > pace_limit[lap]:
                return inf
            lap += 1
            check = total - total * (lap + 1) // LAPS if lap < LAPS - 1 else -1
        # -- look at the rank's candidates
        me = at_rank + r
        ready_key, ready, kind = inf, NONE, KIND_F
        blocked_key = inf
        soon_key, soon_at = inf, inf
        next_at = inf
        room = mine[r, LIMIT] - mine[r, USED]
        begin, stop = num[me, SLOTS_FROM], num[me + 1, SLOTS_FROM]
        for k in range(begin, stop):
            at = row[k, ROW_AT_F]
            if at < inf:
                need, kept, key = row[k, ROW_HOLD], row[k, ROW_RESERVE], row[k, ROW_KEY_F]
                if bank > 0.0:
                    kept = max(kept, bank * (mine[r, OWED] + (row[k, ROW_LATER] if k == begin else -need)))
                if need + kept > room:
                    if at <= t and key < blocked_key:
                        blocked_key = key
                elif at <= t:
                    if key < ready_key:
                        ready_key, ready, kind = key, k, KIND_F
                else:
                    next_at = min(next_at, at)
                    if at <= t + look and key < soon_key:
                        soon_key, soon_at = key, at
            at = row[k, ROW_AT_I]
            if at < inf:
                key = row[k, ROW_KEY_I]
                if at <= t:
                    if key < ready_key:
                        ready_key, ready, kind = key, k, KIND_I
                else:
                    next_at = min(next_at, at)
                    if at <= t + look and key < soon_key:
                        soon_key, soon_at = key, at
        chosen = ready
        if soon_key < ready_key:
            chosen = NONE
            next_at = soon_at
        gap = next_at - t if chosen == NONE else -1.0
        best = -inf
        if num[me, PENDING] > 0 and (chosen == NONE or blocked_key < ready_key):
            # A gap: the longest W that fits before the next arrival, else the one that overruns least. Or the F this
            # rank wants next lacks memory: the W that gives back most.
            for k in range(begin, stop):
                if num[k, NEXT_W] < num[k, NEXT_I]:
                    ms = row[k, ROW_W_MS]
                    if gap < 0.0:
                        score = row[k, ROW_TAIL]
                    elif gap == inf:
                        score = -np.float64(num[k, NEXT_W])
                    elif ms <= gap + 1e-9:
                        score = ms
                    elif ms <= gap + over:
                        score = gap - ms
                    else:
                        continue
                    if score > best:
                        best, chosen, kind = score, k, KIND_W
        if gap >= 0.0:
            for k in range(begin, stop):
                m = num[k, NEXT_R]
                s = num[k, NUM_STAGE]
                if st[REDO, s] and m < num[k, NEXT_F] and m == num[k, NEXT_I]:
                    if vary:
                        v = st[ENTRY, m]
                    ms = cost[F_MS, s, v]
                    if ms <= gap and cost[FULL, s, v] - cost[HOLD, s, v] <= room and ms > best:
                        best, chosen, kind = ms, k, KIND_R
            if chosen == NONE:
                mine[r, CLOCK] = next_at
                num[me, IDLE] = 1
                mine[r, FREE] = t
                continue
        # -- run it
        k = chosen
        s = num[k, NUM_STAGE]
        n = num[me, DONE]
        if kind == KIND_F:
            m = num[k, NEXT_F]
            end = t + row[k, ROW_F_MS]
            mine[r, LEFT] -= row[k, ROW_F_MS]
            mine[r, WAY] -= row[k, ROW_F_MS]
            mine[r, USED] += row[k, ROW_HOLD]
            mine[r, OWED] += row[k, ROW_LATER] if k == begin else -row[k, ROW_HOLD]
            num[k, NEXT_F] = m + 1
            remaining -= 1
            if vary:
                v = st[ENTRY, m]
            if s + 1 < stages:
                q = num[k, RANK_AFTER]
                at = end
                if q != r:
                    at = max(at, sc.channel[r, q]) + cost[HOP_F, s, v]
                    sc.channel[r, q] = at
                    if num[at_rank + q, IDLE] == 1:
                        mine[q, CLOCK] = min(mine[q, CLOCK], max(at, mine[q, FREE]))
                arrive[0, s + 1, m] = at
                j = num[k, AFTER]
                if num[j, NEXT_F] == m and m - num[j, NEXT_I] < num[j, NUM_FLIGHT]:
                    row[j, ROW_AT_F] = at
                if buffers:
                    mine[q, USED] += p.layer[BOUNDARY, v, st[BOUNDS, s + 1]]
            else:
                arrive[1, s, m] = end
                if num[k, NEXT_I] == m:
                    row[k, ROW_AT_I] = end
            if buffers:
                mine[r, USED] -= p.layer[BOUNDARY, v, st[BOUNDS, s]]
            row[k, ROW_AT_F] = inf
            following = m + 1
            if following < M:
                row[k, ROW_KEY_F] += slope_f
                if vary:
                    v = st[ENTRY, following]
                    row[k, ROW_F_MS] = cost[F_MS, s, v]
                    row[k, ROW_HOLD] = cost[HOLD, s, v]
                if following - num[k, NEXT_I] < num[k, NUM_FLIGHT]:
                    row[k, ROW_AT_F] = arrive[0, s, following]
        elif kind == KIND_I:
            m = num[k, NEXT_I]
            if vary:
                v = st[ENTRY, m]
            if st[REDO, s] and num[k, NEXT_R] == m:
                # R right before its I, unless the forward was the very last thing this rank ran.
                if n == 0 or seq[r, n - 1] != pack(KIND_F, s, m):
                    seq[r, n] = pack(KIND_R, s, m)
                    t += cost[F_MS, s, v]
                    ends[r, n] = t
                    n += 1
                    if s + 1 < stages:
                        mine[r, LEFT] -= cost[F_MS, s, v]
                mine[r, USED] += cost[FULL, s, v] - cost[HOLD, s, v]
                num[k, NEXT_R] += 1
            end = t + row[k, ROW_I_MS]
            mine[r, LEFT] -= row[k, ROW_I_MS]
            mine[r, WAY] -= row[k, ROW_I_MS]
            mine[r, USED] -= row[k, ROW_FREED]
            num[k, NEXT_I] = m + 1
            num[me, PENDING] += 1
            remaining -= 1
            if s > 0:
                q = num[k, RANK_BEFORE]
                at = end
                if q != r:
                    at = max(at, sc.channel[r, q]) + cost[HOP_I, s, v]
                    sc.channel[r, q] = at
                    if num[at_rank + q, IDLE] == 1:
                        mine[q, CLOCK] = min(mine[q, CLOCK], max(at, mine[q, FREE]))
                arrive[1, s - 1, m] = at
                j = num[k, BEFORE]
                if num[j, NEXT_I] == m:
                    row[j, ROW_AT_I] = at
                if buffers:
                    mine[q, USED] += p.layer[BOUNDARY, v, st[BOUNDS, s]]
            if buffers and s + 1 < stages:
                mine[r, USED] -= p.layer[BOUNDARY, v, st[BOUNDS, s + 1]]
            row[k, ROW_AT_I] = inf
            following = m + 1
            if following == M and k == begin:
                mine[r, WAY] = -inf
            if following < M:
                row[k, ROW_KEY_I] += slope_i
                if vary:
                    v = st[ENTRY, following]
                    row[k, ROW_I_MS] = cost[I_MS, s, v]
                    row[k, ROW_FREED] = cost[FULL, s, v] - cost[TAIL, s, v]
                if following < num[k, NEXT_F]:
                    row[k, ROW_AT_I] = arrive[1, s, following]
            # One micro-batch less between F and I: the next F may have waited for that.
            following = num[k, NEXT_F]
            if following < M and following - (m + 1) < num[k, NUM_FLIGHT]:
                row[k, ROW_AT_F] = arrive[0, s, following]
        elif kind == KIND_W:
            m = num[k, NEXT_W]
            end = t + row[k, ROW_W_MS]
            mine[r, LEFT] -= row[k, ROW_W_MS]
            mine[r, USED] -= row[k, ROW_TAIL]
            num[k, NEXT_W] = m + 1
            num[me, PENDING] -= 1
            remaining -= 1
            sc.done[s] = end
            if vary and m + 1 < M:
                v = st[ENTRY, m + 1]
                row[k, ROW_W_MS] = cost[W_MS, s, v]
                row[k, ROW_TAIL] = cost[TAIL, s, v]
        else:
            m = num[k, NEXT_R]
            if vary:
                v = st[ENTRY, m]
            end = t + cost[F_MS, s, v]
            if s + 1 < stages:
                mine[r, LEFT] -= cost[F_MS, s, v]
            mine[r, USED] += cost[FULL, s, v] - cost[HOLD, s, v]
            num[k, NEXT_R] = m + 1
        seq[r, n] = pack(kind, s, m)
        ends[r, n] = end
        num[me, DONE] = n + 1
        mine[r, CLOCK] = end
        mine[r, FREE] = end
        num[me, IDLE] = 0
    last_end = 0.0
    for q in range(p.count[RANKS]):
        sc.place[LENGTH, q] = num[at_rank + q, DONE]
        if mine[q, FREE] > last_end:
            last_end = mine[q, FREE]
            sc.place[LENGTH, p.count[RANKS]] = q
    if p.count[HAS_EXTRAS] > 0:
        last_end = max(last_end, extras_end(p, st, sc))
    return last_end


@njit
def set_up(p, st, keys, sc):  # type: ignore[no-untyped-def]
    """Rows of stages and ranks before anything has run, after `price`."""
    ranks, M, stages, inf = p.count[RANKS], p.count[MICRO_BATCHES], st[SIZE, 0], np.inf
    row, num, mine = sc.row, sc.num, sc.mine
    at_rank = num.shape[0] - ranks - 1
    whole_f = max(p.layer[FORWARD, 0, p.count[LAYERS]], 1e-12)
    whole_i = max(p.layer[INPUT, 0, p.count[LAYERS]], 1e-12)
    v = st[ENTRY, 0] if p.count[VARIANTS] > 1 else 0
    for r in range(ranks):
        for q in range(ranks):
            sc.channel[r, q] = 0.0
        num[at_rank + r, SLOTS_FROM] = sc.place[FIRST, r]
        num[at_rank + r, DONE] = 0
        num[at_rank + r, PENDING] = 0
        num[at_rank + r, IDLE] = 1
        later = 0.0
        again = 0.0
        for at in range(sc.place[FIRST, r + 1] - 1, sc.place[FIRST, r] - 1, -1):
            s = sc.place[AT_SLOT, at]
            row[at, ROW_LATER] = later
            row[at, ROW_RESERVE] = later * keys[RHO]
            most = 0.0
            for w in range(p.count[VARIANTS]):
                most = max(most, sc.price[HOLD, s, w])
                again = max(again, sc.price[FULL, s, w] - sc.price[HOLD, s, w])
            later += most
        mine[r, CLOCK] = 0.0
        mine[r, FREE] = 0.0
        mine[r, OWED] = 0.0
        mine[r, WAY] = 0.0
        # A rank that recomputes must always be able to restore its hungriest stage.
        mine[r, LIMIT] -= again
    num[at_rank + ranks, SLOTS_FROM] = sc.place[FIRST, ranks]
    for s in range(stages):
        at = sc.place[SLOT, s]
        num[at, NUM_STAGE] = s
        num[at, NEXT_F] = 0
        num[at, NEXT_I] = 0
        num[at, NEXT_W] = 0
        num[at, NEXT_R] = 0
        num[at, NUM_FLIGHT] = st[FLIGHT, s]
        num[at, BEFORE] = sc.place[SLOT, max(s - 1, 0)]
        num[at, AFTER] = sc.place[SLOT, min(s + 1, stages - 1)]
        num[at, RANK_BEFORE] = st[RANK, max(s - 1, 0)]
        num[at, RANK_AFTER] = st[RANK, min(s + 1, stages - 1)]
        row[at, ROW_AT_F] = inf
        row[at, ROW_AT_I] = inf
        row[at, ROW_KEY_F] = keys[B_F] * p.layer[FORWARD, 0, st[BOUNDS, s]] / whole_f
        row[at, ROW_KEY_I] = keys[C_I] + keys[B_I] * (1.0 - p.layer[INPUT, 0, st[BOUNDS, s + 1]] / whole_i)
        row[at, ROW_F_MS] = sc.price[F_MS, s, v]
        row[at, ROW_I_MS] = sc.price[I_MS, s, v]
        row[at, ROW_W_MS] = sc.price[W_MS, s, v]
        row[at, ROW_HOLD] = sc.price[HOLD, s, v]
        row[at, ROW_TAIL] = sc.price[TAIL, s, v]
        row[at, ROW_FREED] = sc.price[FULL, s, v] - sc.price[TAIL, s, v]
        for m in range(M):
            sc.arrive[0, s, m] = inf if s > 0 else 0.0
            sc.arrive[1, s, m] = inf
    row[sc.place[SLOT, 0], ROW_AT_F] = 0.0
    # The last gradient of a rank's lowest stage must still pass the stages below; the last W of stage 0 follows it.
    back = 0.0
    if p.count[VARIANTS] == 1:
        for s in range(stages):
            r = st[RANK, s]
            if s == sc.place[AT_SLOT, sc.place[FIRST, r]]:
                mine[r, WAY] += back + sc.price[HOP_I, s, 0]
            back += sc.price[I_MS, s, 0] + (sc.price[HOP_I, s, 0] if s > 0 else sc.price[W_MS, 0, 0])
            mine[r, WAY] += M * (sc.price[F_MS, s, 0] + sc.price[I_MS, s, 0])
