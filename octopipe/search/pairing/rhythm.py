"""Compiled periodic schedules: every rank runs its ops in a fixed periodic sequence, one F and one I at a time.

Knows: costs of a structure, and the slots of every stage's ops. Does not know: plans, or how slots are found
(`states`).

In the steady state, every rank runs one F and one I of each of its stages per micro-batch, always in the same sequence.
A rank's order is therefore determined by a few numbers: the slot of every stage's first F and first I, and the slot in
which each micro-batch starts. A rank runs its ops by slot and pairs an F and an I of the same slot. A fixed sequence
keeps the period stable, whereas running whatever arrives first (`schedule`) does not: one displaced pair delays all
later ones.

In addition, two F run together while the pipeline fills, if both inputs have arrived and that is shorter. W is part of
the I of a pair if that is cheaper than W alone; otherwise it waits for a single op with an exchange that can hide it,
or for idle time. The memory limit is not enforced but measured: the search sees by how much a sequence exceeds it.
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
from octopipe.search.pairing.prices import ACTIVATION, ALONE_F, ALONE_W, FB, FF, FI
from octopipe.search.pairing.schedule import beside
from octopipe.simulation.timing import FOR_F, FOR_I

PATIENCE, FIT, FUSE, RESERVE, BESIDE_W, TWO_F, LONE_F, KEEP, APART_W = range(9)
"""Places in `numbers`. Those before LONE_F are as in `schedule`; with infinite PATIENCE, ranks wait for every partner.
LONE_F: the number of F of a rank that run alone at first, so that the first micro-batches arrive early.
KEEP: the number of W that a rank keeps while it waits for a single op, to run them beside that op's exchange.
APART_W: for this many of the last micro-batches, W is not fused into pairs. It fills idle time at the end of the step,
when there is memory for what it holds."""

TOGETHER = 0.5
"""An F and an I are paired only if their slots differ by less than this."""


class Beat(NamedTuple):
    """The periodic sequence of every rank."""

    place_f: Any
    """[stage]: the slot of its first F."""
    place_i: Any
    """[stage]: the slot of its first I."""
    starts: Any
    """[micro-batch]: in which slot it starts."""
    numbers: Any


@njit
def rhythm(st, beat, micro_batches, slots, over_by):  # type: ignore[no-untyped-def]
    """The makespan of the schedule, infinite if it deadlocks. `slots` is filled as by `schedule`, and
    `over_by[rank]` with the bytes by which the schedule exceeds the memory of the rank."""
    size, ranks, inf, numbers = st.rank.size, st.room.size, np.inf, beat.numbers
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
    over_by[:] = 0.0
    forwards = np.zeros(ranks, np.int64)
    end = 0.0
    while True:
        r, unfinished = next_rank(state)
        if not unfinished:
            return end
        if r < 0:
            return inf
        now = state.clock[r]
        next_f, next_i, low_f, low_i = next_ops(beat, state, r)
        spare, pending = fullest_weight(st, state, r)
        f, f2, i, b, w = -1, -1, -1, -1, -1
        if (
            spare >= 0
            and next_f >= 0
            and low_f < low_i + TOGETHER
            and (state.used[r] + st.own[ACTIVATION, next_f] > st.room[r])
        ):
            # The next F lacks memory: run a W first, which frees some. The sequence stays as it is otherwise.
            w = spare
            took = st.own[ALONE_W, w]
        else:
            wants_f, wants_i, when = partners(beat, state, r, next_f, next_i, low_f, low_i)
            if when > now:
                single = not (wants_f and wants_i)
                fits = spare >= 0 and (pending > numbers[KEEP] or not single)
                fits = fits and (when == inf or now + numbers[FIT] * st.own[ALONE_W, spare] <= when)
                if not fits and when < inf:
                    state.clock[r] = when
                    continue
                if not fits and state.left[r] != pending:
                    state.asleep[r] = True
                    continue
                # A W fits before the partner comes, or nothing but W is left.
                w = spare
                took = st.own[ALONE_W, w]
            elif wants_f and wants_i:
                f, i = next_f, next_i
                b, took = fused(st, beat, state, f, i)
            else:
                if wants_i:
                    i = next_i
                else:
                    f = next_f
                    if forwards[r] >= numbers[LONE_F]:
                        f2 = forward_after(st, beat, state, r, f, low_i)
                if f2 >= 0:
                    took = st.together[FF, f, f2]
                else:
                    w, took = beside(st, numbers[BESIDE_W], f, i, spare)
        over = now + took
        holding = state.used[r] + (st.own[ACTIVATION, f] if f >= 0 else 0.0)
        holding += st.own[ACTIVATION, f2] if f2 >= 0 else 0.0
        over_by[r] = max(over_by[r], holding - st.room[r])
        take(st, state, slots, r, over, f, f2, i, b, w)
        forwards[r] += (1 if f >= 0 else 0) + (1 if f2 >= 0 else 0)
        if over > end:
            end = over


@njit
def next_ops(beat, state, r):  # type: ignore[no-untyped-def]
    """The stages of the next F and the next I in rank r's sequence (-1 if none is left), and their slots."""
    next_f, next_i, low_f, low_i = -1, -1, np.inf, np.inf
    for place in range(state.holds[r]):
        s = state.held[r, place]
        m = state.done[DONE_F, s]
        if m < state.arrived.shape[2] and beat.place_f[s] + beat.starts[m] < low_f:
            low_f, next_f = beat.place_f[s] + beat.starts[m], s
        m = state.done[DONE_I, s]
        if m < state.arrived.shape[2] and beat.place_i[s] + beat.starts[m] < low_i:
            low_i, next_i = beat.place_i[s] + beat.starts[m], s
    return next_f, next_i, low_f, low_i


@njit
def partners(beat, state, r, next_f, next_i, low_f, low_i):  # type: ignore[no-untyped-def]
    """Whether rank r runs the F next, whether it runs the I next (both: as a pair), and when the inputs of what it runs
    have arrived (infinite if not known yet)."""
    at_f, at_i, when, now = np.inf, np.inf, np.inf, state.clock[r]
    if next_f >= 0:
        at_f = state.arrived[FOR_F, next_f, state.done[DONE_F, next_f]]
    # An I cannot run before the F of its own stage and micro-batch.
    may_i = next_i >= 0 and state.done[DONE_I, next_i] < state.done[DONE_F, next_i]
    if may_i:
        at_i = state.arrived[FOR_I, next_i, state.done[DONE_I, next_i]]
    wants_f = next_f >= 0 and low_f < low_i + TOGETHER
    wants_i = may_i and low_i < low_f + TOGETHER
    if wants_f and wants_i:
        when = max(at_f, at_i)
        if when > now + beat.numbers[PATIENCE] and min(at_f, at_i) <= now:
            # The partner arrives too late: run the op whose input has arrived.
            wants_f, wants_i = at_i > now, at_i <= now
            when = at_i if wants_i else at_f
    elif wants_f:
        when = at_f
    elif wants_i:
        when = at_i
    return wants_f, wants_i, when


@njit
def fused(st, beat, state, f, i):  # type: ignore[no-untyped-def]
    """An F and an I as a pair: the stage whose W is fused into the I (-1 if none), and the duration of the pair."""
    took, done = st.together[FI, f, i], state.done[DONE_I, i]
    extra = st.together[FB, f, i] - took
    apart = done >= state.arrived.shape[2] - beat.numbers[APART_W]
    if not apart and state.done[DONE_W, i] == done and extra <= beat.numbers[FUSE] * st.own[ALONE_W, i]:
        return i, st.together[FB, f, i]
    return -1, took


@njit
def forward_after(st, beat, state, r, f, low_i):  # type: ignore[no-untyped-def]
    """The F that follows that of stage f in the rank's sequence, if the two may run together; otherwise -1."""
    low, second, now = np.inf, -1, state.clock[r]
    for place in range(state.holds[r]):
        s = state.held[r, place]
        m = state.done[DONE_F, s] + (1 if s == f else 0)
        if m < state.arrived.shape[2] and beat.place_f[s] + beat.starts[m] < low:
            low, second = beat.place_f[s] + beat.starts[m], s
    if second < 0 or not low < low_i - TOGETHER:
        return -1
    m = state.done[DONE_F, second] + (1 if second == f else 0)
    needed = state.used[r] + st.own[ACTIVATION, f] + st.own[ACTIVATION, second]
    pays = st.together[FF, f, second] <= beat.numbers[TWO_F] * (st.own[ALONE_F, f] + st.own[ALONE_F, second])
    return second if state.arrived[FOR_F, second, m] <= now and needed <= st.room[r] and pays else -1
