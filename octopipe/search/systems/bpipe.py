"""BPipe: 1F1B whose front ranks lend their activations to the back ranks.

Kim et al., "BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models", ICML 2023 (rule as
generally known).
Rule: 1F1B; rank i may hold at most ceil((p+2)/2) micro-batches. Before it would hold one more, the newest
activation moves to rank p-1-i, which has room, and comes back for its backward. Peak ceil((p+2)/2) everywhere.
Simplified: a plan cannot express such moves, so it is the plan of 1F1B. The moves are taken to be hidden behind
compute, as in the paper, and `balanced_peak_bytes` returns the resulting memory, which `compare` shows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octopipe.costs.table import CostTable
from octopipe.plans.plan import CODES, Op, Plan
from octopipe.plans.price import stage_memory
from octopipe.search.systems.closed_forms import ClosedForm, even_layers
from octopipe.search.systems.registry import Setting, build_plan, system
from octopipe.search.systems.shapes import even_sizes, loop, make_plan, one_f_one_b_order, stages_from_sizes
from octopipe.simulation.simulator import simulate
from octopipe.simulation.timeline import Timeline


class Move(NamedTuple):
    """An activation that leaves its rank when `leaves` starts and is back when `returns` starts."""

    stage: int
    micro_batch: int
    source: int
    target: int
    leaves: Op
    returns: Op


@system(name="bpipe", title="BPipe", paper="Kim et al., ICML 2023", year=2023, tunes=())
def bpipe(setting: Setting) -> Plan:
    p, m = setting.num_ranks, setting.num_micro_batches
    stages = stages_from_sizes(even_sizes(setting.costs, p), loop(p, p))
    orders = [one_f_one_b_order(s, p - 1 - s, m) for s in range(p)]
    return make_plan(setting.costs, p, m, stages, orders, extra={"balances_memory": True})


def most_held(num_ranks: int) -> int:
    """The largest number of micro-batches that a rank holds: ceil((p+2)/2)."""
    return (num_ranks + 3) // 2


def moves(plan: Plan) -> list[Move]:
    """Return all moves of activations that BPipe makes in this plan, rank after rank."""
    out: list[Move] = []
    limit = most_held(plan.num_ranks)
    for rank, order in enumerate(plan.orders):
        held: list[tuple[int, int]] = []
        away: dict[tuple[int, int], Op] = {}
        for op in order:
            stash = (op.stage, op.micro_batch)
            if op.kind == "F" or (op.kind in "IB" and stash in away):
                if len(held) >= limit:
                    away[held.pop()] = op
                if op.kind == "F":
                    held.append(stash)
                else:
                    out.append(Move(*stash, rank, plan.num_ranks - 1 - rank, away.pop(stash), op))
            elif op.kind in "IB":
                held.remove(stash)
    return out


def balanced_peak_bytes(plan: Plan, costs: CostTable, timeline: Timeline) -> NDArray[np.float64]:
    """Return the peak bytes per rank with the moves of `moves`."""
    t, memory = plan.table(), stage_memory(plan, costs)
    start = timeline.spans.start_ms
    shifts: list[list[tuple[float, float]]] = [[] for _ in range(plan.num_ranks)]
    for move in moves(plan):
        size = float(memory.activation[move.stage, move.micro_batch])
        for op, sign in ((move.leaves, -1.0), (move.returns, 1.0)):
            when = float(start[t.index[CODES[op.kind], op.stage, op.micro_batch]])
            shifts[move.source].append((when, sign * size))
            shifts[move.target].append((when, -sign * size))
    peaks = np.empty(plan.num_ranks)
    for rank, curve in enumerate(timeline.memory):
        shift_ms, change = np.array(sorted(shifts[rank])).reshape(-1, 2).T
        times = np.union1d(curve.times_ms, shift_ms)
        base = curve.bytes[np.searchsorted(curve.times_ms, times, side="right") - 1]
        moved = np.concatenate(([0.0], np.cumsum(change)))[np.searchsorted(shift_ms, times, side="right")]
        peaks[rank] = (base + moved).max()
    return peaks


def closed_forms() -> list[ClosedForm]:
    def peak(p: int, m: int) -> float:
        costs = even_layers(p, 1.0, 2.0)
        plan = build_plan("bpipe", costs, p, m)
        return float(balanced_peak_bytes(plan, costs, simulate(plan, costs)).max())

    return [
        ClosedForm(
            system="bpipe",
            case=f"p={p} m={m} F=1 b=2",
            quantity="highest peak, micro-batches",
            formula="ceil((p+2)/2)",
            expected=float(most_held(p)),
            simulate=lambda p=p, m=m: peak(p, m),  # type: ignore[misc]
        )
        for p, m in ((4, 8), (8, 16), (7, 14))
    ]
