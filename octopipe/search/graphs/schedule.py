"""Compiled list scheduling over paths that fork and join: turns a structure and its keys into orders.

Knows: costs of a structure, the edges of its paths, and how a rank decides what to run next. Does not know: plans,
layers, or how structures are varied.

Timing equals that of the simulator under directed channels (`simulation/timing.py`). Orders are built in time order:
the rank that is free first decides next, so it is known exactly what has arrived. A rank runs the ready F or I with the
smallest key, and may wait briefly (`LOOK`) for a better one that is in flight. A stage keeps at most `flight`
micro-batches between F and I. An F needs memory for what it holds and for a share (`RESERVE`) of what its micro-batch
will still hold on the rank. W fills the gaps, and runs earlier if it frees the memory that the best F lacks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.simulation.timing import FOR_F, FOR_I, handed_over

A_F, A_I, C_I, LOOK, OVER, RESERVE, NUM_NUMBERS = range(7)
"""Places in `numbers`. A_F, A_I: by how much the keys of F and I rise from one micro-batch to the next. C_I: what is
added to every I's key. LOOK: how long a rank waits for a better op (ms). OVER: by how much a W may delay an op whose
arrival is known (ms). RESERVE: the share of later stages' bytes that is kept free."""
OP_F, OP_I, OP_W = 0, 2, 3
"""The codes of the kinds of ops, as in `plan.KINDS`."""
MS_F, MS_I, MS_W = 0, 1, 2
"""Rows of `Priced.ms` and of `OrderState.done`."""


class Priorities(NamedTuple):
    """The priorities by which ranks decide: of the ops that are ready, the one with the smallest key runs."""

    forward: Any
    """[stage]: the key of a stage's F for the first micro-batch; `inward`: of its I."""
    inward: Any
    flight: Any
    """[stage]: the largest number of micro-batches between F and I."""
    numbers: Any


class OrderState(NamedTuple):
    """The state of ranks and stages while orders are built."""

    arrived: Any
    """[2, stage, micro-batch]: when the last of the results that F and I wait for arrives, among those known so far."""
    missing: Any
    """[2, stage, micro-batch]: how many of these results are not known yet."""
    channel: Any
    done: Any
    """[3, stage]: how many F, I and W have run."""
    clock: Any
    """[rank]: when it decides next."""
    free: Any
    """[rank]: the time since which it waits, if it waits."""
    idle: Any
    """[rank]: 1 if it waits, otherwise 0."""
    used: Any
    """[rank]: bytes of activations in use."""
    work: Any
    """[rank]: the time of the ops that are left, in ms."""
    left: Any
    """[rank]: the number of ops that are left."""
    mine: Any
    """[rank, k]: the stages of the rank."""
    holds: Any
    """[rank]: how many stages it has."""


@njit
def schedule(p, keys, cutoff, out, lengths):  # type: ignore[no-untyped-def]
    """The makespan of the orders that the keys give a layout with costs `p` (`layout.Priced`); infinite if they
    deadlock or exceed `cutoff`. `out[rank]` receives the packed ops, `lengths` their number."""
    size, micro_batches, ranks, inf = p.rank.size, p.path.size, p.room.size, np.inf
    state = OrderState(
        arrived=np.zeros((2, size, micro_batches)),
        missing=np.zeros((2, size, micro_batches), np.int64),
        channel=np.zeros((ranks, ranks)),
        done=np.zeros((3, size), np.int64),
        clock=np.zeros(ranks),
        free=np.zeros(ranks),
        idle=np.zeros(ranks, np.int64),
        used=np.zeros(ranks),
        work=np.zeros(ranks),
        left=np.zeros(ranks, np.int64),
        mine=np.zeros((ranks, size), np.int64),
        holds=np.zeros(ranks, np.int64),
    )
    set_up(p, state)
    for r in range(ranks):
        lengths[r] = 0
    end = 0.0
    while True:
        r = -1
        unfinished = False
        for k in range(ranks):
            if state.left[k] > 0:
                unfinished = True
                if state.clock[k] < inf and (r < 0 or state.clock[k] < state.clock[r]):
                    r = k
        if not unfinished:
            return end
        if r < 0:
            return inf
        now = state.clock[r]
        if now + state.work[r] > cutoff:
            return inf
        s, kind, next_at = choose(p, keys, state, r)
        if s < 0:
            state.clock[r] = next_at
            state.idle[r] = 1
            state.free[r] = now
            continue
        m, over = run(p, state, r, s, kind)
        out[r, lengths[r]] = (kind * size + s) * micro_batches + m
        lengths[r] += 1
        state.left[r] -= 1
        state.clock[r] = over
        state.idle[r] = 0
        end = max(end, over)


@njit
def set_up(p, state):  # type: ignore[no-untyped-def]
    """Initialise which stages a rank holds, what they wait for, and how much work there is."""
    for s in range(p.rank.size):
        r = p.rank[s]
        state.mine[r, state.holds[r]] = s
        state.holds[r] += 1
        state.left[r] += 3 * p.counts[s]
        for j in range(p.counts[s]):
            m = p.turns[s, j]
            for k in range(p.before.shape[2]):
                if p.before[p.path[m], s, k] >= 0:
                    state.missing[FOR_F, s, m] += 1
            state.missing[FOR_I, s, m] = 1
            for k in range(p.after.shape[2]):
                if p.after[p.path[m], s, k] >= 0:
                    state.missing[FOR_I, s, m] += 1
            for kind in range(3):
                state.work[r] += p.ms[kind, s, m]


@njit
def choose(p, keys, state, r):  # type: ignore[no-untyped-def]
    """What rank r runs now: the stage (-1 if it waits), the kind of the op, and until when it waits."""
    now, numbers, inf = state.clock[r], keys.numbers, np.inf
    ready, kind, low = -1, OP_F, inf
    soon_low, soon_at, next_at = inf, inf, inf
    blocked = inf
    for place in range(state.holds[r]):
        s = state.mine[r, place]
        j = state.done[MS_F, s]
        if j < p.counts[s] and j - state.done[MS_I, s] < keys.flight[s]:
            m = p.turns[s, j]
            if state.missing[FOR_F, s, m] == 0:
                at = state.arrived[FOR_F, s, m]
                key = numbers[A_F] * j + keys.forward[s]
                if state.used[r] + p.held[s, m] + numbers[RESERVE] * p.later[s] > p.room[r]:
                    if at <= now and key < blocked:
                        blocked = key
                elif at <= now:
                    if key < low:
                        low, ready, kind = key, s, OP_F
                else:
                    next_at = min(next_at, at)
                    if at <= now + numbers[LOOK] and key < soon_low:
                        soon_low, soon_at = key, at
        j = state.done[MS_I, s]
        if j < state.done[MS_F, s]:
            m = p.turns[s, j]
            if state.missing[FOR_I, s, m] == 0:
                at = state.arrived[FOR_I, s, m]
                key = numbers[C_I] + numbers[A_I] * j + keys.inward[s]
                if at <= now:
                    if key < low:
                        low, ready, kind = key, s, OP_I
                else:
                    next_at = min(next_at, at)
                    if at <= now + numbers[LOOK] and key < soon_low:
                        soon_low, soon_at = key, at
    if soon_low < low:
        ready = -1
        next_at = soon_at
    if ready < 0 or blocked < low:
        w = fitting_weight(p, keys, state, r, next_at - now if ready < 0 else -1.0)
        if w >= 0:
            ready, kind = w, OP_W
    return ready, kind, next_at


@njit
def fitting_weight(p, keys, state, r, gap):  # type: ignore[no-untyped-def]
    """The stage whose W fills a gap best, or -1: the longest W that fits, otherwise the one that overruns least. If the
    gap is infinite, the stage with the fewest W so far; if it is negative, the W that frees most memory."""
    best, found = -np.inf, -1
    for place in range(state.holds[r]):
        s = state.mine[r, place]
        if state.done[MS_W, s] < state.done[MS_I, s]:
            m = p.turns[s, state.done[MS_W, s]]
            took = p.ms[MS_W, s, m]
            if gap < 0.0:
                score = p.stash[s, m]
            elif gap == np.inf:
                score = -np.float64(state.done[MS_W, s])
            elif took <= gap + 1e-9:
                score = took
            elif took <= gap + keys.numbers[OVER]:
                score = gap - took
            else:
                continue
            if score > best:
                best, found = score, s
    return found


@njit
def run(p, state, r, s, kind):  # type: ignore[no-untyped-def]
    """Run the next op of a stage on rank r and pass on its result; returns its micro-batch and its end."""
    row = MS_F if kind == OP_F else MS_I if kind == OP_I else MS_W
    m = p.turns[s, state.done[row, s]]
    over = state.clock[r] + p.ms[row, s, m]
    state.work[r] -= p.ms[row, s, m]
    state.done[row, s] += 1
    if kind == OP_F:
        state.used[r] += p.held[s, m]
        state.arrived[FOR_I, s, m] = max(state.arrived[FOR_I, s, m], over)
        state.missing[FOR_I, s, m] -= 1
        for k in range(p.after.shape[2]):
            t = p.after[p.path[m], s, k]
            if t >= 0:
                reach(p, state, FOR_F, t, m, r, over, s)
    elif kind == OP_I:
        state.used[r] -= p.held[s, m] - p.stash[s, m]
        for k in range(p.before.shape[2]):
            t = p.before[p.path[m], s, k]
            if t >= 0:
                reach(p, state, FOR_I, t, m, r, over, t)
    else:
        state.used[r] -= p.stash[s, m]
    return m, over


@njit
def reach(p, state, row, t, m, r, end, producer):  # type: ignore[no-untyped-def]
    """Pass a result on to stage t; its rank decides again if that was the last result it waited for."""
    q = p.rank[t]
    last = join(p, state.arrived, state.missing, state.channel, row, t, m, r, end, producer)
    if last and state.idle[q] == 1:
        state.clock[q] = min(state.clock[q], max(state.arrived[row, t, m], state.free[q]))


@njit
def join(p, arrived, missing, channel, row, t, m, r, end, producer):  # type: ignore[no-untyped-def]
    """Pass a result of rank r on to stage t; returns True if it was the last one that t waited for. `producer` is the
    stage whose output, or the gradient of whose output, is sent."""
    q = p.rank[t]
    hop = p.latency[r, q] + p.nbytes[producer, m] * p.share[p.path[m], producer] * p.per_byte[r, q]
    arrived[row, t, m] = max(arrived[row, t, m], handed_over(channel, r, q, end, hop))
    missing[row, t, m] -= 1
    return missing[row, t, m] == 0
