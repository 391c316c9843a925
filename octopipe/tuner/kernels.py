"""The tuner's inner loop, compiled with numba: a list scheduler over stages of consecutive layers.

Knows: arrays of layer costs (`Problem`), a structure (stage boundaries, ranks, recomputation) and priorities;
turns them into an order per rank and its makespan. Does not know: plans, searches or words.

Timing is that of the simulator under directed channels: a rank runs one op at a time, a tensor for another
rank waits for the queue of its direction and then takes its transfer time. `schedule` builds orders in time
order, so at every decision it knows exactly what has arrived and what is in flight.

Rules of the list scheduler:
- of a stage, micro-batches go first in, first out (in the searched `entry` order, where they differ in size);
- a rank runs the ready F or I with the smallest key; it may wait a little (`LOOK`) for a better one in flight;
- a stage keeps at most `flight` micro-batches between their F and their I;
- F starts only if its activation fits beside a reserve for the later stages of its rank, so that the oldest
  micro-batch can always drain; a circle of waiting that remains is reported as an infinite makespan;
- W, and R of stages that recompute, fill what is left; a W with a key competes with F and I.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from octopipe.cost import CostTable
from octopipe.errors import OctoPipeError

# Positions in the vector of searched numbers. Times are in units of a rank's mean work per micro-batch.
A_F, B_F, A_I, B_I, C_I, LOOK, RHO, W_OVER, C_W, BANK, NUM_GLOBALS = range(11)
"""Key of F: A_F * m + B_F * (share of the forward chain before the stage) + offsets.
Key of I: C_I + A_I * m + B_I * (share of the backward chain before it) + offsets. Key of W: C_W + m + offset;
from NEVER on a W only fills gaps.
RHO: share of the later stages' activations of one micro-batch kept free; BANK: the same for every micro-batch
that is on its way through the rank. W_OVER: how far a W may run into a known arrival."""

NEVER = 1e6
"""From here on a W has no key."""
KIND_F, KIND_R, KIND_I, KIND_W = 0, 1, 2, 3
"""As plan.KINDS."""
KIND_BITS, STAGE_BITS, MASK = 28, 14, (1 << 14) - 1
"""An op packed into 32 bits: kind << 28 | stage << 14 | micro-batch."""
LAPS = 10
"""A schedule's pace is read after every tenth of its ops."""
ZERO: Any = np.uint64(0)
ONE: Any = np.uint64(1)
NONE: Any = np.uint64(1 << 62)

AT_F, KEY_F, F_MS, HOLD, RESERVE, AT_I, KEY_I, I_MS, FREED, W_MS, TAIL, LATER, BASE_F, BASE_I, KEY_W = range(15)
"""Columns of `Scratch.row`: when the next F can start (infinite: not yet), its key, time and memory, what must stay
free beside it; the same of the next I and W; what the rank's later stages hold of one micro-batch; keys' common
part; key of the next W (infinite while there is none)."""
STAGE, NEXT_F, NEXT_I, NEXT_W, NEXT_R, FLIGHT, BEFORE, AFTER, RANK_BEFORE, RANK_AFTER = range(10)
"""Columns of `Scratch.num`: the stage, the micro-batch that is next, the neighbours' slots and ranks."""
FREE, USED, LEFT, OWED, LIMIT, WAY = range(6)
"""Columns of `Scratch.mine`: since when the rank is free, bytes in use, work left, bytes that micro-batches on their
way through the rank will still take, most bytes, F and I left plus the way of the last gradient back to stage 0."""
FIRST, LENGTH, PENDING, IDLE = range(4)
"""Columns of `Scratch.tally`: first slot, ops so far, W that could run, whether it waits."""

ANY_PACE = np.full(LAPS, np.inf)


class Problem(NamedTuple):
    """Everything about model, ranks and micro-batches, as arrays. V is 1, or M where micro-batches differ."""

    num_ranks: int
    num_micro_batches: int
    num_layers: int
    variants: int
    forward: Any
    """[V, L+1]: prefix sums of forward times; input, weight, activation, stash likewise."""
    input: Any
    weight: Any
    activation: Any
    stash: Any
    boundary: Any
    """[V, L+1]: bytes of the tensor that enters layer l (0 for the first)."""
    static: Any
    """[L+1]: prefix sums of weights, gradients and optimizer state; optimizer and gradient likewise."""
    optimizer: Any
    gradient: Any
    workspace: Any
    """[L]"""
    slow: Any
    """[R]: compute-time factor."""
    capacity: Any
    """[R]: bytes; infinite without a limit."""
    latency: Any
    """[R, R] in ms; per_byte likewise."""
    per_byte: Any
    total: Any
    """[L+1]: prefix sums of the work of all micro-batches; `again` of their forwards alone."""
    again: Any
    fastest: Any
    """[L+1]: prefix sums of the smallest micro-batch's forward times."""
    unit: float
    """Mean work of a rank per micro-batch: the unit of keys, lookahead and overrun."""
    reduce_latency: float
    reduce_per_byte: float
    has_extras: bool
    has_limit: bool
    has_buffers: bool


def make_problem(costs: CostTable, num_ranks: int, num_micro_batches: int) -> Problem:
    """The arrays of a setting."""
    layers = costs.num_layers
    if max(num_micro_batches, layers) > MASK:
        raise OctoPipeError(
            f"{num_micro_batches} micro-batches over {layers} layers; the tuner takes at most {MASK} of either"
        )
    factor = costs.micro_batch_factor
    size = np.ones((1, layers)) if factor is None else factor[:num_micro_batches]

    def prefix(values: Any) -> Any:
        rows = size * values
        return np.concatenate((np.zeros((rows.shape[0], 1)), np.cumsum(rows, axis=1)), axis=1)

    def once(values: Any) -> Any:
        return np.concatenate(([0.0], np.cumsum(values)))

    slow = np.array([costs.slowdown(r) for r in range(num_ranks)])
    capacity = np.array([costs.capacity_bytes(r) for r in range(num_ranks)])
    latency, per_byte = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for a in range(num_ranks):
        for b in range(num_ranks):
            if a != b:
                link = costs.network.link(a, b)
                latency[a, b], per_byte[a, b] = link.latency_ms, link.ms_per_byte
    times = size.sum(axis=0) * costs.layer_ms * (num_micro_batches if factor is None else 1)
    boundary = np.concatenate((np.zeros((size.shape[0], 1)), size * costs.boundary_bytes), axis=1)
    dp = costs.data_parallel
    reduces = dp > 1 and bool(costs.gradient_bytes.any())
    return Problem(
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        num_layers=layers,
        variants=size.shape[0],
        forward=prefix(costs.forward_ms),
        input=prefix(costs.input_ms),
        weight=prefix(costs.weight_ms),
        activation=prefix(costs.activation_bytes),
        stash=prefix(costs.stash_bytes),
        boundary=boundary,
        static=once(costs.static_bytes),
        optimizer=once(costs.optimizer_ms),
        gradient=once(costs.gradient_bytes),
        workspace=np.array(costs.workspace_bytes),
        slow=slow,
        capacity=capacity,
        latency=latency,
        per_byte=per_byte,
        total=once(times),
        again=once(size.sum(axis=0) * costs.forward_ms * (num_micro_batches if factor is None else 1)),
        fastest=once(size.min(axis=0) * costs.forward_ms),
        unit=max(float(times.sum()) / float((1.0 / slow).sum()) / num_micro_batches, 1e-9),
        reduce_latency=2 * int(np.ceil(np.log2(dp))) * costs.reduction.latency_ms if reduces else 0.0,
        reduce_per_byte=2 * (dp - 1) / dp * costs.reduction.ms_per_byte if reduces else 0.0,
        has_extras=reduces or bool(costs.optimizer_ms.any()),
        has_limit=bool(np.isfinite(capacity).any()),
        has_buffers=bool(np.isfinite(capacity).any() and costs.boundary_bytes.any()),
    )


class Scratch(NamedTuple):
    """Working memory of `schedule`, made once per worker. `seq` and `length` hold the orders it built."""

    f_ms: Any
    i_ms: Any
    w_ms: Any
    hop_f: Any
    hop_i: Any
    hold: Any
    """[S, V]: bytes F takes; `full` the whole activation, `tail` what stays from I until W."""
    full: Any
    tail: Any
    row: Any
    """[slot, 15]: what a decision reads of a stage's next ops; slots are stages sorted by rank."""
    num: Any
    """[slot, 10]: the same in whole numbers."""
    mine: Any
    """[R, 6]: a rank's time and memory; tally the same in whole numbers, with a row for the end."""
    tally: Any
    slot_of: Any
    arrive_f: Any
    """[S, M]: when the input (arrive_i: the gradient) is there; infinite while unknown."""
    arrive_i: Any
    on_rank: Any
    """[R, S]: the rank's stages in chain order."""
    count: Any
    """[R + 1]: how many those are; at the end, the rank that finished last."""
    clock: Any
    """[R]: when the rank decides next."""
    free: Any
    used: Any
    left: Any
    channel: Any
    limit: Any
    done: Any
    seq: Any
    """[R, ops]: kind, stage and micro-batch, packed."""
    length: Any
    end: Any
    """[R, ops]: when each op of seq ends."""
    pace: Any
    """[LAPS]: after each lap, the sum over ranks of their times if none idled any more; infinite where it did not get
    that far."""


def make_scratch(problem: Problem, max_stages: int) -> Scratch:
    s, m, r, v = max_stages, problem.num_micro_batches, problem.num_ranks, problem.variants
    ints = np.int32
    return Scratch(  # type: ignore[call-arg]  # mypy cannot count what the generator gives
        *(np.zeros((s, v)) for _ in range(8)),
        np.zeros((s, 15)),
        np.zeros((s, 10), np.uint64),
        np.zeros((r, 6)),
        np.zeros((r + 1, 4), np.uint64),
        np.zeros(s, np.uint64),
        np.zeros((s, m)),
        np.zeros((s, m)),
        np.zeros((r, s), ints),
        np.zeros(r + 1, ints),
        *(np.zeros(r) for _ in range(4)),
        np.zeros((r, r)),
        np.zeros(r),
        np.zeros(s),
        np.zeros((r, 4 * s * m), ints),
        np.zeros(r, ints),
        np.zeros((r, 4 * s * m)),
        np.zeros(LAPS),
    )


@njit(cache=True, nogil=True)
def price(p, stages, bounds, rank, recompute, margin, sc):  # type: ignore[no-untyped-def]
    """Fill the scratch's per-stage prices. False when static memory alone does not fit."""
    for r in range(p.num_ranks):
        sc.count[r] = 0
        sc.used[r] = margin[r]
        sc.left[r] = 0.0
        sc.limit[r] = p.capacity[r]
    for s in range(stages):
        a, z, r = bounds[s], bounds[s + 1], rank[s]
        sc.on_rank[r, sc.count[r]] = s
        sc.count[r] += 1
        sc.used[r] += p.static[z] - p.static[a]
        sc.left[r] += (p.total[z] - p.total[a]) * p.slow[r]
        work = 0.0
        for l in range(a, z):
            if p.workspace[l] > work:
                work = p.workspace[l]
        if p.capacity[r] - work < sc.limit[r]:
            sc.limit[r] = p.capacity[r] - work
        after = rank[s + 1] if s + 1 < stages else r
        before = rank[s - 1] if s > 0 else r
        for v in range(p.variants):
            sc.f_ms[s, v] = (p.forward[v, z] - p.forward[v, a]) * p.slow[r]
            sc.i_ms[s, v] = (p.input[v, z] - p.input[v, a]) * p.slow[r]
            sc.w_ms[s, v] = (p.weight[v, z] - p.weight[v, a]) * p.slow[r]
            sc.hop_f[s, v] = 0.0
            sc.hop_i[s, v] = 0.0
            if after != r:
                sc.hop_f[s, v] = p.latency[r, after] + p.boundary[v, z] * p.per_byte[r, after]
            if before != r:
                sc.hop_i[s, v] = p.latency[r, before] + p.boundary[v, a] * p.per_byte[r, before]
            sc.full[s, v] = p.activation[v, z] - p.activation[v, a]
            sc.tail[s, v] = p.stash[v, z] - p.stash[v, a]
            sc.hold[s, v] = sc.full[s, v]
            if recompute[s]:
                sc.hold[s, v] = min(p.boundary[v, a], sc.full[s, v])
        if recompute[s] and s + 1 < stages:
            sc.left[r] += (p.again[z] - p.again[a]) * p.slow[r]
    if p.has_extras:
        for s in range(stages):
            sc.left[rank[s]] += (p.optimizer[bounds[s + 1]] - p.optimizer[bounds[s]]) * p.slow[rank[s]]
    for r in range(p.num_ranks):
        if sc.used[r] > sc.limit[r]:
            return False
    return True


@njit(cache=True, nogil=True)
def quick_bound(p, stages, bounds, rank, recompute, seen):  # type: ignore[no-untyped-def]
    """max over ranks of (arrival of the first micro-batch + the rank's work): no order can beat it."""
    hop = 0.0
    fill = 0.0
    worst = 0.0
    for r in range(p.num_ranks):
        seen[r] = -1.0
    for s in range(stages):
        r = rank[s]
        a, z = bounds[s], bounds[s + 1]
        if seen[r] < 0.0:
            seen[r] = fill + hop
        seen[r] += (p.total[z] - p.total[a] + p.optimizer[z] - p.optimizer[a]) * p.slow[r]
        if recompute[s] and s + 1 < stages:
            # The last stage may run I right after F and skip R; no other can.
            seen[r] += (p.again[z] - p.again[a]) * p.slow[r]
        fill += (p.fastest[z] - p.fastest[a]) * p.slow[r]
        if s + 1 < stages and rank[s + 1] != r:
            hop += p.latency[r, rank[s + 1]]
    for r in range(p.num_ranks):
        if seen[r] > worst:
            worst = seen[r]
    return worst


@njit(cache=True, nogil=True)
def schedule(p, stages, bounds, rank, recompute, flight, entry, glob, offset, wiggle, margin, cutoff, pace_limit, sc):  # type: ignore[no-untyped-def]
    """Build orders and return their step time; infinite on deadlock or as soon as it must exceed `cutoff`.

    `pace_limit`: give up as well where the pace after a lap is beyond this (infinite: never).

    What a decision reads stands together in one row per stage, rows sorted by rank, and is renewed only when something
    about that stage has changed. Indices are unsigned: numba then need not ask whether they count from the end.
    """
    inf = np.inf
    if not price(p, stages, bounds, rank, recompute, margin, sc):
        return inf
    ranks, M, num_stages = np.uint64(p.num_ranks), np.uint64(p.num_micro_batches), np.uint64(stages)
    row, num, clock, mine, tally = sc.row, sc.num, sc.clock, sc.mine, sc.tally
    arrive_f, arrive_i, seq, ends = sc.arrive_f, sc.arrive_i, sc.seq, sc.end
    vary = p.variants > 1
    buffers = p.has_buffers
    slope_f, slope_i = glob[A_F], glob[A_I]
    _rows(p, stages, bounds, rank, recompute, flight, entry, glob, offset, wiggle, sc)
    total = 3 * stages * p.num_micro_batches
    remaining = total
    lap = ZERO
    sc.pace[:] = inf
    check = remaining_at(lap, total)
    look = glob[LOOK] * p.unit
    over = glob[W_OVER] * p.unit
    bank = glob[BANK]
    eager_w = glob[C_W] < NEVER
    v = ZERO
    while remaining > 0:
        r = ZERO
        t = clock[ZERO]
        for q in range(ONE, ranks):
            if clock[q] < t:
                t = clock[q]
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
            lap += ONE
            check = remaining_at(lap, total)
        # -- look at the rank's candidates
        ready_key, ready, kind = inf, NONE, 0
        blocked_key = inf
        soon_key, soon_at = inf, inf
        next_at = inf
        room = mine[r, LIMIT] - mine[r, USED]
        begin, stop = tally[r, FIRST], tally[r + ONE, FIRST]
        w_key, w_slot = inf, NONE
        if eager_w and tally[r, PENDING] > ZERO:
            for k in range(begin, stop):
                if row[k, KEY_W] < w_key:
                    w_key, w_slot = row[k, KEY_W], k
        for k in range(begin, stop):
            at = row[k, AT_F]
            if at < inf:
                need, kept, key = row[k, HOLD], row[k, RESERVE], row[k, KEY_F]
                if bank > 0.0:
                    kept = max(kept, bank * (mine[r, OWED] + (row[k, LATER] if k == begin else -need)))
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
            at = row[k, AT_I]
            if at < inf:
                key = row[k, KEY_I]
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
        if chosen != NONE and blocked_key < ready_key and tally[r, PENDING] > ZERO:
            # The F this rank wants next lacks memory: make room for it.
            most = -1.0
            for k in range(begin, stop):
                if num[k, NEXT_W] < num[k, NEXT_I] and row[k, TAIL] > most:
                    most, chosen, kind = row[k, TAIL], k, KIND_W
        elif chosen != NONE and w_key < ready_key:
            chosen, kind = w_slot, KIND_W
        if chosen == NONE:
            # -- a gap: the longest W (or R) that fits before the next arrival, else the one that overruns least
            best = -inf
            gap = next_at - t
            if tally[r, PENDING] > ZERO:
                for k in range(begin, stop):
                    if num[k, NEXT_W] < num[k, NEXT_I]:
                        ms = row[k, W_MS]
                        if gap == inf:
                            score = -np.float64(num[k, NEXT_W]) - offset[2, num[k, STAGE]]
                        elif ms <= gap + 1e-9:
                            score = ms
                        elif ms <= gap + over:
                            score = gap - ms
                        else:
                            continue
                        if score > best:
                            best, chosen, kind = score, k, KIND_W
            for k in range(begin, stop):
                m = num[k, NEXT_R]
                if m < num[k, NEXT_F] and m == num[k, NEXT_I] and recompute[num[k, STAGE]]:
                    s = num[k, STAGE]
                    if vary:
                        v = np.uint64(entry[m])
                    ms = sc.f_ms[s, v]
                    if ms <= gap and sc.full[s, v] - sc.hold[s, v] <= room and ms > best:
                        best, chosen, kind = ms, k, KIND_R
            if chosen == NONE:
                clock[r] = next_at
                tally[r, IDLE] = ONE
                mine[r, FREE] = t
                continue
        # -- run it
        k = chosen
        s = num[k, STAGE]
        n = tally[r, LENGTH]
        if kind == KIND_F:
            m = num[k, NEXT_F]
            ms = row[k, F_MS]
            end = t + ms
            mine[r, LEFT] -= ms
            mine[r, WAY] -= ms
            mine[r, USED] += row[k, HOLD]
            mine[r, OWED] += row[k, LATER] if k == begin else -row[k, HOLD]
            num[k, NEXT_F] = m + ONE
            remaining -= 1
            if vary:
                v = np.uint64(entry[m])
            if s + ONE < num_stages:
                q = num[k, RANK_AFTER]
                at = end
                if q != r:
                    at = max(at, sc.channel[r, q]) + sc.hop_f[s, v]
                    sc.channel[r, q] = at
                    if tally[q, IDLE] == ONE:
                        clock[q] = min(clock[q], max(at, mine[q, FREE]))
                arrive_f[s + ONE, m] = at
                j = num[k, AFTER]
                if num[j, NEXT_F] == m and m - num[j, NEXT_I] < num[j, FLIGHT]:
                    row[j, AT_F] = at
                if buffers:
                    mine[q, USED] += p.boundary[v, bounds[s + ONE]]
            else:
                arrive_i[s, m] = end
                if num[k, NEXT_I] == m:
                    row[k, AT_I] = end
            if buffers:
                mine[r, USED] -= p.boundary[v, bounds[s]]
            row[k, AT_F] = inf
            following = m + ONE
            if following < M:
                row[k, KEY_F] = row[k, BASE_F] + slope_f * following + wiggle[0, s, following]
                if vary:
                    v = np.uint64(entry[following])
                    row[k, F_MS] = sc.f_ms[s, v]
                    row[k, HOLD] = sc.hold[s, v]
                if following - num[k, NEXT_I] < num[k, FLIGHT]:
                    row[k, AT_F] = arrive_f[s, following]
        elif kind == KIND_I:
            m = num[k, NEXT_I]
            if vary:
                v = np.uint64(entry[m])
            if recompute[s] and num[k, NEXT_R] == m:
                # R right before its I, unless the forward was the very last thing this rank ran.
                last = np.int64(seq[r, n - ONE]) if n > ZERO else -1
                if last != pack(KIND_F, s, m):
                    seq[r, n] = pack(KIND_R, s, m)
                    t += sc.f_ms[s, v]
                    ends[r, n] = t
                    n += ONE
                    if s + ONE < num_stages:
                        mine[r, LEFT] -= sc.f_ms[s, v]
                mine[r, USED] += sc.full[s, v] - sc.hold[s, v]
                num[k, NEXT_R] += ONE
            ms = row[k, I_MS]
            end = t + ms
            mine[r, LEFT] -= ms
            mine[r, WAY] -= ms
            mine[r, USED] -= row[k, FREED]
            num[k, NEXT_I] = m + ONE
            if eager_w and num[k, NEXT_W] == m:
                row[k, KEY_W] = glob[C_W] + m + offset[2, s]
            tally[r, PENDING] += ONE
            remaining -= 1
            if s > ZERO:
                q = num[k, RANK_BEFORE]
                at = end
                if q != r:
                    at = max(at, sc.channel[r, q]) + sc.hop_i[s, v]
                    sc.channel[r, q] = at
                    if tally[q, IDLE] == ONE:
                        clock[q] = min(clock[q], max(at, mine[q, FREE]))
                arrive_i[s - ONE, m] = at
                j = num[k, BEFORE]
                if num[j, NEXT_I] == m:
                    row[j, AT_I] = at
                if buffers:
                    mine[q, USED] += p.boundary[v, bounds[s]]
            if buffers and s + ONE < num_stages:
                mine[r, USED] -= p.boundary[v, bounds[s + ONE]]
            row[k, AT_I] = inf
            following = m + ONE
            if following == M and k == begin:
                mine[r, WAY] = -inf
            if following < M:
                row[k, KEY_I] = row[k, BASE_I] + slope_i * following + wiggle[1, s, following]
                if vary:
                    v = np.uint64(entry[following])
                    row[k, I_MS] = sc.i_ms[s, v]
                    row[k, FREED] = sc.full[s, v] - sc.tail[s, v]
                if following < num[k, NEXT_F]:
                    row[k, AT_I] = arrive_i[s, following]
            # One micro-batch less between F and I: the next F may have waited for that.
            following = num[k, NEXT_F]
            if following < M and following - (m + ONE) < num[k, FLIGHT]:
                row[k, AT_F] = arrive_f[s, following]
        elif kind == KIND_W:
            m = num[k, NEXT_W]
            ms = row[k, W_MS]
            end = t + ms
            mine[r, LEFT] -= ms
            mine[r, USED] -= row[k, TAIL]
            num[k, NEXT_W] = m + ONE
            tally[r, PENDING] -= ONE
            remaining -= 1
            if eager_w:
                following = m + ONE
                row[k, KEY_W] = inf
                if following < num[k, NEXT_I]:
                    row[k, KEY_W] = glob[C_W] + following + offset[2, s]
            if m + ONE == M:
                sc.done[s] = end
            elif vary:
                v = np.uint64(entry[m + ONE])
                row[k, W_MS] = sc.w_ms[s, v]
                row[k, TAIL] = sc.tail[s, v]
        else:
            m = num[k, NEXT_R]
            if vary:
                v = np.uint64(entry[m])
            end = t + sc.f_ms[s, v]
            if s + ONE < num_stages:
                mine[r, LEFT] -= sc.f_ms[s, v]
            mine[r, USED] += sc.full[s, v] - sc.hold[s, v]
            num[k, NEXT_R] = m + ONE
        seq[r, n] = pack(kind, s, m)
        ends[r, n] = end
        tally[r, LENGTH] = n + ONE
        clock[r] = end
        mine[r, FREE] = end
        tally[r, IDLE] = ZERO
    last_end = 0.0
    for r in range(ranks):
        n = tally[r, LENGTH]
        sc.length[r] = n
        if n > ZERO and ends[r, n - ONE] > last_end:
            last_end = ends[r, n - ONE]
            sc.count[ranks] = r
    if p.has_extras:
        last_end = max(last_end, extras_end(p, stages, bounds, rank, sc))
    return last_end


@njit(cache=True, nogil=True)
def remaining_at(lap, total):  # type: ignore[no-untyped-def]
    """How many ops remain at the end of a lap; -1 after the last."""
    return total - total * (np.int64(lap) + 1) // LAPS if lap < LAPS - 1 else -1


@njit(cache=True, nogil=True)
def pack(kind, s, m):  # type: ignore[no-untyped-def]
    return (np.int64(kind) << KIND_BITS) | (np.int64(s) << STAGE_BITS) | np.int64(m)


@njit(cache=True, nogil=True)
def _rows(p, stages, bounds, rank, recompute, flight, entry, glob, offset, wiggle, sc):  # type: ignore[no-untyped-def]
    """Set up the rows of stages and ranks for `schedule`, after `price`."""
    ranks, M, inf = p.num_ranks, p.num_micro_batches, np.inf
    row, num, mine, tally = sc.row, sc.num, sc.mine, sc.tally
    whole_f = max(p.forward[0, p.num_layers], 1e-12)
    whole_i = max(p.input[0, p.num_layers], 1e-12)
    v = entry[0] if p.variants > 1 else 0
    k = 0
    for r in range(ranks):
        sc.clock[r] = 0.0
        for q in range(ranks):
            sc.channel[r, q] = 0.0
        tally[r, FIRST] = k
        tally[r, LENGTH] = 0
        tally[r, PENDING] = 0
        tally[r, IDLE] = 1
        k += sc.count[r]
        later = 0.0
        again = 0.0
        for i in range(sc.count[r] - 1, -1, -1):
            s = sc.on_rank[r, i]
            at = tally[r, FIRST] + np.uint64(i)
            sc.slot_of[s] = at
            num[at, STAGE] = s
            row[at, LATER] = later
            row[at, RESERVE] = later * glob[RHO]
            most = 0.0
            for w in range(p.variants):
                most = max(most, sc.hold[s, w])
                again = max(again, sc.full[s, w] - sc.hold[s, w])
            later += most
        mine[r, FREE] = 0.0
        mine[r, USED] = sc.used[r]
        mine[r, LEFT] = sc.left[r]
        mine[r, OWED] = 0.0
        # A rank that recomputes must always be able to restore its hungriest stage.
        mine[r, LIMIT] = sc.limit[r] - again
    tally[ranks, FIRST] = k
    for s in range(stages):
        at = sc.slot_of[s]
        num[at, NEXT_F] = 0
        num[at, NEXT_I] = 0
        num[at, NEXT_W] = 0
        num[at, NEXT_R] = 0
        num[at, FLIGHT] = flight[s]
        num[at, BEFORE] = sc.slot_of[max(s - 1, 0)]
        num[at, AFTER] = sc.slot_of[min(s + 1, stages - 1)]
        num[at, RANK_BEFORE] = rank[max(s - 1, 0)]
        num[at, RANK_AFTER] = rank[min(s + 1, stages - 1)]
        row[at, AT_F] = inf
        row[at, AT_I] = inf
        row[at, KEY_W] = inf
        row[at, BASE_F] = glob[B_F] * p.forward[0, bounds[s]] / whole_f + offset[0, s]
        row[at, BASE_I] = glob[C_I] + glob[B_I] * (1.0 - p.input[0, bounds[s + 1]] / whole_i) + offset[1, s]
        row[at, KEY_F] = row[at, BASE_F] + wiggle[0, s, 0]
        row[at, KEY_I] = row[at, BASE_I] + wiggle[1, s, 0]
        row[at, F_MS] = sc.f_ms[s, v]
        row[at, I_MS] = sc.i_ms[s, v]
        row[at, W_MS] = sc.w_ms[s, v]
        row[at, HOLD] = sc.hold[s, v]
        row[at, TAIL] = sc.tail[s, v]
        row[at, FREED] = sc.full[s, v] - sc.tail[s, v]
        for m in range(M):
            sc.arrive_f[s, m] = inf
            sc.arrive_i[s, m] = inf
    for m in range(M):
        sc.arrive_f[0, m] = 0.0
    row[sc.slot_of[0], AT_F] = 0.0
    # The last gradient of a rank's lowest stage must still pass the stages below; the last W of stage 0 follows it.
    for r in range(ranks):
        mine[r, WAY] = 0.0
    back = 0.0
    for s in range(stages):
        r = rank[s]
        if p.variants == 1:
            if s == sc.on_rank[r, 0]:
                mine[r, WAY] += back + sc.hop_i[s, 0]
            back += sc.i_ms[s, 0] + (sc.hop_i[s, 0] if s > 0 else sc.w_ms[0, 0])
            mine[r, WAY] += M * (sc.f_ms[s, 0] + sc.i_ms[s, 0])


@njit(cache=True, nogil=True)
def extras_end(p, stages, bounds, rank, sc):  # type: ignore[no-untyped-def]
    """When the last reduction and optimizer update end, given each stage's last W in sc.done."""
    latest = 0.0
    for r in range(p.num_ranks):
        clock = 0.0
        finished = 0.0
        update = 0.0
        # Stages in the order in which they finish; a rank has few, so selection is cheap.
        before = -1.0
        handled = 0
        while handled < sc.count[r]:
            nearest = np.inf
            for k in range(sc.count[r]):
                s = sc.on_rank[r, k]
                if sc.done[s] > before and sc.done[s] < nearest:
                    nearest = sc.done[s]
            if nearest == np.inf:
                break
            for k in range(sc.count[r]):
                s = sc.on_rank[r, k]
                if sc.done[s] == nearest:
                    handled += 1
                    moved = p.gradient[bounds[s + 1]] - p.gradient[bounds[s]]
                    if moved > 0.0 and (p.reduce_per_byte > 0.0 or p.reduce_latency > 0.0):
                        clock = max(clock, nearest) + p.reduce_latency + moved * p.reduce_per_byte
                    update += p.optimizer[bounds[s + 1]] - p.optimizer[bounds[s]]
            finished = nearest
            before = nearest
        latest = max(latest, max(clock, finished) + update * p.slow[r])
    return latest
