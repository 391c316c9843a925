"""Compiled timing and local search of given orders, over paths that fork and join.

Knows: the times of a structure's ops and transfers, its edges, and moves of one op within its rank's order. Does not
know: how orders are built (`schedule`), or plans.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.problem import below, uniform

NEAR, FAR = 4, 40
"""How far an F or I, and a W, is moved at most."""


@njit
def follow(  # type: ignore[no-untyped-def]
    seq, lengths, ms, held, stash, nbytes, rank, before, after, share, path, latency, per_byte, room, arrived, missing,
    needed, cutoff,
):  # fmt: skip
    """Makespan of the orders `seq[rank, :lengths[rank]]`; infinite where they wait for each other, exceed a rank's room
    or take longer than `cutoff`. An op is packed as (kind * stages + stage) * micro-batches + micro-batch.

    `needed[way, stage, micro-batch]`: how many results its F (0) and its I (1) wait for. `arrived` and `missing` are
    room of the same shape.
    """
    size, micro_batches, ranks, inf = rank.size, path.size, room.size, np.inf
    missing[:] = needed
    arrived[:] = 0.0
    done = np.zeros((size, micro_batches), np.int64)
    clock, used = np.zeros(ranks), np.zeros(ranks)
    channel = np.zeros((ranks, ranks))
    head = np.zeros(ranks, np.int64)
    moved = True
    while moved:
        moved = False
        for r in range(ranks):
            now = clock[r]
            at = head[r]
            while at < lengths[r]:
                code = seq[r, at]
                m = code % micro_batches
                rest = code // micro_batches
                s = rest % size
                kind = rest // size
                p = path[m]
                if kind == 0:
                    if missing[0, s, m] > 0:
                        break
                    used[r] += held[s, m]
                    if used[r] > room[r]:
                        return inf
                    now = max(now, arrived[0, s, m]) + ms[0, s, m]
                    arrived[1, s, m] = max(arrived[1, s, m], now)
                    missing[1, s, m] -= 1
                    for k in range(after.shape[2]):
                        t = after[p, s, k]
                        if t >= 0:
                            q = rank[t]
                            there = now
                            if q != r:
                                hop = latency[r, q] + nbytes[s, m] * share[p, s] * per_byte[r, q]
                                there = max(now, channel[r, q]) + hop
                                channel[r, q] = there
                            arrived[0, t, m] = max(arrived[0, t, m], there)
                            missing[0, t, m] -= 1
                elif kind == 2:
                    if missing[1, s, m] > 0:
                        break
                    used[r] -= held[s, m] - stash[s, m]
                    now = max(now, arrived[1, s, m]) + ms[1, s, m]
                    done[s, m] = 1
                    for k in range(before.shape[2]):
                        t = before[p, s, k]
                        if t >= 0:
                            q = rank[t]
                            there = now
                            if q != r:
                                hop = latency[r, q] + nbytes[t, m] * share[p, t] * per_byte[r, q]
                                there = max(now, channel[r, q]) + hop
                                channel[r, q] = there
                            arrived[1, t, m] = max(arrived[1, t, m], there)
                            missing[1, t, m] -= 1
                else:
                    if done[s, m] == 0:
                        break
                    used[r] -= stash[s, m]
                    now += ms[2, s, m]
                at += 1
                moved = True
            head[r] = at
            clock[r] = now
            if now > cutoff:
                return inf
    end = 0.0
    for r in range(ranks):
        if head[r] < lengths[r]:
            return inf
        end = max(end, clock[r])
    return end


@njit
def polish(  # type: ignore[no-untyped-def]
    seq, best, lengths, ms, held, stash, nbytes, rank, before, after, share, path, latency, per_byte, room, arrived,
    missing, needed, rng, moves, heat, now, best_ms,
):  # fmt: skip
    """`moves` moves of one op each at the temperature `heat` (ms); returns the makespans of `seq` and of `best`."""
    size, micro_batches, ranks = rank.size, path.size, room.size
    for _ in range(moves):
        r = below(rng, ranks)
        length = lengths[r]
        if length < 2:
            continue
        a = below(rng, length)
        kind = seq[r, a] // micro_batches // size
        far = FAR if kind == 3 else NEAR
        b = min(max(a + below(rng, 2 * far + 1) - far, 0), length - 1)
        if a == b:
            continue
        jump(seq, r, a, b)
        most = now - heat * np.log(max(uniform(rng), 1e-300))
        found = follow(
            seq, lengths, ms, held, stash, nbytes, rank, before, after, share, path, latency, per_byte, room, arrived,
            missing, needed, most,
        )  # fmt: skip
        if not found <= most:
            jump(seq, r, b, a)
            continue
        now = found
        if now < best_ms - 1e-9:
            best_ms = now
            best[:] = seq
    return now, best_ms


@njit
def jump(seq, r, a, b):  # type: ignore[no-untyped-def]
    """Move the op at `a` to `b`."""
    code = seq[r, a]
    if a < b:
        for k in range(a, b):
            seq[r, k] = seq[r, k + 1]
    else:
        for k in range(a, b, -1):
            seq[r, k] = seq[r, k - 1]
    seq[r, b] = code
