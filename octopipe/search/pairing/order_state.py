"""Compiled state that the list schedulers with pairs share: ranks and stages, and the execution of a slot.

Knows: costs of a structure, which ops of a stage come next, and the effect of a slot of up to three ops. Does not know:
how a rank decides what to run (`schedule`, `rhythm`), or plans. `simulation/timing.py` defines when a result arrives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.pairing.prices import ACTIVATION, STASH
from octopipe.simulation.timing import FOR_F, FOR_I, hand_on

OP_F, OP_I, OP_W, OP_B = 0, 2, 3, 4
"""The codes of the kinds of ops, as in `plan.KINDS`."""
DONE_F, DONE_I, DONE_W = 0, 1, 2
"""Rows of `OrderState.done`."""


class Structure(NamedTuple):
    """Costs of stages on ranks."""

    own: Any
    """[row, stage]: rows are named in `prices`."""
    together: Any
    """[plane, stage, stage]: times of pairs, planes are named in `prices`."""
    hop_f: Any
    """[stage]: the transfer of F's output to the next stage."""
    hop_i: Any
    """[stage]: the transfer of I's gradient to the stage before."""
    rank: Any
    room: Any
    """[rank]: bytes for activations."""


class Slots(NamedTuple):
    """Where the orders are written."""

    ops: Any
    """[rank, slot, 2]: packed ops; the second is -1 where there is none."""
    lengths: Any
    """[rank]: the number of slots."""


class OrderState(NamedTuple):
    """The state of ranks and stages while orders are built."""

    arrived: Any
    """[2, stage, micro-batch]: when inputs and gradients are there; infinite while that is not known."""
    channel: Any
    done: Any
    """[3, stage]: how many F, I and W have run."""
    clock: Any
    """[rank]: when it decides next."""
    asleep: Any
    """[rank]: whether it sleeps, because it can run nothing until something arrives."""
    used: Any
    """[rank]: bytes of activations in use."""
    left: Any
    """[rank]: the number of its ops that have not run."""
    held: Any
    """[rank, k]: the stages of the rank."""
    holds: Any
    """[rank]: how many stages it has."""


@njit
def set_up(st, state, slots):  # type: ignore[no-untyped-def]
    """Initialise the state: nothing has run, and the first stage has all its inputs."""
    micro_batches = state.arrived.shape[2]
    state.arrived[:] = np.inf
    for s in range(st.rank.size):
        r = st.rank[s]
        state.held[r, state.holds[r]] = s
        state.holds[r] += 1
        state.left[r] += 3 * micro_batches
    for r in range(st.room.size):
        slots.lengths[r] = 0
    for m in range(micro_batches):
        state.arrived[FOR_F, 0, m] = 0.0


@njit
def next_rank(state):  # type: ignore[no-untyped-def]
    """The rank that decides next, or -1 if all ranks that have something left are asleep; and whether any rank has
    something left."""
    r = -1
    unfinished = False
    for k in range(state.left.size):
        if state.left[k] > 0:
            unfinished = True
            if not state.asleep[k] and (r < 0 or state.clock[k] < state.clock[r]):
                r = k
    return r, unfinished


@njit
def fullest_weight(st, state, r):  # type: ignore[no-untyped-def]
    """The stage of rank r whose pending W (those after their I) hold most bytes, or -1; and the number of W that are
    pending on the rank. Among equal stages, the one with most pending W."""
    best, most, pending = -1, 0.0, 0
    for place in range(state.holds[r]):
        s = state.held[r, place]
        waiting = state.done[DONE_I, s] - state.done[DONE_W, s]
        pending += waiting
        if waiting > 0 and st.own[STASH, s] * waiting + 1e-9 * waiting > most:
            most = st.own[STASH, s] * waiting + 1e-9 * waiting
            best = s
    return best, pending


@njit
def take(st, state, slots, r, over, f, f2, i, b, w):  # type: ignore[no-untyped-def]
    """Append a slot that ends at `over` to the order of rank r, update the state and pass on the results. `f` and `f2`
    are the stages whose F it contains, `i` and `w` those of its I and W, each -1 if there is none. If `b` is not -1,
    the I is a B."""
    size, micro_batches = st.rank.size, state.arrived.shape[2]
    slot = slots.lengths[r]
    slots.lengths[r] += 1
    slots.ops[r, slot, 0] = -1
    slots.ops[r, slot, 1] = -1
    place = 0
    for turn in range(2):
        s = f if turn == 0 else f2
        if s >= 0:
            m = state.done[DONE_F, s]
            slots.ops[r, slot, place] = (OP_F * size + s) * micro_batches + m
            place += 1
            state.done[DONE_F, s] += 1
            state.used[r] += st.own[ACTIVATION, s]
            state.left[r] -= 1
            if s + 1 < size:
                wake(st, state, FOR_F, s + 1, m, r, over, st.hop_f[s])
            else:
                state.arrived[FOR_I, s, m] = over
    if i >= 0:
        m = state.done[DONE_I, i]
        slots.ops[r, slot, place] = ((OP_B if b >= 0 else OP_I) * size + i) * micro_batches + m
        place += 1
        state.done[DONE_I, i] += 1
        state.used[r] -= st.own[ACTIVATION, i] - st.own[STASH, i]
        state.left[r] -= 1
        if b >= 0:
            state.done[DONE_W, i] += 1
            state.used[r] -= st.own[STASH, i]
            state.left[r] -= 1
        if i > 0:
            wake(st, state, FOR_I, i - 1, m, r, over, st.hop_i[i])
    if w >= 0:
        slots.ops[r, slot, place] = (OP_W * size + w) * micro_batches + state.done[DONE_W, w]
        state.done[DONE_W, w] += 1
        state.used[r] -= st.own[STASH, w]
        state.left[r] -= 1
    state.clock[r] = over


@njit
def wake(st, state, row, s, m, r, end, hop):  # type: ignore[no-untyped-def]
    """Pass a result on to stage s. If that stage's rank is asleep, it decides again when the result arrives."""
    to = st.rank[s]
    at = hand_on(state.arrived, row, s, m, state.channel, r, to, end, hop)
    if state.asleep[to]:
        state.asleep[to] = False
        state.clock[to] = max(state.clock[to], at)
