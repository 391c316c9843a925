"""The rows that a decision of the list scheduler reads, per stage and per rank: their columns and initial values.

Knows: the keys of list scheduling and the columns of `Scratch.row` and `Scratch.num`. Does not know: how a rank decides
(`decode`), or where keys come from (`keys`).
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.search.tuner.core.problem import (
    AT_SLOT, BOUNDS, CLOCK, ENTRY, FIRST, FLIGHT, FORWARD, FREE, FULL, F_MS, HOLD, HOP_I, INPUT, I_MS,
    LAYERS, LIMIT, MICRO_BATCHES, OWED, RANK, RANKS, SIZE, SLOT, TAIL, VARIANTS, WAY, W_MS,
)  # fmt: skip
from octopipe.simulation.timing import FOR_F, FOR_I

A_F, B_F, A_I, B_I, C_I, LOOK, RHO, W_OVER, BANK, RULE, RULE_SLACK, RULE_MORE, NUM_KEYS = range(13)
"""These are the places in a vector of keys. The priority of F is A_F * m + B_F * (share of the forward chain before the
stage), and that of I is C_I + A_I * m + B_I * (share of the backward chain before it). LOOK says how long a rank waits
for a better op, and W_OVER how far a W may run into a known arrival, both in units of a rank's mean work per
micro-batch. RHO is the share of the later stages' activations of one micro-batch that is kept free; BANK is the same
for every micro-batch on its way through the rank. RULE and its two numbers limit the micro-batches in flight (see
keys.py)."""

(
    ROW_AT_F, ROW_KEY_F, ROW_F_MS, ROW_HOLD, ROW_RESERVE, ROW_AT_I, ROW_KEY_I, ROW_I_MS, ROW_FREED, ROW_W_MS, ROW_TAIL,
    ROW_LATER,
) = range(12)  # fmt: skip
"""These are the columns of `Scratch.row`. For the next F: when it can start (infinite if it cannot yet), its key, its
duration, the bytes that it takes and the bytes that must stay free beside it. For the next I: when it can start, its
key, its duration and the bytes that it frees. For the next W: its duration and the bytes that it frees. The last column
holds the bytes that the rank's later stages take for one micro-batch."""
NUM_STAGE, NEXT_F, NEXT_I, NEXT_W, NEXT_R, NUM_FLIGHT, BEFORE, AFTER, RANK_BEFORE, RANK_AFTER = range(10)
"""These are the columns of `Scratch.num` for slots: the stage, the next micro-batch of every kind of op, the limit of
micro-batches in flight, and the slots and ranks of the neighbours in the chain."""
SLOTS_FROM, DONE, PENDING, IDLE = range(4)
"""These are the columns of `Scratch.num` for ranks, whose rows follow those of all slots: the first slot, the number of
ops so far, the number of W that could run, and whether the rank waits."""


@njit
def set_up(p, st, keys, sc):  # type: ignore[no-untyped-def]
    """Initialise the rows of stages and ranks to the state before anything has run; call `price` first."""
    ranks, M, stages, inf = p.count[RANKS], p.count[MICRO_BATCHES], st[SIZE, 0], np.inf
    row, num, mine = sc.row, sc.num, sc.mine
    at_rank = num.shape[0] - ranks - 1
    whole_f = max(p.layer[FORWARD, 0, p.count[LAYERS]], 1e-12)
    whole_i = max(p.layer[INPUT, 0, p.count[LAYERS]], 1e-12)
    v = st[ENTRY, 0] if p.count[VARIANTS] > 1 else 0
    for r in range(ranks):
        for q in range(ranks):
            sc.channel[r, q] = 0.0
        num[at_rank + r, SLOTS_FROM] = sc.place[FIRST, r]
        num[at_rank + r, DONE] = 0
        num[at_rank + r, PENDING] = 0
        num[at_rank + r, IDLE] = 1
        later = 0.0
        again = 0.0
        for at in range(sc.place[FIRST, r + 1] - 1, sc.place[FIRST, r] - 1, -1):
            s = sc.place[AT_SLOT, at]
            row[at, ROW_LATER] = later
            row[at, ROW_RESERVE] = later * keys[RHO]
            most = 0.0
            for w in range(p.count[VARIANTS]):
                most = max(most, sc.price[HOLD, s, w])
                again = max(again, sc.price[FULL, s, w] - sc.price[HOLD, s, w])
            later += most
        mine[r, CLOCK] = 0.0
        mine[r, FREE] = 0.0
        mine[r, OWED] = 0.0
        mine[r, WAY] = 0.0
        # Leave room for one R: a rank must always be able to restore the activations of any stage that it recomputes.
        mine[r, LIMIT] -= again
    num[at_rank + ranks, SLOTS_FROM] = sc.place[FIRST, ranks]
    for s in range(stages):
        at = sc.place[SLOT, s]
        num[at, NUM_STAGE] = s
        num[at, NEXT_F] = 0
        num[at, NEXT_I] = 0
        num[at, NEXT_W] = 0
        num[at, NEXT_R] = 0
        num[at, NUM_FLIGHT] = st[FLIGHT, s]
        num[at, BEFORE] = sc.place[SLOT, max(s - 1, 0)]
        num[at, AFTER] = sc.place[SLOT, min(s + 1, stages - 1)]
        num[at, RANK_BEFORE] = st[RANK, max(s - 1, 0)]
        num[at, RANK_AFTER] = st[RANK, min(s + 1, stages - 1)]
        row[at, ROW_AT_F] = inf
        row[at, ROW_AT_I] = inf
        row[at, ROW_KEY_F] = keys[B_F] * p.layer[FORWARD, 0, st[BOUNDS, s]] / whole_f
        row[at, ROW_KEY_I] = keys[C_I] + keys[B_I] * (1.0 - p.layer[INPUT, 0, st[BOUNDS, s + 1]] / whole_i)
        row[at, ROW_F_MS] = sc.price[F_MS, s, v]
        row[at, ROW_I_MS] = sc.price[I_MS, s, v]
        row[at, ROW_W_MS] = sc.price[W_MS, s, v]
        row[at, ROW_HOLD] = sc.price[HOLD, s, v]
        row[at, ROW_TAIL] = sc.price[TAIL, s, v]
        row[at, ROW_FREED] = sc.price[FULL, s, v] - sc.price[TAIL, s, v]
        for m in range(M):
            sc.arrive[FOR_F, s, m] = inf if s > 0 else 0.0
            sc.arrive[FOR_I, s, m] = inf
    row[sc.place[SLOT, 0], ROW_AT_F] = 0.0
    # After the last I of a rank's first stage, the gradient must pass all stages before it; the W of stage 0 follows.
    back = 0.0
    if p.count[VARIANTS] == 1:
        for s in range(stages):
            r = st[RANK, s]
            if s == sc.place[AT_SLOT, sc.place[FIRST, r]]:
                mine[r, WAY] += back + sc.price[HOP_I, s, 0]
            back += sc.price[I_MS, s, 0] + (sc.price[HOP_I, s, 0] if s > 0 else sc.price[W_MS, 0, 0])
            mine[r, WAY] += M * (sc.price[F_MS, s, 0] + sc.price[I_MS, s, 0])
