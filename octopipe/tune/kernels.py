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
- W, and R of stages that recompute, fill what is left.
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
Key of I: C_I + A_I * m + B_I * (share of the backward chain before it) + offsets. Key of W: C_W + m + offset.
RHO: share of the later stages' activations of one micro-batch kept free; BANK: the same for every micro-batch
that is on its way through the rank. W_OVER: how far a W may run into a known arrival."""

KIND_F, KIND_R, KIND_I, KIND_W = 0, 1, 2, 3
"""As plan.KINDS."""
KIND_BITS, STAGE_BITS, MASK = 28, 14, (1 << 14) - 1
"""An op packed into 32 bits: kind << 28 | stage << 14 | micro-batch."""


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
    reserve: Any
    later: Any
    """[S]: what the later stages of its rank hold of one micro-batch."""
    key_f: Any
    key_i: Any
    arrive_f: Any
    """[S, M]: when the input (arrive_i: the gradient) is there; infinite while unknown."""
    arrive_i: Any
    next_f: Any
    """[S]: how many micro-batches have started; next_i, next_w, next_r likewise."""
    next_i: Any
    next_w: Any
    next_r: Any
    on_rank: Any
    """[R, S]: the rank's stages in chain order."""
    count: Any
    """[R + 1]: how many those are; at the end, the rank that finished last."""
    clock: Any
    """[R]: when the rank decides next."""
    free: Any
    idle: Any
    used: Any
    left: Any
    owed: Any
    """[R]: bytes that micro-batches on their way through the rank will still take."""
    channel: Any
    limit: Any
    done: Any
    seq: Any
    """[R, ops]: kind, stage and micro-batch, packed."""
    length: Any
    end: Any
    """[R, ops]: when each op of seq ends."""


def make_scratch(problem: Problem, max_stages: int) -> Scratch:
    s, m, r, v = max_stages, problem.num_micro_batches, problem.num_ranks, problem.variants
    ints = np.int32
    return Scratch(  # type: ignore[call-arg]  # mypy cannot count what the generator gives
        *(np.zeros((s, v)) for _ in range(8)),
        np.zeros(s),
        np.zeros(s),
        np.zeros((s, m)),
        np.zeros((s, m)),
        np.zeros((s, m)),
        np.zeros((s, m)),
        np.zeros(s, ints),
        np.zeros(s, ints),
        np.zeros(s, ints),
        np.zeros(s, ints),
        np.zeros((r, s), ints),
        np.zeros(r + 1, ints),
        np.zeros(r),
        np.zeros(r),
        np.zeros(r, np.bool_),
        np.zeros(r),
        np.zeros(r),
        np.zeros(r),
        np.zeros((r, r)),
        np.zeros(r),
        np.zeros(s),
        np.zeros((r, 4 * s * m), ints),
        np.zeros(r, ints),
        np.zeros((r, 4 * s * m)),
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
def schedule(p, stages, bounds, rank, recompute, flight, entry, glob, offset, wiggle, margin, cutoff, sc):  # type: ignore[no-untyped-def]
    """Build orders and return their step time; infinite on deadlock or as soon as it must exceed `cutoff`."""
    ranks, M = p.num_ranks, p.num_micro_batches
    inf = np.inf
    if not price(p, stages, bounds, rank, recompute, margin, sc):
        return inf
    whole_f = p.forward[0, p.num_layers]
    whole_i = max(p.input[0, p.num_layers], 1e-12)
    vary = 1 if p.variants > 1 else 0
    for s in range(stages):
        key_f = glob[B_F] * p.forward[0, bounds[s]] / max(whole_f, 1e-12) + offset[0, s]
        key_i = glob[C_I] + glob[B_I] * (1.0 - p.input[0, bounds[s + 1]] / whole_i) + offset[1, s]
        sc.next_f[s] = 0
        sc.next_i[s] = 0
        sc.next_w[s] = 0
        sc.next_r[s] = 0
        for m in range(M):
            sc.arrive_f[s, m] = inf
            sc.arrive_i[s, m] = inf
            sc.key_f[s, m] = key_f + glob[A_F] * m + wiggle[0, s, m]
            sc.key_i[s, m] = key_i + glob[A_I] * m + wiggle[1, s, m]
    for m in range(M):
        sc.arrive_f[0, m] = 0.0
    for r in range(ranks):
        sc.clock[r] = 0.0
        sc.free[r] = 0.0
        sc.idle[r] = True
        sc.length[r] = 0
        for q in range(ranks):
            sc.channel[r, q] = 0.0
        sc.owed[r] = 0.0
        later = 0.0
        again = 0.0
        for k in range(sc.count[r] - 1, -1, -1):
            s = sc.on_rank[r, k]
            sc.later[s] = later
            sc.reserve[s] = later * glob[RHO]
            hold = 0.0
            for v in range(p.variants):
                hold = max(hold, sc.hold[s, v])
                again = max(again, sc.full[s, v] - sc.hold[s, v])
            later += hold
        # A rank that recomputes must always be able to restore its hungriest stage.
        sc.limit[r] -= again
    remaining = 3 * stages * M
    look = glob[LOOK] * p.unit
    over = glob[W_OVER] * p.unit
    while remaining > 0:
        r = 0
        t = sc.clock[0]
        for q in range(1, ranks):
            if sc.clock[q] < t:
                t = sc.clock[q]
                r = q
        if t == inf:
            return inf
        if t + sc.left[r] > cutoff:
            return inf
        # -- look at the rank's candidates
        ready_key, ready_s, ready_kind = inf, -1, 0
        blocked_key = inf
        soon_key, soon_at = inf, inf
        next_at = inf
        waiting_w = False
        room = sc.limit[r] - sc.used[r]
        for k in range(sc.count[r]):
            s = sc.on_rank[r, k]
            m = sc.next_f[s]
            if m < M and m - sc.next_i[s] < flight[s]:
                at = sc.arrive_f[s, m]
                if at < inf:
                    key = sc.key_f[s, m]
                    hold = sc.hold[s, entry[m] * vary]
                    owed = sc.owed[r] + (sc.later[s] if k == 0 else -hold)
                    if hold + max(sc.reserve[s], glob[BANK] * owed) > room:
                        if at <= t and key < blocked_key:
                            blocked_key = key
                    elif at <= t:
                        if key < ready_key:
                            ready_key, ready_s, ready_kind = key, s, KIND_F
                    else:
                        if at < next_at:
                            next_at = at
                        if at <= t + look and key < soon_key:
                            soon_key, soon_at = key, at
            m = sc.next_i[s]
            if m < sc.next_f[s]:
                at = sc.arrive_i[s, m]
                if at < inf:
                    key = sc.key_i[s, m]
                    if at <= t:
                        if key < ready_key:
                            ready_key, ready_s, ready_kind = key, s, KIND_I
                    else:
                        if at < next_at:
                            next_at = at
                        if at <= t + look and key < soon_key:
                            soon_key, soon_at = key, at
                if sc.next_w[s] < m:
                    waiting_w = True
        chosen, kind = ready_s, ready_kind
        if soon_key < ready_key:
            chosen = -1
            next_at = soon_at
        if chosen >= 0 and waiting_w and blocked_key < ready_key:
            # The F this rank wants next lacks memory: make room for it.
            most = -1.0
            for k in range(sc.count[r]):
                s = sc.on_rank[r, k]
                m = sc.next_w[s]
                if m < sc.next_i[s] and sc.tail[s, entry[m] * vary] > most:
                    most, chosen, kind = sc.tail[s, entry[m] * vary], s, KIND_W
        elif chosen >= 0 and waiting_w and glob[C_W] < 1e6:
            for k in range(sc.count[r]):
                s = sc.on_rank[r, k]
                m = sc.next_w[s]
                if m < sc.next_i[s]:
                    key = glob[C_W] + m + offset[2, s]
                    if key < ready_key:
                        ready_key, chosen, kind = key, s, KIND_W
        if chosen < 0:
            # -- a gap: the longest W (or R) that fits before the next arrival, else the one that overruns least
            best = -inf
            gap = next_at - t
            for k in range(sc.count[r]):
                s = sc.on_rank[r, k]
                m = sc.next_w[s]
                if m < sc.next_i[s]:
                    ms = sc.w_ms[s, entry[m] * vary]
                    if gap == inf:
                        score = -m - offset[2, s]
                    elif ms <= gap + 1e-9:
                        score = ms
                    elif ms <= gap + over:
                        score = gap - ms
                    else:
                        continue
                    if score > best:
                        best, chosen, kind = score, s, KIND_W
                if recompute[s]:
                    m = sc.next_r[s]
                    if m < sc.next_f[s] and m == sc.next_i[s]:
                        ms = sc.f_ms[s, entry[m] * vary]
                        more = sc.full[s, entry[m] * vary] - sc.hold[s, entry[m] * vary]
                        if ms <= gap and more <= room and ms > best:
                            best, chosen, kind = ms, s, KIND_R
            if chosen < 0:
                sc.clock[r] = next_at
                sc.idle[r] = True
                sc.free[r] = t
                continue
        # -- run it
        s = chosen
        if kind == KIND_F:
            m = sc.next_f[s]
        elif kind == KIND_I:
            m = sc.next_i[s]
        elif kind == KIND_W:
            m = sc.next_w[s]
        else:
            m = sc.next_r[s]
        v = entry[m] * vary
        n = sc.length[r]
        if kind == KIND_I and recompute[s] and sc.next_r[s] == m:
            # R right before its I, unless the forward was the very last thing this rank ran.
            last = sc.seq[r, n - 1] if n > 0 else -1
            if last != (KIND_F << KIND_BITS) | (s << STAGE_BITS) | m:
                sc.seq[r, n] = (KIND_R << KIND_BITS) | (s << STAGE_BITS) | m
                t += sc.f_ms[s, v]
                sc.end[r, n] = t
                n += 1
                if s + 1 < stages:
                    sc.left[r] -= sc.f_ms[s, v]
            sc.used[r] += sc.full[s, v] - sc.hold[s, v]
            sc.next_r[s] += 1
        sc.seq[r, n] = (kind << KIND_BITS) | (s << STAGE_BITS) | m
        if kind == KIND_F:
            end = t + sc.f_ms[s, v]
            sc.left[r] -= sc.f_ms[s, v]
            sc.used[r] += sc.hold[s, v]
            sc.owed[r] += sc.later[s] if s == sc.on_rank[r, 0] else -sc.hold[s, v]
            sc.next_f[s] += 1
            remaining -= 1
            if s + 1 < stages:
                q = rank[s + 1]
                at = end
                if q != r:
                    if sc.channel[r, q] > at:
                        at = sc.channel[r, q]
                    at += sc.hop_f[s, v]
                    sc.channel[r, q] = at
                sc.arrive_f[s + 1, m] = at
                if p.has_buffers:
                    sc.used[q] += p.boundary[v, bounds[s + 1]]
                if q != r and sc.idle[q]:
                    wake = max(at, sc.free[q])
                    if wake < sc.clock[q]:
                        sc.clock[q] = wake
            else:
                sc.arrive_i[s, m] = end
            if p.has_buffers:
                sc.used[r] -= p.boundary[v, bounds[s]]
        elif kind == KIND_I:
            end = t + sc.i_ms[s, v]
            sc.left[r] -= sc.i_ms[s, v]
            sc.used[r] += sc.tail[s, v] - sc.full[s, v]
            sc.next_i[s] += 1
            remaining -= 1
            if s > 0:
                q = rank[s - 1]
                at = end
                if q != r:
                    if sc.channel[r, q] > at:
                        at = sc.channel[r, q]
                    at += sc.hop_i[s, v]
                    sc.channel[r, q] = at
                sc.arrive_i[s - 1, m] = at
                if p.has_buffers:
                    sc.used[q] += p.boundary[v, bounds[s]]
                if q != r and sc.idle[q]:
                    wake = max(at, sc.free[q])
                    if wake < sc.clock[q]:
                        sc.clock[q] = wake
            if p.has_buffers and s + 1 < stages:
                sc.used[r] -= p.boundary[v, bounds[s + 1]]
        elif kind == KIND_W:
            end = t + sc.w_ms[s, v]
            sc.left[r] -= sc.w_ms[s, v]
            sc.used[r] -= sc.tail[s, v]
            sc.next_w[s] += 1
            remaining -= 1
            if m == M - 1:
                sc.done[s] = end
        else:
            end = t + sc.f_ms[s, v]
            if s + 1 < stages:
                sc.left[r] -= sc.f_ms[s, v]
            sc.used[r] += sc.full[s, v] - sc.hold[s, v]
            sc.next_r[s] += 1
        sc.end[r, n] = end
        sc.length[r] = n + 1
        sc.clock[r] = end
        sc.free[r] = end
        sc.idle[r] = False
    last = 0.0
    for r in range(ranks):
        n = sc.length[r]
        if n > 0 and sc.end[r, n - 1] > last:
            last = sc.end[r, n - 1]
            sc.count[ranks] = r
    if p.has_extras:
        last = max(last, extras_end(p, stages, bounds, rank, sc))
    return last


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
