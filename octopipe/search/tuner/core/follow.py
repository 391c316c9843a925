"""Timing and annealing of given orders: changes the partition, the placement and each rank's sequence in small steps.

Knows: how to time given sequences exactly (`follow`), also over several routes (plans that hold layers more than once)
and under jitter, and how to change them. Does not know: where they come from, or plans.

List scheduling finds good sequences quickly but is chaotic: moving one layer changes half of the decisions. Here
sequences are kept, so a small change has a small effect, and evaluating one costs a fraction of building it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.anneal import threshold, write_line
from octopipe.search.tuner.core.moves import pick, slide
from octopipe.search.tuner.core.problem import (
    CLOCK, ENTRY, F_MS, FREE, FULL, HAS_EXTRAS, HOLD, HOP_F, HOP_I, I_MS, KIND_BITS, KIND_F, KIND_I, KIND_R, KIND_W,
    LEFT, LENGTH, LIMIT, MASK, MICRO_BATCHES, RANK, RANKS, REDO, ROUTES, SIZE, STAGE_BITS, TAIL, USED, VARIANTS, W_MS,
    Problem, below, extras_end, pack, price, uniform, work_bound,
)  # fmt: skip
from octopipe.search.tuner.settings import ORDER_MOVES, SETTINGS
from octopipe.simulation.timing import DROPPED, FOR_F, FOR_I, NEVER, hand_on, note_run, start_of

MIGRATE, SHIFT, MOVE_STAGE, EXCHANGE, SWAP, ADVANCE, MOVE_OP = range(len(ORDER_MOVES))
REORDERING, OTHER, REACH = SETTINGS.reordering, SETTINGS.other_moves, SETTINGS.reach
SOMETIMES, LONGEST_RUN = SETTINGS.sometimes, SETTINGS.longest_run


class Orders(NamedTuple):
    """The sequences of all ranks, packed as in `Scratch`."""

    seq: Any
    length: Any


class Times(NamedTuple):
    """The timing of the current orders, updated whenever a move is accepted."""

    end: Any
    """The shape is [4, S, M]: when each op ends."""
    where: Any
    """The shape is [4, S, M]: the position of each op on its rank."""
    path: Any
    """The shape is [2, ops]: rank and position of the critical ops, the last one first."""
    spare: Any
    """The shape is [ops]: working space in which a sequence is rebuilt."""


def make_orders(problem: Problem, max_stages: int) -> Orders:
    ops = 4 * max_stages * problem.micro_batches
    return Orders(np.zeros((problem.ranks, ops), np.int32), np.zeros(problem.ranks + 1, np.int64))


def make_times(problem: Problem, max_stages: int) -> Times:
    shape = (4, max_stages, problem.micro_batches)
    ops = 4 * max_stages * problem.micro_batches
    return Times(np.zeros(shape), np.zeros(shape, np.int64), np.zeros((2, ops), np.int64), np.zeros(ops, np.int32))


@njit
def copy_orders(to, of):  # type: ignore[no-untyped-def]
    for r in range(of.length.size):
        n = of.length[r]
        to.length[r] = n
        if r < of.seq.shape[0]:
            for i in range(n):
                to.seq[r, i] = of.seq[r, i]


@njit
def follow(p, st, orders, cutoff, factors, draw, sc):  # type: ignore[no-untyped-def]
    """The step time of given orders; infinite on deadlock, if memory is exceeded, or beyond the cutoff. Fills `sc.end`.

    If `draw` >= 0, the times of all ops and transfers are scaled by that draw of `factors`; the optimizer and the
    gradient reductions are not scaled.
    """
    if not price(p, st, sc):
        return np.inf
    size, routes, ranks, inf = st[SIZE, 0], st[ROUTES, 0], p.count[RANKS], np.inf
    cost, mine, arrive = sc.price, sc.mine, sc.arrive
    left = begin_step(p, st, orders, routes > 1 or draw >= 0, sc)
    vary = 1 if p.count[VARIANTS] > 1 else 0
    factor = carried = 1.0
    while left > 0:
        moved = False
        for r in range(ranks):
            t = mine[r, CLOCK]
            i = sc.place[LENGTH, r]
            first = i
            while i < orders.length[r]:
                code = orders.seq[r, i]
                kind, s, m = code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK
                v = st[ENTRY, m] * vary
                if draw >= 0:
                    factor, carried = factors[draw, 0, kind, s, m], factors[draw, 1, kind, s, m]
                if kind == KIND_I and st[REDO, s] and arrive[FOR_F, s, m] == DROPPED:
                    # Without an R, the I of a stage that recomputes may only run right after its own F.
                    if i == 0 or orders.seq[r, i - 1] != pack(KIND_F, s, m):
                        return inf
                    mine[r, USED] += cost[FULL, s, v] - cost[HOLD, s, v]
                    if mine[r, USED] > mine[r, LIMIT]:
                        return inf
                    note_run(arrive, KIND_R, s, m, False)
                at = start_of(arrive, kind, s, m, t)
                if at == NEVER:
                    return inf
                if at == inf:
                    break
                ms = op_ms(cost, kind, s, v)
                t = at + ms * factor
                note_run(arrive, kind, s, m, st[REDO, s] > 0)
                if kind == KIND_F:
                    mine[r, USED] += cost[HOLD, s, v]
                    if (s + 1) % size != 0:
                        hop = cost[HOP_F, s, v] * carried
                        hand_on(arrive, FOR_F, s + 1, m, sc.channel, r, st[RANK, s + 1], t, hop)
                    else:
                        arrive[FOR_I, s, m] = t
                elif kind == KIND_I:
                    mine[r, USED] += cost[TAIL, s, v] - cost[FULL, s, v]
                    if s % size != 0:
                        hop = cost[HOP_I, s, v] * carried
                        hand_on(arrive, FOR_I, s - 1, m, sc.channel, r, st[RANK, s - 1], t, hop)
                elif kind == KIND_W:
                    mine[r, USED] -= cost[TAIL, s, v]
                    sc.done[s] = t
                else:
                    mine[r, USED] += cost[FULL, s, v] - cost[HOLD, s, v]
                    if (s + 1) % size == 0:
                        ms = 0.0  # LEFT does not contain R of the last stage (see `price`)
                if kind <= KIND_R and mine[r, USED] > mine[r, LIMIT]:
                    return inf
                mine[r, LEFT] -= ms
                sc.end[r, i] = t
                i += 1
                if draw < 0 and t + max(mine[r, LEFT], 0.0) > cutoff:
                    return inf
            if i > first:
                moved = True
                left -= i - first
                sc.place[LENGTH, r] = i
                mine[r, CLOCK] = t
        if not moved:
            return inf
    return step_end(p, st, sc)


@njit
def begin_step(p, st, orders, unknown_work, sc):  # type: ignore[no-untyped-def]
    """Reset the state to the beginning of a step; returns the number of ops. `unknown_work` means that the remaining
    work of the ranks is not known in advance, so nothing can be abandoned early because of it."""
    size, ranks, inf, left = st[SIZE, 0], p.count[RANKS], np.inf, 0
    for s in range(size * st[ROUTES, 0]):
        for m in range(p.count[MICRO_BATCHES]):
            sc.arrive[FOR_F, s, m] = 0.0 if s % size == 0 else inf
            sc.arrive[FOR_I, s, m] = inf
    for r in range(ranks):
        sc.mine[r, CLOCK] = 0.0
        sc.place[LENGTH, r] = 0
        left += orders.length[r]
        if unknown_work:
            sc.mine[r, LEFT] = 0.0
        for q in range(ranks):
            sc.channel[r, q] = 0.0
    return left


@njit
def op_ms(cost, kind, s, v):  # type: ignore[no-untyped-def]
    """The duration of an op. R takes as long as F."""
    if kind == KIND_I:
        return cost[I_MS, s, v]
    return cost[W_MS, s, v] if kind == KIND_W else cost[F_MS, s, v]


@njit
def step_end(p, st, sc):  # type: ignore[no-untyped-def]
    """The end of the step, given the end of every rank; records the rank that ends last."""
    last, ranks = 0.0, p.count[RANKS]
    for r in range(ranks):
        sc.mine[r, FREE] = sc.mine[r, CLOCK]
        if sc.mine[r, CLOCK] > last:
            last = sc.mine[r, CLOCK]
            sc.place[LENGTH, ranks] = r
    if p.count[HAS_EXTRAS] > 0 or st[ROUTES, 0] > 1:
        last = max(last, extras_end(p, st, sc))
    return last


@njit
def value_of(p, st, orders, cutoff, factors, sc):  # type: ignore[no-untyped-def]
    """The value that moves on orders minimise: the step time, or its mean over all draws of `factors` if there are any
    and the step time without jitter is within the cutoff."""
    if st[ROUTES, 0] == 1 and work_bound(p, st, sc) > cutoff:
        return np.inf
    value = follow(p, st, orders, cutoff, factors, -1, sc)
    if factors.shape[0] == 0 or not value <= cutoff:  # the mean is hardly ever below the time without jitter
        return value
    total = 0.0
    for draw in range(factors.shape[0]):
        total += follow(p, st, orders, np.inf, factors, draw, sc)
    return total / factors.shape[0]


@njit
def read_times(p, st, orders, factors, sc, times):  # type: ignore[no-untyped-def]
    """Record the end of every op and the critical path; returns the length of the path. If the last timing was
    jittered, the orders are timed again without jitter."""
    size, ranks = st[SIZE, 0], p.count[RANKS]
    if factors.shape[0] > 0:
        follow(p, st, orders, np.inf, factors, -1, sc)
    vary = 1 if p.count[VARIANTS] > 1 else 0
    for r in range(ranks):
        for i in range(orders.length[r]):
            code = orders.seq[r, i]
            kind, s, m = code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK
            times.end[kind, s, m] = sc.end[r, i]
            times.where[kind, s, m] = i
    r = sc.place[LENGTH, ranks]
    i = orders.length[r] - 1
    found = 0
    while i >= 0 and found < times.path.shape[1]:
        times.path[0, found] = r
        times.path[1, found] = i
        found += 1
        code = orders.seq[r, i]
        kind, s, m = code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK
        v = st[ENTRY, m] * vary
        ms = op_ms(sc.price, kind, s, v)
        if i > 0 and sc.end[r, i - 1] >= sc.end[r, i] - ms - 1e-9:
            i -= 1
            continue
        if kind == KIND_F and s % size != 0:
            s -= 1
        elif kind == KIND_I and (s + 1) % size != 0:
            s += 1
        else:
            break
        r = st[RANK, s]
        i = times.where[kind, s, m]
    return found


@njit
def jump(orders, r, at, to):  # type: ignore[no-untyped-def]
    """Move the op at one position of a rank's sequence to another position."""
    code = orders.seq[r, at]
    step = 1 if to > at else -1
    i = at
    while i != to:
        orders.seq[r, i] = orders.seq[r, i + step]
        i += step
    orders.seq[r, to] = code


@njit
def hand_stage(st, orders, times, s, to):  # type: ignore[no-untyped-def]
    """Move a stage to another rank. Its ops are merged into that rank's sequence by their present end times."""
    of = st[RANK, s]
    kept = moved = 0
    for i in range(orders.length[of]):
        code = orders.seq[of, i]
        if (code >> STAGE_BITS) & MASK == s:
            times.spare[moved] = code
            moved += 1
        else:
            orders.seq[of, kept] = code
            kept += 1
    orders.length[of] = kept
    # Merge from the back, in place.
    i, j, k = orders.length[to] - 1, moved - 1, orders.length[to] + moved - 1
    orders.length[to] += moved
    while j >= 0:
        b = times.spare[j]
        a = orders.seq[to, max(i, 0)]
        after = times.end[a >> KIND_BITS, (a >> STAGE_BITS) & MASK, a & MASK]
        if i >= 0 and after > times.end[b >> KIND_BITS, (b >> STAGE_BITS) & MASK, b & MASK]:
            orders.seq[to, k] = a
            i -= 1
        else:
            orders.seq[to, k] = b
            j -= 1
        k -= 1
    st[RANK, s] = to


@njit
def alter(p, st, orders, times, path, rng, critical):  # type: ignore[no-untyped-def]
    """Apply one random move in place; returns its number in ORDER_MOVES, or -1 if it did not apply."""
    n = st[SIZE, 0]
    move = SWAP + below(rng, 3) if uniform(rng) < REORDERING else below(rng, MOVE_STAGE)
    if uniform(rng) < OTHER:
        move = MOVE_STAGE + below(rng, 2)
    if move <= SHIFT:
        s = pick(st, rng, critical) + below(rng, 2)
        e = s if move == MIGRATE else min(s + 1 + below(rng, LONGEST_RUN), n - 1)
        return move if e >= s and slide(st, s, e, 1 if uniform(rng) < 0.5 else -1) else -1
    if move <= EXCHANGE:
        s = pick(st, rng, critical)
        e = below(rng, n)
        a, b = st[RANK, s], st[RANK, e]
        if move == MOVE_STAGE:
            b = below(rng, p.count[RANKS])
        if a == b or st[ROUTES, 0] > 1:  # copies of a layer stay on the ranks they were given
            return -1
        hand_stage(st, orders, times, s, b)
        if move == EXCHANGE:
            hand_stage(st, orders, times, e, a)
        return move
    if move <= ADVANCE and path > 1:
        # Move a critical op ahead by one place (SWAP), or by up to REACH places (ADVANCE).
        k = below(rng, path)
        r, i = times.path[0, k], times.path[1, k]
        if i == 0 or i >= orders.length[r]:  # a stage may have left the rank since the path was read
            return -1
        jump(orders, r, i, i - 1 if move == SWAP else max(0, i - 1 - below(rng, REACH)))
        return move
    r = critical if uniform(rng) < 0.5 else below(rng, p.count[RANKS])
    length = orders.length[r]
    if length < 2:
        return -1
    i = below(rng, length)
    far = 3 * REACH if orders.seq[r, i] >> KIND_BITS == KIND_W else REACH
    to = min(max(i + below(rng, 2 * far) - far, 0), length - 1)
    if to == i:
        return -1
    jump(orders, r, i, to)
    return MOVE_OP


@njit
def polish(p, st, orders, best, best_orders, back, back_orders, sc, times, rng, moves, heat, best_ms, log, factors):  # type: ignore[no-untyped-def]
    """Apply `moves` moves to fixed orders at temperature `heat` (a share of the step time). Returns the step time of
    the orders, the best step time, and the number of lines in `log`. If `best_ms` is infinite, the given orders
    are the first best.

    With `factors` [draws, op or transfer, kind, stage, micro-batch], the mean over the draws is minimised.
    """
    lines = 0
    current = value_of(p, st, orders, np.inf, factors, sc)
    if current == np.inf:
        return current, best_ms, 0
    if best_ms == np.inf:
        best_ms = current
        best[:] = st
        copy_orders(best_orders, orders)
    path = read_times(p, st, orders, factors, sc, times)
    critical = sc.place[LENGTH, p.count[RANKS]]
    for i in range(moves):
        back[:] = st
        copy_orders(back_orders, orders)
        move = alter(p, st, orders, times, path, rng, critical)
        while uniform(rng) < SOMETIMES:
            more = alter(p, st, orders, times, path, rng, critical)
            if move < 0:
                move = more
        value = cutoff = threshold(current, heat * best_ms, rng)
        if move >= 0:
            value = value_of(p, st, orders, cutoff, factors, sc)
        if move < 0 or not value <= cutoff:
            st[:] = back
            copy_orders(orders, back_orders)
            continue
        current = value
        path = read_times(p, st, orders, factors, sc, times)
        critical = sc.place[LENGTH, p.count[RANKS]]
        if value < best_ms - 1e-9:
            lines = write_line(log, lines, i, move, best_ms, value)
            best_ms = value
            best[:] = st
            copy_orders(best_orders, orders)
    return current, best_ms, lines
