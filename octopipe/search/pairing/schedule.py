"""Compiled list scheduling with pairs: turns a structure and its keys into orders in which ops run together.

Knows: costs of a structure, and how a rank decides what to run next. Does not know: plans, or moves on structures.

A free rank considers the next F and the next I of each of its stages (micro-batches are equal, so first in, first out
is no restriction) and selects the best of each by key. If both have arrived, they run as a pair, together with the W of
the I if that is cheaper than W alone. If one is missing, the rank waits for it for a while (`patience`); otherwise it
runs the other with a W beside it, or alone. But a stage with `flight` micro-batches in flight runs no F alone: it keeps
that F for a pair. Two F may run together if no gradient is near. If neither has arrived, the rank runs a W. An F needs
memory for what it holds and for a share of what its micro-batch will hold on the same rank later, so that the backward
is not blocked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.pairing.order_state import (
    DONE_F,
    DONE_I,
    DONE_W,
    OrderState,
    fullest_weight,
    next_rank,
    set_up,
    take,
)
from octopipe.search.pairing.prices import ACTIVATION, ALONE_F, ALONE_I, ALONE_W, FB, FF, FI, FW, IW
from octopipe.simulation.timing import FOR_F, FOR_I

PATIENCE, FIT, FUSE, RESERVE, BESIDE_W, TWO_F = range(6)
"""Places in `numbers`. PATIENCE: how long a rank waits for a partner (ms). FIT: the share of a W that must fit before
the next arrival (1: it must not overrun). FUSE, BESIDE_W: the share of its own duration by which a W may lengthen a
pair or a single op. RESERVE: the share of later stages' bytes that is kept free. TWO_F: two F run together if that
takes at most this share of their separate durations."""


class Keys(NamedTuple):
    """The priorities of a rank: of the ops of two stages, the one with the smaller (micro-batch + key) goes first."""

    forward: Any
    inward: Any
    flight: Any
    """[stage]: F may run alone only while fewer micro-batches than this are between F and I."""
    numbers: Any


@njit
def schedule(st, keys, micro_batches, slots):  # type: ignore[no-untyped-def]
    """The makespan of the orders that the keys give, infinite if they deadlock; `slots` receives the orders."""
    size, ranks, inf = st.rank.size, st.room.size, np.inf
    state = OrderState(
        arrived=np.empty((2, size, micro_batches)),
        channel=np.zeros((ranks, ranks)),
        done=np.zeros((3, size), np.int64),
        clock=np.zeros(ranks),
        asleep=np.zeros(ranks, np.bool_),
        used=np.zeros(ranks),
        left=np.zeros(ranks, np.int64),
        held=np.zeros((ranks, size), np.int64),
        holds=np.zeros(ranks, np.int64),
    )
    set_up(st, state, slots)
    # The bytes that a micro-batch will still take in later stages of the same rank.
    later = np.zeros(size)
    for s in range(size):
        for t in range(s + 1, size):
            if st.rank[t] == st.rank[s]:
                later[s] += st.own[ACTIVATION, t]
    end = 0.0
    while True:
        r, unfinished = next_rank(state)
        if not unfinished:
            return end
        if r < 0:
            return inf
        now = state.clock[r]
        f, i, w, soon_f, soon_i = look(st, keys, state, later, r)
        f2, b = -1, -1
        if f >= 0 and i >= 0:
            w = -1
            b, took = pair(st, keys, state, f, i)
        elif f >= 0 or i >= 0:
            partner = soon_f if i >= 0 else soon_i
            if partner <= now + keys.numbers[PATIENCE]:
                state.clock[r] = partner
                continue
            if f >= 0:
                f2 = second_forward(st, keys, state, later, r, f)
            if f2 >= 0:
                w, took = -1, st.together[FF, f, f2]
            else:
                w, took = beside(st, keys.numbers[BESIDE_W], f, i, w)
        else:
            soon = min(soon_f, soon_i)
            if w >= 0 and (soon == inf or now + keys.numbers[FIT] * st.own[ALONE_W, w] <= soon):
                took = st.own[ALONE_W, w]
            elif soon < inf:
                state.clock[r] = soon
                continue
            else:
                state.asleep[r] = True
                continue
        over = now + took
        take(st, state, slots, r, over, f, f2, i, b, w)
        if over > end:
            end = over


@njit
def look(st, keys, state, later, r):  # type: ignore[no-untyped-def]
    """What rank r can run now: the stages of the best F, I and W whose inputs are there (-1 if none; if there is no
    I, the F is one that may run alone), and when the next F and the next I that are not ready become ready."""
    micro_batches, now, inf = state.arrived.shape[2], state.clock[r], np.inf
    best_f, best_i, only_f = -1, -1, -1
    soon_f, soon_i = inf, inf
    low_f, low_i, low_only = inf, inf, inf
    for place in range(state.holds[r]):
        s = state.held[r, place]
        m = state.done[DONE_F, s]
        if m < micro_batches and (
            state.used[r] + st.own[ACTIVATION, s] + keys.numbers[RESERVE] * later[s] <= st.room[r]
        ):
            at, key = state.arrived[FOR_F, s, m], m + keys.forward[s]
            if at <= now:
                if key < low_f:
                    low_f, best_f = key, s
                if m - state.done[DONE_I, s] < keys.flight[s] and key < low_only:
                    low_only, only_f = key, s
            elif at < soon_f:
                soon_f = at
        m = state.done[DONE_I, s]
        if m < state.done[DONE_F, s]:
            at, key = state.arrived[FOR_I, s, m], m + keys.inward[s]
            if at <= now:
                if key < low_i:
                    low_i, best_i = key, s
            elif at < soon_i:
                soon_i = at
    best_w, _ = fullest_weight(st, state, r)
    return only_f if best_i < 0 else best_f, best_i, best_w, soon_f, soon_i


@njit
def pair(st, keys, state, f, i):  # type: ignore[no-untyped-def]
    """An F and an I together: the stage whose W is fused into the I (-1 if none), and the duration of the pair."""
    took = st.together[FI, f, i]
    extra = st.together[FB, f, i] - took
    # W run first in, first out as well: a fused W must be the next one of its stage.
    if state.done[DONE_W, i] == state.done[DONE_I, i] and extra <= keys.numbers[FUSE] * st.own[ALONE_W, i]:
        return i, st.together[FB, f, i]
    return -1, took


@njit
def second_forward(st, keys, state, later, r, f):  # type: ignore[no-untyped-def]
    """The stage of an F that may run together with that of stage f, or -1."""
    low, best, reserved = np.inf, -1, keys.numbers[RESERVE]
    for place in range(state.holds[r]):
        s = state.held[r, place]
        m = state.done[DONE_F, s] + (1 if s == f else 0)
        if (
            m < state.arrived.shape[2]
            and m - state.done[DONE_I, s] < keys.flight[s]
            and state.arrived[FOR_F, s, m] <= state.clock[r]
        ):
            needed = state.used[r] + st.own[ACTIVATION, f] + st.own[ACTIVATION, s] + reserved * max(later[s], later[f])
            pays = st.together[FF, f, s] <= keys.numbers[TWO_F] * (st.own[ALONE_F, f] + st.own[ALONE_F, s])
            if pays and needed <= st.room[r] and m + keys.forward[s] < low:
                low, best = m + keys.forward[s], s
    return best


@njit
def beside(st, share, f, i, w):  # type: ignore[no-untyped-def]
    """For a single F or I: the stage whose W runs beside it (-1 if none), and the duration of the slot. The W may add
    at most the share `share` of its own duration."""
    alone = st.own[ALONE_F, f] if f >= 0 else st.own[ALONE_I, i]
    if w >= 0:
        both = st.together[FW, f, w] if f >= 0 else st.together[IW, i, w]
        if both - alone <= share * st.own[ALONE_W, w]:
            return w, both
    return -1, alone
