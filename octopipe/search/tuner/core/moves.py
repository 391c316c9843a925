"""Moves on a structure: its partition, its placement, what it recomputes; one function per move, and their weights.

Knows: how to change a structure in place, and how to rebalance its ranks afterwards. Does not know: keys or schedules.
Every move returns whether it was applicable.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.problem import (
    BOUNDS, ENTRY, LOAD, MICRO_BATCHES, RANK, RANKS, REDO, SIZE, VARIANTS, below, uniform, work_bound,
)  # fmt: skip
from octopipe.search.tuner.settings import SETTINGS, STRUCTURE_MOVES

(
    MIGRATE, SHIFT, MOVE_STAGE, EXCHANGE, SPLIT, MERGE, ROTATE, EXCHANGE_RANKS, RECOMPUTE, REORDER,
) = range(len(STRUCTURE_MOVES))  # fmt: skip
MIGRATING, OTHER, SOMETIMES = SETTINGS.migrating, SETTINGS.other_moves, SETTINGS.sometimes
LONGEST_RUN, REPAIR_MOVES = SETTINGS.longest_run, SETTINGS.repair_moves


@njit
def pick(st, rng, critical):  # type: ignore[no-untyped-def]
    """A random stage; in half of the cases one of the rank `critical` (-1: no rank is known to be critical)."""
    n = st[SIZE, 0]
    s = below(rng, n)
    if critical >= 0 and uniform(rng) < 0.5:
        for _ in range(n):
            if st[RANK, s] == critical:
                break
            s = s + 1 if s + 1 < n else 0
    return s


@njit
def slide(st, s, e, by):  # type: ignore[no-untyped-def]
    """Move the boundaries s .. e by some layers, if no stage becomes empty; the stages between them keep their size."""
    if s < 1 or e >= st[SIZE, 0] or st[BOUNDS, s] + by <= st[BOUNDS, s - 1] or st[BOUNDS, e] + by >= st[BOUNDS, e + 1]:
        return False
    for k in range(s, e + 1):
        st[BOUNDS, k] += by
    return True


@njit
def migrate(st, rng, critical):  # type: ignore[no-untyped-def]
    """Move one boundary by one or two layers."""
    s = pick(st, rng, critical) + below(rng, 2)
    by = 2 if uniform(rng) < SOMETIMES else 1
    return slide(st, s, s, by if uniform(rng) < 0.5 else -by)


@njit
def shift(st, rng):  # type: ignore[no-untyped-def]
    """Shift a run of stages by one layer: they keep their sizes, and the stages next to the run change theirs."""
    n = st[SIZE, 0]
    if n < 3:
        return False
    s = 1 + below(rng, n - 2)
    return slide(st, s, min(s + 1 + below(rng, LONGEST_RUN), n - 1), 1 if uniform(rng) < 0.5 else -1)


@njit
def move_stage(p, st, rng, critical):  # type: ignore[no-untyped-def]
    """Move a stage, or all consecutive stages of its rank, to another rank."""
    s = pick(st, rng, critical)
    r = below(rng, p.count[RANKS])
    if st[RANK, s] == r:
        return False
    if below(rng, 3) == 0:
        hand_over(st, s, st[RANK, s], r)
    else:
        st[RANK, s] = r
    return True


@njit
def exchange(st, rng, critical):  # type: ignore[no-untyped-def]
    """Exchange the ranks or the places of two stages, or of two visits (runs of consecutive stages on a rank)."""
    n = st[SIZE, 0]
    s = pick(st, rng, critical)
    e = below(rng, n)
    if uniform(rng) < 0.5:
        e = min(s + 1 + below(rng, 3), n - 1)
    x, y = st[RANK, s], st[RANK, e]
    if x == y:
        return False
    way = below(rng, 3)
    if way == 0:
        change_places(st, min(s, e), max(s, e))
    elif way == 1:
        hand_over(st, e, y, -1)
        hand_over(st, s, x, y)
        hand_over(st, e, -1, x)
    else:
        st[RANK, s], st[RANK, e] = y, x
    return True


@njit
def hand_over(st, s, of, to):  # type: ignore[no-untyped-def]
    """Give stage `s` and the consecutive stages of rank `of` around it to another rank."""
    e = s
    while e < st[SIZE, 0] and st[RANK, e] == of:
        st[RANK, e] = to
        e += 1
    e = s - 1
    while e >= 0 and st[RANK, e] == of:
        st[RANK, e] = to
        e -= 1


@njit
def change_places(st, s, e):  # type: ignore[no-untyped-def]
    """Exchange two visits on different ranks, s before e, together with their numbers of layers, so that the ranks keep
    their work."""
    n = st[SIZE, 0]
    a, b, c, d = s, s + 1, e, e + 1
    while a > 0 and st[RANK, a - 1] == st[RANK, s]:
        a -= 1
    while st[RANK, b] == st[RANK, s]:
        b += 1
    while st[RANK, c - 1] == st[RANK, e]:
        c -= 1
    while d < n and st[RANK, d] == st[RANK, e]:
        d += 1
    ranks, widths = np.empty(d - a, np.int64), np.empty(d - a, np.int64)
    for i in range(a, d):
        # Where stage i goes: the second visit first, then what is between, then the first visit.
        k = i - c if i >= c else (i - a + d - b if i < b else i - b + d - c)
        ranks[k], widths[k] = st[RANK, i], st[BOUNDS, i + 1] - st[BOUNDS, i]
    for k in range(d - a):
        st[RANK, a + k] = ranks[k]
        st[BOUNDS, a + k + 1] = st[BOUNDS, a + k] + widths[k]


@njit
def rotate(st, rng):  # type: ignore[no-untyped-def]
    """Rotate the ranks of three consecutive stages."""
    if st[SIZE, 0] < 3:
        return False
    s = below(rng, st[SIZE, 0] - 2)
    a, b, c = st[RANK, s], st[RANK, s + 1], st[RANK, s + 2]
    if uniform(rng) < 0.5:
        st[RANK, s], st[RANK, s + 1], st[RANK, s + 2] = b, c, a
    else:
        st[RANK, s], st[RANK, s + 1], st[RANK, s + 2] = c, a, b
    return True


@njit
def exchange_ranks(p, st, rng):  # type: ignore[no-untyped-def]
    """Exchange all stages of two ranks; this matters if speeds, links or memory differ."""
    x, y = below(rng, p.count[RANKS]), below(rng, p.count[RANKS])
    for s in range(st[SIZE, 0]):
        if st[RANK, s] == x:
            st[RANK, s] = y
        elif st[RANK, s] == y:
            st[RANK, s] = x
    return x != y


@njit
def split(p, st, rng, critical):  # type: ignore[no-untyped-def]
    """Split a stage in two, or send some of its layers elsewhere."""
    n = st[SIZE, 0]
    s = pick(st, rng, critical)
    width = st[BOUNDS, s + 1] - st[BOUNDS, s]
    if width < 2 or n >= st[SIZE, 1]:
        return False
    if uniform(rng) < SOMETIMES:
        return send(st, rng, s, width)
    cut = st[BOUNDS, s] + 1 + below(rng, width - 1)
    insert_stage(st, s)
    st[BOUNDS, s + 1] = cut
    if width < LONGEST_RUN or uniform(rng) >= SOMETIMES:
        st[RANK, s + below(rng, 2)] = below(rng, p.count[RANKS])
    return True


@njit
def merge(st, rng):  # type: ignore[no-untyped-def]
    """Merge two stages: two neighbours, or two stages of one rank."""
    n = st[SIZE, 0]
    if n < 2:
        return False
    if uniform(rng) < SOMETIMES:
        return fetch(st, rng)
    s = 1 + below(rng, n - 1)
    if uniform(rng) < SOMETIMES:
        # A split in place hardly changes the step time, so it is usually accepted. Undo such splits as often as they
        # are made, or the number of stages would keep growing.
        for _ in range(n - 1):
            if st[RANK, s - 1] == st[RANK, s]:
                break
            s = s + 1 if s + 1 < n else 1
        if st[RANK, s - 1] != st[RANK, s]:
            return False
    remove_boundary(st, s, s - below(rng, 2))
    return True


@njit
def send(st, rng, s, width):  # type: ignore[no-untyped-def]
    """Turn some layers of stage `s` into a stage of the same rank elsewhere in the chain. The stages in between slide
    and keep their sizes, so every rank keeps its work, up to differences between layers."""
    n = st[SIZE, 0]
    r = st[RANK, s]
    j = below(rng, n + 1)
    if (j < n and st[RANK, j] == r) or (j > 0 and st[RANK, j - 1] == r):
        return False
    by = 1 + below(rng, min(width - 1, LONGEST_RUN))
    if j <= s:
        for k in range(j, s + 1):
            st[BOUNDS, k] += by
        insert_stage(st, j)
        st[BOUNDS, j + 1] = st[BOUNDS, j]
        st[BOUNDS, j] -= by
    else:
        for k in range(s + 1, j):
            st[BOUNDS, k] -= by
        end = st[BOUNDS, j]
        insert_stage(st, j - 1)
        st[BOUNDS, j] = end - by
    st[RANK, j] = r
    return True


@njit
def fetch(st, rng):  # type: ignore[no-untyped-def]
    """The inverse of `send`: the layers of a stage join another stage of the same rank elsewhere in the chain."""
    n = st[SIZE, 0]
    s = below(rng, n)
    e = below(rng, n)
    for _ in range(n):
        if st[RANK, e] == st[RANK, s] and abs(e - s) > 1:
            break
        e = e + 1 if e + 1 < n else 0
    if st[RANK, e] != st[RANK, s] or abs(e - s) < 2:
        return False
    by = st[BOUNDS, s + 1] - st[BOUNDS, s]
    if s < e:
        for k in range(s + 1, e + 1):
            st[BOUNDS, k] -= by
        # Stage s is empty now: the one after it takes its place.
        remove_boundary(st, s + 1, s + 1)
    else:
        for k in range(e + 1, s + 1):
            st[BOUNDS, k] += by
        remove_boundary(st, s, s - 1)
    return True


@njit
def insert_stage(st, at):  # type: ignore[no-untyped-def]
    """Duplicate stage `at`; the copy follows it directly, and the caller sets the boundary between them."""
    n = st[SIZE, 0]
    for s in range(n, at, -1):
        st[BOUNDS, s + 1] = st[BOUNDS, s]
        st[RANK, s] = st[RANK, s - 1]
        st[REDO, s] = st[REDO, s - 1]
    st[SIZE, 0] = n + 1


@njit
def remove_boundary(st, at, keep):  # type: ignore[no-untyped-def]
    """Merge the stages at-1 and at, with the rank and recomputation of `keep` (one of the two)."""
    n = st[SIZE, 0]
    st[RANK, at - 1] = st[RANK, keep]
    st[REDO, at - 1] = st[REDO, keep]
    for s in range(at, n - 1):
        st[BOUNDS, s] = st[BOUNDS, s + 1]
        st[RANK, s] = st[RANK, s + 1]
        st[REDO, s] = st[REDO, s + 1]
    st[BOUNDS, n - 1] = st[BOUNDS, n]
    st[SIZE, 0] = n - 1


@njit
def change(p, st, rng, may_recompute, critical):  # type: ignore[no-untyped-def]
    """Apply one random move; returns its number in STRUCTURE_MOVES, or -1 if it did not apply."""
    if may_recompute and uniform(rng) < OTHER:
        s = below(rng, st[SIZE, 0])
        st[REDO, s] = 1 - st[REDO, s]
        return RECOMPUTE
    if p.count[VARIANTS] > 1 and uniform(rng) < OTHER:
        a, b = below(rng, p.count[MICRO_BATCHES]), below(rng, p.count[MICRO_BATCHES])
        st[ENTRY, a], st[ENTRY, b] = st[ENTRY, b], st[ENTRY, a]
        return REORDER
    move = MIGRATE if uniform(rng) < MIGRATING else SHIFT + below(rng, MERGE)
    if uniform(rng) < OTHER:
        move = ROTATE + below(rng, 2)
    if move == MIGRATE:
        applied = migrate(st, rng, critical)
    elif move == SHIFT:
        applied = shift(st, rng)
    elif move == MOVE_STAGE:
        applied = move_stage(p, st, rng, critical)
    elif move == EXCHANGE:
        applied = exchange(st, rng, critical)
    elif move == ROTATE:
        applied = rotate(st, rng)
    elif move == EXCHANGE_RANKS:
        applied = exchange_ranks(p, st, rng)
    elif move == SPLIT:
        applied = split(p, st, rng, critical)
    else:
        applied = merge(st, rng)
    return move if applied else -1


@njit
def repair(p, st, rng, target, sc):  # type: ignore[no-untyped-def]
    """Migrate layers away from the busiest rank until the work bound is below `target` or no move helps; returns the
    bound."""
    now = work_bound(p, st, sc)
    for _ in range(REPAIR_MOVES):
        if now <= target:
            break
        busiest = 0
        for r in range(1, p.count[RANKS]):
            if sc.mine[r, LOAD] > sc.mine[busiest, LOAD]:
                busiest = r
        s = pick(st, rng, busiest) + below(rng, 2)
        e = s
        if uniform(rng) < 0.5:
            e = min(s + below(rng, LONGEST_RUN), st[SIZE, 0] - 1)
        by = 1 if uniform(rng) < 0.5 else -1
        if uniform(rng) < SOMETIMES:
            by *= 2
        if e < s or not slide(st, s, e, by):
            continue
        then = work_bound(p, st, sc)
        if then <= now:
            now = then
        else:
            for k in range(s, e + 1):
                st[BOUNDS, k] -= by
            work_bound(p, st, sc)
    return now
