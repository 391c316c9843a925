"""Compiled periodic schedules: every rank runs its ops in a fixed periodic sequence, one F and one I at a time.

Knows: costs of a structure, and the slots of every stage's ops. Does not know: plans, or how slots are found
(`states`).

In the steady state, every rank runs one F and one I of each of its stages per micro-batch, always in the same sequence.
A rank's order is therefore determined by a few numbers: the slot of every stage's first F and first I, and the slot in
which each micro-batch starts. A rank runs its ops by slot and pairs an F and an I of the same slot. A fixed sequence
keeps the period stable, whereas running whatever arrives first (`schedule`) does not: one displaced pair delays all
later ones.

In addition, two F run together while the pipeline fills, if both have arrived and that is shorter. W is part of the I
of a pair if that is cheaper than W alone; otherwise it waits for a single op with an exchange that can hide it, or for
idle time. The memory limit is not enforced but measured: the search sees by how much a sequence exceeds it.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.pairing.schedule import take

PATIENCE, FIT, FUSE, RESERVE, ALONE_W, TWO_F, LONE_F, KEEP, APART_W, NUM_NUMBERS = range(10)
"""Places in `numbers`: up to LONE_F as in `schedule`, but a rank whose patience is infinite waits for every partner;
LONE_F: how many F of a rank run alone at first, so that the first micro-batches arrive early;
KEEP: how many W a rank keeps back, while it waits for a single op, to run them beside its exchange;
APART_W: of how many of the last micro-batches W is no part of a pair: it fills the ranks' idle time at the end, when
there is room for what it holds."""

TOGETHER = 0.5
"""How far apart, in slots, two ops may stand that are paired."""


@njit
def rhythm(  # type: ignore[no-untyped-def]
    own,
    together,
    hop_f,
    hop_i,
    rank,
    room,
    place_f,
    place_i,
    starts,
    numbers,
    ranks,
    micro_batches,
    out,
    lengths,
    over_by,
):
    """Makespan of the schedule, infinite where it blocks. `out` and `lengths` are filled as by `schedule`,
    `over_by[rank]` with the bytes that it holds beyond the rank's room."""
    size = rank.size
    inf = np.inf
    arrived = np.full((2, size, micro_batches), inf)
    done = np.zeros((3, size), np.int64)
    total = np.zeros(ranks, np.int64)
    clock = np.zeros(ranks)
    asleep = np.zeros(ranks, np.bool_)
    used = np.zeros(ranks)
    left = np.zeros(ranks, np.int64)
    channel = np.zeros((ranks, ranks))
    held = np.zeros((ranks, size), np.int64)
    holds = np.zeros(ranks, np.int64)
    for s in range(size):
        held[rank[s], holds[rank[s]]] = s
        holds[rank[s]] += 1
        left[rank[s]] += 3 * micro_batches
    for r in range(ranks):
        lengths[r] = 0
        over_by[r] = 0.0
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
        next_f = -1
        next_i = -1
        best_w = -1
        low_f = inf
        low_i = inf
        low_w = 0.0
        pending = 0
        for place in range(holds[r]):
            s = held[r, place]
            if done[0, s] < micro_batches and place_f[s] + starts[done[0, s]] < low_f:
                low_f = place_f[s] + starts[done[0, s]]
                next_f = s
            if done[1, s] < micro_batches and place_i[s] + starts[done[1, s]] < low_i:
                low_i = place_i[s] + starts[done[1, s]]
                next_i = s
            waiting = done[1, s] - done[2, s]
            pending += waiting
            if waiting > 0 and own[4, s] * waiting + 1e-9 * waiting > low_w:
                low_w = own[4, s] * waiting + 1e-9 * waiting
                best_w = s
        # What W still holds gives way before the next F comes; beyond that the sequence stays as it is.
        w_only = best_w >= 0 and next_f >= 0 and low_f < low_i + TOGETHER and used[r] + own[3, next_f] > room[r]
        at_f = inf
        at_i = inf
        if next_f >= 0:
            at_f = arrived[0, next_f, done[0, next_f]]
        if next_i >= 0 and done[1, next_i] < done[0, next_i]:
            at_i = arrived[1, next_i, done[1, next_i]]
        wants_f = next_f >= 0 and low_f < low_i + TOGETHER
        wants_i = next_i >= 0 and low_i < low_f + TOGETHER
        if wants_i and done[1, next_i] >= done[0, next_i]:
            # Its own F has not run: that comes first.
            wants_i = False
        f, f2, i, b, w = -1, -1, -1, -1, -1
        took = 0.0
        when = inf
        if w_only:
            w = best_w
            took = own[2, w]
        else:
            if wants_f and wants_i:
                when = max(at_f, at_i)
                if when > now + numbers[0] and min(at_f, at_i) <= now:
                    # The partner is too far off: run what is there.
                    if at_i <= now:
                        wants_f = False
                        when = at_i
                    else:
                        wants_i = False
                        when = at_f
            elif wants_f:
                when = at_f
            elif wants_i:
                when = at_i
            if when > now:
                single = not (wants_f and wants_i)
                spare = best_w >= 0 and (pending > numbers[7] or not single)
                if spare and (when == inf or now + numbers[1] * own[2, best_w] <= when):
                    w = best_w
                    took = own[2, w]
                elif when < inf:
                    clock[r] = when
                    continue
                else:
                    if left[r] == pending:
                        # Nothing but W is left.
                        w = best_w
                        took = own[2, w]
                    else:
                        asleep[r] = True
                        continue
            elif wants_f and wants_i:
                f, i = next_f, next_i
                took = together[0, f, i]
                extra = together[1, f, i] - took
                apart = done[1, i] >= micro_batches - numbers[8]
                if not apart and done[2, i] == done[1, i] and extra <= numbers[2] * own[2, i]:
                    b = i
                    took = together[1, f, i]
            elif wants_i:
                i = next_i
                took = own[1, i]
                if best_w >= 0:
                    both = together[3, i, best_w]
                    if both - own[1, i] <= numbers[4] * own[2, best_w]:
                        w = best_w
                        took = both
            else:
                f = next_f
                took = own[0, f]
                if total[r] >= numbers[6]:
                    # The F after it, in the rank's sequence.
                    low = inf
                    second = -1
                    for place in range(holds[r]):
                        s = held[r, place]
                        m = done[0, s] + (1 if s == f else 0)
                        if m < micro_batches and place_f[s] + starts[m] < low:
                            low = place_f[s] + starts[m]
                            second = s
                    if second >= 0 and low < low_i - TOGETHER:
                        m = done[0, second] + (1 if second == f else 0)
                        needed = used[r] + own[3, f] + own[3, second]
                        pays = together[4, f, second] <= numbers[5] * (own[0, f] + own[0, second])
                        if arrived[0, second, m] <= now and needed <= room[r] and pays:
                            f2 = second
                            took = together[4, f, f2]
                if f2 < 0 and best_w >= 0:
                    both = together[2, f, best_w]
                    if both - own[0, f] <= numbers[4] * own[2, best_w]:
                        w = best_w
                        took = both
        over = now + took
        holding = used[r] + (own[3, f] if f >= 0 else 0.0) + (own[3, f2] if f2 >= 0 else 0.0)
        if holding - room[r] > over_by[r]:
            over_by[r] = holding - room[r]
        take(
            r, over, f, f2, i, b, w, own, hop_f, hop_i, rank, micro_batches, arrived, done, clock, asleep, used, left,
            channel, out, lengths,
        )  # fmt: skip
        total[r] += (1 if f >= 0 else 0) + (1 if f2 >= 0 else 0)
        if over > end:
            end = over
