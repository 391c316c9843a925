"""The simulator's hot loops, compiled.

Knows: arrays of ops, transfers and predecessors. Does not know: plans, costs or messages; simulator.py and lowering.py
build the arrays and interpret the results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.plans.op import F, R, W
from octopipe.simulation.timing import FOR_F, FOR_I, NEVER, begin_paths, note_run, pass_on, start_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
AT_ONCE = 1 << 20
"""The number of jittered durations that are drawn at a time."""


@njit
def longest_path(order, preds, duration):  # type: ignore[no-untyped-def]
    """Return start and end of every node if each starts as soon as its predecessors have ended, and its binding.

    The binding is the predecessor that ended last (ties: the first column), or -1 if the node starts at time zero.
    """
    nodes, width = preds.shape
    start = np.zeros(nodes)
    end = np.zeros(nodes)
    binding = np.full(nodes, -1, np.int32)
    for i in range(order.size):
        node = order[i]
        latest = 0.0
        because = -1
        for k in range(width):
            p = preds[node, k]
            if p >= 0 and (because < 0 or end[p] > latest):
                latest = end[p]
                because = p
        start[node] = latest
        end[node] = latest + duration[node]
        binding[node] = because
    return start, end, binding


def makespans(order: Ints, preds: Ints, duration: Floats, sigma: float, runs: int, seed: int) -> Floats:
    """Return the makespans of `runs` trials in which every duration is scaled by a log-normal of mean 1."""
    draws = np.random.RandomState(seed & 0xFFFFFFFF)
    nodes = order[duration[order] > 0.0] if sigma > 0.0 else order[:0]
    out = np.empty(runs)
    at_once = max(1, AT_ONCE // max(duration.size, 1))
    for first in range(0, runs, at_once):
        count = min(at_once, runs - first)
        scaled = np.tile(duration, (count, 1))
        # Not np.exp of an array, whose last digit depends on the processor.
        scaled[:, nodes] *= draws.lognormal(-0.5 * sigma * sigma, sigma, (count, nodes.size))
        out[first : first + count] = _ends(order, preds, scaled)
    return out


@njit
def _ends(order, preds, duration):  # type: ignore[no-untyped-def]
    """Return when the last node ends, for every row of durations."""
    runs, nodes = duration.shape
    width = preds.shape[1]
    end = np.zeros(nodes)
    out = np.empty(runs)
    for run in range(runs):
        makespan = 0.0
        for i in range(order.size):
            node = order[i]
            latest = 0.0
            for k in range(width):
                p = preds[node, k]
                if p >= 0 and end[p] > latest:
                    latest = end[p]
            end[node] = latest + duration[run, node]
            if end[node] > makespan:
                makespan = end[node]
        out[run] = makespan
    return out


@njit
def program_predecessors(  # type: ignore[no-untyped-def]
    compute_preds, transfer_of, rank_of, source, target, instr_offsets, instr_kind, instr_id, mode, ranks
):
    """Predecessors of the rendezvous graph: compute ops are nodes 0..C-1, transfers C..C+T-1.

    compute_preds[c, k] is a data predecessor and transfer_of[c, k] the transfer that carries it (or -1).
    instr_* list each rank's program: kind 0 compute, 1 send, 2 receive; id is the op or the transfer.
    mode 0 directed, 1 pair, 2 single, 3 blocking.
    Columns of a transfer: producer, last compute before the send, last compute before the receive, the
    transfer before it in the sender's queue and in the receiver's queue. A compute op: the op before it,
    its data predecessors (through their transfers), and in blocking mode the instruction before it.
    """
    computes, width = compute_preds.shape
    transfers = source.size
    preds = np.full((computes + transfers, max(width + 1, 5)), -1, np.int32)
    for c in range(computes):
        for k in range(width):
            if transfer_of[c, k] >= 0:
                preds[c, k + 1] = computes + transfer_of[c, k]
            else:
                preds[c, k + 1] = compute_preds[c, k]
    if mode == 3:
        for r in range(ranks):
            previous = -1
            for i in range(instr_offsets[r], instr_offsets[r + 1]):
                if instr_kind[i] == 0:
                    preds[instr_id[i], 0] = previous
                    previous = instr_id[i]
                else:
                    t = instr_id[i]
                    preds[computes + t, 0] = source[t]
                    preds[computes + t, instr_kind[i]] = previous
                    previous = computes + t
        return preds
    last = np.full((2, ranks), -1, np.int32)
    for r in range(ranks):
        last[:] = -1
        single = -1
        previous = -1
        for i in range(instr_offsets[r], instr_offsets[r + 1]):
            if instr_kind[i] == 0:
                preds[instr_id[i], 0] = previous
                previous = instr_id[i]
                continue
            t = instr_id[i]
            sending = instr_kind[i] == 1
            node = computes + t
            preds[node, 0] = source[t]
            preds[node, instr_kind[i]] = previous
            peer = rank_of[target[t]] if sending else rank_of[source[t]]
            side = 1 if sending and mode == 0 else 0
            before = single if mode == 2 else last[side, peer]
            preds[node, 3 if sending else 4] = before
            if mode == 2:
                single = node
            else:
                last[side, peer] = node
    return preds


@njit
def evaluate(  # type: ignore[no-untyped-def]
    offsets, stage, kind, micro_batch, duration, before, after, route, stage_rank, forward_ms, gradient_ms
):
    """Return the makespan of orders under the directed channel model, from the op arrays alone; -1 on deadlock.

    forward_ms[stage, m] is the transfer time of the stage's output to the next stage's rank, and gradient_ms[stage, m]
    that of its input gradient to the preceding stage's rank. The result equals that of lowering and simulating the
    plan.
    """
    start, end = np.empty(stage.size), np.empty(stage.size)
    sent = np.empty((2, stage_rank.size, route.size))
    reached = np.empty((2, stage_rank.size, route.size))
    return order_times(
        offsets, stage, kind, micro_batch, duration, before, after, route, stage_rank, forward_ms, gradient_ms,
        start, end, sent, reached,
    )  # fmt: skip


@njit
def order_times(  # type: ignore[no-untyped-def]
    offsets, stage, kind, micro_batch, duration, before, after, route, stage_rank, forward_ms, gradient_ms,
    start, end, sent, reached,
):  # fmt: skip
    """Return the makespan as `evaluate` does, and write the times of ops and transfers into the last four arrays.

    start[op] and end[op] are an op's times. sent[row, stage, m] and reached[row, stage, m] are those of the transfer
    that brings the stage its input (row FOR_F) or its gradient (row FOR_I). Entries without a transfer are not written.
    """
    ranks = offsets.size - 1
    arrived = np.empty((2, stage_rank.size, route.size))
    begin_paths(arrived, before, route)
    channel = np.zeros((ranks, ranks))
    clock = np.zeros(ranks)
    head = offsets[:-1].copy()
    left = stage.size
    again = np.zeros((stage_rank.size, route.size), np.bool_)
    for i in range(left):
        if kind[i] == R:
            again[stage[i], micro_batch[i]] = True
    while left > 0:
        moved = False
        for r in range(ranks):
            now = clock[r]
            i = head[r]
            while i < offsets[r + 1]:
                s, k, m = stage[i], kind[i], micro_batch[i]
                at = start_of(arrived, k, s, m, now)
                if at == NEVER:
                    return -1.0
                if at == np.inf:
                    break
                now = at + duration[i]
                start[i] = at
                end[i] = now
                note_run(arrived, k, s, m, again[s, m])
                row = FOR_F if k == F else FOR_I
                to = after[route[m], s] if k == F else -1 if k == R else before[route[m], s] if k != W else -1
                if to >= 0 and stage_rank[to] != r:
                    sent[row, to, m] = max(now, channel[r, stage_rank[to]])
                pass_on(arrived, k, s, m, before, after, route, stage_rank, channel, now, forward_ms, gradient_ms)
                if to >= 0 and stage_rank[to] != r:
                    reached[row, to, m] = channel[r, stage_rank[to]]
                i += 1
                moved = True
            left -= i - head[r]
            head[r] = i
            clock[r] = now
        if not moved:
            return -1.0
    return clock.max()
