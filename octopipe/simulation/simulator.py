"""The simulator: Program + CostTable -> Timeline, with exact event times.

Knows: when every op and transfer of a program starts and ends, and what each rank holds in memory over time. Does not
know: where a plan comes from, or what follows the last op (`after_pipeline.py`).

A program is a graph (see lowering.py): every op and transfer starts when its predecessors have ended, so one
topological pass gives exact times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octopipe.base.errors import OctoPipeError
from octopipe.base.graph import topological_order
from octopipe.base.limits import checked_seed
from octopipe.costs.table import CostTable
from octopipe.plans.pair_price import op_durations
from octopipe.plans.plan import KINDS, B, F, I, Plan, R, W, route_neighbours
from octopipe.plans.price import (
    boundary_bytes,
    hop_times,
    match,
    stage_memory,
    static_bytes,
    workspace_bytes,
)
from octopipe.simulation import engine as _engine
from octopipe.simulation.after_pipeline import after_pipeline
from octopipe.simulation.host_moves import HostMoves, memory_times
from octopipe.simulation.lanes import lane_spans
from octopipe.simulation.lowering import Channel, Program, lower, pairs_start_together, prove_deadlock_free
from octopipe.simulation.timeline import HostSpans, MemoryCurve, Spans, Timeline, Transfers
from octopipe.simulation.timing import FOR_F

Floats = NDArray[np.float64]


def simulate(
    plan: Plan | Program, costs: CostTable, *, channel: Channel = "directed", label: str = "", check: bool = True
) -> Timeline:
    """Return the predicted Timeline of a plan, lowered for `channel`, or of a program, timed as it is.

    `check` validates the plan, or proves that a given program cannot deadlock, before anything is timed.
    """
    lowered_here = not isinstance(plan, Program)
    program = plan if isinstance(plan, Program) else lower(plan, costs, channel=channel, check=check)
    plan = program.plan
    match(plan, costs)
    if check and not lowered_here:  # lowering has proven its own
        prove_deadlock_free(program)
    duration = program.node_ms(op_durations(plan, costs))
    times = _engine.longest_path(topological_order(program.preds), program.preds, duration)
    return timeline_of(program, costs, *times, label=label)


def timeline_of(
    program: Program,
    costs: CostTable,
    start: Floats,
    end: Floats,
    binding: NDArray[np.int32],
    *,
    overhead_ms: float = 0.0,
    label: str = "",
) -> Timeline:
    """Build the Timeline of a program, with memory and what follows the pipeline, from the times of all its nodes.

    `overhead_ms`: the time that an op costs beyond that of its layers. It passes after the op, before the next op
    starts and the op's tensor is sent, and is not part of the op's span.
    """
    plan = program.plan
    t = plan.table()
    computes = t.stage.size
    start = pairs_start_together(t, start)
    ended = np.maximum(end[:computes] - overhead_ms, start[:computes]) if overhead_ms else end[:computes]
    spans = Spans(t.rank, t.stage, t.kind.astype(np.int32), t.micro_batch, start[:computes], ended)
    nodes = computes + program.num_transfers
    transfers = Transfers(
        program.source,
        program.target,
        t.rank[program.source],
        t.rank[program.target],
        start[computes:nodes],
        end[computes:nodes],
        program.nbytes,
    )
    return Timeline(
        num_ranks=plan.num_ranks,
        spans=spans,
        transfers=transfers,
        memory=memory_curves(program, costs, spans, transfers),
        extras=after_pipeline(plan, costs, spans),
        capacity_bytes=tuple(costs.capacity_bytes(r) for r in range(plan.num_ranks)),
        binding=seen_bindings(binding, nodes),
        label=label or str(plan.extra.get("system", "")),
        model=costs.model,
        lanes=lane_spans(plan, costs, spans),
        host=host_spans(program, start, end),
    )


def seen_bindings(binding: NDArray[np.int32], nodes: int) -> NDArray[np.int32]:
    """Return the bindings among ops and transfers, with -1 for all others. No op of a lowered program waits for a move
    to or from host memory, so nothing is lost."""
    return np.where(binding[:nodes] < nodes, binding[:nodes], -1).astype(np.int32)


def host_spans(program: Program, start: Floats, end: Floats) -> HostSpans | None:
    """Return when activations were moved to host memory and back, from the times of all nodes; None without
    offloading."""
    moves = program.moves
    if moves is None:
        return None
    t, first, n = program.plan.table(), program.plan.table().stage.size + program.num_transfers, moves.number
    down, up = slice(first, first + n), slice(first + n, first + 2 * n)
    return HostSpans(
        t.rank[moves.forward],
        t.stage[moves.forward],
        t.micro_batch[moves.forward],
        start[down],
        end[down],
        start[up],
        end[up],
        moves.nbytes,
    )


def makespan_ms(plan: Plan, costs: CostTable) -> float:
    """Return the makespan under directed channels without building a program or a timeline, and without checking the
    plan.

    Plans with pairs, with paths that fork or with offloading are lowered nevertheless.
    """
    if plan.pairs or plan.edges or plan.offloads:
        program = lower(plan, costs, check=False)
        duration = program.node_ms(op_durations(plan, costs))
        return float(_engine.longest_path(topological_order(program.preds), program.preds, duration)[1].max())
    result = float(_engine.evaluate(*_order_arrays(plan, costs)))
    if result < 0:
        plan.check()
        raise OctoPipeError("the orders wait for each other; run check on the plan")
    return result


def _order_arrays(plan: Plan, costs: CostTable) -> tuple[Any, ...]:
    """Return the arguments with which the engine times the orders of a plan whose paths are chains."""
    t = plan.table()
    return (
        t.offsets,
        t.stage,
        t.kind,
        t.micro_batch,
        op_durations(plan, costs),
        *route_neighbours(plan),
        np.asarray(plan.route_of_micro_batch, np.int32),
        np.array([s.rank for s in plan.stages], np.int32),
        *hop_times(plan, costs),
    )


def ops_and_transfers(plan: Plan, costs: CostTable) -> Timeline | None:
    """Return only the spans and transfers of `simulate` under directed channels (transfers in another order), for
    searches that time many orders; None if the orders cannot run.

    The ops must be those of a valid plan of chains without pairs, offload and exchanges, in any order.
    """
    t = plan.table()
    arrays = _order_arrays(plan, costs)
    before, after, route, rank_of = arrays[5:9]
    start, end = np.empty((2, t.stage.size))
    sent, reached = np.full((2, 2, len(plan.stages), plan.num_micro_batches), np.nan)
    if _engine.order_times(*arrays, start, end, sent, reached) < 0:
        return None
    row, stage, micro_batch = np.nonzero(~np.isnan(sent))
    there = (route[micro_batch], stage)
    forward = row == FOR_F
    source = np.where(forward, before[there], after[there])
    made_by = np.stack((t.index[F], np.maximum(t.index[I], t.index[B])))
    out_bytes = boundary_bytes(plan, costs)[0]
    transfers = Transfers(
        made_by[row, source, micro_batch],
        made_by[row, stage, micro_batch],
        rank_of[source],
        rank_of[stage],
        sent[row, stage, micro_batch],
        reached[row, stage, micro_batch],
        out_bytes[np.where(forward, source, stage), micro_batch],
    )
    spans = Spans(t.rank, t.stage, t.kind.astype(np.int32), t.micro_batch, start, end)
    return Timeline(num_ranks=plan.num_ranks, spans=spans, transfers=transfers)


def with_memory(timeline: Timeline, plan: Plan, costs: CostTable) -> Timeline:
    """Return the result of `ops_and_transfers` with the memory curve and the capacity of every rank added."""
    transfers = timeline.transfers
    carried = np.full(plan.predecessor_table().shape, -1, np.int32)
    column = np.where(timeline.spans.kind[transfers.consumer] == F, 0, 2)
    carried[transfers.consumer, column] = np.arange(column.size, dtype=np.int32)
    return replace(
        timeline,
        memory=_memory_curves(plan, costs, timeline.spans, transfers, carried, None),
        capacity_bytes=tuple(costs.capacity_bytes(r) for r in range(plan.num_ranks)),
    )


def jitter_ms(program: Program, costs: CostTable, *, sigma: float = 0.05, runs: int = 1000, seed: int = 0) -> Floats:
    """Return the makespans of `runs` trials, with every op and transfer scaled by a log-normal of mean 1 and width
    sigma.

    With data parallelism the step waits for its slowest pipeline: take the maximum of `data_parallel` trials.
    """
    if not (0 <= sigma < 10) or runs < 1:
        raise OctoPipeError(f"jitter sigma {sigma} with {runs} runs; give 0 <= sigma < 10 and at least one run")
    duration = program.node_ms(op_durations(program.plan, costs))
    return _engine.makespans(topological_order(program.preds), program.preds, duration, sigma, runs, checked_seed(seed))


def memory_curves(program: Program, costs: CostTable, spans: Spans, transfers: Transfers) -> tuple[MemoryCurve, ...]:
    """Return the bytes in use on every rank over time, for predicted or measured spans of a program.

    An activation (or the part that recomputation keeps) is counted from F to I, and the part that W needs until W. R
    restores what F dropped. Offloaded activations occupy no memory between their release and their fetch. A tensor
    between stages is counted from its producer's end to its transfer's end on the sending rank, and from its transfer's
    start to its consumer's start on the receiving rank (a gradient: to its consumer's end).
    """
    return _memory_curves(program.plan, costs, spans, transfers, program.transfer_of, program.moves)


def _memory_curves(
    plan: Plan,
    costs: CostTable,
    spans: Spans,
    transfers: Transfers,
    carried: NDArray[np.int32],
    moves: HostMoves | None,
) -> tuple[MemoryCurve, ...]:
    t = plan.table()
    at_start, at_end = changes_of_ops(plan, costs)
    changes = _Changes()
    changes.add(t.rank, spans.start_ms, at_start)
    changes.add(t.rank, spans.end_ms, at_end)
    if moves is not None:
        released, fetched = memory_times(moves, t.offsets, spans.start_ms, spans.end_ms)
        changes.add(t.rank[moves.forward], released, -moves.nbytes)
        changes.add(t.rank[moves.forward], fetched, moves.nbytes)
    _add_tensors_between_stages(changes, plan, costs, spans, transfers, carried)
    return changes.curves(static_bytes(plan, costs))


class _Changes:
    """Changes of the bytes in use, added in any order: the rank, the time and the number of bytes of each."""

    def __init__(self) -> None:
        self._rank: list[NDArray[np.int32]] = []
        self._time: list[Floats] = []
        self._delta: list[Floats] = []

    def add(self, rank: NDArray[np.int32], when: Floats, change: Floats) -> None:
        self._rank.append(rank)
        self._time.append(when)
        self._delta.append(change)

    def curves(self, static: Floats) -> tuple[MemoryCurve, ...]:
        """Return the memory curve of every rank, with its static bytes included."""
        ranks, times, deltas = np.concatenate(self._rank), np.concatenate(self._time), np.concatenate(self._delta)
        by = np.lexsort((times, ranks))
        ranks, times, deltas = ranks[by], times[by], deltas[by]
        bounds = np.searchsorted(ranks, np.arange(static.size + 1))
        curves = []
        for r in range(static.size):
            mine = slice(bounds[r], bounds[r + 1])
            used = static[r] + np.cumsum(deltas[mine])
            # Rounding of sums of large byte counts can leave a hair below the static level at the end.
            used = np.maximum(used, static[r])
            when = times[mine]
            # A level that lasts no time (bytes freed and allocated at the same instant) is not a state of the memory.
            lasting = np.append(when[1:] > when[:-1], True)[: when.size]
            curves.append(MemoryCurve(when[lasting], used[lasting], float(static[r])))
        return tuple(curves)


def changes_of_ops(plan: Plan, costs: CostTable) -> tuple[Floats, Floats]:
    """Return by how much every op changes the bytes in use on its rank, at its start and at its end."""
    t = plan.table()
    memory = stage_memory(plan, costs)
    cell = (t.stage, t.micro_batch)
    recomputes = t.index[R][cell] >= 0
    activation, kept, stash = memory.activation[cell], memory.after_forward[cell], memory.stash[cell]
    at_start, at_end = np.zeros(t.stage.size), np.zeros(t.stage.size)
    is_f, is_r, is_i, is_w, is_b = (t.kind == k for k in (F, R, I, W, B))
    at_start[is_f] = np.where(recomputes, kept, activation)[is_f]
    at_start[is_r] = (activation - kept)[is_r]
    at_end[is_i] = (stash - activation)[is_i]
    at_end[is_w] = -stash[is_w]
    at_end[is_b] = -activation[is_b]
    scratch = workspace_bytes(plan, costs)[t.stage]
    return at_start + scratch, at_end - scratch


def _add_tensors_between_stages(
    changes: _Changes,
    plan: Plan,
    costs: CostTable,
    spans: Spans,
    transfers: Transfers,
    transfer_of: NDArray[np.int32],
) -> None:
    """Add the outputs and gradients that cross stages, on the rank that produces them and on the one that consumes
    them."""
    t = plan.table()
    add = changes.add
    out_bytes = boundary_bytes(plan, costs)[0]
    data = plan.predecessor_table()
    further = range(3, data.shape[1])
    last_use = np.full(t.stage.size, -1.0)
    for forward, column in [(True, k) for k in (0, *further)] + [(False, k) for k in (2, *further)]:
        takes = (t.kind == F) if forward else ((t.kind == I) | (t.kind == B))
        consumer = np.flatnonzero((data[:, column] >= 0) & takes)
        producer = data[consumer, column]
        # A gradient has the size of the output that it belongs to, which the gradient's consumer produced.
        maker = producer if forward else consumer
        size = out_bytes[t.stage[maker], t.micro_batch[maker]]
        carried = transfer_of[consumer, column]
        local = carried < 0
        moved = carried[~local]
        if forward and plan.edges:
            # An output that several stages consume is one tensor on its producer's rank, until the last of them has it.
            let_go = np.where(local, spans.start_ms[consumer], 0.0)
            let_go[~local] = transfers.end_ms[moved]
            np.maximum.at(last_use, producer, let_go)
        else:
            add(t.rank[producer], spans.end_ms[producer], size)
            add(t.rank[consumer], spans.start_ms[consumer] if forward else spans.end_ms[consumer], -size)
            add(transfers.source[moved], transfers.end_ms[moved], -size[~local])
            add(transfers.destination[moved], transfers.start_ms[moved], size[~local])
            continue
        add(transfers.destination[moved], transfers.start_ms[moved], size[~local])
        add(t.rank[consumer[~local]], spans.start_ms[consumer[~local]], -size[~local])
    made = np.flatnonzero(last_use >= 0.0)
    if made.size:
        size = out_bytes[t.stage[made], t.micro_batch[made]]
        add(t.rank[made], spans.end_ms[made], size)
        add(t.rank[made], last_use[made], -size)


__all__ = [
    "KINDS", "changes_of_ops", "jitter_ms", "makespan_ms", "memory_curves", "ops_and_transfers", "simulate",
    "with_memory",
]  # fmt: skip
