"""Backward splitting for systems that do not define it: B becomes I and W, and W runs where it costs no time.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; the paper's evaluation splits every baseline like this.
Rule: forwards, recomputations and input gradients keep the plan's own order; a rank runs a weight gradient
when it would be idle, when its memory is short, and at the end.

Knows: the fused plan, its costs, where a rank idles. Does not know: which system made the plan.

Memory: no rank exceeds the fused plan's highest peak over all ranks (as in ZB-H1), nor its capacity if the
fused plan fits. Gradients that arrive sooner than in the fused plan may add two boundary tensors, because
their buffers do not depend on where W runs. If the costs contain no bytes, a stage's number of layers stands
for its activations, all held until W.
Time: candidates differ in how long W may be deferred and in how small a gap W may fill; the fastest by
simulation wins. The plain sequence I, W is a candidate, so the result is never slower than that.

>>> from octopipe.costs.table import CostTable
>>> from octopipe.simulation.simulator import simulate
>>> from octopipe.search.systems import build_plan
>>> costs = CostTable.uniform(num_layers=4)
>>> simulate(build_plan("1f1b", costs, 4, 8), costs).span_ms  # 8 * 3 + 3 * (1 + 2)
33.0
>>> simulate(split_backward(build_plan("1f1b", costs, 4, 8), costs), costs).span_ms  # 8 * 3 + 3 * (1 + 1 - 1)
27.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octopipe.base.compile import njit
from octopipe.costs.table import CostTable
from octopipe.plans.plan import B, F, I, Op, Plan, R, W
from octopipe.plans.price import boundary_bytes, hop_times, prices_cached, stage_memory, stage_times
from octopipe.simulation.simulator import makespan_ms, simulate
from octopipe.simulation.timeline import Timeline
from octopipe.simulation.timing import handed_over

DEFERRALS = (1.0, 0.75, 0.5, 0.25)
"""The shares of the free memory that may be used to defer W."""
PATIENCE = ((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0))
"""The share of a W that may extend beyond a gap: up to the rank's last forward, and after it."""
FINALISTS = 6
ROUNDS = 4
_SLACK = 1e-9
Floats = NDArray[np.float64]


def split_backward(plan: Plan, costs: CostTable) -> Plan:
    """Return the plan with every B split into I and W. A plan without B is returned as it is, and so is one with pairs:
    the W of a paired B runs wherever the pair leaves the compute lane free.

    If no split plan stays within the memory limit, the fused plan is returned.
    """
    if plan.pairs or not any(op.kind == "B" for order in plan.orders for op in order):
        return plan
    with prices_cached():  # only orders differ between the candidates
        return _split(plan, costs)


def _split(plan: Plan, costs: CostTable) -> Plan:
    fused = simulate(plan, costs, check=False)
    target = fused.peak_bytes
    if not plan.extra.get("balances_memory"):  # BPipe's plan uses the free memory of other ranks already
        target = np.maximum(target, target.max())
    limit = target + _early_gradients(plan, costs)
    if fused.fits:
        target, limit = (np.minimum(x, np.array(fused.capacity_bytes)) for x in (target, limit))
    prices = _prices(plan, costs)
    room = target - np.array([c.static_bytes for c in fused.memory]) - _overhead(fused, prices)
    if not prices.known:
        room = np.full(plan.num_ranks, prices.peak.max())
    pair = _with_orders(plan, [_adjacent(order) for order in plan.orders])
    tried = [(pair, simulate(pair, costs, check=False))]
    for _ in range(ROUNDS):
        finalists = _candidates(plan, costs, prices, room)[:FINALISTS]
        results = [(c, simulate(c, costs, check=False)) for c in finalists]
        tried += results
        excess = np.max([t.peak_bytes - limit for _, t in results], axis=0)
        if np.all(excess <= _SLACK * limit):
            break
        # Gradients that arrive sooner wait in buffers that `_fill` does not count, so keep their bytes free.
        room = room - np.maximum(excess, 0.0)
    fitting = [(c, t) for c, t in tried if np.all(t.peak_bytes <= limit * (1 + _SLACK))]
    if not fitting:
        return plan
    return min(fitting, key=lambda result: (round(result[1].step_ms, 6), result[1].span_ms))[0]


def _candidates(plan: Plan, costs: CostTable, prices: _Prices, room: Floats) -> list[Plan]:
    """Return plans with W filled in for all deferrals and patience values, sorted by makespan."""
    plans: dict[bytes, Plan] = {}
    for deferral in DEFERRALS:
        cap = np.minimum(prices.peak, room) + deferral * np.maximum(room - prices.peak, 0.0)
        for steady, draining in PATIENCE:
            filled = _fill_all(prices, cap, steady, draining)
            if filled.tobytes() not in plans:
                plans[filled.tobytes()] = _with_orders(plan, _orders(plan, filled))
    return sorted(plans.values(), key=lambda candidate: makespan_ms(candidate, costs))


def _early_gradients(plan: Plan, costs: CostTable) -> Floats:
    """Return the bytes of two boundary tensors, per rank."""
    output, gradient = (x.max(axis=1) for x in boundary_bytes(plan, costs))
    out = np.zeros(plan.num_ranks)
    np.maximum.at(out, [s.rank for s in plan.stages], 2.0 * np.maximum(output, gradient))
    return out


def _adjacent(order: Sequence[Op]) -> list[Op]:
    out: list[Op] = []
    for op in order:
        out += [op] if op.kind != "B" else [Op(op.stage, "I", op.micro_batch), Op(op.stage, "W", op.micro_batch)]
    return out


def _with_orders(plan: Plan, orders: Sequence[Sequence[Op]]) -> Plan:
    return replace(plan, orders=tuple(tuple(order) for order in orders))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prices:
    """Everything that the filling needs, per op of the fused plan (B stands for its I)."""

    offsets: NDArray[np.int32]
    waits_for: NDArray[np.int32]
    """[op, 2]: ops on other ranks whose results it waits for, or -1."""
    target: NDArray[np.int32]
    """The rank to which the op's result travels, or -1."""
    duration: Floats
    hop: Floats
    weight: Floats
    """Duration of the W that belongs to a B; negative for other ops."""
    takes: Floats
    frees: Floats
    stash: Floats
    glued: NDArray[np.bool_]
    """Backwards that must directly follow their forward, because their stage recomputes but they have no R."""
    last_forward: NDArray[np.int32]
    """[rank]: number of its last F."""
    peak: Floats
    """[rank]: highest sum of activations in the fused order."""
    known: bool
    """False if the costs contain no bytes, so that numbers of layers are used instead."""


def _prices(plan: Plan, costs: CostTable) -> _Prices:
    t = plan.table()
    data = plan.predecessor_table()
    cell = (t.stage, t.micro_batch)
    backward = t.kind == B
    times = stage_times(plan, costs)
    duration = np.where(backward, times[I][cell], times[t.kind, t.stage, t.micro_batch])
    forward_hop, gradient_hop = hop_times(plan, costs)
    hop = np.where(t.kind == F, forward_hop[cell], np.where(backward | (t.kind == I), gradient_hop[cell], 0.0))
    crossing = (data >= 0) & (t.rank[np.maximum(data, 0)] != t.rank[:, None])
    waits_for = np.where(crossing, data, -1)
    target = np.full(t.stage.size, -1, np.int32)
    consumer, column = np.nonzero(crossing)
    target[data[consumer, column]] = t.rank[consumer]

    activation, kept, stash, known = _activations(plan, costs)
    again = t.index[R][cell] >= 0
    takes = np.zeros(t.stage.size)
    takes[t.kind == F] = np.where(again, kept[cell], activation[cell])[t.kind == F]
    takes[t.kind == R] = (activation - kept)[cell][t.kind == R]
    frees = np.where(backward | (t.kind == I), (activation - stash)[cell], 0.0)
    frees[t.kind == W] = stash[cell][t.kind == W]
    peak = np.zeros(plan.num_ranks)
    for r in range(plan.num_ranks):
        mine = slice(t.offsets[r], t.offsets[r + 1])
        whole = (frees + np.where(backward, stash[cell], 0.0))[mine]
        peak[r] = (np.cumsum(takes[mine]) - np.cumsum(whole) + whole).max(initial=0.0)
    recomputes = np.array([bool(s.recompute) for s in plan.stages])[t.stage]
    last_forward = np.full(plan.num_ranks, -1, np.int32)
    np.maximum.at(last_forward, t.rank[t.kind == F], np.flatnonzero(t.kind == F).astype(np.int32))
    return _Prices(
        offsets=t.offsets,
        waits_for=np.ascontiguousarray(waits_for[:, [0, 2]]),
        target=target,
        duration=duration,
        hop=hop,
        weight=np.where(backward, times[W][cell], -1.0),
        takes=takes,
        frees=frees,
        stash=np.where(backward, stash[cell], 0.0),
        glued=(backward | (t.kind == I)) & recomputes & ~again,
        last_forward=last_forward,
        peak=peak,
        known=known,
    )


def _activations(plan: Plan, costs: CostTable) -> tuple[Floats, Floats, Floats, bool]:
    memory = stage_memory(plan, costs)
    if memory.activation.any():
        return memory.activation, memory.after_forward, memory.stash, True
    units = np.array([[float(s.num_layers)] for s in plan.stages]) * np.ones((1, plan.num_micro_batches))
    kept = units - np.array([[float(len(s.recomputed_layers))] for s in plan.stages])
    return units, kept, units, False


def _overhead(fused: Timeline, prices: _Prices) -> Floats:
    """Return the peak bytes of the fused plan, per rank, minus weights and activations: buffers and workspaces."""
    static = np.array([c.static_bytes for c in fused.memory])
    return np.maximum(fused.peak_bytes - static - prices.peak, 0.0) if prices.known else np.zeros(static.size)


def _fill_all(prices: _Prices, cap: Floats, steady: float, draining: float) -> NDArray[np.int32]:
    return _fill(
        prices.offsets,
        prices.waits_for,
        prices.target,
        prices.duration,
        prices.hop,
        prices.weight,
        prices.takes,
        prices.frees,
        prices.stash,
        prices.glued,
        prices.last_forward,
        cap * (1 + 1e-9) + 1e-9,
        steady,
        draining,
    )


def _orders(plan: Plan, filled: NDArray[np.int32]) -> list[list[Op]]:
    """Return the ops for the numbers that `_fill` returns; a W is written as -1 minus the number of its B."""
    t = plan.table()
    weights = np.bincount(t.rank[t.kind == B], minlength=plan.num_ranks)
    sizes = np.diff(t.offsets) + weights
    stops = np.cumsum(sizes)
    ops = [op for order in plan.orders for op in order]
    first = [Op(op.stage, "I", op.micro_batch) if op.kind == "B" else op for op in ops]
    orders = []
    for r in range(plan.num_ranks):
        numbers = filled[stops[r] - sizes[r] : stops[r]].tolist()
        orders.append([first[n] if n >= 0 else Op(ops[-1 - n].stage, "W", ops[-1 - n].micro_batch) for n in numbers])
    return orders


@njit
def _fill(  # type: ignore[no-untyped-def]
    offsets, waits_for, target, duration, hop, weight, takes, frees, stash, glued, last_forward, cap, steady, draining
):
    """Replay the fused orders with I for B; insert W into gaps, before ops that would not fit, and at the end.

    The arrivals that a rank's next op waits for do not depend on W inserted before it, so the gap is known exactly.
    """
    ranks = offsets.size - 1
    computes = duration.size
    extra = 0
    first = np.zeros(ranks + 1, np.int64)
    for r in range(ranks):
        for i in range(offsets[r], offsets[r + 1]):
            if weight[i] >= 0.0:
                extra += 1
        first[r + 1] = offsets[r + 1] + extra
    out = np.empty(computes + extra, np.int32)
    place = first[:-1].copy()
    waiting = np.empty(computes, np.int32)
    wait_head = offsets[:-1].copy()
    wait_tail = offsets[:-1].copy()
    arrival = np.full(computes, -1.0)
    channel = np.zeros((ranks, ranks))
    clock = np.zeros(ranks)
    used = np.zeros(ranks)
    head = offsets[:-1].copy()
    left = computes
    while left > 0:
        moved = False
        for r in range(ranks):
            while head[r] < offsets[r + 1]:
                i = head[r]
                ready = 0.0
                known = True
                for k in range(2):
                    p = waits_for[i, k]
                    if p >= 0:
                        if arrival[p] < 0.0:
                            known = False
                            break
                        if arrival[p] > ready:
                            ready = arrival[p]
                if not known:
                    break
                patience = steady if i <= last_forward[r] else draining
                while wait_head[r] < wait_tail[r] and not glued[i]:
                    w = waiting[wait_head[r]]
                    gap = ready - clock[r]
                    fits_gap = gap > 1e-9 and gap >= (1.0 - patience) * weight[w] - 1e-9
                    too_full = takes[i] > 0.0 and used[r] + takes[i] > cap[r]
                    if not fits_gap and not too_full:
                        break
                    out[place[r]] = -1 - w
                    place[r] += 1
                    wait_head[r] += 1
                    clock[r] += weight[w]
                    used[r] -= stash[w]
                clock[r] = max(clock[r], ready) + duration[i]
                used[r] += takes[i] - frees[i]
                arrival[i] = clock[r]
                if target[i] >= 0:
                    arrival[i] = handed_over(channel, r, target[i], clock[r], hop[i])
                out[place[r]] = i
                place[r] += 1
                if weight[i] >= 0.0:
                    waiting[wait_tail[r]] = i
                    wait_tail[r] += 1
                head[r] += 1
                left -= 1
                moved = True
        if not moved:
            break
    for r in range(ranks):
        while wait_head[r] < wait_tail[r]:
            out[place[r]] = -1 - waiting[wait_head[r]]
            place[r] += 1
            wait_head[r] += 1
    return out
