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
    BOUNDARY, BOUNDS, CLOCK, ENTRY, FREE, FULL, F_MS, HAS_BUFFERS, HAS_EXTRAS, HOLD, HOP_F, HOP_I,
    I_MS, KIND_F, KIND_I, KIND_R, KIND_W, LEFT, LENGTH, LIMIT, MICRO_BATCHES, OWED, RANKS, REDO, SIZE, TAIL, UNIT,
    USED, VARIANTS, WAY, W_MS, extras_end, pack, price, work_bound,
)  # fmt: skip
from octopipe.search.tuner.core.rows import (
    AFTER, A_F, A_I, BANK, BEFORE, DONE, IDLE, LOOK, NEXT_F, NEXT_I, NEXT_R, NEXT_W, NUM_FLIGHT, NUM_STAGE, PENDING,
    RANK_AFTER, RANK_BEFORE, ROW_AT_F, ROW_AT_I, ROW_FREED, ROW_F_MS, ROW_HOLD, ROW_I_MS, ROW_KEY_F, ROW_KEY_I,
    ROW_LATER, ROW_RESERVE, ROW_TAIL, ROW_W_MS, SLOTS_FROM, W_OVER, set_up,
)  # fmt: skip
from octopipe.simulation.timing import FOR_F, FOR_I, hand_on

LAPS = 10
"""The ops of a schedule are divided into this many equal parts (laps). Its pace is recorded after each but the last."""
NONE = -1
"""This stands for no slot."""


@njit
def decode(p, st, keys, cutoff, pace_limit, sc):  # type: ignore[no-untyped-def]
    """List scheduling: build the orders and return the step time, or infinity on deadlock or as soon as the step must
    exceed `cutoff`.

    Also gives up if the pace after a lap exceeds `pace_limit` (infinite: never). Everything that a decision reads is
    kept in one row per stage, which is updated only when something about that stage changes.
    """
    inf = np.inf
    if work_bound(p, st, sc) > cutoff or not price(p, st, sc):
        return inf
    set_up(p, st, keys, sc)
    num, mine, seq, ends = sc.num, sc.mine, sc.seq, sc.end
    ranks = p.count[RANKS]
    at_rank = num.shape[0] - ranks - 1
    total = 3 * st[SIZE, 0] * p.count[MICRO_BATCHES]
    remaining = total
    lap = 0
    sc.pace[:] = inf
    check = total - total // LAPS
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
            if not keeps_pace(p, pace_limit, lap, t, sc):
                return inf
            lap += 1
            check = total - total * (lap + 1) // LAPS if lap < LAPS - 1 else -1
        me = at_rank + r
        k, kind, next_at = choose(p, st, keys, r, t, sc)
        if k == NONE:
            mine[r, CLOCK] = next_at
            num[me, IDLE] = 1
            mine[r, FREE] = t
            continue
        s = num[k, NUM_STAGE]
        if kind == KIND_F:
            m, end = run_forward(p, st, keys, r, k, t, sc)
        elif kind == KIND_I:
            m, end = run_input_gradient(p, st, keys, r, k, t, sc)
        elif kind == KIND_W:
            m, end = run_weight_gradient(p, st, r, k, t, sc)
        else:
            m, end = run_again(p, st, r, k, t, sc)
        if kind != KIND_R:
            remaining -= 1
        n = num[me, DONE]
        seq[r, n] = pack(kind, s, m)
        ends[r, n] = end
        num[me, DONE] = n + 1
        mine[r, CLOCK] = end
        mine[r, FREE] = end
        num[me, IDLE] = 0
    last_end = 0.0
    for q in range(ranks):
        sc.place[LENGTH, q] = num[at_rank + q, DONE]
        if mine[q, FREE] > last_end:
            last_end = mine[q, FREE]
            sc.place[LENGTH, ranks] = q
    if p.count[HAS_EXTRAS] > 0:
        last_end = max(last_end, extras_end(p, st, sc))
    return last_end


@njit
def keeps_pace(p, pace_limit, lap, t, sc):  # type: ignore[no-untyped-def]
    """Record the pace after this lap, which is the sum over ranks of the times at which they would finish if none of
    them waited any more, and return whether it is within the limit for this lap."""
    projected = 0.0
    for q in range(p.count[RANKS]):
        projected += max(sc.mine[q, FREE], t) + sc.mine[q, LEFT]
    sc.pace[lap] = projected
    return projected <= pace_limit[lap]


@njit
def choose(p, st, keys, r, t, sc):  # type: ignore[no-untyped-def]
    """What a rank runs at time t: its slot (NONE if it waits), the kind of the op, and until when it waits."""
    row, num, mine, cost, inf = sc.row, sc.num, sc.mine, sc.price, np.inf
    bank, look, over = keys[BANK], keys[LOOK] * p.number[UNIT], keys[W_OVER] * p.number[UNIT]
    me, vary, v = num.shape[0] - p.count[RANKS] - 1 + r, p.count[VARIANTS] > 1, 0
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
        # In a gap: the longest W that fits before the next arrival, otherwise the one that overruns least (if no
        # arrival is known: of the stage with the fewest W so far). If the best F lacks memory: the W that frees most.
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
    return chosen, kind, next_at


@njit
def wake(sc, r, q, at_rank, at):  # type: ignore[no-untyped-def]
    """Let a waiting rank decide again when something from another rank arrives."""
    if q != r and sc.num[at_rank + q, IDLE] == 1:
        sc.mine[q, CLOCK] = min(sc.mine[q, CLOCK], max(at, sc.mine[q, FREE]))


@njit
def run_forward(p, st, keys, r, k, t, sc):  # type: ignore[no-untyped-def]
    """Run the next F of a slot; returns its micro-batch and its end."""
    slope_f = keys[A_F]
    row, num, mine, cost, arrive, inf = sc.row, sc.num, sc.mine, sc.price, sc.arrive, np.inf
    M, stages = p.count[MICRO_BATCHES], st[SIZE, 0]
    at_rank = num.shape[0] - p.count[RANKS] - 1
    vary, buffers = p.count[VARIANTS] > 1, p.count[HAS_BUFFERS] > 0
    s, me, v = num[k, NUM_STAGE], at_rank + r, 0
    begin = num[me, SLOTS_FROM]
    m = num[k, NEXT_F]
    end = t + row[k, ROW_F_MS]
    mine[r, LEFT] -= row[k, ROW_F_MS]
    mine[r, WAY] -= row[k, ROW_F_MS]
    mine[r, USED] += row[k, ROW_HOLD]
    mine[r, OWED] += row[k, ROW_LATER] if k == begin else -row[k, ROW_HOLD]
    num[k, NEXT_F] = m + 1
    if vary:
        v = st[ENTRY, m]
    if s + 1 < stages:
        q = num[k, RANK_AFTER]
        at = hand_on(arrive, FOR_F, s + 1, m, sc.channel, r, q, end, cost[HOP_F, s, v])
        wake(sc, r, q, at_rank, at)
        j = num[k, AFTER]
        if num[j, NEXT_F] == m and m - num[j, NEXT_I] < num[j, NUM_FLIGHT]:
            row[j, ROW_AT_F] = at
        if buffers:
            mine[q, USED] += p.layer[BOUNDARY, v, st[BOUNDS, s + 1]]
    else:
        arrive[FOR_I, s, m] = end
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
            row[k, ROW_AT_F] = arrive[FOR_F, s, following]
    return m, end


@njit
def run_input_gradient(p, st, keys, r, k, t, sc):  # type: ignore[no-untyped-def]
    """Run the next I of a slot, preceded by the R that it needs if that has not run; returns its micro-batch and its
    end."""
    slope_i = keys[A_I]
    row, num, mine, cost, arrive, inf = sc.row, sc.num, sc.mine, sc.price, sc.arrive, np.inf
    M, stages = p.count[MICRO_BATCHES], st[SIZE, 0]
    at_rank = num.shape[0] - p.count[RANKS] - 1
    vary, buffers = p.count[VARIANTS] > 1, p.count[HAS_BUFFERS] > 0
    s, me, v = num[k, NUM_STAGE], at_rank + r, 0
    begin = num[me, SLOTS_FROM]
    seq, ends, n = sc.seq, sc.end, num[me, DONE]
    m = num[k, NEXT_I]
    if vary:
        v = st[ENTRY, m]
    if st[REDO, s] and num[k, NEXT_R] == m:
        # Insert R right before its I, unless the rank's last op was the F of this stage and micro-batch.
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
    if s > 0:
        q = num[k, RANK_BEFORE]
        at = hand_on(arrive, FOR_I, s - 1, m, sc.channel, r, q, end, cost[HOP_I, s, v])
        wake(sc, r, q, at_rank, at)
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
            row[k, ROW_AT_I] = arrive[FOR_I, s, following]
    # One micro-batch less between F and I: the next F may have waited for that.
    following = num[k, NEXT_F]
    if following < M and following - (m + 1) < num[k, NUM_FLIGHT]:
        row[k, ROW_AT_F] = arrive[FOR_F, s, following]
    num[me, DONE] = n
    return m, end


@njit
def run_weight_gradient(p, st, r, k, t, sc):  # type: ignore[no-untyped-def]
    """Run the next W of a slot; returns its micro-batch and its end."""
    row, num, mine, cost = sc.row, sc.num, sc.mine, sc.price
    M, vary = p.count[MICRO_BATCHES], p.count[VARIANTS] > 1
    s, me = num[k, NUM_STAGE], num.shape[0] - p.count[RANKS] - 1 + r
    m = num[k, NEXT_W]
    end = t + row[k, ROW_W_MS]
    mine[r, LEFT] -= row[k, ROW_W_MS]
    mine[r, USED] -= row[k, ROW_TAIL]
    num[k, NEXT_W] = m + 1
    num[me, PENDING] -= 1
    sc.done[s] = end
    if vary and m + 1 < M:
        v = st[ENTRY, m + 1]
        row[k, ROW_W_MS] = cost[W_MS, s, v]
        row[k, ROW_TAIL] = cost[TAIL, s, v]
    return m, end


@njit
def run_again(p, st, r, k, t, sc):  # type: ignore[no-untyped-def]
    """Run the next R of a slot; returns its micro-batch and its end."""
    num, mine, cost, stages = sc.num, sc.mine, sc.price, st[SIZE, 0]
    s, v, vary = num[k, NUM_STAGE], 0, p.count[VARIANTS] > 1
    m = num[k, NEXT_R]
    if vary:
        v = st[ENTRY, m]
    end = t + cost[F_MS, s, v]
    if s + 1 < stages:
        mine[r, LEFT] -= cost[F_MS, s, v]
    mine[r, USED] += cost[FULL, s, v] - cost[HOLD, s, v]
    num[k, NEXT_R] = m + 1
    return m, end
