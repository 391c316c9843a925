"""Simulated annealing over structure and priorities together, through the list scheduler.

Knows: the state of one walker (stages, ranks, recomputation, keys) and the moves that change it. Does not
know: time, threads or plans; best.py shares out the budget.

The temperature falls from about 0.08 % to 0.01 % of the step time. The threshold of a move is drawn before it
is judged, so a move dies at its work bound, or as soon as some rank's idle time has grown too large: most moves
cost a fraction of a full simulation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from octopipe.tuner.kernels import (
    A_F,
    A_I,
    ANY_PACE,
    B_F,
    B_I,
    BANK,
    C_I,
    C_W,
    KIND_BITS,
    KIND_F,
    KIND_I,
    KIND_R,
    KIND_W,
    LAPS,
    LOOK,
    MASK,
    NUM_GLOBALS,
    RHO,
    STAGE_BITS,
    W_OVER,
    Problem,
    quick_bound,
    schedule,
)

MOVES = (
    "migrate layers",
    "shift stage",
    "move stage",
    "exchange stages",
    "rotate stages",
    "split stage",
    "merge stages",
    "stage priority",
    "op priority",
    "priorities",
    "recompute",
    "micro-batch order",
    "micro-batches in flight",
    "advance op",
)
"""Names of the moves; the first two change the partition, the next five the placement, then the order."""
PHASE_OF_MOVE = ("partition",) * 2 + ("placement",) * 5 + ("schedule",) * 3 + ("recompute",) + ("schedule",) * 3


FOCUS = 0.5
"""How often a structural move starts from a stage of the rank that finished last."""
STAY, STAY_WIDTH = 0.4, 3
"""How often both halves of a stage that is split stay on its rank, if it has so many layers."""
VISIT, CHANGE_PLACES = 0.33, 0.33
"""How often all stages that follow one another on a rank go to another one together, and how often they take their
sizes along when they are exchanged."""
ELSEWHERE, MOST_SENT = 0.4, 3
"""How often a stage that is split or merged is so with another place of the chain, and how many layers are sent."""
HINTED = 0.4
"""How often a move of the order advances an op that another rank waited for."""
MAX_HINTS = 64
SLACK = 0.003
"""How far, as a share of the step time, a schedule may fall behind the walker's pace before it is given up. Of the
schedules that were accepted in the end hardly one was that late after any lap; of the others most were after two."""
FULL_RACE = 0.05
"""How often a schedule may run at any pace."""
FULL, RELIEF = 5e-4, 0.005
"""A walk this close to its busiest rank's work bound can only gain where that falls: structural moves then aim at up to
so much less, as shares of the step time."""
REPAIR = 40
"""Most migrations tried to rebalance the ranks after a structural move."""


class State(NamedTuple):
    """One walker. Arrays are sized for the most stages allowed; `size[0]` of them are in use."""

    size: Any
    bounds: Any
    rank: Any
    recompute: Any
    flight: Any
    """Most micro-batches of a stage between their F and their I."""
    entry: Any
    glob: Any
    offset: Any
    wiggle: Any


def make_state(problem: Problem, max_stages: int) -> State:
    m = problem.num_micro_batches
    return State(
        size=np.zeros(1, np.int32),
        bounds=np.zeros(max_stages + 1, np.int32),
        rank=np.zeros(max_stages, np.int32),
        recompute=np.zeros(max_stages, np.bool_),
        flight=np.full(max_stages, m, np.int32),
        entry=np.arange(m, dtype=np.int32),
        glob=np.zeros(NUM_GLOBALS),
        offset=np.zeros((3, max_stages)),
        wiggle=np.zeros((2, max_stages, m)),
    )


@njit(cache=True, nogil=True)
def copy_state(to, of):  # type: ignore[no-untyped-def]
    """Overwrite a walker with another."""
    n = of.size[0]
    to.size[0] = n
    for s in range(n):
        to.bounds[s] = of.bounds[s]
        to.rank[s] = of.rank[s]
        to.recompute[s] = of.recompute[s]
        to.flight[s] = of.flight[s]
        for k in range(3):
            to.offset[k, s] = of.offset[k, s]
        for m in range(of.entry.size):
            to.wiggle[0, s, m] = of.wiggle[0, s, m]
            to.wiggle[1, s, m] = of.wiggle[1, s, m]
    to.bounds[n] = of.bounds[n]
    to.entry[:] = of.entry
    to.glob[:] = of.glob


@njit(cache=True, nogil=True)
def uniform(rng):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from a xorshift generator whose state the caller owns: threads do not share one."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True, nogil=True)
def below(rng, n):  # type: ignore[no-untyped-def]
    return min(int(uniform(rng) * n), n - 1)


@njit(cache=True, nogil=True)
def bell(rng):  # type: ignore[no-untyped-def]
    """Roughly normal, mean 0 and deviation 1, with short tails."""
    return (uniform(rng) + uniform(rng) + uniform(rng) - 1.5) * 2.0


@njit(cache=True, nogil=True)
def insert_stage(st, at):  # type: ignore[no-untyped-def]
    """Double stage `at`: the copy stands right after it; the caller sets the boundary between them."""
    n = st.size[0]
    for s in range(n, at, -1):
        st.bounds[s + 1] = st.bounds[s]
        st.rank[s] = st.rank[s - 1]
        st.recompute[s] = st.recompute[s - 1]
        st.flight[s] = st.flight[s - 1]
        for k in range(3):
            st.offset[k, s] = st.offset[k, s - 1]
        st.wiggle[0, s, :] = st.wiggle[0, s - 1, :]
        st.wiggle[1, s, :] = st.wiggle[1, s - 1, :]
    st.size[0] = n + 1


@njit(cache=True, nogil=True)
def remove_boundary(st, at, keep):  # type: ignore[no-untyped-def]
    """Merge stages at-1 and at, with rank, recomputation and keys of `keep` (one of the two)."""
    n = st.size[0]
    if keep == at:
        st.rank[at - 1] = st.rank[at]
        st.recompute[at - 1] = st.recompute[at]
        st.flight[at - 1] = st.flight[at]
        for k in range(3):
            st.offset[k, at - 1] = st.offset[k, at]
        st.wiggle[0, at - 1, :] = st.wiggle[0, at, :]
        st.wiggle[1, at - 1, :] = st.wiggle[1, at, :]
    for s in range(at, n - 1):
        st.bounds[s] = st.bounds[s + 1]
        st.rank[s] = st.rank[s + 1]
        st.recompute[s] = st.recompute[s + 1]
        st.flight[s] = st.flight[s + 1]
        for k in range(3):
            st.offset[k, s] = st.offset[k, s + 1]
        st.wiggle[0, s, :] = st.wiggle[0, s + 1, :]
        st.wiggle[1, s, :] = st.wiggle[1, s + 1, :]
    st.bounds[n - 1] = st.bounds[n]
    st.size[0] = n - 1


@njit(cache=True, nogil=True)
def pick(st, rng, critical):  # type: ignore[no-untyped-def]
    """A stage; half of the time one on the critical rank."""
    n = st.size[0]
    s = below(rng, n)
    if critical >= 0 and uniform(rng) < FOCUS:
        for _ in range(n):
            if st.rank[s] == critical:
                break
            s = s + 1 if s + 1 < n else 0
    return s


@njit(cache=True, nogil=True)
def migrate(st, rng, critical=-1):  # type: ignore[no-untyped-def]
    """Move one boundary by a layer or two."""
    n = st.size[0]
    if n < 2:
        return False
    s = pick(st, rng, critical) + below(rng, 2)
    if s == 0 or s == n:
        return False
    by = 1 if uniform(rng) < 0.75 else 2
    if uniform(rng) < 0.5:
        by = -by
    to = st.bounds[s] + by
    if to <= st.bounds[s - 1] or to >= st.bounds[s + 1]:
        return False
    st.bounds[s] = to
    return True


@njit(cache=True, nogil=True)
def shift(st, rng):  # type: ignore[no-untyped-def]
    """Slide a run of one to three stages by a layer: they keep their sizes, their neighbours change."""
    n = st.size[0]
    if n < 3:
        return False
    s = 1 + below(rng, n - 2)
    e = min(s + 1 + below(rng, 3), n - 1)
    by = 1 if uniform(rng) < 0.5 else -1
    if st.bounds[s] + by <= st.bounds[s - 1] or st.bounds[e] + by >= st.bounds[e + 1]:
        return False
    for k in range(s, e + 1):
        st.bounds[k] += by
    return True


@njit(cache=True, nogil=True)
def fit_flight(p, st, rank, share):  # type: ignore[no-untyped-def]
    """Let a rank's stages keep as many micro-batches in flight as fill this share of its memory.

    In proportion to the way from a stage's F to its I (Little's law), so that no stage takes the memory that
    the later ones of its rank need for the same micro-batches.
    """
    n, M, last = st.size[0], p.num_micro_batches, p.num_layers
    room = p.capacity[rank]
    most = 0.0
    for s in range(n):
        if st.rank[s] == rank:
            room -= p.static[st.bounds[s + 1]] - p.static[st.bounds[s]]
            a = st.bounds[s]
            most = max(most, p.forward[0, last] - p.forward[0, a] + p.input[0, last] - p.input[0, a])
    room *= share
    low, high = 0.0, M * p.unit / max(most, 1e-9)
    high = max(high, 1.0) * 4.0
    if room == np.inf:
        low = high
    for _ in range(12):
        if low == high:
            break
        slack = 0.5 * (low + high)
        held = 0.0
        for s in range(n):
            if st.rank[s] == rank:
                a, z = st.bounds[s], st.bounds[s + 1]
                way = p.forward[0, last] - p.forward[0, a] + p.input[0, last] - p.input[0, a]
                hold = p.boundary[0, a] if st.recompute[s] else p.activation[0, z] - p.activation[0, a]
                held += hold * min(int(1.5 + slack * way / p.unit), M)
        if held <= room:
            low = slack
        else:
            high = slack
    for s in range(n):
        if st.rank[s] == rank:
            a = st.bounds[s]
            way = p.forward[0, last] - p.forward[0, a] + p.input[0, last] - p.input[0, a]
            st.flight[s] = min(int(1.5 + low * way / p.unit), M)


@njit(cache=True, nogil=True)
def hand_over(st, s, of, to):  # type: ignore[no-untyped-def]
    """Give stage `s` and its neighbours on rank `of` to another rank."""
    e = s
    while e < st.size[0] and st.rank[e] == of:
        st.rank[e] = to
        e += 1
    e = s - 1
    while e >= 0 and st.rank[e] == of:
        st.rank[e] = to
        e -= 1


@njit(cache=True, nogil=True)
def change_places(st, s, e):  # type: ignore[no-untyped-def]
    """Exchange two visits, s before e on other ranks, with as many layers as they have: ranks keep their work."""
    n = st.size[0]
    a, b, c, d = s, s + 1, e, e + 1
    while a > 0 and st.rank[a - 1] == st.rank[s]:
        a -= 1
    while st.rank[b] == st.rank[s]:
        b += 1
    while st.rank[c - 1] == st.rank[e]:
        c -= 1
    while d < n and st.rank[d] == st.rank[e]:
        d += 1
    ranks, widths = np.empty(d - a, np.int32), np.empty(d - a, np.int32)
    k = 0
    for first, last in ((c, d), (b, c), (a, b)):
        for i in range(first, last):
            ranks[k], widths[k] = st.rank[i], st.bounds[i + 1] - st.bounds[i]
            k += 1
    for k in range(d - a):
        st.rank[a + k] = ranks[k]
        st.bounds[a + k + 1] = st.bounds[a + k] + widths[k]


@njit(cache=True, nogil=True)
def send(st, rng, s, width):  # type: ignore[no-untyped-def]
    """Some layers of stage `s` become a stage of its rank elsewhere in the chain; those between slide, none changes its
    size, and no rank its work but for layers that differ."""
    n = st.size[0]
    r = st.rank[s]
    j = below(rng, n + 1)
    if (j < n and st.rank[j] == r) or (j > 0 and st.rank[j - 1] == r):
        return False
    by = 1 + below(rng, min(width - 1, MOST_SENT))
    if j <= s:
        for k in range(j, s + 1):
            st.bounds[k] += by
        insert_stage(st, j)
        st.bounds[j + 1] = st.bounds[j]
        st.bounds[j] -= by
    else:
        for k in range(s + 1, j):
            st.bounds[k] -= by
        end = st.bounds[j]
        insert_stage(st, j - 1)
        st.bounds[j] = end - by
    st.rank[j] = r
    return True


@njit(cache=True, nogil=True)
def fetch(st, rng):  # type: ignore[no-untyped-def]
    """The layers of a stage join another one of its rank elsewhere: as `send`, undone."""
    n = st.size[0]
    s = below(rng, n)
    e = below(rng, n)
    for _ in range(n):
        if st.rank[e] == st.rank[s] and abs(e - s) > 1:
            break
        e = e + 1 if e + 1 < n else 0
    if st.rank[e] != st.rank[s] or abs(e - s) < 2:
        return False
    by = st.bounds[s + 1] - st.bounds[s]
    if s < e:
        for k in range(s + 1, e + 1):
            st.bounds[k] -= by
        # Stage s is empty now: the one after it takes its place.
        remove_boundary(st, s + 1, s + 1)
    else:
        for k in range(e + 1, s + 1):
            st.bounds[k] += by
        remove_boundary(st, s, s - 1)
    return True


@njit(cache=True, nogil=True)
def mutate(p, st, rng, may_recompute, structure, critical, hints, num_hints):  # type: ignore[no-untyped-def]
    """One random move; returns its number in MOVES, or -1 where it does not apply.

    `structure` is the share of moves that change partition or placement.
    """
    n = st.size[0]
    if uniform(rng) < structure:
        u = uniform(rng)
        if u < 0.34:
            return 0 if migrate(st, rng, critical) else -1
        if u < 0.44:
            return 1 if shift(st, rng) else -1
        if u < 0.58:
            s = pick(st, rng, critical)
            r = below(rng, p.num_ranks)
            if st.rank[s] == r:
                return -1
            if uniform(rng) < VISIT:
                hand_over(st, s, st.rank[s], r)
            else:
                st.rank[s] = r
            return 2
        if u < 0.74:
            s = pick(st, rng, critical)
            e = below(rng, n)
            if uniform(rng) < 0.5:
                e = min(s + 1 + below(rng, 3), n - 1)
            x, y = st.rank[s], st.rank[e]
            if x == y:
                return -1
            u = uniform(rng)
            if u < CHANGE_PLACES:
                change_places(st, min(s, e), max(s, e))
            elif u < CHANGE_PLACES + VISIT:
                hand_over(st, e, y, -1)
                hand_over(st, s, x, y)
                hand_over(st, e, -1, x)
            else:
                st.rank[s], st.rank[e] = y, x
            return 3
        if u < 0.78:
            if n < 3:
                return -1
            s = below(rng, n - 2)
            a, b, c = st.rank[s], st.rank[s + 1], st.rank[s + 2]
            if uniform(rng) < 0.5:
                st.rank[s], st.rank[s + 1], st.rank[s + 2] = b, c, a
            else:
                st.rank[s], st.rank[s + 1], st.rank[s + 2] = c, a, b
            return 4
        if u < 0.80:
            # Two ranks trade all their stages: matters where speeds, links or memory differ.
            x, y = below(rng, p.num_ranks), below(rng, p.num_ranks)
            if x == y:
                return -1
            for s in range(n):
                if st.rank[s] == x:
                    st.rank[s] = y
                elif st.rank[s] == y:
                    st.rank[s] = x
            return 4
        if u < 0.90:
            s = pick(st, rng, critical)
            width = st.bounds[s + 1] - st.bounds[s]
            if width < 2 or n >= st.rank.size:
                return -1
            if uniform(rng) < ELSEWHERE:
                return 5 if send(st, rng, s, width) else -1
            cut = st.bounds[s] + 1 + below(rng, width - 1)
            insert_stage(st, s)
            st.bounds[s + 1] = cut
            if width < STAY_WIDTH or uniform(rng) >= STAY:
                e = s + below(rng, 2)
                st.rank[e] = below(rng, p.num_ranks)
            return 5
        if n < 2:
            return -1
        if uniform(rng) < ELSEWHERE:
            return 6 if fetch(st, rng) else -1
        s = 1 + below(rng, n - 1)
        if uniform(rng) < STAY:
            # Splits in place hardly cost anything: undone as often as they are made, or stages would grow in number.
            for _ in range(n - 1):
                if st.rank[s - 1] == st.rank[s]:
                    break
                s = s + 1 if s + 1 < n else 1
            if st.rank[s - 1] != st.rank[s]:
                return -1
        remove_boundary(st, s, s - below(rng, 2))
        return 6
    u = uniform(rng)
    if may_recompute and u < 0.15:
        s = below(rng, n)
        st.recompute[s] = not st.recompute[s]
        return 10
    if p.variants > 1 and u > 0.85:
        a, b = below(rng, p.num_micro_batches), below(rng, p.num_micro_batches)
        st.entry[a], st.entry[b] = st.entry[b], st.entry[a]
        return 11
    if num_hints > 0 and uniform(rng) < HINTED:
        # Let an op that held up another rank go before the one that ran just before it.
        h = below(rng, num_hints)
        kind, s, m = hints[h, 0], hints[h, 1], hints[h, 2]
        if s < n:
            row, slope = (0, A_F) if kind == KIND_F else (1, A_I)
            mine = key_of(p, st, kind, s, m)
            other = key_of(p, st, hints[h, 3], min(hints[h, 4], n - 1), hints[h, 5])
            by = other - mine - (0.02 + 0.5 * uniform(rng)) * st.glob[slope]
            if by < 0.0:
                st.wiggle[row, s, m] += by
                return 13
    u = uniform(rng)
    if u < 0.15:
        if p.has_limit and uniform(rng) < 0.3:
            share = 0.7 + 0.6 * uniform(rng)
            if uniform(rng) < 0.5:
                fit_flight(p, st, below(rng, p.num_ranks), share)
            else:
                for r in range(p.num_ranks):
                    fit_flight(p, st, r, share)
            return 12
        by = 1 if uniform(rng) < 0.5 else -1
        s = below(rng, n)
        e = s + 1
        if uniform(rng) < 0.4:
            e = min(n, s + 1 + below(rng, n))
        for k in range(s, e):
            st.flight[k] = min(max(st.flight[k] + by, 1), p.num_micro_batches)
        return 12
    if u < 0.40:
        s = below(rng, n)
        k = below(rng, 2) if uniform(rng) < 0.9 else 2
        if uniform(rng) < 0.1:
            st.offset[k, s] = 0.0
        else:
            st.offset[k, s] += bell(rng) * (1.0 if uniform(rng) < 0.5 else 0.25) * st.glob[A_I if k == 1 else A_F]
        return 7
    if u < 0.70:
        s = below(rng, n)
        k = below(rng, 2)
        m = below(rng, p.num_micro_batches)
        by = bell(rng) * (2.0 if uniform(rng) < 0.5 else 0.5) * st.glob[A_I if k == 1 else A_F]
        stop = m + 1 if uniform(rng) < 0.7 else p.num_micro_batches
        if uniform(rng) < 0.15:
            by = -st.wiggle[k, s, m]
        for i in range(m, stop):
            st.wiggle[k, s, i] += by
        return 8
    k = below(rng, 10)
    if k == A_F or k == A_I:
        st.glob[k] = max(0.05, st.glob[k] * (1.0 + 0.15 * bell(rng)))
    elif k == B_F or k == B_I or k == C_I:
        st.glob[k] += bell(rng) * (1.0 if uniform(rng) < 0.5 else 0.2) * st.glob[A_F if k == B_F else A_I]
    elif k == LOOK:
        if uniform(rng) < 0.15:
            st.glob[k] = 0.5 * uniform(rng)
        else:
            st.glob[k] = 0.0 if uniform(rng) < 0.2 else abs(st.glob[k] + 0.01 * bell(rng))
    elif k == RHO:
        st.glob[k] = 1.0 if uniform(rng) < 0.2 else min(1.0, max(0.0, st.glob[k] + 0.2 * bell(rng)))
    elif k == BANK:
        st.glob[k] = 0.0 if uniform(rng) < 0.3 else uniform(rng)
    elif k == W_OVER:
        st.glob[k] = 10.0 if uniform(rng) < 0.2 else uniform(rng) * 0.2
    elif k == C_W:
        st.glob[k] = 1e9 if uniform(rng) < 0.5 else p.num_micro_batches * (uniform(rng) * 2.0)
    return 9


@njit(cache=True, nogil=True)
def key_of(p, st, kind, s, m):  # type: ignore[no-untyped-def]
    """The priority of an F or I, as `schedule` computes it."""
    if kind == KIND_F:
        share = p.forward[0, st.bounds[s]] / max(p.forward[0, p.num_layers], 1e-12)
        return st.glob[B_F] * share + st.offset[0, s] + st.glob[A_F] * m + st.wiggle[0, s, m]
    share = 1.0 - p.input[0, st.bounds[s + 1]] / max(p.input[0, p.num_layers], 1e-12)
    return st.glob[C_I] + st.glob[B_I] * share + st.offset[1, s] + st.glob[A_I] * m + st.wiggle[1, s, m]


@njit(cache=True, nogil=True)
def diagnose(p, st, sc, where, hints):  # type: ignore[no-untyped-def]
    """Why ranks idled in the schedule just built: rows (op, the op that ran before it and held it up).

    From the op after an idle gap the chain of inputs is followed back to the first one that did not run as soon
    as it could, because its rank ran another F or I first.
    """
    n = st.size[0]
    vary = 1 if p.variants > 1 else 0
    for r in range(p.num_ranks):
        for i in range(sc.length[r]):
            code = sc.seq[r, i]
            kind = code >> KIND_BITS
            if kind == KIND_F or kind == KIND_I:
                where[0 if kind == KIND_F else 1, (code >> STAGE_BITS) & MASK, code & MASK] = i
    found = 0
    for r in range(p.num_ranks):
        clock = 0.0
        for i in range(sc.length[r]):
            code = sc.seq[r, i]
            kind = code >> KIND_BITS
            s = (code >> STAGE_BITS) & MASK
            m = code & MASK
            v = st.entry[m] * vary
            if kind == KIND_W:
                clock = sc.end[r, i]
                continue
            start = sc.end[r, i] - (sc.i_ms[s, v] if kind == KIND_I else sc.f_ms[s, v])
            if start > clock + 1e-9 and kind != KIND_R and i > 0:
                # Follow the inputs back.
                for _ in range(4 * n):
                    if kind == KIND_F:
                        if s == 0:
                            break
                        s -= 1
                    elif s + 1 < n:
                        s += 1
                    else:
                        kind = KIND_F
                    q = st.rank[s]
                    j = where[0 if kind == KIND_F else 1, s, m]
                    ready = sc.arrive_f[s, m] if kind == KIND_F else sc.arrive_i[s, m]
                    began = sc.end[q, j] - (sc.f_ms[s, v] if kind == KIND_F else sc.i_ms[s, v])
                    if began > ready + 1e-9:
                        if j > 0:
                            before = sc.seq[q, j - 1]
                            other = before >> KIND_BITS
                            if other == KIND_F or other == KIND_I:
                                hints[found, 0], hints[found, 1], hints[found, 2] = kind, s, m
                                hints[found, 3] = other
                                hints[found, 4] = (before >> STAGE_BITS) & MASK
                                hints[found, 5] = before & MASK
                                found += 1
                        break
                if found == hints.shape[0]:
                    return found
            clock = sc.end[r, i]
    return found


@njit(cache=True, nogil=True)
def repair(p, st, rng, target, loads):  # type: ignore[no-untyped-def]
    """Migrate layers off the busiest rank until the work bound is below `target`, or give up; returns it."""
    n = st.size[0]
    now = quick_bound(p, n, st.bounds, st.rank, st.recompute, loads)
    for _ in range(REPAIR):
        if now <= target:
            break
        busiest = 0
        for r in range(1, p.num_ranks):
            if loads[r] > loads[busiest]:
                busiest = r
        s = pick(st, rng, busiest) + below(rng, 2)
        if s == 0 or s == n:
            continue
        # Slide the run of boundaries s .. e by one layer: stages between keep their size.
        e = s
        if uniform(rng) < 0.5:
            e = min(s + below(rng, 4), n - 1)
        by = 1 if uniform(rng) < 0.5 else -1
        if uniform(rng) < 0.3:
            by *= 2
        if st.bounds[s] + by <= st.bounds[s - 1] or st.bounds[e] + by >= st.bounds[e + 1]:
            continue
        for k in range(s, e + 1):
            st.bounds[k] += by
        then = quick_bound(p, n, st.bounds, st.rank, st.recompute, loads)
        if then <= now:
            now = then
        else:
            for k in range(s, e + 1):
                st.bounds[k] -= by
            quick_bound(p, n, st.bounds, st.rank, st.recompute, loads)
    return now


@njit(cache=True, nogil=True)
def race(p, st, margin, cutoff, pace_limit, sc):  # type: ignore[no-untyped-def]
    """Step time of a walker; infinite when it exceeds the cutoff, falls behind the pace, does not fit or deadlocks."""
    n = st.size[0]
    if quick_bound(p, n, st.bounds, st.rank, st.recompute, sc.free) > cutoff:
        return np.inf
    return schedule(
        p, n, st.bounds, st.rank, st.recompute, st.flight, st.entry, st.glob, st.offset, st.wiggle, margin, cutoff,
        pace_limit, sc,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def judge(p, st, margin, cutoff, sc):  # type: ignore[no-untyped-def]
    """As `race`, at any pace."""
    return race(p, st, margin, cutoff, ANY_PACE, sc)


@njit(cache=True, nogil=True)
def anneal(
    p, st, best, back, margin, sc, rng, iterations, hot, cold, current, best_ms, may_recompute, structure, cap, log
):  # type: ignore[no-untyped-def]
    """`iterations` moves of one walker; returns (its step time, the best one's, lines written to `log`).

    A structural move must keep the work bound (load and head of the busiest rank) below `cap`: a rank that is full
    leaves the order of all others without pressure, and the walk would rest there. `st` walks, `best` keeps the best
    seen, `back` is scratch. Lines of log: iteration, move, before, after.
    """
    lines = 0
    critical = -1
    balance = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free)
    num_hints = 0
    hints = np.zeros((MAX_HINTS, 6), np.int32)
    where = np.zeros((2, st.rank.size, p.num_micro_batches), np.int32)
    pace = np.full(LAPS, np.inf)
    limit = np.full(LAPS, np.inf)
    for i in range(iterations):
        temperature = (hot + (cold - hot) * i / iterations) * best_ms
        copy_state(back, st)
        move = mutate(p, st, rng, may_recompute, structure, critical, hints, num_hints)
        while uniform(rng) < 0.25:
            more = mutate(p, st, rng, may_recompute, structure, critical, hints, num_hints)
            if move < 0:
                move = more
        if move < 0:
            copy_state(st, back)
            continue
        cutoff = current - temperature * np.log(max(uniform(rng), 1e-300))
        value = np.inf
        target = min(cap, cutoff)
        if current <= balance * (1.0 + FULL) and uniform(rng) < 0.3:
            target = min(target, current * (1.0 - RELIEF * uniform(rng)))
        if move >= 7 or repair(p, st, rng, target, sc.free) <= max(cap, balance):
            late = p.num_ranks * (cutoff - current + SLACK * current)
            if uniform(rng) < FULL_RACE:
                late = np.inf
            for lap in range(LAPS):
                limit[lap] = pace[lap] + late
            value = race(p, st, margin, cutoff, limit, sc)
        if value <= cutoff:
            current = value
            pace[:] = sc.pace
            critical = sc.count[p.num_ranks]
            balance = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free)
            num_hints = diagnose(p, st, sc, where, hints)
            if value < best_ms - 1e-9:
                if lines < log.shape[0]:
                    log[lines, 0] = i
                    log[lines, 1] = move
                    log[lines, 2] = best_ms
                    log[lines, 3] = value
                    lines += 1
                best_ms = value
                copy_state(best, st)
        else:
            copy_state(st, back)
    return current, best_ms, lines
