"""Annealing with every rank's F and I in a fixed sequence, its "word", and the W woven in by rule.

Knows: how to time words (`weave`) and how to change them, the partition and the placement. Does not know: where a word
came from (kernels.py builds the first one by list scheduling) or what a plan is.

List scheduling is chaotic: move one layer and half of the decisions change. Fully fixed orders (follow.py) are brittle:
every W sits at one place, and the least shift of an input leaves it in the way. Words are in between: F and I keep
their order, so a small change has a small effect, and the W fill whatever gaps there are then.

A letter is a stage and F or I; the micro-batch is the next one of that stage, so every word is first in, first out.
A rank's decisions depend only on when its inputs arrive, not on the order in which ranks are looked at. So a word
changed from some position on is timed again only from the last point that no change can have reached.

W by rule: before a letter whose input is late, the longest W that fits the gap, else the one that overruns least, if by
less than `over`; before an F that lacks memory, the W that frees most; the rest at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from octopipe.tune.anneal import (
    State,
    below,
    copy_state,
    insert_stage,
    make_state,
    pick,
    reach,
    remove_boundary,
    slide,
    uniform,
)
from octopipe.tune.follow import Orders
from octopipe.tune.kernels import (
    ANY_PACE,
    KIND_BITS,
    KIND_F,
    KIND_I,
    KIND_R,
    KIND_W,
    MASK,
    STAGE_BITS,
    W_OVER,
    Problem,
    Scratch,
    extras_end,
    price,
    quick_bound,
    schedule,
)

WORD_MOVES = (
    "migrate layers",
    "shift stages",
    "move stage",
    "exchange stages",
    "split stage",
    "merge stages",
    "swap ops",
    "advance op",
    "W overrun",
    "recompute",
)
STRUCTURE = 0.4
"""Share of moves that change partition or placement."""
WORD_PHASES = ("partition",) * 2 + ("placement",) * 4 + ("schedule",) * 3 + ("recompute",)
MARKS = 24
"""Points of a timing from which it can be taken up again."""
POS, LENGTH, LAST = range(3)
"""Columns of `Loom.at`: the next letter, ops so far, the last one of them."""
CLOCK, USED, LEFT, WAY = range(4)
"""Columns of `Loom.now`: a rank's time, bytes in use, work left, F and I left plus the last gradient's way."""
NEXT_F, NEXT_I, NEXT_W = range(3)
"""Columns of `Loom.next`."""


class Words(NamedTuple):
    """Every rank's F and I in order, as stage << 1 | is I."""

    letter: Any
    """[R, 2 * S * M]"""
    length: Any


class Woven(NamedTuple):
    """What came of a walk over words."""

    step_ms: float
    state: State
    words: Words
    orders: Orders


class Loom(NamedTuple):
    """Working memory of `weave`, for two timings: the one that stands and the one being tried."""

    next: Any
    """[S, 3]: micro-batches that are next."""
    at: Any
    """[R, 3]"""
    now: Any
    """[R, 4]"""
    channel: Any
    """[R, R]: until when a direction is taken."""
    arrive: Any
    """[2, 2, S, M]: of each timing, when inputs and gradients are there; infinite while unknown."""
    seq: Any
    """[2, R, ops]: of each timing, the orders with R and W; packed as in Scratch."""
    end: Any
    done: Any
    """[2, S]: when a stage's last W ends."""
    length: Any
    """[2, R]: ops of each timing."""
    mark_next: Any
    """[2, MARKS, S, 3]: copies of the above as they were at each mark."""
    mark_at: Any
    mark_now: Any
    mark_channel: Any
    marks: Any
    """[2]: how many there are."""
    first: Any
    """[R]: where each word was changed first; beyond its end where it was not."""
    finish: Any
    """[4, S, M]: when each op ends, in the timing that stands; `where` its place in the word."""
    where: Any
    path: Any
    """[ops, 2]: rank and place in the word of critical letters, last first."""
    spare: Any


def make_words(problem: Problem, max_stages: int) -> Words:
    ops = 2 * max_stages * problem.num_micro_batches
    return Words(np.zeros((problem.num_ranks, ops), np.int32), np.zeros(problem.num_ranks, np.int64))


def make_loom(problem: Problem, max_stages: int) -> Loom:
    s, m, r = max_stages, problem.num_micro_batches, problem.num_ranks
    return Loom(
        next=np.zeros((s, 3), np.int64),
        at=np.zeros((r, 3), np.int64),
        now=np.zeros((r, 4)),
        channel=np.zeros((r, r)),
        arrive=np.zeros((2, 2, s, m)),
        seq=np.zeros((2, r, 4 * s * m), np.int32),
        end=np.zeros((2, r, 4 * s * m)),
        done=np.zeros((2, s)),
        length=np.zeros((2, r), np.int64),
        mark_next=np.zeros((2, MARKS, s, 3), np.int64),
        mark_at=np.zeros((2, MARKS, r, 3), np.int64),
        mark_now=np.zeros((2, MARKS, r, 4)),
        mark_channel=np.zeros((2, MARKS, r, r)),
        marks=np.zeros(2, np.int64),
        first=np.zeros(r, np.int64),
        finish=np.zeros((4, s, m)),
        where=np.zeros((4, s, m), np.int64),
        path=np.zeros((2 * s * m, 2), np.int64),
        spare=np.zeros(4 * s * m, np.int64),
    )


@njit(cache=True, nogil=True)
def copy_words(to, of):  # type: ignore[no-untyped-def]
    for r in range(of.length.size):
        n = of.length[r]
        to.length[r] = n
        for i in range(n):
            to.letter[r, i] = of.letter[r, i]


@njit(cache=True, nogil=True)
def read_words(words, seq, length):  # type: ignore[no-untyped-def]
    """The F and I of full orders."""
    for r in range(words.length.size):
        n = 0
        for i in range(length[r]):
            code = seq[r, i]
            kind = code >> KIND_BITS
            if kind == KIND_F or kind == KIND_I:
                words.letter[r, n] = ((code >> STAGE_BITS) & MASK) << 1 | (1 if kind == KIND_I else 0)
                n += 1
        words.length[r] = n


@njit(cache=True, nogil=True)
def begin_weave(p, st, margin, sc, lo, b):  # type: ignore[no-untyped-def]
    """Everything at its beginning; False where static memory alone does not fit."""
    stages, M = st.size[0], p.num_micro_batches
    if not price(p, stages, st.bounds, st.rank, st.recompute, margin, sc):
        return False
    for s in range(stages):
        for k in range(3):
            lo.next[s, k] = 0
        for m in range(M):
            lo.arrive[b, 0, s, m] = np.inf
            lo.arrive[b, 1, s, m] = np.inf
    for m in range(M):
        lo.arrive[b, 0, 0, m] = 0.0
    for r in range(p.num_ranks):
        lo.at[r, POS] = 0
        lo.at[r, LENGTH] = 0
        lo.at[r, LAST] = -1
        lo.now[r, CLOCK] = 0.0
        lo.now[r, USED] = sc.used[r]
        lo.now[r, LEFT] = sc.left[r]
        lo.now[r, WAY] = 0.0
        for q in range(p.num_ranks):
            lo.channel[r, q] = 0.0
    lo.marks[b] = 0
    if p.variants == 1:
        # The last gradient of a rank's lowest stage must still pass the stages below; the last W of stage 0 follows it.
        back = 0.0
        for s in range(stages):
            r = st.rank[s]
            if s == sc.on_rank[r, 0]:
                lo.now[r, WAY] += back + sc.hop_i[s, 0]
            back += sc.i_ms[s, 0] + (sc.hop_i[s, 0] if s > 0 else sc.w_ms[0, 0])
            lo.now[r, WAY] += M * (sc.f_ms[s, 0] + sc.i_ms[s, 0])
    return True


@njit(cache=True, nogil=True)
def resume_weave(p, st, lo, a, b):  # type: ignore[no-untyped-def]
    """Set timing `b` to where timing `a` was at the last mark before any change; returns that mark, or -1."""
    stages, ranks, M = st.size[0], p.num_ranks, p.num_micro_batches
    k = lo.marks[a] - 1
    for r in range(ranks):
        while k >= 0 and lo.mark_at[a, k, r, POS] > lo.first[r]:
            k -= 1
    if k < 0:
        return k
    for s in range(stages):
        for j in range(3):
            lo.next[s, j] = lo.mark_next[a, k, s, j]
    for r in range(ranks):
        for j in range(3):
            lo.at[r, j] = lo.mark_at[a, k, r, j]
        for j in range(4):
            lo.now[r, j] = lo.mark_now[a, k, r, j]
        for q in range(ranks):
            lo.channel[r, q] = lo.mark_channel[a, k, r, q]
    for s in range(stages):
        known = lo.next[s - 1, NEXT_F] if s > 0 else M
        for m in range(known):
            lo.arrive[b, 0, s, m] = lo.arrive[a, 0, s, m]
        for m in range(known, M):
            lo.arrive[b, 0, s, m] = np.inf
        known = lo.next[s + 1, NEXT_I] if s + 1 < stages else lo.next[s, NEXT_F]
        for m in range(known):
            lo.arrive[b, 1, s, m] = lo.arrive[a, 1, s, m]
        for m in range(known, M):
            lo.arrive[b, 1, s, m] = np.inf
        lo.done[b, s] = lo.done[a, s]
    lo.marks[b] = k + 1
    return k


@njit(cache=True, nogil=True)
def keep_weave(p, st, lo, a, b, mark):  # type: ignore[no-untyped-def]
    """Timing `b`, taken up from timing `a` at a mark, is to stand alone: give it what came before."""
    for k in range(mark + 1):
        for s in range(st.size[0]):
            for j in range(3):
                lo.mark_next[b, k, s, j] = lo.mark_next[a, k, s, j]
        for r in range(p.num_ranks):
            for j in range(3):
                lo.mark_at[b, k, r, j] = lo.mark_at[a, k, r, j]
            for j in range(4):
                lo.mark_now[b, k, r, j] = lo.mark_now[a, k, r, j]
            for q in range(p.num_ranks):
                lo.mark_channel[b, k, r, q] = lo.mark_channel[a, k, r, q]
    if mark >= 0:
        for r in range(p.num_ranks):
            for i in range(lo.mark_at[a, mark, r, LENGTH]):
                lo.seq[b, r, i] = lo.seq[a, r, i]
                lo.end[b, r, i] = lo.end[a, r, i]


@njit(cache=True, nogil=True)
def weave(p, st, words, over, cutoff, sc, lo, b):  # type: ignore[no-untyped-def]
    """Time the words from where `lo` stands; infinite on deadlock, for lack of memory, or beyond the cutoff.

    Writes orders, ends and marks of timing `b`.
    """
    stages, ranks, M = st.size[0], p.num_ranks, p.num_micro_batches
    inf = np.inf
    vary = 1 if p.variants > 1 else 0
    nxt, seq, ends = lo.next, lo.seq[b], lo.end[b]
    arrive_f, arrive_i = lo.arrive[b, 0], lo.arrive[b, 1]
    total = 2 * stages * M
    done = 0
    for r in range(ranks):
        done += lo.at[r, POS]
    spacing = max(total // MARKS, 1)
    following = (done // spacing + 1) * spacing
    while done < total:
        moved = False
        for r in range(ranks):
            if done >= following and lo.marks[b] < MARKS:
                k = lo.marks[b]
                lo.marks[b] = k + 1
                following = (done // spacing + 1) * spacing
                for s in range(stages):
                    for j in range(3):
                        lo.mark_next[b, k, s, j] = nxt[s, j]
                for q in range(ranks):
                    for j in range(3):
                        lo.mark_at[b, k, q, j] = lo.at[q, j]
                    for j in range(4):
                        lo.mark_now[b, k, q, j] = lo.now[q, j]
                    for x in range(ranks):
                        lo.mark_channel[b, k, q, x] = lo.channel[q, x]
            i, n = lo.at[r, POS], lo.at[r, LENGTH]
            last = lo.at[r, LAST]
            begin = i
            size = words.length[r]
            t, used, left, way = lo.now[r, CLOCK], lo.now[r, USED], lo.now[r, LEFT], lo.now[r, WAY]
            limit = sc.limit[r]
            mine = sc.on_rank[r]
            count = sc.count[r]
            while i < size:
                letter = words.letter[r, i]
                s = letter >> 1
                backward = (letter & 1) == 1
                m = nxt[s, NEXT_I] if backward else nxt[s, NEXT_F]
                at = arrive_i[s, m] if backward else arrive_f[s, m]
                if at == inf:
                    break
                v = st.entry[m] * vary
                need = 0.0
                if not backward:
                    need = sc.hold[s, v]
                elif st.recompute[s]:
                    need = sc.full[s, v] - sc.hold[s, v]
                # Make room for it.
                while used + need > limit:
                    most, chosen = -1.0, -1
                    for k in range(count):
                        o = mine[k]
                        if nxt[o, NEXT_W] < nxt[o, NEXT_I]:
                            freed = sc.tail[o, st.entry[nxt[o, NEXT_W]] * vary]
                            if freed > most:
                                most, chosen = freed, o
                    if chosen < 0:
                        return inf
                    w = nxt[chosen, NEXT_W]
                    u = st.entry[w] * vary
                    nxt[chosen, NEXT_W] = w + 1
                    t += sc.w_ms[chosen, u]
                    left -= sc.w_ms[chosen, u]
                    used -= sc.tail[chosen, u]
                    last = (KIND_W << KIND_BITS) | (chosen << STAGE_BITS) | w
                    seq[r, n] = last
                    ends[r, n] = t
                    n += 1
                    lo.done[b, chosen] = t
                if backward and st.recompute[s]:
                    used += need
                    if last == (KIND_F << KIND_BITS) | (s << STAGE_BITS) | m:
                        # Right after its own forward it needs no R, so nothing may come between.
                        t = max(t, at)
                    else:
                        t += sc.f_ms[s, v]
                        if s + 1 < stages:
                            left -= sc.f_ms[s, v]
                        last = (KIND_R << KIND_BITS) | (s << STAGE_BITS) | m
                        seq[r, n] = last
                        ends[r, n] = t
                        n += 1
                # Fill the gap before it.
                while at > t:
                    gap = at - t
                    best, chosen = -inf, -1
                    for k in range(count):
                        o = mine[k]
                        w = nxt[o, NEXT_W]
                        if w < nxt[o, NEXT_I]:
                            ms = sc.w_ms[o, st.entry[w] * vary]
                            if ms <= gap + 1e-9:
                                if ms > best:
                                    best, chosen = ms, o
                            elif ms <= gap + over and gap - ms > best:
                                best, chosen = gap - ms, o
                    if chosen < 0:
                        t = at
                        break
                    w = nxt[chosen, NEXT_W]
                    u = st.entry[w] * vary
                    nxt[chosen, NEXT_W] = w + 1
                    t += sc.w_ms[chosen, u]
                    left -= sc.w_ms[chosen, u]
                    used -= sc.tail[chosen, u]
                    last = (KIND_W << KIND_BITS) | (chosen << STAGE_BITS) | w
                    seq[r, n] = last
                    ends[r, n] = t
                    n += 1
                    lo.done[b, chosen] = t
                # Run it.
                if backward:
                    ms = sc.i_ms[s, v]
                    t += ms
                    used += sc.tail[s, v] - sc.full[s, v]
                    nxt[s, NEXT_I] = m + 1
                    last = (KIND_I << KIND_BITS) | (s << STAGE_BITS) | m
                    if s > 0:
                        q = st.rank[s - 1]
                        at = t
                        if q != r:
                            at = max(at, lo.channel[r, q]) + sc.hop_i[s, v]
                            lo.channel[r, q] = at
                        arrive_i[s - 1, m] = at
                else:
                    ms = sc.f_ms[s, v]
                    t += ms
                    used += need
                    nxt[s, NEXT_F] = m + 1
                    last = (KIND_F << KIND_BITS) | (s << STAGE_BITS) | m
                    if s + 1 < stages:
                        q = st.rank[s + 1]
                        at = t
                        if q != r:
                            at = max(at, lo.channel[r, q]) + sc.hop_f[s, v]
                            lo.channel[r, q] = at
                        arrive_f[s + 1, m] = at
                    else:
                        arrive_i[s, m] = t
                left -= ms
                way -= ms
                seq[r, n] = last
                ends[r, n] = t
                n += 1
                i += 1
                if backward and m + 1 == M and s == mine[0]:
                    way = -inf
                if t + max(left, way) > cutoff:
                    return inf
            if i > begin:
                moved = True
                done += i - begin
                lo.at[r, POS], lo.at[r, LENGTH], lo.at[r, LAST] = i, n, last
                lo.now[r, CLOCK], lo.now[r, USED], lo.now[r, LEFT], lo.now[r, WAY] = t, used, left, way
        if not moved:
            return inf
    latest = 0.0
    for r in range(ranks):
        # What is left of the W.
        t, n = lo.now[r, CLOCK], lo.at[r, LENGTH]
        for k in range(sc.count[r]):
            s = sc.on_rank[r, k]
            for m in range(nxt[s, NEXT_W], M):
                t += sc.w_ms[s, st.entry[m] * vary]
                seq[r, n] = (KIND_W << KIND_BITS) | (s << STAGE_BITS) | m
                ends[r, n] = t
                n += 1
                lo.done[b, s] = t
        lo.length[b, r] = n
        if t > latest:
            latest = t
            sc.count[ranks] = r
    if p.has_extras:
        for s in range(stages):
            sc.done[s] = lo.done[b, s]
        latest = max(latest, extras_end(p, stages, st.bounds, st.rank, sc))
    return latest


@njit(cache=True, nogil=True)
def read_ends(p, lo, a):  # type: ignore[no-untyped-def]
    """Every op's end and place, in timing `a`."""
    for r in range(p.num_ranks):
        for i in range(lo.length[a, r]):
            code = lo.seq[a, r, i]
            kind, s, m = code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK
            lo.finish[kind, s, m] = lo.end[a, r, i]
            lo.where[kind, s, m] = i


@njit(cache=True, nogil=True)
def read_path(p, st, lo, sc, a, critical):  # type: ignore[no-untyped-def]
    """The critical path of timing `a`, ended by rank `critical`: its letters' places in the words; returns how many."""
    stages = st.size[0]
    vary = 1 if p.variants > 1 else 0
    seq, ends = lo.seq[a], lo.end[a]
    read_ends(p, lo, a)
    r = critical
    i = lo.length[a, r] - 1
    found = 0
    while i >= 0 and found < lo.path.shape[0]:
        code = seq[r, i]
        kind, s, m = code >> KIND_BITS, (code >> STAGE_BITS) & MASK, code & MASK
        v = st.entry[m] * vary
        ms = sc.w_ms[s, v]
        if kind == KIND_F or kind == KIND_I:
            ms = sc.i_ms[s, v] if kind == KIND_I else sc.f_ms[s, v]
            lo.path[found, 0] = r
            lo.path[found, 1] = i
            found += 1
        elif kind == KIND_R:
            ms = sc.f_ms[s, v]
        start = ends[r, i] - ms
        if i > 0 and ends[r, i - 1] >= start - 1e-9:
            i -= 1
            continue
        if kind == KIND_F and s > 0:
            s -= 1
        elif kind == KIND_I and s + 1 < stages:
            s += 1
        else:
            break
        r = st.rank[s]
        i = lo.where[kind, s, m]
    # Places among all ops become places in the word.
    for r in range(p.num_ranks):
        n = 0
        for i in range(lo.length[a, r]):
            kind = seq[r, i] >> KIND_BITS
            lo.spare[i] = n
            if kind == KIND_F or kind == KIND_I:
                n += 1
        for k in range(found):
            if lo.path[k, 0] == r:
                lo.path[k, 1] = lo.spare[lo.path[k, 1]]
    return found


@njit(cache=True, nogil=True)
def jump(words, lo, r, at, to):  # type: ignore[no-untyped-def]
    """Take the letter at one place of a word and put it at another; False where nothing changes."""
    word = words.letter[r]
    code = word[at]
    changed = False
    if to < at:
        for i in range(at, to, -1):
            changed = changed or word[i - 1] != code
            word[i] = word[i - 1]
    else:
        for i in range(at, to):
            changed = changed or word[i + 1] != code
            word[i] = word[i + 1]
    word[to] = code
    lo.first[r] = min(lo.first[r], min(at, to))
    return changed


@njit(cache=True, nogil=True)
def move_letters(st, words, lo, s, to):  # type: ignore[no-untyped-def]
    """Move a stage to another rank; its letters are merged into that rank's word by their present times."""
    of = st.rank[s]
    if of == to:
        return
    # Present times of the target's letters, which are first in, first out.
    word = words.letter[of]
    kept = 0
    for i in range(words.length[of]):
        if word[i] >> 1 == s:
            continue
        word[kept] = word[i]
        kept += 1
    moved = words.length[of] - kept
    words.length[of] = kept
    word = words.letter[to]
    n = words.length[to]
    # Merge from the back, in place; counters run down.
    M = moved // 2
    left_f, left_i = M, M
    for i in range(n):
        lo.spare[word[i]] = M
    k, i = n + moved - 1, n - 1
    while left_f > 0 or left_i > 0:
        late_f = lo.finish[KIND_F, s, left_f - 1] if left_f > 0 else -np.inf
        late_i = lo.finish[KIND_I, s, left_i - 1] if left_i > 0 else -np.inf
        late = max(late_f, late_i)
        if i >= 0:
            code = word[i]
            kind = KIND_I if code & 1 else KIND_F
            if lo.finish[kind, code >> 1, lo.spare[code] - 1] > late:
                lo.spare[code] -= 1
                word[k] = code
                i -= 1
                k -= 1
                continue
        if left_f == 0 or (left_i > 0 and late_i >= late_f):
            word[k] = s << 1 | 1
            left_i -= 1
        else:
            word[k] = s << 1
            left_f -= 1
        k -= 1
    words.length[to] = n + moved
    st.rank[s] = to


@njit(cache=True, nogil=True)
def split_letters(p, st, words, lo, s, cut, to, second):  # type: ignore[no-untyped-def]
    """Split stage s at layer `cut`; the first or the second half goes to rank `to`."""
    n, M = st.size[0], p.num_micro_batches
    a, z = st.bounds[s], st.bounds[s + 1]
    f = (p.forward[0, cut] - p.forward[0, a]) / max(p.forward[0, z] - p.forward[0, a], 1e-12)
    g = (p.input[0, z] - p.input[0, cut]) / max(p.input[0, z] - p.input[0, a], 1e-12)
    slow = p.slow[st.rank[s]]
    f_ms, i_ms = (p.forward[0, z] - p.forward[0, a]) * slow, (p.input[0, z] - p.input[0, a]) * slow
    insert_stage(st, s)
    st.bounds[s + 1] = cut
    for k in range(n, s + 1, -1):
        for m in range(M):
            for kind in range(4):
                lo.finish[kind, k, m] = lo.finish[kind, k - 1, m]
    for m in range(M):
        lo.finish[KIND_F, s + 1, m] = lo.finish[KIND_F, s, m]
        lo.finish[KIND_F, s, m] -= (1.0 - f) * f_ms
        lo.finish[KIND_I, s + 1, m] = lo.finish[KIND_I, s, m] - (1.0 - g) * i_ms
    for r in range(p.num_ranks):
        word = words.letter[r]
        if r != st.rank[s]:
            for i in range(words.length[r]):
                if word[i] >> 1 > s:
                    word[i] += 2
            continue
        # F of s is followed by F of s + 1, I of s + 1 by I of s: written from the back.
        size = words.length[r]
        k = size + 2 * M - 1
        for i in range(size - 1, -1, -1):
            code = word[i]
            if code >> 1 > s:
                word[k] = code + 2
            elif code >> 1 < s:
                word[k] = code
            elif code & 1:
                word[k] = s << 1 | 1
                k -= 1
                word[k] = (s + 1) << 1 | 1
            else:
                word[k] = (s + 1) << 1
                k -= 1
                word[k] = s << 1
            k -= 1
        words.length[r] = size + 2 * M
    move_letters(st, words, lo, s + 1 if second else s, to)


@njit(cache=True, nogil=True)
def merge_letters(p, st, words, lo, s, keep):  # type: ignore[no-untyped-def]
    """Merge stages s - 1 and s where `keep`, one of them, is."""
    n, M = st.size[0], p.num_micro_batches
    gone = s - 1 if keep == s else s
    remove_boundary(st, s, keep)
    for r in range(p.num_ranks):
        word = words.letter[r]
        kept = 0
        for i in range(words.length[r]):
            code = word[i]
            if code >> 1 == gone:
                continue
            word[kept] = code - 2 if code >> 1 > gone else code
            kept += 1
        words.length[r] = kept
    for k in range(gone, n - 1):
        for m in range(M):
            for kind in range(4):
                lo.finish[kind, k, m] = lo.finish[kind, k + 1, m]


@njit(cache=True, nogil=True)
def restructure(p, st, words, lo, a, rng, critical):  # type: ignore[no-untyped-def]
    """One random change of partition or placement; its number in WORD_MOVES, or -1."""
    n = st.size[0]
    u = uniform(rng)
    if u < 0.75:
        s = pick(st, rng, critical) + below(rng, 2)
        if s == 0 or s >= n:
            return -1
        e = s
        if u > 0.5:
            e = reach(rng, s, n)
        if not slide(st, s, e, 1 if uniform(rng) < 0.5 else -1):
            return -1
        return 0 if e == s else 1
    if n < 2:
        return -1
    read_ends(p, lo, a)
    s = pick(st, rng, critical)
    if u < 0.82:
        to = below(rng, p.num_ranks)
        if to == st.rank[s]:
            return -1
        move_letters(st, words, lo, s, to)
        return 2
    if u < 0.92:
        e = below(rng, n)
        if uniform(rng) < 0.5:
            e = min(s + 1 + below(rng, 3), n - 1)
        x, y = st.rank[s], st.rank[e]
        if x == y:
            return -1
        move_letters(st, words, lo, s, y)
        move_letters(st, words, lo, e, x)
        return 3
    if u < 0.96:
        width = st.bounds[s + 1] - st.bounds[s]
        if width < 2 or n >= st.rank.size:
            return -1
        cut = st.bounds[s] + 1 + below(rng, width - 1)
        split_letters(p, st, words, lo, s, cut, below(rng, p.num_ranks), uniform(rng) < 0.5)
        return 4
    s = 1 + below(rng, n - 1)
    merge_letters(p, st, words, lo, s, s - below(rng, 2))
    return 5


@njit(cache=True, nogil=True)
def reorder(p, words, lo, path, rng, critical):  # type: ignore[no-untyped-def]
    """One random change of a word; its number in WORD_MOVES, or -1."""
    u = uniform(rng)
    if u < 0.7 and path > 1:
        # A critical letter before the one that ran just before it.
        k = below(rng, path)
        r, i = lo.path[k, 0], lo.path[k, 1]
        if i == 0:
            return -1
        if u < 0.35:
            return 6 if jump(words, lo, r, i, i - 1) else -1
        return 7 if jump(words, lo, r, i, max(0, i - 1 - below(rng, 8))) else -1
    r = critical if uniform(rng) < 0.4 else below(rng, p.num_ranks)
    length = words.length[r]
    if length < 2:
        return -1
    i = below(rng, length)
    to = min(max(i + below(rng, 17) - 8, 0), length - 1)
    if to == i:
        return -1
    return 7 if jump(words, lo, r, i, to) else -1


@njit(cache=True, nogil=True)
def copy_shape(to, of):  # type: ignore[no-untyped-def]
    """Stages, ranks, recomputation and the entry order; priorities mean nothing to words."""
    n = of.size[0]
    to.size[0] = n
    for s in range(n):
        to.bounds[s] = of.bounds[s]
        to.rank[s] = of.rank[s]
        to.recompute[s] = of.recompute[s]
    to.bounds[n] = of.bounds[n]
    to.glob[W_OVER] = of.glob[W_OVER]


@njit(cache=True, nogil=True)
def anneal_words(  # type: ignore[no-untyped-def]
    p, st, words, best, best_words, back, back_words, margin, sc, lo, rng, iterations, hot, cold, best_ms,
    may_recompute, structure, log,
):  # fmt: skip
    """`iterations` moves on words; returns (step time, the best one's, lines written to `log`)."""
    lines = 0
    a, b = 0, 1
    copy_shape(back, st)
    back.entry[:] = st.entry
    copy_words(back_words, words)
    if not begin_weave(p, st, margin, sc, lo, a):
        return np.inf, best_ms, 0
    current = weave(p, st, words, st.glob[W_OVER] * p.unit, np.inf, sc, lo, a)
    if current == np.inf:
        return np.inf, best_ms, 0
    critical = sc.count[p.num_ranks]
    path = read_path(p, st, lo, sc, a, critical)
    stale = False
    for i in range(iterations):
        temperature = (hot + (cold - hot) * i / iterations) * current
        whole = False
        for r in range(p.num_ranks):
            lo.first[r] = 1 << 40
        move = -1
        while True:
            u = uniform(rng)
            if u < structure:
                done = -1
                if may_recompute and uniform(rng) < 0.1:
                    s = below(rng, st.size[0])
                    st.recompute[s] = not st.recompute[s]
                    done = 9
                elif uniform(rng) < 0.03:
                    st.glob[W_OVER] = 10.0 if uniform(rng) < 0.2 else uniform(rng) ** 2 * 0.3
                    done = 8
                elif move < 0:
                    done = restructure(p, st, words, lo, a, rng, critical)
                whole = whole or done >= 0
            else:
                if stale:
                    path = read_path(p, st, lo, sc, a, critical)
                    stale = False
                done = reorder(p, words, lo, path, rng, critical)
            if move < 0:
                move = done
            if uniform(rng) >= 0.25 or whole:
                break
        value = np.inf
        cutoff = current - temperature * np.log(max(uniform(rng), 1e-300))
        mark = -1
        if move >= 0:
            if whole:
                least = quick_bound(p, st.size[0], st.bounds, st.rank, st.recompute, sc.free)
                if least <= cutoff and begin_weave(p, st, margin, sc, lo, b):
                    value = weave(p, st, words, st.glob[W_OVER] * p.unit, cutoff, sc, lo, b)
            else:
                mark = resume_weave(p, st, lo, a, b)
                if mark < 0:
                    begin_weave(p, st, margin, sc, lo, b)
                value = weave(p, st, words, st.glob[W_OVER] * p.unit, cutoff, sc, lo, b)
        if value <= cutoff and move >= 0:
            keep_weave(p, st, lo, a, b, mark)
            a, b = b, a
            current = value
            critical = sc.count[p.num_ranks]
            stale = True
            if whole:
                copy_shape(back, st)
                copy_words(back_words, words)
            else:
                for r in range(p.num_ranks):
                    if lo.first[r] < words.length[r]:
                        for j in range(lo.first[r], words.length[r]):
                            back_words.letter[r, j] = words.letter[r, j]
            if value < best_ms - 1e-9:
                if lines < log.shape[0]:
                    log[lines, 0] = i
                    log[lines, 1] = move
                    log[lines, 2] = best_ms
                    log[lines, 3] = value
                    lines += 1
                best_ms = value
                copy_shape(best, st)
                copy_words(best_words, words)
        elif move >= 0:
            if whole:
                copy_shape(st, back)
                copy_words(words, back_words)
                price(p, st.size[0], st.bounds, st.rank, st.recompute, margin, sc)
            else:
                for r in range(p.num_ranks):
                    if lo.first[r] < words.length[r]:
                        for j in range(lo.first[r], words.length[r]):
                            words.letter[r, j] = back_words.letter[r, j]
    return current, best_ms, lines


class Weaver:
    """One walk over words and the best it has seen."""

    def __init__(
        self, problem: Problem, max_stages: int, scratch: Scratch, margin: np.ndarray, seed: tuple[int, ...],
        may_recompute: bool,
    ) -> None:  # fmt: skip
        self.problem, self.scratch, self.margin, self.may_recompute = problem, scratch, margin, may_recompute
        self.state, self.best, self.back = (make_state(problem, max_stages) for _ in range(3))
        self.words, self.best_words, self.back_words = (make_words(problem, max_stages) for _ in range(3))
        self.loom = make_loom(problem, max_stages)
        self.rng = np.random.default_rng((*seed, 1)).integers(1, 1 << 62, 1).astype(np.uint64)
        self.log = np.zeros((64, 4))
        self.current_ms = self.best_ms = float("inf")

    def begin(self, st: State) -> bool:
        """Start from the order that list scheduling gives a state; False where it does not fit."""
        n = int(st.size[0])
        schedule(
            self.problem, n, st.bounds, st.rank, st.recompute, st.flight, st.entry, st.glob, st.offset, st.wiggle,
            self.margin, np.inf, ANY_PACE, self.scratch,
        )  # fmt: skip
        read_words(self.words, self.scratch.seq, self.scratch.length)
        best = np.inf
        kept = float(st.glob[W_OVER])
        copy_state(self.state, st)
        for over in (kept, 0.0, 0.02, 0.05, 0.1, 0.3, 10.0):
            self.state.glob[W_OVER] = over
            value = self.judge(self.state, self.words)
            if value < best:
                best, kept = value, over
        self.state.glob[W_OVER] = kept
        copy_state(self.best, self.state)
        copy_words(self.best_words, self.words)
        self.current_ms = self.best_ms = best
        return bool(best < np.inf)

    def resume(self, woven: Woven) -> bool:
        """Go on where another walk ended; False where that does not fit here."""
        copy_state(self.state, woven.state)
        copy_words(self.words, woven.words)
        copy_state(self.best, woven.state)
        copy_words(self.best_words, woven.words)
        self.current_ms = self.best_ms = self.judge(woven.state, woven.words)
        return bool(self.best_ms < np.inf)

    def result(self) -> Woven:
        """The best so far, in copies of its own."""
        self.judge(self.best, self.best_words)
        length = self.loom.length[0].astype(np.int32)
        state = make_state(self.problem, self.best.rank.size)
        copy_state(state, self.best)
        width = int(self.best_words.length.max())
        words = Words(self.best_words.letter[:, :width].copy(), self.best_words.length.copy())
        return Woven(float(self.best_ms), state, words, Orders(self.loom.seq[0, :, : length.max()].copy(), length))

    def judge(self, st: State, words: Words) -> float:
        """Step time of words from the beginning."""
        if not begin_weave(self.problem, st, self.margin, self.scratch, self.loom, 0):
            return float("inf")
        over = float(st.glob[W_OVER]) * self.problem.unit
        return float(weave(self.problem, st, words, over, np.inf, self.scratch, self.loom, 0))

    def run(self, iterations: int, temperature: float, structure: float = STRUCTURE) -> np.ndarray:
        """Some moves at one temperature; returns the improvements, a line each."""
        self.current_ms, self.best_ms, lines = anneal_words(
            self.problem, self.state, self.words, self.best, self.best_words, self.back, self.back_words, self.margin,
            self.scratch, self.loom, self.rng, iterations, temperature, temperature, self.best_ms,
            self.may_recompute, structure, self.log,
        )  # fmt: skip
        return self.log[:lines].copy()
