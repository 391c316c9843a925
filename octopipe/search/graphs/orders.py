"""Compiled timing and local search of given orders, over paths that fork and join.

Knows: the times of a structure's ops and transfers, its edges, and moves of one op within its rank's order. Does not
know: how orders are built (`schedule`), or plans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.graphs.schedule import OP_F, OP_I, OP_W, join
from octopipe.search.tuner.core.problem import below, uniform
from octopipe.simulation.timing import FOR_F, FOR_I

NEAR, FAR = 4, 40
"""A move shifts an F or I by at most NEAR places, and a W by at most FAR places."""


class Waits(NamedTuple):
    """What ops wait for, and working space for `follow`; all arrays are [F or I, stage, micro-batch]."""

    needed: Any
    """How many results an op waits for."""
    missing: Any
    """How many of them are not known yet."""
    arrived: Any
    """When the last of the known results arrives."""


@njit
def follow(p, seq, lengths, waits, cutoff):  # type: ignore[no-untyped-def]
    """The makespan of the orders `seq[rank, :lengths[rank]]` of a layout with costs `p` (`layout.Priced`); infinite
    if they deadlock, exceed the memory of a rank or take longer than `cutoff`. An op is packed as (kind * stages +
    stage) * micro-batches + micro-batch."""
    size, micro_batches, ranks, inf = p.rank.size, p.path.size, p.room.size, np.inf
    arrived, missing = waits.arrived, waits.missing
    missing[:] = waits.needed
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
                m, rest = code % micro_batches, code // micro_batches
                s, kind = rest % size, rest // size
                if kind == OP_F:
                    if missing[FOR_F, s, m] > 0:
                        break
                    used[r] += p.held[s, m]
                    if used[r] > p.room[r]:
                        return inf
                    now = max(now, arrived[FOR_F, s, m]) + p.ms[0, s, m]
                    arrived[FOR_I, s, m] = max(arrived[FOR_I, s, m], now)
                    missing[FOR_I, s, m] -= 1
                    for k in range(p.after.shape[2]):
                        t = p.after[p.path[m], s, k]
                        if t >= 0:
                            join(p, arrived, missing, channel, FOR_F, t, m, r, now, s)
                elif kind == OP_I:
                    if missing[FOR_I, s, m] > 0:
                        break
                    used[r] -= p.held[s, m] - p.stash[s, m]
                    now = max(now, arrived[FOR_I, s, m]) + p.ms[1, s, m]
                    done[s, m] = 1
                    for k in range(p.before.shape[2]):
                        t = p.before[p.path[m], s, k]
                        if t >= 0:
                            join(p, arrived, missing, channel, FOR_I, t, m, r, now, t)
                else:
                    if done[s, m] == 0:
                        break
                    used[r] -= p.stash[s, m]
                    now += p.ms[2, s, m]
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
def polish(p, seq, best, lengths, waits, rng, moves, heat, now, best_ms):  # type: ignore[no-untyped-def]
    """Anneal `seq` by `moves` moves of single ops at the temperature `heat` (ms), and copy it to `best` whenever its
    makespan falls below `best_ms`. Returns the makespans of `seq` and of `best`."""
    size, micro_batches, ranks = p.rank.size, p.path.size, p.room.size
    for _ in range(moves):
        r = below(rng, ranks)
        length = lengths[r]
        if length < 2:
            continue
        a = below(rng, length)
        kind = seq[r, a] // micro_batches // size
        far = FAR if kind == OP_W else NEAR
        b = min(max(a + below(rng, 2 * far + 1) - far, 0), length - 1)
        if a == b:
            continue
        jump(seq, r, a, b)
        most = now - heat * np.log(max(uniform(rng), 1e-300))
        found = follow(p, seq, lengths, waits, most)
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
    """Move the op at position `a` of a rank's order to position `b`."""
    code = seq[r, a]
    if a < b:
        for k in range(a, b):
            seq[r, k] = seq[r, k + 1]
    else:
        for k in range(a, b, -1):
            seq[r, k] = seq[r, k - 1]
    seq[r, b] = code
