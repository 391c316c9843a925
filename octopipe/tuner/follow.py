"""Annealing of fixed orders: the partition, the placement and the sequence of every rank, one small step at a time.

Knows: how to time given sequences exactly (`follow`) and how to change them. Does not know: where they came from
(kernels.py builds them by list scheduling) or what a plan is.

List scheduling finds good sequences fast but is chaotic: move one layer and half the decisions change. Here the
sequences stay as they are, so a small change has a small effect, and judging one costs a fraction of building it.
Moves: layers migrate between neighbours; ops of the critical path swap with their neighbours or jump ahead; weight
gradients jump; a stage moves to another rank or trades places, its ops merged in by their present times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from octopipe.tuner.anneal import State, below, copy_state, make_state, pick, uniform
from octopipe.tuner.kernels import (
    ANY_PACE,
    KIND_BITS,
    KIND_F,
    KIND_I,
    KIND_W,
    MASK,
    STAGE_BITS,
    Problem,
    Scratch,
    extras_end,
    price,
    quick_bound,
    schedule,
)

ORDER_MOVES = (
    "migrate layers",
    "shift stages",
    "swap ops",
    "advance op",
    "move W",
    "move stage",
    "exchange stages",
)
RAN, RESTORED = -1.0, -2.0
"""In place of an arrival, where a stage recomputes: its F has run; its R has."""
ORDER_PHASES = ("partition", "partition", "schedule", "schedule", "schedule", "placement", "placement")


class Orders(NamedTuple):
    """Sequences of all ranks, packed as in Scratch."""

    seq: Any
    length: Any


class Times(NamedTuple):
    """What is known of the current orders' timing, refreshed whenever a move is taken."""

    end: Any
    """[4, S, M]: when each op ends."""
    path: Any
    """[ops, 2]: rank and position of the critical ops, last first."""
    where: Any
    """[4, S, M]: the position of each op on its rank."""
    spare: Any
    """[ops]: room for a sequence being rebuilt."""


def make_orders(problem: Problem, max_stages: int) -> Orders:
    ops = 4 * max_stages * problem.num_micro_batches
    return Orders(np.zeros((problem.num_ranks, ops), np.int32), np.zeros(problem.num_ranks, np.int32))


def make_times(problem: Problem, max_stages: int) -> Times:
    ops = 4 * max_stages * problem.num_micro_batches
    return Times(
        np.zeros((4, max_stages, problem.num_micro_batches)),
        np.zeros((ops, 2), np.int32),
        np.zeros((4, max_stages, problem.num_micro_batches), np.int32),
        np.zeros(ops, np.int32),
    )


@njit(cache=True, nogil=True)
def copy_orders(to, of):  # type: ignore[no-untyped-def]
    """Also from a scratch: the sequences that `schedule` has just built."""
    for r in range(of.length.size):
        n = of.length[r]
        to.length[r] = n
        for i in range(n):
            to.seq[r, i] = of.seq[r, i]


@njit(cache=True, nogil=True)
def rewind(p, stages, orders, sc):  # type: ignore[no-untyped-def]
    """Nothing has run yet: only the inputs of the first stage are there. Returns how many ops there are."""
    left = 0
    for s in range(stages):
        for m in range(p.num_micro_batches):
            sc.arrive_f[s, m] = np.inf
            sc.arrive_i[s, m] = np.inf
    for m in range(p.num_micro_batches):
        sc.arrive_f[0, m] = 0.0
    for r in range(p.num_ranks):
        sc.clock[r] = 0.0
        sc.length[r] = 0
        left += orders.length[r]
        for q in range(p.num_ranks):
            sc.channel[r, q] = 0.0
    return left


@njit(cache=True, nogil=True)
def follow(p, st, orders, margin, cutoff, sc):  # type: ignore[no-untyped-def]
    """Step time of fixed orders; infinite on deadlock, lack of memory, or beyond the cutoff. Fills sc.end."""
    stages = st.size[0]
    ranks, inf = p.num_ranks, np.inf
    if not price(p, stages, st.bounds, st.rank, st.recompute, margin, sc):
        return inf
    vary = 1 if p.variants > 1 else 0
    left = rewind(p, stages, orders, sc)
    while left > 0:
        moved = False
        for r in range(ranks):
            t = sc.clock[r]
            i = sc.length[r]
            first = i
            while i < orders.length[r]:
                code = orders.seq[r, i]
                kind = code >> KIND_BITS
                s = (code >> STAGE_BITS) & MASK
                m = code & MASK
                v = st.entry[m] * vary
                if kind == KIND_F:
                    at = sc.arrive_f[s, m]
                    if at == inf:
                        break
                    if at > t:
                        t = at
                    hold = sc.hold[s, v]
                    if sc.used[r] + hold > sc.limit[r]:
                        return inf
                    sc.used[r] += hold
                    t += sc.f_ms[s, v]
                    sc.left[r] -= sc.f_ms[s, v]
                    if st.recompute[s]:
                        sc.arrive_f[s, m] = RAN
                    if s + 1 < stages:
                        q = st.rank[s + 1]
                        at = t
                        if q != r:
                            if sc.channel[r, q] > at:
                                at = sc.channel[r, q]
                            at += sc.hop_f[s, v]
                            sc.channel[r, q] = at
                        sc.arrive_f[s + 1, m] = at
                    else:
                        sc.arrive_i[s, m] = t
                elif kind == KIND_I:
                    at = sc.arrive_i[s, m]
                    if at == inf:
                        break
                    if st.recompute[s] and sc.arrive_f[s, m] != RESTORED:
                        # Not restored by an R: only right after its own forward may it do without.
                        if i == 0 or orders.seq[r, i - 1] != (KIND_F << KIND_BITS) | (s << STAGE_BITS) | m:
                            return inf
                        sc.used[r] += sc.full[s, v] - sc.hold[s, v]
                        if sc.used[r] > sc.limit[r]:
                            return inf
                    if at > t:
                        t = at
                    t += sc.i_ms[s, v]
                    sc.left[r] -= sc.i_ms[s, v]
                    sc.used[r] += sc.tail[s, v] - sc.full[s, v]
                    # A negative arrival marks what is done; W looks for it.
                    sc.arrive_i[s, m] = -1.0 - at
                    if s > 0:
                        q = st.rank[s - 1]
                        at = t
                        if q != r:
                            if sc.channel[r, q] > at:
                                at = sc.channel[r, q]
                            at += sc.hop_i[s, v]
                            sc.channel[r, q] = at
                        sc.arrive_i[s - 1, m] = at
                elif kind == KIND_W:
                    if sc.arrive_i[s, m] >= 0.0:
                        return inf
                    t += sc.w_ms[s, v]
                    sc.left[r] -= sc.w_ms[s, v]
                    sc.used[r] -= sc.tail[s, v]
                    sc.done[s] = t
                else:
                    # R after its own F, which stands before it on this rank or nowhere.
                    if sc.arrive_f[s, m] != RAN or sc.arrive_i[s, m] < 0.0:
                        return inf
                    sc.arrive_f[s, m] = RESTORED
                    sc.used[r] += sc.full[s, v] - sc.hold[s, v]
                    if sc.used[r] > sc.limit[r]:
                        return inf
                    t += sc.f_ms[s, v]
                    if s + 1 < stages:
                        sc.left[r] -= sc.f_ms[s, v]
                sc.end[r, i] = t
                i += 1
                if t + sc.left[r] > cutoff:
                    return inf
            if i > first:
                moved = True
                left -= i - first
                sc.length[r] = i
                sc.clock[r] = t
        if not moved:
            return inf
    last = 0.0
    for r in range(ranks):
        if sc.clock[r] > last:
            last = sc.clock[r]
            sc.count[ranks] = r
    if p.has_extras:
        last = max(last, extras_end(p, stages, st.bounds, st.rank, sc))
    return last


@njit(cache=True, nogil=True)
def mean_step(p, st, orders, factors, sc):  # type: ignore[no-untyped-def]
    """Mean step time of orders that `follow` has just timed, over draws of a factor for every op and its transfer.

    Memory is not asked about again: a rank's ops, and so what it holds, stay in the order they have. What `follow` left
    for `read_times` is left alone. Optimizer and reductions are not jittered, and not counted.
    """
    stages, ranks, inf = st.size[0], p.num_ranks, np.inf
    vary = 1 if p.variants > 1 else 0
    total = 0.0
    for k in range(factors.shape[0]):
        left = rewind(p, stages, orders, sc)
        while left > 0:
            for r in range(ranks):
                t = sc.clock[r]
                i = sc.length[r]
                first = i
                while i < orders.length[r]:
                    code = orders.seq[r, i]
                    kind = code >> KIND_BITS
                    s = (code >> STAGE_BITS) & MASK
                    m = code & MASK
                    v = st.entry[m] * vary
                    factor = factors[k, 0, kind, s, m]
                    carried = factors[k, 1, kind, s, m]
                    if kind == KIND_F:
                        at = sc.arrive_f[s, m]
                        if at == inf:
                            break
                        t = max(t, at) + sc.f_ms[s, v] * factor
                        at = t
                        if s + 1 < stages:
                            q = st.rank[s + 1]
                            if q != r:
                                at = max(at, sc.channel[r, q]) + sc.hop_f[s, v] * carried
                                sc.channel[r, q] = at
                            sc.arrive_f[s + 1, m] = at
                        else:
                            sc.arrive_i[s, m] = at
                    elif kind == KIND_I:
                        at = sc.arrive_i[s, m]
                        if at == inf:
                            break
                        t = max(t, at) + sc.i_ms[s, v] * factor
                        if s > 0:
                            q = st.rank[s - 1]
                            at = t
                            if q != r:
                                at = max(at, sc.channel[r, q]) + sc.hop_i[s, v] * carried
                                sc.channel[r, q] = at
                            sc.arrive_i[s - 1, m] = at
                    elif kind == KIND_W:
                        t += sc.w_ms[s, v] * factor
                    else:
                        t += sc.f_ms[s, v] * factor
                    i += 1
                left -= i - first
                sc.length[r] = i
                sc.clock[r] = t
        last = 0.0
        for r in range(ranks):
            last = max(last, sc.clock[r])
        total += last
    return total / factors.shape[0]


@njit(cache=True, nogil=True)
def read_times(p, st, orders, sc, times):  # type: ignore[no-untyped-def]
    """After `follow`: every op's end, and the critical path; returns the path's length."""
    n = st.size[0]
    vary = 1 if p.variants > 1 else 0
    where = times.where
    for r in range(p.num_ranks):
        for i in range(orders.length[r]):
            code = orders.seq[r, i]
            times.end[code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK] = sc.end[r, i]
            where[code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK] = i
    r = sc.count[p.num_ranks]
    i = orders.length[r] - 1
    found = 0
    while i >= 0 and found < times.path.shape[0]:
        times.path[found, 0] = r
        times.path[found, 1] = i
        found += 1
        code = orders.seq[r, i]
        kind = code >> KIND_BITS
        s = (code >> STAGE_BITS) & MASK
        m = code & MASK
        v = st.entry[m] * vary
        ms = sc.w_ms[s, v]
        if kind == KIND_I:
            ms = sc.i_ms[s, v]
        elif kind != KIND_W:
            ms = sc.f_ms[s, v]
        start = sc.end[r, i] - ms
        if i > 0 and sc.end[r, i - 1] >= start - 1e-9:
            i -= 1
            continue
        if kind == KIND_F and s > 0:
            s -= 1
        elif kind == KIND_I and s + 1 < n:
            s += 1
        else:
            break
        r = st.rank[s]
        i = where[kind, s, m]
    return found


@njit(cache=True, nogil=True)
def jump(orders, r, at, to):  # type: ignore[no-untyped-def]
    """Take the op at one position of a rank's sequence and put it at another."""
    code = orders.seq[r, at]
    if to < at:
        for i in range(at, to, -1):
            orders.seq[r, i] = orders.seq[r, i - 1]
    else:
        for i in range(at, to):
            orders.seq[r, i] = orders.seq[r, i + 1]
    orders.seq[r, to] = code


@njit(cache=True, nogil=True)
def move_stage(st, orders, times, s, to):  # type: ignore[no-untyped-def]
    """Move a stage to another rank; its ops are merged into that rank's sequence by their present ends."""
    of = st.rank[s]
    kept = 0
    moved = 0
    for i in range(orders.length[of]):
        code = orders.seq[of, i]
        if (code >> STAGE_BITS) & MASK == s:
            times.spare[moved] = code
            moved += 1
        else:
            orders.seq[of, kept] = code
            kept += 1
    orders.length[of] = kept
    n = orders.length[to]
    # Merge from the back, in place.
    i, j, k = n - 1, moved - 1, n + moved - 1
    while j >= 0:
        b = times.spare[j]
        late = times.end[b >> KIND_BITS, (b >> STAGE_BITS) & MASK, b & MASK]
        if i >= 0:
            a = orders.seq[to, i]
            if times.end[a >> KIND_BITS, (a >> STAGE_BITS) & MASK, a & MASK] > late:
                orders.seq[to, k] = a
                i -= 1
                k -= 1
                continue
        orders.seq[to, k] = b
        j -= 1
        k -= 1
    orders.length[to] = n + moved
    st.rank[s] = to


@njit(cache=True, nogil=True)
def alter(p, st, orders, times, path, rng, critical):  # type: ignore[no-untyped-def]
    """One random move in place; returns its number in ORDER_MOVES, or -1."""
    n = st.size[0]
    u = uniform(rng)
    if u < 0.30:
        s = pick(st, rng, critical) + below(rng, 2)
        if s == 0 or s >= n:
            return -1
        e = s
        if u > 0.20:
            e = min(s + 1 + below(rng, 3), n - 1)
        by = 1 if uniform(rng) < 0.5 else -1
        if st.bounds[s] + by <= st.bounds[s - 1] or st.bounds[e] + by >= st.bounds[e + 1]:
            return -1
        for k in range(s, e + 1):
            st.bounds[k] += by
        return 0 if e == s else 1
    if u < 0.36 and n > 1:
        s = pick(st, rng, critical)
        if u < 0.33:
            to = below(rng, p.num_ranks)
            if to == st.rank[s]:
                return -1
            move_stage(st, orders, times, s, to)
            return 5
        e = below(rng, n)
        a, b = st.rank[s], st.rank[e]
        if a == b:
            return -1
        move_stage(st, orders, times, s, b)
        move_stage(st, orders, times, e, a)
        return 6
    if u < 0.85 and path > 1:
        # A critical op before the op that ran just before it.
        k = below(rng, path)
        r, i = times.path[k, 0], times.path[k, 1]
        if i == 0 or i >= orders.length[r]:  # a stage may have left the rank since the path was read
            return -1
        if u < 0.62:
            jump(orders, r, i, i - 1)
            return 2
        jump(orders, r, i, max(0, i - 1 - below(rng, 6)))
        return 3
    r = critical if uniform(rng) < 0.4 else below(rng, p.num_ranks)
    length = orders.length[r]
    if length < 2:
        return -1
    i = below(rng, length)
    kind = orders.seq[r, i] >> KIND_BITS
    if kind == KIND_W:
        to = i + below(rng, 40) - 20
    else:
        to = i + below(rng, 12) - 6
    to = min(max(to, 0), length - 1)
    if to == i:
        return -1
    jump(orders, r, i, to)
    return 4 if kind == KIND_W else 3


@njit(cache=True, nogil=True)
def anneal_orders(  # type: ignore[no-untyped-def]
    p,
    st,
    orders,
    best,
    best_orders,
    back,
    back_orders,
    margin,
    sc,
    times,
    rng,
    iterations,
    hot,
    cold,
    current,
    best_ms,
    log,
    factors,
):
    """`iterations` moves on fixed orders; as `anneal`. With `factors` the mean under them is what counts."""
    lines = 0
    jittered = factors.shape[0] > 0
    value = follow(p, st, orders, margin, np.inf, sc)
    if value == np.inf:
        return current, best_ms, 0
    current = mean_step(p, st, orders, factors, sc) if jittered else value
    path = read_times(p, st, orders, sc, times)
    critical = sc.count[p.num_ranks]
    for i in range(iterations):
        temperature = (hot + (cold - hot) * i / iterations) * best_ms
        copy_state(back, st)
        copy_orders(back_orders, orders)
        move = alter(p, st, orders, times, path, rng, critical)
        while uniform(rng) < 0.25:
            more = alter(p, st, orders, times, path, rng, critical)
            if move < 0:
                move = more
        if move < 0:
            copy_state(st, back)
            copy_orders(orders, back_orders)
            continue
        cutoff = current - temperature * np.log(max(uniform(rng), 1e-300))
        value = np.inf
        if quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free) <= cutoff:
            value = follow(p, st, orders, margin, cutoff, sc)
            if jittered and value <= cutoff:  # the mean is hardly ever below the time without jitter
                value = mean_step(p, st, orders, factors, sc)
        if value <= cutoff:
            current = value
            path = read_times(p, st, orders, sc, times)
            critical = sc.count[p.num_ranks]
            if value < best_ms - 1e-9:
                if lines < log.shape[0]:
                    log[lines, 0] = i
                    log[lines, 1] = move
                    log[lines, 2] = best_ms
                    log[lines, 3] = value
                    lines += 1
                best_ms = value
                copy_state(best, st)
                copy_orders(best_orders, orders)
        else:
            copy_state(st, back)
            copy_orders(orders, back_orders)
    return current, best_ms, lines


class Polisher:
    """One walk over fixed orders and the best it has seen."""

    def __init__(
        self,
        problem: Problem,
        max_stages: int,
        scratch: Scratch,
        margin: np.ndarray,
        seed: tuple[int, ...],
        factors: np.ndarray | None = None,
    ) -> None:
        """`factors` [draws, op or its transfer, kind, stage, micro-batch]: all times are means under these."""
        self.problem, self.scratch, self.margin = problem, scratch, margin
        self.factors = np.zeros((0, 2, 1, 1, 1)) if factors is None else factors
        self.state, self.best, self.back = (make_state(problem, max_stages) for _ in range(3))
        self.orders, self.best_orders, self.back_orders = (make_orders(problem, max_stages) for _ in range(3))
        self.times = make_times(problem, max_stages)
        self.rng = np.random.default_rng((*seed, 1)).integers(1, 1 << 62, 1).astype(np.uint64)
        self.log = np.zeros((64, 4))
        self.current_ms = self.best_ms = float("inf")

    def begin(self, st: State) -> bool:
        """Start from the orders that list scheduling gives a state; False where they do not fit."""
        n = int(st.size[0])
        schedule(
            self.problem, n, st.bounds, st.rank, st.recompute, st.flight, st.entry, st.glob, st.offset, st.wiggle,
            self.margin, np.inf, ANY_PACE, self.scratch,
        )  # fmt: skip
        copy_orders(self.orders, self.scratch)
        for to in (self.state, self.best):
            copy_state(to, st)
        copy_orders(self.best_orders, self.orders)
        self.current_ms = self.best_ms = follow(
            self.problem, self.state, self.orders, self.margin, np.inf, self.scratch
        )
        if self.factors.size and self.best_ms < np.inf:
            self.current_ms = self.best_ms = mean_step(
                self.problem, self.state, self.orders, self.factors, self.scratch
            )
        return bool(self.best_ms < np.inf)

    def run(self, iterations: int, temperature: float) -> np.ndarray:
        """Some moves at one temperature; returns the improvements, a line each."""
        self.current_ms, self.best_ms, lines = anneal_orders(
            self.problem, self.state, self.orders, self.best, self.best_orders, self.back, self.back_orders,
            self.margin, self.scratch, self.times, self.rng, iterations, temperature, temperature,
            self.current_ms, self.best_ms, self.log, self.factors,
        )  # fmt: skip
        return self.log[:lines].copy()
