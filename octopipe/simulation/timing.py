"""The single compiled timing rule: what must have ended before an op, when it may start, and when its result arrives.

Knows: what F, R, I, W and B of one stage and micro-batch wait for, and directed channels (one queue per direction of a
pair of ranks, in order). Does not know: orders, plans, prices or memory. Everything that times given orders (`engine`,
the polishers and replays of the searches) and every list scheduler calls these kernels. `Plan.predecessor_table` states
the same dependencies for lowering; tests/simulation/test_timing.py checks that the two agree.

The state of a step is one array, `arrived[2, stage, micro_batch]`. It holds when the input of F (row `FOR_F`) and the
gradient for I (row `FOR_I`) are on the stage's rank, and it is infinite while that is not known. A negative number
says that the op which consumes it has run, so the array also answers what may follow:

- F starts when its rank is free and its input has arrived.
- I, or B, needs its own F, its own R where the activations were dropped, and the gradient. On the last stage of a path
  the gradient is there when F ends.
- R needs its own F, and W its own I. These are on the same rank, so there is no transfer.
"""

from __future__ import annotations

import numpy as np

from octopipe.base.compile import njit
from octopipe.plans.op import F, R, W

FOR_F, FOR_I = 0, 1
"""Rows of `arrived`."""
RAN, DROPPED = -1.0, -2.0
"""In place of an arrival: the op has run; F has run and its activations were dropped, so that R must run before I."""
NEVER = -1.0
"""In place of a start: the op stands before another op of its own rank that it needs, so these orders cannot run."""


@njit
def handed_over(channel, source, target, end, transfer_ms):  # type: ignore[no-untyped-def]
    """Return when the result of an op that ended at `end` on rank `source` is on rank `target`, and occupy its queue.

    A result that stays on its rank is there at once. Any other waits until the queue of its direction is empty.
    """
    if source == target:
        return end
    at = max(end, channel[source, target]) + transfer_ms
    channel[source, target] = at
    return at


@njit
def hand_on(arrived, row, stage, micro_batch, channel, source, target, end, transfer_ms):  # type: ignore[no-untyped-def]
    """Hand a result over to a stage on rank `target` and note when it arrives there; returns that time."""
    at = handed_over(channel, source, target, end, transfer_ms)
    arrived[row, stage, micro_batch] = at
    return at


@njit
def start_of(arrived, kind, stage, micro_batch, free):  # type: ignore[no-untyped-def]
    """Return when an op may start on a rank that is free from `free` on: infinite while what it needs has not arrived,
    NEVER if its own rank has not run an op that must come first."""
    if kind == F:
        return max(free, arrived[FOR_F, stage, micro_batch])
    if kind == W:
        return free if arrived[FOR_I, stage, micro_batch] < 0.0 else NEVER
    if kind == R:
        dropped = arrived[FOR_F, stage, micro_batch] == DROPPED
        return free if dropped and arrived[FOR_I, stage, micro_batch] >= 0.0 else NEVER
    if arrived[FOR_F, stage, micro_batch] != RAN:
        return NEVER
    return max(free, arrived[FOR_I, stage, micro_batch])


@njit
def note_run(arrived, kind, stage, micro_batch, drops):  # type: ignore[no-untyped-def]
    """Note that an op has run. `drops`: F drops its activations, and an R will restore them."""
    if kind == F:
        arrived[FOR_F, stage, micro_batch] = DROPPED if drops else RAN
    elif kind == R:
        arrived[FOR_F, stage, micro_batch] = RAN
    elif kind != W:
        arrived[FOR_I, stage, micro_batch] = RAN


@njit
def begin_paths(arrived, before, route):  # type: ignore[no-untyped-def]
    """Mark everything as not arrived, except the inputs of stages that no other stage feeds (`before[route, stage]` <
    0)."""
    for s in range(arrived.shape[1]):
        for m in range(arrived.shape[2]):
            arrived[FOR_F, s, m] = 0.0 if before[route[m], s] < 0 else np.inf
            arrived[FOR_I, s, m] = np.inf


@njit
def pass_on(  # type: ignore[no-untyped-def]
    arrived, kind, s, m, before, after, route, stage_rank, channel, end, forward_ms, gradient_ms
):
    """Hand on the result of an op that ended at `end`: F's output to the stage after it, the gradient of I and B to the
    stage before it. If a path ends with F, its gradient is there at once. R and W produce nothing for other stages."""
    r = stage_rank[s]
    if kind == F:
        to = after[route[m], s]
        if to >= 0:
            hand_on(arrived, FOR_F, to, m, channel, r, stage_rank[to], end, forward_ms[s, m])
        else:
            arrived[FOR_I, s, m] = end
    elif kind != R and kind != W:
        to = before[route[m], s]
        if to >= 0:
            hand_on(arrived, FOR_I, to, m, channel, r, stage_rank[to], end, gradient_ms[s, m])
