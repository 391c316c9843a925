"""Orders derived from priorities by list scheduling, compiled.

Knows: arrays of times, bytes and keys, and how a rank decides what to run next. Does not know: plans, phases or moves.

Among the F and I whose inputs have arrived, the one with the smallest key runs. W fills time in which a rank would
wait, and runs before an F for which memory is short. These are the paper's advance of F and B, delay of W, and advance
of W to avoid running out of memory. `simulation/timing.py` defines when a result arrives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.plans.op import F, I, R, W
from octopipe.simulation.timing import FOR_F, FOR_I, hand_on

STUCK, TOO_SLOW = -1, -2
"""Returned in place of the first rank's length: no rank can run any op, or some rank cannot end before the cutoff."""


class Rules(NamedTuple):
    """The criteria by which a rank decides what to run next."""

    keys: Any
    """[F or I, stage, micro_batch]: the op with the smallest key runs first."""
    flight: Any
    """Maximum number of micro-batches in flight."""
    wait_ms: Any
    """How long a rank waits for an op with a smaller key."""
    overrun: Any
    """The share of a W that may extend beyond the gap that it fills."""
    recomputes: Any
    """[stage]: whether the stage recomputes."""


class OrderState(NamedTuple):
    """The state of stages and ranks while orders are built."""

    arrived: Any
    """[2, stage, micro_batch]: when the input of F and the gradient for I arrive; infinite if not known yet."""
    channel: Any
    """[from rank, to rank]: when the channel is free."""
    done: Any
    """[2, stage]: how many F and I have run."""
    clock: Any
    """[rank]: when the rank is free."""
    used: Any
    """[rank]: bytes in use."""
    room: Any
    """[rank]: bytes that are kept free for the activations that R restores."""
    undone: Any
    """[rank]: remaining work in milliseconds."""
    listed: Any
    """The stages of all ranks, one rank after the other."""
    first: Any
    """[rank + 1]: where the stages of each rank begin in `listed`."""
    waiting: Any
    """[rank, k, 2]: stage and micro-batch of the W that can run, oldest first."""
    queue: Any
    """[2, rank]: where the pending W of each rank begin and end in `waiting`."""
    length: Any
    """[rank]: number of ops in its order so far."""


@njit
def arrange(prices, rules, size, capacity, cutoff_ms, out):  # type: ignore[no-untyped-def]
    """Build the orders of a chain of stages in out[rank] and return their lengths; the first length is STUCK or
    TOO_SLOW if that failed. `size` is an upper bound on the number of ops of a rank. Micro-batches pass every stage in
    the order of their numbers."""
    ranks, stages, micro_batches = prices.static.size, prices.rank.size, prices.held.shape[1]
    state = OrderState(
        arrived=np.full((2, stages, micro_batches), np.inf),
        channel=np.zeros((ranks, ranks)),
        done=np.zeros((2, stages), np.int64),
        clock=np.zeros(ranks),
        used=prices.static.copy(),
        room=np.zeros(ranks),
        undone=np.zeros(ranks),
        listed=np.zeros(stages, np.int64),
        first=np.zeros(ranks + 1, np.int64),
        waiting=np.zeros((ranks, size, 2), np.int64),
        queue=np.zeros((2, ranks), np.int64),
        length=np.zeros(ranks, np.int64),
    )
    _set_up(prices, rules, state)
    # The next op of every rank; it is decided again only if something that it depends on has changed.
    next_at, next_stage, next_kind = np.full(ranks, np.inf), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    decided = np.zeros(ranks, np.bool_)
    left = 2 * stages * micro_batches
    while left > 0:
        # The rank whose next op starts first goes first: results of later ops cannot arrive before that.
        r = -1
        for k in range(ranks):
            if not decided[k]:
                decided[k] = True
                next_at[k], next_stage[k], next_kind[k] = _decide(prices, rules, state, k, capacity)
            if next_at[k] < (next_at[r] if r >= 0 else np.inf):
                r = k
        if r < 0:
            state.length[0] = STUCK
            return state.length
        decided[r] = False
        if next_kind[r] == W:
            _run_weight(prices, state, r, out)
            continue
        told = _run(prices, rules, state, next_kind[r], next_stage[r], capacity, cutoff_ms, out)
        if told < 0:
            state.length[0] = told
            return state.length
        decided[told] = False
        left -= 1
    for r in range(ranks):
        while state.queue[0, r] < state.queue[1, r]:
            _run_weight(prices, state, r, out)
    return state.length


@njit
def _set_up(p, rules, state):  # type: ignore[no-untyped-def]
    stages, micro_batches = state.arrived.shape[1], state.arrived.shape[2]
    for m in range(micro_batches):
        state.arrived[FOR_F, 0, m] = 0.0
    count = 0
    for r in range(state.clock.size):
        for s in range(stages):
            if p.rank[s] == r:
                state.listed[count] = s
                count += 1
        state.first[r + 1] = count
    for s in range(stages):
        r = p.rank[s]
        for m in range(micro_batches):
            state.undone[r] += p.ms[F, s, m] + p.ms[I, s, m] + p.ms[W, s, m]
            if rules.recomputes[s]:
                # There must always be room for the activations that R restores.
                state.room[r] = max(state.room[r], p.held[s, m] - p.kept[s, m])


@njit
def _decide(p, rules, state, r, capacity):  # type: ignore[no-untyped-def]
    """Return the start time, the stage (-1 for a W) and the kind of the next op of rank r; the time is infinite if the
    rank cannot run any op."""
    key, at, s_of, k_of = np.inf, np.inf, -1, -1
    for turn in range(2):
        # Turn 0 finds the earliest start; turn 1 the smallest key among the ops that start at most wait_ms later.
        for place in range(state.first[r], state.first[r + 1]):
            s = state.listed[place]
            for row in range(2):
                m = state.done[row, s]
                if not _may_run(p, rules, state, row, s, m, r, capacity):
                    continue
                ready = max(state.arrived[row, s, m], state.clock[r])
                if turn == 0:
                    at = min(at, ready)
                elif ready <= at + rules.wait_ms and rules.keys[row, s, m] < key:
                    key, s_of, k_of = rules.keys[row, s, m], s, row
        if at == np.inf:
            break
    begins, kind = np.inf, I if k_of == FOR_I else F
    if s_of >= 0:
        begins = max(state.arrived[k_of, s_of, state.done[k_of, s_of]], state.clock[r])
    if state.queue[0, r] < state.queue[1, r]:
        w_s, w_m = state.waiting[r, state.queue[0, r], 0], state.waiting[r, state.queue[0, r], 1]
        gap = begins - state.clock[r]
        if gap > 1e-9 and gap >= (1.0 - rules.overrun) * p.ms[W, w_s, w_m]:
            return state.clock[r], -1, W
    return begins, s_of, kind


@njit
def _may_run(p, rules, state, row, s, m, r, capacity):  # type: ignore[no-untyped-def]
    """Whether the next F (row FOR_F) or I (row FOR_I) of a stage can run: its input has arrived or is under way, its
    activations fit, if necessary after pending W have run, and the limit of micro-batches in flight holds."""
    if m >= state.arrived.shape[2] or state.arrived[row, s, m] == np.inf:
        return False
    used, waits = state.used[r], state.queue[0, r] < state.queue[1, r]
    if row == FOR_I:
        if state.done[FOR_F, s] <= m:
            return False
        return not (rules.recomputes[s] and used + p.held[s, m] - p.kept[s, m] + p.work[s] > capacity[r] and not waits)
    if s == 0 and m - state.done[FOR_I, 0] >= rules.flight:
        return False
    needed = used + (p.kept[s, m] if rules.recomputes[s] else p.held[s, m]) + p.work[s] + state.room[r]
    return needed <= capacity[r] or (waits and needed - _stashed(p, state, r) <= capacity[r])


@njit
def _run(p, rules, state, kind, s, capacity, cutoff_ms, out):  # type: ignore[no-untyped-def]
    """Run the next F or I of a stage, after the W that must release memory first and the R that it needs; return the
    rank that receives its result, or STUCK or TOO_SLOW."""
    r, row = p.rank[s], FOR_F if kind == F else FOR_I
    m, n = state.done[row, s], state.length[r]
    again = rules.recomputes[s]
    # A recomputing stage needs no R if its I directly follows its F.
    apart = n > 0 and not (out[r, n - 1, 0] == s and out[r, n - 1, 1] == F and out[r, n - 1, 2] == m)
    if kind == F:
        takes, reserve = p.kept[s, m] if again else p.held[s, m], state.room[r]
    else:
        takes, reserve = p.held[s, m] - p.kept[s, m] if again else 0.0, 0.0
    while (
        state.used[r] + takes + p.work[s] + reserve > capacity[r]
        and state.queue[0, r] < state.queue[1, r]
        and takes > 0.0
    ):
        _run_weight(p, state, r, out)
    if state.used[r] + takes + p.work[s] > capacity[r] and takes > 0.0:
        return STUCK
    if kind == I and again and apart:
        state.clock[r] += p.ms[R, s, m]  # while the gradient is under way
        _write(state, r, s, R, m, out)
    state.used[r] += takes
    end = max(state.clock[r], state.arrived[row, s, m]) + p.ms[kind, s, m]
    state.clock[r] = end
    state.undone[r] -= p.ms[kind, s, m]
    if end + state.undone[r] > cutoff_ms:
        return TOO_SLOW
    _write(state, r, s, kind, m, out)
    state.done[row, s] += 1
    if kind == I:
        state.used[r] -= p.held[s, m] - p.stash[s, m]
        state.waiting[r, state.queue[1, r], 0], state.waiting[r, state.queue[1, r], 1] = s, m
        state.queue[1, r] += 1
    if kind == F and s + 1 < state.done.shape[1]:
        to = p.rank[s + 1]
        hand_on(state.arrived, FOR_F, s + 1, m, state.channel, r, to, end, p.forward_ms[s, m])
        return to
    if kind == F:
        state.arrived[FOR_I, s, m] = end
    elif s > 0:
        to = p.rank[s - 1]
        hand_on(state.arrived, FOR_I, s - 1, m, state.channel, r, to, end, p.gradient_ms[s, m])
        return to
    return r


@njit
def _stashed(p, state, r):  # type: ignore[no-untyped-def]
    """Return the bytes that the pending W of a rank would release."""
    total = 0.0
    for k in range(state.queue[0, r], state.queue[1, r]):
        total += p.stash[state.waiting[r, k, 0], state.waiting[r, k, 1]]
    return total


@njit
def _run_weight(p, state, r, out):  # type: ignore[no-untyped-def]
    """Run the W that has waited longest on rank r."""
    s, m = state.waiting[r, state.queue[0, r], 0], state.waiting[r, state.queue[0, r], 1]
    state.queue[0, r] += 1
    state.clock[r] += p.ms[W, s, m]
    state.undone[r] -= p.ms[W, s, m]
    state.used[r] -= p.stash[s, m]
    _write(state, r, s, W, m, out)


@njit
def _write(state, r, s, kind, m, out):  # type: ignore[no-untyped-def]
    n = state.length[r]
    out[r, n, 0], out[r, n, 1], out[r, n, 2] = s, kind, m
    state.length[r] = n + 1
